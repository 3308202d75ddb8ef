/* macOS: sysctl for totals, host_statistics64 for what is available (free, inactive and purgeable
 * pages), and IOKit's power sources. IOKit is opened when it is asked, so that a build needs
 * neither its headers nor its stubs; the signatures are those of <IOKit/ps/IOPowerSources.h> and
 * <CoreFoundation/CFString.h>. */
#include "agent/sysinfo.h"

#include <dlfcn.h>
#include <mach/mach.h>
#include <malloc/malloc.h>
#include <string.h>
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

/* CFTypeRef and CFStringRef are const void *. */
struct power_calls {
    const void *(*copy_info)(void);
    const void *(*providing_type)(const void *info);
    unsigned char (*get_text)(const void *string, char *to, long size, uint32_t encoding);
    void (*release)(const void *object);
};

static bool find_call(const char *name, void *to)
{
    void *found = dlsym(RTLD_DEFAULT, name);
    memcpy(to, &found, sizeof found);
    return found != NULL;
}

static bool find_calls(struct power_calls *c)
{
    enum { FLAGS = RTLD_LAZY | RTLD_GLOBAL }; /* kept open: it is asked again every few seconds */
    return dlopen("/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation", FLAGS) &&
           dlopen("/System/Library/Frameworks/IOKit.framework/IOKit", FLAGS) &&
           find_call("IOPSCopyPowerSourcesInfo", &c->copy_info) &&
           find_call("IOPSGetProvidingPowerSourceType", &c->providing_type) &&
           find_call("CFStringGetCString", &c->get_text) && find_call("CFRelease", &c->release);
}

bool sysinfo_on_mains(void)
{
    enum { UTF8 = 0x08000100 }; /* kCFStringEncodingUTF8 */
    struct power_calls c;
    char type[64] = "";
    const void *info = find_calls(&c) ? c.copy_info() : NULL;
    if (!info)
        return true;
    const void *string = c.providing_type(info); /* not ours to release */
    bool known = string && c.get_text(string, type, sizeof type, UTF8);
    c.release(info);
    return !known || strcmp(type, "AC Power") == 0; /* else "Battery Power" or "UPS Power" */
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
