/* Q8_0 blocks of the KV cache to F32, for the kernels that read F32. Each variant compiles it for
 * itself; one rounded product for each value, so all have the same bits. Internal to the kernels.
 *
 * For each KV head of a block: K as int8 [4 groups][head_dim][16 positions], V as int8 [64
 * positions][head_dim], then scales F16 [64 positions][runs] of K and the same of V: one for each
 * run of 32 dimensions of a position (the last may be shorter). */
#ifndef COVEY_RUNTIME_KERNELS_KV_OPEN_H
#define COVEY_RUNTIME_KERNELS_KV_OPEN_H

#include "runtime/kernels/arithmetic.h"
#include "runtime/kernels/half.h"

#include <stddef.h>

static inline uint32_t kv_runs(uint32_t head_dim)
{
    return (head_dim + BLOCK - 1) / BLOCK;
}

/* Of one KV head. */
static inline size_t kv_q8_bytes(uint32_t head_dim)
{
    return (size_t)2 * KV_BLOCK * (head_dim + kv_runs(head_dim) * 2);
}

static inline const uint8_t *kv_q8_scales(const uint8_t *head, uint32_t head_dim)
{
    return head + (size_t)2 * KV_BLOCK * head_dim;
}

/* Positions low <= p < high of one KV head, K by whole groups, to the places that they have in a
 * block of F32. */
static inline void kv_open_q8(const uint8_t *head, uint32_t head_dim, uint32_t low, uint32_t high,
                              float *k, float *v)
{
    const int8_t *from = (const int8_t *)head;
    const uint8_t *scales = kv_q8_scales(head, head_dim);
    uint32_t runs = kv_runs(head_dim);
    for (uint32_t g = low / KV_GROUP; g * KV_GROUP < high; g++) {
        for (uint32_t d = 0; d < head_dim; d += BLOCK) {
            float scale[KV_GROUP];
            uint32_t n = head_dim - d < BLOCK ? head_dim - d : BLOCK;
            for (uint32_t p = 0; p < KV_GROUP; p++)
                scale[p] = half_open(
                    load_u16(scales + 2 * ((size_t)(g * KV_GROUP + p) * runs + d / BLOCK)));
            size_t at = ((size_t)g * head_dim + d) * KV_GROUP;
            for (uint32_t i = 0; i < n; i++, at += KV_GROUP)
                for (uint32_t p = 0; p < KV_GROUP; p++)
                    k[at + p] = scale[p] * (float)from[at + p];
        }
    }
    from += (size_t)KV_BLOCK * head_dim;
    scales += (size_t)2 * KV_BLOCK * runs;
    for (uint32_t p = low; p < high; p++) {
        for (uint32_t d = 0; d < head_dim; d += BLOCK) {
            float scale = half_open(load_u16(scales + 2 * ((size_t)p * runs + d / BLOCK)));
            uint32_t n = head_dim - d < BLOCK ? head_dim - d : BLOCK;
            size_t at = (size_t)p * head_dim + d;
            for (uint32_t i = 0; i < n; i++)
                v[at + i] = scale * (float)from[at + i];
        }
    }
}

#endif
