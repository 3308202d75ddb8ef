/* A link: an ordered, sealed, bounded channel of frames to one peer, used by one thread at a time.
 *
 * The operation table is what implementations fill (link_tcp; RDMA later). A frame is opaque here
 * but for its first LINK_HEADER_BYTES: `len` (u32, the whole frame) at offset 0, `link_seq` and
 * `ack` (u64) at offsets 16 and 24, which the link stamps when it sends and checks when it
 * receives. transport/frame (data plane) and transport/bulk (model bytes) both start that way.
 *
 * A link never retransmits and never reconnects: after any error but ERR_AGAIN, ERR_LIMIT and
 * ERR_INVALID it is dead, says so for ever, and is freed. Nothing is allocated per frame once the
 * buffers have grown to the largest frame seen. */
#ifndef COVEY_TRANSPORT_LINK_H
#define COVEY_TRANSPORT_LINK_H

#include "base/buf.h"
#include "base/err.h"
#include "transport/frame.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LINK_HEADER_BYTES = 32,
    LINK_PIECES_MAX = 4,
    LINK_WAIT_MAX = 64,     /* links of one wait; a bit each in struct link_ready */
    LINK_SPIN_US_MAX = 100, /* longer spinning steals the core from the one we wait for */
};

/* One run of bytes of a frame to be sent. */
struct link_piece {
    const void *bytes;
    size_t n;
};

struct link_stats {
    uint64_t n_frames_sent, n_frames_received;
    uint64_t n_bytes_sent, n_bytes_received; /* on the wire, with seals */
    uint64_t n_again;                        /* sends refused for want of room */
    uint64_t peer_ack; /* link_seq of our last frame that the peer is known to have received */
    uint64_t n_bytes_queued;   /* sealed, not yet taken by the system */
    uint64_t last_received_us; /* monotonic; 0: nothing yet */
};

struct link;

struct link_ops {
    enum err (*send)(struct link *l, const struct link_piece *pieces, unsigned n);
    enum err (*receive)(struct link *l, const uint8_t **ret_bytes, size_t *ret_n);
    enum err (*flush)(struct link *l);
    bool (*has_input)(const struct link *l);
    bool (*has_output)(const struct link *l);
    int (*fd)(const struct link *l);
    void (*set_frame_bytes_max)(struct link *l, uint32_t n);
    void (*stats)(const struct link *l, struct link_stats *ret);
    void (*free)(struct link *l);
};

/* Implementations have this as their first member. */
struct link {
    const struct link_ops *ops;
};

/* Sends one frame made of up to LINK_PIECES_MAX pieces that together have the `len` of its header;
 * the first holds at least LINK_HEADER_BYTES. All or nothing: ERR_AGAIN when the send buffer has no
 * room for all of it (try again after link_wait has flushed), ERR_LIMIT above the largest frame,
 * ERR_INVALID when lengths disagree. ERR_OK does not mean that the peer has it. The bytes are not
 * needed after the return. */
static inline enum err link_send(struct link *l, const struct link_piece *pieces, unsigned n)
{
    return l->ops->send(l, pieces, n);
}

/* The next whole frame, as a view (aligned to FRAME_ALIGN) that lasts until the next call on this
 * link. ERR_AGAIN: not here yet. ERR_CLOSED: the peer is gone. ERR_CORRUPT: seal, order or length
 * is wrong. */
static inline enum err link_receive(struct link *l, const uint8_t **ret_bytes, size_t *ret_n)
{
    return l->ops->receive(l, ret_bytes, ret_n);
}

/* Pushes queued bytes to the system. ERR_AGAIN: some are left. link_wait does this too. */
static inline enum err link_flush(struct link *l)
{
    return l->ops->flush(l);
}

/* The largest frame accepted and sent from now on (from the plan: rows × row bytes + headers). */
static inline void link_set_frame_bytes_max(struct link *l, uint32_t n)
{
    l->ops->set_frame_bytes_max(l, n);
}

static inline void link_stats_get(const struct link *l, struct link_stats *ret)
{
    l->ops->stats(l, ret);
}

/* Closes at once; what is queued is lost (flush first for a polite BYE). NULL is fine. */
static inline void link_free(struct link *l)
{
    if (l)
        l->ops->free(l);
}

/* Encodes into `scratch` (reused, grows to the largest header or OPEN) and sends. `rows` is the
 * payload of a STEP, [n_rows, row_bytes / 4], else NULL. Errors of frame_encode and link_send, and
 * ERR_NO_MEMORY. */
enum err link_send_frame(struct link *l, const struct frame *f, const float *rows,
                         struct buf *scratch);

/* Waits until queued bytes are out. ERR_TIMEOUT, or what broke the link. */
enum err link_flush_wait(struct link *l, uint64_t timeout_us);

struct link_ready {
    uint64_t links; /* bit i: link_receive(links[i]) has something to say (perhaps an error) */
    uint64_t room;  /* bit i: link i had queued bytes and all are out now */
    bool extra;     /* the extra descriptor is readable */
};

/* Waits until a link has input (or is dead), a link that had queued bytes has got rid of them, or
 * `extra_fd` (a mailbox; -1: none) is readable. Queued bytes are flushed meanwhile. NULL entries
 * are passed over. Spins for up to `spin_us` first where the machine has more than one core, then
 * sleeps in poll(). ERR_TIMEOUT after `timeout_us`; ERR_IO when poll() itself fails. A bit set in
 * `links` may turn out to be ERR_AGAIN (a part of a frame). */
enum err link_wait(struct link *const links[], unsigned n, int extra_fd, uint64_t timeout_us,
                   uint32_t spin_us, struct link_ready *ret);

#endif
