/* Which variants an arm64 CPU can run. NEON is part of the architecture; the system says whether
 * the dot-product and i8mm instructions are there (cpu_arm64_*.c). */
#include "runtime/kernels/cpu_arm64.h"

bool kernel_ops_find(enum kernels_variant *variant, struct kernel_ops *ret)
{
    bool dotprod = cpu_has_dotprod(), i8mm = dotprod && cpu_has_i8mm();
    if (*variant == KERNELS_BEST)
        *variant = i8mm ? KERNELS_NEON_I8MM : dotprod ? KERNELS_NEON_DOTPROD : KERNELS_NEON;
    kernel_ops_c(ret);
    switch (*variant) {
    case KERNELS_C:
        return true;
    case KERNELS_NEON:
        kernel_ops_neon(ret);
        return true;
    case KERNELS_NEON_DOTPROD:
        kernel_ops_neon_dotprod(ret);
        return dotprod;
    case KERNELS_NEON_I8MM:
        kernel_ops_neon_i8mm(ret);
        return i8mm;
    default:
        return false;
    }
}
