/* What strangers say over mDNS, on its way to the agent: TXT records, the child's messages, the
 * table of what is known, and the child's life (played by shell scripts that write to its socket).
 * The real Avahi is tested in tests/netlab. */
#include "discovery/mdns.h"
#include "discovery/mdns_table.h"
#include "discovery/mdns_wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { GUARD_MS = 20000 };

/* ---- TXT ---- */

static enum err parse(const char *bytes, size_t n, struct mdns_txt *ret)
{
    return mdns_txt_parse((const uint8_t *)bytes, n, ret);
}
#define PARSE(literal, ret) parse(literal, sizeof(literal) - 1, ret)

/* The bytes are written by hand from RFC 6763, section 6. */
static void test_txt_is_read_and_written_as_the_rfc_says(void **state)
{
    (void)state;
    static const char bytes[] = "\3v=1"
                                "\7n=alpha"
                                "\6t=00ff"
                                "\6i=abcd";
    struct mdns_txt t;
    uint8_t written[MDNS_TXT_BYTES_MAX];
    assert_int_equal(PARSE(bytes, &t), ERR_OK);
    assert_int_equal(t.version, 1);
    assert_string_equal(t.name, "alpha");
    assert_int_equal(t.n_cluster_tag, 2);
    assert_memory_equal(t.cluster_tag, "\x00\xff", 2);
    assert_int_equal(t.n_invite_tag, 2);
    assert_memory_equal(t.invite_tag, "\xab\xcd", 2);
    assert_int_equal(mdns_txt_build(&t, written), sizeof bytes - 1);
    assert_memory_equal(written, bytes, sizeof bytes - 1);
}

static void test_txt_takes_what_makes_sense_and_no_more(void **state)
{
    (void)state;
    struct mdns_txt t;
    /* keys in either case, the first of equal ones, unknown ones, strings without a value */
    assert_int_equal(PARSE("\3V=1\3v=2\3x=y\1n\0\3N=a\3n=b", &t), ERR_OK);
    assert_int_equal(t.version, 1);
    assert_string_equal(t.name, "a");
    /* a name with an escape sequence, odd and bad hex: as if absent */
    assert_int_equal(PARSE("\3v=1\6n=a\33[m\5t=abc\4i=zz", &t), ERR_OK);
    assert_string_equal(t.name, "");
    assert_int_equal(t.n_cluster_tag + t.n_invite_tag, 0);
    /* no version, a version that is none, a string beyond the end, nothing */
    assert_int_equal(PARSE("\3n=a", &t), ERR_CORRUPT);
    assert_int_equal(PARSE("\3v=x", &t), ERR_CORRUPT);
    assert_int_equal(PARSE("\3v=1\7n=a", &t), ERR_CORRUPT);
    assert_int_equal(PARSE("", &t), ERR_CORRUPT);
    static char huge[MDNS_TXT_READ_MAX + 1];
    assert_int_equal(parse(huge, sizeof huge, &t), ERR_LIMIT);
    /* overlong UTF-8, a surrogate, a C1 control, and what is right (RFC 3629) */
    assert_false(mdns_text_ok("\xc0\xaf", 2));
    assert_false(mdns_text_ok("\xed\xa0\x80", 3));
    assert_false(mdns_text_ok("\xc2\x85", 2));
    assert_false(mdns_text_ok("\xf4\x90\x80\x80", 4));
    assert_true(mdns_text_ok("G\xc3\xa4nse \xf0\x9f\xaa\xbf", 11));
}

/* ---- the table ---- */

static struct mdns_message sighting(const char *instance, uint32_t interface, const char *v4)
{
    struct mdns_message m = {
        .type = MDNS_SIGHTING, .interface = interface, .protocol = 4, .family = 4};
    unsigned a, b, c, d;
    assert_int_equal(sscanf(v4, "%u.%u.%u.%u", &a, &b, &c, &d), 4);
    m.ip[0] = (uint8_t)a, m.ip[1] = (uint8_t)b, m.ip[2] = (uint8_t)c, m.ip[3] = (uint8_t)d;
    m.service.port = 26840;
    m.service.txt.version = 1;
    (void)snprintf(m.service.instance, sizeof m.service.instance, "%s", instance);
    return m;
}

static struct mdns_message lost(const char *instance, uint32_t interface)
{
    struct mdns_message m = {.type = MDNS_LOST, .interface = interface, .protocol = 4};
    (void)snprintf(m.service.instance, sizeof m.service.instance, "%s", instance);
    return m;
}

static struct mdns_table *new_table(void)
{
    struct mdns_table *t = NULL;
    assert_int_equal(mdns_table_new(&t), ERR_OK);
    return t;
}

static void test_table_makes_one_record_of_several_sightings(void **state)
{
    (void)state;
    struct mdns_table *t = new_table();
    struct mdns_record r;
    struct mdns_message a = sighting("x", 2, "10.0.0.2"), b = sighting("x", 3, "10.1.0.2");
    struct mdns_message v6 = a, gone = lost("x", 2);
    v6.family = v6.protocol = 6;
    memcpy(v6.ip, "\xfe\x80\0\0\0\0\0\0\0\0\0\0\0\0\0\1", 16);
    assert_int_equal(mdns_table_apply(t, &a, "eth0", false, 0), ERR_OK);
    assert_int_equal(mdns_table_apply(t, &b, "eth1", false, 1), ERR_OK);
    assert_int_equal(mdns_table_apply(t, &v6, "eth0", false, 2), ERR_OK);
    assert_false(mdns_table_next(t, 2, &r));
    assert_int_equal(mdns_table_due(t), MDNS_SETTLE_US);
    assert_true(mdns_table_next(t, MDNS_SETTLE_US, &r));
    assert_string_equal(r.instance, "x");
    assert_int_equal(r.n_addresses, 3);
    assert_string_equal(r.addresses[0].interface, "eth0");
    assert_string_equal(r.addresses[1].interface, "eth1");
    assert_int_equal(r.addresses[0].scope, 0);
    assert_int_equal(r.addresses[2].scope, 2); /* link-local: by that interface only */
    assert_false(mdns_table_next(t, MDNS_SETTLE_US, &r));
    /* the same again is no news; one interface less is */
    assert_int_equal(mdns_table_apply(t, &a, "eth0", false, 3), ERR_OK);
    assert_int_equal(mdns_table_due(t), UINT64_MAX);
    assert_int_equal(mdns_table_apply(t, &gone, "eth0", false, 3), ERR_OK);
    assert_true(mdns_table_next(t, 10 * MDNS_CHANGE_EVERY_US, &r));
    assert_int_equal(r.n_addresses, 2);
    mdns_table_free(t);
}

static void test_table_believes_no_address_that_cannot_be_there(void **state)
{
    (void)state;
    static const char *const bad[] = {"127.0.0.1", "0.0.0.0", "224.0.0.251", "255.255.255.255"};
    struct mdns_table *t = new_table();
    struct mdns_record r;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct mdns_message m = sighting("x", 2, bad[i]);
        assert_int_equal(mdns_table_apply(t, &m, "eth0", false, 0), ERR_INVALID);
    }
    struct mdns_message m = sighting("peer:10.0.0.1", 2, "10.0.0.2");
    assert_int_equal(mdns_table_apply(t, &m, "eth0", false, 0), ERR_INVALID);
    mdns_table_set_own(t, "me");
    mdns_table_set_own(t, "me-again");
    m = sighting("me", 2, "10.0.0.2");
    assert_int_equal(mdns_table_apply(t, &m, "eth0", false, 0), ERR_OK);
    assert_int_equal(mdns_table_n(t), 0);
    m = sighting("x", 1, "127.0.0.1");
    assert_int_equal(mdns_table_apply(t, &m, "lo", true, 0), ERR_OK);
    assert_true(mdns_table_next(t, MDNS_SETTLE_US, &r));
    mdns_table_free(t);
}

static void test_table_hands_out_changes_at_most_so_often(void **state)
{
    (void)state;
    struct mdns_table *t = new_table();
    struct mdns_record r;
    int n = 0;
    for (uint64_t us = 0; us < 5 * 1000 * 1000; us += 1000) {
        struct mdns_message m = sighting("x", 2, "10.0.0.2");
        m.service.txt.n_cluster_tag = 1;
        m.service.txt.cluster_tag[0] = (uint8_t)(us / 1000);
        assert_int_equal(mdns_table_apply(t, &m, "eth0", false, us), ERR_OK);
        while (mdns_table_next(t, us, &r))
            n++;
    }
    assert_in_range(n, 5, 11);
    mdns_table_free(t);
}

static bool trusts_honest(void *context, const char *instance)
{
    (void)context;
    return strncmp(instance, "honest", 6) == 0;
}

static void see(struct mdns_table *t, const char *instance, uint64_t now_us)
{
    struct mdns_message m = sighting(instance, 2, "10.0.0.2");
    assert_int_equal(mdns_table_apply(t, &m, "eth0", false, now_us), ERR_OK);
}

/* A flood fills the table and pushes out its own oldest; whoever was told of one hears of its end,
 * so that what the user knows is bounded too. Whom it trusts stays, and a newcomer finds room. */
static void test_table_forgets_the_oldest_stranger_in_a_flood(void **state)
{
    (void)state;
    struct mdns_table *t = new_table();
    struct mdns_record r;
    char name[32];
    int n_known = 0, n_most = 0;
    bool member = false, newcomer = false, first = false;
    uint64_t us = 0;
    mdns_table_set_trusted(t, trusts_honest, NULL);
    see(t, "honest-member", us);
    for (int i = 0; i < 10001; i++, us += 1000) {
        (void)snprintf(name, sizeof name, "flood-%d", i);
        see(t, i == 10000 ? "newcomer" : name, us);
        uint64_t at = i == 10000 ? us + MDNS_SETTLE_US : us;
        while (mdns_table_due(t) <= at && mdns_table_next(t, at, &r)) {
            n_known += r.gone ? -1 : 1;
            if (n_known > n_most)
                n_most = n_known;
            member |= strcmp(r.instance, "honest-member") == 0 && !r.gone;
            assert_false(strcmp(r.instance, "honest-member") == 0 && r.gone);
            newcomer |= strcmp(r.instance, "newcomer") == 0 && !r.gone;
            first |= strcmp(r.instance, "flood-0") == 0 && r.gone;
        }
    }
    assert_true(member && newcomer && first);
    assert_int_equal(n_known, MDNS_INSTANCES_MAX);
    assert_int_equal(n_most, MDNS_INSTANCES_MAX);
    for (int i = 0; i < 10000; i++) { /* goodbyes */
        (void)snprintf(name, sizeof name, "flood-%d", i);
        struct mdns_message m = lost(name, 2);
        (void)mdns_table_apply(t, &m, "eth0", false, us);
    }
    while (mdns_table_next(t, us + 10 * MDNS_CHANGE_EVERY_US, &r))
        n_known += r.gone ? -1 : 1;
    assert_int_equal(n_known, 2);
    assert_int_equal(mdns_table_n(t), 2);
    mdns_table_free(t);
}

static void test_table_full_of_trusted_ones_takes_no_more(void **state)
{
    (void)state;
    struct mdns_table *t = new_table();
    struct mdns_message m = sighting("stranger", 2, "10.0.0.2");
    char name[32];
    mdns_table_set_trusted(t, trusts_honest, NULL);
    for (int i = 0; i < MDNS_INSTANCES_MAX; i++) {
        (void)snprintf(name, sizeof name, "honest-%d", i);
        see(t, name, 0);
    }
    assert_int_equal(mdns_table_apply(t, &m, "eth0", false, 0), ERR_LIMIT);
    assert_int_equal(mdns_table_n(t), MDNS_INSTANCES_MAX);
    mdns_table_free(t);
}

static void test_table_drops_what_a_new_child_does_not_see(void **state)
{
    (void)state;
    struct mdns_table *t = new_table();
    struct mdns_record r;
    struct mdns_message a = sighting("a", 2, "10.0.0.2"), b = sighting("b", 2, "10.0.0.3");
    (void)mdns_table_apply(t, &a, "eth0", false, 0);
    (void)mdns_table_apply(t, &b, "eth0", false, 0);
    while (mdns_table_next(t, MDNS_SETTLE_US, &r))
        ;
    mdns_table_restarted(t, MDNS_SETTLE_US);
    (void)mdns_table_apply(t, &b, "eth0", false, MDNS_SETTLE_US);
    assert_false(mdns_table_next(t, MDNS_GRACE_US, &r));
    uint64_t due = mdns_table_due(t);
    assert_int_equal(due, MDNS_SETTLE_US + MDNS_GRACE_US);
    while (!mdns_table_next(t, due, &r))
        due = mdns_table_due(t);
    assert_string_equal(r.instance, "a");
    assert_true(r.gone);
    assert_int_equal(mdns_table_n(t), 1);
    mdns_table_free(t);
}

/* ---- the child's life ---- */

struct lab {
    uv_loop_t loop;
    uv_timer_t guard;
    bool late;
    struct log log;
    struct mdns *mdns;
    int n_found;
    struct mdns_record last;
    char folder[64];
};

static void on_guard(uv_timer_t *timer)
{
    ((struct lab *)timer->data)->late = true;
}

static void on_found(void *context, const struct mdns_record *record)
{
    struct lab *lab = context;
    lab->n_found++;
    lab->last = *record;
}

static void lab_start(struct lab *lab, const char *script)
{
    static const char *args[] = {"sh", "-c", NULL, NULL};
    struct err_text text = {""};
    *lab = (struct lab){.log = {.fd = STDERR_FILENO, .level = LOG_ERROR}};
    assert_int_equal(uv_loop_init(&lab->loop), 0);
    assert_int_equal(uv_timer_init(&lab->loop, &lab->guard), 0);
    lab->guard.data = lab;
    assert_int_equal(uv_timer_start(&lab->guard, on_guard, GUARD_MS, 0), 0);
    args[2] = script;
    struct mdns_options o = {.loop = &lab->loop,
                             .log = &lab->log,
                             .child_file = "/bin/sh",
                             .child_args = args,
                             .service = {.instance = "me", .port = 1, .txt = {.version = 1}},
                             .context = lab,
                             .on_found = on_found};
    assert_int_equal(mdns_new(&o, &lab->mdns, &text), ERR_OK);
}

static void lab_end(struct lab *lab)
{
    mdns_close(lab->mdns);
    uv_close((uv_handle_t *)&lab->guard, NULL);
    assert_int_equal(uv_run(&lab->loop, UV_RUN_DEFAULT), 0);
    assert_int_equal(uv_loop_close(&lab->loop), 0);
}

/* STARTED (avahi-core), and instance "x" at 10.0.0.2:513 on interface 9999, which has no name. */
#define SEEN_X                                                                                     \
    "printf '\\002\\000\\003\\002' >&3; "                                                          \
    "printf '\\024\\000\\004\\017\\047\\000\\000\\004\\004\\012\\000\\000\\002\\001x\\001\\002"    \
    "\\001\\000\\000\\000\\000' >&3; "

static void test_child_reports(void **state)
{
    (void)state;
    struct lab lab;
    lab_start(&lab, SEEN_X "exec cat <&3 >/dev/null");
    assert_string_equal(mdns_backend(lab.mdns), "none");
    while (lab.n_found == 0 && !lab.late)
        (void)uv_run(&lab.loop, UV_RUN_ONCE);
    assert_int_equal(lab.n_found, 1);
    assert_string_equal(lab.last.instance, "x");
    assert_int_equal(lab.last.addresses[0].port, 513);
    assert_string_equal(mdns_backend(lab.mdns), "avahi-core");
    lab_end(&lab);
}

/* The first child talks rubbish and is killed; what the next one says counts. */
static void test_child_that_breaks_the_rules_is_replaced(void **state)
{
    (void)state;
    struct lab lab;
    char script[512], mark[64];
    (void)snprintf(mark, sizeof mark, "/tmp/covey-test-mdns-%d", (int)getpid());
    (void)snprintf(script, sizeof script,
                   "if mkdir %s 2>/dev/null; then printf '\\377\\377rubbish' >&3; "
                   "else " SEEN_X "fi; exec cat <&3 >/dev/null",
                   mark);
    lab_start(&lab, script);
    while (lab.n_found == 0 && !lab.late)
        (void)uv_run(&lab.loop, UV_RUN_ONCE);
    (void)rmdir(mark);
    assert_int_equal(lab.n_found, 1);
    lab_end(&lab);
}

static void test_child_that_ends_at_once_does_no_harm(void **state)
{
    (void)state;
    struct lab lab;
    lab_start(&lab, "exit 1");
    struct mdns_service other = {.instance = "other", .port = 2, .txt = {.version = 1}};
    uint64_t until_ms = uv_now(&lab.loop) + 600; /* two starts */
    while (uv_now(&lab.loop) < until_ms && !lab.late) {
        (void)uv_run(&lab.loop, UV_RUN_ONCE);
        mdns_publish(lab.mdns, &other);
        mdns_interfaces_changed(lab.mdns);
    }
    assert_int_equal(lab.n_found, 0);
    assert_string_equal(mdns_backend(lab.mdns), "none");
    lab_end(&lab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_txt_is_read_and_written_as_the_rfc_says),
        cmocka_unit_test(test_txt_takes_what_makes_sense_and_no_more),
        cmocka_unit_test(test_table_makes_one_record_of_several_sightings),
        cmocka_unit_test(test_table_believes_no_address_that_cannot_be_there),
        cmocka_unit_test(test_table_hands_out_changes_at_most_so_often),
        cmocka_unit_test(test_table_forgets_the_oldest_stranger_in_a_flood),
        cmocka_unit_test(test_table_full_of_trusted_ones_takes_no_more),
        cmocka_unit_test(test_table_drops_what_a_new_child_does_not_see),
        cmocka_unit_test(test_child_reports),
        cmocka_unit_test(test_child_that_breaks_the_rules_is_replaced),
        cmocka_unit_test(test_child_that_ends_at_once_does_no_harm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
