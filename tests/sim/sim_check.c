/* What must hold. Rules are named as in the protocol's section 3.
 *
 * At every step: reservations within the limit, by the core's word and by what is really loaded
 * (3.9); no term is used before it is on the disk (3.1); one current and one draining epoch of a
 * model (3.9); epochs are unique (3.2); terms and incarnations never go back (3.1, 2.1); what is
 * computed belongs to an epoch committed in this boot and confirmed since the machine last woke
 * (2.5), in order of steps, from the rows of the stage before in the same epoch (3.9); a client
 * gets each position once, and the oracle's token there (3.12). After healing: all see the same,
 * what is wanted runs where it fits, every request has ended. */
#include "tests/sim/sim_internal.h"

#include "base/util.h"
#include "planner/search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    LOOK_US = 200 * MS,
    DIALS_MAX = 25,        /* of one machine to another, in a second */
    UNLINK_US = 6 * SECOND /* the data plane may be computing when it is told */
};

static void check_locals(struct sim *w, struct machine *m)
{
    const struct control *c = node_control(m->node);
    uint32_t n = control_n_local(c), n_executing[MODELS] = {0}, n_current[MODELS] = {0},
             n_draining[MODELS] = {0};
    for (uint32_t i = 0; i < n; i++) {
        struct control_local l;
        control_local_at(c, i, &l);
        for (uint32_t k = 0; k < MODELS; k++) {
            if (!hash256_eq(&l.plan->model, &w->shapes[k].model))
                continue;
            n_current[k] += l.state == EPOCH_CURRENT;
            n_draining[k] += l.state == EPOCH_DRAINING;
            n_executing[k] +=
                l.state == EPOCH_CURRENT || l.state == EPOCH_DRAINING || l.state == EPOCH_COMMITTED;
        }
        if (w->n == 1 && l.suspended && m->n_sleeps == m->n_sleeps_told)
            sim_fail(w, "machine %u is alone, and does not confirm its own plan", m->number);
        if (l.plan->stages[l.stage].boot_id != m->boot_id && l.state != EPOCH_FAILED)
            sim_fail(w, "machine %u takes part in a plan for another boot of it", m->number);
    }
    for (uint32_t k = 0; k < MODELS; k++) {
        if (n_executing[k] > 2 || n_current[k] > 1 || n_draining[k] > 1)
            sim_fail(w, "machine %u executes %u epochs of model %u, %u current, %u draining",
                     m->number, n_executing[k], k, n_current[k], n_draining[k]);
    }
}

/* What is really there: from PREPARE until the memory is free again. */
void check_memory(struct sim *w, struct machine *m)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < LOADING; i++) {
        const struct loading *l = &m->loading[i];
        if (l->plan)
            sum += l->plan->stages[l->stage].memory_bytes;
    }
    if (sum > m->budget_most_bytes)
        sim_fail(w, "machine %u holds %llu of %llu MiB", m->number, (unsigned long long)(sum >> 20),
                 (unsigned long long)(m->budget_most_bytes >> 20));
}

static void check_incarnations(struct sim *w, struct machine *m)
{
    const struct swim *s = node_swim(m->node);
    uint64_t own = swim_self_incarnation(s);
    if (own < m->own_incarnation)
        sim_fail(w, "machine %u: its incarnation goes back", m->number);
    m->own_incarnation = own;
    for (uint32_t i = 0; i < w->n; i++) {
        struct swim_member_view v;
        if (node_id_eq(&w->machines[i].identity.id, &m->identity.id))
            continue;
        if (!swim_member(s, &w->machines[i].identity.id, &v)) {
            m->incarnations[i] = 0; /* forgotten with its membership */
            continue;
        }
        if (v.incarnation < m->incarnations[i])
            sim_fail(w, "machine %u sees the incarnation of %u go back", m->number, i);
        m->incarnations[i] = v.incarnation;
    }
}

/* 1.5: who is revoked has no session and no record here, and soon no link. */
static void check_revoked(struct sim *w, struct machine *m)
{
    for (uint32_t i = 0; i < w->n; i++) {
        const struct node_id *id = &w->machines[i].identity.id;
        struct swim_member_view v;
        if (i == m->number || !w->machines[i].revoked)
            continue;
        if (trust_role(node_trust(m->node), id) != TRUST_ROLE_REVOKED) {
            m->revoked_since_us[i] = 0; /* not heard yet, or of another cluster */
            continue;
        }
        if (m->revoked_since_us[i] == 0)
            m->revoked_since_us[i] = w->now;
        if (node_session_of(m->node, id))
            sim_fail(w, "machine %u keeps a session with %u, which is revoked", m->number, i);
        if (swim_member(node_swim(m->node), id, &v))
            sim_fail(w, "machine %u keeps the record of %u, which is revoked", m->number, i);
        if (m->links[i] && w->now > m->revoked_since_us[i] + UNLINK_US)
            sim_fail(w, "machine %u keeps a data link to %u, which is revoked", m->number, i);
    }
}

void check_step(struct sim *w, struct machine *m)
{
    const struct control *c = node_control(m->node);
    uint64_t term = control_term_seen(c);
    if (term < m->term_seen)
        sim_fail(w, "machine %u forgets term %llu and goes back to %llu", m->number,
                 (unsigned long long)m->term_seen, (unsigned long long)term);
    m->term_seen = term;
    if (term > m->term_on_disk)
        sim_fail(w, "machine %u acts with term %llu, and its disk holds %llu", m->number,
                 (unsigned long long)term, (unsigned long long)m->term_on_disk);
    if (control_reserved_bytes(c) > m->budget_most_bytes)
        sim_fail(w, "machine %u reserves %llu of %llu MiB", m->number,
                 (unsigned long long)(control_reserved_bytes(c) >> 20),
                 (unsigned long long)(m->budget_most_bytes >> 20));
    check_locals(w, m);
    check_revoked(w, m);
    const struct hash256 *cluster = trust_cluster_id(node_trust(m->node));
    if (!hash256_eq(cluster, &m->cluster)) { /* left or joined: what it saw is forgotten */
        m->cluster = *cluster;
        memset(m->incarnations, 0, sizeof m->incarnations);
    }
    if (w->now >= m->checked_us + LOOK_US) {
        m->checked_us = w->now;
        check_incarnations(w, m);
    }
}

/* A session that is replaced again and again is none. */
void check_dial(struct sim *w, struct machine *m, uint32_t to)
{
    if (to == MACHINES)
        return;
    if (w->now >= m->dials_since_us[to] + SECOND) {
        m->dials_since_us[to] = w->now;
        m->n_dials[to] = 0;
    }
    if (++m->n_dials[to] > DIALS_MAX)
        sim_fail(w, "machine %u dials %u again and again", m->number, to);
}

void check_plan(struct sim *w, struct machine *m, const struct plan *p)
{
    if (plan_check(p) != ERR_OK)
        sim_fail(w, "machine %u is to prepare a plan that is none", m->number);
    for (uint32_t i = 0; i < w->n_plans; i++) {
        const struct epoch *e = &w->plans[i].epoch;
        if (hash256_eq(&e->hash, &p->epoch.hash))
            return;
        bool clone =
            w->n_all > w->n && node_id_eq(&e->planner, &w->machines[w->cloned].identity.id);
        if (epoch_cmp(e, &p->epoch) == 0 && !clone) /* the hash tells plans of a clone apart */
            sim_fail(w, "two plans have the epoch (%llu, %u, %llu)", (unsigned long long)e->term,
                     sim_number(w, &e->planner), (unsigned long long)e->sequence);
    }
    if (w->n_plans == PLANS)
        sim_fail(w, "plans change without end");
    else
        w->plans[w->n_plans++].epoch = p->epoch;
}

/* --- computations --- */

static struct output *output_of(struct sim *w, uint64_t epoch, uint64_t step, uint32_t stage)
{
    uint64_t h = (epoch ^ (step * 0x9e3779b97f4a7c15u) ^ stage) * 0xbf58476d1ce4e5b9u;
    uint32_t i = (uint32_t)(h >> 40) % OUTPUTS;
    for (uint32_t n = 0; n < 64; n++, i = (i + 1) % OUTPUTS) {
        struct output *o = &w->outputs[i];
        if (o->epoch == 0 || (o->epoch == epoch && o->step == step && o->stage == stage))
            return o;
    }
    return &w->outputs[i]; /* full: the oldest there goes */
}

void check_output(struct sim *w, const struct instance *in, const struct pipeline_compute *c,
                  const uint8_t *rows)
{
    uint64_t h = sim_hash(rows, (size_t)c->n_rows * HASH_STAGE_ROW_BYTES);
    *output_of(w, c->epoch, c->step, in->stage) = (struct output){c->epoch, c->step, h, in->stage};
}

void check_compute(struct sim *w, struct machine *m, const struct pipeline_compute *c)
{
    struct instance *in = c->instance < INSTANCES ? &m->instances[c->instance] : NULL;
    if (!in || !in->used) {
        sim_fail(w, "machine %u computes on a stage that is not there", m->number);
        return;
    }
    if (!in->committed || c->epoch != epoch_alias(&in->plan.epoch))
        sim_fail(w, "machine %u computes for an epoch that is not committed here", m->number);
    if (in->sleep != m->n_sleeps)
        sim_fail(w, "machine %u computes for an epoch that nobody confirmed since it woke",
                 m->number);
    if (c->step <= in->last_step)
        sim_fail(w, "machine %u: step %llu after %llu", m->number, (unsigned long long)c->step,
                 (unsigned long long)in->last_step);
    in->last_step = c->step;
    if ((bool)c->is_tail != (in->stage + 1 == in->plan.n_stages))
        sim_fail(w, "machine %u takes itself for the tail, or not", m->number);
    if (in->stage == 0)
        return;
    const struct output *o = output_of(w, c->epoch, c->step, in->stage - 1);
    if (!c->rows_in || o->epoch != c->epoch || o->step != c->step ||
        o->hash != sim_hash(c->rows_in, (size_t)c->n_rows * HASH_STAGE_ROW_BYTES))
        sim_fail(w, "machine %u: rows of step %llu are not those of the stage before", m->number,
                 (unsigned long long)c->step);
}

/* 2.5: between waking and confirmation no step goes on, and no result of before the sleep. */
void check_send(struct sim *w, struct machine *m, const struct pipeline_send *s)
{
    if (m->stale_result && s->type == FRAME_TOKEN)
        sim_fail(w, "machine %u sends a token that it began before it slept", m->number);
    for (uint32_t i = 0; i < INSTANCES && s->type == FRAME_STEP; i++) {
        const struct instance *in = &m->instances[i];
        if (in->used && epoch_alias(&in->plan.epoch) == s->epoch && in->sleep != m->n_sleeps)
            sim_fail(w, "machine %u sends a step of an epoch that nobody confirmed since it woke",
                     m->number);
    }
}

/* --- clients --- */

void check_token(struct sim *w, struct machine *m, const struct pipeline_effect *e)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        struct request *q = &w->requests[i];
        uint32_t position = e->token.position;
        if (m->stale_result)
            sim_fail(w, "request %u gets a token that was begun before the sleep", i);
        if (!request_id_eq(&q->id, &e->token.request))
            continue;
        if (q->state != REQUEST_RUNNING || q->entry != m->number)
            sim_fail(w, "request %u gets a token at the wrong place or time", i);
        else if (position != q->n_prompt + q->n_got || e->token.index != q->n_got)
            sim_fail(w, "request %u: position %u after %u tokens", i, position, q->n_got);
        else if (position >= q->n_tokens || q->tokens[position] != e->token.sampled.id)
            sim_fail(w, "request %u: token %d at position %u is not the oracle's", i,
                     e->token.sampled.id, position);
        q->n_got++;
        w->r->n_tokens++;
        return;
    }
    sim_fail(w, "a token for nobody");
}

void check_end(struct sim *w, struct machine *m, const struct pipeline_effect *e)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        struct request *q = &w->requests[i];
        if (!request_id_eq(&q->id, &e->end.request))
            continue;
        sim_trace(w, "request %u ends at %u after %u of %u tokens: %s %s", i, m->number, q->n_got,
                  q->n_tokens - q->n_prompt, err_name(e->end.err), e->end.text);
        if (q->state != REQUEST_RUNNING || q->entry != m->number)
            sim_fail(w, "request %u ends twice or elsewhere", i);
        q->state = REQUEST_DONE;
        if (e->end.err == ERR_OK) {
            w->r->n_answers++;
            if (q->n_prompt + q->n_got != q->n_tokens || e->end.finish != q->finish)
                sim_fail(w, "request %u: %u tokens and finish %d, the oracle has %u and %d", i,
                         q->n_got, (int)e->end.finish, q->n_tokens - q->n_prompt, (int)q->finish);
            return;
        }
        w->r->n_errors++;
        if (e->end.err == ERR_CANCELLED && !q->cancelled)
            sim_fail(w, "request %u is cancelled by nobody", i);
        if (!e->end.text || e->end.text[0] == 0)
            sim_fail(w, "request %u ends with %s and no sentence", i, err_name(e->end.err));
        if (q->must_succeed)
            sim_fail(w, "request %u, after healing, ends with %s: %s", i, err_name(e->end.err),
                     e->end.text);
        return;
    }
    sim_fail(w, "an end for nobody");
}

void check_all_ended(struct sim *w)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        const struct request *q = &w->requests[i];
        if (q->state != REQUEST_DONE)
            sim_fail(w, "request %u at machine %u does not end (%u of %u tokens)", i, q->entry,
                     q->n_got, q->n_tokens - q->n_prompt);
    }
}

/* --- after healing --- */

static bool sees_all(struct sim *w, struct machine *m, char ret[256])
{
    for (uint32_t i = 0; i < w->n; i++) {
        const struct machine *other = &w->machines[i];
        struct swim_member_view v;
        if (other == m || other->revoked)
            continue;
        bool is = swim_member(node_swim(m->node), &other->identity.id, &v);
        if (is && v.state == SWIM_ALIVE && v.boot_id == other->boot_id &&
            node_session_of(m->node, &other->identity.id))
            continue;
        (void)snprintf(ret, 256, "machine %u holds %u %s%s%s", m->number, i,
                       is ? swim_state_name(v.state) : "no member",
                       is && v.boot_id != other->boot_id ? " with another boot" : "",
                       node_session_of(m->node, &other->identity.id) ? "" : " without a session");
        return false;
    }
    return true;
}

static bool same_wishes(const struct control *a, const struct control *b)
{
    uint32_t n = control_n_models(a);
    if (n != control_n_models(b))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        struct control_model x, y;
        control_model_at(a, i, &x);
        control_model_at(b, i, &y);
        if (!hash256_eq(&x.model, &y.model) || x.context != y.context)
            return false;
    }
    return true;
}

/* 1.7: two live machines with one key. Both are excluded, from the membership and from plans. */
void check_conflict(struct sim *w)
{
    const struct node_id *id = &w->machines[w->cloned].identity.id;
    for (uint32_t i = 0; i < w->n_all; i++) {
        struct machine *m = &w->machines[i];
        struct swim_member_view v;
        if (!m->alive)
            continue;
        if (i == w->cloned || i == w->n) {
            if (swim_self_state(node_swim(m->node)) != SWIM_CONFLICT)
                sim_fail(w, "machine %u does not know that its key is used twice", i);
            continue;
        }
        if (swim_member(node_swim(m->node), id, &v) && v.state != SWIM_CONFLICT)
            sim_fail(w, "machine %u holds %u %s, and its key is used twice", i, w->cloned,
                     swim_state_name(v.state));
        for (uint32_t k = 0; k < MODELS; k++) {
            const struct plan *p = control_active(node_control(m->node), &w->shapes[k].model);
            if (p && plan_stage_of(p, id) >= 0)
                sim_fail(w, "machine %u routes through %u, and its key is used twice", i,
                         w->cloned);
        }
    }
}

bool check_agree(struct sim *w, char ret[256])
{
    struct node_id planner = {{0}};
    uint64_t term = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        struct machine *m = &w->machines[i];
        struct node_id id;
        uint64_t t;
        if (m->revoked)
            continue;
        if (!m->alive || m->asleep || !chaos_is_member(w, m)) {
            (void)snprintf(ret, 256, "machine %u is not there", i);
            return false;
        }
        if (!sees_all(w, m, ret))
            return false;
        if (!node_planner(m->node, &id, &t)) {
            (void)snprintf(ret, 256, "machine %u knows no planner", i);
            return false;
        }
        if (i == 0) {
            planner = id;
            term = t;
        }
        if (!node_id_eq(&id, &planner) || t != term) {
            (void)snprintf(ret, 256, "machine 0 follows %u in term %llu, machine %u %u in %llu",
                           sim_number(w, &planner), (unsigned long long)term, i, sim_number(w, &id),
                           (unsigned long long)t);
            return false;
        }
        if (!same_wishes(node_control(m->node), node_control(w->machines[0].node))) {
            (void)snprintf(ret, 256, "machines 0 and %u want different models", i);
            return false;
        }
    }
    return true;
}

/* Would it fit on machines that have nothing else to do? */
static bool fits(struct sim *w, uint32_t model)
{
    struct topology *t = sim_alloc(sizeof *t);
    struct plan p;
    struct err_text text;
    struct search_options o = SEARCH_OPTIONS_INIT;
    o.context = CONTEXT;
    t->n_nodes = w->n;
    for (uint32_t i = 0; i < w->n; i++) {
        const struct machine *m = &w->machines[i];
        t->nodes[i] = (struct topology_node){.id = m->identity.id,
                                             .boot_id = m->boot_id,
                                             .eligible = !m->revoked,
                                             .arithmetic_version = ARITHMETIC,
                                             .budget_bytes = m->budget_bytes,
                                             .stream_bytes_per_s = 1e9,
                                             .macs_per_s = 1e10};
        for (uint32_t k = 0; k < w->n; k++)
            t->edges[i][k] = (struct topology_edge){true, 500, 1e8};
    }
    bool ok = search_plan(t, &w->shapes[model], &o, &p, &text) == ERR_OK;
    free(t);
    return ok;
}

/* All participants execute it, and everybody routes to it. */
static bool runs_everywhere(struct sim *w, uint32_t model)
{
    const struct plan *p =
        control_active(node_control(w->machines[0].node), &w->shapes[model].model);
    for (uint32_t i = 0; p && i < w->n; i++) {
        const struct control *c = node_control(w->machines[i].node);
        const struct plan *other = control_active(c, &w->shapes[model].model);
        int stage = plan_stage_of(p, &w->machines[i].identity.id);
        if (w->machines[i].revoked && stage < 0)
            continue;
        if (w->machines[i].revoked || !other || !epoch_eq(&other->epoch, &p->epoch))
            return false;
        bool executes = stage < 0;
        for (uint32_t k = 0; k < control_n_local(c); k++) {
            struct control_local l;
            control_local_at(c, k, &l);
            executes |=
                epoch_eq(&l.plan->epoch, &p->epoch) && l.state == EPOCH_CURRENT && !l.suspended;
        }
        if (!executes)
            return false;
    }
    return p != NULL;
}

bool check_runs(struct sim *w, char ret[256])
{
    const struct machine *m = &w->machines[0];
    uint32_t n_running = 0, n_fit = 0, n_wanted = 0;
    for (uint32_t i = 0; i < w->n; i++) {
        if (!w->machines[i].alive || w->machines[i].asleep)
            return false;
    }
    n_wanted = control_n_models(node_control(m->node));
    for (uint32_t i = 0; i < n_wanted; i++) {
        struct control_model c;
        control_model_at(node_control(m->node), i, &c);
        uint32_t model = hash256_eq(&c.model, &w->shapes[0].model) ? 0 : 1;
        bool fit = fits(w, model), run = runs_everywhere(w, model);
        n_fit += fit;
        n_running += run;
        if (!run && !c.no_fit[0]) {
            (void)snprintf(ret, 256, "model %u neither runs nor is it said why", model);
            return false;
        }
        /* Alone it must run; of two, one may take the memory of the other. */
        if (fit && !run && n_wanted == 1) {
            (void)snprintf(ret, 256, "model %u fits and does not run: %.180s", model, c.no_fit);
            return false;
        }
    }
    if (n_fit > 0 && n_running == 0) {
        (void)snprintf(ret, 256, "nothing runs though %u of %u would fit", n_fit, n_wanted);
        return false;
    }
    return true;
}
