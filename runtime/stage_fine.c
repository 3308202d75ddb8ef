#include "runtime/stage_fine.h"

#include "runtime/kernels/arithmetic.h"

#include <stdint.h>
#include <string.h>

/* Adding and subtracting it rounds |v| < 2^22 to the nearest whole number, ties to even. */
#define ROUNDER 0x1.8p23f

/* max |x|: floats of one sign are ordered as their bits are. */
static float largest(const float x[BLOCK])
{
    int32_t bits[BLOCK], most = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < BLOCK; i++) {
        int32_t v = bits[i] & INT32_MAX;
        most = v > most ? v : most;
    }
    float a;
    memcpy(&a, &most, sizeof a);
    return a;
}

void fine_rest(const float *x, size_t n, float *rest)
{
    for (size_t b = 0; b < n; b += BLOCK) {
        float a = largest(x + b);
        if (a < BLOCK_ZERO_BELOW) { /* all q are 0 */
            memcpy(rest + b, x + b, BLOCK * sizeof *x);
            continue;
        }
        float d = a / 127.0f, id = 127.0f / a;
        for (int i = 0; i < BLOCK; i++) {
            float q = (x[b + (size_t)i] * id + ROUNDER) - ROUNDER;
            rest[b + (size_t)i] = x[b + (size_t)i] - d * q;
        }
    }
}
