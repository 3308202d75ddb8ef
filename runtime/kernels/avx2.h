/* The AVX2 variant, in parts. Internal to the kernels; its files are compiled with AVX2, FMA and
 * F16C and run only where the CPU has them. Lanes hold different outputs (or positions, or
 * elements), never parts of one chain; sums along a row keep their 16 lanes. */
#ifndef COVEY_RUNTIME_KERNELS_AVX2_H
#define COVEY_RUNTIME_KERNELS_AVX2_H

#include "runtime/kernels/half.h"
#include "runtime/kernels/table.h"
#include "runtime/vmath.h"

#include <immintrin.h>
#include <math.h>

#define AVX2_INLINE static inline __attribute__((always_inline))

/* gcc reassociates integer vector sums into trees and then spills them all, and folds a load that
 * is used twice into two instructions: an empty asm keeps the value as it is, in its register. */
#define AVX2_KEEP(v) __asm__("" : "+x"(v))

void avx2_few(struct kernel_ops *ops);
void avx2_opened(struct kernel_ops *ops);
void avx2_panels(struct kernel_ops *ops);
void avx2_dense(struct kernel_ops *ops);
void avx2_wide_dense(struct kernel_ops *ops); /* of AVX-VNNI only */
void avx2_rows(struct kernel_ops *ops);
void avx2_attention(struct kernel_ops *ops);
void avx2_combine(struct attend_sum *to, const struct attend_sum *from, uint32_t head_dim);

AVX2_INLINE __m256 avx2_power(__m256i n) /* 2^n, -126 <= n <= 127 */
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

/* vm_expf in eight lanes, the same operations. */
AVX2_INLINE __m256 avx2_exp(__m256 x)
{
    const __m256 magic = _mm256_set1_ps(0x1.8p23f);
    __m256 n = _mm256_fmadd_ps(x, _mm256_set1_ps(0x1.715476p+0f), magic);
    n = _mm256_sub_ps(n, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0x1.62e4p-1f), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-0x1.7f7d1cp-20f), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(0x1.6d113cp-10f), r, _mm256_set1_ps(0x1.120ba2p-7f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.55551ap-5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1.5554dcp-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0x1p-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.f));
    __m256i i = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(i, 1);
    p = _mm256_mul_ps(p, avx2_power(half));
    p = _mm256_mul_ps(p, avx2_power(_mm256_sub_epi32(i, half)));
    p = _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_set1_ps(VM_EXP_LOW), _CMP_LT_OQ), p);
    p = _mm256_blendv_ps(p, _mm256_set1_ps(INFINITY),
                         _mm256_cmp_ps(x, _mm256_set1_ps(VM_EXP_HIGH), _CMP_GT_OQ));
    return _mm256_blendv_ps(p, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* Lanes l + 8 (a + b), + 4, + 2, + 1. */
AVX2_INLINE float avx2_sum_lanes(__m256 a, __m256 b)
{
    a = _mm256_add_ps(a, b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}

#endif
