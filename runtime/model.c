#include "runtime/model_internal.h"

#include "base/util.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { KEY_MAX = 96, NAME_MAX_SHOWN = 80 };

struct load {
    struct model *m;
    const struct gguf *g;
    const char *path;
    struct err_text *text;
    uint32_t n_used; /* tensors that found their place */
};

/* "<architecture>.<name>" */
static const char *key_of(const struct load *l, const char *name, char key[KEY_MAX])
{
    (void)snprintf(key, KEY_MAX, "%s.%s", l->m->arch->name, name);
    return key;
}

static enum err bad_value(const struct load *l, const char *key)
{
    return err_set(l->text, ERR_CORRUPT, "%s: the metadata value %s is missing or makes no sense",
                   l->path, key);
}

/* A count that must be there and lie in [1, max]. */
static enum err need_count(const struct load *l, const char *name, uint32_t max, uint32_t *ret)
{
    char key[KEY_MAX];
    uint32_t v;
    if (gguf_get_u32(l->g, key_of(l, name, key), &v) != ERR_OK || v < 1 || v > max)
        return bad_value(l, key);
    *ret = v;
    return ERR_OK;
}

/* The same with a default when absent. */
static enum err want_count(const struct load *l, const char *name, uint32_t max, uint32_t absent,
                           uint32_t *ret)
{
    char key[KEY_MAX];
    uint32_t v = 0;
    enum err e = gguf_get_u32(l->g, key_of(l, name, key), &v);
    if (e == ERR_NOT_FOUND)
        v = absent;
    else if (e != ERR_OK || v < 1 || v > max)
        return bad_value(l, key);
    *ret = v;
    return ERR_OK;
}

static enum err want_positive(const struct load *l, const char *name, float absent, float *ret)
{
    char key[KEY_MAX];
    float v = 0;
    enum err e = gguf_get_f32(l->g, key_of(l, name, key), &v);
    if (e == ERR_NOT_FOUND)
        v = absent;
    else if (e != ERR_OK)
        return bad_value(l, key);
    if (!isfinite(v) || !(v > 0.0f))
        return bad_value(l, key);
    *ret = v;
    return ERR_OK;
}

static enum err find_arch(struct load *l)
{
    struct gguf_string name;
    if (gguf_get_string(l->g, "general.architecture", &name) != ERR_OK)
        return bad_value(l, "general.architecture");
    char shown[NAME_MAX_SHOWN];
    gguf_string_copy(name, shown, sizeof shown);
    l->m->arch = arch_find(name.data, name.n);
    if (!l->m->arch)
        return err_set(l->text, ERR_UNSUPPORTED,
                       "%s: the architecture %s is not one that Covey can run", l->path, shown);
    struct model_info *info = &l->m->info;
    gguf_string_copy(name, info->architecture, sizeof info->architecture);
    struct gguf_string title;
    if (gguf_get_string(l->g, "general.name", &title) == ERR_OK)
        gguf_string_copy(title, info->name, sizeof info->name);
    return ERR_OK;
}

/* Scaling of positions. Types that the engine does not compute are refused, never ignored. */
static enum err read_rope(struct load *l)
{
    char key[KEY_MAX];
    struct gguf_string type;
    struct model *m = l->m;
    TRY(want_positive(l, "rope.freq_base", 10000.0f, &m->info.rope_base));
    TRY(want_count(l, "rope.dimension_count", m->info.head_dim, m->info.head_dim, &m->n_rot));
    if (m->n_rot % 2 != 0)
        return bad_value(l, key_of(l, "rope.dimension_count", key));
    m->rope_frequency_scale = 1.0f;
    enum err e = gguf_get_string(l->g, key_of(l, "rope.scaling.type", key), &type);
    if (e == ERR_NOT_FOUND || (e == ERR_OK && gguf_string_eq(type, "none")))
        return ERR_OK;
    if (e != ERR_OK)
        return bad_value(l, key);
    if (!gguf_string_eq(type, "linear")) {
        char shown[NAME_MAX_SHOWN];
        gguf_string_copy(type, shown, sizeof shown);
        return err_set(l->text, ERR_UNSUPPORTED, "%s: rope scaling of type %s is not supported",
                       l->path, shown);
    }
    float factor = 1.0f;
    TRY(want_positive(l, "rope.scaling.factor", 1.0f, &factor));
    m->rope_frequency_scale = 1.0f / factor;
    return ERR_OK;
}

/* Sliding windows: a window of 0 or none at all means that all layers see everything. */
static enum err read_windows(struct load *l)
{
    struct model_info *info = &l->m->info;
    char key[KEY_MAX];
    if (l->m->arch->window_period == 0)
        return ERR_OK;
    enum err e = gguf_get_u32(l->g, key_of(l, "attention.sliding_window", key), &info->window);
    if (e == ERR_NOT_FOUND || (e == ERR_OK && info->window == 0))
        return ERR_OK;
    if (e != ERR_OK || info->window > MODEL_CONTEXT_MAX)
        return bad_value(l, key);
    TRY(want_count(l, "attention.sliding_window_pattern", MODEL_INFO_LAYERS_MAX,
                   l->m->arch->window_period, &info->window_period));
    return want_positive(l, "rope.freq_base_swa", l->m->arch->window_rope_base,
                         &l->m->window_rope_base);
}

/* Factors on the embedded tokens and on the products of queries and keys. */
static enum err read_factors(struct load *l)
{
    struct model *m = l->m;
    char key[KEY_MAX];
    float v = 0;
    m->embedding_scale = m->arch->scales_embedding ? sqrtf((float)m->info.n_embd) : 1.0f;
    m->attention_scale = 1.0f / sqrtf((float)m->info.head_dim);
    enum err e = gguf_get_f32(l->g, key_of(l, "attention.scale", key), &v);
    if (e == ERR_NOT_FOUND || (e == ERR_OK && v == 0.0f))
        return ERR_OK;
    if (e != ERR_OK || !isfinite(v) || !(v > 0.0f))
        return bad_value(l, key);
    m->attention_scale = v;
    return ERR_OK;
}

/* Settings that change the result and that this engine does not compute. */
static enum err refuse_settings(struct load *l)
{
    const char *const counts[] = {"expert_count",
                                  l->m->arch->window_period ? NULL : "attention.sliding_window"};
    static const char *const floats[] = {
        "logit_scale",         "residual_scale",         "embedding_scale",
        "attention.clamp_kqv", "attn_logit_softcapping", "final_logit_softcapping"};
    char key[KEY_MAX];
    for (size_t i = 0; i < ARRAY_LEN(counts) && counts[i]; i++) {
        uint64_t v = 0;
        enum err e = gguf_get_u64(l->g, key_of(l, counts[i], key), &v);
        if (e != ERR_NOT_FOUND && (e != ERR_OK || v != 0))
            return err_set(l->text, ERR_UNSUPPORTED, "%s: the setting %s is not supported", l->path,
                           key);
    }
    for (size_t i = 0; i < ARRAY_LEN(floats); i++) {
        float v = 0;
        enum err e = gguf_get_f32(l->g, key_of(l, floats[i], key), &v);
        if (e != ERR_NOT_FOUND && (e != ERR_OK || v != 0.0f))
            return err_set(l->text, ERR_UNSUPPORTED, "%s: the setting %s is not supported", l->path,
                           key);
    }
    return ERR_OK;
}

static enum err read_sizes(struct load *l)
{
    struct model_info *info = &l->m->info;
    char key[KEY_MAX];
    TRY(need_count(l, "block_count", MODEL_INFO_LAYERS_MAX, &info->n_layers));
    TRY(need_count(l, "context_length", MODEL_CONTEXT_MAX, &info->context_max));
    TRY(need_count(l, "embedding_length", MATRIX_IN_MAX, &info->n_embd));
    TRY(need_count(l, "feed_forward_length", MATRIX_IN_MAX, &info->n_ff));
    TRY(need_count(l, "attention.head_count", MATRIX_IN_MAX / 8, &info->n_heads));
    TRY(want_count(l, "attention.head_count_kv", info->n_heads, info->n_heads, &info->n_kv_heads));
    if (info->n_heads % info->n_kv_heads != 0)
        return bad_value(l, key_of(l, "attention.head_count_kv", key));
    TRY(want_count(l, "attention.key_length", HEAD_DIM_MAX, info->n_embd / info->n_heads,
                   &info->head_dim));
    uint32_t value_length = 0;
    TRY(want_count(l, "attention.value_length", HEAD_DIM_MAX, info->head_dim, &value_length));
    if (info->head_dim < 8 || info->head_dim > HEAD_DIM_MAX || info->head_dim % 8 != 0 ||
        value_length != info->head_dim)
        return err_set(l->text, ERR_UNSUPPORTED,
                       "%s: heads of %u and %u elements are not supported "
                       "(they must be equal and a multiple of 8 up to %d)",
                       l->path, info->head_dim, value_length, HEAD_DIM_MAX);
    if ((uint64_t)info->n_heads * info->head_dim > MATRIX_IN_MAX)
        return bad_value(l, key_of(l, "attention.head_count", key));
    l->m->q_dim = info->n_heads * info->head_dim;
    l->m->kv_dim = info->n_kv_heads * info->head_dim;
    info->kv_bytes_per_position = (uint64_t)l->m->kv_dim * 2 * 2;
    if (gguf_get_f32(l->g, key_of(l, "attention.layer_norm_rms_epsilon", key),
                     &info->norm_epsilon) != ERR_OK ||
        !(info->norm_epsilon >= 0.0f) || !isfinite(info->norm_epsilon))
        return bad_value(l, key);
    TRY(read_rope(l));
    TRY(read_windows(l));
    TRY(read_factors(l));
    return refuse_settings(l);
}

static uint64_t dim_value(const struct model *m, enum arch_dim dim)
{
    switch (dim) {
    case DIM_ONE:
        return 1;
    case DIM_EMBD:
        return m->info.n_embd;
    case DIM_Q:
        return m->q_dim;
    case DIM_KV:
        return m->kv_dim;
    case DIM_HEAD:
        return m->info.head_dim;
    case DIM_FF:
        return m->info.n_ff;
    case DIM_VOCAB:
        return m->info.n_vocab;
    case DIM_ROPE_HALF:
        return m->n_rot / 2;
    }
    return 0;
}

/* Finds a tensor and holds its type and shape against the description. *ret is NULL when it is
 * absent and may be. */
static enum err take_tensor(struct load *l, const char *name, struct arch_tensor want,
                            enum arch_need need, const struct gguf_tensor **ret)
{
    const struct gguf_tensor *t = gguf_tensor(l->g, name);
    *ret = NULL;
    if (!t && need == ARCH_REQUIRED)
        return err_set(l->text, ERR_CORRUPT, "%s: the tensor %s is missing", l->path, name);
    if (!t || need == ARCH_ABSENT)
        return ERR_OK;
    const struct tensor_traits *traits = tensor_traits(t->type);
    if (!traits || (want.out == DIM_ONE && traits->quantised))
        return err_set(l->text, ERR_UNSUPPORTED,
                       "%s: the tensor %s is stored as %s, which Covey "
                       "does not compute with",
                       l->path, name, gguf_tensor_type_name(t->type));
    uint64_t in = dim_value(l->m, want.in), out = dim_value(l->m, want.out);
    if (t->dims[0] != in || t->dims[1] != out || t->dims[2] != 1 || t->dims[3] != 1)
        return err_set(l->text, ERR_CORRUPT,
                       "%s: the tensor %s has the shape %llu x %llu, but the "
                       "metadata ask for %llu x %llu",
                       l->path, name, (unsigned long long)t->dims[0],
                       (unsigned long long)t->dims[1], (unsigned long long)in,
                       (unsigned long long)out);
    l->n_used++;
    *ret = t;
    return ERR_OK;
}

/* The vocabulary's size is that of the embedding, and the tokenizer must agree. */
static enum err read_vocabulary(struct load *l)
{
    struct model_info *info = &l->m->info;
    const struct gguf_tensor *t = gguf_tensor(l->g, "token_embd.weight");
    if (!t)
        return err_set(l->text, ERR_CORRUPT, "%s: the tensor token_embd.weight is missing",
                       l->path);
    if (t->dims[1] > MODEL_VOCAB_MAX)
        return err_set(l->text, ERR_LIMIT, "%s: a vocabulary of %llu tokens is too large", l->path,
                       (unsigned long long)t->dims[1]);
    info->n_vocab = (uint32_t)t->dims[1];
    struct gguf_array tokens;
    if (gguf_get_array(l->g, "tokenizer.ggml.tokens", &tokens) == ERR_OK &&
        tokens.n != info->n_vocab)
        return err_set(l->text, ERR_CORRUPT,
                       "%s: the tokenizer has %llu tokens, but the embedding "
                       "%u rows",
                       l->path, (unsigned long long)tokens.n, info->n_vocab);
    return ERR_OK;
}

static enum err take_outer_tensors(struct load *l)
{
    struct model *m = l->m;
    const struct arch_tensor matrix = {"", DIM_EMBD, DIM_VOCAB}, norm = {"", DIM_EMBD, DIM_ONE},
                             factors = {"", DIM_ROPE_HALF, DIM_ONE};
    TRY(take_tensor(l, "token_embd.weight", matrix, ARCH_REQUIRED, &m->embedding));
    TRY(take_tensor(l, "output_norm.weight", norm, ARCH_REQUIRED, &m->output_norm));
    enum arch_need need = m->arch->output_may_be_tied ? ARCH_OPTIONAL : ARCH_REQUIRED;
    TRY(take_tensor(l, "output.weight", matrix, need, &m->output));
    m->info.output_is_embedding = !m->output;
    if (!m->output)
        m->output = m->embedding;
    return take_tensor(l, "rope_freqs.weight", factors, ARCH_OPTIONAL, &m->rope_factors);
}

static enum err take_layers(struct load *l)
{
    struct model *m = l->m;
    m->layers = calloc(m->info.n_layers, sizeof *m->layers);
    if (!m->layers)
        return err_set(l->text, ERR_NO_MEMORY, "%s: no memory for the layers", l->path);
    for (uint32_t i = 0; i < m->info.n_layers; i++) {
        for (int k = 0; k < LAYER_TENSORS; k++) {
            char name[KEY_MAX];
            (void)snprintf(name, sizeof name, "blk.%u.%s", i, arch_layer_tensors[k].name);
            TRY(take_tensor(l, name, arch_layer_tensors[k], m->arch->needs[k], &m->layers[i][k]));
        }
    }
    return ERR_OK;
}

static bool is_taken(const struct model *m, const struct gguf_tensor *t)
{
    if (t == m->embedding || t == m->output_norm || t == m->output || t == m->rope_factors)
        return true;
    for (uint32_t i = 0; i < m->info.n_layers; i++)
        for (int k = 0; k < LAYER_TENSORS; k++)
            if (m->layers[i][k] == t)
                return true;
    return false;
}

/* A tensor that has no place would change the result if it were computed with: refuse. */
static enum err refuse_others(struct load *l)
{
    if (l->n_used == gguf_n_tensors(l->g))
        return ERR_OK;
    for (uint32_t i = 0; i < gguf_n_tensors(l->g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(l->g, i);
        if (is_taken(l->m, t))
            continue;
        char name[NAME_MAX_SHOWN];
        gguf_string_copy(t->name, name, sizeof name);
        return err_set(l->text, ERR_UNSUPPORTED,
                       "%s: the tensor %s does not belong to the architecture %s as Covey knows it",
                       l->path, name, l->m->arch->name);
    }
    return ERR_OK;
}

/* Multiply-adds of a matrix for one row; `fine`: with finer activations where it is quantised. */
static uint64_t macs_of(const struct gguf_tensor *t, bool fine)
{
    return fine && tensor_traits(t->type)->quantised ? 2 * t->n_elements : t->n_elements;
}

static void add_up(struct model *m)
{
    struct model_info *info = &m->info;
    info->file_bytes = gguf_file_bytes(m->gguf);
    info->header_bytes = gguf_header_bytes(m->gguf);
    info->embedding_bytes = m->embedding->n_bytes;
    info->output_bytes = m->output_norm->n_bytes + m->output->n_bytes;
    info->output_macs = macs_of(m->output, true);
    for (uint32_t i = 0; i < info->n_layers; i++) {
        info->layer_bytes[i] = m->rope_factors ? m->rope_factors->n_bytes : 0;
        for (int k = 0; k < LAYER_TENSORS; k++) {
            const struct gguf_tensor *t = m->layers[i][k];
            if (!t)
                continue;
            info->layer_bytes[i] += t->n_bytes;
            if (i == 0 && arch_layer_tensors[k].out != DIM_ONE)
                info->layer_macs += macs_of(t, k >= LAYER_ATTN_Q && k <= LAYER_ATTN_V);
        }
    }
}

enum err model_open_gguf(struct gguf *take_gguf, struct model **ret, struct err_text *text)
{
    struct model *m = calloc(1, sizeof *m);
    if (!m) {
        (void)err_set(text, ERR_NO_MEMORY, "%s: no memory for the model", gguf_path(take_gguf));
        gguf_free(take_gguf);
        return ERR_NO_MEMORY;
    }
    m->gguf = take_gguf;
    atomic_init(&m->n_refs, 1);
    struct load l = {.m = m, .g = take_gguf, .path = gguf_path(take_gguf), .text = text};
    enum err (*const steps[])(struct load *) = {find_arch,          read_sizes,  read_vocabulary,
                                                take_outer_tensors, take_layers, refuse_others};
    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        enum err e = steps[i](&l);
        if (e != ERR_OK) {
            model_unref(m);
            return e;
        }
    }
    add_up(m);
    *ret = m;
    return ERR_OK;
}

enum err model_open(const char *path, struct model **ret, struct err_text *text)
{
    struct gguf *g;
    TRY(gguf_open(path, &g, text));
    return model_open_gguf(g, ret, text);
}

struct model *model_ref(struct model *model)
{
    atomic_fetch_add_explicit(&model->n_refs, 1, memory_order_relaxed);
    return model;
}

void model_unref(struct model *model)
{
    if (!model || atomic_fetch_sub_explicit(&model->n_refs, 1, memory_order_acq_rel) != 1)
        return;
    gguf_free(model->gguf);
    free(model->layers);
    free(model);
}

const struct model_info *model_info(const struct model *model)
{
    return &model->info;
}

const struct gguf *model_gguf(const struct model *model)
{
    return model->gguf;
}

/* Ranges while they are gathered: not sorted yet. */
struct gather {
    struct byte_range *ranges;
    uint32_t n, max;
};

static enum err gather_tensor(struct gather *a, const struct gguf_tensor *t)
{
    if (!t)
        return ERR_OK;
    if (a->n == a->max)
        return ERR_LIMIT;
    a->ranges[a->n++] = (struct byte_range){t->offset, t->n_bytes};
    return ERR_OK;
}

static int by_offset(const void *a, const void *b)
{
    const struct byte_range *x = a, *y = b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

/* Neighbours become one when nothing but alignment lies between them. */
static uint32_t merge(struct byte_range *r, uint32_t n)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t end = r[i].offset + r[i].n_bytes;
        struct byte_range *last = kept > 0 ? &r[kept - 1] : NULL;
        if (last && r[i].offset <= last->offset + last->n_bytes + GGUF_ALIGNMENT_DEFAULT)
            last->n_bytes = MAX_OF(end, last->offset + last->n_bytes) - last->offset;
        else
            r[kept++] = r[i];
    }
    return kept;
}

/* Everything that the layers need, unsorted; `a` has room. */
static enum err gather_all(const struct model *model, uint32_t first, uint32_t n, struct gather *a)
{
    if (first == 0)
        TRY(gather_tensor(a, model->embedding));
    if (first + n == model->info.n_layers) {
        TRY(gather_tensor(a, model->output_norm));
        TRY(gather_tensor(a, model->output));
    }
    TRY(gather_tensor(a, model->rope_factors));
    for (uint32_t i = first; i < first + n; i++)
        for (int k = 0; k < LAYER_TENSORS; k++)
            TRY(gather_tensor(a, model->layers[i][k]));
    return ERR_OK;
}

enum err model_ranges(const struct model *model, uint32_t first, uint32_t n, struct byte_range *ret,
                      uint32_t max, uint32_t *ret_n)
{
    uint32_t n_layers = model->info.n_layers;
    if (n == 0 || first >= n_layers || n > n_layers - first)
        return ERR_INVALID;
    struct gather a = {.max = n * LAYER_TENSORS + 4};
    a.ranges = malloc(a.max * sizeof *a.ranges);
    if (!a.ranges)
        return ERR_NO_MEMORY;
    enum err e = gather_all(model, first, n, &a);
    if (e == ERR_OK) {
        qsort(a.ranges, a.n, sizeof *a.ranges, by_offset);
        uint32_t kept = merge(a.ranges, a.n);
        e = kept > max ? ERR_LIMIT : ERR_OK;
        if (e == ERR_OK) {
            memcpy(ret, a.ranges, kept * sizeof *ret);
            *ret_n = kept;
        }
    }
    free(a.ranges);
    return e;
}
