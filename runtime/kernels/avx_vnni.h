/* The AVX-VNNI variant: AVX2 with the 8-bit dot products of CPUs without AVX-512. Internal to the
 * kernels; its files are compiled with AVX-VNNI beside AVX2, FMA and F16C. */
#ifndef COVEY_RUNTIME_KERNELS_AVX_VNNI_H
#define COVEY_RUNTIME_KERNELS_AVX_VNNI_H

#include "runtime/kernels/table.h"

void avx_vnni_few(struct kernel_ops *ops);
void avx_vnni_panels(struct kernel_ops *ops);

#endif
