/* ~/Library, as Apple's File System Programming Guide says. */
#include "agent/config.h"

#include <stdio.h>
#include <stdlib.h>

enum err folders_of_system(struct folders *ret)
{
    const char *home = getenv("HOME");
    if (!home || home[0] != '/')
        return ERR_NOT_FOUND;
    int n =
        snprintf(ret->config, CONFIG_PATH_MAX, "%s/Library/Application Support/covey/config", home);
    (void)snprintf(ret->data, CONFIG_PATH_MAX, "%s/Library/Application Support/covey/data", home);
    (void)snprintf(ret->socket, CONFIG_PATH_MAX, "%s/Library/Caches/covey/agent.sock", home);
    return n > 0 && n < CONFIG_PATH_MAX ? ERR_OK : ERR_NOT_FOUND;
}
