/* Row-wise work driven over the pool, and RoPE's tables. */
#include "runtime/kernels/context.h"
#include "runtime/vmath.h"

#include <assert.h>
#include <math.h>

enum row_work { ROW_NORM, ROW_SILU, ROW_GELU, ROW_BIAS, ROW_ROPE };

struct row_task {
    struct kernels *k;
    enum row_work work;
    const float *x, *other;
    float *y;
    size_t ldx, ldy;
    uint32_t n_rows, n, n_tasks;
    float epsilon;
    const struct rope *rope;
    uint32_t n_heads;
};

static void one_row(const struct row_task *t, uint32_t m)
{
    const struct kernel_ops *ops = &t->k->ops;
    const float *x = t->x + m * t->ldx;
    float *y = t->y + m * t->ldy;
    switch (t->work) {
    case ROW_NORM: {
        float mean = ops->sum_squares(x, t->n) / (float)t->n;
        ops->norm(x, t->n, 1.f / sqrtf(mean + t->epsilon), t->other, y);
        break;
    }
    case ROW_SILU:
        ops->silu_mul(x, t->other + m * t->ldx, t->n, y);
        break;
    case ROW_GELU:
        ops->gelu_mul(x, t->other + m * t->ldx, t->n, y);
        break;
    case ROW_BIAS:
        ops->add(y, t->other, t->n);
        break;
    case ROW_ROPE:
        for (uint32_t h = 0; h < t->n_heads; h++)
            ops->rope(t->rope->pairing, x, t->rope->n_dims, y + (size_t)h * t->n);
        break;
    }
}

static void some_rows(void *arg, uint32_t task, uint32_t thread)
{
    const struct row_task *t = arg;
    (void)thread;
    uint32_t end = task_first(t->n_rows, t->n_tasks, task + 1);
    for (uint32_t m = task_first(t->n_rows, t->n_tasks, task); m < end; m++)
        one_row(t, m);
}

static void run_rows(struct row_task *t, uint64_t weight)
{
    t->n_tasks = kernels_tasks(t->k, t->n_rows, weight);
    pool_run(t->k->pool, some_rows, t, t->n_tasks);
}

void rms_norm(struct kernels *k, const float *x, size_t ldx, uint32_t n_rows, uint32_t n,
              const float *weight, float epsilon, float *y, size_t ldy)
{
    struct row_task t = {k, ROW_NORM, x, weight, y, ldx, ldy, n_rows, n, .epsilon = epsilon};
    run_rows(&t, (uint64_t)n * 4);
}

void silu_mul(struct kernels *k, const float *gate, const float *up, size_t ld, uint32_t n_rows,
              uint32_t n, float *y, size_t ldy)
{
    struct row_task t = {k, ROW_SILU, gate, up, y, ld, ldy, n_rows, n};
    run_rows(&t, (uint64_t)n * 32);
}

void gelu_tanh_mul(struct kernels *k, const float *gate, const float *up, size_t ld,
                   uint32_t n_rows, uint32_t n, float *y, size_t ldy)
{
    struct row_task t = {k, ROW_GELU, gate, up, y, ld, ldy, n_rows, n};
    run_rows(&t, (uint64_t)n * 32);
}

void add_bias(struct kernels *k, float *y, size_t ldy, uint32_t n_rows, uint32_t n,
              const float *bias)
{
    struct row_task t = {k, ROW_BIAS, bias, bias, y, 0, ldy, n_rows, n};
    run_rows(&t, n);
}

void add_to(struct kernels *k, float *y, const float *x, size_t n)
{
    k->ops.add(y, x, n);
}

void scale_by(struct kernels *k, float *y, size_t n, float factor)
{
    (void)k;
    for (size_t i = 0; i < n; i++)
        y[i] *= factor;
}

float exp_sum(struct kernels *k, const float *x, size_t n, float max, float *y)
{
    return k->ops.exp_sum(x, n, max, y);
}

/* ---- RoPE */

size_t rope_table_elements(const struct rope *rope, uint32_t n_rows)
{
    return (size_t)n_rows * rope->n_dims;
}

struct table_task {
    const struct rope *rope;
    const uint32_t *positions;
    float *table;
    uint32_t n_rows, n_tasks;
    const double *frequencies;
};

static void table_rows(void *arg, uint32_t task, uint32_t thread)
{
    const struct table_task *t = arg;
    (void)thread;
    uint32_t end = task_first(t->n_rows, t->n_tasks, task + 1);
    for (uint32_t m = task_first(t->n_rows, t->n_tasks, task); m < end; m++)
        for (uint32_t i = 0; i < t->rope->n_dims / 2; i++) {
            double s, c;
            float *pair = t->table + (size_t)m * t->rope->n_dims + 2 * (size_t)i;
            vm_sincos((double)t->positions[m] * t->frequencies[i], &s, &c);
            pair[0] = (float)c;
            pair[1] = (float)s;
        }
}

void rope_table(struct kernels *k, const struct rope *rope, const uint32_t *positions,
                uint32_t n_rows, float *table)
{
    assert(rope->n_dims % 2 == 0 && rope->n_dims <= HEAD_DIM_MAX && rope->base > 0);
    double frequencies[HEAD_DIM_MAX / 2], log_base = vm_log((double)rope->base);
    for (uint32_t i = 0; i < rope->n_dims / 2; i++) {
        double f = vm_exp(-2.0 * (double)i / (double)rope->n_dims * log_base);
        f *= (double)rope->frequency_scale;
        frequencies[i] = rope->freq_factors ? f / (double)rope->freq_factors[i] : f;
    }
    struct table_task t = {rope, positions, table, n_rows, 1, frequencies};
    t.n_tasks = kernels_tasks(k, n_rows, (uint64_t)rope->n_dims * 100);
    pool_run(k->pool, table_rows, &t, t.n_tasks);
}

void rope_apply(struct kernels *k, const struct rope *rope, const float *table, float *x,
                size_t ldx, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim)
{
    assert(rope->n_dims <= head_dim);
    struct row_task t = {k, ROW_ROPE, table, NULL, x, rope->n_dims, ldx, n_rows, head_dim};
    t.rope = rope;
    t.n_heads = n_heads;
    run_rows(&t, (uint64_t)n_heads * head_dim * 4);
}
