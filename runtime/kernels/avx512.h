/* The AVX-512 variant, in parts. Internal to the kernels; its files are compiled with AVX-512 F,
 * BW, DQ, VL and VNNI beside AVX2, FMA and F16C and run only where the CPU has them all. */
#ifndef COVEY_RUNTIME_KERNELS_AVX512_H
#define COVEY_RUNTIME_KERNELS_AVX512_H

#include "runtime/kernels/table.h"

#include <immintrin.h>

/* See AVX2_KEEP. */
#define AVX512_KEEP(v) __asm__("" : "+v"(v))

void avx512_attention(struct kernel_ops *ops);
void avx512_dense(struct kernel_ops *ops);
void avx512_few(struct kernel_ops *ops);
void avx512_wide(struct kernel_ops *ops);
void avx512_wide_dense(struct kernel_ops *ops);
void avx512_panels(struct kernel_ops *ops);

#endif
