/* Start, loop, timers, stop. */
#include "agent/serve.h"

#include "agent/agent.h"
#include "agent/discovery_shell.h"
#include "agent/http.h"
#include "agent/mapping_guard.h"
#include "agent/sysinfo.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/util.h"
#include "proto/identity_file.h"
#include "runtime/kernels/kernels.h"
#include "runtime/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>

enum {
    STOP_POLL_US = 20 * 1000,
    TICK_MAX_US = 1000 * 1000, /* sleep is noticed this soon */
    REMEMBERED_MAX = 256,
    RESERVE_SHARE = 10,     /* a tenth of the machine's memory is left alone … */
    BUDGET_STEP = 16 << 20, /* budgets move in such steps: not every page is news */
};
#define RESERVE_MIN_BYTES (UINT64_C(512) << 20) /* … and at least this much */

void agent_fatal(struct agent *a, const char *format, ...)
{
    char line[ERR_TEXT_MAX];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(line, sizeof line, format, args);
    va_end(args);
    log_error(&a->log, "%s", line);
    if (!a->failed)
        (void)snprintf(a->failure, sizeof a->failure, "this node is stopping: %.300s", line);
    a->failed = a->stopped = true;
    uv_stop(&a->loop);
}

/* ---- what this machine has ---- */

static uint64_t budget(const struct agent *a, const struct sysinfo_memory *m)
{
    if (a->config.memory_limit)
        return a->config.memory_limit;
    uint64_t own = 0; /* what our own stages hold is ours to use again */
    struct control_local l;
    for (uint32_t i = 0; a->node && i < control_n_local(node_control(a->node)); i++) {
        control_local_at(node_control(a->node), i, &l);
        own += l.plan->stages[l.stage].memory_bytes;
    }
    uint64_t reserve = MAX_OF(m->total_bytes / RESERVE_SHARE, RESERVE_MIN_BYTES);
    uint64_t have = MIN_OF(m->available_bytes + own, m->total_bytes);
    return have > reserve ? (have - reserve) / BUDGET_STEP * BUDGET_STEP : 0;
}

void agent_refresh_local(struct agent *a)
{
    struct sysinfo_memory m;
    sysinfo_read_memory(&m);
    a->local.memory_total_bytes = m.total_bytes;
    a->local.memory_available_bytes = m.available_bytes / BUDGET_STEP * BUDGET_STEP;
    a->local.memory_limit_bytes = a->config.memory_limit;
    a->local.budget_bytes = budget(a, &m);
    a->local.on_mains = sysinfo_on_mains();
    a->local.wired = sysinfo_wired();
    a->local.room_bytes = agent_spare_room(a);
    a->local_due_us = clock_monotonic_us() + AGENT_LOCAL_US;
    if (a->node)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_LOCAL,
                                                 .local = &a->local,
                                                 .wall_ms = clock_wall_ms()});
}

static void shape_of(const struct served_model *s, struct model_shape *ret)
{
    const struct model_info *i = model_info(s->model);
    struct stage_options one = {.first_layer = 0, .n_layers = 1, .context = 64};
    *ret = (struct model_shape){.model = s->id,
                                .n_layers = i->n_layers,
                                .context_max = i->context_max,
                                .hidden = i->n_embd,
                                .embedding_bytes = i->embedding_bytes,
                                .output_bytes = i->output_bytes,
                                .output_is_embedding = i->output_is_embedding,
                                .kv_bytes_per_position = i->kv_bytes_per_position,
                                .layer_macs = i->layer_macs,
                                .output_macs = i->output_macs};
    memcpy(ret->layer_bytes, i->layer_bytes, sizeof ret->layer_bytes);
    (void)snprintf(ret->name, sizeof ret->name, "%s", s->name);
    uint64_t memory = stage_memory_bytes(s->model, &one);
    uint64_t kv = i->kv_bytes_per_position * 64;
    ret->activation_bytes_per_row =
        memory > kv ? (memory - kv + STAGE_ROWS_MAX - 1) / STAGE_ROWS_MAX : 0;
}

static void tell_model(struct agent *a, const struct store_entry *e)
{
    struct served_model *s = NULL;
    struct err_text text = {""};
    char path[STORE_PATH_MAX];
    struct node_model m = {.n_bytes = e->n_bytes, .present_bytes = e->present_bytes};
    m.n_runs = store_runs(a->store, &e->id, m.runs, SPARE_RUNS_MAX);
    if (!e->header_present || store_path(a->store, &e->id, path) != ERR_OK)
        return;
    enum err r = models_open(a->models, &e->id, e->name, path, &s, &text);
    if (r == ERR_OK && strcmp(s->name, e->name) != 0) { /* pulled again under another name */
        models_put(s);
        models_drop(a->models, &e->id);
        r = models_open(a->models, &e->id, e->name, path, &s, &text);
    }
    if (r != ERR_OK) {
        log_warning(&a->log, "%s", text.text);
        return;
    }
    shape_of(s, &m.shape);
    models_put(s);
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_MODEL, .model = &m});
}

void agent_tell_models(struct agent *a, const struct hash256 *only)
{
    struct store_entry *list = calloc(STORE_MODELS_MAX, sizeof *list);
    if (!list)
        return;
    uint32_t n = store_list(a->store, list, STORE_MODELS_MAX);
    for (uint32_t i = 0; i < n; i++) {
        if (!only || hash256_eq(&list[i].id, only))
            tell_model(a, &list[i]);
    }
    free(list);
}

/* ---- calls from HTTP threads ---- */

static void drop_call(void *owned)
{
    struct call *c = owned;
    call_fail(c, ERR_CLOSED, "this node is stopping");
    call_unref(c);
}

void agent_post_call(struct agent *a, struct call *take_call)
{
    (void)pthread_mutex_lock(&a->from_http_mutex);
    enum err e = mailbox_send_owned(a->from_http, LOOP_CALL, NULL, 0, take_call, drop_call);
    (void)pthread_mutex_unlock(&a->from_http_mutex);
    if (e != ERR_OK) {
        call_fail(take_call, e, "this node is too busy: try again soon");
        call_unref(take_call);
    }
}

void agent_post_dropped(struct agent *a, const struct request_id *request)
{
    (void)pthread_mutex_lock(&a->from_http_mutex);
    (void)mailbox_send(a->from_http, LOOP_CALL_DROPPED, request, sizeof *request);
    (void)pthread_mutex_unlock(&a->from_http_mutex);
}

/* ---- timers ---- */

/* The data plane hears first: what the control core commits from now on is confirmed. */
void agent_slept(struct agent *a, uint64_t slept_us)
{
    if (slept_us <= a->slept_us + CLOCK_SLEEP_US / 2)
        return; /* known: the inference thread saw the same sleep */
    a->slept_us = slept_us;
    agent_event_out(a, "slept", "this machine was asleep");
    (void)inference_slept(a->inference, slept_us);
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_SLEPT});
}

static void check_sleep(struct agent *a)
{
    uint64_t slept_us = clock_slept_us();
    if (slept_us > a->slept_us + CLOCK_SLEEP_US)
        agent_slept(a, slept_us);
}

static void remembered_path(const struct agent *a, char ret[CONFIG_PATH_MAX + 16])
{
    (void)snprintf(ret, CONFIG_PATH_MAX + 16, "%s/addresses", a->config.folders.data);
}

static void save_remembered(struct agent *a)
{
    struct node_id ids[REMEMBERED_MAX];
    struct address list[REMEMBERED_MAX];
    uint32_t n = node_remembered(a->node, ids, list, REMEMBERED_MAX);
    char path[CONFIG_PATH_MAX + 16];
    uint8_t bytes[REMEMBERED_MAX * (32 + 1 + 16 + 2 + 4)];
    struct writer w = writer_of(bytes, sizeof bytes);
    for (uint32_t i = 0; i < n; i++) {
        write_bytes(&w, ids[i].bytes, sizeof ids[i].bytes);
        write_u8(&w, list[i].family);
        write_bytes(&w, list[i].ip, sizeof list[i].ip);
        write_u16(&w, list[i].port);
        write_u32(&w, list[i].scope);
    }
    remembered_path(a, path);
    a->remember_due_us = 0;
    if (file_write_atomic(path, bytes, w.len, 0600) != ERR_OK)
        log_warning(&a->log, "%s cannot be written", path);
}

static uint32_t read_remembered(const struct agent *a, struct node_id *ids, struct address *list)
{
    char path[CONFIG_PATH_MAX + 16];
    struct buf b = BUF_INIT((size_t)REMEMBERED_MAX * (32 + 1 + 16 + 2 + 4));
    uint32_t n = 0;
    remembered_path(a, path);
    if (file_read(path, &b) == ERR_OK) {
        struct reader r = reader_of(b.data, b.len);
        while (r.left > 0 && n < REMEMBERED_MAX) {
            read_bytes(&r, ids[n].bytes, sizeof ids[n].bytes);
            list[n] = (struct address){.family = read_u8(&r)};
            read_bytes(&r, list[n].ip, sizeof list[n].ip);
            list[n].port = read_u16(&r);
            list[n].scope = read_u32(&r);
            if (r.bad)
                break;
            n++;
        }
    }
    buf_deinit(&b);
    return n;
}

/* Answers that clients of this node wait for, and those among them that other nodes compute. */
static void count_requests(struct agent *a, uint32_t *ret_n, uint32_t *ret_elsewhere)
{
    struct inference_view *v = malloc(sizeof *v);
    struct node_id self = node_self(a->node);
    *ret_n = *ret_elsewhere = 0;
    if (!v)
        return;
    inference_look(a->inference, v);
    *ret_n = v->n_requests;
    for (uint32_t i = 0; i < v->n_requests; i++) {
        const struct plan *p = control_active(node_control(a->node), &v->requests[i].model);
        *ret_elsewhere += p && plan_stage_of(p, &self) < 0;
    }
    free(v);
}

/* A polite stop lets answers end: for long where plans have moved to other nodes, for a moment
 * where this node would have to stay for them. */
static bool stop_is_due(struct agent *a, uint64_t now_us)
{
    uint32_t n = 0, n_elsewhere = 0;
    if (!a->stopping || now_us >= a->stop_until_us)
        return a->stopping;
    if (!a->stopped)
        return false;
    count_requests(a, &n, &n_elsewhere);
    return n == 0 || (n_elsewhere == 0 && now_us >= a->drain_until_us);
}

/* A model is used as long as a request runs on it, not only when one ends. */
static void note_use(struct agent *a)
{
    struct inference_view *v = malloc(sizeof *v);
    if (v)
        inference_look(a->inference, v);
    for (uint32_t i = 0; v && i < v->n_requests; i++)
        (void)agent_step(
            a, &(struct node_event){.type = NODE_EVENT_USED, .model_id = v->requests[i].model});
    free(v);
}

static void on_timer(uv_timer_t *timer)
{
    struct agent *a = timer->data;
    uint64_t now_us = clock_monotonic_us();
    check_sleep(a);
    if (now_us >= a->local_due_us) {
        agent_refresh_local(a);
        agent_check_files(a);
        note_use(a);
    }
    if (now_us >= a->peers_due_us) {
        a->peers_due_us = now_us + AGENT_PEERS_US;
        discovery_shell_refresh(a->discovery);
    }
    if (a->remember_due_us && now_us >= a->remember_due_us)
        save_remembered(a);
    if (now_us >= a->sweep_due_us) {
        a->sweep_due_us = now_us + AGENT_SWEEP_US;
        http_server_sweep(a->http);
        http_server_sweep(a->local_http);
    }
    agent_disk_tick(a, now_us);
    agent_calls_tick(a, now_us);
    if (now_us >= a->spare_due_us)
        agent_spare_tick(a, now_us);
    if (node_next_due(a->node) <= now_us)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_TICK});
    if (stop_is_due(a, now_us)) {
        uv_stop(&a->loop);
        return;
    }
    agent_schedule(a);
}

void agent_schedule(struct agent *a)
{
    if (!a->node || !uv_is_active((uv_handle_t *)&a->mail_poll))
        return;
    uint64_t now_us = clock_monotonic_us(), due_us = node_next_due(a->node);
    uint64_t wait_us = due_us <= now_us ? 0 : MIN_OF(due_us - now_us, (uint64_t)TICK_MAX_US);
    if (a->stopping && a->stopped)
        wait_us = MIN_OF(wait_us, (uint64_t)STOP_POLL_US);
    uv_update_time(&a->loop);
    /* At least 1 ms: libuv runs timers that are due at once again and again before anything else.
     */
    (void)uv_timer_start(&a->timer, on_timer, MAX_OF((wait_us + 999) / 1000, (uint64_t)1), 0);
}

static void on_mail(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    agent_read_mail(poll->data);
}

void agent_begin_stop(struct agent *a)
{
    if (a->stopping) { /* asked twice: at once */
        uv_stop(&a->loop);
        return;
    }
    a->stopping = true;
    a->stop_until_us = clock_monotonic_us() + AGENT_STOP_US;
    a->drain_until_us = clock_monotonic_us() + AGENT_DRAIN_US;
    agent_event_out(a, "stopping", "saying goodbye; plans move to other nodes first");
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_STOP});
    agent_schedule(a);
}

static void on_signal(uv_signal_t *signal, int number)
{
    (void)number;
    agent_begin_stop(signal->data);
}

/* ---- start ---- */

static enum err lock_folder(const struct config *c, int *ret_fd, struct err_text *text)
{
    char path[CONFIG_PATH_MAX + 16];
    if (file_make_folder(c->folders.data) != ERR_OK)
        return err_set(text, ERR_IO, "%s cannot be made: %s", c->folders.data, strerror(errno));
    (void)snprintf(path, sizeof path, "%s/lock", c->folders.data);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return err_set(text, ERR_IO, "%s cannot be opened: %s", path, strerror(errno));
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        (void)close(fd);
        return err_set(text, ERR_EXISTS,
                       "an agent runs already with this data folder (%s): use another COVEY_HOME "
                       "for a second one",
                       c->folders.data);
    }
    *ret_fd = fd;
    return ERR_OK;
}

static enum err read_state(struct agent *a, const char *name, struct buf *b, struct err_text *text)
{
    char path[CONFIG_PATH_MAX + 16];
    (void)snprintf(path, sizeof path, "%s/%s", a->config.folders.data, name);
    enum err e = secret_file_read(path, b);
    if (e == ERR_NOT_FOUND || e == ERR_OK)
        return ERR_OK;
    return err_set(text, e, "%s cannot be read (%s): it must belong to you alone (chmod 600)", path,
                   err_name(e));
}

static enum err open_identity(struct agent *a, struct err_text *text)
{
    struct hash256 machine = {{0}};
    char path[CONFIG_PATH_MAX + 16];
    enum identity_origin origin;
    (void)machine_id_digest(&machine);
    (void)snprintf(path, sizeof path, "%s/identity", a->config.folders.data);
    TRY(identity_file_open(path, &machine, random_source_system(), &a->identity, &origin, text));
    if (origin == IDENTITY_CLONED)
        log_warning(&a->log,
                    "this data folder comes from another machine: a new identity was made");
    randombytes_buf(&a->boot_id, sizeof a->boot_id);
    a->boot_id |= 1; /* never 0 */
    return ERR_OK;
}

static enum err open_engine(struct agent *a, struct err_text *text)
{
    uint32_t n_threads = a->config.n_threads ? a->config.n_threads : sysinfo_usable_cores();
    char models[CONFIG_PATH_MAX + 16];
    struct kernels *kernels = NULL;
    TRY(pool_new(n_threads, &a->pool));
    enum err e = kernels_new(a->pool, KERNELS_BEST, &kernels);
    if (e != ERR_OK)
        return err_set(text, e, "no kernels for this CPU (%s)", err_name(e));
    a->local.kernel_digest = kernels_digest(kernels);
    kernels_free(kernels);
    a->local.cores = sysinfo_usable_cores();
    a->local.threads = n_threads;
    a->local.backend = BACKEND_NATIVE;
    a->local.arithmetic_version = stage_arithmetic_version();
    (void)snprintf(models, sizeof models, "%s/models", a->config.folders.data);
    struct err_text warning = {""};
    e = store_open(models, &a->store, &warning);
    if (e != ERR_OK) {
        *text = warning;
        return e;
    }
    if (warning.text[0])
        log_warning(&a->log, "%s", warning.text);
    return models_new(&a->models);
}

static enum err open_threads(struct agent *a, struct err_text *text)
{
    TRY(mailbox_new("loop", &a->mailbox));
    TRY(mailbox_sender_new(a->mailbox, &a->from_http));
    TRY(peer_fds_new(&a->fds));
    struct inference_options i = {
        .self = a->identity.id, .pool = a->pool, .loop = a->mailbox, .fds = a->fds, .log = &a->log};
    TRY(inference_new(&i, &a->inference, text));
    struct loader_options l = {.store = a->store,
                               .models = a->models,
                               .pool = a->pool,
                               .loop = a->mailbox,
                               .fds = a->fds,
                               .log = &a->log};
    TRY(loader_new(&l, &a->loader, text));
    struct worker_options w = {.store = a->store,
                               .loop = a->mailbox,
                               .fds = a->fds,
                               .config = &a->config,
                               .log = &a->log,
                               .n_threads = a->local.threads,
                               .kernel_digest = a->local.kernel_digest};
    return worker_new(&w, &a->worker, text);
}

static enum err open_ports(struct agent *a, struct err_text *text)
{
    struct control_net_options c = {.port = a->config.control_port,
                                    .static_public = a->identity.static_public,
                                    .static_secret = a->identity.static_secret,
                                    .random = random_source_system(),
                                    .context = a,
                                    .psks = agent_psks,
                                    .on_event = agent_session_event};
    TRY(control_net_new(&a->loop, &c, &a->control, text));
    TRY(hello_gate_new(&a->gate));
    a->hello =
        (struct hello_facts){.protocol_min = HELLO_VERSION,
                             .protocol_max = HELLO_VERSION,
                             .features = crypto_aead_aes256gcm_is_available() ? HELLO_AES : 0,
                             .arithmetic_version = a->local.arithmetic_version,
                             .kernel_digest = a->local.kernel_digest,
                             .frame_bytes_max = FRAME_BYTES_MAX,
                             .types = (UINT64_C(1) << FRAME_TYPE_N) - 2};
    struct data_port_options d = {.port = a->config.data_port,
                                  .gate = a->gate,
                                  .own = a->hello,
                                  .context = a,
                                  .on_connection = agent_on_data_connection};
    return data_port_new(&a->loop, &d, &a->data_port, text);
}

static enum err open_node(struct agent *a, struct err_text *text)
{
    struct buf trust = BUF_INIT(TRUST_STORED_MAX), control = BUF_INIT(CONTROL_PERSIST_MAX);
    struct node_id ids[REMEMBERED_MAX];
    struct address addresses[REMEMBERED_MAX];
    struct node_options o = {.identity = &a->identity,
                             .boot_id = a->boot_id,
                             .random = random_source_system(),
                             .control_port = control_net_port(a->control),
                             .data_port = data_port_port(a->data_port),
                             .arithmetic_version = a->local.arithmetic_version,
                             .kernel_digest = a->local.kernel_digest,
                             .wall_ms = clock_wall_ms(),
                             .remembered = addresses,
                             .remembered_ids = ids,
                             .n_remembered = read_remembered(a, ids, addresses)};
    (void)snprintf(o.name, sizeof o.name, "%s", a->config.name);
    (void)snprintf(o.version, sizeof o.version, "%s", COVEY_VERSION);
    enum err e = read_state(a, "trust", &trust, text);
    if (e == ERR_OK)
        e = read_state(a, "control", &control, text);
    if (e == ERR_OK) {
        o.trust_bytes = trust.len ? trust.data : NULL;
        o.n_trust_bytes = trust.len;
        o.control_bytes = control.len ? control.data : NULL;
        o.n_control_bytes = control.len;
        e = node_new(&o, clock_monotonic_us(), &a->node, text);
    }
    if (trust.data)
        sodium_memzero(trust.data, trust.len);
    buf_deinit(&trust);
    buf_deinit(&control);
    return e;
}

static enum err open_http(struct agent *a, struct err_text *text)
{
    struct http_options public = {.agent = a,
                                  .host = a->config.http_host,
                                  .port = a->config.http_port,
                                  .api_key = a->config.api_key,
                                  .log = &a->log};
    TRY(http_server_new(&public, &a->http, text));
    struct http_options local = {
        .agent = a, .unix_path = a->config.folders.socket, .api_key = "", .log = &a->log};
    TRY(http_server_new(&local, &a->local_http, text));
    bool v6 = strchr(a->config.http_host, ':') != NULL;
    (void)snprintf(a->http_url, sizeof a->http_url, v6 ? "http://[%s]:%u" : "http://%s:%u",
                   a->config.http_host, http_server_port(a->http));
    return ERR_OK;
}

/* The model named on the command line is added when it is a file, and wanted either way. */
static void want_first_model(struct agent *a)
{
    if (!a->config.model[0])
        return;
    bool is_file = strchr(a->config.model, '/') != NULL || access(a->config.model, R_OK) == 0;
    if (!is_file) {
        json_t *args =
            json_pack("{s:s, s:i}", "model", a->config.model, "context", (int)a->config.context);
        if (a->config.keep_alive_s)
            (void)json_object_set_new(args, "keep_alive_s", json_integer(a->config.keep_alive_s));
        struct call *load = call_new(CALL_LOAD, args, NULL, NULL);
        if (load)
            agent_on_call(a, load);
        return;
    }
    struct hash256 id;
    struct err_text text = {""};
    char name[MANIFEST_NAME_MAX];
    const char *slash = strrchr(a->config.model, '/');
    (void)snprintf(name, sizeof name, "%.95s", slash ? slash + 1 : a->config.model);
    size_t n = strlen(name);
    if (n > 5 && strcmp(name + n - 5, ".gguf") == 0)
        name[n - 5] = 0;
    log_info(&a->log, "reading %s", a->config.model);
    if (store_add_file(a->store, a->config.model, name, NULL, NULL, &id, &text) != ERR_OK) {
        log_error(&a->log, "%s", text.text);
        return;
    }
    agent_tell_models(a, &id);
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_WANT,
                                             .model_id = id,
                                             .context = a->config.context,
                                             .precision = a->config.precision,
                                             .keep_alive_s = a->config.keep_alive_s});
}

static void raise_fd_limit(void)
{
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) == 0 && r.rlim_cur < MIN_OF(r.rlim_max, (rlim_t)8192)) {
        r.rlim_cur = MIN_OF(r.rlim_max, (rlim_t)8192);
        (void)setrlimit(RLIMIT_NOFILE, &r);
    }
}

static enum err start(struct agent *a, struct err_text *text)
{
    TRY(open_identity(a, text));
    TRY(open_engine(a, text));
    TRY(open_threads(a, text));
    TRY(open_ports(a, text));
    TRY(open_node(a, text));
    TRY(discovery_shell_new(a, &a->discovery, text));
    (void)uv_timer_init(&a->loop, &a->timer);
    (void)uv_poll_init(&a->loop, &a->mail_poll, mailbox_fd(a->mailbox));
    (void)uv_signal_init(&a->loop, &a->on_int);
    (void)uv_signal_init(&a->loop, &a->on_term);
    a->timer.data = a->mail_poll.data = a->on_int.data = a->on_term.data = a;
    (void)uv_poll_start(&a->mail_poll, UV_READABLE, on_mail);
    (void)uv_signal_start(&a->on_int, on_signal, SIGINT);
    (void)uv_signal_start(&a->on_term, on_signal, SIGTERM);
    TRY(inference_start(a->inference));
    TRY(loader_start(a->loader));
    TRY(worker_start(a->worker));
    TRY(open_http(a, text));
    agent_refresh_local(a);
    agent_tell_models(a, NULL);
    (void)worker_calibrate(a->worker);
    want_first_model(a);
    return ERR_OK;
}

/* ---- stop ---- */

static void close_handle(uv_handle_t *handle, void *context)
{
    (void)context;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void stop(struct agent *a)
{
    agent_calls_end(a);
    if (a->inference)
        inference_stop(
            a->inference); /* every request ends with a sentence, which the servers still send */
    http_server_free(a->http);
    http_server_free(a->local_http);
    if (a->loader)
        loader_stop(a->loader);
    if (a->worker)
        worker_stop(a->worker);
    for (int i = 0; i < AGENT_DATA_DIALS_MAX; i++)
        data_dial_cancel(a->dials[i].dial);
    discovery_shell_free(a->discovery);
    if (a->node && !a->failed)
        save_remembered(a);
    data_port_close(a->data_port);
    control_net_free(a->control);
    uv_walk(&a->loop, close_handle, NULL);
    (void)uv_run(&a->loop, UV_RUN_DEFAULT);
    (void)uv_loop_close(&a->loop);
    hello_gate_free(a->gate);
    node_free(a->node);
    inference_free(a->inference);
    loader_free(a->loader);
    worker_free(a->worker);
    peer_fds_free(a->fds);
    mailbox_sender_free(a->from_http);
    mailbox_free(a->mailbox);
    models_free(a->models);
    store_close(a->store);
    pool_free(a->pool);
    for (int i = 0; i < AGENT_EPOCHS_MAX; i++)
        free(a->epochs[i].plan);
    identity_wipe(&a->identity);
}

enum err serve(const struct config *config, struct err_text *text)
{
    _cleanup_(closep) int lock = -1;
    if (sodium_init() < 0)
        return err_set(text, ERR_IO, "the cryptography library cannot start");
    TRY(lock_folder(config, &lock, text));
    raise_fd_limit();
    sysinfo_bound_allocator();
    (void)signal(SIGPIPE, SIG_IGN);
    TRY(mapping_guard_install());
    struct agent *a = calloc(1, sizeof *a);
    if (!a)
        return ERR_NO_MEMORY;
    a->config = *config;
    a->log = (struct log){.fd = STDERR_FILENO, .level = config->log_level};
    a->started_us = clock_monotonic_us();
    a->slept_us = clock_slept_us();
    (void)pthread_mutex_init(&a->from_http_mutex, NULL);
    (void)uv_loop_init(&a->loop);
    enum err e = start(a, text);
    if (e == ERR_OK) {
        (void)printf("covey %s: http %s, control port %u, data port %u\n", COVEY_VERSION,
                     a->http_url, control_net_port(a->control), data_port_port(a->data_port));
        (void)fflush(stdout);
        (void)uv_run(&a->loop, UV_RUN_DEFAULT);
        if (a->failed)
            e = err_set(text, ERR_IO, "the agent had to stop: see the lines above");
    } else if (text && !text->text[0]) {
        (void)err_set(text, e, "the agent could not start (%s)", err_name(e));
    }
    stop(a);
    (void)pthread_mutex_destroy(&a->from_http_mutex);
    free(a);
    return e;
}
