#include "agent/config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void test_config_sizes(void **state)
{
    (void)state;
    uint64_t v = 0;
    assert_int_equal(config_parse_size("1.5G", &v), ERR_OK);
    assert_int_equal(v, 1610612736);
    assert_int_equal(config_parse_size("64MiB", &v), ERR_OK);
    assert_int_equal(v, 67108864);
    assert_int_equal(config_parse_size("12 parsecs", &v), ERR_INVALID);
    assert_int_equal(config_parse_size("-1G", &v), ERR_INVALID);
    assert_int_equal(config_parse_size("nan", &v), ERR_INVALID);
    assert_int_equal(config_parse_size("1e30T", &v), ERR_LIMIT);
    struct config c;
    config_init(&c);
    assert_int_equal(config_set(&c, "memory-limit", "110", NULL), ERR_OK);
    assert_int_equal(c.memory_limit, UINT64_C(110) << 20); /* a plain number is MiB */
    assert_true(c.spare_copies);
    assert_true(c.spare_margin == UINT64_MAX); /* 10 GiB or a tenth */
    assert_int_equal(config_set(&c, "spare-copies", "off", NULL), ERR_OK);
    assert_int_equal(config_set(&c, "spare-margin", "20G", NULL), ERR_OK);
    assert_false(c.spare_copies);
    assert_int_equal(c.spare_margin, UINT64_C(20) << 30);
    assert_int_equal(config_set(&c, "spare-copies", "many", NULL), ERR_INVALID);
    assert_int_equal(config_set(&c, "memory-limit", "2G", NULL), ERR_OK);
    assert_int_equal(c.memory_limit, UINT64_C(2) << 30);
}

static void test_config_keep_alive(void **state)
{
    (void)state;
    static const struct {
        const char *word;
        enum err e;
        uint32_t seconds;
    } cases[] = {{"90", ERR_OK, 90},           {"10s", ERR_OK, 10},
                 {"5m", ERR_OK, 300},          {"2h", ERR_OK, 7200},
                 {"1d", ERR_OK, 86400},        {"forever", ERR_OK, 0},
                 {"3650d", ERR_OK, 315360000}, {"3651d", ERR_INVALID, 0},
                 {"9s", ERR_INVALID, 0},       {"0", ERR_INVALID, 0},
                 {"", ERR_INVALID, 0},         {"h", ERR_INVALID, 0},
                 {"-5m", ERR_INVALID, 0},      {" 5m", ERR_INVALID, 0},
                 {"5 m", ERR_INVALID, 0},      {"5mm", ERR_INVALID, 0},
                 {"1.5h", ERR_INVALID, 0},     {"18446744073709551616", ERR_INVALID, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t seconds = 0;
        assert_int_equal(config_parse_keep_alive(cases[i].word, &seconds), cases[i].e);
        assert_int_equal(seconds, cases[i].seconds);
    }
    struct config c;
    config_init(&c);
    assert_int_equal(c.keep_alive_s, 0);
    assert_int_equal(config_set(&c, "keep-alive", "30m", NULL), ERR_OK);
    assert_int_equal(c.keep_alive_s, 1800);
}

static void test_config_hosts_and_ports(void **state)
{
    (void)state;
    static const struct {
        const char *word, *host;
        int port; /* -1: refused; 7: untouched */
    } cases[] = {{"localhost", "localhost", 7},
                 {"a:80", "a", 80},
                 {"[::1]:80", "::1", 80},
                 {"[::1]", "::1", 7},
                 {"::1", "::1", 7},
                 {"fe80::1%eth0", "fe80::1%eth0", 7},
                 {"a:0", "a", 0},
                 {"a:65536", "", -1},
                 {"a:x", "", -1},
                 {"", "", -1},
                 {":80", "", -1},
                 {"[::1", "", -1},
                 {"[::1]x", "", -1},
                 {"a:-1", "", -1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char host[CONFIG_WORD_MAX] = "";
        uint16_t port = 7;
        enum err e = config_parse_host_port(cases[i].word, host, &port);
        if (cases[i].port < 0) {
            assert_int_not_equal(e, ERR_OK);
            continue;
        }
        assert_int_equal(e, ERR_OK);
        assert_string_equal(host, cases[i].host);
        assert_int_equal(port, cases[i].port);
    }
}

static void test_config_refuses_with_a_sentence(void **state)
{
    (void)state;
    struct config c;
    struct err_text text = {""};
    config_init(&c);
    assert_int_equal(config_set(&c, "colour", "red", &text), ERR_NOT_FOUND);
    assert_non_null(strstr(text.text, "colour"));
    assert_int_equal(config_set(&c, "threads", "many", &text), ERR_INVALID);
    assert_non_null(strstr(text.text, "threads"));
    assert_int_equal(config_set(&c, "precision", "f16", &text), ERR_INVALID);
    assert_int_equal(config_set(&c, "control-port", "70000", &text), ERR_INVALID);
    for (int i = 0; i < CONFIG_PEERS_MAX; i++)
        assert_int_equal(config_set(&c, "peer", "host", &text), ERR_OK);
    assert_int_equal(config_set(&c, "peer", "host", &text), ERR_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_sizes),
        cmocka_unit_test(test_config_keep_alive),
        cmocka_unit_test(test_config_hosts_and_ports),
        cmocka_unit_test(test_config_refuses_with_a_sentence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
