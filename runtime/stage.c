/* Life of a stage: options, memory, slots, and the checks of a step. The arithmetic is in
 * stage_forward.c and below it in the kernels. */
#include "runtime/stage_internal.h"

#include <string.h>

enum {
    MEMORY_ALIGNMENT = 64,
    /* Raised with any change of slices or order in the forward pass. */
    PASS_VERSION = 1,
};

uint32_t stage_arithmetic_version(void)
{
    return ARITHMETIC_VERSION * 1000 + PASS_VERSION;
}

static bool options_fit(const struct model *m, const struct stage_options *o)
{
    return o->n_layers >= 1 && o->first_layer < m->info.n_layers &&
           o->n_layers <= m->info.n_layers - o->first_layer && o->context >= 1 &&
           o->context <= m->info.context_max && o->n_slots >= 1 && o->n_slots <= STAGE_SLOTS_MAX &&
           (o->precision == STAGE_FAST || o->precision == STAGE_F32);
}

/* Fills what follows from model and options alone. */
static void describe(struct stage *s, struct model *m, const struct stage_options *o)
{
    s->options = *o;
    s->is_head = o->first_layer == 0;
    s->is_tail = o->first_layer + o->n_layers == m->info.n_layers;
    s->precision = o->precision == STAGE_F32 ? KERNELS_F32 : KERNELS_FAST;
    s->rope = (struct rope){.pairing = m->arch->rope,
                            .n_dims = m->n_rot,
                            .base = m->info.rope_base,
                            .frequency_scale = m->rope_frequency_scale};
    s->kv_layout = (struct kv_layout){
        .n_kv_heads = m->info.n_kv_heads, .head_dim = m->info.head_dim, .precision = s->precision};
    s->kv_block_bytes = (kv_block_bytes(&s->kv_layout) + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT *
                        MEMORY_ALIGNMENT;
    s->blocks_per_slot = (o->context + KV_BLOCK - 1) / KV_BLOCK;
}

static uint64_t kv_bytes(const struct stage *s)
{
    return (uint64_t)s->options.n_layers * s->options.n_slots * s->blocks_per_slot *
           s->kv_block_bytes;
}

/* Gives the next part of the working memory, or only counts when base is NULL. */
static void *part(uint8_t *base, size_t *at, size_t bytes)
{
    void *ret = base ? base + *at : NULL;
    *at += (bytes + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT * MEMORY_ALIGNMENT;
    return ret;
}

static float *part_f32(uint8_t *base, size_t *at, size_t rows, size_t width)
{
    return part(base, at, rows * width * sizeof(float));
}

/* Lays the working memory out and returns its size. */
static size_t lay_out(const struct stage *s, const struct model *m, uint8_t *base,
                      struct stage_work *w)
{
    const struct model_info *info = &m->info;
    size_t at = 0, rows = STAGE_ROWS_MAX;
    w->x = part_f32(base, &at, rows, info->n_embd);
    w->h = part_f32(base, &at, rows, info->n_embd);
    w->q = part_f32(base, &at, rows + FINE_ROWS, m->q_dim);
    w->keys = part_f32(base, &at, rows + FINE_ROWS, m->kv_dim);
    w->values = part_f32(base, &at, rows + FINE_ROWS, m->kv_dim);
    w->attended = part_f32(base, &at, rows, m->q_dim);
    w->fine = part_f32(base, &at, 2 * (size_t)FINE_ROWS, info->n_embd);
    w->logits = part_f32(base, &at, s->is_tail ? 2 * (size_t)OUTPUT_ROWS : 0, info->n_vocab);
    w->gate = part_f32(base, &at, FFN_ROWS, info->n_ff);
    w->up = part_f32(base, &at, FFN_ROWS, info->n_ff);
    w->rope = part_f32(base, &at, 1, rope_table_elements(&s->rope, STAGE_ROWS_MAX));
    size_t prepared = MAX_OF(activations_bytes(STAGE_ROWS_MAX, MAX_OF(info->n_embd, m->q_dim)),
                             activations_bytes(FFN_ROWS, info->n_ff));
    w->activations = part(base, &at, prepared);
    w->attention = part(base, &at,
                        attention_workspace_bytes(&s->kv_layout, info->n_heads, STAGE_ROWS_MAX,
                                                  s->options.context));
    w->blocks = part(base, &at, (size_t)s->options.n_slots * s->blocks_per_slot * sizeof(void *));
    return at;
}

uint64_t stage_memory_bytes(const struct model *model, const struct stage_options *options)
{
    if (!options_fit(model, options))
        return 0;
    struct stage s = {0};
    struct stage_work work;
    describe(&s, (struct model *)(uintptr_t)model, options);
    return kv_bytes(&s) + lay_out(&s, model, NULL, &work) + sizeof s;
}

static enum err reserve(struct stage *s, struct err_text *text)
{
    uint64_t kv = kv_bytes(s);
    size_t work = lay_out(s, s->model, NULL, &s->work);
    if (kv <= SIZE_MAX / 2) {
        /* Not cleared: the pages stay untouched until positions are filled. */
        s->kv = aligned_alloc(MEMORY_ALIGNMENT, (size_t)kv);
        s->work.base = aligned_alloc(MEMORY_ALIGNMENT, work);
    }
    if (!s->kv || !s->work.base)
        return err_set(text, ERR_NO_MEMORY,
                       "%s: no memory for a context of %u positions in %u "
                       "slots (%llu MiB)",
                       gguf_path(s->model->gguf), s->options.context, s->options.n_slots,
                       (unsigned long long)((kv + work) >> 20));
    (void)lay_out(s, s->model, s->work.base, &s->work);
    return ERR_OK;
}

enum err stage_new(struct model *model, struct pool *pool, const struct stage_options *options,
                   struct stage **ret, struct err_text *text)
{
    const char *path = gguf_path(model->gguf);
    if (!options_fit(model, options))
        return err_set(text, ERR_INVALID,
                       "%s: no stage of %u layers from %u with %u slots and a "
                       "context of %u (the model has %u layers and at most %u positions)",
                       path, options->n_layers, options->first_layer, options->n_slots,
                       options->context, model->info.n_layers, model->info.context_max);
    struct stage *s = calloc(1, sizeof *s);
    if (!s)
        return err_set(text, ERR_NO_MEMORY, "%s: no memory for a stage", path);
    s->model = model_ref(model);
    describe(s, model, options);
    enum err e = kernels_new(pool, (enum kernels_variant)options->variant, &s->kernels);
    if (e != ERR_OK)
        (void)err_set(text, e, "%s: cannot set up the kernels (%s)", path, err_name(e));
    if (e == ERR_OK)
        e = stage_weights_init(s, text);
    if (e == ERR_OK)
        e = reserve(s, text);
    if (e != ERR_OK) {
        stage_free(s);
        return e;
    }
    s->rope.freq_factors = s->weights.rope_factors;
    *ret = s;
    return ERR_OK;
}

void stage_free(struct stage *stage)
{
    if (!stage)
        return;
    stage_weights_deinit(&stage->weights);
    kernels_free(stage->kernels);
    free(stage->kv);
    free(stage->work.base);
    model_unref(stage->model);
    free(stage);
}

/* Everything about the segments that could be wrong. Fills the slots' lengths after the step. */
static enum err check_segments(const struct stage *s, const struct stage_segment *segments,
                               uint32_t n_segments, uint32_t lengths[STAGE_SLOTS_MAX],
                               uint32_t *ret_rows)
{
    uint64_t used = 0; /* slots that this step has touched */
    uint32_t rows = 0;
    if (n_segments < 1 || n_segments > STAGE_SEGMENTS_MAX)
        return ERR_INVALID;
    memcpy(lengths, s->lengths, sizeof s->lengths);
    for (uint32_t i = 0; i < n_segments; i++) {
        const struct stage_segment *g = &segments[i];
        if (g->slot >= s->options.n_slots || g->n_rows < 1 || g->n_rows > STAGE_ROWS_MAX - rows ||
            g->position > lengths[g->slot] || g->position > s->options.context ||
            g->n_rows > s->options.context - g->position)
            return ERR_INVALID;
        if (used >> g->slot & 1 && g->position != lengths[g->slot])
            return ERR_INVALID;
        if (s->is_head && !g->token_ids)
            return ERR_INVALID;
        for (uint32_t r = 0; s->is_head && r < g->n_rows; r++)
            if (g->token_ids[r] < 0 || (uint32_t)g->token_ids[r] >= s->model->info.n_vocab)
                return ERR_INVALID;
        if (g->logits != STAGE_LOGITS_NONE && g->logits != STAGE_LOGITS_LAST &&
            g->logits != STAGE_LOGITS_ALL)
            return ERR_INVALID;
        used |= UINT64_C(1) << g->slot;
        rows += g->n_rows;
        lengths[g->slot] = g->position + g->n_rows;
    }
    *ret_rows = rows;
    return ERR_OK;
}

enum err stage_forward(struct stage *stage, const struct stage_segment *segments,
                       uint32_t n_segments, const float *in, float *out, float *logits)
{
    uint32_t lengths[STAGE_SLOTS_MAX], n_rows = 0;
    if ((!stage->is_head && !in) || (!stage->is_tail && !out))
        return ERR_INVALID;
    TRY(check_segments(stage, segments, n_segments, lengths, &n_rows));
    for (uint32_t i = 0; stage->is_tail && i < n_segments; i++)
        if (segments[i].logits != STAGE_LOGITS_NONE && !logits)
            return ERR_INVALID;
    stage_pass(stage, segments, n_segments, n_rows, in, out, logits);
    memcpy(stage->lengths, lengths, sizeof lengths);
    return ERR_OK;
}

uint32_t stage_slot_length(const struct stage *stage, uint32_t slot)
{
    return slot < stage->options.n_slots ? stage->lengths[slot] : 0;
}

void stage_slot_truncate(struct stage *stage, uint32_t slot, uint32_t n)
{
    if (slot < stage->options.n_slots && n < stage->lengths[slot])
        stage->lengths[slot] = n;
}
