/* Sealed records: authenticated encryption of one direction of a connection.
 *
 * AES-256-GCM where both ends have it in hardware, else ChaCha20-Poly1305 (RFC 8439); libsodium's.
 * A record is {length u32 of what follows, ciphertext, 16-byte tag}; the length is authenticated
 * too. The nonce is a counter from 0, so that a record lost, repeated or moved is noticed. */
#ifndef COVEY_TRANSPORT_SEAL_H
#define COVEY_TRANSPORT_SEAL_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum seal_cipher { SEAL_CHACHA20_POLY1305 = 1, SEAL_AES_256_GCM = 2 };

enum {
    SEAL_KEY_BYTES = 32,
    SEAL_TAG_BYTES = 16,
    SEAL_PREFIX_BYTES = 4,
    SEAL_OVERHEAD = SEAL_PREFIX_BYTES + SEAL_TAG_BYTES,
    SEAL_PLAIN_MAX = 64 << 10, /* bytes of content in one record */
    SEAL_RECORD_MAX = SEAL_PLAIN_MAX + SEAL_OVERHEAD,
};

/* Both directions of one connection, seen from one end. Wiped by who is done with it. */
struct seal_keys {
    uint8_t cipher; /* enum seal_cipher */
    uint8_t send[SEAL_KEY_BYTES];
    uint8_t receive[SEAL_KEY_BYTES];
};

struct seal;

/* Whether this machine has AES-256-GCM in hardware as far as libsodium can use it. */
bool seal_has_aes(void);

/* ERR_UNSUPPORTED: a cipher that this machine lacks. ERR_NO_MEMORY. */
enum err seal_new(uint8_t cipher, const uint8_t key[SEAL_KEY_BYTES], struct seal **ret);
void seal_free(struct seal *s);

/* Writes one record of n + SEAL_OVERHEAD bytes (1 <= n <= SEAL_PLAIN_MAX). `plain` may lie at
 * to + SEAL_PREFIX_BYTES (in place), and must not overlap otherwise. */
void seal_record(struct seal *s, const uint8_t *plain, size_t n, uint8_t *to);

/* Length of the content of the record that starts with these 4 bytes. ERR_CORRUPT. */
enum err seal_record_length(const uint8_t prefix[SEAL_PREFIX_BYTES], size_t *ret_n);

/* Opens the whole record of `n` bytes of content into `to` [n]. ERR_CORRUPT: not the next record
 * that the peer sealed. */
enum err seal_open(struct seal *s, const uint8_t *record, size_t n, uint8_t *to);

#endif
