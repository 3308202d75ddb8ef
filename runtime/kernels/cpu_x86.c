/* Which variants an x86-64 CPU can run. */
#include "runtime/kernels/table.h"

#include <cpuid.h>

static bool has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool kernel_ops_find(enum kernels_variant *variant, struct kernel_ops *ret)
{
    if (*variant == KERNELS_BEST)
        *variant = has_avx2() ? KERNELS_AVX2 : KERNELS_C;
    if (*variant != KERNELS_C && (*variant != KERNELS_AVX2 || !has_avx2()))
        return false;
    kernel_ops_c(ret);
    if (*variant == KERNELS_AVX2)
        kernel_ops_avx2(ret);
    return true;
}
