/* A model file opened for reading: its description, and where its bytes are. GGUF (runtime/gguf.h)
 * underneath. Reference counted: agent, stages and tokenizer share it. Only the header stays
 * mapped; a stage maps the tensor bytes of its layers. Once opened it never changes, so that any
 * thread may read it. */
#ifndef COVEY_RUNTIME_MODEL_H
#define COVEY_RUNTIME_MODEL_H

#include "base/err.h"

#include <stdbool.h>
#include <stdint.h>

struct gguf;
struct model;

enum {
    MODEL_RANGES_MAX = 8192,
    MODEL_INFO_LAYERS_MAX = 512,
    MODEL_VOCAB_MAX = 1 << 22,
    MODEL_CONTEXT_MAX = 1 << 24,
};

struct byte_range {
    uint64_t offset, n_bytes; /* in the file */
};

struct model_info {
    char architecture[32];
    char name[96];
    uint32_t n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_ff, n_vocab, context_max;
    /* Positions that a layer with a sliding window sees, and in which period every last layer sees
     * all; 0: all layers see all. The KV cache holds all positions of every layer. */
    uint32_t window, window_period;
    float rope_base, norm_epsilon;
    bool output_is_embedding; /* tied */
    uint64_t file_bytes;
    uint64_t
        header_bytes; /* everything before the tensor data: enough for tokenizer and template */
    uint64_t embedding_bytes, output_bytes; /* output: norm + matrix (the matrix also when tied) */
    uint64_t layer_bytes[MODEL_INFO_LAYERS_MAX];
    /* Multiply-adds for one row in precision fast, where quantised q, k, v and output matrices are
     * computed twice (stage_fine.h). */
    uint64_t layer_macs, output_macs;
    uint64_t kv_bytes_per_position; /* of one layer, for F16 */
};

/* Opens and checks a file (every number is checked before it is believed). Tensor data need not be
 * present: the bytes are only touched by a stage. On failure `text` names the file and what is
 * wrong. Errors of gguf_open; ERR_UNSUPPORTED for an architecture, tensor or setting that the
 * engine does not compute. */
enum err model_open(const char *path, struct model **ret, struct err_text *text);
/* The same over a GGUF that is open; owns it from now on, also on failure. */
enum err model_open_gguf(struct gguf *take_gguf, struct model **ret, struct err_text *text);
struct model *model_ref(struct model *model);
void model_unref(struct model *model);

const struct model_info *model_info(const struct model *model);
const struct gguf *model_gguf(const struct model *model);

/* The byte ranges of the file that layers [first, first + n) need (with the embedding for first ==
 * 0, with norm and output matrix when they end with the last layer), sorted, merged, header not
 * included. ERR_LIMIT over max. */
enum err model_ranges(const struct model *model, uint32_t first, uint32_t n, struct byte_range *ret,
                      uint32_t max, uint32_t *ret_n);

#endif
