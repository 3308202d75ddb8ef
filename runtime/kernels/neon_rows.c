/* Work along rows, NEON. Sums keep the 16 lanes of arithmetic.h 7 in four vectors; the last n % 16
 * elements are padded with +0, which changes no lane. */
#include "runtime/kernels/neon.h"

static float sum_squares(const float *x, uint32_t n)
{
    float32x4_t a[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 4; j++) {
            float32x4_t v = vld1q_f32(x + i + 4 * j);
            a[j] = vfmaq_f32(a[j], v, v);
        }
    if (i < n) {
        float rest[16] = {0};
        memcpy(rest, x + i, (n - i) * sizeof(float));
        for (int j = 0; j < 4; j++) {
            float32x4_t v = vld1q_f32(rest + 4 * j);
            a[j] = vfmaq_f32(a[j], v, v);
        }
    }
    return neon_sum_lanes(a);
}

static void norm(const float *x, uint32_t n, float scale, const float *weight, float *y)
{
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t v = vmulq_n_f32(vld1q_f32(x + i), scale);
        vst1q_f32(y + i, weight ? vmulq_f32(v, vld1q_f32(weight + i)) : v);
    }
    for (; i < n; i++)
        y[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

NEON_INLINE float32x4_t silu(float32x4_t x)
{
    return vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.f), neon_exp(vnegq_f32(x))));
}

NEON_INLINE float32x4_t gelu(float32x4_t x)
{
    float32x4_t cubic = vfmaq_f32(x, vmulq_n_f32(x, 0.044715f), vmulq_f32(x, x));
    float32x4_t u = vmulq_n_f32(cubic, 0x1.988454p-1f);
    return vdivq_f32(x, vaddq_f32(vdupq_n_f32(1.f), neon_exp(vmulq_n_f32(u, -2.f))));
}

static void silu_mul_row(const float *gate, const float *up, uint32_t n, float *y)
{
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vmulq_f32(silu(vld1q_f32(gate + i)), vld1q_f32(up + i)));
    for (; i < n; i++)
        y[i] = vm_siluf(gate[i]) * up[i];
}

static void gelu_mul_row(const float *gate, const float *up, uint32_t n, float *y)
{
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vmulq_f32(gelu(vld1q_f32(gate + i)), vld1q_f32(up + i)));
    for (; i < n; i++)
        y[i] = vm_gelu_tanhf(gate[i]) * up[i];
}

static float exp_sum_row(const float *x, size_t n, float max, float *y)
{
    const float32x4_t m = vdupq_n_f32(max);
    float32x4_t a[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 4; j++) {
            float32x4_t v = neon_exp(vsubq_f32(vld1q_f32(x + i + 4 * j), m));
            vst1q_f32(y + i + 4 * j, v);
            a[j] = vaddq_f32(a[j], v);
        }
    if (i < n) {
        float rest[16] = {0};
        for (size_t j = i; j < n; j++)
            rest[j - i] = y[j] = vm_expf(x[j] - max);
        for (int j = 0; j < 4; j++)
            a[j] = vaddq_f32(a[j], vld1q_f32(rest + 4 * j));
    }
    return neon_sum_lanes(a);
}

static void rope_head(enum rope_pairing pairing, const float *table, uint32_t n_dims, float *head)
{
    uint32_t half = n_dims / 2, i = 0;
    for (; i + 4 <= half; i += 4) {
        float32x4x2_t cs = vld2q_f32(table + 2 * i), ab;
        if (pairing == ROPE_NORM)
            ab = vld2q_f32(head + 2 * i);
        else
            ab = (float32x4x2_t){{vld1q_f32(head + i), vld1q_f32(head + i + half)}};
        float32x4_t minus = vnegq_f32(vmulq_f32(ab.val[1], cs.val[1]));
        float32x4_t first = vfmaq_f32(minus, ab.val[0], cs.val[0]);
        ab.val[1] = vfmaq_f32(vmulq_f32(ab.val[1], cs.val[0]), ab.val[0], cs.val[1]);
        ab.val[0] = first;
        if (pairing == ROPE_NORM) {
            vst2q_f32(head + 2 * i, ab);
        } else {
            vst1q_f32(head + i, ab.val[0]);
            vst1q_f32(head + i + half, ab.val[1]);
        }
    }
    for (; i < half; i++) {
        float *pa = pairing == ROPE_NORM ? head + 2 * i : head + i;
        float *pb = pairing == ROPE_NORM ? pa + 1 : pa + half;
        float a = *pa, b = *pb, c = table[2 * i], s = table[2 * i + 1];
        *pa = fmaf(a, c, -(b * s));
        *pb = fmaf(a, s, b * c);
    }
}

static void halves(const float *x, uint32_t n, uint16_t *y)
{
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    for (; i < n; i++)
        y[i] = half_round(x[i]);
}

void neon_rows(struct kernel_ops *ops)
{
    ops->sum_squares = sum_squares;
    ops->norm = norm;
    ops->silu_mul = silu_mul_row;
    ops->gelu_mul = gelu_mul_row;
    ops->exp_sum = exp_sum_row;
    ops->rope = rope_head;
    ops->halves = halves;
}
