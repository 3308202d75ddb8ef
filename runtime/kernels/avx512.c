/* The AVX-512 variant: what it replaces of the AVX2 table. */
#include "runtime/kernels/avx512.h"

void kernel_ops_avx512(struct kernel_ops *ops)
{
    avx512_few(ops);
    avx512_wide(ops);
    avx512_wide_dense(ops);
    avx512_panels(ops);
    avx512_dense(ops);
    avx512_attention(ops);
}
