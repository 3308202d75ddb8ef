/* The numeric layer: everything a stage computes, for rows of many sequences at once.
 *
 * The bits are defined in arithmetic.h and never depend on rows beside, threads or CPU. Weights
 * stay where the file is mapped. No call allocates; working memory comes from the context or the
 * caller (every size can be asked for). A context serves one calling thread; its pool does the
 * rest. Programmer's errors (shapes that do not fit) assert: check shapes when a model is loaded.
 *
 * Matrices are [n_out, n_in] row-major as in the file; activations [n_rows, n_in] and results
 * [n_rows, n_out] F32 row-major. `ld` is the distance between rows in elements. */
#ifndef COVEY_RUNTIME_KERNELS_H
#define COVEY_RUNTIME_KERNELS_H

#include "base/err.h"
#include "base/util.h"
#include "runtime/kernels/arithmetic.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pool;
struct kernels;

/* ---- element types, with GGUF's numbers */

enum tensor_type {
    TENSOR_F32 = 0,
    TENSOR_F16 = 1,
    TENSOR_Q4_0 = 2,
    TENSOR_Q4_1 = 3,
    TENSOR_Q5_0 = 6,
    TENSOR_Q5_1 = 7,
    TENSOR_Q8_0 = 8,
    TENSOR_Q2_K = 10,
    TENSOR_Q3_K = 11,
    TENSOR_Q4_K = 12,
    TENSOR_Q5_K = 13,
    TENSOR_Q6_K = 14,
    TENSOR_IQ4_NL = 20,
    TENSOR_BF16 = 30,
    TENSOR_MXFP4 = 39,
    TENSOR_TYPES = 40
};

struct tensor_traits {
    const char *name;        /* "Q4_1" */
    uint32_t block_elements; /* 1, 32 or 256 */
    uint32_t block_bytes;
    bool quantised; /* false: F32, F16, BF16 */
};

/* NULL when the number is none that this engine computes with. */
const struct tensor_traits *tensor_traits(uint32_t type);
/* Bytes of a row of n elements; 0 when the type is unknown or n is no whole number of blocks. */
size_t tensor_row_bytes(uint32_t type, uint64_t n);

float f32_of_f16(uint16_t h);
uint16_t f16_of_f32(float f); /* nearest even */
float f32_of_bf16(uint16_t b);

/* ---- the context */

enum kernels_variant {
    KERNELS_BEST = 0, /* what this CPU does best */
    KERNELS_C,
    KERNELS_AVX2, /* with FMA and F16C */
    KERNELS_AVX_VNNI,
    KERNELS_AVX512, /* F, BW, DQ, VL and VNNI */
    KERNELS_AMX,    /* with 8-bit integers, beside AVX-512 */
    KERNELS_NEON,
    KERNELS_NEON_DOTPROD,
    KERNELS_NEON_I8MM, /* matrix products of 8-bit integers, beside dot product */
    KERNELS_VARIANTS
};

enum kernels_precision { KERNELS_FAST = 0, KERNELS_F32 = 1 };

/* Chooses the table of functions and reserves working memory for each thread of the pool, which
 * must outlive the context. ERR_UNSUPPORTED when this CPU or build lacks the variant;
 * ERR_NO_MEMORY. */
enum err kernels_new(struct pool *pool, enum kernels_variant variant, struct kernels **ret);
void kernels_free(struct kernels *k);
DEFINE_CLEANUP(struct kernels, kernels_free)

enum kernels_variant kernels_variant(const struct kernels *k);
const char *kernels_variant_name(enum kernels_variant variant); /* "c", "avx2", ... */
uint64_t kernels_memory_bytes(uint32_t n_threads);              /* that kernels_new reserves */
struct pool *kernels_pool(const struct kernels *k);

/* True when dense prompt-sized products go through BLIS's micro-kernel. It is taken with
 * KERNELS_BEST only, where ours has no larger tile (BLIS does not know every new CPU), and only
 * after it has given the same bits as our own chains at this start. */
bool kernels_use_library(const struct kernels *k);

/* A digest of all kernels on fixed inputs, some milliseconds: equal on every CPU and variant of one
 * ARITHMETIC_VERSION. 0 when it could not be computed for want of memory. */
uint64_t kernels_digest(struct kernels *k);

/* ---- products */

struct matrix {
    enum tensor_type type;
    uint32_t n_out, n_in; /* n_in a whole number of blocks, at most MATRIX_IN_MAX */
    size_t row_bytes;
    const void *data; /* [n_out] rows, any alignment that is a multiple of 2 (F32: 4) */
};

/* Rows of activations prepared once for several matrices of the same n_in. The fields are for the
 * kernels only. */
struct activations {
    uint32_t n_rows, n_in;
    unsigned forms;
    size_t ldx;
    const float *x;
    uint8_t *quantised;
    float *packed;
};

/* In which forms the rows are needed; OR them over the matrices that will be used. */
enum {
    ACTIVATIONS_QUANTISED = 1, /* quantised weights in precision fast */
    ACTIVATIONS_DENSE = 2,     /* F32, F16, BF16 weights, and all in precision f32 */
};
unsigned activations_form(enum tensor_type type, enum kernels_precision precision);

/* Working memory for up to this many rows and inputs (for one set of activations), aligned to 64.
 */
size_t activations_bytes(uint32_t n_rows, uint32_t n_in);
/* Prepares x [n_rows, n_in] in `memory` (activations_bytes, aligned to 64). Both must stay as they
 * are until the last product. ACTIVATIONS_QUANTISED needs n_in to be a multiple of 32. */
void activations_prepare(struct kernels *k, struct activations *a, void *memory, const float *x,
                         size_t ldx, uint32_t n_rows, uint32_t n_in, unsigned forms);

struct matmul_options {
    enum kernels_precision precision;
    uint32_t slice; /* elements; 0: none. A multiple of 32 and of the type's block, at least n_in /
                       SLICES_MAX. Dense types: any multiple of 32. */
};
enum { SLICES_MAX = 1024 };

/* y[m][n] = sum over k of x[m][k] w[n][k], as arithmetic.h 1 to 6 define it. */
void matmul(struct kernels *k, const struct matrix *w, const struct activations *a,
            const struct matmul_options *options, float *y, size_t ldy);

/* Opens row `row` of a matrix to F32: y[n_in]. For embeddings. */
void matrix_row(struct kernels *k, const struct matrix *w, uint32_t row, float *y);

/* ---- rows */

/* y = rms_norm(x) * weight; weight [n] F32 or NULL for none. y may be x. */
void rms_norm(struct kernels *k, const float *x, size_t ldx, uint32_t n_rows, uint32_t n,
              const float *weight, float epsilon, float *y, size_t ldy);
/* y = silu(gate) * up, [n_rows, n]; y may be either. */
void silu_mul(struct kernels *k, const float *gate, const float *up, size_t ld, uint32_t n_rows,
              uint32_t n, float *y, size_t ldy);
void gelu_tanh_mul(struct kernels *k, const float *gate, const float *up, size_t ld,
                   uint32_t n_rows, uint32_t n, float *y, size_t ldy);
/* y += x over n elements. */
void add_to(struct kernels *k, float *y, const float *x, size_t n);
/* y += bias for each row; bias [n]. */
void add_bias(struct kernels *k, float *y, size_t ldy, uint32_t n_rows, uint32_t n,
              const float *bias);
void scale_by(struct kernels *k, float *y, size_t n, float factor);
/* y[i] = exp(x[i] - max), returns the sum as arithmetic.h 7 defines it. y may be x. */
float exp_sum(struct kernels *k, const float *x, size_t n, float max, float *y);

/* ---- RoPE */

enum rope_pairing {
    ROPE_NORM, /* elements 2i and 2i+1 (llama in GGUF) */
    ROPE_NEOX, /* elements i and i + n_dims/2 */
};

struct rope {
    enum rope_pairing pairing;
    uint32_t n_dims;           /* the first n_dims of each head turn; even, at most HEAD_DIM_MAX */
    float base;                /* such as 10000 */
    float frequency_scale;     /* 1, or 1/factor for linear scaling */
    const float *freq_factors; /* [n_dims/2] divisors, or NULL */
};

/* Elements of a table for n rows: [n][n_dims/2] pairs of cos and sin. */
size_t rope_table_elements(const struct rope *rope, uint32_t n_rows);
/* Fills the table for rows at these positions; once per step, for all layers. */
void rope_table(struct kernels *k, const struct rope *rope, const uint32_t *positions,
                uint32_t n_rows, float *table);
/* Turns x [n_rows, n_heads, head_dim] in place. */
void rope_apply(struct kernels *k, const struct rope *rope, const float *table, float *x,
                size_t ldx, uint32_t n_rows, uint32_t n_heads, uint32_t head_dim);

/* ---- KV cache and attention */

/* A KV block holds K and V of KV_BLOCK consecutive positions (the first a multiple of KV_BLOCK) of
 * one layer of one sequence: for each KV head first K as [4 groups][head_dim][16 positions], then V
 * as [64 positions][head_dim]; F16 or F32, or int8 with scales (kv_open.h). Aligned to 64 bytes.
 * Never needs to be cleared. */
enum kv_type {
    KV_OF_PRECISION = 0, /* FAST: F16, F32: F32 */
    KV_Q8_0 = 1,         /* 34 bytes for 32 values; with FAST only */
};

struct kv_layout {
    uint32_t n_kv_heads;
    uint32_t head_dim; /* a multiple of 8, at most HEAD_DIM_MAX */
    enum kernels_precision precision;
    enum kv_type type;
};

size_t kv_block_bytes(const struct kv_layout *layout);

/* Consecutive positions of one sequence in one layer. blocks[i] holds positions from 64 i on. */
struct kv_segment {
    void *const *blocks;
    uint32_t position; /* of its first row */
    uint32_t n_rows;
};

/* Writes K and V rows ([all rows of the segments, n_kv_heads * head_dim] F32, in the order of the
 * segments) at their positions. */
void kv_write(struct kernels *k, const struct kv_layout *layout, const struct kv_segment *segments,
              uint32_t n_segments, const float *keys, size_t ldk, const float *values, size_t ldv);

struct attention {
    const struct kv_layout *layout;
    uint32_t
        n_heads;     /* a multiple of n_kv_heads; head h reads KV head h / (n_heads / n_kv_heads) */
    uint32_t window; /* a row sees this many last positions, itself included; 0: all */
    float scale;
    const struct kv_segment *segments;
    uint32_t n_segments;
    const float *q; /* [all rows, n_heads * head_dim] */
    size_t ldq;
    float *out; /* [all rows, n_heads * head_dim], not q */
    size_t ldo;
    void *workspace; /* attention_workspace_bytes, aligned to 64 */
};

/* Working memory for up to n_rows rows in one call over sequences of up to n_positions. */
size_t attention_workspace_bytes(const struct kv_layout *layout, uint32_t n_heads, uint32_t n_rows,
                                 uint32_t n_positions);
/* Causal: the row at position p sees positions 0 to p of its own sequence (kv_write comes
 * first). */
void attention(struct kernels *k, const struct attention *a);

#endif
