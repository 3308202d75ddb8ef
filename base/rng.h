/* A seeded random stream for cores: they draw no randomness from the system, the shell seeds them.
 * xoshiro256** (Blackman and Vigna, 2018), seeded by splitmix64. Not for secrets. */
#ifndef COVEY_BASE_RNG_H
#define COVEY_BASE_RNG_H

#include <stdint.h>

struct rng {
    uint64_t s[4];
};

void rng_seed(struct rng *r, uint64_t seed);
uint64_t rng_u64(struct rng *r);
/* Uniform in [0, n); n > 0. */
uint64_t rng_below(struct rng *r, uint64_t n);
/* Uniform in [0, 1). */
double rng_unit(struct rng *r);

#endif
