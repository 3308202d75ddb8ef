/* The model store of one agent: which models it knows, which of their 1 MiB blocks are here, and
 * where.
 *
 * One folder per model, named by its manifest id:
 *   manifest   the encoded manifest (agent/manifest.h)
 *   data.gguf  the bytes, a sparse file of full size; or
 *   source     "SIZE MTIME_NS PATH" of a file that the owner keeps elsewhere: used in place,
 * complete, never written map        one bit per block of data.gguf; written after the data is
 * synced, so that it never promises too much A block is checked against the manifest's leaf hash
 * before it is written. Names that peers give never become paths. Safe from several threads (one
 * mutex); calls that hash or copy long files hold it only for bookkeeping. */
#ifndef COVEY_AGENT_STORE_H
#define COVEY_AGENT_STORE_H

#include "agent/manifest.h"
#include "agent/spare.h"

#include <stdbool.h>

struct store;

enum { STORE_MODELS_MAX = 256, STORE_PATH_MAX = 4096 };

struct store_entry {
    struct hash256 id;
    char name[MANIFEST_NAME_MAX];
    uint64_t n_bytes, present_bytes;
    uint64_t header_bytes;
    bool complete, header_present, external;
};

/* Opens the folder (made if absent) and reads what is there; damaged entries are left alone and
 * reported in `text`. */
enum err store_open(const char *folder, struct store **ret, struct err_text *text);
void store_close(struct store *s);

/* Adds a complete file that stays where it is. Hashes it. An equal model that is already known is
 * just renamed. */
enum err store_add_file(struct store *s, const char *path, const char *name,
                        manifest_progress progress, void *ctx, struct hash256 *ret,
                        struct err_text *text);
/* Moves a complete file (a finished download in the same file system) into the store. */
enum err store_import_file(struct store *s, const char *path, const char *name,
                           manifest_progress progress, void *ctx, struct hash256 *ret,
                           struct err_text *text);
/* A manifest from a peer: its id must be `expected`. Makes the sparse file. Nothing is done when it
 * is known. */
enum err store_add_manifest(struct store *s, const struct hash256 *expected, const uint8_t *bytes,
                            size_t n, struct err_text *text);
enum err store_remove(struct store *s, const struct hash256 *id, struct err_text *text);

/* Copies at most max entries. */
uint32_t store_list(struct store *s, struct store_entry *ret, uint32_t max);
enum err store_get(struct store *s, const struct hash256 *id, struct store_entry *ret);
/* By full id (64 hex digits), unique id prefix (8 or more digits) or name (case-insensitive). */
enum err store_find(struct store *s, const char *word, struct store_entry *ret);
/* Path of the data for model_open. The file has full size, but absent blocks are holes. */
enum err store_path(struct store *s, const struct hash256 *id, char ret[STORE_PATH_MAX]);
/* ERR_STALE, with a sentence that names the file, when the owner's file is no longer what was
 * hashed. Nothing is read: size and time of change tell. */
enum err store_check_source(struct store *s, const struct hash256 *id, struct err_text *text);
/* The same, but where only the time differs the file is hashed anew: the owner may have put back
 * what was there before. */
enum err store_renew_source(struct store *s, const struct hash256 *id, struct err_text *text);
/* The encoded manifest, to serve to a peer. */
enum err store_manifest_bytes(struct store *s, const struct hash256 *id, struct buf *ret);

/* True when every block that overlaps the range is here. */
bool store_has(struct store *s, const struct hash256 *id, uint64_t offset, uint64_t n);
/* One bit per block, ret_n bytes. ERR_LIMIT over max. */
enum err store_map(struct store *s, const struct hash256 *id, uint8_t *ret, size_t max,
                   size_t *ret_n);
/* Runs of blocks that are here, ascending, at most max; 0 when the model is not known. */
uint32_t store_runs(struct store *s, const struct hash256 *id, struct spare_run *ret, uint32_t max);
/* Disk that is free where the store is; 0 when that cannot be told. */
uint64_t store_free_bytes(const struct store *s, uint64_t *ret_total);
/* Reads present bytes (for a peer). ERR_NOT_FOUND when a block is absent, ERR_INVALID outside the
 * file. */
enum err store_read(struct store *s, const struct hash256 *id, uint64_t offset, void *to, size_t n);
/* Writes block `leaf` after checking its hash. ERR_CORRUPT on a mismatch; on a full disk ERR_IO
 * with a sentence. */
enum err store_write_block(struct store *s, const struct hash256 *id, uint32_t leaf,
                           const void *bytes, size_t n, struct err_text *text);
/* Syncs the data, then writes the map. */
enum err store_sync(struct store *s, const struct hash256 *id, struct err_text *text);

#endif
