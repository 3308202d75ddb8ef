/* Many rows of activations times quantised weights, AVX-512 with VNNI: the product of a panel of 16
 * outputs with up to 8 rows. vpdpbusd multiplies unsigned weights by signed activations and adds in
 * 32 bits, so no bound of 16 bits has to be kept: a centre c is taken off by beginning with -c
 * times the sum of the activations, which the tile holds as pairs. */
#define PANEL_SIGNED 0
#include "runtime/kernels/avx512_panel.h"

/* R rows of one block of a tile whose layout has `layout` rows. */
struct rows_at {
    const uint8_t *q, *pairs; /* of the first of the R rows */
    uint32_t layout;
};

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
                __m512 product = _mm512_mul_ps(mw, minimum_sum(panel, at.pairs + 4 * r, layout));
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
    set_packs(ops);
    ops->tile[PANEL_U4C] = tile_U4C;
    ops->tile[PANEL_U4M] = tile_U4M;
    ops->tile[PANEL_U5C] = tile_U5C;
    ops->tile[PANEL_U5M] = tile_U5M;
    ops->tile[PANEL_I8] = tile_I8;
    ops->tile[PANEL_S6] = tile_S6;
    ops->tile[PANEL_S2M] = tile_S2M;
}
