/* Opening quantised rows with NEON, same values as block_open. */
#ifndef COVEY_RUNTIME_KERNELS_NEON_OPEN_H
#define COVEY_RUNTIME_KERNELS_NEON_OPEN_H

#include "runtime/kernels/neon.h"

/* 32 columns of one row as stored, before the centre is taken off. */
struct row32 {
    int8x16_t low, high;
};

/* Scales of one part of 32 columns of 8 rows. */
struct scales8 {
    float dw[PANEL_OUTS], mw[PANEL_OUTS];
    int16_t sc[2][PANEL_OUTS], mn[2][PANEL_OUTS];
};

NEON_INLINE uint32_t neon_parts(enum tensor_type t) /* of 32 columns in a block of the file */
{
    return t >= TENSOR_Q2_K && t <= TENSOR_Q6_K ? 8 : 1;
}

NEON_INLINE struct row32 neon_nibbles(const uint8_t *p)
{
    uint8x16_t v = vld1q_u8(p);
    return (struct row32){vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))),
                          vreinterpretq_s8_u8(vshrq_n_u8(v, 4))};
}

/* Bit i of 16 -> 16 in byte i. */
NEON_INLINE int8x16_t neon_fifth_bits(const uint8_t *p)
{
    const uint8x16_t mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t bits = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
    return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(bits, mask), vdupq_n_u8(16)));
}

NEON_INLINE struct row32 neon_five(const uint8_t *qs, const uint8_t *qh)
{
    struct row32 r = neon_nibbles(qs);
    r.low = vorrq_s8(r.low, neon_fifth_bits(qh));
    r.high = vorrq_s8(r.high, neon_fifth_bits(qh + 2));
    return r;
}

NEON_INLINE struct row32 neon_table(const uint8_t *qs, int8x16_t table)
{
    struct row32 r = neon_nibbles(qs);
    r.low = vqtbl1q_s8(table, vreinterpretq_u8_s8(r.low));
    r.high = vqtbl1q_s8(table, vreinterpretq_u8_s8(r.high));
    return r;
}

/* (16 bytes at p, shifted right, masked) shifted left. */
NEON_INLINE int8x16_t neon_bits(const uint8_t *p, int right, uint8_t mask, int left)
{
    uint8x16_t v = vshlq_u8(vld1q_u8(p), vdupq_n_s8((int8_t)-right));
    v = vandq_u8(v, vdupq_n_u8(mask));
    return vreinterpretq_s8_u8(vshlq_u8(v, vdupq_n_s8((int8_t)left)));
}

NEON_INLINE struct row32 neon_two(const uint8_t *low, int right_low, uint8_t mask,
                                  const uint8_t *high, int right_high, uint8_t mask_high, int left)
{
    return (struct row32){
        vorrq_s8(neon_bits(low, right_low, mask, 0), neon_bits(high, right_high, mask_high, left)),
        vorrq_s8(neon_bits(low + 16, right_low, mask, 0),
                 neon_bits(high + 16, right_high, mask_high, left))};
}

/* Part j of the block of the file at p. */
NEON_INLINE struct row32 neon_open(const enum tensor_type t, const uint8_t *p, int j)
{
    const int8x16_t iq4 = {-127, -104, -83, -65, -49, -35, -22, -10,
                           1,    13,   25,  38,  53,  69,  89,  113};
    const int8x16_t mxfp4 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    struct row32 r;
    switch (t) {
    case TENSOR_Q4_0:
        return neon_nibbles(p + 2);
    case TENSOR_Q4_1:
        return neon_nibbles(p + 4);
    case TENSOR_Q5_0:
        return neon_five(p + 6, p + 2);
    case TENSOR_Q5_1:
        return neon_five(p + 8, p + 4);
    case TENSOR_IQ4_NL:
        return neon_table(p + 2, iq4);
    case TENSOR_MXFP4:
        return neon_table(p + 1, mxfp4);
    case TENSOR_Q8_0:
        return (struct row32){vld1q_s8((const int8_t *)p + 2), vld1q_s8((const int8_t *)p + 18)};
    case TENSOR_Q2_K:
        p += 16 + j / 4 * 32;
        return (struct row32){neon_bits(p, 2 * (j % 4), 3, 0),
                              neon_bits(p + 16, 2 * (j % 4), 3, 0)};
    case TENSOR_Q3_K:
        r = neon_two(p + 32 + j / 4 * 32, 2 * (j % 4), 3, p, j, 1, 2);
        r.low = vaddq_s8(r.low, vdupq_n_s8(28));
        r.high = vaddq_s8(r.high, vdupq_n_s8(28));
        return r;
    case TENSOR_Q4_K:
        p += 16 + j / 2 * 32;
        return (struct row32){neon_bits(p, 4 * (j & 1), 15, 0),
                              neon_bits(p + 16, 4 * (j & 1), 15, 0)};
    case TENSOR_Q5_K:
        return neon_two(p + 48 + j / 2 * 32, 4 * (j & 1), 15, p + 16, j, 1, 4);
    default: /* Q6_K */
        return neon_two(p + 64 * (j / 4) + 32 * (j & 1), j % 4 < 2 ? 0 : 4, 15,
                        p + 128 + 32 * (j / 4), 2 * (j % 4), 3, 4);
    }
}

/* Scales of part j of one row into lane r. */
NEON_INLINE void neon_scales_row(const enum tensor_type t, const uint8_t *p, int j, uint32_t r,
                                 struct scales8 *s)
{
    if (t == TENSOR_Q6_K) {
        s->dw[r] = neon_half(p + 208);
        s->sc[0][r] = (int8_t)p[192 + 2 * j];
        s->sc[1][r] = (int8_t)p[193 + 2 * j];
    } else if (t == TENSOR_MXFP4) {
        s->dw[r] = float_of_bits(p[0] < 2 ? 0x00200000u << p[0] : (uint32_t)(p[0] - 1) << 23);
    } else if (neon_parts(t) == 8) { /* rarer layouts: the reference opens them */
        struct opened o;
        block_open(t, p, (uint32_t)j, &o);
        s->dw[r] = o.dw;
        s->mw[r] = o.mw;
        for (int h = 0; h < 2; h++) {
            s->sc[h][r] = o.sc[h];
            s->mn[h][r] = o.mn[h];
        }
    } else {
        s->dw[r] = neon_half(p);
        if (t == TENSOR_Q4_1 || t == TENSOR_Q5_1)
            s->mw[r] = neon_half(p + 2);
    }
}

/* Q4_K, Q5_K: all eight parts at once, once per block of the file. */
NEON_INLINE void neon_k_scales(const uint8_t *p, uint32_t r, float (*dw)[PANEL_OUTS],
                               float (*mw)[PANEL_OUTS])
{
    float d = neon_half(p), dmin = neon_half(p + 2);
    const uint8_t *s = p + 4;
    for (int j = 0; j < 4; j++) {
        dw[j][r] = d * (float)(s[j] & 63);
        mw[j][r] = -(dmin * (float)(s[j + 4] & 63));
        dw[j + 4][r] = d * (float)((s[j + 8] & 15) | s[j] >> 6 << 4);
        mw[j + 4][r] = -(dmin * (float)(s[j + 8] >> 4 | s[j + 4] >> 6 << 4));
    }
}

/* Scales of 8 rows for the parts of one block of the file. */
NEON_INLINE void neon_scales(const enum tensor_type t, const uint8_t *p, size_t stride,
                             struct scales8 *s)
{
    if (t == TENSOR_Q4_K || t == TENSOR_Q5_K) {
        float dw[8][PANEL_OUTS], mw[8][PANEL_OUTS];
        for (uint32_t r = 0; r < PANEL_OUTS; r++)
            neon_k_scales(p + r * stride, r, dw, mw);
        for (int j = 0; j < 8; j++) {
            memcpy(s[j].dw, dw[j], sizeof dw[j]);
            memcpy(s[j].mw, mw[j], sizeof mw[j]);
        }
        return;
    }
    for (int j = 0; j < (int)neon_parts(t); j++)
        for (uint32_t r = 0; r < PANEL_OUTS; r++)
            neon_scales_row(t, p + r * stride, j, r, &s[j]);
}

#endif
