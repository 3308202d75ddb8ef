/* BLIS's micro-kernel for dense products, called directly on our own panels. BLIS's sgemm as a
 * whole is no chain (it adds partial sums per cache block, and takes other paths for small sizes),
 * its micro-kernels are. Which kernel, and how large, depends on the CPU; dense_whole_exact looks
 * at each start whether it keeps the arithmetic. */
#include "runtime/kernels/table.h"

#include <blis.h>
#include <string.h>

typedef void (*micro_kernel)(dim_t m, dim_t n, dim_t k, float *alpha, float *a, float *b,
                             float *beta, float *c, inc_t rs, inc_t cs, auxinfo_t *aux,
                             cntx_t *cntx);

/* The weights take the operand that the kernel loads as vectors: the second when it prefers rows,
 * else the first, with the transposed result. */
static void run(const struct dense_whole *w, const float *panel, uint32_t n_in, const float *tile,
                float *y, size_t ldy)
{
    float one = 1, zero = 0;
    /* the interface lacks const; next: what to prefetch */
    union {
        const float *in;
        float *out;
    } weights = {.in = panel}, rows = {.in = tile};
    auxinfo_t aux;
    bli_auxinfo_set_next_a(weights.out, &aux);
    bli_auxinfo_set_next_b(rows.out, &aux);
    micro_kernel kernel = (micro_kernel)w->kernel;
    if (w->weights_first)
        kernel(w->outs, w->rows, n_in, &one, weights.out, rows.out, &zero, y, 1, (inc_t)ldy, &aux,
               w->context);
    else
        kernel(w->rows, w->outs, n_in, &one, rows.out, weights.out, &zero, y, (inc_t)ldy, 1, &aux,
               w->context);
    for (uint32_t r = 0; r < w->rows; r++)
        for (uint32_t o = 0; o < w->outs; o++)
            y[r * ldy + o] += 0.0f; /* an underflown -0 becomes +0 */
}

bool dense_whole_find(struct dense_whole *ret)
{
    cntx_t *context = bli_gks_query_cntx();
    void_fp found = bli_cntx_get_l3_nat_ukr_dt(BLIS_FLOAT, BLIS_GEMM_UKR, context);
    void (*kernel)(void);
    memcpy(&kernel, &found, sizeof kernel); /* BLIS hands functions out as void pointers */
    dim_t mr = bli_cntx_get_blksz_def_dt(BLIS_FLOAT, BLIS_MR, context);
    dim_t nr = bli_cntx_get_blksz_def_dt(BLIS_FLOAT, BLIS_NR, context);
    bool padded = bli_cntx_get_blksz_max_dt(BLIS_FLOAT, BLIS_MR, context) != mr ||
                  bli_cntx_get_blksz_max_dt(BLIS_FLOAT, BLIS_NR, context) != nr;
    bool by_rows = bli_cntx_l3_nat_ukr_prefers_rows_dt(BLIS_FLOAT, BLIS_GEMM_UKR, context);
    dim_t rows = by_rows ? mr : nr, outs = by_rows ? nr : mr;
    if (!kernel || padded || rows < 1 || outs < 1 || rows > DENSE_ROWS_MAX ||
        outs > DENSE_OUTS_MAX || outs % DENSE_OUTS != 0 || DENSE_ROWS_MAX % rows != 0)
        return false;
    *ret = (struct dense_whole){.run = run,
                                .rows = (uint32_t)rows,
                                .outs = (uint32_t)outs,
                                .weights_first = !by_rows,
                                .kernel = kernel,
                                .context = context};
    return true;
}
