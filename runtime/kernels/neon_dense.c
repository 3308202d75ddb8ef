/* F32, F16 and BF16 weights times F32 activations, and quantising rows of activations, NEON. */
#include "runtime/kernels/neon.h"

enum { STEP = 4 };

/* STEP columns of one row. */
NEON_INLINE float32x4_t load_4(const enum dense_type t, const uint8_t *p)
{
    if (t == DENSE_F32)
        return vreinterpretq_f32_u8(vld1q_u8(p));
    uint16x4_t h = vreinterpret_u16_u8(vld1_u8(p));
    if (t == DENSE_F16)
        return vcvt_f32_f16(vreinterpret_f16_u16(h));
    return vreinterpretq_f32_u32(vshll_n_u16(h, 16));
}

static float load_1(enum dense_type t, const uint8_t *p)
{
    return t == DENSE_F32   ? float_of_bits(load_u32(p))
           : t == DENSE_F16 ? load_half(p)
                            : bf16_open(load_u16(p));
}

/* STEP columns of four rows: v[i] is column i. */
NEON_INLINE void open_step(const enum dense_type t, const uint8_t *p, size_t stride,
                           float32x4_t v[STEP])
{
    float32x4_t rows[4];
    for (uint32_t r = 0; r < 4; r++)
        rows[r] = load_4(t, p + r * stride);
    neon_transpose(rows, v);
}

static float32x4_t open_column(enum dense_type t, const uint8_t *p, size_t stride)
{
    float v[4];
    for (uint32_t r = 0; r < 4; r++)
        v[r] = load_1(t, p + r * stride);
    return vld1q_f32(v);
}

NEON_INLINE void few_any(const enum dense_type t, const uint32_t R, const uint8_t *w, size_t stride,
                         uint32_t n_in, const float *x, size_t ldx, float (*out)[PANEL_OUTS],
                         bool resume)
{
    const uint32_t size = t == DENSE_F32 ? 4 : 2;
    float32x4_t acc[FEW_ROWS][2];
    uint32_t k = 0;
    for (uint32_t r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            acc[r][half] = resume ? vld1q_f32(out[r] + 4 * half) : vdupq_n_f32(0);
    for (; k + STEP <= n_in; k += STEP) {
        float32x4_t v[2][STEP];
        if (k * size % 64 == 0)
            for (uint32_t o = 0; o < PANEL_OUTS; o++)
                __builtin_prefetch(w + o * stride + k * size + 512);
        open_step(t, w + k * size, stride, v[0]);
        open_step(t, w + k * size + 4 * stride, stride, v[1]);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < R; r++) {
            float32x4_t a = vld1q_f32(x + r * ldx + k);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                acc[r][half] = vfmaq_laneq_f32(acc[r][half], v[half][0], a, 0);
                acc[r][half] = vfmaq_laneq_f32(acc[r][half], v[half][1], a, 1);
                acc[r][half] = vfmaq_laneq_f32(acc[r][half], v[half][2], a, 2);
                acc[r][half] = vfmaq_laneq_f32(acc[r][half], v[half][3], a, 3);
            }
        }
    }
    for (; k < n_in; k++)
        for (uint32_t half = 0; half < 2; half++) {
            float32x4_t v = open_column(t, w + k * size + 4 * half * stride, stride);
            for (uint32_t r = 0; r < R; r++)
                acc[r][half] = vfmaq_n_f32(acc[r][half], v, x[r * ldx + k]);
        }
    for (uint32_t r = 0; r < R; r++)
        for (int half = 0; half < 2; half++)
            vst1q_f32(out[r] + 4 * half, vaddq_f32(acc[r][half], vdupq_n_f32(0)));
}

NEON_INLINE void pack_any(const enum dense_type t, const uint8_t *w, size_t stride, uint32_t n_in,
                          float *panel, size_t ldp)
{
    const uint32_t size = t == DENSE_F32 ? 4 : 2;
    for (uint32_t half = 0; half < 2; half++, w += 4 * stride, panel += 4) {
        uint32_t k = 0;
        for (; k + STEP <= n_in; k += STEP) {
            float32x4_t v[STEP];
            open_step(t, w + k * size, stride, v);
            for (uint32_t i = 0; i < STEP; i++)
                vst1q_f32(panel + (k + i) * ldp, v[i]);
        }
        for (; k < n_in; k++)
            vst1q_f32(panel + k * ldp, open_column(t, w + k * size, stride));
    }
}

NEON_INLINE void tile_rows(const uint32_t R, const float *w, size_t ldp, uint32_t n_in,
                           const float *x, size_t ldx, float *y, size_t ldy, bool resume)
{
    float32x4_t acc[DENSE_ROWS][4];
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            acc[r][i] = resume ? vld1q_f32(y + r * ldy + 4 * i) : vdupq_n_f32(0);
    for (uint32_t k = 0; k < n_in; k++, w += ldp, x += ldx) {
        float32x4_t v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            v[i] = vld1q_f32(w + 4 * i);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                acc[r][i] = vfmaq_n_f32(acc[r][i], v[i], x[r]);
    }
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            vst1q_f32(y + r * ldy + 4 * i, vaddq_f32(acc[r][i], vdupq_n_f32(0)));
}

static void dense_tile(const float *panel, size_t ldp, uint32_t n_in, const float *tile, size_t ldx,
                       uint32_t n_rows, float *y, size_t ldy, bool resume)
{
    uint32_t r = 0;
    if (n_rows == DENSE_ROWS) {
        tile_rows(6, panel, ldp, n_in, tile, ldx, y, ldy, resume);
        return;
    }
    for (; r + 3 <= n_rows; r += 3)
        tile_rows(3, panel, ldp, n_in, tile + r, ldx, y + r * ldy, ldy, resume);
    for (; r < n_rows; r++)
        tile_rows(1, panel, ldp, n_in, tile + r, ldx, y + r * ldy, ldy, resume);
}

#define DENSE(T)                                                                                   \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,            \
                        size_t ldx, uint32_t n_rows, float(*out)[PANEL_OUTS], bool resume)         \
    {                                                                                              \
        if (n_rows == 1)                                                                           \
            few_any(DENSE_##T, 1, w, stride, n_in, x, ldx, out, resume);                           \
        else if (n_rows == 2)                                                                      \
            few_any(DENSE_##T, 2, w, stride, n_in, x, ldx, out, resume);                           \
        else if (n_rows == 3)                                                                      \
            few_any(DENSE_##T, 3, w, stride, n_in, x, ldx, out, resume);                           \
        else                                                                                       \
            few_any(DENSE_##T, 4, w, stride, n_in, x, ldx, out, resume);                           \
    }                                                                                              \
    static void pack_##T(const uint8_t *w, size_t stride, uint32_t n_in, float *panel, size_t ldp) \
    {                                                                                              \
        pack_any(DENSE_##T, w, stride, n_in, panel, ldp);                                          \
    }
DENSE(F32)
DENSE(F16)
DENSE(BF16)

/* ---- quantising activations */

/* 16 elements times id, rounded to bytes. */
NEON_INLINE int8x16_t round_16(const float *x, float id)
{
    int16x4_t h[4];
    for (int i = 0; i < 4; i++) {
        float32x4_t v = vmulq_n_f32(vld1q_f32(x + 4 * i), id);
        v = vbslq_f32(vceqq_f32(v, v), v, vdupq_n_f32(0)); /* NaN -> 0 */
        v = vmaxq_f32(vminq_f32(v, vdupq_n_f32(127.f)), vdupq_n_f32(-127.f));
        h[i] = vmovn_s32(vcvtnq_s32_f32(v)); /* to nearest, ties to even */
    }
    return vcombine_s8(vmovn_s16(vcombine_s16(h[0], h[1])), vmovn_s16(vcombine_s16(h[2], h[3])));
}

/* Sums of 16 bytes over k mod 4 < 2 and >= 2. */
NEON_INLINE void pair_sums(int8x16_t q, int sums[2])
{
    int16x8_t p = vpaddlq_s8(q);
    int16x4_t s = vadd_s16(vget_low_s16(p), vget_high_s16(p));
    sums[0] = vget_lane_s16(s, 0) + vget_lane_s16(s, 2);
    sums[1] = vget_lane_s16(s, 1) + vget_lane_s16(s, 3);
}

static void put_pair(uint8_t *p, int low, int high)
{
    int16_t pair[2] = {(int16_t)low, (int16_t)high};
    memcpy(p, pair, sizeof pair);
}

static void quantise(const float *x, uint32_t n_blocks, uint32_t n_rows, uint32_t r, uint8_t *tile)
{
    const size_t n = n_rows;
    for (uint32_t b = 0; b < n_blocks; b++, x += BLOCK, tile += n * TILE_ROW_BYTES) {
        uint32x4_t top = vdupq_n_u32(0);
        for (int i = 0; i < 8; i++)
            top = vmaxq_u32(top, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + 4 * i)),
                                           vdupq_n_u32(0x7fffffff)));
        float a = float_of_bits(vmaxvq_u32(top));
        bool zero = a < BLOCK_ZERO_BELOW;
        float d = zero ? 0 : a / 127.f, id = zero ? 0 : 127.f / a;
        int8x16_t q0 = round_16(x, id), q1 = round_16(x + 16, id);
        vst1q_s8((int8_t *)tile + 32 * (size_t)r, q0);
        vst1q_s8((int8_t *)tile + 32 * (size_t)r + 16, q1);
        int s0[2], s1[2];
        pair_sums(q0, s0);
        pair_sums(q1, s1);
        int first = s0[0] + s1[0], second = s0[1] + s1[1];
        float s = d * (float)(first + second);
        uint8_t *p = tile + 32 * n + 4 * (size_t)r;
        memcpy(p, &d, 4);
        memcpy(p + 4 * n, &s, 4);
        put_pair(p + 8 * n, -8 * first, -8 * second);
        put_pair(p + 12 * n, -16 * first, -16 * second);
        put_pair(p + 16 * n, -32 * s0[0], -32 * s0[1]);
        put_pair(p + 20 * n, -32 * s1[0], -32 * s1[1]);
    }
}

void neon_dense(struct kernel_ops *ops)
{
    ops->dense_few[DENSE_F32] = few_F32;
    ops->dense_few[DENSE_F16] = few_F16;
    ops->dense_few[DENSE_BF16] = few_BF16;
    ops->dense_pack[DENSE_F32] = pack_F32;
    ops->dense_pack[DENSE_F16] = pack_F16;
    ops->dense_pack[DENSE_BF16] = pack_BF16;
    ops->dense_tile = dense_tile;
    ops->quantise = quantise;
}
