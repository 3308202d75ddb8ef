/* Template interpreter: walks the tree. Names live in scopes (one for the template, one for each
 * turn of a loop, macro call, capture and `with`); `set` binds in the innermost one, so what a loop
 * sets is gone after it, as in Jinja. */
#include "runtime/jinja.h"

#include "base/util.h"

static struct val eval(struct interp *in, const struct node *n);
static void exec(struct interp *in, const struct node *n);

/* -- scopes ------------------------------------------------------------------------------------ */

static void scope_push(struct interp *in)
{
    struct scope *s = jinja_alloc(in, sizeof *s);
    if (!s)
        return;
    s->parent = in->scope;
    in->scope = s;
}

static void bind(struct interp *in, uint32_t symbol, struct val v)
{
    struct scope *s = in->scope;
    for (uint32_t i = 0; i < s->n; i++)
        if (s->v[i].symbol == symbol) {
            s->v[i].value = v;
            return;
        }
    if (s->n == s->cap) {
        uint32_t cap = s->cap ? s->cap * 2 : 4;
        struct binding *grown = jinja_alloc(in, cap * sizeof *grown);
        if (!grown)
            return;
        if (s->n)
            memcpy(grown, s->v, s->n * sizeof *grown);
        s->v = grown;
        s->cap = cap;
    }
    s->v[s->n++] = (struct binding){symbol, v};
}

static const struct val *lookup(struct interp *in, uint32_t symbol)
{
    for (struct scope *s = in->scope; s && jinja_step(in, 1 + s->n / 8); s = s->parent)
        for (uint32_t i = 0; i < s->n; i++)
            if (s->v[i].symbol == symbol)
                return &s->v[i].value;
    return NULL;
}

static struct val eval_name(struct interp *in, const struct node *n)
{
    const struct val *found = lookup(in, n->symbol);
    if (found)
        return *found;
    const struct builtin *fn = jinja_function(in, n->text);
    if (!fn)
        return (struct val){.kind = K_UNDEFINED, .s = n->text};
    struct jmethod *m = jinja_alloc(in, sizeof *m);
    if (!m)
        return v_undefined();
    *m = (struct jmethod){v_undefined(), fn};
    return (struct val){.kind = K_METHOD, .method = m};
}

static void assign(struct interp *in, const struct node *target, struct val v)
{
    if (in->err)
        return;
    if (target->kind == N_NAME) {
        bind(in, target->symbol, v);
        return;
    }
    if (target->kind == N_ATTR) {
        const struct val *ns = lookup(in, target->a->symbol);
        if (!ns || ns->kind != K_NAMESPACE) {
            (void)jinja_fail(in, ERR_CORRUPT, "only attributes of a namespace can be set");
            return;
        }
        dict_set(in, ns->d, (struct val){.kind = K_STR, .s = target->text}, v);
        return;
    }
    const struct jlist *parts = val_elements(in, v);
    if (parts->n != target->n_items) {
        (void)jinja_fail(in, ERR_CORRUPT, "%zu values for %u names", parts->n, target->n_items);
        return;
    }
    for (uint32_t i = 0; i < target->n_items; i++)
        assign(in, target->items[i], parts->v[i]);
}

/* -- calls ------------------------------------------------------------------------------------- */

static struct val *eval_all(struct interp *in, const struct node *const *nodes, uint32_t n)
{
    struct val *v = n ? jinja_alloc(in, n * sizeof *v) : NULL;
    for (uint32_t i = 0; v && i < n && !in->err; i++)
        v[i] = eval(in, nodes[i]);
    return in->err ? NULL : v;
}

static bool eval_arguments(struct interp *in, const struct node *n, struct call *ret)
{
    *ret = (struct call){.n_pos = n->n_items, .names = n->kw_names, .n_kw = n->n_kw};
    ret->pos = eval_all(in, n->items, n->n_items);
    ret->kw = eval_all(in, n->kw, n->n_kw);
    return !in->err;
}

/* Runs a body with its text going to a string instead. */
static struct val capture(struct interp *in, const struct node *body)
{
    struct sink k = {0};
    struct sink *outer = in->out;
    in->out = &k;
    exec(in, body);
    in->out = outer;
    return sink_val(in, &k);
}

static bool keyword(const struct call *c, const struct jstr *name, struct val *ret)
{
    for (uint32_t i = 0; i < c->n_kw; i++)
        if (jstr_eq(c->names[i], name)) {
            *ret = c->kw[i];
            return true;
        }
    return false;
}

static void bind_parameters(struct interp *in, const struct node *m, const struct call *c)
{
    uint32_t n_required = m->n_items - m->n_kw;
    for (uint32_t i = 0; i < m->n_items && !in->err; i++) {
        const struct node *name = m->items[i];
        struct val given;
        bool is_given = keyword(c, name->text, &given);
        if (i < c->n_pos && is_given)
            (void)jinja_fail(in, ERR_CORRUPT, "an argument is given twice");
        else if (i < c->n_pos)
            bind(in, name->symbol, c->pos[i]);
        else if (is_given)
            bind(in, name->symbol, given);
        else if (i >= n_required)
            bind(in, name->symbol, eval(in, m->kw[i - n_required]));
        else
            bind(in, name->symbol, (struct val){.kind = K_UNDEFINED, .s = name->text});
    }
    struct jlist *rest = list_new(in, LIST_TUPLE);
    for (uint32_t i = m->n_items; i < c->n_pos && !in->err; i++)
        list_push(in, rest, c->pos[i]);
    bind(in, SYM_VARARGS, v_list(rest));
    struct jdict *named = dict_new(in);
    for (uint32_t i = 0; i < c->n_kw && !in->err; i++) {
        bool is_parameter = false;
        for (uint32_t j = 0; j < m->n_items; j++)
            is_parameter |= jstr_eq(m->items[j]->text, c->names[i]);
        if (!is_parameter)
            dict_set(in, named, (struct val){.kind = K_STR, .s = c->names[i]}, c->kw[i]);
    }
    bind(in, SYM_KWARGS, v_dict(named));
}

static struct val call_macro(struct interp *in, const struct jmacro *macro, const struct call *c)
{
    struct scope *outer = in->scope;
    in->scope = macro->scope;
    scope_push(in);
    if (!in->err)
        bind_parameters(in, macro->node, c);
    struct val v = in->err ? v_undefined() : capture(in, macro->node->b);
    in->scope = outer;
    return v;
}

struct val jinja_call(struct interp *in, struct val callee, const struct call *c)
{
    if (callee.kind == K_METHOD)
        return jinja_apply(in, callee.method->fn, callee.method->self, c);
    if (callee.kind == K_MACRO)
        return call_macro(in, callee.macro, c);
    if (callee.kind == K_UNDEFINED)
        return val_attr(in, callee, &in->nil_str);
    return jinja_fail(in, ERR_CORRUPT, "a %s cannot be called", val_type_name(callee));
}

static struct val eval_call(struct interp *in, const struct node *n)
{
    struct val callee = eval(in, n->a);
    struct call c;
    if (!eval_arguments(in, n, &c))
        return v_undefined();
    in->line = n->line;
    return jinja_call(in, callee, &c);
}

static struct val eval_filter_or_test(struct interp *in, const struct node *n)
{
    if (!n->fn) {
        in->line = n->line;
        return jinja_fail(in, ERR_UNSUPPORTED, "there is no %s '%.*s' here",
                          n->kind == N_TEST ? "test" : "filter",
                          (int)MIN_OF(n->text->n, (size_t)40), n->text->p);
    }
    struct val self = eval(in, n->a);
    struct call c;
    if (!eval_arguments(in, n, &c))
        return v_undefined();
    in->line = n->line;
    return jinja_apply(in, n->fn, self, &c);
}

/* -- expressions ------------------------------------------------------------------------------- */

static struct val eval_items(struct interp *in, const struct node *n)
{
    struct jlist *l = list_new(in, n->kind == N_TUPLE ? LIST_TUPLE : LIST_PLAIN);
    for (uint32_t i = 0; i < n->n_items && !in->err; i++)
        list_push(in, l, eval(in, n->items[i]));
    return v_list(l);
}

static struct val eval_dict(struct interp *in, const struct node *n)
{
    struct jdict *d = dict_new(in);
    for (uint32_t i = 0; i + 1 < n->n_items && !in->err; i += 2) {
        struct val key = eval(in, n->items[i]);
        dict_set(in, d, key, eval(in, n->items[i + 1]));
    }
    return v_dict(d);
}

static struct val eval_concat(struct interp *in, const struct node *n)
{
    struct sink k = {0};
    for (uint32_t i = 0; i < n->n_items && !in->err; i++)
        val_print(in, &k, eval(in, n->items[i]));
    return sink_val(in, &k);
}

static bool compare(struct interp *in, enum op op, struct val a, struct val b)
{
    switch (op) {
    case OP_EQ:
        return val_equal(in, a, b);
    case OP_NE:
        return !val_equal(in, a, b);
    case OP_LT:
        return val_order(in, a, b) < 0;
    case OP_LE:
        return val_order(in, a, b) <= 0;
    case OP_GT:
        return val_order(in, a, b) > 0;
    case OP_GE:
        return val_order(in, a, b) >= 0;
    case OP_IN:
        return val_contains(in, b, a);
    default:
        return !val_contains(in, b, a);
    }
}

static struct val eval_compare(struct interp *in, const struct node *n)
{
    struct val left = eval(in, n->items[0]);
    for (uint32_t i = 1; i < n->n_items && !in->err; i++) {
        struct val right = eval(in, n->items[i]);
        in->line = n->line;
        if (!compare(in, (enum op)n->ops[i - 1], left, right))
            return v_bool(false);
        left = right;
    }
    return v_bool(true);
}

static struct val eval_slice(struct interp *in, const struct node *n)
{
    struct val base = eval(in, n->a), bounds[3];
    for (int i = 0; i < 3; i++)
        bounds[i] = n->items[i] ? eval(in, n->items[i]) : v_none();
    in->line = n->line;
    return in->err ? v_undefined() : val_slice(in, base, bounds);
}

static struct val eval_operation(struct interp *in, const struct node *n)
{
    struct val a = eval(in, n->a);
    struct val b = n->b ? eval(in, n->b) : v_undefined();
    if (in->err)
        return v_undefined();
    in->line = n->line;
    switch (n->kind) {
    case N_BINARY:
        return val_binary(in, n->op, a, b);
    case N_NEGATE:
        return val_negate(in, a);
    case N_PLUS:
        return a.kind == K_BOOL ? v_int(a.b) : val_is_number(a) ? a : val_negate(in, a);
    case N_ATTR:
        return val_attr(in, a, n->text);
    default:
        return val_item(in, a, b);
    }
}

static struct val eval_kind(struct interp *in, const struct node *n)
{
    struct val v;
    switch (n->kind) {
    case N_CONST:
        return n->value;
    case N_NAME:
        return eval_name(in, n);
    case N_LIST:
    case N_TUPLE:
        return eval_items(in, n);
    case N_DICT:
        return eval_dict(in, n);
    case N_COND:
        if (val_truthy(eval(in, n->b)))
            return eval(in, n->a);
        return n->c ? eval(in, n->c) : v_undefined();
    case N_OR:
        v = eval(in, n->a);
        return val_truthy(v) ? v : eval(in, n->b);
    case N_AND:
        v = eval(in, n->a);
        return val_truthy(v) ? eval(in, n->b) : v;
    case N_NOT:
        return v_bool(!val_truthy(eval(in, n->a)));
    case N_CONCAT:
        return eval_concat(in, n);
    case N_COMPARE:
        return eval_compare(in, n);
    case N_SLICE:
        return eval_slice(in, n);
    case N_CALL:
        return eval_call(in, n);
    case N_FILTER:
    case N_TEST:
        return eval_filter_or_test(in, n);
    case N_HOLE:
        return in->hole;
    default:
        return eval_operation(in, n);
    }
}

/* Counts the step and the depth; false when there is no going on. */
static bool enter(struct interp *in)
{
    if (!jinja_step(in, 1))
        return false;
    if (in->depth >= in->limits->depth_max) {
        (void)jinja_fail(in, ERR_LIMIT, "nested more than %u deep", in->limits->depth_max);
        return false;
    }
    in->depth++;
    return true;
}

static struct val eval(struct interp *in, const struct node *n)
{
    if (!enter(in))
        return v_undefined();
    struct val v = eval_kind(in, n);
    in->depth--;
    return v;
}

/* -- statements -------------------------------------------------------------------------------- */

static void exec_if(struct interp *in, const struct node *n)
{
    for (uint32_t i = 0; i + 1 < n->n_items; i += 2) {
        bool holds = val_truthy(eval(in, n->items[i]));
        if (in->err)
            return;
        if (holds) {
            exec(in, n->items[i + 1]);
            return;
        }
    }
    if (n->a)
        exec(in, n->a);
}

/* The elements for which the loop's own condition holds. */
static const struct jlist *filtered(struct interp *in, const struct node *n,
                                    const struct jlist *all)
{
    if (!n->c)
        return all;
    struct jlist *kept = list_new(in, LIST_PLAIN);
    struct scope *outer = in->scope;
    for (size_t i = 0; i < all->n && !in->err; i++) {
        scope_push(in);
        assign(in, n->a, all->v[i]);
        if (val_truthy(eval(in, n->c)))
            list_push(in, kept, all->v[i]);
        in->scope = outer;
    }
    return kept;
}

static void exec_for(struct interp *in, const struct node *n)
{
    const struct jlist *all = val_elements(in, eval(in, n->b));
    struct jlist *items = list_new(in, LIST_PLAIN);
    if (in->err)
        return;
    *items = *filtered(in, n, all); /* a view: later appends are not seen */
    struct scope *outer = in->scope;
    if (items->n == 0 && n->e && !in->err) {
        scope_push(in);
        exec(in, n->e);
        in->scope = outer;
        return;
    }
    for (size_t i = 0; i < items->n && jinja_step(in, 1); i++) {
        struct jloop *loop = jinja_alloc(in, sizeof *loop);
        scope_push(in);
        if (in->err)
            break;
        *loop = (struct jloop){items, items->n, i};
        bind(in, SYM_LOOP, (struct val){.kind = K_LOOP, .loop = loop});
        assign(in, n->a, items->v[i]);
        exec(in, n->d);
        in->scope = outer;
        enum flow flow = in->flow;
        in->flow = FLOW_ON;
        if (flow == FLOW_BREAK)
            break;
    }
    in->scope = outer;
}

/* Text captured from a body, passed through the filters of its tag. */
static struct val capture_filtered(struct interp *in, const struct node *n)
{
    struct scope *outer = in->scope;
    scope_push(in);
    struct val v = capture(in, n->b);
    in->scope = outer;
    if (!n->c)
        return v;
    struct val hole = in->hole;
    in->hole = v;
    v = eval(in, n->c);
    in->hole = hole;
    return v;
}

static void exec_scope(struct interp *in, const struct node *n)
{
    struct scope *outer = in->scope;
    struct val *values = n->n_items ? jinja_alloc(in, n->n_items * sizeof *values) : NULL;
    for (uint32_t i = 0; values && i + 1 < n->n_items; i += 2)
        values[i] = eval(in, n->items[i + 1]);
    scope_push(in);
    for (uint32_t i = 0; values && i + 1 < n->n_items; i += 2)
        assign(in, n->items[i], values[i]);
    if (!in->err)
        exec(in, n->b);
    in->scope = outer;
}

static void exec_macro(struct interp *in, const struct node *n)
{
    struct jmacro *m = jinja_alloc(in, sizeof *m);
    if (!m)
        return;
    *m = (struct jmacro){n, in->scope};
    bind(in, n->symbol, (struct val){.kind = K_MACRO, .macro = m});
}

static void exec_kind(struct interp *in, const struct node *n)
{
    switch (n->kind) {
    case N_BODY:
        for (uint32_t i = 0; i < n->n_items && !in->err && in->flow == FLOW_ON; i++)
            exec(in, n->items[i]);
        break;
    case N_TEXT:
        sink_put_str(in, in->out, n->text);
        break;
    case N_OUTPUT:
        val_print(in, in->out, eval(in, n->a));
        break;
    case N_IF:
        exec_if(in, n);
        break;
    case N_FOR:
        exec_for(in, n);
        break;
    case N_SET:
        assign(in, n->a, eval(in, n->b));
        break;
    case N_CAPTURE:
        assign(in, n->a, capture_filtered(in, n));
        break;
    case N_FILTERED:
        val_print(in, in->out, capture_filtered(in, n));
        break;
    case N_SCOPE:
        exec_scope(in, n);
        break;
    case N_MACRO:
        exec_macro(in, n);
        break;
    case N_BREAK:
        in->flow = FLOW_BREAK;
        break;
    case N_CONTINUE:
        in->flow = FLOW_CONTINUE;
        break;
    default:
        break;
    }
}

static void exec(struct interp *in, const struct node *n)
{
    if (!enter(in))
        return;
    in->line = n->line;
    exec_kind(in, n);
    in->depth--;
}

void jinja_run(struct interp *in)
{
    scope_push(in); /* the inputs were bound outside of it */
    exec(in, in->t->body);
}
