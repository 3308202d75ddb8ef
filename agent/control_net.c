#include "agent/control_net.h"

#include "base/clock.h"
#include "base/util.h"

#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    CONNS_MAX = NODE_SESSIONS_MAX,
    QUEUE_BYTES_MAX = 4 << 20,
    DIAL_TIMEOUT_MS = 3000,
    FLUSH_CLOSE_MS = 1000,
    SILENT_MS = 3000, /* of a session: a cut cable breaks it, and another way is dialled */
};
#define ACCEPTED_BIT (UINT64_C(1) << 63)

struct conn {
    struct control_net *net;
    uint64_t id; /* 0: free */
    bool inbound, ready, authenticated, closing;
    struct address address;
    uint8_t psk[SESSION_KEY_BYTES];
    uint64_t psk_tag;
    struct net_dial *dial;
    struct net_stream *stream;
    struct session *session;
    struct datagram datagram;
    uint64_t since_us;
};

struct control_net {
    struct control_net_options options;
    uv_loop_t *loop;
    struct net_listener *listener;
    struct net_udp *udp;
    struct conn conns[CONNS_MAX];
    uint64_t next_accepted;
};

static struct conn *find(struct control_net *c, uint64_t id)
{
    for (int i = 0; id && i < CONNS_MAX; i++) {
        if (c->conns[i].id == id)
            return &c->conns[i];
    }
    return NULL;
}

static struct conn *new_conn(struct control_net *c, uint64_t id)
{
    for (int i = 0; i < CONNS_MAX; i++) {
        if (c->conns[i].id == 0) {
            c->conns[i] = (struct conn){.net = c, .id = id, .since_us = clock_monotonic_us()};
            return &c->conns[i];
        }
    }
    return NULL;
}

static void drop(struct conn *k)
{
    net_dial_cancel(k->dial);
    net_stream_close(k->stream);
    session_free(k->session);
    datagram_wipe(&k->datagram);
    sodium_memzero(k->psk, sizeof k->psk);
    *k = (struct conn){.id = 0};
}

static enum node_down down_of(enum err e)
{
    switch (e) {
    case ERR_TIMEOUT:
        return NODE_DOWN_TIMED_OUT;
    case ERR_DENIED:
    case ERR_CORRUPT:
    case ERR_UNSUPPORTED:
        return NODE_DOWN_DENIED;
    default:
        return NODE_DOWN_CLOSED;
    }
}

/* Drops the connection and, where the node core knows it, says so. */
static void report_down(struct conn *k, enum node_down how)
{
    struct control_net *c = k->net;
    struct node_event e = {.type = NODE_EVENT_SESSION_DOWN, .session = k->id, .down = how};
    bool known = (!k->inbound || k->ready) && !k->closing;
    drop(k);
    if (known)
        c->options.on_event(c->options.context, &e);
}

static bool flush(struct conn *k)
{
    size_t n;
    const uint8_t *bytes = session_output(k->session, &n);
    if (n == 0)
        return true;
    enum err e = net_stream_write(k->stream, bytes, n);
    if (e == ERR_LIMIT)
        return true; /* stays in the session's own bounded output until the stream has drained */
    if (e != ERR_OK)
        return false;
    session_output_consume(k->session, n);
    return true;
}

static void on_drained(void *context)
{
    struct conn *k = context;
    if (k->closing)
        drop(k);
    else if (!flush(k))
        report_down(k, NODE_DOWN_CLOSED);
}

static bool became_ready(struct conn *k, const struct session_event *event)
{
    struct control_net *c = k->net;
    uint8_t master[32];
    if (session_export(k->session, "probe", master) != ERR_OK)
        return false;
    datagram_init(&k->datagram, master, session_role(k->session));
    sodium_memzero(master, sizeof master);
    k->ready = true;
    struct node_event e = {.type = NODE_EVENT_SESSION_READY,
                           .session = k->id,
                           .inbound = k->inbound,
                           .address = k->address,
                           .psk_tag = k->inbound ? event->psk_tag : k->psk_tag};
    memcpy(e.peer_static, event->peer_static, sizeof e.peer_static);
    c->options.on_event(c->options.context, &e);
    return true;
}

static void on_bytes(void *context, const uint8_t *bytes, size_t n)
{
    struct conn *k = context;
    struct control_net *c = k->net;
    uint64_t id = k->id;
    while (n > 0) {
        size_t used = 0;
        struct session_event event = {SESSION_EVENT_NONE};
        enum err e = session_feed(k->session, bytes, n, &used, &event);
        if (e != ERR_OK) {
            report_down(k, k->ready ? NODE_DOWN_CLOSED : down_of(e));
            return;
        }
        bytes += used;
        n -= used;
        if (event.kind == SESSION_EVENT_READY && !became_ready(k, &event)) {
            report_down(k, NODE_DOWN_CLOSED);
            return;
        }
        if (event.kind == SESSION_EVENT_FRAME)
            c->options.on_event(c->options.context, &(struct node_event){.type = NODE_EVENT_MESSAGE,
                                                                         .session = id,
                                                                         .channel = event.channel,
                                                                         .bytes = event.bytes,
                                                                         .len = event.len});
        if (k->id != id || k->closing)
            return; /* closed by what it said */
    }
    if (!flush(k))
        report_down(k, NODE_DOWN_CLOSED);
}

static void on_end(void *context, enum err e)
{
    struct conn *k = context;
    /* A stranger's door closes without a word: for the dialler that looks like a close during the
     * handshake. */
    enum node_down how = down_of(e);
    if (!k->ready && how == NODE_DOWN_CLOSED)
        how = NODE_DOWN_DENIED;
    report_down(k, how);
}

static enum err open_stream(struct conn *k, int fd, const struct session_psk *psks, uint32_t n_psks)
{
    struct control_net *c = k->net;
    struct net_stream_options o = {.fd = fd,
                                   .queue_bytes_max = QUEUE_BYTES_MAX,
                                   .read_bytes_max = SIZE_MAX,
                                   .context = k,
                                   .on_bytes = on_bytes,
                                   .on_end = on_end,
                                   .on_drained = on_drained};
    struct session_options s = {.role = k->inbound ? SESSION_RESPONDER : SESSION_INITIATOR,
                                .static_public = c->options.static_public,
                                .static_secret = c->options.static_secret,
                                .psks = psks,
                                .n_psks = n_psks,
                                .random = c->options.random};
    TRY(session_new(&s, &k->session));
    net_os_give_up_after(fd, SILENT_MS);
    TRY(net_stream_new(c->loop, &o, &k->stream));
    net_stream_deadline(k->stream, SESSION_HANDSHAKE_US / 1000);
    return flush(k) ? ERR_OK : ERR_CLOSED;
}

/* ---- accepting ---- */

static void make_room(struct control_net *c)
{
    struct conn *oldest = NULL;
    uint32_t n = 0;
    for (int i = 0; i < CONNS_MAX; i++) {
        struct conn *k = &c->conns[i];
        if (k->id == 0 || !k->inbound || k->authenticated)
            continue;
        n++;
        if (!oldest || k->since_us < oldest->since_us)
            oldest = k;
    }
    if (n >= SESSION_UNAUTHENTICATED_MAX)
        report_down(oldest, NODE_DOWN_TIMED_OUT);
}

static void on_connection(void *context, int fd, const struct address *from)
{
    struct control_net *c = context;
    make_room(c);
    struct conn *k = new_conn(c, ACCEPTED_BIT | ++c->next_accepted);
    if (!k) {
        (void)close(fd);
        return;
    }
    k->inbound = true;
    k->address = *from;
    net_address_name(&k->address);
    struct session_psk psks[SESSION_PSKS_MAX];
    uint32_t n = c->options.psks(c->options.context, psks, SESSION_PSKS_MAX);
    enum err e = open_stream(k, fd, psks, n);
    sodium_memzero(psks, sizeof psks);
    if (e != ERR_OK) {
        if (!k->stream)
            (void)close(fd);
        drop(k);
    }
}

/* ---- dialling ---- */

static void on_dialled(void *context, enum err e, int fd)
{
    struct conn *k = context;
    k->dial = NULL;
    if (e != ERR_OK) {
        report_down(k, e == ERR_CLOSED    ? NODE_DOWN_REFUSED
                       : e == ERR_TIMEOUT ? NODE_DOWN_TIMED_OUT
                                          : NODE_DOWN_CLOSED);
        return;
    }
    struct session_psk psk = {.tag = k->psk_tag};
    memcpy(psk.key, k->psk, sizeof psk.key);
    e = open_stream(k, fd, &psk, 1);
    sodium_memzero(&psk, sizeof psk);
    if (e != ERR_OK) {
        if (!k->stream)
            (void)close(fd);
        report_down(k, NODE_DOWN_CLOSED);
    }
}

void control_net_dial(struct control_net *c, uint64_t session, const struct address *to,
                      const uint8_t psk[SESSION_KEY_BYTES], uint64_t psk_tag)
{
    struct conn *k = new_conn(c, session);
    if (!k)
        return; /* the core's own deadline for dials ends it */
    k->address = *to;
    k->psk_tag = psk_tag;
    memcpy(k->psk, psk, sizeof k->psk);
    struct net_dial_options o = {
        .to = *to, .timeout_ms = DIAL_TIMEOUT_MS, .context = k, .on_done = on_dialled};
    if (net_connect(c->loop, &o, &k->dial) != ERR_OK) {
        k->dial = NULL;
        drop(k);
    }
}

/* ---- sending ---- */

enum err control_net_send(struct control_net *c, uint64_t session, uint8_t channel,
                          const uint8_t *bytes, uint32_t len)
{
    struct conn *k = find(c, session);
    if (!k || !k->ready || k->closing)
        return ERR_NOT_FOUND;
    enum err e = session_send(k->session, channel, 0, bytes, len);
    if (e == ERR_OK && flush(k))
        return ERR_OK;
    /* A peer that takes nothing any more must not hold our memory: its session ends, gossip goes on
     * without it. */
    report_down(k, NODE_DOWN_CLOSED);
    return e == ERR_OK ? ERR_CLOSED : e;
}

enum err control_net_datagram(struct control_net *c, uint64_t session, const struct address *to,
                              uint8_t channel, const uint8_t *bytes, uint32_t len)
{
    struct conn *k = find(c, session);
    if (!k || !k->ready || !c->udp)
        return ERR_NOT_FOUND;
    uint8_t sealed[DATAGRAM_BYTES_MAX];
    size_t n;
    TRY(datagram_seal(&k->datagram, channel, bytes, len, sealed, &n));
    return net_udp_send(c->udp, to, 0, sealed, n);
}

static void on_datagram(void *context, const struct net_datagram *d)
{
    struct control_net *c = context;
    uint64_t key = 0;
    if (datagram_key_id(d->bytes, d->n, &key) != ERR_OK)
        return;
    for (int i = 0; i < CONNS_MAX; i++) {
        struct conn *k = &c->conns[i];
        if (k->id == 0 || !k->ready || k->datagram.receive_id != key)
            continue;
        uint8_t payload[DATAGRAM_PAYLOAD_MAX];
        size_t n;
        uint8_t channel;
        if (datagram_open(&k->datagram, d->bytes, d->n, payload, &n, &channel) != ERR_OK)
            return;
        struct address from = d->from;
        net_address_name(&from);
        c->options.on_event(c->options.context, &(struct node_event){.type = NODE_EVENT_DATAGRAM,
                                                                     .session = k->id,
                                                                     .address = from,
                                                                     .channel = channel,
                                                                     .bytes = payload,
                                                                     .len = (uint32_t)n});
        return;
    }
}

void control_net_close(struct control_net *c, uint64_t session)
{
    struct conn *k = find(c, session);
    if (!k)
        return;
    k->closing = true;
    if (!k->stream || net_stream_queued(k->stream) == 0)
        drop(k);
    else
        net_stream_deadline(k->stream, FLUSH_CLOSE_MS);
}

void control_net_authenticated(struct control_net *c, uint64_t session)
{
    struct conn *k = find(c, session);
    if (!k)
        return;
    k->authenticated = true;
    net_stream_deadline(k->stream, 0);
}

enum err control_net_export(struct control_net *c, uint64_t session, const char *label,
                            uint8_t ret[32])
{
    struct conn *k = find(c, session);
    if (!k || !k->ready)
        return ERR_NOT_FOUND;
    return session_export(k->session, label, ret);
}

uint16_t control_net_port(const struct control_net *c)
{
    return net_listener_port(c->listener);
}

enum err control_net_new(uv_loop_t *loop, const struct control_net_options *options,
                         struct control_net **ret, struct err_text *text)
{
    struct control_net *c = calloc(1, sizeof *c);
    if (!c)
        return ERR_NO_MEMORY;
    c->options = *options;
    c->loop = loop;
    struct net_listener_options l = {
        .port = options->port, .context = c, .on_connection = on_connection};
    struct net_udp_options u = {.context = c, .on_datagram = on_datagram};
    enum err e = net_listen_both(loop, &l, &u, &c->listener, &c->udp, text);
    if (e != ERR_OK) {
        free(c);
        return e;
    }
    *ret = c;
    return ERR_OK;
}

void control_net_free(struct control_net *c)
{
    if (!c)
        return;
    for (int i = 0; i < CONNS_MAX; i++) {
        if (c->conns[i].id)
            drop(&c->conns[i]);
    }
    net_listener_close(c->listener);
    net_udp_close(c->udp);
    free(c);
}
