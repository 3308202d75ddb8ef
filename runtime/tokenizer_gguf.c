/* Tokenizers from the metadata of GGUF files. */
#include "runtime/gguf.h"
#include "runtime/tokenizer.h"

#include "base/util.h"

#include <stdlib.h>

struct lists {
    struct text_view *tokens, *merges;
    int32_t *types;
    float *scores;
};

static void lists_deinit(struct lists *l)
{
    free(l->tokens);
    free(l->merges);
    free(l->types);
    free(l->scores);
}

static enum err wrong(const struct gguf *g, enum err e, const char *what, struct err_text *text)
{
    return err_set(text, e, "%s: %s", gguf_path(g), what);
}

static enum err get_strings(const struct gguf *g, const char *key, uint32_t max,
                            struct text_view **ret, uint32_t *ret_n, struct err_text *text)
{
    struct gguf_array array;
    enum err e = gguf_get_array(g, key, &array);
    if (e == ERR_NOT_FOUND)
        return e;
    if (e || array.type != GGUF_STRING)
        return err_set(text, ERR_CORRUPT, "%s: %s is not a list of strings", gguf_path(g), key);
    if (array.n > max)
        return err_set(text, ERR_LIMIT, "%s: %s has %llu entries", gguf_path(g), key,
                       (unsigned long long)array.n);
    struct text_view *v = calloc(array.n ? array.n : 1, sizeof *v);
    if (!v)
        return wrong(g, ERR_NO_MEMORY, "out of memory", text);
    for (uint64_t i = 0; i < array.n; i++) {
        struct gguf_string s = gguf_array_string(&array, i);
        v[i] = (struct text_view){s.data, s.n};
    }
    *ret = v;
    *ret_n = (uint32_t)array.n;
    return ERR_OK;
}

static enum err get_types(const struct gguf *g, uint32_t n_tokens, int32_t **ret,
                          struct err_text *text)
{
    struct gguf_array array;
    enum err e = gguf_get_array(g, "tokenizer.ggml.token_type", &array);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e || array.n != n_tokens)
        return wrong(g, ERR_CORRUPT, "tokenizer.ggml.token_type does not fit the tokens", text);
    int32_t *types = calloc(n_tokens ? n_tokens : 1, sizeof *types);
    if (!types)
        return wrong(g, ERR_NO_MEMORY, "out of memory", text);
    for (uint32_t i = 0; i < n_tokens; i++) {
        int64_t type;
        if (!gguf_array_int(&array, i, &type) || type < 0 || type > INT32_MAX) {
            free(types);
            return wrong(g, ERR_CORRUPT, "tokenizer.ggml.token_type is not a list of types", text);
        }
        types[i] = (int32_t)type;
    }
    *ret = types;
    return ERR_OK;
}

static enum err get_scores(const struct gguf *g, uint32_t n_tokens, float **ret,
                           struct err_text *text)
{
    struct gguf_array array;
    enum err e = gguf_get_array(g, "tokenizer.ggml.scores", &array);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e || array.n != n_tokens)
        return wrong(g, ERR_CORRUPT, "tokenizer.ggml.scores does not fit the tokens", text);
    float *scores = calloc(n_tokens ? n_tokens : 1, sizeof *scores);
    if (!scores)
        return wrong(g, ERR_NO_MEMORY, "out of memory", text);
    for (uint32_t i = 0; i < n_tokens; i++) {
        double score;
        if (!gguf_array_float(&array, i, &score)) {
            free(scores);
            return wrong(g, ERR_CORRUPT, "tokenizer.ggml.scores is not a list of numbers", text);
        }
        scores[i] = (float)score;
    }
    *ret = scores;
    return ERR_OK;
}

/* 0 or 1; untouched when it is absent. */
static enum err get_choice(const struct gguf *g, const char *key, int *ret, struct err_text *text)
{
    bool v;
    enum err e = gguf_get_bool(g, key, &v);
    if (e && e != ERR_NOT_FOUND)
        return err_set(text, ERR_CORRUPT, "%s: %s is not a boolean", gguf_path(g), key);
    if (!e)
        *ret = v;
    return ERR_OK;
}

static enum err get_id(const struct gguf *g, const char *key, int64_t *ret, struct err_text *text)
{
    uint32_t id;
    enum err e = gguf_get_u32(g, key, &id);
    if (e == ERR_NOT_FOUND)
        return ERR_OK;
    if (e)
        return err_set(text, ERR_CORRUPT, "%s: %s is not a token", gguf_path(g), key);
    *ret = id;
    return ERR_OK;
}

static enum err get_name(const struct gguf *g, const char *key, struct text_view *ret,
                         struct err_text *text)
{
    struct gguf_string s;
    enum err e = gguf_get_string(g, key, &s);
    if (e == ERR_NOT_FOUND)
        return e;
    if (e)
        return err_set(text, ERR_CORRUPT, "%s: %s is not a string", gguf_path(g), key);
    *ret = (struct text_view){s.data, s.n};
    return ERR_OK;
}

static enum err fill(const struct gguf *g, struct tokenizer_source *source, struct lists *l,
                     struct err_text *text)
{
    enum err e = get_name(g, "tokenizer.ggml.model", &source->model, text);
    if (!e)
        e = get_strings(g, "tokenizer.ggml.tokens", TOKENIZER_VOCAB_MAX, &l->tokens,
                        &source->n_tokens, text);
    if (e == ERR_NOT_FOUND)
        return wrong(g, e, "the file has no tokenizer", text);
    TRY(e);
    source->pre = (struct text_view){"default", 7};
    e = get_name(g, "tokenizer.ggml.pre", &source->pre, text);
    if (e && e != ERR_NOT_FOUND)
        return e;
    e = get_strings(g, "tokenizer.ggml.merges", TOKENIZER_MERGES_MAX, &l->merges, &source->n_merges,
                    text);
    if (e && e != ERR_NOT_FOUND)
        return e;
    TRY(get_types(g, source->n_tokens, &l->types, text));
    TRY(get_id(g, "tokenizer.ggml.bos_token_id", &source->bos, text));
    TRY(get_id(g, "tokenizer.ggml.eos_token_id", &source->eos, text));
    TRY(get_id(g, "tokenizer.ggml.eot_token_id", &source->eot, text));
    TRY(get_id(g, "tokenizer.ggml.eom_token_id", &source->eom, text));
    TRY(get_id(g, "tokenizer.ggml.unknown_token_id", &source->unknown, text));
    TRY(get_scores(g, source->n_tokens, &l->scores, text));
    TRY(get_choice(g, "tokenizer.ggml.add_bos_token", &source->add_bos, text));
    TRY(get_choice(g, "tokenizer.ggml.add_space_prefix", &source->space_prefix, text));
    source->tokens = l->tokens;
    source->merges = l->merges;
    source->types = l->types;
    source->scores = l->scores;
    return ERR_OK;
}

enum err tokenizer_new_gguf(const struct gguf *gguf, struct tokenizer **ret, struct err_text *text)
{
    struct tokenizer_source source = TOKENIZER_SOURCE_INIT;
    struct lists l = {0};
    struct err_text inner = {""};
    enum err e = fill(gguf, &source, &l, text);
    if (!e) {
        e = tokenizer_new(&source, ret, &inner);
        if (e)
            (void)err_set(text, e, "%s: %s", gguf_path(gguf), inner.text);
    }
    lists_deinit(&l);
    return e;
}
