#include "transport/bulk_wire.h"

#include "base/clock.h"

#include <errno.h>
#include <poll.h>

void bulk_begin(struct writer *w, uint8_t type, uint64_t tag, size_t n_body)
{
    write_u32(w, (uint32_t)(LINK_HEADER_BYTES + n_body));
    write_u8(w, type);
    write_u8(w, 0);
    write_u16(w, LINK_HEADER_BYTES);
    write_u64(w, tag);
    write_u64(w, 0); /* link_seq and ack are the link's */
    write_u64(w, 0);
}

enum err bulk_parse(const uint8_t *bytes, size_t n, struct bulk_head *ret)
{
    struct bulk_head h;
    struct reader r = reader_of(bytes, n);
    uint32_t len = read_u32(&r);
    h.type = read_u8(&r);
    (void)read_u8(&r);
    uint16_t header_len = read_u16(&r);
    h.tag = read_u64(&r);
    (void)read_view(&r, 16);
    if (r.bad || len != n || header_len != LINK_HEADER_BYTES)
        return ERR_CORRUPT;
    h.body = r;
    *ret = h;
    return ERR_OK;
}

enum err bulk_wait_input(struct link *l, const struct bulk_wait *w)
{
    struct link_ready ready;
    uint64_t now = clock_monotonic_us();
    TRY(link_wait(&l, 1, w->stop_fd, now < w->due_us ? w->due_us - now : 0, 0, &ready));
    return ready.extra ? ERR_CANCELLED : ERR_OK;
}

enum err bulk_wait_room(struct link *l, const struct bulk_wait *w)
{
    for (;;) {
        enum err e = link_flush(l);
        if (e != ERR_AGAIN)
            return e;
        uint64_t now = clock_monotonic_us();
        if (now >= w->due_us)
            return ERR_TIMEOUT;
        uint64_t ms = (w->due_us - now + 999) / 1000;
        struct pollfd p[2] = {{l->ops->fd(l), POLLOUT, 0}, {w->stop_fd, POLLIN, 0}};
        if (poll(p, 2, ms > 60000 ? 60000 : (int)ms) < 0 && errno != EINTR)
            return ERR_IO;
        if (p[1].revents)
            return ERR_CANCELLED;
    }
}

enum err bulk_send(struct link *l, const void *bytes, size_t n, const struct bulk_wait *w)
{
    struct link_piece p = {bytes, n};
    enum err e;
    while ((e = link_send(l, &p, 1)) == ERR_AGAIN)
        TRY(bulk_wait_room(l, w));
    return e;
}

enum err bulk_receive(struct link *l, const struct bulk_wait *w, struct bulk_head *ret)
{
    const uint8_t *bytes;
    size_t n;
    enum err e;
    while ((e = link_receive(l, &bytes, &n)) == ERR_AGAIN)
        TRY(bulk_wait_input(l, w));
    return e == ERR_OK ? bulk_parse(bytes, n, ret) : e;
}
