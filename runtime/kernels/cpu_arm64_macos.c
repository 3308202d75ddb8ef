#include "runtime/kernels/cpu_arm64.h"

#include <sys/sysctl.h>

static bool has(const char *name)
{
    int value = 0;
    size_t n = sizeof value;
    return sysctlbyname(name, &value, &n, NULL, 0) == 0 && value != 0;
}

bool cpu_has_dotprod(void)
{
    return has("hw.optional.arm.FEAT_DotProd");
}

bool cpu_has_i8mm(void)
{
    return has("hw.optional.arm.FEAT_I8MM");
}
