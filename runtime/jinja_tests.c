/* Template interpreter: tests ("x is defined"). */
#include "runtime/jinja.h"

#include "base/util.h"

#define TEST(name)                                                                                 \
    static struct val name(struct interp *in, struct val self, const struct call *c,               \
                           const struct val *a)

#define KIND_TEST(name, condition)                                                                 \
    TEST(name)                                                                                     \
    {                                                                                              \
        (void)in, (void)c, (void)a;                                                                \
        return v_bool(condition);                                                                  \
    }

KIND_TEST(is_defined, self.kind != K_UNDEFINED)
KIND_TEST(is_undefined, self.kind == K_UNDEFINED)
KIND_TEST(is_none, self.kind == K_NONE)
KIND_TEST(is_string, self.kind == K_STR)
KIND_TEST(is_mapping, self.kind == K_DICT)
KIND_TEST(is_number, val_is_number(self))
KIND_TEST(is_integer, self.kind == K_INT)
KIND_TEST(is_float, self.kind == K_FLOAT)
KIND_TEST(is_boolean, self.kind == K_BOOL)
KIND_TEST(is_true, self.kind == K_BOOL && self.b)
KIND_TEST(is_false, self.kind == K_BOOL && !self.b)
KIND_TEST(is_callable, self.kind == K_MACRO || self.kind == K_METHOD)
KIND_TEST(is_iterable, self.kind == K_STR || self.kind == K_LIST || self.kind == K_DICT ||
                           self.kind == K_UNDEFINED || self.kind == K_LOOP)
KIND_TEST(is_sequence, self.kind == K_STR || self.kind == K_DICT || self.kind == K_UNDEFINED ||
                           (self.kind == K_LIST && self.l->kind != LIST_LAZY))

TEST(is_equal)
{
    (void)c;
    return v_bool(val_equal(in, self, a[0]));
}

TEST(is_not_equal)
{
    (void)c;
    return v_bool(!val_equal(in, self, a[0]));
}

TEST(is_less)
{
    (void)c;
    return v_bool(val_order(in, self, a[0]) < 0);
}

TEST(is_at_most)
{
    (void)c;
    return v_bool(val_order(in, self, a[0]) <= 0);
}

TEST(is_greater)
{
    (void)c;
    return v_bool(val_order(in, self, a[0]) > 0);
}

TEST(is_at_least)
{
    (void)c;
    return v_bool(val_order(in, self, a[0]) >= 0);
}

TEST(is_in)
{
    (void)c;
    return v_bool(val_contains(in, a[0], self));
}

/* Remainder by 2 and the like: undefined values fail in val_binary. */
static struct val rest_is(struct interp *in, struct val self, struct val by, int64_t rest)
{
    return v_bool(val_equal(in, val_binary(in, OP_MOD, self, by), v_int(rest)));
}

TEST(is_odd)
{
    (void)c, (void)a;
    return rest_is(in, self, v_int(2), 1);
}

TEST(is_even)
{
    (void)c, (void)a;
    return rest_is(in, self, v_int(2), 0);
}

TEST(is_divisible)
{
    (void)c;
    return rest_is(in, self, a[0], 0);
}

static struct val is_cased(struct interp *in, struct val self, enum text_case how)
{
    const struct jstr *s = val_to_str(in, self);
    const struct jstr *same = text_case(in, s, how).s;
    const struct jstr *other = text_case(in, s, how == CASE_UPPER ? CASE_LOWER : CASE_UPPER).s;
    return v_bool(jstr_eq(s, same) && !jstr_eq(s, other));
}

TEST(is_upper)
{
    (void)c, (void)a;
    return is_cased(in, self, CASE_UPPER);
}

TEST(is_lower)
{
    (void)c, (void)a;
    return is_cased(in, self, CASE_LOWER);
}

TEST(is_filter_name)
{
    (void)in, (void)c, (void)a;
    return v_bool(self.kind == K_STR && jinja_filter(self.s));
}

TEST(is_test_name)
{
    (void)in, (void)c, (void)a;
    return v_bool(self.kind == K_STR && jinja_test(self.s));
}

const struct builtin *jinja_test(const struct jstr *name)
{
    static const struct builtin TESTS[] = {
        {"defined", is_defined, ""},
        {"undefined", is_undefined, ""},
        {"none", is_none, ""},
        {"string", is_string, ""},
        {"mapping", is_mapping, ""},
        {"sequence", is_sequence, ""},
        {"iterable", is_iterable, ""},
        {"number", is_number, ""},
        {"integer", is_integer, ""},
        {"float", is_float, ""},
        {"boolean", is_boolean, ""},
        {"true", is_true, ""},
        {"false", is_false, ""},
        {"callable", is_callable, ""},
        {"equalto", is_equal, "other"},
        {"eq", is_equal, "other"},
        {"==", is_equal, "other"},
        {"ne", is_not_equal, "other"},
        {"!=", is_not_equal, "other"},
        {"sameas", is_equal, "other"},
        {"lt", is_less, "other"},
        {"lessthan", is_less, "other"},
        {"<", is_less, "other"},
        {"le", is_at_most, "other"},
        {"<=", is_at_most, "other"},
        {"gt", is_greater, "other"},
        {"greaterthan", is_greater, "other"},
        {">", is_greater, "other"},
        {"ge", is_at_least, "other"},
        {">=", is_at_least, "other"},
        {"in", is_in, "seq"},
        {"odd", is_odd, ""},
        {"even", is_even, ""},
        {"divisibleby", is_divisible, "num"},
        {"upper", is_upper, ""},
        {"lower", is_lower, ""},
        {"filter", is_filter_name, ""},
        {"test", is_test_name, ""},
    };
    for (size_t i = 0; i < ARRAY_LEN(TESTS); i++)
        if (jstr_is(name, TESTS[i].name))
            return &TESTS[i];
    return NULL;
}
