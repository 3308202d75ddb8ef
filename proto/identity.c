#include "proto/identity.h"

#include "base/buf.h"

#include <assert.h>
#include <string.h>

#include <sodium.h>

enum { MAGIC_BYTES = 8, VERSION = 1, CHECKSUM_BYTES = 32 };
static const uint8_t magic[MAGIC_BYTES] = {'c', 'o', 'v', 'e', 'y', 'i', 'd', VERSION};
static const char static_key_statement[] = "static key";

static void derive(struct identity *id, const uint8_t seed[32])
{
    (void)crypto_sign_seed_keypair(id->id.bytes, id->sign_secret, seed);
    (void)crypto_scalarmult_base(id->static_public, id->static_secret);
    identity_sign(id, static_key_statement, id->static_public, sizeof id->static_public,
                  id->static_signature);
}

void identity_make(struct random_source random, const struct hash256 *machine, struct identity *ret)
{
    uint8_t seed[32];
    random.fill(random.ctx, seed, sizeof seed);
    random.fill(random.ctx, ret->static_secret, sizeof ret->static_secret);
    ret->machine = *machine;
    derive(ret, seed);
    sodium_memzero(seed, sizeof seed);
}

void identity_wipe(struct identity *id)
{
    sodium_memzero(id, sizeof *id);
}

void identity_encode(const struct identity *id, uint8_t ret[IDENTITY_STORED_BYTES])
{
    struct writer w = writer_of(ret, IDENTITY_STORED_BYTES);
    write_bytes(&w, magic, sizeof magic);
    write_bytes(&w, id->sign_secret, 32); /* libsodium's secret key starts with the seed */
    write_bytes(&w, id->static_secret, 32);
    write_bytes(&w, id->machine.bytes, 32);
    (void)crypto_generichash(ret + w.len, CHECKSUM_BYTES, ret, w.len, NULL, 0);
    assert(w.len + CHECKSUM_BYTES == IDENTITY_STORED_BYTES);
}

enum err identity_decode(const uint8_t *bytes, size_t n, struct identity *ret)
{
    uint8_t checksum[CHECKSUM_BYTES], seed[32];
    struct identity id;
    if (n < MAGIC_BYTES || memcmp(bytes, magic, MAGIC_BYTES - 1) != 0)
        return ERR_CORRUPT;
    if (bytes[MAGIC_BYTES - 1] != VERSION)
        return ERR_UNSUPPORTED;
    if (n != IDENTITY_STORED_BYTES)
        return ERR_CORRUPT;
    (void)crypto_generichash(checksum, sizeof checksum, bytes, n - CHECKSUM_BYTES, NULL, 0);
    if (memcmp(checksum, bytes + n - CHECKSUM_BYTES, CHECKSUM_BYTES) != 0)
        return ERR_CORRUPT;
    struct reader r = reader_of(bytes + MAGIC_BYTES, n - MAGIC_BYTES);
    read_bytes(&r, seed, sizeof seed);
    read_bytes(&r, id.static_secret, sizeof id.static_secret);
    read_bytes(&r, id.machine.bytes, sizeof id.machine.bytes);
    derive(&id, seed);
    *ret = id;
    sodium_memzero(seed, sizeof seed);
    sodium_memzero(&id, sizeof id);
    return ERR_OK;
}

/* The signed bytes: "covey ", the word with its NUL, then a digest of the statement; so a statement
 * of one kind is never the prefix of another. */
enum { STATEMENT_MAX = 64 };
static size_t statement_of(const char *what, const uint8_t *bytes, size_t n,
                           uint8_t ret[STATEMENT_MAX])
{
    struct writer w = writer_of(ret, STATEMENT_MAX);
    write_bytes(&w, "covey ", 6);
    write_bytes(&w, what, strlen(what) + 1);
    uint8_t digest[32];
    (void)crypto_generichash(digest, sizeof digest, bytes, n, NULL, 0);
    write_bytes(&w, digest, sizeof digest);
    assert(!w.bad);
    return w.len;
}

void identity_sign(const struct identity *id, const char *what, const uint8_t *bytes, size_t n,
                   uint8_t ret[IDENTITY_SIGNATURE_BYTES])
{
    uint8_t statement[STATEMENT_MAX];
    size_t n_statement = statement_of(what, bytes, n, statement);
    (void)crypto_sign_detached(ret, NULL, statement, n_statement, id->sign_secret);
}

bool identity_verify(const struct node_id *signer, const char *what, const uint8_t *bytes, size_t n,
                     const uint8_t signature[IDENTITY_SIGNATURE_BYTES])
{
    uint8_t statement[STATEMENT_MAX];
    size_t n_statement = statement_of(what, bytes, n, statement);
    return crypto_sign_verify_detached(signature, statement, n_statement, signer->bytes) == 0;
}

bool identity_verify_static(const struct node_id *id, const uint8_t static_public[32],
                            const uint8_t signature[IDENTITY_SIGNATURE_BYTES])
{
    return identity_verify(id, static_key_statement, static_public, 32, signature);
}
