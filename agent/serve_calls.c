/* What HTTP threads ask of the loop, by kind of call. */
#include "agent/agent.h"

#include "agent/discovery_shell.h"
#include "base/clock.h"
#include "base/util.h"
#include "proto/identity_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { HELD_MAX = 256 };

static const char *word_arg(const struct call *c, const char *key)
{
    return json_string_value(json_object_get(call_args(c), key));
}

static uint64_t number_arg(const struct call *c, const char *key)
{
    json_int_t v = json_integer_value(json_object_get(call_args(c), key));
    return v > 0 ? (uint64_t)v : 0;
}

/* Keeps the reference until agent_answer. NULL: too many wait already (the call has failed). */
static struct agent_call *later(struct agent *a, struct call *c)
{
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        if (a->calls[i].number)
            continue;
        a->calls[i] = (struct agent_call){.number = ++a->next_call, .call = c};
        return &a->calls[i];
    }
    call_fail(c, ERR_BUSY, "too many calls wait for an answer: try again soon");
    call_unref(c);
    return NULL;
}

static void done(struct agent_call *w, enum err e, json_t *body, const char *text)
{
    if (e == ERR_OK)
        call_reply(w->call, ERR_OK, body);
    else
        call_fail(w->call, e, "%s", text);
    call_unref(w->call);
    *w = (struct agent_call){.number = 0};
}

static json_t *invite_body(const char *token, uint64_t expires_in_us)
{
    uint64_t at_s = (clock_wall_ms() + expires_in_us / 1000) / 1000;
    return json_pack("{s:s, s:I, s:I}", "token", token, "expires_at", (json_int_t)at_s, "ttl_s",
                     (json_int_t)((expires_in_us + 500000) / 1000000));
}

void agent_answer(struct agent *a, uint64_t number, enum err e, const char *text,
                  uint64_t expires_in_us)
{
    for (int i = 0; number && i < AGENT_CALLS_MAX; i++) {
        struct agent_call *w = &a->calls[i];
        if (w->number != number)
            continue;
        if (w->wants_model && e == ERR_OK)
            return; /* wanted; the answer comes when it runs */
        json_t *body = NULL;
        if (e == ERR_OK && call_kind(w->call) == CALL_INVITE)
            body = invite_body(text, expires_in_us);
        else if (e == ERR_OK)
            body = json_pack("{s:s}", "text", text);
        done(w, e, body, text);
        return;
    }
}

/* What a wish changes must be on disk before it counts (PROTOCOL 3.1), and an agent that cannot
 * write it down has to stop. So a disk that is full refuses the wish, and the agent goes on. False:
 * the call has failed. */
static bool disk_or_fail(struct agent *a, struct call *c)
{
    bool room = agent_has_disk_room(a);
    if (!room)
        call_fail(c, ERR_IO,
                  "%.200s cannot be written: is the disk full? Nothing was changed; make room and "
                  "ask again",
                  a->config.folders.data);
    return room;
}

/* ---- models ---- */

/* Finds a model by name, id or prefix among what members hold. */
static enum err find_model(struct agent *a, const char *word, struct node_held *ret)
{
    struct node_held *held = calloc(HELD_MAX, sizeof *held);
    if (!held)
        return ERR_NO_MEMORY;
    uint32_t n = node_held(a->node, held, HELD_MAX), n_found = 0;
    size_t n_word = strlen(word);
    for (uint32_t i = 0; i < n; i++) {
        char hex[HEX_ID_MAX];
        hex_of_32(held[i].model.bytes, hex);
        if (strcasecmp(held[i].name, word) == 0) {
            *ret = held[i];
            n_found = 1;
            break;
        }
        if (n_word >= 8 && strncasecmp(hex, word, n_word) == 0) {
            *ret = held[i];
            n_found++;
        }
    }
    free(held);
    return n_found == 0 ? ERR_NOT_FOUND : n_found > 1 ? ERR_INVALID : ERR_OK;
}

static enum err find_or_fail(struct agent *a, struct call *c, struct node_held *ret)
{
    const char *word = word_arg(c, "model");
    enum err e = word ? find_model(a, word, ret) : ERR_INVALID;
    if (e == ERR_OK)
        return ERR_OK;
    if (!word)
        call_fail(c, e, "a model is needed");
    else
        call_fail(c, e,
                  e == ERR_NOT_FOUND
                      ? "no member has a model named '%.100s': `covey pull %.100s` fetches it"
                      : "'%.100s' names more than one model%.0s",
                  word, word);
    return e;
}

static bool runs_here(struct agent *a, const struct hash256 *model)
{
    struct served_model *open = models_get(a->models, model);
    bool is_open = open != NULL;
    models_put(open);
    return is_open && control_active(node_control(a->node), model) != NULL;
}

static json_t *load_body(struct agent *a, const struct hash256 *model)
{
    char hex[HEX_ID_MAX];
    const struct plan *p = control_active(node_control(a->node), model);
    hex_of_32(model->bytes, hex);
    return json_pack("{s:s, s:s, s:i, s:o}", "id", hex, "name", p->model_name, "context",
                     (int)p->context, "plan", status_plan_object(a, p));
}

void agent_model_runs(struct agent *a, const struct hash256 *model)
{
    if (!runs_here(a, model))
        return;
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        struct agent_call *w = &a->calls[i];
        if (w->number && w->wants_model && hash256_eq(&w->model, model))
            done(w, ERR_OK, load_body(a, model), NULL);
    }
}

void agent_model_cannot(struct agent *a, const struct hash256 *model, enum err e, const char *text)
{
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        struct agent_call *w = &a->calls[i];
        if (w->number && w->wants_model && hash256_eq(&w->model, model))
            done(w, e, NULL, text);
    }
}

static const struct control_model *wanted(struct agent *a, const struct hash256 *model,
                                          struct control_model *m)
{
    uint32_t n = control_n_models(node_control(a->node));
    for (uint32_t i = 0; i < n; i++) {
        control_model_at(node_control(a->node), i, m);
        if (hash256_eq(&m->model, model))
            return m;
    }
    return NULL;
}

/* Whether a plan for this context can be had at all, now that another one runs: that one goes on
 * otherwise, and nobody would say why nothing changes. */
static enum err context_can_be(struct agent *a, const struct hash256 *model, uint32_t context,
                               struct err_text *text)
{
    enum err e = ERR_OK;
    json_decref(status_plan_json(a, model, context, false, &e, text));
    return e == ERR_AGAIN ? ERR_OK : e;
}

static void on_load(struct agent *a, struct call *c)
{
    struct node_held held;
    if (find_or_fail(a, c, &held) != ERR_OK) {
        call_unref(c);
        return;
    }
    struct control_model m;
    const struct control_model *is = wanted(a, &held.model, &m);
    uint32_t context = (uint32_t)number_arg(c, "context");
    const char *precision = word_arg(c, "precision");
    uint8_t want_precision = a->config.precision;
    struct err_text text = {""};
    enum err e = ERR_OK;
    if (precision && precision_parse(precision, &want_precision) != ERR_OK)
        e = err_set(&text, ERR_INVALID, "precision is 'fast', 'f32' or 'fast-kv8', not '%.40s'",
                    precision);
    else if (context && context < CONFIG_CONTEXT_MIN)
        e = err_set(&text, ERR_INVALID,
                    "a context of %u is too short for a prompt and an answer: at least %d", context,
                    CONFIG_CONTEXT_MIN);
    else if (context && runs_here(a, &held.model))
        e = context_can_be(a, &held.model, context, &text);
    if (e != ERR_OK) {
        call_fail(c, e, "%s", text.text);
        call_unref(c);
        return;
    }
    bool same = is && (context == 0 || context == is->context) &&
                (!precision || want_precision == is->precision);
    uint32_t keep_alive_s = is ? is->keep_alive_s : a->config.keep_alive_s;
    if (json_is_integer(json_object_get(call_args(c), "keep_alive_s")))
        keep_alive_s = (uint32_t)MIN_OF(number_arg(c, "keep_alive_s"), UINT32_MAX);
    agent_no_fit_again(a, &held.model);
    if (same) /* it is used, or will be; perhaps it is only to stay for another time */
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_WANT,
                                                 .model_id = held.model,
                                                 .context = is->context,
                                                 .precision = is->precision,
                                                 .keep_alive_s = keep_alive_s});
    if (same && runs_here(a, &held.model)) {
        call_reply(c, ERR_OK, load_body(a, &held.model));
        call_unref(c);
        return;
    }
    if (!same && !disk_or_fail(a, c)) {
        call_unref(c);
        return;
    }
    struct agent_call *w = later(a, c);
    if (!w)
        return;
    w->wants_model = true;
    w->model = held.model;
    w->until_us = clock_monotonic_us() + AGENT_LOAD_US;
    if (same)
        return; /* it is on its way */
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_WANT,
                                             .call = w->number,
                                             .model_id = held.model,
                                             .context = context ? context : a->config.context,
                                             .precision = want_precision,
                                             .keep_alive_s = keep_alive_s});
}

/* A model that is wanted, by name or id: its bytes may have gone from all members meanwhile. */
static bool find_wanted(struct agent *a, const char *word, struct hash256 *ret)
{
    struct control_model m;
    char hex[HEX_ID_MAX];
    uint32_t n = word ? control_n_models(node_control(a->node)) : 0;
    for (uint32_t i = 0; i < n; i++) {
        control_model_at(node_control(a->node), i, &m);
        hex_of_32(m.model.bytes, hex);
        if (strcasecmp(m.name, word) == 0 ||
            (strlen(word) >= 8 && strncasecmp(hex, word, strlen(word)) == 0)) {
            *ret = m.model;
            return true;
        }
    }
    return false;
}

static void on_unload(struct agent *a, struct call *c)
{
    struct node_held held;
    if (!find_wanted(a, word_arg(c, "model"), &held.model) && find_or_fail(a, c, &held) != ERR_OK) {
        call_unref(c);
        return;
    }
    struct agent_call *w = later(a, c);
    if (w)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_UNWANT,
                                                 .call = w->number,
                                                 .model_id = held.model});
}

static void on_remove(struct agent *a, struct call *c)
{
    struct store_entry entry;
    struct err_text text = {""};
    const char *word = word_arg(c, "model");
    enum err e = word ? store_find(a->store, word, &entry) : ERR_INVALID;
    if (e == ERR_OK && control_active(node_control(a->node), &entry.id))
        e = err_set(&text, ERR_BUSY, "%s is running: stop it first", entry.name);
    struct control_model m;
    if (e == ERR_OK && wanted(a, &entry.id, &m)) /* a second copy would come back by itself */
        e = err_set(&text, ERR_BUSY, "%s is wanted: stop it first", entry.name);
    if (e == ERR_OK)
        e = store_remove(a->store, &entry.id, &text);
    if (e != ERR_OK) {
        call_fail(c, e, "%s", text.text[0] ? text.text : "this node holds no such model");
    } else {
        models_drop(a->models, &entry.id);
        (void)agent_step(a,
                         &(struct node_event){.type = NODE_EVENT_MODEL_GONE, .model_id = entry.id});
        call_reply(c, ERR_OK, json_pack("{s:s}", "text", "removed"));
    }
    call_unref(c);
}

static void answer_plan(struct agent *a, struct agent_call *w)
{
    struct err_text text = {""};
    enum err e = ERR_OK;
    const json_t *args = call_args(w->call);
    uint32_t context = (uint32_t)number_arg(w->call, "context");
    json_t *body = status_plan_json(a, &w->model, context ? context : a->config.context,
                                    json_is_true(json_object_get(args, "explain")), &e, &text);
    done(w, e, body, text.text);
}

/* Where this node has never met the model, its shape comes from a member first. */
static void on_plan(struct agent *a, struct call *c)
{
    struct node_held held;
    if (find_or_fail(a, c, &held) != ERR_OK) {
        call_unref(c);
        return;
    }
    struct agent_call *w = later(a, c);
    if (!w)
        return;
    w->wants_plan = true;
    w->model = held.model;
    w->until_us = clock_monotonic_us() + AGENT_SHAPE_US;
    if (node_shape(a->node, &held.model))
        answer_plan(a, w);
    else
        node_want_shape(a->node, &held.model);
}

/* ---- members ---- */

static enum err find_node(struct agent *a, const char *word, struct node_view *ret)
{
    struct node_view *views = calloc(NODE_FOUND_MAX, sizeof *views);
    if (!views)
        return ERR_NO_MEMORY;
    uint32_t n = node_views(a->node, views, NODE_FOUND_MAX), n_found = 0;
    size_t n_word = strlen(word);
    for (uint32_t i = 0; i < n; i++) {
        char hex[HEX_ID_MAX];
        hex_of_32(views[i].id.bytes, hex);
        bool by_id = n_word >= 6 && strncasecmp(hex, word, n_word) == 0;
        if (views[i].has_id && (by_id || strcasecmp(views[i].name, word) == 0)) {
            *ret = views[i];
            n_found++;
        }
    }
    free(views);
    return n_found == 0 ? ERR_NOT_FOUND : n_found > 1 ? ERR_INVALID : ERR_OK;
}

/* False: the call has failed. */
static bool node_or_fail(struct agent *a, struct call *c, struct node_view *ret)
{
    const char *word = word_arg(c, "node");
    if (word && find_node(a, word, ret) == ERR_OK)
        return true;
    call_fail(c, ERR_NOT_FOUND, "no member, or more than one, is named so");
    return false;
}

static void on_invite(struct agent *a, struct call *c)
{
    const json_t *ttl = json_object_get(call_args(c), "ttl_s");
    if (json_is_integer(ttl) && json_integer_value(ttl) <= 0) {
        call_fail(c, ERR_INVALID, "ttl_s: a token is good for at least one second");
        call_unref(c);
        return;
    }
    struct agent_call *w = later(a, c);
    if (w)
        (void)agent_step(a, &(struct node_event){
                                .type = NODE_EVENT_INVITE,
                                .call = w->number,
                                .ttl_us = number_arg(c, "ttl_s") * 1000000,
                                .worker = json_is_true(json_object_get(call_args(c), "worker"))});
}

static void on_join(struct agent *a, struct call *c)
{
    const char *peer = word_arg(c, "peer");
    if (peer)
        discovery_shell_add_peer(a->discovery, peer);
    struct agent_call *w = later(a, c);
    if (w)
        (void)agent_step(
            a, &(struct node_event){.type = NODE_EVENT_JOIN,
                                    .call = w->number,
                                    .text = word_arg(c, "token"),
                                    .leave = json_is_true(json_object_get(call_args(c), "leave"))});
}

static void on_leave(struct agent *a, struct call *c)
{
    struct agent_call *w = later(a, c);
    if (w)
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_LEAVE, .call = w->number});
}

static void on_revoke(struct agent *a, struct call *c)
{
    struct node_view v;
    if (!node_or_fail(a, c, &v)) {
        call_unref(c);
        return;
    }
    struct agent_call *w = later(a, c);
    if (w)
        (void)agent_step(
            a, &(struct node_event){.type = NODE_EVENT_REVOKE, .call = w->number, .peer = v.id});
}

static void on_ping(struct agent *a, struct call *c)
{
    struct node_view v;
    if (!node_or_fail(a, c, &v)) {
        call_unref(c);
        return;
    }
    json_t *paths = json_array();
    double best_us = 0;
    for (uint32_t i = 0; i < v.n_paths; i++) {
        char text[ADDRESS_TEXT_MAX];
        address_text(&v.paths[i].address, text);
        if (v.paths[i].up && v.paths[i].rtt_us > 0 && (best_us <= 0 || v.paths[i].rtt_us < best_us))
            best_us = v.paths[i].rtt_us;
        (void)json_array_append_new(
            paths, json_pack("{s:s, s:b, s:f, s:f, s:f}", "address", text, "up", v.paths[i].up,
                             "rtt_us", v.paths[i].rtt_us, "rtt_p99_us", v.paths[i].rtt_p99_us,
                             "bytes_per_s", v.paths[i].bytes_per_s));
    }
    call_reply(c, ERR_OK,
               json_pack("{s:s, s:s, s:f, s:o}", "name", v.name, "state", v.state, "rtt_us",
                         best_us, "paths", paths));
    call_unref(c);
}

static void on_events(struct agent *a, struct call *c)
{
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        if (!a->listeners[i]) {
            a->listeners[i] = c;
            return;
        }
    }
    call_fail(c, ERR_BUSY, "too many listeners");
    call_unref(c);
}

static void on_chat(struct agent *a, struct call *c)
{
    enum err e = inference_submit(a->inference, c);
    if (e != ERR_OK) {
        call_fail(c, e, "this node is too busy: try again soon");
        call_unref(c);
    }
}

static void reply_now(struct call *c, json_t *body)
{
    if (body)
        call_reply(c, ERR_OK, body);
    else
        call_fail(c, ERR_NO_MEMORY, "out of memory");
    call_unref(c);
}

/* Calls that change what must be remembered. */
static void on_wish(struct agent *a, struct call *c)
{
    switch (call_kind(c)) {
    case CALL_INVITE:
        on_invite(a, c);
        break;
    case CALL_JOIN:
        on_join(a, c);
        break;
    case CALL_REVOKE:
        on_revoke(a, c);
        break;
    case CALL_LEAVE:
        on_leave(a, c);
        break;
    default:
        on_unload(a, c);
    }
}

void agent_on_call(struct agent *a, struct call *take_call)
{
    struct call *c = take_call;
    switch (call_kind(c)) {
    case CALL_STATUS:
        reply_now(c, status_json(a));
        break;
    case CALL_NODES:
        reply_now(c, status_nodes_json(a));
        break;
    case CALL_MODELS:
        reply_now(c, status_models_json(a));
        break;
    case CALL_PLAN:
        on_plan(a, c);
        break;
    case CALL_INVITE:
    case CALL_JOIN:
    case CALL_REVOKE:
    case CALL_LEAVE:
    case CALL_UNLOAD:
        if (disk_or_fail(a, c))
            on_wish(a, c);
        else
            call_unref(c);
        break;
    case CALL_ADD_FILE:
    case CALL_PULL:
        (void)worker_add(a->worker, c);
        break;
    case CALL_REMOVE:
        on_remove(a, c);
        break;
    case CALL_LOAD:
        on_load(a, c);
        break;
    case CALL_PING:
        on_ping(a, c);
        break;
    case CALL_EVENTS:
        on_events(a, c);
        break;
    case CALL_CHAT:
        on_chat(a, c);
        break;
    case CALL_STOP:
        call_reply(c, ERR_OK, json_pack("{s:s}", "text", "stopping"));
        call_unref(c);
        agent_begin_stop(a);
        break;
    case CALL_DOCTOR:
        reply_now(c, doctor_json(a));
        break;
    case CALL_KIND_N:
        call_fail(c, ERR_INVALID, "unknown call");
        call_unref(c);
        break;
    }
}

void agent_no_fit_again(struct agent *a, const struct hash256 *model)
{
    for (int i = 0; i < CONTROL_MODELS_MAX; i++) {
        if (a->no_fits[i].used && hash256_eq(&a->no_fits[i].model, model))
            a->no_fits[i].since_us = clock_monotonic_us();
    }
}

void agent_no_fit(struct agent *a, const struct hash256 *model, const char *text,
                  uint64_t patience_us)
{
    struct agent_no_fit *f = NULL;
    for (int i = 0; i < CONTROL_MODELS_MAX; i++) {
        struct agent_no_fit *k = &a->no_fits[i];
        if (k->used && hash256_eq(&k->model, model))
            f = k;
    }
    for (int i = 0; text && !f && i < CONTROL_MODELS_MAX; i++) {
        if (!a->no_fits[i].used)
            f = &a->no_fits[i];
    }
    if (f && text && !f->used)
        *f = (struct agent_no_fit){.used = true, .model = *model, .since_us = clock_monotonic_us()};
    if (f && text)
        f->patience_us = patience_us;
    if (f && text)
        (void)snprintf(f->text, sizeof f->text, "%s", text);
    else if (f)
        f->used = false;
}

static void say_no_fit(struct agent *a, uint64_t now_us)
{
    for (int i = 0; i < CONTROL_MODELS_MAX; i++) {
        struct agent_no_fit *f = &a->no_fits[i];
        if (!f->used || now_us < f->since_us + f->patience_us)
            continue;
        (void)inference_no_route(a->inference, &f->model, ERR_NO_FIT, f->text);
        agent_model_cannot(a, &f->model, ERR_NO_FIT, f->text);
    }
}

void agent_calls_tick(struct agent *a, uint64_t now_us)
{
    say_no_fit(a, now_us);
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        struct agent_call *w = &a->calls[i];
        if (w->number && w->wants_plan && node_shape(a->node, &w->model))
            answer_plan(a, w);
        else if (w->number && w->until_us && now_us >= w->until_us)
            done(w, ERR_TIMEOUT, NULL,
                 w->wants_plan ? "no member that has this model has described it in time: try again"
                               : "the model did not start in time: `covey status` and `covey "
                                 "events` say what it "
                                 "waits for");
        else if (w->number && call_is_dropped(w->call))
            done(w, ERR_CANCELLED, NULL, "the client is gone");
    }
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        if (a->listeners[i] && call_is_dropped(a->listeners[i])) {
            call_unref(a->listeners[i]);
            a->listeners[i] = NULL;
        }
    }
}

void agent_calls_end(struct agent *a)
{
    for (int i = 0; i < AGENT_CALLS_MAX; i++) {
        if (a->calls[i].number)
            done(&a->calls[i], ERR_CLOSED, NULL,
                 a->failure[0] ? a->failure : "this node is stopping");
        if (a->listeners[i]) {
            call_reply(a->listeners[i], ERR_OK, NULL);
            call_unref(a->listeners[i]);
            a->listeners[i] = NULL;
        }
    }
}
