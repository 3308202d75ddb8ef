/* Life of a machine, and the shell around its node core: what agent/serve.c, agent/serve_node.c and
 * agent/serve_mail.c do with the real world. */
#include "tests/sim/sim_internal.h"

#include "base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPINS_MAX = 200, TICK_US = 1 * MS, STOP_US = 12 * SECOND };

static void random_fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

static void tell_model(struct sim *w, struct machine *m, uint32_t model)
{
    struct node_model *held = sim_alloc(sizeof *held);
    held->shape = w->shapes[model];
    held->n_bytes = held->present_bytes = 1 << 20;
    (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_MODEL, .model = held});
    free(held);
}

static struct node *new_node(struct sim *w, struct machine *m)
{
    struct node_options o = {.identity = &m->identity,
                             .boot_id = m->boot_id,
                             .random = {random_fill, &m->rng},
                             .version = "0.1.0",
                             .control_port = CONTROL_PORT,
                             .data_port = DATA_PORT,
                             .arithmetic_version = ARITHMETIC,
                             .trust_bytes = m->trust_bytes,
                             .control_bytes = m->control_bytes,
                             .n_trust_bytes = m->n_trust_bytes,
                             .n_control_bytes = m->n_control_bytes,
                             .remembered = m->remembered,
                             .remembered_ids = m->remembered_ids,
                             .n_remembered = m->n_remembered};
    o.wall_ms = (uint64_t)(1800000000000 + (int64_t)(w->now / 1000) + m->wall_offset_ms);
    (void)snprintf(o.name, sizeof o.name, "machine-%c", (char)('a' + m->number));
    struct node *n = NULL;
    struct err_text text = {""};
    if (node_new(&o, sim_local_us(w, m), &n, &text) != ERR_OK)
        sim_fail(w, "machine %u does not start from its disk: %s", m->number, text.text);
    return n;
}

/* What the machine measures of itself; memory comes and goes. */
void machine_budget(struct sim *w, struct machine *m, uint64_t bytes)
{
    m->budget_bytes = bytes;
    m->budget_most_bytes = MAX_OF(bytes, m->budget_most_bytes);
    struct node_local local = {.memory_total_bytes = m->budget_bytes,
                               .memory_available_bytes = m->budget_bytes,
                               .memory_limit_bytes = m->budget_bytes,
                               .budget_bytes = m->budget_bytes,
                               .cores = 4,
                               .threads = 4,
                               .stream_bytes_per_s = m->speed * 1e9,
                               .macs_per_s = m->speed * 1e10,
                               .on_mains = m->number % 3 != 1,
                               .wired = m->number % 2 == 0,
                               .arithmetic_version = ARITHMETIC};
    (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_LOCAL, .local = &local});
}

void machine_start(struct sim *w, struct machine *m)
{
    m->boot++;
    m->boot_id = rng_u64(&m->rng) | 1;
    m->offset_us = 1000000 + rng_below(&w->rng, 1000) * 1000003;
    m->slept_us = 0;
    m->kill_pending = m->stopping = m->asleep = m->busy = false;
    m->crash_at = 0;
    m->n_spins = 0;
    m->n_sleeps = m->n_sleeps_told = 0;
    m->stale_result = false;
    m->tick_at_us = m->pipe_tick_at_us = 0;
    m->own_incarnation = 0;
    m->next_accepted = 0;
    memset(m->incarnations, 0, sizeof m->incarnations);
    memset(m->revoked_since_us, 0, sizeof m->revoked_since_us);
    memset(m->link_dialling, 0, sizeof m->link_dialling);
    m->node = new_node(w, m);
    if (!m->node)
        return;
    m->alive = m->powered = true;
    m->term_on_disk = control_term_seen(node_control(m->node));
    stage_start(w, m);
    sim_trace(w, "%u starts, boot %u", m->number, m->boot);
    m->budget_most_bytes = 0;
    machine_budget(w, m, m->budget_usual_bytes);
    for (uint32_t i = 0; i < MODELS && m->alive; i++) {
        if (m->holds[i])
            tell_model(w, m, i);
    }
    if (m->alive)
        sim_post(w, w->now + sim_below(w, 100 * MS), EV_ANNOUNCE, m->number);
}

void machine_kill(struct sim *w, struct machine *m, bool power, bool polite)
{
    if (!m->alive)
        return;
    if (m->depth > 0) {
        m->kill_pending = true;
        m->kill_power = power;
        m->kill_polite = polite;
        return;
    }
    sim_trace(w, "%u %s", m->number, polite ? "stops" : power ? "loses power" : "crashes");
    if (polite)
        net_announce(w, m, true);
    net_drop_machine(w, m, power);
    m->alive = m->asleep = m->kill_pending = false;
    m->powered = !power;
    stage_stop(w, m);
    node_free(m->node);
    m->node = NULL;
    for (uint32_t i = 0; i < LOADING; i++) {
        free(m->loading[i].plan);
        m->loading[i] = (struct loading){.plan = NULL};
    }
    for (uint32_t i = 0; i < w->n_requests; i++) {
        struct request *q = &w->requests[i];
        if (q->state == REQUEST_RUNNING && q->entry == m->number) {
            q->state = REQUEST_DONE;
            w->r->n_lost++;
        }
    }
}

/* --- epochs, as in agent/serve_node.c --- */

static struct loading *loading_find(struct machine *m, const struct epoch *epoch)
{
    for (uint32_t i = 0; i < LOADING; i++) {
        if (m->loading[i].plan && epoch_eq(&m->loading[i].plan->epoch, epoch))
            return &m->loading[i];
    }
    return NULL;
}

static void loading_forget(struct loading *l)
{
    free(l->plan);
    *l = (struct loading){.plan = NULL};
}

static void do_prepare(struct sim *w, struct machine *m, struct node_effect *x)
{
    struct loading *l = loading_find(m, &x->epoch);
    for (uint32_t i = 0; !l && i < LOADING; i++) {
        if (!m->loading[i].plan)
            l = &m->loading[i];
    }
    if (!l || l->plan)
        return;
    check_plan(w, m, x->plan);
    *l = (struct loading){.plan = TAKE(x->plan), .stage = x->stage, .state = LOADING_NOW};
    check_memory(w, m);
    uint64_t us = 5 * MS + sim_below(w, 300 * MS);
    if (sim_has(w, SIM_LOADS) && sim_chance(w, 6))
        us += (uint64_t)sim_below(w, 6000) * MS;
    sim_post(w, w->now + us, EV_LOADED, m->number)->x = (uint32_t)(l - m->loading);
}

static void do_retire(struct sim *w, struct machine *m, const struct epoch *epoch)
{
    struct loading *l = loading_find(m, epoch);
    if (!l)
        (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_RETIRED, .epoch = *epoch});
    else if (l->state == LOADING_INSTALLED)
        stage_mail(w, m, &(struct mail){.type = MAIL_RETIRE, .epoch = *epoch}, false);
    else
        l->state = LOADING_ABORTED;
}

static uint32_t model_number(const struct sim *w, const struct hash256 *id)
{
    uint32_t i = 0;
    while (i < MODELS - 1 && !hash256_eq(&w->shapes[i].model, id))
        i++;
    return i;
}

void machine_loaded(struct sim *w, struct machine *m, uint32_t index)
{
    struct loading *l = &m->loading[index];
    if (!l->plan)
        return;
    struct epoch epoch = l->plan->epoch;
    if (l->state == LOADING_ABORTED) {
        loading_forget(l);
        (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_RETIRED, .epoch = epoch});
        return;
    }
    uint32_t model = model_number(w, &l->plan->model);
    struct node_id holder;
    const char *why = NULL;
    if (!m->holds[model] && node_holders(m->node, &l->plan->model, &holder, 1) == 0)
        why = "no member within reach holds the bytes";
    else if (sim_has(w, SIM_LOADS) && sim_chance(w, 10))
        why = "the disk is full";
    if (why) {
        loading_forget(l);
        (void)machine_step(
            w, m,
            &(struct node_event){
                .type = NODE_EVENT_PREPARE_FAILED, .epoch = epoch, .error = ERR_IO, .text = why});
        return;
    }
    struct plan *copy = sim_alloc(sizeof *copy);
    *copy = *l->plan;
    l->state = LOADING_INSTALLED;
    stage_mail(w, m, &(struct mail){.type = MAIL_INSTALL, .plan = copy}, false);
    bool is_new = !m->holds[model];
    m->holds[model] = true;
    (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_PREPARED, .epoch = epoch});
    if (is_new && m->alive)
        tell_model(w, m, model);
}

/* --- effects --- */

static bool persist(struct machine *m, const struct node_effect *x)
{
    bool trust = x->type == NODE_EFFECT_PERSIST_TRUST;
    if (!trust && m->disk_full)
        return false;
    if (!trust)
        m->term_on_disk = control_term_seen(node_control(m->node));
    uint8_t **to = trust ? &m->trust_bytes : &m->control_bytes;
    free(*to);
    *to = sim_alloc(x->n_bytes);
    memcpy(*to, x->bytes, x->n_bytes);
    *(trust ? &m->n_trust_bytes : &m->n_control_bytes) = x->n_bytes;
    return true;
}

void machine_disk(struct sim *w, struct machine *m, bool full)
{
    if (m->disk_full == full)
        return;
    if (!full && m->alive && m->asleep) {
        sim_post(w, w->now + 300 * MS, EV_DISK, NOBODY)->x = m->number;
        return;
    }
    sim_trace(w, full ? "the disk of %u is full" : "the disk of %u has room again", m->number);
    m->disk_full = full;
    if (!full) /* that it is full the machine finds out */
        (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_DISK});
}

static void plan_mail(struct sim *w, struct machine *m, enum mail_type type,
                      const struct node_effect *x)
{
    struct mail mail = {.type = type, .epoch = x->epoch, .model = x->model, .error = x->error};
    (void)snprintf(mail.text, sizeof mail.text, "%s", x->text);
    if (type == MAIL_ROUTE) {
        mail.plan = sim_alloc(sizeof *mail.plan);
        *mail.plan = *x->plan;
    }
    stage_mail(w, m, &mail, false);
}

static void do_peer(struct sim *w, struct machine *m, uint64_t session)
{
    uint32_t conn, end;
    struct conn_end *e = net_session(w, m, session, &conn, &end);
    if (e)
        e->keyed = true;
}

static void carry_out(struct sim *w, struct machine *m, struct node_effect *x)
{
    switch (x->type) {
    case NODE_EFFECT_PERSIST_TRUST:
    case NODE_EFFECT_PERSIST_CONTROL:
    case NODE_EFFECT_CLOSE: /* after the messages */
        break;
    case NODE_EFFECT_REMEMBER:
        m->n_remembered =
            node_remembered(m->node, m->remembered_ids, m->remembered, DISK_ADDRESSES);
        break;
    case NODE_EFFECT_DIAL:
        net_dial(w, m, x);
        break;
    case NODE_EFFECT_PEER:
        do_peer(w, m, x->session);
        break;
    case NODE_EFFECT_ANNOUNCE:
        net_announce(w, m, false);
        break;
    case NODE_EFFECT_MEASURE: {
        uint32_t to = sim_number(w, &x->peer);
        bool open = to < w->n && net_open(w, m->number, to) && net_open(w, to, m->number);
        for (uint32_t i = 0; i < 2 && to < w->n; i++) {
            struct event *e = sim_post(w, w->now + 100 * MS, EV_MEASURED, i ? to : m->number);
            e->x = i ? m->number : to;
            e->y = open ? 100 * 1000 * 1000 : 0;
        }
        break;
    }
    case NODE_EFFECT_UNLINK: {
        uint32_t peer = sim_number(w, &x->peer);
        stage_mail(w, m, &(struct mail){.type = MAIL_UNLINK, .number = peer}, false);
        break;
    }
    case NODE_EFFECT_DIAL_LINK:
        net_dial_link(w, m, x);
        break;
    case NODE_EFFECT_PREPARE:
        do_prepare(w, m, x);
        break;
    case NODE_EFFECT_COMMIT:
        plan_mail(w, m, MAIL_COMMIT, x);
        break;
    case NODE_EFFECT_ABORT:
    case NODE_EFFECT_RETIRE:
        do_retire(w, m, &x->epoch);
        break;
    case NODE_EFFECT_DRAIN:
        plan_mail(w, m, MAIL_DRAIN, x);
        break;
    case NODE_EFFECT_ROUTE:
        if (x->plan)
            plan_mail(w, m, MAIL_ROUTE, x);
        break;
    case NODE_EFFECT_NO_ROUTE:
        if (x->error != ERR_NO_FIT)
            plan_mail(w, m, MAIL_NO_ROUTE, x);
        break;
    case NODE_EFFECT_ANSWER:
        chaos_answer(w, m, x);
        break;
    case NODE_EFFECT_NOTE:
        sim_trace(w, "%u notes %s: %s", m->number, x->word, x->text);
        break;
    case NODE_EFFECT_STOPPED:
        machine_kill(w, m, false, true);
        break;
    }
}

static void send_messages(struct sim *w, struct machine *m, const struct outbox *box,
                          bool persisted)
{
    for (uint32_t i = 0; i < box->n; i++) {
        const struct wire_message *msg = &box->messages[i];
        uint32_t conn, end;
        if (msg->channel == CHANNEL_CONTROL && !persisted)
            continue;
        if (msg->way == WAY_DATAGRAM) {
            net_datagram(w, m, msg);
            continue;
        }
        const struct conn_end *e = net_session(w, m, msg->session, &conn, &end);
        if (e && e->ready)
            net_send(w, conn, end, PACKET_DATA, msg->channel, msg->bytes, msg->len, NULL, 0);
    }
}

/* A crash can come between what is written and what is said of it. */
static bool persist_all(struct sim *w, struct machine *m, const struct node_update *u,
                        bool *ret_persisted)
{
    bool any = false;
    for (uint32_t i = 0; i < u->n_effects; i++)
        any |= u->effects[i].type == NODE_EFFECT_PERSIST_TRUST ||
               u->effects[i].type == NODE_EFFECT_PERSIST_CONTROL;
    int crash_at = any ? m->crash_at : 0;
    if (crash_at != 0)
        sim_post(w, w->now + (uint64_t)(300 + sim_below(w, 6000)) * MS, EV_START, NOBODY)->x =
            m->number;
    if (crash_at == 1)
        machine_kill(w, m, true, false);
    for (uint32_t i = 0; i < u->n_effects && crash_at != 1; i++) {
        if (u->effects[i].type == NODE_EFFECT_PERSIST_TRUST ||
            u->effects[i].type == NODE_EFFECT_PERSIST_CONTROL)
            *ret_persisted &= persist(m, &u->effects[i]);
    }
    if (crash_at == 2)
        machine_kill(w, m, true, false);
    return crash_at == 0;
}

static void carry_out_update(struct sim *w, struct machine *m, struct node_update *u)
{
    if (m->kill_pending && !m->kill_polite)
        return;
    bool persisted = true;
    if (!persist_all(w, m, u, &persisted))
        return;
    if (!persisted)
        (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_DISK, .full = true});
    for (uint32_t i = 0; i < u->n_effects; i++)
        carry_out(w, m, &u->effects[i]);
    send_messages(w, m, &u->outbox, persisted);
    for (uint32_t i = 0; i < u->n_effects; i++) {
        uint32_t conn, end;
        if (u->effects[i].type == NODE_EFFECT_CLOSE &&
            net_session(w, m, u->effects[i].session, &conn, &end))
            net_close(w, conn, end);
    }
}

static void schedule(struct sim *w, struct machine *m)
{
    uint64_t due = node_next_due(m->node), now = sim_local_us(w, m);
    if (due == UINT64_MAX)
        return;
    uint64_t at = w->now + MAX_OF(due > now ? due - now : 0, (uint64_t)TICK_US);
    if (m->tick_at_us > w->now && m->tick_at_us <= at)
        return;
    m->tick_at_us = at;
    sim_post(w, at, EV_TICK, m->number);
}

enum err machine_step(struct sim *w, struct machine *m, const struct node_event *e)
{
    if (!m->alive || m->kill_pending)
        return ERR_CLOSED;
    struct node_update u = NODE_UPDATE_INIT;
    m->depth++;
    w->r->n_steps++;
    enum err r = node_step(m->node, e, sim_local_us(w, m), &u);
    if (r == ERR_NO_MEMORY)
        sim_fail(w, "machine %u says that there is no memory", m->number);
    carry_out_update(w, m, &u);
    node_update_deinit(&u);
    if (--m->depth > 0)
        return r;
    if (m->kill_pending) {
        machine_kill(w, m, m->kill_power, m->kill_polite);
        return r;
    }
    check_step(w, m);
    schedule(w, m);
    return r;
}

void machine_tick(struct sim *w, struct machine *m)
{
    m->tick_at_us = 0;
    (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_TICK});
    if (!m->alive)
        return;
    if (node_next_due(m->node) > sim_local_us(w, m))
        m->n_spins = 0;
    else if (++m->n_spins > SPINS_MAX)
        sim_fail(w, "machine %u asks for a tick again and again", m->number);
    if (m->stopping && !m->kill_pending && node_next_due(m->node) == UINT64_MAX)
        return;
}

static void tell_slept(struct sim *w, struct machine *m)
{
    if (m->n_sleeps_told == m->n_sleeps)
        return;
    m->n_sleeps_told = m->n_sleeps;
    stage_mail(w, m, &(struct mail){.type = MAIL_SLEPT}, false);
    (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_SLEPT});
}

void machine_wake(struct sim *w, struct machine *m)
{
    if (!m->alive || !m->asleep || w->now < m->wake_at_us)
        return;
    m->asleep = false;
    m->slept_us += w->now - m->sleep_began_us;
    sim_trace(w, "%u wakes", m->number);
    if (w->now - m->sleep_began_us <= SECOND)
        return;
    m->n_sleeps++;
    stage_woken(w, m);
    if (sim_chance(w, 2)) /* the loop sees it by itself, else it hears of it */
        tell_slept(w, m);
}

/* --- mail from the data plane, as in agent/serve_mail.c --- */

static void on_mail(struct sim *w, struct machine *m, const struct mail *mail)
{
    struct node_event e = {.type = NODE_EVENT_TICK, .peer = mail->peer, .up = mail->up};
    switch (mail->type) {
    case MAIL_WOKEN:
        tell_slept(w, m);
        return;
    case MAIL_WANT_LINK:
        e.type = NODE_EVENT_WANT_LINK;
        break;
    case MAIL_LINK_STATE:
        e.type = NODE_EVENT_LINK;
        break;
    case MAIL_RELEASED: {
        struct loading *l = loading_find(m, &mail->epoch);
        if (l)
            loading_forget(l);
        e.type = NODE_EVENT_RETIRED;
        e.epoch = mail->epoch;
        break;
    }
    case MAIL_DRAINED:
        stage_mail(w, m, &(struct mail){.type = MAIL_RETIRE, .epoch = mail->epoch}, false);
        return;
    case MAIL_USED:
        e.type = NODE_EVENT_USED;
        e.model_id = mail->model;
        break;
    case MAIL_PROGRESS:
        e.type = NODE_EVENT_BUSY;
        e.step = mail->step;
        break;
    default:
        return;
    }
    (void)machine_step(w, m, &e);
}

void machine_mail(struct sim *w, struct machine *m)
{
    uint32_t boot = m->boot;
    while (m->alive && m->boot == boot && m->loop.first && m->loop.first->due_us <= w->now) {
        struct mail *mail = m->loop.first;
        m->loop.first = mail->next;
        if (!m->loop.first)
            m->loop.last = NULL;
        on_mail(w, m, mail);
        free(mail->plan);
        free(mail);
    }
}
