#include "transport/link_tcp.h"

#include "base/clock.h"
#include "base/util.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    LINK_SEQ_AT = 16,
    ACK_AT = 24,
    /* A piece at least this long is sealed from where it lies, in records of its own: a second
     * record costs less than copying it. */
    DIRECT_MIN = 4096,
    /* Of what the system gives us at once: two whole records. */
    IN_BYTES = 2 * SEAL_RECORD_MAX,
    QUEUE_BYTES_MIN = 2 * SEAL_RECORD_MAX,
};

struct link_tcp {
    struct link link; /* first */
    int fd;
    enum err broken; /* why it is dead */
    struct seal *send, *receive;
    uint32_t frame_bytes_max;
    size_t queue_bytes_max;
    struct link_stats stats;

    uint8_t *out; /* sealed: [out_at, out_n) is not yet written */
    size_t out_at, out_n, out_cap;

    uint8_t *in; /* sealed: [in_at, in_n) is not yet opened */
    size_t in_at, in_n;

    uint8_t *frame; /* aligned; [0, frame_n) opened so far */
    size_t frame_n, frame_cap;
    size_t frame_len; /* 0: its first record is not here */
    bool frame_given; /* the caller has it; the next call starts anew */
};

static struct link_tcp *of(struct link *l)
{
    return (struct link_tcp *)l;
}

static const struct link_tcp *of_const(const struct link *l)
{
    return (const struct link_tcp *)l;
}

static enum err broken(struct link_tcp *t, enum err e)
{
    t->broken = e;
    return e;
}

/* ---- sending ---- */

static enum err flush(struct link_tcp *t)
{
    while (t->out_at < t->out_n) {
        ssize_t n = send(t->fd, t->out + t->out_at, t->out_n - t->out_at, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EINTR)
                continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK)
                return ERR_AGAIN;
            return broken(t, errno == EPIPE || errno == ECONNRESET ? ERR_CLOSED : ERR_IO);
        }
        t->out_at += (size_t)n;
        t->stats.n_bytes_sent += (uint64_t)n;
    }
    t->out_at = t->out_n = 0;
    return ERR_OK;
}

static enum err tcp_flush(struct link *l)
{
    struct link_tcp *t = of(l);
    return t->broken ? t->broken : flush(t);
}

/* Sealed size at most: each piece ends a record at worst, and so does each SEAL_PLAIN_MAX. */
static size_t sealed_max(size_t n, unsigned n_pieces)
{
    return n + (n / SEAL_PLAIN_MAX + (size_t)2 * n_pieces + 2) * SEAL_OVERHEAD;
}

static enum err make_room(struct link_tcp *t, size_t n)
{
    if (t->out_at > 0) {
        memmove(t->out, t->out + t->out_at, t->out_n - t->out_at);
        t->out_n -= t->out_at;
        t->out_at = 0;
    }
    if (n > t->queue_bytes_max)
        return ERR_LIMIT;
    if (t->out_n > t->queue_bytes_max - n)
        return ERR_AGAIN;
    if (t->out_cap - t->out_n >= n)
        return ERR_OK;
    size_t cap = MAX_OF(t->out_cap, (size_t)QUEUE_BYTES_MIN);
    while (cap < t->out_n + n)
        cap *= 2;
    cap = MIN_OF(cap, t->queue_bytes_max);
    uint8_t *out = realloc(t->out, cap);
    if (!out)
        return ERR_NO_MEMORY;
    t->out = out;
    t->out_cap = cap;
    return ERR_OK;
}

static void seal_out(struct link_tcp *t, const uint8_t *plain, size_t n)
{
    seal_record(t->send, plain, n, t->out + t->out_n);
    t->out_n += n + SEAL_OVERHEAD;
    /* The wire works while we seal on. An error is kept in t->broken. */
    if (t->out_n - t->out_at >= SEAL_PLAIN_MAX)
        (void)flush(t);
}

/* Long stretches from where they lie. */
static void seal_direct(struct link_tcp *t, const uint8_t *bytes, size_t n)
{
    while (n > 0) {
        size_t now = MIN_OF(n, (size_t)SEAL_PLAIN_MAX);
        seal_out(t, bytes, now);
        bytes += now;
        n -= now;
    }
}

/* The frame's first bytes and other short pieces are gathered where their record will be. */
static void seal_pieces(struct link_tcp *t, const struct link_piece *pieces, unsigned n_pieces)
{
    size_t n_gathered = 0;
    bool first = true;
    for (unsigned i = 0; i < n_pieces; i++) {
        const uint8_t *p = pieces[i].bytes;
        size_t left = pieces[i].n;
        while (left > 0) {
            if (!first && left >= DIRECT_MIN) {
                if (n_gathered > 0)
                    seal_out(t, t->out + t->out_n + SEAL_PREFIX_BYTES, n_gathered);
                n_gathered = 0;
                seal_direct(t, p, left);
                break;
            }
            size_t now = MIN_OF(left, SEAL_PLAIN_MAX - n_gathered);
            if (first && left >= DIRECT_MIN)
                now = LINK_HEADER_BYTES;
            memcpy(t->out + t->out_n + SEAL_PREFIX_BYTES + n_gathered, p, now);
            if (first)
                frame_stamp(t->out + t->out_n + SEAL_PREFIX_BYTES, t->stats.n_frames_sent + 1,
                            t->stats.n_frames_received);
            first = false;
            n_gathered += now;
            p += now;
            left -= now;
            if (n_gathered == SEAL_PLAIN_MAX) {
                seal_out(t, t->out + t->out_n + SEAL_PREFIX_BYTES, n_gathered);
                n_gathered = 0;
            }
        }
    }
    if (n_gathered > 0)
        seal_out(t, t->out + t->out_n + SEAL_PREFIX_BYTES, n_gathered);
}

static enum err tcp_send(struct link *l, const struct link_piece *pieces, unsigned n_pieces)
{
    struct link_tcp *t = of(l);
    if (t->broken)
        return t->broken;
    size_t n = 0;
    for (unsigned i = 0; i < n_pieces; i++)
        n += pieces[i].n;
    if (n_pieces < 1 || n_pieces > LINK_PIECES_MAX || pieces[0].n < LINK_HEADER_BYTES)
        return ERR_INVALID;
    struct reader r = reader_of(pieces[0].bytes, 4);
    if (read_u32(&r) != n)
        return ERR_INVALID;
    if (n > t->frame_bytes_max)
        return ERR_LIMIT;
    enum err e = flush(t);
    if (e != ERR_OK && e != ERR_AGAIN)
        return e;
    e = make_room(t, sealed_max(n, n_pieces));
    if (e != ERR_OK) {
        t->stats.n_again += e == ERR_AGAIN;
        return e;
    }
    seal_pieces(t, pieces, n_pieces);
    t->stats.n_frames_sent++;
    if (!t->broken)
        (void)flush(t);
    return t->broken;
}

/* ---- receiving ---- */

/* The record at in_at, when all of it is here. */
static enum err whole_record(const struct link_tcp *t, size_t *ret_n)
{
    size_t have = t->in_n - t->in_at, n;
    if (have < SEAL_PREFIX_BYTES)
        return ERR_AGAIN;
    TRY(seal_record_length(t->in + t->in_at, &n));
    if (have < n + SEAL_OVERHEAD)
        return ERR_AGAIN;
    *ret_n = n;
    return ERR_OK;
}

static enum err read_more(struct link_tcp *t)
{
    if (t->in_at > 0) {
        memmove(t->in, t->in + t->in_at, t->in_n - t->in_at);
        t->in_n -= t->in_at;
        t->in_at = 0;
    }
    assert(t->in_n < IN_BYTES);
    ssize_t n;
    do {
        n = recv(t->fd, t->in + t->in_n, IN_BYTES - t->in_n, 0);
    } while (n < 0 && errno == EINTR);
    if (n == 0)
        return ERR_CLOSED;
    if (n < 0) {
        if (errno == EAGAIN || errno == EWOULDBLOCK)
            return ERR_AGAIN;
        return errno == ECONNRESET || errno == EPIPE ? ERR_CLOSED : ERR_IO;
    }
    t->in_n += (size_t)n;
    t->stats.n_bytes_received += (uint64_t)n;
    t->stats.last_received_us = clock_monotonic_us();
    return ERR_OK;
}

static enum err grow_frame(struct link_tcp *t, size_t n)
{
    if (n <= t->frame_cap)
        return ERR_OK;
    size_t cap = (n + FRAME_ALIGN - 1) / FRAME_ALIGN * FRAME_ALIGN;
    uint8_t *frame = aligned_alloc(FRAME_ALIGN, cap);
    if (!frame)
        return ERR_NO_MEMORY;
    if (t->frame_n > 0)
        memcpy(frame, t->frame, t->frame_n);
    free(t->frame);
    t->frame = frame;
    t->frame_cap = cap;
    return ERR_OK;
}

/* The first record of a frame has told its length. */
static enum err begin_frame(struct link_tcp *t)
{
    if (t->frame_n < LINK_HEADER_BYTES)
        return ERR_CORRUPT;
    struct reader r = reader_of(t->frame, LINK_HEADER_BYTES);
    uint32_t len = read_u32(&r);
    (void)read_view(&r, LINK_SEQ_AT - 4);
    uint64_t link_seq = read_u64(&r), ack = read_u64(&r);
    if (len < t->frame_n || len > t->frame_bytes_max ||
        link_seq != t->stats.n_frames_received + 1 || ack > t->stats.n_frames_sent ||
        ack < t->stats.peer_ack)
        return ERR_CORRUPT;
    t->stats.peer_ack = ack;
    TRY(grow_frame(t, len));
    t->frame_len = len;
    return ERR_OK;
}

static enum err open_record(struct link_tcp *t, size_t n)
{
    if (t->frame_len > 0 && n > t->frame_len - t->frame_n)
        return ERR_CORRUPT;
    TRY(grow_frame(t, t->frame_n + n));
    TRY(seal_open(t->receive, t->in + t->in_at, n, t->frame + t->frame_n));
    t->in_at += n + SEAL_OVERHEAD;
    t->frame_n += n;
    return t->frame_len > 0 ? ERR_OK : begin_frame(t);
}

static enum err receive(struct link_tcp *t)
{
    if (t->frame_given) {
        t->frame_given = false;
        t->frame_n = t->frame_len = 0;
    }
    for (;;) {
        size_t n;
        enum err e = whole_record(t, &n);
        if (e == ERR_AGAIN)
            e = read_more(t);
        else if (e == ERR_OK)
            e = open_record(t, n);
        if (e != ERR_OK)
            return e;
        if (t->frame_len > 0 && t->frame_n == t->frame_len) {
            t->stats.n_frames_received++;
            t->frame_given = true;
            return ERR_OK;
        }
    }
}

static enum err tcp_receive(struct link *l, const uint8_t **ret_bytes, size_t *ret_n)
{
    struct link_tcp *t = of(l);
    /* What arrived before the peer went is still given out when only sending has failed. */
    if (t->broken && t->broken != ERR_CLOSED)
        return t->broken;
    enum err e = receive(t);
    if (e == ERR_OK) {
        *ret_bytes = t->frame;
        *ret_n = t->frame_len;
        return ERR_OK;
    }
    if (e == ERR_AGAIN)
        return t->broken ? t->broken : ERR_AGAIN;
    return broken(t, e);
}

/* ---- the rest ---- */

static bool tcp_has_input(const struct link *l)
{
    const struct link_tcp *t = of_const(l);
    size_t n;
    return t->broken != ERR_OK || whole_record(t, &n) != ERR_AGAIN;
}

static bool tcp_has_output(const struct link *l)
{
    const struct link_tcp *t = of_const(l);
    return t->broken == ERR_OK && t->out_at < t->out_n;
}

static int tcp_fd(const struct link *l)
{
    return of_const(l)->fd;
}

static size_t default_queue(uint32_t frame_bytes_max)
{
    size_t n = 2 * sealed_max(frame_bytes_max, LINK_PIECES_MAX);
    return MAX_OF(n, (size_t)QUEUE_BYTES_MIN);
}

static void tcp_set_frame_bytes_max(struct link *l, uint32_t n)
{
    struct link_tcp *t = of(l);
    t->frame_bytes_max =
        MIN_OF(MAX_OF(n, (uint32_t)FRAME_STEP_HEADER_MAX), (uint32_t)FRAME_BYTES_MAX);
    t->queue_bytes_max = MAX_OF(t->queue_bytes_max, default_queue(t->frame_bytes_max));
}

static void tcp_stats(const struct link *l, struct link_stats *ret)
{
    const struct link_tcp *t = of_const(l);
    *ret = t->stats;
    ret->n_bytes_queued = t->out_n - t->out_at;
}

static void tcp_free(struct link *l)
{
    struct link_tcp *t = of(l);
    if (t->fd >= 0)
        (void)close(t->fd);
    seal_free(t->send);
    seal_free(t->receive);
    free(t->out);
    free(t->in);
    free(t->frame);
    free(t);
}

static const struct link_ops tcp_ops = {
    .send = tcp_send,
    .receive = tcp_receive,
    .flush = tcp_flush,
    .has_input = tcp_has_input,
    .has_output = tcp_has_output,
    .fd = tcp_fd,
    .set_frame_bytes_max = tcp_set_frame_bytes_max,
    .stats = tcp_stats,
    .free = tcp_free,
};

static enum err prepare_socket(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return ERR_IO;
    int on = 1;
    /* Fails on sockets that are not TCP, which need it not. */
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
#ifdef SO_NOSIGPIPE
    (void)setsockopt(fd, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    return ERR_OK;
}

enum err link_tcp_new(const struct link_tcp_options *options, struct link **ret)
{
    if (options->fd < 0 || options->frame_bytes_max < FRAME_SMALL_MAX ||
        options->frame_bytes_max > FRAME_BYTES_MAX)
        return ERR_INVALID;
    TRY(prepare_socket(options->fd));
    struct link_tcp *t = calloc(1, sizeof *t);
    if (!t)
        return ERR_NO_MEMORY;
    t->link.ops = &tcp_ops;
    t->fd = -1;
    t->frame_bytes_max = options->frame_bytes_max;
    t->queue_bytes_max = options->queue_bytes_max
                             ? MAX_OF(options->queue_bytes_max, (size_t)QUEUE_BYTES_MIN)
                             : default_queue(options->frame_bytes_max);
    enum err e = seal_new(options->keys.cipher, options->keys.send, &t->send);
    if (e == ERR_OK)
        e = seal_new(options->keys.cipher, options->keys.receive, &t->receive);
    if (e == ERR_OK && !(t->in = malloc(IN_BYTES)))
        e = ERR_NO_MEMORY;
    if (e != ERR_OK) {
        tcp_free(&t->link);
        return e;
    }
    t->fd = options->fd;
    *ret = &t->link;
    return ERR_OK;
}
