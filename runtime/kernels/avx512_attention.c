/* One block of attention, AVX-512: as avx2_attention.c, with 16 positions or dimensions per vector
 * and two vectors of each at a time, so that six rows make twelve chains. */
#include "runtime/kernels/avx2.h"
#include "runtime/kernels/avx512.h"
#include "runtime/kernels/kv_open.h"

/* Sixteen elements of K or V from element i on. */
AVX2_INLINE __m512 load_16(const bool f32, const void *p, size_t i)
{
    if (f32)
        return _mm512_loadu_ps((const float *)p + i);
    const uint16_t *h = (const uint16_t *)p + i;
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)h));
}

typedef float scores[KV_BLOCK] __attribute__((aligned(64)));

/* Scores of R rows at positions 16 g to 16 (g + G) - 1. */
AVX2_INLINE void score_groups(const bool f32, const uint32_t R, const uint32_t G,
                              const struct attend_block *b, uint32_t row, uint32_t g, scores *e)
{
    __m512 acc[ATTEND_ROWS][2];
    const size_t pitch = (size_t)KV_GROUP * b->head_dim;
    size_t at = g * pitch;
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (uint32_t d = 0; d < b->head_dim; d++, at += KV_GROUP) {
        __m512 k0 = load_16(f32, b->k, at), k1 = G > 1 ? load_16(f32, b->k, at + pitch) : k0;
        AVX512_KEEP(k0);
        AVX512_KEEP(k1);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++) {
            __m512 q = _mm512_set1_ps(b->q[row + r][d]);
            acc[r][0] = _mm512_fmadd_ps(k0, q, acc[r][0]);
            if (G > 1)
                acc[r][1] = _mm512_fmadd_ps(k1, q, acc[r][1]);
        }
    }
    __m512 scale = _mm512_set1_ps(b->scale);
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        _mm512_store_ps(e[r] + g * KV_GROUP, _mm512_mul_ps(acc[r][0], scale));
        if (G > 1)
            _mm512_store_ps(e[r] + (g + 1) * KV_GROUP, _mm512_mul_ps(acc[r][1], scale));
    }
}

/* vm_expf in sixteen lanes, the same operations. */
AVX2_INLINE __m512 exp_16(__m512 x)
{
    const __m512 magic = _mm512_set1_ps(0x1.8p23f);
    __m512 n = _mm512_fmadd_ps(x, _mm512_set1_ps(0x1.715476p+0f), magic);
    n = _mm512_sub_ps(n, magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0x1.62e4p-1f), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-0x1.7f7d1cp-20f), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0x1.6d113cp-10f), r, _mm512_set1_ps(0x1.120ba2p-7f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.55551ap-5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1.5554dcp-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0x1p-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.f));
    __m512i i = _mm512_cvtps_epi32(n), half = _mm512_srai_epi32(i, 1);
    __m512i bias = _mm512_set1_epi32(127);
    __m512i first = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
    __m512i rest = _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(i, half), bias), 23);
    p = _mm512_mul_ps(p, _mm512_castsi512_ps(first));
    p = _mm512_mul_ps(p, _mm512_castsi512_ps(rest));
    p = _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, _mm512_set1_ps(VM_EXP_LOW), _CMP_LT_OQ),
                           _mm512_setzero_ps());
    p = _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, _mm512_set1_ps(VM_EXP_HIGH), _CMP_GT_OQ),
                           _mm512_set1_ps(INFINITY));
    return _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

/* Scores -> exponentials (0 where not visible), with their largest and sum. */
static void soften(scores e, uint32_t low, uint32_t high, float *ret_m, float *ret_l)
{
    for (uint32_t p = 0; p < low; p++)
        e[p] = -INFINITY;
    for (uint32_t p = high; p < KV_BLOCK; p++)
        e[p] = -INFINITY;
    __m512 a = _mm512_max_ps(_mm512_load_ps(e), _mm512_load_ps(e + 16));
    __m512 b = _mm512_max_ps(_mm512_load_ps(e + 32), _mm512_load_ps(e + 48));
    a = _mm512_max_ps(a, b);
    __m256 top = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    *ret_m = _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
    __m512 m = _mm512_set1_ps(*ret_m), sum = _mm512_setzero_ps();
    for (uint32_t p = 0; p < KV_BLOCK; p += 16) {
        __m512 v = exp_16(_mm512_sub_ps(_mm512_load_ps(e + p), m));
        _mm512_store_ps(e + p, v);
        sum = _mm512_add_ps(sum, v);
    }
    *ret_l = avx2_sum_lanes(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1));
}

/* N vectors of dimensions from d on, R rows, positions [low, high). */
AVX2_INLINE void values_add(const bool f32, const uint32_t R, const uint32_t N,
                            const struct attend_block *b, uint32_t d, scores *e, uint32_t low,
                            uint32_t high, __m512 (*acc)[2])
{
    for (uint32_t p = low; p < high; p++) {
        size_t at = (size_t)p * b->head_dim + d;
        __m512 v0 = load_16(f32, b->v, at), v1 = N > 1 ? load_16(f32, b->v, at + 16) : v0;
        AVX512_KEEP(v0);
        AVX512_KEEP(v1);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++) {
            __m512 x = _mm512_set1_ps(e[r][p]);
            acc[r][0] = _mm512_fmadd_ps(v0, x, acc[r][0]);
            if (N > 1)
                acc[r][1] = _mm512_fmadd_ps(v1, x, acc[r][1]);
        }
    }
}

/* o[r][d..] for R rows: positions that all see together, the others row by row, in order. */
AVX2_INLINE void values_part(const bool f32, const uint32_t R, const uint32_t N,
                             const struct attend_block *b, uint32_t row, uint32_t d, scores *e,
                             float (*o)[HEAD_DIM_MAX])
{
    __m512 acc[ATTEND_ROWS][2];
    uint32_t low = 0, high = KV_BLOCK;
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
        low = MAX_OF(low, b->low[row + r]);
        high = MIN_OF(high, b->high[row + r]);
    }
    if (R > 1) {
        high = MAX_OF(low, high);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
            values_add(f32, 1, N, b, d, e + r, b->low[row + r], MIN_OF(low, b->high[row + r]),
                       acc + r);
    }
    values_add(f32, R, N, b, d, e, low, high, acc);
    if (R > 1)
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
            values_add(f32, 1, N, b, d, e + r, MAX_OF(high, b->low[row + r]), b->high[row + r],
                       acc + r);
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        _mm512_storeu_ps(o[r] + d, _mm512_add_ps(acc[r][0], _mm512_setzero_ps()));
        if (N > 1)
            _mm512_storeu_ps(o[r] + d + 16, _mm512_add_ps(acc[r][1], _mm512_setzero_ps()));
    }
}

/* The last 8 dimensions of heads that are no multiple of 16 wide: row by row. */
static void values_last(const bool f32, const struct attend_block *b, uint32_t n, uint32_t row,
                        uint32_t d, scores *e, float (*o)[HEAD_DIM_MAX])
{
    for (uint32_t r = 0; r < n; r++) {
        __m256 acc = _mm256_setzero_ps();
        for (uint32_t p = b->low[row + r]; p < b->high[row + r]; p++) {
            size_t at = (size_t)p * b->head_dim + d;
            const uint16_t *h = (const uint16_t *)b->v + at;
            __m256 v = f32 ? _mm256_loadu_ps((const float *)b->v + at)
                           : _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)h));
            acc = _mm256_fmadd_ps(v, _mm256_set1_ps(e[r][p]), acc);
        }
        _mm256_storeu_ps(o[r] + d, _mm256_add_ps(acc, _mm256_setzero_ps()));
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
    uint32_t g = low / KV_GROUP;
    for (; (g + 1) * KV_GROUP < high; g += 2)
        score_groups(f32, R, 2, b, row, g, e);
    if (g * KV_GROUP < high)
        score_groups(f32, R, 1, b, row, g, e);
    struct attend_sum part[ATTEND_ROWS];
    for (uint32_t r = 0; r < R; r++) {
        part[r].o = o[r];
        soften(e[r], b->low[row + r], b->high[row + r], &part[r].m, &part[r].l);
    }
    for (; d + 32 <= b->head_dim; d += 32)
        values_part(f32, R, 2, b, row, d, e, o);
    for (; d + 16 <= b->head_dim; d += 16)
        values_part(f32, R, 1, b, row, d, e, o);
    if (d < b->head_dim)
        values_last(f32, b, R, row, d, e, o);
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

void avx512_attention(struct kernel_ops *ops)
{
    ops->kv_open = kv_open_q8;
    ops->attend_f16 = attend_f16;
    ops->attend_f32 = attend_f32;
}
