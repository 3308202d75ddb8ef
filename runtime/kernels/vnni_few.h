/* Few rows of activations times quantised weights straight from the file, with VNNI: as avx2_few.c,
 * 8 far weight rows opened once in registers, with 32-bit sums. vpdpbusd multiplies unsigned
 * weights by signed activations, so no bound of 16 bits has to be kept: a centre c is taken off by
 * beginning with -c times the sum of the activations, which the tile holds as pairs.
 *
 * Included by the AVX-VNNI and the AVX-512 variant, whose instructions have different names:
 * VNNI_DPBUSD(sum, unsigned, signed), VNNI_DPWSSD(sum, pairs, pairs), VNNI_FEW_ROWS (at most
 * FEW_ROWS_MAX) and VNNI_SETUP, the function that fills the table. */
#include "runtime/kernels/avx2_open.h"

/* Bytes ahead in each stream. */
enum { PREFETCH_AHEAD = 512 };

AVX2_INLINE __m256i few_pair_at(const uint8_t *pairs)
{
    return _mm256_set1_epi32((int)load_u32(pairs));
}

/* Sums begin with -c * sum(q) over the columns from 4j on (j 0 or 4) or all. */
AVX2_INLINE __m256i centred(const enum panel_kind kind, const uint8_t *pairs, const uint32_t R,
                            const int j)
{
    const __m256i ones = _mm256_set1_epi16(1), fours = _mm256_set1_epi16(4);
    const __m256i none = _mm256_setzero_si256();
    if (kind == PANEL_U4C)
        return VNNI_DPWSSD(none, few_pair_at(pairs), ones);
    if (kind == PANEL_U5C)
        return VNNI_DPWSSD(none, few_pair_at(pairs + 4 * R), ones);
    if (kind == PANEL_S6)
        return VNNI_DPWSSD(none, few_pair_at(pairs + (j ? 12 : 8) * R), ones);
    if (kind == PANEL_I8)
        return VNNI_DPWSSD(VNNI_DPWSSD(none, few_pair_at(pairs + 8 * R), fours),
                           few_pair_at(pairs + 12 * R), fours);
    return none;
}

/* Integer sums of 8 outputs over 32 columns for row r of a tile of R rows (block's bytes at a), as
 * F32. */
AVX2_INLINE __m256 block_sum(const enum panel_kind kind, const uint32_t R, const struct block8 *b,
                             const uint8_t *a, const uint32_t r)
{
    const uint8_t *q = a + 32 * r, *pairs = a + 40 * R + 4 * r;
    const bool halves = kind == PANEL_S6 || kind == PANEL_S2M;
    __m256i sum = centred(kind, pairs, R, 0), second = sum;
    if (halves)
        second = centred(kind, pairs, R, 4);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i x = _mm256_set1_epi32((int)load_u32(q + 4 * j));
        if (halves && j >= 4)
            second = VNNI_DPBUSD(second, b->v[j], x);
        else
            sum = VNNI_DPBUSD(sum, b->v[j], x);
    }
    if (!halves)
        return _mm256_cvtepi32_ps(sum);
    /* the scales of both halves as F32: every product and their sum are exact */
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(second), _mm256_castsi256_ps(b->sc[1]),
                           _mm256_mul_ps(_mm256_cvtepi32_ps(sum), _mm256_castsi256_ps(b->sc[0])));
}

AVX2_INLINE void prefetch_rows(const uint8_t *p, size_t stride, uint32_t n_bytes)
{
    for (uint32_t at = 0; at < n_bytes; at += 64)
        for (uint32_t r = 0; r < 8; r++)
            _mm_prefetch((const char *)p + r * stride + at + PREFETCH_AHEAD, _MM_HINT_T0);
}

/* Opens a block and brings it into the form that block_sum takes. */
AVX2_INLINE void open_block(const enum tensor_type t, const uint8_t *w, size_t stride,
                            uint32_t outer, const uint32_t inner, const struct super8 *super,
                            struct block8 *b)
{
    const enum panel_kind kind = avx2_kind(t);
    avx2_open_block(t, w, stride, outer, inner, super, b);
    if (kind == PANEL_I8)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            b->v[j] = _mm256_xor_si256(b->v[j], _mm256_set1_epi8((char)0x80));
    if (kind == PANEL_S6 || kind == PANEL_S2M)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++)
            b->sc[h] = _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32(b->sc[h], 16)));
}

AVX2_INLINE void few_any(const enum tensor_type t, const uint32_t R, const uint8_t *w,
                         size_t stride, uint32_t n_blocks, const uint8_t *a,
                         float (*out)[PANEL_OUTS])
{
    const enum panel_kind kind = avx2_kind(t);
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    struct super8 super;
    __m256 acc[FEW_ROWS_MAX];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        acc[r] = _mm256_setzero_ps();
    for (uint32_t i = 0; i < n; i++, w += bytes) {
        if (avx2_is_k(t) || (i * bytes & 63) < bytes)
            prefetch_rows(w, stride, avx2_is_k(t) ? bytes : 1);
        avx2_open_super(t, w, stride, &super);
        for (uint32_t outer = 0; outer < n_outer; outer++) {
            avx2_open_outer(t, w, stride, outer, &super);
#pragma GCC unroll 4
            for (uint32_t inner = 0; inner < n_inner; inner++, a += (size_t)R * TILE_ROW_BYTES) {
                struct block8 b;
                open_block(t, w, stride, outer, inner, &super, &b);
                const float *d = (const float *)(const void *)(a + 32 * R);
#pragma GCC unroll 8
                for (uint32_t r = 0; r < R; r++) {
                    __m256 product = _mm256_mul_ps(b.dw, block_sum(kind, R, &b, a, r));
                    acc[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(d[r]), acc[r]);
                    if (panel_has_minimum(kind))
                        acc[r] = _mm256_fmadd_ps(b.mw, _mm256_set1_ps(d[R + r]), acc[r]);
                    if (kind == PANEL_S2M) {
                        __m256i m = avx2_minimum_sum(b.mn, a + 40 * R + 4 * r, R);
                        product = _mm256_mul_ps(b.mw, _mm256_cvtepi32_ps(m));
                        acc[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(d[r]), acc[r]);
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        _mm256_storeu_ps(out[r], _mm256_add_ps(acc[r], _mm256_setzero_ps()));
}

#define FEW_ROWS_CASE(T, R)                                                                        \
    case R:                                                                                        \
        few_any(TENSOR_##T, R, w, stride, n_blocks, tile, out);                                    \
        break;
#if VNNI_FEW_ROWS == 8
#define FEW_MORE_CASES(T)                                                                          \
    FEW_ROWS_CASE(T, 5) FEW_ROWS_CASE(T, 6) FEW_ROWS_CASE(T, 7) FEW_ROWS_CASE(T, 8)
#else
#define FEW_MORE_CASES(T)
#endif
#define FEW(T)                                                                                     \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,   \
                        uint32_t n_rows, float(*out)[PANEL_OUTS])                                  \
    {                                                                                              \
        switch (n_rows) {                                                                          \
            FEW_ROWS_CASE(T, 1)                                                                    \
            FEW_ROWS_CASE(T, 2)                                                                    \
            FEW_ROWS_CASE(T, 3)                                                                    \
            FEW_ROWS_CASE(T, 4)                                                                    \
            FEW_MORE_CASES(T)                                                                      \
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

void VNNI_SETUP(struct kernel_ops *ops)
{
    ops->few_rows = VNNI_FEW_ROWS;
    ops->few[TENSOR_Q4_0] = few_Q4_0;
    ops->few[TENSOR_Q4_1] = few_Q4_1;
    ops->few[TENSOR_Q5_0] = few_Q5_0;
    ops->few[TENSOR_Q5_1] = few_Q5_1;
    ops->few[TENSOR_Q8_0] = few_Q8_0;
    ops->few[TENSOR_Q4_K] = few_Q4_K;
    ops->few[TENSOR_Q5_K] = few_Q5_K;
    ops->few[TENSOR_Q6_K] = few_Q6_K;
    ops->few[TENSOR_Q2_K] = few_Q2_K;
    ops->few[TENSOR_Q3_K] = few_Q3_K;
    ops->few[TENSOR_IQ4_NL] = few_IQ4_NL;
    ops->few[TENSOR_MXFP4] = few_MXFP4;
}
