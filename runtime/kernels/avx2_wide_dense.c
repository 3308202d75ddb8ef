/* F32, F16 and BF16 weights times few rows of activations straight from the file, AVX2: 16 far
 * weight rows in two vectors, because one vector's chain of multiply-adds alone takes longer than
 * its weights take to arrive. For CPUs with 12 ways in the first-level cache or more: rows are
 * often a multiple of 4 KiB long, and then 16 streams share one set. */
#include "runtime/kernels/avx2.h"

/* Bytes ahead in each stream; of each row in one step. */
enum { PREFETCH_AHEAD = 512, STEP_BYTES = 16, HALF = WIDE_OUTS / 2 };

/* 16 bytes of rows r and r + 8. */
AVX2_INLINE __m256i two_rows(const uint8_t *p, size_t stride, uint32_t r)
{
    p += r * stride;
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(p + HALF * stride));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

/* 8 columns of 16 rows of 16 bits; in each vector the first 8 rows, then the others. */
AVX2_INLINE void transpose_u16(const uint8_t *p, size_t stride, __m256i v[8])
{
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < 8; r++)
        a[r] = two_rows(p, stride, r);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) { /* columns 4h..4h+3 */
        __m256i c0 = _mm256_unpacklo_epi32(b[h], b[2 + h]);
        __m256i c1 = _mm256_unpackhi_epi32(b[h], b[2 + h]);
        __m256i d0 = _mm256_unpacklo_epi32(b[4 + h], b[6 + h]);
        __m256i d1 = _mm256_unpackhi_epi32(b[4 + h], b[6 + h]);
        v[4 * h] = _mm256_unpacklo_epi64(c0, d0);
        v[4 * h + 1] = _mm256_unpackhi_epi64(c0, d0);
        v[4 * h + 2] = _mm256_unpacklo_epi64(c1, d1);
        v[4 * h + 3] = _mm256_unpackhi_epi64(c1, d1);
    }
}

AVX2_INLINE __m256 open_16(const enum dense_type t, __m128i v)
{
    if (t == DENSE_F16)
        return _mm256_cvtph_ps(v);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

/* 4 columns of 8 rows of F32. */
AVX2_INLINE void transpose_f32(const uint8_t *p, size_t stride, __m256 v[4])
{
    __m256d b[4];
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; i++) {
        __m128 low[2], high[2];
#pragma GCC unroll 2
        for (uint32_t r = 0; r < 2; r++) {
            low[r] = _mm_loadu_ps((const float *)(const void *)(p + (2 * i + r) * stride));
            high[r] = _mm_loadu_ps((const float *)(const void *)(p + (2 * i + r + 4) * stride));
        }
        __m256 a0 = _mm256_insertf128_ps(_mm256_castps128_ps256(low[0]), high[0], 1);
        __m256 a1 = _mm256_insertf128_ps(_mm256_castps128_ps256(low[1]), high[1], 1);
        b[2 * i] = _mm256_castps_pd(_mm256_unpacklo_ps(a0, a1));
        b[2 * i + 1] = _mm256_castps_pd(_mm256_unpackhi_ps(a0, a1));
    }
    v[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(b[0], b[2]));
    v[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(b[0], b[2]));
    v[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b[1], b[3]));
    v[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b[1], b[3]));
}

/* STEP_BYTES of 16 rows as F32: v[column][first 8 rows, others]. */
AVX2_INLINE void open_step(const enum dense_type t, const uint8_t *p, size_t stride, __m256 v[8][2])
{
    if (t == DENSE_F32) {
        __m256 first[4], others[4];
        transpose_f32(p, stride, first);
        transpose_f32(p + HALF * stride, stride, others);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            v[i][0] = first[i];
            v[i][1] = others[i];
        }
        return;
    }
    __m256i u[8];
    transpose_u16(p, stride, u);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        v[i][0] = open_16(t, _mm256_castsi256_si128(u[i]));
        v[i][1] = open_16(t, _mm256_extracti128_si256(u[i], 1));
    }
}

/* One column of 8 rows: for the last that are no whole step. */
static __m256 open_column(enum dense_type t, const uint8_t *p, size_t stride)
{
    float v[HALF];
    for (uint32_t r = 0; r < HALF; r++, p += stride)
        v[r] = t == DENSE_F32   ? float_of_bits(load_u32(p))
               : t == DENSE_F16 ? load_half(p)
                                : bf16_open(load_u16(p));
    return _mm256_loadu_ps(v);
}

AVX2_INLINE void few_any(const enum dense_type t, const uint32_t R, const uint8_t *w, size_t stride,
                         uint32_t n_in, const float *x, size_t ldx, float (*out)[WIDE_OUTS])
{
    const uint32_t size = t == DENSE_F32 ? 4 : 2, step = STEP_BYTES / size;
    __m256 acc[FEW_ROWS][2];
    uint32_t k = 0;
    for (uint32_t r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = _mm256_setzero_ps();
    for (; k + step <= n_in; k += step, w += STEP_BYTES) {
        __m256 v[8][2];
        if (k * size % 64 == 0)
            for (uint32_t r = 0; r < WIDE_OUTS; r++)
                _mm_prefetch((const char *)w + r * stride + PREFETCH_AHEAD, _MM_HINT_T0);
        open_step(t, w, stride, v);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < step; i++) {
            AVX2_KEEP(v[i][0]);
            AVX2_KEEP(v[i][1]);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < R; r++) {
                __m256 a = _mm256_broadcast_ss(x + r * ldx + k + i);
                acc[r][0] = _mm256_fmadd_ps(v[i][0], a, acc[r][0]);
                acc[r][1] = _mm256_fmadd_ps(v[i][1], a, acc[r][1]);
            }
        }
    }
    for (; k < n_in; k++, w += size) {
        __m256 first = open_column(t, w, stride),
               others = open_column(t, w + HALF * stride, stride);
        for (uint32_t r = 0; r < R; r++) {
            __m256 a = _mm256_broadcast_ss(x + r * ldx + k);
            acc[r][0] = _mm256_fmadd_ps(first, a, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(others, a, acc[r][1]);
        }
    }
    for (uint32_t r = 0; r < R; r++) {
        _mm256_storeu_ps(out[r], _mm256_add_ps(acc[r][0], _mm256_setzero_ps()));
        _mm256_storeu_ps(out[r] + HALF, _mm256_add_ps(acc[r][1], _mm256_setzero_ps()));
    }
}

#define FEW(T)                                                                                     \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,            \
                        size_t ldx, uint32_t n_rows, float(*out)[WIDE_OUTS])                       \
    {                                                                                              \
        if (n_rows == 1)                                                                           \
            few_any(DENSE_##T, 1, w, stride, n_in, x, ldx, out);                                   \
        else if (n_rows == 2)                                                                      \
            few_any(DENSE_##T, 2, w, stride, n_in, x, ldx, out);                                   \
        else if (n_rows == 3)                                                                      \
            few_any(DENSE_##T, 3, w, stride, n_in, x, ldx, out);                                   \
        else                                                                                       \
            few_any(DENSE_##T, 4, w, stride, n_in, x, ldx, out);                                   \
    }
FEW(F32)
FEW(F16)
FEW(BF16)

void avx2_wide_dense(struct kernel_ops *ops)
{
    ops->wide_dense_few[DENSE_F32] = few_F32;
    ops->wide_dense_few[DENSE_F16] = few_F16;
    ops->wide_dense_few[DENSE_BF16] = few_BF16;
}
