#include "agent/client.h"

#include "base/buf.h"
#include "base/util.h"

#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

struct transfer {
    struct buf all; /* of a whole reply, or the unfinished line of a stream */
    bool (*on_line)(void *context, json_t *line);
    void *context;
    bool stopped;
    long status;
    CURL *curl;
};

static void take_lines(struct transfer *t)
{
    for (;;) {
        uint8_t *end = t->all.len ? memchr(t->all.data, '\n', t->all.len) : NULL;
        if (!end || t->stopped)
            return;
        size_t n = (size_t)(end - t->all.data);
        json_t *line = json_loadb((char *)t->all.data, n, 0, NULL);
        buf_consume(&t->all, n + 1);
        if (line && !t->on_line(t->context, line))
            t->stopped = true;
        json_decref(line);
    }
}

static size_t on_data(char *bytes, size_t size, size_t n, void *context)
{
    struct transfer *t = context;
    (void)curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &t->status);
    if (buf_append(&t->all, bytes, size * n) != ERR_OK)
        return 0;
    if (t->on_line && t->status == 200)
        take_lines(t);
    return t->stopped ? 0 : size * n;
}

static enum err error_of(const json_t *reply, struct err_text *text)
{
    const json_t *error = json_object_get(reply, "error");
    const char *message = json_string_value(json_object_get(error, "message"));
    const char *code = json_string_value(json_object_get(error, "code"));
    enum err e = ERR_IO;
    for (int i = 1; code && i < ERR_N; i++) {
        if (strcmp(err_name((enum err)i), code) == 0)
            e = (enum err)i;
    }
    return err_set(text, e, "%s",
                   message ? message : "the agent gave an answer that makes no sense");
}

static enum err perform(const char *socket_path, const char *path, const json_t *body,
                        struct transfer *t, bool *ret_no_agent, struct err_text *text)
{
    char url[512];
    if (strlen(socket_path) >= sizeof((struct sockaddr_un *)0)->sun_path) {
        *ret_no_agent = true; /* none can have started there */
        return err_set(text, ERR_LIMIT,
                       "%s: too long for a socket (at most %zu bytes): choose a shorter COVEY_HOME",
                       socket_path, sizeof((struct sockaddr_un *)0)->sun_path - 1);
    }
    CURL *curl = curl_easy_init();
    if (!curl)
        return ERR_NO_MEMORY;
    t->curl = curl;
    (void)snprintf(url, sizeof url, "http://localhost%s", path);
    char *out = body ? json_dumps(body, JSON_COMPACT) : NULL;
    struct curl_slist *headers = curl_slist_append(NULL, "Content-Type: application/json");
    headers = curl_slist_append(headers, "Expect:");
    (void)curl_easy_setopt(curl, CURLOPT_URL, url);
    (void)curl_easy_setopt(curl, CURLOPT_UNIX_SOCKET_PATH, socket_path);
    (void)curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, on_data);
    (void)curl_easy_setopt(curl, CURLOPT_WRITEDATA, t);
    (void)curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
    if (out) {
        (void)curl_easy_setopt(curl, CURLOPT_POSTFIELDS, out);
        (void)curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    }
    CURLcode r = curl_easy_perform(curl);
    (void)curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &t->status);
    *ret_no_agent = r == CURLE_COULDNT_CONNECT;
    curl_slist_free_all(headers);
    curl_easy_cleanup(curl);
    free(out);
    if (t->stopped)
        return ERR_CANCELLED;
    if (*ret_no_agent)
        return err_set(text, ERR_NOT_FOUND,
                       "no agent is running here: start one with `covey serve`");
    if (r != CURLE_OK)
        return err_set(text, ERR_CLOSED, "the connection to the agent broke: %s",
                       curl_easy_strerror(r));
    return ERR_OK;
}

enum err client_call(const char *socket_path, const char *path, const json_t *body, json_t **ret,
                     bool *ret_no_agent, struct err_text *text)
{
    struct transfer t = {.all = BUF_INIT(CLIENT_REPLY_MAX)};
    enum err e = perform(socket_path, path, body, &t, ret_no_agent, text);
    json_t *reply = e == ERR_OK ? json_loadb((char *)t.all.data, t.all.len, 0, NULL) : NULL;
    if (e == ERR_OK && (t.status != 200 || !reply))
        e = error_of(reply, text);
    buf_deinit(&t.all);
    if (e != ERR_OK) {
        json_decref(reply);
        return e;
    }
    *ret = reply;
    return ERR_OK;
}

enum err client_stream(const char *socket_path, const char *path, const json_t *body,
                       bool (*on_line)(void *context, json_t *line), void *context,
                       bool *ret_no_agent, struct err_text *text)
{
    struct transfer t = {.all = BUF_INIT(CLIENT_REPLY_MAX), .on_line = on_line, .context = context};
    enum err e = perform(socket_path, path, body, &t, ret_no_agent, text);
    if (e == ERR_OK && t.status != 200) {
        json_t *reply = json_loadb((char *)t.all.data, t.all.len, 0, NULL);
        e = error_of(reply, text);
        json_decref(reply);
    }
    buf_deinit(&t.all);
    return e;
}
