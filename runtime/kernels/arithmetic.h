/* The arithmetic of the native engine, in words. This is the one place that defines it.
 *
 * Every variant (C, AVX2, NEON, NEON with dot product, ...) computes exactly these operations for
 * each output, so the bits do not depend on the CPU, the rows beside, tiles, threads or chunks.
 * Promised for finite values. All single operations are IEEE 754 binary32, rounded to nearest even,
 * with subnormals kept (no FTZ/DAZ); fmaf() has one rounding; nothing is contracted or
 * reassociated.
 *
 *  1. Product y[m][n] of a row of activations x[m] and a row of weights w[n]: ONE chain of fused
 *     multiply-adds over increasing k, starting at +0. With slices of S elements the chain restarts
 *     at each multiple of S; the slice sums are added by the aligned binary tree over slice
 *     numbers: in each round, neighbours 2i and 2i+1 are added and an odd last one passes up
 *     unchanged. Every chain ends with "+ 0.0f", so that an underflown -0 becomes +0.
 *  2. Activations for quantised weights (precision `fast`), per row in blocks of 32: a = max |x|;
 *     when a < 2^-100: all q = 0 and d_x = 0; else d_x = a / 127.f, id = 127.f / a (true
 *     divisions), q = rint(x * id) with ties to even, clamped to +-127.
 *     s_x = d_x * (float)sum(q).
 *  3. Step of the chain for one block of 32 quantised weights:
 *     acc = fmaf(dw * (float)isum, d_x, acc), isum an exact integer:
 *       Q4_0 sum (nibble - 8) q; Q5_0 sum (w - 16) q; Q8_0, IQ4_NL, MXFP4 sum w q;
 *       Q4_1, Q5_1, Q4_K, Q5_K sum w q with w unsigned;
 *       Q6_K, Q3_K, Q2_K: sc0 * sum over the first 16 + sc1 * sum over the last 16 (w - 32, w - 4
 *       and w); |isum| < 2^24 always.
 *     dw is the block's scale as F32 (K types: d times the integer scale of the 32, exact).
 *  4. A minimum is the next step of the same chain: acc = fmaf(mw, s_x, acc) with mw = m (Q4_1,
 *     Q5_1) or -(dmin * mn) (Q4_K, Q5_K). Q2_K, whose minimum changes inside the 32:
 *     acc = fmaf(-dmin * (float)(mn0 * sum(q of the first 16) + mn1 * sum(q of the last 16)), d_x,
 *     acc).
 *  5. F32, F16, BF16 weights, and any weights in precision `f32` (opened exactly to F32 as in 6):
 *     acc = fmaf(w, x, acc).
 *  6. Opening to F32: w = dw * q, then for types with a minimum one addition of mw (the products
 *     are exact). BF16 and F16 are exact.
 *  7. Sums along a row that is never split (RMS norm, softmax denominators): element i goes to lane
 *     i mod 16, each lane one chain from +0 (fmaf(x, x, lane) or lane + e), then lanes l and l + 8
 *     are added, then l and l + 4, l + 2, l + 1.
 *  8. RMS norm: y = (x * (1.f / sqrtf(sum / (float)n + eps))) * w.
 *  9. exp: runtime/vmath.h; silu(x) = x / (1.f + exp(-x)); silu_mul = silu(gate) * up.
 *     gelu_tanh(x) = x / (1.f + exp(-2u)), u = sqrt(2/pi) * (x + 0.044715f x^3), see vmath.h.
 * 10. RoPE: tables of cos and sin in binary64 by our own functions, rounded once to binary32;
 *     a' = fmaf(a, c, -(b * s)), b' = fmaf(a, s, b * c).
 * 11. Attention of one query row and head, over blocks of 64 fixed absolute positions, p running
 *     over the visible positions only:
 *       s[p] = (chain over d of fmaf(k[p][d], q[d], .)) * scale
 *       m_b = max s[p]; e[p] = exp(s[p] - m_b); l_b = sum e[p] as in 7 (lane = p mod 16);
 *       o_b[d] = chain over p of fmaf(v[p][d], e[p], .), then + 0.0f.
 *     Blocks combine in increasing order, beginning with the first block's own values:
 *       M = max(m, m_b), a = exp(m - M), b = exp(m_b - M),
 *       l = fmaf(l, a, l_b * b), o = fmaf(o, a, o_b * b), m = M.
 *     At last y[d] = o[d] / l. K and V are rounded to F16 (nearest even) in precision `fast` and
 *     kept in F32 in precision `f32`.
 *
 * Measured and argued in the project's kernel study; chains cost nothing because SIMD lanes hold
 * different outputs, never parts of one sum. */
#ifndef COVEY_RUNTIME_KERNELS_ARITHMETIC_H
#define COVEY_RUNTIME_KERNELS_ARITHMETIC_H

enum {
    /* Nodes with different versions never share a plan. Raise it with any change of the above. */
    ARITHMETIC_VERSION = 1,

    BLOCK = 32,              /* elements of one quantised activation block */
    SUM_LANES = 16,          /* of sums along a row: one AVX-512, two AVX2, four NEON registers */
    KV_BLOCK = 64,           /* positions of one block of attention */
    KV_GROUP = 16,           /* positions that lie beside each other in K's transposed layout */
    HEAD_DIM_MAX = 512,      /* of attention */
    MATRIX_IN_MAX = 1 << 18, /* input elements of a matrix */
};

/* Below this a block of activations counts as zero: 127 / a would overflow. */
#define BLOCK_ZERO_BELOW 0x1p-100f

#endif
