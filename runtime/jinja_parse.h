/* Template parser: state shared by statements (jinja_statements.c) and expressions
 * (jinja_expressions.c). Failures are sticky: after the first one the parser sees only the end of
 * the template. */
#ifndef COVEY_RUNTIME_JINJA_PARSE_H
#define COVEY_RUNTIME_JINJA_PARSE_H

#include "runtime/jinja.h"

struct parser {
    struct template *t;
    const struct token *at;
    uint32_t depth, loop_depth;
    enum err err;
    struct err_text *text;
    struct node nil; /* handed out after a failure */
};

/* A list that grows while its length is unknown. */
struct node_list {
    const struct node **v;
    uint32_t n, cap;
};

struct node *parse_fail(struct parser *p, enum err e, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void *parse_alloc(struct parser *p, size_t n);
struct node *jinja_node_new(struct parser *p, enum node_kind kind);
void node_list_push(struct parser *p, struct node_list *l, const struct node *n);
uint32_t parse_symbol(struct parser *p, const struct jstr *name);
bool parse_enter(struct parser *p);
void parse_leave(struct parser *p);

bool at_op(const struct parser *p, const char *op);
bool at_name(const struct parser *p, const char *name);
bool accept_op(struct parser *p, const char *op);
bool accept_name(struct parser *p, const char *name);
void expect_op(struct parser *p, const char *op);
const struct jstr *expect_name(struct parser *p);

struct node *parse_expression(struct parser *p); /* with an inline if */
struct node *parse_or(struct parser *p);         /* without */
/* One expression, or several with commas: then a tuple. */
struct node *parse_tuple(struct parser *p, struct node *(*element)(struct parser *));
/* "(a, b=c)" into items and kw of `n`. */
void parse_arguments(struct parser *p, struct node *n);
/* "name(arguments) | name ..." over `base`, the first name without its bar. */
struct node *parse_filter_chain(struct parser *p, struct node *base);

#endif
