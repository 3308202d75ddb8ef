/* The world of a run: machines, models, people who invite and ask, faults, and the healing. */
#include "tests/sim/sim_internal.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

enum {
    QUIET_US = 3 * SECOND, /* for the first machines to become a cluster */
    PERSON_US = 300 * MS,
    JOIN_CALL = 1000,   /* + the joiner */
    INVITE_CALL = 2000, /* + the machine that it is for */
};
#define MIB (UINT64_C(1) << 20)

static void make_models(struct sim *w)
{
    for (uint32_t i = 0; i < MODELS; i++) {
        struct model_shape *s = &w->shapes[i];
        *s = (struct model_shape){.n_layers = LAYERS,
                                  .context_max = CONTEXT,
                                  .hidden = 4,
                                  .embedding_bytes = 30 * MIB,
                                  .output_bytes = 30 * MIB,
                                  .kv_bytes_per_position = 1024,
                                  .layer_macs = 1000000,
                                  .output_macs = 1000000,
                                  .activation_bytes_per_row = 64};
        memset(s->model.bytes, 7 + (int)i, sizeof s->model.bytes);
        s->name[0] = (char)('m' + i);
        for (uint32_t k = 0; k < LAYERS; k++)
            s->layer_bytes[k] = (i ? 40 : 100) * MIB;
    }
}

static void seed_fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

/* A cable that is not plugged in, a network that others do not reach. */
static void show_addresses(struct sim *w, struct machine *m)
{
    m->shown[0] = m->address;
    m->n_shown = 1;
    if (!sim_has(w, SIM_DEAD_ADDRESSES) || sim_chance(w, 3))
        return;
    m->n_shown = 2 + sim_below(w, 3);
    uint32_t at = sim_below(w, m->n_shown);
    for (uint32_t i = 0; i < m->n_shown; i++) {
        m->shown[i] = m->address;
        if (i != at)
            m->shown[i].ip[2] = (uint8_t)(i + 1);
    }
}

static void make_machines(struct sim *w)
{
    struct rng keys; /* the same machines in each run */
    struct hash256 id = {{0}};
    rng_seed(&keys, 4711);
    for (uint32_t i = 0; i < w->n; i++) {
        struct machine *m = &w->machines[i];
        m->number = i;
        identity_make((struct random_source){seed_fill, &keys}, &id, &m->identity);
        rng_seed(&m->rng, rng_u64(&w->rng));
        m->address = (struct address){.family = 4, .port = CONTROL_PORT};
        m->address.ip[0] = 10;
        m->address.ip[3] = (uint8_t)(i + 1);
        show_addresses(w, m);
        m->budget_bytes = (w->n == 1 ? 1200 : w->n == 2 ? 350 : 200) * MIB;
        m->budget_bytes += sim_below(w, sim_chance(w, 4) ? 1500 : 600) * MIB;
        m->budget_usual_bytes = m->budget_bytes;
        m->speed = 0.5 + rng_unit(&w->rng) * 4;
        m->wants_in = true;
        m->holds[0] = i == 0 || sim_chance(w, 4);
        m->holds[1] = i == w->n - 1 || sim_chance(w, 4);
        if (sim_has(w, SIM_SLOW) && sim_chance(w, 5))
            m->slow_us = 1 + sim_below(w, 150 * MS);
        if (sim_has(w, SIM_CLOCKS))
            m->wall_offset_ms = (int64_t)sim_below(w, 7200000) - 3600000;
    }
}

static void make_request(struct sim *w, uint64_t at, bool must_succeed, uint32_t model)
{
    if (w->n_requests == REQUESTS)
        return;
    uint32_t number = w->n_requests++;
    struct request *q = &w->requests[number];
    for (uint32_t i = 0; i < sizeof q->id.bytes; i++)
        q->id.bytes[i] = (uint8_t)sim_below(w, 256);
    q->entry = sim_below(w, w->n);
    while (must_succeed && w->machines[q->entry].revoked)
        q->entry = (q->entry + 1) % w->n;
    q->model = model;
    q->must_succeed = must_succeed;
    q->n_prompt = 1 + sim_below(w, 40);
    uint32_t base = sim_below(w, 3), n_base = sim_below(w, q->n_prompt + 1);
    for (uint32_t k = 0; k < q->n_prompt; k++)
        q->tokens[k] =
            k < n_base ? w->bases[base][k] : (int32_t)sim_below(w, HASH_STAGE_VOCABULARY);
    q->sampler.seed = rng_u64(&w->rng);
    q->sampler.max_tokens = sim_chance(w, 6) ? 0 : 1 + sim_below(w, 40);
    q->sampler.n_end_ids = (uint8_t)sim_below(w, FRAME_END_IDS_MAX);
    for (uint32_t i = 0; i < q->sampler.n_end_ids; i++)
        q->sampler.end_ids[i] = (int32_t)sim_below(w, HASH_STAGE_VOCABULARY);
    q->n_tokens = hash_stage_answer(w->shapes[model].model.bytes[0], LAYERS, CONTEXT, &q->sampler,
                                    q->tokens, q->n_prompt, &q->finish);
    if (!must_succeed && sim_chance(w, 5))
        q->deadline_after_us = (uint64_t)(20 + sim_below(w, 8000)) * MS;
    sim_post(w, at, EV_SUBMIT, NOBODY)->x = number;
    if (sim_has(w, SIM_NAPS) && sim_chance(w, 3))
        sim_post(w, at + sim_below(w, 30 * MS), EV_NAP, NOBODY)->x = number;
    if (!must_succeed && sim_chance(w, 5))
        sim_post(w, at + (uint64_t)sim_below(w, 3000) * MS, EV_CANCEL, NOBODY)->x = number;
}

void chaos_begin(struct sim *w)
{
    static const uint8_t sizes[] = {2, 2, 3, 3, 3, 4, 4, 5, 5, 6, 8, 12};
    uint32_t n = w->o.n_machines ? w->o.n_machines : sizes[sim_below(w, sizeof sizes)];
    w->n = w->n_all = w->r->n_machines = n;
    if (sim_has(w, SIM_CLONES) && n < MACHINES)
        w->n_all = n + 1;
    uint64_t chaos_us = (w->o.chaos_ms ? w->o.chaos_ms : 4000 + sim_below(w, 14000)) * MS;
    w->chaos_end_us = QUIET_US + chaos_us;
    make_models(w);
    make_machines(w);
    for (uint32_t i = 0; i < 3 * CONTEXT; i++)
        w->bases[i / CONTEXT][i % CONTEXT] = (int32_t)sim_below(w, HASH_STAGE_VOCABULARY);
    for (uint32_t i = 0; i < n; i++)
        sim_post(w, sim_below(w, 300 * MS), EV_START, NOBODY)->x = i;
    sim_post(w, 400 * MS, EV_PERSON, NOBODY);
    struct event *e = sim_post(w, 600 * MS + sim_below(w, 2 * SECOND), EV_WANT, NOBODY);
    e->x = 0;
    e->y = 1;
    /* A machine that is alone has no excuse: its model runs by then, and it must not lose an
     * answer for having slept. */
    for (uint32_t i = 0; i < 5 + sim_below(w, 8); i++)
        make_request(w, (n == 1 ? 4U : 1U) * SECOND + rng_below(&w->rng, w->chaos_end_us), n == 1,
                     0);
    uint32_t n_faults = w->o.faults ? 1 + sim_below(w, 12) : 0;
    for (uint32_t i = 0; i < n_faults; i++)
        sim_post(w, QUIET_US + rng_below(&w->rng, chaos_us), EV_FAULT, NOBODY);
    for (uint32_t i = 0; (w->o.faults & SIM_WANTS) && i < 1 + sim_below(w, 3); i++) {
        e = sim_post(w, QUIET_US + rng_below(&w->rng, chaos_us), EV_WANT, NOBODY);
        e->x = 1;
        e->y = i % 2 == 0;
        make_request(w, e->at + rng_below(&w->rng, 4 * SECOND), false, 1);
    }
    sim_post(w, w->chaos_end_us, EV_HEAL, NOBODY);
}

/* --- people --- */

bool chaos_is_member(const struct sim *w, const struct machine *m)
{
    const struct machine *founder = &w->machines[0];
    if (!m->alive || !founder->alive)
        return false;
    const struct trust *t = node_trust(founder->node);
    return trust_is_member(t, &m->identity.id) &&
           hash256_eq(trust_cluster_id(node_trust(m->node)), trust_cluster_id(t));
}

/* Whoever is not in gets a token from a member, and tries again when that does not work. */
void chaos_person(struct sim *w)
{
    sim_post(w, w->now + PERSON_US, EV_PERSON, NOBODY);
    if (!w->machines[0].alive || w->machines[0].asleep)
        return;
    for (uint32_t i = 1; i < w->n; i++) {
        struct machine *m = &w->machines[i];
        if (!m->alive || m->asleep || !m->wants_in || chaos_is_member(w, m) ||
            w->now < m->join_try_us)
            continue;
        struct machine *issuer = &w->machines[sim_below(w, w->n)];
        if (issuer == m || !issuer->alive || issuer->asleep || !chaos_is_member(w, issuer) ||
            sim_chance(w, 2))
            issuer = &w->machines[0];
        m->join_try_us = w->now + 6 * SECOND;
        (void)machine_step(w, issuer,
                           &(struct node_event){.type = NODE_EVENT_INVITE,
                                                .call = INVITE_CALL + i,
                                                .ttl_us = 20 * SECOND});
    }
}

void chaos_answer(struct sim *w, struct machine *m, const struct node_effect *x)
{
    if (x->call >= INVITE_CALL && x->call < INVITE_CALL + w->n && x->error == ERR_OK) {
        struct machine *joiner = &w->machines[x->call - INVITE_CALL];
        if (joiner == m || !joiner->alive || joiner->asleep || joiner->depth > 0)
            return;
        (void)machine_step(w, joiner,
                           &(struct node_event){.type = NODE_EVENT_JOIN,
                                                .call = JOIN_CALL + joiner->number,
                                                .text = x->text,
                                                .leave = true});
    } else if (x->call >= JOIN_CALL && x->call < JOIN_CALL + w->n) {
        sim_trace(w, "%u joined: %s, %s", m->number, err_name(x->error), x->text);
        if (x->error != ERR_OK && x->error != ERR_BUSY)
            m->join_try_us = w->now + 300 * MS;
    }
}

static struct machine *someone(struct sim *w)
{
    uint32_t first = sim_below(w, w->n);
    for (uint32_t i = 0; i < w->n; i++) {
        struct machine *m = &w->machines[(first + i) % w->n];
        if (m->alive && !m->asleep && !m->stopping && chaos_is_member(w, m))
            return m;
    }
    return NULL;
}

void chaos_want(struct sim *w, uint32_t model, bool want)
{
    struct machine *m = someone(w);
    if (!m || m->disk_full) { /* an agent whose disk is full refuses it */
        struct event *e = sim_post(w, w->now + 200 * MS, EV_WANT, NOBODY);
        e->x = model;
        e->y = want;
        return;
    }
    (void)machine_step(w, m,
                       &(struct node_event){.type = want ? NODE_EVENT_WANT : NODE_EVENT_UNWANT,
                                            .model_id = w->shapes[model].model,
                                            .context = CONTEXT});
}

void chaos_submit(struct sim *w, uint32_t number)
{
    struct request *q = &w->requests[number];
    struct machine *m = &w->machines[q->entry];
    if (!m->alive || m->asleep || m->stopping) {
        m = someone(w);
        if (!m && q->must_succeed) { /* nobody asks a machine that sleeps */
            sim_post(w, w->now + 500 * MS, EV_SUBMIT, NOBODY)->x = number;
            return;
        }
        if (!m) {
            q->state = REQUEST_DONE;
            w->r->n_lost++;
            return;
        }
        q->entry = m->number;
    }
    q->state = REQUEST_RUNNING;
    q->submitted_us = w->now;
    if (q->deadline_after_us)
        q->deadline_us = sim_local_us(w, m) + q->deadline_after_us;
    stage_mail(w, m, &(struct mail){.type = MAIL_SUBMIT, .number = number}, false);
}

void chaos_cancel(struct sim *w, uint32_t number)
{
    struct request *q = &w->requests[number];
    struct machine *m = &w->machines[q->entry];
    if (q->state != REQUEST_RUNNING || !m->alive || m->asleep)
        return;
    q->cancelled = true;
    stage_mail(w, m, &(struct mail){.type = MAIL_CANCEL, .number = number}, false);
}

/* --- faults --- */

static uint64_t for_a_while(struct sim *w)
{
    return w->now + (uint64_t)(100 + sim_below(w, sim_chance(w, 3) ? 12000 : 3000)) * MS;
}

/* x: bits of the machines on one side; y: 0 both ways, 1 out of that side only, 2 into it only. */
static void partition(struct sim *w, uint32_t side, uint32_t way, bool on)
{
    for (uint32_t a = 0; a < w->n; a++) {
        for (uint32_t b = 0; b < w->n; b++) {
            if (!(side >> a & 1) || (side >> b & 1))
                continue;
            uint32_t *out = &w->blocked[a][b], *in = &w->blocked[b][a];
            if (way != 2)
                *out = on ? *out + 1 : *out - (*out > 0);
            if (way != 1)
                *in = on ? *in + 1 : *in - (*in > 0);
        }
    }
}

static void fault_partition(struct sim *w)
{
    uint32_t side = 1 + sim_below(w, (1u << w->n) - 2), way = 0;
    if (sim_chance(w, 2))
        side = 1u << sim_below(w, w->n);
    if (sim_has(w, SIM_ONE_WAY) && sim_chance(w, 3))
        way = 1 + sim_below(w, 2);
    sim_trace(w, "partition %x, way %u", side, way);
    partition(w, side, way, true);
    struct event *e = sim_post(w, for_a_while(w), EV_UNBLOCK, NOBODY);
    e->x = side;
    e->y = way;
}

void chaos_unblock(struct sim *w, uint32_t x, uint32_t y)
{
    if (w->healed)
        return;
    sim_trace(w, "partition %x ends", x);
    partition(w, x, y, false);
}

static void fault_crash(struct sim *w, struct machine *m)
{
    bool power = sim_chance(w, 2);
    if (sim_has(w, SIM_CLOCKS) && sim_chance(w, 2))
        m->wall_offset_ms += (int64_t)sim_below(w, 7200000) - 3600000;
    if (sim_chance(w, 3)) {
        m->crash_at = 1 + (int)sim_below(w, 2);
        return;
    }
    machine_kill(w, m, power, false);
    sim_post(w, w->now + (uint64_t)(300 + sim_below(w, 9000)) * MS, EV_START, NOBODY)->x =
        m->number;
}

static void fault_sleep(struct sim *w, struct machine *m)
{
    sim_trace(w, "%u falls asleep", m->number);
    m->asleep = true;
    m->sleep_began_us = w->now;
    m->wake_at_us = w->now + (uint64_t)(300 + sim_below(w, 9000)) * MS;
    sim_post(w, m->wake_at_us, EV_WAKE, NOBODY)->x = m->number;
}

/* Somebody shuts the lid while the answer is being written. */
void chaos_nap(struct sim *w, uint32_t request)
{
    const struct request *q = &w->requests[request];
    struct machine *m = &w->machines[q->entry];
    if (q->state != REQUEST_RUNNING || !sim_has(w, SIM_NAPS) || !m->alive || m->asleep ||
        m->stopping)
        return;
    w->r->n_faults++;
    fault_sleep(w, m);
}

static void fault_leave(struct sim *w, struct machine *m)
{
    if (m->number != 0 && sim_chance(w, 3)) {
        sim_trace(w, "%u leaves the cluster", m->number);
        (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_LEAVE});
        return;
    }
    sim_trace(w, "%u is told to stop", m->number);
    m->stopping = true;
    sim_post(w, w->now + 12 * SECOND, EV_STOP_LATE, m->number);
    (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_STOP});
    sim_post(w, w->now + (uint64_t)(13000 + sim_below(w, 3000)) * MS, EV_START, NOBODY)->x =
        m->number;
}

/* Does the membership of `who` rest on `on`, as the founder sees it? */
static bool rests_on(const struct sim *w, const struct machine *who, const struct machine *on)
{
    const struct trust *t = node_trust(w->machines[0].node);
    struct node_id id = who->identity.id;
    for (uint32_t depth = 0; depth < MACHINES; depth++) {
        struct trust_member m;
        uint32_t i = 0;
        if (node_id_eq(&id, &on->identity.id))
            return true;
        while (trust_member_at(t, i, &m) && !node_id_eq(&m.id, &id))
            i++;
        if (!trust_member_at(t, i, &m) || node_id_eq(&m.issuer, &id))
            return false;
        id = m.issuer;
    }
    return false;
}

/* A member is expelled for ever. A revocation by one who is expelled later may be void, and that
 * the test of the trust core covers: here nobody on whom a revocation rests is expelled. */
static void fault_revoke(struct sim *w, struct machine *m)
{
    struct machine *by = someone(w);
    if (m->number == 0 || m->revoked || !by || by == m || by->revoked || by->crash_at ||
        !w->machines[0].alive || !chaos_is_member(w, m) ||
        ((w->o.faults & SIM_WANTS) && m->number == w->n - 1)) /* holds a model alone */
        return;
    for (uint32_t i = 0; i < w->n; i++) {
        if (w->machines[i].revoker && rests_on(w, &w->machines[i], m))
            return;
    }
    enum err e = machine_step(
        w, by, &(struct node_event){.type = NODE_EVENT_REVOKE, .peer = m->identity.id});
    sim_trace(w, "%u revokes %u: %s", by->number, m->number, err_name(e));
    if (e != ERR_OK)
        return;
    by->revoker = m->revoked = true;
    m->wants_in = false;
}

static uint8_t *copy_of(const uint8_t *bytes, size_t n)
{
    uint8_t *copy = sim_alloc(n);
    if (n)
        memcpy(copy, bytes, n);
    return copy;
}

/* A disk is copied, key and all, and both machines run. */
static void fault_clone(struct sim *w, struct machine *m)
{
    struct machine *c = &w->machines[w->n];
    if (w->n_all == w->n || c->alive || !chaos_is_member(w, m) || m->number == 0)
        return;
    free(c->trust_bytes);
    free(c->control_bytes);
    uint32_t boot = c->boot; /* events of an earlier clone are over */
    *c = *m;
    c->number = w->n;
    c->node = NULL;
    c->pipeline = NULL;
    c->trust_bytes = copy_of(m->trust_bytes, m->n_trust_bytes);
    c->control_bytes = copy_of(m->control_bytes, m->n_control_bytes);
    c->boot = boot;
    c->address.ip[3] = 200;
    c->shown[0] = c->address;
    c->n_shown = 1;
    c->wants_in = c->busy = c->alive = false;
    c->depth = 0;
    c->inbox = c->loop = (struct mailbox_sim){.first = NULL};
    memset(c->instances, 0, sizeof c->instances);
    memset(c->loading, 0, sizeof c->loading);
    rng_seed(&c->rng, rng_u64(&w->rng));
    w->cloned = m->number;
    sim_trace(w, "%u is a clone of %u", c->number, m->number);
    machine_start(w, c);
    sim_post(w, w->now + 6 * SECOND + sim_below(w, 4 * SECOND), EV_CLONE_GONE, NOBODY);
}

void chaos_clone_gone(struct sim *w)
{
    struct machine *c = &w->machines[w->n];
    if (!c->alive)
        return;
    check_conflict(w);
    w->clone_gone_us = w->now;
    machine_kill(w, c, sim_chance(w, 2), false);
}

static void fault_cut(struct sim *w)
{
    if (w->n_live > 0)
        net_cut(w, w->live[sim_below(w, w->n_live)], 300 * MS);
}

static void fault_disk(struct sim *w, struct machine *m)
{
    machine_disk(w, m, true);
    sim_post(w, for_a_while(w), EV_DISK, NOBODY)->x = m->number;
}

void chaos_fault(struct sim *w)
{
    static const enum sim_fault kinds[] = {SIM_CUTS,    SIM_CUTS,    SIM_PARTITIONS, SIM_PARTITIONS,
                                           SIM_CRASHES, SIM_CRASHES, SIM_SLEEP,      SIM_LEAVES,
                                           SIM_MEMORY,  SIM_REVOKES, SIM_CLONES};
    enum sim_fault kind = kinds[sim_below(w, ARRAY_LEN(kinds))];
    if (sim_has(w, SIM_DISKS) && sim_chance(w, 2))
        kind = SIM_DISKS;
    while (!sim_has(w, kind) && !w->healed && (w->o.faults & SIM_ANY_EVENT))
        kind = kinds[sim_below(w, ARRAY_LEN(kinds))];
    struct machine *m = &w->machines[sim_below(w, w->n)];
    bool awake = m->alive && !m->asleep && !m->stopping;
    if (!sim_has(w, kind))
        return;
    w->r->n_faults++;
    if (kind == SIM_CUTS)
        for (uint32_t i = 0; i < 1 + sim_below(w, 3); i++)
            fault_cut(w);
    else if (kind == SIM_PARTITIONS)
        fault_partition(w);
    else if (kind == SIM_CRASHES && awake)
        fault_crash(w, m);
    else if (kind == SIM_SLEEP && awake)
        fault_sleep(w, m);
    else if (kind == SIM_LEAVES && awake)
        fault_leave(w, m);
    else if (kind == SIM_REVOKES)
        fault_revoke(w, m);
    else if (kind == SIM_CLONES && awake)
        fault_clone(w, m);
    else if (kind == SIM_DISKS)
        fault_disk(w, m);
    else if (kind == SIM_MEMORY && awake)
        machine_budget(w, m, m->budget_usual_bytes / 10 * (4 + sim_below(w, 8)));
}

/* --- healing --- */

static bool revoked_everywhere(const struct sim *w, const struct machine *m)
{
    for (uint32_t i = 0; i < w->n; i++) {
        const struct machine *other = &w->machines[i];
        if (!other->revoked &&
            trust_role(node_trust(other->node), &m->identity.id) != TRUST_ROLE_REVOKED)
            return false;
    }
    return true;
}

/* Every machine runs, is awake, reaches every other and is a member; only then the time counts. */
void chaos_heal(struct sim *w)
{
    /* A conflict ends when the other has been silent for 3.5 s. */
    bool ready =
        w->n_all == w->n || (!w->machines[w->n].alive && w->now >= w->clone_gone_us + 2 * SECOND);
    w->o.faults &= ~(uint32_t)(SIM_DATAGRAMS | SIM_STALLS | SIM_CUTS | SIM_PARTITIONS |
                               SIM_CRASHES | SIM_SLEEP | SIM_LEAVES | SIM_MEMORY | SIM_NAPS |
                               SIM_REVOKES | SIM_CLONES | SIM_DISKS);
    for (uint32_t i = 0; i < w->n; i++) {
        struct machine *m = &w->machines[i];
        m->crash_at = 0;
        machine_disk(w, m, false);
        ready &= m->alive && !m->asleep && !m->stopping;
    }
    /* Partitions go last: what has to do with them is what is to be seen. */
    if (ready) {
        bool all_in = true;
        for (uint32_t i = 0; i < w->n; i++) {
            const struct machine *m = &w->machines[i];
            all_in &= m->revoked ? revoked_everywhere(w, m) : chaos_is_member(w, m);
        }
        if (!all_in)
            memset(w->blocked, 0, sizeof w->blocked); /* or they could not join */
        ready = all_in;
    }
    if (!ready) {
        if (w->now > w->chaos_end_us + 60 * SECOND)
            sim_fail(w, "a machine does not come back into the cluster");
        sim_post(w, w->now + 100 * MS, EV_HEAL, NOBODY);
        return;
    }
    sim_trace(w, "healed");
    for (uint32_t i = 0; i < w->n; i++)
        machine_budget(w, &w->machines[i], w->machines[i].budget_usual_bytes);
    memset(w->blocked, 0, sizeof w->blocked);
    w->healed = true;
    w->heal_us = w->now;
    for (uint32_t i = 0; i < w->n_live; i++) {
        w->conns[w->live[i]]->ends[0].stalled_until_us = 0;
        w->conns[w->live[i]]->ends[1].stalled_until_us = 0;
    }
    sim_post(w, w->now + 100 * MS, EV_CHECK, NOBODY);
}

/* Everything works again. */
void chaos_last_requests(struct sim *w)
{
    const struct control *c = node_control(w->machines[0].node);
    sim_trace(w, "runs");
    for (uint32_t model = 0; model < MODELS; model++) {
        if (control_active(c, &w->shapes[model].model))
            make_request(w, w->now + 1 * MS, true, model);
    }
}
