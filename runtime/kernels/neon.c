/* The NEON variants: what they replace of the C table. */
#include "runtime/kernels/neon.h"

void kernel_ops_neon(struct kernel_ops *ops)
{
    neon_products(ops);
    neon_dense(ops);
    neon_rows(ops);
    neon_attention(ops);
}

void kernel_ops_neon_dotprod(struct kernel_ops *ops)
{
    kernel_ops_neon(ops);
    neon_products_dotprod(ops);
}

void kernel_ops_neon_i8mm(struct kernel_ops *ops)
{
    kernel_ops_neon(ops);
    neon_products_i8mm(ops);
}
