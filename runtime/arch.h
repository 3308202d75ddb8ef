/* What distinguishes one architecture from another, as data: the forward pass (stage.c) is one, and
 * reads this. A new architecture is a row in arch.c (and, where it computes something new, one more
 * field here).
 *
 * Names of tensors and metadata keys are those of GGUF (ggml, docs/gguf.md; gguf-py constants). */
#ifndef COVEY_RUNTIME_ARCH_H
#define COVEY_RUNTIME_ARCH_H

#include "runtime/kernels/kernels.h"

#include <stdbool.h>
#include <stdint.h>

/* The tensors of a layer that the forward pass knows. */
enum layer_tensor {
    LAYER_ATTN_NORM,
    LAYER_ATTN_Q,
    LAYER_ATTN_K,
    LAYER_ATTN_V,
    LAYER_ATTN_Q_BIAS,
    LAYER_ATTN_K_BIAS,
    LAYER_ATTN_V_BIAS,
    LAYER_ATTN_Q_NORM, /* RMS norm of each head, before RoPE */
    LAYER_ATTN_K_NORM,
    LAYER_ATTN_OUTPUT,
    LAYER_ATTN_POST_NORM, /* RMS norm of what attention adds to the residual stream */
    LAYER_FFN_NORM,
    LAYER_FFN_GATE,
    LAYER_FFN_UP,
    LAYER_FFN_DOWN,
    LAYER_FFN_POST_NORM,
    LAYER_TENSORS
};

/* Sizes that depend on the model. */
enum arch_dim { DIM_ONE, DIM_EMBD, DIM_Q, DIM_KV, DIM_HEAD, DIM_FF, DIM_VOCAB, DIM_ROPE_HALF };

struct arch_tensor {
    const char *name;      /* behind "blk.<layer>." for the tensors of a layer */
    enum arch_dim in, out; /* dims[0], dims[1]; out is DIM_ONE for a vector */
};

extern const struct arch_tensor arch_layer_tensors[LAYER_TENSORS];

enum arch_need { ARCH_ABSENT = 0, ARCH_OPTIONAL, ARCH_REQUIRED };
enum arch_activation { ARCH_SILU, ARCH_GELU_TANH };

struct arch {
    const char *name; /* general.architecture, and the prefix of its metadata keys */
    enum rope_pairing rope;
    enum arch_activation activation;
    bool output_may_be_tied;
    bool scales_embedding; /* by sqrt(n_embd) in F32 */
    /* Sliding windows when the metadata name one: of each window_period layers all but the last
     * have it. 0: the architecture has none. */
    uint32_t window_period;
    float window_rope_base; /* of the layers with a window; they have no scaling of positions */
    enum arch_need needs[LAYER_TENSORS];
};

/* NULL when the architecture is not known. `name` need not be NUL-terminated. */
const struct arch *arch_find(const char *name, uint64_t n);

#endif
