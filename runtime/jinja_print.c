/* Template interpreter: how values look as text, as Python literals and as JSON. */
#include "runtime/jinja.h"

#include "base/util.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

/* The shortest decimal that reads back as the same number, laid out as Python's repr. */
void print_float(double f, char ret[40])
{
    if (!isfinite(f)) {
        (void)snprintf(ret, 40, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    char e[40];
    for (int digits = 0; digits <= 16; digits++) {
        (void)snprintf(e, sizeof e, "%.*e", digits, f);
        if (strtod(e, NULL) == f)
            break;
    }
    char mantissa[24] = "";
    size_t n = 0;
    const char *p = e;
    char *out = ret;
    if (*p == '-')
        *out++ = *p++;
    for (; *p && *p != 'e'; p++)
        if (*p >= '0' && *p <= '9' && n < sizeof mantissa)
            mantissa[n++] = *p;
    int exponent = (int)strtol(p + 1, NULL, 10);
    if (exponent < -4 || exponent >= 16) {
        *out++ = mantissa[0];
        if (n > 1) {
            *out++ = '.';
            memcpy(out, mantissa + 1, n - 1);
            out += n - 1;
        }
        (void)snprintf(out, 14, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    if (exponent < 0) {
        *out++ = '0';
        *out++ = '.';
        for (int i = -1; i > exponent; i--)
            *out++ = '0';
    }
    for (int i = 0; i < (int)n || i <= exponent; i++) {
        *out++ = (char)(i < (int)n ? mantissa[i] : '0');
        if (i == exponent && exponent >= 0) {
            *out++ = '.';
            if (i + 1 >= (int)n)
                *out++ = '0';
        }
    }
    *out = 0;
}

static bool is_printable(int32_t c)
{
    if (c < 0)
        return false;
    switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return c == ' ';
    default:
        return true;
    }
}

static void put_escape(struct interp *in, struct sink *k, const char *escape, const uint8_t *mark)
{
    uint8_t marks[16];
    size_t n = MIN_OF(strlen(escape), sizeof marks);
    if (mark)
        memset(marks, *mark, n);
    sink_put(in, k, escape, n, mark ? marks : NULL);
}

static void repr_str(struct interp *in, struct sink *k, const struct jstr *s)
{
    bool has_single = s->n && memchr(s->p, '\'', s->n),
         has_double = s->n && memchr(s->p, '"', s->n);
    char quote = has_single && !has_double ? '"' : '\'';
    sink_put(in, k, &quote, 1, NULL);
    for (size_t at = 0; at < s->n && jinja_step(in, 1);) {
        int32_t c;
        size_t n = text_char(s->p + at, s->n - at, &c);
        const uint8_t *mark = s->mark ? s->mark + at : NULL;
        char e[16] = "";
        if (c == '\\' || c == quote)
            (void)snprintf(e, sizeof e, "\\%c", (char)c);
        else if (c == '\n' || c == '\r' || c == '\t')
            (void)snprintf(e, sizeof e, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
        else if (c < 0)
            (void)snprintf(e, sizeof e, "\\x%02x", (unsigned)(uint8_t)s->p[at]);
        else if (!is_printable(c))
            (void)snprintf(e, sizeof e,
                           c < 0x100     ? "\\x%02x"
                           : c < 0x10000 ? "\\u%04x"
                                         : "\\U%08x",
                           (unsigned)c);
        if (e[0])
            put_escape(in, k, e, mark);
        else
            sink_put(in, k, s->p + at, n, mark);
        at += n;
    }
    sink_put(in, k, &quote, 1, NULL);
}

static void repr_list(struct interp *in, struct sink *k, const struct jlist *l)
{
    if (l->kind == LIST_LAZY) {
        sink_puts(in, k, "<generator object>");
        return;
    }
    sink_puts(in, k, l->kind == LIST_TUPLE ? "(" : "[");
    for (size_t i = 0; i < l->n && jinja_step(in, 1); i++) {
        if (i > 0)
            sink_puts(in, k, ", ");
        val_repr(in, k, l->v[i]);
    }
    sink_puts(in, k, l->kind != LIST_TUPLE ? "]" : l->n == 1 ? ",)" : ")");
}

static void repr_dict(struct interp *in, struct sink *k, const struct jdict *d)
{
    sink_puts(in, k, "{");
    for (size_t i = 0; i < d->n && jinja_step(in, 1); i++) {
        if (i > 0)
            sink_puts(in, k, ", ");
        val_repr(in, k, d->v[i].key);
        sink_puts(in, k, ": ");
        val_repr(in, k, d->v[i].value);
    }
    sink_puts(in, k, "}");
}

/* Everything but strings and containers, which look alike as text and as a literal. */
static void print_scalar(struct interp *in, struct sink *k, struct val v)
{
    char text[48];
    switch (v.kind) {
    case K_NONE:
        sink_puts(in, k, "None");
        break;
    case K_BOOL:
        sink_puts(in, k, v.b ? "True" : "False");
        break;
    case K_INT:
        (void)snprintf(text, sizeof text, "%" PRId64, v.i);
        sink_puts(in, k, text);
        break;
    case K_FLOAT:
        print_float(v.f, text);
        sink_puts(in, k, text);
        break;
    case K_MACRO:
        sink_puts(in, k, "<macro>");
        break;
    case K_METHOD:
        sink_puts(in, k, "<method>");
        break;
    case K_LOOP:
        sink_puts(in, k, "<loop>");
        break;
    default:
        break;
    }
}

void val_repr(struct interp *in, struct sink *k, struct val v)
{
    if (!jinja_step(in, 1))
        return;
    if (++in->depth > in->limits->depth_max) {
        (void)jinja_fail(in, ERR_LIMIT, "a value is nested too deeply");
        return;
    }
    if (v.kind == K_STR)
        repr_str(in, k, v.s);
    else if (v.kind == K_UNDEFINED)
        sink_puts(in, k, "Undefined");
    else if (v.kind == K_LIST)
        repr_list(in, k, v.l);
    else if (v.kind == K_DICT)
        repr_dict(in, k, v.d);
    else if (v.kind == K_NAMESPACE) {
        sink_puts(in, k, "<Namespace ");
        repr_dict(in, k, v.d);
        sink_puts(in, k, ">");
    } else
        print_scalar(in, k, v);
    in->depth--;
}

void val_print(struct interp *in, struct sink *k, struct val v)
{
    if (v.kind == K_STR)
        sink_put_str(in, k, v.s);
    else if (v.kind != K_UNDEFINED)
        val_repr(in, k, v);
}

const struct jstr *val_to_str(struct interp *in, struct val v)
{
    if (v.kind == K_STR)
        return v.s;
    struct sink k = {0};
    val_print(in, &k, v);
    return sink_val(in, &k).s;
}

/* -- JSON -------------------------------------------------------------------------------------- */

static void json_escape(struct interp *in, struct sink *k, int32_t c, const uint8_t *mark)
{
    static const char SHORT[][2] = {{'"', '"'},  {'\\', '\\'}, {'\n', 'n'}, {'\r', 'r'},
                                    {'\t', 't'}, {'\f', 'f'},  {'\b', 'b'}};
    char e[16];
    for (size_t i = 0; i < ARRAY_LEN(SHORT); i++)
        if (c == SHORT[i][0]) {
            (void)snprintf(e, sizeof e, "\\%c", SHORT[i][1]);
            put_escape(in, k, e, mark);
            return;
        }
    if (c < 0x10000)
        (void)snprintf(e, sizeof e, "\\u%04x", (unsigned)c);
    else
        (void)snprintf(e, sizeof e, "\\u%04x\\u%04x", 0xd800u + (((unsigned)c - 0x10000u) >> 10),
                       0xdc00u + (((unsigned)c - 0x10000u) & 0x3ffu));
    put_escape(in, k, e, mark);
}

static void json_put_str(struct interp *in, struct sink *k, const struct jstr *s,
                         const struct json_style *style)
{
    sink_puts(in, k, "\"");
    size_t done = 0;
    for (size_t at = 0; at < s->n && jinja_step(in, 1);) {
        int32_t c;
        size_t n = text_char(s->p + at, s->n - at, &c);
        bool plain = c >= 0x20 && c != '"' && c != '\\' && (c < 0x7f || !style->ensure_ascii);
        if (!plain && c >= 0) {
            sink_put(in, k, s->p + done, at - done, s->mark ? s->mark + done : NULL);
            json_escape(in, k, c, s->mark ? s->mark + at : NULL);
            done = at + n;
        }
        at += n;
    }
    sink_put(in, k, s->p + done, s->n - done, s->mark ? s->mark + done : NULL);
    sink_puts(in, k, "\"");
}

static void json_newline(struct interp *in, struct sink *k, const struct json_style *style,
                         uint32_t level)
{
    if (!style->indent)
        return;
    sink_puts(in, k, "\n");
    for (uint32_t i = 0; i < level && jinja_step(in, 1); i++)
        sink_put_str(in, k, style->indent);
}

static void json_value(struct interp *in, struct sink *k, struct val v,
                       const struct json_style *style, uint32_t level);

static void json_separator(struct interp *in, struct sink *k, const struct json_style *style)
{
    if (style->item_separator)
        sink_put_str(in, k, style->item_separator);
    else
        sink_puts(in, k, style->indent ? "," : ", ");
}

static void json_list(struct interp *in, struct sink *k, const struct jlist *l,
                      const struct json_style *style, uint32_t level)
{
    sink_puts(in, k, "[");
    for (size_t i = 0; i < l->n && jinja_step(in, 1); i++) {
        if (i > 0)
            json_separator(in, k, style);
        json_newline(in, k, style, level + 1);
        json_value(in, k, l->v[i], style, level + 1);
    }
    if (l->n)
        json_newline(in, k, style, level);
    sink_puts(in, k, "]");
}

/* Keys are strings in JSON: json.dumps turns numbers, booleans and None into theirs. */
static void json_key(struct interp *in, struct sink *k, struct val key,
                     const struct json_style *style)
{
    if (key.kind == K_STR) {
        json_put_str(in, k, key.s, style);
        return;
    }
    if (key.kind != K_INT && key.kind != K_FLOAT && key.kind != K_BOOL && key.kind != K_NONE) {
        (void)jinja_fail(in, ERR_CORRUPT, "tojson: a %s cannot be a key", val_type_name(key));
        return;
    }
    sink_puts(in, k, "\"");
    json_value(in, k, key, style, 0);
    sink_puts(in, k, "\"");
}

static void json_dict(struct interp *in, struct sink *k, const struct jdict *d,
                      const struct json_style *style, uint32_t level)
{
    sink_puts(in, k, "{");
    for (size_t i = 0; i < d->n && jinja_step(in, 1); i++) {
        if (i > 0)
            json_separator(in, k, style);
        json_newline(in, k, style, level + 1);
        json_key(in, k, d->v[i].key, style);
        if (style->key_separator)
            sink_put_str(in, k, style->key_separator);
        else
            sink_puts(in, k, ": ");
        json_value(in, k, d->v[i].value, style, level + 1);
    }
    if (d->n)
        json_newline(in, k, style, level);
    sink_puts(in, k, "}");
}

/* A copy with its entries in the order of their keys. */
static const struct jdict *sorted(struct interp *in, const struct jdict *d)
{
    struct jdict *copy = dict_new(in);
    for (size_t i = 0; i < d->n && !in->err; i++)
        dict_set(in, copy, d->v[i].key, d->v[i].value);
    /* insertion sort: sort_keys is rare and such objects are small; steps bound it */
    for (size_t i = 1; i < copy->n && !in->err; i++)
        for (size_t j = i;
             j > 0 && jinja_step(in, 1) && val_order(in, copy->v[j].key, copy->v[j - 1].key) < 0;
             j--) {
            struct jentry e = copy->v[j];
            copy->v[j] = copy->v[j - 1];
            copy->v[j - 1] = e;
        }
    return copy;
}

static void json_value(struct interp *in, struct sink *k, struct val v,
                       const struct json_style *style, uint32_t level)
{
    if (!jinja_step(in, 1))
        return;
    if (++in->depth > in->limits->depth_max) {
        (void)jinja_fail(in, ERR_LIMIT, "tojson: a value is nested too deeply");
        return;
    }
    if (v.kind == K_STR)
        json_put_str(in, k, v.s, style);
    else if (v.kind == K_LIST && v.l->kind != LIST_LAZY)
        json_list(in, k, v.l, style, level);
    else if (v.kind == K_DICT)
        json_dict(in, k, style->sort_keys ? sorted(in, v.d) : v.d, style, level);
    else if (v.kind == K_BOOL)
        sink_puts(in, k, v.b ? "true" : "false");
    else if (v.kind == K_NONE)
        sink_puts(in, k, "null");
    else if (v.kind == K_FLOAT && !isfinite(v.f))
        sink_puts(in, k, isnan(v.f) ? "NaN" : v.f < 0 ? "-Infinity" : "Infinity");
    else if (v.kind == K_INT || v.kind == K_FLOAT)
        print_scalar(in, k, v);
    else
        (void)jinja_fail(in, ERR_CORRUPT, "tojson: a %s has no JSON form", val_type_name(v));
    in->depth--;
}

void val_json(struct interp *in, struct sink *k, struct val v, const struct json_style *style)
{
    json_value(in, k, v, style, 0);
}
