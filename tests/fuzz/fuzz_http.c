/* HTTP through the real server: agent/http.c with its parser, its handlers and its threads, on a
 * loopback port and on a local socket. This thread is the client and plays the loop of the agent:
 * it takes the calls from the mailbox and answers them, in time, late, or not before the client
 * has gone.
 *
 * Input: a byte of options (enum option), a byte that says how calls are answered, and pieces: a
 * length and as many bytes; each is written by itself. Then the client says that this was all, or
 * drops the connection. The server must end the connection in time, and must answer a well-formed
 * request afterwards. With COVEY_SOURCE set, a tiny model is there to be asked. */
#include "agent/agent.h"
#include "agent/http.h"
#include "agent/mail.h"
#include "base/clock.h"
#include "base/util.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum option {
    OPTION_LOCAL = 1,  /* the local socket, else the public port */
    OPTION_DROP = 2,   /* the client goes without a word */
    OPTION_LATE = 4,   /* calls are answered when all has been written */
    OPTION_DEAF = 8,   /* the client reads only when all has been written */
    OPTION_NEVER = 16, /* calls are answered when the client has gone (with OPTION_DROP) */
};

enum {
    ANSWER_TOKENS_MAX = 32,
    HELD_MAX = 256,
    DEADLINE_US = 5 * 1000 * 1000, /* a server that is slower hangs */
    PIECES_MAX = 64,
};

struct rig {
    struct agent *agent;
    struct http_server *http, *local;
    struct served_model *model;
    char folder[64], path[96];
    struct call *held[HELD_MAX];
    uint32_t n_held, n_clients;
    uint8_t answers;
};

static void need(bool ok, const char *what)
{
    if (ok)
        return;
    (void)fprintf(stderr, "fuzz_http: %s\n", what);
    abort();
}

/* ---- the loop's side ---- */

static void open_model(struct rig *r)
{
    char path[CONFIG_PATH_MAX];
    struct err_text text = {""};
    struct hash256 id = {.bytes = {1}};
    const char *source = getenv("COVEY_SOURCE");
    if (!source)
        return;
    (void)snprintf(path, sizeof path, "%s/tests/reference/tiny_split.gguf", source);
    need(models_open(r->agent->models, &id, "tiny", path, &r->model, &text) == ERR_OK, text.text);
}

static void answer_chat(const struct rig *r, struct call *c)
{
    const struct chat_submit *q = call_submit(c);
    uint32_t n = r->answers % (ANSWER_TOKENS_MAX + 1);
    for (uint32_t i = 0; i < n; i++) {
        struct call_item item = {.kind = CALL_ITEM_TOKEN,
                                 .token_id = q->prompt_ids[i % q->n_prompt_ids],
                                 .position = i,
                                 .logprob = -0.5f};
        (void)call_push(c, &item);
    }
    struct call_item end = {.kind = CALL_ITEM_END, .n_generated = n, .finish = "stop"};
    if (r->answers & 64) {
        end.error = ERR_TIMEOUT;
        (void)snprintf(end.text, sizeof end.text, "a node was lost");
    }
    (void)call_push(c, &end);
    call_reply(c, ERR_OK, NULL);
}

static json_t *reply_of(const struct rig *r, enum call_kind kind)
{
    char hex[2 * sizeof r->model->id.bytes + 1] = "00";
    if (r->model)
        hex_encode(r->model->id.bytes, sizeof r->model->id.bytes, hex);
    switch (kind) {
    case CALL_LOAD:
        return json_pack("{s:s, s:i}", "id", hex, "context", 512);
    case CALL_MODELS:
        return json_pack("{s:[{s:s, s:s}, {s:s}]}", "models", "name", "tiny", "kv_type", "f16",
                         "name", "bare");
    default:
        return json_pack("{s:s}", "node", "x");
    }
}

static void answer(const struct rig *r, struct call *take_call)
{
    enum call_kind kind = call_kind(take_call);
    bool refused = r->answers & 128 && kind != CALL_MODELS;
    for (int i = 0; !refused && i < 3 && (kind == CALL_EVENTS || kind == CALL_PULL); i++) {
        struct call_item item = {.kind = CALL_ITEM_JSON, .json = json_pack("{s:i}", "done", i)};
        if (call_push(take_call, &item) != ERR_OK)
            json_decref(item.json);
    }
    if (refused)
        call_fail(take_call, ERR_BUSY, "this node is busy");
    else if (kind == CALL_CHAT)
        answer_chat(r, take_call);
    else
        call_reply(take_call, ERR_OK, reply_of(r, kind));
    call_unref(take_call);
}

static void answer_held(struct rig *r)
{
    for (uint32_t i = 0; i < r->n_held; i++)
        answer(r, r->held[i]);
    r->n_held = 0;
}

static void read_mail(struct rig *r, bool hold)
{
    struct mail m;
    while (mailbox_receive(r->agent->mailbox, &m) == ERR_OK) {
        if (m.type == LOOP_CALL && hold && r->n_held < HELD_MAX)
            r->held[r->n_held++] = TAKE(m.owned);
        else if (m.type == LOOP_CALL)
            answer(r, TAKE(m.owned));
        mail_clear(&m);
    }
}

/* ---- the client's side ---- */

/* The fuzzer's own timer may interrupt it: then it goes on by itself. */
static void connect_to(int fd, const void *to, socklen_t n, const char *what)
{
    int e = connect(fd, to, n) == 0 ? 0 : errno;
    socklen_t size = sizeof e;
    while (e == EINTR || e == EINPROGRESS) {
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        if (poll(&p, 1, DEADLINE_US / 1000) != 1)
            e = errno == EINTR ? EINTR : ETIMEDOUT;
        else
            need(getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &size) == 0, "no state of a socket");
    }
    if (e != 0)
        (void)fprintf(stderr, "fuzz_http: %s\n", strerror(e));
    need(e == 0, what);
}

static int connect_tcp(struct rig *r, uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    uint32_t k = r->n_clients++;
    /* A source address of its own, so that ports do not run out while old ones wait. */
    struct sockaddr_in from = {.sin_family = AF_INET,
                               .sin_addr.s_addr = htonl(0x7f010000u | (k >> 8 & 0xffff))};
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    need(fd >= 0, "no socket");
    (void)setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
    (void)bind(fd, (struct sockaddr *)&from, sizeof from);
    connect_to(fd, &to, sizeof to, "the port takes no connection");
    return fd;
}

static int connect_local(const struct rig *r)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    (void)snprintf(to.sun_path, sizeof to.sun_path, "%s", r->path);
    need(fd >= 0, "no socket");
    connect_to(fd, &to, sizeof to, "the local socket takes no connection");
    return fd;
}

static int client(struct rig *r, bool local)
{
    int fd = local ? connect_local(r) : connect_tcp(r, http_server_port(r->http));
    (void)fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    return fd;
}

/* Waits for the socket or a call, then takes both. False: the server has ended the connection. What
 * it says is kept in `ret` ([max], may be NULL). */
static bool pump(struct rig *r, int fd, int timeout_ms, uint8_t options, char *ret, size_t max)
{
    struct pollfd p[2] = {{.fd = mailbox_fd(r->agent->mailbox), .events = POLLIN},
                          {.fd = options & OPTION_DEAF ? -1 : fd, .events = POLLIN}};
    char bytes[4096];
    (void)poll(p, 2, timeout_ms);
    read_mail(r, options & (OPTION_LATE | OPTION_NEVER));
    while (!(options & OPTION_DEAF)) {
        ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        if (n < 0)
            break;
        size_t at = ret ? strlen(ret) : 0;
        for (ssize_t i = 0; ret && i < n && at + 1 < max; i++)
            ret[at++] = bytes[i];
    }
    return true;
}

/* False: the server has ended the connection. */
static bool write_piece(struct rig *r, int fd, const uint8_t *bytes, size_t n, uint8_t options)
{
    uint64_t until_us = clock_monotonic_us() + DEADLINE_US;
    while (n > 0) {
        ssize_t k = send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (k < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        if (k > 0) {
            bytes += k;
            n -= (size_t)k;
        }
        if (!pump(r, fd, k > 0 ? 0 : 10, options, NULL, 0))
            return false;
        need(clock_monotonic_us() < until_us, "the server does not read");
    }
    return true;
}

static void until_closed(struct rig *r, int fd, char *ret, size_t max)
{
    uint64_t until_us = clock_monotonic_us() + DEADLINE_US;
    while (pump(r, fd, 10, 0, ret, max))
        need(clock_monotonic_us() < until_us, "the server does not end the connection");
}

static void play(struct rig *r, const uint8_t *data, size_t size)
{
    uint8_t options = data[0];
    bool open = true;
    int fd = client(r, options & OPTION_LOCAL);
    r->answers = data[1];
    size_t at = 2;
    for (int i = 0; open && at < size && i < PIECES_MAX; i++) {
        size_t n = MIN_OF((size_t)data[at], size - at - 1);
        open = write_piece(r, fd, data + at + 1, n, options);
        at += 1 + n;
    }
    if (open && at < size) /* the rest at once */
        open = write_piece(r, fd, data + at, size - at, options);
    if (!(options & OPTION_NEVER))
        answer_held(r);
    if (open && !(options & OPTION_DROP)) {
        (void)shutdown(fd, SHUT_WR);
        answer_held(r);
        until_closed(r, fd, NULL, 0);
    }
    (void)close(fd);
    read_mail(r, false);
    answer_held(r);
}

/* Whatever came before, an honest client is served. */
static void check(struct rig *r, bool local)
{
    static const char ask[] =
        "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    char answer_text[4096] = "";
    int fd = client(r, local);
    r->answers = 0;
    need(send(fd, ask, sizeof ask - 1, MSG_NOSIGNAL) == sizeof ask - 1, "nothing can be asked");
    until_closed(r, fd, answer_text, sizeof answer_text);
    (void)close(fd);
    need(strncmp(answer_text, "HTTP/1.1 200 ", 13) == 0 && strstr(answer_text, "\"id\":\"tiny\""),
         "a well-formed request is not answered");
    need(strstr(answer_text, "\"id\":\"bare\""), "a model without a kv_type is not listed");
}

/* ---- life ---- */

static const struct log quiet;

static struct rig *rig_new(void)
{
    struct err_text text = {""};
    struct rig *r = calloc(1, sizeof *r);
    need(r && sodium_init() >= 0, "no memory");
    r->agent = calloc(1, sizeof *r->agent);
    need(r->agent, "no memory");
    (void)snprintf(r->folder, sizeof r->folder, "/tmp/fuzz_http.XXXXXX");
    need(mkdtemp(r->folder), "no folder");
    (void)snprintf(r->path, sizeof r->path, "%s/socket", r->folder);
    (void)snprintf(r->agent->config.name, sizeof r->agent->config.name, "fuzzed");
    need(pthread_mutex_init(&r->agent->from_http_mutex, NULL) == 0, "no mutex");
    need(mailbox_new("fuzz-http", &r->agent->mailbox) == ERR_OK, "no mailbox");
    need(mailbox_sender_new(r->agent->mailbox, &r->agent->from_http) == ERR_OK, "no sender");
    need(models_new(&r->agent->models) == ERR_OK, "no models");
    open_model(r);
    struct http_options o = {.agent = r->agent, .host = "127.0.0.1", .api_key = "", .log = &quiet};
    need(http_server_new(&o, &r->http, &text) == ERR_OK, text.text);
    o.host = NULL;
    o.unix_path = r->path;
    need(http_server_new(&o, &r->local, &text) == ERR_OK, text.text);
    return r;
}

static void end(void);

/* The server lives as long as the process: starting its threads is slow. */
static struct rig *rig_of_process(void)
{
    static struct rig *r;
    if (!r) {
        r = rig_new();
        (void)atexit(end);
    }
    return r;
}

static void end(void)
{
    struct rig *r = rig_of_process();
    http_server_free(r->http);
    http_server_free(r->local);
    read_mail(r, false);
    models_put(r->model);
    models_free(r->agent->models);
    mailbox_sender_free(r->agent->from_http);
    mailbox_free(r->agent->mailbox);
    (void)pthread_mutex_destroy(&r->agent->from_http_mutex);
    (void)rmdir(r->folder);
    free(r->agent);
    free(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    struct rig *r = rig_of_process();
    play(r, data, size);
    check(r, data[0] & OPTION_LOCAL);
    return 0;
}
