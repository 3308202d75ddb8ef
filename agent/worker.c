#include "agent/worker.h"

#include "agent/control_net.h"
#include "agent/peer_fds.h"
#include "agent/pull.h"
#include "base/file.h"
#include "base/util.h"
#include "discovery/mdns_txt.h"
#include "runtime/calibrate.h"
#include "runtime/pool.h"
#include "agent/loader.h"
#include "transport/bulk.h"
#include "transport/link_tcp.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    QUEUE_MAX = 32,
    PEER_THREADS_MAX = 16, /* bulk connections and measurements at once */
    PROGRESS_ITEM_BYTES = 4 << 20,
};

enum job_kind { JOB_CALL, JOB_CALIBRATE };

struct job {
    enum job_kind kind;
    struct call *call;
};

struct worker {
    struct worker_options options;
    struct log log;
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct job jobs[QUEUE_MAX];
    uint32_t n_jobs;
    atomic_bool stopping;
    uint32_t n_peer_threads;        /* guarded by `mutex`; `changed` says when one has ended */
    struct mailbox_sender *to_loop; /* guarded by `mutex` */
    int stop_pipe[2];               /* readable when peer threads are to end */
};

struct peer_job {
    struct worker *worker;
    int fd;
    struct hello_result result;
    struct address address;
    bool initiator;
};

static void tell_loop(struct worker *w, enum loop_mail type, const void *body, size_t n)
{
    (void)pthread_mutex_lock(&w->mutex);
    (void)mailbox_send(w->to_loop, type, body, n);
    (void)pthread_mutex_unlock(&w->mutex);
}

/* ---- calls ---- */

struct progress {
    struct worker *worker;
    struct call *call;
    uint64_t said;
};

static bool on_progress(void *context, uint64_t done, uint64_t total)
{
    struct progress *p = context;
    if (call_is_dropped(p->call) || p->worker->stopping)
        return false;
    if (done < total && done < p->said + PROGRESS_ITEM_BYTES)
        return true;
    p->said = done;
    struct call_item item = {
        .kind = CALL_ITEM_JSON,
        .json = json_pack("{s:I, s:I}", "done", (json_int_t)done, "total", (json_int_t)total)};
    if (call_push(p->call, &item) != ERR_OK)
        json_decref(item.json);
    return true;
}

static bool goes_on(void *context, uint64_t done, uint64_t total)
{
    const struct worker *w = context;
    (void)done;
    (void)total;
    return !w->stopping;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* "dir/SmolLM2-135M.gguf" becomes "SmolLM2-135M". */
static void name_of_path(const char *path, char ret[MANIFEST_NAME_MAX])
{
    (void)snprintf(ret, MANIFEST_NAME_MAX, "%.95s", base_name(path));
    size_t n = strlen(ret);
    if (n > 5 && strcmp(ret + n - 5, ".gguf") == 0)
        ret[n - 5] = 0;
}

static enum err add_file(struct worker *w, struct call *c, char name[MANIFEST_NAME_MAX],
                         struct hash256 *id, struct err_text *text)
{
    const char *path = json_string_value(json_object_get(call_args(c), "path"));
    const char *wanted = json_string_value(json_object_get(call_args(c), "name"));
    if (!path)
        return err_set(text, ERR_INVALID, "a path is needed");
    if (wanted && strlen(wanted) >= MANIFEST_NAME_MAX)
        name[0] = 0;
    else if (wanted)
        (void)snprintf(name, MANIFEST_NAME_MAX, "%s", wanted);
    else
        name_of_path(path, name);
    if (!name[0] || !mdns_text_ok(name, strlen(name)))
        return err_set(
            text, ERR_INVALID,
            "%.200s: no model can have this name: --name gives another, of 1 to %d bytes "
            "of text",
            path, MANIFEST_NAME_MAX - 1);
    struct progress p = {w, c, 0};
    return store_add_file(w->options.store, path, name, on_progress, &p, id, text);
}

static enum err pull(struct worker *w, struct call *c, char name[MANIFEST_NAME_MAX],
                     struct hash256 *id, const char **ret_from, struct err_text *text)
{
    const char *wanted = json_string_value(json_object_get(call_args(c), "name"));
    if (!wanted)
        return err_set(text, ERR_INVALID, "a model name is needed");
    struct store_entry known;
    if (store_find(w->options.store, wanted, &known) == ERR_OK && known.complete) {
        (void)snprintf(name, MANIFEST_NAME_MAX, "%s", known.name);
        *id = known.id;
        *ret_from = "store"; /* it was here already */
        return ERR_OK;
    }
    struct progress p = {w, c, 0};
    char path[STORE_PATH_MAX];
    struct pull_options o = {.name = wanted,
                             .hub = w->options.config->hub,
                             .folder = w->options.config->folders.data,
                             .progress = on_progress,
                             .context = &p};
    TRY(pull_file(&o, path, name, ret_from, text));
    return store_import_file(w->options.store, path, name, goes_on, w, id, text);
}

static void do_call(struct worker *w, struct call *c)
{
    struct err_text text = {""};
    struct hash256 id;
    char name[MANIFEST_NAME_MAX] = "", hex[HEX_ID_MAX];
    const char *from = "file";
    enum err e = call_kind(c) == CALL_PULL ? pull(w, c, name, &id, &from, &text)
                                           : add_file(w, c, name, &id, &text);
    if (e != ERR_OK) {
        call_fail(c, e, "%s", text.text[0] ? text.text : err_name(e));
    } else {
        tell_loop(w, LOOP_MODEL_NEWS, &id, sizeof id);
        hex_of_32(id.bytes, hex);
        call_reply(c, ERR_OK, json_pack("{s:s, s:s, s:s}", "id", hex, "name", name, "from", from));
    }
    call_unref(c);
}

/* ---- calibration ---- */

static void calibration_path(const struct worker *w, char ret[CONFIG_PATH_MAX + 32])
{
    (void)snprintf(ret, CONFIG_PATH_MAX + 32, "%s/calibration", w->options.config->folders.data);
}

/* "DIGEST THREADS STREAM MACS": used again only for the same kernels and thread count. */
static bool read_calibration(const struct worker *w, uint64_t digest, struct mail_calibrated *ret)
{
    char path[CONFIG_PATH_MAX + 32];
    calibration_path(w, path);
    struct buf b = BUF_INIT(256);
    uint64_t was = 0;
    uint32_t n_threads = 0;
    bool ok = file_read(path, &b) == ERR_OK && buf_cstr(&b) &&
              sscanf(buf_cstr(&b), "%" SCNx64 " %" SCNu32 " %lf %lf", &was, &n_threads,
                     &ret->stream_bytes_per_s, &ret->macs_per_s) == 4 &&
              was == digest && n_threads == w->options.n_threads && ret->stream_bytes_per_s > 0 &&
              ret->macs_per_s > 0;
    buf_deinit(&b);
    return ok;
}

static void do_calibrate(struct worker *w)
{
    struct mail_calibrated m = {0, 0};
    uint64_t digest = w->options.kernel_digest;
    if (!read_calibration(w, digest, &m)) {
        struct pool *pool = NULL;
        struct calibration c = {0, 0};
        enum err e = pool_new(w->options.n_threads, &pool);
        if (e == ERR_OK)
            e = calibrate(pool, &c);
        pool_free(pool);
        if (e != ERR_OK) {
            log_error(&w->log,
                      "this machine's speed could not be measured (%s): it takes no part in plans",
                      err_name(e));
            return;
        }
        m = (struct mail_calibrated){c.stream_bytes_per_s, c.macs_per_s};
        char path[CONFIG_PATH_MAX + 32], line[128];
        calibration_path(w, path);
        int n = snprintf(line, sizeof line, "%" PRIx64 " %" PRIu32 " %.0f %.0f\n", digest,
                         w->options.n_threads, m.stream_bytes_per_s, m.macs_per_s);
        if (n > 0 && file_write_atomic(path, line, (size_t)n, 0600) != ERR_OK)
            log_warning(&w->log, "%s cannot be written", path);
    }
    tell_loop(w, LOOP_CALIBRATED, &m, sizeof m);
}

static void *run(void *context)
{
    struct worker *w = context;
    for (;;) {
        (void)pthread_mutex_lock(&w->mutex);
        while (w->n_jobs == 0 && !w->stopping)
            (void)pthread_cond_wait(&w->changed, &w->mutex);
        if (w->stopping) {
            (void)pthread_mutex_unlock(&w->mutex);
            return NULL;
        }
        struct job j = w->jobs[0];
        memmove(w->jobs, w->jobs + 1, --w->n_jobs * sizeof w->jobs[0]);
        (void)pthread_mutex_unlock(&w->mutex);
        if (j.kind == JOB_CALIBRATE)
            do_calibrate(w);
        else
            do_call(w, j.call);
    }
}

static enum err queue(struct worker *w, struct job job)
{
    enum err e = ERR_OK;
    (void)pthread_mutex_lock(&w->mutex);
    if (w->n_jobs == QUEUE_MAX || w->stopping)
        e = ERR_BUSY;
    else
        w->jobs[w->n_jobs++] = job;
    (void)pthread_cond_signal(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
    return e;
}

enum err worker_add(struct worker *w, struct call *take_call)
{
    enum err e = queue(w, (struct job){JOB_CALL, take_call});
    if (e != ERR_OK) {
        call_fail(take_call, e, "too many jobs are waiting: try again soon");
        call_unref(take_call);
    }
    return e;
}

enum err worker_calibrate(struct worker *w)
{
    return queue(w, (struct job){JOB_CALIBRATE, NULL});
}

/* ---- threads that talk to one peer ---- */

static void close_fd(struct worker *w, int fd)
{
    peer_fds_remove(w->options.fds, fd);
    (void)close(fd);
}

static struct link *link_of(struct peer_job *j)
{
    struct link *link = NULL;
    struct link_tcp_options o = {
        .fd = j->fd, .keys = j->result.keys, .frame_bytes_max = BULK_FRAME_BYTES_MAX};
    if (link_tcp_new(&o, &link) != ERR_OK) {
        close_fd(j->worker, j->fd);
        return NULL;
    }
    return link;
}

/* Who answers learns the figures too; the connection says from where it was asked. */
static void note_asker(struct peer_job *j)
{
    struct sockaddr_storage from;
    socklen_t n = sizeof from;
    struct address a;
    if (getpeername(j->fd, (struct sockaddr *)&from, &n) == 0 &&
        net_address_of(&from, &a) == ERR_OK) {
        net_address_name(&a);
        j->address = a;
    }
}

/* Whether one more thread may run. */
static bool take_thread(struct worker *w)
{
    (void)pthread_mutex_lock(&w->mutex);
    bool room = w->n_peer_threads < PEER_THREADS_MAX && !w->stopping;
    w->n_peer_threads += room;
    (void)pthread_mutex_unlock(&w->mutex);
    return room;
}

static void give_up_thread(struct worker *w)
{
    (void)pthread_mutex_lock(&w->mutex);
    w->n_peer_threads--;
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
}

static void *run_peer(void *context)
{
    struct peer_job *j = context;
    struct worker *w = j->worker;
    if (!j->initiator)
        note_asker(j);
    struct link *link = link_of(j);
    struct bandwidth b = {0, 0};
    enum err e = link ? ERR_OK : ERR_IO;
    if (j->result.kind == HELLO_BULK && link) {
        struct bulk_source source = loader_source(w->options.store);
        e = bulk_serve(link, &source, w->stop_pipe[0]);
        log_debug(&w->log, "a bulk connection ended (%s)", err_name(e));
    } else if (link) {
        e = j->initiator ? bandwidth_measure(link, &b) : bandwidth_answer(link, &b);
    }
    if (link)
        peer_fds_remove(w->options.fds, j->fd);
    link_free(link);
    if (j->result.kind == HELLO_BANDWIDTH) {
        struct mail_bandwidth m = {j->result.peer, j->address, 0};
        if (e == ERR_OK)
            m.bytes_per_s = (double)MIN_OF(b.to_peer_bytes_per_s, b.from_peer_bytes_per_s);
        tell_loop(w, LOOP_BANDWIDTH, &m, sizeof m);
    }
    free(j);
    give_up_thread(w);
    return NULL;
}

static void start_peer(struct worker *w, int fd, const struct hello_result *result,
                       const struct address *address)
{
    struct peer_job *j = calloc(1, sizeof *j);
    pthread_attr_t attributes;
    pthread_t thread;
    bool room = take_thread(w), known = peer_fds_add(w->options.fds, &result->peer, fd) == ERR_OK;
    if (j && room && known && pthread_attr_init(&attributes) == 0) {
        *j = (struct peer_job){
            .worker = w, .fd = fd, .result = *result, .initiator = address != NULL};
        if (address)
            j->address = *address;
        (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int r = pthread_create(&thread, &attributes, run_peer, j);
        (void)pthread_attr_destroy(&attributes);
        if (r == 0)
            return;
    }
    free(j);
    if (room)
        give_up_thread(w);
    close_fd(w, fd);
}

void worker_serve_bulk(struct worker *w, int fd, const struct hello_result *result)
{
    start_peer(w, fd, result, NULL);
}

void worker_answer_bandwidth(struct worker *w, int fd, const struct hello_result *result)
{
    start_peer(w, fd, result, NULL);
}

void worker_measure_bandwidth(struct worker *w, int fd, const struct hello_result *result,
                              const struct address *address)
{
    start_peer(w, fd, result, address);
}

/* ---- life ---- */

enum err worker_new(const struct worker_options *options, struct worker **ret,
                    struct err_text *text)
{
    struct worker *w = calloc(1, sizeof *w);
    if (!w)
        return ERR_NO_MEMORY;
    w->options = *options;
    if (options->log)
        w->log = *options->log;
    w->log.room = "worker";
    (void)pthread_mutex_init(&w->mutex, NULL);
    (void)pthread_cond_init(&w->changed, NULL);
    w->stop_pipe[0] = w->stop_pipe[1] = -1;
    enum err e = mailbox_sender_new(options->loop, &w->to_loop);
    if (e == ERR_OK && pipe(w->stop_pipe) != 0)
        e = ERR_IO;
    for (int i = 0; i < 2 && w->stop_pipe[i] >= 0; i++)
        (void)fcntl(w->stop_pipe[i], F_SETFD, FD_CLOEXEC); /* a child's copy would keep it open */
    if (e != ERR_OK) {
        worker_free(w);
        return err_set(text, e, "the worker thread cannot be made (%s)", err_name(e));
    }
    *ret = w;
    return ERR_OK;
}

enum err worker_start(struct worker *w)
{
    if (pthread_create(&w->thread, NULL, run, w) != 0)
        return ERR_IO;
    w->started = true;
    return ERR_OK;
}

void worker_stop(struct worker *w)
{
    if (!w->started)
        return;
    (void)pthread_mutex_lock(&w->mutex);
    w->stopping = true;
    (void)pthread_cond_broadcast(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
    (void)close(w->stop_pipe[1]); /* the other end is readable from now on */
    w->stop_pipe[1] = -1;
    (void)pthread_join(w->thread, NULL);
    /* A measurement has BANDWIDTH_TIMEOUT_MS, a bulk connection sees the pipe: all of them end. */
    (void)pthread_mutex_lock(&w->mutex);
    while (w->n_peer_threads > 0)
        (void)pthread_cond_wait(&w->changed, &w->mutex);
    (void)pthread_mutex_unlock(&w->mutex);
    w->started = false;
}

void worker_free(struct worker *w)
{
    if (!w)
        return;
    for (uint32_t i = 0; i < w->n_jobs; i++) {
        if (w->jobs[i].call) {
            call_fail(w->jobs[i].call, ERR_CLOSED, "this node is stopping");
            call_unref(w->jobs[i].call);
        }
    }
    mailbox_sender_free(w->to_loop);
    for (int i = 0; i < 2; i++) {
        if (w->stop_pipe[i] >= 0)
            (void)close(w->stop_pipe[i]);
    }
    (void)pthread_cond_destroy(&w->changed);
    (void)pthread_mutex_destroy(&w->mutex);
    free(w);
}
