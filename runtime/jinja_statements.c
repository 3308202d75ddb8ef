/* Template parser: statements, and the small tools that both halves of the parser use. */
#include "runtime/jinja_parse.h"

#include "base/util.h"

#include <stdarg.h>
#include <stdio.h>

/* -- tools ------------------------------------------------------------------------------------- */

struct node *parse_fail(struct parser *p, enum err e, const char *format, ...)
{
    static const struct token END = {.kind = T_EOF, .text = {"", 0, NULL}};
    if (!p->err) {
        char sentence[ERR_TEXT_MAX];
        va_list args;
        va_start(args, format);
        (void)vsnprintf(sentence, sizeof sentence, format, args);
        va_end(args);
        p->err = err_set(p->text, e, "chat template, line %u: %.300s", p->at->line, sentence);
        p->at = &END;
    }
    return &p->nil;
}

void *parse_alloc(struct parser *p, size_t n)
{
    void *m = p->err ? NULL : arena_alloc(&p->t->arena, n);
    if (!m)
        (void)parse_fail(p, p->t->arena.err, "the template is too large");
    return m;
}

struct node *jinja_node_new(struct parser *p, enum node_kind kind)
{
    struct node *n = parse_alloc(p, sizeof *n);
    if (!n)
        return &p->nil;
    n->kind = kind;
    n->line = p->at->line;
    return n;
}

void node_list_push(struct parser *p, struct node_list *l, const struct node *n)
{
    if (l->n == l->cap) {
        uint32_t cap = l->cap ? l->cap * 2 : 4;
        const struct node **v = parse_alloc(p, cap * sizeof(struct node *));
        if (!v)
            return;
        if (l->n)
            memcpy(v, l->v, l->n * sizeof(struct node *));
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = n;
}

uint32_t parse_symbol(struct parser *p, const struct jstr *name)
{
    struct template *t = p->t;
    for (uint32_t i = 0; i < t->n_symbols; i++)
        if (jstr_eq(t->symbols[i], name))
            return i;
    if (t->n_symbols == JINJA_SYMBOLS_MAX) {
        (void)parse_fail(p, ERR_LIMIT, "more than %d different names", JINJA_SYMBOLS_MAX);
        return 0;
    }
    t->symbols[t->n_symbols] = name;
    return t->n_symbols++;
}

bool parse_enter(struct parser *p)
{
    if (p->err)
        return false;
    if (p->depth == JINJA_PARSE_DEPTH_MAX) {
        (void)parse_fail(p, ERR_LIMIT, "nested more than %d deep", JINJA_PARSE_DEPTH_MAX);
        return false;
    }
    p->depth++;
    return true;
}

void parse_leave(struct parser *p)
{
    p->depth--;
}

bool at_op(const struct parser *p, const char *op)
{
    return p->at->kind == T_OP && jstr_is(&p->at->text, op);
}

bool at_name(const struct parser *p, const char *name)
{
    return p->at->kind == T_NAME && jstr_is(&p->at->text, name);
}

bool accept_op(struct parser *p, const char *op)
{
    if (!at_op(p, op))
        return false;
    p->at++;
    return true;
}

bool accept_name(struct parser *p, const char *name)
{
    if (!at_name(p, name))
        return false;
    p->at++;
    return true;
}

void expect_op(struct parser *p, const char *op)
{
    if (!accept_op(p, op))
        (void)parse_fail(p, ERR_CORRUPT, "'%s' is missing before '%.*s'", op,
                         (int)MIN_OF(p->at->text.n, (size_t)20), p->at->text.p);
}

const struct jstr *expect_name(struct parser *p)
{
    static const struct jstr NONE = {"", 0, NULL};
    if (p->at->kind != T_NAME) {
        (void)parse_fail(p, ERR_CORRUPT, "a name is missing before '%.*s'",
                         (int)MIN_OF(p->at->text.n, (size_t)20), p->at->text.p);
        return &NONE;
    }
    return &(p->at++)->text;
}

/* -- statements -------------------------------------------------------------------------------- */

static struct node *parse_body(struct parser *p, const char *const *ends);

static void expect_block_end(struct parser *p)
{
    if (p->at->kind != T_BLOCK_END)
        (void)parse_fail(p, ERR_CORRUPT, "'%%}' is missing before '%.*s'",
                         (int)MIN_OF(p->at->text.n, (size_t)20), p->at->text.p);
    else
        p->at++;
}

/* The body up to one of `ends`, whose name is then next; it is accepted when it is the only one. */
static struct node *parse_block(struct parser *p, const char *end)
{
    const char *const ends[] = {end, NULL};
    expect_block_end(p);
    struct node *body = parse_body(p, ends);
    (void)accept_name(p, end);
    return body;
}

/* "a", "a, b", "(a, b)", "(a, b), c" */
static struct node *parse_target(struct parser *p);

static struct node *parse_target_part(struct parser *p)
{
    if (!parse_enter(p))
        return &p->nil;
    struct node *n;
    if (accept_op(p, "(")) {
        n = parse_target(p);
        expect_op(p, ")");
    } else {
        const struct jstr *name = expect_name(p);
        n = jinja_node_new(p, N_NAME);
        n->text = name;
        n->symbol = parse_symbol(p, name);
    }
    parse_leave(p);
    return n;
}

static struct node *parse_target(struct parser *p)
{
    return parse_tuple(p, parse_target_part);
}

static struct node *parse_if(struct parser *p)
{
    static const char *const ENDS[] = {"elif", "else", "endif", NULL};
    struct node *n = jinja_node_new(p, N_IF);
    struct node_list items = {0};
    do {
        node_list_push(p, &items, parse_tuple(p, parse_or));
        expect_block_end(p);
        node_list_push(p, &items, parse_body(p, ENDS));
    } while (!p->err && accept_name(p, "elif"));
    n->items = items.v;
    n->n_items = items.n;
    if (accept_name(p, "else"))
        n->a = parse_block(p, "endif");
    else
        (void)accept_name(p, "endif");
    return n;
}

static struct node *parse_for(struct parser *p)
{
    static const char *const ENDS[] = {"else", "endfor", NULL};
    struct node *n = jinja_node_new(p, N_FOR);
    n->a = parse_target(p);
    if (!accept_name(p, "in"))
        return parse_fail(p, ERR_CORRUPT, "'in' is missing");
    n->b = parse_tuple(p, parse_or);
    if (accept_name(p, "if"))
        n->c = parse_expression(p);
    if (at_name(p, "recursive"))
        return parse_fail(p, ERR_UNSUPPORTED, "recursive loops are not supported");
    expect_block_end(p);
    p->loop_depth++;
    n->d = parse_body(p, ENDS);
    p->loop_depth--;
    if (accept_name(p, "else"))
        n->e = parse_block(p, "endfor");
    else
        (void)accept_name(p, "endfor");
    return n;
}

static struct node *hole(struct parser *p)
{
    return jinja_node_new(p, N_HOLE);
}

static struct node *parse_set(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_SET), *target;
    if (p->at->kind == T_NAME && p->at[1].kind == T_OP && jstr_is(&p->at[1].text, ".")) {
        target = jinja_node_new(p, N_ATTR);
        target->a = parse_target_part(p);
        expect_op(p, ".");
        target->text = expect_name(p);
    } else {
        target = parse_target(p);
    }
    n->a = target;
    if (accept_op(p, "=")) {
        n->b = parse_tuple(p, parse_expression);
        return n;
    }
    n->kind = N_CAPTURE;
    if (accept_op(p, "|"))
        n->c = parse_filter_chain(p, hole(p));
    n->b = parse_block(p, "endset");
    return n;
}

static struct node *parse_filter_block(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_FILTERED);
    n->c = parse_filter_chain(p, hole(p));
    n->b = parse_block(p, "endfilter");
    return n;
}

static struct node *parse_with(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_SCOPE);
    struct node_list items = {0};
    while (!p->err && p->at->kind != T_BLOCK_END) {
        if (items.n)
            expect_op(p, ",");
        node_list_push(p, &items, parse_target(p));
        expect_op(p, "=");
        node_list_push(p, &items, parse_expression(p));
    }
    n->items = items.v;
    n->n_items = items.n;
    n->b = parse_block(p, "endwith");
    return n;
}

static struct node *parse_generation(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_SCOPE);
    n->b = parse_block(p, "endgeneration");
    return n;
}

static struct node *parse_macro(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_MACRO);
    n->text = expect_name(p);
    n->symbol = parse_symbol(p, n->text);
    struct node_list params = {0}, defaults = {0};
    expect_op(p, "(");
    while (!p->err && !at_op(p, ")")) {
        node_list_push(p, &params, parse_target_part(p));
        if (accept_op(p, "="))
            node_list_push(p, &defaults, parse_expression(p));
        else if (defaults.n)
            (void)parse_fail(p, ERR_CORRUPT, "a parameter without default after one with default");
        if (!at_op(p, ")"))
            expect_op(p, ",");
    }
    expect_op(p, ")");
    n->items = params.v;
    n->n_items = params.n;
    n->kw = defaults.v;
    n->n_kw = defaults.n;
    uint32_t loops = p->loop_depth;
    p->loop_depth = 0;
    n->b = parse_block(p, "endmacro");
    p->loop_depth = loops;
    return n;
}

static struct node *parse_jump(struct parser *p, enum node_kind kind)
{
    if (p->loop_depth == 0)
        return parse_fail(p, ERR_CORRUPT, "break or continue outside of a loop");
    return jinja_node_new(p, kind);
}

static struct node *parse_statement(struct parser *p)
{
    if (accept_name(p, "if"))
        return parse_if(p);
    if (accept_name(p, "for"))
        return parse_for(p);
    if (accept_name(p, "set"))
        return parse_set(p);
    if (accept_name(p, "macro"))
        return parse_macro(p);
    if (accept_name(p, "break"))
        return parse_jump(p, N_BREAK);
    if (accept_name(p, "continue"))
        return parse_jump(p, N_CONTINUE);
    if (accept_name(p, "filter"))
        return parse_filter_block(p);
    if (accept_name(p, "with"))
        return parse_with(p);
    if (accept_name(p, "generation"))
        return parse_generation(p);
    return parse_fail(p, p->at->kind == T_NAME ? ERR_UNSUPPORTED : ERR_CORRUPT,
                      "'%.*s' is no statement that is supported here",
                      (int)MIN_OF(p->at->text.n, (size_t)40), p->at->text.p);
}

static bool at_end_word(const struct parser *p, const char *const *ends)
{
    for (; *ends; ends++)
        if (at_name(p, *ends))
            return true;
    return false;
}

static struct node *parse_text(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_TEXT);
    n->text = &p->at->text;
    p->at++;
    return n;
}

static struct node *parse_output(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_OUTPUT);
    p->at++;
    n->a = parse_tuple(p, parse_expression);
    if (p->at->kind != T_VAR_END)
        return parse_fail(p, ERR_CORRUPT, "'}}' is missing before '%.*s'",
                          (int)MIN_OF(p->at->text.n, (size_t)20), p->at->text.p);
    p->at++;
    return n;
}

/* Nodes up to "{%" and one of the words `ends` (which is then next), or to the end of the template
 * when `ends` is NULL. */
static struct node *parse_body(struct parser *p, const char *const *ends)
{
    struct node *n = jinja_node_new(p, N_BODY);
    struct node_list items = {0};
    if (!parse_enter(p))
        return &p->nil;
    while (!p->err && p->at->kind != T_EOF) {
        if (p->at->kind == T_DATA) {
            node_list_push(p, &items, parse_text(p));
        } else if (p->at->kind == T_VAR_BEGIN) {
            node_list_push(p, &items, parse_output(p));
        } else {
            p->at++;
            if (ends && at_end_word(p, ends))
                break;
            node_list_push(p, &items, parse_statement(p));
            expect_block_end(p);
        }
    }
    if (ends && p->at->kind == T_EOF)
        (void)parse_fail(p, ERR_CORRUPT, "'%s' is missing at the end", ends[0]);
    parse_leave(p);
    n->items = items.v;
    n->n_items = items.n;
    return n;
}

enum err jinja_parse(struct template *t, const struct token *tokens, struct err_text *text)
{
    static const struct jstr FIXED[SYM_FIXED_N] = {
        [SYM_LOOP] = {"loop", 4, NULL},
        [SYM_VARARGS] = {"varargs", 7, NULL},
        [SYM_KWARGS] = {"kwargs", 6, NULL},
    };
    struct parser p = {.t = t, .at = tokens, .text = text};
    t->symbols = parse_alloc(&p, JINJA_SYMBOLS_MAX * sizeof(struct jstr *));
    for (size_t i = 0; i < SYM_FIXED_N && t->symbols; i++)
        (void)parse_symbol(&p, &FIXED[i]);
    t->body = parse_body(&p, NULL);
    return p.err;
}
