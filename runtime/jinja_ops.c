/* Template interpreter: truth, equality, order and arithmetic, as Python has them. */
#include "runtime/jinja.h"

#include "base/util.h"

#include <math.h>

const char *val_type_name(struct val v)
{
    switch (v.kind) {
    case K_UNDEFINED:
        return "undefined value";
    case K_NONE:
        return "none";
    case K_BOOL:
        return "boolean";
    case K_INT:
        return "whole number";
    case K_FLOAT:
        return "number";
    case K_STR:
        return "string";
    case K_LIST:
        return v.l->kind == LIST_LAZY ? "generator" : v.l->kind == LIST_TUPLE ? "tuple" : "list";
    case K_DICT:
        return "dict";
    case K_NAMESPACE:
        return "namespace";
    case K_MACRO:
        return "macro";
    case K_METHOD:
        return "function";
    case K_LOOP:
        return "loop";
    case K_ABSENT:
        break;
    }
    return "missing argument";
}

bool val_is_number(struct val v)
{
    return v.kind == K_BOOL || v.kind == K_INT || v.kind == K_FLOAT;
}

double val_number(struct val v)
{
    return v.kind == K_FLOAT ? v.f : v.kind == K_INT ? (double)v.i : (double)v.b;
}

static bool is_whole(struct val v)
{
    return v.kind == K_BOOL || v.kind == K_INT;
}

static int64_t whole(struct val v)
{
    return v.kind == K_INT ? v.i : v.b;
}

bool val_truthy(struct val v)
{
    switch (v.kind) {
    case K_UNDEFINED:
    case K_NONE:
    case K_ABSENT:
        return false;
    case K_BOOL:
        return v.b;
    case K_INT:
        return v.i != 0;
    case K_FLOAT:
        return v.f != 0;
    case K_STR:
        return v.s->n > 0;
    case K_LIST:
        return v.l->kind == LIST_LAZY || v.l->n > 0;
    case K_DICT:
        return v.d->n > 0;
    case K_NAMESPACE:
    case K_MACRO:
    case K_METHOD:
    case K_LOOP:
        break;
    }
    return true;
}

size_t val_length(struct interp *in, struct val v)
{
    switch (v.kind) {
    case K_UNDEFINED:
        return 0;
    case K_STR:
        return jinja_step(in, v.s->n / 16) ? text_length(v.s) : 0;
    case K_LIST:
        if (v.l->kind != LIST_LAZY)
            return v.l->n;
        break;
    case K_DICT:
        return v.d->n;
    case K_LOOP:
        return v.loop->n;
    default:
        break;
    }
    (void)jinja_fail(in, ERR_CORRUPT, "a %s has no length", val_type_name(v));
    return 0;
}

static bool equal_dicts(struct interp *in, const struct jdict *a, const struct jdict *b)
{
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n && jinja_step(in, 1); i++) {
        const struct val *other = dict_get(in, b, a->v[i].key);
        if (!other || !val_equal(in, a->v[i].value, *other))
            return false;
    }
    return !in->err;
}

static bool equal_lists(struct interp *in, const struct jlist *a, const struct jlist *b)
{
    if (a->n != b->n || a->kind != b->kind)
        return false;
    for (size_t i = 0; i < a->n && jinja_step(in, 1); i++)
        if (!val_equal(in, a->v[i], b->v[i]))
            return false;
    return !in->err;
}

static bool equal_deep(struct interp *in, struct val a, struct val b)
{
    if (++in->depth > in->limits->depth_max) {
        (void)jinja_fail(in, ERR_LIMIT, "a value is nested too deeply");
        return false;
    }
    bool same = a.kind == K_LIST ? equal_lists(in, a.l, b.l) : equal_dicts(in, a.d, b.d);
    in->depth--;
    return same;
}

bool val_equal(struct interp *in, struct val a, struct val b)
{
    if (is_whole(a) && is_whole(b))
        return whole(a) == whole(b);
    if (val_is_number(a) && val_is_number(b))
        return val_number(a) == val_number(b);
    if (a.kind != b.kind)
        return false;
    switch (a.kind) {
    case K_UNDEFINED:
    case K_NONE:
        return true;
    case K_STR:
        return jinja_step(in, a.s->n / 64) && jstr_eq(a.s, b.s);
    case K_LIST:
        return a.l == b.l || equal_deep(in, a, b);
    case K_DICT:
        return a.d == b.d || equal_deep(in, a, b);
    case K_NAMESPACE:
        return a.d == b.d;
    case K_MACRO:
        return a.macro == b.macro;
    case K_METHOD:
        return a.method == b.method;
    case K_LOOP:
        return a.loop == b.loop;
    default:
        return false;
    }
}

static int order_lists(struct interp *in, const struct jlist *a, const struct jlist *b)
{
    if (++in->depth > in->limits->depth_max) {
        (void)jinja_fail(in, ERR_LIMIT, "a value is nested too deeply");
        return 0;
    }
    int order = 0;
    for (size_t i = 0; i < a->n && i < b->n && order == 0 && jinja_step(in, 1); i++)
        if (!val_equal(in, a->v[i], b->v[i]))
            order = val_order(in, a->v[i], b->v[i]);
    in->depth--;
    return order ? order : a->n < b->n ? -1 : a->n > b->n;
}

int val_order(struct interp *in, struct val a, struct val b)
{
    if (is_whole(a) && is_whole(b))
        return whole(a) < whole(b) ? -1 : whole(a) > whole(b);
    if (val_is_number(a) && val_is_number(b))
        return val_number(a) < val_number(b) ? -1 : val_number(a) > val_number(b);
    if (a.kind == K_STR && b.kind == K_STR) {
        /* UTF-8 sorts as its code points do */
        size_t n = MIN_OF(a.s->n, b.s->n);
        int order = n && jinja_step(in, n / 64) ? memcmp(a.s->p, b.s->p, n) : 0;
        return order ? (order < 0 ? -1 : 1) : a.s->n < b.s->n ? -1 : a.s->n > b.s->n;
    }
    if (a.kind == K_LIST && b.kind == K_LIST && a.l->kind == b.l->kind && a.l->kind != LIST_LAZY)
        return order_lists(in, a.l, b.l);
    (void)jinja_fail(in, ERR_CORRUPT, "a %s and a %s have no order", val_type_name(a),
                     val_type_name(b));
    return 0;
}

bool val_contains(struct interp *in, struct val container, struct val item)
{
    switch (container.kind) {
    case K_STR:
        if (item.kind != K_STR) {
            (void)jinja_fail(in, ERR_CORRUPT, "a %s cannot be in a string", val_type_name(item));
            return false;
        }
        return text_find(in, container.s, item.s, 0) != SIZE_MAX;
    case K_DICT:
        return dict_get(in, container.d, item) != NULL;
    case K_LIST:
        for (size_t i = 0; i < container.l->n && jinja_step(in, 1); i++)
            if (val_equal(in, container.l->v[i], item))
                return true;
        return false;
    case K_UNDEFINED:
        return false;
    default:
        (void)jinja_fail(in, ERR_CORRUPT, "'in' needs a container, not a %s",
                         val_type_name(container));
        return false;
    }
}

/* -- arithmetic -------------------------------------------------------------------------------- */

static struct val overflow(struct interp *in)
{
    return jinja_fail(in, ERR_CORRUPT, "a number does not fit 64 bits");
}

static struct val power(struct interp *in, int64_t base, int64_t exponent)
{
    if (exponent < 0)
        return base == 0 ? jinja_fail(in, ERR_CORRUPT, "division by zero")
                         : v_float(pow((double)base, (double)exponent));
    int64_t r = 1;
    for (int64_t i = 0; i < exponent; i++) {
        if (base == 0 || base == 1 || base == -1) {
            r = base == -1 && exponent % 2 == 0 ? 1 : base;
            break;
        }
        if (mul_overflows(r, base, &r))
            return overflow(in);
    }
    return v_int(r);
}

static struct val whole_op(struct interp *in, enum op op, int64_t a, int64_t b)
{
    int64_t r;
    switch (op) {
    case OP_ADD:
        return add_overflows(a, b, &r) ? overflow(in) : v_int(r);
    case OP_SUB:
        return __builtin_sub_overflow(a, b, &r) ? overflow(in) : v_int(r);
    case OP_MUL:
        return mul_overflows(a, b, &r) ? overflow(in) : v_int(r);
    case OP_POW:
        return power(in, a, b);
    default:
        break;
    }
    if (b == 0)
        return jinja_fail(in, ERR_CORRUPT, "division by zero");
    if (op == OP_DIV)
        return v_float((double)a / (double)b);
    if (b == -1)
        return op == OP_MOD ? v_int(0) : a == INT64_MIN ? overflow(in) : v_int(-a);
    int64_t rest = a % b;
    bool down = rest != 0 && (rest < 0) != (b < 0);
    if (op == OP_MOD)
        return v_int(down ? rest + b : rest);
    return v_int(a / b - down);
}

static struct val float_op(struct interp *in, enum op op, double a, double b)
{
    switch (op) {
    case OP_ADD:
        return v_float(a + b);
    case OP_SUB:
        return v_float(a - b);
    case OP_MUL:
        return v_float(a * b);
    case OP_POW:
        return v_float(pow(a, b));
    default:
        break;
    }
    if (b == 0)
        return jinja_fail(in, ERR_CORRUPT, "division by zero");
    if (op == OP_DIV)
        return v_float(a / b);
    double rest = fmod(a, b);
    if (rest != 0 && (rest < 0) != (b < 0))
        rest += b;
    return v_float(op == OP_MOD ? rest : round((a - rest) / b));
}

static struct val repeat(struct interp *in, struct val v, int64_t times)
{
    if (v.kind == K_LIST) {
        struct jlist *l = list_new(in, v.l->kind);
        for (int64_t i = 0; i < times && v.l->n && !in->err; i++)
            for (size_t j = 0; j < v.l->n && !in->err; j++)
                list_push(in, l, v.l->v[j]);
        return v_list(l);
    }
    struct sink k = {0};
    for (int64_t i = 0; i < times && v.s->n && jinja_step(in, 1); i++)
        sink_put_str(in, &k, v.s);
    return sink_val(in, &k);
}

static bool is_sequence(struct val v)
{
    return v.kind == K_STR || (v.kind == K_LIST && v.l->kind != LIST_LAZY);
}

static struct val add_sequences(struct interp *in, struct val a, struct val b)
{
    if (a.kind == K_STR) {
        struct sink k = {0};
        sink_put_str(in, &k, a.s);
        sink_put_str(in, &k, b.s);
        return sink_val(in, &k);
    }
    struct jlist *l = list_new(in, a.l->kind);
    for (size_t i = 0; i < a.l->n && !in->err; i++)
        list_push(in, l, a.l->v[i]);
    for (size_t i = 0; i < b.l->n && !in->err; i++)
        list_push(in, l, b.l->v[i]);
    return v_list(l);
}

struct val val_binary(struct interp *in, enum op op, struct val a, struct val b)
{
    if (in->err)
        return v_undefined();
    if (is_whole(a) && is_whole(b))
        return whole_op(in, op, whole(a), whole(b));
    if (val_is_number(a) && val_is_number(b))
        return float_op(in, op, val_number(a), val_number(b));
    if (op == OP_ADD && is_sequence(a) && a.kind == b.kind &&
        (a.kind == K_STR || a.l->kind == b.l->kind))
        return add_sequences(in, a, b);
    if (op == OP_MUL && is_sequence(a) && is_whole(b))
        return repeat(in, a, whole(b));
    if (op == OP_MUL && is_whole(a) && is_sequence(b))
        return repeat(in, b, whole(a));
    if (a.kind == K_UNDEFINED || b.kind == K_UNDEFINED)
        return val_attr(in, a.kind == K_UNDEFINED ? a : b, &in->nil_str);
    if (op == OP_MOD && a.kind == K_STR)
        return jinja_fail(in, ERR_UNSUPPORTED, "formatting with %% is not supported");
    return jinja_fail(in, ERR_CORRUPT, "a %s and a %s cannot be combined so", val_type_name(a),
                      val_type_name(b));
}

struct val val_negate(struct interp *in, struct val v)
{
    if (v.kind == K_FLOAT)
        return v_float(-v.f);
    if (is_whole(v))
        return whole(v) == INT64_MIN ? overflow(in) : v_int(-whole(v));
    if (v.kind == K_UNDEFINED)
        return val_attr(in, v, &in->nil_str);
    return jinja_fail(in, ERR_CORRUPT, "a %s has no negative", val_type_name(v));
}
