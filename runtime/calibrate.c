#include "runtime/calibrate.h"

#include "base/clock.h"
#include "runtime/kernels/kernels.h"
#include "runtime/pool.h"
#include "runtime/stage.h"

#include <stdio.h>
#include <string.h>

enum {
    N_IN = 2048,      /* a matrix of a model of 1 to 3 thousand million weights */
    N_OUT = 1024 + 8, /* not a multiple of 4096 bytes apart (kernels trap 3) */
    ROWS = 128,
    MATRICES = 96, /* 1.3 MB each: more than caches hold */
    MATRICES_MIN = 24,
    STREAM_US = 700000,
    PROMPT_US = 700000,
    BLOCK_BYTES = 20, /* Q4_1: scale, minimum (F16), 32 nibbles */
};

struct bench {
    struct kernels *kernels;
    uint8_t *weights; /* [n_matrices] */
    uint32_t n_matrices;
    size_t matrix_bytes;
    float *x, *y; /* [ROWS, N_IN], [ROWS, N_OUT] */
    void *prepared;
};

static void bench_deinit(struct bench *b)
{
    kernels_free(b->kernels);
    free(b->weights);
    free(b->x);
    free(b->y);
    free(b->prepared);
}

/* Any weights will do, as long as they are finite. */
static void fill(struct bench *b)
{
    uint32_t r = 1;
    for (size_t i = 0; i < b->matrix_bytes; i++) {
        r = r * 1664525u + 1013904223u;
        size_t at = i % BLOCK_BYTES;
        b->weights[i] = at == 1 || at == 3 ? 0x20 /* near 0.01 */ : (uint8_t)(r >> 24);
    }
    for (uint32_t m = 1; m < b->n_matrices; m++)
        memcpy(b->weights + m * b->matrix_bytes, b->weights, b->matrix_bytes);
    for (size_t i = 0; i < (size_t)ROWS * N_IN; i++)
        b->x[i] = (float)(i % 61) * 0.03f - 0.9f;
}

static enum err bench_init(struct bench *b, struct pool *pool)
{
    TRY(kernels_new(pool, KERNELS_BEST, &b->kernels));
    b->matrix_bytes = (size_t)N_OUT * ((size_t)N_IN / 32) * BLOCK_BYTES;
    for (b->n_matrices = MATRICES; b->n_matrices >= MATRICES_MIN; b->n_matrices /= 2)
        if ((b->weights = aligned_alloc(64, b->n_matrices * b->matrix_bytes)) != NULL)
            break;
    b->x = malloc((size_t)ROWS * N_IN * sizeof(float));
    b->y = malloc((size_t)ROWS * N_OUT * sizeof(float));
    b->prepared = aligned_alloc(64, (activations_bytes(ROWS, N_IN) + 63) / 64 * 64);
    if (!b->weights || !b->x || !b->y || !b->prepared)
        return ERR_NO_MEMORY;
    fill(b);
    return ERR_OK;
}

static void multiply(struct bench *b, uint32_t matrix, uint32_t n_rows)
{
    const struct matrix m = {.type = TENSOR_Q4_1,
                             .n_out = N_OUT,
                             .n_in = N_IN,
                             .row_bytes = (size_t)N_IN / 32 * BLOCK_BYTES,
                             .data = b->weights + matrix * b->matrix_bytes};
    const struct matmul_options options = {.precision = KERNELS_FAST};
    struct activations a;
    activations_prepare(b->kernels, &a, b->prepared, b->x, N_IN, n_rows, N_IN,
                        ACTIVATIONS_QUANTISED);
    matmul(b->kernels, &m, &a, &options, b->y, N_OUT);
}

/* The fastest of several rounds of `n` products, in products per second: other programs can only
 * make it slower. */
static double fastest(struct bench *b, uint32_t n, uint32_t n_rows, uint64_t limit_us)
{
    uint64_t start = clock_monotonic_us(), now = start, best = UINT64_MAX;
    uint32_t matrix = 0;
    do {
        uint64_t before = now;
        for (uint32_t i = 0; i < n; i++) {
            multiply(b, matrix, n_rows);
            matrix = (matrix + 1) % b->n_matrices;
        }
        now = clock_monotonic_us();
        best = MIN_OF(best, now - before);
    } while (now - start + best < limit_us);
    return (double)n * 1e6 / (double)MAX_OF(best, (uint64_t)1);
}

enum err calibrate(struct pool *pool, struct calibration *ret)
{
    struct bench b = {0};
    enum err e = bench_init(&b, pool);
    if (e == ERR_OK) {
        double streamed = fastest(&b, b.n_matrices / 4, 1, STREAM_US);
        double prompted = fastest(&b, 1, ROWS, PROMPT_US);
        *ret = (struct calibration){
            .stream_bytes_per_s = streamed * (double)b.matrix_bytes,
            .macs_per_s = prompted * (double)ROWS * N_IN * N_OUT,
            .n_threads = pool_threads(pool),
            .arithmetic_version = stage_arithmetic_version(),
        };
        (void)snprintf(ret->kernels, sizeof ret->kernels, "%s",
                       kernels_variant_name(kernels_variant(b.kernels)));
    }
    bench_deinit(&b);
    return e;
}
