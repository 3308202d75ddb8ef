/* The snapshot that the planner decides from, and what the control core wants done. */
#include "agent/node_internal.h"

#include "proto/node.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VIEW_DELAY_US = 50 * 1000 }; /* a burst of changes is one snapshot */

void plan_view_changed(struct node *n)
{
    n->view_due_us = MIN_OF(n->view_due_us, n->now_us + VIEW_DELAY_US);
}

/* Plans are made among nodes that compute the same bits: one number for the version and the
 * kernels' digest. */
uint32_t plan_arithmetic(uint32_t version, uint64_t kernel_digest)
{
    uint64_t mixed = (kernel_digest ^ version) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(mixed >> 32);
}

static void fill_node(const struct node_local *l, const struct node_id *id, uint64_t boot_id,
                      bool eligible, struct topology_node *ret)
{
    *ret = (struct topology_node){
        .id = *id,
        .boot_id = boot_id,
        .eligible = eligible && l->stream_bytes_per_s > 0 && l->macs_per_s > 0,
        .arithmetic_version = plan_arithmetic(l->arithmetic_version, l->kernel_digest),
        .backend = l->backend,
        .budget_bytes = l->budget_bytes,
        .stream_bytes_per_s = l->stream_bytes_per_s,
        .macs_per_s = l->macs_per_s};
}

static uint32_t index_of(const struct topology *t, const struct node_id *id)
{
    uint32_t i = 0;
    while (i < t->n_nodes && !node_id_eq(&t->nodes[i].id, id))
        i++;
    return i;
}

static void fill_edges(const struct node *n, const struct node_id *from, struct topology *t)
{
    struct swim_record_view r;
    uint32_t i = index_of(t, from);
    if (i == t->n_nodes || !swim_record(n->swim, from, RECORD_LINKS, &r))
        return;
    Covey__Node__Links *m = covey__node__links__unpack(NULL, r.len, r.bytes);
    for (size_t k = 0; m && k < m->n_links; k++) {
        const Covey__Node__Link *l = m->links[k];
        struct node_id to;
        if (l->peer.len != sizeof to.bytes)
            continue;
        memcpy(to.bytes, l->peer.data, sizeof to.bytes);
        uint32_t j = index_of(t, &to);
        bool sane =
            l->rtt_us >= 0 && l->rtt_us < 1e9 && l->bytes_per_s >= 0 && l->bytes_per_s < 1e15;
        if (j < t->n_nodes && j != i && sane)
            t->edges[i][j] = (struct topology_edge){
                .up = l->up, .latency_us = l->rtt_us / 2, .bytes_per_s = l->bytes_per_s};
    }
    if (m)
        covey__node__links__free_unpacked(m, NULL);
}

static void fill_view(const struct node *n, struct control_view *v)
{
    struct topology *t = &v->topology;
    v->sole = trust_n_members(n->trust) <= 1;
    t->n_nodes = 1;
    enum swim_state self = swim_self_state(n->swim);
    bool usable = n->has_local && !n->stopping && self == SWIM_ALIVE && n->asleep_until_us == 0;
    fill_node(&n->local, &n->identity.id, n->options.boot_id, usable, &t->nodes[0]);
    v->peers[0] = (struct control_peer){.reachable = true,
                                        .mains = n->local.on_mains,
                                        .wired = n->local.wired,
                                        .up_ms = (n->now_us - n->started_us) / 1000};
    uint64_t wall_ms = n->options.wall_ms + (n->now_us - n->started_us) / 1000;
    for (uint32_t i = 0; i < n->n_peers && t->n_nodes < NODES_MAX; i++) {
        const struct peer *p = &n->peers[i];
        struct swim_member_view m;
        if (!swim_member(n->swim, &p->id, &m) || m.boot_id == 0)
            continue;
        bool alive = m.state == SWIM_ALIVE, counts = p->has_facts && p->awake && !p->draining;
        uint32_t at = t->n_nodes++;
        fill_node(&p->local, &p->id, m.boot_id, alive && counts, &t->nodes[at]);
        v->peers[at] = (struct control_peer){
            .reachable = (alive || m.state == SWIM_SUSPECT) && p->session != 0,
            .awaited = alive && p->session == 0 && !p->introduced,
            .mains = p->local.on_mains,
            .wired = p->local.wired,
            .up_ms = wall_ms > p->up_since_ms ? wall_ms - p->up_since_ms : 0};
    }
    for (uint32_t i = 0; i < t->n_nodes; i++) {
        struct node_id id = t->nodes[i].id;
        fill_edges(n, &id, t);
    }
}

void node_topology(const struct node *n, struct topology *ret)
{
    struct control_view *v = calloc(1, sizeof *v);
    *ret = (struct topology){.n_nodes = 0};
    if (v) {
        fill_view(n, v);
        *ret = v->topology;
    }
    free(v);
}

void plan_send_view(struct node *n)
{
    struct control_view *v = calloc(1, sizeof *v);
    n->view_due_us = UINT64_MAX;
    if (!v)
        return;
    fill_view(n, v);
    (void)node_feed_control(n, &(struct control_event){.kind = CONTROL_VIEW, .view = v});
    free(v);
}

void plan_send_shape(struct node *n, const struct model_shape *shape)
{
    /* The shape describes F16; weights stay as they are in the file. Q8_0 has 34 bytes for 32
     * values, and at most 10 for 8 where heads are that narrow. */
    static const struct {
        uint8_t precision;
        uint32_t times, of;
    } kinds[] = {{PRECISION_FAST, 1, 1}, {PRECISION_F32, 2, 1}, {PRECISION_FAST_KV8, 5, 8}};
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        struct model_shape s = *shape;
        s.kv_bytes_per_position =
            (s.kv_bytes_per_position * kinds[i].times + kinds[i].of - 1) / kinds[i].of;
        (void)node_feed_control(n, &(struct control_event){.kind = CONTROL_MODEL,
                                                           .shape = &s,
                                                           .precision = kinds[i].precision});
    }
}

static struct plan *copy_plan(const struct plan *p)
{
    struct plan *copy = malloc(sizeof *copy);
    if (copy)
        *copy = *p;
    return copy;
}

static void plan_effect(struct node *n, enum node_effect_type type, const struct control_effect *x)
{
    struct node_effect *e = node_effect(n, type);
    if (!e)
        return;
    e->epoch = x->plan.epoch;
    e->model = x->plan.model;
    e->stage = x->stage;
    e->plan = copy_plan(&x->plan);
}

static void no_route(struct node *n, const struct control_effect *x, enum err error)
{
    struct node_effect *e = node_effect(n, NODE_EFFECT_NO_ROUTE);
    if (!e)
        return;
    e->model = x->model;
    e->error = error;
    e->refused = x->refused;
    (void)snprintf(e->text, sizeof e->text, "%s", x->text.text);
}

static void planner_changed(struct node *n, const struct control_effect *x)
{
    const struct peer *p = peer_find(n, &x->node);
    if (node_id_is_zero(&x->node))
        node_note(n, "planner", "no planner is known (term %llu)", (unsigned long long)x->term);
    else
        node_note(n, "planner", "%s plans (term %llu)",
                  node_id_eq(&x->node, &n->identity.id) ? "this node"
                  : p && p->name[0]                     ? p->name
                                                        : "a member",
                  (unsigned long long)x->term);
}

static void left(struct node *n)
{
    if (n->left)
        return;
    n->left = true;
    (void)node_feed_swim(n, &(struct swim_event){.type = SWIM_EVENT_LEAVING});
    (void)node_effect(n, NODE_EFFECT_STOPPED);
}

static void one_effect(struct node *n, const struct control_effect *x)
{
    switch (x->kind) {
    case CONTROL_PREPARE:
        plan_effect(n, NODE_EFFECT_PREPARE, x);
        break;
    case CONTROL_COMMIT:
        /* The shell does it before the messages of this update go out, so it may be reported at
         * once. */
        plan_effect(n, NODE_EFFECT_COMMIT, x);
        (void)node_feed_control(
            n, &(struct control_event){.kind = CONTROL_COMMITTED, .epoch = x->plan.epoch.hash});
        break;
    case CONTROL_ABORT:
        plan_effect(n, NODE_EFFECT_ABORT, x);
        break;
    case CONTROL_DRAIN:
        plan_effect(n, NODE_EFFECT_DRAIN, x);
        break;
    case CONTROL_SUSPEND: /* the shell saw to it before NODE_EVENT_SLEPT */
        break;
    case CONTROL_RESUME:
        plan_effect(n, NODE_EFFECT_COMMIT, x);
        break;
    case CONTROL_RETIRE:
        plan_effect(n, NODE_EFFECT_RETIRE, x);
        break;
    case CONTROL_ACTIVE:
        plan_effect(n, NODE_EFFECT_ROUTE, x);
        break;
    case CONTROL_INACTIVE:
        no_route(n, x, ERR_AGAIN);
        break;
    case CONTROL_NO_FIT:
        no_route(n, x, ERR_NO_FIT);
        if (x->text.text[0])
            node_note(n, "no_fit", "%s", x->text.text);
        break;
    case CONTROL_PLANNER:
        planner_changed(n, x);
        break;
    case CONTROL_NOTE:
        node_note(n, "plan", "%s", x->text.text);
        break;
    case CONTROL_LEFT:
        left(n);
        break;
    }
}

enum err plan_control_effects(struct node *n, struct control_update *u)
{
    for (uint32_t i = 0; i < u->n_effects; i++)
        one_effect(n, &u->effects[i]);
    uint32_t n_models = control_n_models(n->control);
    for (uint32_t i = 0; i < n_models; i++) {
        struct control_model m;
        control_model_at(n->control, i, &m);
        records_want_shape(n, &m.model);
    }
    return ERR_OK;
}

/* The shell commits before the messages of this update go out, so that may be reported in the same
 * step. */
void plan_report_commits(struct node *n, const struct control_update *u)
{
    for (uint32_t i = 0; i < u->n_effects; i++) {
        if (u->effects[i].kind == CONTROL_COMMIT)
            (void)node_feed_control(
                n, &(struct control_event){.kind = CONTROL_COMMITTED,
                                           .epoch = u->effects[i].plan.epoch.hash});
    }
}

static enum err on_want(struct node *n, const struct node_event *e)
{
    struct node_held held[NODE_MODELS_MAX];
    char name[MODEL_NAME_MAX] = "";
    const struct model_shape *shape = node_shape(n, &e->model_id);
    if (shape)
        (void)snprintf(name, sizeof name, "%s", shape->name);
    uint32_t n_held = shape ? 0 : node_held(n, held, NODE_MODELS_MAX);
    for (uint32_t i = 0; i < n_held; i++) {
        if (hash256_eq(&held[i].model, &e->model_id))
            (void)snprintf(name, sizeof name, "%s", held[i].name);
    }
    enum err r = node_feed_control(n, &(struct control_event){.kind = CONTROL_WANT,
                                                              .model = e->model_id,
                                                              .model_name = name,
                                                              .context = e->context,
                                                              .precision = e->precision,
                                                              .keep_alive_s = e->keep_alive_s});
    node_answer(n, e->call, r, r == ERR_OK ? "wanted" : "more models than can be wanted at once");
    return r;
}

static enum err on_unwant(struct node *n, const struct node_event *e)
{
    enum err r =
        node_feed_control(n, &(struct control_event){.kind = CONTROL_UNWANT, .model = e->model_id});
    node_answer(n, e->call, r, r == ERR_OK ? "no longer wanted" : "that model is not wanted");
    return r;
}

enum err plan_event(struct node *n, const struct node_event *e, bool *ret_handled)
{
    *ret_handled = true;
    struct control_event c = {.epoch = e->epoch.hash, .model = e->model_id};
    switch (e->type) {
    case NODE_EVENT_PREPARED:
        c.kind = CONTROL_PREPARED;
        return node_feed_control(n, &c);
    case NODE_EVENT_PREPARE_FAILED:
        c.kind = CONTROL_PREPARE_FAILED;
        c.error = e->error;
        c.reason = e->text;
        node_note(n, "prepare", "a part of a plan cannot be computed here: %s",
                  e->text ? e->text : "");
        return node_feed_control(n, &c);
    case NODE_EVENT_RETIRED:
        c.kind = CONTROL_RETIRED;
        return node_feed_control(n, &c);
    case NODE_EVENT_USED:
        c.kind = CONTROL_USED;
        return node_feed_control(n, &c);
    case NODE_EVENT_WANT:
        return on_want(n, e);
    case NODE_EVENT_UNWANT:
        return on_unwant(n, e);
    default:
        *ret_handled = false;
        return ERR_OK;
    }
}
