/* Template interpreter: filters of single values; those over sequences are in jinja_sequence.c. */
#include "runtime/jinja.h"

#include "base/util.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define FILTER(name)                                                                               \
    static struct val name(struct interp *in, struct val self, const struct call *c,               \
                           const struct val *a)

static bool absent(struct val v)
{
    return v.kind == K_ABSENT || v.kind == K_NONE;
}

static bool flag(struct val v)
{
    return v.kind != K_ABSENT && val_truthy(v);
}

FILTER(f_default)
{
    (void)c;
    bool missing = self.kind == K_UNDEFINED || (flag(a[1]) && !val_truthy(self));
    return !missing ? self : a[0].kind == K_ABSENT ? v_literal(in, "") : a[0];
}

FILTER(f_trim)
{
    (void)c;
    return text_strip(in, val_to_str(in, self), absent(a[0]) ? NULL : val_to_str(in, a[0]),
                      STRIP_BOTH);
}

FILTER(f_upper)
{
    (void)c, (void)a;
    return text_case(in, val_to_str(in, self), CASE_UPPER);
}

FILTER(f_lower)
{
    (void)c, (void)a;
    return text_case(in, val_to_str(in, self), CASE_LOWER);
}

FILTER(f_title)
{
    (void)c, (void)a;
    return text_case(in, val_to_str(in, self), CASE_TITLE_FILTER);
}

FILTER(f_capitalize)
{
    (void)c, (void)a;
    return text_case(in, val_to_str(in, self), CASE_CAPITALIZE);
}

FILTER(f_string)
{
    (void)c, (void)a;
    return (struct val){.kind = K_STR, .s = val_to_str(in, self)};
}

FILTER(f_safe)
{
    return f_string(in, self, c, a);
}

FILTER(f_replace)
{
    (void)c;
    int64_t count = -1;
    if (a[2].kind == K_INT)
        count = a[2].i;
    else if (!absent(a[2]))
        return jinja_fail(in, ERR_CORRUPT, "replace: the count must be a whole number");
    return text_replace(in, val_to_str(in, self), val_to_str(in, a[0]), val_to_str(in, a[1]),
                        count);
}

FILTER(f_escape)
{
    (void)c, (void)a;
    const struct jstr *s = val_to_str(in, self);
    struct sink k = {0};
    for (size_t i = 0; i < s->n && jinja_step(in, 1); i++) {
        const char *e = s->p[i] == '&'    ? "&amp;"
                        : s->p[i] == '<'  ? "&lt;"
                        : s->p[i] == '>'  ? "&gt;"
                        : s->p[i] == '"'  ? "&#34;"
                        : s->p[i] == '\'' ? "&#39;"
                                          : NULL;
        uint8_t marks[8];
        if (s->mark)
            memset(marks, s->mark[i], sizeof marks);
        sink_put(in, &k, e ? e : s->p + i, e ? strlen(e) : 1, s->mark ? marks : NULL);
    }
    return sink_val(in, &k);
}

static const struct jstr *spaces(struct interp *in, int64_t n)
{
    struct sink k = {0};
    for (int64_t i = 0; i < n && jinja_step(in, 1); i++)
        sink_put(in, &k, " ", 1, NULL);
    return sink_val(in, &k).s;
}

/* A width: a number of blanks, or the text itself. */
static const struct jstr *width_of(struct interp *in, struct val v, int64_t usual)
{
    if (v.kind == K_STR)
        return v.s;
    if (v.kind != K_INT && v.kind != K_BOOL && v.kind != K_ABSENT)
        (void)jinja_fail(in, ERR_CORRUPT, "the width must be a number or a string");
    return spaces(in, v.kind == K_INT ? v.i : v.kind == K_BOOL ? v.b : usual);
}

FILTER(f_indent)
{
    (void)c;
    const struct jstr *s = val_to_str(in, self), *width = width_of(in, a[0], 4);
    struct sink with_end = {0}, k = {0};
    sink_put_str(in, &with_end, s);
    sink_puts(in, &with_end, "\n"); /* so that a newline at the end is kept, as Jinja does */
    const struct jlist *lines = text_lines(in, sink_val(in, &with_end).s);
    if (flag(a[1]))
        sink_put_str(in, &k, width);
    for (size_t i = 0; i < lines->n && jinja_step(in, 1); i++) {
        if (i > 0)
            sink_puts(in, &k, "\n");
        if (i > 0 && (lines->v[i].s->n > 0 || flag(a[2])))
            sink_put_str(in, &k, width);
        sink_put_str(in, &k, lines->v[i].s);
    }
    return sink_val(in, &k);
}

FILTER(f_tojson)
{
    (void)c;
    struct json_style style = {.ensure_ascii = flag(a[0]), .sort_keys = flag(a[3])};
    if (!absent(a[1]))
        style.indent = width_of(in, a[1], 0);
    if (!absent(a[2])) {
        const struct jlist *pair = val_elements(in, a[2]);
        if (in->err || pair->n != 2 || pair->v[0].kind != K_STR || pair->v[1].kind != K_STR)
            return jinja_fail(in, ERR_CORRUPT, "tojson: separators must be two strings");
        style.item_separator = pair->v[0].s;
        style.key_separator = pair->v[1].s;
    }
    struct sink k = {0};
    val_json(in, &k, self, &style);
    return sink_val(in, &k);
}

/* -- numbers ----------------------------------------------------------------------------------- */

/* The text without white space around it and without "_", NUL-terminated; false when too long. */
static bool number_text(struct interp *in, const struct jstr *s, char *ret, size_t room)
{
    const struct jstr *t = text_strip(in, s, NULL, STRIP_BOTH).s;
    size_t n = 0;
    for (size_t i = 0; i < t->n; i++) {
        if (n + 1 >= room || t->p[i] == 0)
            return false;
        if (t->p[i] != '_')
            ret[n++] = t->p[i];
    }
    ret[n] = 0;
    return n > 0;
}

static bool parse_float(struct interp *in, const struct jstr *s, double *ret)
{
    char text[512], *end;
    if (!number_text(in, s, text, sizeof text) || strpbrk(text, "xXpP("))
        return false;
    *ret = strtod(text, &end);
    return *end == 0;
}

static bool parse_int(struct interp *in, const struct jstr *s, int base, int64_t *ret)
{
    char text[512], *p = text, *end;
    if (!number_text(in, s, text, sizeof text))
        return false;
    bool negative = *p == '-';
    p += *p == '-' || *p == '+';
    char kind = (char)(p[0] == '0' ? p[1] | 0x20 : 0);
    if ((base == 16 && kind == 'x') || (base == 8 && kind == 'o') || (base == 2 && kind == 'b'))
        p += 2;
    if (*p == '-' || *p == '+' || *p == ' ' || *p == 0 || (p[0] == '0' && kind == 'x'))
        return false;
    unsigned long long value = strtoull(p, &end, base);
    if (*end)
        return false;
    if (value > INT64_MAX) {
        (void)jinja_fail(in, ERR_CORRUPT, "a number does not fit 64 bits");
        return false;
    }
    *ret = negative ? -(int64_t)value : (int64_t)value;
    return true;
}

static struct val int_of_float(struct interp *in, double f, struct val otherwise)
{
    if (!isfinite(f))
        return otherwise;
    if (fabs(f) >= 9.2e18)
        return jinja_fail(in, ERR_CORRUPT, "a number does not fit 64 bits");
    return v_int((int64_t)f);
}

FILTER(f_int)
{
    (void)c;
    struct val otherwise = a[0].kind == K_ABSENT ? v_int(0) : a[0];
    int64_t base = a[1].kind == K_INT ? a[1].i : 10, i;
    double f;
    if (base < 2 || base > 36)
        return jinja_fail(in, ERR_CORRUPT, "int: no such base");
    switch (self.kind) {
    case K_INT:
    case K_BOOL:
        return v_int(self.kind == K_INT ? self.i : self.b);
    case K_FLOAT:
        return int_of_float(in, self.f, otherwise);
    case K_STR:
        if (parse_int(in, self.s, (int)base, &i))
            return v_int(i);
        return parse_float(in, self.s, &f) ? int_of_float(in, f, otherwise) : otherwise;
    case K_UNDEFINED:
        return val_attr(in, self, &in->nil_str);
    default:
        return otherwise;
    }
}

FILTER(f_float)
{
    (void)c;
    double f;
    if (val_is_number(self))
        return v_float(val_number(self));
    if (self.kind == K_UNDEFINED)
        return val_attr(in, self, &in->nil_str);
    if (self.kind == K_STR && parse_float(in, self.s, &f))
        return v_float(f);
    return a[0].kind == K_ABSENT ? v_float(0) : a[0];
}

FILTER(f_abs)
{
    (void)c, (void)a;
    if (self.kind == K_FLOAT)
        return v_float(fabs(self.f));
    return val_order(in, self, v_int(0)) < 0 ? val_negate(in, self)
           : self.kind == K_BOOL             ? v_int(self.b)
                                             : self;
}

FILTER(f_round)
{
    (void)c;
    int64_t precision = a[0].kind == K_INT ? a[0].i : 0;
    const struct jstr *method = a[1].kind == K_ABSENT ? NULL : val_to_str(in, a[1]);
    if (!val_is_number(self) || precision < -300 || precision > 300)
        return jinja_fail(in, ERR_CORRUPT, "round: a %s, or no such precision",
                          val_type_name(self));
    double f = val_number(self), scale = pow(10, (double)precision);
    if (method && jstr_is(method, "ceil"))
        return v_float(ceil(f * scale) / scale);
    if (method && jstr_is(method, "floor"))
        return v_float(floor(f * scale) / scale);
    if (method && !jstr_is(method, "common"))
        return jinja_fail(in, ERR_CORRUPT, "round: no such method");
    if (self.kind != K_FLOAT && precision >= 0)
        return self.kind == K_INT ? self : v_int(self.b);
    if (!isfinite(f) || fabs(f) >= 1e17)
        return self;
    if (precision < 0) {
        double r = nearbyint(f * scale) / scale;
        return self.kind == K_FLOAT ? v_float(r) : v_int((int64_t)r);
    }
    char text[400]; /* printf rounds the exact value, as Python does */
    (void)snprintf(text, sizeof text, "%.*f", (int)MIN_OF(precision, (int64_t)300), f);
    return v_float(strtod(text, NULL));
}

const struct builtin *jinja_filter(const struct jstr *name)
{
    static const struct builtin FILTERS[] = {
        {"default", f_default, "default_value= boolean="},
        {"d", f_default, "default_value= boolean="},
        {"trim", f_trim, "chars="},
        {"upper", f_upper, ""},
        {"lower", f_lower, ""},
        {"title", f_title, ""},
        {"capitalize", f_capitalize, ""},
        {"string", f_string, ""},
        {"safe", f_safe, ""},
        {"replace", f_replace, "old new count="},
        {"escape", f_escape, ""},
        {"e", f_escape, ""},
        {"indent", f_indent, "width= first= blank="},
        {"tojson", f_tojson, "ensure_ascii= indent= separators= sort_keys="},
        {"int", f_int, "default= base="},
        {"float", f_float, "default="},
        {"abs", f_abs, ""},
        {"round", f_round, "precision= method="},
    };
    for (size_t i = 0; i < ARRAY_LEN(FILTERS); i++)
        if (jstr_is(name, FILTERS[i].name))
            return &FILTERS[i];
    for (size_t i = 0; JINJA_SEQUENCE_FILTERS[i].name; i++)
        if (jstr_is(name, JINJA_SEQUENCE_FILTERS[i].name))
            return &JINJA_SEQUENCE_FILTERS[i];
    return NULL;
}
