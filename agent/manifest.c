#include "agent/manifest.h"

#include "base/file.h"
#include "base/util.h"
#include "transport/bulk.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const uint8_t magic[4] = {'C', 'V', 'M', 'F'};
enum { VERSION = 1 };

DEFINE_CLEANUP(struct manifest, manifest_free)

void manifest_free(struct manifest *m)
{
    if (!m)
        return;
    for (int i = 0; i < MANIFEST_FILES_MAX; i++)
        free(m->files[i].leaves);
    free(m);
}

struct hash256 manifest_leaf_hash(const void *bytes, size_t n)
{
    return bulk_leaf_hash(bytes, n);
}

static enum err encode_files(const struct manifest *m, struct buf *ret)
{
    uint8_t head[20];
    struct writer w = writer_of(head, sizeof head);
    write_u16(&w, m->n_files);
    TRY(buf_append(ret, head, w.len));
    for (int i = 0; i < m->n_files; i++) {
        const struct manifest_file *f = &m->files[i];
        w = writer_of(head, sizeof head);
        write_u64(&w, f->n_bytes);
        write_u64(&w, f->header_bytes);
        write_u32(&w, f->n_leaves);
        TRY(buf_append(ret, head, w.len));
        TRY(buf_append(ret, f->leaves, (size_t)f->n_leaves * sizeof *f->leaves));
    }
    return ERR_OK;
}

struct hash256 manifest_id(const struct manifest *m)
{
    struct hash256 id = {{0}};
    struct buf b = BUF_INIT(MANIFEST_BYTES_MAX);
    if (encode_files(m, &b) == ERR_OK)
        (void)crypto_generichash(id.bytes, sizeof id.bytes, b.data, b.len,
                                 (const uint8_t *)"covey manifest 1", 16);
    buf_deinit(&b);
    return id;
}

enum err manifest_encode(const struct manifest *m, struct buf *ret)
{
    uint8_t head[10];
    struct writer w = writer_of(head, sizeof head);
    size_t n_name = strlen(m->name);
    write_bytes(&w, magic, sizeof magic);
    write_u32(&w, VERSION);
    write_u16(&w, (uint16_t)n_name);
    TRY(buf_append(ret, head, w.len));
    TRY(buf_append(ret, m->name, n_name));
    return encode_files(m, ret);
}

static enum err decode_file(struct reader *r, struct manifest_file *f)
{
    f->n_bytes = read_u64(r);
    f->header_bytes = read_u64(r);
    f->n_leaves = read_u32(r);
    if (r->bad || f->n_leaves > MANIFEST_LEAVES_MAX || f->header_bytes > f->n_bytes)
        return ERR_CORRUPT;
    uint64_t expected = (f->n_bytes + MANIFEST_LEAF_BYTES - 1) / MANIFEST_LEAF_BYTES;
    if (f->n_bytes == 0 || f->n_bytes > (uint64_t)MANIFEST_LEAVES_MAX * MANIFEST_LEAF_BYTES ||
        f->n_leaves != expected)
        return ERR_CORRUPT;
    size_t n = (size_t)f->n_leaves * sizeof *f->leaves;
    const uint8_t *leaves = read_view(r, n);
    if (!leaves)
        return ERR_CORRUPT;
    f->leaves = malloc(n);
    if (!f->leaves)
        return ERR_NO_MEMORY;
    memcpy(f->leaves, leaves, n);
    return ERR_OK;
}

enum err manifest_decode(const uint8_t *bytes, size_t n, struct manifest **ret)
{
    if (n > MANIFEST_BYTES_MAX)
        return ERR_LIMIT;
    struct reader r = reader_of(bytes, n);
    const uint8_t *found = read_view(&r, sizeof magic);
    if (!found || memcmp(found, magic, sizeof magic) != 0)
        return ERR_CORRUPT;
    if (read_u32(&r) != VERSION)
        return ERR_UNSUPPORTED;
    uint16_t n_name = read_u16(&r);
    if (n_name >= MANIFEST_NAME_MAX)
        return ERR_CORRUPT;
    const uint8_t *name = read_view(&r, n_name);
    if (!name)
        return ERR_CORRUPT;
    for (size_t i = 0; i < n_name; i++) {
        if (name[i] < 0x20 || name[i] == 0x7f)
            return ERR_CORRUPT;
    }
    uint16_t n_files = read_u16(&r);
    if (r.bad || n_files == 0 || n_files > MANIFEST_FILES_MAX)
        return ERR_CORRUPT;
    struct manifest *m = calloc(1, sizeof *m);
    if (!m)
        return ERR_NO_MEMORY;
    memcpy(m->name, name, n_name);
    m->n_files = n_files;
    enum err e = ERR_OK;
    for (int i = 0; i < m->n_files && e == ERR_OK; i++)
        e = decode_file(&r, &m->files[i]);
    if (e == ERR_OK && r.left != 0)
        e = ERR_CORRUPT;
    if (e != ERR_OK) {
        manifest_free(m);
        return e;
    }
    m->id = manifest_id(m);
    *ret = m;
    return ERR_OK;
}

static enum err hash_leaves(int fd, struct manifest_file *f, manifest_progress progress, void *ctx)
{
    _cleanup_(freep) uint8_t *leaf = malloc(MANIFEST_LEAF_BYTES);
    if (!leaf)
        return ERR_NO_MEMORY;
    for (uint32_t i = 0; i < f->n_leaves; i++) {
        uint64_t at = (uint64_t)i * MANIFEST_LEAF_BYTES;
        size_t n = (size_t)MIN_OF((uint64_t)MANIFEST_LEAF_BYTES, f->n_bytes - at);
        TRY(file_read_at(fd, at, leaf, n));
        f->leaves[i] = manifest_leaf_hash(leaf, n);
        if (progress && !progress(ctx, at + n, f->n_bytes))
            return ERR_CANCELLED;
    }
    return ERR_OK;
}

enum err manifest_of_file(const char *path, const char *name, uint64_t header_bytes,
                          manifest_progress progress, void *ctx, struct manifest **ret,
                          struct err_text *text)
{
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0 || st.st_size <= 0)
        return err_set(text, ERR_IO, "%s: cannot be read: %s", path, strerror(errno));
    _cleanup_(manifest_freep) struct manifest *m = calloc(1, sizeof *m);
    if (!m)
        return ERR_NO_MEMORY;
    (void)snprintf(m->name, sizeof m->name, "%s", name);
    m->n_files = 1;
    struct manifest_file *f = &m->files[0];
    f->n_bytes = (uint64_t)st.st_size;
    f->header_bytes = header_bytes;
    uint64_t n_leaves = (f->n_bytes + MANIFEST_LEAF_BYTES - 1) / MANIFEST_LEAF_BYTES;
    if (n_leaves > MANIFEST_LEAVES_MAX / 8)
        return err_set(text, ERR_LIMIT, "%s: larger than 512 GiB, which Covey does not handle yet",
                       path);
    f->n_leaves = (uint32_t)n_leaves;
    f->leaves = calloc(f->n_leaves, sizeof *f->leaves);
    if (!f->leaves)
        return ERR_NO_MEMORY;
    enum err e = hash_leaves(fd, f, progress, ctx);
    if (e != ERR_OK)
        return err_set(text, e, "%s: reading stopped: %s", path, err_name(e));
    m->id = manifest_id(m);
    *ret = TAKE(m);
    return ERR_OK;
}
