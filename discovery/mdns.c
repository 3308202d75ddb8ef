#include "discovery/mdns.h"

#include "base/clock.h"
#include "base/util.h"
#include "discovery/mdns_table.h"
#include "discovery/mdns_wire.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    RESTART_FIRST_MS = 250,
    RESTART_MAX_MS = 30 * 1000,
    LIVED_LONG_US = 60 * 1000 * 1000, /* then it does not count as failing again */
    READ_BYTES = 16 << 10,
    READS_PER_WAKE = 4,   /* the loop has other work too */
    TROUBLES_LOGGED = 16, /* lines of one child */
    CHANGES_PER_WAKE = 64,
    ENVIRONMENT_MAX = 8,
};

/* One child, from its start until its handles are closed. */
struct child {
    struct mdns *mdns; /* NULL: given up */
    uv_process_t process;
    uv_poll_t poll;
    int fd;
    int n_handles;
    uint64_t started_us;
    uint8_t in[READ_BYTES];
    size_t n_in;
    uint8_t out[2 * MDNS_MESSAGE_MAX];
    size_t n_out;
    bool publish_due, interfaces_due;
    int n_troubles;
};

struct mdns {
    struct mdns_options options;
    const char *args[MDNS_ARGS_MAX + 1];
    struct mdns_table *table;
    struct child *child;
    uv_timer_t timer, restart;
    int n_handles;
    uint32_t restart_ms;
    enum mdns_backend_kind backend;
    bool closing;
};

/* ---- end of a child ---- */

static void on_child_handle_closed(uv_handle_t *handle)
{
    struct child *c = handle->data;
    if (--c->n_handles > 0)
        return;
    if (c->fd >= 0)
        (void)close(c->fd);
    free(c);
}

/* Closing our end of the socket is what tells it to say goodbye and end. */
static void child_give_up(struct child *c)
{
    c->mdns = NULL;
    if (c->fd >= 0)
        (void)shutdown(c->fd, SHUT_RDWR);
    if (!uv_is_closing((uv_handle_t *)&c->poll))
        uv_close((uv_handle_t *)&c->poll, on_child_handle_closed);
    if (!uv_is_closing((uv_handle_t *)&c->process))
        uv_close((uv_handle_t *)&c->process, on_child_handle_closed);
}

static void on_restart(uv_timer_t *timer);

/* It ended, or it broke the rules. Give it up and have another one soon. */
static void child_lost(struct child *c, bool kill_it)
{
    struct mdns *m = c->mdns;
    if (!m)
        return;
    if (kill_it)
        (void)uv_process_kill(&c->process, SIGKILL);
    bool lived_long = clock_monotonic_us() - c->started_us > LIVED_LONG_US;
    child_give_up(c);
    m->child = NULL;
    m->backend = MDNS_BACKEND_NONE;
    m->restart_ms = lived_long || m->restart_ms == 0 ? (uint32_t)RESTART_FIRST_MS
                                                     : MIN_OF(m->restart_ms * 2, RESTART_MAX_MS);
    log_warning(m->options.log,
                "mDNS stopped: it is started again in %u ms; sessions are not touched",
                m->restart_ms);
    (void)uv_timer_start(&m->restart, on_restart, m->restart_ms, 0);
}

static void on_exit_of_child(uv_process_t *process, int64_t status, int signal)
{
    struct child *c = process->data;
    if (c->mdns)
        log_debug(c->mdns->options.log, "the mDNS child ended: status %d, signal %d", (int)status,
                  signal);
    child_lost(c, false);
}

/* ---- what is known, to its user ---- */

static void on_timer(uv_timer_t *timer);

static void schedule(struct mdns *m)
{
    uint64_t due_us = mdns_table_due(m->table), now_us = clock_monotonic_us();
    if (m->closing)
        return;
    if (due_us == UINT64_MAX) {
        (void)uv_timer_stop(&m->timer);
        return;
    }
    uint64_t wait_us = due_us > now_us ? due_us - now_us : 0;
    uv_update_time(m->options.loop);
    (void)uv_timer_start(&m->timer, on_timer, (wait_us + 999) / 1000, 0);
}

static void on_timer(uv_timer_t *timer)
{
    struct mdns *m = timer->data;
    struct mdns_record record;
    int n = 0;
    while (!m->closing && n++ < CHANGES_PER_WAKE &&
           mdns_table_next(m->table, clock_monotonic_us(), &record))
        m->options.on_found(m->options.context, &record);
    schedule(m);
}

/* ---- messages ---- */

static bool is_loopback(const char *interface)
{
    return strcmp(interface, "lo") == 0 || strcmp(interface, "lo0") == 0;
}

static void on_message(struct mdns *m, struct child *c, const struct mdns_message *message)
{
    char name[IF_NAMESIZE] = "";
    switch (message->type) {
    case MDNS_STARTED:
        m->backend = message->backend;
        log_info(m->options.log, "mDNS runs through %s", mdns_backend_name(m->backend));
        mdns_table_restarted(m->table, clock_monotonic_us());
        break;
    case MDNS_SIGHTING:
    case MDNS_LOST:
        (void)if_indextoname(message->interface, name);
        (void)mdns_table_apply(m->table, message, name, is_loopback(name), clock_monotonic_us());
        break;
    case MDNS_COLLISION:
        if (strcmp(message->service.instance, m->options.service.instance) == 0 &&
            m->options.on_collision)
            m->options.on_collision(m->options.context);
        break;
    case MDNS_TROUBLE:
        if (c->n_troubles++ < TROUBLES_LOGGED)
            log_warning(m->options.log, "mDNS: %s", message->text);
        break;
    default:
        break; /* decoded, but not meant for this side */
    }
}

/* False: it broke the rules. */
static bool take_messages(struct child *c)
{
    size_t at = 0;
    while (c->mdns) {
        struct mdns_message message;
        size_t used = 0;
        enum err e = mdns_message_decode(c->in + at, c->n_in - at, &message, &used);
        if (e == ERR_AGAIN)
            break;
        if (e != ERR_OK)
            return false;
        at += used;
        on_message(c->mdns, c, &message);
    }
    memmove(c->in, c->in + at, c->n_in - at);
    c->n_in -= at;
    return true;
}

static void on_poll(uv_poll_t *poll, int status, int events);

static void watch(struct child *c)
{
    bool writes = c->n_out > 0 || c->publish_due || c->interfaces_due;
    (void)uv_poll_start(&c->poll, writes ? UV_READABLE | UV_WRITABLE : UV_READABLE, on_poll);
}

static void fill_out(struct child *c)
{
    const struct mdns *m = c->mdns;
    struct mdns_message message = {.type = MDNS_PUBLISH, .service = m->options.service};
    if (c->n_out > 0)
        return;
    if (c->publish_due)
        c->n_out = mdns_message_encode(&message, c->out);
    message.type = MDNS_INTERFACES;
    if (c->interfaces_due)
        c->n_out += mdns_message_encode(&message, c->out + c->n_out);
    c->publish_due = c->interfaces_due = false;
}

static void flush(struct child *c)
{
    fill_out(c);
    if (c->n_out > 0) {
        ssize_t n = send(c->fd, c->out, c->n_out, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            memmove(c->out, c->out + n, c->n_out - (size_t)n);
            c->n_out -= (size_t)n;
        } /* an error shows when reading, too */
    }
    watch(c);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct child *c = poll->data;
    struct mdns *m = c->mdns;
    if (!m)
        return;
    for (int i = 0; status >= 0 && i < READS_PER_WAKE; i++) {
        ssize_t n = recv(c->fd, c->in + c->n_in, sizeof c->in - c->n_in, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (n <= 0) {
            child_lost(c, true);
            return;
        }
        c->n_in += (size_t)n;
        if (!take_messages(c)) {
            log_warning(m->options.log, "the mDNS child broke the rules of its socket");
            child_lost(c, true);
            return;
        }
        if (!c->mdns)
            return; /* closed by its user */
    }
    if (status < 0) {
        child_lost(c, true);
        return;
    }
    if (events & UV_WRITABLE)
        flush(c);
    schedule(m);
}

/* ---- start of a child ---- */

/* It gets nothing of our environment but what it needs. */
static void environment(char *kept[ENVIRONMENT_MAX + 1], char *texts, size_t size)
{
    static const char *const names[] = {"DBUS_SYSTEM_BUS_ADDRESS", "LD_LIBRARY_PATH",
                                        "ASAN_OPTIONS", "UBSAN_OPTIONS", "LSAN_OPTIONS"};
    size_t n = 0, at = 0;
    for (size_t i = 0; i < ARRAY_LEN(names); i++) {
        const char *value = getenv(names[i]);
        int k = value ? snprintf(texts + at, size - at, "%s=%s", names[i], value) : -1;
        if (k < 0 || (size_t)k >= size - at)
            continue;
        kept[n++] = texts + at;
        at += (size_t)k + 1;
    }
    kept[n] = NULL;
}

static int spawn(struct mdns *m, struct child *c, int theirs)
{
    char texts[4096];
    char *env[ENVIRONMENT_MAX + 1];
    environment(env, texts, sizeof texts);
    uv_stdio_container_t stdio[MDNS_CHILD_FD + 1] = {{.flags = UV_IGNORE},
                                                     {.flags = UV_IGNORE},
                                                     {.flags = UV_INHERIT_FD, .data.fd = 2},
                                                     {.flags = UV_INHERIT_FD, .data.fd = theirs}};
    uv_process_options_t o = {.file = m->options.child_file,
                              .args = (char **)m->args,
                              .env = env,
                              .exit_cb = on_exit_of_child,
                              .stdio = stdio,
                              .stdio_count = MDNS_CHILD_FD + 1};
    return uv_spawn(m->options.loop, &c->process, &o);
}

static int nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 ? -1 : fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

static enum err child_start(struct mdns *m, struct err_text *text)
{
    _cleanup_(closep) int theirs = -1;
    int fds[2];
    struct child *c = calloc(1, sizeof *c);
    if (!c)
        return ERR_NO_MEMORY;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds) != 0) {
        free(c);
        return err_set(text, ERR_IO, "no socket pair: %s", strerror(errno));
    }
    c->fd = fds[0];
    theirs = fds[1];
    c->process.data = c->poll.data = c;
    c->started_us = clock_monotonic_us();
    (void)fcntl(fds[0], F_SETFD, FD_CLOEXEC);
    (void)fcntl(fds[1], F_SETFD, FD_CLOEXEC);
    int e = nonblocking(c->fd);
    if (e != 0 || uv_poll_init(m->options.loop, &c->poll, c->fd) != 0) {
        (void)close(c->fd);
        free(c);
        return err_set(text, ERR_IO, "the loop cannot watch a socket");
    }
    c->n_handles = 2; /* uv_spawn() makes a handle even when it fails */
    e = spawn(m, c, theirs);
    if (e != 0) {
        child_give_up(c);
        return err_set(text, ERR_IO, "%s cannot be started for mDNS: %s", m->options.child_file,
                       uv_strerror(e));
    }
    c->mdns = m;
    m->child = c;
    c->publish_due = m->options.service.instance[0] != 0;
    flush(c);
    return ERR_OK;
}

static void on_restart(uv_timer_t *timer)
{
    struct mdns *m = timer->data;
    struct err_text text = {""};
    if (m->closing || child_start(m, &text) == ERR_OK)
        return;
    log_warning(m->options.log, "%s", text.text);
    m->restart_ms = MIN_OF(m->restart_ms * 2, RESTART_MAX_MS);
    (void)uv_timer_start(&m->restart, on_restart, m->restart_ms, 0);
}

/* ---- life ---- */

enum err mdns_new(const struct mdns_options *options, struct mdns **ret, struct err_text *text)
{
    struct mdns *m = calloc(1, sizeof *m);
    if (!m)
        return ERR_NO_MEMORY;
    m->options = *options;
    for (int i = 0; options->child_args[i]; i++) {
        assert(i < MDNS_ARGS_MAX);
        m->args[i] = options->child_args[i];
    }
    enum err e = mdns_table_new(&m->table);
    if (e != ERR_OK) {
        free(m);
        return e;
    }
    mdns_table_set_own(m->table, options->service.instance);
    mdns_table_set_trusted(m->table, options->is_trusted, options->context);
    (void)uv_timer_init(options->loop, &m->timer);
    (void)uv_timer_init(options->loop, &m->restart);
    m->n_handles = 2;
    m->timer.data = m->restart.data = m;
    e = child_start(m, text);
    if (e != ERR_OK) {
        mdns_close(m);
        return e;
    }
    *ret = m;
    return ERR_OK;
}

void mdns_publish(struct mdns *m, const struct mdns_service *service)
{
    m->options.service = *service;
    mdns_table_set_own(m->table, service->instance);
    if (!m->child)
        return;
    m->child->publish_due = true;
    flush(m->child);
}

void mdns_interfaces_changed(struct mdns *m)
{
    if (!m->child)
        return;
    m->child->interfaces_due = true;
    flush(m->child);
}

const char *mdns_backend(const struct mdns *m)
{
    return mdns_backend_name(m->backend);
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct mdns *m = handle->data;
    if (--m->n_handles > 0)
        return;
    mdns_table_free(m->table);
    free(m);
}

void mdns_close(struct mdns *m)
{
    if (!m || m->closing)
        return;
    m->closing = true;
    if (m->child)
        child_give_up(m->child);
    m->child = NULL;
    uv_close((uv_handle_t *)&m->timer, on_handle_closed);
    uv_close((uv_handle_t *)&m->restart, on_handle_closed);
}
