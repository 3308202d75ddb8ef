/* macOS: CLOCK_UPTIME_RAW stops during sleep, CLOCK_MONOTONIC_RAW goes on (clock_gettime(3)). */
#include "base/clock.h"

#include <stdint.h>
#include <time.h>

static uint64_t read_us(clockid_t id)
{
    return clock_gettime_nsec_np(id) / 1000u;
}

uint64_t clock_monotonic_us(void)
{
    return read_us(CLOCK_UPTIME_RAW);
}

uint64_t clock_boottime_us(void)
{
    return read_us(CLOCK_MONOTONIC_RAW);
}

uint64_t clock_wall_ms(void)
{
    return read_us(CLOCK_REALTIME) / 1000u;
}
