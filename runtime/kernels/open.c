/* Element types: their traits, and opening blocks and rows in plain C. */
#include "runtime/kernels/open.h"
#include "runtime/kernels/half.h"

#include <assert.h>

static const struct tensor_traits traits[TENSOR_TYPES] = {
    [TENSOR_F32] = {"F32", 1, 4, false},      [TENSOR_F16] = {"F16", 1, 2, false},
    [TENSOR_BF16] = {"BF16", 1, 2, false},    [TENSOR_Q4_0] = {"Q4_0", 32, 18, true},
    [TENSOR_Q4_1] = {"Q4_1", 32, 20, true},   [TENSOR_Q5_0] = {"Q5_0", 32, 22, true},
    [TENSOR_Q5_1] = {"Q5_1", 32, 24, true},   [TENSOR_Q8_0] = {"Q8_0", 32, 34, true},
    [TENSOR_Q2_K] = {"Q2_K", 256, 84, true},  [TENSOR_Q3_K] = {"Q3_K", 256, 110, true},
    [TENSOR_Q4_K] = {"Q4_K", 256, 144, true}, [TENSOR_Q5_K] = {"Q5_K", 256, 176, true},
    [TENSOR_Q6_K] = {"Q6_K", 256, 210, true}, [TENSOR_IQ4_NL] = {"IQ4_NL", 32, 18, true},
    [TENSOR_MXFP4] = {"MXFP4", 32, 17, true},
};

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                      1,    13,   25,  38,  53,  69,  89,  113};
/* E2M1 values doubled; the block's scale is halved in return. */
static const int8_t mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

const struct tensor_traits *tensor_traits(uint32_t type)
{
    return type < TENSOR_TYPES && traits[type].name ? &traits[type] : NULL;
}

size_t tensor_row_bytes(uint32_t type, uint64_t n)
{
    const struct tensor_traits *t = tensor_traits(type);
    if (!t || n % t->block_elements != 0 || n > MATRIX_IN_MAX)
        return 0;
    return (size_t)(n / t->block_elements * t->block_bytes);
}

float f32_of_f16(uint16_t h)
{
    return half_open(h);
}

uint16_t f16_of_f32(float f)
{
    return half_round(f);
}

float f32_of_bf16(uint16_t b)
{
    return bf16_open(b);
}

enum panel_kind panel_kind(enum tensor_type type)
{
    switch (type) {
    case TENSOR_Q4_0:
        return PANEL_U4C;
    case TENSOR_Q4_1:
    case TENSOR_Q4_K:
        return PANEL_U4M;
    case TENSOR_Q5_0:
        return PANEL_U5C;
    case TENSOR_Q5_1:
    case TENSOR_Q5_K:
        return PANEL_U5M;
    case TENSOR_Q6_K:
    case TENSOR_Q3_K:
        return PANEL_S6;
    case TENSOR_Q2_K:
        return PANEL_S2M;
    default:
        return PANEL_I8;
    }
}

int panel_centre(enum panel_kind kind)
{
    return kind == PANEL_U4C ? 8 : kind == PANEL_U5C ? 16 : kind == PANEL_S6 ? 32 : 0;
}

static void open_nibbles(const uint8_t *qs, const uint8_t *qh, int8_t *w)
{
    uint32_t high = qh ? load_u32(qh) : 0;
    for (unsigned i = 0; i < 16; i++) {
        w[i] = (int8_t)((qs[i] & 15u) | (high >> i & 1u) << 4);
        w[i + 16] = (int8_t)((unsigned)qs[i] >> 4 | (high >> (i + 16) & 1u) << 4);
    }
}

static void open_table(const uint8_t *qs, const int8_t values[16], int8_t *w)
{
    for (unsigned i = 0; i < 16; i++) {
        w[i] = values[qs[i] & 15];
        w[i + 16] = values[qs[i] >> 4];
    }
}

/* The 6-bit scale and minimum of 32 columns in the 12 bytes of Q4_K and Q5_K. */
static void k_scale(const uint8_t *s, uint32_t j, unsigned *scale, unsigned *minimum)
{
    if (j < 4) {
        *scale = s[j] & 63u;
        *minimum = s[j + 4] & 63u;
    } else {
        *scale = (s[j + 4] & 15u) | (unsigned)s[j - 4] >> 6 << 4;
        *minimum = (unsigned)s[j + 4] >> 4 | (unsigned)s[j] >> 6 << 4;
    }
}

static void open_q4_k(const uint8_t *p, uint32_t j, bool five, struct opened *ret)
{
    unsigned scale, minimum;
    k_scale(p + 4, j, &scale, &minimum);
    ret->dw = load_half(p) * (float)scale;
    ret->mw = -(load_half(p + 2) * (float)minimum);
    const uint8_t *qh = p + 16, *qs = p + (five ? 48 : 16) + j / 2 * 32;
    for (unsigned i = 0; i < 32; i++) {
        unsigned v = j & 1 ? (unsigned)qs[i] >> 4 : qs[i] & 15u;
        ret->w[i] = (int8_t)(five ? v | ((unsigned)qh[i] >> j & 1u) << 4 : v);
    }
}

static int16_t signed_byte(uint8_t b)
{
    return (int16_t)(b < 128 ? b : b - 256);
}

static void open_q6_k(const uint8_t *p, uint32_t j, struct opened *ret)
{
    uint32_t half = j / 4, part = j % 4;
    const uint8_t *ql = p + 64 * half + 32 * (part & 1), *qh = p + 128 + 32 * half;
    for (unsigned i = 0; i < 32; i++) {
        unsigned low = part < 2 ? ql[i] & 15u : (unsigned)ql[i] >> 4;
        ret->w[i] = (int8_t)(low | ((unsigned)qh[i] >> 2 * part & 3u) << 4);
    }
    ret->sc[0] = signed_byte(p[192 + 2 * j]);
    ret->sc[1] = signed_byte(p[193 + 2 * j]);
    ret->dw = load_half(p + 208);
}

/* Stored as w + 32, so that it shares Q6_K's kernels: 28..35. */
static void open_q3_k(const uint8_t *p, uint32_t j, struct opened *ret)
{
    const uint8_t *qs = p + 32 + j / 4 * 32, *s = p + 96;
    for (unsigned i = 0; i < 32; i++)
        ret->w[i] =
            (int8_t)(28u + ((unsigned)qs[i] >> 2 * (j % 4) & 3u) + ((unsigned)p[i] >> j & 1u) * 4u);
    for (uint32_t h = 0; h < 2; h++) {
        uint32_t i = 2 * j + h;
        unsigned low = i < 8 ? s[i] & 15u : (unsigned)s[i - 8] >> 4;
        unsigned high = (unsigned)s[8 + i % 4] >> 2 * (i / 4) & 3u;
        ret->sc[h] = (int16_t)((int)(low | high << 4) - 32);
    }
    ret->dw = load_half(p + 108);
}

static void open_q2_k(const uint8_t *p, uint32_t j, struct opened *ret)
{
    const uint8_t *qs = p + 16 + j / 4 * 32;
    for (unsigned i = 0; i < 32; i++)
        ret->w[i] = (int8_t)((unsigned)qs[i] >> 2 * (j % 4) & 3u);
    for (uint32_t h = 0; h < 2; h++) {
        ret->sc[h] = (int16_t)(p[2 * j + h] & 15);
        ret->mn[h] = (int16_t)(p[2 * j + h] >> 4);
    }
    ret->dw = load_half(p + 80);
    ret->mw = -load_half(p + 82);
}

/* Half of 2 to the power e - 127. */
static float mxfp4_scale(uint8_t e)
{
    return float_of_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

void block_open(enum tensor_type type, const uint8_t *row, uint32_t b, struct opened *ret)
{
    const struct tensor_traits *t = &traits[type];
    uint32_t per = t->block_elements / 32, j = b % per;
    const uint8_t *p = row + (size_t)(b / per) * t->block_bytes;
    *ret = (struct opened){.sc = {1, 1}};
    switch (type) {
    case TENSOR_Q4_1:
        ret->mw = load_half(p + 2);
        open_nibbles(p + 4, NULL, ret->w);
        break;
    case TENSOR_Q5_0:
        open_nibbles(p + 6, p + 2, ret->w);
        break;
    case TENSOR_Q5_1:
        ret->mw = load_half(p + 2);
        open_nibbles(p + 8, p + 4, ret->w);
        break;
    case TENSOR_Q8_0:
        memcpy(ret->w, p + 2, 32);
        break;
    case TENSOR_IQ4_NL:
        open_table(p + 2, iq4_values, ret->w);
        break;
    case TENSOR_MXFP4:
        open_table(p + 1, mxfp4_values, ret->w);
        ret->dw = mxfp4_scale(p[0]);
        return;
    case TENSOR_Q2_K:
        open_q2_k(p, j, ret);
        return;
    case TENSOR_Q3_K:
        open_q3_k(p, j, ret);
        return;
    case TENSOR_Q4_K:
    case TENSOR_Q5_K:
        open_q4_k(p, j, type == TENSOR_Q5_K, ret);
        return;
    case TENSOR_Q6_K:
        open_q6_k(p, j, ret);
        return;
    default:
        assert(type == TENSOR_Q4_0);
        open_nibbles(p + 2, NULL, ret->w);
    }
    ret->dw = load_half(p);
}

static void open_quantised(enum tensor_type type, const uint8_t *row, uint32_t first, uint32_t n,
                           float *y)
{
    enum panel_kind kind = panel_kind(type);
    int centre = panel_centre(kind);
    bool minimum = kind == PANEL_U4M || kind == PANEL_U5M || kind == PANEL_S2M;
    for (uint32_t b = 0; b < n / 32; b++, y += 32) {
        struct opened o;
        block_open(type, row, first / 32 + b, &o);
        for (unsigned i = 0; i < 32; i++) {
            unsigned half = i / 16;
            float v = o.dw * (float)o.sc[half] * (float)(o.w[i] - centre);
            float m = kind == PANEL_S2M ? o.mw * (float)o.mn[half] : o.mw;
            y[i] = minimum ? v + m : v;
        }
    }
}

void row_open(enum tensor_type type, const uint8_t *row, uint32_t first, uint32_t n, float *y)
{
    switch (type) {
    case TENSOR_F32:
        memcpy(y, row + 4 * (size_t)first, 4 * (size_t)n);
        break;
    case TENSOR_F16:
        for (uint32_t i = 0; i < n; i++)
            y[i] = load_half(row + 2 * ((size_t)first + i));
        break;
    case TENSOR_BF16:
        for (uint32_t i = 0; i < n; i++)
            y[i] = bf16_open(load_u16(row + 2 * ((size_t)first + i)));
        break;
    default:
        open_quantised(type, row, first, n, y);
    }
}
