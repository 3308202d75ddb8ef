/* F32, F16 and BF16 weights times few rows of activations straight from the file, AVX-512: 16 far
 * weight rows, transposed in registers. Twice the outputs of avx2_dense.c: one vector's chain of
 * multiply-adds alone takes longer than its weights take to arrive. */
#include "runtime/kernels/avx512_open.h"

enum { STEP_BYTES = 16 };

AVX2_INLINE uint32_t size_of(const enum dense_type t)
{
    return t == DENSE_F32 ? 4 : 2;
}

/* STEP_BYTES of 16 rows as F32, one vector for each column. */
AVX2_INLINE void open_step(const enum dense_type t, const uint8_t *p, size_t stride, __m512 v[8])
{
    __m512i d[4];
    avx512_transpose(p, stride, d);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        if (t == DENSE_F32) {
            v[i] = _mm512_castsi512_ps(d[i]);
        } else if (t == DENSE_F16) {
            avx512_two_halves(d[i], &v[2 * i], &v[2 * i + 1]);
        } else {
            const __m512i high = _mm512_set1_epi32((int)0xffff0000);
            v[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(d[i], 16));
            v[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(d[i], high));
        }
    }
}

/* One column of 16 rows: for the last that are no whole step. */
static __m512 open_column(enum dense_type t, const uint8_t *p, size_t stride)
{
    float v[WIDE_OUTS];
    for (uint32_t r = 0; r < WIDE_OUTS; r++, p += stride)
        v[r] = t == DENSE_F32   ? float_of_bits(load_u32(p))
               : t == DENSE_F16 ? load_half(p)
                                : bf16_open(load_u16(p));
    return _mm512_loadu_ps(v);
}

AVX2_INLINE void few_any(const enum dense_type t, const uint32_t R, const uint8_t *w, size_t stride,
                         uint32_t n_in, const float *x, size_t ldx, float (*out)[WIDE_OUTS])
{
    const uint32_t size = size_of(t), step = STEP_BYTES / size;
    __m512 acc[FEW_ROWS_MAX];
    uint32_t k = 0;
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        acc[r] = _mm512_setzero_ps();
    for (; k + step <= n_in; k += step, w += STEP_BYTES) {
        __m512 v[8];
        if (k * size % 64 == 0)
#pragma GCC unroll 16
            for (uint32_t r = 0; r < WIDE_OUTS; r++)
                _mm_prefetch((const char *)w + r * stride + WIDE_PREFETCH, _MM_HINT_T0);
        open_step(t, w, stride, v);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < step; i++) {
            AVX512_KEEP(v[i]);
#pragma GCC unroll 8
            for (uint32_t r = 0; r < R; r++)
                acc[r] = _mm512_fmadd_ps(v[i], _mm512_set1_ps(x[r * ldx + k + i]), acc[r]);
        }
    }
    for (; k < n_in; k++, w += size) {
        __m512 v = open_column(t, w, stride);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++)
            acc[r] = _mm512_fmadd_ps(v, _mm512_set1_ps(x[r * ldx + k]), acc[r]);
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        _mm512_storeu_ps(out[r], _mm512_add_ps(acc[r], _mm512_setzero_ps()));
}

#define ROWS_CASE(T, R)                                                                            \
    case R:                                                                                        \
        few_any(DENSE_##T, R, w, stride, n_in, x, ldx, out);                                       \
        break;
#define FEW(T)                                                                                     \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,            \
                        size_t ldx, uint32_t n_rows, float(*out)[WIDE_OUTS])                       \
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
FEW(F32)
FEW(F16)
FEW(BF16)

void avx512_wide_dense(struct kernel_ops *ops)
{
    ops->dense_few_rows = FEW_ROWS_MAX;
    ops->wide_dense_few[DENSE_F32] = few_F32;
    ops->wide_dense_few[DENSE_F16] = few_F16;
    ops->wide_dense_few[DENSE_BF16] = few_BF16;
}
