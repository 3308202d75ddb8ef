/* Inside of the template interpreter: memory, values, syntax tree. Private to runtime/jinja_*.c and
 * runtime/template.c; everybody else uses runtime/template.h.
 *
 * Failures are sticky: the first one is kept in the interpreter (or parser) with its sentence,
 * every later operation yields something harmless (undefined, "", an empty list), and loops end
 * because `jinja_step` refuses. Whoever started the render looks once at the end.
 *
 * All memory is one arena per template and one per render. Strings are views: `p` may point into
 * the source, the context or the arena. `mark`, when not NULL, has one byte per byte of `p`:
 * nonzero where a user wrote it. */
#ifndef COVEY_RUNTIME_JINJA_H
#define COVEY_RUNTIME_JINJA_H

#include "base/err.h"
#include "runtime/template.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* -- memory ------------------------------------------------------------------------------------ */

struct arena_chunk;
struct arena {
    struct arena_chunk *head;
    size_t used, max;
    enum err err; /* ERR_OK, ERR_LIMIT or ERR_NO_MEMORY; sticky */
};
/* Zeroed, aligned for any type; NULL when over `max` or out of memory. */
void *arena_alloc(struct arena *a, size_t n);
void arena_deinit(struct arena *a);

/* -- values ------------------------------------------------------------------------------------ */

struct jstr {
    const char *p;
    size_t n;
    const uint8_t *mark;
};
#define JSTR(literal) ((struct jstr){(literal), sizeof(literal) - 1, NULL})

enum kind {
    K_UNDEFINED, /* s: the name, for the sentence */
    K_NONE,
    K_BOOL,
    K_INT,
    K_FLOAT,
    K_STR,
    K_LIST,
    K_DICT,
    K_NAMESPACE, /* d */
    K_MACRO,
    K_METHOD,
    K_LOOP,
    K_ABSENT, /* an argument that was not given; never visible to templates */
};

enum list_kind { LIST_PLAIN, LIST_TUPLE, LIST_LAZY /* a generator: no length, always true */ };

struct jlist;
struct jdict;
struct jmacro;
struct jmethod;
struct jloop;

struct val {
    enum kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        const struct jstr *s;
        struct jlist *l;
        struct jdict *d;
        const struct jmacro *macro;
        const struct jmethod *method;
        const struct jloop *loop;
    };
};

struct jlist {
    struct val *v;
    size_t n, cap;
    enum list_kind kind;
};

struct jentry {
    struct val key, value;
    uint64_t hash;
};
struct jdict {
    struct jentry *v; /* in order of insertion */
    size_t n, cap;
    uint32_t *index; /* entry + 1, open addressing; NULL while small */
    size_t n_index;
};

struct call {
    const struct val *pos;
    uint32_t n_pos;
    const struct jstr *const *names; /* [n_kw] */
    const struct val *kw;            /* [n_kw] */
    uint32_t n_kw;
};

struct interp;
enum { BUILTIN_ARGS_MAX = 5 };
/* A filter, test, method or function. `params`: names separated by blanks, "=" behind optional
 * ones; their values arrive in `a` (K_ABSENT where not given). NULL: takes what it likes from `c`.
 */
struct builtin {
    const char *name;
    struct val (*fn)(struct interp *in, struct val self, const struct call *c, const struct val *a);
    const char *params;
};

struct jmethod {
    struct val self;
    const struct builtin *fn;
};

struct jmacro {
    const struct node *node;
    struct scope *scope;
};

struct jloop {
    const struct jlist *items;
    size_t n, index0;
};

/* -- syntax tree ------------------------------------------------------------------------------- */

enum node_kind {
    /* statements */
    N_BODY,     /* items */
    N_TEXT,     /* text */
    N_OUTPUT,   /* a */
    N_IF,       /* items: condition, body, condition, body ...; a: else body or NULL */
    N_FOR,      /* a: target, b: iterated, c: filter or NULL, d: body, e: else or NULL */
    N_SET,      /* a: target, b: value */
    N_CAPTURE,  /* block set: a: target, b: body, c: filters over N_HOLE or NULL */
    N_FILTERED, /* filter block: b: body, c: filters over N_HOLE */
    N_SCOPE,    /* with, generation: items: targets and values in turn; b: body */
    N_MACRO,    /* symbol; items: N_NAME of each parameter; kw: defaults; b: body */
    N_BREAK,
    N_CONTINUE,
    /* expressions */
    N_CONST,   /* value */
    N_NAME,    /* symbol, text */
    N_LIST,    /* items */
    N_TUPLE,   /* items */
    N_DICT,    /* items: key, value, key, value ... */
    N_COND,    /* a if b else c (NULL: undefined) */
    N_OR,      /* a, b */
    N_AND,     /* a, b */
    N_NOT,     /* a */
    N_NEGATE,  /* a */
    N_PLUS,    /* a */
    N_BINARY,  /* a op b */
    N_CONCAT,  /* items */
    N_COMPARE, /* items; ops[n_items - 1] */
    N_ATTR,    /* a.text */
    N_ITEM,    /* a[b] */
    N_SLICE,   /* a[items[0]:items[1]:items[2]], entries may be NULL */
    N_CALL,    /* a(items, kw) */
    N_FILTER,  /* a | text(items, kw) */
    N_TEST,    /* a is text(items, kw) */
    N_HOLE,    /* stands for the text that a filter block captured */
};

enum op {
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_DIV,
    OP_FLOORDIV,
    OP_MOD,
    OP_POW,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOT_IN,
};

struct node {
    enum node_kind kind;
    enum op op;
    uint32_t line;
    uint32_t symbol;
    const struct jstr *text;
    struct val value;
    const struct node *a, *b, *c, *d, *e;
    const struct node **items;
    uint32_t n_items;
    const struct jstr *const *kw_names; /* [n_kw] */
    const struct node **kw;             /* [n_kw] */
    uint32_t n_kw;
    const uint8_t *ops;
    const struct builtin *fn; /* N_FILTER, N_TEST; NULL: unknown, an error when reached */
};

enum { JINJA_PARSE_DEPTH_MAX = 100, JINJA_SYMBOLS_MAX = 4096 };

struct template
{
    struct arena arena;
    const struct node *body;
    const struct jstr **symbols; /* names that occur as variables */
    uint32_t n_symbols;
    uint32_t sym_loop;
};

/* Symbols that the interpreter itself binds; interned first, in this order. */
enum { SYM_LOOP, SYM_VARARGS, SYM_KWARGS, SYM_FIXED_N };

/* -- lexer ------------------------------------------------------------------------------------- */

enum token_kind {
    T_DATA,
    T_VAR_BEGIN,
    T_VAR_END,
    T_BLOCK_BEGIN,
    T_BLOCK_END,
    T_NAME,
    T_STRING, /* escapes undone */
    T_INT,
    T_FLOAT,
    T_OP, /* text is the operator */
    T_EOF,
};
struct token {
    enum token_kind kind;
    uint32_t line;
    struct jstr text;
    int64_t i;
    double f;
};
/* Cuts the source into tokens ending with T_EOF, whitespace control applied. */
enum err jinja_lex(struct arena *arena, const char *source, size_t n, struct token **ret,
                   struct err_text *text);
/* Fills t->body and symbols. */
enum err jinja_parse(struct template *t, const struct token *tokens, struct err_text *text);

/* -- interpreter ------------------------------------------------------------------------------- */

/* Growing text in the arena. */
struct sink {
    char *p;
    uint8_t *mark;
    size_t n, cap;
    size_t max; /* 0: only the arena's limit */
    bool marked;
};

struct binding {
    uint32_t symbol;
    struct val value;
};
struct scope {
    struct scope *parent;
    struct binding *v;
    uint32_t n, cap;
};

enum flow { FLOW_ON, FLOW_BREAK, FLOW_CONTINUE };

struct interp {
    const struct template *t;
    const struct template_limits *limits;
    const struct tm *now;
    struct arena arena;
    uint64_t steps;
    uint32_t depth, line;
    enum err err;
    struct err_text *text;
    struct sink *out;
    struct scope *scope;
    enum flow flow;
    struct val hole;
    const uint8_t *ones; /* marks for strings that are wholly the user's */
    size_t n_ones;
    /* handed out after a failure, so that nobody has to check for NULL */
    struct jstr nil_str;
    struct jlist nil_list;
    struct jdict nil_dict;
};

/* Keeps the first failure; the sentence gets the line. Returns undefined. */
struct val jinja_fail(struct interp *in, enum err e, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Counts n steps; false when there is a failure or the limit is reached. */
bool jinja_step(struct interp *in, uint64_t n);
void *jinja_alloc(struct interp *in, size_t n);

static inline struct val v_undefined(void)
{
    return (struct val){.kind = K_UNDEFINED, .s = NULL};
}
static inline struct val v_none(void)
{
    return (struct val){.kind = K_NONE};
}
static inline struct val v_bool(bool b)
{
    return (struct val){.kind = K_BOOL, .b = b};
}
static inline struct val v_int(int64_t i)
{
    return (struct val){.kind = K_INT, .i = i};
}
static inline struct val v_float(double f)
{
    return (struct val){.kind = K_FLOAT, .f = f};
}
static inline struct val v_list(struct jlist *l)
{
    return (struct val){.kind = K_LIST, .l = l};
}
static inline struct val v_dict(struct jdict *d)
{
    return (struct val){.kind = K_DICT, .d = d};
}
static inline bool jstr_is(const struct jstr *s, const char *word)
{
    return s->n == strlen(word) && memcmp(s->p, word, s->n) == 0;
}
static inline bool jstr_eq(const struct jstr *a, const struct jstr *b)
{
    return a->n == b->n && (a->n == 0 || memcmp(a->p, b->p, a->n) == 0);
}

/* jinja_value.c */
struct val v_str(struct interp *in, const char *p, size_t n, const uint8_t *mark);
struct val v_literal(struct interp *in, const char *text);
/* Bytes [from, to) of s. */
struct val v_sub(struct interp *in, const struct jstr *s, size_t from, size_t to);
struct jlist *list_new(struct interp *in, enum list_kind kind);
void list_push(struct interp *in, struct jlist *l, struct val v);
struct jdict *dict_new(struct interp *in);
void dict_set(struct interp *in, struct jdict *d, struct val key, struct val value);
/* NULL when absent (or the key cannot be one: then also a failure). */
const struct val *dict_get(struct interp *in, const struct jdict *d, struct val key);
const struct val *dict_get_str(struct interp *in, const struct jdict *d, const struct jstr *key);
enum json_origin { JSON_OWN, JSON_USER };
struct val val_of_json(struct interp *in, const json_t *json, enum json_origin origin);
void sink_put(struct interp *in, struct sink *k, const char *p, size_t n, const uint8_t *mark);
void sink_put_str(struct interp *in, struct sink *k, const struct jstr *s);
void sink_puts(struct interp *in, struct sink *k, const char *text);
struct val sink_val(struct interp *in, const struct sink *k);
/* The elements that a loop over v sees; a failure for what cannot be iterated. */
const struct jlist *val_elements(struct interp *in, struct val v);
struct val val_attr(struct interp *in, struct val v, const struct jstr *name);
struct val val_item(struct interp *in, struct val v, struct val key);
struct val val_slice(struct interp *in, struct val v, const struct val bounds[3]);

/* jinja_text.c: Unicode and text helpers */
/* Bytes of the character at p (at least 1; a byte that is not UTF-8 is a character of its own, with
 * *ret_c = -1). */
size_t text_char(const char *p, size_t n, int32_t *ret_c);
size_t text_encode(int32_t c, char ret[4]);
size_t text_length(const struct jstr *s); /* in characters */
/* Byte offset of character `index` (clamped to the end). */
size_t text_offset(const struct jstr *s, size_t index);
bool text_is_space(int32_t c);
/* `chars` NULL: white space. */
enum strip_sides { STRIP_LEFT = 1, STRIP_RIGHT = 2, STRIP_BOTH = 3 };
struct val text_strip(struct interp *in, const struct jstr *s, const struct jstr *chars,
                      enum strip_sides sides);
enum text_case { CASE_UPPER, CASE_LOWER, CASE_CAPITALIZE, CASE_TITLE, CASE_TITLE_FILTER };
struct val text_case(struct interp *in, const struct jstr *s, enum text_case how);
struct val text_replace(struct interp *in, const struct jstr *s, const struct jstr *from,
                        const struct jstr *to, int64_t count);
/* Offset of `needle` in s at or after `from`, or SIZE_MAX. */
size_t text_find(struct interp *in, const struct jstr *s, const struct jstr *needle, size_t from);
struct jlist *text_lines(struct interp *in, const struct jstr *s);
struct val text_join(struct interp *in, const struct jlist *parts, const struct jstr *between);

/* jinja_print.c */
const struct jstr *val_to_str(struct interp *in, struct val v);
void print_float(double f, char ret[40]);
void val_print(struct interp *in, struct sink *k, struct val v);
void val_repr(struct interp *in, struct sink *k, struct val v);
struct json_style {
    const struct jstr *indent;                         /* NULL: one line */
    const struct jstr *item_separator, *key_separator; /* NULL: the usual ones */
    bool ensure_ascii, sort_keys;
};
void val_json(struct interp *in, struct sink *k, struct val v, const struct json_style *style);

/* jinja_ops.c */
bool val_truthy(struct val v);
bool val_equal(struct interp *in, struct val a, struct val b);
/* -1, 0, 1; a failure where Python has no order. */
int val_order(struct interp *in, struct val a, struct val b);
bool val_contains(struct interp *in, struct val container, struct val item);
struct val val_binary(struct interp *in, enum op op, struct val a, struct val b);
struct val val_negate(struct interp *in, struct val v);
/* Number of elements or characters; a failure for what has none. */
size_t val_length(struct interp *in, struct val v);
bool val_is_number(struct val v);
double val_number(struct val v); /* of BOOL, INT, FLOAT */
const char *val_type_name(struct val v);

/* jinja_filters.c, jinja_tests.c, jinja_methods.c: NULL when there is none of that name. */
const struct builtin *jinja_filter(const struct jstr *name);
const struct builtin *jinja_test(const struct jstr *name);
const struct builtin *jinja_method(enum kind kind, const struct jstr *name);
const struct builtin *jinja_function(const struct interp *in, const struct jstr *name);
/* Binds arguments to the builtin's parameters and calls it. */
struct val jinja_apply(struct interp *in, const struct builtin *fn, struct val self,
                       const struct call *c);
/* jinja_sequence.c: filters over sequences */
extern const struct builtin JINJA_SEQUENCE_FILTERS[];

/* jinja_eval.c */
void jinja_run(struct interp *in);
struct val jinja_call(struct interp *in, struct val callee, const struct call *c);

#endif
