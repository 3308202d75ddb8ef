/* Sealed UDP datagrams, keyed from a session's export "probe".
 *
 * Wire: key id u64, counter u64 (both little-endian), then ChaCha20-Poly1305 of {channel u8,
 * payload} with those 16 bytes as associated data and the counter as nonce. Both ends derive, for
 * each direction, a key and the id under which its receiver looks it up; so no message is needed to
 * agree on them. The receiver accepts each counter once, in a window of DATAGRAM_WINDOW.
 *
 * A plain value without allocations; the owner of the session keeps it and wipes it with it. */
#ifndef COVEY_PROTO_DATAGRAM_H
#define COVEY_PROTO_DATAGRAM_H

#include "base/err.h"
#include "proto/session.h"
#include "proto/wire.h"

#include <stddef.h>
#include <stdint.h>

enum {
    DATAGRAM_HEADER_BYTES = 16,
    DATAGRAM_OVERHEAD = DATAGRAM_HEADER_BYTES + 1 + 16,
    DATAGRAM_BYTES_MAX = DATAGRAM_PAYLOAD_MAX + DATAGRAM_OVERHEAD,
    DATAGRAM_WINDOW = 1024,
};

struct datagram {
    uint8_t send_key[32], receive_key[32];
    uint64_t send_id, receive_id;
    uint64_t send_counter;
    uint64_t highest; /* highest counter accepted + 1; 0: none yet */
    uint64_t seen[DATAGRAM_WINDOW / 64];
};

/* `master` is session_export(s, "probe"); the two ends have different roles. */
void datagram_init(struct datagram *d, const uint8_t master[32], enum session_role role);
void datagram_wipe(struct datagram *d);

/* The key id of a received datagram, to find its receiver. ERR_CORRUPT when it is too short or too
 * long to be one. */
enum err datagram_key_id(const uint8_t *bytes, size_t n, uint64_t *ret_id);

/* ERR_LIMIT above DATAGRAM_PAYLOAD_MAX or when the counter is used up. */
enum err datagram_seal(struct datagram *d, uint8_t channel, const uint8_t *payload, size_t n,
                       uint8_t ret[DATAGRAM_BYTES_MAX], size_t *ret_n);

/* ERR_CORRUPT: too short or too long; ERR_DENIED: forged, or not for this key; ERR_STALE: a counter
 * seen before or older than the window. Nothing changes on failure. */
enum err datagram_open(struct datagram *d, const uint8_t *bytes, size_t n,
                       uint8_t ret[DATAGRAM_PAYLOAD_MAX], size_t *ret_n, uint8_t *ret_channel);

#endif
