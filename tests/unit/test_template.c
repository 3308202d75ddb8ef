/* Templates against the Python package jinja2: tests/reference/template_cases.json, made by
 * make_template_cases.py beside it. Further: limits, marks on user text, failures of memory. */
#include "runtime/template.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static json_t *load_cases(void)
{
    const char *root = getenv("COVEY_SOURCE");
    char path[4096];
    (void)snprintf(path, sizeof path, "%s/tests/reference/template_cases.json", root ? root : ".");
    json_error_t error;
    json_t *cases = json_load_file(path, 0, &error);
    if (!cases)
        fail_msg("%s: %s", path, error.text);
    return cases;
}

static enum err render_with(const char *source, size_t n, const struct template_input *input,
                            const struct template_limits *limits, struct buf *out,
                            struct text_spans *spans, struct err_text *text)
{
    struct template *t;
    enum err e = template_new(source, n, &t, text);
    if (e)
        return e;
    e = template_render(t, input, limits, out, spans, text);
    template_free(t);
    return e;
}

static enum err render(const char *source, const struct template_input *input, struct buf *out,
                       struct text_spans *spans, struct err_text *text)
{
    const struct template_limits limits = TEMPLATE_LIMITS_DEFAULT;
    return render_with(source, strlen(source), input, &limits, out, spans, text);
}

static bool case_holds(const json_t *all, const json_t *c, const struct tm *now)
{
    const json_t *source =
        json_array_get(json_object_get(all, "templates"),
                       (size_t)json_integer_value(json_object_get(c, "template")));
    const struct template_input input = {
        .own = json_object_get(c, "own"),
        .user = json_array_get(json_object_get(all, "users"),
                               (size_t)json_integer_value(json_object_get(c, "user"))),
        .now = now,
    };
    const json_t *expected = json_object_get(c, "expected"), *raises = json_object_get(c, "raises");
    const struct template_limits limits = TEMPLATE_LIMITS_DEFAULT;
    struct buf out = BUF_INIT(1 << 24);
    struct err_text text = {""};
    enum err e = render_with(json_string_value(source), json_string_length(source), &input, &limits,
                             &out, NULL, &text);
    bool holds;
    if (expected)
        holds = !e && out.len == json_string_length(expected) &&
                (!out.len || memcmp(out.data, json_string_value(expected), out.len) == 0);
    else if (raises)
        holds = e == ERR_INVALID && strcmp(text.text, json_string_value(raises)) == 0;
    else
        holds = e == ERR_CORRUPT || e == ERR_UNSUPPORTED || e == ERR_LIMIT;
    if (!holds)
        print_error(
            "case '%s'\n  template: %.300s\n  expected: %s\n  got:      %s\n  error:    %s %s\n",
            json_string_value(json_object_get(c, "name")), json_string_value(source),
            expected ? json_string_value(expected)
            : raises ? json_string_value(raises)
                     : "a failure",
            buf_cstr(&out), err_name(e), text.text);
    buf_deinit(&out);
    return holds;
}

static void test_template_renders_as_jinja2(void **state)
{
    (void)state;
    json_t *all = load_cases(), *c;
    /* the moment that make_template_cases.py uses: Thursday, 2026-03-05 14:07:09 */
    const struct tm now = {.tm_year = 126,
                           .tm_mon = 2,
                           .tm_mday = 5,
                           .tm_hour = 14,
                           .tm_min = 7,
                           .tm_sec = 9,
                           .tm_wday = 4,
                           .tm_yday = 63};
    size_t i, n_wrong = 0, n = json_array_size(json_object_get(all, "cases"));
    assert_true(n > 300);
    json_array_foreach(json_object_get(all, "cases"), i, c) n_wrong += !case_holds(all, c, &now);
    json_decref(all);
    assert_int_equal(n_wrong, 0);
}

static void expect_limit(const char *source, const struct template_limits *limits)
{
    struct buf out = BUF_INIT(1 << 24);
    struct err_text text = {""};
    const struct template_input input = {0};
    enum err e = render_with(source, strlen(source), &input, limits, &out, NULL, &text);
    if (e != ERR_LIMIT)
        print_error("%.100s: %s %s\n", source, err_name(e), text.text);
    assert_int_equal(e, ERR_LIMIT);
    assert_true(strlen(text.text) > 0);
    assert_int_equal(out.len, 0);
    buf_deinit(&out);
}

static void test_template_limits_end_hostile_ones(void **state)
{
    (void)state;
    const struct template_limits small = {.output_bytes_max = 1000,
                                          .memory_bytes_max = 1 << 20,
                                          .steps_max = 100000,
                                          .depth_max = 60};
    static const char *const SOURCES[] = {
        "{% for i in range(1001) %}x{% endfor %}",
        "{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 1000000000 }}",
        "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set l = [] %}{% for i in range(99) %}{% set _ = l.append(l) %}{% endfor %}{{ l }}",
        "{% set l = [1] %}{% set ns = namespace(l=l) %}{% for i in range(99) %}"
        "{% set ns.l = ns.l + ns.l %}{% endfor %}",
        "{{ [0] * 100000000 }}",
        "{{ range(99999)|list|string|length }}",
        "{% set s = 'ab' * 40000 %}{% for i in range(1000) %}{{ s.count('ba') }}{% endfor %}",
        "{{ ('a' * 500000).replace('', 'b')|length }}",
    };
    for (size_t i = 0; i < sizeof SOURCES / sizeof *SOURCES; i++)
        expect_limit(SOURCES[i], &small);
}

static void test_template_nesting_is_limited_when_parsed(void **state)
{
    (void)state;
    static const char *const OPENERS[] = {"(", "[", "-", "not ", "{1:", "x[", "f(", "1 if 1 else "};
    const struct template_limits limits = TEMPLATE_LIMITS_DEFAULT;
    for (size_t i = 0; i < sizeof OPENERS / sizeof *OPENERS; i++) {
        struct buf source = BUF_INIT(1 << 20);
        assert_int_equal(buf_append(&source, "{{ ", 3), ERR_OK);
        for (int j = 0; j < 20000; j++)
            assert_int_equal(buf_append(&source, OPENERS[i], strlen(OPENERS[i])), ERR_OK);
        assert_int_equal(buf_append(&source, " 1 }}", 5), ERR_OK);
        expect_limit(buf_cstr(&source), &limits);
        buf_deinit(&source);
    }
    struct buf source = BUF_INIT(1 << 20);
    for (int j = 0; j < 20000; j++)
        assert_int_equal(buf_append(&source, "{% if 1 %}", 10), ERR_OK);
    expect_limit(buf_cstr(&source), &limits);
    buf_deinit(&source);
    char *large = calloc(1, TEMPLATE_SOURCE_MAX + 2);
    memset(large, 'x', TEMPLATE_SOURCE_MAX + 1);
    expect_limit(large, &limits);
    free(large);
}

/* Renders and writes the user's bytes as capitals, everything else as it is. */
static void expect_marked(const char *source, const char *user_json, const char *expected)
{
    json_t *user = json_loads(user_json, 0, NULL);
    assert_non_null(user);
    struct buf out = BUF_INIT(1 << 16);
    struct text_spans spans = {0};
    struct err_text text = {""};
    const struct template_input input = {.user = user};
    enum err e = render(source, &input, &out, &spans, &text);
    if (e)
        fail_msg("%s: %s", source, text.text);
    size_t before = 0;
    for (size_t i = 0; i < spans.n; i++) {
        assert_true(spans.v[i].begin >= before && spans.v[i].end > spans.v[i].begin);
        assert_true(spans.v[i].end <= out.len);
        before = spans.v[i].end;
        for (size_t at = spans.v[i].begin; at < spans.v[i].end; at++)
            if (out.data[at] >= 'a' && out.data[at] <= 'z')
                out.data[at] = (uint8_t)(out.data[at] - 32);
    }
    assert_string_equal(buf_cstr(&out), expected);
    text_spans_deinit(&spans);
    buf_deinit(&out);
    json_decref(user);
}

/* Marks are ours alone, so no other engine knows the answers: they follow from the rule that a byte
 * is marked when it stems from a string of the user. */
static void test_template_marks_what_the_user_wrote(void **state)
{
    (void)state;
    const char *user = "{\"m\": \"user\", \"l\": [\"ab\", \"cd\"], \"d\": {\"key\": \"val\"}, "
                       "\"s\": \"  pad  \", \"q\": \"a\\\"b\"}";
    static const struct {
        const char *source, *expected;
    } CASES[] = {
        {"x{{ m }}y", "xUSERy"},
        {"{{ 'x' + m + 'y' ~ m ~ 1 }}", "xUSERyUSER1"},
        {"{{ m[1:] }}{{ m[0] }}{{ m[::-1] }}", "SERURESU"},
        {"{{ s.strip() }}|{{ s|trim }}", "PAD|PAD"},
        {"{{ ('a' ~ m ~ 'b').split('s')|join('-') }}", "aU-ERb"},
        {"{{ l|join(', ') }}{{ ', '.join(l) }}", "AB, CDAB, CD"},
        {"{{ l }}{{ d }}", "['AB', 'CD']{'KEY': 'VAL'}"},
        {"{{ d|tojson }}{{ q|tojson }}", "{\"KEY\": \"VAL\"}\"A\\\"B\""},
        {"{{ m.replace('s', 'x') }}{{ 'abc'.replace('b', m) }}", "UxERaUSERc"},
        {"{% for k, v in d.items() %}{{ k }}={{ v }}{% endfor %}", "KEY=VAL"},
        {"{% set x %}a{{ m }}b{% endset %}{{ x }}{{ x|length }}", "aUSERb6"},
        {"{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(m) }}", "<USER>"},
        {"{% set ns = namespace(t='') %}{% for x in l %}{% set ns.t = ns.t + x + '.' %}{% endfor %}"
         "{{ ns.t }}",
         "AB.CD."},
        {"{{ m|lower }}{{ m|indent(2, true) }}{{ m * 2 }}", "USER  USERUSERUSER"},
        {"{{ m|list|reverse|join }}{{ l|map('first')|join }}{{ m|first }}", "RESUACU"},
        {"{{ (m ~ 'x')|e }}{{ d|string }}", "USERx{'KEY': 'VAL'}"},
        {"{{ 'no' if m == 'user' }}{{ m is string }}{{ m|length }}", "noTrue4"},
    };
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        expect_marked(CASES[i].source, user, CASES[i].expected);
}

static void test_template_list_append_works(void **state)
{
    (void)state; /* a departure: the sandbox of transformers refuses it */
    const struct template_input input = {0};
    struct buf out = BUF_INIT(1 << 16);
    struct err_text text = {""};
    assert_int_equal(
        render("{% set l = [1] %}{% set _ = l.append(2) %}{{ l }}", &input, &out, NULL, &text),
        ERR_OK);
    assert_string_equal(buf_cstr(&out), "[1, 2]");
    buf_deinit(&out);
}

static void test_template_without_clock_has_no_strftime_now(void **state)
{
    (void)state;
    const struct template_input input = {0};
    struct buf out = BUF_INIT(1 << 16);
    struct err_text text = {""};
    assert_int_equal(render("{{ strftime_now is defined }}", &input, &out, NULL, &text), ERR_OK);
    assert_string_equal(buf_cstr(&out), "False");
    assert_int_equal(render("{{ strftime_now('%d') }}", &input, &out, NULL, &text), ERR_CORRUPT);
    assert_string_equal(buf_cstr(&out), "False");
    buf_deinit(&out);
}

static void test_template_output_that_does_not_fit_changes_nothing(void **state)
{
    (void)state;
    const struct template_input input = {0};
    struct buf out = BUF_INIT(8);
    struct err_text text = {""};
    assert_int_equal(buf_append(&out, "abc", 3), ERR_OK);
    assert_int_equal(render("{{ 'x' * 6 }}", &input, &out, NULL, &text), ERR_LIMIT);
    assert_int_equal(out.len, 3);
    assert_int_equal(render("{{ 'x' * 5 }}", &input, &out, NULL, &text), ERR_OK);
    assert_string_equal(buf_cstr(&out), "abcxxxxx");
    buf_deinit(&out);
}

static void test_template_bytes_that_are_not_utf8_survive(void **state)
{
    (void)state;
    json_t *user = json_object();
    assert_int_equal(json_object_set_new(user, "m", json_stringn_nocheck("a\xff\xc3\x00z", 5)), 0);
    const struct template_input input = {.user = user};
    struct buf out = BUF_INIT(1 << 16);
    struct err_text text = {""};
    assert_int_equal(render("{{ m }}{{ m|length }}{{ m[1] }}{{ m|upper }}{{ [m] }}{{ m|tojson }}",
                            &input, &out, NULL, &text),
                     ERR_OK);
    static const char EXPECTED[] = "a\xff\xc3\x00z5\xff"
                                   "A\xff\xc3\x00Z['a\\xff\\xc3\\x00z']\"a\xff\xc3\\u0000z\"";
    assert_int_equal(out.len, sizeof EXPECTED - 1);
    assert_memory_equal(out.data, EXPECTED, out.len);
    buf_deinit(&out);
    json_decref(user);
}

/* Every amount of memory from nothing to enough: a limit or the text, never anything else. */
static void test_template_memory_may_end_anywhere(void **state)
{
    (void)state;
    const char *source = "{% macro f(a) %}{{ a|upper }}{% endmacro %}{% set ns = namespace(s='') %}"
                         "{% for k, v in d.items() %}{% set ns.s = ns.s ~ f(k) ~ v|tojson %}"
                         "{% endfor %}{{ ns.s }}{{ d|dictsort|map('first')|join(',') }}"
                         "{{ 'a,b'.split(',')|sort(reverse=true) }}";
    json_t *user =
        json_loads("{\"d\": {\"a\": 1, \"b\": [1, {\"c\": \"x\"}], \"e\": \"yz\"}}", 0, NULL);
    const struct template_input input = {.user = user};
    struct template *t;
    struct err_text text = {""};
    assert_int_equal(template_new(source, strlen(source), &t, &text), ERR_OK);
    bool done = false;
    for (size_t memory = 0; memory < 100000 && !done; memory += 16) {
        struct template_limits limits = TEMPLATE_LIMITS_DEFAULT;
        limits.memory_bytes_max = memory;
        struct buf out = BUF_INIT(1 << 16);
        enum err e = template_render(t, &input, &limits, &out, NULL, &text);
        assert_true(e == ERR_OK || e == ERR_LIMIT);
        if (e == ERR_OK)
            assert_string_equal(buf_cstr(&out), "A1B[1, {\"c\": \"x\"}]E\"yz\"a,b,e['b', 'a']");
        done = e == ERR_OK;
        buf_deinit(&out);
    }
    assert_true(done);
    template_free(t);
    json_decref(user);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_template_renders_as_jinja2),
        cmocka_unit_test(test_template_limits_end_hostile_ones),
        cmocka_unit_test(test_template_nesting_is_limited_when_parsed),
        cmocka_unit_test(test_template_marks_what_the_user_wrote),
        cmocka_unit_test(test_template_list_append_works),
        cmocka_unit_test(test_template_without_clock_has_no_strftime_now),
        cmocka_unit_test(test_template_output_that_does_not_fit_changes_nothing),
        cmocka_unit_test(test_template_bytes_that_are_not_utf8_survive),
        cmocka_unit_test(test_template_memory_may_end_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
