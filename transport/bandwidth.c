/* The short transfer that measures a path: the other half of transport/bulk.h.
 *
 * The receiver says of each FILL that it has arrived, and the sender keeps a window under way that
 * grows with these, so that a slow path is not flooded with megabytes that it needs seconds for.
 * The receiver's clock counts, from a quarter of the FILLs on: before, TCP is still finding its
 * pace. */
#include "transport/bulk.h"

#include "base/clock.h"
#include "base/util.h"
#include "transport/bulk_wire.h"

#include <string.h>

enum {
    FILL_BYTES = 16 << 10,
    FILLS_MAX = BANDWIDTH_BYTES_MAX / FILL_BYTES,
    WINDOW_FIRST = 4,
    WINDOW_LAST = 128,
};

static enum err send_plain(struct link *l, uint8_t type, const struct bulk_wait *wait)
{
    uint8_t frame[LINK_HEADER_BYTES];
    struct writer w = writer_of(frame, sizeof frame);
    bulk_begin(&w, type, 0, 0);
    return bulk_send(l, frame, w.len, wait);
}

static enum err take_took(struct link *l, const struct bulk_wait *wait, unsigned *n_taken)
{
    struct bulk_head h;
    TRY(bulk_receive(l, wait, &h));
    if (h.type != BULK_TOOK || h.body.left > 0)
        return ERR_CORRUPT;
    (*n_taken)++;
    return ERR_OK;
}

static enum err fill(struct link *l, const struct bulk_wait *wait, uint64_t *ret_rate)
{
    uint8_t frame[LINK_HEADER_BYTES + FILL_BYTES] = {0};
    struct writer w = writer_of(frame, sizeof frame);
    bulk_begin(&w, BULK_FILL, 0, FILL_BYTES);
    unsigned n_sent = 0, n_taken = 0;
    uint64_t begin = clock_monotonic_us();
    while (n_sent < FILLS_MAX && clock_monotonic_us() - begin < BANDWIDTH_US_MAX) {
        unsigned window = MIN_OF((unsigned)WINDOW_FIRST + n_taken, (unsigned)WINDOW_LAST);
        if (n_sent - n_taken < window) {
            TRY(bulk_send(l, frame, sizeof frame, wait));
            n_sent++;
        } else {
            TRY(take_took(l, wait, &n_taken));
        }
    }
    TRY(send_plain(l, BULK_LAST, wait));
    while (n_taken < n_sent)
        TRY(take_took(l, wait, &n_taken));
    struct bulk_head h;
    TRY(bulk_receive(l, wait, &h));
    uint64_t rate = read_u64(&h.body);
    if (h.type != BULK_RATE || h.body.bad || h.body.left > 0)
        return ERR_CORRUPT;
    *ret_rate = rate;
    return ERR_OK;
}

static uint64_t rate_of(const uint64_t *arrived_us, unsigned n)
{
    unsigned first = n / 4;
    if (n < 2)
        return 0;
    uint64_t us = arrived_us[n - 1] - arrived_us[first];
    return (uint64_t)(n - 1 - first) * FILL_BYTES * 1000000u / MAX_OF(us, (uint64_t)1);
}

static enum err drain(struct link *l, const struct bulk_wait *wait, uint64_t *ret_rate)
{
    uint64_t arrived_us[FILLS_MAX];
    unsigned n = 0;
    for (;;) {
        struct bulk_head h;
        TRY(bulk_receive(l, wait, &h));
        if (h.type == BULK_LAST && h.body.left == 0)
            break;
        if (h.type != BULK_FILL || h.body.left != FILL_BYTES || n == FILLS_MAX)
            return ERR_CORRUPT;
        arrived_us[n++] = clock_monotonic_us();
        TRY(send_plain(l, BULK_TOOK, wait));
    }
    uint64_t rate = rate_of(arrived_us, n);
    uint8_t frame[LINK_HEADER_BYTES + 8];
    struct writer w = writer_of(frame, sizeof frame);
    bulk_begin(&w, BULK_RATE, 0, 8);
    write_u64(&w, rate);
    TRY(bulk_send(l, frame, w.len, wait));
    *ret_rate = rate;
    return ERR_OK;
}

static struct bulk_wait whole_exchange(void)
{
    return (struct bulk_wait){clock_monotonic_us() + BANDWIDTH_TIMEOUT_MS * 1000ull, -1};
}

enum err bandwidth_measure(struct link *link, struct bandwidth *ret)
{
    struct bulk_wait wait = whole_exchange();
    struct bandwidth b;
    TRY(fill(link, &wait, &b.to_peer_bytes_per_s));
    TRY(drain(link, &wait, &b.from_peer_bytes_per_s));
    TRY(bulk_wait_room(link, &wait));
    *ret = b;
    return ERR_OK;
}

enum err bandwidth_answer(struct link *link, struct bandwidth *ret)
{
    struct bulk_wait wait = whole_exchange();
    struct bandwidth b;
    TRY(drain(link, &wait, &b.from_peer_bytes_per_s));
    TRY(fill(link, &wait, &b.to_peer_bytes_per_s));
    *ret = b;
    return ERR_OK;
}
