#include "agent/store.h"

#include "agent/models.h"
#include "agent/sysinfo.h"
#include "base/file.h"
#include "base/util.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

struct entry {
    struct manifest *manifest;
    uint8_t *map; /* NULL when external: all there */
    size_t map_bytes;
    char *source; /* path of an external file, else NULL */
    int fd;
};

struct store {
    pthread_mutex_t mutex;
    char folder[STORE_PATH_MAX - 128];
    struct entry entries[STORE_MODELS_MAX];
    uint32_t n;
};

DEFINE_CLEANUP(struct manifest, manifest_free)

static void entry_deinit(struct entry *e)
{
    manifest_free(e->manifest);
    free(e->map);
    free(e->source);
    if (e->fd >= 0)
        (void)close(e->fd);
    *e = (struct entry){.fd = -1};
}

static void entry_path(const struct store *s, const struct hash256 *id, const char *file,
                       char ret[STORE_PATH_MAX])
{
    char hex[HEX_ID_MAX];
    hex_of_32(id->bytes, hex);
    (void)snprintf(ret, STORE_PATH_MAX, "%s/%s%s%s", s->folder, hex, *file ? "/" : "", file);
}

static struct entry *find(struct store *s, const struct hash256 *id)
{
    for (uint32_t i = 0; i < s->n; i++) {
        if (hash256_eq(&s->entries[i].manifest->id, id))
            return &s->entries[i];
    }
    return NULL;
}

static bool block_present(const struct entry *e, uint32_t leaf)
{
    return !e->map || (e->map[leaf / 8] >> (leaf % 8) & 1) != 0;
}

static bool range_present(const struct entry *e, uint64_t offset, uint64_t n)
{
    const struct manifest_file *f = &e->manifest->files[0];
    if (offset > f->n_bytes || n > f->n_bytes - offset)
        return false;
    if (n == 0)
        return true;
    uint64_t last = (offset + n - 1) / MANIFEST_LEAF_BYTES;
    for (uint64_t leaf = offset / MANIFEST_LEAF_BYTES; leaf <= last; leaf++) {
        if (!block_present(e, (uint32_t)leaf))
            return false;
    }
    return true;
}

static uint64_t leaf_bytes(const struct manifest_file *f, uint32_t leaf)
{
    uint64_t at = (uint64_t)leaf * MANIFEST_LEAF_BYTES;
    return MIN_OF((uint64_t)MANIFEST_LEAF_BYTES, f->n_bytes - at);
}

static struct store_entry describe(const struct entry *e)
{
    const struct manifest_file *f = &e->manifest->files[0];
    struct store_entry r = {.id = e->manifest->id,
                            .n_bytes = f->n_bytes,
                            .header_bytes = f->header_bytes,
                            .external = e->source != NULL};
    memcpy(r.name, e->manifest->name, sizeof r.name);
    for (uint32_t i = 0; i < f->n_leaves; i++) {
        if (block_present(e, i))
            r.present_bytes += leaf_bytes(f, i);
    }
    r.complete = r.present_bytes == f->n_bytes;
    r.header_present = range_present(e, 0, f->header_bytes);
    return r;
}

/* "SIZE MTIME_NS PATH": valid only while the file is what it was when it was hashed. */
static enum err read_source(const struct store *s, const struct hash256 *id, uint64_t n_bytes,
                            char **ret)
{
    char path[STORE_PATH_MAX];
    entry_path(s, id, "source", path);
    struct buf b = BUF_INIT(STORE_PATH_MAX + 64);
    enum err e = file_read(path, &b);
    char *line = e == ERR_OK ? buf_cstr(&b) : NULL;
    if (!line) {
        buf_deinit(&b);
        return e == ERR_OK ? ERR_NO_MEMORY : e;
    }
    uint64_t size = 0;
    int64_t mtime = 0;
    int at = 0;
    struct stat st;
    e = ERR_CORRUPT;
    if (sscanf(line, "%" SCNu64 " %" SCNd64 " %n", &size, &mtime, &at) == 2 && at > 0 &&
        line[at] == '/') {
        e = ERR_STALE;
        if (stat(line + at, &st) == 0 && (uint64_t)st.st_size == size && size == n_bytes &&
            sysinfo_mtime_ns(&st) == mtime) {
            *ret = strdup(line + at);
            e = *ret ? ERR_OK : ERR_NO_MEMORY;
        }
    }
    buf_deinit(&b);
    return e;
}

static enum err open_data(const struct store *s, struct entry *e)
{
    char path[STORE_PATH_MAX];
    const struct manifest_file *f = &e->manifest->files[0];
    entry_path(s, &e->manifest->id, "data.gguf", path);
    e->map_bytes = (f->n_leaves + 7u) / 8u;
    e->map = calloc(1, e->map_bytes);
    if (!e->map)
        return ERR_NO_MEMORY;
    e->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (e->fd < 0)
        return ERR_IO;
    struct stat st;
    if (fstat(e->fd, &st) != 0)
        return ERR_IO;
    bool whole = (uint64_t)st.st_size == f->n_bytes;
    if (!whole && ftruncate(e->fd, (off_t)f->n_bytes) != 0)
        return ERR_IO;
    entry_path(s, &e->manifest->id, "map", path);
    struct buf b = BUF_INIT(e->map_bytes);
    if (whole && file_read(path, &b) == ERR_OK && b.len == e->map_bytes)
        memcpy(e->map, b.data, b.len);
    buf_deinit(&b);
    return ERR_OK;
}

static enum err load_entry(const struct store *s, const struct hash256 *id, struct entry *ret)
{
    char path[STORE_PATH_MAX];
    entry_path(s, id, "manifest", path);
    struct buf b = BUF_INIT(MANIFEST_BYTES_MAX);
    struct entry e = {.fd = -1};
    enum err r = file_read(path, &b);
    if (r == ERR_OK)
        r = manifest_decode(b.data, b.len, &e.manifest);
    buf_deinit(&b);
    if (r == ERR_OK && !hash256_eq(&e.manifest->id, id))
        r = ERR_CORRUPT;
    if (r == ERR_OK) {
        r = read_source(s, id, e.manifest->files[0].n_bytes, &e.source);
        if (r == ERR_NOT_FOUND)
            r = open_data(s, &e);
    }
    if (r == ERR_OK && e.source) {
        e.fd = open(e.source, O_RDONLY | O_CLOEXEC);
        r = e.fd < 0 ? ERR_IO : ERR_OK;
    }
    if (r != ERR_OK) {
        entry_deinit(&e);
        return r;
    }
    *ret = e;
    return ERR_OK;
}

enum err store_open(const char *folder, struct store **ret, struct err_text *text)
{
    if (strlen(folder) >= sizeof((struct store *)0)->folder)
        return err_set(text, ERR_LIMIT, "%s: the path is too long", folder);
    if (file_make_folder(folder) != ERR_OK)
        return err_set(text, ERR_IO, "%s: the folder cannot be made: %s", folder, strerror(errno));
    struct store *s = calloc(1, sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    (void)snprintf(s->folder, sizeof s->folder, "%s", folder);
    (void)pthread_mutex_init(&s->mutex, NULL);
    DIR *dir = opendir(folder);
    if (!dir) {
        store_close(s);
        return err_set(text, ERR_IO, "%s: cannot be read: %s", folder, strerror(errno));
    }
    for (struct dirent *d; (d = readdir(dir)) != NULL && s->n < STORE_MODELS_MAX;) {
        struct hash256 id;
        if (!hex_decode(d->d_name, id.bytes, sizeof id.bytes))
            continue;
        enum err e = load_entry(s, &id, &s->entries[s->n]);
        if (e == ERR_OK)
            s->n++;
        else
            (void)err_set(text, e,
                          "%s/%s: left alone (%s): its manifest or file is damaged or has changed",
                          folder, d->d_name, err_name(e));
    }
    (void)closedir(dir);
    *ret = s;
    return ERR_OK;
}

void store_close(struct store *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n; i++)
        entry_deinit(&s->entries[i]);
    (void)pthread_mutex_destroy(&s->mutex);
    free(s);
}

static enum err write_manifest(struct store *s, const struct manifest *m)
{
    char path[STORE_PATH_MAX];
    entry_path(s, &m->id, "", path);
    TRY(file_make_folder(path));
    entry_path(s, &m->id, "manifest", path);
    struct buf b = BUF_INIT(MANIFEST_BYTES_MAX);
    enum err e = manifest_encode(m, &b);
    if (e == ERR_OK)
        e = file_write_atomic(path, b.data, b.len, 0600);
    buf_deinit(&b);
    return e;
}

static enum err write_source(struct store *s, const struct hash256 *id, const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return ERR_IO;
    struct buf b = BUF_INIT(STORE_PATH_MAX + 64);
    enum err e = buf_printf(&b, "%" PRIu64 " %" PRId64 " %s", (uint64_t)st.st_size,
                            sysinfo_mtime_ns(&st), path);
    char to[STORE_PATH_MAX];
    entry_path(s, id, "source", to);
    if (e == ERR_OK)
        e = file_write_atomic(to, b.data, b.len, 0600);
    buf_deinit(&b);
    return e;
}

/* With the mutex held: loads what is now on disk in the place of what was known under this id. */
static enum err reload(struct store *s, const struct hash256 *id)
{
    struct entry *known = find(s, id);
    if (!known && s->n == STORE_MODELS_MAX)
        return ERR_LIMIT;
    struct entry fresh;
    TRY(load_entry(s, id, &fresh));
    if (known)
        entry_deinit(known);
    else
        known = &s->entries[s->n++];
    *known = fresh;
    return ERR_OK;
}

static enum err hash_model(const char *path, const char *name, manifest_progress progress,
                           void *ctx, struct manifest **ret, struct err_text *text)
{
    uint64_t header_bytes = 0;
    TRY(models_check_file(path, &header_bytes, text));
    return manifest_of_file(path, name, header_bytes, progress, ctx, ret, text);
}

enum err store_add_file(struct store *s, const char *path, const char *name,
                        manifest_progress progress, void *ctx, struct hash256 *ret,
                        struct err_text *text)
{
    char absolute[STORE_PATH_MAX];
    if (!realpath(path, absolute))
        return err_set(text, ERR_NOT_FOUND, "%s: %s", path, strerror(errno));
    _cleanup_(manifest_freep) struct manifest *m = NULL;
    TRY(hash_model(absolute, name, progress, ctx, &m, text));
    (void)pthread_mutex_lock(&s->mutex);
    enum err e = write_manifest(s, m);
    struct entry *known = find(s, &m->id);
    if (e == ERR_OK && !(known && !known->source && describe(known).complete))
        e = write_source(s, &m->id, absolute);
    if (e == ERR_OK)
        e = reload(s, &m->id);
    (void)pthread_mutex_unlock(&s->mutex);
    if (e != ERR_OK)
        return err_set(text, e, "%s: cannot be added to %s (%s)", path, s->folder, err_name(e));
    *ret = m->id;
    return ERR_OK;
}

/* The map of a file all of whose blocks are here. */
static enum err write_full_map(const char *path, size_t n)
{
    uint8_t *all = malloc(n);
    if (!all)
        return ERR_NO_MEMORY;
    memset(all, 0xff, n);
    enum err e = file_write_atomic(path, all, n, 0600);
    free(all);
    return e;
}

enum err store_import_file(struct store *s, const char *path, const char *name,
                           manifest_progress progress, void *ctx, struct hash256 *ret,
                           struct err_text *text)
{
    _cleanup_(manifest_freep) struct manifest *m = NULL;
    TRY(hash_model(path, name, progress, ctx, &m, text));
    char to[STORE_PATH_MAX], map[STORE_PATH_MAX];
    (void)pthread_mutex_lock(&s->mutex);
    enum err e = write_manifest(s, m);
    entry_path(s, &m->id, "data.gguf", to);
    entry_path(s, &m->id, "map", map);
    if (e == ERR_OK && rename(path, to) != 0)
        e = ERR_IO;
    if (e == ERR_OK)
        e = write_full_map(map, (m->files[0].n_leaves + 7u) / 8u);
    if (e == ERR_OK)
        e = reload(s, &m->id);
    (void)pthread_mutex_unlock(&s->mutex);
    if (e != ERR_OK)
        return err_set(text, e, "%s: cannot be moved into %s: %s", path, s->folder,
                       strerror(errno));
    *ret = m->id;
    return ERR_OK;
}

enum err store_add_manifest(struct store *s, const struct hash256 *expected, const uint8_t *bytes,
                            size_t n, struct err_text *text)
{
    _cleanup_(manifest_freep) struct manifest *m = NULL;
    enum err e = manifest_decode(bytes, n, &m);
    if (e == ERR_OK && !hash256_eq(&m->id, expected))
        e = ERR_CORRUPT;
    if (e != ERR_OK)
        return err_set(text, e, "a peer's model manifest is not what its id says (%s)",
                       err_name(e));
    (void)pthread_mutex_lock(&s->mutex);
    if (!find(s, &m->id)) {
        e = write_manifest(s, m);
        if (e == ERR_OK)
            e = reload(s, &m->id);
    }
    (void)pthread_mutex_unlock(&s->mutex);
    if (e != ERR_OK)
        return err_set(text, e, "%s: no room for model %s: %s", s->folder, m->name,
                       strerror(errno));
    return ERR_OK;
}

enum err store_remove(struct store *s, const struct hash256 *id, struct err_text *text)
{
    static const char *const files[] = {"map", "data.gguf", "source", "manifest", ""};
    (void)pthread_mutex_lock(&s->mutex);
    struct entry *e = find(s, id);
    if (!e) {
        (void)pthread_mutex_unlock(&s->mutex);
        return err_set(text, ERR_NOT_FOUND, "no such model is in the store");
    }
    struct hash256 copy = *id;
    entry_deinit(e);
    *e = s->entries[--s->n];
    for (size_t i = 0; i < ARRAY_LEN(files); i++) {
        char path[STORE_PATH_MAX];
        entry_path(s, &copy, files[i], path);
        (void)remove(path);
    }
    (void)pthread_mutex_unlock(&s->mutex);
    return ERR_OK;
}

uint32_t store_list(struct store *s, struct store_entry *ret, uint32_t max)
{
    (void)pthread_mutex_lock(&s->mutex);
    uint32_t n = MIN_OF(s->n, max);
    for (uint32_t i = 0; i < n; i++)
        ret[i] = describe(&s->entries[i]);
    (void)pthread_mutex_unlock(&s->mutex);
    return n;
}

enum err store_get(struct store *s, const struct hash256 *id, struct store_entry *ret)
{
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    if (e)
        *ret = describe(e);
    (void)pthread_mutex_unlock(&s->mutex);
    return e ? ERR_OK : ERR_NOT_FOUND;
}

enum err store_find(struct store *s, const char *word, struct store_entry *ret)
{
    size_t n_word = strlen(word);
    const struct entry *found = NULL;
    uint32_t n_by_prefix = 0;
    (void)pthread_mutex_lock(&s->mutex);
    for (uint32_t i = 0; i < s->n; i++) {
        const struct entry *e = &s->entries[i];
        char hex[HEX_ID_MAX];
        hex_of_32(e->manifest->id.bytes, hex);
        if (strcasecmp(e->manifest->name, word) == 0) {
            found = e;
            n_by_prefix = 1;
            break;
        }
        if (n_word >= 8 && strncasecmp(hex, word, n_word) == 0) {
            found = e;
            n_by_prefix++;
        }
    }
    enum err e = !found ? ERR_NOT_FOUND : n_by_prefix > 1 ? ERR_INVALID : ERR_OK;
    if (e == ERR_OK)
        *ret = describe(found);
    (void)pthread_mutex_unlock(&s->mutex);
    return e;
}

enum err store_path(struct store *s, const struct hash256 *id, char ret[STORE_PATH_MAX])
{
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    if (e && e->source)
        (void)snprintf(ret, STORE_PATH_MAX, "%s", e->source);
    else if (e)
        entry_path(s, id, "data.gguf", ret);
    (void)pthread_mutex_unlock(&s->mutex);
    return e ? ERR_OK : ERR_NOT_FOUND;
}

enum err store_check_source(struct store *s, const struct hash256 *id, struct err_text *text)
{
    char path[STORE_PATH_MAX] = "";
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    enum err r = ERR_OK;
    if (e && e->source) {
        char *same = NULL;
        (void)snprintf(path, sizeof path, "%s", e->source);
        r = read_source(s, id, e->manifest->files[0].n_bytes, &same);
        free(same);
    }
    (void)pthread_mutex_unlock(&s->mutex);
    if (r == ERR_OK)
        return ERR_OK;
    return err_set(text, r,
                   "%s: the file has changed or gone since `covey pull` read it: pull it again",
                   path);
}

enum err store_renew_source(struct store *s, const struct hash256 *id, struct err_text *text)
{
    char path[STORE_PATH_MAX] = "", name[MANIFEST_NAME_MAX] = "";
    uint64_t n_bytes = 0;
    struct stat st;
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    if (e && e->source) {
        (void)snprintf(path, sizeof path, "%s", e->source);
        (void)snprintf(name, sizeof name, "%s", e->manifest->name);
        n_bytes = e->manifest->files[0].n_bytes;
    }
    (void)pthread_mutex_unlock(&s->mutex);
    if (!path[0] || store_check_source(s, id, text) == ERR_OK)
        return ERR_OK;
    _cleanup_(manifest_freep) struct manifest *m = NULL;
    struct err_text unread = {""};
    if (stat(path, &st) != 0 || (uint64_t)st.st_size != n_bytes ||
        hash_model(path, name, NULL, NULL, &m, &unread) != ERR_OK || !hash256_eq(&m->id, id))
        return ERR_STALE; /* the sentence is there */
    (void)pthread_mutex_lock(&s->mutex);
    enum err r = write_source(s, id, path);
    if (r == ERR_OK)
        r = reload(s, id);
    (void)pthread_mutex_unlock(&s->mutex);
    return r == ERR_OK ? r : err_set(text, r, "%s: cannot be added again", path);
}

enum err store_manifest_bytes(struct store *s, const struct hash256 *id, struct buf *ret)
{
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    enum err r = e ? manifest_encode(e->manifest, ret) : ERR_NOT_FOUND;
    (void)pthread_mutex_unlock(&s->mutex);
    return r;
}

bool store_has(struct store *s, const struct hash256 *id, uint64_t offset, uint64_t n)
{
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    bool has = e && range_present(e, offset, n);
    (void)pthread_mutex_unlock(&s->mutex);
    return has;
}

enum err store_map(struct store *s, const struct hash256 *id, uint8_t *ret, size_t max,
                   size_t *ret_n)
{
    enum err r = ERR_NOT_FOUND;
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    if (e) {
        uint32_t n_leaves = e->manifest->files[0].n_leaves;
        size_t n = (n_leaves + 7u) / 8u;
        r = n > max ? ERR_LIMIT : ERR_OK;
        if (r == ERR_OK) {
            memset(ret, 0, n);
            for (uint32_t i = 0; i < n_leaves; i++) {
                if (block_present(e, i))
                    ret[i / 8] = (uint8_t)(ret[i / 8] | 1u << (i % 8));
            }
            *ret_n = n;
        }
    }
    (void)pthread_mutex_unlock(&s->mutex);
    return r;
}

uint32_t store_runs(struct store *s, const struct hash256 *id, struct spare_run *ret, uint32_t max)
{
    uint32_t n = 0;
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    for (uint32_t i = 0; e && i < e->manifest->files[0].n_leaves; i++) {
        if (!block_present(e, i))
            continue;
        if (n > 0 && ret[n - 1].first + ret[n - 1].n == i)
            ret[n - 1].n++;
        else if (n < max)
            ret[n++] = (struct spare_run){i, 1};
        else
            break;
    }
    (void)pthread_mutex_unlock(&s->mutex);
    return n;
}

uint64_t store_free_bytes(const struct store *s, uint64_t *ret_total)
{
    struct statvfs v;
    *ret_total = 0;
    if (statvfs(s->folder, &v) != 0)
        return 0;
    *ret_total = (uint64_t)v.f_blocks * v.f_frsize;
    return (uint64_t)v.f_bavail * v.f_frsize;
}

enum err store_read(struct store *s, const struct hash256 *id, uint64_t offset, void *to, size_t n)
{
    (void)pthread_mutex_lock(&s->mutex);
    const struct entry *e = find(s, id);
    enum err r = ERR_NOT_FOUND;
    int fd = -1;
    if (e &&
        (offset > e->manifest->files[0].n_bytes || n > e->manifest->files[0].n_bytes - offset)) {
        r = ERR_INVALID;
    } else if (e && range_present(e, offset, n)) {
        fd = fcntl(e->fd, F_DUPFD_CLOEXEC, 0); /* the entry may go while we read */
        r = fd < 0 ? ERR_IO : ERR_OK;
    }
    (void)pthread_mutex_unlock(&s->mutex);
    if (r == ERR_OK)
        r = file_read_at(fd, offset, to, n);
    if (fd >= 0)
        (void)close(fd);
    return r;
}

/* With the mutex held, into an entry with a map. */
static enum err write_block(const struct store *s, struct entry *e, uint32_t leaf,
                            const void *bytes, size_t n, struct err_text *text)
{
    const struct manifest_file *file = &e->manifest->files[0];
    if (leaf >= file->n_leaves || n != leaf_bytes(file, leaf))
        return err_set(text, ERR_INVALID, "block %u of %s has a wrong size", leaf,
                       e->manifest->name);
    struct hash256 h = manifest_leaf_hash(bytes, n);
    if (!hash256_eq(&h, &file->leaves[leaf]))
        return err_set(text, ERR_CORRUPT, "block %u of %s arrived damaged", leaf,
                       e->manifest->name);
    enum err r = file_write_at(e->fd, (uint64_t)leaf * MANIFEST_LEAF_BYTES, bytes, n);
    if (r != ERR_OK)
        return err_set(text, r, "%s: writing %s failed: %s", s->folder, e->manifest->name,
                       strerror(errno));
    e->map[leaf / 8] = (uint8_t)(e->map[leaf / 8] | 1u << (leaf % 8));
    return ERR_OK;
}

enum err store_write_block(struct store *s, const struct hash256 *id, uint32_t leaf,
                           const void *bytes, size_t n, struct err_text *text)
{
    (void)pthread_mutex_lock(&s->mutex);
    struct entry *e = find(s, id);
    enum err r = e && e->map
                     ? write_block(s, e, leaf, bytes, n, text)
                     : err_set(text, ERR_NOT_FOUND, "no model that lacks blocks has this id");
    (void)pthread_mutex_unlock(&s->mutex);
    return r;
}

enum err store_sync(struct store *s, const struct hash256 *id, struct err_text *text)
{
    char path[STORE_PATH_MAX];
    enum err r = ERR_OK;
    (void)pthread_mutex_lock(&s->mutex);
    struct entry *e = find(s, id);
    if (e && e->map) {
        entry_path(s, id, "map", path);
        r = file_sync(e->fd);
        if (r == ERR_OK)
            r = file_write_atomic(path, e->map, e->map_bytes, 0600);
        if (r != ERR_OK)
            r = err_set(text, r, "%s: cannot be synced: %s", path, strerror(errno));
    }
    (void)pthread_mutex_unlock(&s->mutex);
    return r;
}
