#include "transport/hello_net.h"

#include "base/util.h"

#include <sodium.h>
#include <string.h>

enum { QUEUE_BYTES = 2 * HELLO_BYTES };

/* ---- one conversation over a stream ---- */

struct talk {
    struct net_stream *stream;
    struct hello *hello;
    uint8_t bytes[HELLO_BYTES];
    size_t n;
};

static void talk_close(struct talk *t)
{
    net_stream_close(t->stream);
    t->stream = NULL;
    hello_free(t->hello);
    t->hello = NULL;
}

/* One step with the bytes gathered so far. *ret_done: the conversation is over, well. */
static enum err talk_step(struct talk *t, bool *ret_done)
{
    struct hello_update update;
    TRY(hello_step(t->hello, t->bytes, t->n, &update));
    t->n = 0;
    if (update.n_out)
        TRY(net_stream_write(t->stream, update.out, update.n_out));
    net_stream_want(t->stream, hello_wants(t->hello));
    *ret_done = update.done;
    return ERR_OK;
}

/* The stream reads no more than the conversation wants, so all of it fits. */
static enum err talk_take(struct talk *t, const uint8_t *bytes, size_t n, bool *ret_done)
{
    *ret_done = false;
    if (n > sizeof t->bytes - t->n)
        return ERR_CORRUPT;
    memcpy(t->bytes + t->n, bytes, n);
    t->n += n;
    return t->n < hello_wants(t->hello) ? ERR_OK : talk_step(t, ret_done);
}

static enum err talk_detach(struct talk *t, int *ret_fd, struct hello_result *ret)
{
    TRY(net_stream_detach(t->stream, ret_fd));
    t->stream = NULL;
    hello_result_get(t->hello, ret);
    return ERR_OK;
}

/* ---- the data port ---- */

struct guest {
    struct data_port *port;
    struct talk talk;
    struct guest *next; /* older ones are nearer to the head */
};

struct data_port {
    uv_loop_t *loop;
    struct data_port_options options;
    struct net_listener *listener;
    struct guest *oldest;
    unsigned n_guests;
};

static void guest_free(struct data_port *p, struct guest *g)
{
    p->n_guests--;
    talk_close(&g->talk);
    free(g);
}

static void guest_leave(struct data_port *p, struct guest *g)
{
    struct guest **at = &p->oldest;
    while (*at != g)
        at = &(*at)->next;
    *at = g->next;
    guest_free(p, g);
}

static void on_guest_bytes(void *context, const uint8_t *bytes, size_t n)
{
    struct guest *g = context;
    struct hello_result result;
    bool done;
    int fd = -1;
    enum err e = talk_take(&g->talk, bytes, n, &done);
    if (e == ERR_OK && !done)
        return;
    if (e == ERR_OK)
        e = talk_detach(&g->talk, &fd, &result);
    struct data_port *p = g->port;
    guest_leave(p, g);
    if (e != ERR_OK)
        return;
    p->options.on_connection(p->options.context, fd, &result);
    sodium_memzero(&result, sizeof result);
}

static void on_guest_end(void *context, enum err e)
{
    (void)e;
    struct guest *g = context;
    guest_leave(g->port, g);
}

static enum err guest_begin(struct data_port *p, struct guest *g, int fd)
{
    uint8_t nonce[HELLO_NONCE_BYTES];
    randombytes_buf(nonce, sizeof nonce);
    TRY(hello_new_responder(p->options.gate, &p->options.own, nonce, &g->talk.hello));
    struct net_stream_options o = {.fd = fd,
                                   .queue_bytes_max = QUEUE_BYTES,
                                   .read_bytes_max = hello_wants(g->talk.hello),
                                   .context = g,
                                   .on_bytes = on_guest_bytes,
                                   .on_end = on_guest_end};
    enum err e = net_stream_new(p->loop, &o, &g->talk.stream);
    if (e != ERR_OK) {
        hello_free(g->talk.hello);
        return e;
    }
    net_stream_deadline(g->talk.stream, HELLO_TIMEOUT_MS);
    return ERR_OK;
}

static void on_port_connection(void *context, int fd, const struct address *from)
{
    (void)from;
    struct data_port *p = context;
    if (p->n_guests == HELLO_PENDING_MAX)
        guest_leave(p, p->oldest);
    struct guest *g = calloc(1, sizeof *g);
    if (!g || guest_begin(p, g, fd) != ERR_OK) {
        free(g);
        (void)close(fd);
        return;
    }
    g->port = p;
    struct guest **end = &p->oldest;
    while (*end)
        end = &(*end)->next;
    *end = g;
    p->n_guests++;
}

enum err data_port_new(uv_loop_t *loop, const struct data_port_options *options,
                       struct data_port **ret, struct err_text *text)
{
    if (sodium_init() < 0)
        return err_set(text, ERR_IO, "libsodium cannot start");
    struct data_port *p = calloc(1, sizeof *p);
    if (!p)
        return err_set(text, ERR_NO_MEMORY, "no memory for the data port");
    p->loop = loop;
    p->options = *options;
    struct net_listener_options o = {
        .port = options->port, .context = p, .on_connection = on_port_connection};
    enum err e = net_listen(loop, &o, &p->listener, text);
    if (e != ERR_OK) {
        free(p);
        return e;
    }
    *ret = p;
    return ERR_OK;
}

uint16_t data_port_port(const struct data_port *p)
{
    return net_listener_port(p->listener);
}

unsigned data_port_pending(const struct data_port *p)
{
    return p->n_guests;
}

void data_port_close(struct data_port *p)
{
    if (!p)
        return;
    for (struct guest *g; (g = p->oldest) != NULL;) {
        p->oldest = g->next;
        guest_free(p, g);
    }
    net_listener_close(p->listener);
    free(p);
}

/* ---- dialling ---- */

struct data_dial {
    uv_loop_t *loop;
    struct data_dial_options options;
    struct net_dial *dial;
    struct talk talk;
};

static void dial_free(struct data_dial *d)
{
    net_dial_cancel(d->dial);
    talk_close(&d->talk);
    sodium_memzero(d, sizeof *d);
    free(d);
}

static void dial_fail(struct data_dial *d, enum err e)
{
    struct data_dial_options o = d->options;
    dial_free(d);
    o.on_done(o.context, e, -1, NULL);
    sodium_memzero(&o, sizeof o);
}

static void on_dial_bytes(void *context, const uint8_t *bytes, size_t n)
{
    struct data_dial *d = context;
    struct hello_result result;
    bool done;
    int fd = -1;
    enum err e = talk_take(&d->talk, bytes, n, &done);
    if (e == ERR_OK && !done)
        return;
    if (e == ERR_OK)
        e = talk_detach(&d->talk, &fd, &result);
    if (e != ERR_OK) {
        dial_fail(d, e);
        return;
    }
    void *to = d->options.context;
    void (*on_done)(void *, enum err, int, const struct hello_result *) = d->options.on_done;
    dial_free(d);
    on_done(to, ERR_OK, fd, &result);
    sodium_memzero(&result, sizeof result);
}

static void on_dial_end(void *context, enum err e)
{
    dial_fail(context, e);
}

static enum err dial_begin(struct data_dial *d, int fd)
{
    uint8_t nonce[HELLO_NONCE_BYTES];
    bool done;
    randombytes_buf(nonce, sizeof nonce);
    TRY(hello_new_initiator(&d->options.key, d->options.kind, &d->options.own, nonce,
                            &d->talk.hello));
    struct net_stream_options o = {.fd = fd,
                                   .queue_bytes_max = QUEUE_BYTES,
                                   .read_bytes_max = 0,
                                   .context = d,
                                   .on_bytes = on_dial_bytes,
                                   .on_end = on_dial_end};
    TRY(net_stream_new(d->loop, &o, &d->talk.stream));
    net_stream_deadline(d->talk.stream, HELLO_TIMEOUT_MS);
    return talk_step(&d->talk, &done);
}

static void on_dial_connected(void *context, enum err e, int fd)
{
    struct data_dial *d = context;
    d->dial = NULL;
    if (e == ERR_OK) {
        e = dial_begin(d, fd);
        if (e != ERR_OK && !d->talk.stream)
            (void)close(fd);
    }
    if (e != ERR_OK)
        dial_fail(d, e);
}

enum err data_dial_new(uv_loop_t *loop, const struct data_dial_options *options,
                       struct data_dial **ret)
{
    if (options->kind < HELLO_DATA || options->kind >= HELLO_KIND_N)
        return ERR_INVALID;
    struct data_dial *d = calloc(1, sizeof *d);
    if (!d)
        return ERR_NO_MEMORY;
    d->loop = loop;
    d->options = *options;
    struct net_dial_options o = {.to = options->to,
                                 .interface = options->interface,
                                 .timeout_ms = HELLO_TIMEOUT_MS,
                                 .context = d,
                                 .on_done = on_dial_connected};
    enum err e = net_connect(loop, &o, &d->dial);
    if (e != ERR_OK) {
        sodium_memzero(d, sizeof *d);
        free(d);
        return e;
    }
    *ret = d;
    return ERR_OK;
}

void data_dial_cancel(struct data_dial *d)
{
    if (d)
        dial_free(d);
}
