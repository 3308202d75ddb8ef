/* Template interpreter: filters over sequences. What is a generator in Jinja is marked lazy: it is
 * true even when empty, and has no length. */
#include "runtime/jinja.h"

#include "base/util.h"

#define FILTER(name)                                                                               \
    static struct val name(struct interp *in, struct val self, const struct call *c,               \
                           const struct val *a)

static bool flag(struct val v)
{
    return v.kind != K_ABSENT && val_truthy(v);
}

/* "a.b.0" names a part of a part; a whole number is an index. */
static struct val attribute(struct interp *in, struct val v, struct val path)
{
    if (path.kind == K_INT)
        return val_item(in, v, path);
    if (path.kind != K_STR)
        return jinja_fail(in, ERR_CORRUPT, "an attribute must be a name");
    const struct jstr dot = JSTR(".");
    for (size_t at = 0; jinja_step(in, 1);) {
        size_t end = text_find(in, path.s, &dot, at);
        size_t to = end == SIZE_MAX ? path.s->n : end;
        struct val part = v_sub(in, path.s, at, to);
        bool digits = part.s->n > 0 && part.s->n < 10;
        int64_t index = 0;
        for (size_t i = 0; i < part.s->n && digits; i++) {
            digits = part.s->p[i] >= '0' && part.s->p[i] <= '9';
            index = index * 10 + (part.s->p[i] - '0');
        }
        v = val_item(in, v, digits ? v_int(index) : part);
        if (end == SIZE_MAX)
            return v;
        at = end + 1;
    }
    return v_undefined();
}

static struct val attribute_or_self(struct interp *in, struct val v, struct val path)
{
    return path.kind == K_ABSENT || path.kind == K_NONE ? v : attribute(in, v, path);
}

static struct val fold_case(struct interp *in, struct val v)
{
    return v.kind == K_STR ? text_case(in, v.s, CASE_LOWER) : v;
}

FILTER(f_length)
{
    (void)c, (void)a;
    return v_int((int64_t)val_length(in, self));
}

FILTER(f_first)
{
    (void)c, (void)a;
    const struct jlist *l = val_elements(in, self);
    return l->n ? l->v[0] : v_undefined();
}

FILTER(f_last)
{
    (void)c, (void)a;
    const struct jlist *l = val_elements(in, self);
    return l->n ? l->v[l->n - 1] : v_undefined();
}

static struct jlist *copy_list(struct interp *in, const struct jlist *from, enum list_kind kind)
{
    struct jlist *l = list_new(in, kind);
    for (size_t i = 0; i < from->n && !in->err; i++)
        list_push(in, l, from->v[i]);
    return l;
}

FILTER(f_list)
{
    (void)c, (void)a;
    return v_list(copy_list(in, val_elements(in, self), LIST_PLAIN));
}

FILTER(f_join)
{
    (void)c;
    const struct jlist *from = val_elements(in, self);
    struct jlist *l = list_new(in, LIST_PLAIN);
    for (size_t i = 0; i < from->n && !in->err; i++)
        list_push(in, l, attribute_or_self(in, from->v[i], a[1]));
    return text_join(in, l, a[0].kind == K_ABSENT ? NULL : val_to_str(in, a[0]));
}

FILTER(f_reverse)
{
    (void)c, (void)a;
    const struct jlist *from = val_elements(in, self);
    struct jlist *l = list_new(in, LIST_LAZY);
    for (size_t i = from->n; i > 0 && !in->err; i--)
        list_push(in, l, from->v[i - 1]);
    return self.kind == K_STR ? text_join(in, l, NULL) : v_list(l);
}

FILTER(f_items)
{
    (void)c, (void)a;
    struct jlist *l = list_new(in, LIST_LAZY);
    if (self.kind == K_UNDEFINED)
        return v_list(l);
    if (self.kind != K_DICT)
        return jinja_fail(in, ERR_CORRUPT, "items: a %s is no dict", val_type_name(self));
    for (size_t i = 0; i < self.d->n && !in->err; i++) {
        struct jlist *pair = list_new(in, LIST_TUPLE);
        list_push(in, pair, self.d->v[i].key);
        list_push(in, pair, self.d->v[i].value);
        list_push(in, l, v_list(pair));
    }
    return v_list(l);
}

/* -- order ------------------------------------------------------------------------------------- */

struct keyed {
    struct val key, value;
};

/* A stable merge sort; every comparison is a step. */
static void merge_sort(struct interp *in, struct keyed *v, struct keyed *spare, size_t n,
                       bool descending)
{
    for (size_t width = 1; width < n && !in->err; width *= 2) {
        for (size_t from = 0; from < n; from += 2 * width) {
            size_t middle = MIN_OF(from + width, n), end = MIN_OF(from + 2 * width, n);
            size_t i = from, j = middle;
            for (size_t k = from; k < end && jinja_step(in, 1); k++) {
                bool second = i >= middle;
                if (!second && j < end) {
                    int order = val_order(in, v[j].key, v[i].key);
                    second = descending ? order > 0 : order < 0;
                }
                spare[k] = second ? v[j++] : v[i++];
            }
            if (in->err)
                return;
        }
        memcpy(v, spare, n * sizeof *v);
    }
}

static struct val sort_by(struct interp *in, const struct jlist *from, const struct jlist *keys,
                          bool descending)
{
    size_t n = from->n;
    struct keyed *v = n ? jinja_alloc(in, n * sizeof *v) : NULL;
    struct keyed *spare = n ? jinja_alloc(in, n * sizeof *spare) : NULL;
    struct jlist *l = list_new(in, LIST_PLAIN);
    if (in->err || n == 0 || keys->n != n)
        return v_list(l);
    for (size_t i = 0; i < n; i++)
        v[i] = (struct keyed){keys->v[i], from->v[i]};
    merge_sort(in, v, spare, n, descending);
    for (size_t i = 0; i < n && !in->err; i++)
        list_push(in, l, v[i].value);
    return v_list(l);
}

FILTER(f_sort)
{
    (void)c;
    const struct jlist *from = val_elements(in, self);
    struct jlist *keys = list_new(in, LIST_PLAIN);
    for (size_t i = 0; i < from->n && !in->err; i++) {
        struct val key = attribute_or_self(in, from->v[i], a[2]);
        list_push(in, keys, flag(a[1]) ? key : fold_case(in, key));
    }
    return sort_by(in, from, keys, flag(a[0]));
}

FILTER(f_dictsort)
{
    (void)c;
    if (self.kind != K_DICT)
        return jinja_fail(in, ERR_CORRUPT, "dictsort: a %s is no dict", val_type_name(self));
    bool by_value = a[1].kind == K_STR && jstr_is(a[1].s, "value");
    const struct jlist *pairs = f_items(in, self, c, a).l;
    struct jlist *keys = list_new(in, LIST_PLAIN);
    for (size_t i = 0; i < self.d->n && !in->err; i++) {
        struct val key = by_value ? self.d->v[i].value : self.d->v[i].key;
        list_push(in, keys, flag(a[0]) ? key : fold_case(in, key));
    }
    return in->err ? v_undefined() : sort_by(in, pairs, keys, flag(a[2]));
}

static struct val extreme(struct interp *in, struct val self, const struct val *a, int sign)
{
    const struct jlist *from = val_elements(in, self);
    struct val best = v_undefined(), best_key = best;
    for (size_t i = 0; i < from->n && jinja_step(in, 1); i++) {
        struct val key = attribute_or_self(in, from->v[i], a[1]);
        if (!flag(a[0]))
            key = fold_case(in, key);
        if (i == 0 || val_order(in, key, best_key) * sign > 0) {
            best = from->v[i];
            best_key = key;
        }
    }
    return best;
}

FILTER(f_max)
{
    (void)c;
    return extreme(in, self, a, 1);
}

FILTER(f_min)
{
    (void)c;
    return extreme(in, self, a, -1);
}

FILTER(f_sum)
{
    (void)c;
    const struct jlist *from = val_elements(in, self);
    struct val sum = a[1].kind == K_ABSENT ? v_int(0) : a[1];
    for (size_t i = 0; i < from->n && jinja_step(in, 1); i++)
        sum = val_binary(in, OP_ADD, sum, attribute_or_self(in, from->v[i], a[0]));
    return sum;
}

FILTER(f_unique)
{
    (void)c;
    const struct jlist *from = val_elements(in, self);
    struct jlist *l = list_new(in, LIST_LAZY);
    struct jdict *seen = dict_new(in);
    for (size_t i = 0; i < from->n && jinja_step(in, 1); i++) {
        struct val key = attribute_or_self(in, from->v[i], a[1]);
        if (!flag(a[0]))
            key = fold_case(in, key);
        if (dict_get(in, seen, key) || in->err)
            continue;
        dict_set(in, seen, key, v_bool(true));
        list_push(in, l, from->v[i]);
    }
    return v_list(l);
}

/* -- map and select ---------------------------------------------------------------------------- */

static const struct val *keyword(const struct call *c, const char *name)
{
    for (uint32_t i = 0; i < c->n_kw; i++)
        if (jstr_is(c->names[i], name))
            return &c->kw[i];
    return NULL;
}

/* The arguments of the inner filter or test: those after the first `skip`. */
static struct call inner_call(const struct call *c, uint32_t skip)
{
    struct call inner = *c;
    inner.n_pos = c->n_pos > skip ? c->n_pos - skip : 0;
    inner.pos = inner.n_pos ? c->pos + skip : NULL;
    return inner;
}

FILTER(f_map)
{
    (void)a;
    const struct jlist *from = val_elements(in, self);
    struct jlist *l = list_new(in, LIST_LAZY);
    const struct val *path = keyword(c, "attribute"), *otherwise = keyword(c, "default");
    if (c->n_pos == 0 && path) {
        for (size_t i = 0; i < from->n && !in->err; i++) {
            struct val v = attribute(in, from->v[i], *path);
            list_push(in, l, v.kind == K_UNDEFINED && otherwise ? *otherwise : v);
        }
        return v_list(l);
    }
    if (c->n_pos == 0 || c->pos[0].kind != K_STR)
        return jinja_fail(in, ERR_CORRUPT, "map needs a filter or an attribute");
    const struct builtin *fn = jinja_filter(c->pos[0].s);
    if (!fn)
        return jinja_fail(in, ERR_UNSUPPORTED, "there is no filter '%.*s' here",
                          (int)MIN_OF(c->pos[0].s->n, (size_t)40), c->pos[0].s->p);
    struct call inner = inner_call(c, 1);
    for (size_t i = 0; i < from->n && !in->err; i++)
        list_push(in, l, jinja_apply(in, fn, from->v[i], &inner));
    return v_list(l);
}

/* select, reject, selectattr, rejectattr: keeps elements for which the test gives `wanted`. */
static struct val select_by(struct interp *in, struct val self, const struct call *c,
                            bool by_attribute, bool wanted)
{
    const struct jlist *from = val_elements(in, self);
    struct jlist *l = list_new(in, LIST_LAZY);
    uint32_t first = by_attribute ? 1 : 0;
    const struct builtin *test = NULL;
    if (c->n_pos < first)
        return jinja_fail(in, ERR_CORRUPT, "the name of an attribute is missing");
    if (c->n_pos > first) {
        struct val name = c->pos[first];
        test = name.kind == K_STR ? jinja_test(name.s) : NULL;
        if (!test)
            return jinja_fail(in, ERR_UNSUPPORTED, "there is no such test here");
    }
    struct call inner = inner_call(c, first + 1);
    for (size_t i = 0; i < from->n && jinja_step(in, 1); i++) {
        struct val v = by_attribute ? attribute(in, from->v[i], c->pos[0]) : from->v[i];
        bool holds = val_truthy(test ? jinja_apply(in, test, v, &inner) : v);
        if (holds == wanted)
            list_push(in, l, from->v[i]);
    }
    return v_list(l);
}

FILTER(f_select)
{
    (void)a;
    return select_by(in, self, c, false, true);
}

FILTER(f_reject)
{
    (void)a;
    return select_by(in, self, c, false, false);
}

FILTER(f_selectattr)
{
    (void)a;
    return select_by(in, self, c, true, true);
}

FILTER(f_rejectattr)
{
    (void)a;
    return select_by(in, self, c, true, false);
}

const struct builtin JINJA_SEQUENCE_FILTERS[] = {
    {"length", f_length, ""},
    {"count", f_length, ""},
    {"first", f_first, ""},
    {"last", f_last, ""},
    {"list", f_list, ""},
    {"join", f_join, "d= attribute="},
    {"reverse", f_reverse, ""},
    {"items", f_items, ""},
    {"sort", f_sort, "reverse= case_sensitive= attribute="},
    {"dictsort", f_dictsort, "case_sensitive= by= reverse="},
    {"max", f_max, "case_sensitive= attribute="},
    {"min", f_min, "case_sensitive= attribute="},
    {"sum", f_sum, "attribute= start="},
    {"unique", f_unique, "case_sensitive= attribute="},
    {"map", f_map, NULL},
    {"select", f_select, NULL},
    {"reject", f_reject, NULL},
    {"selectattr", f_selectattr, NULL},
    {"rejectattr", f_rejectattr, NULL},
    {NULL, NULL, NULL},
};
