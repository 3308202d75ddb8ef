/* The CLI's side of the local socket: one request at a time, JSON in and out (libcurl over a Unix
 * socket). */
#ifndef COVEY_AGENT_CLIENT_H
#define COVEY_AGENT_CLIENT_H

#include "base/err.h"

#include <jansson.h>
#include <stdbool.h>

enum { CLIENT_REPLY_MAX = 64 << 20 };

/* `body` is borrowed, NULL for GET. ERR_NOT_FOUND as err with *ret_no_agent: nobody listens at the
 * socket; else the agent's own error with its sentence in `text`. */
enum err client_call(const char *socket_path, const char *path, const json_t *body, json_t **ret,
                     bool *ret_no_agent, struct err_text *text);

/* A stream of JSON lines; `on_line` gets a borrowed object and returns false to stop
 * (ERR_CANCELLED). */
enum err client_stream(const char *socket_path, const char *path, const json_t *body,
                       bool (*on_line)(void *context, json_t *line), void *context,
                       bool *ret_no_agent, struct err_text *text);

#endif
