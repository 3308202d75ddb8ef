/* Datagrams and the watch over interfaces: the other half of transport/loop_net.h. */
#define __APPLE_USE_RFC_3542 1 /* IPV6_RECVPKTINFO on macOS; means nothing elsewhere */
#include "transport/loop_net.h"

#include "base/clock.h"
#include "base/util.h"
#include "transport/loop_socket.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

enum {
    BOTH_TRIES = 16,
    SETTLE_MS = 100, /* a cable that is plugged in makes a burst of changes */
};

/* ---- datagrams ---- */

struct udp_end {
    uv_poll_t poll;
    int fd;
};

struct net_udp {
    struct udp_end ends[LOOP_SOCKET_BOTH]; /* IPv6, IPv4 */
    struct net_udp_options options;
    uint16_t port;
    unsigned n_open;
    bool closed;
};

union control {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(sizeof(struct in6_pktinfo)) + CMSG_SPACE(sizeof(struct in_pktinfo))];
};

static uint32_t interface_of(struct msghdr *m)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
            struct in_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof info);
            return (uint32_t)info.ipi_ifindex;
        }
        if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
            struct in6_pktinfo info;
            memcpy(&info, CMSG_DATA(c), sizeof info);
            return (uint32_t)info.ipi6_ifindex;
        }
    }
    return 0;
}

/* false: nothing is left. */
static bool receive_one(struct net_udp *u, int fd)
{
    uint8_t bytes[NET_DATAGRAM_MAX + 1];
    struct sockaddr_storage a = {0};
    union control control;
    struct iovec piece = {bytes, sizeof bytes};
    struct msghdr m = {.msg_name = &a,
                       .msg_namelen = sizeof a,
                       .msg_iov = &piece,
                       .msg_iovlen = 1,
                       .msg_control = &control,
                       .msg_controllen = sizeof control};
    ssize_t n = recvmsg(fd, &m, 0);
    if (n < 0)
        return errno != EAGAIN && errno != EWOULDBLOCK;
    struct net_datagram d = {.bytes = bytes, .n = (size_t)n, .received_us = clock_monotonic_us()};
    d.interface = interface_of(&m);
    if (n > NET_DATAGRAM_MAX || net_address_of(&a, &d.from) != ERR_OK)
        return true;
    u->options.on_datagram(u->options.context, &d);
    return true;
}

static void on_udp_readable(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct net_udp *u = poll->data;
    struct udp_end *end = poll == &u->ends[0].poll ? &u->ends[0] : &u->ends[1];
    for (int i = 0; i < NET_DATAGRAMS_PER_WAKE && !u->closed; i++) {
        if (!receive_one(u, end->fd))
            break;
    }
    if (status < 0 && !u->closed) /* libuv stops watching after an error */
        (void)uv_poll_start(poll, UV_READABLE, on_udp_readable);
}

static bool ask_for_interface(int fd, uint8_t family)
{
    int on = 1;
    if (family == NET_IPV4)
        return setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &on, sizeof on) == 0;
    return setsockopt(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof on) == 0;
}

enum err net_udp_new(uv_loop_t *loop, const struct net_udp_options *options, struct net_udp **ret,
                     struct err_text *text)
{
    int fds[LOOP_SOCKET_BOTH];
    struct net_udp *u = calloc(1, sizeof *u);
    if (!u)
        return err_set(text, ERR_NO_MEMORY, "no memory for a datagram socket");
    enum err e = loop_socket_bind_both(SOCK_DGRAM, options->port, fds, &u->port, text);
    if (e != ERR_OK) {
        free(u);
        return e;
    }
    u->options = *options;
    for (int i = 0; i < LOOP_SOCKET_BOTH; i++) {
        u->ends[i].fd = fds[i];
        u->ends[i].poll.data = u;
        if (fds[i] < 0 || e != ERR_OK)
            continue;
        if (!ask_for_interface(fds[i], i == 0 ? NET_IPV6 : NET_IPV4) ||
            uv_poll_init(loop, &u->ends[i].poll, fds[i]) < 0) {
            e = ERR_IO;
            continue;
        }
        u->n_open++;
        if (uv_poll_start(&u->ends[i].poll, UV_READABLE, on_udp_readable) < 0)
            e = ERR_IO;
    }
    if (e != ERR_OK) {
        net_udp_close(u);
        return err_set(text, e, "cannot watch the datagram socket");
    }
    *ret = u;
    return ERR_OK;
}

uint16_t net_udp_port(const struct net_udp *u)
{
    return u->port;
}

static void put_interface(struct msghdr *m, union control *control, uint8_t family, uint32_t index)
{
    bool v4 = family == NET_IPV4;
    size_t n = v4 ? sizeof(struct in_pktinfo) : sizeof(struct in6_pktinfo);
    memset(control, 0, sizeof *control);
    m->msg_control = control;
    m->msg_controllen = (__typeof__(m->msg_controllen))CMSG_SPACE(n);
    struct cmsghdr *c = CMSG_FIRSTHDR(m);
    c->cmsg_level = v4 ? IPPROTO_IP : IPPROTO_IPV6;
    c->cmsg_type = v4 ? IP_PKTINFO : IPV6_PKTINFO;
    c->cmsg_len = (__typeof__(c->cmsg_len))CMSG_LEN(n);
    if (v4) {
        struct in_pktinfo info = {.ipi_ifindex = (__typeof__(info.ipi_ifindex))index};
        memcpy(CMSG_DATA(c), &info, sizeof info);
    } else {
        struct in6_pktinfo info = {.ipi6_ifindex = index};
        memcpy(CMSG_DATA(c), &info, sizeof info);
    }
}

enum err net_udp_send(struct net_udp *u, const struct address *to, uint32_t interface,
                      const void *bytes, size_t n)
{
    if (to->family != NET_IPV4 && to->family != NET_IPV6)
        return ERR_INVALID;
    int fd = u->ends[to->family == NET_IPV6 ? 0 : 1].fd;
    if (fd < 0)
        return ERR_NOT_FOUND;
    struct address dest = *to;
    if (!dest.scope && dest.family == NET_IPV6 && address_is_link_local(&dest))
        dest.scope = interface;
    struct sockaddr_storage a;
    union control control;
    struct iovec piece = {(void *)(uintptr_t)bytes, n};
    struct msghdr m = {.msg_name = &a, .msg_iov = &piece, .msg_iovlen = 1};
    m.msg_namelen = net_address_to(&dest, &a);
    if (interface)
        put_interface(&m, &control, dest.family, interface);
    ssize_t sent;
    do {
        sent = sendmsg(fd, &m, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return ERR_OK;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
        return ERR_AGAIN;
    return loop_socket_error(errno);
}

static void udp_gone(uv_handle_t *handle)
{
    struct net_udp *u = handle->data;
    if (--u->n_open == 0)
        free(u);
}

void net_udp_close(struct net_udp *u)
{
    if (!u || u->closed)
        return;
    u->closed = true;
    bool watched = u->n_open > 0;
    for (int i = 0; i < LOOP_SOCKET_BOTH; i++) {
        if (u->ends[i].fd < 0)
            continue;
        if (u->ends[i].poll.type == UV_POLL)
            uv_close((uv_handle_t *)&u->ends[i].poll, udp_gone);
        (void)close(u->ends[i].fd);
    }
    if (!watched)
        free(u);
}

enum err net_listen_both(uv_loop_t *loop, const struct net_listener_options *listener,
                         const struct net_udp_options *udp, struct net_listener **ret_listener,
                         struct net_udp **ret_udp, struct err_text *text)
{
    enum err e = ERR_EXISTS;
    for (int i = 0; e == ERR_EXISTS && i < (listener->port ? 1 : BOTH_TRIES); i++) {
        struct net_listener *l;
        TRY(net_listen(loop, listener, &l, text));
        struct net_udp_options o = *udp;
        o.port = net_listener_port(l);
        e = net_udp_new(loop, &o, ret_udp, text);
        if (e == ERR_OK)
            *ret_listener = l;
        else
            net_listener_close(l);
    }
    return e;
}

/* ---- interfaces ---- */

struct net_watch {
    uv_poll_t poll;
    uv_timer_t timer;
    int fd;
    unsigned n_open;
    void *context;
    void (*on_change)(void *context, const struct net_interfaces *now);
    struct net_interfaces last;
};

static void on_settled(uv_timer_t *timer)
{
    struct net_watch *w = timer->data;
    struct net_interfaces now;
    if (net_interfaces_get(&now) != ERR_OK || net_interfaces_eq(&now, &w->last))
        return;
    w->last = now;
    w->on_change(w->context, &now);
}

static void on_watch_readable(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct net_watch *w = poll->data;
    uint8_t bytes[8192];
    /* What they say does not matter, that they say something does; an overflow does too. */
    while (recv(w->fd, bytes, sizeof bytes, 0) > 0)
        ;
    if (!uv_is_active((uv_handle_t *)&w->timer))
        (void)uv_timer_start(&w->timer, on_settled, SETTLE_MS, 0);
    if (status < 0)
        (void)uv_poll_start(poll, UV_READABLE, on_watch_readable);
}

enum err net_watch_new(uv_loop_t *loop, void *context,
                       void (*on_change)(void *context, const struct net_interfaces *now),
                       struct net_watch **ret)
{
    struct net_watch *w = calloc(1, sizeof *w);
    if (!w)
        return ERR_NO_MEMORY;
    w->fd = -1;
    enum err e = net_os_watch_open(&w->fd);
    if (e == ERR_OK)
        e = net_interfaces_get(&w->last);
    if (e == ERR_OK && uv_poll_init(loop, &w->poll, w->fd) < 0)
        e = ERR_IO;
    if (e != ERR_OK) {
        closep(&w->fd);
        free(w);
        return e;
    }
    (void)uv_timer_init(loop, &w->timer);
    w->n_open = 2;
    w->poll.data = w->timer.data = w;
    w->context = context;
    w->on_change = on_change;
    if (uv_poll_start(&w->poll, UV_READABLE, on_watch_readable) < 0) {
        net_watch_close(w);
        return ERR_IO;
    }
    *ret = w;
    return ERR_OK;
}

static void watch_gone(uv_handle_t *handle)
{
    struct net_watch *w = handle->data;
    if (--w->n_open == 0)
        free(w);
}

void net_watch_close(struct net_watch *w)
{
    if (!w)
        return;
    uv_close((uv_handle_t *)&w->poll, watch_gone);
    uv_close((uv_handle_t *)&w->timer, watch_gone);
    (void)close(w->fd);
}
