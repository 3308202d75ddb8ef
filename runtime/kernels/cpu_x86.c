/* Which variants an x86-64 CPU can run. */
#include "runtime/kernels/cpu_x86.h"
#include "runtime/kernels/table.h"

#include <cpuid.h>

static bool has_avx2(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

static bool has_avx_vnni(void)
{
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

static bool has_amx(void)
{
    unsigned a, b, c, d;
    const unsigned tile = 1u << 24, int8 = 1u << 25;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & tile) && (d & int8) &&
           cpu_x86_allow_amx();
}

bool kernel_ops_find(enum kernels_variant *variant, struct kernel_ops *ret)
{
    const bool have[KERNELS_VARIANTS] = {[KERNELS_C] = true,
                                         [KERNELS_AVX2] = has_avx2(),
                                         [KERNELS_AVX_VNNI] = has_avx_vnni(),
                                         [KERNELS_AVX512] = has_avx512(),
                                         [KERNELS_AMX] = has_amx()};
    if (*variant == KERNELS_BEST)
        *variant = have[KERNELS_AMX]        ? KERNELS_AMX
                   : have[KERNELS_AVX512]   ? KERNELS_AVX512
                   : have[KERNELS_AVX_VNNI] ? KERNELS_AVX_VNNI
                   : have[KERNELS_AVX2]     ? KERNELS_AVX2
                                            : KERNELS_C;
    if ((unsigned)*variant >= KERNELS_VARIANTS || !have[*variant])
        return false;
    kernel_ops_c(ret);
    if (*variant >= KERNELS_AVX2)
        kernel_ops_avx2(ret);
    if (*variant == KERNELS_AVX_VNNI)
        kernel_ops_avx_vnni(ret);
    if (*variant >= KERNELS_AVX512)
        kernel_ops_avx512(ret);
    if (*variant == KERNELS_AMX)
        kernel_ops_amx(ret);
    return true;
}
