#include "transport/link.h"

#include "base/clock.h"
#include "base/util.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>

enum err link_send_frame(struct link *l, const struct frame *f, const float *rows,
                         struct buf *scratch)
{
    uint8_t *to;
    size_t n = 0;
    scratch->len = 0;
    TRY(buf_reserve(scratch, frame_encoded_bytes(f), &to));
    TRY(frame_encode(f, to, frame_encoded_bytes(f), &n));
    struct frame_header h;
    TRY(frame_decode_header(to, n, &h));
    struct link_piece pieces[2] = {{to, n}, {rows, h.len - n}};
    return link_send(l, pieces, h.len > n ? 2 : 1);
}

enum { POLL_MS_MAX = 60000 };

/* Rounded up, so that a short rest is not a busy loop; poll's -1 is never used. */
static int poll_ms(uint64_t now, uint64_t due)
{
    if (now >= due)
        return 0;
    uint64_t ms = (due - now + 999) / 1000;
    return ms > POLL_MS_MAX ? POLL_MS_MAX : (int)ms;
}

enum err link_flush_wait(struct link *l, uint64_t timeout_us)
{
    uint64_t due = clock_monotonic_us() + timeout_us;
    for (;;) {
        enum err e = link_flush(l);
        if (e != ERR_AGAIN)
            return e;
        uint64_t now = clock_monotonic_us();
        if (now >= due)
            return ERR_TIMEOUT;
        struct pollfd p = {l->ops->fd(l), POLLOUT, 0};
        if (poll(&p, 1, poll_ms(now, due)) < 0 && errno != EINTR)
            return ERR_IO;
    }
}

struct wait_set {
    struct link *const *links;
    unsigned n;
    struct pollfd fds[LINK_WAIT_MAX + 1];
};

/* What is ready without asking the system; also fills the descriptors to be watched. A descriptor
 * of -1 is passed over by poll. */
static bool wait_begin(struct wait_set *w, int extra_fd, struct link_ready *ready)
{
    *ready = (struct link_ready){0, 0, false};
    for (unsigned i = 0; i < w->n; i++) {
        struct link *l = w->links[i];
        w->fds[i] = (struct pollfd){-1, 0, 0};
        if (!l)
            continue;
        if (l->ops->has_input(l))
            ready->links |= 1ull << i;
        w->fds[i].fd = l->ops->fd(l);
        w->fds[i].events = POLLIN;
        if (l->ops->has_output(l))
            w->fds[i].events |= POLLOUT;
    }
    w->fds[w->n] = (struct pollfd){extra_fd, POLLIN, 0};
    return ready->links != 0;
}

static bool wait_collect(struct wait_set *w, struct link_ready *ready)
{
    for (unsigned i = 0; i < w->n; i++) {
        short got = w->fds[i].revents;
        if (got & POLLOUT) {
            enum err e = link_flush(w->links[i]);
            if (e == ERR_OK)
                ready->room |= 1ull << i;
            else if (e != ERR_AGAIN)
                ready->links |= 1ull << i;
        }
        if (got & (POLLIN | POLLERR | POLLHUP | POLLNVAL))
            ready->links |= 1ull << i;
    }
    ready->extra = w->fds[w->n].revents != 0;
    return ready->links || ready->room || ready->extra;
}

/* Asking costs a file that is opened and read, so the answer, which is the machine's and not ours,
 * is kept. */
static bool has_cores_to_spare(void)
{
    static _Atomic long n_cores;
    long n = atomic_load_explicit(&n_cores, memory_order_relaxed);
    if (n == 0) {
        n = sysconf(_SC_NPROCESSORS_ONLN);
        atomic_store_explicit(&n_cores, n < 1 ? 1 : n, memory_order_relaxed);
    }
    return n > 1;
}

enum err link_wait(struct link *const links[], unsigned n, int extra_fd, uint64_t timeout_us,
                   uint32_t spin_us, struct link_ready *ret)
{
    assert(n <= LINK_WAIT_MAX);
    struct wait_set w = {.links = links, .n = n};
    struct link_ready ready;
    uint64_t begin = clock_monotonic_us(), now = begin;
    uint64_t due = add_overflows(begin, timeout_us, &due) ? UINT64_MAX : due;
    uint64_t spin_due = begin;
    if (spin_us > 0 && has_cores_to_spare())
        spin_due += MIN_OF(spin_us, (uint32_t)LINK_SPIN_US_MAX);
    bool at_hand = wait_begin(&w, extra_fd, &ready);
    for (;;) {
        int ms = at_hand || now < spin_due ? 0 : poll_ms(now, due);
        int got = poll(w.fds, n + 1, ms);
        if (got < 0 && errno != EINTR)
            return ERR_IO;
        if ((got > 0 && wait_collect(&w, &ready)) || at_hand) {
            *ret = ready;
            return ERR_OK;
        }
        if (ms == 0)
            (void)sched_yield(); /* the one we wait for may want this very core */
        now = clock_monotonic_us();
        if (now >= due)
            return ERR_TIMEOUT;
    }
}
