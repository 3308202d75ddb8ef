/* Life of a stage: options, memory, and the checks of a step. The arithmetic is in
 * stage_forward.c and below it in the kernels. */
#include "runtime/stage_internal.h"

#include <string.h>

enum {
    MEMORY_ALIGNMENT = 64,
    /* Raised with any change of slices or order in the forward pass. */
    PASS_VERSION = 1,
};

_Static_assert((int)STAGE_BLOCK == (int)KV_BLOCK, "the kernels' blocks are those of the interface");

uint32_t stage_arithmetic_version(void)
{
    return ARITHMETIC_VERSION * 1000 + PASS_VERSION;
}

static bool options_fit(const struct model *m, const struct stage_options *o)
{
    return o->n_layers >= 1 && o->first_layer < m->info.n_layers &&
           o->n_layers <= m->info.n_layers - o->first_layer && o->context >= 1 &&
           o->context <= m->info.context_max && o->n_blocks <= STAGE_BLOCKS_MAX &&
           (o->precision == STAGE_FAST || o->precision == STAGE_F32 ||
            o->precision == STAGE_FAST_KV8);
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
    s->rope_local = s->rope;
    s->rope_local.base = m->window_rope_base;
    s->rope_local.frequency_scale = 1.0f;
    s->kv_layout =
        (struct kv_layout){.n_kv_heads = m->info.n_kv_heads,
                           .head_dim = m->info.head_dim,
                           .precision = s->precision,
                           .type = o->precision == STAGE_FAST_KV8 ? KV_Q8_0 : KV_OF_PRECISION};
    s->kv_block_bytes = (kv_block_bytes(&s->kv_layout) + MEMORY_ALIGNMENT - 1) / MEMORY_ALIGNMENT *
                        MEMORY_ALIGNMENT;
    s->blocks_per_sequence = (o->context + KV_BLOCK - 1) / KV_BLOCK;
    if (o->n_blocks == 0)
        s->options.n_blocks = s->blocks_per_sequence;
}

static uint64_t kv_bytes(const struct stage *s)
{
    return (uint64_t)s->options.n_layers * s->options.n_blocks * s->kv_block_bytes;
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
    w->rope_local =
        part_f32(base, &at, info->window > 0, rope_table_elements(&s->rope_local, STAGE_ROWS_MAX));
    size_t prepared = MAX_OF(activations_bytes(STAGE_ROWS_MAX, MAX_OF(info->n_embd, m->q_dim)),
                             activations_bytes(FFN_ROWS, info->n_ff));
    w->activations = part(base, &at, prepared);
    w->attention = part(base, &at,
                        attention_workspace_bytes(&s->kv_layout, info->n_heads, STAGE_ROWS_MAX,
                                                  s->options.context));
    w->blocks =
        part(base, &at, (size_t)STAGE_SEGMENTS_MAX * s->blocks_per_sequence * sizeof(void *));
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
                       "%s: no memory for a KV cache of %u blocks of %d positions (%llu MiB)",
                       gguf_path(s->model->gguf), s->options.n_blocks, (int)KV_BLOCK,
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
                       "%s: no stage of %u layers from %u with %u blocks and a "
                       "context of %u (the model has %u layers and at most %u positions)",
                       path, options->n_layers, options->first_layer, options->n_blocks,
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

static uint32_t block_of(const struct stage_segment *g, uint32_t i)
{
    return g->blocks ? g->blocks[i] : i;
}

static bool segment_ok(const struct stage *s, const struct stage_segment *g, uint32_t rows_left)
{
    if (g->n_rows < 1 || g->n_rows > rows_left || g->position > s->options.context ||
        g->n_rows > s->options.context - g->position ||
        (g->logits != STAGE_LOGITS_NONE && g->logits != STAGE_LOGITS_LAST &&
         g->logits != STAGE_LOGITS_ALL))
        return false;
    for (uint32_t i = 0; i <= (g->position + g->n_rows - 1) / KV_BLOCK; i++)
        if (block_of(g, i) >= s->options.n_blocks)
            return false;
    if (s->is_head && !g->token_ids)
        return false;
    for (uint32_t r = 0; s->is_head && r < g->n_rows; r++)
        if (g->token_ids[r] < 0 || (uint32_t)g->token_ids[r] >= s->model->info.n_vocab)
            return false;
    return true;
}

/* A run of positions of one block that a step writes. */
struct written {
    uint32_t block, first, end;
};

/* Adds what the segment writes; false when another writes there too. */
static bool add_written(struct written *all, uint32_t *n, const struct stage_segment *g)
{
    uint32_t end = g->position + g->n_rows;
    for (uint32_t p = g->position; p < end; p = (p / KV_BLOCK + 1) * KV_BLOCK) {
        uint32_t begins = p / KV_BLOCK * KV_BLOCK;
        struct written w = {block_of(g, p / KV_BLOCK), p - begins,
                            MIN_OF(end - begins, (uint32_t)KV_BLOCK)};
        for (uint32_t i = 0; i < *n; i++)
            if (all[i].block == w.block && all[i].first < w.end && w.first < all[i].end)
                return false;
        all[(*n)++] = w;
    }
    return true;
}

/* Everything about the segments that could be wrong. */
static enum err check_segments(const struct stage *s, const struct stage_segment *segments,
                               uint32_t n_segments, uint32_t *ret_rows)
{
    /* each segment begins in one block, and each KV_BLOCK rows of the step begin one more */
    struct written all[2 * STAGE_SEGMENTS_MAX + STAGE_ROWS_MAX / KV_BLOCK];
    uint32_t rows = 0, n_written = 0;
    if (n_segments < 1 || n_segments > STAGE_SEGMENTS_MAX)
        return ERR_INVALID;
    for (uint32_t i = 0; i < n_segments; i++) {
        if (!segment_ok(s, &segments[i], STAGE_ROWS_MAX - rows) ||
            !add_written(all, &n_written, &segments[i]))
            return ERR_INVALID;
        rows += segments[i].n_rows;
    }
    *ret_rows = rows;
    return ERR_OK;
}

enum err stage_forward(struct stage *stage, const struct stage_segment *segments,
                       uint32_t n_segments, const float *in, float *out, float *logits)
{
    uint32_t n_rows = 0;
    if ((!stage->is_head && !in) || (!stage->is_tail && !out))
        return ERR_INVALID;
    TRY(check_segments(stage, segments, n_segments, &n_rows));
    for (uint32_t i = 0; stage->is_tail && i < n_segments; i++)
        if (segments[i].logits != STAGE_LOGITS_NONE && !logits)
            return ERR_INVALID;
    stage_pass(stage, segments, n_segments, n_rows, in, out, logits);
    return ERR_OK;
}

enum err stage_copy_block(struct stage *stage, uint32_t from, uint32_t to)
{
    size_t n = stage->kv_block_bytes, n_blocks = stage->options.n_blocks;
    if (from >= n_blocks || to >= n_blocks)
        return ERR_INVALID;
    for (size_t layer = 0; from != to && layer < stage->options.n_layers; layer++)
        memcpy(stage->kv + (layer * n_blocks + to) * n, stage->kv + (layer * n_blocks + from) * n,
               n);
    return ERR_OK;
}
