/* Made-up weights and activations, the same on every system: for the digest, tests and benches. */
#ifndef COVEY_RUNTIME_KERNELS_SYNTHETIC_H
#define COVEY_RUNTIME_KERNELS_SYNTHETIC_H

#include "base/rng.h"
#include "runtime/kernels/kernels.h"

/* Fills n_bytes (whole blocks) with random blocks of the type; every scale is finite and of about
 * the size that real weights have. */
void synthetic_weights(struct rng *rng, enum tensor_type type, void *data, size_t n_bytes);

/* Uniform in [-size, size), now and then 50 times that. */
void synthetic_floats(struct rng *rng, float *x, size_t n, float size);

#endif
