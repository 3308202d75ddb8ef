/* Products with finer activations, for the matrices where rounding to 8 bits costs most: the
 * projections to q, k and v, whose errors go through an exponential, and the output matrix. (On
 * SmolLM2-135M Q4_1 they cause about half of the squared error in log-probabilities, at a sixth of
 * the arithmetic of a layer.)
 *
 * For quantised weights in precision `fast` a row x is computed as two rows, x and its rest
 * r = x - d_x * q with d_x and q as arithmetic.h 2 defines them (one rounding for the product, one
 * for the difference): y = y(x) + y(r), one addition. As the weights are read once for both,
 * decoding costs hardly more. Other weights and precisions are computed as ever. */
#ifndef COVEY_RUNTIME_STAGE_FINE_H
#define COVEY_RUNTIME_STAGE_FINE_H

#include <stddef.h>

/* rest[i] = what the rounding of x[0, n) to 8-bit blocks of 32 leaves; n a multiple of 32. */
void fine_rest(const float *x, size_t n, float *rest);

#endif
