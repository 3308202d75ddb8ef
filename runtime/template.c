/* The public face of the template interpreter: one arena per template, one per render. */
#include "runtime/jinja.h"

#include "base/util.h"

#include <stdlib.h>

enum { TEMPLATE_MEMORY_MAX = 256 << 20 }; /* of a parsed template; a real one takes under 1 MiB */

void text_spans_deinit(struct text_spans *spans)
{
    free(spans->v);
    *spans = (struct text_spans){0};
}

enum err template_new(const char *source, size_t n, struct template **ret, struct err_text *text)
{
    if (n > TEMPLATE_SOURCE_MAX)
        return err_set(text, ERR_LIMIT, "chat template: longer than %d bytes", TEMPLATE_SOURCE_MAX);
    struct template *t = calloc(1, sizeof *t);
    if (!t)
        return err_set(text, ERR_NO_MEMORY, "chat template: out of memory");
    t->arena.max = TEMPLATE_MEMORY_MAX;
    struct token *tokens;
    enum err e = jinja_lex(&t->arena, source, n, &tokens, text);
    if (!e)
        e = jinja_parse(t, tokens, text);
    if (e)
        template_free(t);
    else
        *ret = t;
    return e;
}

void template_free(struct template *t)
{
    if (!t)
        return;
    arena_deinit(&t->arena);
    free(t);
}

static void bind_inputs(struct interp *in, const struct template_input *input)
{
    struct scope *scope = in->scope;
    scope->v = jinja_alloc(in, (in->t->n_symbols + 1) * sizeof *scope->v);
    scope->cap = in->t->n_symbols;
    for (uint32_t i = 0; i < in->t->n_symbols && !in->err; i++) {
        char name[256];
        const struct jstr *s = in->t->symbols[i];
        if (s->n >= sizeof name)
            continue;
        memcpy(name, s->p, s->n);
        name[s->n] = 0;
        const json_t *user = json_object_get(input->user, name);
        const json_t *own = json_object_get(input->own, name);
        if (user || own)
            scope->v[scope->n++] = (struct binding){
                i, val_of_json(in, user ? user : own, user ? JSON_USER : JSON_OWN)};
    }
}

/* The runs of nonzero marks. */
static enum err spans_of_marks(const struct sink *k, struct text_spans *ret)
{
    size_t n = 0;
    for (size_t i = 0; k->marked && i < k->n; i++)
        n += k->mark[i] && (i == 0 || !k->mark[i - 1]);
    struct text_spans spans = {n ? calloc(n, sizeof *spans.v) : NULL, 0};
    if (n && !spans.v)
        return ERR_NO_MEMORY;
    for (size_t i = 0; n && i < k->n; i++) {
        if (k->mark[i] && (i == 0 || !k->mark[i - 1]))
            spans.v[spans.n++].begin = i;
        if (k->mark[i])
            spans.v[spans.n - 1].end = i + 1;
    }
    *ret = spans;
    return ERR_OK;
}

static enum err hand_out(struct interp *in, struct buf *out, struct text_spans *ret_user)
{
    struct text_spans spans = {0};
    if (in->err)
        return in->err;
    enum err e = ret_user ? spans_of_marks(in->out, &spans) : ERR_OK;
    if (!e)
        e = buf_append(out, in->out->p, in->out->n);
    if (e) {
        text_spans_deinit(&spans);
        return err_set(in->text, e, "chat template: no room for the rendered text");
    }
    if (ret_user)
        *ret_user = spans;
    return ERR_OK;
}

enum err template_render(const struct template *t, const struct template_input *input,
                         const struct template_limits *limits, struct buf *out,
                         struct text_spans *ret_user, struct err_text *text)
{
    struct sink k = {.max = limits->output_bytes_max ? limits->output_bytes_max : 1};
    struct scope inputs = {0};
    struct interp in = {
        .t = t,
        .limits = limits,
        .now = input->now,
        .arena = {.max = limits->memory_bytes_max},
        .text = text,
        .line = 1,
        .out = &k,
        .scope = &inputs,
        .hole = v_undefined(),
        .nil_str = {"", 0, NULL},
    };
    bind_inputs(&in, input);
    if (!in.err)
        jinja_run(&in);
    enum err e = hand_out(&in, out, ret_user);
    arena_deinit(&in.arena);
    return e;
}
