/* Template parser: expressions. One function for each level of binding, loosest first, as
 * jinja2/parser.py has them: if, or, and, not, comparisons, + -, ~, * / // %, **, unary, postfix,
 * filters and tests. */
#include "runtime/jinja_parse.h"

#include "base/util.h"

static struct node *parse_unary(struct parser *p);

static struct node *new_text(struct parser *p, enum node_kind kind, const struct node *a,
                             const struct jstr *text)
{
    struct node *n = jinja_node_new(p, kind);
    n->a = a;
    n->text = text;
    return n;
}

static struct node *new_two(struct parser *p, enum node_kind kind, const struct node *a,
                            const struct node *b)
{
    struct node *n = jinja_node_new(p, kind);
    n->a = a;
    n->b = b;
    return n;
}

static struct node *new_const(struct parser *p, struct val v)
{
    struct node *n = jinja_node_new(p, N_CONST);
    n->value = v;
    return n;
}

static void set_items(struct node *n, const struct node_list *l)
{
    n->items = l->v;
    n->n_items = l->n;
}

/* -- literals and names ------------------------------------------------------------------------ */

static struct node *parse_string(struct parser *p)
{
    struct jstr *s = parse_alloc(p, sizeof *s);
    if (!s)
        return &p->nil;
    *s = p->at->text;
    p->at++;
    while (p->at->kind == T_STRING && !p->err) { /* neighbours are one string */
        char *joined = parse_alloc(p, s->n + p->at->text.n);
        if (!joined)
            return &p->nil;
        if (s->n)
            memcpy(joined, s->p, s->n);
        if (p->at->text.n)
            memcpy(joined + s->n, p->at->text.p, p->at->text.n);
        *s = (struct jstr){joined, s->n + p->at->text.n, NULL};
        p->at++;
    }
    return new_const(p, (struct val){.kind = K_STR, .s = s});
}

static struct node *parse_list(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_LIST);
    struct node_list items = {0};
    expect_op(p, "[");
    while (!p->err && !at_op(p, "]")) {
        node_list_push(p, &items, parse_expression(p));
        if (!at_op(p, "]"))
            expect_op(p, ",");
    }
    expect_op(p, "]");
    set_items(n, &items);
    return n;
}

static struct node *parse_dict(struct parser *p)
{
    struct node *n = jinja_node_new(p, N_DICT);
    struct node_list items = {0};
    expect_op(p, "{");
    while (!p->err && !at_op(p, "}")) {
        node_list_push(p, &items, parse_expression(p));
        expect_op(p, ":");
        node_list_push(p, &items, parse_expression(p));
        if (!at_op(p, "}"))
            expect_op(p, ",");
    }
    expect_op(p, "}");
    set_items(n, &items);
    return n;
}

static struct node *parse_name(struct parser *p)
{
    static const struct {
        const char *word;
        struct val value;
    } CONSTANTS[] = {
        {"true", {.kind = K_BOOL, .b = true}},
        {"True", {.kind = K_BOOL, .b = true}},
        {"false", {.kind = K_BOOL, .b = false}},
        {"False", {.kind = K_BOOL, .b = false}},
        {"none", {.kind = K_NONE}},
        {"None", {.kind = K_NONE}},
    };
    const struct jstr *name = expect_name(p);
    for (size_t i = 0; i < ARRAY_LEN(CONSTANTS); i++)
        if (jstr_is(name, CONSTANTS[i].word))
            return new_const(p, CONSTANTS[i].value);
    struct node *n = new_text(p, N_NAME, NULL, name);
    n->symbol = parse_symbol(p, name);
    return n;
}

static struct node *parse_parentheses(struct parser *p)
{
    expect_op(p, "(");
    if (accept_op(p, ")"))
        return jinja_node_new(p, N_TUPLE);
    struct node *n = parse_tuple(p, parse_expression);
    expect_op(p, ")");
    return n;
}

static struct node *parse_primary(struct parser *p)
{
    struct node *n = NULL;
    if (!parse_enter(p))
        return &p->nil;
    switch (p->at->kind) {
    case T_NAME:
        n = parse_name(p);
        break;
    case T_STRING:
        n = parse_string(p);
        break;
    case T_INT:
        n = new_const(p, v_int(p->at->i));
        p->at++;
        break;
    case T_FLOAT:
        n = new_const(p, v_float(p->at->f));
        p->at++;
        break;
    default:
        if (at_op(p, "("))
            n = parse_parentheses(p);
        else if (at_op(p, "["))
            n = parse_list(p);
        else if (at_op(p, "{"))
            n = parse_dict(p);
        else
            n = parse_fail(p, ERR_CORRUPT, "an expression is missing before '%.*s'",
                           (int)MIN_OF(p->at->text.n, (size_t)20), p->at->text.p);
    }
    parse_leave(p);
    return n;
}

/* -- what follows a value ---------------------------------------------------------------------- */

void parse_arguments(struct parser *p, struct node *n)
{
    struct node_list items = {0}, values = {0};
    const struct jstr **names = NULL;
    uint32_t names_cap = 0;
    expect_op(p, "(");
    while (!p->err && !at_op(p, ")")) {
        if (at_op(p, "*") || at_op(p, "**")) {
            (void)parse_fail(p, ERR_UNSUPPORTED, "'*' before an argument is not supported");
        } else if (p->at->kind == T_NAME && p->at[1].kind == T_OP && jstr_is(&p->at[1].text, "=")) {
            if (values.n == names_cap) {
                names_cap = names_cap ? names_cap * 2 : 4;
                const struct jstr **grown = parse_alloc(p, names_cap * sizeof(struct jstr *));
                if (!grown)
                    return;
                if (values.n)
                    memcpy(grown, names, values.n * sizeof(struct jstr *));
                names = grown;
            }
            names[values.n] = expect_name(p);
            expect_op(p, "=");
            node_list_push(p, &values, parse_expression(p));
        } else if (values.n) {
            (void)parse_fail(p, ERR_CORRUPT, "an argument without a name after one with a name");
        } else {
            node_list_push(p, &items, parse_expression(p));
        }
        if (!at_op(p, ")"))
            expect_op(p, ",");
    }
    expect_op(p, ")");
    set_items(n, &items);
    n->kw = values.v;
    n->n_kw = values.n;
    n->kw_names = names;
}

/* "[" is next: an index or a slice. */
static struct node *parse_subscript(struct parser *p, struct node *base)
{
    expect_op(p, "[");
    struct node *n = jinja_node_new(p, N_SLICE);
    n->a = base;
    const struct node **parts = parse_alloc(p, 3 * sizeof(struct node *));
    if (!parts)
        return &p->nil;
    uint32_t part = 0;
    bool colon = false;
    while (!p->err && !at_op(p, "]")) {
        if (accept_op(p, ":")) {
            colon = true;
            if (++part > 2)
                return parse_fail(p, ERR_CORRUPT, "a slice has at most three parts");
        } else if (parts[part]) {
            return parse_fail(p, ERR_CORRUPT, "']' is missing");
        } else {
            parts[part] = colon ? parse_expression(p) : parse_tuple(p, parse_expression);
        }
    }
    expect_op(p, "]");
    if (colon) {
        n->items = parts;
        n->n_items = 3;
        return n;
    }
    if (!parts[0])
        return parse_fail(p, ERR_CORRUPT, "an index is missing");
    n->kind = N_ITEM;
    n->b = parts[0];
    return n;
}

static struct node *parse_call(struct parser *p, struct node *callee)
{
    struct node *n = jinja_node_new(p, N_CALL);
    n->a = callee;
    parse_arguments(p, n);
    return n;
}

static struct node *parse_postfix(struct parser *p, struct node *n)
{
    while (!p->err) {
        if (accept_op(p, ".")) {
            if (p->at->kind == T_INT) {
                n = new_two(p, N_ITEM, n, new_const(p, v_int(p->at->i)));
                p->at++;
            } else {
                n = new_text(p, N_ATTR, n, expect_name(p));
            }
        } else if (at_op(p, "[")) {
            n = parse_subscript(p, n);
        } else if (at_op(p, "(")) {
            n = parse_call(p, n);
        } else {
            break;
        }
    }
    return n;
}

struct node *parse_filter_chain(struct parser *p, struct node *base)
{
    struct node *n = base;
    do {
        n = new_text(p, N_FILTER, n, expect_name(p));
        n->fn = jinja_filter(n->text);
        if (at_op(p, "("))
            parse_arguments(p, n);
    } while (!p->err && accept_op(p, "|"));
    return n;
}

/* Whether the argument of a test follows without parentheses: "is divisibleby 3". */
static bool at_test_argument(const struct parser *p)
{
    static const char *const NOT_ARGUMENTS[] = {"else", "or", "and", "if", "in", "not"};
    for (size_t i = 0; i < ARRAY_LEN(NOT_ARGUMENTS); i++)
        if (at_name(p, NOT_ARGUMENTS[i]))
            return false;
    return p->at->kind == T_NAME || p->at->kind == T_STRING || p->at->kind == T_INT ||
           p->at->kind == T_FLOAT || at_op(p, "[") || at_op(p, "{");
}

static struct node *parse_test(struct parser *p, struct node *base)
{
    bool negated = accept_name(p, "not");
    struct node *n = new_text(p, N_TEST, base, expect_name(p));
    n->fn = jinja_test(n->text);
    if (at_op(p, "(")) {
        parse_arguments(p, n);
    } else if (at_name(p, "is")) {
        return parse_fail(p, ERR_CORRUPT, "tests cannot be chained with 'is'");
    } else if (at_test_argument(p)) {
        struct node_list one = {0};
        node_list_push(p, &one, parse_postfix(p, parse_primary(p)));
        set_items(n, &one);
    }
    return negated ? new_two(p, N_NOT, n, NULL) : n;
}

static struct node *parse_filters_and_tests(struct parser *p, struct node *n)
{
    while (!p->err) {
        if (accept_op(p, "|")) {
            struct node *filter = new_text(p, N_FILTER, n, expect_name(p));
            filter->fn = jinja_filter(filter->text);
            if (at_op(p, "("))
                parse_arguments(p, filter);
            n = filter;
        } else if (accept_name(p, "is")) {
            n = parse_test(p, n);
        } else if (at_op(p, "(")) {
            n = parse_call(p, n);
        } else {
            break;
        }
    }
    return n;
}

/* -- operators --------------------------------------------------------------------------------- */

/* A sign binds tighter than a filter: -1|abs is (-1)|abs. */
static struct node *parse_signed(struct parser *p)
{
    if (!at_op(p, "-") && !at_op(p, "+"))
        return parse_postfix(p, parse_primary(p));
    if (!parse_enter(p))
        return &p->nil;
    enum node_kind kind = accept_op(p, "-") ? N_NEGATE : N_PLUS;
    if (kind == N_PLUS)
        expect_op(p, "+");
    struct node *n = new_two(p, kind, parse_signed(p), NULL);
    parse_leave(p);
    return n;
}

static struct node *parse_unary(struct parser *p)
{
    return parse_filters_and_tests(p, parse_signed(p));
}

struct operator_row {
    const char *text;
    enum op op;
};

static bool accept_operator(struct parser *p, const struct operator_row *rows, size_t n,
                            enum op *ret)
{
    for (size_t i = 0; i < n; i++)
        if (accept_op(p, rows[i].text)) {
            *ret = rows[i].op;
            return true;
        }
    return false;
}

static struct node *parse_left(struct parser *p, const struct operator_row *rows, size_t n_rows,
                               struct node *(*operand)(struct parser *))
{
    struct node *n = operand(p);
    enum op op;
    while (!p->err && accept_operator(p, rows, n_rows, &op)) {
        n = new_two(p, N_BINARY, n, operand(p));
        n->op = op;
    }
    return n;
}

static struct node *parse_power(struct parser *p)
{
    static const struct operator_row ROWS[] = {{"**", OP_POW}};
    return parse_left(p, ROWS, ARRAY_LEN(ROWS), parse_unary);
}

static struct node *parse_product(struct parser *p)
{
    static const struct operator_row ROWS[] = {
        {"*", OP_MUL}, {"/", OP_DIV}, {"//", OP_FLOORDIV}, {"%", OP_MOD}};
    return parse_left(p, ROWS, ARRAY_LEN(ROWS), parse_power);
}

static struct node *parse_concat(struct parser *p)
{
    struct node *first = parse_product(p);
    if (!at_op(p, "~"))
        return first;
    struct node *n = jinja_node_new(p, N_CONCAT);
    struct node_list items = {0};
    node_list_push(p, &items, first);
    while (!p->err && accept_op(p, "~"))
        node_list_push(p, &items, parse_product(p));
    set_items(n, &items);
    return n;
}

static struct node *parse_sum(struct parser *p)
{
    static const struct operator_row ROWS[] = {{"+", OP_ADD}, {"-", OP_SUB}};
    return parse_left(p, ROWS, ARRAY_LEN(ROWS), parse_concat);
}

static bool accept_comparison(struct parser *p, enum op *ret)
{
    static const struct operator_row ROWS[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<", OP_LT},
                                               {"<=", OP_LE}, {">", OP_GT},  {">=", OP_GE}};
    if (accept_operator(p, ROWS, ARRAY_LEN(ROWS), ret))
        return true;
    if (accept_name(p, "in")) {
        *ret = OP_IN;
        return true;
    }
    if (at_name(p, "not") && p->at[1].kind == T_NAME && jstr_is(&p->at[1].text, "in")) {
        p->at += 2;
        *ret = OP_NOT_IN;
        return true;
    }
    return false;
}

enum { COMPARISONS_MAX = 64 };

static struct node *parse_comparison(struct parser *p)
{
    struct node *first = parse_sum(p);
    uint8_t ops[COMPARISONS_MAX];
    uint32_t n_ops = 0;
    struct node_list items = {0};
    enum op op;
    while (!p->err && accept_comparison(p, &op)) {
        if (n_ops == COMPARISONS_MAX)
            return parse_fail(p, ERR_LIMIT, "too many comparisons in a chain");
        if (n_ops == 0)
            node_list_push(p, &items, first);
        ops[n_ops++] = (uint8_t)op;
        node_list_push(p, &items, parse_sum(p));
    }
    if (n_ops == 0)
        return first;
    struct node *n = jinja_node_new(p, N_COMPARE);
    uint8_t *kept = parse_alloc(p, n_ops);
    if (!kept)
        return &p->nil;
    memcpy(kept, ops, n_ops);
    n->ops = kept;
    set_items(n, &items);
    return n;
}

static struct node *parse_not(struct parser *p)
{
    if (!at_name(p, "not"))
        return parse_comparison(p);
    if (!parse_enter(p))
        return &p->nil;
    p->at++;
    struct node *n = new_two(p, N_NOT, parse_not(p), NULL);
    parse_leave(p);
    return n;
}

static struct node *parse_and(struct parser *p)
{
    struct node *n = parse_not(p);
    while (!p->err && accept_name(p, "and"))
        n = new_two(p, N_AND, n, parse_not(p));
    return n;
}

struct node *parse_or(struct parser *p)
{
    struct node *n = parse_and(p);
    while (!p->err && accept_name(p, "or"))
        n = new_two(p, N_OR, n, parse_and(p));
    return n;
}

struct node *parse_expression(struct parser *p)
{
    struct node *n = parse_or(p);
    while (!p->err && accept_name(p, "if")) {
        if (!parse_enter(p))
            return &p->nil;
        struct node *condition = parse_or(p);
        struct node *cond = new_two(p, N_COND, n, condition);
        if (accept_name(p, "else"))
            cond->c = parse_expression(p);
        parse_leave(p);
        n = cond;
    }
    return n;
}

/* A tuple ends where no further element can start. */
static bool at_tuple_end(const struct parser *p)
{
    return p->at->kind == T_VAR_END || p->at->kind == T_BLOCK_END || p->at->kind == T_EOF ||
           at_op(p, ")") || at_op(p, "]") || at_op(p, "=") || at_name(p, "in");
}

struct node *parse_tuple(struct parser *p, struct node *(*element)(struct parser *))
{
    struct node *first = element(p);
    if (!at_op(p, ","))
        return first;
    struct node *n = jinja_node_new(p, N_TUPLE);
    struct node_list items = {0};
    node_list_push(p, &items, first);
    while (!p->err && accept_op(p, ",") && !at_tuple_end(p))
        node_list_push(p, &items, element(p));
    set_items(n, &items);
    return n;
}
