/* The local socket: everything that the CLI and the tray show and do, as JSON over HTTP on a Unix
 * socket. Long jobs and events are streams of JSON lines; the last line of a job is {"result": …}
 * or {"error": …}. */
#include "agent/exchange.h"
#include "base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static enum exchange_next reply_when_done(struct exchange *x)
{
    json_t *body = NULL;
    struct err_text text = {""};
    enum err e = exchange_result(x, &body, &text);
    if (e == ERR_AGAIN)
        return EXCHANGE_WAIT;
    if (e != ERR_OK) {
        json_decref(body);
        return exchange_fail(x, e, NULL, "%s", text.text[0] ? text.text : err_name(e));
    }
    return exchange_reply(x, 200, body ? body : json_object());
}

static void write_line(struct exchange *x, json_t *take)
{
    char *line = take ? json_dumps(take, JSON_COMPACT) : NULL;
    json_decref(take);
    if (line)
        (void)buf_printf(&x->out, "%s\n", line);
    free(line);
}

static bool more_lines(struct exchange *x)
{
    struct call_item item;
    while (x->call && x->out.len < EXCHANGE_OUT_MAX / 2 && call_next(x->call, &item)) {
        if (item.kind == CALL_ITEM_JSON)
            write_line(x, item.json);
    }
    if (!x->call || !call_is_done(x->call) || x->out.len >= EXCHANGE_OUT_MAX / 2)
        return x->call != NULL;
    json_t *body = NULL;
    struct err_text text = {""};
    enum err e = exchange_result(x, &body, &text);
    if (e == ERR_OK && body)
        write_line(x, json_pack("{s:o}", "result", body));
    else if (e != ERR_OK)
        write_line(x, json_pack("{s:{s:s, s:s}}", "error", "message",
                                text.text[0] ? text.text : err_name(e), "code", err_name(e)));
    return false;
}

static enum exchange_next stream_now(struct exchange *x)
{
    x->content_type = "application/x-ndjson";
    x->more = more_lines;
    return EXCHANGE_STREAM;
}

struct route {
    const char *method, *path;
    enum call_kind kind;
    bool stream;
};

static const struct route routes[] = {
    {"GET", "/covey/status", CALL_STATUS, false},  {"GET", "/covey/nodes", CALL_NODES, false},
    {"GET", "/covey/models", CALL_MODELS, false},  {"GET", "/covey/doctor", CALL_DOCTOR, false},
    {"GET", "/covey/events", CALL_EVENTS, true},   {"POST", "/covey/plan", CALL_PLAN, false},
    {"POST", "/covey/invite", CALL_INVITE, false}, {"POST", "/covey/join", CALL_JOIN, false},
    {"POST", "/covey/leave", CALL_LEAVE, false},   {"POST", "/covey/revoke", CALL_REVOKE, false},
    {"POST", "/covey/add", CALL_ADD_FILE, true},   {"POST", "/covey/pull", CALL_PULL, true},
    {"POST", "/covey/remove", CALL_REMOVE, false}, {"POST", "/covey/load", CALL_LOAD, false},
    {"POST", "/covey/unload", CALL_UNLOAD, false}, {"POST", "/covey/ping", CALL_PING, false},
    {"POST", "/covey/stop", CALL_STOP, false},
};

static enum exchange_next begin(struct exchange *x)
{
    struct err_text text = {""};
    json_t *args = NULL;
    for (size_t i = 0; i < ARRAY_LEN(routes); i++) {
        const struct route *r = &routes[i];
        if (strcmp(r->path, x->path) != 0 || strcmp(r->method, x->method) != 0)
            continue;
        if (x->body.len > 0) {
            enum err e = exchange_json(x, &args, &text);
            if (e != ERR_OK)
                return exchange_fail(x, e, NULL, "%s", text.text);
        }
        x->handle = r->stream ? stream_now : reply_when_done;
        enum exchange_next next = exchange_call(x, r->kind, args);
        return next == EXCHANGE_WAIT && r->stream ? stream_now(x) : next;
    }
    return exchange_fail(x, ERR_NOT_FOUND, NULL,
                         "there is nothing at this path, or it wants another HTTP method");
}

bool local_route(struct exchange *x)
{
    if (strncmp(x->path, "/covey/", 7) != 0 || strcmp(x->path, "/covey/generate") == 0)
        return false;
    x->handle = begin;
    return true;
}
