/* Probes: pings over each path in turn, helpers, round-trip times and loss of every path.
 *
 * A probe of a member is: a ping over the path whose turn it is; when that is not answered in time,
 * pings over all other paths and the session, and requests to k helpers; when the end comes with no
 * answer of any kind and no other word from the member, it is suspected. Each ping also is one
 * sample of its path: answered (a round-trip time) or lost. */
#include "discovery/swim_internal.h"

#include <string.h>

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

void path_view(const struct path *p, struct swim_path_view *ret)
{
    *ret = (struct swim_path_view){.id = p->id, .up = p->up, .n_samples = p->n_rtt};
    if (p->n_outcomes > 0)
        ret->loss = (double)__builtin_popcount(p->outcomes) / p->n_outcomes;
    if (p->n_rtt == 0)
        return;
    uint32_t sorted[SWIM_RTT_SAMPLES];
    memcpy(sorted, p->rtt_us, p->n_rtt * sizeof sorted[0]);
    qsort(sorted, p->n_rtt, sizeof sorted[0], by_value);
    ret->rtt_p50_us = sorted[(p->n_rtt - 1) / 2];
    ret->rtt_p99_us = sorted[(p->n_rtt * 99 + 99) / 100 - 1];
}

const struct path *path_best(const struct node *n)
{
    const struct path *best = NULL;
    struct swim_path_view best_view = {0};
    for (uint32_t i = 0; i < n->n_paths; i++) {
        struct swim_path_view v;
        path_view(&n->paths[i], &v);
        if (!v.up)
            continue;
        if (!best || v.loss + 0.1 < best_view.loss ||
            (v.loss < best_view.loss + 0.1 && v.rtt_p50_us < best_view.rtt_p50_us)) {
            best = &n->paths[i];
            best_view = v;
        }
    }
    return best;
}

static struct path *path_find(struct node *n, uint32_t id)
{
    for (uint32_t i = 0; i < n->n_paths; i++)
        if (n->paths[i].id == id)
            return &n->paths[i];
    return NULL;
}

static void emit_edge(struct swim *s, struct swim_update *u, struct node *n, struct path *p)
{
    struct swim_effect *e = effect_add(s, u, SWIM_EFFECT_EDGE, n);
    if (e) {
        path_view(p, &e->path);
        p->reported_p50_us = e->path.rtt_p50_us;
        p->reported_at_us = s->now_us;
    }
}

static uint64_t direct_timeout(const struct swim *s, struct node *n, uint32_t path)
{
    uint64_t timeout = s->o.direct_max_us;
    struct path *p = path_find(n, path);
    if (p && p->n_rtt > 0) {
        struct swim_path_view v;
        path_view(p, &v);
        timeout = 3 * v.rtt_p99_us + s->o.direct_slack_us;
    }
    timeout = MIN_OF(MAX_OF(timeout, s->o.direct_min_us), s->o.direct_max_us);
    return timeout * (1 + s->health);
}

static struct attempt *ping(struct swim *s, struct swim_update *u, struct node *n, uint32_t path)
{
    uint64_t seq = s->next_seq++;
    struct attempt *a = &s->attempts[seq % ATTEMPTS_MAX];
    *a = (struct attempt){
        .open = true,
        .seq = seq,
        .peer = n->id,
        .path = path,
        .sent_us = s->now_us,
        .expires_us = s->now_us + direct_timeout(s, n, path),
    };
    s->attempts_due_us = MIN_OF(s->attempts_due_us, a->expires_us);
    enum way way = path == PATH_SESSION ? WAY_SESSION : WAY_DATAGRAM;
    struct draft *d = draft_begin(s, way);
    d->ping.seq = seq;
    d->message.ping = &d->ping;
    d->message.body_case = COVEY__SWIM__MESSAGE__BODY_PING;
    draft_send(s, u, n, path == PATH_SESSION ? 0 : path, way);
    return a;
}

void probe_paths(struct swim *s, struct swim_update *u, struct node *n, const uint32_t *ids,
                 uint32_t n_ids)
{
    struct path old[SWIM_PATHS_MAX];
    uint32_t n_old = n->n_paths;
    memcpy(old, n->paths, sizeof old);
    n->n_paths = 0;
    for (uint32_t i = 0; i < n_ids; i++) {
        if (path_find(n, ids[i]))
            continue;
        struct path *p = &n->paths[n->n_paths++];
        *p = (struct path){.id = ids[i]};
        for (uint32_t j = 0; j < n_old; j++)
            if (old[j].id == ids[i])
                *p = old[j];
    }
    n->path_turn = 0;
    if (s->silent)
        return;
    enum swim_state state = node_state(n);
    for (uint32_t i = 0; i < n->n_paths; i++) {
        bool known = false;
        for (uint32_t j = 0; j < n_old; j++)
            known = known || old[j].id == n->paths[i].id;
        if (!known && state != SWIM_LEFT && state != SWIM_ASLEEP)
            (void)ping(s, u, n, n->paths[i].id);
    }
}

void probe_paths_down(struct swim *s, struct swim_update *u, struct node *n)
{
    for (uint32_t i = 0; i < n->n_paths; i++) {
        if (!n->paths[i].up)
            continue;
        n->paths[i].up = false;
        emit_edge(s, u, n, &n->paths[i]);
    }
}

void probe_forget(struct swim *s, struct node *n)
{
    n->probe.active = false;
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++) {
        struct attempt *a = &s->attempts[i];
        if (node_id_eq(&a->peer, &n->id) || (a->relay && node_id_eq(&a->relay_for, &n->id)))
            *a = (struct attempt){0};
    }
    s->attempts_changed = true;
}

void probe_shift(struct swim *s, uint64_t late_us)
{
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++) {
        s->attempts[i].expires_us += late_us;
        s->attempts[i].tainted = true;
    }
    s->attempts_changed = true;
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        s->nodes[i].probe.direct_at_us += late_us;
        s->nodes[i].probe.end_at_us += late_us;
    }
}

void probe_start(struct swim *s, struct swim_update *u, struct node *n)
{
    if (n->probe.active || s->silent)
        return;
    uint32_t first = n->n_paths > 0 ? n->paths[n->path_turn++ % n->n_paths].id : 0;
    struct attempt *a = ping(s, u, n, first);
    uint64_t direct_at_us = a->expires_us;
    /* A path that is down tells nothing about the member: ask over the best one too. */
    const struct path *best = path_best(n), *p = path_find(n, first);
    if (p && best && best != p && !p->up) {
        uint32_t id = best->id;
        direct_at_us = ping(s, u, n, id)->expires_us;
    }
    n->probe = (struct probe){
        .active = true,
        .seq = s->next_seq++,
        .started_us = s->now_us,
        .direct_at_us = direct_at_us,
        .end_at_us = direct_at_us + s->o.indirect_us * (1 + s->health),
    };
}

void probe_urgently(struct swim *s, struct swim_update *u, struct node *n)
{
    n->probe.active = false;
    probe_start(s, u, n);
    n->probe.direct_at_us = s->now_us; /* the timers of this step ask the helpers */
}

/* k random live members other than the target (reservoir sampling). */
static uint32_t pick_helpers(struct swim *s, const struct node *target,
                             struct node *helpers[HELPERS_MAX])
{
    uint32_t seen = 0, n = 0, k = s->o.n_helpers;
    for (uint32_t i = 1; i < s->n_nodes && k > 0; i++) {
        struct node *h = &s->nodes[i];
        if (h == target || node_state(h) != SWIM_ALIVE)
            continue;
        seen++;
        if (n < k) {
            helpers[n++] = h;
        } else {
            uint64_t at = rng_below(&s->rng, seen);
            if (at < k)
                helpers[at] = h;
        }
    }
    return n;
}

static void ask_others(struct swim *s, struct swim_update *u, struct node *n)
{
    struct probe *probe = &n->probe;
    probe->asked = true;
    if (n->n_paths == 0)
        (void)ping(s, u, n, 0);
    for (uint32_t i = 0; i < n->n_paths; i++)
        (void)ping(s, u, n, n->paths[i].id);
    if (n->session_up)
        (void)ping(s, u, n, PATH_SESSION);
    struct node *helpers[HELPERS_MAX] = {NULL};
    probe->n_asked = pick_helpers(s, n, helpers);
    uint64_t timeout_us = (probe->end_at_us - s->now_us) / 10 * 8; /* Lifeguard: nack at 80 % */
    for (uint32_t i = 0; i < probe->n_asked; i++) {
        enum way way = gossip_way(helpers[i]);
        struct draft *d = draft_begin(s, way);
        d->ping_request.seq = probe->seq;
        d->ping_request.target.data = n->id.bytes;
        d->ping_request.target.len = sizeof n->id.bytes;
        d->ping_request.timeout_us = (uint32_t)MIN_OF(timeout_us, UINT32_MAX);
        d->message.ping_request = &d->ping_request;
        d->message.body_case = COVEY__SWIM__MESSAGE__BODY_PING_REQUEST;
        draft_send(s, u, helpers[i], 0, way);
    }
}

static void probe_end(struct swim *s, struct swim_update *u, struct node *n)
{
    struct probe *probe = &n->probe;
    probe->active = false;
    if (n->heard_us > probe->started_us)
        return; /* no answer to the probe, but another word from it */
    if (!node_is_live(n))
        return;
    enum swim_state old = node_state(n);
    claim_suspect(s, u, n);
    if (old == SWIM_SUSPECT)
        return;
    /* Lifeguard: helpers that kept silent too, or nobody to ask: it may be us. */
    uint32_t missed = probe->n_asked > 0 ? probe->n_asked - probe->n_nacks : 1;
    health_worse(s, missed);
}

static void path_answered(struct swim *s, struct swim_update *u, struct node *n,
                          const struct attempt *a)
{
    struct path *p = path_find(n, a->path);
    if (!p)
        return;
    if (!a->tainted) {
        uint64_t rtt_us = MAX_OF(s->now_us - a->sent_us, 1u);
        p->rtt_us[p->next_rtt] = (uint32_t)MIN_OF(rtt_us, UINT32_MAX);
        p->next_rtt = (p->next_rtt + 1) % SWIM_RTT_SAMPLES;
        p->n_rtt = MIN_OF(p->n_rtt + 1, (uint32_t)SWIM_RTT_SAMPLES);
    }
    p->lost_in_row = 0;
    if (a->open) {
        p->outcomes <<= 1;
        p->n_outcomes = MIN_OF(p->n_outcomes + 1, 32u);
    }
    if (!p->up) {
        p->up = true;
        emit_edge(s, u, n, p);
        return;
    }
    if (s->now_us < p->reported_at_us + EDGE_REPORT_GAP_US)
        return;
    struct swim_path_view v;
    path_view(p, &v);
    uint64_t was = p->reported_p50_us;
    uint64_t moved = v.rtt_p50_us > was ? v.rtt_p50_us - was : was - v.rtt_p50_us;
    if (moved > 50 && moved * 4 > was)
        emit_edge(s, u, n, p);
}

static void path_lost(struct swim *s, struct swim_update *u, struct node *n, uint32_t id)
{
    struct path *p = path_find(n, id);
    if (!p)
        return;
    p->outcomes = p->outcomes << 1 | 1;
    p->n_outcomes = MIN_OF(p->n_outcomes + 1, 32u);
    p->lost_in_row++;
    if (!p->up)
        return;
    if (p->lost_in_row < PATH_DOWN_AFTER) {
        (void)ping(s, u, n, id); /* find out now rather than at its next turn */
    } else {
        p->up = false;
        emit_edge(s, u, n, p);
    }
}

static void answer_relay(struct swim *s, struct swim_update *u, const struct attempt *a,
                         struct node *target)
{
    struct node *asker = node_find(s, &a->relay_for);
    if (!asker || asker == &s->nodes[0])
        return;
    enum way way = gossip_way(asker);
    struct draft *d = draft_begin(s, way);
    ProtobufCBinaryData id = {sizeof a->peer.bytes, (uint8_t *)(uintptr_t)a->peer.bytes};
    if (target) {
        d->indirect_ack.seq = a->relay_seq;
        d->indirect_ack.target = id;
        d->indirect_ack.boot_id = target->claim.boot_id;
        d->indirect_ack.incarnation = target->claim.incarnation;
        d->message.indirect_ack = &d->indirect_ack;
        d->message.body_case = COVEY__SWIM__MESSAGE__BODY_INDIRECT_ACK;
    } else {
        d->nack.seq = a->relay_seq;
        d->nack.target = id;
        d->message.nack = &d->nack;
        d->message.body_case = COVEY__SWIM__MESSAGE__BODY_NACK;
    }
    draft_send(s, u, asker, 0, way);
}

void probe_on_ack(struct swim *s, struct swim_update *u, struct node *n, uint64_t seq)
{
    struct attempt *slot = &s->attempts[seq % ATTEMPTS_MAX];
    if (slot->seq != seq || seq == 0 || !node_id_eq(&slot->peer, &n->id))
        return;
    struct attempt a = *slot;
    *slot = (struct attempt){0};
    s->attempts_changed = true;
    path_answered(s, u, n, &a);
    if (a.relay) {
        answer_relay(s, u, &a, n);
        return;
    }
    if (n->probe.active && a.sent_us >= n->probe.started_us) {
        n->probe.active = false;
        health_better(s);
    }
}

void probe_on_request(struct swim *s, struct swim_update *u, struct node *n,
                      const struct node_id *target, uint64_t seq, uint64_t timeout_us)
{
    struct node *t = node_find(s, target);
    if (!t || t == &s->nodes[0] || t == n)
        return;
    const struct path *best = path_best(t);
    uint32_t path = best ? best->id : t->n_paths > 0 ? t->paths[0].id : 0;
    struct attempt *a = ping(s, u, t, path);
    a->relay = true;
    a->relay_for = n->id;
    a->relay_seq = seq;
    a->expires_us = s->now_us + MIN_OF(timeout_us, MILLISECONDS(5000));
    s->attempts_changed = true;
}

/* The asker's `seq` names the probe, so that a late answer counts for no later one. */
void probe_on_indirect_ack(struct swim *s, const struct node_id *target, uint64_t seq,
                           uint64_t boot_id)
{
    struct node *t = node_find(s, target);
    if (!t || !t->probe.active || t->probe.seq != seq || t->claim.boot_id != boot_id)
        return;
    t->probe.active = false;
    health_better(s);
}

void probe_on_nack(struct swim *s, const struct node *n, const struct node_id *target, uint64_t seq)
{
    struct node *t = node_find(s, target);
    if (!t || !t->probe.active || t->probe.seq != seq || t->probe.n_nacks >= t->probe.n_asked)
        return;
    for (uint32_t i = 0; i < t->probe.n_nacks; i++)
        if (node_id_eq(&t->probe.nacks[i], &n->id))
            return;
    t->probe.nacks[t->probe.n_nacks++] = n->id;
}

static void find_attempts_due(struct swim *s)
{
    s->attempts_changed = false;
    s->attempts_due_us = NEVER;
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++)
        if (s->attempts[i].open)
            s->attempts_due_us = MIN_OF(s->attempts_due_us, s->attempts[i].expires_us);
}

static void attempt_timers(struct swim *s, struct swim_update *u)
{
    if (s->attempts_changed)
        find_attempts_due(s);
    if (s->now_us < s->attempts_due_us)
        return;
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++) {
        struct attempt *a = &s->attempts[i];
        if (!a->open || s->now_us < a->expires_us)
            continue;
        a->open = false; /* it stays in its slot: a late answer is still a round trip */
        struct node *n = node_find(s, &a->peer);
        struct attempt copy = *a;
        if (n)
            path_lost(s, u, n, copy.path);
        if (copy.relay)
            answer_relay(s, u, &copy, NULL);
    }
    find_attempts_due(s);
}

/* A new round: every live member once, in random order (SWIM section 4.3). */
static void new_round(struct swim *s)
{
    s->n_order = 0;
    s->next_order = 0;
    for (uint32_t i = 1; i < s->n_nodes; i++)
        if (node_is_live(&s->nodes[i]))
            s->order[s->n_order++] = s->nodes[i].id;
    for (uint32_t i = s->n_order; i > 1; i--) {
        uint64_t j = rng_below(&s->rng, i);
        struct node_id swap = s->order[i - 1];
        s->order[i - 1] = s->order[j];
        s->order[j] = swap;
    }
    /* With nobody left to answer, only being on time can show that we are well again. */
    if (!s->was_late)
        health_better(s);
    s->was_late = false;
}

static void round_timer(struct swim *s, struct swim_update *u)
{
    if (s->now_us < s->probe_at_us)
        return;
    if (s->next_order >= s->n_order)
        new_round(s);
    uint64_t gap = s->n_order > 0 ? s->o.round_us / s->n_order : s->o.round_us;
    s->probe_at_us = s->now_us + MIN_OF(MAX_OF(gap, s->o.probe_gap_min_us), s->o.round_us);
    while (s->next_order < s->n_order) {
        struct node *n = node_find(s, &s->order[s->next_order++]);
        if (n && node_is_live(n)) {
            probe_start(s, u, n);
            break;
        }
    }
}

/* Dead and unknown members, and live ones without a session, one at a time. */
static void reprobe_timer(struct swim *s, struct swim_update *u)
{
    if (s->now_us < s->reprobe_at_us)
        return;
    s->reprobe_at_us = s->now_us + s->o.reprobe_us;
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[1 + s->reprobe_turn++ % (s->n_nodes - 1)];
        enum swim_state state = node_state(n);
        if (state == SWIM_LEFT || state == SWIM_ASLEEP || (node_is_live(n) && n->session_up))
            continue;
        if (!n->session_up)
            (void)effect_add(s, u, SWIM_EFFECT_REDIAL, n);
        if (node_is_live(n))
            return;
        if (n->n_paths == 0)
            (void)ping(s, u, n, 0);
        for (uint32_t p = 0; p < n->n_paths; p++)
            (void)ping(s, u, n, n->paths[p].id);
        if (n->session_up)
            (void)ping(s, u, n, PATH_SESSION);
        return;
    }
}

void probe_timers(struct swim *s, struct swim_update *u)
{
    attempt_timers(s, u);
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        if (n->probe.active && !n->probe.asked && s->now_us >= n->probe.direct_at_us)
            ask_others(s, u, n);
        if (n->probe.active && s->now_us >= n->probe.end_at_us)
            probe_end(s, u, n);
    }
    round_timer(s, u);
    reprobe_timer(s, u);
}

uint64_t probe_due(const struct swim *s)
{
    uint64_t due = MIN_OF(s->probe_at_us, s->attempts_due_us);
    if (s->n_nodes > 1)
        due = MIN_OF(due, s->reprobe_at_us);
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        const struct probe *p = &s->nodes[i].probe;
        if (p->active)
            due = MIN_OF(due, p->asked ? p->end_at_us : p->direct_at_us);
    }
    return due;
}
