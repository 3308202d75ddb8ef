#include "transport/loop_net.h"

#include "base/util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <fcntl.h>
#include <poll.h>
#include <net/if.h>
#ifdef __linux__
#include <sched.h>
#endif
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

enum { GUARD_MS = 10000 };

/* ---- a loop that runs until something is so ---- */

struct lab {
    uv_loop_t loop;
    uv_timer_t guard;
    bool late;
    /* what the callbacks saw */
    int n_accepted, accepted_fd;
    struct address accepted_from;
    int n_dials, dialled_fd;
    enum err dial_err;
    size_t n_bytes;
    uint8_t bytes[1 << 20];
    int n_ends, n_drained;
    enum err end;
    struct net_stream *to_detach;
    int n_datagrams;
    struct net_datagram datagram;
    uint8_t datagram_bytes[NET_DATAGRAM_MAX];
};

static void on_guard(uv_timer_t *timer)
{
    ((struct lab *)timer->data)->late = true;
}

static struct lab *lab_new(void)
{
    struct lab *lab = calloc(1, sizeof *lab);
    assert_int_equal(uv_loop_init(&lab->loop), 0);
    assert_int_equal(uv_timer_init(&lab->loop, &lab->guard), 0);
    lab->guard.data = lab;
    lab->accepted_fd = lab->dialled_fd = -1;
    return lab;
}

#define RUN_UNTIL(lab, condition)                                                                  \
    do {                                                                                           \
        (lab)->late = false;                                                                       \
        (void)uv_timer_start(&(lab)->guard, on_guard, GUARD_MS, 0);                                \
        while (!(condition) && !(lab)->late)                                                       \
            (void)uv_run(&(lab)->loop, UV_RUN_ONCE);                                               \
        (void)uv_timer_stop(&(lab)->guard);                                                        \
        assert_true(condition);                                                                    \
    } while (0)

static void lab_free(struct lab *lab)
{
    uv_close((uv_handle_t *)&lab->guard, NULL);
    while (uv_run(&lab->loop, UV_RUN_DEFAULT))
        ;
    assert_int_equal(uv_loop_close(&lab->loop), 0); /* every handle is gone */
    free(lab);
}

static void on_connection(void *context, int fd, const struct address *from)
{
    struct lab *lab = context;
    lab->n_accepted++;
    if (lab->accepted_fd >= 0)
        (void)close(lab->accepted_fd);
    lab->accepted_fd = fd;
    lab->accepted_from = *from;
}

static void on_dialled(void *context, enum err e, int fd)
{
    struct lab *lab = context;
    lab->n_dials++;
    lab->dial_err = e;
    lab->dialled_fd = fd;
}

static struct net_listener *listen_on(struct lab *lab, uint16_t port)
{
    struct net_listener_options o = {.port = port, .context = lab, .on_connection = on_connection};
    struct net_listener *l;
    struct err_text text;
    assert_int_equal(net_listen(&lab->loop, &o, &l, &text), ERR_OK);
    assert_true(net_listener_port(l) != 0);
    return l;
}

static struct address address(const char *text, uint16_t port)
{
    struct address a;
    assert_int_equal(net_address_parse(text, port, &a), ERR_OK);
    return a;
}

static enum err dial(struct lab *lab, struct address to, uint32_t interface)
{
    struct net_dial_options o = {.to = to,
                                 .interface = interface,
                                 .timeout_ms = GUARD_MS / 2,
                                 .context = lab,
                                 .on_done = on_dialled};
    struct net_dial *d;
    lab->n_dials = 0;
    return net_connect(&lab->loop, &o, &d);
}

static void connect_pair(struct lab *lab, struct address to, uint32_t interface)
{
    int n = lab->n_accepted;
    assert_int_equal(dial(lab, to, interface), ERR_OK);
    RUN_UNTIL(lab, lab->n_accepted > n && lab->n_dials == 1);
    assert_int_equal(lab->dial_err, ERR_OK);
}

static bool has_ipv6(void)
{
    struct net_interfaces all;
    assert_int_equal(net_interfaces_get(&all), ERR_OK);
    for (uint32_t i = 0; i < all.n; i++) {
        for (unsigned k = 0; k < all.list[i].n_addresses; k++) {
            struct address *a = &all.list[i].addresses[k];
            if (a->family == NET_IPV6 && address_is_loopback(a))
                return true;
        }
    }
    return false;
}

static uint32_t loopback_index(void)
{
    struct net_interfaces all;
    assert_int_equal(net_interfaces_get(&all), ERR_OK);
    for (uint32_t i = 0; i < all.n; i++) {
        if (all.list[i].kind == NET_LOOPBACK)
            return all.list[i].index;
    }
    fail_msg("no loopback interface");
    return 0;
}

static void close_fds(struct lab *lab)
{
    closep(&lab->accepted_fd);
    closep(&lab->dialled_fd);
    lab->accepted_fd = lab->dialled_fd = -1;
}

/* ---- addresses ---- */

static void check_text(const char *text, enum err expected, const char *formatted)
{
    struct address a;
    char out[ADDRESS_TEXT_MAX];
    assert_int_equal(net_address_parse(text, 99, &a), expected);
    if (expected != ERR_OK)
        return;
    net_address_name(&a);
    address_text(&a, out);
    assert_string_equal(out, formatted);
}

static void test_addresses_and_what_they_are(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        bool loopback, link_local;
    } rows[] = {
        {"127.0.0.1", true, false},   {"127.255.0.9", true, false}, {"::1", true, false},
        {"169.254.3.4", false, true}, {"fe80::1%1", false, true},   {"10.0.0.1", false, false},
        {"fd00::1", false, false},    {"::2", false, false},
    };
    for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
        struct address a;
        assert_int_equal(net_address_parse(rows[i].text, 0, &a), ERR_OK);
        assert_int_equal(address_is_loopback(&a), rows[i].loopback);
        assert_int_equal(address_is_link_local(&a), rows[i].link_local);
        a.family = NET_NONE; /* no address is neither, whatever its bytes */
        assert_false(address_is_loopback(&a));
        assert_false(address_is_link_local(&a));
    }
}

static void test_addresses_as_text(void **state)
{
    (void)state;
    check_text("10.0.0.1", ERR_OK, "10.0.0.1:99");
    check_text("10.0.0.1:26840", ERR_OK, "10.0.0.1:26840");
    check_text("::1", ERR_OK, "[::1]:99");
    check_text("[fd00::1:2]:5", ERR_OK, "[fd00::1:2]:5");
    check_text("[::1]", ERR_OK, "[::1]:99");
    check_text("fe80::1%1", ERR_OK, "[fe80::1%lo]:99");
    check_text("fe80::1%lo", ERR_OK, "[fe80::1%lo]:99");
    check_text("fe80::1%nosuchif", ERR_NOT_FOUND, NULL);
    check_text("fd00::1%lo", ERR_INVALID, NULL);
    check_text("10.0.0.1:0", ERR_INVALID, NULL);
    check_text("10.0.0.1:65536", ERR_INVALID, NULL);
    check_text("10.0.0.1:1x", ERR_INVALID, NULL);
    check_text("10.0.0", ERR_INVALID, NULL);
    check_text("", ERR_INVALID, NULL);
    check_text("[::1", ERR_INVALID, NULL);
    check_text("[::1]5", ERR_INVALID, NULL);
    check_text("host", ERR_INVALID, NULL);
    struct sockaddr_storage s;
    struct address a = address("fe80::1%1", 7), b;
    (void)net_address_to(&a, &s);
    assert_int_equal(net_address_of(&s, &b), ERR_OK);
    assert_true(address_eq(&a, &b));
}

static void test_loopback_is_known(void **state)
{
    (void)state;
    assert_true(loopback_index() > 0);
    assert_string_equal(net_kind_name(NET_LOOPBACK), "loopback");
    assert_string_equal(net_kind_name(200), "other");
}

/* ---- connections ---- */

static void test_both_families_reach_one_port(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0);
    connect_pair(lab, address("127.0.0.1", net_listener_port(l)), 0);
    assert_int_equal(lab->accepted_from.family, NET_IPV4);
    close_fds(lab);
    connect_pair(lab, address("127.0.0.1", net_listener_port(l)), loopback_index());
    close_fds(lab);
    if (has_ipv6()) {
        connect_pair(lab, address("::1", net_listener_port(l)), loopback_index());
        assert_int_equal(lab->accepted_from.family, NET_IPV6);
        close_fds(lab);
    }
    net_listener_close(l);
    lab_free(lab);
}

static void test_taken_port_is_said(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0), *second;
    struct err_text text;
    struct net_listener_options o = {.port = net_listener_port(l)};
    assert_int_equal(net_listen(&lab->loop, &o, &second, &text), ERR_EXISTS);
    assert_non_null(strstr(text.text, "taken"));
    net_listener_close(l);
    /* and free again at once */
    l = listen_on(lab, o.port);
    net_listener_close(l);
    lab_free(lab);
}

static void test_refused_and_unreachable_are_told_apart(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0);
    struct address gone = address("127.0.0.1", net_listener_port(l));
    net_listener_close(l);
    enum err e = dial(lab, gone, 0);
    if (e == ERR_OK) {
        RUN_UNTIL(lab, lab->n_dials == 1);
        e = lab->dial_err;
    }
    assert_int_equal(e, ERR_CLOSED);
    assert_int_equal(dial(lab, gone, 60000), ERR_NOT_FOUND);
    assert_int_equal(dial(lab, (struct address){.family = 9}, 0), ERR_INVALID);
    lab_free(lab);
}

/* A listener that never accepts and whose queue is full drops what comes: the dial's own deadline
 * ends it. A cancelled dial never calls back. */
static void test_dial_has_a_deadline(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    int deaf = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_storage s;
    struct address a = address("127.0.0.1", 1);
    a.port = 0;
    socklen_t n = net_address_to(&a, &s);
    assert_int_equal(bind(deaf, (struct sockaddr *)&s, n), 0);
    assert_int_equal(listen(deaf, 0), 0);
    assert_int_equal(getsockname(deaf, (struct sockaddr *)&s, &n), 0);
    assert_int_equal(net_address_of(&s, &a), ERR_OK);
    struct net_dial *d[8];
    struct net_dial_options o = {.to = a, .timeout_ms = 50, .context = lab, .on_done = on_dialled};
    lab->dial_err = ERR_OK;
    while (lab->dial_err == ERR_OK && lab->n_dials < 8) {
        int before = lab->n_dials;
        assert_int_equal(net_connect(&lab->loop, &o, &d[0]), ERR_OK);
        RUN_UNTIL(lab, lab->n_dials > before);
        closep(&lab->dialled_fd);
    }
    assert_int_equal(lab->dial_err, ERR_TIMEOUT);
    int before = lab->n_dials;
    assert_int_equal(net_connect(&lab->loop, &o, &d[0]), ERR_OK);
    net_dial_cancel(d[0]);
    for (int i = 0; i < 4; i++)
        (void)uv_run(&lab->loop, UV_RUN_NOWAIT);
    assert_int_equal(lab->n_dials, before);
    (void)close(deaf);
    lab_free(lab);
}

/* ---- streams ---- */

static void on_bytes(void *context, const uint8_t *bytes, size_t n)
{
    struct lab *lab = context;
    assert_true(lab->n_bytes + n <= sizeof lab->bytes);
    memcpy(lab->bytes + lab->n_bytes, bytes, n);
    lab->n_bytes += n;
}

static void on_end(void *context, enum err e)
{
    struct lab *lab = context;
    lab->n_ends++;
    lab->end = e;
}

static void on_drained(void *context)
{
    ((struct lab *)context)->n_drained++;
}

static struct net_stream *stream_on(struct lab *lab, int fd, size_t queue, size_t want)
{
    struct net_stream_options o = {.fd = fd,
                                   .queue_bytes_max = queue,
                                   .read_bytes_max = want,
                                   .context = lab,
                                   .on_bytes = on_bytes,
                                   .on_end = on_end,
                                   .on_drained = on_drained};
    struct net_stream *s;
    assert_int_equal(net_stream_new(&lab->loop, &o, &s), ERR_OK);
    return s;
}

static void test_stream_carries_and_drains(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0);
    connect_pair(lab, address("127.0.0.1", net_listener_port(l)), 0);
    enum { N = 600 * 1000 };
    uint8_t *sent = malloc(N);
    for (size_t i = 0; i < N; i++)
        sent[i] = (uint8_t)(i * 7 + i / 251);
    int small = 8192;
    (void)setsockopt(lab->dialled_fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    struct net_stream *a = stream_on(lab, lab->dialled_fd, N, 0);
    struct net_stream *b = stream_on(lab, lab->accepted_fd, 100, SIZE_MAX);
    assert_int_equal(net_stream_write(a, sent, N), ERR_OK);
    assert_int_equal(net_stream_write(a, sent, N), ERR_LIMIT);
    assert_true(net_stream_queued(a) > 0);
    int fd;
    assert_int_equal(net_stream_detach(a, &fd), ERR_BUSY);
    RUN_UNTIL(lab, lab->n_bytes == N && lab->n_drained == 1);
    assert_memory_equal(lab->bytes, sent, N);
    net_stream_close(a);
    RUN_UNTIL(lab, lab->n_ends == 1);
    assert_int_equal(lab->end, ERR_CLOSED);
    assert_int_equal(net_stream_write(b, sent, 1), ERR_CLOSED);
    net_stream_close(b);
    net_listener_close(l);
    free(sent);
    lab_free(lab);
}

/* Only what was wanted is read; the rest is there for who gets the descriptor. */
static void test_detach_leaves_the_rest_unread(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0);
    connect_pair(lab, address("127.0.0.1", net_listener_port(l)), 0);
    struct net_stream *b = stream_on(lab, lab->accepted_fd, 100, 5);
    assert_int_equal(send(lab->dialled_fd, "hellorest", 9, 0), 9);
    RUN_UNTIL(lab, lab->n_bytes == 5);
    int fd = -1;
    assert_int_equal(net_stream_detach(b, &fd), ERR_OK);
    char rest[8];
    assert_int_equal(recv(fd, rest, sizeof rest, 0), 4);
    assert_memory_equal(rest, "rest", 4);
    assert_memory_equal(lab->bytes, "hello", 5);
    close_fds(lab);
    net_listener_close(l);
    lab_free(lab);
}

static void test_idle_stream_meets_its_deadline(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0);
    connect_pair(lab, address("127.0.0.1", net_listener_port(l)), 0);
    struct net_stream *b = stream_on(lab, lab->accepted_fd, 100, 5);
    net_stream_deadline(b, 20);
    RUN_UNTIL(lab, lab->n_ends == 1);
    assert_int_equal(lab->end, ERR_TIMEOUT);
    net_stream_close(b);
    (void)close(lab->dialled_fd);
    net_listener_close(l);
    lab_free(lab);
}

/* With no descriptor left, connections are refused and the listener lives on. */
static void test_full_descriptor_table_is_survived(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener *l = listen_on(lab, 0);
    struct address to = address("127.0.0.1", net_listener_port(l));
    int clients[4];
    struct sockaddr_storage s;
    socklen_t n = net_address_to(&to, &s);
    for (int i = 0; i < 4; i++)
        clients[i] = socket(AF_INET, SOCK_STREAM, 0);
    struct rlimit old, tight;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
    int next = dup(0);
    (void)close(next);
    tight = old;
    tight.rlim_cur = (rlim_t)next;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    for (int i = 0; i < 3; i++)
        assert_int_equal(connect(clients[i], (struct sockaddr *)&s, n), 0);
    for (int i = 0; i < 3; i++) {
        struct pollfd p = {clients[i], POLLIN, 0};
        RUN_UNTIL(lab, (uv_run(&lab->loop, UV_RUN_NOWAIT), poll(&p, 1, 0)) == 1);
        char byte;
        assert_true(recv(clients[i], &byte, 1, 0) <= 0); /* closed by the other side */
    }
    assert_int_equal(lab->n_accepted, 0);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
    assert_int_equal(connect(clients[3], (struct sockaddr *)&s, n), 0);
    RUN_UNTIL(lab, lab->n_accepted == 1);
    for (int i = 0; i < 4; i++)
        (void)close(clients[i]);
    close_fds(lab);
    net_listener_close(l);
    lab_free(lab);
}

/* ---- datagrams ---- */

static void on_datagram(void *context, const struct net_datagram *d)
{
    struct lab *lab = context;
    lab->n_datagrams++;
    lab->datagram = *d;
    memcpy(lab->datagram_bytes, d->bytes, d->n);
}

static void check_datagram(struct lab *lab, struct net_udp *u, struct address to,
                           uint32_t interface)
{
    int n = lab->n_datagrams;
    uint8_t body[1200];
    memset(body, n + 1, sizeof body);
    assert_int_equal(net_udp_send(u, &to, interface, body, sizeof body), ERR_OK);
    RUN_UNTIL(lab, lab->n_datagrams == n + 1);
    assert_int_equal(lab->datagram.n, sizeof body);
    assert_memory_equal(lab->datagram_bytes, body, sizeof body);
    assert_int_equal(lab->datagram.from.family, to.family);
    assert_int_equal(lab->datagram.from.port, net_udp_port(u));
    assert_true(address_is_loopback(&lab->datagram.from));
    assert_int_equal(lab->datagram.interface, loopback_index());
    assert_true(lab->datagram.received_us > 0);
}

static void test_datagrams_of_both_families(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct net_listener_options lo = {.context = lab, .on_connection = on_connection};
    struct net_udp_options uo = {.context = lab, .on_datagram = on_datagram};
    struct net_listener *l;
    struct net_udp *u, *second;
    struct err_text text;
    assert_int_equal(net_listen_both(&lab->loop, &lo, &uo, &l, &u, &text), ERR_OK);
    uint16_t port = net_udp_port(u);
    assert_int_equal(port, net_listener_port(l));
    check_datagram(lab, u, address("127.0.0.1", port), 0);
    check_datagram(lab, u, address("127.0.0.1", port), loopback_index());
    if (has_ipv6()) {
        check_datagram(lab, u, address("::1", port), 0);
        check_datagram(lab, u, address("::1", port), loopback_index());
    }
    /* one that is too long is dropped, the next arrives */
    uint8_t big[NET_DATAGRAM_MAX + 1] = {0};
    struct address to = address("127.0.0.1", port);
    assert_int_equal(net_udp_send(u, &to, 0, big, sizeof big), ERR_OK);
    check_datagram(lab, u, to, 0);
    assert_int_equal(net_udp_send(u, &to, 60000, big, 1), ERR_NOT_FOUND);
    lo.port = port;
    struct net_listener *l2;
    assert_int_equal(net_listen_both(&lab->loop, &lo, &uo, &l2, &second, &text), ERR_EXISTS);
    uo.port = port;
    assert_int_equal(net_udp_new(&lab->loop, &uo, &second, &text), ERR_EXISTS);
    assert_non_null(strstr(text.text, "UDP"));
    net_udp_close(u);
    net_listener_close(l);
    lab_free(lab);
}

static void on_change(void *context, const struct net_interfaces *now)
{
    struct lab *lab = context;
    lab->n_ends += now->n == 1 && now->list[0].kind == NET_LOOPBACK;
}

#ifdef __linux__
/* In a network namespace of its own, whose loopback is down until we put it up. */
static int watch_in_namespace(void)
{
    if (unshare(CLONE_NEWNET) < 0 && unshare(CLONE_NEWUSER | CLONE_NEWNET) < 0)
        return 77;
    struct lab *lab = lab_new();
    struct net_watch *w;
    assert_int_equal(net_watch_new(&lab->loop, lab, on_change, &w), ERR_OK);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    assert_int_equal(ioctl(fd, SIOCSIFFLAGS, &request), 0);
    RUN_UNTIL(lab, lab->n_ends == 1);
    net_watch_close(w);
    (void)close(fd);
    lab_free(lab);
    return 0;
}

static void test_watch_sees_an_interface_come(void **state)
{
    (void)state;
    pid_t child = fork();
    if (child == 0)
        _exit(watch_in_namespace());
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        skip();
    assert_int_equal(status, 0);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_addresses_as_text),
        cmocka_unit_test(test_addresses_and_what_they_are),
        cmocka_unit_test(test_loopback_is_known),
        cmocka_unit_test(test_both_families_reach_one_port),
        cmocka_unit_test(test_taken_port_is_said),
        cmocka_unit_test(test_refused_and_unreachable_are_told_apart),
        cmocka_unit_test(test_dial_has_a_deadline),
        cmocka_unit_test(test_stream_carries_and_drains),
        cmocka_unit_test(test_detach_leaves_the_rest_unread),
        cmocka_unit_test(test_idle_stream_meets_its_deadline),
        cmocka_unit_test(test_full_descriptor_table_is_survived),
        cmocka_unit_test(test_datagrams_of_both_families),
#ifdef __linux__
        cmocka_unit_test(test_watch_sees_an_interface_come),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
