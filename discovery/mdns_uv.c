#include "discovery/mdns_uv.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/time.h>
#include <unistd.h>

/* Two watches may share a descriptor (D-Bus has one for reading and one for writing), two libuv
 * polls may not: each polls a duplicate of its own. */
struct AvahiWatch {
    uv_poll_t poll;
    int fd, polled_fd;
    AvahiWatchEvent happened;
    AvahiWatchCallback callback;
    void *userdata;
};

struct AvahiTimeout {
    uv_timer_t timer;
    AvahiTimeoutCallback callback;
    void *userdata;
};

static void on_watch_closed(uv_handle_t *handle)
{
    struct AvahiWatch *w = handle->data;
    (void)close(w->polled_fd);
    free(w);
}

static void on_poll(uv_poll_t *poll, int status, int events)
{
    struct AvahiWatch *w = poll->data;
    unsigned happened = 0;
    if (status < 0)
        happened |= AVAHI_WATCH_ERR;
    if (events & UV_READABLE)
        happened |= AVAHI_WATCH_IN;
    if (events & UV_WRITABLE)
        happened |= AVAHI_WATCH_OUT;
    if (events & UV_DISCONNECT)
        happened |= AVAHI_WATCH_HUP;
    w->happened = (AvahiWatchEvent)happened;
    w->callback(w, w->fd, w->happened, w->userdata);
}

static void watch_update(struct AvahiWatch *w, AvahiWatchEvent events)
{
    int mask = 0;
    if (events & AVAHI_WATCH_IN)
        mask |= UV_READABLE;
    if (events & AVAHI_WATCH_OUT)
        mask |= UV_WRITABLE;
    if (events & AVAHI_WATCH_HUP)
        mask |= UV_DISCONNECT;
    if (mask)
        (void)uv_poll_start(&w->poll, mask, on_poll);
    else
        (void)uv_poll_stop(&w->poll);
}

static struct AvahiWatch *watch_new(const AvahiPoll *api, int fd, AvahiWatchEvent events,
                                    AvahiWatchCallback callback, void *userdata)
{
    struct AvahiWatch *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    w->fd = fd;
    w->callback = callback;
    w->userdata = userdata;
    w->poll.data = w;
    w->polled_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (w->polled_fd < 0 || uv_poll_init(api->userdata, &w->poll, w->polled_fd) != 0) {
        if (w->polled_fd >= 0)
            (void)close(w->polled_fd);
        free(w);
        return NULL;
    }
    w->poll.data = w;
    watch_update(w, events);
    return w;
}

static AvahiWatchEvent watch_get_events(struct AvahiWatch *w)
{
    return w->happened;
}

static void watch_free(struct AvahiWatch *w)
{
    uv_close((uv_handle_t *)&w->poll, on_watch_closed);
}

static void on_timeout_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void on_timer(uv_timer_t *timer)
{
    struct AvahiTimeout *t = timer->data;
    t->callback(t, t->userdata);
}

/* Avahi gives wall-clock moments. */
static void timeout_update(struct AvahiTimeout *t, const struct timeval *at)
{
    struct timeval now;
    if (!at) {
        (void)uv_timer_stop(&t->timer);
        return;
    }
    (void)gettimeofday(&now, NULL);
    int64_t us = (int64_t)(at->tv_sec - now.tv_sec) * 1000000 + (at->tv_usec - now.tv_usec);
    uv_update_time(t->timer.loop);
    (void)uv_timer_start(&t->timer, on_timer, us > 0 ? (uint64_t)(us + 999) / 1000 : 0, 0);
}

static struct AvahiTimeout *timeout_new(const AvahiPoll *api, const struct timeval *at,
                                        AvahiTimeoutCallback callback, void *userdata)
{
    struct AvahiTimeout *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    (void)uv_timer_init(api->userdata, &t->timer);
    t->callback = callback;
    t->userdata = userdata;
    t->timer.data = t;
    timeout_update(t, at);
    return t;
}

static void timeout_free(struct AvahiTimeout *t)
{
    uv_close((uv_handle_t *)&t->timer, on_timeout_closed);
}

void mdns_uv_init(AvahiPoll *api, uv_loop_t *loop)
{
    *api = (AvahiPoll){.userdata = loop,
                       .watch_new = watch_new,
                       .watch_update = watch_update,
                       .watch_get_events = watch_get_events,
                       .watch_free = watch_free,
                       .timeout_new = timeout_new,
                       .timeout_update = timeout_update,
                       .timeout_free = timeout_free};
}
