/* Model bytes on a connection of their own (HELLO kind BULK), so that they stall neither probes nor
 * tokens; and the short transfer that measures bandwidth (kind BANDWIDTH).
 *
 * The client asks for the map of present blocks of a file, or for a range of at most 1 MiB; the
 * server answers each request once, in order, with bytes and their hash or with an error code. A
 * model is named by the hash of its manifest and a file by its number in it; never by a path. Bytes
 * come from and go to callbacks. Client and server are cores over a link that neither block nor
 * read a clock; bulk_fetch and bulk_serve are the loops of a thread that does nothing else.
 * Resuming is asking again for what is still missing: nothing else is remembered. The link is made
 * with BULK_FRAME_BYTES_MAX as its largest frame, whatever HELLO says about the data plane's. */
#ifndef COVEY_TRANSPORT_BULK_H
#define COVEY_TRANSPORT_BULK_H

#include "base/err.h"
#include "base/id.h"
#include "transport/link.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    BULK_BLOCK_BYTES = 1 << 20,    /* a leaf of the hash tree (PROTOCOL 5.1) */
    BULK_FILES_MAX = 1024,         /* of one manifest */
    BULK_MAP_BLOCKS_MAX = 1 << 18, /* of one HAVE-MAP: 32 KiB of bits, 256 GiB of file */
    BULK_FRAME_BYTES_MAX = BULK_BLOCK_BYTES + 4096,
    BULK_WINDOW = 4, /* requests under way; two keep the wire busy, more help on long paths */
    BULK_IDLE_MS = 30000,
};

/* Leaf: BLAKE2b-256(0x00 ‖ bytes), inner node: BLAKE2b-256(0x01 ‖ left ‖ right), split as in RFC
 * 6962 (the left part is the largest power of two below n); the hash of an empty file is that of an
 * empty leaf. */
struct hash256 bulk_leaf_hash(const void *bytes, size_t n);
struct hash256 bulk_tree_root(const struct hash256 *leaves, size_t n);

/* ---- server ---- */

/* Where a server reads; called from the thread that runs it. Errors become codes on the wire. */
struct bulk_source {
    void *context;
    /* Reads exactly n bytes. ERR_NOT_FOUND: not held here (manifest, file, or these blocks). */
    enum err (*read)(void *context, const struct hash256 *manifest, uint32_t file, uint64_t offset,
                     size_t n, void *to);
    /* Sets bit i (of byte i / 8, lowest first) of ret [(n_blocks + 7) / 8], zeroed before, for each
     * block first + i that is here whole. */
    enum err (*have)(void *context, const struct hash256 *manifest, uint32_t file, uint32_t first,
                     uint32_t n_blocks, uint8_t *ret);
};

struct bulk_server;
/* The link stays the caller's. */
enum err bulk_server_new(struct link *link, const struct bulk_source *source,
                         struct bulk_server **ret);
void bulk_server_free(struct bulk_server *s);
/* Answers what is there. ERR_AGAIN: wait for the link. Anything else: the connection is over. */
enum err bulk_server_step(struct bulk_server *s);

/* Serves one connection until the peer closes it (ERR_OK), it idles for BULK_IDLE_MS (ERR_TIMEOUT),
 * `stop_fd` is readable (ERR_CANCELLED; -1: none), or the link breaks. */
enum err bulk_serve(struct link *link, const struct bulk_source *source, int stop_fd);

/* ---- client ---- */

struct bulk_range {
    uint32_t file;
    uint32_t n_bytes; /* 1 … BULK_BLOCK_BYTES, within one block */
    uint64_t offset;
};

/* Where a client finds out what to get and puts what it got; called from the thread that runs it.
 */
struct bulk_sink {
    void *context;
    struct hash256 manifest;
    /* The next range that is wanted; false: no more. */
    bool (*next)(void *context, struct bulk_range *ret);
    /* The bytes of a range and the hash of its leaf as the server gave it; the hash of the bytes
     * was checked (a whole block against the leaf; a part of one against the part). A failure ends
     * the fetch with that error. */
    enum err (*put)(void *context, const struct bulk_range *range, const void *bytes,
                    const struct hash256 *hash);
    /* The server cannot: ERR_NOT_FOUND, ERR_IO, … or the bytes did not fit their hash
     * (ERR_CORRUPT). ERR_OK goes on with the other ranges, else the fetch ends with that error. */
    enum err (*missing)(void *context, const struct bulk_range *range, enum err why);
};

/* Fetches every range that `next` names, with BULK_WINDOW under way. ERR_OK: all were answered.
 * ERR_TIMEOUT: nothing came for `idle_ms`. ERR_CANCELLED: `stop_fd` became readable. ERR_CLOSED,
 * ERR_CORRUPT: the link; go on with another, from `next`. */
enum err bulk_fetch(struct link *link, const struct bulk_sink *sink, uint32_t idle_ms, int stop_fd);

/* Asks which blocks of a file the peer has. Bits as in struct bulk_source; `ret` has
 * (n_blocks + 7) / 8 bytes. ERR_NOT_FOUND: it does not hold that model. */
enum err bulk_ask_map(struct link *link, const struct hash256 *manifest, uint32_t file,
                      uint32_t first, uint32_t n_blocks, uint32_t timeout_ms, uint8_t *ret);

/* ---- bandwidth ---- */

enum {
    BANDWIDTH_BYTES_MAX = 4 << 20, /* each way */
    BANDWIDTH_US_MAX = 200 * 1000, /* each way */
    BANDWIDTH_TIMEOUT_MS = 3000,   /* of the whole exchange */
};

struct bandwidth {
    uint64_t to_peer_bytes_per_s;   /* as the peer saw them arrive; 0: too slow to tell */
    uint64_t from_peer_bytes_per_s; /* as they arrived here */
};

/* The initiator sends first, then the other. Both ends learn both figures. Blocks for
 * BANDWIDTH_TIMEOUT_MS at most. ERR_TIMEOUT, ERR_CLOSED, ERR_CORRUPT. */
enum err bandwidth_measure(struct link *link, struct bandwidth *ret);
enum err bandwidth_answer(struct link *link, struct bandwidth *ret);

#endif
