/* The AVX2 variant, in parts. Internal to the kernels; its files are compiled with AVX2, FMA and
 * F16C and run only where the CPU has them. */
#ifndef COVEY_RUNTIME_KERNELS_AVX2_H
#define COVEY_RUNTIME_KERNELS_AVX2_H

#include "runtime/kernels/table.h"

#endif
