/* The context behind struct kernels. Internal to the kernels. */
#ifndef COVEY_RUNTIME_KERNELS_CONTEXT_H
#define COVEY_RUNTIME_KERNELS_CONTEXT_H

#include "runtime/kernels/table.h"
#include "runtime/pool.h"

enum {
    SLICE_LEVELS = 12,    /* of the tree over slices: log2(SLICES_MAX) + 2 */
    SLICE_ROWS_UNIT = 48, /* rows of one pass with slices: a multiple of every tile height */
    CHUNK_MAX = 2048,     /* input elements of dense panels and of opened or copied rows */

    TAPERED_WEIGHT = 65536, /* multiply-adds of a task: some microseconds */

    PANEL_BUFFER = 256 * 1024, /* half of a small L2; 1 MiB measured 7 to 13 % slower */
    /* A whole chain for another library's kernel: 4096 elements by 32 outputs. */
    WHOLE_BUFFER = 512 * 1024,
    ROWS_BUFFER = PANEL_OUTS * CHUNK_MAX * 4,
    /* 96 rows with the most slices */
    STACK_BUFFER = SLICE_LEVELS * 96 * DENSE_OUTS_MAX * 4,
    SCRATCH_BYTES = WHOLE_BUFFER + ROWS_BUFFER + STACK_BUFFER + 256,
};

/* Working memory of one thread. */
struct scratch {
    uint8_t *panels; /* WHOLE_BUFFER */
    uint8_t *rows;   /* ROWS_BUFFER: opened or copied weight rows */
    float *stack;    /* STACK_BUFFER: slice sums */
};

struct kernels {
    struct kernel_ops ops;
    enum kernels_variant variant;
    struct pool *pool;
    bool is_library; /* ops.whole is another library's */
    uint8_t *memory;
};

static inline struct scratch kernels_scratch(const struct kernels *k, uint32_t thread)
{
    uint8_t *p = k->memory + (size_t)thread * SCRATCH_BYTES;
    return (struct scratch){p, p + WHOLE_BUFFER, (float *)(void *)(p + WHOLE_BUFFER + ROWS_BUFFER)};
}

/* Tasks for `n` equal pieces of work of `weight` multiply-adds each: 1 when they are not worth
 * waking anybody, else a few per thread so that an interrupted thread holds up little. */
static inline uint32_t kernels_tasks(const struct kernels *k, uint32_t n, uint64_t weight)
{
    uint32_t threads = pool_threads(k->pool);
    if (threads == 1 || n < 2 || n * weight < 65536)
        return 1;
    uint32_t tasks = threads * 4;
    return tasks < n ? tasks : n;
}

/* The same for weights that are read once, where the threads' ends decide: more tasks, but each
 * long beside what claiming it costs. */
static inline uint32_t kernels_tapered_tasks(const struct kernels *k, uint32_t n, uint64_t weight)
{
    uint64_t tasks = kernels_tasks(k, n, weight), most = n * weight / TAPERED_WEIGHT;
    if (tasks == 1 || most <= tasks)
        return (uint32_t)tasks;
    tasks = (uint64_t)pool_threads(k->pool) * 16;
    tasks = tasks < most ? tasks : most;
    return (uint32_t)(tasks < n ? tasks : n);
}

/* The first of `n` pieces that task t of n_tasks works on; t == n_tasks gives n. */
static inline uint32_t task_first(uint32_t n, uint32_t n_tasks, uint32_t t)
{
    return (uint32_t)((uint64_t)n * t / n_tasks);
}

/* The same with smaller and smaller shares: the first half of the tasks has three quarters of the
 * pieces. */
static inline uint32_t task_tapered(uint32_t n, uint32_t n_tasks, uint32_t t)
{
    uint64_t large = n_tasks / 2, small = n_tasks - large;
    uint64_t all = 3 * large + small, at = t < large ? 3 * (uint64_t)t : 3 * large + (t - large);
    return (uint32_t)(n * at / all);
}

#endif
