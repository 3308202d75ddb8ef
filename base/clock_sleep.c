/* How long the machine has slept, from two clocks that are not read at the same moment: a thread
 * that is held up between the two readings must not take that for sleep, nor for less of it. */
#include "base/clock.h"

enum { APART_US = 1000, TRIES = 8 };

uint64_t clock_slept_us(void)
{
    uint64_t before = 0, boot = 0, after = 0;
    for (int i = 0; i < TRIES; i++) {
        before = clock_monotonic_us();
        boot = clock_boottime_us();
        after = clock_monotonic_us();
        if (after - before < APART_US)
            break;
    }
    return boot > after ? boot - after : 0;
}
