/* The link over a TCP connection (or any stream socket), for one thread.
 *
 * Made from a connected descriptor whose ends have authenticated each other (transport/hello). The
 * byte stream is sealed records; a frame starts with a record and spans as many as it needs. Rows
 * are sealed from where they lie into the send buffer, and opened from the receive buffer into the
 * frame: no other copies. */
#ifndef COVEY_TRANSPORT_LINK_TCP_H
#define COVEY_TRANSPORT_LINK_TCP_H

#include "transport/link.h"
#include "transport/seal.h"

struct link_tcp_options {
    int fd; /* taken over on success; made non-blocking */
    struct seal_keys keys;
    uint32_t frame_bytes_max; /* at most FRAME_BYTES_MAX; both ways */
    /* Sealed bytes that may wait for the system at once; 0: two of the largest frames. */
    size_t queue_bytes_max;
};

/* ERR_INVALID, ERR_NO_MEMORY, ERR_UNSUPPORTED (cipher), ERR_IO. On failure the descriptor stays the
 * caller's. */
enum err link_tcp_new(const struct link_tcp_options *options, struct link **ret);

#endif
