/* The shell around proto/identity: the key file, the machine's id, and files that hold secrets. */
#ifndef COVEY_PROTO_IDENTITY_FILE_H
#define COVEY_PROTO_IDENTITY_FILE_H

#include "base/buf.h"
#include "proto/identity.h"

enum identity_origin {
    IDENTITY_LOADED,
    IDENTITY_NEW,    /* there was no file */
    IDENTITY_CLONED, /* the file belongs to another machine: a new key was made */
};

/* Reads the key file, or makes and writes one. A file that is damaged or that others may read is an
 * error, never replaced. `text` gets a sentence on failure. */
enum err identity_file_open(const char *path, const struct hash256 *machine,
                            struct random_source random, struct identity *ret,
                            enum identity_origin *ret_origin, struct err_text *text);

/* A digest of this machine's id (/etc/machine-id; gethostuuid on macOS). The id itself never
 * leaves. ERR_NOT_FOUND where the system has none: the digest of nothing is then the caller's
 * fallback. */
enum err machine_id_digest(struct hash256 *ret);

/* file_write_atomic, mode 0600. */
enum err secret_file_write(const char *path, const uint8_t *bytes, size_t n);
/* Appends the content to `ret` (its maximum bounds it). ERR_NOT_FOUND, ERR_LIMIT, ERR_DENIED when
 * others may read it, ERR_IO. */
enum err secret_file_read(const char *path, struct buf *ret);

#endif
