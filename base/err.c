#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>

const char *err_name(enum err e)
{
    static const char *const names[ERR_N] = {
        [ERR_OK] = "ok",
        [ERR_NO_MEMORY] = "no_memory",
        [ERR_INVALID] = "invalid",
        [ERR_LIMIT] = "limit",
        [ERR_CORRUPT] = "corrupt",
        [ERR_UNSUPPORTED] = "unsupported",
        [ERR_NOT_FOUND] = "not_found",
        [ERR_EXISTS] = "exists",
        [ERR_IO] = "io",
        [ERR_AGAIN] = "again",
        [ERR_CLOSED] = "closed",
        [ERR_DENIED] = "denied",
        [ERR_TIMEOUT] = "timeout",
        [ERR_BUSY] = "busy",
        [ERR_NO_FIT] = "no_fit",
        [ERR_STALE] = "stale",
        [ERR_CANCELLED] = "cancelled",
    };
    if ((unsigned)e >= ERR_N)
        return "unknown";
    return names[e];
}

enum err err_set(struct err_text *t, enum err e, const char *format, ...)
{
    if (t) {
        va_list args;
        va_start(args, format);
        (void)vsnprintf(t->text, sizeof t->text, format, args);
        va_end(args);
    }
    return e;
}
