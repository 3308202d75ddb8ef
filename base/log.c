#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LINE_MAX_BYTES = 1024 };

static const char *const level_names[] = {"error", "warning", "info", "debug"};

bool log_level_parse(const char *word, enum log_level *ret)
{
    for (int i = 0; i < 4; i++) {
        if (strcmp(word, level_names[i]) == 0) {
            *ret = (enum log_level)i;
            return true;
        }
    }
    return false;
}

void log_line(const struct log *log, enum log_level level, const char *format, ...)
{
    if (!log || level > log->level)
        return;
    char line[LINE_MAX_BYTES];
    struct timespec now = {0};
    (void)clock_gettime(CLOCK_REALTIME, &now);
    struct tm tm = {0};
    (void)localtime_r(&now.tv_sec, &tm);
    size_t n = strftime(line, sizeof line, "%H:%M:%S", &tm);
    int m = snprintf(line + n, sizeof line - n, ".%03ld %-7s ", now.tv_nsec / 1000000,
                     level_names[level]);
    if (m > 0)
        n += (size_t)m;
    if (log->room) {
        m = snprintf(line + n, sizeof line - n, "[%s] ", log->room);
        if (m > 0)
            n += (size_t)m;
    }
    va_list args;
    va_start(args, format);
    m = vsnprintf(line + n, sizeof line - n - 1, format, args);
    va_end(args);
    if (m > 0)
        n += (size_t)m;
    if (n > sizeof line - 2)
        n = sizeof line - 2;
    line[n++] = '\n';
    ssize_t written = write(log->fd, line, n);
    (void)written; /* a log that cannot be written has nowhere to complain */
}
