/* The sealed session between two nodes, as a core: bytes of a stream in, events out, and back.
 *
 * Wire. The initiator sends one first message of SESSION_FIRST_BYTES: eight bytes in the clear
 * (magic, version) and the first message of Noise_XXpsk0_25519_ChaChaPoly_BLAKE2b, whose prologue
 * is those eight bytes. The responder tries each pre-shared key that it accepts; where none fits it
 * sends nothing, keeps nothing, and the caller closes. Two more messages of fixed size end the
 * handshake. From then on each side sends frames: u32 length (little-endian) of what follows, then
 * the sealed {channel u8, flags u8, payload}. The length is the associated data; the nonce is a
 * 64-bit counter that starts at 0 in each direction, so a frame that is lost, repeated or out of
 * order ends the session. Every SESSION_REKEY_FRAMES frames the direction's key is replaced by
 * Noise's REKEY.
 *
 * Owner: the caller owns the socket and the timer; the session owns its keys, its input of at most
 * one frame and its output. Not here: who the peer is (proto/trust), limits on the number of
 * unauthenticated connections (the listener).
 *
 * Source: The Noise Protocol Framework, revision 34. */
#ifndef COVEY_PROTO_SESSION_H
#define COVEY_PROTO_SESSION_H

#include "base/err.h"
#include "base/util.h"
#include "proto/random.h"
#include "proto/wire.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    SESSION_KEY_BYTES = 32,
    SESSION_VERSION = 1,
    SESSION_FIRST_BYTES = 8 + 32 + 16, /* header, ephemeral key, tag */
    SESSION_PSKS_MAX = 64,             /* secrets held + open tokens */
    SESSION_FRAME_OVERHEAD = 4 + 2 + 16,
    SESSION_OUTPUT_MAX = 4 * 1024 * 1024,
    SESSION_REKEY_FRAMES = 1 << 16,
    SESSION_HANDSHAKE_US =
        3 * 1000 * 1000,              /* a connection that is not authenticated by then goes */
    SESSION_UNAUTHENTICATED_MAX = 64, /* of those; the oldest is evicted */
};

enum session_role { SESSION_INITIATOR, SESSION_RESPONDER };

/* A pre-shared key and the caller's word for it, which tells afterwards which one matched. */
struct session_psk {
    uint8_t key[SESSION_KEY_BYTES];
    uint64_t tag;
};

struct session_options {
    enum session_role role;
    const uint8_t *static_public, *static_secret; /* X25519, 32 bytes each; copied */
    const struct session_psk *psks;               /* copied; the initiator has exactly one */
    uint32_t n_psks;
    struct random_source random; /* for the ephemeral key; used during the handshake only */
};

enum session_event_kind {
    SESSION_EVENT_NONE,  /* more bytes are needed */
    SESSION_EVENT_READY, /* the handshake is done: peer_static and psk_tag are set */
    SESSION_EVENT_FRAME, /* channel, flags, bytes */
};

struct session_event {
    enum session_event_kind kind;
    uint8_t peer_static[SESSION_KEY_BYTES];
    uint64_t psk_tag;
    uint8_t channel, flags;
    const uint8_t *bytes; /* belongs to the session, valid until the next call on it */
    uint32_t len;
};

struct session;

/* The initiator's first message is in the output at once. ERR_INVALID: no psk, or not exactly one
 * for an initiator, or too many; ERR_NO_MEMORY. */
enum err session_new(const struct session_options *options, struct session **ret);
void session_free(struct session *s);
DEFINE_CLEANUP(struct session, session_free)

/* Takes bytes of the stream up to and including the first that completes an event; *ret_used says
 * how many. Call again with the rest until all are used. After an error the session is over: every
 * call returns that error, and the caller closes the stream without a word. ERR_DENIED: no psk
 * fits, or a forged, repeated or reordered frame; ERR_UNSUPPORTED: another version; ERR_CORRUPT:
 * not our protocol, or a length beyond the limits; ERR_NO_MEMORY. */
enum err session_feed(struct session *s, const uint8_t *bytes, size_t n, size_t *ret_used,
                      struct session_event *ret_event);

/* Seals one frame into the output. ERR_AGAIN before SESSION_EVENT_READY, ERR_LIMIT above
 * FRAME_PAYLOAD_MAX, ERR_BUSY when the output holds SESSION_OUTPUT_MAX (nothing is sent then),
 * ERR_NO_MEMORY. */
enum err session_send(struct session *s, uint8_t channel, uint8_t flags, const uint8_t *bytes,
                      size_t n);

/* What waits to be written to the stream: *ret_n bytes. After writing k of them, consume k. */
const uint8_t *session_output(const struct session *s, size_t *ret_n);
void session_output_consume(struct session *s, size_t k);

bool session_is_ready(const struct session *s);

/* A further key, known to both ends only: one for each label ("probe", "data"). ERR_AGAIN before
 * SESSION_EVENT_READY. Where the two directions need different keys the user derives them by role.
 */
enum err session_export(const struct session *s, const char *label, uint8_t ret[SESSION_KEY_BYTES]);
enum session_role session_role(const struct session *s);

#endif
