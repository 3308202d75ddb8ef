/* Mapping of a stage's weights: only the byte ranges that its layers need are mapped, because other
 * parts of the file may be absent (PROTOCOL 5.2). */
#include "runtime/stage_internal.h"

#include <string.h>

static enum err map_ranges(struct stage *s, struct err_text *text)
{
    struct stage_weights *w = &s->weights;
    const struct gguf *g = s->model->gguf;
    w->ranges = malloc(MODEL_RANGES_MAX * sizeof *w->ranges);
    w->mappings = calloc(MODEL_RANGES_MAX, sizeof *w->mappings);
    if (!w->ranges || !w->mappings)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory to map the weights", gguf_path(g));
    uint32_t n = 0;
    enum err e = model_ranges(s->model, s->options.first_layer, s->options.n_layers, w->ranges,
                              MODEL_RANGES_MAX, &n);
    for (uint32_t i = 0; e == ERR_OK && i < n; i++) {
        e = gguf_map(g, w->ranges[i].offset, w->ranges[i].n_bytes, &w->mappings[i]);
        w->n_mappings = i + 1;
    }
    if (e != ERR_OK)
        return err_set(text, e, "%s: cannot map the weights of layers %u to %u", gguf_path(g),
                       s->options.first_layer, s->options.first_layer + s->options.n_layers - 1);
    return ERR_OK;
}

/* Where a tensor's bytes are mapped. Each lies whole in one range. */
static const uint8_t *bytes_of(const struct stage_weights *w, const struct gguf_tensor *t)
{
    uint32_t low = 0, high = w->n_mappings;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (w->ranges[middle].offset <= t->offset)
            low = middle;
        else
            high = middle;
    }
    return w->mappings[low].data + (t->offset - w->ranges[low].offset);
}

static struct matrix matrix_of(const struct stage_weights *w, const struct gguf_tensor *t)
{
    return (struct matrix){
        .type = (enum tensor_type)t->type,
        .n_out = (uint32_t)t->dims[1],
        .n_in = (uint32_t)t->dims[0],
        .row_bytes = tensor_row_bytes(t->type, t->dims[0]),
        .data = bytes_of(w, t),
    };
}

/* A vector in F32: in place where the file has it so, else opened into our own memory. */
static const float *vector_of(struct stage *s, const struct gguf_tensor *t)
{
    if (!t)
        return NULL;
    struct stage_weights *w = &s->weights;
    if (t->type == TENSOR_F32)
        return (const float *)(const void *)bytes_of(w, t);
    float *to = w->opened + w->n_opened;
    w->n_opened += t->dims[0];
    struct matrix m = matrix_of(w, t);
    matrix_row(s->kernels, &m, 0, to);
    return to;
}

static size_t elements_to_open(const struct gguf_tensor *t)
{
    return t && t->type != TENSOR_F32 ? (size_t)t->dims[0] : 0;
}

static enum err reserve_opened(struct stage *s, struct err_text *text)
{
    const struct model *m = s->model;
    size_t n = elements_to_open(m->output_norm) + elements_to_open(m->rope_factors);
    for (uint32_t i = 0; i < s->options.n_layers; i++)
        for (int k = 0; k < LAYER_TENSORS; k++)
            if (arch_layer_tensors[k].out == DIM_ONE)
                n += elements_to_open(m->layers[s->options.first_layer + i][k]);
    if (n == 0)
        return ERR_OK;
    s->weights.opened = malloc(n * sizeof(float));
    if (!s->weights.opened)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory for the weights", gguf_path(m->gguf));
    return ERR_OK;
}

static uint32_t greatest_divisor(uint32_t a, uint32_t b)
{
    while (b != 0) {
        uint32_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

/* Elements of one slice of the attention output's input: the least run of KV-head groups that is a
 * whole number of quantisation blocks (of 32 at least), doubled until the kernels can hold the
 * number of slices. Part of the arithmetic. */
static uint32_t attn_output_slice(const struct model *m, const struct matrix *w)
{
    uint32_t block = MAX_OF(tensor_traits(w->type)->block_elements, (uint32_t)BLOCK);
    uint32_t group = m->info.n_heads / m->info.n_kv_heads * m->info.head_dim;
    uint64_t slice = (uint64_t)group / greatest_divisor(group, block) * block;
    while (slice * SLICES_MAX < w->n_in)
        slice *= 2;
    return slice < w->n_in ? (uint32_t)slice : 0;
}

static void resolve_layer(struct stage *s, uint32_t layer, struct layer_weights *ret)
{
    const struct model *m = s->model;
    for (int k = 0; k < LAYER_TENSORS; k++) {
        const struct gguf_tensor *t = m->layers[layer][k];
        if (!t)
            continue;
        if (arch_layer_tensors[k].out == DIM_ONE)
            ret->vector[k] = vector_of(s, t);
        else
            ret->matrix[k] = matrix_of(&s->weights, t);
    }
    ret->attn_output_slice = attn_output_slice(m, &ret->matrix[LAYER_ATTN_OUTPUT]);
    ret->ffn_down_slice = m->info.n_ff > FFN_SLICE ? FFN_SLICE : 0;
}

enum err stage_weights_init(struct stage *s, struct err_text *text)
{
    struct stage_weights *w = &s->weights;
    const struct model *m = s->model;
    TRY(map_ranges(s, text));
    TRY(reserve_opened(s, text));
    w->layers = calloc(s->options.n_layers, sizeof *w->layers);
    if (!w->layers)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory for the layers", gguf_path(m->gguf));
    for (uint32_t i = 0; i < s->options.n_layers; i++)
        resolve_layer(s, s->options.first_layer + i, &w->layers[i]);
    if (s->is_head)
        w->embedding = matrix_of(w, m->embedding);
    if (s->is_tail) {
        w->output = matrix_of(w, m->output);
        w->output_norm = vector_of(s, m->output_norm);
    }
    w->rope_factors = vector_of(s, m->rope_factors);
    return ERR_OK;
}

void stage_weights_deinit(struct stage_weights *w)
{
    for (uint32_t i = 0; i < w->n_mappings; i++)
        gguf_unmap(&w->mappings[i]);
    free(w->mappings);
    free(w->ranges);
    free(w->opened);
    free(w->layers);
    *w = (struct stage_weights){0};
}
