/* This node as a participant and as an entry: PROTOCOL 3.7 to 3.11 from the side of the one who
 * obeys. A local epoch goes PREPARING -> PREPARED -> COMMITTED -> CURRENT -> DRAINING -> gone, and
 * from anywhere to GOING. Memory counts as reserved until the shell says that it is free. */
#include "planner/control_private.h"

#include "base/util.h"

#include <sodium.h>
#include <stdio.h>
#include <string.h>

const char *epoch_state_name(enum epoch_state state)
{
    static const char *const names[] = {"none",    "preparing", "prepared", "committed",
                                        "current", "draining",  "going",    "failed"};
    return (unsigned)state < ARRAY_LEN(names) ? names[state] : "unknown";
}

static struct local *local_find(struct control *c, const struct hash256 *hash)
{
    for (uint32_t i = 0; i < c->n_locals; i++)
        if (hash256_eq(&c->locals[i].plan.epoch.hash, hash))
            return &c->locals[i];
    return NULL;
}

static void local_drop(struct control *c, struct local *l)
{
    *l = c->locals[--c->n_locals];
    c->report_due = true;
}

static void local_set(struct control *c, struct local *l, enum epoch_state state)
{
    l->state = state;
    l->since_us = c->now_us;
    c->report_due = true;
}

static bool executes(const struct local *l)
{
    return l->state == EPOCH_COMMITTED || l->state == EPOCH_CURRENT || l->state == EPOCH_DRAINING;
}

uint64_t control_reserved_bytes(const struct control *c)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->n_locals; i++)
        if (c->locals[i].state != EPOCH_FAILED || c->locals[i].releasing)
            sum += c->locals[i].plan.stages[c->locals[i].stage].memory_bytes;
    return sum;
}

/* Makes it go: loading is aborted, a running one is stopped; the shell confirms. */
static void local_end(struct control *c, struct local *l)
{
    if (l->state == EPOCH_FAILED && !l->releasing) {
        local_drop(c, l);
        return;
    }
    if (l->state == EPOCH_FAILED) { /* the shell is at it already */
        local_set(c, l, EPOCH_GOING);
        return;
    }
    if (l->state == EPOCH_GOING)
        return;
    control_effect_plan(c, executes(l) ? CONTROL_RETIRE : CONTROL_ABORT, l);
    local_set(c, l, EPOCH_GOING);
}

static void local_drain(struct control *c, struct local *l)
{
    if (l->state == EPOCH_DRAINING)
        return;
    if (!executes(l)) {
        local_end(c, l);
        return;
    }
    /* One draining epoch for each instance: an older one ends now. */
    for (uint32_t i = 0; i < c->n_locals; i++) {
        struct local *other = &c->locals[i];
        if (other != l && other->state == EPOCH_DRAINING &&
            hash256_eq(&other->plan.model, &l->plan.model))
            local_end(c, other);
    }
    control_effect_plan(c, CONTROL_DRAIN, l);
    local_set(c, l, EPOCH_DRAINING);
}

/* The refusal stays in the table, so that reports show it, until the planner aborts it. */
static void refuse(struct control *c, const struct plan *p, enum err e, const char *reason)
{
    struct local *l = local_find(c, &p->epoch.hash);
    if (!l) {
        for (uint32_t i = 0; i < c->n_locals && c->n_locals == CONTROL_LOCAL_MAX; i++)
            if (c->locals[i].state == EPOCH_FAILED && !c->locals[i].releasing)
                local_drop(c, &c->locals[i]);
        if (c->n_locals == CONTROL_LOCAL_MAX)
            return;
        l = &c->locals[c->n_locals++];
        memset(l, 0, sizeof *l);
        l->plan = *p;
        int stage = plan_stage_of(p, &c->options.self);
        l->stage = stage < 0 ? 0 : (uint32_t)stage;
    }
    l->error = e;
    (void)snprintf(l->reason, sizeof l->reason, "%s", reason ? reason : err_name(e));
    local_set(c, l, EPOCH_FAILED);
}

/* Why this node cannot take part in the plan, or ERR_OK. */
static enum err suitable(const struct control *c, const struct plan *p, char reason[REASON_MAX])
{
    int stage = plan_stage_of(p, &c->options.self);
    if (stage < 0 || p->stages[stage].boot_id != c->options.boot_id) {
        (void)snprintf(reason, REASON_MAX, "planned for a node that has restarted since");
        return ERR_STALE;
    }
    if (p->arithmetic_version != c->options.arithmetic_version ||
        p->backend != c->options.backend) {
        (void)snprintf(reason, REASON_MAX, "this node computes with arithmetic %u, backend %u",
                       c->options.arithmetic_version, c->options.backend);
        return ERR_UNSUPPORTED;
    }
    if (c->leaving) {
        (void)snprintf(reason, REASON_MAX, "this node is leaving");
        return ERR_CLOSED;
    }
    int at = control_view_index(c, &c->options.self);
    uint64_t limit = at < 0 ? 0 : c->view.topology.nodes[at].budget_bytes;
    uint64_t used = control_reserved_bytes(c), need = p->stages[stage].memory_bytes;
    if (need > limit || used > limit - need) {
        (void)snprintf(reason, REASON_MAX, "needs %llu MiB, %llu of %llu MiB are reserved",
                       (unsigned long long)(need >> 20), (unsigned long long)(used >> 20),
                       (unsigned long long)(limit >> 20));
        return ERR_NO_FIT;
    }
    if (c->n_locals == CONTROL_LOCAL_MAX) {
        (void)snprintf(reason, REASON_MAX, "too many epochs");
        return ERR_BUSY;
    }
    return ERR_OK;
}

/* What was being prepared for the same model by an order that this one replaces. */
static void abort_older(struct control *c, const struct plan *p)
{
    for (uint32_t i = c->n_locals; i-- > 0;) {
        struct local *l = &c->locals[i];
        if (hash256_eq(&l->plan.model, &p->model) &&
            (l->state == EPOCH_PREPARING || l->state == EPOCH_PREPARED) && !l->committing)
            local_end(c, l);
    }
}

enum err control_prepare_in(struct control *c, const struct node_id *from,
                            const Covey__Control__Prepare *m)
{
    struct plan p;
    if (!m->plan)
        return ERR_CORRUPT;
    enum err e = plan_from_message(m->plan, &p);
    if (e != ERR_OK && e != ERR_UNSUPPORTED)
        return e;
    if (!control_authority(c, from, m->term))
        return ERR_OK;
    c->report_due = true;
    if (e == ERR_UNSUPPORTED) /* the planner sees no such epoch in our reports, and gives up */
        return ERR_OK;
    struct local *known = local_find(c, &p.epoch.hash);
    if (known && (known->state != EPOCH_FAILED || known->releasing))
        return ERR_OK;
    if (known)
        local_drop(c, known);
    abort_older(c, &p);
    char reason[REASON_MAX] = "";
    e = suitable(c, &p, reason);
    if (e != ERR_OK) {
        refuse(c, &p, e, reason);
        return ERR_OK;
    }
    struct local *l = &c->locals[c->n_locals++];
    memset(l, 0, sizeof *l);
    l->plan = p;
    l->stage = (uint32_t)plan_stage_of(&p, &c->options.self);
    local_set(c, l, EPOCH_PREPARING);
    control_effect_plan(c, CONTROL_PREPARE, l);
    return ERR_OK;
}

/* At most one other epoch of the instance executes beside the new one: the newest. */
static void make_way(struct control *c, const struct local *next)
{
    struct local *keep = NULL;
    for (uint32_t i = 0; i < c->n_locals; i++) {
        struct local *l = &c->locals[i];
        if (l == next || !hash256_eq(&l->plan.model, &next->plan.model) || !executes(l))
            continue;
        if (!keep) {
            keep = l;
            continue;
        }
        bool newer = (l->state != EPOCH_DRAINING) != (keep->state != EPOCH_DRAINING)
                         ? l->state != EPOCH_DRAINING
                         : epoch_cmp(&l->plan.epoch, &keep->plan.epoch) > 0;
        local_end(c, newer ? keep : l);
        keep = newer ? l : keep;
    }
}

static void commit(struct control *c, struct local *l)
{
    if (l->state != EPOCH_PREPARED || l->committing)
        return;
    make_way(c, l);
    l->committing = true;
    control_effect_plan(c, CONTROL_COMMIT, l);
}

enum err control_command_in(struct control *c, const struct node_id *from,
                            const Covey__Control__Command *m)
{
    struct hash256 hash;
    if (!control_take_hash(&m->hash, &hash))
        return ERR_CORRUPT;
    if (!control_authority(c, from, m->term))
        return ERR_OK;
    c->report_due = true; /* an unknown epoch is answered by its absence */
    struct local *l = local_find(c, &hash);
    if (!l)
        return ERR_OK;
    switch ((int)m->verb) {
    case VERB_COMMIT:
        commit(c, l);
        break;
    case VERB_ABORT:
    case VERB_RETIRE:
        local_end(c, l);
        break;
    case VERB_DRAIN:
        local_drain(c, l);
        break;
    case VERB_CANNOT_MOVE:
        l->cannot_move = true;
        break;
    default:
        break;
    }
    return ERR_OK;
}

/* It cannot be computed here any more (its file changed under us): it stops at once, and the
 * planner hears the reason. */
static void fail_running(struct control *c, struct local *l, const struct control_event *e)
{
    control_effect_plan(c, CONTROL_RETIRE, l);
    l->releasing = true;
    l->suspended = false;
    refuse(c, &l->plan, e->error ? e->error : ERR_IO, e->reason);
}

enum err control_member_event(struct control *c, const struct control_event *e)
{
    struct local *l = local_find(c, &e->epoch);
    if (!l)
        return ERR_OK; /* already gone */
    switch (e->kind) {
    case CONTROL_PREPARED:
        if (l->state == EPOCH_PREPARING)
            local_set(c, l, EPOCH_PREPARED);
        return ERR_OK;
    case CONTROL_PREPARE_FAILED:
        if (l->state == EPOCH_GOING)
            local_drop(c, l);
        else if (l->state == EPOCH_PREPARING || l->state == EPOCH_PREPARED)
            refuse(c, &l->plan, e->error ? e->error : ERR_INVALID, e->reason);
        else if (executes(l))
            fail_running(c, l, e);
        return ERR_OK;
    case CONTROL_COMMITTED:
        if (l->state == EPOCH_PREPARED && l->committing)
            local_set(c, l, EPOCH_COMMITTED);
        return ERR_OK;
    case CONTROL_RETIRED:
        if (l->state == EPOCH_FAILED) /* the planner has still to hear why */
            l->releasing = false;
        else
            local_drop(c, l);
        c->report_due = true;
        return ERR_OK;
    default:
        return ERR_INVALID;
    }
}

/* 2.5: whatever was prepared is dropped, what runs waits until the active plan is confirmed. */
void control_member_slept(struct control *c)
{
    for (uint32_t i = c->n_locals; i-- > 0;) {
        struct local *l = &c->locals[i];
        if (executes(l) && !l->suspended) {
            l->suspended = true;
            control_effect_plan(c, CONTROL_SUSPEND, l);
        } else if (l->state == EPOCH_PREPARING || l->state == EPOCH_PREPARED) {
            local_end(c, l);
        }
    }
    for (uint32_t i = 0; i < c->state.n_active; i++) {
        struct control_effect *e = control_effect(c, CONTROL_INACTIVE);
        if (e)
            e->model = c->state.active[i].model;
    }
    c->state.n_active = 0;
}

uint64_t control_state_digest(const struct state *s)
{
    crypto_generichash_state h;
    (void)crypto_generichash_init(&h, NULL, 0, 32);
    for (uint32_t i = 0; i < s->n_active; i++)
        (void)crypto_generichash_update(&h, s->active[i].epoch.hash.bytes, 32);
    for (uint32_t i = 0; i < s->n_no_fit; i++) {
        (void)crypto_generichash_update(&h, s->no_fit[i].model.bytes, 32);
        (void)crypto_generichash_update(&h, (const uint8_t *)s->no_fit[i].sentence,
                                        strlen(s->no_fit[i].sentence) + 1);
        uint8_t refused = s->no_fit[i].refused;
        (void)crypto_generichash_update(&h, &refused, 1);
    }
    uint8_t out[32];
    (void)crypto_generichash_final(&h, out, sizeof out);
    struct reader r = reader_of(out, sizeof out);
    return read_u64(&r);
}

static const struct plan *active_in(const struct state *s, const struct hash256 *model)
{
    for (uint32_t i = 0; i < s->n_active; i++)
        if (hash256_eq(&s->active[i].model, model))
            return &s->active[i];
    return NULL;
}

static const struct no_fit *no_fit_in(const struct state *s, const struct hash256 *model)
{
    for (uint32_t i = 0; i < s->n_no_fit; i++)
        if (hash256_eq(&s->no_fit[i].model, model))
            return &s->no_fit[i];
    return NULL;
}

static enum err state_decode(const Covey__Control__State *m, struct state *ret)
{
    if (m->n_active > CONTROL_MODELS_MAX || m->n_no_fit > CONTROL_MODELS_MAX)
        return ERR_CORRUPT;
    ret->n_active = ret->n_no_fit = 0;
    for (size_t i = 0; i < m->n_active; i++) {
        enum err e = plan_from_message(m->active[i], &ret->active[ret->n_active]);
        if (e == ERR_UNSUPPORTED)
            continue; /* of a newer version: nothing that we could route to */
        if (e != ERR_OK)
            return e;
        if (active_in(ret, &ret->active[ret->n_active].model))
            return ERR_CORRUPT;
        ret->n_active++;
    }
    for (size_t i = 0; i < m->n_no_fit; i++) {
        struct no_fit *n = &ret->no_fit[ret->n_no_fit++];
        memset(n, 0, sizeof *n);
        size_t len = strlen(m->no_fit[i]->sentence);
        if (!control_take_hash(&m->no_fit[i]->model, &n->model))
            return ERR_CORRUPT;
        memcpy(n->sentence, m->no_fit[i]->sentence, MIN_OF(len, sizeof n->sentence - 1));
        n->refused = m->no_fit[i]->refused;
    }
    return ERR_OK;
}

/* The active epoch of an instance is known: ours of it becomes current, others of it drain. */
static void make_current(struct control *c, const struct plan *active)
{
    struct local *l = local_find(c, &active->epoch.hash);
    for (uint32_t i = c->n_locals; i-- > 0;) {
        struct local *other = &c->locals[i];
        if (other != l && hash256_eq(&other->plan.model, &active->model) &&
            other->state == EPOCH_CURRENT)
            local_drain(c, other);
    }
    if (!l)
        return;
    if (l->state == EPOCH_COMMITTED)
        local_set(c, l, EPOCH_CURRENT);
    if (l->suspended && executes(l)) {
        l->suspended = false;
        control_effect_plan(c, CONTROL_RESUME, l);
    }
}

/* Effects for what differs between what was known and what is now. */
static void state_tell(struct control *c, const struct state *next)
{
    for (uint32_t i = 0; i < next->n_active; i++) {
        const struct plan *p = &next->active[i], *old = active_in(&c->state, &p->model);
        if (old && epoch_eq(&old->epoch, &p->epoch))
            continue;
        struct control_effect *e = control_effect(c, CONTROL_ACTIVE);
        if (!e)
            return;
        e->plan = *p;
        e->model = p->model;
        int stage = plan_stage_of(p, &c->options.self);
        e->stage = stage < 0 ? UINT32_MAX : (uint32_t)stage;
    }
    for (uint32_t i = 0; i < c->state.n_active; i++)
        if (!active_in(next, &c->state.active[i].model)) {
            struct control_effect *e = control_effect(c, CONTROL_INACTIVE);
            if (!e)
                return;
            e->model = c->state.active[i].model;
        }
    for (uint32_t k = 0; k < 2; k++) { /* new sentences, then those that are over */
        const struct state *from = k ? &c->state : next, *other = k ? next : &c->state;
        for (uint32_t i = 0; i < from->n_no_fit; i++) {
            const struct no_fit *a = &from->no_fit[i], *b = no_fit_in(other, &a->model);
            if (b && (k || strcmp(a->sentence, b->sentence) == 0))
                continue;
            struct control_effect *e = control_effect(c, CONTROL_NO_FIT);
            if (!e)
                return;
            e->model = a->model;
            e->refused = a->refused;
            if (!k)
                memcpy(e->text.text, a->sentence, sizeof e->text.text);
        }
    }
}

enum err control_state_in(struct control *c, const struct node_id *from,
                          const Covey__Control__State *m)
{
    struct node_id planner;
    if (!control_take_id(&m->planner, &planner))
        return ERR_CORRUPT;
    if (node_id_eq(&planner, from)) {
        if (!control_authority(c, from, m->term))
            return ERR_OK;
    } else {
        control_hearsay(c, from, &planner, m->term, MIN_OF(m->age_ms, UINT64_C(1) << 30) * 1000);
        if (c->planner_direct || !control_planner_lives(c) ||
            !node_id_eq(&c->planner_id, &planner) || c->planner_term != m->term)
            return ERR_OK;
    }
    struct state *next = malloc(sizeof *next);
    if (!next) {
        c->failed = ERR_NO_MEMORY;
        return ERR_OK;
    }
    memset(next, 0, sizeof *next);
    enum err e = state_decode(m, next);
    if (e == ERR_OK) {
        for (uint32_t i = 0; i < next->n_active; i++)
            make_current(c, &next->active[i]);
        state_tell(c, next);
        c->state = *next;
    }
    free(next);
    return e;
}

static uint64_t last_use(const struct control *c, const struct hash256 *model)
{
    for (uint32_t i = 0; i < c->n_wanted; i++)
        if (hash256_eq(&c->wanted[i].model, model))
            return c->wanted[i].used_us;
    return 0;
}

/* When a local epoch ends by itself, 3.7 and 3.10. */
static uint64_t local_due(const struct control *c, const struct local *l)
{
    uint64_t lapse = c->contact_us + CONTROL_LAPSE_US;
    switch (l->state) {
    case EPOCH_PREPARING:
    case EPOCH_PREPARED:
        return lapse;
    case EPOCH_COMMITTED:
    case EPOCH_CURRENT:
        return MAX_OF(lapse, last_use(c, &l->plan.model) + CONTROL_LAPSE_US);
    case EPOCH_DRAINING:
        return l->since_us + CONTROL_DRAIN_US;
    case EPOCH_FAILED:
        return l->since_us + CONTROL_LAPSE_US;
    default:
        return UINT64_MAX;
    }
}

/* Is there a node that could take over what this one runs? Where none is, as when all stop at once,
 * there is nothing to wait for. */
static bool others_stay(const struct control *c)
{
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++) {
        const struct topology_node *t = &c->view.topology.nodes[i];
        bool leaves = node_id_eq(&t->id, &c->options.self);
        for (uint32_t k = 0; k < c->n_members; k++)
            leaves |= node_id_eq(&c->members[k].id, &t->id) && c->members[k].leaving;
        if (t->eligible && !leaves)
            return true;
    }
    return false;
}

static void leave_tick(struct control *c)
{
    if (!c->leaving || c->left)
        return;
    bool waits = false;
    for (uint32_t i = 0; i < c->n_locals; i++)
        waits |= c->locals[i].state != EPOCH_FAILED && !c->locals[i].cannot_move;
    if (waits && others_stay(c) && control_planner_lives(c) && c->now_us < c->leave_due_us)
        return;
    c->left = true;
    if (c->role == ROLE_PLAN)
        control_planner_resign(c);
    (void)control_effect(c, CONTROL_LEFT);
}

void control_member_tick(struct control *c)
{
    if (c->role == ROLE_PLAN)
        c->contact_us = c->now_us;
    for (uint32_t i = c->n_locals; i-- > 0;)
        if (i < c->n_locals && c->now_us >= local_due(c, &c->locals[i]))
            local_end(c, &c->locals[i]);
    leave_tick(c);
}

uint64_t control_member_due(const struct control *c)
{
    uint64_t due = UINT64_MAX;
    for (uint32_t i = 0; i < c->n_locals; i++)
        due = MIN_OF(due, local_due(c, &c->locals[i]));
    if (c->leaving && !c->left)
        due = MIN_OF(due, c->leave_due_us);
    return due;
}
