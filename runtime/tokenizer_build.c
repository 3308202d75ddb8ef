/* Construction of tokenizers: checks the source, copies the vocabulary, turns merges into numbers,
 * and collects special and end tokens. */
#include "runtime/tokenizer_internal.h"

#include "base/util.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* GPT-2's alphabet writes each byte as one printable character: printable Latin-1 as itself, the
 * others as U+0100 and up, in order. */
static bool is_own_letter(int32_t c)
{
    return (c >= '!' && c <= '~') || (c >= 0xa1 && c <= 0xac) || (c >= 0xae && c <= 0xff);
}

/* The byte that a character stands for, or -1. */
static int byte_of_letter(int32_t c)
{
    if (is_own_letter(c))
        return c;
    if (c < 0x100 || c > 0x143)
        return -1;
    int32_t left = c - 0x100;
    for (int b = 0; b < 256; b++)
        if (!is_own_letter(b) && left-- == 0)
            return b;
    return -1;
}

bool bytes_of_alphabet(const char *p, size_t n, char *ret, size_t *ret_n)
{
    size_t at = 0, n_out = 0;
    while (at < n) {
        utf8proc_int32_t c;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)p + at, (utf8proc_ssize_t)(n - at), &c);
        int b = used > 0 ? byte_of_letter(c) : -1;
        if (b < 0)
            return false;
        ret[n_out++] = (char)b;
        at += (size_t)used;
    }
    *ret_n = n_out;
    return true;
}

static bool is_special(enum token_type type)
{
    return type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED || type == TOKEN_UNKNOWN;
}

/* -- vocabulary -------------------------------------------------------------------------------- */

static enum err explain(enum err e, struct err_text *text)
{
    if (e == ERR_CORRUPT)
        return err_set(text, e, "tokenizer: the vocabulary was made to collide");
    if (e == ERR_LIMIT)
        return err_set(text, e, "tokenizer: the vocabulary is too large");
    return e ? err_set(text, e, "tokenizer: out of memory") : ERR_OK;
}

/* What the token stands for in an answer: nothing for control tokens, its own text for
 * user-defined ones, else the bytes that GPT-2's alphabet spells, or SentencePiece's notation. */
static enum err add_bytes(struct tokenizer *t, struct text_view token, enum token_type type,
                          char *room)
{
    size_t n;
    if (type == TOKEN_CONTROL || type == TOKEN_UNKNOWN)
        return strings_add(&t->bytes, "", 0);
    if (t->ranks && type == TOKEN_BYTE) {
        room[0] = (char)spm_byte_of(token);
        return strings_add(&t->bytes, room, 1);
    }
    if (t->ranks && type != TOKEN_USER_DEFINED) {
        spm_bytes(token.p, token.n, room, &n);
        return strings_add(&t->bytes, room, n);
    }
    if (type != TOKEN_USER_DEFINED && bytes_of_alphabet(token.p, token.n, room, &n))
        return strings_add(&t->bytes, room, n);
    return strings_add(&t->bytes, token.p, token.n);
}

static enum err add_token(struct tokenizer *t, const struct tokenizer_source *source, uint32_t i,
                          char *room, struct err_text *text)
{
    struct text_view token = source->tokens[i];
    int32_t type = source->types ? source->types[i] : TOKEN_NORMAL;
    if (type < TOKEN_NORMAL || type > TOKEN_BYTE)
        return err_set(text, ERR_CORRUPT, "tokenizer: token %u has the unknown type %d", i, type);
    if (token.n > TOKENIZER_TOKEN_BYTES_MAX ||
        (is_special((enum token_type)type) && token.n > TOKENIZER_SPECIAL_BYTES_MAX))
        return err_set(text, ERR_LIMIT, "tokenizer: token %u is %zu bytes long", i, token.n);
    if (t->ranks && token.n > TOKENIZER_SCORED_BYTES_MAX)
        return err_set(text, ERR_LIMIT, "tokenizer: token %u is %zu bytes long", i, token.n);
    if (t->ranks && type == TOKEN_BYTE && spm_byte_of(token) < 0)
        return err_set(text, ERR_CORRUPT, "tokenizer: token %u names no byte", i);
    t->types[i] = (uint8_t)type;
    enum err e = strings_add(&t->text, token.p, token.n);
    if (!e)
        e = strings_index(&t->text, i);
    if (!e)
        e = add_bytes(t, token, (enum token_type)type, room);
    return explain(e, text);
}

/* Which tokens merging may yield. Control tokens never come out of plain text. Normal ones win over
 * user-defined ones that stand for the same bytes. */
static enum err index_bytes(struct tokenizer *t)
{
    for (int pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < t->n_tokens; i++) {
            enum token_type type = (enum token_type)t->types[i];
            if (t->bytes.v[i].n == 0 || type == TOKEN_CONTROL || type == TOKEN_UNKNOWN ||
                (type == TOKEN_NORMAL) != (pass == 1))
                continue;
            TRY(strings_index(&t->bytes, i));
        }
    return ERR_OK;
}

static enum err build_vocabulary(struct tokenizer *t, const struct tokenizer_source *source,
                                 struct err_text *text)
{
    if (source->n_tokens == 0 || source->n_tokens > TOKENIZER_VOCAB_MAX)
        return err_set(text, source->n_tokens ? ERR_LIMIT : ERR_CORRUPT,
                       "tokenizer: the vocabulary has %u tokens", source->n_tokens);
    t->n_tokens = source->n_tokens;
    t->types = calloc(t->n_tokens, 1);
    char *room = malloc(TOKENIZER_TOKEN_BYTES_MAX);
    if (!t->types || !room) {
        free(room);
        return explain(ERR_NO_MEMORY, text);
    }
    enum err e = ERR_OK;
    for (uint32_t i = 0; i < t->n_tokens && !e; i++)
        e = add_token(t, source, i, room, text);
    free(room);
    return e || t->ranks ? e : explain(index_bytes(t), text);
}

/* -- scores ------------------------------------------------------------------------------------ */

static enum err build_ranks(struct tokenizer *t, const struct tokenizer_source *source,
                            struct err_text *text)
{
    if (!source->scores)
        return err_set(text, ERR_CORRUPT, "tokenizer: the tokens have no scores");
    t->ranks = malloc(((size_t)source->n_tokens + 1) * sizeof *t->ranks);
    if (!t->ranks)
        return explain(ERR_NO_MEMORY, text);
    for (uint32_t i = 0; i < source->n_tokens; i++) {
        if (!isfinite(source->scores[i]))
            return err_set(text, ERR_CORRUPT, "tokenizer: the score of token %u is no number", i);
        t->ranks[i] = spm_rank(source->scores[i]);
    }
    t->space_prefix = source->space_prefix != 0;
    return ERR_OK;
}

/* The token of each byte: "<0xNN>", else the byte itself as a character. */
static void find_bytes(struct tokenizer *t)
{
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        t->byte_symbols[b] = spm_token(t, &byte, 1);
    }
    for (uint32_t i = t->n_tokens; i-- > 0;) {
        if (t->types[i] == TOKEN_BYTE)
            t->byte_symbols[spm_byte_of(strings_at(&t->text, i))] = i;
    }
}

/* -- merges ------------------------------------------------------------------------------------ */

/* The number of a run of bytes: its token, or a symbol of its own that no token has. */
static enum err symbol_of(struct tokenizer *t, const char *p, size_t n, uint32_t *ret)
{
    uint32_t found = strings_find(&t->bytes, p, n);
    if (found == STRINGS_NONE) {
        found = t->bytes.n;
        TRY(strings_add(&t->bytes, p, n));
        TRY(strings_index(&t->bytes, found));
    }
    *ret = found;
    return ERR_OK;
}

enum { MERGE_BYTES_MAX = 2 * TOKENIZER_TOKEN_BYTES_MAX + 1 };

static enum err add_merge(struct tokenizer *t, struct text_view line, uint32_t rank, char *room,
                          struct err_text *text)
{
    const char *gap = line.n > 2 ? memchr(line.p + 1, ' ', line.n - 2) : NULL;
    if (!gap || line.n > MERGE_BYTES_MAX)
        return err_set(text, ERR_CORRUPT, "tokenizer: merge %u is not a pair", rank);
    size_t n_left = (size_t)(gap - line.p), left_bytes, right_bytes;
    if (!bytes_of_alphabet(line.p, n_left, room, &left_bytes) ||
        !bytes_of_alphabet(gap + 1, line.n - n_left - 1, room + left_bytes, &right_bytes))
        return ERR_OK; /* no text has such characters, so it never applies */
    struct merge m = {.rank = rank};
    enum err e = symbol_of(t, room, left_bytes, &m.left);
    if (!e)
        e = symbol_of(t, room + left_bytes, right_bytes, &m.right);
    if (!e)
        e = symbol_of(t, room, left_bytes + right_bytes, &m.result);
    if (!e)
        e = merges_put(&t->merges, &m);
    return explain(e, text);
}

static enum err build_merges(struct tokenizer *t, const struct tokenizer_source *source,
                             struct err_text *text)
{
    if (source->n_merges > TOKENIZER_MERGES_MAX)
        return err_set(text, ERR_LIMIT, "tokenizer: %u merges", source->n_merges);
    for (int b = 0; b < 256; b++) {
        char byte = (char)b;
        TRY(explain(symbol_of(t, &byte, 1, &t->byte_symbols[b]), text));
    }
    TRY(explain(merges_init(&t->merges, source->n_merges), text));
    char *room = malloc(MERGE_BYTES_MAX);
    enum err e = room ? ERR_OK : explain(ERR_NO_MEMORY, text);
    for (uint32_t i = 0; i < source->n_merges && !e; i++)
        e = add_merge(t, source->merges[i], i, room, text);
    free(room);
    return e;
}

/* -- special tokens ---------------------------------------------------------------------------- */

static int view_cmp(struct text_view a, struct text_view b)
{
    int order = memcmp(a.p, b.p, MIN_OF(a.n, b.n));
    return order ? order : a.n < b.n ? -1 : a.n > b.n;
}

/* A bottom-up merge sort by bytes: qsort has no context argument everywhere. */
static void sort_special(const struct tokenizer *t, uint32_t *v, uint32_t *spare, uint32_t n)
{
    for (uint32_t width = 1; width < n; width *= 2) {
        for (uint32_t from = 0; from < n; from += 2 * width) {
            uint32_t middle = MIN_OF(from + width, n), end = MIN_OF(from + 2 * width, n);
            uint32_t i = from, j = middle;
            for (uint32_t k = from; k < end; k++) {
                bool second = i >= middle || (j < end && view_cmp(strings_at(&t->text, v[j]),
                                                                  strings_at(&t->text, v[i])) < 0);
                spare[k] = second ? v[j++] : v[i++];
            }
        }
        memcpy(v, spare, n * sizeof *v);
    }
}

/* Tokens that are looked for in the text: those that their own text finds (of two with one text,
 * the later). */
static enum err build_special(struct tokenizer *t, struct err_text *text)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_tokens; i++)
        n += is_special((enum token_type)t->types[i]);
    uint32_t *v = malloc((n + 1) * sizeof *v), *spare = malloc((n + 1) * sizeof *spare);
    if (!v || !spare) {
        free(v);
        free(spare);
        return explain(ERR_NO_MEMORY, text);
    }
    n = 0;
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        struct text_view s = strings_at(&t->text, i);
        if (is_special((enum token_type)t->types[i]) && s.n &&
            strings_find(&t->text, s.p, s.n) == i)
            v[n++] = i;
    }
    sort_special(t, v, spare, n);
    free(spare);
    t->special = v;
    t->n_special = n;
    uint32_t at = 0;
    for (int b = 0; b < 257; b++) {
        while (at < n && (uint8_t)strings_at(&t->text, v[at]).p[0] < b)
            at++;
        t->special_from[b] = at;
    }
    return ERR_OK;
}

/* -- end tokens -------------------------------------------------------------------------------- */

static enum err add_end(struct tokenizer *t, int64_t id, struct err_text *text)
{
    if (id < 0 || tokenizer_is_end(t, (int32_t)id))
        return ERR_OK;
    if (t->n_ends == TOKENIZER_END_MAX)
        return err_set(text, ERR_LIMIT, "tokenizer: more than %d end tokens", TOKENIZER_END_MAX);
    uint32_t at = t->n_ends++;
    for (; at > 0 && t->ends[at - 1] > id; at--)
        t->ends[at] = t->ends[at - 1];
    t->ends[at] = (int32_t)id;
    return ERR_OK;
}

/* Ends of a turn that metadata often do not name; they count when they are control tokens. */
static enum err build_ends(struct tokenizer *t, const struct tokenizer_source *source,
                           struct err_text *text)
{
    static const char *const NAMES[] = {
        "<|endoftext|>",   "<|im_end|>",    "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<|end_of_text|>", "<end_of_turn>", "<|return|>", "<|call|>",   "<EOT>",
    };
    TRY(add_end(t, source->eos, text));
    TRY(add_end(t, source->eot, text));
    TRY(add_end(t, source->eom, text));
    for (size_t i = 0; i < ARRAY_LEN(NAMES); i++) {
        int32_t id = tokenizer_find(t, NAMES[i], strlen(NAMES[i]));
        if (id >= 0 && t->types[id] == TOKEN_CONTROL)
            TRY(add_end(t, id, text));
    }
    return ERR_OK;
}

static enum err check_id(const struct tokenizer *t, const char *what, int64_t id,
                         struct err_text *text)
{
    if (id < -1 || id >= (int64_t)t->n_tokens)
        return err_set(text, ERR_CORRUPT, "tokenizer: the %s token %lld is not in the vocabulary",
                       what, (long long)id);
    return ERR_OK;
}

static enum err check_ids(struct tokenizer *t, const struct tokenizer_source *source,
                          struct err_text *text)
{
    TRY(check_id(t, "bos", source->bos, text));
    TRY(check_id(t, "eos", source->eos, text));
    TRY(check_id(t, "eot", source->eot, text));
    TRY(check_id(t, "eom", source->eom, text));
    TRY(check_id(t, "unknown", source->unknown, text));
    t->bos = (int32_t)source->bos;
    t->eos = (int32_t)source->eos;
    t->unknown = (int32_t)source->unknown;
    assert(t->ranks || t->splitter.rule); /* SentencePiece, or pieces of text */
    bool usual = t->ranks || t->splitter.rule->add_bos;
    t->adds_bos = source->add_bos < 0 ? usual : source->add_bos != 0;
    if (t->adds_bos && t->bos < 0) {
        if (source->add_bos > 0)
            return err_set(text, ERR_CORRUPT,
                           "tokenizer: a bos token is wanted, and there is none");
        t->adds_bos = false;
    }
    return ERR_OK;
}

/* Every byte must come out as something. */
static enum err check_bytes(const struct tokenizer *t, struct err_text *text)
{
    for (int b = 0; b < 256; b++)
        if (t->byte_symbols[b] >= t->n_tokens && t->unknown < 0)
            return err_set(text, ERR_CORRUPT,
                           "tokenizer: no token for the byte 0x%02x, and no unknown token", b);
    return ERR_OK;
}

static bool view_is(struct text_view v, const char *s)
{
    return v.n == strlen(s) && memcmp(v.p, s, v.n) == 0;
}

/* Vocabulary and merges of byte-level BPE. */
static enum err build_gpt2(struct tokenizer *t, const struct tokenizer_source *source,
                           struct err_text *text)
{
    const struct split_rule *rule = split_rule_find(source->pre);
    if (!rule)
        return err_set(text, ERR_UNSUPPORTED,
                       "tokenizer: the splitting rule '%.*s' is not supported yet",
                       (int)MIN_OF(source->pre.n, (size_t)40), source->pre.p);
    TRY(splitter_init(&t->splitter, rule, text));
    TRY(build_vocabulary(t, source, text));
    return build_merges(t, source, text);
}

static enum err build_llama(struct tokenizer *t, const struct tokenizer_source *source,
                            struct err_text *text)
{
    if (source->n_tokens > TOKENIZER_VOCAB_MAX)
        return explain(ERR_LIMIT, text);
    TRY(build_ranks(t, source, text));
    TRY(build_vocabulary(t, source, text));
    find_bytes(t);
    return ERR_OK;
}

static enum err build(struct tokenizer *t, const struct tokenizer_source *source,
                      struct err_text *text)
{
    if (view_is(source->model, "gpt2"))
        TRY(build_gpt2(t, source, text));
    else if (view_is(source->model, "llama"))
        TRY(build_llama(t, source, text));
    else
        return err_set(text, ERR_UNSUPPORTED, "tokenizer: the kind '%.*s' is not supported yet",
                       (int)MIN_OF(source->model.n, (size_t)40), source->model.p);
    TRY(build_special(t, text));
    TRY(check_ids(t, source, text));
    TRY(check_bytes(t, text));
    return build_ends(t, source, text);
}

enum err tokenizer_new(const struct tokenizer_source *source, struct tokenizer **ret,
                       struct err_text *text)
{
    struct tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return explain(ERR_NO_MEMORY, text);
    enum err e = build(t, source, text);
    if (e)
        tokenizer_free(t);
    else
        *ret = t;
    return e;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t)
        return;
    splitter_deinit(&t->splitter);
    strings_deinit(&t->text);
    strings_deinit(&t->bytes);
    merges_deinit(&t->merges);
    free(t->types);
    free(t->ranks);
    free(t->special);
    free(t);
}
