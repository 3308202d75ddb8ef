/* What stage.c (life), stage_weights.c (mapping) and stage_forward.c (the pass) share. */
#ifndef COVEY_RUNTIME_STAGE_INTERNAL_H
#define COVEY_RUNTIME_STAGE_INTERNAL_H

#include "runtime/kernels/kernels.h"
#include "runtime/model_internal.h"
#include "runtime/pool.h"
#include "runtime/stage.h"

enum {
    /* Rows of one pass through a feed-forward block. The kernels are as fast with 128 rows as with
     * 512, and the working memory of wide models is a quarter. */
    FFN_ROWS = 128,
    /* The same for the projections to q, k and v with finer activations, and for the output matrix,
     * where the results of twice as many rows are held. */
    FINE_ROWS = 128,
    OUTPUT_ROWS = 16,
    /* Elements of one slice of ffn_down's input: whole blocks of every type. Fixed for ever
     * (arithmetic). */
    FFN_SLICE = 512,
};

/* A tensor of a layer, ready for the kernels: a matrix, or a vector in F32. */
struct layer_weights {
    struct matrix matrix[LAYER_TENSORS]; /* data NULL where absent */
    const float *vector[LAYER_TENSORS];  /* NULL where absent */
    uint32_t attn_output_slice;          /* elements; 0: one chain */
    uint32_t ffn_down_slice;
};

struct stage_weights {
    struct gguf_mapping *mappings;
    struct byte_range *ranges; /* [n_mappings], sorted */
    uint32_t n_mappings;
    float *opened; /* vectors that are not F32 in the file */
    size_t n_opened;
    struct layer_weights *layers; /* [n_layers of the stage] */
    struct matrix embedding, output;
    const float *output_norm, *rope_factors;
};

/* Working memory of one step; pointers into one allocation. Rows are STAGE_ROWS_MAX where nothing
 * else is said, and FINE_ROWS more in q, keys and values (stage_fine.h). */
struct stage_work {
    void *base;
    float *x;          /* [rows, n_embd] the residual stream */
    float *h;          /* [rows, n_embd] normed rows, then products to be added */
    float *q;          /* [rows, q_dim] */
    float *keys;       /* [rows, kv_dim] */
    float *values;     /* [rows, kv_dim] */
    float *attended;   /* [rows, q_dim] */
    float *fine;       /* [2 FINE_ROWS, n_embd] rows and their rests */
    float *logits;     /* [2 OUTPUT_ROWS, n_vocab]; of a tail */
    float *gate;       /* [FFN_ROWS, n_ff] */
    float *up;         /* [FFN_ROWS, n_ff] */
    float *rope;       /* table of the step */
    float *rope_local; /* the same for layers with a window */
    void *activations; /* prepared rows, for the kernels */
    void *attention;   /* workspace, for the kernels */
    void **blocks;     /* [segments, blocks_per_sequence]: KV blocks of the layer at hand */
    uint32_t positions[STAGE_ROWS_MAX];
    struct kv_segment segments[STAGE_SEGMENTS_MAX];
};

struct stage {
    struct model *model;
    struct kernels *kernels;
    struct stage_options options;
    bool is_head, is_tail;
    enum kernels_precision precision;
    struct stage_weights weights;
    struct rope rope, rope_local; /* of layers that see everything, of those with a window */
    struct kv_layout kv_layout;
    size_t kv_block_bytes;
    uint32_t blocks_per_sequence;
    uint8_t *kv; /* [n_layers, n_blocks] blocks */
    struct stage_work work;
};

/* Maps and resolves what the stage's layers need. On failure the caller still calls _deinit. */
enum err stage_weights_init(struct stage *s, struct err_text *text);
void stage_weights_deinit(struct stage_weights *w);

/* The pass over checked segments; `n_rows` is their sum. */
void stage_pass(struct stage *s, const struct stage_segment *segments, uint32_t n_segments,
                uint32_t n_rows, const float *in, float *out, float *logits);

#endif
