/* Few rows of activations times quantised weights. */
#include "runtime/kernels/avx_vnni.h"

#define VNNI_DPBUSD _mm256_dpbusd_avx_epi32
#define VNNI_DPWSSD _mm256_dpwssd_avx_epi32
#define VNNI_FEW_ROWS 4
#define VNNI_SETUP avx_vnni_few
#include "runtime/kernels/vnni_few.h"
