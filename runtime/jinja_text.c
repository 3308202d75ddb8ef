/* Template interpreter: characters, case, stripping, searching. Marks travel with the bytes. */
#include "runtime/jinja.h"

#include "base/util.h"

#include <utf8proc.h>

size_t text_char(const char *p, size_t n, int32_t *ret_c)
{
    const uint8_t *b = (const uint8_t *)p;
    if (b[0] < 0x80) {
        *ret_c = b[0];
        return 1;
    }
    utf8proc_int32_t c;
    utf8proc_ssize_t used = utf8proc_iterate(b, n > 4 ? 4 : (utf8proc_ssize_t)n, &c);
    if (used <= 0) {
        *ret_c = -1;
        return 1;
    }
    *ret_c = c;
    return (size_t)used;
}

size_t text_encode(int32_t c, char ret[4])
{
    if (c < 0 || c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
        c = 0xfffd;
    return (size_t)utf8proc_encode_char(c, (utf8proc_uint8_t *)ret);
}

size_t text_length(const struct jstr *s)
{
    size_t n = 0;
    for (size_t at = 0; at < s->n; n++) {
        int32_t c;
        at += text_char(s->p + at, s->n - at, &c);
    }
    return n;
}

size_t text_offset(const struct jstr *s, size_t index)
{
    size_t at = 0;
    for (; index > 0 && at < s->n; index--) {
        int32_t c;
        at += text_char(s->p + at, s->n - at, &c);
    }
    return at;
}

/* str.isspace of Python */
bool text_is_space(int32_t c)
{
    return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

static bool in_set(const char *p, size_t n, const struct jstr *chars)
{
    int32_t c;
    if (!chars) {
        (void)text_char(p, n, &c);
        return text_is_space(c);
    }
    for (size_t at = 0; at < chars->n;) {
        size_t used = text_char(chars->p + at, chars->n - at, &c);
        if (used == n && memcmp(chars->p + at, p, n) == 0)
            return true;
        at += used;
    }
    return false;
}

/* The start of the last character of p[from, to). */
static size_t last_char(const char *p, size_t from, size_t to)
{
    for (size_t back = 1; back <= 4 && to - from >= back; back++) {
        int32_t c;
        if (text_char(p + to - back, back, &c) == back && (back == 1 || c >= 0))
            if (back > 1 || (uint8_t)p[to - 1] < 0x80)
                return to - back;
    }
    return to - 1;
}

struct val text_strip(struct interp *in, const struct jstr *s, const struct jstr *chars,
                      enum strip_sides sides)
{
    size_t from = 0, to = s->n;
    uint64_t cost = 1 + (chars ? chars->n / 16 : 0);
    while ((sides & STRIP_LEFT) && from < to && jinja_step(in, cost)) {
        int32_t c;
        size_t n = text_char(s->p + from, to - from, &c);
        if (!in_set(s->p + from, n, chars))
            break;
        from += n;
    }
    while ((sides & STRIP_RIGHT) && from < to && jinja_step(in, cost)) {
        size_t at = last_char(s->p, from, to);
        if (!in_set(s->p + at, to - at, chars))
            break;
        to = at;
    }
    return v_sub(in, s, from, to);
}

static void put_char(struct interp *in, struct sink *k, int32_t c, const uint8_t *mark)
{
    char bytes[4];
    uint8_t marks[4];
    size_t n = text_encode(c, bytes);
    if (mark)
        memset(marks, *mark, n);
    sink_put(in, k, bytes, n, mark ? marks : NULL);
}

static bool is_letter(int32_t c)
{
    if (c < 0)
        return false;
    utf8proc_category_t k = utf8proc_category(c);
    return k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT;
}

/* Whether the character after `before` starts a word, for the two kinds of title. */
static bool starts_word(enum text_case how, int32_t before, size_t at)
{
    if (at == 0)
        return true;
    if (how == CASE_TITLE)
        return !is_letter(before);
    if (how == CASE_TITLE_FILTER)
        return text_is_space(before) || before == '-' || before == '(' || before == '{' ||
               before == '[' || before == '<';
    return false;
}

struct val text_case(struct interp *in, const struct jstr *s, enum text_case how)
{
    struct sink k = {0};
    int32_t before = 0;
    for (size_t at = 0; at < s->n && jinja_step(in, 1);) {
        int32_t c;
        size_t n = text_char(s->p + at, s->n - at, &c);
        const uint8_t *mark = s->mark ? s->mark + at : NULL;
        bool upper = how == CASE_UPPER || (how != CASE_LOWER && starts_word(how, before, at));
        if (c < 0)
            sink_put(in, &k, s->p + at, n, mark);
        else if (upper && c == 0xdf) { /* sharp s has no capital of its own */
            put_char(in, &k, 'S', mark);
            put_char(in, &k, how == CASE_UPPER || how == CASE_TITLE_FILTER ? 'S' : 's', mark);
        } else if (upper)
            put_char(in, &k,
                     how == CASE_UPPER || how == CASE_TITLE_FILTER ? utf8proc_toupper(c)
                                                                   : utf8proc_totitle(c),
                     mark);
        else {
            put_char(in, &k, c == 0x130 ? 'i' : utf8proc_tolower(c), mark);
            if (c == 0x130) /* dotted capital I keeps its dot, as a mark of its own */
                put_char(in, &k, 0x307, mark);
        }
        before = c;
        at += n;
    }
    return sink_val(in, &k);
}

size_t text_find(struct interp *in, const struct jstr *s, const struct jstr *needle, size_t from)
{
    if (needle->n == 0)
        return from <= s->n ? from : SIZE_MAX;
    while (from <= s->n && s->n - from >= needle->n) {
        const char *first = memchr(s->p + from, needle->p[0], s->n - from - needle->n + 1);
        size_t at = first ? (size_t)(first - s->p) : s->n;
        if (!jinja_step(in, 1 + (at - from) / 64) || !first)
            return SIZE_MAX;
        size_t same = 1;
        while (same < needle->n && s->p[at + same] == needle->p[same])
            same++;
        if (same == needle->n)
            return at;
        if (!jinja_step(in, same / 16))
            return SIZE_MAX;
        from = at + 1;
    }
    return SIZE_MAX;
}

/* str.replace with an empty `from`: between all characters. */
static struct val replace_empty(struct interp *in, const struct jstr *s, const struct jstr *to,
                                int64_t count)
{
    struct sink k = {0};
    size_t at = 0;
    for (; count != 0 && !in->err; count--) {
        sink_put_str(in, &k, to);
        if (at >= s->n)
            break;
        int32_t c;
        size_t n = text_char(s->p + at, s->n - at, &c);
        sink_put(in, &k, s->p + at, n, s->mark ? s->mark + at : NULL);
        at += n;
        if (!jinja_step(in, 1))
            break;
    }
    sink_put(in, &k, s->p + at, s->n - at, s->mark ? s->mark + at : NULL);
    return sink_val(in, &k);
}

struct val text_replace(struct interp *in, const struct jstr *s, const struct jstr *from,
                        const struct jstr *to, int64_t count)
{
    if (from->n == 0)
        return replace_empty(in, s, to, count);
    struct sink k = {0};
    size_t done = 0;
    for (; count != 0; count--) {
        size_t at = text_find(in, s, from, done);
        if (at == SIZE_MAX)
            break;
        sink_put(in, &k, s->p + done, at - done, s->mark ? s->mark + done : NULL);
        sink_put_str(in, &k, to);
        done = at + from->n;
    }
    if (done == 0)
        return v_sub(in, s, 0, s->n);
    sink_put(in, &k, s->p + done, s->n - done, s->mark ? s->mark + done : NULL);
    return sink_val(in, &k);
}

/* str.splitlines */
struct jlist *text_lines(struct interp *in, const struct jstr *s)
{
    struct jlist *l = list_new(in, LIST_PLAIN);
    size_t start = 0;
    for (size_t at = 0; at < s->n && jinja_step(in, 1);) {
        int32_t c;
        size_t n = text_char(s->p + at, s->n - at, &c);
        bool end = (c >= 10 && c <= 13) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
                   c == 0x2029;
        if (end) {
            list_push(in, l, v_sub(in, s, start, at));
            if (c == '\r' && at + 1 < s->n && s->p[at + 1] == '\n')
                n = 2;
            start = at + n;
        }
        at += n;
    }
    if (start < s->n)
        list_push(in, l, v_sub(in, s, start, s->n));
    return l;
}

struct val text_join(struct interp *in, const struct jlist *parts, const struct jstr *between)
{
    struct sink k = {0};
    for (size_t i = 0; i < parts->n && jinja_step(in, 1); i++) {
        if (i > 0 && between)
            sink_put_str(in, &k, between);
        val_print(in, &k, parts->v[i]);
    }
    return sink_val(in, &k);
}
