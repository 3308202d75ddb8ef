/* Template interpreter: source text to tokens. Newlines are normalised, one newline at the end of
 * the source is dropped, and white space around tags goes as trim_blocks, lstrip_blocks, "-" and
 * "+" say (jinja2/lexer.py describes the order in which these act). */
#include "runtime/jinja.h"

#include "base/util.h"

#include <stdlib.h>

struct lexer {
    struct arena *arena;
    const char *p; /* normalised source */
    size_t n, at;
    size_t line_at; /* `line` is the line of this offset */
    uint32_t line;
    struct token *tokens;
    size_t n_tokens, cap;
    struct err_text *text;
    enum err err;
};

static void lex_fail(struct lexer *x, enum err e, const char *what)
{
    if (!x->err)
        x->err = err_set(x->text, e, "chat template, line %u: %s", x->line, what);
}

static void count_lines(struct lexer *x, size_t to)
{
    for (; x->line_at < to; x->line_at++)
        x->line += x->p[x->line_at] == '\n';
}

static struct token *push(struct lexer *x, enum token_kind kind, size_t from, size_t to)
{
    if (x->n_tokens == x->cap && !x->err) {
        size_t cap = x->cap ? x->cap * 2 : 256;
        struct token *grown = arena_alloc(x->arena, cap * sizeof *grown);
        if (!grown) {
            lex_fail(x, x->arena->err, "the template is too large");
            return NULL;
        }
        if (x->n_tokens)
            memcpy(grown, x->tokens, x->n_tokens * sizeof *grown);
        x->tokens = grown;
        x->cap = cap;
    }
    if (x->err)
        return NULL;
    count_lines(x, from);
    struct token *t = &x->tokens[x->n_tokens++];
    *t = (struct token){.kind = kind, .line = x->line, .text = {x->p + from, to - from, NULL}};
    return t;
}

/* 0 after the end. */
static char byte_at(const struct lexer *x, size_t at)
{
    return (char)(at < x->n ? x->p[at] : 0);
}

static bool starts(const struct lexer *x, size_t at, const char *word)
{
    size_t n = strlen(word);
    return x->n - at >= n && memcmp(x->p + at, word, n) == 0;
}

static size_t skip_space(const struct lexer *x, size_t at)
{
    while (at < x->n) {
        int32_t c;
        size_t n = text_char(x->p + at, x->n - at, &c);
        if (!text_is_space(c))
            break;
        at += n;
    }
    return at;
}

/* Where text [from, to) ends once white space at its end is gone. */
static size_t strip_right(const struct lexer *x, size_t from, size_t to)
{
    size_t end = from;
    for (size_t at = from; at < to;) {
        int32_t c;
        size_t n = text_char(x->p + at, to - at, &c);
        at += n;
        if (!text_is_space(c))
            end = at;
    }
    return end;
}

/* lstrip_blocks: the white space between the start of the line and a tag goes. */
static size_t strip_line(const struct lexer *x, size_t from, size_t to)
{
    size_t line = to;
    while (line > from && x->p[line - 1] != '\n')
        line--;
    bool at_line_start = line > from || from == 0 || x->p[from - 1] == '\n';
    return at_line_start && line < to && skip_space(x, line) >= to ? line : to;
}

/* The end of a tag or comment: after "-%}" white space goes, after "%}" one newline, after "+%}"
 * nothing. `at` is behind the closing brace. */
static size_t after_close(const struct lexer *x, size_t at, char sign)
{
    if (sign == '-')
        return skip_space(x, at);
    return sign != '+' && at < x->n && x->p[at] == '\n' ? at + 1 : at;
}

/* -- tokens inside of tags --------------------------------------------------------------------- */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (uint8_t)c >= 0x80;
}

static int digit_value(char c)
{
    if (is_digit(c))
        return c - '0';
    char low = (char)(c | 0x20);
    return low >= 'a' && low <= 'f' ? low - 'a' + 10 : 99;
}

/* Digits with single underscores between them. */
static size_t skip_digits(const struct lexer *x, size_t at, int base)
{
    while (at < x->n && (digit_value(x->p[at]) < base ||
                         (x->p[at] == '_' && at + 1 < x->n && digit_value(x->p[at + 1]) < base)))
        at++;
    return at;
}

static void lex_int(struct lexer *x, size_t from, size_t to, int base)
{
    int64_t value = 0;
    for (size_t at = from; at < to; at++) {
        if (x->p[at] == '_')
            continue;
        if (mul_overflows(value, (int64_t)base, &value) ||
            add_overflows(value, (int64_t)digit_value(x->p[at]), &value)) {
            lex_fail(x, ERR_CORRUPT, "a number does not fit 64 bits");
            return;
        }
    }
    struct token *t = push(x, T_INT, from, to);
    if (t)
        t->i = value;
}

static void lex_float(struct lexer *x, size_t from, size_t to)
{
    char text[64];
    size_t n = 0;
    for (size_t at = from; at < to && n < sizeof text - 1; at++)
        if (x->p[at] != '_')
            text[n++] = x->p[at];
    text[n] = 0;
    struct token *t = push(x, T_FLOAT, from, to);
    if (t)
        t->f = strtod(text, NULL);
}

static void lex_number(struct lexer *x)
{
    size_t from = x->at, end = skip_digits(x, from, 10);
    char kind = (char)(byte_at(x, from + 1) | 0x20);
    int base = x->p[from] != '0' ? 10 : kind == 'x' ? 16 : kind == 'o' ? 8 : kind == 'b' ? 2 : 10;
    if (base != 10) {
        end = skip_digits(x, from + 2, base);
        lex_int(x, from + 2, end, base);
        x->at = end;
        return;
    }
    bool after_dot = from > 0 && x->p[from - 1] == '.', is_float = false;
    if (!after_dot && end + 1 < x->n && x->p[end] == '.' && is_digit(x->p[end + 1])) {
        end = skip_digits(x, end + 1, 10);
        is_float = true;
    }
    if (!after_dot && end < x->n && (x->p[end] | 0x20) == 'e') {
        size_t e = end + 1;
        if (e < x->n && (x->p[e] == '+' || x->p[e] == '-'))
            e++;
        if (e < x->n && is_digit(x->p[e])) {
            end = skip_digits(x, e, 10);
            is_float = true;
        }
    }
    if (is_float)
        lex_float(x, from, end);
    else
        lex_int(x, from, end, 10);
    x->at = end;
}

/* Reads up to `max` digits of a base; the number of them, or 0. */
static size_t escape_digits(const char *p, size_t n, int base, size_t max, int32_t *ret)
{
    size_t used = 0;
    int32_t value = 0;
    while (used < n && used < max && digit_value(p[used]) < base)
        value = (int32_t)(((uint32_t)value * (uint32_t)base) + (uint32_t)digit_value(p[used++]));
    *ret = value;
    return used;
}

/* One backslash escape at p[0] == '\\' (n >= 2): bytes read; writes what it means. */
static size_t unescape(const char *p, size_t n, char *out, size_t *n_out)
{
    static const char NAMES[] = "abfnrtv\\'\"", VALUES[] = "\a\b\f\n\r\t\v\\'\"";
    const char *found = p[1] ? strchr(NAMES, p[1]) : NULL;
    int32_t c;
    size_t want = p[1] == 'x' ? 2 : p[1] == 'u' ? 4 : p[1] == 'U' ? 8 : 0;
    if (found) {
        out[(*n_out)++] = VALUES[found - NAMES];
        return 2;
    }
    if (p[1] == '\n')
        return 2;
    if (want && escape_digits(p + 2, n - 2, 16, want, &c) == want) {
        *n_out += text_encode(c, out + *n_out);
        return 2 + want;
    }
    size_t octal = escape_digits(p + 1, n - 1, 8, 3, &c);
    if (octal) {
        *n_out += text_encode(c, out + *n_out);
        return 1 + octal;
    }
    out[(*n_out)++] = p[0];
    return 1;
}

static void lex_string(struct lexer *x)
{
    char quote = x->p[x->at];
    size_t from = x->at + 1, to = from;
    bool escapes = false;
    while (to < x->n && x->p[to] != quote) {
        escapes |= x->p[to] == '\\';
        to += x->p[to] == '\\' ? 2 : 1;
    }
    if (to >= x->n) {
        lex_fail(x, ERR_CORRUPT, "a string does not end");
        return;
    }
    struct token *t = push(x, T_STRING, from, to);
    if (t && escapes) {
        char *out = arena_alloc(x->arena, (to - from) * 2);
        size_t n = 0;
        for (size_t at = from; out && at < to;)
            if (x->p[at] == '\\' && at + 1 < to)
                at += unescape(x->p + at, to - at, out, &n);
            else
                out[n++] = x->p[at++];
        if (!out)
            lex_fail(x, x->arena->err, "the template is too large");
        t->text = (struct jstr){out, n, NULL};
    }
    x->at = to + 1;
}

static bool lex_operator(struct lexer *x)
{
    static const char *const OPERATORS[] = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                            "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                            ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    for (size_t i = 0; i < ARRAY_LEN(OPERATORS); i++)
        if (starts(x, x->at, OPERATORS[i])) {
            size_t from = x->at;
            x->at += strlen(OPERATORS[i]);
            (void)push(x, T_OP, from, x->at);
            return true;
        }
    return false;
}

/* Whether the tag ends here: "%}" or "}}" with an optional sign; moves behind it. */
static bool lex_close(struct lexer *x, const char *close, bool is_block)
{
    char sign = x->p[x->at];
    size_t at = x->at + (sign == '-' || (sign == '+' && is_block));
    if (!starts(x, at, close))
        return false;
    (void)push(x, is_block ? T_BLOCK_END : T_VAR_END, x->at, at + 2);
    if (is_block)
        x->at = after_close(x, at + 2, sign);
    else
        x->at = sign == '-' ? skip_space(x, at + 2) : at + 2;
    return true;
}

static bool opens(char c)
{
    return c == '(' || c == '[' || c == '{';
}

/* Tokens up to the end of a tag; inside of brackets "}}" is two braces. */
static void lex_tag(struct lexer *x, const char *close, bool is_block)
{
    char stack[256];
    size_t depth = 0;
    while (!x->err) {
        x->at = skip_space(x, x->at);
        count_lines(x, x->at);
        if (x->at >= x->n) {
            lex_fail(x, ERR_CORRUPT, "a tag does not end");
            return;
        }
        if (depth == 0 && lex_close(x, close, is_block))
            return;
        char c = x->p[x->at];
        if (is_digit(c)) {
            lex_number(x);
        } else if (is_name(c)) {
            size_t from = x->at;
            while (x->at < x->n && (is_name(x->p[x->at]) || is_digit(x->p[x->at])))
                x->at++;
            (void)push(x, T_NAME, from, x->at);
        } else if (c == '\'' || c == '"') {
            lex_string(x);
        } else if (!lex_operator(x)) {
            lex_fail(x, ERR_CORRUPT, "a character that makes no sense in a tag");
        } else if (opens(c)) {
            if (depth == sizeof stack)
                lex_fail(x, ERR_LIMIT, "nested too deeply");
            else
                stack[depth++] = (char)(c == '(' ? ')' : c + 2);
        } else if (c == ')' || c == ']' || c == '}') {
            if (depth == 0 || stack[depth - 1] != c)
                lex_fail(x, ERR_CORRUPT, "a bracket that was not opened");
            else
                depth--;
        }
    }
}

/* -- text between tags ------------------------------------------------------------------------- */

static void lex_comment(struct lexer *x)
{
    for (size_t at = x->at; at + 1 < x->n; at++)
        if (x->p[at] == '#' && x->p[at + 1] == '}') {
            char sign = (char)(at > x->at ? x->p[at - 1] : 0);
            x->at = after_close(x, at + 2, sign);
            return;
        }
    lex_fail(x, ERR_CORRUPT, "a comment does not end");
}

/* Whether "{%" (with a sign or not) at `at` is the tag of one word; *ret is behind the word. */
static bool is_word_tag(const struct lexer *x, size_t at, const char *word, size_t *ret)
{
    if (!starts(x, at, "{%"))
        return false;
    at += 2;
    if (at < x->n && (x->p[at] == '-' || x->p[at] == '+'))
        at++;
    at = skip_space(x, at);
    if (!starts(x, at, word))
        return false;
    at = skip_space(x, at + strlen(word));
    char sign = byte_at(x, at);
    size_t close = at + (sign == '-' || sign == '+');
    if (!starts(x, MIN_OF(close, x->n), "%}"))
        return false;
    *ret = at;
    return true;
}

static size_t data_end(const struct lexer *x, size_t from, size_t tag, bool is_variable)
{
    char sign = byte_at(x, tag + 2);
    if (sign == '-')
        return strip_right(x, from, tag);
    return sign != '+' && !is_variable ? strip_line(x, from, tag) : tag;
}

static void lex_raw(struct lexer *x, size_t close)
{
    char sign = x->p[close];
    size_t from = close + 2 + (sign == '-' || sign == '+');
    if (sign == '-')
        from = skip_space(x, from);
    for (size_t at = from; at + 1 < x->n; at++) {
        size_t end;
        if (!is_word_tag(x, at, "endraw", &end))
            continue;
        (void)push(x, T_DATA, from, data_end(x, from, at, false));
        char end_sign = x->p[end];
        x->at = after_close(x, end + 2 + (end_sign == '-' || end_sign == '+'), end_sign);
        return;
    }
    lex_fail(x, ERR_CORRUPT, "a raw block does not end");
}

static void lex_data(struct lexer *x)
{
    size_t from = x->at, tag = from;
    while (tag < x->n && !(x->p[tag] == '{' && tag + 1 < x->n &&
                           (x->p[tag + 1] == '%' || x->p[tag + 1] == '{' || x->p[tag + 1] == '#')))
        tag++;
    if (tag >= x->n) {
        if (from < x->n)
            (void)push(x, T_DATA, from, x->n);
        x->at = x->n;
        return;
    }
    char kind = x->p[tag + 1];
    size_t end = data_end(x, from, tag, kind == '{');
    if (end > from)
        (void)push(x, T_DATA, from, end);
    count_lines(x, tag);
    size_t raw;
    if (kind == '%' && is_word_tag(x, tag, "raw", &raw)) {
        lex_raw(x, raw);
        return;
    }
    char sign = byte_at(x, tag + 2);
    x->at = tag + 2 + (sign == '-' || sign == '+');
    if (kind == '#') {
        lex_comment(x);
        return;
    }
    (void)push(x, kind == '%' ? T_BLOCK_BEGIN : T_VAR_BEGIN, tag, x->at);
    lex_tag(x, kind == '%' ? "%}" : "}}", kind == '%');
}

/* "\r\n" and "\r" become "\n"; one newline at the end goes. */
static bool normalise(struct lexer *x, const char *source, size_t n)
{
    char *p = arena_alloc(x->arena, n);
    if (!p)
        return false;
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        if (source[i] == '\r' && i + 1 < n && source[i + 1] == '\n')
            continue;
        p[k++] = (char)(source[i] == '\r' ? '\n' : source[i]);
    }
    if (k > 0 && p[k - 1] == '\n')
        k--;
    x->p = p;
    x->n = k;
    return true;
}

enum err jinja_lex(struct arena *arena, const char *source, size_t n, struct token **ret,
                   struct err_text *text)
{
    struct lexer x = {.arena = arena, .line = 1, .text = text};
    if (!normalise(&x, source, n))
        lex_fail(&x, arena->err, "the template is too large");
    while (!x.err && x.at < x.n)
        lex_data(&x);
    (void)push(&x, T_EOF, x.n, x.n);
    if (x.err)
        return x.err;
    *ret = x.tokens;
    return ERR_OK;
}
