/* What this machine computes and streams, measured with the real kernels in at most two seconds.
 * Plans are made from these rates until stages have measured their own (DESIGN section 5). */
#ifndef COVEY_RUNTIME_CALIBRATE_H
#define COVEY_RUNTIME_CALIBRATE_H

#include "base/err.h"

#include <stdint.h>

struct pool; /* runtime/pool.h */

struct calibration {
    double
        stream_bytes_per_s; /* weight bytes that decoding one row streams, all threads together */
    double macs_per_s;      /* multiply-adds of a prompt of 128 rows, all threads together */
    uint32_t n_threads;
    uint32_t arithmetic_version; /* stage_arithmetic_version() */
    char kernels[16];            /* "avx2": another variant makes a kept calibration void */
};

/* Takes some 130 MiB for the while (less when that cannot be had), and the pool, which nobody else
 * may use meanwhile. ERR_NO_MEMORY, ERR_UNSUPPORTED. */
enum err calibrate(struct pool *pool, struct calibration *ret);

#endif
