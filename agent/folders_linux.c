/* XDG base directories (specification 0.8). */
#include "agent/config.h"

#include <stdio.h>
#include <stdlib.h>

static int place(char ret[CONFIG_PATH_MAX], const char *variable, const char *fallback,
                 const char *tail)
{
    const char *value = getenv(variable), *home = getenv("HOME");
    if (value && value[0] == '/')
        return snprintf(ret, CONFIG_PATH_MAX, "%s/%s", value, tail);
    if (!home || home[0] != '/')
        return -1;
    return snprintf(ret, CONFIG_PATH_MAX, "%s/%s/%s", home, fallback, tail);
}

enum err folders_of_system(struct folders *ret)
{
    int a = place(ret->config, "XDG_CONFIG_HOME", ".config", "covey");
    int b = place(ret->data, "XDG_DATA_HOME", ".local/share", "covey");
    int c = place(ret->socket, "XDG_RUNTIME_DIR", ".local/share", "covey/agent.sock");
    return a > 0 && b > 0 && c > 0 && a < CONFIG_PATH_MAX && b < CONFIG_PATH_MAX &&
                   c < CONFIG_PATH_MAX
               ? ERR_OK
               : ERR_NOT_FOUND;
}
