/* Few rows of activations times quantised weights: AVX-512 has registers for eight. */
#include "runtime/kernels/avx512.h"

#define VNNI_DPBUSD _mm256_dpbusd_epi32
#define VNNI_DPWSSD _mm256_dpwssd_epi32
#define VNNI_FEW_ROWS 8
#define VNNI_SETUP avx512_few
#include "runtime/kernels/vnni_few.h"
