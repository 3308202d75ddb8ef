/* Small files: read whole with a limit, write atomically (temporary file, sync, rename, sync of the
 * folder). Parts of large ones. */
#ifndef COVEY_BASE_FILE_H
#define COVEY_BASE_FILE_H

#include "base/buf.h"
#include "base/err.h"

#include <stdint.h>

/* Appends the content of the file. ERR_NOT_FOUND, ERR_LIMIT (larger than ret->max), ERR_IO. */
enum err file_read(const char *path, struct buf *ret);
/* Replaces the file so that after a crash either the old or the new content is there, on disk. Mode
 * e.g. 0600. Not for two writers of one path at once. ERR_LIMIT: the path is too long. ERR_IO
 * (errno says more). */
enum err file_write_atomic(const char *path, const void *bytes, size_t n, unsigned mode);
/* Makes the folder and its parents, mode 0700 for what it makes. */
enum err file_make_folder(const char *path);
/* fsync, on macOS F_FULLFSYNC where the file system knows it. */
enum err file_sync(int fd);
/* All n bytes at that place of an open file. ERR_IO: also when the file ends before. */
enum err file_read_at(int fd, uint64_t offset, void *to, size_t n);
enum err file_write_at(int fd, uint64_t offset, const void *from, size_t n);

#endif
