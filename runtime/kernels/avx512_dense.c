/* Prompt-sized products with F32, F16 and BF16 weights, AVX-512: whole chains of 12 rows by 32
 * outputs on the panels of matmul.c. */
#include "runtime/kernels/avx2.h"
#include "runtime/kernels/avx512.h"

enum { ROWS = 12, OUTS = 32 };

static void run(const struct dense_whole *w, const float *panel, uint32_t n_in, const float *tile,
                float *y, size_t ldy)
{
    __m512 acc[ROWS][2];
    (void)w;
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (uint32_t k = 0; k < n_in; k++, panel += OUTS, tile += ROWS) {
        __m512 w0 = _mm512_load_ps(panel), w1 = _mm512_load_ps(panel + 16);
        AVX512_KEEP(w0);
        AVX512_KEEP(w1);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            __m512 x = _mm512_set1_ps(tile[r]);
            AVX512_KEEP(x);
            acc[r][0] = _mm512_fmadd_ps(w0, x, acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(w1, x, acc[r][1]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        _mm512_storeu_ps(y + (size_t)r * ldy, _mm512_add_ps(acc[r][0], _mm512_setzero_ps()));
        _mm512_storeu_ps(y + (size_t)r * ldy + 16, _mm512_add_ps(acc[r][1], _mm512_setzero_ps()));
    }
}

void avx512_dense(struct kernel_ops *ops)
{
    ops->whole = (struct dense_whole){.run = run, .rows = ROWS, .outs = OUTS};
    ops->dense_rows = ROWS;
    ops->dense_outs = OUTS;
}
