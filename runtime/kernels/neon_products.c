/* Quantised weights times 8-bit activations, NEON; compiled three times: plain, with the
 * dot-product instructions, and with these and i8mm (products of 2 x 8 by 8 x 2 matrices, for
 * tiles). The build says which (NEON_DOTPROD, NEON_I8MM beside it), not the compiler, whose own
 * choice of a CPU may have more than the plain one. Integer sums are exact, so however they are
 * formed the bits agree. */
#include "runtime/kernels/neon_open.h"

/* a += the products of 16 bytes; where their sums lie in a does not matter, only the total. */
NEON_INLINE int32x4_t dot(int32x4_t a, int8x16_t w, int8x16_t x)
{
#ifdef NEON_DOTPROD
    return vdotq_s32(a, w, x);
#else
    /* two products fit 16 bits: 2 * 128 * 127 */
    int16x8_t p = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    return vpadalq_s16(a, vmlal_s8(p, vget_high_s8(w), vget_high_s8(x)));
#endif
}

/* Totals of four vectors. */
NEON_INLINE int32x4_t totals(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d)
{
    return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}

/* Sum of a pair of the tile: -c * sum(q). */
NEON_INLINE int pair_total(const uint8_t *p)
{
    int16_t pair[2];
    memcpy(pair, p, sizeof pair);
    return pair[0] + pair[1];
}

/* One row of one block of a tile whose layout has `layout` rows. */
struct row_at {
    const int8_t *q;
    const uint8_t *pairs; /* c8; the others follow at 4 * layout bytes each */
    float d, s;
};

NEON_INLINE struct row_at row_at(const uint8_t *tile, uint32_t layout, uint32_t r)
{
    const uint8_t *f = tile + 32 * (size_t)layout + 4 * (size_t)r;
    struct row_at x = {.q = (const int8_t *)tile + 32 * (size_t)r, .pairs = f + 8 * (size_t)layout};
    memcpy(&x.d, f, 4);
    memcpy(&x.s, f + 4 * (size_t)layout, 4);
    return x;
}

/* What centres an unsigned sum over all 32 columns, or over half h of them. */
NEON_INLINE int correction(const enum panel_kind kind, const struct row_at *x, uint32_t layout,
                           int h)
{
    if (kind == PANEL_U4C)
        return pair_total(x->pairs);
    if (kind == PANEL_U5C)
        return pair_total(x->pairs + 4 * layout);
    if (kind == PANEL_S6)
        return pair_total(x->pairs + (h ? 12 : 8) * layout);
    return 0;
}

NEON_INLINE bool two_scales(const enum panel_kind kind)
{
    return kind == PANEL_S6 || kind == PANEL_S2M;
}

/* The chain's steps for four outputs of one block. sc, mn: [2][8] from the first output on. */
NEON_INLINE float32x4_t step(const enum panel_kind kind, int32x4_t sum, const float *dw,
                             const float *mw, const struct row_at *x, uint32_t layout,
                             const int16_t *mn, float32x4_t acc)
{
    acc = vfmaq_n_f32(acc, vmulq_f32(vld1q_f32(dw), vcvtq_f32_s32(sum)), x->d);
    if (panel_has_minimum(kind))
        acc = vfmaq_n_f32(acc, vld1q_f32(mw), x->s);
    if (kind == PANEL_S2M) {
        int first = -pair_total(x->pairs + 8 * layout) / 32;
        int last = -pair_total(x->pairs + 12 * layout) / 32;
        int32x4_t m = vmulq_n_s32(vmovl_s16(vld1_s16(mn)), first);
        m = vmlaq_n_s32(m, vmovl_s16(vld1_s16(mn + 8)), last);
        acc = vfmaq_n_f32(acc, vmulq_f32(vld1q_f32(mw), vcvtq_f32_s32(m)), x->d);
    }
    return acc;
}

/* ---- few rows */

NEON_INLINE int32x4_t few_sum(const enum panel_kind kind, const struct row32 *w,
                              const struct row_at *x, uint32_t layout, const struct scales8 *s,
                              uint32_t first)
{
    int8x16_t x0 = vld1q_s8(x->q), x1 = vld1q_s8(x->q + 16);
    const int32x4_t zero = vdupq_n_s32(0);
    if (two_scales(kind)) {
        int32x4_t a = totals(dot(zero, w[0].low, x0), dot(zero, w[1].low, x0),
                             dot(zero, w[2].low, x0), dot(zero, w[3].low, x0));
        int32x4_t b = totals(dot(zero, w[0].high, x1), dot(zero, w[1].high, x1),
                             dot(zero, w[2].high, x1), dot(zero, w[3].high, x1));
        a = vaddq_s32(a, vdupq_n_s32(correction(kind, x, layout, 0)));
        b = vaddq_s32(b, vdupq_n_s32(correction(kind, x, layout, 1)));
        a = vmulq_s32(a, vmovl_s16(vld1_s16(s->sc[0] + first)));
        return vmlaq_s32(a, b, vmovl_s16(vld1_s16(s->sc[1] + first)));
    }
    int32x4_t a[4];
    for (int i = 0; i < 4; i++)
        a[i] = dot(dot(zero, w[i].low, x0), w[i].high, x1);
    return vaddq_s32(totals(a[0], a[1], a[2], a[3]), vdupq_n_s32(correction(kind, x, layout, 0)));
}

NEON_INLINE void few_any(const enum tensor_type t, const enum panel_kind kind, const uint32_t bytes,
                         const uint32_t R, const uint8_t *w, size_t stride, uint32_t n_blocks,
                         const uint8_t *tile, float (*out)[PANEL_OUTS])
{
    float32x4_t acc[FEW_ROWS][2];
    for (uint32_t r = 0; r < R; r++)
        acc[r][0] = acc[r][1] = vdupq_n_f32(0);
    for (uint32_t i = 0; i < n_blocks / neon_parts(t); i++, w += bytes) {
        struct scales8 scales[8];
        neon_scales(t, w, stride, scales);
        for (uint32_t at = 0; at < bytes; at += 64)
            for (uint32_t o = 0; o < PANEL_OUTS; o++)
                __builtin_prefetch(w + o * stride + at + 512);
        for (int j = 0; j < (int)neon_parts(t); j++, tile += (size_t)R * TILE_ROW_BYTES)
            for (uint32_t half = 0; half < 2; half++) {
                const struct scales8 *s = &scales[j];
                struct row32 rows[4];
                for (uint32_t o = 0; o < 4; o++)
                    rows[o] = neon_open(t, w + (4 * half + o) * stride, j);
                for (uint32_t r = 0; r < R; r++) {
                    struct row_at x = row_at(tile, R, r);
                    int32x4_t sum = few_sum(kind, rows, &x, R, s, 4 * half);
                    acc[r][half] = step(kind, sum, s->dw + 4 * half, s->mw + 4 * half, &x, R,
                                        s->mn[0] + 4 * half, acc[r][half]);
                }
            }
    }
    for (uint32_t r = 0; r < R; r++)
        for (uint32_t half = 0; half < 2; half++)
            vst1q_f32(out[r] + 4 * half, vaddq_f32(acc[r][half], vdupq_n_f32(0)));
}

/* ---- packing */

/* 16 columns of four outputs, as tile_half wants them: four vectors of 4 outputs x 4 columns; with
 * i8mm of 2 outputs x 8 columns: columns 0 to 7 of outputs 0, 1 and of 2, 3, then 8 to 15. */
NEON_INLINE void store_columns(const int8x16_t w[4], uint8_t *panel)
{
#ifdef NEON_I8MM
    for (int i = 0; i < 4; i += 2) {
        int64x2_t a = vreinterpretq_s64_s8(w[i]), b = vreinterpretq_s64_s8(w[i + 1]);
        vst1q_u8(panel + 16 * i, vreinterpretq_u8_s64(vtrn1q_s64(a, b)));
        vst1q_u8(panel + 16 * i + 64, vreinterpretq_u8_s64(vtrn2q_s64(a, b)));
    }
#else
    float32x4_t a[4], v[4];
    for (int i = 0; i < 4; i++)
        a[i] = vreinterpretq_f32_s8(w[i]);
    neon_transpose(a, v);
    for (int i = 0; i < 4; i++)
        vst1q_u8(panel + 32 * i, vreinterpretq_u8_f32(v[i]));
#endif
}

NEON_INLINE void pack_any(const enum tensor_type t, const enum panel_kind kind,
                          const uint32_t bytes, const uint8_t *w, size_t stride, uint32_t n_blocks,
                          uint8_t *panel)
{
    for (uint32_t i = 0; i < n_blocks / neon_parts(t); i++, w += bytes) {
        struct scales8 scales[8];
        memset(scales, 0, sizeof scales);
        neon_scales(t, w, stride, scales);
        for (int j = 0; j < (int)neon_parts(t); j++, panel += panel_block_bytes(kind)) {
            for (uint32_t half = 0; half < 2; half++) {
                int8x16_t low[4], high[4];
                for (uint32_t o = 0; o < 4; o++) {
                    struct row32 r = neon_open(t, w + (4 * half + o) * stride, j);
                    low[o] = r.low;
                    high[o] = r.high;
                }
                store_columns(low, panel + 16 * half);
                store_columns(high, panel + 128 + 16 * half);
            }
            memcpy(panel + 256, scales[j].dw, 32);
            memcpy(panel + 288, scales[j].mw, 32);
            for (int h = 0; h < 2 && two_scales(kind); h++) {
                int16x8_t sc = vld1q_s16(scales[j].sc[h]), mn = vld1q_s16(scales[j].mn[h]);
                int16_t *to = (int16_t *)(void *)(panel + 320 + 32 * h);
                vst1q_s16(to, vzip1q_s16(sc, sc));
                vst1q_s16(to + 8, vzip2q_s16(sc, sc));
                if (kind == PANEL_S2M) {
                    vst1q_s16(to + 32, vzip1q_s16(mn, mn));
                    vst1q_s16(to + 40, vzip2q_s16(mn, mn));
                }
            }
        }
    }
}

/* ---- panels */

/* Between tile_halves a sum is a row's four outputs; with i8mm, sums r and r + 1 are rows r and
 * r + 1 of outputs 0, 1 and of outputs 2, 3. This changes the one into the other, both ways. */
NEON_INLINE void tile_turn(const uint32_t R, int32x4_t *sum)
{
#ifdef NEON_I8MM
#pragma GCC unroll 2
    for (uint32_t r = 0; r < R; r += 2) {
        int64x2_t a = vreinterpretq_s64_s32(sum[r]), b = vreinterpretq_s64_s32(sum[r + 1]);
        sum[r] = vreinterpretq_s32_s64(vtrn1q_s64(a, b));
        sum[r + 1] = vreinterpretq_s32_s64(vtrn2q_s64(a, b));
    }
#else
    (void)R, (void)sum;
#endif
}

/* Adds columns 16 h to 16 h + 15 of four outputs (w: as packed, 32 bytes apart) for R rows. */
NEON_INLINE void tile_half(const uint32_t R, const int8_t *w, const uint8_t *q, int32x4_t *sum)
{
#if defined NEON_I8MM
    int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 64); /* outputs 0, 1 */
    int8x16_t v0 = vld1q_s8(w + 32), v1 = vld1q_s8(w + 96);
#pragma GCC unroll 2
    for (uint32_t r = 0; r < R; r += 2) {
        const int8_t *p = (const int8_t *)q + 32 * r;
        int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(p)); /* of one row alone: twice */
        int64x2_t b = R == 1 ? a : vreinterpretq_s64_s8(vld1q_s8(p + 32));
        int8x16_t x0 = vreinterpretq_s8_s64(vtrn1q_s64(a, b));
        int8x16_t x1 = vreinterpretq_s8_s64(vtrn2q_s64(a, b));
        sum[r] = vmmlaq_s32(vmmlaq_s32(sum[r], x0, w0), x1, w1);
        sum[r + 1] = vmmlaq_s32(vmmlaq_s32(sum[r + 1], x0, v0), x1, v1);
    }
#elif defined NEON_DOTPROD
    int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 32);
    int8x16_t w2 = vld1q_s8(w + 64), w3 = vld1q_s8(w + 96);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < R; r++) {
        int8x16_t x = vld1q_s8((const int8_t *)q + 32 * r);
        sum[r] = vdotq_laneq_s32(sum[r], w0, x, 0);
        sum[r] = vdotq_laneq_s32(sum[r], w1, x, 1);
        sum[r] = vdotq_laneq_s32(sum[r], w2, x, 2);
        sum[r] = vdotq_laneq_s32(sum[r], w3, x, 3);
    }
#else
    for (uint32_t r = 0; r < R; r++) {
        int32x4_t low = vdupq_n_s32(0), high = low; /* outputs 0, 1 and 2, 3: two lanes each */
        for (int j = 0; j < 4; j += 2) {
            int8x16_t w0 = vld1q_s8(w + 32 * j), w1 = vld1q_s8(w + 32 * j + 32);
            int8x8_t x0 = vreinterpret_s8_u32(vdup_n_u32(load_u32(q + 32 * r + 4 * j)));
            int8x8_t x1 = vreinterpret_s8_u32(vdup_n_u32(load_u32(q + 32 * r + 4 * j + 4)));
            int16x8_t a = vmlal_s8(vmull_s8(vget_low_s8(w0), x0), vget_low_s8(w1), x1);
            int16x8_t b = vmlal_s8(vmull_s8(vget_high_s8(w0), x0), vget_high_s8(w1), x1);
            low = vpadalq_s16(low, a);
            high = vpadalq_s16(high, b);
        }
        sum[r] = vaddq_s32(sum[r], vpaddq_s32(low, high));
    }
#endif
}

/* The scales of four outputs, each stored twice. */
NEON_INLINE int32x4_t every_second(const uint8_t *p)
{
    int16x8_t v = vld1q_s16((const int16_t *)(const void *)p);
    return vmovl_s16(vget_low_s16(vuzp1q_s16(v, v)));
}

/* Sums begin with what centres them. */
NEON_INLINE void tile_begin(const enum panel_kind kind, const uint32_t R, const uint8_t *tile,
                            uint32_t layout, uint32_t row, int h, int32x4_t *sum)
{
#pragma GCC unroll 4
    for (uint32_t r = 0; r < R; r++) {
        struct row_at x = row_at(tile, layout, row + r);
        sum[r] = vdupq_n_s32(correction(kind, &x, layout, h));
    }
    if (R == 1)
        sum[1] = sum[0];
    tile_turn(R, sum);
}

/* Integer sums of four outputs of one block, R rows from `row` on: 1, 2 or 4. */
NEON_INLINE void tile_sums(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                           uint32_t half, const uint8_t *tile, uint32_t layout, uint32_t row,
                           int32x4_t *sum)
{
    const int8_t *w = (const int8_t *)panel + 16 * half;
    const uint8_t *q = tile + 32 * row;
    tile_begin(kind, R, tile, layout, row, 0, sum);
    tile_half(R, w, q, sum);
    if (!two_scales(kind)) {
        tile_half(R, w + 128, q + 16, sum);
        tile_turn(R, sum);
        return;
    }
    int32x4_t second[4];
    tile_begin(kind, R, tile, layout, row, 1, second);
    tile_half(R, w + 128, q + 16, second);
    tile_turn(R, sum);
    tile_turn(R, second);
    int32x4_t sc0 = every_second(panel + 320 + 16 * half);
    int32x4_t sc1 = every_second(panel + 352 + 16 * half);
    for (uint32_t r = 0; r < R; r++)
        sum[r] = vmlaq_s32(vmulq_s32(sum[r], sc0), second[r], sc1);
}

NEON_INLINE void tile_rows(const enum panel_kind kind, const uint32_t R, const uint8_t *panel,
                           uint32_t n_blocks, const uint8_t *tile, uint32_t layout, uint32_t row,
                           float *y, size_t ldy, bool resume)
{
    float32x4_t acc[4][2];
    for (uint32_t r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            acc[r][half] = resume ? vld1q_f32(y + r * ldy + 4 * half) : vdupq_n_f32(0);
    for (uint32_t b = 0; b < n_blocks; b++) {
#pragma GCC unroll 2
        for (uint32_t half = 0; half < 2; half++) {
            const float *dw = (const float *)(const void *)(panel + 256) + 4 * half;
            int16_t mn[16];
            int32x4_t sum[4];
            tile_sums(kind, R, panel, half, tile, layout, row, sum);
            if (kind == PANEL_S2M)
                for (int h = 0; h < 2; h++)
                    vst1_s16(mn + 8 * h, vmovn_s32(every_second(panel + 384 + 32 * h + 16 * half)));
#pragma GCC unroll 4
            for (uint32_t r = 0; r < R; r++) {
                struct row_at x = row_at(tile, layout, row + r);
                acc[r][half] = step(kind, sum[r], dw, dw + 8, &x, layout, mn, acc[r][half]);
            }
        }
        panel += panel_block_bytes(kind);
        tile += (size_t)layout * TILE_ROW_BYTES;
    }
    for (uint32_t r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            vst1q_f32(y + r * ldy + 4 * half, vaddq_f32(acc[r][half], vdupq_n_f32(0)));
}

/* ---- the table */

#define TYPE(T, kind, bytes)                                                                       \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,   \
                        uint32_t n_rows, float(*out)[PANEL_OUTS])                                  \
    {                                                                                              \
        if (n_rows == 1)                                                                           \
            few_any(TENSOR_##T, kind, bytes, 1, w, stride, n_blocks, tile, out);                   \
        else if (n_rows == 2)                                                                      \
            few_any(TENSOR_##T, kind, bytes, 2, w, stride, n_blocks, tile, out);                   \
        else if (n_rows == 3)                                                                      \
            few_any(TENSOR_##T, kind, bytes, 3, w, stride, n_blocks, tile, out);                   \
        else                                                                                       \
            few_any(TENSOR_##T, kind, bytes, 4, w, stride, n_blocks, tile, out);                   \
    }                                                                                              \
    static void pack_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, uint8_t *panel)       \
    {                                                                                              \
        pack_any(TENSOR_##T, kind, bytes, w, stride, n_blocks, panel);                             \
    }
#define TILE(K)                                                                                    \
    static void tile_##K(const uint8_t *panel, uint32_t n_blocks, const uint8_t *tile,             \
                         uint32_t n_rows, float *y, size_t ldy, bool resume)                       \
    {                                                                                              \
        uint32_t row = 0;                                                                          \
        for (; row + 4 <= n_rows; row += 4)                                                        \
            tile_rows(PANEL_##K, 4, panel, n_blocks, tile, n_rows, row, y + row * ldy, ldy,        \
                      resume);                                                                     \
        for (; row + 2 <= n_rows; row += 2)                                                        \
            tile_rows(PANEL_##K, 2, panel, n_blocks, tile, n_rows, row, y + row * ldy, ldy,        \
                      resume);                                                                     \
        if (row < n_rows)                                                                          \
            tile_rows(PANEL_##K, 1, panel, n_blocks, tile, n_rows, row, y + row * ldy, ldy,        \
                      resume);                                                                     \
    }
TYPE(Q4_0, PANEL_U4C, 18)
TYPE(Q4_1, PANEL_U4M, 20)
TYPE(Q5_0, PANEL_U5C, 22)
TYPE(Q5_1, PANEL_U5M, 24)
TYPE(Q8_0, PANEL_I8, 34)
TYPE(IQ4_NL, PANEL_I8, 18)
TYPE(MXFP4, PANEL_I8, 17)
TYPE(Q2_K, PANEL_S2M, 84)
TYPE(Q3_K, PANEL_S6, 110)
TYPE(Q4_K, PANEL_U4M, 144)
TYPE(Q5_K, PANEL_U5M, 176)
TYPE(Q6_K, PANEL_S6, 210)
TILE(U4C)
TILE(U4M)
TILE(U5C)
TILE(U5M)
TILE(I8)
TILE(S6)
TILE(S2M)

#if defined NEON_I8MM
void neon_products_i8mm(struct kernel_ops *ops)
#elif defined NEON_DOTPROD
void neon_products_dotprod(struct kernel_ops *ops)
#else
void neon_products(struct kernel_ops *ops)
#endif
{
#define SET_TYPE(T)                                                                                \
    ops->few[TENSOR_##T] = few_##T;                                                                \
    ops->pack[TENSOR_##T] = pack_##T;
#define SET_TILE(K) ops->tile[PANEL_##K] = tile_##K;
    /* A list of macros, which clang-format takes for one statement. */
    /* clang-format off */
    SET_TYPE(Q4_0)
    SET_TYPE(Q4_1)
    SET_TYPE(Q5_0)
    SET_TYPE(Q5_1)
    SET_TYPE(Q8_0)
    SET_TYPE(IQ4_NL)
    SET_TYPE(MXFP4)
    SET_TYPE(Q2_K)
    SET_TYPE(Q3_K)
    SET_TYPE(Q4_K)
    SET_TYPE(Q5_K)
    SET_TYPE(Q6_K)
    SET_TILE(U4C)
    SET_TILE(U4M)
    SET_TILE(U5C)
    SET_TILE(U5M)
    SET_TILE(I8)
    SET_TILE(S6)
    SET_TILE(S2M)
    /* clang-format on */
}
