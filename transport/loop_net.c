#include "transport/loop_net.h"

#include "base/buf.h"
#include "base/util.h"
#include "transport/loop_socket.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>

/* ---- listener ---- */

struct listening {
    uv_poll_t poll; /* its data is the listener */
    int fd;
};

struct net_listener {
    struct listening ends[LOOP_SOCKET_BOTH];
    struct net_listener_options options;
    uint16_t port;
    int reserve; /* a descriptor to spare, so that a full table cannot make us spin */
    unsigned n_open;
    bool closed;
};

static void listener_gone(uv_handle_t *handle)
{
    struct net_listener *l = handle->data;
    if (--l->n_open == 0)
        free(l);
}

/* No descriptor is left: take the connection with the spare one and close it at once. */
static void refuse_one(struct net_listener *l, int fd)
{
    if (l->reserve >= 0)
        (void)close(l->reserve);
    int refused = accept(fd, NULL, NULL);
    if (refused >= 0)
        (void)close(refused);
    l->reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static bool accept_one(struct net_listener *l, int fd)
{
    struct sockaddr_storage a = {0};
    socklen_t n = sizeof a;
    int got = accept(fd, (struct sockaddr *)&a, &n);
    if (got < 0) {
        if (errno == EMFILE || errno == ENFILE)
            refuse_one(l, fd);
        return errno == EINTR || errno == ECONNABORTED;
    }
    struct address from;
    if (loop_socket_prepare(got) != ERR_OK || net_address_of(&a, &from) != ERR_OK) {
        (void)close(got);
        return true;
    }
    l->options.on_connection(l->options.context, got, &from);
    return true;
}

static void on_acceptable(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct net_listener *l = poll->data;
    struct listening *end = poll == &l->ends[0].poll ? &l->ends[0] : &l->ends[1];
    for (int i = 0; i < NET_ACCEPTS_PER_WAKE && !l->closed; i++) {
        if (!accept_one(l, end->fd))
            break;
    }
    if (status < 0 && !l->closed) /* libuv stops watching after an error */
        (void)uv_poll_start(poll, UV_READABLE, on_acceptable);
}

enum err net_listen(uv_loop_t *loop, const struct net_listener_options *options,
                    struct net_listener **ret, struct err_text *text)
{
    int fds[LOOP_SOCKET_BOTH];
    struct net_listener *l = calloc(1, sizeof *l);
    if (!l)
        return err_set(text, ERR_NO_MEMORY, "no memory for a listener");
    enum err e = loop_socket_bind_both(SOCK_STREAM, options->port, fds, &l->port, text);
    if (e != ERR_OK) {
        free(l);
        return e;
    }
    l->options = *options;
    l->reserve = open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (int i = 0; i < LOOP_SOCKET_BOTH; i++) {
        l->ends[i].fd = fds[i];
        l->ends[i].poll.data = l;
        if (fds[i] < 0)
            continue;
        if (uv_poll_init(loop, &l->ends[i].poll, fds[i]) < 0) {
            e = ERR_IO;
            break;
        }
        l->n_open++;
        if (uv_poll_start(&l->ends[i].poll, UV_READABLE, on_acceptable) < 0)
            e = ERR_IO;
    }
    if (e != ERR_OK) {
        net_listener_close(l);
        return err_set(text, e, "cannot watch the listening socket");
    }
    *ret = l;
    return ERR_OK;
}

uint16_t net_listener_port(const struct net_listener *l)
{
    return l->port;
}

void net_listener_close(struct net_listener *l)
{
    if (!l || l->closed)
        return;
    l->closed = true;
    bool watched = l->n_open > 0;
    for (int i = 0; i < LOOP_SOCKET_BOTH; i++) {
        if (l->ends[i].fd < 0)
            continue;
        if (l->ends[i].poll.type == UV_POLL)
            uv_close((uv_handle_t *)&l->ends[i].poll, listener_gone);
        (void)close(l->ends[i].fd);
    }
    closep(&l->reserve);
    if (!watched)
        free(l);
}

/* ---- outgoing connection ---- */

struct net_dial {
    uv_poll_t poll;
    uv_timer_t timer;
    struct net_dial_options options;
    int fd;
    unsigned n_open;
};

static void dial_gone(uv_handle_t *handle)
{
    struct net_dial *d = handle->data;
    if (--d->n_open == 0)
        free(d);
}

static void dial_end(struct net_dial *d)
{
    if (uv_is_closing((uv_handle_t *)&d->poll))
        return;
    uv_close((uv_handle_t *)&d->poll, dial_gone);
    uv_close((uv_handle_t *)&d->timer, dial_gone);
}

static void dial_done(struct net_dial *d, enum err e)
{
    struct net_dial_options o = d->options;
    int fd = d->fd;
    dial_end(d);
    if (e != ERR_OK) {
        (void)close(fd);
        fd = -1;
    }
    o.on_done(o.context, e, fd);
}

/* A connection of a port to itself, which TCP allows, is no peer. */
static bool is_own_end(int fd)
{
    struct sockaddr_storage a = {0}, b = {0};
    struct address own, peer;
    socklen_t n_a = sizeof a, n_b = sizeof b;
    return getsockname(fd, (struct sockaddr *)&a, &n_a) == 0 &&
           getpeername(fd, (struct sockaddr *)&b, &n_b) == 0 &&
           net_address_of(&a, &own) == ERR_OK && net_address_of(&b, &peer) == ERR_OK &&
           address_eq(&own, &peer);
}

static void on_connected(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct net_dial *d = poll->data;
    int number = 0;
    socklen_t n = sizeof number;
    if (getsockopt(d->fd, SOL_SOCKET, SO_ERROR, &number, &n) < 0)
        number = errno;
    enum err e = loop_socket_error(number);
    if (e == ERR_OK && is_own_end(d->fd))
        e = ERR_CLOSED;
    dial_done(d, e);
}

static void on_dial_timeout(uv_timer_t *timer)
{
    dial_done(timer->data, ERR_TIMEOUT);
}

static enum err begin_connect(const struct net_dial_options *o, int *ret_fd)
{
    int fd;
    if (o->to.family != NET_IPV4 && o->to.family != NET_IPV6)
        return ERR_INVALID;
    TRY(loop_socket_open(o->to.family, SOCK_STREAM, &fd));
    enum err e = ERR_OK;
    if (o->interface)
        e = net_os_bind_interface(fd, o->to.family, o->interface);
    struct sockaddr_storage a;
    struct address to = o->to;
    if (!to.scope && to.family == NET_IPV6 && address_is_link_local(&to))
        to.scope = o->interface;
    socklen_t n = net_address_to(&to, &a);
    if (e == ERR_OK && connect(fd, (struct sockaddr *)&a, n) < 0 && errno != EINPROGRESS &&
        errno != EINTR)
        e = loop_socket_error(errno);
    if (e != ERR_OK) {
        (void)close(fd);
        return e;
    }
    *ret_fd = fd;
    return ERR_OK;
}

enum err net_connect(uv_loop_t *loop, const struct net_dial_options *options, struct net_dial **ret)
{
    struct net_dial *d = calloc(1, sizeof *d);
    if (!d)
        return ERR_NO_MEMORY;
    d->options = *options;
    enum err e = begin_connect(options, &d->fd);
    if (e == ERR_OK && uv_poll_init(loop, &d->poll, d->fd) < 0) {
        (void)close(d->fd);
        e = ERR_IO;
    }
    if (e != ERR_OK) {
        free(d);
        return e;
    }
    (void)uv_timer_init(loop, &d->timer);
    d->n_open = 2;
    d->poll.data = d->timer.data = d;
    if (uv_poll_start(&d->poll, UV_WRITABLE, on_connected) < 0 ||
        uv_timer_start(&d->timer, on_dial_timeout, options->timeout_ms, 0) < 0) {
        net_dial_cancel(d);
        return ERR_IO;
    }
    *ret = d;
    return ERR_OK;
}

void net_dial_cancel(struct net_dial *d)
{
    if (!d)
        return;
    dial_end(d);
    (void)close(d->fd);
}

/* ---- byte stream ---- */

struct net_stream {
    uv_poll_t poll;
    uv_timer_t timer;
    struct net_stream_options options;
    struct buf queue;
    size_t want;
    int fd;
    unsigned n_open;
    bool ended;  /* on_end was called */
    bool closed; /* by its owner */
};

static void on_stream_ready(uv_poll_t *poll, int status, int events);

static void stream_watch(struct net_stream *s)
{
    int events = 0;
    if (s->closed)
        return;
    if (!s->ended && s->want > 0)
        events |= UV_READABLE;
    if (!s->ended && s->queue.len > 0)
        events |= UV_WRITABLE;
    if (events)
        (void)uv_poll_start(&s->poll, events, on_stream_ready);
    else
        (void)uv_poll_stop(&s->poll);
}

static void stream_end(struct net_stream *s, enum err e)
{
    if (s->ended || s->closed)
        return;
    s->ended = true;
    stream_watch(s);
    (void)uv_timer_stop(&s->timer);
    s->options.on_end(s->options.context, e);
}

static enum err stream_flush(struct net_stream *s)
{
    while (s->queue.len > 0) {
        ssize_t n = send(s->fd, s->queue.data, s->queue.len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? ERR_OK : loop_socket_error(errno);
        buf_consume(&s->queue, (size_t)n);
    }
    return ERR_OK;
}

static void stream_read(struct net_stream *s)
{
    uint8_t bytes[NET_READ_BYTES_MAX];
    ssize_t n;
    do {
        n = recv(s->fd, bytes, MIN_OF(sizeof bytes, s->want), 0);
    } while (n < 0 && errno == EINTR);
    if (n > 0) {
        if (s->want != SIZE_MAX)
            s->want -= (size_t)n;
        s->options.on_bytes(s->options.context, bytes, (size_t)n);
    } else if (n == 0) {
        stream_end(s, ERR_CLOSED);
    } else if (errno != EAGAIN && errno != EWOULDBLOCK) {
        stream_end(s, loop_socket_error(errno));
    }
}

static void on_stream_ready(uv_poll_t *poll, int status, int events)
{
    struct net_stream *s = poll->data;
    if (s->queue.len > 0 && (status < 0 || (events & UV_WRITABLE))) {
        enum err e = stream_flush(s);
        if (e != ERR_OK)
            stream_end(s, e);
        else if (s->queue.len == 0 && s->options.on_drained)
            s->options.on_drained(s->options.context);
    }
    if (!s->closed && !s->ended && s->want > 0 && (status < 0 || (events & UV_READABLE)))
        stream_read(s);
    stream_watch(s);
}

static void on_stream_timeout(uv_timer_t *timer)
{
    stream_end(timer->data, ERR_TIMEOUT);
}

static void stream_gone(uv_handle_t *handle)
{
    struct net_stream *s = handle->data;
    if (--s->n_open > 0)
        return;
    buf_deinit(&s->queue);
    free(s);
}

enum err net_stream_new(uv_loop_t *loop, const struct net_stream_options *options,
                        struct net_stream **ret)
{
    int on = 1;
    if (options->fd < 0)
        return ERR_INVALID;
    TRY(loop_socket_prepare(options->fd));
    (void)setsockopt(options->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct net_stream *s = calloc(1, sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    if (uv_poll_init(loop, &s->poll, options->fd) < 0) {
        free(s);
        return ERR_IO;
    }
    (void)uv_timer_init(loop, &s->timer);
    s->n_open = 2;
    s->poll.data = s->timer.data = s;
    s->options = *options;
    s->fd = options->fd;
    s->queue = BUF_INIT(options->queue_bytes_max);
    s->want = options->read_bytes_max;
    stream_watch(s);
    *ret = s;
    return ERR_OK;
}

void net_stream_want(struct net_stream *s, size_t n_bytes)
{
    s->want = n_bytes;
    stream_watch(s);
}

void net_stream_deadline(struct net_stream *s, uint32_t ms)
{
    if (s->ended || s->closed)
        return;
    if (ms)
        (void)uv_timer_start(&s->timer, on_stream_timeout, ms, 0);
    else
        (void)uv_timer_stop(&s->timer);
}

enum err net_stream_write(struct net_stream *s, const void *bytes, size_t n)
{
    if (s->ended || s->closed)
        return ERR_CLOSED;
    if (n > s->options.queue_bytes_max || s->queue.len > s->options.queue_bytes_max - n)
        return ERR_LIMIT;
    bool idle = s->queue.len == 0;
    TRY(buf_append(&s->queue, bytes, n));
    if (idle) {
        enum err e = stream_flush(s);
        if (e != ERR_OK)
            return e;
    }
    stream_watch(s);
    return ERR_OK;
}

size_t net_stream_queued(const struct net_stream *s)
{
    return s->queue.len;
}

static void stream_release(struct net_stream *s)
{
    s->closed = true;
    uv_close((uv_handle_t *)&s->poll, stream_gone);
    uv_close((uv_handle_t *)&s->timer, stream_gone);
}

enum err net_stream_detach(struct net_stream *s, int *ret_fd)
{
    if (s->queue.len > 0)
        return ERR_BUSY;
    assert(!s->closed);
    *ret_fd = s->fd;
    stream_release(s);
    return ERR_OK;
}

void net_stream_close(struct net_stream *s)
{
    if (!s || s->closed)
        return;
    stream_release(s);
    (void)close(s->fd);
}
