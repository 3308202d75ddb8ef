/* Many rows of activations times quantised weights, AVX-512 with VNNI: panels of 16 outputs and the
 * product of a panel with up to 8 rows. vpdpbusd multiplies unsigned weights by signed activations
 * and adds in 32 bits, so no bound of 16 bits has to be kept: a centre c is taken off by beginning
 * with -c times the sum of the activations, which the tile holds as pairs.
 *
 * Panel, one block of 32 (twice the bytes of table.h): uint8 w[8 j][16 outputs][4]; float dw[16],
 * mw[16]; kinds with two integer scales: float sc[2][16]; PANEL_S2M: int16 mn[2][16][2]. Weights of
 * PANEL_I8 are stored plus 128. Integer products with scales are formed in F32, where they are
 * exact: |isum| < 2^24. */
#include "runtime/kernels/avx2_open.h"
#include "runtime/kernels/avx512.h"

enum { AT_DW = 512, AT_MW = 576, AT_SCALES = 640, AT_MINIMA = 768, OUTS = 16 };

/* ---- packing */

/* Eight of the panel's outputs: half 0 or 1. */
AVX2_INLINE void pack_half(const enum tensor_type t, const uint8_t *w, size_t stride,
                           uint32_t n_blocks, uint8_t *panel)
{
    const enum panel_kind kind = avx2_kind(t);
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    const __m256i sign = _mm256_set1_epi8((char)0x80);
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
                                       kind == PANEL_I8 ? _mm256_xor_si256(b.v[j], sign) : b.v[j]);
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

/* ---- tiles */

/* R rows of one block of a tile whose layout has `layout` rows. */
struct rows_at {
    const uint8_t *q, *pairs; /* of the first of the R rows */
    uint32_t layout;
};

AVX2_INLINE __m512i pair_at(const uint8_t *pairs)
{
    return _mm512_set1_epi32((int)load_u32(pairs));
}

/* acc - c * sum(q) over the columns from 4j on (j 0 or 4) or all; the pairs hold it as two. */
AVX2_INLINE __m512i centred(const enum panel_kind kind, struct rows_at a, uint32_t r, const int j)
{
    const __m512i ones = _mm512_set1_epi16(1), fours = _mm512_set1_epi16(4);
    const __m512i none = _mm512_setzero_si512();
    const uint8_t *p = a.pairs + 4 * r;
    if (kind == PANEL_U4C)
        return _mm512_dpwssd_epi32(none, pair_at(p), ones);
    if (kind == PANEL_U5C)
        return _mm512_dpwssd_epi32(none, pair_at(p + 4 * a.layout), ones);
    if (kind == PANEL_S6)
        return _mm512_dpwssd_epi32(none, pair_at(p + (j ? 12 : 8) * a.layout), ones);
    if (kind == PANEL_I8)
        return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(none, pair_at(p + 8 * a.layout), fours),
                                   pair_at(p + 12 * a.layout), fours);
    return none;
}

/* Sums over columns 4 from to 4 to of R rows. */
AVX2_INLINE void sum_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                          struct rows_at a, const int from, const int to, __m512i *sum)
{
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        sum[r] = centred(kind, a, r, from);
#pragma GCC unroll 8
    for (int j = from; j < to; j++) {
        __m512i v = _mm512_load_si512(panel + 64 * j);
        AVX512_KEEP(v);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            __m512i x = _mm512_set1_epi32((int)load_u32(a.q + 32 * r + 4 * j));
            sum[r] = _mm512_dpbusd_epi32(sum[r], v, x);
        }
    }
}

AVX2_INLINE __m512 floats_at(const uint8_t *p)
{
    return _mm512_load_ps((const float *)(const void *)p);
}

/* The integer sums of one block as F32. */
AVX2_INLINE void block_sums(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                            struct rows_at a, __m512 *ret)
{
    __m512i sum[TILE_ROWS];
    if (kind != PANEL_S6 && kind != PANEL_S2M) {
        sum_rows(kind, R, panel, a, 0, 8, sum);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++)
            ret[r] = _mm512_cvtepi32_ps(sum[r]);
        return;
    }
    sum_rows(kind, R, panel, a, 0, 4, sum);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        ret[r] = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), floats_at(panel + AT_SCALES));
    sum_rows(kind, R, panel, a, 4, 8, sum);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        ret[r] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), floats_at(panel + AT_SCALES + 64), ret[r]);
}

/* mn0 * sum(q of the first 16) + mn1 * sum(q of the last 16), from the pairs of -32 sum(q). */
AVX2_INLINE __m512 minimum_sum(const uint8_t *panel, struct rows_at a, uint32_t r)
{
    const uint8_t *p = a.pairs + 4 * r;
    __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), pair_at(p + 8 * a.layout),
                                      _mm512_load_si512(panel + AT_MINIMA));
    sum = _mm512_dpwssd_epi32(sum, pair_at(p + 12 * a.layout),
                              _mm512_load_si512(panel + AT_MINIMA + 64));
    sum = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_srai_epi32(sum, 5));
    return _mm512_cvtepi32_ps(sum);
}

/* R rows of a tile whose layout has `layout` rows, beginning with row `row`. */
AVX2_INLINE void tile_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                           uint32_t n_blocks, const uint8_t *tile, uint32_t layout, uint32_t row,
                           float *y, size_t ldy, bool resume)
{
    __m512 acc[TILE_ROWS];
    for (uint32_t r = 0; r < R; r++)
        acc[r] = resume ? _mm512_loadu_ps(y + r * ldy) : _mm512_setzero_ps();
    for (uint32_t b = 0; b < n_blocks; b++) {
        __m512 sum[TILE_ROWS];
        const uint8_t *f = tile + 4 * row;
        struct rows_at at = {tile + 32 * row, f + 40 * layout, layout};
        block_sums(kind, R, panel, at, sum);
        const float *d = (const float *)(const void *)(f + 32 * layout), *s = d + layout;
        __m512 dw = floats_at(panel + AT_DW), mw = floats_at(panel + AT_MW);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            acc[r] = _mm512_fmadd_ps(_mm512_mul_ps(dw, sum[r]), _mm512_set1_ps(d[r]), acc[r]);
            if (panel_has_minimum(kind))
                acc[r] = _mm512_fmadd_ps(mw, _mm512_set1_ps(s[r]), acc[r]);
            if (kind == PANEL_S2M) {
                __m512 product = _mm512_mul_ps(mw, minimum_sum(panel, at, r));
                acc[r] = _mm512_fmadd_ps(product, _mm512_set1_ps(d[r]), acc[r]);
            }
        }
        panel += 2 * panel_block_bytes(kind);
        tile += (size_t)layout * TILE_ROW_BYTES;
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        _mm512_storeu_ps(y + r * ldy, _mm512_add_ps(acc[r], _mm512_setzero_ps()));
}

#define TILE(K)                                                                                    \
    static void tile_##K(const uint8_t *panel, uint32_t n_blocks, const uint8_t *tile,             \
                         uint32_t n_rows, float *y, size_t ldy, bool resume)                       \
    {                                                                                              \
        uint32_t row = 0;                                                                          \
        if (n_rows == TILE_ROWS) {                                                                 \
            tile_rows(PANEL_##K, 8, panel, n_blocks, tile, 8, 0, y, ldy, resume);                  \
            return;                                                                                \
        }                                                                                          \
        if (n_rows & 4) {                                                                          \
            tile_rows(PANEL_##K, 4, panel, n_blocks, tile, n_rows, 0, y, ldy, resume);             \
            row = 4;                                                                               \
        }                                                                                          \
        if (n_rows & 2) {                                                                          \
            tile_rows(PANEL_##K, 2, panel, n_blocks, tile, n_rows, row, y + row * ldy, ldy,        \
                      resume);                                                                     \
            row += 2;                                                                              \
        }                                                                                          \
        if (n_rows & 1)                                                                            \
            tile_rows(PANEL_##K, 1, panel, n_blocks, tile, n_rows, row, y + row * ldy, ldy,        \
                      resume);                                                                     \
    }
TILE(U4C)
TILE(U4M)
TILE(U5C)
TILE(U5M)
TILE(I8)
TILE(S6)
TILE(S2M)

void avx512_panels(struct kernel_ops *ops)
{
    ops->panel_outs = OUTS;
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
    ops->tile[PANEL_U4C] = tile_U4C;
    ops->tile[PANEL_U4M] = tile_U4M;
    ops->tile[PANEL_U5C] = tile_U5C;
    ops->tile[PANEL_U5M] = tile_U5M;
    ops->tile[PANEL_I8] = tile_I8;
    ops->tile[PANEL_S6] = tile_S6;
    ops->tile[PANEL_S2M] = tile_S2M;
}
