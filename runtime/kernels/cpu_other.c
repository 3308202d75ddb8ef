/* A CPU for which there is only the C reference. */
#include "runtime/kernels/table.h"

bool kernel_ops_find(enum kernels_variant *variant, struct kernel_ops *ret)
{
    if (*variant != KERNELS_BEST && *variant != KERNELS_C)
        return false;
    *variant = KERNELS_C;
    kernel_ops_c(ret);
    return true;
}
