/* Few rows of activations times quantised weights straight from the file, AVX2: 8 weight rows far
 * apart are 8 sequential streams, opened once in registers for up to 4 rows of activations. */
#include "runtime/kernels/avx2_open.h"

/* Bytes ahead in each stream. Hardware prefetching alone gave half the bandwidth on short rows. */
enum { PREFETCH_AHEAD = 512 };

/* Integer sums of 8 outputs over 32 columns for row r of a tile of R rows (block's bytes at a). */
AVX2_INLINE __m256i block_sum(const enum panel_kind kind, const uint32_t R, const struct block8 *b,
                              const uint8_t *a, const uint32_t r)
{
    const uint8_t *q = a + 32 * r, *pairs = a + 40 * R + 4 * r;
    const __m256i ones = _mm256_set1_epi16(1);
    if (kind == PANEL_I8) {
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i x = _mm256_set1_epi32((int)load_u32(q + 4 * j));
            x = _mm256_maddubs_epi16(_mm256_abs_epi8(b->v[j]), _mm256_sign_epi8(x, b->v[j]));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(x, ones));
            AVX2_KEEP(sum);
        }
        return sum;
    }
    const bool halves = kind == PANEL_S6 || kind == PANEL_S2M;
    __m256i total = _mm256_setzero_si256(), centre = total, sum = total;
    if (kind == PANEL_U4C)
        sum = _mm256_set1_epi32((int)load_u32(pairs));
    if (kind == PANEL_U5C || kind == PANEL_U5M)
        sum = centre = _mm256_set1_epi32((int)load_u32(pairs + 4 * R));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        if (halves && j % 4 == 0)
            sum = kind == PANEL_S2M ? _mm256_setzero_si256()
                                    : _mm256_set1_epi32((int)load_u32(pairs + (j ? 12 : 8) * R));
        __m256i x = _mm256_set1_epi32((int)load_u32(q + 4 * j));
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(b->v[j], x));
        AVX2_KEEP(sum);
        if (halves && j % 4 == 3)
            total = _mm256_add_epi32(total, _mm256_madd_epi16(sum, b->sc[j / 4]));
    }
    if (halves)
        return total;
    sum = _mm256_madd_epi16(sum, ones);
    return kind == PANEL_U5M ? _mm256_sub_epi32(sum, _mm256_madd_epi16(centre, ones)) : sum;
}

AVX2_INLINE void prefetch_rows(const uint8_t *p, size_t stride, uint32_t n_bytes)
{
    for (uint32_t at = 0; at < n_bytes; at += 64)
        for (uint32_t r = 0; r < 8; r++)
            _mm_prefetch((const char *)p + r * stride + at + PREFETCH_AHEAD, _MM_HINT_T0);
}

AVX2_INLINE void few_any(const enum tensor_type t, const uint32_t R, const uint8_t *w,
                         size_t stride, uint32_t n_blocks, const uint8_t *a,
                         float (*out)[PANEL_OUTS])
{
    const enum panel_kind kind = avx2_kind(t);
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    struct super8 super;
    __m256 acc[FEW_ROWS];
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
                avx2_open_block(t, w, stride, outer, inner, &super, &b);
                const float *d = (const float *)(const void *)(a + 32 * R);
#pragma GCC unroll 4
                for (uint32_t r = 0; r < R; r++) {
                    __m256 sum = _mm256_cvtepi32_ps(block_sum(kind, R, &b, a, r));
                    acc[r] =
                        _mm256_fmadd_ps(_mm256_mul_ps(b.dw, sum), _mm256_set1_ps(d[r]), acc[r]);
                    if (panel_has_minimum(kind))
                        acc[r] = _mm256_fmadd_ps(b.mw, _mm256_set1_ps(d[R + r]), acc[r]);
                    if (kind == PANEL_S2M) {
                        __m256i m = avx2_minimum_sum(b.mn, a + 40 * R + 4 * r, R);
                        __m256 product = _mm256_mul_ps(b.mw, _mm256_cvtepi32_ps(m));
                        acc[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(d[r]), acc[r]);
                    }
                }
            }
        }
    }
    for (uint32_t r = 0; r < R; r++)
        _mm256_storeu_ps(out[r], _mm256_add_ps(acc[r], _mm256_setzero_ps()));
}

#define FEW(T)                                                                                     \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,   \
                        uint32_t n_rows, float(*out)[PANEL_OUTS])                                  \
    {                                                                                              \
        if (n_rows == 1)                                                                           \
            few_any(TENSOR_##T, 1, w, stride, n_blocks, tile, out);                                \
        else if (n_rows == 2)                                                                      \
            few_any(TENSOR_##T, 2, w, stride, n_blocks, tile, out);                                \
        else if (n_rows == 3)                                                                      \
            few_any(TENSOR_##T, 3, w, stride, n_blocks, tile, out);                                \
        else                                                                                       \
            few_any(TENSOR_##T, 4, w, stride, n_blocks, tile, out);                                \
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

void avx2_few(struct kernel_ops *ops)
{
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
