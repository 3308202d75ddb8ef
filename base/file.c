#include "base/file.h"

#include "base/util.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum err file_read(const char *path, struct buf *ret)
{
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return errno == ENOENT ? ERR_NOT_FOUND : ERR_IO;
    for (;;) {
        uint8_t chunk[16384];
        ssize_t n = read(fd, chunk, sizeof chunk);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return ERR_IO;
        if (n == 0)
            return ERR_OK;
        TRY(buf_append(ret, chunk, (size_t)n));
    }
}

enum err file_sync(int fd)
{
#ifdef F_FULLFSYNC
    if (fcntl(fd, F_FULLFSYNC) == 0)
        return ERR_OK;
#endif
    return fsync(fd) == 0 ? ERR_OK : ERR_IO;
}

enum err file_read_at(int fd, uint64_t offset, void *to, size_t n)
{
    uint8_t *p = to;
    while (n > 0) {
        ssize_t k = pread(fd, p, n, (off_t)offset);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return ERR_IO;
        p += k;
        offset += (uint64_t)k;
        n -= (size_t)k;
    }
    return ERR_OK;
}

enum err file_write_at(int fd, uint64_t offset, const void *from, size_t n)
{
    const uint8_t *p = from;
    while (n > 0) {
        ssize_t k = pwrite(fd, p, n, (off_t)offset);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return ERR_IO;
        p += k;
        offset += (uint64_t)k;
        n -= (size_t)k;
    }
    return ERR_OK;
}

/* The folder's entry is synced too, or a crash could bring the old name back. */
static enum err sync_folder_of(const char *path)
{
    char folder[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (!slash)
        (void)snprintf(folder, sizeof folder, ".");
    else
        (void)snprintf(folder, sizeof folder, "%.*s", n ? (int)n : 1, path);
    _cleanup_(closep) int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return ERR_IO;
    /* Some file systems cannot sync a folder (EINVAL): then the rename is all there is. */
    return fsync(fd) == 0 || errno == EINVAL ? ERR_OK : ERR_IO;
}

enum err file_write_atomic(const char *path, const void *bytes, size_t n, unsigned mode)
{
    char beside[PATH_MAX];
    int k = snprintf(beside, sizeof beside, "%s.new", path);
    if (k < 0 || (size_t)k >= sizeof beside)
        return ERR_LIMIT;
    int fd = open(beside, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, (mode_t)mode);
    if (fd < 0)
        return ERR_IO;
    /* What a crash left there may have another mode. */
    enum err e = fchmod(fd, (mode_t)mode) == 0 ? file_write_at(fd, 0, bytes, n) : ERR_IO;
    if (e == ERR_OK)
        e = file_sync(fd);
    if (close(fd) != 0 && e == ERR_OK)
        e = ERR_IO;
    if (e == ERR_OK && rename(beside, path) != 0)
        e = ERR_IO;
    if (e != ERR_OK) {
        int keep = errno;
        (void)unlink(beside);
        errno = keep;
        return e;
    }
    return sync_folder_of(path);
}

enum err file_make_folder(const char *path)
{
    char part[PATH_MAX];
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof part)
        return ERR_LIMIT;
    memcpy(part, path, n + 1);
    for (char *p = part + 1;; p++) {
        if (*p != '/' && *p != 0)
            continue;
        char c = *p;
        *p = 0;
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return ERR_IO;
        *p = c;
        if (c == 0)
            break;
    }
    struct stat st;
    if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
        return ERR_IO;
    return ERR_OK;
}
