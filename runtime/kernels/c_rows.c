/* The C reference of everything that works along rows, and of attention: arithmetic.h 7 to 11. */
#include "runtime/kernels/c_ref.h"
#include "runtime/kernels/half.h"
#include "runtime/vmath.h"
#include "runtime/kernels/kv_open.h"

#include <math.h>

static float sum_squares(const float *x, uint32_t n)
{
    float lanes[SUM_LANES] = {0};
    for (uint32_t i = 0; i < n; i++)
        lanes[i % SUM_LANES] = fmaf(x[i], x[i], lanes[i % SUM_LANES]);
    return sum_lanes(lanes);
}

static void norm(const float *x, uint32_t n, float scale, const float *weight, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

static void silu_mul_row(const float *gate, const float *up, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = vm_siluf(gate[i]) * up[i];
}

static void gelu_mul_row(const float *gate, const float *up, uint32_t n, float *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = vm_gelu_tanhf(gate[i]) * up[i];
}

static float exp_sum_row(const float *x, size_t n, float max, float *y)
{
    float lanes[SUM_LANES] = {0};
    for (size_t i = 0; i < n; i++) {
        y[i] = vm_expf(x[i] - max);
        lanes[i % SUM_LANES] += y[i];
    }
    return sum_lanes(lanes);
}

static void add_row(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] += x[i];
}

static void rope_head(enum rope_pairing pairing, const float *table, uint32_t n_dims, float *head)
{
    uint32_t half = n_dims / 2;
    for (uint32_t i = 0; i < half; i++) {
        float *pa = pairing == ROPE_NORM ? head + 2 * i : head + i;
        float *pb = pairing == ROPE_NORM ? pa + 1 : pa + half;
        float a = *pa, b = *pb, c = table[2 * i], s = table[2 * i + 1];
        *pa = fmaf(a, c, -(b * s));
        *pb = fmaf(a, s, b * c);
    }
}

static void halves(const float *x, uint32_t n, uint16_t *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = half_round(x[i]);
}

void c_rows(struct kernel_ops *ops)
{
    ops->sum_squares = sum_squares;
    ops->norm = norm;
    ops->silu_mul = silu_mul_row;
    ops->gelu_mul = gelu_mul_row;
    ops->exp_sum = exp_sum_row;
    ops->add = add_row;
    ops->rope = rope_head;
    ops->halves = halves;
}

static float kv_get(bool f32, const void *p, size_t i)
{
    return f32 ? ((const float *)p)[i] : half_open(((const uint16_t *)p)[i]);
}

static void combine(struct attend_sum *to, const struct attend_sum *from, uint32_t head_dim)
{
    float m = to->m > from->m ? to->m : from->m;
    float a = vm_expf(to->m - m), b = vm_expf(from->m - m);
    to->l = fmaf(to->l, a, from->l * b);
    to->m = m;
    for (uint32_t d = 0; d < head_dim; d++)
        to->o[d] = fmaf(to->o[d], a, from->o[d] * b);
}

static void attend_row(const struct attend_block *b, uint32_t r, bool f32)
{
    float s[KV_BLOCK], e[KV_BLOCK] = {0}, o[HEAD_DIM_MAX];
    uint32_t low = b->low[r], high = b->high[r];
    struct attend_sum part = {.m = -INFINITY, .o = b->fresh[r] ? b->sum[r]->o : o};
    for (uint32_t p = low; p < high; p++) {
        float acc = 0;
        for (uint32_t d = 0; d < b->head_dim; d++) {
            size_t i = ((size_t)(p / KV_GROUP) * b->head_dim + d) * KV_GROUP + p % KV_GROUP;
            acc = fmaf(kv_get(f32, b->k, i), b->q[r][d], acc);
        }
        s[p] = acc * b->scale;
        part.m = s[p] > part.m ? s[p] : part.m;
    }
    float lanes[SUM_LANES] = {0};
    for (uint32_t p = low; p < high; p++) {
        e[p] = vm_expf(s[p] - part.m);
        lanes[p % SUM_LANES] += e[p];
    }
    part.l = sum_lanes(lanes);
    for (uint32_t d = 0; d < b->head_dim; d++) {
        float acc = 0;
        for (uint32_t p = low; p < high; p++)
            acc = fmaf(kv_get(f32, b->v, (size_t)p * b->head_dim + d), e[p], acc);
        part.o[d] = acc + 0.0f;
    }
    if (b->fresh[r])
        *b->sum[r] = part;
    else
        combine(b->sum[r], &part, b->head_dim);
}

static void attend_f16(const struct attend_block *b)
{
    for (uint32_t r = 0; r < b->n_q; r++)
        attend_row(b, r, false);
}

static void attend_f32(const struct attend_block *b)
{
    for (uint32_t r = 0; r < b->n_q; r++)
        attend_row(b, r, true);
}

void c_attention(struct kernel_ops *ops)
{
    ops->kv_open = kv_open_q8;
    ops->attend_f16 = attend_f16;
    ops->attend_f32 = attend_f32;
    ops->attend_combine = combine;
}

void kernel_ops_c(struct kernel_ops *ops)
{
    *ops = (struct kernel_ops){0};
    c_products(ops);
    c_rows(ops);
    c_attention(ops);
}
