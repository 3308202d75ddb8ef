/* A stage: a run of consecutive layers of one model with its KV cache, executed in this process.
 *
 * A step is a batch of rows from several sequences ("segments"). Row bits never depend on the other
 * rows of the step, on the chunking or on the number of threads (DESIGN section 6). Owned and
 * called by one thread; the pool does the rest. The interface already carries batches; tensor
 * slices and several chunks in flight come later. */
#ifndef COVEY_RUNTIME_STAGE_H
#define COVEY_RUNTIME_STAGE_H

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

struct model; /* runtime/model.h */
struct pool;  /* runtime/pool.h */
struct stage;

/* FAST_KV8: like FAST, with the KV cache in Q8_0 instead of F16. */
enum stage_precision { STAGE_FAST = 0, STAGE_F32 = 1, STAGE_FAST_KV8 = 2 };
enum stage_logits { STAGE_LOGITS_NONE = 0, STAGE_LOGITS_LAST = 1, STAGE_LOGITS_ALL = 2 };

enum {
    STAGE_SEGMENTS_MAX = 64, /* segments of one step */
    STAGE_ROWS_MAX = 512,    /* rows of one step */
    STAGE_BLOCK = 64,        /* positions of a block of the KV cache */
    STAGE_BLOCKS_MAX = 1 << 20,
};

struct stage_options {
    uint32_t first_layer, n_layers;
    uint32_t context;  /* positions of one sequence, at most */
    uint32_t n_blocks; /* of the KV cache; 0: as many as one sequence needs */
    enum stage_precision precision;
    uint32_t
        variant; /* enum kernels_variant (runtime/kernels/kernels.h); 0: what this CPU does best */
};

/* Some consecutive positions of one sequence. */
struct stage_segment {
    /* [blocks of position + n_rows positions] numbers below n_blocks: where the sequence's KV is,
     * STAGE_BLOCK positions each; its first `position` positions must have been written. NULL: 0,
     * 1, 2 and so on, for who runs one sequence. */
    const uint32_t *blocks;
    uint32_t position;        /* of its first row */
    uint32_t n_rows;          /* at least 1 */
    const int32_t *token_ids; /* [n_rows]; read by a head only, may be NULL elsewhere */
    enum stage_logits logits; /* which rows yield logits; read by a tail only */
};

/* Maps the weights that the layers need (a stage that starts at layer 0 is a head, one that ends
 * with the last is a tail) and reserves KV and working memory: nothing is allocated later, and the
 * KV takes no pages before it is written. Keeps a reference to the model; the pool must outlive the
 * stage. The bytes of the layers must be in the file by now. ERR_INVALID (layers, context or blocks
 * out of range), ERR_NO_MEMORY, ERR_IO,
 * ERR_UNSUPPORTED (a kernels variant that this CPU lacks). A file that is cut short later kills
 * with SIGBUS whoever computes; the owner of the process handles it (PROTOCOL 5.2). */
enum err stage_new(struct model *model, struct pool *pool, const struct stage_options *options,
                   struct stage **ret, struct err_text *text);
void stage_free(struct stage *stage);

/* Bytes that stage_new reserves beside the mapped weights (KV + working memory), for budgets; the
 * pool's and the kernels' own memory per thread (kernels_memory_bytes) comes on top. 0 when the
 * options are out of range. */
uint64_t stage_memory_bytes(const struct model *model, const struct stage_options *options);

/* Executes one step over all segments, rows in the order of the segments.
 *   in      [n_rows, n_embd] F32 from the stage before; NULL for a head
 *   out     [n_rows, n_embd] F32 for the next stage; NULL for a tail
 *   logits  [n_logit_rows, n_vocab] F32, rows in order; NULL unless a tail
 * The KV of each segment is written at its positions, before any is read. Which blocks belong to
 * which sequence, and how far they are filled, is the caller's to know: a stage has no memory of
 * it. Several segments may share blocks that none of them writes, and one sequence may have several
 * segments in a step.
 * ERR_INVALID on a bad segment, too many rows, or two that write one position of a block; nothing
 * has happened then. */
enum err stage_forward(struct stage *stage, const struct stage_segment *segments,
                       uint32_t n_segments, const float *in, float *out, float *logits);

/* Copies a block, for a sequence that goes on from a part of it (copy on write): in all layers. Not
 * while a step is computed. ERR_INVALID. */
enum err stage_copy_block(struct stage *stage, uint32_t from, uint32_t to);

/* The arithmetic that plans must agree on: ARITHMETIC_VERSION of the kernels together with how the
 * forward pass is cut into slices and ordered. */
uint32_t stage_arithmetic_version(void);

#endif
