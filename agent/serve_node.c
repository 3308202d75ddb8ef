/* Carrying out what the node core wants, in the order that it asks for. */
#include "agent/agent.h"

#include "agent/discovery_shell.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/util.h"
#include "proto/identity_file.h"

#include <assert.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- events for people ---- */

void agent_event_out(struct agent *a, const char *kind, const char *text)
{
    log_info(&a->log, "%s: %s", kind, text);
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        struct call *c = a->listeners[i];
        if (!c)
            continue;
        struct call_item item = {.kind = CALL_ITEM_JSON,
                                 .json = json_pack("{s:I, s:s, s:s}", "time_ms",
                                                   (json_int_t)clock_wall_ms(), "event", kind,
                                                   "text", text)};
        if (call_push(c, &item) != ERR_OK) {
            json_decref(item.json);
            call_reply(c, ERR_BUSY, NULL);
            call_unref(c);
            a->listeners[i] = NULL;
        }
    }
}

/* ---- epochs ---- */

struct agent_epoch *agent_epoch_find(struct agent *a, const struct epoch *epoch)
{
    for (int i = 0; i < AGENT_EPOCHS_MAX; i++) {
        if (a->epochs[i].plan && epoch_eq(&a->epochs[i].epoch, epoch))
            return &a->epochs[i];
    }
    return NULL;
}

void agent_epoch_forget(struct agent_epoch *e)
{
    free(e->plan);
    *e = (struct agent_epoch){.plan = NULL};
}

static void refuse_plan(struct agent *a, const struct epoch *epoch, enum err e, const char *text)
{
    (void)agent_step(
        a, &(struct node_event){
               .type = NODE_EVENT_PREPARE_FAILED, .epoch = *epoch, .error = e, .text = text});
}

/* Members that hold bytes of the model. A plan can arrive before the gossip of who holds what: then
 * every live member is asked. */
static uint32_t holders_of(struct agent *a, const struct hash256 *model,
                           struct node_id ret[LOADER_HOLDERS_MAX])
{
    enum { VIEWS = 64 };
    uint32_t n = node_holders(a->node, model, ret, LOADER_HOLDERS_MAX);
    struct node_view *views = n == 0 ? calloc(VIEWS, sizeof *views) : NULL;
    uint32_t n_views = views ? node_views(a->node, views, VIEWS) : 0;
    for (uint32_t i = 0; i < n_views && n < LOADER_HOLDERS_MAX; i++) {
        if (views[i].member && !views[i].self && node_session_of(a->node, &views[i].id))
            ret[n++] = views[i].id;
    }
    free(views);
    return n;
}

static void do_prepare(struct agent *a, struct node_effect *x)
{
    struct agent_epoch *e = agent_epoch_find(a, &x->epoch);
    for (int i = 0; !e && i < AGENT_EPOCHS_MAX; i++) {
        if (!a->epochs[i].plan)
            e = &a->epochs[i];
    }
    if (!e || e->plan || !x->plan)
        return; /* known already, or the table is full: the planner's patience ends it */
    struct node_id holders[LOADER_HOLDERS_MAX];
    uint32_t n = holders_of(a, &x->plan->model, holders);
    enum err r = loader_prepare(a->loader, x->plan, x->stage, holders, n);
    if (r != ERR_OK) {
        refuse_plan(a, &x->epoch, r, "the loader is busy");
        return;
    }
    *e = (struct agent_epoch){.epoch = x->epoch, .plan = TAKE(x->plan), .state = AGENT_LOADING};
}

void agent_stage_broken(struct agent *a, const struct epoch *epoch)
{
    struct agent_epoch *e = agent_epoch_find(a, epoch);
    if (!e || e->state != AGENT_INSTALLED || e->broken)
        return;
    e->broken = true;
    const struct plan *p = e->plan;
    struct hash256 model = p->model;
    struct err_text text = {""};
    char path[STORE_PATH_MAX] = "?", sentence[ERR_TEXT_MAX];
    (void)store_path(a->store, &model, path);
    bool changed = store_check_source(a->store, &model, &text) != ERR_OK;
    (void)snprintf(sentence, sizeof sentence,
                   changed ? "%.60s: %.150s has changed or gone while it was in use: restore it or "
                             "`covey pull` it again, then `covey load`"
                           : "%.60s: %.150s could not be read: look at the disk, then `covey load`",
                   p->model_name, path);
    models_drop(a->models, &model); /* its mapping may have holes */
    refuse_plan(a, epoch, changed ? ERR_STALE : ERR_IO, sentence);
}

void agent_check_files(struct agent *a)
{
    for (int i = 0; i < AGENT_EPOCHS_MAX; i++) {
        struct agent_epoch *e = &a->epochs[i];
        struct err_text text = {""};
        if (!e->plan || e->state != AGENT_INSTALLED || e->broken ||
            store_check_source(a->store, &e->plan->model, &text) == ERR_OK)
            continue;
        struct epoch epoch = e->epoch;
        agent_stage_broken(a, &epoch);
    }
}

static void do_retire(struct agent *a, const struct epoch *epoch)
{
    struct agent_epoch *e = agent_epoch_find(a, epoch);
    if (!e)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_RETIRED, .epoch = *epoch});
    else if (e->state == AGENT_INSTALLED)
        (void)inference_retire(a->inference, epoch);
    else
        e->state = AGENT_ABORTED; /* said when the loader comes back */
}

static void do_route(struct agent *a, const struct plan *p)
{
    (void)inference_route(a->inference, p);
    agent_no_fit(a, &p->model, NULL, 0);
    struct served_model *open = models_get(a->models, &p->model);
    if (!open) {
        struct node_id holders[LOADER_HOLDERS_MAX];
        uint32_t n = node_holders(a->node, &p->model, holders, LOADER_HOLDERS_MAX);
        (void)loader_open(a->loader, &p->model, holders, n);
    }
    models_put(open);
    char text[128];
    (void)snprintf(text, sizeof text, "%s runs on %u node%s", p->model_name, p->n_stages,
                   p->n_stages == 1 ? "" : "s");
    agent_event_out(a, "active", text);
    agent_model_runs(a, &p->model);
}

/* ---- the data port ---- */

static enum err key_of(struct agent *a, const struct node_id *peer, uint64_t session,
                       struct hello_key *ret)
{
    *ret = (struct hello_key){.peer = *peer, .own_boot_id = a->boot_id};
    struct trust_peer who;
    if (!trust_session_peer(node_trust(a->node), session, &who))
        return ERR_NOT_FOUND;
    ret->peer_boot_id = who.self.boot_id;
    return control_net_export(a->control, session, "data", ret->secret);
}

static void do_peer(struct agent *a, const struct node_effect *x)
{
    struct hello_key key;
    control_net_authenticated(a->control, x->session);
    for (int i = 0; key_of(a, &x->peer, x->session, &key) == ERR_OK && i < HELLO_KEYS_MAX; i++) {
        struct agent_key *k = &a->keys[i];
        if (k->session)
            continue;
        k->session = x->session;
        memcpy(k->secret, key.secret, sizeof k->secret);
        (void)hello_gate_add(a->gate, &key);
        break;
    }
    sodium_memzero(&key, sizeof key);
}

/* A session that ended opens no data connection any more. */
static void forget_key(struct agent *a, uint64_t session)
{
    for (int i = 0; i < HELLO_KEYS_MAX; i++) {
        if (a->keys[i].session != session)
            continue;
        hello_gate_remove(a->gate, a->keys[i].secret);
        sodium_memzero(&a->keys[i], sizeof a->keys[i]);
    }
}

/* Two that do not compute the same bits must not share a computation (DESIGN section 6). */
static bool computes_alike(struct agent *a, const struct hello_result *r)
{
    if (r->theirs.arithmetic_version == a->hello.arithmetic_version &&
        r->theirs.kernel_digest == a->hello.kernel_digest)
        return true;
    agent_event_out(
        a, "unlike",
        "a member computes with other kernels than this node: no work is shared with it");
    return false;
}

/* It may have been revoked while the connection was made. */
static bool is_member(const struct agent *a, const struct node_id *peer)
{
    return trust_is_member(node_trust(a->node), peer);
}

static void take_link(struct agent *a, int fd, const struct hello_result *result)
{
    if (computes_alike(a, result))
        (void)inference_link(a->inference, fd, result);
    else
        (void)close(fd);
}

void agent_on_data_connection(void *context, int fd, const struct hello_result *result)
{
    struct agent *a = context;
    if (!is_member(a, &result->peer)) {
        (void)close(fd);
        return;
    }
    switch (result->kind) {
    case HELLO_DATA:
        take_link(a, fd, result);
        break;
    case HELLO_BULK:
        worker_serve_bulk(a->worker, fd, result);
        break;
    case HELLO_BANDWIDTH:
        worker_answer_bandwidth(a->worker, fd, result);
        break;
    default:
        (void)close(fd);
    }
}

static void on_data_dialled(void *context, enum err e, int fd, const struct hello_result *result)
{
    struct agent_dial *d = context;
    struct agent *a = d->agent;
    struct agent_dial was = *d;
    *d = (struct agent_dial){.agent = NULL};
    if (e == ERR_OK && !is_member(a, &was.peer)) {
        (void)close(fd);
        e = ERR_DENIED;
    }
    if (e != ERR_OK)
        log_debug(&a->log, "a data connection of kind %u failed (%s)", was.kind, err_name(e));
    if (was.kind == HELLO_DATA && e == ERR_OK)
        take_link(a, fd, result);
    else if (was.kind == HELLO_BULK)
        (void)loader_bulk(a->loader, &was.peer, e == ERR_OK ? fd : -1, e == ERR_OK ? result : NULL);
    else if (was.kind == HELLO_BANDWIDTH && e == ERR_OK)
        worker_measure_bandwidth(a->worker, fd, result, &was.address);
    else if (was.kind == HELLO_BANDWIDTH)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_BANDWIDTH,
                                                 .peer = was.peer,
                                                 .address = was.address});
}

static bool dialling(const struct agent *a, const struct node_id *peer, uint8_t kind)
{
    for (int i = 0; i < AGENT_DATA_DIALS_MAX; i++) {
        const struct agent_dial *d = &a->dials[i];
        if (d->dial && d->kind == kind && node_id_eq(&d->peer, peer))
            return true;
    }
    return false;
}

void agent_dial_data(struct agent *a, const struct node_id *peer, const struct address *to,
                     uint8_t kind)
{
    struct agent_dial *d = NULL;
    for (int i = 0; !d && i < AGENT_DATA_DIALS_MAX; i++) {
        if (!a->dials[i].dial)
            d = &a->dials[i];
    }
    if (kind == HELLO_DATA && dialling(a, peer, kind))
        return;
    struct data_dial_options o = {
        .to = *to, .kind = kind, .own = a->hello, .context = d, .on_done = on_data_dialled};
    uint64_t session = node_session_of(a->node, peer);
    enum err e = d ? key_of(a, peer, session, &o.key) : ERR_BUSY;
    if (e == ERR_OK) {
        *d = (struct agent_dial){.agent = a, .peer = *peer, .address = *to, .kind = kind};
        e = data_dial_new(&a->loop, &o, &d->dial);
        if (e != ERR_OK)
            *d = (struct agent_dial){.agent = NULL};
    }
    sodium_memzero(&o.key, sizeof o.key);
    if (e != ERR_OK && kind == HELLO_BULK)
        (void)loader_bulk(a->loader, peer, -1, NULL);
}

/* ---- effects ---- */

/* A transfer would disturb answers: only when idle, else the core asks again later. */
static void measure(struct agent *a, const struct node_effect *x)
{
    struct inference_view *v = malloc(sizeof *v);
    bool busy = true;
    if (v) {
        inference_look(a->inference, v);
        busy = v->progress.n_requests + v->progress.n_sequences > 0;
    }
    free(v);
    if (busy)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_BANDWIDTH,
                                                 .peer = x->peer,
                                                 .address = x->address});
    else
        agent_dial_data(a, &x->peer, &x->address, HELLO_BANDWIDTH);
}

static bool persist(struct agent *a, const struct node_effect *x)
{
    char path[CONFIG_PATH_MAX + 16];
    (void)snprintf(path, sizeof path, "%s/%s", a->config.folders.data,
                   x->type == NODE_EFFECT_PERSIST_TRUST ? "trust" : "control");
    enum err e = secret_file_write(path, x->bytes, x->n_bytes);
    if (e != ERR_OK && x->type == NODE_EFFECT_PERSIST_TRUST)
        agent_fatal(a,
                    "%s cannot be written: is the disk full? A node must not forget what it "
                    "promised, so it stops",
                    path);
    return e == ERR_OK;
}

/* A term that cannot be written must not be used (PROTOCOL 3.1): the node core takes it back, and
 * what runs goes on. */
static void disk_is_full(struct agent *a)
{
    if (!a->disk_full)
        agent_event_out(a, "disk",
                        "the data folder cannot be written: is the disk full? This node takes part "
                        "in no election and follows no new planner until there is room; what it "
                        "runs goes on");
    a->disk_full = true;
    a->disk_due_us = clock_monotonic_us() + AGENT_DISK_US;
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_DISK, .full = true});
}

bool agent_has_disk_room(struct agent *a)
{
    char path[CONFIG_PATH_MAX + 16];
    uint8_t *room = calloc(1, CONTROL_PERSIST_MAX);
    (void)snprintf(path, sizeof path, "%s/room", a->config.folders.data);
    enum err e = room ? secret_file_write(path, room, CONTROL_PERSIST_MAX) : ERR_NO_MEMORY;
    (void)unlink(path);
    free(room);
    return e == ERR_OK;
}

void agent_disk_tick(struct agent *a, uint64_t now_us)
{
    if (!a->disk_full || now_us < a->disk_due_us)
        return;
    a->disk_due_us = now_us + AGENT_DISK_US;
    if (!agent_has_disk_room(a))
        return;
    a->disk_full = false;
    agent_event_out(a, "disk", "the data folder can be written again");
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_DISK});
}

static void carry_out(struct agent *a, struct node_effect *x)
{
    switch (x->type) {
    case NODE_EFFECT_PERSIST_TRUST:
    case NODE_EFFECT_PERSIST_CONTROL:
        break; /* done before */
    case NODE_EFFECT_REMEMBER:
        if (!a->remember_due_us)
            a->remember_due_us = clock_monotonic_us() + AGENT_REMEMBER_US;
        break;
    case NODE_EFFECT_DIAL:
        control_net_dial(a->control, x->session, &x->address, x->psk, x->psk_tag);
        break;
    case NODE_EFFECT_CLOSE:
        break; /* done after the messages */
    case NODE_EFFECT_PEER:
        do_peer(a, x);
        break;
    case NODE_EFFECT_ANNOUNCE:
        discovery_shell_announce(a->discovery);
        break;
    case NODE_EFFECT_MEASURE:
        measure(a, x);
        break;
    case NODE_EFFECT_UNLINK:
        peer_fds_cut(a->fds, &x->peer);
        (void)inference_unlink(a->inference, &x->peer);
        break;
    case NODE_EFFECT_DIAL_LINK:
        agent_dial_data(a, &x->peer, &x->address, HELLO_DATA);
        break;
    case NODE_EFFECT_PREPARE:
        do_prepare(a, x);
        break;
    case NODE_EFFECT_COMMIT:
        (void)inference_commit(a->inference, &x->epoch);
        break;
    case NODE_EFFECT_ABORT:
    case NODE_EFFECT_RETIRE:
        do_retire(a, &x->epoch);
        break;
    case NODE_EFFECT_DRAIN:
        (void)inference_drain(a->inference, &x->epoch);
        break;
    case NODE_EFFECT_ROUTE:
        if (x->plan)
            do_route(a, x->plan);
        break;
    case NODE_EFFECT_NO_ROUTE:
        if (x->error == ERR_NO_FIT)
            agent_no_fit(a, &x->model, x->text[0] ? x->text : NULL,
                         x->refused ? AGENT_REFUSED_US : AGENT_NO_FIT_US);
        else
            (void)inference_no_route(a->inference, &x->model, x->error, x->text);
        break;
    case NODE_EFFECT_ANSWER:
        agent_answer(a, x->call, x->error, x->text, x->expires_in_us);
        break;
    case NODE_EFFECT_NOTE:
        agent_event_out(a, x->word, x->text);
        break;
    case NODE_EFFECT_STOPPED:
        a->stopped = true;
        break;
    }
}

static void send_messages(struct agent *a, const struct outbox *box, bool persisted)
{
    for (uint32_t i = 0; i < box->n; i++) {
        const struct wire_message *m = &box->messages[i];
        if (m->channel == CHANNEL_CONTROL && !persisted)
            continue;
        if (m->way == WAY_SESSION) {
            (void)control_net_send(a->control, m->session, m->channel, m->bytes, m->len);
            continue;
        }
        struct address to;
        if (node_path_address(a->node, &m->to, m->path, &to))
            (void)control_net_datagram(a->control, m->session, &to, m->channel, m->bytes, m->len);
    }
}

static void carry_out_update(struct agent *a, struct node_update *u)
{
    bool persisted = true;
    for (uint32_t i = 0; i < u->n_effects && !a->failed; i++) {
        if (u->effects[i].type == NODE_EFFECT_PERSIST_TRUST ||
            u->effects[i].type == NODE_EFFECT_PERSIST_CONTROL)
            persisted &= persist(a, &u->effects[i]);
    }
    if (a->failed)
        return;
    if (!persisted)
        disk_is_full(a);
    for (uint32_t i = 0; i < u->n_effects; i++)
        carry_out(a, &u->effects[i]);
    send_messages(a, &u->outbox, persisted);
    for (uint32_t i = 0; i < u->n_effects; i++) {
        if (u->effects[i].type == NODE_EFFECT_CLOSE) {
            forget_key(a, u->effects[i].session);
            control_net_close(a->control, u->effects[i].session);
        }
    }
}

/* A step may be asked for while another is carried out (a refused plan, a session that broke while
 * sending). The core is free by then, so it may simply run; only the recursion is bounded by
 * queueing what comes from below. */
enum err agent_step(struct agent *a, const struct node_event *event)
{
    if (a->failed)
        return ERR_CLOSED;
    struct node_update u = NODE_UPDATE_INIT;
    bool outer = !a->in_step;
    if (event->type == NODE_EVENT_SESSION_DOWN)
        forget_key(a, event->session);
    a->in_step = true;
    enum err e = node_step(a->node, event, clock_monotonic_us(), &u);
    carry_out_update(a, &u);
    node_update_deinit(&u);
    if (!outer)
        return e;
    a->in_step = false;
    while (a->n_downs > 0) {
        struct node_event down = a->downs[0];
        memmove(a->downs, a->downs + 1, --a->n_downs * sizeof a->downs[0]);
        (void)agent_step(a, &down);
    }
    agent_schedule(a);
    return e;
}

void agent_session_event(void *context, const struct node_event *event)
{
    struct agent *a = context;
    if (a->in_step) {
        /* Only a session that broke while we were sending: everything else comes from the loop
         * itself. */
        assert(event->type == NODE_EVENT_SESSION_DOWN);
        if (a->n_downs < AGENT_DOWNS_MAX)
            a->downs[a->n_downs++] = *event;
        return;
    }
    enum err e = agent_step(a, event);
    if (e == ERR_CORRUPT && event->type == NODE_EVENT_MESSAGE && event->channel != CHANNEL_TRUST) {
        log_warning(&a->log, "a member broke the rules of channel %u: its session is closed",
                    event->channel);
        control_net_close(a->control, event->session);
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_SESSION_DOWN,
                                                 .session = event->session,
                                                 .down = NODE_DOWN_CLOSED});
    }
}

uint32_t agent_psks(void *context, struct session_psk *ret, uint32_t max)
{
    struct agent *a = context;
    return a->node ? node_psks(a->node, ret, max) : 0;
}
