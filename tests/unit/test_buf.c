#include "base/buf.h"
#include "base/id.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_buf_keeps_its_maximum(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(10);
    assert_int_equal(buf_append(&b, "12345678", 8), ERR_OK);
    assert_int_equal(buf_append(&b, "abc", 3), ERR_LIMIT);
    assert_int_equal(b.len, 8);
    assert_int_equal(buf_append(&b, "ab", 2), ERR_OK);
    buf_consume(&b, 7);
    assert_string_equal(buf_cstr(&b), "8ab");
    buf_deinit(&b);
}

static void test_reader_is_sticky(void **state)
{
    (void)state;
    const uint8_t bytes[] = {1, 2, 0, 3, 0, 0, 0, 9};
    struct reader r = reader_of(bytes, sizeof bytes);
    assert_int_equal(read_u8(&r), 1);
    assert_int_equal(read_u16(&r), 2);
    assert_int_equal(read_u32(&r), 3);
    assert_int_equal(read_u16(&r), 0);
    assert_true(r.bad);
    assert_int_equal(read_u8(&r), 0);
    assert_null(read_view(&r, 0));
}

static void test_hex_refuses_what_is_not_hex(void **state)
{
    (void)state;
    uint8_t out[2];
    assert_true(hex_decode("a0Ff", out, 2));
    assert_int_equal(out[0], 0xa0);
    assert_int_equal(out[1], 0xff);
    assert_false(hex_decode("a0F", out, 2));
    assert_false(hex_decode("a0Ff0", out, 2));
    assert_false(hex_decode("a0xf", out, 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buf_keeps_its_maximum),
        cmocka_unit_test(test_reader_is_sticky),
        cmocka_unit_test(test_hex_refuses_what_is_not_hex),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
