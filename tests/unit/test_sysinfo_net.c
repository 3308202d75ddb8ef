/* Cable or radio, from made-up folders of proc and sys. The columns of routes are those of proc(5)
 * and of Linux's net/ipv6/route.c, files and types those of its sysfs-class-net. */
#include "agent/sysinfo_net_linux.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct machine {
    char root[64];
};

static void put(const struct machine *m, const char *path, const char *text)
{
    char full[512];
    (void)snprintf(full, sizeof full, "%s/%s", m->root, path);
    for (char *p = full + strlen(m->root) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = 0;
        (void)mkdir(full, 0700);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void add(const struct machine *m, const char *name, const char *type, const char *state,
                const char *more)
{
    char path[256], text[64];
    (void)snprintf(path, sizeof path, "sys/class/net/%s/type", name);
    (void)snprintf(text, sizeof text, "%s\n", type);
    put(m, path, text);
    (void)snprintf(path, sizeof path, "sys/class/net/%s/operstate", name);
    (void)snprintf(text, sizeof text, "%s\n", state);
    put(m, path, text);
    for (const char *word = more; *word;) {
        size_t n = strcspn(word, " ");
        (void)snprintf(path, sizeof path, "sys/class/net/%s/%.*s/x", name, (int)n, word);
        put(m, path, "");
        word += n + (word[n] == ' ');
    }
}

static void add_usual(const struct machine *m, const char *eth_state)
{
    add(m, "lo", "772", "unknown", "");
    add(m, "eth0", "1", eth_state, "device");
    add(m, "wlan0", "1", "up", "device wireless phy80211");
}

#define HEAD "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
#define BY(name, metric) name "\t00000000\t010200C0\t0003\t0\t0\t" metric "\t00000000\t0\t0\t0\n"
#define LAN(name) name "\t000200C0\t00000000\t0001\t0\t0\t50\t00FFFFFF\t0\t0\t0\n"
#define ZEROS "00000000000000000000000000000000"

static void test_the_default_route_decides(void **state)
{
    const struct machine *m = *state;
    add_usual(m, "up");
    put(m, "proc/net/route", HEAD BY("eth0", "100") BY("wlan0", "600"));
    assert_true(sysinfo_wired_below(m->root));
    put(m, "proc/net/route", HEAD LAN("eth0") BY("wlan0", "600"));
    assert_false(sysinfo_wired_below(m->root));
    put(m, "proc/net/route", HEAD BY("wlan0", "600") BY("eth0", "100"));
    assert_true(sysinfo_wired_below(m->root));
    put(m, "proc/net/route", HEAD BY("eth0", "700") BY("wlan0", "600"));
    assert_false(sysinfo_wired_below(m->root));
}

static void test_a_default_route_of_ipv6_alone(void **state)
{
    const struct machine *m = *state;
    add_usual(m, "up");
    put(m, "proc/net/route", HEAD);
    put(m, "proc/net/ipv6_route",
        "fe800000000000000000000000000000 40 " ZEROS " 00 " ZEROS
        " 00000100 00000001 00000000 00000001     eth0\n" ZEROS " 00 " ZEROS
        " 00 fe800000000000000000000000000001 00000258 00000001 00000000 00000003    wlan0\n" ZEROS
        " 00 " ZEROS " 00 " ZEROS " ffffffff 00000001 00000000 00200200       lo\n");
    assert_false(sysinfo_wired_below(m->root));
}

static void test_behind_a_virtual_interface_the_hardware_decides(void **state)
{
    const struct machine *m = *state;
    add_usual(m, "down");
    add(m, "tun0", "65534", "unknown", "");
    put(m, "proc/net/route", HEAD BY("tun0", "50"));
    assert_false(sysinfo_wired_below(m->root)); /* a VPN over Wi-Fi */
    add(m, "eth0", "1", "up", "device");
    assert_true(sysinfo_wired_below(m->root));
}

static void test_without_a_default_route_the_hardware_decides(void **state)
{
    const struct machine *m = *state;
    add_usual(m, "down");
    assert_false(sysinfo_wired_below(m->root));
    add(m, "eth0", "1", "up", "device");
    assert_true(sysinfo_wired_below(m->root));
}

static void test_radio_by_its_type_alone(void **state)
{
    const struct machine *m = *state;
    add(m, "mon0", "803", "up", "device");
    put(m, "proc/net/route", HEAD BY("mon0", "1"));
    assert_false(sysinfo_wired_below(m->root));
}

static void test_a_container_counts_as_wired(void **state)
{
    const struct machine *m = *state;
    assert_true(sysinfo_wired_below(m->root)); /* nothing at all */
    add(m, "lo", "772", "unknown", "");
    add(m, "eth0", "1", "up", ""); /* one end of a veth pair */
    put(m, "proc/net/route", HEAD BY("eth0", "0"));
    assert_true(sysinfo_wired_below(m->root));
}

static void test_lines_that_make_no_sense(void **state)
{
    const struct machine *m = *state;
    add_usual(m, "up");
    put(m, "proc/net/route",
        HEAD "a-name-that-is-much-too-long-for-an-interface\t0\t0\t3\t0\t0\t0\t0\nwlan0\n\n" BY(
            "../../etc", "1"));
    assert_true(sysinfo_wired_below(m->root));
    put(m, "sys/class/net/eth0/type", "cable\n");
    assert_false(sysinfo_wired_below(m->root)); /* what is left is radio */
}

static int setup(void **state)
{
    struct machine *m = malloc(sizeof *m);
    if (!m)
        return -1;
    (void)snprintf(m->root, sizeof m->root, "/tmp/covey-sysinfo-XXXXXX");
    *state = m;
    return mkdtemp(m->root) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *walk)
{
    (void)st;
    (void)type;
    (void)walk;
    return remove(path);
}

static int teardown(void **state)
{
    struct machine *m = *state;
    int r = nftw(m->root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(m);
    return r;
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_the_default_route_decides),
        CASE(test_a_default_route_of_ipv6_alone),
        CASE(test_behind_a_virtual_interface_the_hardware_decides),
        CASE(test_without_a_default_route_the_hardware_decides),
        CASE(test_radio_by_its_type_alone),
        CASE(test_a_container_counts_as_wired),
        CASE(test_lines_that_make_no_sense),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
