/* Without BLIS: our own dense kernels do everything. */
#include "runtime/kernels/table.h"

bool dense_whole_find(struct dense_whole *ret)
{
    (void)ret;
    return false;
}
