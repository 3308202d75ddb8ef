/* What is believed about each member: claims and their order, suspicion, refutation, and two
 * processes under one key.
 *
 * Order: (incarnation, state, boot_id), the largest wins, so that all views end equal whatever the
 * order of arrival. In SWIM a death is final; here a higher incarnation ends it (as in the
 * `memberlist` library's protocol).
 *
 * Restart and conflict (PROTOCOL 1.7): a process that hears a claim about its own key with another
 * boot_id that is not below its own jumps above it and names that boot as its `rival`. A dead
 * process cannot answer. A live one jumps again and names the newcomer as *its* rival, and a claim
 * by another boot that names ours is the proof that it lived after we started: both say `conflict`
 * and repeat it, each above the other, until one falls silent. Others keep one session with a key,
 * so that one of the two may be heard by nobody; but the two also meet in a handshake, where each
 * proves the key to the other. */
#include "discovery/swim_internal.h"

int claim_cmp(const struct claim *a, const struct claim *b)
{
    if (a->incarnation != b->incarnation)
        return a->incarnation < b->incarnation ? -1 : 1;
    if (a->state != b->state)
        return a->state < b->state ? -1 : 1;
    if (a->boot_id != b->boot_id)
        return a->boot_id < b->boot_id ? -1 : 1;
    return 0;
}

/* Lifeguard section IV.B: from max down to min, logarithmically in the number of confirmations.
 * With nobody to confirm it is min at once. */
static uint64_t suspicion_timeout(const struct swim *s, const struct node *n)
{
    static const double ln[BY_MAX + 1] = {0, 0, 0.6931, 1.0986, 1.3863};
    uint32_t live = n_live(s); /* with the suspect, without us */
    uint32_t k = live > 1 ? MIN_OF(MIN_OF(live - 1, s->o.n_confirmations), BY_MAX - 1) : 0;
    uint32_t c = n->claim.n_by > 1 ? MIN_OF(n->claim.n_by - 1, k) : 0;
    uint64_t timeout = s->o.suspicion_min_us;
    if (k > 0) {
        double span = (double)(s->o.suspicion_max_us - s->o.suspicion_min_us);
        timeout = s->o.suspicion_max_us - (uint64_t)(span * ln[c + 1] / ln[k + 1]);
    }
    return timeout * (1 + MIN_OF(n->suspicion_health, s->health));
}

/* Adds those who confirm the suspicion; only members count. */
static void confirm(struct swim *s, struct node *n, const struct node_id *by, uint32_t n_by)
{
    for (uint32_t i = 0; i < n_by && n->claim.n_by < BY_MAX; i++) {
        bool known = false;
        for (uint32_t j = 0; j < n->claim.n_by; j++)
            known = known || node_id_eq(&n->claim.by[j], &by[i]);
        if (known || node_id_eq(&by[i], &n->id) || !node_find(s, &by[i]))
            continue;
        n->claim.by[n->claim.n_by++] = by[i];
        gossip_claim(s, n);
    }
}

static void on_suspect(struct swim *s, struct swim_update *u, struct node *n)
{
    n->suspected_us = s->now_us;
    n->suspicion_health = s->health;
    gossip_tell(s, u, n);
    uint32_t live = n_live(s);
    if (live <= CROWD || rng_below(&s->rng, live) < CROWD)
        probe_start(s, u, n);
}

static void accept_claim(struct swim *s, struct swim_update *u, struct node *n,
                         const struct claim *c)
{
    enum swim_state old = node_state(n);
    bool was_live = node_is_live(n);
    bool other_boot = n->claim.boot_id != c->boot_id;
    struct claim claim = *c;
    claim.n_by = 0;
    n->claim = claim;
    n->lost = false;
    if (other_boot) {
        n->heard_us = 0;
        n->step = 0;
        n->layers_done = 0;
        n->progress_at_us = 0;
    }
    s->hash_valid = false;
    gossip_claim(s, n);
    enum swim_state new = node_state(n);
    if (new != old || (other_boot && node_is_live(n)))
        emit_state(s, u, n, old);
    if (c->state == SWIM_SUSPECT) {
        confirm(s, n, c->by, c->n_by);
        on_suspect(s, u, n);
    } else if (!node_is_live(n)) {
        n->probe.active = false;
        probe_paths_down(s, u, n);
    } else if (!was_live) {
        probe_start(s, u, n);
    }
}

static void raise_self(struct swim *s, struct swim_update *u, uint64_t above, enum swim_state state)
{
    struct node *me = &s->nodes[0];
    enum swim_state old = me->claim.state;
    uint64_t incarnation = MAX_OF(me->claim.incarnation, above) + 1;
    me->claim.incarnation = MIN_OF(incarnation, INCARNATION_LIMIT - 1);
    me->claim.state = state;
    s->hash_valid = false;
    gossip_claim(s, me);
    (void)effect_add(s, u, SWIM_EFFECT_INCARNATION, me);
    if (state != old)
        emit_state(s, u, me, old);
}

void claim_self(struct swim *s, struct swim_update *u, enum swim_state state)
{
    raise_self(s, u, s->rival_incarnation, state);
}

static void conflict_begin(struct swim *s, struct swim_update *u, uint64_t boot_id, uint64_t above)
{
    s->conflict_claim_at_us = s->now_us + s->o.conflict_claim_us;
    struct swim_effect *e = effect_add(s, u, SWIM_EFFECT_SELF_CONFLICT, &s->nodes[0]);
    if (e)
        e->boot_id = boot_id;
    raise_self(s, u, above, SWIM_CONFLICT);
}

void claim_meet_rival(struct swim *s, struct swim_update *u, uint64_t boot_id)
{
    struct node *me = &s->nodes[0];
    if (s->silent || boot_id == me->claim.boot_id)
        return;
    s->conflict_seen_us = s->now_us;
    me->claim.rival = boot_id;
    if (me->claim.state != SWIM_CONFLICT)
        conflict_begin(s, u, boot_id, s->rival_incarnation);
}

static void hear_of_rival(struct swim *s, struct swim_update *u, const struct claim *c)
{
    struct node *me = &s->nodes[0];
    bool newer = c->incarnation > s->rival_incarnation;
    bool above = claim_cmp(c, &me->claim) > 0;
    if (newer) {
        s->rival_incarnation = c->incarnation;
        me->claim.rival = c->boot_id;
    }
    if (newer && c->rival == me->claim.boot_id) {
        s->conflict_seen_us = s->now_us;
        if (me->claim.state == SWIM_CONFLICT) {
            /* Answered soon, not at once: the two would go on as fast as the network lets them.
             * Both may have taken the same incarnation, where the smaller boot_id is seen by
             * nobody. */
            uint64_t pause_us = s->o.conflict_claim_us / 4;
            if (above)
                s->conflict_claim_at_us =
                    MIN_OF(s->conflict_claim_at_us,
                           s->now_us + pause_us + rng_below(&s->rng, pause_us + 1));
            return;
        }
        conflict_begin(s, u, c->boot_id, c->incarnation);
    } else if (above && me->claim.state != SWIM_CONFLICT) {
        raise_self(s, u, c->incarnation, me->claim.state);
    }
}

static void hear_of_self(struct swim *s, struct swim_update *u, const struct claim *c)
{
    struct node *me = &s->nodes[0];
    if (c->boot_id != me->claim.boot_id) {
        hear_of_rival(s, u, c);
    } else if (claim_cmp(c, &me->claim) > 0) {
        /* Lifeguard: to be suspected is a sign that we are slow. */
        if (c->state == SWIM_SUSPECT || c->state == SWIM_DEAD)
            health_worse(s, 1);
        raise_self(s, u, c->incarnation, me->claim.state);
    }
}

void claim_hear(struct swim *s, struct swim_update *u, struct node *n, const struct claim *c)
{
    if (n == &s->nodes[0]) {
        hear_of_self(s, u, c);
        return;
    }
    int order = n->claim.incarnation == 0 ? 1 : claim_cmp(c, &n->claim);
    if (order > 0)
        accept_claim(s, u, n, c);
    else if (order == 0 && c->state == SWIM_SUSPECT)
        confirm(s, n, c->by, c->n_by);
}

void claim_suspect(struct swim *s, struct swim_update *u, struct node *n)
{
    struct claim c = n->claim;
    c.state = SWIM_SUSPECT;
    c.by[0] = s->o.self;
    c.n_by = 1;
    for (uint32_t i = 0; i < n->probe.n_nacks && c.n_by < BY_MAX; i++)
        c.by[c.n_by++] = n->probe.nacks[i];
    claim_hear(s, u, n, &c);
}

void claim_dead(struct swim *s, struct swim_update *u, struct node *n)
{
    struct claim c = n->claim;
    c.state = SWIM_DEAD;
    claim_hear(s, u, n, &c);
}

static void conflict_timers(struct swim *s, struct swim_update *u)
{
    struct node *me = &s->nodes[0];
    if (me->claim.state != SWIM_CONFLICT)
        return;
    if (s->now_us >= s->conflict_seen_us + s->o.conflict_quiet_us) {
        me->claim.rival = 0;
        s->conflict_claim_at_us = NEVER;
        claim_self(s, u, SWIM_ALIVE);
    } else if (s->now_us >= s->conflict_claim_at_us) {
        s->conflict_claim_at_us = s->now_us + s->o.conflict_claim_us;
        claim_self(s, u, SWIM_CONFLICT);
    }
}

void claim_timers(struct swim *s, struct swim_update *u)
{
    conflict_timers(s, u);
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        if (node_state(n) != SWIM_SUSPECT || s->now_us < n->suspected_us + suspicion_timeout(s, n))
            continue;
        if (n->heard_us >= n->suspected_us) {
            /* It lives; it does not hear that it should say so. We tell it again, and will not be
             * the one who calls it dead. */
            n->suspected_us = s->now_us;
            gossip_tell(s, u, n);
        } else {
            claim_dead(s, u, n);
        }
    }
}

uint64_t claim_due(const struct swim *s)
{
    uint64_t due = NEVER;
    if (s->nodes[0].claim.state == SWIM_CONFLICT)
        due = MIN_OF(s->conflict_seen_us + s->o.conflict_quiet_us, s->conflict_claim_at_us);
    for (uint32_t i = 1; i < s->n_nodes; i++)
        if (node_state(&s->nodes[i]) == SWIM_SUSPECT)
            due = MIN_OF(due, s->nodes[i].suspected_us + suspicion_timeout(s, &s->nodes[i]));
    return due;
}
