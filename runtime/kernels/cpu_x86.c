/* Which variants an x86-64 CPU can run. */
#include "runtime/kernels/table.h"

#include <cpuid.h>

static bool has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

bool kernel_ops_find(enum kernels_variant *variant, struct kernel_ops *ret)
{
    enum kernels_variant best = has_avx512() ? KERNELS_AVX512
                                : has_avx2() ? KERNELS_AVX2
                                             : KERNELS_C;
    if (*variant == KERNELS_BEST)
        *variant = best;
    if (*variant < KERNELS_C || *variant > best)
        return false;
    kernel_ops_c(ret);
    if (*variant >= KERNELS_AVX2)
        kernel_ops_avx2(ret);
    if (*variant >= KERNELS_AVX512)
        kernel_ops_avx512(ret);
    return true;
}
