/* One HTTP request and its answer, between libmicrohttpd (agent/http.c) and the handlers
 * (http_openai.c, http_local.c).
 *
 * A handler is called once when the whole body is there, and again each time the loop has something
 * for it. It answers with exchange_reply, or begins a stream, or says that it waits. All calls come
 * from one HTTP thread at a time. */
#ifndef COVEY_AGENT_EXCHANGE_H
#define COVEY_AGENT_EXCHANGE_H

#include "agent/agent.h"
#include "agent/call.h"
#include "base/buf.h"

#include <jansson.h>
#include <stdatomic.h>

struct MHD_Connection;
struct exchange;

enum {
    EXCHANGE_BODY_MAX = 16 << 20,
    EXCHANGE_OUT_MAX = 1 << 20, /* bytes of a stream that wait for the client */
    JSON_DEPTH_MAX = 64,
    JSON_VALUES_MAX = 1 << 17,
};

enum exchange_next {
    EXCHANGE_WAIT,   /* call again when the call has news */
    EXCHANGE_ANSWER, /* exchange_reply was called */
    EXCHANGE_STREAM, /* `more` fills the stream from now on */
};

struct exchange {
    struct agent *agent;
    struct http_server *server;
    struct MHD_Connection *connection;
    char method[8];
    char path[256];
    struct buf body;
    bool local; /* came in by the local socket */
    bool too_large;
    struct call *call; /* the one that is waited for; dropped when the client goes */

    enum exchange_next (*handle)(struct exchange *x);
    /* Streams: appends to `out` what there is; false when that was all. */
    bool (*more)(struct exchange *x);
    void *state;
    void (*free_state)(void *state);
    struct buf out;
    const char *content_type; /* of a stream */

    unsigned status; /* of the answer; 0: none yet */
    char *answer;
    /* wake-ups (see http.c) */
    pthread_mutex_t mutex;
    bool suspended, pending, ended;
    int fd;
    atomic_bool gone; /* the client went away while it waited */
};

/* JSON with a status; the body is taken. NULL counts as out of memory. */
enum exchange_next exchange_reply(struct exchange *x, unsigned status, json_t *take_body);
/* {"error": {"message", "type", "code"}} in OpenAI's shape, with the status that fits the error. */
enum exchange_next exchange_fail(struct exchange *x, enum err e, const char *param,
                                 const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Posts a call to the loop and remembers it; x->handle is called again on news. */
enum exchange_next exchange_call(struct exchange *x, enum call_kind kind, json_t *args);
/* The same for a call that was made (with exchange_wake) and filled by the caller. */
enum exchange_next exchange_post(struct exchange *x, struct call *take_call);
void exchange_wake(void *exchange);
/* Gives the finished call's result and forgets the call. ERR_AGAIN when it is not done. */
enum err exchange_result(struct exchange *x, json_t **ret_body, struct err_text *text);
/* The body as a JSON object, or an error in *text: not JSON, too deep, not an object. */
enum err exchange_json(struct exchange *x, json_t **ret, struct err_text *text);

/* Chooses the handler; false: no such path. */
bool openai_route(struct exchange *x);
bool local_route(struct exchange *x);
/* Reads x->body as a request of /v1/chat/completions or, with `generate`, of /covey/generate, and
 * forgets it: for tests of what is refused. The error that a client would get, with its sentence.
 */
enum err openai_check(struct exchange *x, bool generate, struct err_text *text);

#endif
