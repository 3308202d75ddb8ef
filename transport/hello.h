/* The opening of a connection to the data port: two fixed-size HELLOs and a proof, then sealed
 * records. A core: bytes in, bytes out, no socket, no clock, no randomness.
 *
 *   initiator                                 responder
 *   HELLO {…, nonce, tag over it}       →     looks the key id up, checks tag and boot ids
 *                                       ←     HELLO {…, nonce, tag over both}
 *   PROOF {tag over both}               →     only now is the connection handed on
 *
 * Keys come from the control session of the pair: its 32-byte data secret. Every tag and key is
 * keyed BLAKE2b under a subkey of that secret. The traffic keys depend on both HELLOs whole (both
 * nonces, the kind, both feature sets), so a replayed HELLO gets an answer but can neither prove
 * nor read anything; the nonces seen lately are refused even earlier. A HELLO sent back to its own
 * sender fails, since it names the wrong boot ids. */
#ifndef COVEY_TRANSPORT_HELLO_H
#define COVEY_TRANSPORT_HELLO_H

#include "base/err.h"
#include "base/id.h"
#include "transport/seal.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    HELLO_BYTES = 128, /* of each HELLO */
    HELLO_PROOF_BYTES = 32,
    HELLO_NONCE_BYTES = 16,
    HELLO_KEY_ID_BYTES = 8,
    HELLO_SECRET_BYTES = 32,
    HELLO_KEYS_MAX = 256,    /* sessions that the data port knows: two for each of 128 peers */
    HELLO_RECENT_MAX = 1024, /* initiator nonces remembered */
    HELLO_TIMEOUT_MS = 3000,
    HELLO_PENDING_MAX = 64, /* unauthenticated connections; the oldest goes */
    HELLO_VERSION = 1,
};

enum hello_kind { HELLO_DATA = 1, HELLO_BULK = 2, HELLO_BANDWIDTH = 3, HELLO_KIND_N };

enum hello_feature { HELLO_AES = 1 };

/* What a node says about itself. */
struct hello_facts {
    uint16_t protocol_min, protocol_max; /* versions of the data plane that it speaks */
    uint32_t features;                   /* enum hello_feature */
    uint32_t arithmetic_version;
    uint64_t kernel_digest;
    uint32_t frame_bytes_max; /* largest frame that it accepts */
    uint64_t types;           /* bit t: it knows frame type t */
};

/* The key of one control session with a peer. */
struct hello_key {
    struct node_id peer;
    uint64_t own_boot_id, peer_boot_id;
    uint8_t secret[HELLO_SECRET_BYTES];
};

/* What both ends agreed on. */
struct hello_result {
    uint8_t kind; /* enum hello_kind */
    struct node_id peer;
    uint64_t peer_boot_id;
    uint16_t protocol;        /* the highest that both speak */
    uint32_t frame_bytes_max; /* the smaller of the two */
    struct hello_facts theirs;
    struct seal_keys keys;
};

/* The responder's memory: keys of the sessions, nonces seen. */
struct hello_gate;

enum err hello_gate_new(struct hello_gate **ret);
void hello_gate_free(struct hello_gate *g);
/* The newest of a peer's keys is used for dialling; older ones are still accepted until removed.
 * ERR_LIMIT. Adding the same secret again is fine. */
enum err hello_gate_add(struct hello_gate *g, const struct hello_key *key);
/* A session ended: its key opens nothing any more. */
void hello_gate_remove(struct hello_gate *g, const uint8_t secret[HELLO_SECRET_BYTES]);
void hello_gate_remove_peer(struct hello_gate *g, const struct node_id *peer);
/* The newest key of the peer, or NULL. */
const struct hello_key *hello_gate_find(const struct hello_gate *g, const struct node_id *peer);

/* One handshake. */
struct hello;

/* `nonce` is fresh from the system's random source. The first output is at hand at once (an
 * initiator's HELLO) by hello_step with no bytes. */
enum err hello_new_initiator(const struct hello_key *key, uint8_t kind,
                             const struct hello_facts *own, const uint8_t nonce[HELLO_NONCE_BYTES],
                             struct hello **ret);
enum err hello_new_responder(struct hello_gate *gate, const struct hello_facts *own,
                             const uint8_t nonce[HELLO_NONCE_BYTES], struct hello **ret);
void hello_free(struct hello *h);

/* How many bytes the next step needs, exactly; 0 when done. No more may be read from the socket. */
size_t hello_wants(const struct hello *h);

struct hello_update {
    uint32_t n_out; /* bytes to be written */
    uint8_t out[HELLO_BYTES];
    bool done; /* hello_result may be asked; write `out` first */
};

/* `n` is what hello_wants said (0 for the initiator's start). ERR_CORRUPT: not a HELLO.
 * ERR_DENIED: unknown key, wrong tag, replay, wrong boot id. ERR_UNSUPPORTED: no common version.
 * After a failure the handshake is over and the socket is to be closed without a word. */
enum err hello_step(struct hello *h, const uint8_t *bytes, size_t n, struct hello_update *ret);

/* Only once done. */
void hello_result_get(const struct hello *h, struct hello_result *ret);

#endif
