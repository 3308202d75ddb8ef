/* The control core's step: events in, ticks, and what is shared by its parts. See control.h for its
 * duty and control_private.h for which file holds what. */
#include "planner/control_private.h"

#include "base/util.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { ROUNDS_MAX = 32 }; /* of talking to ourselves within one step */

void control_update_init(struct control_update *u)
{
    *u = (struct control_update){.persist = BUF_INIT(CONTROL_PERSIST_MAX), .outbox = OUTBOX_INIT};
}

void control_update_clear(struct control_update *u)
{
    u->persist.len = 0;
    u->n_effects = 0;
    outbox_clear(&u->outbox);
}

void control_update_deinit(struct control_update *u)
{
    if (!u)
        return;
    buf_deinit(&u->persist);
    free(u->effects);
    outbox_deinit(&u->outbox);
    control_update_init(u);
}

/* NULL when the update is full or memory is short: then c->failed says so. */
struct control_effect *control_effect(struct control *c, enum control_effect_kind kind)
{
    struct control_update *u = c->update;
    if (u->n_effects == u->cap_effects) {
        uint32_t cap = u->cap_effects ? u->cap_effects * 2 : 16;
        struct control_effect *grown =
            cap > CONTROL_EFFECTS_MAX ? NULL : realloc(u->effects, cap * sizeof *grown);
        if (!grown) {
            c->failed = ERR_NO_MEMORY;
            return NULL;
        }
        u->effects = grown;
        u->cap_effects = cap;
    }
    struct control_effect *e = &u->effects[u->n_effects++];
    memset(e, 0, sizeof *e);
    e->kind = kind;
    return e;
}

void control_effect_plan(struct control *c, enum control_effect_kind kind, const struct local *l)
{
    struct control_effect *e = control_effect(c, kind);
    if (!e)
        return;
    e->plan = l->plan;
    e->model = l->plan.model;
    e->stage = l->stage;
}

void control_note(struct control *c, const char *format, ...)
{
    struct control_effect *e = control_effect(c, CONTROL_NOTE);
    if (!e)
        return;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(e->text.text, sizeof e->text.text, format, args);
    va_end(args);
}

int control_view_index(const struct control *c, const struct node_id *id)
{
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++)
        if (node_id_eq(&c->view.topology.nodes[i].id, id))
            return (int)i;
    return -1;
}

bool control_counts(const struct control *c, const struct node_id *id)
{
    int at = control_view_index(c, id);
    return at >= 0 && c->view.topology.nodes[at].eligible;
}

bool control_is_self(const struct control *c, const struct node_id *id)
{
    return node_id_eq(id, &c->options.self);
}

bool control_reachable(const struct control *c, const struct node_id *id)
{
    int at = control_view_index(c, id);
    return control_is_self(c, id) || (at >= 0 && c->view.peers[at].reachable);
}

const struct model_shape *control_shape_find(const struct control *c, const struct hash256 *model,
                                             uint8_t precision)
{
    for (uint32_t i = 0; i < c->n_shapes; i++)
        if (c->shapes[i]->precision == precision && hash256_eq(&c->shapes[i]->shape.model, model))
            return &c->shapes[i]->shape;
    return NULL;
}

enum err control_new(const struct control_options *options, const void *persisted,
                     size_t n_persisted, struct control **ret)
{
    struct control *c = calloc(1, sizeof *c);
    if (!c)
        return ERR_NO_MEMORY;
    c->options = *options;
    rng_seed(&c->rng, options->seed);
    enum err e = persisted ? control_persist_read(c, persisted, n_persisted) : ERR_OK;
    if (e != ERR_OK) {
        control_free(c);
        return e;
    }
    *ret = c;
    return ERR_OK;
}

void control_free(struct control *c)
{
    if (!c)
        return;
    control_loop_clear(c);
    for (uint32_t i = 0; i < c->n_shapes; i++)
        free(c->shapes[i]);
    free(c);
}

/* A member that we did not reach before: it gets our map, and the planner's word. */
static void greet(struct control *c, const struct node_id *id)
{
    if (control_is_self(c, id) || !control_reachable(c, id))
        return;
    if (c->n_wanted > 0)
        control_wanted_send(c, id, true);
    if (c->role == ROLE_PLAN) {
        const struct member *m = control_member_of(c, id);
        control_send_heartbeat(c, id, !m || !m->heard, false);
    } else if (node_id_eq(id, &c->planner_id)) {
        c->report_due = true;
    }
}

static bool far(double a, double b, double share)
{
    double gap = a > b ? a - b : b - a;
    return !(gap <= share * (a > b ? a : b)); /* also true for what is no number */
}

/* Measurements always move a little; only what could change a decision counts. */
static bool topology_differs(const struct topology *a, const struct topology *b)
{
    if (a->n_nodes != b->n_nodes)
        return true;
    for (uint32_t i = 0; i < a->n_nodes; i++) {
        const struct topology_node *x = &a->nodes[i], *y = &b->nodes[i];
        if (!node_id_eq(&x->id, &y->id) || x->boot_id != y->boot_id || x->eligible != y->eligible ||
            x->arithmetic_version != y->arithmetic_version || x->backend != y->backend ||
            far((double)x->budget_bytes, (double)y->budget_bytes, 0.005) ||
            far(x->stream_bytes_per_s, y->stream_bytes_per_s, 0.05) ||
            far(x->macs_per_s, y->macs_per_s, 0.05))
            return true;
        for (uint32_t k = 0; k < a->n_nodes; k++) {
            const struct topology_edge *e = &a->edges[i][k], *f = &b->edges[i][k];
            bool latency = far(e->latency_us, f->latency_us, 0.3) &&
                           (e->latency_us > 200 || f->latency_us > 200);
            if (e->up != f->up || latency || far(e->bytes_per_s, f->bytes_per_s, 0.3))
                return true;
        }
    }
    return false;
}

static enum err view_in(struct control *c, const struct control_view *v)
{
    if (!v || v->topology.n_nodes > NODES_MAX)
        return ERR_INVALID;
    bool greeted[NODES_MAX] = {false}, reach_changed = false;
    for (uint32_t i = 0; i < v->topology.n_nodes; i++) {
        int before = control_view_index(c, &v->topology.nodes[i].id);
        greeted[i] = before >= 0 && c->view.peers[before].reachable &&
                     c->view.topology.nodes[before].boot_id == v->topology.nodes[i].boot_id;
        reach_changed |= greeted[i] != v->peers[i].reachable;
    }
    c->view = *v;
    c->has_view = true;
    if (reach_changed || topology_differs(&c->weighed, &v->topology)) {
        c->weighed = v->topology;
        control_view_changed(c);
    }
    if (reach_changed)
        control_elect_reach_changed(c);
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++)
        if (!greeted[i])
            greet(c, &c->view.topology.nodes[i].id);
    return ERR_OK;
}

static enum err model_in(struct control *c, const struct model_shape *shape, uint8_t precision)
{
    if (!shape || shape->n_layers < 1 || shape->n_layers > MODEL_LAYERS_MAX)
        return ERR_INVALID;
    uint32_t at = 0;
    while (at < c->n_shapes && (c->shapes[at]->precision != precision ||
                                !hash256_eq(&c->shapes[at]->shape.model, &shape->model)))
        at++;
    if (at == SHAPES_MAX) { /* one that is not wanted makes way */
        for (at = 0; at < c->n_shapes; at++) {
            const struct wanted *w = control_wanted_find(c, &c->shapes[at]->shape.model);
            if (!w || !w->wanted)
                break;
        }
        if (at == c->n_shapes)
            return ERR_LIMIT;
    }
    if (at == c->n_shapes) {
        struct shape_slot *slot = malloc(sizeof *slot);
        if (!slot)
            return ERR_NO_MEMORY;
        c->shapes[c->n_shapes++] = slot;
    }
    c->shapes[at]->precision = precision;
    c->shapes[at]->shape = *shape;
    c->version++;
    return ERR_OK;
}

static void slept(struct control *c)
{
    if (c->role != ROLE_FOLLOW) {
        c->role = ROLE_FOLLOW;
        control_planner_stop(c);
    }
    control_elect_forget(c);
    /* Alone in its cluster it is its own planner, and confirms at once. */
    bool alone = c->view.topology.n_nodes <= 1;
    c->next_claim_us = alone ? c->now_us : c->now_us + CONTROL_START_US;
    control_member_slept(c);
    control_note(c, "slept: waiting for the active plans to be confirmed");
}

static enum err apply(struct control *c, const struct control_event *e)
{
    switch (e->kind) {
    case CONTROL_TICK:
    case CONTROL_AWAKE: /* the view says who counts */
        return ERR_OK;
    case CONTROL_MESSAGE:
        return control_message_in(c, &e->from, e->bytes, e->n_bytes);
    case CONTROL_VIEW:
        return view_in(c, e->view);
    case CONTROL_MODEL:
        return model_in(c, e->shape, e->precision);
    case CONTROL_WANT:
    case CONTROL_UNWANT:
    case CONTROL_USED:
        return control_wanted_event(c, e);
    case CONTROL_PREPARED:
    case CONTROL_PREPARE_FAILED:
    case CONTROL_COMMITTED:
    case CONTROL_RETIRED:
        return control_member_event(c, e);
    case CONTROL_SLEPT:
        slept(c);
        return ERR_OK;
    case CONTROL_LEAVING:
        if (!c->leaving) {
            c->leaving = c->report_due = true;
            c->leave_due_us = c->now_us + CONTROL_LEAVE_US;
        }
        return ERR_OK;
    case CONTROL_DISK:
        control_elect_disk(c, e->full, e->term);
        return ERR_OK;
    case CONTROL_SESSION_UP:
        greet(c, &e->from);
        return ERR_OK;
    case CONTROL_SESSION_DOWN: /* a hint: the view says what became of it */
        return ERR_OK;
    }
    return ERR_INVALID;
}

static void flush_report(struct control *c)
{
    if (!c->report_due)
        return;
    bool full = c->report_full;
    c->report_due = c->report_full = false;
    if (c->planner_direct && control_planner_lives(c))
        control_send_report(c, &c->planner_id, full);
}

enum err control_step(struct control *c, const struct control_event *event, uint64_t now_us,
                      struct control_update *update)
{
    if (c->started_us == 0)
        c->started_us = c->now_us = now_us;
    c->now_us = MAX_OF(c->now_us, now_us);
    c->wall_ms = event->wall_ms;
    c->update = update;
    c->failed = ERR_OK;
    enum err e = apply(c, event);
    control_elect_tick(c);
    control_member_tick(c);
    for (uint32_t round = 0; round < ROUNDS_MAX; round++) {
        control_planner_drive(c);
        flush_report(c);
        if (c->loop_n == 0)
            break;
        control_loop_drain(c);
    }
    control_loop_clear(c);
    control_member_tick(c); /* leaving may have become possible */
    control_tell_planner(c);
    if (c->persist_due && !c->disk_full && control_persist_write(c) != ERR_OK)
        c->failed = ERR_NO_MEMORY;
    c->update = NULL;
    return e != ERR_OK ? e : c->failed;
}

uint64_t control_next_due(const struct control *c)
{
    uint64_t due = MIN_OF(control_elect_due(c), control_member_due(c));
    if (c->role == ROLE_PLAN) {
        due = MIN_OF(due, c->heartbeat_us);
        if (control_planner_busy(c))
            due = MIN_OF(due, c->now_us + BUSY_TICK_US);
    }
    return due;
}

bool control_planner(const struct control *c, struct node_id *ret_id, uint64_t *ret_term)
{
    bool lives = control_planner_lives(c);
    memset(ret_id, 0, sizeof *ret_id);
    if (lives)
        *ret_id = c->planner_id;
    *ret_term = lives ? c->planner_term : 0;
    return lives;
}

bool control_is_planner(const struct control *c)
{
    return c->role == ROLE_PLAN;
}

uint64_t control_term_seen(const struct control *c)
{
    return c->term_seen;
}

uint32_t control_n_local(const struct control *c)
{
    return c->n_locals;
}

void control_local_at(const struct control *c, uint32_t i, struct control_local *ret)
{
    const struct local *l = &c->locals[i];
    *ret = (struct control_local){&l->plan, l->stage, l->state, l->suspended};
}

const struct plan *control_active(const struct control *c, const struct hash256 *model)
{
    for (uint32_t i = 0; i < c->state.n_active; i++)
        if (hash256_eq(&c->state.active[i].model, model))
            return &c->state.active[i];
    return NULL;
}

uint32_t control_n_models(const struct control *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_wanted; i++)
        n += c->wanted[i].wanted;
    return n;
}

void control_model_at(const struct control *c, uint32_t i, struct control_model *ret)
{
    for (uint32_t k = 0; k < c->n_wanted; k++) {
        const struct wanted *w = &c->wanted[k];
        if (!w->wanted || i-- > 0)
            continue;
        *ret = (struct control_model){w->model,     w->name,
                                      w->context,   w->keep_alive_s,
                                      w->precision, control_active(c, &w->model),
                                      "",           false};
        for (uint32_t n = 0; n < c->state.n_no_fit; n++)
            if (hash256_eq(&c->state.no_fit[n].model, &w->model)) {
                ret->no_fit = c->state.no_fit[n].sentence;
                ret->refused = c->state.no_fit[n].refused;
            }
        return;
    }
}
