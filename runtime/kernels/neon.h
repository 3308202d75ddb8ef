/* The NEON variants, in parts. Internal to the kernels. The products of quantised weights are
 * compiled three times: plain, with the dot-product and with the i8mm instructions; the rest once.
 * Lanes hold different outputs (or positions, or elements); only exact integer sums go across
 * lanes. */
#ifndef COVEY_RUNTIME_KERNELS_NEON_H
#define COVEY_RUNTIME_KERNELS_NEON_H

#include "runtime/kernels/half.h"
#include "runtime/kernels/table.h"
#include "runtime/vmath.h"

#include <arm_neon.h>
#include <math.h>

#define NEON_INLINE static inline __attribute__((always_inline))

void neon_products(struct kernel_ops *ops);
void neon_products_dotprod(struct kernel_ops *ops);
void neon_products_i8mm(struct kernel_ops *ops);
void neon_dense(struct kernel_ops *ops);
void neon_rows(struct kernel_ops *ops);
void neon_attention(struct kernel_ops *ops);

NEON_INLINE float neon_half(const uint8_t *p)
{
    __fp16 h;
    memcpy(&h, p, sizeof h);
    return (float)h;
}

NEON_INLINE float32x4_t neon_power(int32x4_t n) /* 2^n, -126 <= n <= 127 */
{
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}

/* vm_expf in four lanes, the same operations. */
NEON_INLINE float32x4_t neon_exp(float32x4_t x)
{
    const float32x4_t magic = vdupq_n_f32(0x1.8p23f);
    float32x4_t n = vsubq_f32(vfmaq_f32(magic, x, vdupq_n_f32(0x1.715476p+0f)), magic);
    float32x4_t r = vfmaq_f32(x, n, vdupq_n_f32(-0x1.62e4p-1f));
    r = vfmaq_f32(r, n, vdupq_n_f32(-0x1.7f7d1cp-20f));
    float32x4_t p = vfmaq_f32(vdupq_n_f32(0x1.120ba2p-7f), vdupq_n_f32(0x1.6d113cp-10f), r);
    p = vfmaq_f32(vdupq_n_f32(0x1.55551ap-5f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0x1.5554dcp-3f), p, r);
    p = vfmaq_f32(vdupq_n_f32(0x1p-1f), p, r);
    p = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), vdupq_n_f32(1.f));
    int32x4_t i = vcvtq_s32_f32(n), half = vshrq_n_s32(i, 1);
    p = vmulq_f32(vmulq_f32(p, neon_power(half)), neon_power(vsubq_s32(i, half)));
    p = vbslq_f32(vcltq_f32(x, vdupq_n_f32(VM_EXP_LOW)), vdupq_n_f32(0), p);
    p = vbslq_f32(vcgtq_f32(x, vdupq_n_f32(VM_EXP_HIGH)), vdupq_n_f32(INFINITY), p);
    return vbslq_f32(vceqq_f32(x, x), p, x);
}

/* Lanes l + 8, + 4, + 2, + 1. */
NEON_INLINE float neon_sum_lanes(const float32x4_t a[4])
{
    float32x4_t t = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
    float32x2_t u = vadd_f32(vget_low_f32(t), vget_high_f32(t));
    return vget_lane_f32(u, 0) + vget_lane_f32(u, 1);
}

/* Rows become columns. */
NEON_INLINE void neon_transpose(const float32x4_t a[4], float32x4_t v[4])
{
    float64x2_t b0 = vreinterpretq_f64_f32(vtrn1q_f32(a[0], a[1]));
    float64x2_t b1 = vreinterpretq_f64_f32(vtrn2q_f32(a[0], a[1]));
    float64x2_t b2 = vreinterpretq_f64_f32(vtrn1q_f32(a[2], a[3]));
    float64x2_t b3 = vreinterpretq_f64_f32(vtrn2q_f32(a[2], a[3]));
    v[0] = vreinterpretq_f32_f64(vtrn1q_f64(b0, b2));
    v[1] = vreinterpretq_f32_f64(vtrn1q_f64(b1, b3));
    v[2] = vreinterpretq_f32_f64(vtrn2q_f64(b0, b2));
    v[3] = vreinterpretq_f32_f64(vtrn2q_f64(b1, b3));
}

#endif
