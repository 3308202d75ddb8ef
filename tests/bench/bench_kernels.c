/* Speed of the kernels on this machine: bench_kernels [threads [variant [type...]]].
 * With types, only what one to eight rows reach with them. G MAC/s = 10^9 multiply-adds per second;
 * GB/s of weights (few rows) or of KV (attention), beside what the machine reads at most. Weights
 * for few rows are larger than the caches of most machines. The best of many repeats: other
 * programs only make it slower. */
#include "base/clock.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/synthetic.h"
#include "runtime/pool.h"

#include <stdio.h>
#include <string.h>

enum { REPEATS = 7, PATIENCE_US = 250000, MEMORY_MB = 192 };

struct bench {
    struct kernels *k;
    struct rng rng;
    uint8_t *weights;
    float *x, *y;
    void *memory;
    double bandwidth; /* GB/s */
};

/* ---- what the machine reads at most */

typedef uint64_t lane __attribute__((vector_size(16)));

struct reading {
    const uint8_t *memory;
    size_t share; /* of one task */
    uint32_t n_tasks, streams, ahead;
    uint64_t sink[POOL_THREADS_MAX];
};

/* `streams` sequential streams at once, each line asked for `ahead` bytes early. */
static void read_share(void *arg, uint32_t task, uint32_t thread)
{
    struct reading *r = arg;
    const uint8_t *p = r->memory + task * r->share;
    /* an odd number of pages apart: not all in one set of the first-level cache */
    size_t length = ((r->share / r->streams / 4096 - 1) | 1) * 4096;
    lane sum = {0};
    (void)thread;
    for (size_t at = 0; at < length; at += 64)
        for (uint32_t s = 0; s < r->streams; s++) {
            const uint8_t *from = p + s * length + at;
            const lane *v = (const lane *)(const void *)from;
            if (r->ahead)
                __builtin_prefetch(from + r->ahead);
            sum += v[0] + v[1] + v[2] + v[3];
        }
    r->sink[task] += sum[0] + sum[1];
}

/* GB/s; *best_streams and *best_ahead tell which way was the fastest. */
static double bandwidth(struct bench *b, uint32_t *best_streams, uint32_t *best_ahead)
{
    static const uint32_t streams[] = {1, 4, 8, 16}, ahead[] = {0, 512, 1024, 2048};
    struct reading r = {.memory = b->weights, .n_tasks = pool_threads(kernels_pool(b->k))};
    double best = 0;
    r.share = (((size_t)MEMORY_MB << 20) / r.n_tasks - 4096) & ~(size_t)4095;
    for (unsigned i = 0; i < ARRAY_LEN(streams) * ARRAY_LEN(ahead) * REPEATS; i++) {
        r.streams = streams[i % ARRAY_LEN(streams)];
        r.ahead = ahead[i / ARRAY_LEN(streams) % ARRAY_LEN(ahead)];
        size_t length = ((r.share / r.streams / 4096 - 1) | 1) * 4096;
        uint64_t t = clock_monotonic_us();
        pool_run(kernels_pool(b->k), read_share, &r, r.n_tasks);
        double us = (double)(clock_monotonic_us() - t);
        double rate = (double)length * r.streams * r.n_tasks / us / 1e3;
        if (rate <= best)
            continue;
        best = rate;
        *best_streams = r.streams;
        *best_ahead = r.ahead;
    }
    return best;
}

static void show_bandwidth(struct bench *b)
{
    uint32_t streams = 0, ahead = 0;
    memset(b->weights, 1, (size_t)MEMORY_MB << 20);
    b->bandwidth = bandwidth(b, &streams, &ahead);
    printf("reading memory: %.1f GB/s (%u streams a thread, prefetched %u bytes ahead)\n",
           b->bandwidth, streams, ahead);
}

/* ---- products */

static void product(struct bench *b, enum tensor_type type, uint32_t n_out, uint32_t n_in,
                    uint32_t rows, enum kernels_precision precision)
{
    struct matrix w = {type, n_out, n_in, tensor_row_bytes(type, n_in), b->weights};
    struct matmul_options options = {precision, 0};
    uint64_t best = UINT64_MAX, best_prepare = UINT64_MAX;
    uint64_t start = clock_monotonic_us();
    for (int i = 0; i < REPEATS || clock_monotonic_us() - start < PATIENCE_US; i++) {
        struct activations a;
        uint64_t t0 = clock_monotonic_us();
        activations_prepare(b->k, &a, b->memory, b->x, n_in, rows, n_in,
                            activations_form(type, precision));
        uint64_t t1 = clock_monotonic_us();
        matmul(b->k, &w, &a, &options, b->y, n_out);
        uint64_t t2 = clock_monotonic_us();
        best = MIN_OF(best, t2 - t1);
        best_prepare = MIN_OF(best_prepare, t1 - t0);
    }
    double us = (double)MAX_OF(best, (uint64_t)1);
    printf("  %3u rows: %6.1f G MAC/s %5.1f GB/s (%.2f; prepare %.1f %%)", rows,
           (double)n_out * n_in * rows / us / 1e3, (double)n_out * (double)w.row_bytes / us / 1e3,
           (double)n_out * (double)w.row_bytes / us / 1e3 / b->bandwidth,
           100.0 * (double)best_prepare / us);
}

/* Weights of a type that fill the memory; returns the number of rows of 2048. */
static uint32_t fill(struct bench *b, enum tensor_type type)
{
    size_t row = tensor_row_bytes(type, 2048);
    uint32_t far = (uint32_t)((size_t)MEMORY_MB * 1000000 / row);
    synthetic_weights(&b->rng, type, b->weights, row * 5632);
    for (size_t at = row * 5632; at + row <= far * row; at += row)
        memcpy(b->weights + at, b->weights + at % (row * 5632), row);
    return far;
}

static void products(struct bench *b, enum tensor_type type)
{
    uint32_t far = fill(b, type);
    printf("%-7s few: ", tensor_traits(type)->name);
    product(b, type, far, 2048, 1, KERNELS_FAST);
    product(b, type, far, 2048, 4, KERNELS_FAST);
    product(b, type, far, 2048, 8, KERNELS_FAST);
    printf("\n        many:");
    product(b, type, 1408, 2048, 8, KERNELS_FAST);
    product(b, type, 1408, 2048, 128, KERNELS_FAST);
    printf("\n");
}

static void few_rows(struct bench *b, enum tensor_type type)
{
    uint32_t far = fill(b, type);
    printf("%s\n", tensor_traits(type)->name);
    for (uint32_t rows = 1; rows <= 16; rows += rows < 4 ? 1 : 2) {
        product(b, type, far, 2048, rows, KERNELS_FAST);
        printf("\n");
    }
}

static bool is_chosen(const char *name, int argc, char **argv)
{
    for (int i = 3; i < argc; i++)
        if (strcmp(argv[i], name) == 0 || strcmp(argv[i], "all") == 0)
            return true;
    return false;
}

static void attend(struct bench *b, uint32_t rows, uint32_t depth)
{
    enum { HEADS = 9, KV_HEADS = 3, DIM = 64, LAYERS = 16 };
    struct kv_layout layout = {KV_HEADS, DIM, KERNELS_FAST, KV_OF_PRECISION};
    uint32_t n_blocks = depth / KV_BLOCK;
    size_t bytes = kv_block_bytes(&layout);
    void **blocks = malloc(sizeof(void *) * n_blocks * LAYERS);
    for (uint32_t i = 0; i < n_blocks * LAYERS; i++)
        blocks[i] = b->weights + i * bytes;
    memset(b->weights, 0x11, n_blocks * LAYERS * bytes);
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < REPEATS; i++) {
        uint64_t t = clock_monotonic_us();
        for (uint32_t layer = 0; layer < (rows > 1 ? 1 : LAYERS); layer++) {
            struct kv_segment s = {blocks + layer * n_blocks, depth - rows, rows};
            struct attention a = {&layout, HEADS,       0,    0.125f,      &s,       1,
                                  b->x,    HEADS * DIM, b->y, HEADS * DIM, b->memory};
            attention(b->k, &a);
        }
        best = MIN_OF(best, clock_monotonic_us() - t);
    }
    double us = (double)best / (rows > 1 ? 1 : LAYERS);
    printf("attention %u rows at depth %u: %.0f us a layer, %.1f G MAC/s, %.1f GB/s\n", rows, depth,
           us, 2.0 * rows * HEADS * DIM * (depth - 0.5 * rows) / us / 1e3,
           (double)(n_blocks * bytes) / us / 1e3);
    free(blocks);
}

static void row_work(struct bench *b)
{
    enum { N = 1536, ROWS = 64 };
    uint64_t t0 = clock_monotonic_us();
    for (int i = 0; i < 20; i++)
        silu_mul(b->k, b->x, b->x, N, ROWS, N, b->y, N);
    uint64_t t1 = clock_monotonic_us();
    for (int i = 0; i < 20; i++)
        rms_norm(b->k, b->x, N, ROWS, N, b->x, 1e-5f, b->y, N);
    uint64_t t2 = clock_monotonic_us();
    printf("silu_mul %.2f ns, rms_norm %.2f ns per element\n", (double)(t1 - t0) * 50 / (N * ROWS),
           (double)(t2 - t1) * 50 / (N * ROWS));
}

static void others(struct bench *b)
{
    printf("Q4_1 in precision f32:");
    product(b, TENSOR_Q4_1, 1024, 2048, 1, KERNELS_F32);
    product(b, TENSOR_Q4_1, 1024, 2048, 128, KERNELS_F32);
    printf("\n");
    attend(b, 1, 2048);
    attend(b, 128, 128);
    attend(b, 128, 2048);
    row_work(b);
}

int main(int argc, char **argv)
{
    uint32_t threads = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 1;
    enum kernels_variant variant = KERNELS_BEST;
    for (unsigned v = 0; argc > 2 && v < KERNELS_VARIANTS; v++)
        if (strcmp(argv[2], kernels_variant_name((enum kernels_variant)v)) == 0)
            variant = (enum kernels_variant)v;
    struct bench b = {0};
    struct pool *pool = NULL;
    if (pool_new(threads, &pool) != ERR_OK || kernels_new(pool, variant, &b.k) != ERR_OK) {
        (void)fprintf(stderr, "no such variant here, or no memory\n");
        pool_free(pool);
        return 1;
    }
    rng_seed(&b.rng, 1);
    size_t floats = (size_t)1024 * 5632; /* 16 rows of as many outputs as Q2_K has in the memory */
    b.weights = aligned_alloc(4096, (size_t)MEMORY_MB << 20);
    b.x = aligned_alloc(64, floats * 4);
    b.y = aligned_alloc(64, floats * 4);
    b.memory = aligned_alloc(64, (size_t)64 << 20);
    if (!b.weights || !b.x || !b.y || !b.memory)
        return 1;
    synthetic_floats(&b.rng, b.x, floats, 1);
    printf("%s%s, %u threads\n", kernels_variant_name(kernels_variant(b.k)),
           kernels_use_library(b.k) ? " with BLIS" : "", threads);
    uint64_t t = clock_monotonic_us();
    (void)kernels_digest(b.k);
    printf("digest: %.1f ms\n", (double)(clock_monotonic_us() - t) / 1e3);
    static const enum tensor_type types[] = {TENSOR_Q4_0, TENSOR_Q4_1,   TENSOR_Q8_0, TENSOR_Q4_K,
                                             TENSOR_Q5_0, TENSOR_Q5_1,   TENSOR_Q5_K, TENSOR_Q6_K,
                                             TENSOR_F16,  TENSOR_BF16,   TENSOR_F32,  TENSOR_Q2_K,
                                             TENSOR_Q3_K, TENSOR_IQ4_NL, TENSOR_MXFP4};
    show_bandwidth(&b);
    for (unsigned i = 0; i < ARRAY_LEN(types); i++)
        if (argc <= 3)
            products(&b, types[i]);
        else if (is_chosen(tensor_traits(types[i])->name, argc, argv))
            few_rows(&b, types[i]);
    if (argc <= 3)
        others(&b);
    free(b.weights), free(b.x), free(b.y), free(b.memory);
    kernels_free(b.k);
    pool_free(pool);
    return 0;
}
