#include "base/clock.h"

#include <time.h>

static uint64_t read_us(clockid_t id)
{
    struct timespec t = {0};
    (void)clock_gettime(id, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

uint64_t clock_monotonic_us(void)
{
    return read_us(CLOCK_MONOTONIC);
}

uint64_t clock_boottime_us(void)
{
    return read_us(CLOCK_BOOTTIME);
}

uint64_t clock_wall_ms(void)
{
    return read_us(CLOCK_REALTIME) / 1000u;
}
