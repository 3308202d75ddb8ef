/* Template interpreter: the arena, strings, lists, dicts, values from JSON, access to parts. */
#include "runtime/jinja.h"

#include "base/util.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>

/* -- memory and failures ----------------------------------------------------------------------- */

struct arena_chunk {
    struct arena_chunk *next;
    size_t n, cap;
    max_align_t bytes[];
};

enum { CHUNK_BYTES = 16 << 10, ALIGN = _Alignof(max_align_t) };

void *arena_alloc(struct arena *a, size_t n)
{
    n = n ? (n + ALIGN - 1) / ALIGN * ALIGN : ALIGN;
    if (a->err)
        return NULL;
    if (n > a->max || a->used > a->max - n) {
        a->err = ERR_LIMIT;
        return NULL;
    }
    struct arena_chunk *chunk = a->head;
    if (!chunk || chunk->cap - chunk->n < n) {
        size_t cap = n > CHUNK_BYTES ? n : CHUNK_BYTES;
        chunk = calloc(1, sizeof *chunk + cap);
        if (!chunk) {
            a->err = ERR_NO_MEMORY;
            return NULL;
        }
        chunk->cap = cap;
        if (a->head && a->head->cap - a->head->n > cap - n) { /* keep the emptier one in front */
            chunk->next = a->head->next;
            a->head->next = chunk;
        } else {
            chunk->next = a->head;
            a->head = chunk;
        }
    }
    void *p = (char *)chunk->bytes + chunk->n;
    chunk->n += n;
    a->used += n;
    return p;
}

void arena_deinit(struct arena *a)
{
    while (a->head) {
        struct arena_chunk *chunk = a->head;
        a->head = chunk->next;
        free(chunk);
    }
}

struct val jinja_fail(struct interp *in, enum err e, const char *format, ...)
{
    if (in->err)
        return v_undefined();
    in->err = e;
    char sentence[ERR_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    (void)err_set(in->text, e, "chat template, line %u: %.300s", in->line, sentence);
    return v_undefined();
}

bool jinja_step(struct interp *in, uint64_t n)
{
    if (in->err)
        return false;
    in->steps += n;
    if (in->steps > in->limits->steps_max)
        (void)jinja_fail(in, ERR_LIMIT, "more than %llu steps",
                         (unsigned long long)in->limits->steps_max);
    return !in->err;
}

void *jinja_alloc(struct interp *in, size_t n)
{
    if (in->err)
        return NULL;
    void *p = arena_alloc(&in->arena, n);
    if (!p && in->arena.err == ERR_LIMIT)
        (void)jinja_fail(in, ERR_LIMIT, "more than %zu bytes of memory",
                         in->limits->memory_bytes_max);
    else if (!p)
        (void)jinja_fail(in, ERR_NO_MEMORY, "out of memory");
    return p;
}

/* -- strings ----------------------------------------------------------------------------------- */

struct val v_str(struct interp *in, const char *p, size_t n, const uint8_t *mark)
{
    struct jstr *s = jinja_alloc(in, sizeof *s);
    if (!s)
        return (struct val){.kind = K_STR, .s = &in->nil_str};
    *s = (struct jstr){n ? p : "", n, n ? mark : NULL};
    return (struct val){.kind = K_STR, .s = s};
}

struct val v_literal(struct interp *in, const char *text)
{
    return v_str(in, text, strlen(text), NULL);
}

struct val v_sub(struct interp *in, const struct jstr *s, size_t from, size_t to)
{
    if (from > to)
        to = from;
    return v_str(in, s->p + from, to - from, s->mark ? s->mark + from : NULL);
}

/* Grows a string's room; false on failure. */
static bool sink_grow(struct interp *in, struct sink *k, size_t n)
{
    if (k->max && (n > k->max || k->n > k->max - n)) {
        (void)jinja_fail(in, ERR_LIMIT, "the rendered text is longer than %zu bytes", k->max);
        return false;
    }
    if (k->cap - k->n >= n)
        return true;
    size_t cap = MAX_OF(k->cap * 2, MAX_OF(k->n + n, (size_t)64));
    char *p = jinja_alloc(in, cap);
    uint8_t *mark = k->marked ? jinja_alloc(in, cap) : NULL;
    if (!p || (k->marked && !mark))
        return false;
    if (k->n) {
        memcpy(p, k->p, k->n);
        if (k->marked) {
            assert(k->mark);
            memcpy(mark, k->mark, k->n);
        }
    }
    k->p = p;
    k->mark = mark;
    k->cap = cap;
    return true;
}

void sink_put(struct interp *in, struct sink *k, const char *p, size_t n, const uint8_t *mark)
{
    if (n == 0 || !jinja_step(in, n / 16))
        return;
    if (mark && !k->marked) {
        uint8_t *marks = k->cap ? jinja_alloc(in, k->cap) : NULL;
        if (k->cap && !marks)
            return;
        k->mark = marks;
        k->marked = true;
    }
    if (!sink_grow(in, k, n))
        return;
    memcpy(k->p + k->n, p, n);
    if (k->marked) {
        assert(k->mark);
        if (mark)
            memcpy(k->mark + k->n, mark, n);
        else
            memset(k->mark + k->n, 0, n);
    }
    k->n += n;
}

void sink_put_str(struct interp *in, struct sink *k, const struct jstr *s)
{
    sink_put(in, k, s->p, s->n, s->mark);
}

void sink_puts(struct interp *in, struct sink *k, const char *text)
{
    sink_put(in, k, text, strlen(text), NULL);
}

struct val sink_val(struct interp *in, const struct sink *k)
{
    return v_str(in, k->p, k->n, k->marked ? k->mark : NULL);
}

/* -- lists and dicts --------------------------------------------------------------------------- */

struct jlist *list_new(struct interp *in, enum list_kind kind)
{
    struct jlist *l = jinja_alloc(in, sizeof *l);
    if (!l)
        return &in->nil_list;
    l->kind = kind;
    return l;
}

void list_push(struct interp *in, struct jlist *l, struct val v)
{
    if (!jinja_step(in, 1))
        return;
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 4;
        struct val *p = jinja_alloc(in, cap * sizeof *p);
        if (!p)
            return;
        if (l->n)
            memcpy(p, l->v, l->n * sizeof *p);
        l->v = p;
        l->cap = cap;
    }
    l->v[l->n++] = v;
}

struct jdict *dict_new(struct interp *in)
{
    struct jdict *d = jinja_alloc(in, sizeof *d);
    return d ? d : &in->nil_dict;
}

static uint64_t hash_bytes(const void *bytes, size_t n)
{
    const uint8_t *p = bytes;
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ p[i]) * 1099511628211u;
    return h ^ (h >> 29);
}

/* Equal keys have equal hashes: 1, 1.0 and true are one key, as in Python. */
static bool hash_val(struct interp *in, struct val key, uint64_t *ret)
{
    double f;
    switch (key.kind) {
    case K_STR:
        *ret = hash_bytes(key.s->p, key.s->n);
        return jinja_step(in, key.s->n / 16);
    case K_BOOL:
    case K_INT:
    case K_FLOAT:
        f = val_number(key) + 0.0;
        *ret = hash_bytes(&f, sizeof f);
        return !in->err;
    case K_NONE:
    case K_UNDEFINED:
        *ret = (uint64_t)key.kind + 1;
        return !in->err;
    default:
        (void)jinja_fail(in, ERR_CORRUPT, "a %s cannot be a key", val_type_name(key));
        return false;
    }
}

static void dict_index_put(struct jdict *d, size_t entry)
{
    size_t at = d->v[entry].hash & (d->n_index - 1);
    while (d->index[at])
        at = (at + 1) & (d->n_index - 1);
    d->index[at] = (uint32_t)(entry + 1);
}

static struct jentry *dict_find(struct interp *in, const struct jdict *d, struct val key,
                                uint64_t hash)
{
    if (!d->index) {
        for (size_t i = 0; i < d->n; i++)
            if (d->v[i].hash == hash && val_equal(in, d->v[i].key, key))
                return &d->v[i];
        return NULL;
    }
    for (size_t at = hash & (d->n_index - 1); d->index[at] && jinja_step(in, 1);
         at = (at + 1) & (d->n_index - 1)) {
        struct jentry *e = &d->v[d->index[at] - 1];
        if (e->hash == hash && val_equal(in, e->key, key))
            return e;
    }
    return NULL;
}

enum { DICT_SMALL = 8 };

static bool dict_grow(struct interp *in, struct jdict *d)
{
    if (d->n == d->cap) {
        size_t cap = d->cap ? d->cap * 2 : 4;
        struct jentry *v = cap > UINT32_MAX ? NULL : jinja_alloc(in, cap * sizeof *v);
        if (!v)
            return false;
        if (d->n)
            memcpy(v, d->v, d->n * sizeof *v);
        d->v = v;
        d->cap = cap;
    }
    if (d->n >= DICT_SMALL && (d->n + 1) * 2 > d->n_index) {
        size_t n_index = d->n_index ? d->n_index * 2 : (size_t)DICT_SMALL * 4;
        uint32_t *index = jinja_alloc(in, n_index * sizeof *index);
        if (!index)
            return false;
        d->index = index;
        d->n_index = n_index;
        for (size_t i = 0; i < d->n; i++)
            dict_index_put(d, i);
    }
    return true;
}

void dict_set(struct interp *in, struct jdict *d, struct val key, struct val value)
{
    uint64_t hash;
    if (!jinja_step(in, 1) || !hash_val(in, key, &hash))
        return;
    struct jentry *e = dict_find(in, d, key, hash);
    if (e) {
        e->value = value;
        return;
    }
    if (in->err || !dict_grow(in, d))
        return;
    d->v[d->n] = (struct jentry){key, value, hash};
    d->n++;
    if (d->index)
        dict_index_put(d, d->n - 1);
}

const struct val *dict_get(struct interp *in, const struct jdict *d, struct val key)
{
    uint64_t hash;
    if (!hash_val(in, key, &hash))
        return NULL;
    struct jentry *e = dict_find(in, d, key, hash);
    return e ? &e->value : NULL;
}

const struct val *dict_get_str(struct interp *in, const struct jdict *d, const struct jstr *key)
{
    return dict_get(in, d, (struct val){.kind = K_STR, .s = key});
}

/* -- JSON -------------------------------------------------------------------------------------- */

/* Marks for n bytes that are all the user's. */
static const uint8_t *user_marks(struct interp *in, size_t n)
{
    if (n > in->n_ones) {
        size_t room = MAX_OF(n, in->n_ones * 2);
        uint8_t *ones = jinja_alloc(in, room);
        if (!ones)
            return NULL;
        memset(ones, 1, room);
        in->ones = ones;
        in->n_ones = room;
    }
    return in->ones;
}

static struct val json_str(struct interp *in, const char *p, size_t n, enum json_origin origin)
{
    return v_str(in, p, n, origin == JSON_USER ? user_marks(in, n) : NULL);
}

static struct val json_container(struct interp *in, const json_t *json, enum json_origin origin)
{
    if (json_is_array(json)) {
        struct jlist *l = list_new(in, LIST_PLAIN);
        for (size_t i = 0; i < json_array_size(json) && !in->err; i++)
            list_push(in, l, val_of_json(in, json_array_get(json, i), origin));
        return v_list(l);
    }
    struct jdict *d = dict_new(in);
    /* jansson's iterators want a mutable object, and do not change it */
    json_t *object = (json_t *)(uintptr_t)json;
    for (void *it = json_object_iter(object); it && !in->err;
         it = json_object_iter_next(object, it)) {
        const char *key = json_object_iter_key(it);
        dict_set(in, d, json_str(in, key, strlen(key), origin),
                 val_of_json(in, json_object_iter_value(it), origin));
    }
    return v_dict(d);
}

struct val val_of_json(struct interp *in, const json_t *json, enum json_origin origin)
{
    if (!json || !jinja_step(in, 1))
        return v_undefined();
    switch (json_typeof(json)) {
    case JSON_STRING:
        return json_str(in, json_string_value(json), json_string_length(json), origin);
    case JSON_INTEGER:
        return v_int(json_integer_value(json));
    case JSON_REAL:
        return v_float(json_real_value(json));
    case JSON_TRUE:
        return v_bool(true);
    case JSON_FALSE:
        return v_bool(false);
    case JSON_NULL:
        return v_none();
    case JSON_ARRAY:
    case JSON_OBJECT:
        break;
    }
    if (++in->depth > in->limits->depth_max)
        return jinja_fail(in, ERR_LIMIT, "the conversation is nested too deeply");
    struct val v = json_container(in, json, origin);
    in->depth--;
    return v;
}

/* -- parts of values --------------------------------------------------------------------------- */

const struct jlist *val_elements(struct interp *in, struct val v)
{
    struct jlist *l;
    switch (v.kind) {
    case K_LIST:
        return v.l;
    case K_UNDEFINED:
        return list_new(in, LIST_PLAIN);
    case K_DICT:
        l = list_new(in, LIST_PLAIN);
        for (size_t i = 0; i < v.d->n; i++)
            list_push(in, l, v.d->v[i].key);
        return l;
    case K_STR:
        l = list_new(in, LIST_PLAIN);
        for (size_t at = 0; at < v.s->n && !in->err;) {
            int32_t c;
            size_t n = text_char(v.s->p + at, v.s->n - at, &c);
            list_push(in, l, v_sub(in, v.s, at, at + n));
            at += n;
        }
        return l;
    default:
        (void)jinja_fail(in, ERR_CORRUPT, "a %s cannot be iterated", val_type_name(v));
        return &in->nil_list;
    }
}

static struct val fail_undefined(struct interp *in, struct val v)
{
    if (v.s)
        return jinja_fail(in, ERR_CORRUPT, "'%.*s' is undefined", (int)MIN_OF(v.s->n, (size_t)80),
                          v.s->p);
    return jinja_fail(in, ERR_CORRUPT, "a value is undefined");
}

static struct val missing(const struct jstr *name)
{
    return (struct val){.kind = K_UNDEFINED, .s = name};
}

static struct val loop_attr(const struct jloop *loop, const struct jstr *name)
{
    size_t i = loop->index0, n = loop->n;
    if (jstr_is(name, "index"))
        return v_int((int64_t)i + 1);
    if (jstr_is(name, "index0"))
        return v_int((int64_t)i);
    if (jstr_is(name, "first"))
        return v_bool(i == 0);
    if (jstr_is(name, "last"))
        return v_bool(i + 1 == n);
    if (jstr_is(name, "length"))
        return v_int((int64_t)n);
    if (jstr_is(name, "revindex"))
        return v_int((int64_t)(n - i));
    if (jstr_is(name, "revindex0"))
        return v_int((int64_t)(n - i) - 1);
    if (jstr_is(name, "depth"))
        return v_int(1); /* only recursive loops would be deeper */
    if (jstr_is(name, "depth0"))
        return v_int(0);
    if (jstr_is(name, "previtem"))
        return i > 0 ? loop->items->v[i - 1] : missing(name);
    if (jstr_is(name, "nextitem"))
        return i + 1 < n ? loop->items->v[i + 1] : missing(name);
    return missing(name);
}

static struct val bind_method(struct interp *in, struct val self, const struct builtin *fn)
{
    struct jmethod *m = jinja_alloc(in, sizeof *m);
    if (!m)
        return v_undefined();
    *m = (struct jmethod){self, fn};
    return (struct val){.kind = K_METHOD, .method = m};
}

struct val val_attr(struct interp *in, struct val v, const struct jstr *name)
{
    if (v.kind == K_UNDEFINED)
        return fail_undefined(in, v);
    const struct builtin *fn = jinja_method(v.kind, name);
    if (fn)
        return bind_method(in, v, fn);
    if (v.kind == K_LOOP)
        return loop_attr(v.loop, name);
    if (v.kind == K_DICT || v.kind == K_NAMESPACE) {
        const struct val *found = dict_get_str(in, v.d, name);
        if (found)
            return *found;
    }
    return missing(name);
}

/* Python's index: counted from the end when negative; false when outside. */
static bool place(int64_t index, size_t n, size_t *ret)
{
    if (index < 0)
        index += (int64_t)n;
    if (index < 0 || (uint64_t)index >= n)
        return false;
    *ret = (size_t)index;
    return true;
}

struct val val_item(struct interp *in, struct val v, struct val key)
{
    if (v.kind == K_UNDEFINED)
        return fail_undefined(in, v);
    if (v.kind == K_DICT && key.kind != K_LIST && key.kind != K_DICT) {
        const struct val *found = dict_get(in, v.d, key);
        if (found)
            return *found;
    }
    if (key.kind == K_STR)
        return val_attr(in, v, key.s);
    size_t at;
    if (key.kind != K_INT && key.kind != K_BOOL)
        return missing(NULL);
    int64_t index = key.kind == K_INT ? key.i : key.b;
    if (v.kind == K_LIST && v.l->kind != LIST_LAZY && place(index, v.l->n, &at))
        return v.l->v[at];
    if (v.kind == K_STR && jinja_step(in, v.s->n / 16) && place(index, text_length(v.s), &at)) {
        size_t from = text_offset(v.s, at);
        int32_t c;
        return v_sub(in, v.s, from, from + text_char(v.s->p + from, v.s->n - from, &c));
    }
    return missing(NULL);
}

/* The numbers of a slice as Python's slice.indices gives them. */
struct bounds {
    int64_t start, stop, step;
};

static bool slice_number(struct interp *in, struct val v, int64_t absent, int64_t *ret)
{
    if (v.kind == K_NONE || v.kind == K_ABSENT) {
        *ret = absent;
        return true;
    }
    if (v.kind != K_INT && v.kind != K_BOOL) {
        (void)jinja_fail(in, ERR_CORRUPT, "slice bounds must be whole numbers");
        return false;
    }
    *ret = v.kind == K_INT ? v.i : v.b;
    return true;
}

static bool slice_bounds(struct interp *in, const struct val b[3], size_t length,
                         struct bounds *ret)
{
    int64_t n = (int64_t)length;
    if (!slice_number(in, b[2], 1, &ret->step))
        return false;
    if (ret->step == 0 || ret->step == INT64_MIN) {
        (void)jinja_fail(in, ERR_CORRUPT, "slice step cannot be %s", ret->step ? "that" : "zero");
        return false;
    }
    int64_t low = ret->step > 0 ? 0 : -1, high = ret->step > 0 ? n : n - 1;
    if (!slice_number(in, b[0], ret->step > 0 ? INT64_MIN : INT64_MAX, &ret->start) ||
        !slice_number(in, b[1], ret->step > 0 ? INT64_MAX : INT64_MIN, &ret->stop))
        return false;
    int64_t *ends[2] = {&ret->start, &ret->stop};
    for (int i = 0; i < 2; i++) {
        bool given = b[i].kind == K_INT || b[i].kind == K_BOOL;
        if (given && *ends[i] < 0)
            *ends[i] += n;
        *ends[i] = *ends[i] < low ? low : *ends[i] > high ? high : *ends[i];
    }
    return true;
}

/* The next index of a slice; false at the end. */
static bool slice_next(const struct bounds *b, int64_t *at)
{
    if (b->step > 0 ? b->stop - *at <= b->step : *at - b->stop <= -b->step)
        return false;
    *at += b->step;
    return true;
}

struct val val_slice(struct interp *in, struct val v, const struct val bounds[3])
{
    struct bounds b;
    if (v.kind == K_UNDEFINED)
        return fail_undefined(in, v);
    if (v.kind == K_STR) {
        if (!jinja_step(in, v.s->n / 16) || !slice_bounds(in, bounds, text_length(v.s), &b))
            return v_undefined();
        if (b.step == 1)
            return v_sub(in, v.s, text_offset(v.s, (size_t)b.start),
                         text_offset(v.s, (size_t)MAX_OF(b.stop, b.start)));
    } else if (v.kind != K_LIST || v.l->kind == LIST_LAZY) {
        return jinja_fail(in, ERR_CORRUPT, "a %s cannot be sliced", val_type_name(v));
    } else if (!slice_bounds(in, bounds, v.l->n, &b)) {
        return v_undefined();
    }
    const struct jlist *from = val_elements(in, v);
    struct jlist *l = list_new(in, v.kind == K_LIST ? v.l->kind : LIST_PLAIN);
    int64_t at = b.start;
    if (b.step > 0 ? b.start < b.stop : b.start > b.stop)
        do
            if ((uint64_t)at < from->n)
                list_push(in, l, from->v[at]);
        while (!in->err && slice_next(&b, &at));
    return v.kind == K_LIST ? v_list(l) : text_join(in, l, NULL);
}
