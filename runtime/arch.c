/* The table of architectures. */
#include "runtime/arch.h"

#include "base/util.h"

#include <string.h>

const struct arch_tensor arch_layer_tensors[LAYER_TENSORS] = {
    [LAYER_ATTN_NORM] = {"attn_norm.weight", DIM_EMBD, DIM_ONE},
    [LAYER_ATTN_Q] = {"attn_q.weight", DIM_EMBD, DIM_Q},
    [LAYER_ATTN_K] = {"attn_k.weight", DIM_EMBD, DIM_KV},
    [LAYER_ATTN_V] = {"attn_v.weight", DIM_EMBD, DIM_KV},
    [LAYER_ATTN_Q_BIAS] = {"attn_q.bias", DIM_Q, DIM_ONE},
    [LAYER_ATTN_K_BIAS] = {"attn_k.bias", DIM_KV, DIM_ONE},
    [LAYER_ATTN_V_BIAS] = {"attn_v.bias", DIM_KV, DIM_ONE},
    [LAYER_ATTN_Q_NORM] = {"attn_q_norm.weight", DIM_HEAD, DIM_ONE},
    [LAYER_ATTN_K_NORM] = {"attn_k_norm.weight", DIM_HEAD, DIM_ONE},
    [LAYER_ATTN_OUTPUT] = {"attn_output.weight", DIM_Q, DIM_EMBD},
    [LAYER_ATTN_POST_NORM] = {"post_attention_norm.weight", DIM_EMBD, DIM_ONE},
    [LAYER_FFN_NORM] = {"ffn_norm.weight", DIM_EMBD, DIM_ONE},
    [LAYER_FFN_GATE] = {"ffn_gate.weight", DIM_EMBD, DIM_FF},
    [LAYER_FFN_UP] = {"ffn_up.weight", DIM_EMBD, DIM_FF},
    [LAYER_FFN_DOWN] = {"ffn_down.weight", DIM_FF, DIM_EMBD},
    [LAYER_FFN_POST_NORM] = {"post_ffw_norm.weight", DIM_EMBD, DIM_ONE},
};

/* What every architecture of this family has. */
#define COMMON_TENSORS                                                                             \
    [LAYER_ATTN_NORM] = ARCH_REQUIRED, [LAYER_ATTN_Q] = ARCH_REQUIRED,                             \
    [LAYER_ATTN_K] = ARCH_REQUIRED, [LAYER_ATTN_V] = ARCH_REQUIRED,                                \
    [LAYER_ATTN_OUTPUT] = ARCH_REQUIRED, [LAYER_FFN_NORM] = ARCH_REQUIRED,                         \
    [LAYER_FFN_GATE] = ARCH_REQUIRED, [LAYER_FFN_UP] = ARCH_REQUIRED,                              \
    [LAYER_FFN_DOWN] = ARCH_REQUIRED

static const struct arch archs[] = {
    {
        .name = "llama", /* Llama 1 to 3, SmolLM2, TinyLlama, Mistral 7B */
        .rope = ROPE_NORM,
        .activation = ARCH_SILU,
        .output_may_be_tied = true,
        .needs = {COMMON_TENSORS},
    },
    {
        .name = "qwen2", /* Qwen 2 and 2.5 */
        .rope = ROPE_NEOX,
        .activation = ARCH_SILU,
        .output_may_be_tied = true,
        .needs = {COMMON_TENSORS, [LAYER_ATTN_Q_BIAS] = ARCH_REQUIRED,
                  [LAYER_ATTN_K_BIAS] = ARCH_REQUIRED, [LAYER_ATTN_V_BIAS] = ARCH_REQUIRED},
    },
    {
        .name = "gemma3", /* text models; their norm weights are stored with 1 added */
        .rope = ROPE_NEOX,
        .activation = ARCH_GELU_TANH,
        .output_may_be_tied = true,
        .scales_embedding = true,
        .window_period = 6,
        .window_rope_base = 10000.0f,
        .needs = {COMMON_TENSORS, [LAYER_ATTN_Q_NORM] = ARCH_REQUIRED,
                  [LAYER_ATTN_K_NORM] = ARCH_REQUIRED, [LAYER_ATTN_POST_NORM] = ARCH_REQUIRED,
                  [LAYER_FFN_POST_NORM] = ARCH_REQUIRED},
    },
};

const struct arch *arch_find(const char *name, uint64_t n)
{
    for (size_t i = 0; i < ARRAY_LEN(archs); i++)
        if (strlen(archs[i].name) == n && memcmp(archs[i].name, name, (size_t)n) == 0)
            return &archs[i];
    return NULL;
}
