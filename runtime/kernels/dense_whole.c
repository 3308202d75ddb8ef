/* The self-test of another library's dense kernel. */
#include "base/rng.h"
#include "runtime/kernels/half.h"
#include "runtime/kernels/synthetic.h"
#include "runtime/kernels/table.h"

#include <math.h>

enum { N_MAX = 700, LDY = DENSE_OUTS_MAX + 5 };

struct check {
    float panel[(N_MAX + 4) * DENSE_OUTS_MAX]; /* kernels may read on a little */
    float tile[(N_MAX + 4) * DENSE_ROWS_MAX];
    float y[DENSE_ROWS_MAX * LDY];
};

_Static_assert(sizeof(struct check) <= DENSE_CHECK_BYTES, "room for the self-test");

static bool equal(const struct dense_whole *w, const struct check *c, uint32_t n)
{
    for (uint32_t r = 0; r < w->rows; r++)
        for (uint32_t o = 0; o < w->outs; o++) {
            float acc = 0;
            for (uint32_t k = 0; k < n; k++)
                acc = fmaf(c->panel[k * w->outs + o], c->tile[k * w->rows + r], acc);
            acc += 0.0f;
            if (bits_of_float(acc) != bits_of_float(c->y[r * LDY + o]))
                return false;
        }
    return true;
}

bool dense_whole_exact(const struct dense_whole *w, void *memory)
{
    static const uint32_t lengths[] = {1, 2, 3, 5, 8, 31, 64, 257, N_MAX};
    struct check *c = memory;
    struct rng rng;
    rng_seed(&rng, 1);
    synthetic_floats(&rng, c->panel, ARRAY_LEN(c->panel), 1);
    synthetic_floats(&rng, c->tile, ARRAY_LEN(c->tile), 1);
    for (unsigned i = 0; i < ARRAY_LEN(lengths); i++) {
        memset(c->y, 0xff, sizeof c->y);
        w->run(w, c->panel, lengths[i], c->tile, c->y, LDY);
        if (!equal(w, c, lengths[i]))
            return false;
    }
    return true;
}
