/* Input, first byte 0: metadata in a compact form, then a text to encode with them.
 *   u8 rule, u8 flags, u8 n_tokens, n_tokens × (u8 type, u8 n, bytes), u8 n_merges,
 *   n_merges × (u8 n, bytes), [n_tokens × i8 score,] u8 n_plain, n_plain × (u8 begin, u8 n), text
 * Tokens for the 256 single bytes come first unless flag 1 is set. The rule SCORED means
 * SentencePiece: scores are there, the merges are for nothing, and the bytes are "<0xNN>".
 * First byte 1: the rest is a GGUF file. */
#include "base/buf.h"
#include "runtime/gguf.h"
#include "runtime/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int condition)
{
    if (!condition)
        abort();
}

/* Encodes, and when the vocabulary has all bytes and nothing special was parsed, decodes again. */
static void use(const struct tokenizer *t, const char *text, size_t n,
                const struct tokenizer_options *options, int reversible)
{
    struct token_ids ids = {0};
    struct err_text error = {""};
    enum err e = tokenizer_encode(t, text, n, options, &ids, &error);
    check(e == ERR_OK || (ids.n == 0 && error.text[0]));
    size_t at = 0;
    for (size_t i = 0; i < ids.n; i++) {
        struct text_view piece;
        check(tokenizer_piece(t, ids.v[i], &piece) == ERR_OK);
        if (reversible)
            check(piece.n <= n - at && (piece.n == 0 || memcmp(text + at, piece.p, piece.n) == 0));
        at += piece.n;
    }
    check(e != ERR_OK || !reversible || at == n);
    token_ids_deinit(&ids);
}

#define SCORED "scored"

enum { LIST_MAX = 512, PLAIN_MAX = 256 };

struct lists {
    struct text_view tokens[LIST_MAX], merges[LIST_MAX];
    int32_t types[LIST_MAX];
    struct text_span plain[PLAIN_MAX];
    float scores[LIST_MAX];
    char letters[256][2], names[256][8];
};

static struct text_view view(struct reader *r)
{
    uint8_t n = read_u8(r);
    const uint8_t *p = read_view(r, n);
    return (struct text_view){p ? (const char *)p : "", p ? n : 0};
}

static void add_letters(struct lists *l, struct tokenizer_source *s)
{
    int next = 0x100;
    for (int b = 0; b < 256; b++) {
        int own = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        int c = own ? b : next++;
        l->letters[b][0] = (char)(c < 128 ? c : (0xc0 | c >> 6));
        l->letters[b][1] = (char)(0x80 | (c & 63));
        l->types[b] = TOKEN_NORMAL;
        l->tokens[b] = (struct text_view){l->letters[b], c < 128 ? 1 : 2};
    }
    s->n_tokens = 256;
}

static void add_byte_names(struct lists *l)
{
    for (int b = 0; b < 256; b++) {
        (void)snprintf(l->names[b], sizeof l->names[b], "<0x%02X>", (unsigned)b);
        l->types[b] = TOKEN_BYTE;
        l->tokens[b] = (struct text_view){l->names[b], 6};
    }
}

static void add_scores(struct lists *l, struct tokenizer_source *s, struct reader *r)
{
    for (uint32_t i = s->n_tokens > 256 ? 256 : 0; i < s->n_tokens; i++)
        l->scores[i] = (float)(int8_t)read_u8(r);
    s->scores = l->scores;
}

static void run_compact(struct reader r)
{
    static const char *const RULES[] = {"smollm", "gpt-2",  "qwen2",  "llama-bpe",
                                        "gpt-4o", "tekken", "falcon", "default",
                                        "bloom",  "nope",   SCORED};
    struct lists *l = calloc(1, sizeof *l);
    if (!l)
        return;
    struct tokenizer_source s = TOKENIZER_SOURCE_INIT;
    const char *rule = RULES[read_u8(&r) % (sizeof RULES / sizeof *RULES)];
    uint8_t flags = read_u8(&r);
    int scored = strcmp(rule, SCORED) == 0;
    s.model = scored ? (struct text_view){"llama", 5} : (struct text_view){"gpt2", 4};
    s.pre = (struct text_view){rule, strlen(rule)};
    if (!(flags & 1))
        add_letters(l, &s);
    if (scored && !(flags & 1))
        add_byte_names(l);
    int reversible = !(flags & 1);
    for (uint8_t n = read_u8(&r); n > 0; n--) {
        l->types[s.n_tokens] = read_u8(&r) % 8;
        l->tokens[s.n_tokens] = view(&r);
        reversible &= l->types[s.n_tokens++] == TOKEN_NORMAL;
    }
    for (uint8_t n = read_u8(&r); n > 0; n--)
        l->merges[s.n_merges++] = view(&r);
    if (scored)
        add_scores(l, &s, &r);
    s.space_prefix = flags >> 7;
    struct tokenizer_options o = {.parse_special = flags & 2,
                                  .add_bos = flags & 4,
                                  .tokens_max = flags & 8 ? 20 : 0,
                                  .plain = l->plain};
    for (uint8_t n = read_u8(&r); n > 0; n--, o.n_plain++) {
        size_t begin = read_u8(&r);
        l->plain[o.n_plain] = (struct text_span){begin, begin + read_u8(&r)};
    }
    s.tokens = l->tokens;
    s.merges = l->merges;
    s.types = flags & 16 ? NULL : l->types;
    s.bos = flags & 4 ? 0 : -1;
    s.unknown = flags & 32 ? 0 : -1;
    s.eos = flags & 64 ? (int64_t)s.n_tokens - 1 : -1;
    reversible &= !(flags & 4) && !(scored && flags & (16 | 128)); /* no byte tokens; a blank */
    struct tokenizer *t;
    struct err_text error = {""};
    size_t n = r.left;
    const char *text = (const char *)read_view(&r, n);
    for (size_t i = 0; scored && text && i + 3 <= n; i++)
        reversible &= memcmp(text + i, "\xe2\x96\x81", 3) != 0; /* becomes a blank */
    if (tokenizer_new(&s, &t, &error) == ERR_OK) {
        use(t, text ? text : "", text ? n : 0, &o, reversible);
        tokenizer_free(t);
    } else {
        check(error.text[0]);
    }
    free(l);
}

static void run_gguf(const uint8_t *data, size_t size)
{
    struct gguf *g;
    struct tokenizer *t;
    struct err_text error = {""};
    if (gguf_open_memory(data, size, "fuzz", &g, &error) != ERR_OK)
        return;
    if (tokenizer_new_gguf(g, &t, &error) == ERR_OK) {
        static const char TEXT[] = "Hello <|im_end|> 123\n\xff\xe6\x9d\xb1  x";
        const struct tokenizer_options o = {.parse_special = true, .add_bos = true};
        use(t, TEXT, sizeof TEXT - 1, &o, 0);
        tokenizer_free(t);
    } else {
        check(error.text[0]);
    }
    gguf_free(g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    if (data[0] == 0)
        run_compact(reader_of(data + 1, size - 1));
    else if (data[0] == 1)
        run_gguf(data + 1, size - 1);
    return 0;
}
