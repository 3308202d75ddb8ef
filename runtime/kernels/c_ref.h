/* The C reference, in parts. Internal to the kernels. */
#ifndef COVEY_RUNTIME_KERNELS_C_REF_H
#define COVEY_RUNTIME_KERNELS_C_REF_H

#include "runtime/kernels/table.h"

void c_products(struct kernel_ops *ops);
void c_rows(struct kernel_ops *ops);
void c_attention(struct kernel_ops *ops);

/* Lanes l + 8, + 4, + 2, + 1 (arithmetic.h 7). */
static inline float sum_lanes(const float lanes[SUM_LANES])
{
    float t[8];
    for (int i = 0; i < 8; i++)
        t[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; i++)
        t[i] = t[i] + t[i + 4];
    return (t[0] + t[2]) + (t[1] + t[3]);
}

void c_quantise(const float *x, uint32_t n_blocks, uint32_t n_rows, uint32_t r, uint8_t *tile);

#endif
