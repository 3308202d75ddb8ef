/* Whole clusters of control cores on a virtual clock: delays, lost sessions, one-way cuts,
 * partitions, crashes, restarts with what was synced, sleep. Checked at every step: the safety
 * rules of PROTOCOL section 3; after healing: one planner, agreed by all, and the wanted models
 * active.
 *
 * COVEY_SEED=n runs one seed and prints what happens; COVEY_SEEDS=n runs so many. */
#include "base/rng.h"
#include "planner/control.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum {
    WORLD_NODES_MAX = 8,
    EVENTS_MAX = 1 << 14,
    EPOCHS_MAX = 4096,
    MS = 1000,
    SECOND = 1000 * 1000,
};

enum what {
    W_MESSAGE,
    W_VIEW,
    W_SHELL,
    W_CRASH,
    W_START,
    W_CUT,
    W_MEND,
    W_SLEEP,
    W_WANT,
    W_FLAP,
    W_LEAVE,
    W_UNWANT
};

struct happening {
    uint64_t at_us, order;
    enum what what;
    uint32_t node, from;
    uint64_t boot_id;             /* of the node it is for: others are dropped */
    uint64_t session;             /* of the pair: messages of another are lost */
    enum control_event_kind kind; /* W_SHELL */
    struct hash256 epoch;
    uint8_t *bytes;
    size_t n;
};

struct epoch_record {
    struct plan plan;
    bool prepared[PLAN_STAGES_MAX], committed[PLAN_STAGES_MAX];
};

struct vnode {
    struct control *c;
    struct node_id id;
    bool alive, asleep, leaving, left;
    uint64_t boot_id, started_us, due_us;
    uint64_t budget;
    uint8_t persisted[CONTROL_PERSIST_MAX];
    size_t n_persisted;
    uint64_t term_seen, last_office; /* across restarts */
    struct control_update update;
    bool reaches[WORLD_NODES_MAX]; /* as its own view has it */
    uint64_t last_delivery_us[WORLD_NODES_MAX];
};

struct world {
    uint64_t seed, now_us, order, healed_us;
    struct rng rng;
    uint32_t n;
    struct vnode nodes[WORLD_NODES_MAX];
    bool cut[WORLD_NODES_MAX][WORLD_NODES_MAX]; /* one way */
    uint64_t session[WORLD_NODES_MAX][WORLD_NODES_MAX];
    uint64_t flap_end_us[WORLD_NODES_MAX][WORLD_NODES_MAX];
    struct happening *heap;
    uint32_t n_heap;
    struct epoch_record *epochs;
    uint32_t n_epochs;
    struct model_shape models[2];
    uint32_t n_models;
    double rates[WORLD_NODES_MAX];
    bool refusals, verbose, faulty;
    uint32_t n_changes; /* ACTIVE effects seen by node 0's view */
};

#define CHECK(w, condition)                                                                        \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail_msg("seed %llu at %.3f s: %s", (unsigned long long)(w)->seed,                     \
                     (double)(w)->now_us / 1e6, #condition);                                       \
    } while (0)

static bool before(const struct happening *a, const struct happening *b)
{
    return a->at_us != b->at_us ? a->at_us < b->at_us : a->order < b->order;
}

static void later(struct world *w, struct happening h)
{
    CHECK(w, w->n_heap < EVENTS_MAX);
    h.order = w->order++;
    uint32_t i = w->n_heap++;
    for (; i > 0 && before(&h, &w->heap[(i - 1) / 2]); i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = h;
}

static struct happening next_of(struct world *w)
{
    struct happening first = w->heap[0], last = w->heap[--w->n_heap];
    uint32_t i = 0;
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= w->n_heap)
            break;
        if (child + 1 < w->n_heap && before(&w->heap[child + 1], &w->heap[child]))
            child++;
        if (!before(&w->heap[child], &last))
            break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return first;
}

static bool linked(const struct world *w, uint32_t a, uint32_t b)
{
    return w->nodes[a].alive && w->nodes[b].alive && !w->nodes[a].asleep && !w->nodes[b].asleep &&
           !w->cut[a][b] && !w->cut[b][a];
}

static struct epoch_record *record_of(struct world *w, const struct hash256 *hash)
{
    for (uint32_t i = w->n_epochs; i-- > 0;)
        if (hash256_eq(&w->epochs[i].plan.epoch.hash, hash))
            return &w->epochs[i];
    return NULL;
}

static int node_of(const struct world *w, const struct node_id *id)
{
    for (uint32_t i = 0; i < w->n; i++)
        if (node_id_eq(&w->nodes[i].id, id))
            return (int)i;
    return -1;
}

/* ---- safety, after every step ---- */

static void check_locals(struct world *w, const struct vnode *v)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < control_n_local(v->c); i++) {
        struct control_local a;
        control_local_at(v->c, i, &a);
        if (a.state != EPOCH_FAILED) {
            CHECK(w, a.plan->stages[a.stage].boot_id == v->boot_id);
            sum += a.plan->stages[a.stage].memory_bytes;
        }
        uint32_t n_current = 0, n_draining = 0, n_executing = 0;
        for (uint32_t k = 0; k < control_n_local(v->c); k++) {
            struct control_local b;
            control_local_at(v->c, k, &b);
            if (!hash256_eq(&a.plan->model, &b.plan->model))
                continue;
            n_current += b.state == EPOCH_CURRENT;
            n_draining += b.state == EPOCH_DRAINING;
            n_executing +=
                b.state == EPOCH_CURRENT || b.state == EPOCH_DRAINING || b.state == EPOCH_COMMITTED;
        }
        CHECK(w, n_current <= 1);
        CHECK(w, n_draining <= 1);
        CHECK(w, n_executing <= 2);
    }
    CHECK(w, sum == control_reserved_bytes(v->c));
    CHECK(w, sum <= v->budget);
}

static void check_terms(struct world *w, struct vnode *v, bool was_planner)
{
    CHECK(w, control_term_seen(v->c) >= v->term_seen);
    v->term_seen = control_term_seen(v->c);
    if (!control_is_planner(v->c))
        return;
    struct node_id id;
    uint64_t term;
    CHECK(w, control_planner(v->c, &id, &term) && node_id_eq(&id, &v->id));
    CHECK(w, was_planner ? term >= v->last_office : term > v->last_office);
    v->last_office = term;
    for (uint32_t i = 0; i < w->n; i++) {
        const struct vnode *o = &w->nodes[i];
        uint64_t theirs;
        if (o == v || !o->alive || !control_is_planner(o->c) || w->faulty)
            continue;
        /* Without faults all agree: there are no two planners of one term. */
        CHECK(w, control_planner(o->c, &id, &theirs) && theirs != term);
    }
}

static void check_effect(struct world *w, struct vnode *v, const struct control_effect *e)
{
    struct epoch_record *r;
    switch (e->kind) {
    case CONTROL_PREPARE:
        CHECK(w, e->plan.stages[e->stage].boot_id == v->boot_id);
        CHECK(w, node_id_eq(&e->plan.stages[e->stage].node, &v->id));
        CHECK(w, plan_check(&e->plan) == ERR_OK);
        if (!record_of(w, &e->plan.epoch.hash)) {
            CHECK(w, w->n_epochs < EPOCHS_MAX);
            memset(&w->epochs[w->n_epochs], 0, sizeof w->epochs[0]);
            w->epochs[w->n_epochs++].plan = e->plan;
        }
        break;
    case CONTROL_COMMIT: /* 3.8: all are prepared */
        r = record_of(w, &e->plan.epoch.hash);
        CHECK(w, r != NULL);
        for (uint32_t i = 0; i < r->plan.n_stages; i++)
            CHECK(w, r->prepared[i]);
        break;
    case CONTROL_ACTIVE: /* all have committed */
        r = record_of(w, &e->plan.epoch.hash);
        CHECK(w, r != NULL);
        for (uint32_t i = 0; i < r->plan.n_stages; i++)
            CHECK(w, r->committed[i]);
        break;
    default:
        break;
    }
}

/* ---- the shell of each node ---- */

static void shell_later(struct world *w, uint32_t node, enum control_event_kind kind,
                        const struct hash256 *epoch, uint64_t delay_us)
{
    later(w, (struct happening){.at_us = w->now_us + delay_us,
                                .what = W_SHELL,
                                .node = node,
                                .boot_id = w->nodes[node].boot_id,
                                .kind = kind,
                                .epoch = *epoch});
}

static void shell(struct world *w, uint32_t node, const struct control_effect *e)
{
    const struct hash256 *epoch = &e->plan.epoch.hash;
    switch (e->kind) {
    case CONTROL_PREPARE:
        if (w->refusals && !w->healed_us && rng_below(&w->rng, 8) == 0)
            shell_later(w, node, CONTROL_PREPARE_FAILED, epoch, 50 * MS);
        else
            shell_later(w, node, CONTROL_PREPARED, epoch, 20 * MS + rng_below(&w->rng, SECOND));
        break;
    case CONTROL_COMMIT:
        shell_later(w, node, CONTROL_COMMITTED, epoch, MS + rng_below(&w->rng, 50 * MS));
        break;
    case CONTROL_ABORT:
    case CONTROL_RETIRE:
        shell_later(w, node, CONTROL_RETIRED, epoch, MS + rng_below(&w->rng, 100 * MS));
        break;
    case CONTROL_DRAIN:
        shell_later(w, node, CONTROL_RETIRED, epoch, MS + rng_below(&w->rng, 5 * SECOND));
        break;
    case CONTROL_LEFT:
        w->nodes[node].left = true; /* it stops after this step */
        break;
    default:
        break;
    }
}

static void say(const struct world *w, uint32_t node, const struct control_effect *e)
{
    static const char *const kinds[] = {"prepare", "commit", "abort",  "drain",    "retire",
                                        "suspend", "resume", "active", "inactive", "no fit",
                                        "planner", "note",   "left"};
    if (!w->verbose)
        return;
    (void)printf("%9.3f node %u: %s %s", (double)w->now_us / 1e6, node, kinds[e->kind],
                 e->text.text);
    if (e->kind <= CONTROL_RESUME || e->kind == CONTROL_ACTIVE)
        (void)printf("%llu.%llu %016llx", (unsigned long long)e->plan.epoch.term,
                     (unsigned long long)e->plan.epoch.sequence,
                     (unsigned long long)epoch_alias(&e->plan.epoch));
    if (e->kind == CONTROL_PLANNER)
        (void)printf("%d term %llu", node_of(w, &e->node), (unsigned long long)e->term);
    (void)printf("\n");
}

static void execute(struct world *w, uint32_t node)
{
    struct vnode *v = &w->nodes[node];
    struct control_update *u = &v->update;
    if (u->persist.len > 0) {
        memcpy(v->persisted, u->persist.data, u->persist.len);
        v->n_persisted = u->persist.len;
    }
    for (uint32_t i = 0; i < u->n_effects; i++) {
        say(w, node, &u->effects[i]);
        check_effect(w, v, &u->effects[i]);
        shell(w, node, &u->effects[i]);
    }
    for (uint32_t i = 0; i < u->outbox.n; i++) {
        const struct wire_message *m = &u->outbox.messages[i];
        int to = node_of(w, &m->to);
        CHECK(w, to >= 0 && m->channel == CHANNEL_CONTROL && m->way == WAY_SESSION);
        if (!linked(w, node, (uint32_t)to) || w->now_us < w->flap_end_us[node][to])
            continue;
        /* A session keeps the order. */
        uint64_t at = w->now_us + 200 + rng_below(&w->rng, 5 * MS);
        struct vnode *receiver = &w->nodes[to];
        if (at < receiver->last_delivery_us[node])
            at = receiver->last_delivery_us[node];
        receiver->last_delivery_us[node] = at;
        struct happening h = {.at_us = at,
                              .what = W_MESSAGE,
                              .node = (uint32_t)to,
                              .from = node,
                              .boot_id = receiver->boot_id,
                              .session = w->session[node][to],
                              .bytes = malloc(m->len),
                              .n = m->len};
        memcpy(h.bytes, m->bytes, m->len);
        later(w, h);
    }
    control_update_clear(u);
}

static void step(struct world *w, uint32_t node, const struct control_event *e)
{
    struct vnode *v = &w->nodes[node];
    bool was_planner = control_is_planner(v->c);
    enum err err = control_step(v->c, e, w->now_us, &v->update);
    CHECK(w, err == ERR_OK || err == ERR_NOT_FOUND);
    execute(w, node);
    check_terms(w, v, was_planner);
    check_locals(w, v);
    v->due_us = control_next_due(v->c);
}

static void view(struct world *w, uint32_t node)
{
    static struct control_view empty;
    struct control_view view = empty;
    view.topology.n_nodes = w->n;
    for (uint32_t i = 0; i < w->n; i++) {
        const struct vnode *o = &w->nodes[i];
        bool seen = i == node || linked(w, node, i);
        struct topology_node *t = &view.topology.nodes[i];
        t->id = o->id;
        t->boot_id = o->boot_id;
        t->eligible = seen && w->now_us >= o->started_us;
        t->arithmetic_version = 1;
        t->budget_bytes = o->budget;
        t->stream_bytes_per_s = w->rates[i];
        t->macs_per_s = w->rates[i] * 10;
        view.peers[i].reachable = seen && w->now_us >= w->flap_end_us[node][i];
        view.peers[i].mains = i % 2;
        view.peers[i].wired = i % 3 == 0;
        view.peers[i].up_ms = (w->now_us - o->started_us) / SECOND * 1000;
        for (uint32_t k = 0; k < w->n; k++)
            view.topology.edges[i][k] = (struct topology_edge){
                i != k && w->nodes[i].alive && w->nodes[k].alive && !w->cut[i][k], 100, 100e6};
    }
    step(w, node, &(struct control_event){.kind = CONTROL_VIEW, .view = &view});
}

/* Sessions of the pair break or come up; each side learns of it a little later. */
static void links_changed(struct world *w)
{
    for (uint32_t i = 0; i < w->n; i++) {
        for (uint32_t k = 0; k < w->n; k++)
            if (!linked(w, i, k))
                w->session[i][k]++;
        if (w->nodes[i].alive)
            for (uint32_t k = 0; k < 2; k++) /* half known, then all */
                later(w, (struct happening){
                             .at_us = w->now_us + k * SECOND +
                                      rng_below(&w->rng, w->faulty ? 1500 * MS : 300 * MS),
                             .what = W_VIEW,
                             .node = i,
                             .boot_id = w->nodes[i].boot_id});
    }
}

static void node_start(struct world *w, uint32_t node)
{
    struct vnode *v = &w->nodes[node];
    if (v->alive)
        return;
    v->alive = true;
    v->asleep = v->left = v->leaving = false;
    v->boot_id = rng_u64(&w->rng);
    v->started_us = w->now_us;
    struct control_options o = {v->id, v->boot_id, rng_u64(&w->rng), 1, BACKEND_NATIVE};
    enum err e = control_new(&o, v->n_persisted ? v->persisted : NULL, v->n_persisted, &v->c);
    CHECK(w, e == ERR_OK);
    CHECK(w, control_term_seen(v->c) == v->term_seen);
    for (uint32_t i = 0; i < w->n_models; i++)
        step(w, node, &(struct control_event){.kind = CONTROL_MODEL, .shape = &w->models[i]});
    view(w, node);
    links_changed(w);
}

static void node_crash(struct world *w, uint32_t node)
{
    struct vnode *v = &w->nodes[node];
    if (!v->alive)
        return;
    control_free(v->c);
    v->c = NULL;
    v->alive = false;
    links_changed(w);
    later(w, (struct happening){.at_us = w->now_us + 300 * MS + rng_below(&w->rng, 6 * SECOND),
                                .what = W_START,
                                .node = node});
}

static void fault(struct world *w, const struct happening *h)
{
    uint32_t a = h->node, b = h->from;
    switch (h->what) {
    case W_CRASH:
        node_crash(w, a);
        break;
    case W_CUT: /* boot_id tells the kind: a pair both ways, one way, or a partition */
        if (h->kind == 0) {
            w->cut[a][b] = w->cut[b][a] = true;
        } else if (h->kind == 1) {
            w->cut[a][b] = true;
        } else {
            for (uint32_t i = 0; i < w->n; i++)
                for (uint32_t k = 0; k < w->n; k++)
                    w->cut[i][k] |= (i <= a) != (k <= a);
        }
        links_changed(w);
        break;
    case W_FLAP: /* the session breaks and is redialled; what was on its way is lost */
        if (a == b)
            break;
        w->session[a][b]++;
        w->session[b][a]++;
        w->flap_end_us[a][b] = w->flap_end_us[b][a] =
            w->now_us + 10 * MS + rng_below(&w->rng, 800 * MS);
        for (uint32_t i = 0; i < 4; i++) /* each side learns of the end and the beginning */
            if (w->nodes[i % 2 ? a : b].alive)
                later(w, (struct happening){.at_us = i < 2 ? w->now_us + rng_below(&w->rng, 50 * MS)
                                                           : w->flap_end_us[a][b] +
                                                                 rng_below(&w->rng, 50 * MS),
                                            .what = W_VIEW,
                                            .node = i % 2 ? a : b,
                                            .boot_id = w->nodes[i % 2 ? a : b].boot_id});
        break;
    case W_LEAVE:
        if (w->nodes[a].alive && !w->nodes[a].asleep) {
            w->nodes[a].leaving = true;
            step(w, a, &(struct control_event){.kind = CONTROL_LEAVING});
        }
        break;
    case W_UNWANT:
        if (w->nodes[a].alive && !w->nodes[a].asleep)
            step(w, a,
                 &(struct control_event){.kind = CONTROL_UNWANT,
                                         .model = w->models[b % w->n_models].model,
                                         .wall_ms = 1700000000000 + w->now_us / 1000});
        break;
    case W_MEND:
        memset(w->cut, 0, sizeof w->cut);
        links_changed(w);
        break;
    case W_SLEEP:
        if (!w->nodes[a].alive)
            break;
        w->nodes[a].asleep = !w->nodes[a].asleep;
        links_changed(w);
        if (!w->nodes[a].asleep) {
            step(w, a, &(struct control_event){.kind = CONTROL_SLEPT});
            view(w, a);
        } else {
            later(w,
                  (struct happening){.at_us = w->now_us + SECOND + rng_below(&w->rng, 5 * SECOND),
                                     .what = W_SLEEP,
                                     .node = a});
        }
        break;
    default:
        break;
    }
}

static void want(struct world *w, uint32_t node)
{
    if (!w->nodes[node].alive || w->nodes[node].asleep)
        return;
    for (uint32_t i = 0; i < w->n_models; i++)
        step(w, node,
             &(struct control_event){.kind = CONTROL_WANT,
                                     .model = w->models[i].model,
                                     .model_name = w->models[i].name,
                                     .wall_ms = 1700000000000 + w->now_us / 1000});
}

static void heal(struct world *w)
{
    memset(w->cut, 0, sizeof w->cut);
    for (uint32_t i = 0; i < w->n; i++) {
        if (!w->nodes[i].alive)
            node_start(w, i);
        if (w->nodes[i].asleep)
            fault(w, &(struct happening){.what = W_SLEEP, .node = i});
    }
    w->healed_us = w->now_us;
    links_changed(w);
}

static void happen(struct world *w, struct happening *h)
{
    struct vnode *v = &w->nodes[h->node];
    bool there = v->alive && !v->asleep && v->boot_id == h->boot_id;
    struct control_event e = {
        .kind = h->kind, .epoch = h->epoch, .error = ERR_IO, .reason = "disk"};
    struct epoch_record *r;
    int stage;
    if (w->healed_us && (h->what == W_CRASH || h->what == W_CUT || h->what == W_SLEEP ||
                         h->what == W_FLAP || h->what == W_LEAVE || h->what == W_UNWANT))
        return;
    switch (h->what) {
    case W_MESSAGE:
        if (there && h->session == w->session[h->from][h->node])
            step(w, h->node,
                 &(struct control_event){.kind = CONTROL_MESSAGE,
                                         .from = w->nodes[h->from].id,
                                         .bytes = h->bytes,
                                         .n_bytes = h->n});
        free(h->bytes);
        break;
    case W_VIEW:
        if (there)
            view(w, h->node);
        break;
    case W_SHELL:
        if (!v->alive || v->boot_id != h->boot_id)
            break;
        r = record_of(w, &h->epoch);
        stage = r ? plan_stage_of(&r->plan, &v->id) : -1;
        CHECK(w, stage >= 0);
        r->prepared[stage] |= h->kind == CONTROL_PREPARED;
        r->committed[stage] |= h->kind == CONTROL_COMMITTED;
        step(w, h->node, &e);
        break;
    case W_START:
        node_start(w, h->node);
        break;
    case W_WANT:
        want(w, h->node);
        break;
    default:
        fault(w, h);
    }
}

static void run_until(struct world *w, uint64_t end_us)
{
    for (;;) {
        for (uint32_t i = 0; i < w->n; i++)
            if (w->nodes[i].left)
                node_crash(w, i);
        uint64_t next = w->n_heap ? w->heap[0].at_us : UINT64_MAX;
        uint32_t ticking = w->n;
        for (uint32_t i = 0; i < w->n; i++)
            if (w->nodes[i].alive && !w->nodes[i].asleep && w->nodes[i].due_us < next) {
                next = w->nodes[i].due_us;
                ticking = i;
            }
        if (next >= end_us)
            break;
        w->now_us = next > w->now_us ? next : w->now_us;
        if (ticking < w->n) {
            step(w, ticking, &(struct control_event){.kind = CONTROL_TICK});
            CHECK(w, w->nodes[ticking].due_us > w->now_us);
            continue;
        }
        struct happening h = next_of(w);
        happen(w, &h);
    }
    w->now_us = end_us;
}

/* ---- worlds ---- */

static struct model_shape world_model(uint8_t which, uint64_t layer_bytes)
{
    struct model_shape s;
    memset(&s, 0, sizeof s);
    memset(s.model.bytes, 0x40 + which, 32);
    (void)snprintf(s.name, sizeof s.name, "model-%u", which);
    s.n_layers = 12;
    s.context_max = 2048;
    s.hidden = 512;
    for (uint32_t i = 0; i < s.n_layers; i++)
        s.layer_bytes[i] = layer_bytes;
    s.embedding_bytes = s.output_bytes = 4 << 20;
    s.kv_bytes_per_position = 512;
    s.layer_macs = 1000000;
    s.output_macs = 4000000;
    s.activation_bytes_per_row = 4096;
    return s;
}

static struct world *world_new(uint64_t seed, uint32_t n)
{
    struct world *w = calloc(1, sizeof *w);
    w->seed = seed;
    w->now_us = SECOND;
    rng_seed(&w->rng, seed);
    w->heap = calloc(EVENTS_MAX, sizeof *w->heap);
    w->epochs = calloc(EPOCHS_MAX, sizeof *w->epochs);
    w->n = n ? n : 2 + (uint32_t)rng_below(&w->rng, 7);
    w->models[0] = world_model(0, (10 + rng_below(&w->rng, 40)) << 20);
    w->models[1] = world_model(1, 10 << 20);
    w->n_models = 1;
    uint64_t whole = cost_stage_memory(&w->models[0], cost_run_of(&w->models[0], 0, 12), 2048);
    bool tight = rng_below(&w->rng, 2);
    for (uint32_t i = 0; i < w->n; i++) {
        struct vnode *v = &w->nodes[i];
        for (uint32_t k = 0; k < 32; k++)
            v->id.bytes[k] = (uint8_t)rng_u64(&w->rng);
        v->due_us = UINT64_MAX;
        control_update_init(&v->update);
        w->rates[i] = 1e9 * (1 + (double)rng_below(&w->rng, 20));
        v->budget = tight ? whole / 3 + rng_below(&w->rng, whole) : whole * 3;
    }
    if (!tight && rng_below(&w->rng, 2))
        w->n_models = 2;
    return w;
}

static void world_free(struct world *w)
{
    while (w->n_heap > 0) {
        struct happening h = next_of(w);
        free(h.bytes);
    }
    for (uint32_t i = 0; i < w->n; i++) {
        control_free(w->nodes[i].c);
        control_update_deinit(&w->nodes[i].update);
    }
    free(w->heap);
    free(w->epochs);
    free(w);
}

static void start_all(struct world *w, uint64_t within_us)
{
    for (uint32_t i = 0; i < w->n; i++)
        later(w, (struct happening){.at_us = w->now_us + rng_below(&w->rng, within_us + 1),
                                    .what = W_START,
                                    .node = i});
}

static bool fits(const struct world *w, const struct model_shape *shape)
{
    struct topology t;
    memset(&t, 0, sizeof t);
    t.n_nodes = w->n;
    for (uint32_t i = 0; i < w->n; i++) {
        t.nodes[i] = (struct topology_node){w->nodes[i].id,     1,           true,       1, 0,
                                            w->nodes[i].budget, w->rates[i], w->rates[i]};
        for (uint32_t k = 0; k < w->n; k++)
            t.edges[i][k] = (struct topology_edge){i != k, 100, 100e6};
    }
    struct plan p;
    return search_plan(&t, shape, &SEARCH_OPTIONS_INIT, &p, NULL) == ERR_OK;
}

/* One planner, followed by all; each wanted model that fits is active, known to all, executed by
 * its participants. NULL when all is well, else what is not. */
static const char *unhealthy(struct world *w)
{
    uint32_t n_planners = 0;
    struct node_id first, id;
    uint64_t term, first_term = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        n_planners += control_is_planner(w->nodes[i].c);
        if (!control_planner(w->nodes[i].c, &id, &term))
            return "a node follows nobody";
        if (i == 0) {
            first = id;
            first_term = term;
        } else if (!node_id_eq(&id, &first) || term != first_term) {
            return "nodes follow different planners";
        }
    }
    if (n_planners != 1)
        return "not exactly one planner";
    for (uint32_t m = 0; m < w->n_models; m++) {
        if (!fits(w, &w->models[m]))
            continue;
        const struct plan *p = control_active(w->nodes[0].c, &w->models[m].model);
        if (!p)
            return "a wanted model is not active";
        for (uint32_t i = 0; i < w->n; i++) {
            const struct plan *other = control_active(w->nodes[i].c, &w->models[m].model);
            if (!other || !epoch_eq(&other->epoch, &p->epoch))
                return "nodes know different active plans";
        }
        for (uint32_t s = 0; s < p->n_stages; s++) {
            int at = node_of(w, &p->stages[s].node);
            bool executes = false;
            for (uint32_t i = 0; at >= 0 && i < control_n_local(w->nodes[at].c); i++) {
                struct control_local l;
                control_local_at(w->nodes[at].c, i, &l);
                executes |=
                    epoch_eq(&l.plan->epoch, &p->epoch) && l.state == EPOCH_CURRENT && !l.suspended;
            }
            if (!executes)
                return "a participant does not execute the active plan";
        }
    }
    return NULL;
}

static void assert_healthy_within(struct world *w, uint64_t limit_us)
{
    uint64_t end = w->now_us + limit_us;
    const char *what = unhealthy(w);
    while (what && w->now_us < end) {
        run_until(w, w->now_us + 100 * MS);
        what = unhealthy(w);
    }
    if (what)
        fail_msg("seed %llu: %.1f s after healing: %s", (unsigned long long)w->seed,
                 (double)limit_us / 1e6, what);
}

static void one_seed(uint64_t seed, bool verbose)
{
    struct world *w = world_new(seed, 0);
    w->verbose = verbose;
    w->faulty = seed % 8 != 0;
    w->refusals = w->faulty && rng_below(&w->rng, 4) == 0;
    start_all(w, w->faulty ? 5 * SECOND : 300 * MS);
    for (uint32_t i = 0; i < 3; i++)
        later(w, (struct happening){.at_us = SECOND + rng_below(&w->rng, 8 * SECOND),
                                    .what = W_WANT,
                                    .node = (uint32_t)rng_below(&w->rng, w->n)});
    uint64_t n_faults = w->faulty ? rng_below(&w->rng, 20) : 0;
    const enum what kinds[] = {W_CRASH, W_CUT,  W_CUT,  W_MEND,   W_SLEEP,
                               W_CRASH, W_FLAP, W_FLAP, W_UNWANT, W_LEAVE};
    for (uint64_t i = 0; i < n_faults; i++)
        later(w, (struct happening){.at_us = 2 * SECOND + rng_below(&w->rng, 60 * SECOND),
                                    .what = kinds[rng_below(&w->rng, 10)],
                                    .node = (uint32_t)rng_below(&w->rng, w->n),
                                    .from = (uint32_t)rng_below(&w->rng, w->n),
                                    .kind = (enum control_event_kind)rng_below(&w->rng, 3)});
    run_until(w, 64 * SECOND);
    for (uint32_t i = 0; i < w->n; i++) /* those that are leaving are gone, and come back */
        if (w->nodes[i].alive && (w->nodes[i].left || w->nodes[i].leaving))
            node_crash(w, i);
    heal(w);
    /* Sessions are up and known to all after 2.5 s, and so is the newest wish of all that were
     * uttered apart. It may have been a tombstone: what is wanted is said once more. A refused node
     * is not asked for 30 s. */
    run_until(w, w->now_us + 3 * SECOND);
    want(w, 0);
    assert_healthy_within(w, 10 * SECOND + (w->refusals ? 32 * SECOND : 0));
    run_until(w, w->now_us + 130 * SECOND);
    assert_healthy_within(w, SECOND);
    const struct plan *p = control_active(w->nodes[0].c, &w->models[0].model);
    struct epoch settled = p ? p->epoch : (struct epoch){0};
    run_until(w, w->now_us + 70 * SECOND);
    p = control_active(w->nodes[0].c, &w->models[0].model);
    CHECK(w, !p || epoch_eq(&p->epoch, &settled)); /* nothing changes without a reason */
    assert_healthy_within(w, 0);
    world_free(w);
}

static void test_seeds_are_safe_and_heal(void **state)
{
    (void)state;
    const char *one = getenv("COVEY_SEED"), *many = getenv("COVEY_SEEDS");
    if (one) {
        one_seed(strtoull(one, NULL, 10), true);
        return;
    }
    uint64_t n = many ? strtoull(many, NULL, 10) : 300;
    for (uint64_t seed = 0; seed < n; seed++)
        one_seed(seed, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seeds_are_safe_and_heal),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
