/* One block of attention, AVX2: lanes are positions for the scores and dimensions for the values,
 * so both products are chains (arithmetic.h 11). */
#include "runtime/kernels/avx2.h"
#include "runtime/kernels/kv_open.h"

/* Eight elements of K or V from element i on. */
AVX2_INLINE __m256 load_8(const bool f32, const void *p, size_t i)
{
    if (f32)
        return _mm256_loadu_ps((const float *)p + i);
    const uint16_t *h = (const uint16_t *)p + i;
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)h));
}

typedef float scores[KV_BLOCK] __attribute__((aligned(32)));

/* Scores of R rows at 16 positions. */
AVX2_INLINE void score_group(const bool f32, const uint32_t R, const struct attend_block *b,
                             uint32_t row, uint32_t group, scores *e)
{
    __m256 acc[ATTEND_ROWS][2];
    size_t at = (size_t)group * KV_GROUP * b->head_dim;
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (uint32_t d = 0; d < b->head_dim; d++, at += KV_GROUP) {
        __m256 k0 = load_8(f32, b->k, at), k1 = load_8(f32, b->k, at + 8);
        AVX2_KEEP(k0);
        AVX2_KEEP(k1);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++) {
            __m256 q = _mm256_broadcast_ss(b->q[row + r] + d);
            acc[r][0] = _mm256_fmadd_ps(k0, q, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(k1, q, acc[r][1]);
        }
    }
    __m256 scale = _mm256_set1_ps(b->scale);
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        _mm256_store_ps(e[r] + group * KV_GROUP, _mm256_mul_ps(acc[r][0], scale));
        _mm256_store_ps(e[r] + group * KV_GROUP + 8, _mm256_mul_ps(acc[r][1], scale));
    }
}

/* Scores -> exponentials (0 where not visible), with their largest and sum. */
static void soften(scores e, uint32_t low, uint32_t high, float *ret_m, float *ret_l)
{
    for (uint32_t p = 0; p < low; p++)
        e[p] = -INFINITY;
    for (uint32_t p = high; p < KV_BLOCK; p++)
        e[p] = -INFINITY;
    __m256 top = _mm256_load_ps(e);
    for (uint32_t p = 8; p < KV_BLOCK; p += 8)
        top = _mm256_max_ps(top, _mm256_load_ps(e + p));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    *ret_m = _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
    __m256 m = _mm256_set1_ps(*ret_m), sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (uint32_t p = 0; p < KV_BLOCK; p += 8) {
        __m256 v = avx2_exp(_mm256_sub_ps(_mm256_load_ps(e + p), m));
        _mm256_store_ps(e + p, v);
        sums[p / 8 % 2] = _mm256_add_ps(sums[p / 8 % 2], v);
    }
    *ret_l = avx2_sum_lanes(sums[0], sums[1]);
}

/* N8 vectors of dimensions from d on, R rows, positions [low, high). */
AVX2_INLINE void values_add(const bool f32, const uint32_t R, const uint32_t N8,
                            const struct attend_block *b, uint32_t d, scores *e, uint32_t low,
                            uint32_t high, __m256 (*acc)[2])
{
    for (uint32_t p = low; p < high; p++) {
        size_t at = (size_t)p * b->head_dim + d;
        __m256 v0 = load_8(f32, b->v, at), v1 = N8 > 1 ? load_8(f32, b->v, at + 8) : v0;
        AVX2_KEEP(v0);
        AVX2_KEEP(v1);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++) {
            __m256 x = _mm256_broadcast_ss(e[r] + p);
            acc[r][0] = _mm256_fmadd_ps(v0, x, acc[r][0]);
            if (N8 > 1)
                acc[r][1] = _mm256_fmadd_ps(v1, x, acc[r][1]);
        }
    }
}

/* o[r][d..] for R rows: positions that all see together, the others row by row, in order. */
AVX2_INLINE void values_part(const bool f32, const uint32_t R, const uint32_t N8,
                             const struct attend_block *b, uint32_t row, uint32_t d, scores *e,
                             float (*o)[HEAD_DIM_MAX])
{
    __m256 acc[ATTEND_ROWS][2];
    uint32_t low = 0, high = KV_BLOCK;
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
        low = MAX_OF(low, b->low[row + r]);
        high = MIN_OF(high, b->high[row + r]);
    }
    if (R > 1) {
        high = MAX_OF(low, high);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
            values_add(f32, 1, N8, b, d, e + r, b->low[row + r], MIN_OF(low, b->high[row + r]),
                       acc + r);
    }
    values_add(f32, R, N8, b, d, e, low, high, acc);
    if (R > 1)
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
            values_add(f32, 1, N8, b, d, e + r, MAX_OF(high, b->low[row + r]), b->high[row + r],
                       acc + r);
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        _mm256_storeu_ps(o[r] + d, _mm256_add_ps(acc[r][0], _mm256_setzero_ps()));
        if (N8 > 1)
            _mm256_storeu_ps(o[r] + d + 8, _mm256_add_ps(acc[r][1], _mm256_setzero_ps()));
    }
}

/* R rows of the block, beginning with `row`. */
AVX2_INLINE void attend_some(const bool f32, const uint32_t R, const struct attend_block *b,
                             uint32_t row)
{
    scores e[ATTEND_ROWS];
    float o[ATTEND_ROWS][HEAD_DIM_MAX];
    uint32_t low = KV_BLOCK, high = 0, d = 0;
    for (uint32_t r = 0; r < R; r++) {
        low = MIN_OF(low, b->low[row + r]);
        high = MAX_OF(high, b->high[row + r]);
    }
    for (uint32_t g = low / KV_GROUP; g * KV_GROUP < high; g++)
        score_group(f32, R, b, row, g, e);
    struct attend_sum part[ATTEND_ROWS];
    for (uint32_t r = 0; r < R; r++) {
        part[r].o = o[r];
        soften(e[r], b->low[row + r], b->high[row + r], &part[r].m, &part[r].l);
    }
    for (; d + 16 <= b->head_dim; d += 16)
        values_part(f32, R, 2, b, row, d, e, o);
    if (d < b->head_dim)
        values_part(f32, R, 1, b, row, d, e, o);
    for (uint32_t r = 0; r < R; r++) {
        struct attend_sum *to = b->sum[row + r];
        if (b->fresh[row + r]) {
            to->m = part[r].m;
            to->l = part[r].l;
            memcpy(to->o, o[r], b->head_dim * sizeof(float));
        } else {
            avx2_combine(to, &part[r], b->head_dim);
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

void avx2_combine(struct attend_sum *to, const struct attend_sum *from, uint32_t head_dim)
{
    float m = to->m > from->m ? to->m : from->m;
    float a = vm_expf(to->m - m), b = vm_expf(from->m - m);
    const __m256 va = _mm256_set1_ps(a), vb = _mm256_set1_ps(b);
    to->l = fmaf(to->l, a, from->l * b);
    to->m = m;
    for (uint32_t d = 0; d < head_dim; d += 8) {
        __m256 second = _mm256_mul_ps(_mm256_loadu_ps(from->o + d), vb);
        _mm256_storeu_ps(to->o + d, _mm256_fmadd_ps(_mm256_loadu_ps(to->o + d), va, second));
    }
}

void avx2_attention(struct kernel_ops *ops)
{
    ops->kv_open = kv_open_q8;
    ops->attend_f16 = attend_f16;
    ops->attend_f32 = attend_f32;
    ops->attend_combine = avx2_combine;
}
