/* No Mac has AMX in Intel's sense. */
#include "runtime/kernels/cpu_x86.h"

bool cpu_x86_allow_amx(void)
{
    return false;
}
