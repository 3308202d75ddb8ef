/* Tokenizers: looking things up, and encoding. Encoding goes special tokens first, then (gpt2) runs
 * of valid UTF-8 through the splitter and words through byte-pair merges, or (llama) all text
 * between special tokens through merges by score; a byte that is not UTF-8 is a piece of its own.
 */
#include "runtime/tokenizer_internal.h"

#include "base/util.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

void token_ids_deinit(struct token_ids *ids)
{
    free(ids->v);
    *ids = (struct token_ids){0};
}

/* -- looking up -------------------------------------------------------------------------------- */

static bool is_id(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->n_tokens;
}

enum err tokenizer_piece(const struct tokenizer *t, int32_t id, struct text_view *ret)
{
    if (!is_id(t, id))
        return ERR_INVALID;
    *ret = strings_at(&t->bytes, (uint32_t)id);
    return ERR_OK;
}

enum err tokenizer_text(const struct tokenizer *t, int32_t id, struct text_view *ret)
{
    if (!is_id(t, id))
        return ERR_INVALID;
    *ret = strings_at(&t->text, (uint32_t)id);
    return ERR_OK;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *text, size_t n)
{
    uint32_t found = strings_find(&t->text, text, n);
    return found == STRINGS_NONE ? -1 : (int32_t)found;
}

uint32_t tokenizer_n_tokens(const struct tokenizer *t)
{
    return t->n_tokens;
}

enum token_type tokenizer_type(const struct tokenizer *t, int32_t id)
{
    return is_id(t, id) ? (enum token_type)t->types[id] : TOKEN_UNUSED;
}

bool tokenizer_is_end(const struct tokenizer *t, int32_t id)
{
    for (uint32_t i = 0; i < t->n_ends; i++)
        if (t->ends[i] == id)
            return true;
    return false;
}

uint32_t tokenizer_end_tokens(const struct tokenizer *t, const int32_t **ret)
{
    *ret = t->ends;
    return t->n_ends;
}

int32_t tokenizer_bos(const struct tokenizer *t)
{
    return t->bos;
}

int32_t tokenizer_eos(const struct tokenizer *t)
{
    return t->eos;
}

bool tokenizer_adds_bos(const struct tokenizer *t)
{
    return t->adds_bos;
}

/* -- encoding ---------------------------------------------------------------------------------- */

/* One call; nothing of it outlives the call, so that the tokenizer itself stays unchanged. */
struct encoder {
    const struct tokenizer *t;
    const struct tokenizer_options *options;
    struct token_ids *ids;
    size_t ids_max;
    pcre2_match_data *match;
    struct bpe_work work;
    size_t plain_at; /* first plain run that ends behind the present place */
};

static enum err push(struct encoder *x, uint32_t id)
{
    struct token_ids *ids = x->ids;
    if (ids->n >= x->ids_max)
        return ERR_LIMIT;
    if (ids->n == ids->cap) {
        size_t cap = ids->cap ? ids->cap * 2 : 64;
        int32_t *v = realloc(ids->v, cap * sizeof *v);
        if (!v)
            return ERR_NO_MEMORY;
        ids->v = v;
        ids->cap = cap;
    }
    ids->v[ids->n++] = (int32_t)id;
    return ERR_OK;
}

static enum err push_byte(struct encoder *x, uint8_t b)
{
    uint32_t symbol = x->t->byte_symbols[b];
    return push(x, symbol < x->t->n_tokens ? symbol : (uint32_t)x->t->unknown);
}

/* A run of bytes that merging made, but that is no token: its bytes one by one. */
static enum err push_symbol(struct encoder *x, uint32_t symbol)
{
    if (symbol < x->t->n_tokens)
        return push(x, symbol);
    struct text_view bytes = strings_at(&x->t->bytes, symbol);
    for (size_t i = 0; i < bytes.n; i++)
        TRY(push_byte(x, (uint8_t)bytes.p[i]));
    return ERR_OK;
}

static enum err encode_word(void *context, const char *word, size_t n)
{
    struct encoder *x = context;
    if (x->t->splitter.rule->whole_words) {
        uint32_t whole = strings_find(&x->t->bytes, word, n);
        if (whole < x->t->n_tokens)
            return push(x, whole);
    }
    while (n > 0) {
        size_t part = MIN_OF(n, (size_t)TOKENIZER_WORD_MAX);
        TRY(bpe_merge(&x->t->merges, x->t->byte_symbols, (const uint8_t *)word, part, &x->work));
        for (int32_t i = 0; i >= 0; i = x->work.symbols[i].next)
            TRY(push_symbol(x, x->work.symbols[i].id));
        word += part;
        n -= part;
    }
    return ERR_OK;
}

/* The length of the UTF-8 character at p, or 0. */
static size_t char_length(const char *p, size_t n)
{
    utf8proc_int32_t c;
    utf8proc_ssize_t used =
        utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)MIN_OF(n, (size_t)4), &c);
    return used > 0 ? (size_t)used : 0;
}

/* Where a text of the kind llama is cut: at the limit, or before a blank shortly below it, because
 * few tokens have a blank inside. */
static size_t spm_part(const char *p, size_t n)
{
    enum { LIMIT = TOKENIZER_WORD_MAX, LOOK_BACK = 4096 };
    if (n <= LIMIT)
        return n;
    for (size_t i = LIMIT; i > LIMIT - LOOK_BACK; i--)
        if (p[i] == ' ' && p[i - 1] != ' ')
            return i;
    return LIMIT;
}

/* Characters that no token has become their bytes. */
static enum err push_spm(struct encoder *x, const char *text, size_t n)
{
    TRY(spm_merge(x->t, text, n, &x->work));
    for (int32_t i = 0; n > 0 && i >= 0; i = x->work.symbols[i].next) {
        uint32_t length = x->work.symbols[i].id, token = spm_token(x->t, text + i, length);
        if (token != STRINGS_NONE) {
            TRY(push(x, token));
            continue;
        }
        char bytes[4]; /* what merging made is a token, so this is one character */
        size_t n_bytes;
        assert(length <= sizeof bytes);
        spm_bytes(text + i, length, bytes, &n_bytes); /* a blank is one byte */
        for (size_t k = 0; k < n_bytes; k++)
            TRY(push_byte(x, (uint8_t)bytes[k]));
    }
    return ERR_OK;
}

/* Text between special tokens, of the kind llama. */
static enum err encode_spm(struct encoder *x, const char *p, size_t n)
{
    bool prefix = x->t->space_prefix && n > 0;
    while (n > 0) {
        size_t part = spm_part(p, n), n_written = 0;
        char *written = malloc((part + 1) * SPM_BLANK_BYTES);
        if (!written)
            return ERR_NO_MEMORY;
        for (size_t i = 0; i < part + prefix; i++) {
            char c = ' ';
            if (i >= prefix)
                c = p[i - prefix];
            if (c == ' ') {
                memcpy(written + n_written, SPM_BLANK, SPM_BLANK_BYTES);
                n_written += SPM_BLANK_BYTES;
            } else {
                written[n_written++] = c;
            }
        }
        enum err e = push_spm(x, written, n_written);
        free(written);
        TRY(e);
        prefix = false;
        p += part;
        n -= part;
    }
    return ERR_OK;
}

/* Text without special tokens. */
static enum err encode_text(struct encoder *x, const char *p, size_t n)
{
    if (x->t->ranks)
        return encode_spm(x, p, n);
    size_t start = 0, at = 0;
    while (at < n) {
        size_t used = (uint8_t)p[at] < 0x80 ? 1 : char_length(p + at, n - at);
        if (used) {
            at += used;
            continue;
        }
        TRY(splitter_run(&x->t->splitter, x->match, p + start, at - start, encode_word, x));
        TRY(push_byte(x, (uint8_t)p[at]));
        start = ++at;
    }
    return splitter_run(&x->t->splitter, x->match, p + start, n - start, encode_word, x);
}

/* Whether bytes [from, to) touch a plain run; `from` never goes back. */
static bool touches_plain(struct encoder *x, size_t from, size_t to)
{
    const struct tokenizer_options *o = x->options;
    while (x->plain_at < o->n_plain && o->plain[x->plain_at].end <= from)
        x->plain_at++;
    return x->plain_at < o->n_plain && o->plain[x->plain_at].begin < to;
}

/* Narrows [*from, *to) of the sorted special tokens, which agree in their first `depth` bytes, to
 * those whose next byte is b. */
static void narrow(const struct tokenizer *t, size_t depth, uint8_t b, uint32_t *from, uint32_t *to)
{
    uint32_t bounds[2];
    for (int upper = 0; upper < 2; upper++) {
        uint32_t low = *from, high = *to;
        while (low < high) {
            uint32_t middle = low + (high - low) / 2;
            struct text_view s = strings_at(&t->text, t->special[middle]);
            bool below = s.n <= depth || (uint8_t)s.p[depth] < b + upper;
            if (below)
                low = middle + 1;
            else
                high = middle;
        }
        bounds[upper] = low;
    }
    *from = bounds[0];
    *to = bounds[1];
}

/* The longest special token that begins at `at` and may be taken there. */
static bool special_at(struct encoder *x, const char *text, size_t n, size_t at, uint32_t *ret,
                       size_t *ret_n)
{
    const struct tokenizer *t = x->t;
    uint8_t first = (uint8_t)text[at];
    uint32_t from = t->special_from[first], to = t->special_from[first + 1];
    bool found = false;
    for (size_t depth = 1; from < to; depth++) {
        uint32_t id = t->special[from]; /* the shortest comes first */
        if (strings_at(&t->text, id).n == depth &&
            (t->types[id] == TOKEN_USER_DEFINED ||
             (x->options->parse_special && !touches_plain(x, at, at + depth)))) {
            *ret = id;
            *ret_n = depth;
            found = true;
        }
        if (at + depth >= n)
            break;
        narrow(t, depth, (uint8_t)text[at + depth], &from, &to);
    }
    return found;
}

static enum err encode_all(struct encoder *x, const char *text, size_t n)
{
    if (x->options->add_bos && x->t->adds_bos)
        TRY(push(x, (uint32_t)x->t->bos));
    size_t start = 0, at = 0;
    while (at < n) {
        uint32_t id;
        size_t used;
        if (!special_at(x, text, n, at, &id, &used)) {
            at++;
            continue;
        }
        TRY(encode_text(x, text + start, at - start));
        TRY(push(x, id));
        at += used;
        start = at;
    }
    return encode_text(x, text + start, n - start);
}

static bool plain_is_sound(const struct tokenizer_options *o, size_t n)
{
    size_t before = 0;
    for (size_t i = 0; i < o->n_plain; i++) {
        if (o->plain[i].begin < before || o->plain[i].end < o->plain[i].begin ||
            o->plain[i].end > n)
            return false;
        before = o->plain[i].end;
    }
    return true;
}

enum err tokenizer_encode(const struct tokenizer *t, const char *text, size_t n,
                          const struct tokenizer_options *options, struct token_ids *ids,
                          struct err_text *error)
{
    if (n > TOKENIZER_TEXT_MAX)
        return err_set(error, ERR_LIMIT, "the text is longer than %d bytes", TOKENIZER_TEXT_MAX);
    if (!plain_is_sound(options, n))
        return err_set(error, ERR_INVALID, "the plain runs of a text are out of order");
    struct encoder x = {.t = t, .options = options, .ids = ids, .ids_max = SIZE_MAX};
    if (options->tokens_max && options->tokens_max < SIZE_MAX - ids->n)
        x.ids_max = ids->n + options->tokens_max;
    size_t n_before = ids->n;
    x.match = pcre2_match_data_create(1, NULL);
    enum err e = x.match ? encode_all(&x, text, n) : ERR_NO_MEMORY;
    pcre2_match_data_free(x.match);
    bpe_work_deinit(&x.work);
    if (!e)
        return ERR_OK;
    ids->n = n_before;
    if (e == ERR_LIMIT)
        return err_set(error, e,
                       "the text takes more than %zu tokens, or too long to split into words",
                       options->tokens_max);
    return err_set(error, e, "the text cannot be tokenised: %s", err_name(e));
}
