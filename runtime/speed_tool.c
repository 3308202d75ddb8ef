#include "runtime/speed_tool.h"

#include "base/clock.h"
#include "base/util.h"
#include "runtime/kernels/kernels.h"
#include "runtime/model.h"
#include "runtime/pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct run {
    const struct speed_options *options;
    struct model *model;
    struct pool *pool;
    struct stage *stage;
    float *logits; /* [n_batch, n_vocab] */
    int32_t ids[STAGE_ROWS_MAX];
    uint32_t *blocks; /* [n_batch, n_table]: their KV */
    uint32_t n_table;
    uint32_t position;                /* that every sequence has reached */
    double prompts[SPEED_ROUNDS_MAX]; /* tokens per second */
    double generations[SPEED_ROUNDS_MAX];
};

static void run_deinit(struct run *r)
{
    stage_free(r->stage);
    pool_free(r->pool);
    model_unref(r->model);
    free(r->logits);
    free(r->blocks);
}

static enum err check(const struct speed_options *o, const struct model_info *info,
                      struct err_text *text)
{
    if (o->n_prompt > SPEED_TOKENS_MAX || o->n_generate > SPEED_TOKENS_MAX ||
        o->n_depth > SPEED_TOKENS_MAX || o->n_prompt + o->n_generate == 0)
        return err_set(text, ERR_INVALID, "a prompt, or tokens to generate, up to %d of each",
                       SPEED_TOKENS_MAX);
    if (o->n_batch < 1 || o->n_batch > SPEED_BATCH_MAX || o->n_rounds < 1 ||
        o->n_rounds > SPEED_ROUNDS_MAX)
        return err_set(text, ERR_INVALID, "1 to %d sequences at once, in 1 to %d rounds",
                       SPEED_BATCH_MAX, SPEED_ROUNDS_MAX);
    if (o->n_depth + o->n_prompt + o->n_generate > info->context_max)
        return err_set(text, ERR_INVALID, "%s takes %u positions at most", info->name,
                       info->context_max);
    return ERR_OK;
}

static struct stage_options stage_options_of(const struct run *r)
{
    const struct speed_options *o = r->options;
    uint32_t context = o->n_depth + o->n_prompt + o->n_generate;
    return (struct stage_options){.n_layers = model_info(r->model)->n_layers,
                                  .context = context,
                                  .n_blocks =
                                      (context + STAGE_BLOCK - 1) / STAGE_BLOCK * o->n_batch,
                                  .precision = o->precision,
                                  .variant = o->variant};
}

static enum err run_init(struct run *r, const char *path, struct err_text *text)
{
    const struct speed_options *o = r->options;
    TRY(model_open(path, &r->model, text));
    const struct model_info *info = model_info(r->model);
    TRY(check(o, info, text));
    enum err e = pool_new(o->n_threads, &r->pool);
    if (e != ERR_OK)
        return err_set(text, e, "cannot start %u threads", o->n_threads);
    const struct stage_options so = stage_options_of(r);
    TRY(stage_new(r->model, r->pool, &so, &r->stage, text));
    r->logits = malloc((size_t)o->n_batch * info->n_vocab * sizeof *r->logits);
    r->blocks = malloc((size_t)so.n_blocks * sizeof *r->blocks);
    if (!r->logits || !r->blocks)
        return err_set(text, ERR_NO_MEMORY, "no memory for the logits of %u sequences", o->n_batch);
    r->n_table = so.n_blocks / o->n_batch;
    for (uint32_t i = 0; i < so.n_blocks; i++)
        r->blocks[i] = i;
    for (uint32_t i = 0; i < STAGE_ROWS_MAX; i++)
        r->ids[i] = (int32_t)((i * UINT64_C(7919) + 13) % info->n_vocab);
    return ERR_OK;
}

/* n tokens for each sequence, one sequence after the other, in steps as long as a stage takes. */
static enum err fill(struct run *r, uint32_t n)
{
    for (uint32_t i = 0; i < r->options->n_batch; i++)
        for (uint32_t done = 0, rows; done < n; done += rows) {
            rows = MIN_OF(n - done, (uint32_t)STAGE_ROWS_MAX);
            const struct stage_segment s = {.blocks = r->blocks + (size_t)i * r->n_table,
                                            .position = r->position + done,
                                            .n_rows = rows,
                                            .token_ids = r->ids,
                                            .logits = done + rows == n ? STAGE_LOGITS_LAST
                                                                       : STAGE_LOGITS_NONE};
            TRY(stage_forward(r->stage, &s, 1, NULL, NULL, r->logits));
        }
    r->position += n;
    return ERR_OK;
}

/* One token more for all sequences. */
static enum err generate(struct run *r)
{
    struct stage_segment s[SPEED_BATCH_MAX];
    for (uint32_t i = 0; i < r->options->n_batch; i++)
        s[i] = (struct stage_segment){.blocks = r->blocks + (size_t)i * r->n_table,
                                      .position = r->position,
                                      .n_rows = 1,
                                      .token_ids = r->ids + (r->position + i) % STAGE_ROWS_MAX,
                                      .logits = STAGE_LOGITS_LAST};
    TRY(stage_forward(r->stage, s, r->options->n_batch, NULL, NULL, r->logits));
    r->position++;
    return ERR_OK;
}

static double per_second(uint64_t n, uint64_t from_us)
{
    uint64_t us = clock_monotonic_us() - from_us;
    return (double)n * 1e6 / (double)MAX_OF(us, UINT64_C(1));
}

static enum err round_of(struct run *r, double *ret_prompt, double *ret_generate)
{
    const struct speed_options *o = r->options;
    r->position = 0;
    TRY(fill(r, o->n_depth));
    uint64_t start_us = clock_monotonic_us();
    TRY(fill(r, o->n_prompt));
    *ret_prompt = per_second((uint64_t)o->n_prompt * o->n_batch, start_us);
    start_us = clock_monotonic_us();
    for (uint32_t i = 0; i < o->n_generate; i++)
        TRY(generate(r));
    *ret_generate = per_second((uint64_t)o->n_generate * o->n_batch, start_us);
    return ERR_OK;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Sorts. */
static void summarise(double *values, uint32_t n, double *ret_median, double *ret_low,
                      double *ret_high)
{
    qsort(values, n, sizeof *values, compare);
    *ret_median = (values[(n - 1) / 2] + values[n / 2]) / 2;
    *ret_low = values[0];
    *ret_high = values[n - 1];
}

static enum err rounds(struct run *r, struct err_text *text)
{
    const struct speed_options *o = r->options;
    for (uint32_t i = 0; i <= o->n_rounds; i++) {
        double prompt, generated;
        if (o->progress)
            o->progress(o->context, i, o->n_rounds);
        enum err e = round_of(r, &prompt, &generated);
        if (e != ERR_OK)
            return err_set(text, e, "the model could not be computed (%s)", err_name(e));
        if (i > 0) {
            r->prompts[i - 1] = prompt;
            r->generations[i - 1] = generated;
        }
    }
    return ERR_OK;
}

static void describe(struct run *r, struct speed *ret)
{
    const struct speed_options *o = r->options;
    const struct model_info *info = model_info(r->model);
    *ret = (struct speed){.n_threads = pool_threads(r->pool), .weight_bytes = info->output_bytes};
    for (uint32_t i = 0; i < info->n_layers; i++)
        ret->weight_bytes += info->layer_bytes[i];
    const struct stage_options so = stage_options_of(r);
    ret->memory_bytes = stage_memory_bytes(r->model, &so);
    struct kernels *k = NULL;
    if (kernels_new(r->pool, (enum kernels_variant)o->variant, &k) == ERR_OK)
        (void)snprintf(ret->kernels, sizeof ret->kernels, "%s",
                       kernels_variant_name(kernels_variant(k)));
    kernels_free(k);
    if (o->n_prompt > 0)
        summarise(r->prompts, o->n_rounds, &ret->prompt, &ret->prompt_low, &ret->prompt_high);
    if (o->n_generate > 0)
        summarise(r->generations, o->n_rounds, &ret->generate, &ret->generate_low,
                  &ret->generate_high);
}

enum err speed_run(const char *model_path, const struct speed_options *options, struct speed *ret,
                   struct err_text *text)
{
    struct run *r = calloc(1, sizeof *r);
    if (!r)
        return err_set(text, ERR_NO_MEMORY, "no memory to measure in");
    r->options = options;
    enum err e = run_init(r, model_path, text);
    if (e == ERR_OK)
        e = rounds(r, text);
    if (e == ERR_OK)
        describe(r, ret);
    run_deinit(r);
    free(r);
    return e;
}
