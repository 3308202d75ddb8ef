/* Quantised weights in precision f32, AVX2: 8 outputs are opened straight into a dense panel
 * (arithmetic.h 6), and few rows are multiplied with such a panel. */
#include "runtime/kernels/avx2_open.h"

AVX2_INLINE __m256 factor(__m256i pairs) /* an int16 in the upper half of each lane */
{
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 16));
}

AVX2_INLINE void store_block(const enum panel_kind kind, const struct block8 *b, float *panel,
                             size_t ldp)
{
    const bool halves = kind == PANEL_S6 || kind == PANEL_S2M;
    const bool minimum = panel_has_minimum(kind) || kind == PANEL_S2M;
    const int centre = kind == PANEL_U4C ? 8 : kind == PANEL_U5C ? 16 : kind == PANEL_S6 ? 32 : 0;
    __m256 scale = b->dw, least = b->mw;
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        if (halves && j % 4 == 0) {
            scale = _mm256_mul_ps(b->dw, factor(b->sc[j / 4]));
            if (kind == PANEL_S2M)
                least = _mm256_mul_ps(b->mw, factor(b->mn[j / 4]));
        }
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            __m256i w = _mm256_slli_epi32(b->v[j], 24 - 8 * c);
            w = kind == PANEL_I8 ? _mm256_srai_epi32(w, 24) : _mm256_srli_epi32(w, 24);
            w = _mm256_sub_epi32(w, _mm256_set1_epi32(centre));
            __m256 v = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(w));
            _mm256_storeu_ps(panel + (size_t)(4 * j + c) * ldp,
                             minimum ? _mm256_add_ps(v, least) : v);
        }
    }
}

AVX2_INLINE void open_any(const enum tensor_type t, const uint8_t *w, size_t stride,
                          uint32_t n_blocks, float *panel, size_t ldp)
{
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    struct super8 super;
    for (uint32_t i = 0; i < n; i++, w += bytes) {
        avx2_open_super(t, w, stride, &super);
        for (uint32_t outer = 0; outer < n_outer; outer++) {
            avx2_open_outer(t, w, stride, outer, &super);
#pragma GCC unroll 4
            for (uint32_t inner = 0; inner < n_inner; inner++, panel += BLOCK * ldp) {
                struct block8 b = {.mw = _mm256_setzero_ps()};
                avx2_open_block(t, w, stride, outer, inner, &super, &b);
                store_block(avx2_kind(t), &b, panel, ldp);
            }
        }
    }
}

#define OPEN(T)                                                                                    \
    static void open_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, float *panel,         \
                         size_t ldp)                                                               \
    {                                                                                              \
        open_any(TENSOR_##T, w, stride, n_blocks, panel, ldp);                                     \
    }
/* A list of macros, which clang-format takes for one statement. */
/* clang-format off */
OPEN(Q4_0)
OPEN(Q4_1)
OPEN(Q5_0)
OPEN(Q5_1)
OPEN(Q8_0)
OPEN(Q4_K)
OPEN(Q5_K)
OPEN(Q6_K)
OPEN(Q2_K)
OPEN(Q3_K)
OPEN(IQ4_NL)
OPEN(MXFP4)
/* clang-format on */

AVX2_INLINE void few_rows(const uint32_t R, const float *panel, uint32_t n_in, const float *x,
                          size_t ldx, float (*out)[PANEL_OUTS], bool resume)
{
    __m256 acc[FEW_ROWS];
    for (uint32_t r = 0; r < R; r++)
        acc[r] = resume ? _mm256_loadu_ps(out[r]) : _mm256_setzero_ps();
    for (uint32_t k = 0; k < n_in; k++) {
        __m256 w = _mm256_load_ps(panel + (size_t)k * PANEL_OUTS);
        AVX2_KEEP(w);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < R; r++)
            acc[r] = _mm256_fmadd_ps(w, _mm256_broadcast_ss(x + r * ldx + k), acc[r]);
    }
    for (uint32_t r = 0; r < R; r++)
        _mm256_storeu_ps(out[r], _mm256_add_ps(acc[r], _mm256_setzero_ps()));
}

static void opened_few(const float *panel, uint32_t n_in, const float *x, size_t ldx,
                       uint32_t n_rows, float (*out)[PANEL_OUTS], bool resume)
{
    switch (n_rows) {
    case 1:
        few_rows(1, panel, n_in, x, ldx, out, resume);
        break;
    case 2:
        few_rows(2, panel, n_in, x, ldx, out, resume);
        break;
    case 3:
        few_rows(3, panel, n_in, x, ldx, out, resume);
        break;
    default:
        few_rows(4, panel, n_in, x, ldx, out, resume);
    }
}

void avx2_opened(struct kernel_ops *ops)
{
    ops->opened_few = opened_few;
    ops->open_panel[TENSOR_Q4_0] = open_Q4_0;
    ops->open_panel[TENSOR_Q4_1] = open_Q4_1;
    ops->open_panel[TENSOR_Q5_0] = open_Q5_0;
    ops->open_panel[TENSOR_Q5_1] = open_Q5_1;
    ops->open_panel[TENSOR_Q8_0] = open_Q8_0;
    ops->open_panel[TENSOR_Q4_K] = open_Q4_K;
    ops->open_panel[TENSOR_Q5_K] = open_Q5_K;
    ops->open_panel[TENSOR_Q6_K] = open_Q6_K;
    ops->open_panel[TENSOR_Q2_K] = open_Q2_K;
    ops->open_panel[TENSOR_Q3_K] = open_Q3_K;
    ops->open_panel[TENSOR_IQ4_NL] = open_IQ4_NL;
    ops->open_panel[TENSOR_MXFP4] = open_MXFP4;
}
