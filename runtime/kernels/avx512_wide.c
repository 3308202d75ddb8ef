/* Few rows of activations times quantised weights straight from the file, AVX-512 with VNNI: as
 * vnni_few.h, with 16 far weight rows, opened once in registers. */
#include "runtime/kernels/avx512_open.h"

enum { ROWS_TOGETHER = 4 };

AVX2_INLINE __m512i pair_at(const uint8_t *pairs)
{
    return _mm512_set1_epi32((int)load_u32(pairs));
}

/* Sums begin with -c * sum(q) over the columns from 4j on (j 0 or 4) or all. */
AVX2_INLINE __m512i centred(const enum panel_kind kind, const uint8_t *pairs, const uint32_t R,
                            const int j)
{
    const __m512i ones = _mm512_set1_epi16(1), fours = _mm512_set1_epi16(4);
    const __m512i none = _mm512_setzero_si512();
    if (kind == PANEL_U4C)
        return _mm512_dpwssd_epi32(none, pair_at(pairs), ones);
    if (kind == PANEL_U5C)
        return _mm512_dpwssd_epi32(none, pair_at(pairs + 4 * R), ones);
    if (kind == PANEL_S6)
        return _mm512_dpwssd_epi32(none, pair_at(pairs + (j ? 12 : 8) * R), ones);
    if (kind == PANEL_I8)
        return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(none, pair_at(pairs + 8 * R), fours),
                                   pair_at(pairs + 12 * R), fours);
    return none;
}

/* Integer sums of 16 outputs over 32 columns for rows r to r + G - 1 of a tile of R rows (block's
 * bytes at a), as F32. Each sum is formed in PARTS, which are independent: one long chain of
 * vpdpbusd after the other would fill the scheduler with instructions that wait. */
AVX2_INLINE void block_sums(const enum panel_kind kind, const uint32_t R, const uint32_t G,
                            const struct block16 *b, const uint8_t *a, const uint32_t r,
                            __m512 *ret)
{
    const uint8_t *q = a + 32 * r, *pairs = a + 40 * R + 4 * r;
    const bool halves = kind == PANEL_S6 || kind == PANEL_S2M;
    const int parts = G == 1 ? 4 : 2;
    __m512i sum[ROWS_TOGETHER][4];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < G; i++) {
#pragma GCC unroll 4
        for (int h = 0; h < parts; h++)
            sum[i][h] = _mm512_setzero_si512();
        sum[i][0] = centred(kind, pairs + 4 * i, R, 0);
        if (halves)
            sum[i][parts / 2] = centred(kind, pairs + 4 * i, R, 4);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        /* the first columns to the first parts, so that halves stay apart */
        const int h = j % 4 % (parts / 2) + j / 4 * (parts / 2);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < G; i++) {
            __m512i x = _mm512_set1_epi32((int)load_u32(q + 32 * i + 4 * j));
            sum[i][h] = _mm512_dpbusd_epi32(sum[i][h], b->v[j], x);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < G; i++) {
        __m512i first = sum[i][0], second = sum[i][parts / 2];
        if (parts == 4) {
            first = _mm512_add_epi32(first, sum[i][1]);
            second = _mm512_add_epi32(second, sum[i][3]);
        }
        if (!halves)
            ret[i] = _mm512_cvtepi32_ps(_mm512_add_epi32(first, second));
        else /* every product and their sum are exact */
            ret[i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(second), b->sc[1],
                                     _mm512_mul_ps(_mm512_cvtepi32_ps(first), b->sc[0]));
    }
}

/* mn0 * sum(q of the first 16) + mn1 * sum(q of the last 16), from the pairs of -32 sum(q). */
AVX2_INLINE __m512 minimum_sum(const __m512i mn[2], const uint8_t *pairs, const uint32_t R)
{
    __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), pair_at(pairs + 8 * R), mn[0]);
    sum = _mm512_dpwssd_epi32(sum, pair_at(pairs + 12 * R), mn[1]);
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_srai_epi32(sum, 5)));
}

/* One block of rows r to r + G - 1 added to their chains. */
AVX2_INLINE void add_block(const enum panel_kind kind, const uint32_t R, const uint32_t G,
                           const struct block16 *b, const uint8_t *a, const uint32_t r, __m512 *acc)
{
    const float *d = (const float *)(const void *)(a + 32 * R);
    __m512 sum[ROWS_TOGETHER];
    block_sums(kind, R, G, b, a, r, sum);
#pragma GCC unroll 4
    for (uint32_t i = r; i < r + G; i++) {
        __m512 product = _mm512_mul_ps(b->dw, sum[i - r]);
        acc[i] = _mm512_fmadd_ps(product, _mm512_set1_ps(d[i]), acc[i]);
        if (panel_has_minimum(kind))
            acc[i] = _mm512_fmadd_ps(b->mw, _mm512_set1_ps(d[R + i]), acc[i]);
        if (kind == PANEL_S2M) {
            product = _mm512_mul_ps(b->mw, minimum_sum(b->mn, a + 40 * R + 4 * i, R));
            acc[i] = _mm512_fmadd_ps(product, _mm512_set1_ps(d[i]), acc[i]);
        }
    }
}

AVX2_INLINE void prefetch_rows(const uint8_t *p, size_t stride, uint32_t n_bytes)
{
    for (uint32_t at = 0; at < n_bytes; at += 64)
#pragma GCC unroll 16
        for (uint32_t r = 0; r < WIDE_OUTS; r++)
            _mm_prefetch((const char *)p + r * stride + at + WIDE_PREFETCH, _MM_HINT_T0);
}

AVX2_INLINE void few_any(const enum tensor_type t, const uint32_t R, const uint8_t *w,
                         size_t stride, uint32_t n_blocks, const uint8_t *a,
                         float (*out)[WIDE_OUTS])
{
    const enum panel_kind kind = avx2_kind(t);
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    struct super16 super;
    __m512 acc[FEW_ROWS_MAX];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (uint32_t i = 0; i < n; i++, w += bytes) {
        if (avx2_is_k(t) || (i * bytes & 63) < bytes)
            prefetch_rows(w, stride, avx2_is_k(t) ? bytes : 1);
        avx512_open_super(t, w, stride, &super);
        for (uint32_t outer = 0; outer < n_outer; outer++) {
            avx512_open_outer(t, w, stride, outer, &super);
#pragma GCC unroll 4
            for (uint32_t inner = 0; inner < n_inner; inner++, a += (size_t)R * TILE_ROW_BYTES) {
                struct block16 b;
                avx512_open_block(t, w, stride, outer, inner, &super, &b);
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    if (kind == PANEL_I8)
                        b.v[j] = _mm512_xor_si512(b.v[j], _mm512_set1_epi8((char)0x80));
                    AVX512_KEEP(b.v[j]);
                }
#pragma GCC unroll 2
                for (uint32_t r = 0; r + 4 <= R; r += 4)
                    add_block(kind, R, 4, &b, a, r, acc);
                if (R % 4 > 0)
                    add_block(kind, R, R % 4, &b, a, R / 4 * 4, acc);
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        _mm512_storeu_ps(out[r], _mm512_add_ps(acc[r], _mm512_setzero_ps()));
}

#define ROWS_CASE(T, R)                                                                            \
    case R:                                                                                        \
        few_any(TENSOR_##T, R, w, stride, n_blocks, tile, out);                                    \
        break;
#define FEW(T)                                                                                     \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,   \
                        uint32_t n_rows, float(*out)[WIDE_OUTS])                                   \
    {                                                                                              \
        switch (n_rows) {                                                                          \
            ROWS_CASE(T, 1)                                                                        \
            ROWS_CASE(T, 2)                                                                        \
            ROWS_CASE(T, 3)                                                                        \
            ROWS_CASE(T, 4)                                                                        \
            ROWS_CASE(T, 5)                                                                        \
            ROWS_CASE(T, 6)                                                                        \
            ROWS_CASE(T, 7)                                                                        \
            ROWS_CASE(T, 8)                                                                        \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    }
/* A list of macros, which clang-format takes for one statement. */
/* clang-format off */
FEW(Q4_0)
FEW(Q4_1)
FEW(Q5_0)
FEW(Q5_1)
FEW(Q8_0)
FEW(Q4_K)
FEW(Q5_K)
FEW(Q6_K)
FEW(Q2_K)
FEW(Q3_K)
FEW(IQ4_NL)
FEW(MXFP4)
/* clang-format on */

void avx512_wide(struct kernel_ops *ops)
{
    ops->wide_few[TENSOR_Q4_0] = few_Q4_0;
    ops->wide_few[TENSOR_Q4_1] = few_Q4_1;
    ops->wide_few[TENSOR_Q5_0] = few_Q5_0;
    ops->wide_few[TENSOR_Q5_1] = few_Q5_1;
    ops->wide_few[TENSOR_Q8_0] = few_Q8_0;
    ops->wide_few[TENSOR_Q4_K] = few_Q4_K;
    ops->wide_few[TENSOR_Q5_K] = few_Q5_K;
    ops->wide_few[TENSOR_Q6_K] = few_Q6_K;
    ops->wide_few[TENSOR_Q2_K] = few_Q2_K;
    ops->wide_few[TENSOR_Q3_K] = few_Q3_K;
    ops->wide_few[TENSOR_IQ4_NL] = few_IQ4_NL;
    ops->wide_few[TENSOR_MXFP4] = few_MXFP4;
}
