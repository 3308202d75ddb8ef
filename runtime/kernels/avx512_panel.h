/* Panels of 16 outputs, for AVX-512 and AMX.
 *
 * One block of 32 (twice the bytes of table.h): int8 w[8 j][16 outputs][4]; float dw[16], mw[16];
 * kinds with two integer scales: float sc[2][16]; PANEL_S2M: int16 mn[2][16][2]. Integer products
 * with scales are formed in F32, where they are exact: |isum| < 2^24.
 *
 * Included with PANEL_SIGNED 1 (weights are signed, their centre is taken off) or 0 (weights are
 * unsigned: as stored, those of PANEL_I8 plus 128). */
#include "runtime/kernels/avx2_open.h"
#include "runtime/kernels/avx512.h"

enum { AT_DW = 512, AT_MW = 576, AT_SCALES = 640, AT_MINIMA = 768, OUTS = 16 };

AVX2_INLINE __m512 floats_at(const uint8_t *p)
{
    return _mm512_load_ps((const float *)(const void *)p);
}

AVX2_INLINE __m512i pair_at(const uint8_t *pairs)
{
    return _mm512_set1_epi32((int)load_u32(pairs));
}

/* mn0 * sum(q of the first 16) + mn1 * sum(q of the last 16), from the pairs of -32 sum(q). */
AVX2_INLINE __m512 minimum_sum(const uint8_t *panel, const uint8_t *pairs, uint32_t layout)
{
    __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), pair_at(pairs + 8 * layout),
                                      _mm512_load_si512(panel + AT_MINIMA));
    sum = _mm512_dpwssd_epi32(sum, pair_at(pairs + 12 * layout),
                              _mm512_load_si512(panel + AT_MINIMA + 64));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_srai_epi32(sum, 5)));
}

/* Eight of the panel's outputs. */
AVX2_INLINE void pack_half(const enum tensor_type t, const uint8_t *w, size_t stride,
                           uint32_t n_blocks, uint8_t *panel)
{
    const enum panel_kind kind = avx2_kind(t);
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    const int centre = kind == PANEL_U4C ? 8 : kind == PANEL_U5C ? 16 : kind == PANEL_S6 ? 32 : 0;
    /* signed: less the centre; else as they are, signed ones plus 128 */
    const int less = PANEL_SIGNED ? centre : kind == PANEL_I8 ? -128 : 0;
    const __m256i taken = _mm256_set1_epi8((char)less);
    struct super8 super;
    for (uint32_t i = 0; i < n; i++, w += bytes) {
        avx2_open_super(t, w, stride, &super);
        for (uint32_t outer = 0; outer < n_outer; outer++) {
            avx2_open_outer(t, w, stride, outer, &super);
#pragma GCC unroll 4
            for (uint32_t inner = 0; inner < n_inner;
                 inner++, panel += 2 * panel_block_bytes(kind)) {
                struct block8 b = {.mw = _mm256_setzero_ps()};
                avx2_open_block(t, w, stride, outer, inner, &super, &b);
                for (int j = 0; j < 8; j++)
                    _mm256_store_si256((__m256i *)(void *)(panel + 64 * j),
                                       _mm256_sub_epi8(b.v[j], taken));
                _mm256_store_ps((float *)(void *)(panel + AT_DW), b.dw);
                _mm256_store_ps((float *)(void *)(panel + AT_MW), b.mw);
                for (int h = 0; h < 2 && (kind == PANEL_S6 || kind == PANEL_S2M); h++) {
                    __m256i sc = _mm256_srai_epi32(b.sc[h], 16);
                    _mm256_store_ps((float *)(void *)(panel + AT_SCALES + 64 * h),
                                    _mm256_cvtepi32_ps(sc));
                    if (kind == PANEL_S2M)
                        _mm256_store_si256((__m256i *)(void *)(panel + AT_MINIMA + 64 * h),
                                           b.mn[h]);
                }
            }
        }
    }
}

#define PACK(T)                                                                                    \
    static void pack_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, uint8_t *panel)       \
    {                                                                                              \
        pack_half(TENSOR_##T, w, stride, n_blocks, panel);                                         \
        pack_half(TENSOR_##T, w + 8 * stride, stride, n_blocks, panel + 32);                       \
    }
/* A list of macros, which clang-format takes for one statement. */
/* clang-format off */
PACK(Q4_0)
PACK(Q4_1)
PACK(Q5_0)
PACK(Q5_1)
PACK(Q8_0)
PACK(Q4_K)
PACK(Q5_K)
PACK(Q6_K)
PACK(Q2_K)
PACK(Q3_K)
PACK(IQ4_NL)
PACK(MXFP4)
/* clang-format on */

static void set_packs(struct kernel_ops *ops)
{
    ops->pack[TENSOR_Q4_0] = pack_Q4_0;
    ops->pack[TENSOR_Q4_1] = pack_Q4_1;
    ops->pack[TENSOR_Q5_0] = pack_Q5_0;
    ops->pack[TENSOR_Q5_1] = pack_Q5_1;
    ops->pack[TENSOR_Q8_0] = pack_Q8_0;
    ops->pack[TENSOR_Q4_K] = pack_Q4_K;
    ops->pack[TENSOR_Q5_K] = pack_Q5_K;
    ops->pack[TENSOR_Q6_K] = pack_Q6_K;
    ops->pack[TENSOR_Q2_K] = pack_Q2_K;
    ops->pack[TENSOR_Q3_K] = pack_Q3_K;
    ops->pack[TENSOR_IQ4_NL] = pack_IQ4_NL;
    ops->pack[TENSOR_MXFP4] = pack_MXFP4;
}
