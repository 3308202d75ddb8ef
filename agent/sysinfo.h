/* What this machine is and has. One file per system. */
#ifndef COVEY_AGENT_SYSINFO_H
#define COVEY_AGENT_SYSINFO_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

struct sysinfo_memory {
    uint64_t total_bytes;
    uint64_t available_bytes; /* without pressure: free and what can be dropped at once */
};

void sysinfo_read_memory(struct sysinfo_memory *ret);
/* Cores that this process may use (affinity and quotas count). At least 1. */
uint32_t sysinfo_usable_cores(void);
/* True on mains power, and where there is no battery. */
bool sysinfo_on_mains(void);
/* True on a cable, and where there is no network at all: false when this machine is reached by
 * radio. Planners and leaders that are wired are preferred (PROTOCOL 3.4). */
bool sysinfo_wired(void);
/* Resident memory of this process. */
uint64_t sysinfo_resident_bytes(void);
/* Once at the start: has the allocator keep little of what is freed. An agent that served one large
 * request would hold its memory for ever else. */
void sysinfo_bound_allocator(void);
/* Gives freed memory that the allocator keeps back to the system. Takes some milliseconds. */
void sysinfo_give_back_memory(void);
/* When the bytes of a file were last changed, in nanoseconds since 1970. */
int64_t sysinfo_mtime_ns(const struct stat *st);

#endif
