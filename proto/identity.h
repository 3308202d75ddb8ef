/* Who a node is: an Ed25519 key (its id) and an X25519 static key for sessions, signed by the
 * first.
 *
 * The stored form also holds a digest of the machine's id, so that a cloned disk is noticed
 * (PROTOCOL 1.1). A plain value; wipe it when done. Not here: files (proto/identity_file). */
#ifndef COVEY_PROTO_IDENTITY_H
#define COVEY_PROTO_IDENTITY_H

#include "base/err.h"
#include "base/id.h"
#include "proto/random.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    IDENTITY_SIGNATURE_BYTES = 64,
    IDENTITY_STORED_BYTES = 8 + 32 + 32 + 32 + 32, /* magic, two seeds, machine, checksum */
};

struct identity {
    struct node_id id; /* Ed25519 public key */
    uint8_t sign_secret[64];
    uint8_t static_public[32], static_secret[32]; /* X25519 */
    uint8_t static_signature[IDENTITY_SIGNATURE_BYTES];
    struct hash256 machine;
};

void identity_make(struct random_source random, const struct hash256 *machine,
                   struct identity *ret);
void identity_wipe(struct identity *id);

void identity_encode(const struct identity *id, uint8_t ret[IDENTITY_STORED_BYTES]);
/* ERR_CORRUPT: not a key file, or damaged; ERR_UNSUPPORTED: of a later version. */
enum err identity_decode(const uint8_t *bytes, size_t n, struct identity *ret);

/* Signs `what` (a short word that names the kind of statement, so that none can pass for another)
 * and the bytes. */
void identity_sign(const struct identity *id, const char *what, const uint8_t *bytes, size_t n,
                   uint8_t ret[IDENTITY_SIGNATURE_BYTES]);
bool identity_verify(const struct node_id *signer, const char *what, const uint8_t *bytes, size_t n,
                     const uint8_t signature[IDENTITY_SIGNATURE_BYTES]);

/* Does the X25519 key belong to the node? */
bool identity_verify_static(const struct node_id *id, const uint8_t static_public[32],
                            const uint8_t signature[IDENTITY_SIGNATURE_BYTES]);

#endif
