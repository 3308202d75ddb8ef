/* A laboratory for one control core: the test speaks for the other members and for the shell.
 * Shared by test_control.c and test_control_plan.c. */
#ifndef COVEY_TESTS_UNIT_CONTROL_LAB_H
#define COVEY_TESTS_UNIT_CONTROL_LAB_H

#include "planner/control.h"
#include "planner/plan_wire.h"
#include "proto/control.pb-c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MS = 1000, SECOND = 1000000, ME = 1, ANN = 2, BOB = 3, CARL = 4, HEARD_MAX = 256 };

typedef Covey__Control__Message Message;

struct heard {
    uint8_t to;
    Message *m;
};

/* One core and what it said and did since the last look. */
struct lab {
    struct control *c;
    uint64_t now_us;
    struct control_view view;
    struct heard heard[HEARD_MAX];
    uint32_t n_heard;
    struct control_effect *effects;
    uint32_t n_effects;
    uint8_t persisted[CONTROL_PERSIST_MAX];
    size_t n_persisted;
    bool disk_full;  /* nothing can be persisted */
    bool obedient;   /* the shell answers at once */
    uint64_t serial; /* of the last report told */
    struct control_update update;
};

static inline struct node_id id_of(uint8_t who)
{
    struct node_id id;
    memset(id.bytes, who, sizeof id.bytes);
    return id;
}

static inline void forget(struct lab *l)
{
    for (uint32_t i = 0; i < l->n_heard; i++)
        covey__control__message__free_unpacked(l->heard[i].m, NULL);
    l->n_heard = l->n_effects = 0;
}

static inline enum err feed(struct lab *l, const struct control_event *e);

static inline void obey(struct lab *l, const struct control_effect *e)
{
    static const struct {
        enum control_effect_kind effect;
        enum control_event_kind event;
    } answers[] = {{CONTROL_PREPARE, CONTROL_PREPARED},
                   {CONTROL_COMMIT, CONTROL_COMMITTED},
                   {CONTROL_ABORT, CONTROL_RETIRED},
                   {CONTROL_RETIRE, CONTROL_RETIRED},
                   {CONTROL_DRAIN, CONTROL_RETIRED}};
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        if (e->kind == answers[i].effect)
            assert_int_equal(feed(l, &(struct control_event){.kind = answers[i].event,
                                                             .epoch = e->plan.epoch.hash}),
                             ERR_OK);
}

/* One event, and whatever the shell answers. */
static inline enum err feed(struct lab *l, const struct control_event *e)
{
    enum err err = control_step(l->c, e, l->now_us, &l->update);
    struct control_update u = l->update;
    control_update_init(&l->update);
    if (u.persist.len > 0 && l->disk_full) {
        uint64_t term = 0;
        if (l->n_persisted > 0) {
            Covey__Control__Persisted *p =
                covey__control__persisted__unpack(NULL, l->n_persisted, l->persisted);
            term = p->term;
            covey__control__persisted__free_unpacked(p, NULL);
        }
        outbox_clear(&u.outbox);
        assert_int_equal(
            feed(l, &(struct control_event){.kind = CONTROL_DISK, .full = true, .term = term}),
            ERR_OK);
    } else if (u.persist.len > 0) {
        memcpy(l->persisted, u.persist.data, u.persist.len);
        l->n_persisted = u.persist.len;
    }
    for (uint32_t i = 0; i < u.outbox.n; i++) {
        const struct wire_message *w = &u.outbox.messages[i];
        assert_true(l->n_heard < HEARD_MAX);
        l->heard[l->n_heard].to = w->to.bytes[0];
        l->heard[l->n_heard].m = covey__control__message__unpack(NULL, w->len, w->bytes);
        assert_non_null(l->heard[l->n_heard].m);
        l->n_heard++;
    }
    for (uint32_t i = 0; i < u.n_effects; i++) {
        assert_true(l->n_effects < CONTROL_EFFECTS_MAX);
        l->effects[l->n_effects++] = u.effects[i];
    }
    for (uint32_t i = 0; l->obedient && i < u.n_effects; i++)
        obey(l, &u.effects[i]);
    control_update_deinit(&u);
    return err;
}

static inline void run(struct lab *l, uint64_t for_us)
{
    uint64_t end = l->now_us + for_us;
    while (control_next_due(l->c) <= end) {
        uint64_t due = control_next_due(l->c);
        l->now_us = due > l->now_us ? due : l->now_us;
        assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_TICK}), ERR_OK);
        assert_true(control_next_due(l->c) > l->now_us);
    }
    l->now_us = end;
}

static inline enum err say(struct lab *l, uint8_t from, const Message *m)
{
    uint8_t bytes[65536];
    size_t n = covey__control__message__pack(m, bytes);
    return feed(l, &(struct control_event){
                       .kind = CONTROL_MESSAGE, .from = id_of(from), .bytes = bytes, .n_bytes = n});
}

static inline void show(struct lab *l)
{
    assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_VIEW, .view = &l->view}),
                     ERR_OK);
}

static inline struct topology_node *node(struct lab *l, uint8_t who)
{
    return &l->view.topology.nodes[who - 1];
}

static inline void reach(struct lab *l, uint8_t who, bool up)
{
    uint32_t at = who - 1u;
    l->view.peers[at].reachable = up;
    l->view.topology.nodes[at].eligible = up;
    for (uint32_t i = 0; i < l->view.topology.n_nodes; i++)
        l->view.topology.edges[i][at].up = l->view.topology.edges[at][i].up = up && i != at;
}

/* A core among `n` members of which only itself is in reach yet. */
static inline void lab_start(struct lab *l, uint32_t n)
{
    struct control_options o = {id_of(ME), 1001, 7, 1, BACKEND_NATIVE};
    assert_int_equal(control_new(&o, l->n_persisted ? l->persisted : NULL, l->n_persisted, &l->c),
                     ERR_OK);
    memset(&l->view, 0, sizeof l->view);
    l->view.topology.n_nodes = n;
    for (uint32_t i = 0; i < n; i++) {
        struct topology_node *t = &l->view.topology.nodes[i];
        t->id = id_of((uint8_t)(i + 1));
        t->boot_id = 1001 + i;
        t->arithmetic_version = 1;
        t->budget_bytes = 100 << 20;
        t->stream_bytes_per_s = 10e9;
        t->macs_per_s = 100e9;
        for (uint32_t k = 0; k < n; k++)
            l->view.topology.edges[i][k] = (struct topology_edge){false, 100, 100e6};
    }
    reach(l, ME, true);
    show(l);
}

static inline int setup(void **state)
{
    struct lab *l = calloc(1, sizeof *l);
    l->effects = calloc(CONTROL_EFFECTS_MAX, sizeof *l->effects);
    l->now_us = 5 * SECOND;
    l->obedient = true;
    control_update_init(&l->update);
    *state = l;
    return 0;
}

static inline int teardown(void **state)
{
    struct lab *l = *state;
    forget(l);
    control_free(l->c);
    control_update_deinit(&l->update);
    free(l->effects);
    free(l);
    return 0;
}

static inline const Message *find(const struct lab *l, uint8_t to, int body)
{
    for (uint32_t i = l->n_heard; i-- > 0;)
        if (l->heard[i].to == to && (int)l->heard[i].m->body_case == body)
            return l->heard[i].m;
    return NULL;
}

static inline const struct control_effect *did(const struct lab *l, enum control_effect_kind kind)
{
    for (uint32_t i = l->n_effects; i-- > 0;)
        if (l->effects[i].kind == kind)
            return &l->effects[i];
    return NULL;
}

#define BODY(name) COVEY__CONTROL__MESSAGE__BODY_##name

static inline void heartbeat(struct lab *l, uint8_t from, uint64_t term)
{
    Covey__Control__Heartbeat b = COVEY__CONTROL__HEARTBEAT__INIT;
    b.term = term;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(HEARTBEAT);
    m.heartbeat = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

static inline void claim(struct lab *l, uint8_t from, uint64_t term, bool mains)
{
    Covey__Control__Claim b = COVEY__CONTROL__CLAIM__INIT;
    b.term = term;
    b.mains = mains;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(CLAIM);
    m.claim = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

static inline void answer(struct lab *l, uint8_t from, uint64_t term, bool agree, uint8_t planner,
                          uint64_t planner_term)
{
    Covey__Control__ClaimAnswer b = COVEY__CONTROL__CLAIM_ANSWER__INIT;
    struct node_id id = id_of(planner);
    b.term = term;
    b.agree = agree;
    b.term_seen = term;
    if (planner)
        b.planner = (ProtobufCBinaryData){32, id.bytes};
    b.planner_term = planner_term;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(CLAIM_ANSWER);
    m.claim_answer = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

static inline void command(struct lab *l, uint8_t from, uint64_t term, uint32_t verb,
                           const struct plan *p)
{
    struct hash256 hash = p->epoch.hash;
    Covey__Control__Command b = COVEY__CONTROL__COMMAND__INIT;
    b.term = term;
    b.verb = verb;
    b.hash = (ProtobufCBinaryData){32, hash.bytes};
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(COMMAND);
    m.command = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

enum {
    COMMIT = 1,
    ABORT,
    RETIRE,
    DRAIN,
    CANNOT_MOVE
}; /* verbs, as control.proto's users know them */

static inline void prepare(struct lab *l, uint8_t from, uint64_t term, const struct plan *p)
{
    struct plan_message storage;
    plan_to_message(p, &storage);
    Covey__Control__Prepare b = COVEY__CONTROL__PREPARE__INIT;
    b.term = term;
    b.plan = &storage.plan;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(PREPARE);
    m.prepare = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

static inline void tell_state(struct lab *l, uint8_t from, uint64_t term, const struct plan *active)
{
    struct plan_message storage;
    struct node_id planner = id_of(from);
    Covey__Control__Plan *plans[1] = {&storage.plan};
    Covey__Control__State b = COVEY__CONTROL__STATE__INIT;
    b.term = term;
    b.planner = (ProtobufCBinaryData){32, planner.bytes};
    if (active) {
        plan_to_message(active, &storage);
        b.n_active = 1;
        b.active = plans;
    }
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(STATE);
    m.state = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

/* A member's report with at most one epoch. */
struct report {
    uint64_t boot_id, term_seen, reserved;
    bool leaving, with_plan, stale;
    const struct plan *plan;
    enum epoch_state state;
    enum err error;
    uint8_t follows;
    uint64_t follows_term, used_age_ms;
};

static inline void report(struct lab *l, uint8_t from, struct report r)
{
    struct plan_message storage;
    struct node_id follows = id_of(r.follows ? r.follows : ME);
    struct hash256 hash, model;
    Covey__Control__EpochState e = COVEY__CONTROL__EPOCH_STATE__INIT;
    Covey__Control__EpochState *epochs[1] = {&e};
    Covey__Control__Used u = COVEY__CONTROL__USED__INIT;
    Covey__Control__Used *used[1] = {&u};
    Covey__Control__Report b = COVEY__CONTROL__REPORT__INIT;
    struct node_id me;
    b.boot_id = r.boot_id ? r.boot_id : 1000u + from;
    b.term_seen = r.term_seen;
    b.serial = r.stale ? 1 : ++l->serial;
    b.reserved_bytes = r.reserved;
    b.leaving = r.leaving;
    b.planner = (ProtobufCBinaryData){32, follows.bytes};
    b.planner_term = r.follows_term;
    if (!r.follows)
        (void)control_planner(l->c, &me, &b.planner_term);
    if (r.plan) {
        hash = r.plan->epoch.hash;
        model = r.plan->model;
        e.hash = (ProtobufCBinaryData){32, hash.bytes};
        e.model = (ProtobufCBinaryData){32, model.bytes};
        e.state = r.state;
        e.error = r.error;
        struct node_id whose = id_of(from);
        int stage = plan_stage_of(r.plan, &whose);
        e.memory_bytes = r.plan->stages[stage < 0 ? 0 : stage].memory_bytes;
        if (r.with_plan) {
            plan_to_message(r.plan, &storage);
            e.plan = &storage.plan;
        }
        b.n_epochs = 1;
        b.epochs = epochs;
    }
    if (r.used_age_ms) {
        memset(model.bytes, 0x77, 32);
        u.model = (ProtobufCBinaryData){32, model.bytes};
        u.age_ms = r.used_age_ms;
        b.n_used = 1;
        b.used = used;
    }
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(REPORT);
    m.report = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

static inline struct hash256 model_hash(void)
{
    struct hash256 h;
    memset(h.bytes, 0x77, sizeof h.bytes);
    return h;
}

/* 10 layers of 10 MiB; one stage with all of them does not fit 100 MiB, two stages do. */
static inline struct model_shape shape(void)
{
    struct model_shape s;
    memset(&s, 0, sizeof s);
    s.model = model_hash();
    strcpy(s.name, "ten");
    s.n_layers = 10;
    s.context_max = 2048;
    s.hidden = 64;
    for (uint32_t i = 0; i < 10; i++)
        s.layer_bytes[i] = 10 << 20;
    s.layer_macs = 1000;
    s.output_macs = 1000;
    return s;
}

static inline void know_model(struct lab *l)
{
    struct model_shape s = shape();
    assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_MODEL, .shape = &s}), ERR_OK);
}

static inline enum err want(struct lab *l, uint32_t context, uint32_t keep_alive_s)
{
    return feed(l, &(struct control_event){.kind = CONTROL_WANT,
                                           .model = model_hash(),
                                           .model_name = "ten",
                                           .context = context,
                                           .keep_alive_s = keep_alive_s,
                                           .wall_ms = 1700000000000});
}

/* A plan of `planner` over the nodes listed (zero-terminated), layers shared evenly. */
static inline struct plan plan_of(uint8_t planner, uint64_t term, uint64_t sequence,
                                  const char *nodes)
{
    struct plan p;
    memset(&p, 0, sizeof p);
    p.epoch.term = term;
    p.epoch.planner = id_of(planner);
    p.epoch.sequence = sequence;
    p.model = model_hash();
    strcpy(p.model_name, "ten");
    p.n_layers = 10;
    p.context = 2048;
    p.arithmetic_version = 1;
    p.n_stages = (uint32_t)strlen(nodes);
    for (uint32_t i = 0; i < p.n_stages; i++) {
        struct plan_stage *s = &p.stages[i];
        s->node = id_of((uint8_t)nodes[i]);
        s->boot_id = 1000u + (uint8_t)nodes[i];
        s->first_layer = 10 * i / p.n_stages;
        s->n_layers = 10 * (i + 1) / p.n_stages - s->first_layer;
        s->memory_bytes = ((uint64_t)s->n_layers * 10 + 8) << 20;
    }
    plan_seal(&p);
    return p;
}

/* Makes the core the planner of `n` members, all in reach. Their reports come as asked for. */
static inline void become_planner(struct lab *l, uint32_t n)
{
    lab_start(l, n);
    for (uint32_t i = 2; i <= n; i++)
        reach(l, (uint8_t)i, true);
    show(l);
    run(l, 1200 * MS);
    for (uint32_t i = 2; i <= n; i++) {
        const Message *m = find(l, (uint8_t)i, BODY(CLAIM));
        assert_non_null(m);
        answer(l, (uint8_t)i, m->claim->term, true, 0, 0);
    }
    assert_true(control_is_planner(l->c));
    for (uint32_t i = 2; i <= n; i++)
        report(l, (uint8_t)i, (struct report){0});
}

/* The last plan that was sent to be prepared by `to`. */
static inline struct plan prepared_plan(const struct lab *l, uint8_t to)
{
    const Message *m = find(l, to, BODY(PREPARE));
    struct plan p;
    assert_non_null(m);
    assert_int_equal(plan_from_message(m->prepare->plan, &p), ERR_OK);
    return p;
}

static inline bool commanded(const struct lab *l, uint8_t to, uint32_t verb, const struct plan *p)
{
    for (uint32_t i = 0; i < l->n_heard; i++)
        if (l->heard[i].to == to && l->heard[i].m->body_case == BODY(COMMAND) &&
            l->heard[i].m->command->verb == verb &&
            memcmp(l->heard[i].m->command->hash.data, p->epoch.hash.bytes, 32) == 0)
            return true;
    return false;
}

static inline void follow_ann(struct lab *l)
{
    lab_start(l, 3);
    reach(l, ANN, true);
    reach(l, BOB, true);
    show(l);
    heartbeat(l, ANN, 4);
}

static inline enum epoch_state local_state(const struct lab *l, const struct plan *p)
{
    for (uint32_t i = 0; i < control_n_local(l->c); i++) {
        struct control_local x;
        control_local_at(l->c, i, &x);
        if (epoch_eq(&x.plan->epoch, &p->epoch))
            return x.state;
    }
    return EPOCH_NONE;
}

static inline const Covey__Control__EpochState *reported(const struct lab *l, uint8_t to,
                                                         const struct plan *p)
{
    const Message *m = find(l, to, BODY(REPORT));
    for (size_t i = 0; m && i < m->report->n_epochs; i++)
        if (memcmp(m->report->epochs[i]->hash.data, p->epoch.hash.bytes, 32) == 0)
            return m->report->epochs[i];
    return NULL;
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

#endif
