/* The AVX2 variant: what it replaces of the C table. */
#include "runtime/kernels/avx2.h"

void kernel_ops_avx2(struct kernel_ops *ops)
{
    avx2_few(ops);
    avx2_panels(ops);
    avx2_dense(ops);
    avx2_opened(ops);
    avx2_rows(ops);
    avx2_attention(ops);
}
