#include "agent/http.h"

#include "agent/exchange.h"
#include "agent/peer_credentials.h"
#include "agent/sysinfo.h"
#include "base/file.h"
#include "base/util.h"
#include "transport/net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <microhttpd.h>
#include <netdb.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

enum {
    CONNECTIONS_MAX = 4096,
    IDLE_TIMEOUT_S = 120, /* of a connection that sends nothing; suspended ones do not count */
    MEMORY_PER_CONNECTION = 32 << 10,
    HTTP_THREADS = 2,
    BACKLOG = 512,
    CROWD_MIN = 256, /* connections: when most of so many have gone, so does their memory */
    LARGE_BODY_BYTES = 1 << 20, /* of a request: what its parts took is given back to the system */
};

struct http_server {
    struct http_options options;
    char host[CONFIG_WORD_MAX], unix_path[CONFIG_PATH_MAX], api_key[CONFIG_WORD_MAX];
    struct MHD_Daemon *daemon;
    uint16_t port;
    bool loopback;
    struct log log;
    pthread_mutex_t mutex;
    struct exchange *open[CONNECTIONS_MAX]; /* so that a stop can wake those that wait */
    uint32_t n_connections, peak;
};

/* ---- wake-ups ----
 * The loop says that a call has news while holding the call's mutex; the exchange's mutex is taken
 * inside it, never the other way round. `pending` remembers news that came while the connection was
 * not suspended. */

void exchange_wake(void *context)
{
    struct exchange *x = context;
    (void)pthread_mutex_lock(&x->mutex);
    x->pending = true;
    if (x->suspended) {
        x->suspended = false;
        MHD_resume_connection(x->connection);
    }
    (void)pthread_mutex_unlock(&x->mutex);
}

/* True when the connection sleeps now; false when there is news already. */
static bool sleep_until_news(struct exchange *x)
{
    (void)pthread_mutex_lock(&x->mutex);
    bool sleeps = !x->pending && !x->ended;
    x->pending = false;
    if (sleeps) {
        x->suspended = true;
        MHD_suspend_connection(x->connection);
    }
    (void)pthread_mutex_unlock(&x->mutex);
    return sleeps;
}

/* ---- answers ---- */

static unsigned status_of(enum err e)
{
    switch (e) {
    case ERR_INVALID:
    case ERR_CORRUPT:
    case ERR_UNSUPPORTED:
    case ERR_LIMIT:
        return 400;
    case ERR_DENIED:
        return 403;
    case ERR_NOT_FOUND:
        return 404;
    case ERR_EXISTS:
        return 409;
    case ERR_BUSY:
        return 429;
    case ERR_NO_FIT:
    case ERR_CLOSED:
    case ERR_AGAIN:
    case ERR_STALE:
        return 503;
    case ERR_TIMEOUT:
        return 504;
    default:
        return 500;
    }
}

static const char *type_of(unsigned status)
{
    return status == 401 || status == 403 ? "permission_error"
           : status == 404                ? "not_found_error"
           : status == 429                ? "rate_limit_error"
           : status < 500                 ? "invalid_request_error"
                                          : "server_error";
}

enum exchange_next exchange_reply(struct exchange *x, unsigned status, json_t *take_body)
{
    free(x->answer);
    x->answer = take_body ? json_dumps(take_body, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    json_decref(take_body);
    x->status = x->answer ? status : 500;
    return EXCHANGE_ANSWER;
}

enum exchange_next exchange_fail(struct exchange *x, enum err e, const char *param,
                                 const char *format, ...)
{
    char message[ERR_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    unsigned status = status_of(e);
    json_t *text = json_string(message); /* NULL when something in it is not UTF-8 */
    return exchange_reply(x, status,
                          json_pack("{s:{s:o, s:s, s:o, s:s}}", "error", "message",
                                    text ? text : json_string("the request is not valid UTF-8"),
                                    "type", type_of(status), "param",
                                    param ? json_string(param) : json_null(), "code", err_name(e)));
}

/* An Origin that came this far is one of ours: its pages may read the answer. */
static void allow_origin(struct MHD_Connection *c, struct MHD_Response *r)
{
    const char *origin = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Origin");
    if (!origin)
        return;
    (void)MHD_add_response_header(r, "Access-Control-Allow-Origin", origin);
    (void)MHD_add_response_header(r, "Vary", "Origin");
}

/* The question of a browser before a request that a plain form could not make. It carries no key.
 */
static enum MHD_Result send_preflight(struct MHD_Connection *c)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (!r)
        return MHD_NO;
    allow_origin(c, r);
    (void)MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    (void)MHD_add_response_header(r, "Access-Control-Allow-Headers", "Authorization, Content-Type");
    (void)MHD_add_response_header(r, "Access-Control-Max-Age", "600");
    enum MHD_Result ok = MHD_queue_response(c, MHD_HTTP_NO_CONTENT, r);
    MHD_destroy_response(r);
    return ok;
}

/* An answer to a page that may not ask tells it nothing. */
static bool is_for_all(unsigned status)
{
    return status != 403;
}

static enum MHD_Result send_text(struct MHD_Connection *c, unsigned status, const char *text)
{
    struct MHD_Response *r =
        MHD_create_response_from_buffer(strlen(text), (void *)text, MHD_RESPMEM_MUST_COPY);
    if (!r)
        return MHD_NO;
    (void)MHD_add_response_header(r, "Content-Type", "application/json");
    if (is_for_all(status))
        allow_origin(c, r);
    if (status == 401)
        (void)MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    enum MHD_Result ok = MHD_queue_response(c, status, r);
    MHD_destroy_response(r);
    return ok;
}

static ssize_t read_stream(void *context, uint64_t at, char *to, size_t max)
{
    struct exchange *x = context;
    (void)at;
    while (x->out.len == 0) {
        if (x->gone)
            return MHD_CONTENT_READER_END_WITH_ERROR;
        /* Also when this node stops: what came before, and the error that ends it, still goes out.
         */
        bool more = x->more(x);
        if (x->out.len == 0 && (!more || x->ended))
            return MHD_CONTENT_READER_END_OF_STREAM;
        if (x->out.len == 0 && sleep_until_news(x))
            return 0;
    }
    size_t n = MIN_OF(max, x->out.len);
    memcpy(to, x->out.data, n);
    buf_consume(&x->out, n);
    return (ssize_t)n;
}

static enum MHD_Result start_stream(struct exchange *x)
{
    struct MHD_Response *r =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 4096, read_stream, x, NULL);
    if (!r)
        return MHD_NO;
    (void)MHD_add_response_header(r, "Content-Type", x->content_type);
    (void)MHD_add_response_header(r, "Cache-Control", "no-cache");
    allow_origin(x->connection, r);
    enum MHD_Result ok = MHD_queue_response(x->connection, 200, r);
    MHD_destroy_response(r);
    return ok;
}

/* ---- calls ---- */

enum exchange_next exchange_post(struct exchange *x, struct call *take_call)
{
    x->call = call_ref(take_call);
    agent_post_call(x->agent, take_call);
    return EXCHANGE_WAIT;
}

enum exchange_next exchange_call(struct exchange *x, enum call_kind kind, json_t *args)
{
    struct call *c = call_new(kind, args, exchange_wake, x);
    if (!c)
        return exchange_fail(x, ERR_NO_MEMORY, NULL, "out of memory");
    return exchange_post(x, c);
}

enum err exchange_result(struct exchange *x, json_t **ret_body, struct err_text *text)
{
    *ret_body = NULL;
    if (!x->call)
        return ERR_INVALID;
    if (!call_is_done(x->call))
        return ERR_AGAIN;
    enum err e = call_result(x->call, ret_body, text);
    call_drop(x->call);
    call_unref(x->call);
    x->call = NULL;
    return e == ERR_AGAIN ? ERR_BUSY : e; /* "again" means here that the call is not done */
}

enum err exchange_json(struct exchange *x, json_t **ret, struct err_text *text)
{
    json_error_t error;
    size_t depth = 0, deepest = 0, n_values = 1;
    bool in_string = false;
    /* jansson recurses, and spends a hundred bytes on a value of two: depth and number are bounded
     * before it sees the text. */
    for (size_t i = 0; i < x->body.len; i++) {
        uint8_t c = x->body.data[i];
        if (in_string) {
            if (c == '\\')
                i++;
            else if (c == '"')
                in_string = false;
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            depth++;
            n_values++;
            deepest = MAX_OF(deepest, depth);
        } else if (c == ',') {
            n_values++;
        } else if ((c == ']' || c == '}') && depth > 0) {
            depth--;
        }
    }
    if (deepest > JSON_DEPTH_MAX)
        return err_set(text, ERR_LIMIT, "the JSON is nested more than %d deep", JSON_DEPTH_MAX);
    if (n_values > JSON_VALUES_MAX)
        return err_set(text, ERR_LIMIT, "the JSON has more than %d values", JSON_VALUES_MAX);
    if (x->body.len == 0)
        return err_set(text, ERR_INVALID, "the body is empty: a JSON object is needed");
    json_t *j = json_loadb((const char *)x->body.data, x->body.len, JSON_REJECT_DUPLICATES, &error);
    if (!j)
        return err_set(text, ERR_INVALID, "the body is not JSON: %.120s (line %d)", error.text,
                       error.line);
    if (!json_is_object(j)) {
        json_decref(j);
        return err_set(text, ERR_INVALID, "the body is not a JSON object");
    }
    *ret = j;
    return ERR_OK;
}

/* ---- who may ask ---- */

/* "host[:port]" without the port, without brackets. */
static void host_part(const char *value, char ret[CONFIG_WORD_MAX])
{
    uint16_t port = 0;
    if (config_parse_host_port(value, ret, &port) != ERR_OK)
        ret[0] = 0;
}

static bool is_ip(const char *host)
{
    unsigned char ip[16];
    return inet_pton(AF_INET, host, ip) == 1 || inet_pton(AF_INET6, host, ip) == 1;
}

static bool is_loopback_name(const char *host)
{
    /* "127.example.org" begins like one, but its owner says where it leads. */
    return strcasecmp(host, "localhost") == 0 || (strncmp(host, "127.", 4) == 0 && is_ip(host)) ||
           strcmp(host, "::1") == 0;
}

/* A page in a browser must not reach us by a name that its owner points here (DNS rebinding). */
static bool host_is_ours(const struct http_server *s, const char *value)
{
    char host[CONFIG_WORD_MAX];
    if (!value)
        return true; /* HTTP/1.0: no browser */
    host_part(value, host);
    if (is_loopback_name(host) || strcasecmp(host, s->host) == 0)
        return true;
    if (s->loopback)
        return false;
    size_t n = strlen(host);
    return is_ip(host) || strcasecmp(host, s->options.agent->config.name) == 0 ||
           (n > 6 && strcasecmp(host + n - 6, ".local") == 0);
}

static bool origin_is_ours(const struct http_server *s, const char *origin)
{
    if (!origin)
        return true;
    const char *host = strstr(origin, "://");
    return host && host_is_ours(s, host + 3);
}

static bool key_is_right(const struct http_server *s, const char *header)
{
    if (!s->api_key[0])
        return true;
    if (!header || strncasecmp(header, "Bearer ", 7) != 0)
        return false;
    uint8_t a[32], b[32]; /* compared by hash: lengths say nothing */
    (void)crypto_generichash(a, sizeof a, (const uint8_t *)header + 7, strlen(header + 7), NULL, 0);
    (void)crypto_generichash(b, sizeof b, (const uint8_t *)s->api_key, strlen(s->api_key), NULL, 0);
    return sodium_memcmp(a, b, sizeof a) == 0;
}

#define ERROR_JSON(message, type)                                                                  \
    "{\"error\":{\"message\":\"" message "\",\"type\":\"" type "\",\"param\":null,\"code\":null}}"

static bool is_preflight(const struct exchange *x)
{
    return strcmp(x->method, "OPTIONS") == 0 &&
           MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND, "Origin") &&
           MHD_lookup_connection_value(x->connection, MHD_HEADER_KIND,
                                       "Access-Control-Request-Method");
}

static bool is_encoded(struct MHD_Connection *c)
{
    const char *encoding = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Encoding");
    return encoding && encoding[0] && strcasecmp(encoding, "identity") != 0;
}

static enum MHD_Result refuse_stranger(struct exchange *x, bool *ret_refused)
{
    struct http_server *s = x->server;
    struct MHD_Connection *c = x->connection;
    *ret_refused = true;
    if (x->local) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
        if (!info || !peer_is_our_user(info->connect_fd))
            return send_text(c, 403,
                             ERROR_JSON("this socket is for its owner only", "permission_error"));
    } else {
        if (!host_is_ours(s, MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Host")))
            return send_text(c, 403,
                             ERROR_JSON("this Host is not served here", "permission_error"));
        if (!origin_is_ours(s, MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Origin")))
            return send_text(
                c, 403, ERROR_JSON("pages of other sites may not ask here", "permission_error"));
        if (is_preflight(x))
            return send_preflight(c);
        if (!key_is_right(s, MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Authorization")))
            return send_text(c, 401,
                             ERROR_JSON("the API key is missing or wrong", "permission_error"));
    }
    *ret_refused = false;
    return MHD_YES;
}

/* ---- libmicrohttpd ---- */

static void remember(struct http_server *s, struct exchange *x, bool is_open)
{
    (void)pthread_mutex_lock(&s->mutex);
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        if (s->open[i] == (is_open ? NULL : x)) {
            s->open[i] = is_open ? x : NULL;
            break;
        }
    }
    (void)pthread_mutex_unlock(&s->mutex);
}

static struct exchange *exchange_new(struct http_server *s, struct MHD_Connection *c,
                                     const char *url, const char *method)
{
    struct exchange *x = calloc(1, sizeof *x);
    if (!x)
        return NULL;
    x->agent = s->options.agent;
    x->server = s;
    x->connection = c;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
    x->fd = info ? info->connect_fd : -1;
    x->local = s->options.unix_path != NULL;
    x->body = BUF_INIT(EXCHANGE_BODY_MAX);
    x->out = BUF_INIT(EXCHANGE_OUT_MAX);
    (void)snprintf(x->method, sizeof x->method, "%s", strcmp(method, "HEAD") == 0 ? "GET" : method);
    (void)snprintf(x->path, sizeof x->path, "%s", url);
    (void)pthread_mutex_init(&x->mutex, NULL);
    remember(s, x, true);
    return x;
}

static void on_completed(void *context, struct MHD_Connection *c, void **con_cls,
                         enum MHD_RequestTerminationCode code)
{
    struct exchange *x = *con_cls;
    (void)context;
    (void)c;
    (void)code;
    if (!x)
        return;
    *con_cls = NULL;
    remember(x->server, x, false);
    if (x->call) {
        bool chat = call_kind(x->call) == CALL_CHAT && !call_is_done(x->call);
        struct request_id request = call_submit(x->call)->request;
        call_drop(x->call);
        call_unref(x->call);
        if (chat)
            agent_post_dropped(x->agent, &request);
    }
    bool was_large = x->body.len > LARGE_BODY_BYTES;
    if (x->free_state)
        x->free_state(x->state);
    buf_deinit(&x->body);
    buf_deinit(&x->out);
    free(x->answer);
    (void)pthread_mutex_destroy(&x->mutex);
    free(x);
    if (was_large)
        sysinfo_give_back_memory();
}

static void on_connection(void *context, struct MHD_Connection *c, void **socket_context,
                          enum MHD_ConnectionNotificationCode code)
{
    struct http_server *s = context;
    bool crowd_left = false;
    (void)c;
    (void)socket_context;
    (void)pthread_mutex_lock(&s->mutex);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        s->n_connections++;
        s->peak = MAX_OF(s->peak, s->n_connections);
    } else {
        s->n_connections--;
        crowd_left = s->peak >= CROWD_MIN && s->n_connections < s->peak / 8;
        if (crowd_left)
            s->peak = s->n_connections;
    }
    (void)pthread_mutex_unlock(&s->mutex);
    if (crowd_left)
        sysinfo_give_back_memory();
}

static enum MHD_Result proceed(struct exchange *x)
{
    for (;;) {
        if (x->gone)
            return MHD_NO;
        switch (x->handle(x)) {
        case EXCHANGE_WAIT:
            if (sleep_until_news(x))
                return MHD_YES;
            if (x->ended)
                return send_text(x->connection, 503,
                                 ERROR_JSON("this node is stopping", "server_error"));
            break;
        case EXCHANGE_STREAM:
            return start_stream(x);
        case EXCHANGE_ANSWER:
            return send_text(x->connection, x->status, x->answer ? x->answer : "{}");
        }
    }
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *c, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *n_upload, void **con_cls)
{
    struct http_server *s = context;
    struct exchange *x = *con_cls;
    (void)version;
    if (!x) {
        x = exchange_new(s, c, url, method);
        *con_cls = x;
        return x ? MHD_YES : MHD_NO;
    }
    if (*n_upload > 0) {
        if (buf_append(&x->body, upload, *n_upload) != ERR_OK)
            x->too_large = true;
        *n_upload = 0;
        return MHD_YES;
    }
    if (x->handle)
        return proceed(x);
    bool refused;
    enum MHD_Result r = refuse_stranger(x, &refused);
    if (refused)
        return r;
    if (is_encoded(c))
        return send_text(c, 415,
                         ERROR_JSON("the body is compressed (Content-Encoding): send it as it is",
                                    "invalid_request_error"));
    if (x->too_large)
        return send_text(c, 413,
                         ERROR_JSON("the body is larger than 16 MiB", "invalid_request_error"));
    if (!(x->local && local_route(x)) && !openai_route(x))
        return send_text(c, 404, ERROR_JSON("there is nothing at this path", "not_found_error"));
    return proceed(x);
}

/* ---- start and stop ---- */

static bool is_loopback(const struct addrinfo *i)
{
    struct sockaddr_storage s = {0};
    struct address a;
    memcpy(&s, i->ai_addr, MIN_OF((size_t)i->ai_addrlen, sizeof s));
    return net_address_of(&s, &a) == ERR_OK && address_is_loopback(&a);
}

static enum err listen_tcp(struct http_server *s, int *ret_fd, struct err_text *text)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    char port[8];
    (void)snprintf(port, sizeof port, "%u", s->options.port);
    if (getaddrinfo(s->host, port, &hints, &list) != 0 || !list)
        return err_set(text, ERR_INVALID, "--http %s: no such address on this machine", s->host);
    s->loopback = is_loopback(list);
    enum err e = ERR_OK;
    int on = 1, fd = -1;
    if (!s->loopback && !s->api_key[0])
        e = err_set(text, ERR_DENIED,
                    "--http %s would let the whole network ask without a key: set --api-key (or "
                    "api-key in covey.ini) "
                    "or bind to 127.0.0.1",
                    s->host);
    if (e == ERR_OK) {
        fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            e = err_set(text, ERR_IO, "--http %s: %s", s->host, strerror(errno));
    }
    if (e == ERR_OK) {
        (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(fd, list->ai_addr, list->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0)
            e = err_set(text, errno == EADDRINUSE ? ERR_EXISTS : ERR_IO,
                        "HTTP port %u on %s: %s. Is another agent running? --http HOST:PORT "
                        "chooses another",
                        s->options.port, s->host, strerror(errno));
    }
    freeaddrinfo(list);
    if (e != ERR_OK) {
        if (fd >= 0)
            (void)close(fd);
        return e;
    }
    struct sockaddr_storage bound;
    socklen_t n = sizeof bound;
    struct address address;
    if (getsockname(fd, (struct sockaddr *)&bound, &n) == 0 &&
        net_address_of(&bound, &address) == ERR_OK)
        s->port = address.port;
    *ret_fd = fd;
    return ERR_OK;
}

static enum err listen_unix(struct http_server *s, int *ret_fd, struct err_text *text)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    char folder[CONFIG_PATH_MAX];
    if (strlen(s->unix_path) >= sizeof a.sun_path)
        return err_set(text, ERR_LIMIT,
                       "%s: too long for a socket (at most %zu bytes): choose a shorter COVEY_HOME",
                       s->unix_path, sizeof a.sun_path - 1);
    memcpy(a.sun_path, s->unix_path, strlen(s->unix_path) + 1);
    (void)snprintf(folder, sizeof folder, "%s", s->unix_path);
    char *slash = strrchr(folder, '/');
    if (slash)
        *slash = 0;
    if (file_make_folder(folder) != ERR_OK)
        return err_set(text, ERR_IO, "%s cannot be made", folder);
    (void)unlink(s->unix_path); /* the data folder's lock says that no other agent has it */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    mode_t mask = umask(0177);
    int r = fd < 0 ? -1 : bind(fd, (struct sockaddr *)&a, sizeof a);
    (void)umask(mask);
    if (r != 0 || listen(fd, BACKLOG) != 0) {
        if (fd >= 0)
            (void)close(fd);
        return err_set(text, ERR_IO, "%s: %s", s->unix_path, strerror(errno));
    }
    *ret_fd = fd;
    return ERR_OK;
}

enum err http_server_new(const struct http_options *options, struct http_server **ret,
                         struct err_text *text)
{
    struct http_server *s = calloc(1, sizeof *s);
    int fd = -1;
    if (!s)
        return ERR_NO_MEMORY;
    s->options = *options;
    (void)snprintf(s->host, sizeof s->host, "%s", options->host ? options->host : "");
    (void)snprintf(s->unix_path, sizeof s->unix_path, "%s",
                   options->unix_path ? options->unix_path : "");
    (void)snprintf(s->api_key, sizeof s->api_key, "%s", options->api_key);
    s->options.host = s->host;
    if (options->unix_path)
        s->options.unix_path = s->unix_path;
    (void)pthread_mutex_init(&s->mutex, NULL);
    enum err e = options->unix_path ? listen_unix(s, &fd, text) : listen_tcp(s, &fd, text);
    if (e == ERR_OK) {
        s->daemon = MHD_start_daemon(
            /* not epoll: libmicrohttpd 0.9.75 misses the end of a client whose last bytes came with
             * it */
            MHD_USE_POLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ITC, 0, NULL, NULL,
            on_request, s, MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED, on_completed,
            NULL, MHD_OPTION_NOTIFY_CONNECTION, on_connection, s, MHD_OPTION_CONNECTION_LIMIT,
            (unsigned)CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_TIMEOUT_S,
            MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MEMORY_PER_CONNECTION,
            MHD_OPTION_THREAD_POOL_SIZE, (unsigned)HTTP_THREADS, MHD_OPTION_END);
        if (!s->daemon) {
            (void)close(fd);
            e = err_set(text, ERR_IO, "the HTTP server cannot start: %s", strerror(errno));
        }
    }
    if (e != ERR_OK) {
        (void)pthread_mutex_destroy(&s->mutex);
        free(s);
        return e;
    }
    *ret = s;
    return ERR_OK;
}

uint16_t http_server_port(const struct http_server *s)
{
    return s->port;
}

/* Its end of the connection is closed, and nothing that it said is unread. One that closes only its
 * sending side cannot be told from that. */
static bool client_has_left(struct exchange *x)
{
    char c;
    ssize_t n = -1;
    (void)pthread_mutex_lock(&x->mutex);
    bool looked = x->suspended && x->fd >= 0;
    if (looked)
        n = recv(x->fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
    bool left = looked && (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR));
    (void)pthread_mutex_unlock(&x->mutex);
    return left;
}

/* libmicrohttpd does not look at suspended connections. */
void http_server_sweep(struct http_server *s)
{
    if (!s)
        return;
    (void)pthread_mutex_lock(&s->mutex);
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        struct exchange *x = s->open[i];
        if (!x || !client_has_left(x))
            continue;
        x->gone = true;
        exchange_wake(x);
    }
    (void)pthread_mutex_unlock(&s->mutex);
}

void http_server_free(struct http_server *s)
{
    if (!s)
        return;
    /* Suspended connections must be resumed before the daemon stops. */
    (void)pthread_mutex_lock(&s->mutex);
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        if (!s->open[i])
            continue;
        s->open[i]->ended = true;
        exchange_wake(s->open[i]);
    }
    (void)pthread_mutex_unlock(&s->mutex);
    MHD_stop_daemon(s->daemon);
    if (s->unix_path[0])
        (void)unlink(s->unix_path);
    (void)pthread_mutex_destroy(&s->mutex);
    free(s);
}
