/* The swim core's events, timers and queries; swim.h says what it is for. */
#include "discovery/swim_internal.h"

#include <assert.h>
#include <string.h>

enum { EFFECTS_MAX = 1 << 16 };

void swim_options_default(struct swim_options *ret)
{
    *ret = (struct swim_options){
        /* At 2 members half a second at most passes until the dead one is probed; with more, each
         * of the others probes on its own, so the gap may stay above 500 ms / n. */
        .round_us = MILLISECONDS(500),
        .probe_gap_min_us = MILLISECONDS(125),
        .direct_min_us = MILLISECONDS(100), /* a busy machine's loop may answer late */
        .direct_max_us = MILLISECONDS(300),
        .direct_slack_us = MILLISECONDS(50),
        .indirect_us = MILLISECONDS(200),
        .n_helpers = 3,
        /* 500 (round) + 100 + 200 (probe) + 900 + spreading < 2,000 */
        .suspicion_min_us = MILLISECONDS(900),
        .suspicion_max_us = MILLISECONDS(3000),
        .n_confirmations = 3,
        .contact_timeout_us = MILLISECONDS(5000),
        .reprobe_us = MILLISECONDS(1000),
        .gossip_gap_us = MILLISECONDS(50),
        .gossip_fanout = 3,
        .gossip_lambda = 3,
        .digest_us = MILLISECONDS(10000),
        .late_us = MILLISECONDS(50),
        .health_max = 8,
        .conflict_claim_us = MILLISECONDS(1000),
        .conflict_quiet_us = MILLISECONDS(3500),
    };
}

const char *swim_state_name(enum swim_state state)
{
    static const char *const names[SWIM_STATE_N] = {
        [SWIM_UNKNOWN] = "discovered", [SWIM_ALIVE] = "alive",
        [SWIM_CONFLICT] = "conflict",  [SWIM_SUSPECT] = "suspect",
        [SWIM_DEAD] = "dead",          [SWIM_ASLEEP] = "asleep",
        [SWIM_LEFT] = "left",          [SWIM_INCOMPATIBLE] = "incompatible",
    };
    return (unsigned)state < SWIM_STATE_N ? names[state] : "discovered";
}

void swim_update_clear(struct swim_update *u)
{
    outbox_clear(&u->outbox);
    u->n_effects = 0;
}

void swim_update_deinit(struct swim_update *u)
{
    if (!u)
        return;
    outbox_deinit(&u->outbox);
    free(u->effects);
    *u = SWIM_UPDATE_INIT;
}

struct node *node_find(struct swim *s, const struct node_id *id)
{
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (node_id_eq(&s->nodes[i].id, id))
            return &s->nodes[i];
    return NULL;
}

enum swim_state node_state(const struct node *n)
{
    if (n->incompatible)
        return SWIM_INCOMPATIBLE;
    if (n->claim.incarnation == 0)
        return n->lost ? SWIM_DEAD : SWIM_UNKNOWN;
    return n->claim.state;
}

bool node_is_live(const struct node *n)
{
    enum swim_state state = node_state(n);
    return state == SWIM_ALIVE || state == SWIM_SUSPECT || state == SWIM_CONFLICT;
}

uint32_t n_live(const struct swim *s)
{
    uint32_t n = 0;
    for (uint32_t i = 1; i < s->n_nodes; i++)
        n += node_is_live(&s->nodes[i]);
    return n;
}

struct swim_effect *effect_add(struct swim *s, struct swim_update *u, enum swim_effect_type type,
                               const struct node *n)
{
    if (u->n_effects == u->cap_effects) {
        uint32_t cap = u->cap_effects ? u->cap_effects * 2 : 16;
        struct swim_effect *effects =
            cap > EFFECTS_MAX ? NULL : realloc(u->effects, cap * sizeof *effects);
        if (!effects) {
            s->failure = ERR_NO_MEMORY;
            return NULL;
        }
        u->effects = effects;
        u->cap_effects = cap;
    }
    struct swim_effect *e = &u->effects[u->n_effects++];
    *e = (struct swim_effect){
        .type = type,
        .peer = n->id,
        .old = node_state(n),
        .new = node_state(n),
        .boot_id = n->claim.boot_id,
        .incarnation = n->claim.incarnation,
    };
    return e;
}

void emit_state(struct swim *s, struct swim_update *u, struct node *n, enum swim_state old)
{
    n->since_us = s->now_us;
    struct swim_effect *e = effect_add(s, u, SWIM_EFFECT_STATE, n);
    if (e)
        e->old = old;
}

void health_worse(struct swim *s, uint32_t by)
{
    s->health = MIN_OF(s->health + MIN_OF(by, s->o.health_max), s->o.health_max);
}

void health_better(struct swim *s)
{
    if (s->health > 0)
        s->health--;
}

enum err swim_new(const struct swim_options *options, uint64_t now_us, struct swim **ret)
{
    const struct swim_options *o = options;
    if (node_id_is_zero(&o->self) || o->boot_id == 0 || o->round_us == 0 ||
        o->probe_gap_min_us == 0 || o->direct_min_us == 0 || o->direct_max_us < o->direct_min_us ||
        o->indirect_us == 0 || o->suspicion_min_us == 0 ||
        o->suspicion_max_us < o->suspicion_min_us || o->contact_timeout_us == 0 ||
        o->reprobe_us == 0 || o->gossip_gap_us == 0 || o->digest_us == 0 ||
        o->conflict_claim_us == 0 || o->conflict_quiet_us == 0 || o->n_helpers > HELPERS_MAX ||
        o->incarnation_floor >= INCARNATION_LIMIT - 1)
        return ERR_INVALID;
    struct swim *s = calloc(1, sizeof *s);
    if (!s)
        return ERR_NO_MEMORY;
    s->o = *o;
    rng_seed(&s->rng, o->rng_seed);
    s->now_us = now_us;
    s->awake_since_us = now_us;
    s->n_nodes = 1;
    s->nodes[0].id = o->self;
    s->nodes[0].id_hash = hash_bytes(o->self.bytes, sizeof o->self.bytes);
    s->nodes[0].since_us = now_us;
    s->nodes[0].claim = (struct claim){
        .boot_id = o->boot_id, .incarnation = o->incarnation_floor + 1, .state = SWIM_ALIVE};
    s->next_seq = 1 + rng_below(&s->rng, UINT32_MAX);
    s->probe_at_us = now_us + 1 + rng_below(&s->rng, o->round_us);
    s->reprobe_at_us = now_us + 1 + rng_below(&s->rng, o->reprobe_us);
    s->digest_at_us = now_us + 1 + rng_below(&s->rng, o->digest_us);
    s->gossip_at_us = NEVER;
    s->attempts_due_us = NEVER;
    s->conflict_claim_at_us = NEVER;
    s->due_us = s->probe_at_us;
    (void)gossip_hash(s);
    *ret = s;
    return ERR_OK;
}

void swim_free(struct swim *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n_nodes; i++)
        records_free(&s->nodes[i]);
    free(s);
}

static enum err on_member_add(struct swim *s, struct swim_update *u, const struct node_id *id)
{
    if (node_id_is_zero(id))
        return ERR_INVALID;
    if (node_find(s, id))
        return ERR_OK;
    if (s->n_nodes == NODES_ALL)
        return ERR_LIMIT;
    struct node *n = &s->nodes[s->n_nodes++];
    *n = (struct node){
        .id = *id,
        .id_hash = hash_bytes(id->bytes, sizeof id->bytes),
        .added_us = s->now_us,
        .since_us = s->now_us,
        .digest_gap_us = DIGEST_GAP_US,
    };
    if (!s->silent)
        (void)effect_add(s, u, SWIM_EFFECT_REDIAL, n);
    return ERR_OK;
}

static void on_member_remove(struct swim *s, struct node *n)
{
    if (n == &s->nodes[0])
        return;
    probe_forget(s, n);
    records_free(n);
    struct node *last = &s->nodes[--s->n_nodes];
    if (n != last)
        *n = *last;
    memset(last, 0, sizeof *last);
    s->hash_valid = false;
}

static void on_refused(struct swim *s, struct swim_update *u, struct node *n)
{
    bool heard_since =
        n->heard_us > n->session_closed_us + REFUSED_DOUBT_US && n->session_closed_us != 0;
    n->session_up = false;
    if (n->claim.incarnation == 0) {
        enum swim_state old = node_state(n);
        n->lost = true;
        if (node_state(n) != old)
            emit_state(s, u, n, old);
    } else if (node_is_live(n) && heard_since) {
        probe_urgently(s, u, n);
    } else if (node_is_live(n)) {
        claim_dead(s, u, n);
    }
}

static void on_session(struct swim *s, struct swim_update *u, struct node *n,
                       enum swim_session session)
{
    enum swim_state old = node_state(n);
    /* Both sides may dial: while a session is up, a failed dial of ours says nothing. */
    if (n->session_up && (session == SWIM_SESSION_REFUSED || session == SWIM_SESSION_TIMED_OUT))
        return;
    switch (session) {
    case SWIM_SESSION_UP:
        n->session_up = true;
        n->digest_gap_us = DIGEST_GAP_US;
        n->incompatible = false;
        if (node_state(n) != old)
            emit_state(s, u, n, old);
        digest_short(s, u, n);
        probe_start(s, u, n);
        break;
    case SWIM_SESSION_CLOSED:
        n->session_up = false;
        n->session_closed_us = s->now_us;
        if (old != SWIM_LEFT && old != SWIM_ASLEEP && old != SWIM_INCOMPATIBLE) {
            (void)effect_add(s, u, SWIM_EFFECT_REDIAL, n);
            probe_start(s, u, n);
        }
        break;
    case SWIM_SESSION_REFUSED:
        on_refused(s, u, n);
        break;
    case SWIM_SESSION_TIMED_OUT:
        n->session_up = false;
        if (node_is_live(n))
            probe_urgently(s, u, n);
        break;
    case SWIM_SESSION_INCOMPATIBLE:
        n->session_up = false;
        n->incompatible = true;
        if (node_state(n) != old)
            emit_state(s, u, n, old);
        break;
    }
}

/* PROTOCOL 2.5. Everybody's silence was ours: probes and suspicions start anew, and ill health
 * gives the network time to come back. */
static void on_slept(struct swim *s, struct swim_update *u)
{
    s->silent = false;
    s->awake_since_us = s->now_us;
    s->health = s->o.health_max / 2;
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++)
        s->attempts[i].open = false;
    s->attempts_changed = true;
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        n->probe.active = false;
        n->session_up = false;
        n->added_us = s->now_us;
        n->suspected_us = s->now_us;
        n->suspicion_health = s->health;
        if (node_state(n) != SWIM_INCOMPATIBLE)
            (void)effect_add(s, u, SWIM_EFFECT_REDIAL, n);
    }
    claim_self(s, u, SWIM_ALIVE);
}

/* Said over every session, and as a datagram to the live ones. */
static void say_farewell(struct swim *s, struct swim_update *u, enum swim_state state)
{
    if (s->silent && s->nodes[0].claim.state == state)
        return;
    claim_self(s, u, state);
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        if (n->session_up) {
            (void)draft_begin(s, WAY_SESSION);
            draft_send(s, u, n, 0, WAY_SESSION);
        }
        if (node_is_live(n)) {
            (void)draft_begin(s, WAY_DATAGRAM);
            draft_send(s, u, n, 0, WAY_DATAGRAM);
        }
        n->probe.active = false;
    }
    s->silent = true;
    s->gossip_at_us = NEVER;
}

static enum err on_event(struct swim *s, struct swim_update *u, const struct swim_event *e)
{
    bool about_peer = e->type == SWIM_EVENT_MEMBER_REMOVE || e->type == SWIM_EVENT_PATHS ||
                      e->type == SWIM_EVENT_SESSION || e->type == SWIM_EVENT_DATAGRAM ||
                      e->type == SWIM_EVENT_MESSAGE;
    struct node *n = about_peer ? node_find(s, &e->peer) : NULL;
    if (about_peer && (!n || n == &s->nodes[0]))
        return ERR_NOT_FOUND;
    switch (e->type) {
    case SWIM_EVENT_TICK:
        return ERR_OK;
    case SWIM_EVENT_MEMBER_ADD:
        return on_member_add(s, u, &e->peer);
    case SWIM_EVENT_MEMBER_REMOVE:
        on_member_remove(s, n);
        return ERR_OK;
    case SWIM_EVENT_PATHS:
        if (e->n_paths > SWIM_PATHS_MAX)
            return ERR_LIMIT;
        for (uint32_t i = 0; i < e->n_paths; i++)
            if (e->paths[i] == 0 || e->paths[i] == PATH_SESSION)
                return ERR_INVALID;
        probe_paths(s, u, n, e->paths, e->n_paths);
        return ERR_OK;
    case SWIM_EVENT_SESSION:
        if (s->silent)
            n->session_up = e->session == SWIM_SESSION_UP;
        else
            on_session(s, u, n, e->session);
        return ERR_OK;
    case SWIM_EVENT_DATAGRAM:
        return s->silent ? ERR_OK : wire_hear(s, u, n, e->path, WAY_DATAGRAM, e->bytes, e->len);
    case SWIM_EVENT_MESSAGE:
        return s->silent ? ERR_OK : wire_hear(s, u, n, 0, WAY_SESSION, e->bytes, e->len);
    case SWIM_EVENT_SET_RECORD:
        return record_set(s, u, e->kind, e->bytes, e->len);
    case SWIM_EVENT_BUSY:
        s->step = e->step;
        s->layers_done = e->layers_done;
        return ERR_OK;
    case SWIM_EVENT_RIVAL:
        claim_meet_rival(s, u, e->boot_id);
        return ERR_OK;
    case SWIM_EVENT_SLEPT:
        on_slept(s, u);
        return ERR_OK;
    case SWIM_EVENT_GOING_ASLEEP:
        say_farewell(s, u, SWIM_ASLEEP);
        return ERR_OK;
    case SWIM_EVENT_LEAVING:
        say_farewell(s, u, SWIM_LEFT);
        return ERR_OK;
    }
    return ERR_INVALID;
}

static void contact_timers(struct swim *s, struct swim_update *u)
{
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        if (node_state(n) == SWIM_UNKNOWN && s->now_us >= n->added_us + s->o.contact_timeout_us) {
            n->lost = true;
            emit_state(s, u, n, SWIM_UNKNOWN);
        }
    }
}

static uint64_t contact_due(const struct swim *s)
{
    uint64_t due = NEVER;
    for (uint32_t i = 1; i < s->n_nodes; i++)
        if (node_state(&s->nodes[i]) == SWIM_UNKNOWN)
            due = MIN_OF(due, s->nodes[i].added_us + s->o.contact_timeout_us);
    return due;
}

/* Lifeguard's local health, widened: a loop that runs late is ill, and what was not answered
 * meanwhile may be waiting in a socket. */
static void notice_lateness(struct swim *s)
{
    if (s->silent || s->due_us == NEVER || s->now_us <= s->due_us + s->o.late_us)
        return;
    uint64_t late_us = s->now_us - s->due_us;
    s->was_late = true;
    health_worse(s, 1 + (uint32_t)MIN_OF(late_us / MILLISECONDS(500), 100u));
    probe_shift(s, late_us);
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        s->nodes[i].suspected_us += late_us;
        s->nodes[i].suspicion_health = s->health;
        s->nodes[i].added_us += late_us;
    }
    s->conflict_seen_us += late_us;
}

enum err swim_step(struct swim *s, const struct swim_event *event, uint64_t now_us,
                   struct swim_update *u)
{
    s->now_us = MAX_OF(s->now_us, now_us);
    s->failure = ERR_OK;
    if (event->type != SWIM_EVENT_SLEPT)
        notice_lateness(s);
    enum err e = on_event(s, u, event);
    if (s->silent) {
        s->due_us = NEVER;
    } else {
        contact_timers(s, u);
        probe_timers(s, u);
        claim_timers(s, u);
        gossip_timers(s, u);
        uint64_t due = MIN_OF(probe_due(s), claim_due(s));
        due = MIN_OF(due, gossip_due(s));
        due = MIN_OF(due, contact_due(s));
        s->due_us = MAX_OF(due, s->now_us + 1);
    }
    (void)gossip_hash(s);
    return e != ERR_OK ? e : s->failure;
}

uint64_t swim_next_due(const struct swim *s)
{
    return s->due_us;
}

uint32_t swim_n_members(const struct swim *s)
{
    return s->n_nodes - 1;
}

void swim_member_at(const struct swim *s, uint32_t i, struct swim_member_view *ret)
{
    assert(i + 1 < s->n_nodes);
    const struct node *n = &s->nodes[i + 1];
    *ret = (struct swim_member_view){
        .id = n->id,
        .state = node_state(n),
        .boot_id = n->claim.boot_id,
        .incarnation = n->claim.incarnation,
        .last_heard_us = n->heard_us,
        .since_us = n->since_us,
        .session_up = n->session_up,
        .step = n->step,
        .layers_done = n->layers_done,
        .progress_at_us = n->progress_at_us,
        .n_paths = n->n_paths,
    };
    for (uint32_t p = 0; p < n->n_paths; p++)
        path_view(&n->paths[p], &ret->paths[p]);
}

static const struct node *find_const(const struct swim *s, const struct node_id *id)
{
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (node_id_eq(&s->nodes[i].id, id))
            return &s->nodes[i];
    return NULL;
}

bool swim_member(const struct swim *s, const struct node_id *id, struct swim_member_view *ret)
{
    const struct node *n = find_const(s, id);
    if (!n || n == &s->nodes[0])
        return false;
    swim_member_at(s, (uint32_t)(n - s->nodes) - 1, ret);
    return true;
}

uint32_t swim_best_path(const struct swim *s, const struct node_id *id)
{
    const struct node *n = find_const(s, id);
    const struct path *best = n ? path_best(n) : NULL;
    return best ? best->id : 0;
}

enum swim_state swim_self_state(const struct swim *s)
{
    return s->nodes[0].claim.state;
}

uint64_t swim_self_incarnation(const struct swim *s)
{
    return s->nodes[0].claim.incarnation;
}

uint64_t swim_awake_since_us(const struct swim *s)
{
    return s->awake_since_us;
}

uint32_t swim_health(const struct swim *s)
{
    return s->health;
}

uint64_t swim_table_hash(const struct swim *s)
{
    return s->hash;
}

bool swim_record(const struct swim *s, const struct node_id *owner, uint8_t kind,
                 struct swim_record_view *ret)
{
    const struct node *n = find_const(s, owner);
    if (!n || kind >= SWIM_RECORD_KINDS_MAX || !n->records[kind].present)
        return false;
    const struct record *r = &n->records[kind];
    *ret = (struct swim_record_view){r->version, r->boot_id, r->bytes, r->len};
    return true;
}
