/* Logging for shells: levels, one line each, to a descriptor. Prompts, answers and keys are never
 * passed to it. Travels in a context, there is no global. Safe to call from several threads (one
 * write per line). */
#ifndef COVEY_BASE_LOG_H
#define COVEY_BASE_LOG_H

#include <stdbool.h>

enum log_level { LOG_ERROR, LOG_WARNING, LOG_INFO, LOG_DEBUG };

struct log {
    int fd;
    enum log_level level;
    const char *room; /* shown in brackets; may be NULL */
};

/* "error", "warning", "info", "debug"; false when it is none of these. */
bool log_level_parse(const char *word, enum log_level *ret);
void log_line(const struct log *log, enum log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#define log_error(log, ...) log_line((log), LOG_ERROR, __VA_ARGS__)
#define log_warning(log, ...) log_line((log), LOG_WARNING, __VA_ARGS__)
#define log_info(log, ...) log_line((log), LOG_INFO, __VA_ARGS__)
#define log_debug(log, ...) log_line((log), LOG_DEBUG, __VA_ARGS__)

#endif
