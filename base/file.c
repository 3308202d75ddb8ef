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

static enum err write_all(int fd, const void *bytes, size_t n)
{
    const char *p = bytes;
    while (n > 0) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k <= 0)
            return ERR_IO;
        p += k;
        n -= (size_t)k;
    }
    return ERR_OK;
}

static enum err sync_folder_of(const char *path)
{
    char folder[PATH_MAX];
    (void)snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (!slash)
        (void)snprintf(folder, sizeof folder, ".");
    else if (slash != folder)
        *slash = 0;
    _cleanup_(closep) int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return ERR_IO;
    (void)fsync(fd); /* some file systems refuse to sync a folder; the rename stands all the same */
    return ERR_OK;
}

enum err file_write_atomic(const char *path, const void *bytes, size_t n, unsigned mode)
{
    char temporary[PATH_MAX];
    int k = snprintf(temporary, sizeof temporary, "%s.new.%ld", path, (long)getpid());
    if (k < 0 || (size_t)k >= sizeof temporary)
        return ERR_LIMIT;
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, (mode_t)mode);
    if (fd < 0)
        return ERR_IO;
    enum err e = write_all(fd, bytes, n);
    if (e == ERR_OK)
        e = file_sync(fd);
    if (close(fd) != 0 && e == ERR_OK)
        e = ERR_IO;
    if (e == ERR_OK && rename(temporary, path) != 0)
        e = ERR_IO;
    if (e != ERR_OK) {
        (void)unlink(temporary);
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
