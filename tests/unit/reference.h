/* Shared by the tests that hold stages against tests/reference: files, and a model run as a chain
 * of stages in one process. */
#ifndef COVEY_TESTS_REFERENCE_H
#define COVEY_TESTS_REFERENCE_H

#include "base/util.h"
#include "runtime/model.h"
#include "runtime/pool.h"
#include "runtime/stage.h"

#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { CHAIN_STAGES_MAX = 4, CHAIN_TOKENS_MAX = 4096 };

static inline void reference_path(const char *file, char path[4096])
{
    const char *source = getenv("COVEY_SOURCE");
    (void)snprintf(path, 4096, "%s/tests/reference/%s", source ? source : ".", file);
}

static inline json_t *reference_load(const char *file)
{
    char path[4096];
    reference_path(file, path);
    json_error_t error;
    json_t *ret = json_load_file(path, JSON_ALLOW_NUL, &error);
    if (!ret)
        fail_msg("%s: %s", path, error.text);
    return ret;
}

/* An array of token ids; returns how many. */
static inline uint32_t reference_ids(const json_t *array, int32_t *ret)
{
    size_t n = json_array_size(array);
    assert_in_range(n, 1, CHAIN_TOKENS_MAX);
    for (size_t i = 0; i < n; i++)
        ret[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return (uint32_t)n;
}

static inline double reference_real(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    assert_true(json_is_number(v));
    return json_number_value(v);
}

struct chain_options {
    enum stage_precision precision;
    uint32_t variant, n_threads, context, n_blocks;
    uint32_t cuts[CHAIN_STAGES_MAX]; /* first layers of the second and further stages; 0 ends */
};

struct chain {
    struct model *model;
    struct pool *pool;
    struct stage *stages[CHAIN_STAGES_MAX];
    uint32_t n_stages, n_vocab, n_embd;
    float *rows[2];
    float *logits; /* [STAGE_ROWS_MAX, n_vocab] */
};

static inline void chain_open(struct chain *c, const char *path, const struct chain_options *o)
{
    struct err_text text = {""};
    memset(c, 0, sizeof *c);
    if (model_open(path, &c->model, &text) != ERR_OK)
        fail_msg("%s", text.text);
    const struct model_info *info = model_info(c->model);
    assert_int_equal(pool_new(o->n_threads ? o->n_threads : 1, &c->pool), ERR_OK);
    uint32_t first = 0;
    do {
        uint32_t end = c->n_stages < CHAIN_STAGES_MAX - 1 && o->cuts[c->n_stages] > 0
                           ? o->cuts[c->n_stages]
                           : info->n_layers;
        struct stage_options so = {.first_layer = first,
                                   .n_layers = end - first,
                                   .context = o->context ? o->context : 512,
                                   .n_blocks = o->n_blocks,
                                   .precision = o->precision,
                                   .variant = o->variant};
        if (stage_new(c->model, c->pool, &so, &c->stages[c->n_stages], &text) != ERR_OK)
            fail_msg("%s", text.text);
        c->n_stages++;
        first = end;
    } while (first < info->n_layers);
    c->n_vocab = info->n_vocab;
    c->n_embd = info->n_embd;
    for (int i = 0; i < 2; i++)
        c->rows[i] = malloc((size_t)STAGE_ROWS_MAX * info->n_embd * sizeof(float));
    c->logits = calloc((size_t)STAGE_ROWS_MAX * info->n_vocab, sizeof(float));
    assert_true(c->rows[0] && c->rows[1] && c->logits);
}

static inline void chain_close(struct chain *c)
{
    for (uint32_t i = 0; i < c->n_stages; i++)
        stage_free(c->stages[i]);
    pool_free(c->pool);
    model_unref(c->model);
    free(c->rows[0]);
    free(c->rows[1]);
    free(c->logits);
}

/* One step through all stages; logits are in c->logits. */
static inline void chain_step(struct chain *c, const struct stage_segment *segments, uint32_t n)
{
    for (uint32_t i = 0; i < c->n_stages; i++) {
        bool last = i + 1 == c->n_stages;
        assert_int_equal(stage_forward(c->stages[i], segments, n, i > 0 ? c->rows[i % 2] : NULL,
                                       last ? NULL : c->rows[(i + 1) % 2], last ? c->logits : NULL),
                         ERR_OK);
    }
}

/* Feeds tokens at `position` of the sequence in blocks 0, 1, 2, ...; the logits of the last one are
 * returned. */
static inline const float *chain_feed(struct chain *c, const int32_t *ids, uint32_t n,
                                      uint32_t position)
{
    for (uint32_t at = 0; at < n;) {
        uint32_t take = MIN_OF(n - at, (uint32_t)STAGE_ROWS_MAX);
        struct stage_segment s = {.position = position + at,
                                  .n_rows = take,
                                  .token_ids = ids + at,
                                  .logits = STAGE_LOGITS_LAST};
        chain_step(c, &s, 1);
        at += take;
    }
    return c->logits;
}

static inline int32_t argmax_of(const float *logits, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}

#endif
