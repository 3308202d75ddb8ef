/* Tokens per second of one model in one process: a prompt of 128 tokens, then 64 tokens one by one.
 *
 *   bench_stage MODEL [threads [rounds [fast|f32 [prompt [generate]]]]]
 *
 * The best round of each is what the machine can do; other programs only make it slower. */
#include "base/clock.h"
#include "base/util.h"
#include "runtime/model.h"
#include "runtime/pool.h"
#include "runtime/stage.h"

#include <stdio.h>
#include <string.h>

struct bench {
    struct stage *stage;
    float *logits;
    uint32_t n_prompt, n_generate, n_vocab;
};

static int run(struct bench *b, double *ret_prompt_us, double *ret_token_us)
{
    int32_t ids[STAGE_ROWS_MAX];
    for (uint32_t i = 0; i < STAGE_ROWS_MAX; i++)
        ids[i] = (int32_t)((i * 7919 + 13) % b->n_vocab);
    uint64_t start = clock_monotonic_us();
    struct stage_segment s = {.n_rows = b->n_prompt, .token_ids = ids, .logits = STAGE_LOGITS_LAST};
    if (stage_forward(b->stage, &s, 1, NULL, NULL, b->logits) != ERR_OK)
        return 1;
    uint64_t middle = clock_monotonic_us(), best = UINT64_MAX, before = middle;
    for (uint32_t i = 0; i < b->n_generate; i++) {
        struct stage_segment one = {.position = b->n_prompt + i,
                                    .n_rows = 1,
                                    .token_ids = ids + i % STAGE_ROWS_MAX,
                                    .logits = STAGE_LOGITS_LAST};
        if (stage_forward(b->stage, &one, 1, NULL, NULL, b->logits) != ERR_OK)
            return 1;
        uint64_t now = clock_monotonic_us();
        best = MIN_OF(best, now - before);
        before = now;
    }
    (void)printf("prompt %8.1f tokens/s   generate %7.1f tokens/s (fastest token %llu us)\n",
                 b->n_prompt * 1e6 / (double)(middle - start),
                 b->n_generate * 1e6 / (double)(before - middle), (unsigned long long)best);
    *ret_prompt_us = MIN_OF(*ret_prompt_us, (double)(middle - start));
    *ret_token_us = MIN_OF(*ret_token_us, (double)(before - middle) / b->n_generate);
    return 0;
}

int main(int argc, char **argv)
{
    struct err_text text = {""};
    struct model *model = NULL;
    struct pool *pool = NULL;
    uint32_t threads = argc > 2 ? (uint32_t)atoi(argv[2]) : 1;
    int rounds = argc > 3 ? atoi(argv[3]) : 3;
    struct bench b = {.n_prompt = argc > 5 ? (uint32_t)atoi(argv[5]) : 128,
                      .n_generate = argc > 6 ? (uint32_t)atoi(argv[6]) : 64};
    if (argc < 2 || b.n_prompt < 1 || b.n_prompt > STAGE_ROWS_MAX ||
        model_open(argv[1], &model, &text) != ERR_OK || pool_new(threads, &pool) != ERR_OK) {
        (void)fprintf(stderr,
                      "bench_stage MODEL [threads [rounds [fast|f32 [prompt [generate]]]]]\n%s\n",
                      text.text);
        return 2;
    }
    struct stage_options o = {.n_layers = model_info(model)->n_layers,
                              .context = b.n_prompt + b.n_generate,
                              .precision =
                                  argc > 4 && strcmp(argv[4], "f32") == 0 ? STAGE_F32 : STAGE_FAST};
    b.n_vocab = model_info(model)->n_vocab;
    b.logits = malloc(b.n_vocab * sizeof *b.logits);
    if (!b.logits || stage_new(model, pool, &o, &b.stage, &text) != ERR_OK) {
        (void)fprintf(stderr, "%s\n", text.text);
        return 1;
    }
    double prompt_us = 1e18, token_us = 1e18;
    for (int i = 0; i < rounds; i++)
        if (run(&b, &prompt_us, &token_us) != 0)
            return 1;
    (void)printf("best: prompt %.1f tokens/s, generate %.1f tokens/s, %u threads\n",
                 b.n_prompt * 1e6 / prompt_us, 1e6 / token_us, pool_threads(pool));
    stage_free(b.stage);
    pool_free(pool);
    model_unref(model);
    free(b.logits);
    return 0;
}
