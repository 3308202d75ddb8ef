#include "runtime/kernels/cpu_arm64.h"

#include <sys/sysctl.h>

bool cpu_has_dotprod(void)
{
    int value = 0;
    size_t n = sizeof value;
    return sysctlbyname("hw.optional.arm.FEAT_DotProd", &value, &n, NULL, 0) == 0 && value != 0;
}
