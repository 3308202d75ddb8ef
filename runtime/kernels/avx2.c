/* The AVX2 variant: what it replaces of the C table. */
#include "runtime/kernels/avx2.h"

void kernel_ops_avx2(struct kernel_ops *ops)
{
    (void)ops;
}
