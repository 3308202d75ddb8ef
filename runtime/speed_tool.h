/* The work of `covey bench MODEL`: how fast one process computes a model, without an agent.
 *
 * A round fills `n_depth` positions of `n_batch` sequences, then takes the time of a prompt of
 * n_prompt tokens for each of them and of n_generate steps in which each gains one token. Token ids
 * are made up: no arithmetic depends on what they are. */
#ifndef COVEY_RUNTIME_SPEED_TOOL_H
#define COVEY_RUNTIME_SPEED_TOOL_H

#include "base/err.h"
#include "runtime/stage.h"

#include <stdint.h>

enum {
    SPEED_TOKENS_MAX = 1 << 17, /* of each of prompt, generate and depth */
    SPEED_BATCH_MAX = 64,
    SPEED_ROUNDS_MAX = 100,
};

struct speed_options {
    enum stage_precision precision;
    uint32_t variant;              /* enum kernels_variant; 0: best */
    uint32_t n_threads;            /* 0: all CPUs */
    uint32_t n_prompt, n_generate; /* tokens; either may be 0, not both */
    uint32_t n_depth;              /* positions that are filled before, not timed */
    uint32_t n_batch;              /* sequences computed together, at least 1 */
    uint32_t n_rounds;             /* at least 1; one more before, not counted, warms up */
    /* Told before each round (0 is the warming one); may be NULL. */
    void (*progress)(void *context, uint32_t round, uint32_t n_rounds);
    void *context;
};

/* All sequences together, in tokens per second: the median of the rounds, the slowest and the
 * fastest. */
struct speed {
    double prompt, prompt_low, prompt_high;       /* 0 without a prompt */
    double generate, generate_low, generate_high; /* 0 when nothing is generated */
    uint32_t n_threads;
    uint64_t weight_bytes; /* that one generated token reads (all layers and the output matrix) */
    uint64_t memory_bytes; /* KV and working memory beside the mapped weights */
    char kernels[16];      /* "avx2" */
};

/* Errors of model_open, pool_new and stage_new; ERR_INVALID for options out of range. */
enum err speed_run(const char *model_path, const struct speed_options *options, struct speed *ret,
                   struct err_text *text);

#endif
