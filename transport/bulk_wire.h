/* What bulk and bandwidth share: the frames of connections that are not the data plane's, and
 * waiting with a deadline. Private to transport.
 *
 * A frame is the link's header {len u32, type u8, flags u8, header_len u16, tag u64, link_seq u64,
 * ack u64} and a body. The tag of an answer is that of its request. */
#ifndef COVEY_TRANSPORT_BULK_WIRE_H
#define COVEY_TRANSPORT_BULK_WIRE_H

#include "base/buf.h"
#include "transport/link.h"

enum bulk_type {
    BULK_GET = 32,   /* manifest 32, file u32, n_bytes u32, offset u64 */
    BULK_CHUNK = 33, /* hash 32, bytes */
    BULK_ASK = 34,   /* manifest 32, file u32, first u32, n_blocks u32 */
    BULK_MAP = 35,   /* bits */
    BULK_ERROR = 36, /* code u16 (enum frame_error_code) */
    BULK_FILL = 40,  /* bandwidth: bytes that mean nothing */
    BULK_TOOK = 41,  /* one FILL has arrived */
    BULK_LAST = 42,  /* no more FILLs */
    BULK_RATE = 43,  /* bytes_per_s u64, as the receiver of the FILLs saw it */
};

struct bulk_head {
    uint8_t type;
    uint64_t tag;
    struct reader body;
};

/* Starts a frame of `n_body` bytes in `w`; the body follows. */
void bulk_begin(struct writer *w, uint8_t type, uint64_t tag, size_t n_body);
/* ERR_CORRUPT. */
enum err bulk_parse(const uint8_t *bytes, size_t n, struct bulk_head *ret);

/* A moment by which something must have happened, and what may interrupt the wait. */
struct bulk_wait {
    uint64_t due_us; /* monotonic */
    int stop_fd;     /* -1: none */
};

/* Until the link has input. ERR_TIMEOUT, ERR_CANCELLED (stop_fd is readable), ERR_IO. */
enum err bulk_wait_input(struct link *l, const struct bulk_wait *w);
/* Until all that is queued is out. The same, and what broke the link. */
enum err bulk_wait_room(struct link *l, const struct bulk_wait *w);
/* Sends, waiting for room where there is none. */
enum err bulk_send(struct link *l, const void *bytes, size_t n, const struct bulk_wait *w);
/* The next frame. The errors of both. */
enum err bulk_receive(struct link *l, const struct bulk_wait *w, struct bulk_head *ret);

#endif
