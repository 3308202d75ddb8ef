/* A model's manifest: its files, their sizes and the BLAKE2b-256 of every 1 MiB leaf. Its hash is
 * the model's identity.
 *
 * PROTOCOL 5.1 names a model by a hash over size, header hash and tree roots "as far as known".
 * Here the first holder hashes every leaf once, so that the id is stable, two fine-tunes with equal
 * headers differ, and each block that arrives from a peer is checked against the id itself. A
 * manifest of a 40 GB file is 1.3 MB.
 *
 * Canonical encoding (little-endian): magic "CVMF", version u32 = 1, name length u16 and bytes,
 * file count u16, then per file: size u64, header bytes u64, leaf count u32, leaves [count][32].
 * The name is a hint and not part of the id. */
#ifndef COVEY_AGENT_MANIFEST_H
#define COVEY_AGENT_MANIFEST_H

#include "base/buf.h"
#include "base/err.h"
#include "base/id.h"

#include <stdint.h>

enum {
    MANIFEST_NAME_MAX = 96,
    MANIFEST_FILES_MAX = 1, /* GGUF in one piece; split files come later */
    MANIFEST_LEAF_BYTES = 1 << 20,
    MANIFEST_LEAVES_MAX = 1 << 22,                          /* 4 TiB */
    MANIFEST_BYTES_MAX = 64 + MANIFEST_LEAVES_MAX / 8 * 32, /* what we accept: 512 GiB of model */
};

struct manifest_file {
    uint64_t n_bytes;
    uint64_t header_bytes; /* enough to open the model without weights */
    uint32_t n_leaves;
    struct hash256 *leaves;
};

struct manifest {
    struct hash256 id;
    char name[MANIFEST_NAME_MAX];
    uint16_t n_files;
    struct manifest_file files[MANIFEST_FILES_MAX];
};

void manifest_free(struct manifest *m);
enum err manifest_encode(const struct manifest *m, struct buf *ret);
/* Checks every number; computes the id. ERR_CORRUPT, ERR_LIMIT, ERR_NO_MEMORY. */
enum err manifest_decode(const uint8_t *bytes, size_t n, struct manifest **ret);
/* The id from the content (everything but the name). */
struct hash256 manifest_id(const struct manifest *m);

/* Told how far a long hash is; return false to stop (ERR_CANCELLED). */
typedef bool (*manifest_progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
/* Hashes a whole file. `header_bytes` comes from model_open. */
enum err manifest_of_file(const char *path, const char *name, uint64_t header_bytes,
                          manifest_progress progress, void *ctx, struct manifest **ret,
                          struct err_text *text);
struct hash256 manifest_leaf_hash(const void *bytes, size_t n);

#endif
