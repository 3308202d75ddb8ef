#include "runtime/vmath.h"

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln 2 / 2. The vector forms repeat it. */
static const float exp_poly[5] = {0x1p-1f, 0x1.5554dcp-3f, 0x1.55551ap-5f, 0x1.120ba2p-7f,
                                  0x1.6d113cp-10f};

static float power_of_two(int n) /* -126 <= n <= 127 */
{
    uint32_t u = (uint32_t)(n + 127) << 23;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

float vm_expf(float x)
{
    if (x < VM_EXP_LOW)
        return 0;
    if (x > VM_EXP_HIGH)
        return INFINITY;
    if (isnan(x))
        return x;
    float n = fmaf(x, 0x1.715476p+0f, 0x1.8p23f) - 0x1.8p23f;
    float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, x));
    float p = fmaf(exp_poly[4], r, exp_poly[3]);
    p = fmaf(p, r, exp_poly[2]);
    p = fmaf(p, r, exp_poly[1]);
    p = fmaf(p, r, exp_poly[0]);
    p = fmaf(p, r * r, r) + 1.f;
    int i = (int)n, half = i >> 1; /* 2^n may exceed what one factor holds */
    return p * power_of_two(half) * power_of_two(i - half);
}

float vm_siluf(float x)
{
    return x / (1.f + vm_expf(-x));
}

float vm_gelu_tanhf(float x)
{
    /* u = sqrt(2 / pi) (x + 0.044715 x^3); 0.5 x (1 + tanh u) = x / (1 + exp(-2u)) */
    float u = 0x1.988454p-1f * fmaf(0.044715f * x, x * x, x);
    return x / (1.f + vm_expf(-2.f * u));
}

/* ln 2 in two parts; the first has 21 trailing zero bits, so that n times it is exact. */
#define LN2_HIGH 0x1.62e42feep-1
#define LN2_LOW 0x1.a39ef35793c76p-33

double vm_exp(double x)
{
    if (x < -708)
        return 0;
    if (x > 709)
        return INFINITY;
    if (isnan(x))
        return x;
    double n = (x * 0x1.71547652b82fep+0 + 0x1.8p52) - 0x1.8p52;
    double r = (x - n * LN2_HIGH) - n * LN2_LOW;
    double sum = 1; /* Taylor by Horner: r^14 / 14! < 2^-58 at |r| <= 0.347 */
    for (int i = 14; i >= 1; i--)
        sum = 1 + sum * r / i;
    uint64_t u = (uint64_t)((int64_t)n + 1023) << 52;
    double scale;
    memcpy(&scale, &u, sizeof scale);
    return sum * scale;
}

double vm_log(double x)
{
    if (x == 0)
        return -INFINITY;
    if (!(x > 0) || isinf(x))
        return x < 0 ? (double)NAN : x;
    int shift = 0;
    if (x < DBL_MIN) {
        x *= 0x1p54;
        shift = -54;
    }
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    int64_t exponent = (int64_t)(u >> 52) - 1023;
    u = (u & 0xfffffffffffffu) | UINT64_C(1023) << 52;
    double m;
    memcpy(&m, &u, sizeof m);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        exponent++;
    }
    /* ln m = 2 atanh t, t = (m - 1) / (m + 1), |t| <= 0.172: t^24 / 25 < 2^-64 */
    double t = (m - 1) / (m + 1), t2 = t * t, sum = 0;
    for (int i = 23; i >= 1; i -= 2)
        sum = sum * t2 + 1.0 / i;
    double n = (double)(exponent + shift);
    return n * LN2_HIGH + (2 * t * sum + n * LN2_LOW);
}

/* pi / 2 in three parts of 33 bits: a quadrant number below 2^20 times each of the first two is
 * exact; above that the error stays below 1e-16 of a turn times the number of turns. */
#define PIO2_1 0x1.921fb544p+0
#define PIO2_2 0x1.0b4611a6p-34
#define PIO2_3 0x1.3198a2e037073p-69

void vm_sincos(double x, double *ret_sin, double *ret_cos)
{
    if (!(x > -VM_ANGLE_MAX && x < VM_ANGLE_MAX)) { /* a hostile file's frequencies, or NaN */
        *ret_sin = 0;
        *ret_cos = 1;
        return;
    }
    double n = (x * 0x1.45f306dc9c883p-1 + 0x1.8p52) - 0x1.8p52;
    double r = ((x - n * PIO2_1) - n * PIO2_2) - n * PIO2_3, r2 = r * r;
    /* Taylor by Horner on |r| <= pi / 4 */
    double s = 1, c = 1;
    for (int i = 19; i >= 3; i -= 2)
        s = 1 - s * r2 / (double)(i * (i - 1));
    for (int i = 20; i >= 2; i -= 2)
        c = 1 - c * r2 / (double)(i * (i - 1));
    s *= r;
    switch ((uint64_t)(int64_t)n & 3) {
    case 0:
        *ret_sin = s, *ret_cos = c;
        break;
    case 1:
        *ret_sin = c, *ret_cos = -s;
        break;
    case 2:
        *ret_sin = -s, *ret_cos = -c;
        break;
    default:
        *ret_sin = -c, *ret_cos = s;
    }
}
