/* Many rows of activations times quantised weights, AVX2: packing panels of 8 outputs, and the
 * product of a panel with up to 8 rows. Bounds of the 16-bit sums: 4-bit weights <= 16 * 15 * 127;
 * 5 bits centred <= 16 * 16 * 127; 6 bits centred <= 8 * 32 * 127; 8 bits are widened at once. */
#include "runtime/kernels/avx2_open.h"

AVX2_INLINE void pack_any(const enum tensor_type t, const uint8_t *w, size_t stride,
                          uint32_t n_blocks, uint8_t *panel)
{
    const enum panel_kind kind = avx2_kind(t);
    const uint32_t bytes = avx2_block_bytes(t), n_inner = avx2_n_inner(t);
    const uint32_t n_outer = avx2_n_outer(t), n = n_blocks / (n_inner * n_outer);
    struct super8 super;
    for (uint32_t i = 0; i < n; i++, w += bytes) {
        avx2_open_super(t, w, stride, &super);
        for (uint32_t outer = 0; outer < n_outer; outer++) {
            avx2_open_outer(t, w, stride, outer, &super);
#pragma GCC unroll 4
            for (uint32_t inner = 0; inner < n_inner; inner++, panel += panel_block_bytes(kind)) {
                struct block8 b = {.mw = _mm256_setzero_ps()};
                avx2_open_block(t, w, stride, outer, inner, &super, &b);
                __m256i *to = (__m256i *)(void *)panel;
                for (int j = 0; j < 8; j++)
                    _mm256_store_si256(to + j, b.v[j]);
                _mm256_store_ps((float *)(void *)(panel + 256), b.dw);
                _mm256_store_ps((float *)(void *)(panel + 288), b.mw);
                if (kind == PANEL_S6 || kind == PANEL_S2M) {
                    _mm256_store_si256(to + 10, b.sc[0]);
                    _mm256_store_si256(to + 11, b.sc[1]);
                }
                if (kind == PANEL_S2M) {
                    _mm256_store_si256(to + 12, b.mn[0]);
                    _mm256_store_si256(to + 13, b.mn[1]);
                }
            }
        }
    }
}

#define PACK(T)                                                                                    \
    static void pack_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, uint8_t *panel)       \
    {                                                                                              \
        pack_any(TENSOR_##T, w, stride, n_blocks, panel);                                          \
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

/* The -c * sum(q) with which a sum over columns from 4j on begins. */
AVX2_INLINE __m256i first_sum(const enum panel_kind kind, const uint8_t *pairs, uint32_t layout,
                              const int j)
{
    if (kind == PANEL_U4C)
        return _mm256_set1_epi32((int)load_u32(pairs));
    if (kind == PANEL_U5C || kind == PANEL_U5M)
        return _mm256_set1_epi32((int)load_u32(pairs + 4 * layout));
    if (kind == PANEL_S6)
        return _mm256_set1_epi32((int)load_u32(pairs + (j ? 12 : 8) * layout));
    return _mm256_setzero_si256();
}

/* R rows of one block of a tile whose layout has `layout` rows. */
struct rows_at {
    const uint8_t *q, *pairs; /* of the first of the R rows */
    uint32_t layout;
};

/* Sums over columns 4 from to 4 to, of the kinds with small unsigned weights. */
AVX2_INLINE void sum_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                          struct rows_at a, const int from, const int to, __m256i *sum)
{
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        sum[r] = first_sum(kind, a.pairs + 4 * r, a.layout, from);
#pragma GCC unroll 8
    for (int j = from; j < to; j++) {
        __m256i v = _mm256_load_si256((const __m256i *)(const void *)panel + j);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            __m256i x = _mm256_set1_epi32((int)load_u32(a.q + 32 * r + 4 * j));
            sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(v, x));
            AVX2_KEEP(sum[r]);
        }
    }
}

AVX2_INLINE void sum_rows_i8(const uint32_t R, const uint8_t *panel, struct rows_at a, __m256i *sum)
{
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++)
        sum[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i v = _mm256_load_si256((const __m256i *)(const void *)panel + j);
        __m256i size = _mm256_abs_epi8(v);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            __m256i x = _mm256_set1_epi32((int)load_u32(a.q + 32 * r + 4 * j));
            x = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, v));
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(x, _mm256_set1_epi16(1)));
            AVX2_KEEP(sum[r]);
        }
    }
}

/* Exact integer sums of one block as 32-bit lanes. */
AVX2_INLINE void block_sums(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                            struct rows_at a, __m256i *sum)
{
    const __m256i ones = _mm256_set1_epi16(1), *sc = (const __m256i *)(const void *)panel + 10;
    if (kind == PANEL_I8) {
        sum_rows_i8(R, panel, a, sum);
        return;
    }
    if (kind == PANEL_S6 || kind == PANEL_S2M) {
        __m256i second[TILE_ROWS];
        sum_rows(kind, R, panel, a, 0, 4, sum);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++)
            sum[r] = _mm256_madd_epi16(sum[r], sc[0]);
        sum_rows(kind, R, panel, a, 4, 8, second);
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++)
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(second[r], sc[1]));
        return;
    }
    sum_rows(kind, R, panel, a, 0, 8, sum);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < R; r++) {
        sum[r] = _mm256_madd_epi16(sum[r], ones);
        if (kind == PANEL_U5M) {
            __m256i centre = first_sum(kind, a.pairs + 4 * r, a.layout, 0);
            sum[r] = _mm256_sub_epi32(sum[r], _mm256_madd_epi16(centre, ones));
        }
    }
}

/* R rows of a tile whose layout has `layout` rows, beginning with the row that `a` points to. */
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
        block_sums(kind, R, panel, at, sum);
        const float *d = (const float *)(const void *)(f + 32 * layout), *s = d + layout;
        __m256 dw = _mm256_load_ps((const float *)(const void *)(panel + 256));
        __m256 mw = _mm256_load_ps((const float *)(const void *)(panel + 288));
#pragma GCC unroll 8
        for (uint32_t r = 0; r < R; r++) {
            __m256 product = _mm256_mul_ps(dw, _mm256_cvtepi32_ps(sum[r]));
            acc[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(d[r]), acc[r]);
            if (panel_has_minimum(kind))
                acc[r] = _mm256_fmadd_ps(mw, _mm256_set1_ps(s[r]), acc[r]);
            if (kind == PANEL_S2M) {
                __m256i m = avx2_minimum_sum((const __m256i *)(const void *)panel + 12,
                                             at.pairs + 4 * r, layout);
                product = _mm256_mul_ps(mw, _mm256_cvtepi32_ps(m));
                acc[r] = _mm256_fmadd_ps(product, _mm256_set1_ps(d[r]), acc[r]);
            }
        }
        panel += panel_block_bytes(kind);
        tile += (size_t)layout * TILE_ROW_BYTES;
    }
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
TILE(S6)
TILE(S2M)

void avx2_panels(struct kernel_ops *ops)
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
    ops->tile[PANEL_U4C] = tile_U4C;
    ops->tile[PANEL_U4M] = tile_U4M;
    ops->tile[PANEL_U5C] = tile_U5C;
    ops->tile[PANEL_U5M] = tile_U5M;
    ops->tile[PANEL_I8] = tile_I8;
    ops->tile[PANEL_S6] = tile_S6;
    ops->tile[PANEL_S2M] = tile_S2M;
}
