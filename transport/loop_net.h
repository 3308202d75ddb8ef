/* Sockets on the libuv loop: listeners, outgoing connections, byte streams, datagrams, and the
 * interfaces of the machine. Shells: they move bytes and decide nothing.
 *
 * Plain descriptors watched by uv_poll_t, so that a connection can be detached and handed to
 * another thread. All objects belong to the loop thread. x_close() is immediate for the caller: no
 * callback comes after it, the memory goes when the loop next runs. A callback may close its own
 * object. Every read, queue and number of connections is bounded. */
#ifndef COVEY_TRANSPORT_LOOP_NET_H
#define COVEY_TRANSPORT_LOOP_NET_H

#include "base/err.h"
#include "transport/net.h"

#include <uv.h>

#include <stddef.h>
#include <stdint.h>

enum {
    NET_READ_BYTES_MAX = 64 << 10, /* one on_bytes call */
    NET_ACCEPTS_PER_WAKE = 32,
    NET_DATAGRAM_MAX = 2048, /* longer ones are dropped */
    NET_DATAGRAMS_PER_WAKE = 64,
};

/* ---- listener ---- */

struct net_listener;

struct net_listener_options {
    uint16_t port; /* 0: any free one, the same for both families */
    void *context;
    /* `fd` is the callee's now: connected, non-blocking, close-on-exec. */
    void (*on_connection)(void *context, int fd, const struct address *from);
};

/* Listens on every address over IPv4 and IPv6 (IPv4 alone where the machine has no IPv6).
 * ERR_EXISTS: the port is taken, `text` says so in plain words. ERR_DENIED: a privileged port. */
enum err net_listen(uv_loop_t *loop, const struct net_listener_options *options,
                    struct net_listener **ret, struct err_text *text);
uint16_t net_listener_port(const struct net_listener *l);
void net_listener_close(struct net_listener *l);

/* ---- outgoing connection ---- */

struct net_dial;

struct net_dial_options {
    struct address to;
    uint32_t interface; /* leave through it; 0: as the system routes */
    uint32_t timeout_ms;
    void *context;
    /* Once, never from within net_connect; the dial is gone then. On ERR_OK `fd` is the callee's;
     * else -1. ERR_CLOSED: refused. ERR_TIMEOUT. ERR_NOT_FOUND: no route or interface. ERR_IO. */
    void (*on_done)(void *context, enum err e, int fd);
};

enum err net_connect(uv_loop_t *loop, const struct net_dial_options *options,
                     struct net_dial **ret);
/* Gives up: on_done is not called. NULL is fine. */
void net_dial_cancel(struct net_dial *d);

/* ---- byte stream ---- */

struct net_stream;

struct net_stream_options {
    int fd;                 /* connected; taken over on success */
    size_t queue_bytes_max; /* bytes that may wait to be written */
    size_t read_bytes_max;  /* at most this many are read, ever, until net_stream_want; so that
                               nothing beyond a fixed-size message is taken before a detach */
    void *context;
    void (*on_bytes)(void *context, const uint8_t *bytes, size_t n);
    /* Once: the peer closed (ERR_CLOSED), the deadline passed (ERR_TIMEOUT), ERR_IO. The stream is
     * still to be closed by its owner. */
    void (*on_end)(void *context, enum err e);
    void (*on_drained)(void *context); /* the queue became empty; may be NULL */
};

/* ERR_INVALID, ERR_NO_MEMORY, ERR_IO. */
enum err net_stream_new(uv_loop_t *loop, const struct net_stream_options *options,
                        struct net_stream **ret);
/* How many further bytes may be read; 0 pauses, SIZE_MAX is no limit. */
void net_stream_want(struct net_stream *s, size_t n_bytes);
/* Ends the stream with ERR_TIMEOUT after so long, whatever happens, unless set anew; 0: none. */
void net_stream_deadline(struct net_stream *s, uint32_t ms);
/* Sends now what the system takes and queues the rest. ERR_LIMIT: the queue is full, nothing was
 * taken. ERR_CLOSED. */
enum err net_stream_write(struct net_stream *s, const void *bytes, size_t n);
size_t net_stream_queued(const struct net_stream *s);
/* Gives the descriptor back and frees the stream. Only with an empty queue, else ERR_BUSY. */
enum err net_stream_detach(struct net_stream *s, int *ret_fd);
/* Closes at once; what is queued is lost. NULL is fine. */
void net_stream_close(struct net_stream *s);

/* ---- datagrams ---- */

struct net_udp;

struct net_datagram {
    struct address from;
    uint32_t interface; /* that it came in by */
    const uint8_t *bytes;
    size_t n;
    uint64_t received_us; /* monotonic, when it was read */
};

struct net_udp_options {
    uint16_t port; /* 0: any, the same for both families */
    void *context;
    void (*on_datagram)(void *context, const struct net_datagram *d);
};

/* Errors as net_listen. */
enum err net_udp_new(uv_loop_t *loop, const struct net_udp_options *options, struct net_udp **ret,
                     struct err_text *text);
uint16_t net_udp_port(const struct net_udp *u);
/* Through the interface, or as the system routes when 0. A datagram is lost or sent, never queued:
 * ERR_AGAIN (the system's buffer is full), ERR_NOT_FOUND (no route or interface), ERR_IO. */
enum err net_udp_send(struct net_udp *u, const struct address *to, uint32_t interface,
                      const void *bytes, size_t n);
void net_udp_close(struct net_udp *u);

/* A TCP listener and a UDP socket on one port, as the control port wants; with port 0 it tries
 * until both are free. `listener->port` counts, `udp->port` is ignored. */
enum err net_listen_both(uv_loop_t *loop, const struct net_listener_options *listener,
                         const struct net_udp_options *udp, struct net_listener **ret_listener,
                         struct net_udp **ret_udp, struct err_text *text);

/* ---- interfaces ---- */

struct net_watch;

/* Calls back soon after interfaces or addresses changed (a burst of changes is one call), never
 * from within. The first state is the caller's to get (net_interfaces_get). */
enum err net_watch_new(uv_loop_t *loop, void *context,
                       void (*on_change)(void *context, const struct net_interfaces *now),
                       struct net_watch **ret);
void net_watch_close(struct net_watch *w);

#endif
