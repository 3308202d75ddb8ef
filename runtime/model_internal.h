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
    const struct gguf_tensor *embedding, *output_norm,
        *output;                                        /* output: the embedding when tied */
    const struct gguf_tensor *rope_factors;             /* or NULL */
    const struct gguf_tensor *(*layers)[LAYER_TENSORS]; /* [n_layers]; NULL where absent */
};

#endif
