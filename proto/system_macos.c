#include "proto/system.h"

#include <string.h>
#include <time.h>
#include <unistd.h>
#include <uuid/uuid.h>

/* gethostuuid(3): the hardware's UUID; ten seconds is more than it ever takes. */
enum err system_machine_id(uint8_t ret[MACHINE_ID_MAX], size_t *ret_n)
{
    uuid_t id;
    struct timespec wait = {.tv_sec = 10};
    if (gethostuuid(id, &wait) != 0)
        return ERR_NOT_FOUND;
    memcpy(ret, id, sizeof id);
    *ret_n = sizeof id;
    return ERR_OK;
}
