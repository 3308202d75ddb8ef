/* Clocks for shells. Cores never read them; they are handed the time.
 * Monotonic stops during sleep, boot-time goes on: their difference shows that we slept
 * (PROTOCOL 2.5). */
#ifndef COVEY_BASE_CLOCK_H
#define COVEY_BASE_CLOCK_H

#include <stdint.h>

uint64_t clock_monotonic_us(void); /* since some fixed moment, not counting sleep */
uint64_t clock_boottime_us(void);  /* the same, counting sleep */
/* How long this machine has slept, since some fixed moment. A growth by more than CLOCK_SLEEP_US
 * means that we slept; it may go back by as long as it takes to read two clocks. */
enum { CLOCK_SLEEP_US = 1000 * 1000 };
uint64_t clock_slept_us(void);
uint64_t clock_wall_ms(void); /* Unix time; may jump */

#endif
