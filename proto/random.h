/* Where a core takes its random bytes from: the shell passes the system's generator, a simulation a
 * seeded one, so that a run can be repeated. */
#ifndef COVEY_PROTO_RANDOM_H
#define COVEY_PROTO_RANDOM_H

#include <stddef.h>
#include <stdint.h>

struct random_source {
    void (*fill)(void *ctx, uint8_t *to, size_t n);
    void *ctx;
};

/* The system's generator (libsodium), for shells. */
struct random_source random_source_system(void);

#endif
