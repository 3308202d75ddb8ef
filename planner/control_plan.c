/* This node as the planner, PROTOCOL 3.6 to 3.10: the table of epochs that it follows, fed by the
 * reports of participants; adoption of what already runs; commands, repeated until they are
 * reported done. When and to what a plan changes is in control_change.c. */
#include "planner/control_private.h"

#include "base/util.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct member *control_member_of(struct control *c, const struct node_id *id)
{
    for (uint32_t i = 0; i < c->n_members; i++)
        if (node_id_eq(&c->members[i].id, id))
            return &c->members[i];
    return NULL;
}

struct tracked *control_tracked_of(struct control *c, const struct hash256 *model, enum track track)
{
    for (uint32_t i = 0; i < c->n_tracked; i++)
        if (c->tracked[i].track == track && hash256_eq(&c->tracked[i].plan.model, model))
            return &c->tracked[i];
    return NULL;
}

static struct tracked *tracked_find(struct control *c, const struct hash256 *hash)
{
    for (uint32_t i = 0; i < c->n_tracked; i++)
        if (hash256_eq(&c->tracked[i].plan.epoch.hash, hash))
            return &c->tracked[i];
    return NULL;
}

struct tracked *control_tracked_add(struct control *c, const struct plan *p, enum track track)
{
    if (c->n_tracked == TRACKED_MAX)
        return NULL;
    struct tracked *t = &c->tracked[c->n_tracked++];
    memset(t, 0, sizeof *t);
    t->plan = *p;
    memset(t->at, AT_UNKNOWN, sizeof t->at);
    control_track_as(c, t, track);
    return t;
}

void control_track_as(struct control *c, struct tracked *t, enum track track)
{
    t->track = track;
    t->since_us = c->now_us;
    memset(t->sent_us, 0, sizeof t->sent_us);
    c->version++;
}

void control_planner_stop(struct control *c)
{
    c->n_tracked = c->n_members = c->n_instances = 0;
    c->settled = false;
}

void control_planner_start(struct control *c)
{
    c->settled = false;
    c->adopt_us = c->now_us + ADOPT_US;
    c->heartbeat_us = c->now_us;
    c->full_due = true;
    c->version = 1;
    /* Keep-alive starts anew: nobody knows how long the office was empty. */
    for (uint32_t i = 0; i < c->n_wanted; i++)
        c->wanted[i].used_us = MAX_OF(c->wanted[i].used_us, c->now_us);
}

/* What a report says of one epoch. */
static void report_epoch_in(struct control *c, struct member *m, const struct hash256 *hash,
                            const Covey__Control__EpochState *e)
{
    struct tracked *t = tracked_find(c, hash);
    if (!t && e->plan) {
        struct plan p;
        if (plan_from_message(e->plan, &p) == ERR_OK && hash256_eq(&p.epoch.hash, hash))
            t = control_tracked_add(c, &p, TRACK_FOUND);
    }
    if (!t) {
        m->want_full |= e->state != EPOCH_FAILED;
        return;
    }
    int stage = plan_stage_of(&t->plan, &m->id);
    if (stage < 0 || t->plan.stages[stage].boot_id != m->boot_id)
        return;
    t->at[stage] = (uint8_t)e->state;
    if (e->state == EPOCH_FAILED && t->error == ERR_OK) {
        t->error = e->error > 0 && e->error < ERR_N ? (enum err)e->error : ERR_INVALID;
        t->failed_stage = (uint32_t)stage;
        (void)snprintf(t->reason, sizeof t->reason, "%s", e->reason);
    }
}

/* Epochs in which this member has a part, but which it does not report, are nothing to it. */
static void report_absent(struct control *c, const struct member *m)
{
    for (uint32_t i = 0; i < c->n_tracked; i++) {
        struct tracked *t = &c->tracked[i];
        int stage = plan_stage_of(&t->plan, &m->id);
        if (stage < 0)
            continue;
        bool listed = false;
        for (uint32_t k = 0; k < m->n_epochs; k++)
            listed |= hash256_eq(&m->epochs[k].hash, &t->plan.epoch.hash);
        if (!listed || t->plan.stages[stage].boot_id != m->boot_id)
            t->at[stage] = EPOCH_NONE;
    }
}

/* A free record; members that are out of view make way. */
static struct member *member_slot(struct control *c)
{
    if (c->n_members < NODES_MAX)
        return &c->members[c->n_members++];
    for (uint32_t i = 0; i < NODES_MAX; i++)
        if (control_view_index(c, &c->members[i].id) < 0)
            return &c->members[i];
    return NULL;
}

static enum err report_store(struct control *c, const struct node_id *from,
                             const Covey__Control__Report *r)
{
    if (r->n_epochs > CONTROL_LOCAL_MAX || r->n_used > CONTROL_WANTED_MAX)
        return ERR_CORRUPT;
    struct member *m = control_member_of(c, from);
    if (!m) {
        m = member_slot(c);
        if (!m)
            return ERR_OK;
        memset(m, 0, sizeof *m);
        m->id = *from;
    }
    if (m->heard && m->boot_id == r->boot_id && r->serial <= m->serial)
        return ERR_OK; /* overtaken */
    m->serial = r->serial;
    if (!m->heard || m->boot_id != r->boot_id || m->leaving != r->leaving ||
        m->reserved_bytes != r->reserved_bytes)
        c->version++;
    m->heard = true;
    m->boot_id = r->boot_id;
    m->leaving = r->leaving;
    m->reserved_bytes = r->reserved_bytes;
    m->n_epochs = 0;
    m->want_full = false;
    for (size_t i = 0; i < r->n_epochs; i++) {
        struct report_epoch *e = &m->epochs[m->n_epochs];
        if (!control_take_hash(&r->epochs[i]->hash, &e->hash) ||
            !control_take_hash(&r->epochs[i]->model, &e->model) ||
            r->epochs[i]->state < EPOCH_PREPARING || r->epochs[i]->state > EPOCH_FAILED)
            return ERR_CORRUPT;
        e->memory_bytes = r->epochs[i]->memory_bytes;
        m->n_epochs++;
        report_epoch_in(c, m, &e->hash, r->epochs[i]);
    }
    report_absent(c, m);
    for (size_t i = 0; i < r->n_used; i++) {
        struct hash256 model;
        if (!control_take_hash(&r->used[i]->model, &model))
            return ERR_CORRUPT;
        struct wanted *w = control_wanted_find(c, &model);
        uint64_t age_us = MIN_OF(r->used[i]->age_ms, UINT64_C(1) << 40) * 1000;
        if (w && age_us < c->now_us)
            w->used_us = MAX_OF(w->used_us, c->now_us - age_us);
    }
    return ERR_OK;
}

enum err control_report_in(struct control *c, const struct node_id *from,
                           const Covey__Control__Report *r)
{
    if (c->role == ROLE_CLAIM)
        return report_store(c, from, r);
    if (c->role != ROLE_PLAN)
        return ERR_OK;
    struct node_id follows;
    bool other = control_take_id(&r->planner, &follows) && !control_is_self(c, &follows);
    if (other &&
        (r->planner_term > c->planner_term ||
         (r->planner_term == c->planner_term && node_id_cmp(&follows, &c->planner_id) > 0))) {
        /* Through this member we meet a planner that goes before us. */
        control_planner_resign(c);
        control_hearsay(c, from, &follows, r->planner_term, 0);
        return ERR_OK;
    }
    if (r->term_seen > c->planner_term)
        control_planner_retake(c, r->term_seen);
    return c->role == ROLE_PLAN ? report_store(c, from, r) : ERR_OK;
}

bool control_stage_alive(struct control *c, const struct tracked *t, uint32_t stage)
{
    const struct plan_stage *s = &t->plan.stages[stage];
    int at = control_view_index(c, &s->node);
    return at >= 0 && control_reachable(c, &s->node) &&
           c->view.topology.nodes[at].boot_id == s->boot_id;
}

bool control_plan_broken(struct control *c, const struct tracked *t)
{
    uint32_t n = t->plan.n_stages;
    for (uint32_t i = 0; i < n; i++) {
        bool executes = t->at[i] == EPOCH_COMMITTED || t->at[i] == EPOCH_CURRENT;
        if (!executes || !control_stage_alive(c, t, i))
            return true;
    }
    for (uint32_t i = 0; i < n && n > 1; i++) {
        int a = control_view_index(c, &t->plan.stages[i].node);
        int b = control_view_index(c, &t->plan.stages[(i + 1) % n].node);
        if (a < 0 || b < 0 || !cost_edge_usable(&c->view.topology, (uint32_t)a, (uint32_t)b))
            return true;
    }
    return false;
}

/* Of two running epochs of one instance the faster stays, the other drains (3.13). */
static void judge_running(struct control *c, struct tracked *found)
{
    struct tracked *active = control_tracked_of(c, &found->plan.model, TRACK_ACTIVE);
    struct tracked *next = control_tracked_of(c, &found->plan.model, TRACK_NEXT);
    if (next && !control_plan_broken(c, found))
        control_track_as(c, next, TRACK_ABORT); /* not needed after all */
    if (!active) {
        control_track_as(c, found, TRACK_ACTIVE);
        return;
    }
    bool old_broken = control_plan_broken(c, active), new_broken = control_plan_broken(c, found);
    double old_us = control_plan_objective(c, &active->plan),
           new_us = control_plan_objective(c, &found->plan);
    bool better = new_us < old_us ||
                  (!(old_us < new_us) && epoch_cmp(&found->plan.epoch, &active->plan.epoch) > 0);
    if (old_broken != new_broken)
        better = old_broken;
    control_track_as(c, better ? active : found, TRACK_DRAIN);
    if (better)
        control_track_as(c, found, TRACK_ACTIVE);
}

/* Rule 3.6 for an epoch that reports have shown. */
static void judge(struct control *c, struct tracked *t)
{
    uint32_t n_executing = 0, n_prepared = 0, n_ending = 0, n_unknown = 0, n_gone = 0;
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        uint8_t at = t->at[i];
        n_executing += at == EPOCH_COMMITTED || at == EPOCH_CURRENT;
        n_prepared += at == EPOCH_PREPARED;
        n_ending += at == EPOCH_DRAINING || at == EPOCH_GOING;
        n_unknown += at == AT_UNKNOWN && control_stage_alive(c, t, i);
        n_gone += at == EPOCH_NONE || at == AT_UNKNOWN;
    }
    if (n_unknown > 0 && c->now_us - t->since_us < ADOPT_US)
        return;
    struct wanted *w = control_wanted_find(c, &t->plan.model);
    bool wanted = w && w->wanted;
    if (!wanted || n_ending > 0) {
        control_track_as(c, t, n_executing + n_ending > 0 ? TRACK_DRAIN : TRACK_ABORT);
    } else if (n_executing == t->plan.n_stages) {
        judge_running(c, t);
    } else if (n_executing + n_prepared == t->plan.n_stages &&
               !control_tracked_of(c, &t->plan.model, TRACK_NEXT)) {
        control_track_as(c, t, TRACK_NEXT); /* the commit is finished */
        t->phase = PHASE_COMMIT;
    } else if (n_executing > 0 && n_executing + n_gone == t->plan.n_stages &&
               !control_tracked_of(c, &t->plan.model, TRACK_ACTIVE)) {
        control_track_as(c, t,
                         TRACK_ACTIVE); /* it ran, and has lost participants: to be replaced */
    } else {
        control_track_as(c, t, n_executing > 0 ? TRACK_RETIRE : TRACK_ABORT);
    }
}

/* Running ones first, so that a half-made commit finds the epoch that it would replace. */
static void judge_all(struct control *c)
{
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < c->n_tracked; i++) {
            struct tracked *t = &c->tracked[i];
            bool prepared = false;
            for (uint32_t k = 0; k < t->plan.n_stages; k++)
                prepared |= t->at[k] == EPOCH_PREPARED;
            if (t->track == TRACK_FOUND && prepared == (pass == 1))
                judge(c, t);
        }
}

static bool ending_done(struct control *c, const struct tracked *t)
{
    for (uint32_t i = 0; i < t->plan.n_stages; i++)
        if (control_stage_alive(c, t, i) && t->at[i] != EPOCH_NONE)
            return false;
    return true;
}

/* Sends DRAIN, RETIRE or ABORT to every participant that does not yet report it done. */
static void drive_ending(struct control *c, struct tracked *t)
{
    if (t->track == TRACK_DRAIN && c->now_us - t->since_us > CONTROL_DRAIN_US + ADOPT_US)
        control_track_as(c, t, TRACK_RETIRE);
    enum verb verb = t->track == TRACK_DRAIN    ? VERB_DRAIN
                     : t->track == TRACK_RETIRE ? VERB_RETIRE
                                                : VERB_ABORT;
    for (uint32_t i = 0; i < t->plan.n_stages; i++) {
        bool done = t->at[i] == EPOCH_NONE || t->at[i] == EPOCH_GOING ||
                    (verb == VERB_DRAIN && t->at[i] == EPOCH_DRAINING);
        if (done || !control_stage_alive(c, t, i) ||
            (t->sent_us[i] && c->now_us - t->sent_us[i] < RESEND_US))
            continue;
        t->sent_us[i] = c->now_us;
        control_send_command(c, &t->plan.stages[i].node, verb, &t->plan.epoch.hash);
    }
}

static void drive_endings(struct control *c)
{
    for (uint32_t i = c->n_tracked; i-- > 0;) {
        struct tracked *t = &c->tracked[i];
        if (t->track != TRACK_DRAIN && t->track != TRACK_RETIRE && t->track != TRACK_ABORT)
            continue;
        drive_ending(c, t);
        if (ending_done(c, t)) {
            *t = c->tracked[--c->n_tracked];
            c->version++;
        }
    }
}

/* What the planner tells: the active plans that can run, and why others do not. */
static void state_make(struct control *c, struct state *ret)
{
    memset(ret, 0, sizeof *ret);
    for (uint32_t i = 0; i < c->n_wanted; i++) {
        const struct wanted *w = &c->wanted[i];
        if (!w->wanted)
            continue;
        const struct tracked *t = control_tracked_of(c, &w->model, TRACK_ACTIVE);
        if (t && !t->lost && ret->n_active < CONTROL_MODELS_MAX) {
            ret->active[ret->n_active++] = t->plan;
            continue;
        }
        const struct instance *in = control_instance_of(c, &w->model);
        if (in && in->sentence[0] && ret->n_no_fit < CONTROL_MODELS_MAX) {
            struct no_fit *n = &ret->no_fit[ret->n_no_fit++];
            n->model = w->model;
            memcpy(n->sentence, in->sentence, sizeof n->sentence);
            n->refused = in->refused;
        }
    }
}

/* To all, when it has changed; our own copy comes back through the loop. */
static void state_spread(struct control *c)
{
    struct state *s = malloc(sizeof *s);
    if (!s) {
        c->failed = ERR_NO_MEMORY;
        return;
    }
    state_make(c, s);
    uint64_t digest = control_state_digest(s);
    if (digest != c->told_digest || digest != control_state_digest(&c->state)) {
        struct state *before = malloc(sizeof *before);
        if (before) {
            *before = c->state;
            c->state = *s; /* only while it is packed */
            control_send_state(c, NULL);
            c->state = *before;
            c->told_digest = digest;
            free(before);
        }
    }
    free(s);
}

static void heartbeats(struct control *c)
{
    if (c->now_us < c->heartbeat_us && !c->full_due)
        return;
    c->heartbeat_us = c->now_us + CONTROL_HEARTBEAT_US;
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++) {
        const struct node_id *id = &c->view.topology.nodes[i].id;
        const struct member *m = control_member_of(c, id);
        control_send_heartbeat(c, id, c->full_due || !m || !m->heard || m->want_full, false);
    }
    c->full_due = false;
}

/* Everybody has reported, or had time to: who is about to be met for the first time as well,
 * because the plan that runs may be theirs. */
static void settle(struct control *c)
{
    bool all = true;
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++) {
        const struct node_id *id = &c->view.topology.nodes[i].id;
        const struct member *m = control_member_of(c, id);
        if (control_reachable(c, id))
            all &= m && m->heard && !m->want_full;
        else if (c->view.peers[i].awaited)
            all = false;
    }
    c->settled = all || c->now_us >= c->adopt_us;
    c->told_digest = 0;
}

void control_planner_drive(struct control *c)
{
    if (c->role != ROLE_PLAN)
        return;
    heartbeats(c);
    if (!c->settled)
        settle(c);
    if (!c->settled)
        return;
    judge_all(c);
    control_wanted_expire(c);
    for (uint32_t i = 0; i < c->n_wanted; i++) {
        struct instance *in =
            c->wanted[i].wanted ? control_instance_of(c, &c->wanted[i].model) : NULL;
        if (!c->wanted[i].wanted)
            control_instance_end(c, &c->wanted[i].model);
        else if (in)
            control_instance_drive(c, in, &c->wanted[i]);
    }
    drive_endings(c);
    state_spread(c);
}

bool control_planner_busy(const struct control *c)
{
    if (!c->settled)
        return true;
    for (uint32_t i = 0; i < c->n_tracked; i++)
        if (c->tracked[i].track != TRACK_ACTIVE || c->tracked[i].broken_us)
            return true;
    return false;
}
