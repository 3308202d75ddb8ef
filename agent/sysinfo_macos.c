/* macOS: sysctl for totals, host_statistics64 for what is available (free, inactive and purgeable
 * pages). IOKit is not used yet, so the power source is not known and mains is assumed: a laptop on
 * battery is not ranked lower. */
#include "agent/sysinfo.h"

#include <mach/mach.h>
#include <malloc/malloc.h>
#include <sys/sysctl.h>
#include <unistd.h>

void sysinfo_read_memory(struct sysinfo_memory *ret)
{
    *ret = (struct sysinfo_memory){0, 0};
    size_t n = sizeof ret->total_bytes;
    (void)sysctlbyname("hw.memsize", &ret->total_bytes, &n, NULL, 0);
    vm_statistics64_data_t vm;
    mach_msg_type_number_t count = HOST_VM_INFO64_COUNT;
    if (host_statistics64(mach_host_self(), HOST_VM_INFO64, (host_info64_t)&vm, &count) !=
        KERN_SUCCESS)
        return;
    uint64_t pages = (uint64_t)vm.free_count + vm.inactive_count + vm.purgeable_count;
    ret->available_bytes = pages * (uint64_t)getpagesize();
}

uint32_t sysinfo_usable_cores(void)
{
    int32_t n = 0;
    size_t size = sizeof n;
    /* The fast cores: an even share per thread would wait for the slow ones. */
    if (sysctlbyname("hw.perflevel0.logicalcpu", &n, &size, NULL, 0) != 0 || n < 1) {
        size = sizeof n;
        if (sysctlbyname("hw.logicalcpu", &n, &size, NULL, 0) != 0 || n < 1)
            n = 1;
    }
    return (uint32_t)n;
}

bool sysinfo_on_mains(void)
{
    return true;
}

uint64_t sysinfo_resident_bytes(void)
{
    struct mach_task_basic_info info;
    mach_msg_type_number_t count = MACH_TASK_BASIC_INFO_COUNT;
    if (task_info(mach_task_self(), MACH_TASK_BASIC_INFO, (task_info_t)&info, &count) !=
        KERN_SUCCESS)
        return 0;
    return info.resident_size;
}

void sysinfo_bound_allocator(void)
{
}

void sysinfo_give_back_memory(void)
{
    (void)malloc_zone_pressure_relief(NULL, 0);
}

int64_t sysinfo_mtime_ns(const struct stat *st)
{
    return (int64_t)st->st_mtimespec.tv_sec * 1000000000 + st->st_mtimespec.tv_nsec;
}
