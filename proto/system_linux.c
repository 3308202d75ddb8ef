#include "proto/system.h"

#include "base/util.h"

#include <fcntl.h>
#include <unistd.h>

/* machine-id(5): 32 hex digits, the same until the system is installed anew. D-Bus has the older
 * one. */
enum err system_machine_id(uint8_t ret[MACHINE_ID_MAX], size_t *ret_n)
{
    static const char *const paths[] = {"/etc/machine-id", "/var/lib/dbus/machine-id"};
    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        _cleanup_(closep) int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        ssize_t n = read(fd, ret, MACHINE_ID_MAX);
        if (n >= 32) { /* "uninitialized" during the first boot is shorter */
            *ret_n = 32;
            return ERR_OK;
        }
    }
    return ERR_NOT_FOUND;
}
