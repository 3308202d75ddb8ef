/* Template interpreter: binding of arguments, methods of strings, dicts, lists and loops, and the
 * global functions. */
#include "runtime/jinja.h"

#include "base/util.h"

/* -- binding ----------------------------------------------------------------------------------- */

/* Finds the place of a parameter by its name; false when there is none. */
static bool parameter_place(const char *params, const struct jstr *name, size_t *ret)
{
    size_t place = 0;
    for (const char *p = params; *p; place++) {
        size_t n = strcspn(p, "= ");
        if (n == name->n && memcmp(p, name->p, n) == 0) {
            *ret = place;
            return true;
        }
        p += n;
        p += strspn(p, "= ");
    }
    return false;
}

struct val jinja_apply(struct interp *in, const struct builtin *fn, struct val self,
                       const struct call *c)
{
    struct val a[BUILTIN_ARGS_MAX];
    if (in->err)
        return v_undefined();
    if (!fn->params)
        return fn->fn(in, self, c, NULL);
    size_t n_params = 0;
    for (const char *p = fn->params; *p; n_params++) {
        p += strcspn(p, " ");
        p += strspn(p, " ");
    }
    for (size_t i = 0; i < BUILTIN_ARGS_MAX; i++)
        a[i] = i < c->n_pos ? c->pos[i] : (struct val){.kind = K_ABSENT};
    if (c->n_pos > n_params)
        return jinja_fail(in, ERR_CORRUPT, "%s takes at most %zu arguments", fn->name, n_params);
    for (uint32_t i = 0; i < c->n_kw; i++) {
        size_t place;
        if (!parameter_place(fn->params, c->names[i], &place))
            return jinja_fail(in, ERR_CORRUPT, "%s has no argument '%.*s'", fn->name,
                              (int)MIN_OF(c->names[i]->n, (size_t)40), c->names[i]->p);
        a[place] = c->kw[i];
    }
    const char *p = fn->params;
    for (size_t i = 0; i < n_params; i++) {
        p += strcspn(p, "= ");
        if (*p != '=' && a[i].kind == K_ABSENT)
            return jinja_fail(in, ERR_CORRUPT, "%s needs %zu arguments or more", fn->name, i + 1);
        p += strspn(p, "= ");
    }
    return fn->fn(in, self, c, a);
}

/* -- strings ----------------------------------------------------------------------------------- */

/* An optional string argument: NULL when absent or none; a failure for other kinds. */
static const struct jstr *opt_str(struct interp *in, struct val v)
{
    if (v.kind == K_ABSENT || v.kind == K_NONE)
        return NULL;
    if (v.kind == K_STR)
        return v.s;
    (void)jinja_fail(in, ERR_CORRUPT, "a string is needed, not a %s", val_type_name(v));
    return &in->nil_str;
}

static const struct jstr *need_str(struct interp *in, struct val v)
{
    const struct jstr *s = opt_str(in, v);
    if (!s)
        (void)jinja_fail(in, ERR_CORRUPT, "a string is needed, not a %s", val_type_name(v));
    return s ? s : &in->nil_str;
}

static int64_t opt_int(struct interp *in, struct val v, int64_t absent)
{
    if (v.kind == K_INT)
        return v.i;
    if (v.kind == K_BOOL)
        return v.b;
    if (v.kind != K_ABSENT && v.kind != K_NONE)
        (void)jinja_fail(in, ERR_CORRUPT, "a whole number is needed, not a %s", val_type_name(v));
    return absent;
}

#define METHOD(name)                                                                               \
    static struct val name(struct interp *in, struct val self, const struct call *c,               \
                           const struct val *a)

METHOD(str_strip)
{
    (void)c;
    return text_strip(in, self.s, opt_str(in, a[0]), STRIP_BOTH);
}

METHOD(str_lstrip)
{
    (void)c;
    return text_strip(in, self.s, opt_str(in, a[0]), STRIP_LEFT);
}

METHOD(str_rstrip)
{
    (void)c;
    return text_strip(in, self.s, opt_str(in, a[0]), STRIP_RIGHT);
}

METHOD(str_upper)
{
    (void)c, (void)a;
    return text_case(in, self.s, CASE_UPPER);
}

METHOD(str_lower)
{
    (void)c, (void)a;
    return text_case(in, self.s, CASE_LOWER);
}

METHOD(str_title)
{
    (void)c, (void)a;
    return text_case(in, self.s, CASE_TITLE);
}

METHOD(str_capitalize)
{
    (void)c, (void)a;
    return text_case(in, self.s, CASE_CAPITALIZE);
}

METHOD(str_replace)
{
    (void)c;
    return text_replace(in, self.s, need_str(in, a[0]), need_str(in, a[1]), opt_int(in, a[2], -1));
}

static bool has_affix(const struct jstr *s, const struct jstr *affix, bool at_end)
{
    if (affix->n > s->n)
        return false;
    return affix->n == 0 || memcmp(s->p + (at_end ? s->n - affix->n : 0), affix->p, affix->n) == 0;
}

static struct val test_affix(struct interp *in, struct val self, struct val affix, bool at_end)
{
    if (affix.kind == K_LIST && affix.l->kind == LIST_TUPLE) {
        for (size_t i = 0; i < affix.l->n && jinja_step(in, 1); i++)
            if (has_affix(self.s, need_str(in, affix.l->v[i]), at_end))
                return v_bool(true);
        return v_bool(false);
    }
    return v_bool(has_affix(self.s, need_str(in, affix), at_end));
}

METHOD(str_startswith)
{
    (void)c;
    return test_affix(in, self, a[0], false);
}

METHOD(str_endswith)
{
    (void)c;
    return test_affix(in, self, a[0], true);
}

METHOD(str_removeprefix)
{
    (void)c;
    const struct jstr *affix = need_str(in, a[0]);
    return has_affix(self.s, affix, false) ? v_sub(in, self.s, affix->n, self.s->n) : self;
}

METHOD(str_removesuffix)
{
    (void)c;
    const struct jstr *affix = need_str(in, a[0]);
    return has_affix(self.s, affix, true) ? v_sub(in, self.s, 0, self.s->n - affix->n) : self;
}

/* split() without separator: at runs of white space. */
static struct val split_space(struct interp *in, const struct jstr *s, int64_t max)
{
    struct jlist *l = list_new(in, LIST_PLAIN);
    size_t at = 0, start = SIZE_MAX;
    while (at < s->n && jinja_step(in, 1)) {
        int32_t c;
        size_t n = text_char(s->p + at, s->n - at, &c);
        bool space = text_is_space(c);
        if (!space && start == SIZE_MAX) {
            start = at;
            if (max >= 0 && (int64_t)l->n >= max) {
                list_push(in, l, v_sub(in, s, at, s->n));
                return v_list(l);
            }
        } else if (space && start != SIZE_MAX) {
            list_push(in, l, v_sub(in, s, start, at));
            start = SIZE_MAX;
        }
        at += n;
    }
    if (start != SIZE_MAX)
        list_push(in, l, v_sub(in, s, start, s->n));
    return v_list(l);
}

METHOD(str_split)
{
    (void)c;
    const struct jstr *separator = opt_str(in, a[0]);
    int64_t max = opt_int(in, a[1], -1);
    if (!separator)
        return split_space(in, self.s, max);
    if (separator->n == 0)
        return jinja_fail(in, ERR_CORRUPT, "split: the separator is empty");
    struct jlist *l = list_new(in, LIST_PLAIN);
    size_t done = 0;
    while (max < 0 || (int64_t)l->n < max) {
        size_t at = text_find(in, self.s, separator, done);
        if (at == SIZE_MAX)
            break;
        list_push(in, l, v_sub(in, self.s, done, at));
        done = at + separator->n;
    }
    list_push(in, l, v_sub(in, self.s, done, self.s->n));
    return v_list(l);
}

static size_t find_last(struct interp *in, const struct jstr *s, const struct jstr *needle,
                        size_t end)
{
    for (size_t at = end >= needle->n ? end - needle->n + 1 : 0; at > 0; at--)
        if (!jinja_step(in, 1 + needle->n / 16))
            break;
        else if (memcmp(s->p + at - 1, needle->p, needle->n) == 0)
            return at - 1;
    return SIZE_MAX;
}

METHOD(str_rsplit)
{
    int64_t max = opt_int(in, a[1], -1);
    const struct jstr *separator = opt_str(in, a[0]);
    if (max < 0 && !in->err)
        return str_split(in, self, c, a);
    if (!separator)
        return jinja_fail(in, ERR_UNSUPPORTED, "rsplit at white space with a maximum");
    if (separator->n == 0)
        return jinja_fail(in, ERR_CORRUPT, "rsplit: the separator is empty");
    struct jlist *parts = list_new(in, LIST_PLAIN);
    size_t end = self.s->n;
    while ((int64_t)parts->n < max) {
        size_t at = find_last(in, self.s, separator, end);
        if (at == SIZE_MAX)
            break;
        list_push(in, parts, v_sub(in, self.s, at + separator->n, end));
        end = at;
    }
    list_push(in, parts, v_sub(in, self.s, 0, end));
    for (size_t i = 0; i < parts->n / 2; i++) {
        struct val v = parts->v[i];
        parts->v[i] = parts->v[parts->n - 1 - i];
        parts->v[parts->n - 1 - i] = v;
    }
    return v_list(parts);
}

METHOD(str_splitlines)
{
    (void)c, (void)a;
    return v_list(text_lines(in, self.s));
}

static struct val char_index(struct interp *in, const struct jstr *s, size_t at)
{
    if (at == SIZE_MAX || !jinja_step(in, at / 16))
        return v_int(-1);
    struct jstr before = {s->p, at, NULL};
    return v_int((int64_t)text_length(&before));
}

METHOD(str_find)
{
    (void)c;
    size_t from = text_offset(self.s, (size_t)MAX_OF(opt_int(in, a[1], 0), (int64_t)0));
    return char_index(in, self.s, text_find(in, self.s, need_str(in, a[0]), from));
}

METHOD(str_rfind)
{
    (void)c;
    return char_index(in, self.s, find_last(in, self.s, need_str(in, a[0]), self.s->n));
}

METHOD(str_index)
{
    struct val v = str_find(in, self, c, a);
    return v.kind == K_INT && v.i < 0 ? jinja_fail(in, ERR_CORRUPT, "index: substring not found")
                                      : v;
}

METHOD(str_count)
{
    (void)c;
    const struct jstr *needle = need_str(in, a[0]);
    if (needle->n == 0)
        return v_int((int64_t)text_length(self.s) + 1);
    int64_t n = 0;
    for (size_t at = 0; (at = text_find(in, self.s, needle, at)) != SIZE_MAX; at += needle->n)
        n++;
    return v_int(n);
}

METHOD(str_join)
{
    (void)c;
    const struct jlist *parts = val_elements(in, a[0]);
    for (size_t i = 0; i < parts->n && !in->err; i++)
        (void)need_str(in, parts->v[i]);
    return text_join(in, parts, self.s);
}

/* Whether all characters (at least one) are of a kind. */
static struct val all_chars(struct interp *in, const struct jstr *s, bool (*is)(int32_t))
{
    if (s->n == 0)
        return v_bool(false);
    for (size_t at = 0; at < s->n && jinja_step(in, 1);) {
        int32_t c;
        at += text_char(s->p + at, s->n - at, &c);
        if (!is(c))
            return v_bool(false);
    }
    return v_bool(true);
}

static bool is_digit(int32_t c)
{
    return c >= '0' && c <= '9';
}

METHOD(str_isdigit)
{
    (void)c, (void)a;
    return all_chars(in, self.s, is_digit);
}

METHOD(str_isspace)
{
    (void)c, (void)a;
    return all_chars(in, self.s, text_is_space);
}

static const struct builtin STR_METHODS[] = {
    {"strip", str_strip, "chars="},
    {"lstrip", str_lstrip, "chars="},
    {"rstrip", str_rstrip, "chars="},
    {"split", str_split, "sep= maxsplit="},
    {"rsplit", str_rsplit, "sep= maxsplit="},
    {"splitlines", str_splitlines, ""},
    {"startswith", str_startswith, "prefix"},
    {"endswith", str_endswith, "suffix"},
    {"removeprefix", str_removeprefix, "prefix"},
    {"removesuffix", str_removesuffix, "suffix"},
    {"upper", str_upper, ""},
    {"lower", str_lower, ""},
    {"title", str_title, ""},
    {"capitalize", str_capitalize, ""},
    {"replace", str_replace, "old new count="},
    {"find", str_find, "sub start="},
    {"rfind", str_rfind, "sub"},
    {"index", str_index, "sub start="},
    {"count", str_count, "sub"},
    {"join", str_join, "iterable"},
    {"isdigit", str_isdigit, ""},
    {"isspace", str_isspace, ""},
};

/* -- dicts, lists, loops ----------------------------------------------------------------------- */

static struct val pair(struct interp *in, struct val a, struct val b)
{
    struct jlist *l = list_new(in, LIST_TUPLE);
    list_push(in, l, a);
    list_push(in, l, b);
    return v_list(l);
}

METHOD(dict_items)
{
    (void)c, (void)a;
    struct jlist *l = list_new(in, LIST_PLAIN);
    for (size_t i = 0; i < self.d->n && !in->err; i++)
        list_push(in, l, pair(in, self.d->v[i].key, self.d->v[i].value));
    return v_list(l);
}

METHOD(dict_keys)
{
    (void)c, (void)a;
    return v_list((struct jlist *)(uintptr_t)val_elements(in, self));
}

METHOD(dict_values)
{
    (void)c, (void)a;
    struct jlist *l = list_new(in, LIST_PLAIN);
    for (size_t i = 0; i < self.d->n && !in->err; i++)
        list_push(in, l, self.d->v[i].value);
    return v_list(l);
}

METHOD(dict_get_method)
{
    (void)c;
    const struct val *found = dict_get(in, self.d, a[0]);
    return found ? *found : a[1].kind == K_ABSENT ? v_none() : a[1];
}

METHOD(dict_copy)
{
    (void)c, (void)a;
    struct jdict *d = dict_new(in);
    for (size_t i = 0; i < self.d->n && !in->err; i++)
        dict_set(in, d, self.d->v[i].key, self.d->v[i].value);
    return v_dict(d);
}

METHOD(refuse_change)
{
    (void)c, (void)a;
    return jinja_fail(in, ERR_UNSUPPORTED, "a template cannot change a %s in this way",
                      val_type_name(self));
}

static const struct builtin DICT_METHODS[] = {
    {"items", dict_items, ""},
    {"keys", dict_keys, ""},
    {"values", dict_values, ""},
    {"get", dict_get_method, "key default="},
    {"copy", dict_copy, ""},
    {"clear", refuse_change, NULL},
    {"pop", refuse_change, NULL},
    {"popitem", refuse_change, NULL},
    {"setdefault", refuse_change, NULL},
    {"update", refuse_change, NULL},
};

METHOD(list_append)
{
    (void)c;
    list_push(in, self.l, a[0]);
    return v_none();
}

METHOD(list_index)
{
    (void)c;
    for (size_t i = 0; i < self.l->n && jinja_step(in, 1); i++)
        if (val_equal(in, self.l->v[i], a[0]))
            return v_int((int64_t)i);
    return jinja_fail(in, ERR_CORRUPT, "index: no such element");
}

METHOD(list_count)
{
    (void)c;
    int64_t n = 0;
    for (size_t i = 0; i < self.l->n && jinja_step(in, 1); i++)
        n += val_equal(in, self.l->v[i], a[0]);
    return v_int(n);
}

static const struct builtin LIST_METHODS[] = {
    {"append", list_append, "item"}, {"index", list_index, "item"},
    {"count", list_count, "item"},   {"extend", refuse_change, NULL},
    {"insert", refuse_change, NULL}, {"pop", refuse_change, NULL},
    {"remove", refuse_change, NULL}, {"reverse", refuse_change, NULL},
    {"sort", refuse_change, NULL},   {"clear", refuse_change, NULL},
};

METHOD(loop_cycle)
{
    (void)a;
    if (c->n_pos == 0)
        return jinja_fail(in, ERR_CORRUPT, "cycle needs arguments");
    return c->pos[self.loop->index0 % c->n_pos];
}

static const struct builtin LOOP_METHODS[] = {{"cycle", loop_cycle, NULL}};

static const struct builtin *find(const struct builtin *table, size_t n, const struct jstr *name)
{
    for (size_t i = 0; i < n; i++)
        if (jstr_is(name, table[i].name))
            return &table[i];
    return NULL;
}

const struct builtin *jinja_method(enum kind kind, const struct jstr *name)
{
    switch (kind) {
    case K_STR:
        return find(STR_METHODS, ARRAY_LEN(STR_METHODS), name);
    case K_DICT:
        return find(DICT_METHODS, ARRAY_LEN(DICT_METHODS), name);
    case K_LIST:
        return find(LIST_METHODS, ARRAY_LEN(LIST_METHODS), name);
    case K_LOOP:
        return find(LOOP_METHODS, ARRAY_LEN(LOOP_METHODS), name);
    default:
        return NULL;
    }
}

/* -- functions --------------------------------------------------------------------------------- */

enum { RANGE_MAX = 100000 }; /* as the sandbox of Jinja has it */

METHOD(fn_range)
{
    (void)self, (void)c;
    bool one = a[1].kind == K_ABSENT;
    int64_t start = one ? 0 : opt_int(in, a[0], 0), stop = opt_int(in, one ? a[0] : a[1], 0);
    int64_t step = opt_int(in, a[2], 1);
    if (step == 0 || step == INT64_MIN)
        return jinja_fail(in, ERR_CORRUPT, "range: no such step");
    struct jlist *l = list_new(in, LIST_PLAIN);
    for (int64_t i = start; (step > 0 ? i < stop : i > stop) && !in->err;) {
        if (l->n == RANGE_MAX)
            return jinja_fail(in, ERR_LIMIT, "range: more than %d numbers", RANGE_MAX);
        list_push(in, l, v_int(i));
        if (add_overflows(i, step, &i))
            break;
    }
    return v_list(l);
}

static struct jdict *dict_of_call(struct interp *in, const struct call *c)
{
    struct jdict *d = dict_new(in);
    if (c->n_pos > 1 || (c->n_pos == 1 && c->pos[0].kind != K_DICT))
        (void)jinja_fail(in, ERR_UNSUPPORTED, "only a dict and named values can be given here");
    else if (c->n_pos == 1)
        for (size_t i = 0; i < c->pos[0].d->n && !in->err; i++)
            dict_set(in, d, c->pos[0].d->v[i].key, c->pos[0].d->v[i].value);
    for (uint32_t i = 0; i < c->n_kw && !in->err; i++)
        dict_set(in, d, (struct val){.kind = K_STR, .s = c->names[i]}, c->kw[i]);
    return d;
}

METHOD(fn_dict)
{
    (void)self, (void)a;
    return v_dict(dict_of_call(in, c));
}

METHOD(fn_namespace)
{
    (void)self, (void)a;
    return (struct val){.kind = K_NAMESPACE, .d = dict_of_call(in, c)};
}

METHOD(fn_raise_exception)
{
    (void)self, (void)c;
    const struct jstr *message = val_to_str(in, a[0]);
    if (!in->err) {
        in->err = ERR_INVALID;
        (void)err_set(in->text, ERR_INVALID, "%.*s", (int)MIN_OF(message->n, (size_t)ERR_TEXT_MAX),
                      message->p);
    }
    return v_undefined();
}

METHOD(fn_strftime_now)
{
    (void)self, (void)c;
    char format[128], text[512];
    const struct jstr *s = need_str(in, a[0]);
    if (s->n >= sizeof format || memchr(s->p, 0, s->n))
        return jinja_fail(in, ERR_LIMIT, "strftime_now: the format is too long");
    memcpy(format, s->p, s->n);
    format[s->n] = 0;
    size_t n = strftime(text, sizeof text, format, in->now);
    struct sink k = {0};
    sink_put(in, &k, text, n, NULL);
    return sink_val(in, &k);
}

const struct builtin *jinja_function(const struct interp *in, const struct jstr *name)
{
    static const struct builtin FUNCTIONS[] = {
        {"range", fn_range, "start stop= step="},
        {"dict", fn_dict, NULL},
        {"namespace", fn_namespace, NULL},
        {"raise_exception", fn_raise_exception, "message"},
        {"strftime_now", fn_strftime_now, "format"},
    };
    const struct builtin *fn = find(FUNCTIONS, ARRAY_LEN(FUNCTIONS), name);
    return fn && fn->fn == fn_strftime_now && !in->now ? NULL : fn;
}
