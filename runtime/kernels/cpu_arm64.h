/* What the system says of an arm64 CPU. Internal to the kernels. */
#ifndef COVEY_RUNTIME_KERNELS_CPU_ARM64_H
#define COVEY_RUNTIME_KERNELS_CPU_ARM64_H

#include "runtime/kernels/table.h"

bool cpu_has_dotprod(void);
bool cpu_has_i8mm(void);

#endif
