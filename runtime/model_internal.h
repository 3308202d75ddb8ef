/* A model as stages see it. Only model.c and stage*.c include this. */
#ifndef COVEY_RUNTIME_MODEL_INTERNAL_H
#define COVEY_RUNTIME_MODEL_INTERNAL_H

#include "runtime/arch.h"
#include "runtime/gguf.h"
#include "runtime/model.h"

#include <stdatomic.h>

struct model {
    atomic_uint n_refs;
    struct gguf *gguf;
    const struct arch *arch;
    struct model_info info;
    uint32_t q_dim, kv_dim;     /* elements of all query heads, of all KV heads */
    uint32_t n_rot;             /* rotated elements of a head */
    float rope_frequency_scale; /* 1, or 1/factor for linear scaling */
    float window_rope_base;     /* of layers with a window, whose positions are never scaled */
    float embedding_scale;      /* 1: none */
    float attention_scale;      /* of the products of queries and keys */
    const struct gguf_tensor *embedding, *output_norm,
        *output;                                        /* output: the embedding when tied */
    const struct gguf_tensor *rope_factors;             /* or NULL */
    const struct gguf_tensor *(*layers)[LAYER_TENSORS]; /* [n_layers]; NULL where absent */
};

/* Whether a layer (counted from the model's first) sees only info.window positions. */
static inline bool model_layer_has_window(const struct model *m, uint32_t layer)
{
    return m->info.window > 0 && layer % m->info.window_period < m->info.window_period - 1;
}

#endif
