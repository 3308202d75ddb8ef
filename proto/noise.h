/* The Noise handshake XX, with or without a pre-shared key, over 25519, ChaChaPoly and BLAKE2b.
 *
 * Source: The Noise Protocol Framework, revision 34, sections 5 (processing rules), 7.5 (XX), 9
 * (psk modifiers) and 12 (functions). Noise_XX, Noise_XXpsk0 and Noise_XXpsk3 are spoken; the last
 * one only because the published vectors have it and not psk0. Departure: after Split() a further
 * secret is kept, HMAC(ck, "covey export"), from which noise_export derives keys for other uses.
 *
 * Plain values; wipe them when done. The ephemeral key comes in as bytes, so nothing here is
 * random. */
#ifndef COVEY_PROTO_NOISE_H
#define COVEY_PROTO_NOISE_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    NOISE_KEY_BYTES = 32,
    NOISE_HASH_BYTES = 64,
    NOISE_BLOCK_BYTES = 128,
    NOISE_TAG_BYTES = 16,
    NOISE_MESSAGE_MAX = 65535,
    NOISE_MESSAGES = 3, /* of XX */
};

enum noise_pattern { NOISE_XX, NOISE_XX_PSK0, NOISE_XX_PSK3, NOISE_PATTERN_N };
enum noise_role { NOISE_INITIATOR, NOISE_RESPONDER };

/* A cipher with its counter. The key is never used twice with one counter. */
struct noise_cipher {
    uint8_t key[NOISE_KEY_BYTES];
    bool has_key;
    uint64_t nonce;
};

/* out has n + NOISE_TAG_BYTES bytes and may be `text`. ERR_LIMIT: counter used up. */
enum err noise_seal(struct noise_cipher *c, const uint8_t *ad, size_t n_ad, const uint8_t *text,
                    size_t n, uint8_t *out);
/* n counts the tag; out has n - NOISE_TAG_BYTES bytes and may be `sealed`. ERR_DENIED: forged; the
 * counter then stays. */
enum err noise_open(struct noise_cipher *c, const uint8_t *ad, size_t n_ad, const uint8_t *sealed,
                    size_t n, uint8_t *out);
void noise_rekey(struct noise_cipher *c);

struct noise_handshake {
    enum noise_pattern pattern;
    enum noise_role role;
    uint8_t chaining_key[NOISE_HASH_BYTES], hash[NOISE_HASH_BYTES];
    struct noise_cipher cipher;
    uint8_t static_public[32], static_secret[32];
    uint8_t ephemeral_public[32], ephemeral_secret[32];
    uint8_t peer_static[32], peer_ephemeral[32];
    uint8_t psk[NOISE_KEY_BYTES];
    int message; /* how many are done */
};

struct noise_options {
    enum noise_pattern pattern;
    enum noise_role role;
    const uint8_t *prologue;
    size_t n_prologue;
    const uint8_t *static_public, *static_secret, *ephemeral_secret; /* 32 bytes each */
    const uint8_t *psk; /* 32 bytes; NULL for NOISE_XX */
};

void noise_start(struct noise_handshake *h, const struct noise_options *options);
/* The ephemeral key, where the options had none. It must be there before our first noise_write. */
void noise_set_ephemeral(struct noise_handshake *h, const uint8_t secret[32]);

/* How many bytes the next message has beyond its payload. */
size_t noise_overhead(const struct noise_handshake *h);
/* Writes the next message; out has noise_overhead() + n bytes. ERR_DENIED: the peer's key is of low
 * order. It must be our turn. */
enum err noise_write(struct noise_handshake *h, const uint8_t *payload, size_t n, uint8_t *out);
/* Reads the next message; payload has n - noise_overhead() bytes. ERR_DENIED: forged, or another
 * psk: the handshake is then over. ERR_CORRUPT: too short. */
enum err noise_read(struct noise_handshake *h, const uint8_t *message, size_t n, uint8_t *payload);
bool noise_is_done(const struct noise_handshake *h);

/* After the last message: a cipher for each direction, and 64 bytes to derive further keys from. */
void noise_split(const struct noise_handshake *h, struct noise_cipher *ret_send,
                 struct noise_cipher *ret_receive, uint8_t ret_export[NOISE_HASH_BYTES]);
void noise_export(const uint8_t export_key[NOISE_HASH_BYTES], const char *label, uint8_t ret[32]);
void noise_wipe(struct noise_handshake *h);

/* HMAC over BLAKE2b-512 and Noise's HKDF with two or three outputs (out3 may be NULL). */
void noise_hmac(const uint8_t key[NOISE_HASH_BYTES], const uint8_t *bytes, size_t n,
                uint8_t ret[NOISE_HASH_BYTES]);
void noise_hkdf(const uint8_t chaining_key[NOISE_HASH_BYTES], const uint8_t *input, size_t n,
                uint8_t out1[NOISE_HASH_BYTES], uint8_t out2[NOISE_HASH_BYTES], uint8_t *out3);

/* X25519: the public key of a secret; the shared secret. ERR_DENIED for a peer key of low order. */
void noise_public_key(const uint8_t secret[32], uint8_t ret[32]);

#endif
