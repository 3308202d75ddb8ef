/* The context: choosing a variant, working memory. */
#include "runtime/kernels/context.h"

#include <stdlib.h>

static const char *const variant_names[KERNELS_VARIANTS] = {
    "best", "c", "avx2", "avx_vnni", "avx512", "amx", "neon", "neon_dotprod", "neon_i8mm"};

const char *kernels_variant_name(enum kernels_variant variant)
{
    return (unsigned)variant < KERNELS_VARIANTS ? variant_names[variant] : "unknown";
}

uint64_t kernels_memory_bytes(uint32_t n_threads)
{
    return (uint64_t)n_threads * SCRATCH_BYTES + sizeof(struct kernels);
}

enum err kernels_new(struct pool *pool, enum kernels_variant variant, struct kernels **ret)
{
    _cleanup_(kernels_freep) struct kernels *k = calloc(1, sizeof *k);
    if (!k)
        return ERR_NO_MEMORY;
    enum kernels_variant wanted = variant;
    if (!kernel_ops_find(&variant, &k->ops))
        return ERR_UNSUPPORTED;
    k->variant = variant;
    k->pool = pool;
    k->memory = aligned_alloc(64, (size_t)pool_threads(pool) * SCRATCH_BYTES);
    if (!k->memory)
        return ERR_NO_MEMORY;
    struct dense_whole whole;
    uint32_t own = k->ops.whole.run ? k->ops.whole.rows * k->ops.whole.outs : 0;
    if (wanted == KERNELS_BEST && dense_whole_find(&whole) && whole.rows * whole.outs >= own &&
        dense_whole_exact(&whole, k->memory)) {
        k->is_library = true;
        k->ops.whole = whole;
        k->ops.dense_rows = whole.rows;
        k->ops.dense_outs = whole.outs;
    }
    *ret = TAKE(k);
    return ERR_OK;
}

void kernels_free(struct kernels *k)
{
    if (!k)
        return;
    free(k->memory);
    free(k);
}

enum kernels_variant kernels_variant(const struct kernels *k)
{
    return k->variant;
}

struct pool *kernels_pool(const struct kernels *k)
{
    return k->pool;
}

bool kernels_use_library(const struct kernels *k)
{
    return k->is_library;
}
