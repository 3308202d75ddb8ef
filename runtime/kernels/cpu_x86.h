/* What the system must be asked before an x86-64 CPU's registers may be used. Internal to the
 * kernels; cpu_x86_linux.c and cpu_x86_macos.c. */
#ifndef COVEY_RUNTIME_KERNELS_CPU_X86_H
#define COVEY_RUNTIME_KERNELS_CPU_X86_H

#include <stdbool.h>

/* True when every thread of this process, present and future, may use AMX from now on. */
bool cpu_x86_allow_amx(void);

#endif
