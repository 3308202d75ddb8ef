#include "agent/answer_text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

/* Feeds the pieces; what was shown after each is joined with '|'. */
static void check(const char *const *stops, const char *const *pieces, const char *expected,
                  bool stopped)
{
    struct answer_text t;
    struct buf all = BUF_INIT(4096);
    answer_text_init(&t);
    for (; *stops; stops++)
        assert_int_equal(answer_text_add_stop(&t, *stops), ERR_OK);
    for (; *pieces; pieces++) {
        assert_int_equal(answer_text_push(&t, *pieces, strlen(*pieces), &all), ERR_OK);
        assert_int_equal(buf_append(&all, "|", 1), ERR_OK);
    }
    assert_int_equal(answer_text_end(&t, &all), ERR_OK);
    assert_string_equal(buf_cstr(&all), expected);
    assert_int_equal(t.stopped, stopped);
    buf_deinit(&all);
    answer_text_deinit(&t);
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})
#define NONE ((const char *const[]){NULL})

static void test_answer_text_keeps_characters_whole(void **state)
{
    (void)state;
    check(NONE, LIST("a", "\xc3", "\xa9", "b"), "a||\xc3\xa9|b|", false);
    check(NONE, LIST("\xf0\x9f", "\x98\x80"), "|\xf0\x9f\x98\x80|", false);
    /* cut off at the end: one replacement for each byte that is left */
    check(NONE, LIST("x\xe2\x82"), "x|\xef\xbf\xbd\xef\xbf\xbd", false);
    /* never valid: at once */
    check(NONE, LIST("\xff", "y"), "\xef\xbf\xbd|y|", false);
    /* a surrogate (RFC 3629 section 3) and an overlong form */
    check(NONE, LIST("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd|", false);
    check(NONE, LIST("\xc0\x80"), "\xef\xbf\xbd\xef\xbf\xbd|", false);
}

static void test_answer_text_stops_across_tokens(void **state)
{
    (void)state;
    check(LIST("END"), LIST("one E", "N", "D two"), "one |||", true);
    check(LIST("END"), LIST("one E", "N", "X"), "one ||ENX|", false);
    check(LIST("END"), LIST("one E"), "one |E", false);
    check(LIST("ab", "b"), LIST("xa", "b"), "x||", true);
    check(LIST("aab"), LIST("aa", "ab", "z"), "|a||", true);
    check(LIST("\n\n"), LIST("a\n", "b\n\nc"), "a|\nb|", true);
}

static void test_answer_text_limits_stops(void **state)
{
    (void)state;
    struct answer_text t;
    char longest[STOP_BYTES_MAX + 1];
    memset(longest, 'x', sizeof longest);
    longest[STOP_BYTES_MAX] = 0;
    answer_text_init(&t);
    assert_int_equal(answer_text_add_stop(&t, ""), ERR_INVALID);
    assert_int_equal(answer_text_add_stop(&t, longest), ERR_LIMIT);
    for (int i = 0; i < STOPS_MAX; i++)
        assert_int_equal(answer_text_add_stop(&t, "x"), ERR_OK);
    assert_int_equal(answer_text_add_stop(&t, "x"), ERR_LIMIT);
    answer_text_deinit(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answer_text_keeps_characters_whole),
        cmocka_unit_test(test_answer_text_stops_across_tokens),
        cmocka_unit_test(test_answer_text_limits_stops),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
