/* F16 and BF16 in portable C, equal to F16C and NEON on finite values. Internal to the kernels. */
#ifndef COVEY_RUNTIME_KERNELS_HALF_H
#define COVEY_RUNTIME_KERNELS_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t bits_of_float(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float half_open(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u;
    if (exponent == 31)
        return float_of_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent != 0)
        return float_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
    return float_of_bits(sign | bits_of_float((float)mantissa * 0x1p-24f));
}

/* Nearest, ties to even; overflow to infinity. */
static inline uint16_t half_round(float f)
{
    uint32_t u = bits_of_float(f), sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (u >= 0x477ff000u)
        return (uint16_t)(sign | 0x7c00u);
    if (u < 0x38800000u) /* subnormal: adding 0.5 leaves the mantissa in the low bits, rounded */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(u) + 0.5f) - 0x3f000000u));
    u += 0xfffu + (u >> 13 & 1u);
    return (uint16_t)(sign | (u - 0x38000000u) >> 13);
}

static inline float bf16_open(uint16_t b)
{
    return float_of_bits((uint32_t)b << 16);
}

static inline uint16_t load_u16(const void *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline uint32_t load_u32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline float load_half(const void *p)
{
    return half_open(load_u16(p));
}

#endif
