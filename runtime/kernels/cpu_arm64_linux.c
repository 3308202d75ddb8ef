#include "runtime/kernels/cpu_arm64.h"

#include <asm/hwcap.h>
#include <sys/auxv.h>

bool cpu_has_dotprod(void)
{
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
}

bool cpu_has_i8mm(void)
{
    return getauxval(AT_HWCAP2) & HWCAP2_I8MM;
}
