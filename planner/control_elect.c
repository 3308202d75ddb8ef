/* Who plans: claims, heartbeats, and whom this node follows (PROTOCOL 3.1 to 3.6).
 *
 * There is no majority: two nodes must work. A claim needs the agreement of every member that
 * answers in time, and fails while anyone hears a living planner. Two planners can therefore exist
 * on two sides of a partition; when they meet, the lower (term, key) resigns. Only nodes that our
 * own view reaches both ways are heard as planners: a node that hears nobody would otherwise take
 * the office by claiming into silence. */
#include "planner/control_private.h"

#include "base/util.h"

#include <string.h>

static const struct node_id NOBODY;

void control_term_raise(struct control *c, uint64_t term)
{
    if (term <= c->term_seen)
        return;
    c->term_seen = term;
    c->persist_due = true;
}

bool control_term_allowed(const struct control *c, uint64_t term)
{
    return !c->disk_full || term <= c->term_seen;
}

/* Order of (term, key) among planners. */
static int office_cmp(uint64_t term_a, const struct node_id *a, uint64_t term_b,
                      const struct node_id *b)
{
    if (term_a != term_b)
        return term_a < term_b ? -1 : 1;
    return node_id_cmp(a, b);
}

bool control_planner_lives(const struct control *c)
{
    if (c->role == ROLE_PLAN)
        return true;
    if (node_id_is_zero(&c->planner_id))
        return false;
    uint64_t silent_us = c->now_us - c->planner_heard_us;
    if (c->planner_direct)
        return silent_us < CONTROL_SILENCE_US &&
               (control_reachable(c, &c->planner_id) ||
                (control_counts(c, &c->planner_id) && silent_us < FLAP_US + CONTROL_HEARTBEAT_US));
    return silent_us < CONTROL_HEARSAY_US;
}

/* Preference among claimants, 3.4: mains, wired, longest up, key. */
static bool preferred(const struct control_peer *a, const struct node_id *a_id,
                      const struct control_peer *b, const struct node_id *b_id)
{
    if (a->mains != b->mains)
        return a->mains;
    if (a->wired != b->wired)
        return a->wired;
    if (a->up_ms != b->up_ms)
        return a->up_ms > b->up_ms;
    return node_id_cmp(a_id, b_id) > 0;
}

static struct control_peer own_peer(const struct control *c)
{
    int at = control_view_index(c, &c->options.self);
    return at < 0 ? (struct control_peer){0} : c->view.peers[at];
}

/* When the planner is gone, the preferred claim first. */
static uint64_t claim_delay(struct control *c)
{
    struct control_peer own = own_peer(c);
    uint64_t rank = 0;
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++) {
        const struct node_id *id = &c->view.topology.nodes[i].id;
        if (!control_is_self(c, id) && c->view.peers[i].reachable)
            rank += preferred(&c->view.peers[i], id, &own, &c->options.self);
    }
    return rank * 100000 + rng_below(&c->rng, 100000);
}

static uint64_t back_off(struct control *c)
{
    uint32_t n = c->n_refused < 8 ? c->n_refused : 8;
    uint64_t us =
        CONTROL_RETRY_MIN_US + rng_below(&c->rng, CONTROL_RETRY_MAX_US - CONTROL_RETRY_MIN_US + 1);
    us <<= n;
    c->n_refused++;
    return MIN_OF(us, (uint64_t)CONTROL_RETRY_LIMIT_US);
}

void control_elect_forget(struct control *c)
{
    c->planner_id = NOBODY;
    c->planner_term = 0;
    c->planner_direct = false;
}

static void claim_stop(struct control *c)
{
    if (c->role != ROLE_CLAIM)
        return;
    c->role = ROLE_FOLLOW;
    control_planner_stop(c);
    c->next_claim_us = c->now_us + back_off(c);
    /* Withdrawn: who agreed need not wait any longer, or a split vote repeats itself. */
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++)
        if (!control_is_self(c, &c->view.topology.nodes[i].id))
            control_send_heartbeat(c, &c->view.topology.nodes[i].id, false, true);
}

static void follow(struct control *c, const struct node_id *planner, uint64_t term)
{
    if (c->role == ROLE_PLAN)
        control_planner_resign(c);
    claim_stop(c);
    if (!node_id_eq(&c->planner_id, planner) || c->planner_term != term || !c->planner_direct)
        c->report_full = true;
    c->planner_id = *planner;
    c->planner_term = term;
    c->planner_direct = true;
    c->planner_heard_us = c->now_us;
    c->n_refused = 0;
    control_term_raise(c, term);
}

bool control_authority(struct control *c, const struct node_id *from, uint64_t term)
{
    if (control_is_self(c, from))
        return c->role == ROLE_PLAN && term == c->planner_term;
    if (!control_reachable(c, from) || term == 0)
        return false;
    bool same = c->planner_direct && node_id_eq(&c->planner_id, from);
    if (same && term == c->planner_term)
        return true;
    if (term < c->term_seen || (same && term < c->planner_term))
        return false;
    bool rival = c->role == ROLE_PLAN || (c->planner_direct && !same && control_planner_lives(c));
    if (rival && office_cmp(term, from, c->planner_term, &c->planner_id) < 0)
        return false;
    if (!control_term_allowed(c, term)) {
        if (c->role == ROLE_PLAN) /* resigning needs no disk (3.5) */
            control_planner_resign(c);
        return false;
    }
    follow(c, from, term);
    return true;
}

enum err control_heartbeat_in(struct control *c, const struct node_id *from,
                              const Covey__Control__Heartbeat *m)
{
    bool self = control_is_self(c, from);
    if (m->resigns) {
        if (!self && node_id_eq(&c->promised, from) && c->promised_us != 0) {
            c->promised_us = 0;
            if (c->role == ROLE_FOLLOW && !control_planner_lives(c))
                c->next_claim_us = c->now_us + claim_delay(c);
        }
        if (c->role != ROLE_PLAN && node_id_eq(&c->planner_id, from)) {
            control_elect_forget(c);
            c->next_claim_us = c->now_us + claim_delay(c);
        }
        return ERR_OK;
    }
    if (!control_authority(c, from, m->term)) {
        if (self || !control_reachable(c, from))
            return ERR_OK;
        if (c->role == ROLE_PLAN)
            control_send_heartbeat(c, from, false, false); /* it is lower and will resign */
        else
            control_send_report(c, from,
                                false); /* it learns why: a higher term, a better planner */
        return ERR_OK;
    }
    c->planner_heard_us = c->contact_us = c->now_us;
    c->report_due = true;
    c->report_full |= m->full;
    if (self)
        return ERR_OK;
    if (m->wanted_digest != control_wanted_digest(c))
        control_wanted_send(c, from, true);
    if (m->settled && m->state_digest != control_state_digest(&c->state))
        control_send_sync(c, from);
    return ERR_OK;
}

void control_hearsay(struct control *c, const struct node_id *teller, const struct node_id *planner,
                     uint64_t term, uint64_t age_us)
{
    bool direct = c->planner_direct && control_planner_lives(c);
    if (c->role == ROLE_PLAN || direct || control_is_self(c, planner) || node_id_is_zero(planner) ||
        age_us > FRESH_US)
        return;
    claim_stop(c);
    uint64_t heard = age_us < c->now_us ? c->now_us - age_us : 0;
    bool newer = !node_id_eq(&c->planner_id, planner) || heard > c->planner_heard_us;
    c->planner_id = *planner;
    c->planner_term = term;
    c->planner_direct = false;
    c->teller = *teller;
    if (newer)
        c->planner_heard_us = heard;
}

static void office_take(struct control *c)
{
    c->role = ROLE_PLAN;
    c->planner_id = c->options.self;
    c->planner_term = c->claim_term;
    c->planner_direct = true;
    c->planner_heard_us = c->contact_us = c->now_us;
    c->claim_term = 0; /* used: the next office takes a new one */
    c->n_refused = 0;
    control_planner_start(c);
}

static void claim_start(struct control *c)
{
    if (c->claim_term == 0 || c->claim_term != c->term_seen)
        c->claim_term = c->term_seen + 1;
    control_term_raise(c, c->claim_term);
    control_planner_stop(c);
    c->role = ROLE_CLAIM;
    c->claim_us = c->now_us;
    c->n_waiting = 0;
    struct control_peer own = own_peer(c);
    Covey__Control__Claim b = COVEY__CONTROL__CLAIM__INIT;
    b.term = c->claim_term;
    b.mains = own.mains;
    b.wired = own.wired;
    b.up_ms = own.up_ms;
    Covey__Control__Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = COVEY__CONTROL__MESSAGE__BODY_CLAIM;
    m.claim = &b;
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++) {
        const struct node_id *id = &c->view.topology.nodes[i].id;
        if (control_is_self(c, id) || !c->view.peers[i].reachable)
            continue;
        c->waiting[c->n_waiting++] = *id;
        control_send_message(c, id, &m);
    }
    if (c->n_waiting == 0)
        office_take(c);
}

/* May this claim be agreed to? */
static bool claim_agreeable(struct control *c, const struct node_id *from,
                            const Covey__Control__Claim *m)
{
    if (c->role == ROLE_PLAN ||
        (control_planner_lives(c) && c->planner_direct && !node_id_eq(&c->planner_id, from)))
        return false;
    bool promised_it = c->promised_term == m->term && node_id_eq(&c->promised, from);
    if (promised_it && m->term == c->term_seen)
        return true;
    struct control_peer theirs = {true, m->mains, m->wired, m->up_ms}, own = own_peer(c);
    bool claiming = c->role == ROLE_CLAIM;
    if (claiming && preferred(&own, &c->options.self, &theirs, from))
        return false;
    /* Two claims of one term: ours is withdrawn when theirs is preferred. */
    if (m->term < c->term_seen ||
        (m->term == c->term_seen && !(claiming && m->term == c->claim_term)))
        return false;
    bool bound = c->promised_us != 0 && c->now_us - c->promised_us < PROMISE_US &&
                 !node_id_eq(&c->promised, from) && control_reachable(c, &c->promised);
    return !bound;
}

void control_claim_in(struct control *c, const struct node_id *from, const Covey__Control__Claim *m)
{
    /* Silence, not a refusal: that would keep the others from having a planner. */
    if (control_is_self(c, from) || !control_term_allowed(c, m->term))
        return;
    bool agree = m->term > 0 && claim_agreeable(c, from, m);
    if (agree) {
        claim_stop(c);
        c->promised = *from;
        c->promised_term = m->term;
        c->promised_us = c->now_us;
        control_term_raise(c, m->term);
        /* It will plan in a moment; do not cross it. */
        c->next_claim_us =
            MAX_OF(c->next_claim_us, c->now_us + UINT64_C(2) * CONTROL_CLAIM_US + claim_delay(c));
    }
    control_send_claim_answer(c, from, m->term, agree);
}

enum err control_claim_answer_in(struct control *c, const struct node_id *from,
                                 const Covey__Control__ClaimAnswer *m)
{
    if (c->role != ROLE_CLAIM || m->term != c->claim_term)
        return ERR_OK;
    if (m->agree) {
        if (m->report)
            TRY(control_report_in(c, from, m->report));
        for (uint32_t i = 0; i < c->n_waiting; i++)
            if (node_id_eq(&c->waiting[i], from)) {
                c->waiting[i] = c->waiting[--c->n_waiting];
                if (c->n_waiting == 0)
                    office_take(c);
                break;
            }
        return ERR_OK;
    }
    claim_stop(c);
    struct node_id planner;
    if (control_take_id(&m->planner, &planner)) {
        control_hearsay(c, from, &planner, m->planner_term,
                        MIN_OF(m->planner_age_ms, 1u << 30) * 1000);
    } else {
        c->claim_term = 0; /* spent: some may have agreed to it, or to another's of that term */
        if (control_term_allowed(c, m->term_seen))
            control_term_raise(c, m->term_seen);
    }
    return ERR_OK;
}

void control_planner_resign(struct control *c)
{
    for (uint32_t i = 0; i < c->view.topology.n_nodes; i++)
        if (!control_is_self(c, &c->view.topology.nodes[i].id))
            control_send_heartbeat(c, &c->view.topology.nodes[i].id, false, true);
    c->role = ROLE_FOLLOW;
    control_elect_forget(c);
    control_planner_stop(c);
    c->next_claim_us = c->now_us + back_off(c);
}

/* Somebody has seen a higher term, of a claim that failed or a planner that is gone. */
void control_planner_retake(struct control *c, uint64_t above)
{
    if (c->disk_full) { /* those who saw it do not obey: who can take a higher one shall plan */
        control_planner_resign(c);
        return;
    }
    c->planner_term = MAX_OF(c->term_seen, above) + 1;
    control_term_raise(c, c->planner_term);
    c->heartbeat_us = c->now_us;
}

/* Nobody has heard of a term that was not written: it is as if it had not been. */
static void term_unsaid(struct control *c, uint64_t term_on_disk)
{
    c->term_seen = term_on_disk;
    c->claim_term = c->promised_term = c->promised_us = 0;
    c->promised = NOBODY;
    bool office = c->role == ROLE_CLAIM || (c->role == ROLE_PLAN && c->planner_term > term_on_disk);
    if (office) {
        c->role = ROLE_FOLLOW;
        control_planner_stop(c);
    }
    if (office || (c->planner_direct && c->planner_term > term_on_disk))
        control_elect_forget(c);
}

void control_elect_disk(struct control *c, bool full, uint64_t term_on_disk)
{
    if (full)
        c->persist_due = true; /* as soon as there is room */
    if (full && c->term_seen > term_on_disk)
        term_unsaid(c, term_on_disk);
    if (c->disk_full && !full)
        c->next_claim_us = c->now_us + claim_delay(c);
    c->disk_full = full;
}

/* A fresh node claims when it has listened for a while, and as soon as it knows its own speed when
 * there is nobody to be heard. */
static uint64_t listens_until(const struct control *c)
{
    bool at_once = c->view.sole && c->view.topology.nodes[0].eligible;
    return at_once ? c->started_us : c->started_us + CONTROL_START_US;
}

void control_elect_tick(struct control *c)
{
    if (c->role == ROLE_PLAN || !c->has_view)
        return;
    if (c->role == ROLE_CLAIM) {
        if (c->now_us - c->claim_us >= CONTROL_CLAIM_US)
            office_take(c);
        return;
    }
    if (control_planner_lives(c)) {
        if (!c->planner_direct && c->now_us >= c->asked_us + CONTROL_HEARTBEAT_US) {
            c->asked_us = c->now_us;
            control_send_sync(c, &c->teller);
        }
        return;
    }
    if (!node_id_is_zero(&c->planner_id)) {
        control_elect_forget(c);
        c->next_claim_us = MAX_OF(c->next_claim_us, c->now_us + claim_delay(c));
    }
    if (!c->leaving && !c->disk_full && c->now_us >= c->next_claim_us &&
        c->now_us >= listens_until(c))
        claim_start(c);
}

/* Other members are within reach now: earlier refusals say nothing about the next claim. */
void control_elect_reach_changed(struct control *c)
{
    if (c->n_refused <= 1)
        return;
    c->n_refused = 0;
    if (c->role == ROLE_FOLLOW && !control_planner_lives(c))
        c->next_claim_us = MIN_OF(c->next_claim_us, c->now_us + back_off(c) + claim_delay(c));
}

void control_tell_planner(struct control *c)
{
    bool lives = control_planner_lives(c);
    struct node_id id = lives ? c->planner_id : NOBODY;
    uint64_t term = lives ? c->planner_term : 0;
    if (node_id_eq(&id, &c->told_planner) && term == c->told_term)
        return;
    c->told_planner = id;
    c->told_term = term;
    struct control_effect *e = control_effect(c, CONTROL_PLANNER);
    if (!e)
        return;
    e->node = id;
    e->term = term;
}

uint64_t control_elect_due(const struct control *c)
{
    if (c->role == ROLE_PLAN || !c->has_view)
        return UINT64_MAX;
    if (c->role == ROLE_CLAIM)
        return c->claim_us + CONTROL_CLAIM_US;
    if (control_planner_lives(c)) {
        if (c->planner_direct)
            return c->planner_heard_us + (control_reachable(c, &c->planner_id)
                                              ? (uint64_t)CONTROL_SILENCE_US
                                              : FLAP_US + CONTROL_HEARTBEAT_US);
        return MIN_OF(c->planner_heard_us + CONTROL_HEARSAY_US, c->asked_us + CONTROL_HEARTBEAT_US);
    }
    if (c->leaving || c->disk_full)
        return UINT64_MAX;
    return MAX_OF(c->next_claim_us, listens_until(c));
}
