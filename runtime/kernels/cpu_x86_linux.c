/* Linux gives the large registers of AMX to a process that asks for them. */
#include "runtime/kernels/cpu_x86.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Of asm/prctl.h and the list of extended states in Linux. */
enum { REQUEST_STATE = 0x1023, STATE_TILE_DATA = 18 };

bool cpu_x86_allow_amx(void)
{
    return syscall(SYS_arch_prctl, REQUEST_STATE, STATE_TILE_DATA) == 0;
}
