/* One block of attention, NEON: lanes are positions for the scores and dimensions for the values,
 * so both products are chains (arithmetic.h 11). */
#include "runtime/kernels/neon.h"
#include "runtime/kernels/kv_open.h"

/* Four elements of K or V from element i on. */
NEON_INLINE float32x4_t load_4(const bool f32, const void *p, size_t i)
{
    if (f32)
        return vld1q_f32((const float *)p + i);
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p + i)));
}

typedef float scores[KV_BLOCK];

NEON_INLINE void score_group(const bool f32, const uint32_t R, const struct attend_block *b,
                             uint32_t row, uint32_t group, scores *e)
{
    float32x4_t acc[ATTEND_ROWS][4];
    size_t at = (size_t)group * KV_GROUP * b->head_dim;
    for (uint32_t r = 0; r < R; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = vdupq_n_f32(0);
    for (uint32_t d = 0; d < b->head_dim; d++, at += KV_GROUP) {
        float32x4_t k[4];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++)
            k[i] = load_4(f32, b->k, at + 4 * i);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                acc[r][i] = vfmaq_n_f32(acc[r][i], k[i], b->q[row + r][d]);
    }
    for (uint32_t r = 0; r < R; r++)
        for (uint32_t i = 0; i < 4; i++)
            vst1q_f32(e[r] + group * KV_GROUP + 4 * i, vmulq_n_f32(acc[r][i], b->scale));
}

/* Scores -> exponentials (0 where not visible), with their largest and sum. */
static void soften(scores e, uint32_t low, uint32_t high, float *ret_m, float *ret_l)
{
    for (uint32_t p = 0; p < low; p++)
        e[p] = -INFINITY;
    for (uint32_t p = high; p < KV_BLOCK; p++)
        e[p] = -INFINITY;
    float32x4_t top = vld1q_f32(e);
    for (uint32_t p = 4; p < KV_BLOCK; p += 4)
        top = vmaxq_f32(top, vld1q_f32(e + p));
    *ret_m = vmaxvq_f32(top);
    float32x4_t m = vdupq_n_f32(*ret_m);
    float32x4_t sums[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    for (uint32_t p = 0; p < KV_BLOCK; p += 4) {
        float32x4_t v = neon_exp(vsubq_f32(vld1q_f32(e + p), m));
        vst1q_f32(e + p, v);
        sums[p / 4 % 4] = vaddq_f32(sums[p / 4 % 4], v);
    }
    *ret_l = neon_sum_lanes(sums);
}

/* N vectors of dimensions from d on, R rows, positions [low, high). */
NEON_INLINE void values_add(const bool f32, const uint32_t R, const uint32_t N,
                            const struct attend_block *b, uint32_t d, scores *e, uint32_t low,
                            uint32_t high, float32x4_t (*acc)[4])
{
    for (uint32_t p = low; p < high; p++) {
        float32x4_t v[4];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < N; i++)
            v[i] = load_4(f32, b->v, (size_t)p * b->head_dim + d + 4 * i);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
#pragma GCC unroll 4
            for (uint32_t i = 0; i < N; i++)
                acc[r][i] = vfmaq_n_f32(acc[r][i], v[i], e[r][p]);
    }
}

/* o[r][d..] for R rows: positions that all see together, the others row by row, in order. */
NEON_INLINE void values_part(const bool f32, const uint32_t R, const uint32_t N,
                             const struct attend_block *b, uint32_t row, uint32_t d, scores *e,
                             float (*o)[HEAD_DIM_MAX])
{
    float32x4_t acc[ATTEND_ROWS][4];
    uint32_t low = 0, high = KV_BLOCK;
    for (uint32_t r = 0; r < R; r++) {
        for (int i = 0; i < 4; i++)
            acc[r][i] = vdupq_n_f32(0);
        low = MAX_OF(low, b->low[row + r]);
        high = MIN_OF(high, b->high[row + r]);
    }
    high = MAX_OF(low, high);
    for (uint32_t r = 0; r < R && R > 1; r++)
        values_add(f32, 1, N, b, d, e + r, b->low[row + r], MIN_OF(low, b->high[row + r]), acc + r);
    values_add(f32, R, N, b, d, e, low, high, acc);
    for (uint32_t r = 0; r < R && R > 1; r++)
        values_add(f32, 1, N, b, d, e + r, MAX_OF(high, b->low[row + r]), b->high[row + r],
                   acc + r);
    for (uint32_t r = 0; r < R; r++)
        for (uint32_t i = 0; i < N; i++)
            vst1q_f32(o[r] + d + 4 * i, vaddq_f32(acc[r][i], vdupq_n_f32(0)));
}

static void combine(struct attend_sum *to, const struct attend_sum *from, uint32_t head_dim)
{
    float m = to->m > from->m ? to->m : from->m;
    float a = vm_expf(to->m - m), b = vm_expf(from->m - m);
    to->l = fmaf(to->l, a, from->l * b);
    to->m = m;
    for (uint32_t d = 0; d < head_dim; d += 4) {
        float32x4_t second = vmulq_n_f32(vld1q_f32(from->o + d), b);
        vst1q_f32(to->o + d, vfmaq_n_f32(second, vld1q_f32(to->o + d), a));
    }
}

NEON_INLINE void attend_some(const bool f32, const uint32_t R, const struct attend_block *b,
                             uint32_t row)
{
    scores e[ATTEND_ROWS];
    float o[ATTEND_ROWS][HEAD_DIM_MAX];
    struct attend_sum part[ATTEND_ROWS];
    uint32_t low = KV_BLOCK, high = 0, d = 0;
    for (uint32_t r = 0; r < R; r++) {
        low = MIN_OF(low, b->low[row + r]);
        high = MAX_OF(high, b->high[row + r]);
    }
    for (uint32_t g = low / KV_GROUP; g * KV_GROUP < high; g++)
        score_group(f32, R, b, row, g, e);
    for (uint32_t r = 0; r < R; r++) {
        part[r].o = o[r];
        soften(e[r], b->low[row + r], b->high[row + r], &part[r].m, &part[r].l);
    }
    for (; d + 16 <= b->head_dim; d += 16)
        values_part(f32, R, 4, b, row, d, e, o);
    if (d < b->head_dim)
        values_part(f32, R, 2, b, row, d, e, o);
    for (uint32_t r = 0; r < R; r++) {
        struct attend_sum *to = b->sum[row + r];
        if (b->fresh[row + r]) {
            to->m = part[r].m;
            to->l = part[r].l;
            memcpy(to->o, o[r], b->head_dim * sizeof(float));
        } else {
            combine(to, &part[r], b->head_dim);
        }
    }
}

#define ATTEND(name, f32)                                                                          \
    static void name(const struct attend_block *b)                                                 \
    {                                                                                              \
        uint32_t row = 0;                                                                          \
        if (b->n_q == 6) {                                                                         \
            attend_some(f32, 6, b, 0);                                                             \
            return;                                                                                \
        }                                                                                          \
        for (; row + 3 <= b->n_q; row += 3)                                                        \
            attend_some(f32, 3, b, row);                                                           \
        for (; row + 2 <= b->n_q; row += 2)                                                        \
            attend_some(f32, 2, b, row);                                                           \
        if (row < b->n_q)                                                                          \
            attend_some(f32, 1, b, row);                                                           \
    }
ATTEND(attend_f16, false)
ATTEND(attend_f32, true)

void neon_attention(struct kernel_ops *ops)
{
    ops->kv_open = kv_open_q8;
    ops->attend_f16 = attend_f16;
    ops->attend_f32 = attend_f32;
    ops->attend_combine = combine;
}
