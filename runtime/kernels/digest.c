/* The start-up digest: every kernel on fixed inputs, hashed. Nodes that share a plan must have
 * equal ones, else an unequal CPU, compiler or library would silently break the sameness of
 * answers. */
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/synthetic.h"
#include "runtime/vmath.h"

#include <math.h>
#include <string.h>

enum { OUTS = 27, IN = 768, ROWS = 15, HEADS = 6, KV_HEADS = 2, DIM = 40, POSITIONS = 150 };

struct digest {
    uint8_t weights[OUTS * IN * 4] __attribute__((aligned(64)));
    struct kernels *k;
    struct rng rng;
    uint64_t hash;
    float x[ROWS * IN], y[ROWS * IN], z[ROWS * IN];
    void *memory; /* activations, KV, workspace */
};

/* FNV-1a, 64 bits. */
static void add_hash(struct digest *d, const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    for (size_t i = 0; i < n; i++)
        d->hash = (d->hash ^ p[i]) * UINT64_C(1099511628211);
}

static void products(struct digest *d, enum tensor_type type)
{
    struct matrix w = {type, OUTS, IN, tensor_row_bytes(type, IN), d->weights};
    synthetic_weights(&d->rng, type, d->weights, OUTS * w.row_bytes);
    synthetic_floats(&d->rng, d->x, (size_t)ROWS * IN, 1);
    static const uint32_t rows[] = {1, 2, 3, 4, ROWS};
    for (unsigned i = 0; i < ARRAY_LEN(rows); i++)
        for (unsigned precision = 0; precision < 2; precision++) {
            struct activations a;
            struct matmul_options options = {(enum kernels_precision)precision, i % 2 ? 256 : 0};
            activations_prepare(d->k, &a, d->memory, d->x, IN, rows[i], IN,
                                activations_form(type, options.precision));
            matmul(d->k, &w, &a, &options, d->y, OUTS);
            add_hash(d, d->y, sizeof(float) * rows[i] * OUTS);
        }
    matrix_row(d->k, &w, OUTS / 2, d->y);
    add_hash(d, d->y, sizeof(float) * IN);
}

static void rows(struct digest *d)
{
    enum { N = IN - 5 };
    synthetic_floats(&d->rng, d->x, (size_t)ROWS * IN, 3);
    synthetic_floats(&d->rng, d->y, (size_t)ROWS * IN, 1);
    rms_norm(d->k, d->x, IN, ROWS, N, d->y, 1e-5f, d->z, IN);
    add_hash(d, d->z, sizeof(float) * N);
    silu_mul(d->k, d->x, d->y, IN, ROWS, N, d->z, IN);
    add_hash(d, d->z, sizeof(float) * N);
    gelu_tanh_mul(d->k, d->x, d->y, IN, ROWS, N, d->z, IN);
    add_hash(d, d->z, sizeof(float) * N);
    float sum = exp_sum(d->k, d->x, N, 2.5f, d->z);
    add_hash(d, d->z, sizeof(float) * N);
    add_hash(d, &sum, sizeof sum);
    add_to(d->k, d->z, d->x, N);
    add_bias(d->k, d->z, IN, 1, N, d->y);
    add_hash(d, d->z, sizeof(float) * N);
}

static void attend(struct digest *d, enum kernels_precision precision)
{
    struct kv_layout layout = {KV_HEADS, DIM, precision};
    struct rope rope = {ROPE_NORM, DIM - 8, 10000, 1, NULL};
    uint8_t *p = d->memory;
    void *blocks[POSITIONS / KV_BLOCK + 1];
    for (unsigned i = 0; i < ARRAY_LEN(blocks); i++, p += kv_block_bytes(&layout))
        blocks[i] = p;
    float table[ROWS * DIM];
    for (uint32_t from = 0; from < POSITIONS; from += ROWS) {
        struct kv_segment s = {blocks, from, ROWS};
        uint32_t positions[ROWS];
        for (uint32_t i = 0; i < ROWS; i++)
            positions[i] = from + i;
        rope.pairing = from % 2 ? ROPE_NEOX : ROPE_NORM;
        synthetic_floats(&d->rng, d->x, (size_t)ROWS * IN, 1);
        synthetic_floats(&d->rng, d->y, (size_t)ROWS * IN, 1);
        rope_table(d->k, &rope, positions, ROWS, table);
        rope_apply(d->k, &rope, table, d->x, IN, ROWS, HEADS, DIM);
        kv_write(d->k, &layout, &s, 1, d->x + 17, IN, d->y, IN);
        struct attention a = {&layout, HEADS, from % 2 ? 70 : 0, 0.158f, &s, 1, d->x, IN, d->z,
                              IN,      p};
        attention(d->k, &a);
        add_hash(d, d->z, sizeof(float) * HEADS * DIM);
        struct kv_segment last = {blocks, from + ROWS - 1, 1};
        a.segments = &last;
        attention(d->k, &a);
        add_hash(d, d->z, sizeof(float) * HEADS * DIM);
    }
}

uint64_t kernels_digest(struct kernels *k)
{
    struct kv_layout layout = {KV_HEADS, DIM, KERNELS_F32};
    size_t need = kv_block_bytes(&layout) * (POSITIONS / KV_BLOCK + 1) +
                  attention_workspace_bytes(&layout, HEADS, ROWS, POSITIONS);
    need = MAX_OF(need, activations_bytes(ROWS, IN));
    _cleanup_(freep) struct digest *d = aligned_alloc(64, (sizeof *d + 63) & ~(size_t)63);
    _cleanup_(freep) void *memory = aligned_alloc(64, (need + 63) & ~(size_t)63);
    if (!d || !memory)
        return 0;
    d->k = k;
    d->memory = memory;
    d->hash = UINT64_C(14695981039346656037) + ARITHMETIC_VERSION;
    rng_seed(&d->rng, 1);
    for (uint32_t type = 0; type < TENSOR_TYPES; type++)
        if (tensor_traits(type))
            products(d, (enum tensor_type)type);
    rows(d);
    attend(d, KERNELS_FAST);
    attend(d, KERNELS_F32);
    return d->hash;
}
