/* The C reference of packing and products: arithmetic.h 1 to 5 as they stand there. */
#include "runtime/kernels/c_ref.h"
#include "runtime/kernels/half.h"

#include <math.h>

/* Activation row r of block b in a tile of n_rows. */
struct tile_row {
    const int8_t *q;
    float d, s;
};

static struct tile_row tile_row(const uint8_t *tile, uint32_t n_rows, uint32_t b, uint32_t r)
{
    const uint8_t *p = tile + (size_t)b * n_rows * TILE_ROW_BYTES;
    struct tile_row row = {.q = (const int8_t *)p + 32 * (size_t)r};
    memcpy(&row.d, p + 32 * (size_t)n_rows + 4 * (size_t)r, 4);
    memcpy(&row.s, p + 36 * (size_t)n_rows + 4 * (size_t)r, 4);
    return row;
}

static void put_pair(uint8_t *p, int low, int high)
{
    int16_t pair[2] = {(int16_t)low, (int16_t)high};
    memcpy(p, pair, sizeof pair);
}

void c_quantise(const float *x, uint32_t n_blocks, uint32_t n_rows, uint32_t r, uint8_t *tile)
{
    for (uint32_t b = 0; b < n_blocks; b++, x += BLOCK, tile += (size_t)n_rows * TILE_ROW_BYTES) {
        uint32_t top = 0; /* as bits, so that a NaN wins and poisons d */
        for (unsigned i = 0; i < BLOCK; i++) {
            uint32_t u = bits_of_float(x[i]) & 0x7fffffffu;
            top = u > top ? u : top;
        }
        float a = float_of_bits(top);
        bool zero = a < BLOCK_ZERO_BELOW;
        float d = zero ? 0 : a / 127.f, id = zero ? 0 : 127.f / a;
        int8_t *q = (int8_t *)tile + 32 * (size_t)r;
        int sum[2][2] = {{0}}; /* [half][k mod 4 >= 2] */
        for (unsigned i = 0; i < BLOCK; i++) {
            float v = rintf(x[i] * id);
            v = v > 127.f ? 127.f : v < -127.f ? -127.f : isnan(v) ? 0.f : v;
            q[i] = (int8_t)v;
            sum[i / 16][i % 4 / 2] += q[i];
        }
        int low = sum[0][0] + sum[1][0], high = sum[0][1] + sum[1][1];
        float s = d * (float)(low + high);
        uint8_t *p = tile + 32 * (size_t)n_rows + 4 * (size_t)r;
        memcpy(p, &d, 4);
        memcpy(p + 4 * (size_t)n_rows, &s, 4);
        put_pair(p + 8 * (size_t)n_rows, -8 * low, -8 * high);
        put_pair(p + 12 * (size_t)n_rows, -16 * low, -16 * high);
        put_pair(p + 16 * (size_t)n_rows, -32 * sum[0][0], -32 * sum[0][1]);
        put_pair(p + 20 * (size_t)n_rows, -32 * sum[1][0], -32 * sum[1][1]);
    }
}

static void pack_any(enum tensor_type type, const uint8_t *w, size_t stride, uint32_t n_blocks,
                     uint8_t *panel)
{
    uint32_t block_bytes = panel_block_bytes(panel_kind(type));
    for (uint32_t b = 0; b < n_blocks; b++, panel += block_bytes)
        for (uint32_t o = 0; o < PANEL_OUTS; o++) {
            struct opened opened;
            block_open(type, w + o * stride, b, &opened);
            for (uint32_t j = 0; j < 8; j++)
                memcpy(panel + 32 * j + 4 * o, opened.w + 4 * j, 4);
            memcpy(panel + 256 + 4 * o, &opened.dw, 4);
            memcpy(panel + 288 + 4 * o, &opened.mw, 4);
            for (uint32_t h = 0; h < 2 && block_bytes >= PANEL_S6_BYTES; h++) {
                int16_t sc[2] = {opened.sc[h], opened.sc[h]}, mn[2] = {opened.mn[h], opened.mn[h]};
                memcpy(panel + 320 + 32 * h + 4 * o, sc, 4);
                if (block_bytes >= PANEL_S2M_BYTES)
                    memcpy(panel + 384 + 32 * h + 4 * o, mn, 4);
            }
        }
}

/* The chain's steps for one block of 32. */
static float chain_block(enum panel_kind kind, const struct opened *w, struct tile_row x, float acc)
{
    int centre = panel_centre(kind), sum[2] = {0, 0}, q[2] = {0, 0};
    for (unsigned i = 0; i < BLOCK; i++) {
        sum[i / 16] += (w->w[i] - centre) * x.q[i];
        q[i / 16] += x.q[i];
    }
    int isum = w->sc[0] * sum[0] + w->sc[1] * sum[1];
    acc = fmaf(w->dw * (float)isum, x.d, acc);
    if (panel_has_minimum(kind))
        acc = fmaf(w->mw, x.s, acc);
    if (kind == PANEL_S2M)
        acc = fmaf(w->mw * (float)(w->mn[0] * q[0] + w->mn[1] * q[1]), x.d, acc);
    return acc;
}

static void few_any(enum tensor_type type, const uint8_t *w, size_t stride, uint32_t n_blocks,
                    const uint8_t *tile, uint32_t n_rows, float (*out)[PANEL_OUTS])
{
    enum panel_kind kind = panel_kind(type);
    for (uint32_t o = 0; o < PANEL_OUTS; o++) {
        float acc[FEW_ROWS] = {0};
        for (uint32_t b = 0; b < n_blocks; b++) {
            struct opened opened;
            block_open(type, w + o * stride, b, &opened);
            for (uint32_t r = 0; r < n_rows; r++)
                acc[r] = chain_block(kind, &opened, tile_row(tile, n_rows, b, r), acc[r]);
        }
        for (uint32_t r = 0; r < n_rows; r++)
            out[r][o] = acc[r] + 0.0f;
    }
}

static void tile_any(enum panel_kind kind, const uint8_t *panel, uint32_t n_blocks,
                     const uint8_t *tile, uint32_t n_rows, float *y, size_t ldy, bool resume)
{
    uint32_t block_bytes = panel_block_bytes(kind);
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t o = 0; o < PANEL_OUTS; o++) {
            float acc = resume ? y[r * ldy + o] : 0;
            const uint8_t *p = panel;
            for (uint32_t b = 0; b < n_blocks; b++, p += block_bytes) {
                struct opened w = {.sc = {1, 1}};
                for (uint32_t j = 0; j < 8; j++)
                    memcpy(w.w + 4 * j, p + 32 * j + 4 * o, 4);
                memcpy(&w.dw, p + 256 + 4 * o, 4);
                memcpy(&w.mw, p + 288 + 4 * o, 4);
                for (uint32_t h = 0; h < 2 && block_bytes >= PANEL_S6_BYTES; h++) {
                    memcpy(&w.sc[h], p + 320 + 32 * h + 4 * o, 2);
                    if (block_bytes >= PANEL_S2M_BYTES)
                        memcpy(&w.mn[h], p + 384 + 32 * h + 4 * o, 2);
                }
                acc = chain_block(kind, &w, tile_row(tile, n_rows, b, r), acc);
            }
            y[r * ldy + o] = acc + 0.0f;
        }
}

/* One function per type or kind, as the table wants them. */
#define FEW_AND_PACK(T)                                                                            \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, const uint8_t *tile,   \
                        uint32_t n_rows, float(*out)[PANEL_OUTS])                                  \
    {                                                                                              \
        few_any(TENSOR_##T, w, stride, n_blocks, tile, n_rows, out);                               \
    }                                                                                              \
    static void pack_##T(const uint8_t *w, size_t stride, uint32_t n_blocks, uint8_t *panel)       \
    {                                                                                              \
        pack_any(TENSOR_##T, w, stride, n_blocks, panel);                                          \
    }
#define TILE(K)                                                                                    \
    static void tile_##K(const uint8_t *panel, uint32_t n_blocks, const uint8_t *tile,             \
                         uint32_t n_rows, float *y, size_t ldy, bool resume)                       \
    {                                                                                              \
        tile_any(PANEL_##K, panel, n_blocks, tile, n_rows, y, ldy, resume);                        \
    }
#define QUANTISED_TYPES(X)                                                                         \
    X(Q4_0)                                                                                        \
    X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(MXFP4)
#define KINDS(X) X(U4C) X(U4M) X(U5C) X(U5M) X(I8) X(S6) X(S2M)
QUANTISED_TYPES(FEW_AND_PACK)
KINDS(TILE)

static float dense_get(enum dense_type type, const uint8_t *row, uint32_t k)
{
    if (type == DENSE_F32)
        return float_of_bits(load_u32(row + 4 * (size_t)k));
    uint16_t v = load_u16(row + 2 * (size_t)k);
    return type == DENSE_F16 ? half_open(v) : bf16_open(v);
}

static void dense_few_any(enum dense_type type, const uint8_t *w, size_t stride, uint32_t n_in,
                          const float *x, size_t ldx, uint32_t n_rows, float (*out)[PANEL_OUTS],
                          bool resume)
{
    for (uint32_t o = 0; o < PANEL_OUTS; o++) {
        float acc[FEW_ROWS] = {0};
        for (uint32_t r = 0; r < n_rows && resume; r++)
            acc[r] = out[r][o];
        for (uint32_t k = 0; k < n_in; k++) {
            float v = dense_get(type, w + o * stride, k);
            for (uint32_t r = 0; r < n_rows; r++)
                acc[r] = fmaf(v, x[r * ldx + k], acc[r]);
        }
        for (uint32_t r = 0; r < n_rows; r++)
            out[r][o] = acc[r] + 0.0f;
    }
}

static void dense_pack_any(enum dense_type type, const uint8_t *w, size_t stride, uint32_t n_in,
                           float *panel, size_t ldp)
{
    for (uint32_t o = 0; o < PANEL_OUTS; o++)
        for (uint32_t k = 0; k < n_in; k++)
            panel[k * ldp + o] = dense_get(type, w + o * stride, k);
}

static void dense_tile(const float *panel, size_t ldp, uint32_t n_in, const float *tile, size_t ldx,
                       uint32_t n_rows, float *y, size_t ldy, bool resume)
{
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t o = 0; o < DENSE_OUTS; o++) {
            float acc = resume ? y[r * ldy + o] : 0;
            for (uint32_t k = 0; k < n_in; k++)
                acc = fmaf(panel[k * ldp + o], tile[k * ldx + r], acc);
            y[r * ldy + o] = acc + 0.0f;
        }
}

#define DENSE(T)                                                                                   \
    static void dense_few_##T(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,      \
                              size_t ldx, uint32_t n_rows, float(*out)[PANEL_OUTS], bool resume)   \
    {                                                                                              \
        dense_few_any(DENSE_##T, w, stride, n_in, x, ldx, n_rows, out, resume);                    \
    }                                                                                              \
    static void dense_pack_##T(const uint8_t *w, size_t stride, uint32_t n_in, float *panel,       \
                               size_t ldp)                                                         \
    {                                                                                              \
        dense_pack_any(DENSE_##T, w, stride, n_in, panel, ldp);                                    \
    }
DENSE(F32)
DENSE(F16)
DENSE(BF16)

void c_products(struct kernel_ops *ops)
{
#define SET_TYPE(T)                                                                                \
    ops->few[TENSOR_##T] = few_##T;                                                                \
    ops->pack[TENSOR_##T] = pack_##T;
#define SET_KIND(K) ops->tile[PANEL_##K] = tile_##K;
#define SET_DENSE(T)                                                                               \
    ops->dense_few[DENSE_##T] = dense_few_##T;                                                     \
    ops->dense_pack[DENSE_##T] = dense_pack_##T;
    QUANTISED_TYPES(SET_TYPE)
    KINDS(SET_KIND)
    SET_DENSE(F32)
    SET_DENSE(F16)
    SET_DENSE(BF16)
    ops->dense_tile = dense_tile;
    ops->dense_rows = DENSE_ROWS;
    ops->dense_outs = DENSE_OUTS;
    ops->panel_outs = PANEL_OUTS;
    ops->few_rows = FEW_ROWS;
    ops->dense_few_rows = FEW_ROWS;
    ops->tile_rows = TILE_ROWS;
    ops->quantise = c_quantise;
    ops->open = row_open;
}
