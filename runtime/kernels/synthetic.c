#include "runtime/kernels/synthetic.h"
#include "runtime/kernels/half.h"

/* Where a type keeps its F16 scales in a block; -1: none. */
static void scale_offsets(enum tensor_type type, int ret[2])
{
    ret[1] = -1;
    switch (type) {
    case TENSOR_Q4_1:
    case TENSOR_Q5_1:
    case TENSOR_Q4_K:
    case TENSOR_Q5_K:
        ret[1] = 2;
        ret[0] = 0;
        break;
    case TENSOR_Q2_K:
        ret[0] = 80;
        ret[1] = 82;
        break;
    case TENSOR_Q3_K:
        ret[0] = 108;
        break;
    case TENSOR_Q6_K:
        ret[0] = 208;
        break;
    default:
        ret[0] = 0;
    }
}

static float uniform(struct rng *rng)
{
    return (float)((double)(int32_t)(uint32_t)(rng_u64(rng) >> 32) * 0x1p-31);
}

void synthetic_weights(struct rng *rng, enum tensor_type type, void *data, size_t n_bytes)
{
    size_t block = tensor_traits(type)->block_bytes;
    uint8_t *p = data;
    int at[2];
    scale_offsets(type, at);
    for (size_t b = 0; b < n_bytes / block; b++, p += block) {
        for (size_t i = 0; i < block; i++)
            p[i] = (uint8_t)(rng_u64(rng) >> 56);
        float value = uniform(rng) * 0.05f;
        uint16_t half = half_round(value), bf16 = (uint16_t)(bits_of_float(value) >> 16);
        if (type == TENSOR_F32)
            memcpy(p, &value, 4);
        else if (type == TENSOR_BF16)
            memcpy(p, &bf16, 2);
        else if (type == TENSOR_MXFP4)
            p[0] = (uint8_t)(114 + p[0] % 10);
        else
            for (int i = 0; i < 2 && at[i] >= 0; i++, half = half_round(uniform(rng) * 0.05f))
                memcpy(p + at[i], &half, 2);
    }
}

void synthetic_floats(struct rng *rng, float *x, size_t n, float size)
{
    for (size_t i = 0; i < n; i++)
        x[i] = uniform(rng) * (rng_below(rng, 64) == 0 ? 50 * size : size);
}
