#include "proto/identity_file.h"

#include "base/file.h"
#include "base/util.h"
#include "proto/system.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sodium.h>

enum err machine_id_digest(struct hash256 *ret)
{
    static const char label[] = "covey machine";
    uint8_t id[MACHINE_ID_MAX];
    size_t n;
    TRY(system_machine_id(id, &n));
    (void)crypto_generichash(ret->bytes, sizeof ret->bytes, id, n, (const uint8_t *)label,
                             sizeof label - 1);
    return ERR_OK;
}

enum err secret_file_write(const char *path, const uint8_t *bytes, size_t n)
{
    return file_write_atomic(path, bytes, n, 0600);
}

enum err secret_file_read(const char *path, struct buf *ret)
{
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? ERR_NOT_FOUND : ERR_IO;
    struct stat st;
    if (fstat(fd, &st) != 0)
        return ERR_IO;
    if (!S_ISREG(st.st_mode))
        return ERR_INVALID;
    if ((st.st_mode & 077) != 0)
        return ERR_DENIED;
    for (;;) {
        uint8_t chunk[4096];
        ssize_t k = read(fd, chunk, sizeof chunk);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return ERR_IO;
        if (k == 0)
            return ERR_OK;
        enum err e = buf_append(ret, chunk, (size_t)k);
        sodium_memzero(chunk, sizeof chunk);
        TRY(e);
    }
}

static enum err write_identity(const char *path, const struct identity *id, struct err_text *text)
{
    uint8_t bytes[IDENTITY_STORED_BYTES];
    identity_encode(id, bytes);
    enum err e = secret_file_write(path, bytes, sizeof bytes);
    sodium_memzero(bytes, sizeof bytes);
    if (e != ERR_OK)
        return err_set(text, e, "The key file %s cannot be written: %s.", path, strerror(errno));
    return ERR_OK;
}

static enum err read_failure(const char *path, enum err e, struct err_text *text)
{
    if (e == ERR_DENIED)
        return err_set(text, e, "Others may read the key file %s. Run: chmod 600 %s", path, path);
    if (e == ERR_UNSUPPORTED)
        return err_set(text, e, "The key file %s was written by a later version of covey.", path);
    if (e == ERR_IO)
        return err_set(text, e, "The key file %s cannot be read: %s.", path, strerror(errno));
    return err_set(
        text, e, "The key file %s is damaged. Restore it, or move it away to start as a new node.",
        path);
}

static bool is_zero(const struct hash256 *h)
{
    return sodium_is_zero(h->bytes, sizeof h->bytes);
}

enum err identity_file_open(const char *path, const struct hash256 *machine,
                            struct random_source random, struct identity *ret,
                            enum identity_origin *ret_origin, struct err_text *text)
{
    struct buf b = BUF_INIT(4096);
    struct identity id;
    enum err e = secret_file_read(path, &b);
    enum identity_origin origin = e == ERR_NOT_FOUND ? IDENTITY_NEW : IDENTITY_LOADED;
    if (e == ERR_OK)
        e = identity_decode(b.data, b.len, &id);
    if (b.data)
        sodium_memzero(b.data, b.cap);
    buf_deinit(&b);
    if (e != ERR_OK && e != ERR_NOT_FOUND)
        return read_failure(path, e, text);
    /* A machine without an id (all zero) tells nothing either way. */
    if (e == ERR_OK && !hash256_eq(&id.machine, machine) && !is_zero(&id.machine) &&
        !is_zero(machine))
        origin = IDENTITY_CLONED;
    if (origin != IDENTITY_LOADED) {
        identity_make(random, machine, &id);
        TRY(write_identity(path, &id, text));
    }
    *ret = id;
    *ret_origin = origin;
    identity_wipe(&id);
    return ERR_OK;
}
