/* The HTTP servers: the public API on HOST:PORT (OpenAI's), and the local socket that the CLI and
 * the tray use. One implementation with two listeners (libmicrohttpd, its own threads); a handler
 * runs on an HTTP thread, sends a call to the loop (agent/call.h) and suspends its connection until
 * the answer is there. */
#ifndef COVEY_AGENT_HTTP_H
#define COVEY_AGENT_HTTP_H

#include "base/err.h"
#include "base/log.h"

#include <stdint.h>

struct agent;
struct http_server;

struct http_options {
    struct agent
        *agent;       /* agent_post_call, agent_post_dropped and `models` are used, nothing else */
    const char *host; /* of the public API; NULL for the local socket */
    uint16_t port;    /* 0: any free one */
    const char *unix_path; /* of the local socket; NULL for the public API */
    const char *api_key;   /* "" when none; binding beyond loopback without one is refused */
    const struct log *log;
};

enum err http_server_new(const struct http_options *options, struct http_server **ret,
                         struct err_text *text);
uint16_t http_server_port(const struct http_server *s);
/* Ends requests whose clients have gone while they wait; to be called about once a second. */
void http_server_sweep(struct http_server *s);
/* Ends every connection; calls under way are dropped. */
void http_server_free(struct http_server *s);

#endif
