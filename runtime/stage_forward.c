/* One forward pass for all architectures, driven by the model's description (arch.h) and by which
 * tensors its layers have.
 *
 * For each layer, over all rows of the step:
 *   h = rms_norm(x); q, k, v = W h (+ bias; + RMS norm of each head); RoPE on q and k;
 *   k, v into the cache; a = attention(q), over a window in some layers; x += Wo a, in slices;
 *   h = rms_norm(x); x += Wdown (act(Wgate h) * Wup h), in slices.
 * Where a layer has norms for what is added to x, the whole sum of the slices is normed first.
 * Layers with a window have RoPE with a base of their own.
 * Head: x = rows of the embedding, each element times sqrt(n_embd) in F32 where the architecture
 * wants it. Tail: logits = Wout rms_norm(x), for the rows that want them. */
#include "runtime/stage_fine.h"
#include "runtime/stage_internal.h"

#include <string.h>

/* The rows of a step. */
struct pass {
    struct stage *s;
    const struct model *m;
    uint32_t n_rows, n_segments;
};

static void multiply(const struct pass *p, const struct matrix *w, const struct activations *a,
                     uint32_t slice, float *y)
{
    struct matmul_options options = {.precision = p->s->precision, .slice = slice};
    matmul(p->s->kernels, w, a, &options, y, w->n_out);
}

static void prepare(const struct pass *p, struct activations *a, const float *x, uint32_t n_rows,
                    uint32_t n_in, unsigned forms)
{
    activations_prepare(p->s->kernels, a, p->s->work.activations, x, n_in, n_rows, n_in, forms);
}

static unsigned form_of(const struct pass *p, const struct matrix *w)
{
    return activations_form(w->type, p->s->precision);
}

static void norm(const struct pass *p, const float *x, uint32_t n_rows, const float *weight,
                 float *y)
{
    uint32_t n = p->m->info.n_embd;
    rms_norm(p->s->kernels, x, n, n_rows, n, weight, p->m->info.norm_epsilon, y, n);
}

/* y = W x with finer activations (stage_fine.h) for up to FINE_ROWS rows, which are in work.fine.
 * Behind the n_rows of y there must be room for as many more. */
static void multiply_fine(const struct pass *p, const struct matrix *const *w, float *const *y,
                          int n_matrices, uint32_t n_rows)
{
    struct activations a;
    uint32_t n_in = w[0]->n_in;
    size_t n = (size_t)n_rows * n_in;
    float *x = p->s->work.fine;
    int n_fine = 0;
    for (int i = 0; i < n_matrices; i++)
        n_fine += form_of(p, w[i]) == ACTIVATIONS_QUANTISED;
    if (n_fine > 0) {
        fine_rest(x, n, x + n);
        prepare(p, &a, x, 2 * n_rows, n_in, ACTIVATIONS_QUANTISED);
    }
    for (int i = 0; i < n_matrices; i++) {
        if (form_of(p, w[i]) != ACTIVATIONS_QUANTISED)
            continue;
        size_t n_out = (size_t)n_rows * w[i]->n_out;
        multiply(p, w[i], &a, 0, y[i]);
        add_to(p->s->kernels, y[i], y[i] + n_out, n_out);
    }
    if (n_fine < n_matrices)
        prepare(p, &a, x, n_rows, n_in, ACTIVATIONS_DENSE);
    for (int i = 0; i < n_matrices; i++)
        if (form_of(p, w[i]) != ACTIVATIONS_QUANTISED)
            multiply(p, w[i], &a, 0, y[i]);
}

/* q, k and v of the normed rows, with biases, head norms and RoPE. */
static void project(const struct pass *p, const struct layer_weights *w, bool has_window)
{
    struct stage_work *work = &p->s->work;
    const struct model *m = p->m;
    float *const to[3] = {work->q, work->keys, work->values};
    const struct rope *rope = has_window ? &p->s->rope_local : &p->s->rope;
    const float *table = has_window ? work->rope_local : work->rope;
    const uint32_t widths[3] = {m->q_dim, m->kv_dim, m->kv_dim};
    const struct matrix *const matrices[3] = {&w->matrix[LAYER_ATTN_Q], &w->matrix[LAYER_ATTN_K],
                                              &w->matrix[LAYER_ATTN_V]};
    for (uint32_t r = 0; r < p->n_rows; r += FINE_ROWS) {
        float *const at[3] = {to[0] + (size_t)r * widths[0], to[1] + (size_t)r * widths[1],
                              to[2] + (size_t)r * widths[2]};
        uint32_t n_rows = MIN_OF(p->n_rows - r, (uint32_t)FINE_ROWS);
        norm(p, work->x + (size_t)r * m->info.n_embd, n_rows, w->vector[LAYER_ATTN_NORM],
             work->fine);
        multiply_fine(p, matrices, at, 3, n_rows);
    }
    for (int i = 0; i < 3; i++) {
        if (w->vector[LAYER_ATTN_Q_BIAS + i])
            add_bias(p->s->kernels, to[i], widths[i], p->n_rows, widths[i],
                     w->vector[LAYER_ATTN_Q_BIAS + i]);
    }
    for (int i = 0; i < 2; i++) {
        uint32_t n_heads = widths[i] / m->info.head_dim;
        if (w->vector[LAYER_ATTN_Q_NORM + i])
            rms_norm(p->s->kernels, to[i], m->info.head_dim, p->n_rows * n_heads, m->info.head_dim,
                     w->vector[LAYER_ATTN_Q_NORM + i], m->info.norm_epsilon, to[i],
                     m->info.head_dim);
        rope_apply(p->s->kernels, rope, table, to[i], widths[i], p->n_rows, n_heads,
                   m->info.head_dim);
    }
}

/* Points the block table at the KV of one layer, as far as the step's segments reach. */
static void point_blocks(const struct pass *p, uint32_t layer, const struct stage_segment *segments)
{
    struct stage *s = p->s;
    uint8_t *kv = s->kv + (size_t)layer * s->options.n_blocks * s->kv_block_bytes;
    for (uint32_t i = 0; i < p->n_segments; i++) {
        const struct stage_segment *g = &segments[i];
        void **blocks = s->work.blocks + (size_t)i * s->blocks_per_sequence;
        for (uint32_t b = 0; b <= (g->position + g->n_rows - 1) / KV_BLOCK; b++)
            blocks[b] = kv + (g->blocks ? g->blocks[b] : b) * s->kv_block_bytes;
        s->work.segments[i] =
            (struct kv_segment){.blocks = blocks, .position = g->position, .n_rows = g->n_rows};
    }
}

/* x += y, which is in work.h, normed first where the layer has a norm for it. */
static void add_result(const struct pass *p, const float *post_norm)
{
    struct stage_work *work = &p->s->work;
    if (post_norm)
        norm(p, work->h, p->n_rows, post_norm, work->h);
    add_to(p->s->kernels, work->x, work->h, (size_t)p->n_rows * p->m->info.n_embd);
}

static void attend(const struct pass *p, const struct layer_weights *w, bool has_window)
{
    struct stage *s = p->s;
    struct stage_work *work = &s->work;
    const struct model *m = p->m;
    kv_write(s->kernels, &s->kv_layout, work->segments, p->n_segments, work->keys, m->kv_dim,
             work->values, m->kv_dim);
    struct attention attention_call = {
        .layout = &s->kv_layout,
        .n_heads = m->info.n_heads,
        .window = has_window ? m->info.window : 0,
        .scale = m->attention_scale,
        .segments = work->segments,
        .n_segments = p->n_segments,
        .q = work->q,
        .ldq = m->q_dim,
        .out = work->attended,
        .ldo = m->q_dim,
        .workspace = work->attention,
    };
    attention(s->kernels, &attention_call);
    const struct matrix *out = &w->matrix[LAYER_ATTN_OUTPUT];
    struct activations a;
    prepare(p, &a, work->attended, p->n_rows, m->q_dim, form_of(p, out));
    multiply(p, out, &a, w->attn_output_slice, work->h);
    add_result(p, w->vector[LAYER_ATTN_POST_NORM]);
}

/* The feed-forward block over normed rows h; the result replaces h. */
static void feed_forward(const struct pass *p, const struct layer_weights *w, float *h,
                         uint32_t n_rows)
{
    struct stage_work *work = &p->s->work;
    const struct matrix *gate = &w->matrix[LAYER_FFN_GATE], *up = &w->matrix[LAYER_FFN_UP],
                        *down = &w->matrix[LAYER_FFN_DOWN];
    uint32_t n_ff = p->m->info.n_ff;
    struct activations a;
    prepare(p, &a, h, n_rows, p->m->info.n_embd, form_of(p, gate) | form_of(p, up));
    multiply(p, gate, &a, 0, work->gate);
    multiply(p, up, &a, 0, work->up);
    if (p->m->arch->activation == ARCH_SILU)
        silu_mul(p->s->kernels, work->gate, work->up, n_ff, n_rows, n_ff, work->gate, n_ff);
    else
        gelu_tanh_mul(p->s->kernels, work->gate, work->up, n_ff, n_rows, n_ff, work->gate, n_ff);
    prepare(p, &a, work->gate, n_rows, n_ff, form_of(p, down));
    multiply(p, down, &a, w->ffn_down_slice, h);
}

static void run_layer(const struct pass *p, uint32_t layer, const struct stage_segment *segments)
{
    struct stage_work *work = &p->s->work;
    const struct layer_weights *w = &p->s->weights.layers[layer];
    size_t n_embd = p->m->info.n_embd;
    bool has_window = model_layer_has_window(p->m, p->s->options.first_layer + layer);
    project(p, w, has_window);
    point_blocks(p, layer, segments);
    attend(p, w, has_window);
    norm(p, work->x, p->n_rows, w->vector[LAYER_FFN_NORM], work->h);
    for (uint32_t r = 0; r < p->n_rows; r += FFN_ROWS)
        feed_forward(p, w, work->h + r * n_embd, MIN_OF(p->n_rows - r, (uint32_t)FFN_ROWS));
    add_result(p, w->vector[LAYER_FFN_POST_NORM]);
}

/* Positions, and for a head the embedded tokens. */
static void begin(const struct pass *p, const struct stage_segment *segments, const float *in)
{
    struct stage *s = p->s;
    size_t n_embd = p->m->info.n_embd;
    uint32_t row = 0;
    for (uint32_t i = 0; i < p->n_segments; i++) {
        for (uint32_t r = 0; r < segments[i].n_rows; r++, row++) {
            s->work.positions[row] = segments[i].position + r;
            if (s->is_head)
                matrix_row(s->kernels, &s->weights.embedding, (uint32_t)segments[i].token_ids[r],
                           s->work.x + row * n_embd);
        }
    }
    if (!s->is_head)
        memcpy(s->work.x, in, p->n_rows * n_embd * sizeof(float));
    else if (p->m->embedding_scale != 1.0f)
        scale_by(s->kernels, s->work.x, p->n_rows * n_embd, p->m->embedding_scale);
    rope_table(s->kernels, &s->rope, s->work.positions, p->n_rows, s->work.rope);
    if (p->m->info.window > 0)
        rope_table(s->kernels, &s->rope_local, s->work.positions, p->n_rows, s->work.rope_local);
}

static void finish(const struct pass *p, const struct stage_segment *segments, float *logits)
{
    struct stage *s = p->s;
    size_t n_embd = p->m->info.n_embd;
    uint32_t row = 0, n = 0;
    for (uint32_t i = 0; i < p->n_segments; row += segments[i].n_rows, i++) {
        uint32_t wanted = segments[i].logits == STAGE_LOGITS_ALL    ? segments[i].n_rows
                          : segments[i].logits == STAGE_LOGITS_LAST ? 1
                                                                    : 0;
        const float *from = s->work.x + (row + segments[i].n_rows - wanted) * n_embd;
        norm(p, from, wanted, s->weights.output_norm, s->work.h + n * n_embd);
        n += wanted;
    }
    const struct matrix *out = &s->weights.output;
    for (uint32_t r = 0; r < n; r += OUTPUT_ROWS) {
        uint32_t rows = MIN_OF(n - r, (uint32_t)OUTPUT_ROWS);
        float *const tile = s->work.logits;
        memcpy(s->work.fine, s->work.h + r * n_embd, rows * n_embd * sizeof *tile);
        multiply_fine(p, &out, &tile, 1, rows);
        memcpy(logits + (size_t)r * out->n_out, tile, (size_t)rows * out->n_out * sizeof *tile);
    }
}

void stage_pass(struct stage *s, const struct stage_segment *segments, uint32_t n_segments,
                uint32_t n_rows, const float *in, float *out, float *logits)
{
    struct pass p = {.s = s, .m = s->model, .n_rows = n_rows, .n_segments = n_segments};
    begin(&p, segments, in);
    for (uint32_t i = 0; i < s->options.n_layers; i++)
        run_layer(&p, i, segments);
    if (!s->is_tail)
        memcpy(out, s->work.x, (size_t)n_rows * s->model->info.n_embd * sizeof(float));
    else
        finish(&p, segments, logits);
}
