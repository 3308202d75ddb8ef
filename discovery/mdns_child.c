#include "discovery/mdns_child.h"
#include "discovery/mdns_library.h"

#include "base/clock.h"
#include "base/util.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

enum {
    GOODBYE_S = 2, /* a goodbye that takes longer is cut off */
    FAIL_MS = 1000,
    RENEW_MS = 10 * 1000, /* after a flood of names was noticed */
    FILES_MAX = 128,
    OUT_BYTES = 8 << 10,
};
/* A flood of names must not take the machine's memory: past this, it dies and is started again. */
#define MEMORY_MAX (UINT64_C(256) << 20)

struct mdns_child {
    uv_loop_t loop;
    uv_poll_t poll;
    uv_timer_t choose;
    int fd;
    const struct mdns_backend *ops;
    void *backend;
    bool failed, started_due, collision_due, overflowed, has_service;
    size_t first_choice; /* backends before it have refused to publish */
    struct mdns_service service;
    char collision[MDNS_INSTANCE_MAX];
    char trouble[sizeof(((struct mdns_message *)0)->text)];
    struct mdns_seen *seen; /* oldest first */
    uint32_t n_seen;
    uint8_t in[2 * MDNS_MESSAGE_MAX];
    size_t n_in;
    uint8_t out[OUT_BYTES];
    size_t n_out;
};

/* ---- to the agent ---- */

static bool put(struct mdns_child *c, const struct mdns_message *m)
{
    if (c->n_out + MDNS_MESSAGE_MAX > sizeof c->out)
        return false;
    c->n_out += mdns_message_encode(m, c->out + c->n_out);
    return true;
}

static void stop_resolvers(struct mdns_child *c, struct mdns_seen *s)
{
    for (int f = 0; f < 2; f++) {
        void *resolver = s->family[f].resolver;
        s->family[f].resolver = NULL;
        if (resolver)
            c->ops->resolve_stop(resolver);
    }
    void *follower = s->follower;
    s->follower = NULL;
    if (follower)
        c->ops->follow_txt_stop(follower);
}

static bool put_seen(struct mdns_child *c, struct mdns_seen *s)
{
    struct mdns_message m = {.type = MDNS_LOST, .interface = s->interface, .protocol = s->protocol};
    memcpy(m.service.instance, s->instance, sizeof m.service.instance);
    if (s->lost)
        return !s->told || put(c, &m);
    m.type = MDNS_SIGHTING;
    for (int f = 0; f < 2; f++) {
        if (!s->family[f].dirty || !s->has_txt)
            continue;
        m.family = f == 0 ? 4 : 6;
        memcpy(m.ip, s->family[f].ip, sizeof m.ip);
        m.service.port = s->family[f].port;
        m.service.txt = s->txt;
        if (!put(c, &m))
            return false;
        s->family[f].dirty = false;
        s->told = true;
    }
    return true;
}

/* In the order in which things were seen, so that what is lost and seen again arrives so. */
static void put_all(struct mdns_child *c)
{
    struct mdns_message m = {.type = MDNS_STARTED};
    if (c->started_due) {
        m.backend = c->ops ? c->ops->kind : MDNS_BACKEND_NONE;
        c->started_due = !put(c, &m);
    }
    m = (struct mdns_message){.type = MDNS_COLLISION};
    if (c->collision_due) {
        memcpy(m.service.instance, c->collision, sizeof m.service.instance);
        c->collision_due = !put(c, &m);
    }
    m = (struct mdns_message){.type = MDNS_TROUBLE};
    if (c->trouble[0]) {
        memcpy(m.text, c->trouble, sizeof m.text);
        if (put(c, &m))
            c->trouble[0] = 0;
    }
    for (struct mdns_seen **at = &c->seen; *at;) {
        struct mdns_seen *s = *at;
        if (!put_seen(c, s))
            return;
        if (s->lost) {
            *at = s->next;
            free(s);
            c->n_seen--;
        } else {
            at = &s->next;
        }
    }
}

static void on_poll(uv_poll_t *poll, int status, int events);

/* What does not go out now goes out when the agent has read: nothing is queued but what is true. */
static void flush(struct mdns_child *c)
{
    for (;;) {
        put_all(c);
        if (c->n_out == 0)
            break;
        ssize_t n = send(c->fd, c->out, c->n_out, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n <= 0)
            break;
        memmove(c->out, c->out + n, c->n_out - (size_t)n);
        c->n_out -= (size_t)n;
    }
    if (!uv_is_closing((uv_handle_t *)&c->poll))
        (void)uv_poll_start(&c->poll, c->n_out ? UV_READABLE | UV_WRITABLE : UV_READABLE, on_poll);
}

/* ---- what is seen ---- */

static struct mdns_seen *find(struct mdns_child *c, uint32_t interface, uint8_t protocol,
                              const char *instance)
{
    for (struct mdns_seen *s = c->seen; s; s = s->next) {
        if (!s->lost && s->interface == interface && s->protocol == protocol &&
            strcmp(s->instance, instance) == 0)
            return s;
    }
    return NULL;
}

static void lose(struct mdns_child *c, struct mdns_seen *s)
{
    stop_resolvers(c, s);
    s->lost = true;
}

static void on_choose(uv_timer_t *timer);

/* The names of a flood live as long as they say, an hour or more, and fill this list and the cache
 * of the backend meanwhile: whoever is new goes unseen. So all starts anew some time after, with
 * empty tables: what is out there answers again. */
static void overflow(struct mdns_child *c)
{
    if (!c->overflowed && !c->failed)
        (void)uv_timer_start(&c->choose, on_choose, RENEW_MS, 0);
    c->overflowed = true;
}

/* Room for one more: the oldest that leads nowhere goes. */
static bool make_room(struct mdns_child *c)
{
    uint64_t now_us = clock_monotonic_us();
    if (c->n_seen < MDNS_SEEN_MAX)
        return true;
    overflow(c);
    for (struct mdns_seen *s = c->seen; s; s = s->next) {
        if (s->lost || s->told || now_us - s->since_us < MDNS_UNRESOLVED_US)
            continue;
        lose(c, s);
        flush(c);
        break;
    }
    return c->n_seen < MDNS_SEEN_MAX;
}

void mdns_child_seen(struct mdns_child *c, uint32_t interface, uint8_t protocol,
                     const char *instance)
{
    size_t n = strlen(instance);
    if (n == 0 || n >= MDNS_INSTANCE_MAX || !mdns_text_ok(instance, n) || interface == 0)
        return;
    if (c->has_service && strcmp(instance, c->service.instance) == 0)
        return;
    if (find(c, interface, protocol, instance) || !make_room(c))
        return;
    struct mdns_seen *s = calloc(1, sizeof *s), **at = &c->seen;
    if (!s)
        return;
    memcpy(s->instance, instance, n + 1);
    s->interface = interface;
    s->protocol = protocol;
    s->since_us = clock_monotonic_us();
    while (*at)
        at = &(*at)->next;
    *at = s;
    c->n_seen++;
    s->follower = c->ops->follow_txt(c->backend, s);
    s->family[0].resolver = c->ops->resolve(c->backend, s, 4);
    s->family[1].resolver = c->ops->resolve(c->backend, s, 6);
}

void mdns_child_lost(struct mdns_child *c, uint32_t interface, uint8_t protocol,
                     const char *instance)
{
    struct mdns_seen *s = find(c, interface, protocol, instance);
    if (!s)
        return;
    lose(c, s);
    flush(c);
}

void mdns_child_resolved(struct mdns_child *c, struct mdns_seen *seen, uint8_t family,
                         const uint8_t *ip, uint16_t port)
{
    int f = family == 4 ? 0 : 1;
    uint8_t padded[16] = {0};
    if (port == 0)
        return;
    memcpy(padded, ip, family == 4 ? 4 : 16);
    if (seen->family[f].valid && seen->family[f].port == port &&
        memcmp(seen->family[f].ip, padded, sizeof padded) == 0)
        return;
    seen->family[f].valid = seen->family[f].dirty = true;
    seen->family[f].port = port;
    memcpy(seen->family[f].ip, padded, sizeof padded);
    flush(c);
}

void mdns_child_txt(struct mdns_child *c, struct mdns_seen *seen, const uint8_t *txt, size_t n)
{
    struct mdns_txt t;
    if (mdns_txt_parse(txt, n, &t) != ERR_OK || t.version != MDNS_VERSION ||
        (seen->has_txt && mdns_txt_eq(&seen->txt, &t)))
        return;
    seen->has_txt = true;
    seen->txt = t;
    for (int f = 0; f < 2; f++)
        seen->family[f].dirty = seen->family[f].valid;
    flush(c);
}

void mdns_child_forget(struct mdns_child *c)
{
    for (struct mdns_seen *s = c->seen; s; s = s->next)
        lose(c, s);
    flush(c);
}

void mdns_child_collision(struct mdns_child *c, const char *instance)
{
    (void)snprintf(c->collision, sizeof c->collision, "%s", instance);
    c->collision_due = true;
    flush(c);
}

void mdns_child_trouble(struct mdns_child *c, const char *text)
{
    if (!mdns_text_ok(text, strlen(text)))
        return;
    (void)snprintf(c->trouble, sizeof c->trouble, "%.120s", text);
    if (!mdns_text_ok(c->trouble, strlen(c->trouble)))
        c->trouble[0] = 0; /* cut inside a character */
    flush(c);
}

/* ---- backends ---- */

void mdns_child_failed(struct mdns_child *c, const char *why)
{
    if (c->failed)
        return;
    c->failed = true;
    mdns_child_trouble(c, why);
    (void)uv_timer_start(&c->choose, on_choose, FAIL_MS, 0);
}

static void publish(struct mdns_child *c)
{
    if (!c->has_service || !c->backend || c->failed)
        return;
    enum err e = c->ops->publish(c->backend, &c->service);
    if (e == ERR_DENIED && mdns_backends()[c->first_choice + 1]) {
        c->first_choice++;
        mdns_child_failed(c, "the mDNS daemon does not let us publish: using our own stack");
    } else if (e != ERR_OK) {
        mdns_child_failed(c, "publishing failed");
    }
}

static void stop_backend(struct mdns_child *c)
{
    if (!c->backend)
        return;
    mdns_child_forget(c);
    c->ops->stop(c->backend);
    c->backend = NULL;
    c->ops = NULL;
}

/* The first that runs here is taken. */
static void on_choose(uv_timer_t *timer)
{
    struct mdns_child *c = timer->data;
    stop_backend(c);
    c->failed = c->overflowed = false;
    for (size_t i = c->first_choice; mdns_backends()[i]; i++) {
        c->ops = mdns_backends()[i];
        enum err e = c->ops->start(c, &c->loop, &c->backend);
        if (e == ERR_OK) {
            c->started_due = true;
            flush(c);
            publish(c);
            return;
        }
        c->backend = NULL;
        c->failed = false;
        (void)uv_timer_stop(&c->choose);
    }
    c->ops = NULL;
    mdns_child_failed(c, "no mDNS here: neither a daemon nor a socket of our own on port 5353");
}

/* ---- from the agent ---- */

static void leave(struct mdns_child *c)
{
    (void)alarm(GOODBYE_S);
    stop_backend(c);
    uv_stop(&c->loop);
}

static bool take_messages(struct mdns_child *c)
{
    size_t at = 0;
    for (;;) {
        struct mdns_message m;
        size_t used = 0;
        enum err e = mdns_message_decode(c->in + at, c->n_in - at, &m, &used);
        if (e == ERR_AGAIN)
            break;
        if (e != ERR_OK)
            return false;
        at += used;
        if (m.type == MDNS_PUBLISH) {
            c->service = m.service;
            c->has_service = m.service.instance[0] != 0;
            publish(c);
        } else if (m.type == MDNS_INTERFACES && c->backend && !c->failed) {
            c->ops->interfaces_changed(c->backend);
        }
    }
    memmove(c->in, c->in + at, c->n_in - at);
    c->n_in -= at;
    return true;
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct mdns_child *c = poll->data;
    ssize_t n = recv(c->fd, c->in + c->n_in, sizeof c->in - c->n_in, MSG_DONTWAIT);
    bool ended = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
    if (n > 0) {
        c->n_in += (size_t)n;
        ended = !take_messages(c);
    }
    /* After an error libuv watches the socket no more, though something to read was left in it. */
    if (ended || status < 0) {
        leave(c);
        return;
    }
    if (events & UV_WRITABLE)
        flush(c);
}

/* ---- the process ---- */

static void on_term(int number)
{
    (void)number;
    (void)alarm(GOODBYE_S); /* time to notice the closed socket, then the end */
}

static void bound_process(void)
{
    struct rlimit files = {FILES_MAX, FILES_MAX}, none = {0, 0};
    (void)setrlimit(RLIMIT_NOFILE, &files);
    (void)setrlimit(RLIMIT_CORE, &none);
#ifndef MDNS_SANITIZED /* its shadow memory counts */
    struct rlimit memory = {MEMORY_MAX, MEMORY_MAX};
    (void)setrlimit(RLIMIT_DATA, &memory);
#endif
    struct sigaction term = {.sa_handler = on_term};
    (void)sigaction(SIGTERM, &term, NULL);
    (void)signal(SIGINT, SIG_IGN); /* Ctrl-C is for the agent, which closes the socket */
    (void)signal(SIGPIPE, SIG_IGN);
    (void)signal(SIGALRM, SIG_DFL);
#ifdef __linux__
    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    (void)prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
#endif
}

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

int mdns_child_main(int fd)
{
    bound_process();
    struct mdns_child *c = calloc(1, sizeof *c);
    if (!c || uv_loop_init(&c->loop) != 0) {
        free(c);
        return 1;
    }
    c->fd = fd;
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    if (uv_poll_init(&c->loop, &c->poll, fd) != 0) {
        (void)uv_loop_close(&c->loop);
        free(c);
        return 1;
    }
    (void)uv_timer_init(&c->loop, &c->choose);
    c->poll.data = c->choose.data = c;
    (void)uv_poll_start(&c->poll, UV_READABLE, on_poll);
    (void)uv_timer_start(&c->choose, on_choose, 0, 0);
    (void)uv_run(&c->loop, UV_RUN_DEFAULT);
    uv_walk(&c->loop, close_handle, NULL);
    (void)uv_run(&c->loop, UV_RUN_DEFAULT);
    (void)uv_loop_close(&c->loop);
    while (c->seen) {
        struct mdns_seen *next = c->seen->next;
        free(c->seen);
        c->seen = next;
    }
    free(c);
    return 0;
}
