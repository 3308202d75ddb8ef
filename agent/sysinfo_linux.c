#include "agent/sysinfo.h"

#include "base/util.h"

#include <dirent.h>
#include <inttypes.h>
#include <malloc.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { ALLOCATOR_KEEPS_BYTES = 1 << 20 };

static uint64_t limit_of_cgroup(const char *file)
{
    FILE *f = fopen(file, "re");
    uint64_t v = 0;
    if (!f)
        return 0;
    if (fscanf(f, "%" SCNu64, &v) != 1)
        v = 0; /* "max" */
    (void)fclose(f);
    return v;
}

void sysinfo_read_memory(struct sysinfo_memory *ret)
{
    *ret = (struct sysinfo_memory){0, 0};
    FILE *f = fopen("/proc/meminfo", "re");
    if (!f)
        return;
    char line[128];
    while (fgets(line, sizeof line, f)) {
        uint64_t kib;
        if (sscanf(line, "MemTotal: %" SCNu64, &kib) == 1)
            ret->total_bytes = kib * 1024;
        else if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
            ret->available_bytes = kib * 1024;
    }
    (void)fclose(f);
    uint64_t limit = limit_of_cgroup("/sys/fs/cgroup/memory.max");
    if (limit > 0 && limit < ret->total_bytes) {
        uint64_t used = limit_of_cgroup("/sys/fs/cgroup/memory.current");
        ret->total_bytes = limit;
        ret->available_bytes = MIN_OF(ret->available_bytes, limit > used ? limit - used : 0);
    }
}

uint32_t sysinfo_usable_cores(void)
{
    cpu_set_t set;
    long n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                         : sysconf(_SC_NPROCESSORS_ONLN);
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (f) {
        double quota, period;
        if (fscanf(f, "%lf %lf", &quota, &period) == 2 && period > 0 && quota / period < (double)n)
            n = (long)(quota / period + 0.5);
        (void)fclose(f);
    }
    return n < 1 ? 1 : (uint32_t)n;
}

static bool supply_says(const char *supply, const char *file, const char *word)
{
    char path[512], value[64] = "";
    (void)snprintf(path, sizeof path, "/sys/class/power_supply/%s/%s", supply, file);
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    bool same = fgets(value, sizeof value, f) && strncmp(value, word, strlen(word)) == 0;
    (void)fclose(f);
    return same;
}

bool sysinfo_on_mains(void)
{
    DIR *dir = opendir("/sys/class/power_supply");
    if (!dir)
        return true;
    bool battery = false, mains = false;
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        if (d->d_name[0] == '.')
            continue;
        if (supply_says(d->d_name, "type", "Battery") &&
            supply_says(d->d_name, "status", "Discharging"))
            battery = true;
        if (supply_says(d->d_name, "online", "1"))
            mains = true;
    }
    (void)closedir(dir);
    return mains || !battery;
}

uint64_t sysinfo_resident_bytes(void)
{
    FILE *f = fopen("/proc/self/statm", "re");
    uint64_t size = 0, resident = 0;
    if (!f)
        return 0;
    if (fscanf(f, "%" SCNu64 " %" SCNu64, &size, &resident) != 2)
        resident = 0;
    (void)fclose(f);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

void sysinfo_bound_allocator(void)
{
#ifdef __GLIBC__
    /* Set by hand, so that they do not grow with what was freed (mallopt(3)). */
    (void)mallopt(M_MMAP_THRESHOLD, ALLOCATOR_KEEPS_BYTES);
    (void)mallopt(M_TRIM_THRESHOLD, ALLOCATOR_KEEPS_BYTES);
#endif
}

void sysinfo_give_back_memory(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

int64_t sysinfo_mtime_ns(const struct stat *st)
{
    return (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
}
