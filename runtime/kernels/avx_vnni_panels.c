/* Many rows of activations times panels that the AVX2 variant has packed, AVX-VNNI. Sums are 32
 * bits wide (vnni_few.h says how centres are taken off). */
#include "runtime/kernels/avx2_open.h"
#include "runtime/kernels/avx_vnni.h"

/* R rows of one block of a tile whose layout has `layout` rows. */
struct rows_at {
    const uint8_t *q, *pairs; /* of the first of the R rows */
    uint32_t layout;
};

AVX2_INLINE __m256i pair_at(const uint8_t *pairs)
{
    return _mm256_set1_epi32((int)load_u32(pairs));
}

/* Sums begin with -c * sum(q). */
AVX2_INLINE __m256i centred(const enum panel_kind kind, struct rows_at a, uint32_t r)
{
    const __m256i ones = _mm256_set1_epi16(1), fours = _mm256_set1_epi16(4);
    const __m256i none = _mm256_setzero_si256();
    const uint8_t *p = a.pairs + 4 * r;
    if (kind == PANEL_U4C)
        return _mm256_dpwssd_avx_epi32(none, pair_at(p), ones);
    if (kind == PANEL_U5C)
        return _mm256_dpwssd_avx_epi32(none, pair_at(p + 4 * a.layout), ones);
    if (kind == PANEL_I8)
        return _mm256_dpwssd_avx_epi32(
            _mm256_dpwssd_avx_epi32(none, pair_at(p + 8 * a.layout), fours),
            pair_at(p + 12 * a.layout), fours);
    return none;
}

/* The integer sums of one block. */
AVX2_INLINE void sum_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                          struct rows_at a, __m256i *sum)
{
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        sum[r] = centred(kind, a, r);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i v = _mm256_load_si256((const __m256i *)(const void *)panel + j);
        if (kind == PANEL_I8)
            v = _mm256_xor_si256(v, _mm256_set1_epi8((char)0x80));
        AVX2_KEEP(v);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            __m256i x = _mm256_set1_epi32((int)load_u32(a.q + 32 * r + 4 * j));
            sum[r] = _mm256_dpbusd_avx_epi32(sum[r], v, x);
        }
    }
}

/* R rows of a tile whose layout has `layout` rows, beginning with row `row`. */
AVX2_INLINE void tile_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                           uint32_t n_blocks, const uint8_t *tile, uint32_t layout, uint32_t row,
                           float *y, size_t ldy, bool resume)
{
    __m256 acc[TILE_ROWS];
    for (uint32_t r = 0; r < R; r++)
        acc[r] = resume ? _mm256_loadu_ps(y + r * ldy) : _mm256_setzero_ps();
    for (uint32_t b = 0; b < n_blocks; b++) {
        __m256i sum[TILE_ROWS];
        const uint8_t *f = tile + 4 * row;
        struct rows_at at = {tile + 32 * row, f + 40 * layout, layout};
        sum_rows(kind, R, panel, at, sum);
        const float *d = (const float *)(const void *)(f + 32 * layout), *s = d + layout;
        __m256 dw = _mm256_load_ps((const float *)(const void *)(panel + 256));
        __m256 mw = _mm256_load_ps((const float *)(const void *)(panel + 288));
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            __m256 product = _mm256_mul_ps(dw, _mm256_cvtepi32_ps(sum[r]));
            acc[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(d[r]), acc[r]);
            if (panel_has_minimum(kind))
                acc[r] = _mm256_fmadd_ps(mw, _mm256_set1_ps(s[r]), acc[r]);
        }
        panel += panel_block_bytes(kind);
        tile += (size_t)layout * TILE_ROW_BYTES;
    }
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        _mm256_storeu_ps(y + r * ldy, _mm256_add_ps(acc[r], _mm256_setzero_ps()));
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

void avx_vnni_panels(struct kernel_ops *ops)
{
    ops->tile[PANEL_U4C] = tile_U4C;
    ops->tile[PANEL_U4M] = tile_U4M;
    ops->tile[PANEL_U5C] = tile_U5C;
    ops->tile[PANEL_U5M] = tile_U5M;
    ops->tile[PANEL_I8] = tile_I8;
}
