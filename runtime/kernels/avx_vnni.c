/* The AVX-VNNI variant: what it replaces of the AVX2 table. */
#include "runtime/kernels/avx_vnni.h"
#include "runtime/kernels/avx2.h"

void kernel_ops_avx_vnni(struct kernel_ops *ops)
{
    avx_vnni_few(ops);
    avx_vnni_panels(ops);
    avx2_wide_dense(ops);
}
