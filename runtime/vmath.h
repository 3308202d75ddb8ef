/* Our own elementary functions, so that no library decides a bit: the same results on every CPU and
 * system. Scalar forms; the kernels hold vector forms of vm_expf with equal bits.
 *
 * vm_expf: n = rint(x log2 e) by adding and subtracting 1.5 * 2^23, r = x - n ln 2 in two fused
 * steps, 1 + (r + r^2 P4(r)), scaled by two exact powers of two. Below EXP_LOW 0, above EXP_HIGH
 * infinity, NaN stays NaN. At most 1.1 ulp for normal results.
 * Binary64 forms use only + - * / and sqrt, each rounded by IEEE rules. */
#ifndef COVEY_RUNTIME_VMATH_H
#define COVEY_RUNTIME_VMATH_H

/* Where expf would leave the normal range on either side. */
#define VM_EXP_LOW (-87.33654f)
#define VM_EXP_HIGH 88.72283f

float vm_expf(float x);
float vm_siluf(float x);      /* x / (1 + exp(-x)) */
float vm_gelu_tanhf(float x); /* the tanh form: x / (1 + exp(-2u)) */

/* Within a few units in the 15th digit. vm_log: x > 0 and finite, else -infinity for 0, NaN. */
double vm_exp(double x);
double vm_log(double x);
/* Of angles below VM_ANGLE_MAX in size; others, and NaN, count as 0. */
#define VM_ANGLE_MAX 0x1p30
void vm_sincos(double x, double *ret_sin, double *ret_cos);

#endif
