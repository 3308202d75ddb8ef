/* Sessions, datagrams, data links and discovery between virtual machines.
 *
 * A session or link carries packets in order, as TCP does: where the way is blocked they wait, and
 * are tried again at growing intervals (200 ms and twice as long each time); a connection to a
 * machine that lost power is noticed only when that machine is back and answers with a reset, or by
 * whoever gives up. A cut is a connection that breaks by itself: each side loses what was under
 * way, and hears of it a little later. The handshake is reduced to what it decides: whether the
 * dialler's secret is one that the other end accepts. */
#include "tests/sim/sim_internal.h"

#include "base/util.h"
#include "transport/frame.h"

#include <stdlib.h>
#include <string.h>

enum {
    DIAL_US = 3 * SECOND,      /* as in agent/control_net.c */
    HANDSHAKE_US = 3 * SECOND, /* proto/session.h */
    RETRANSMIT_US = 200 * MS,
};
#define ACCEPTED_BIT (UINT64_C(1) << 63)

bool net_open(const struct sim *w, uint32_t from, uint32_t to)
{
    return w->blocked[from][to] == 0;
}

static uint64_t delay_us(struct sim *w, uint32_t from, uint32_t to)
{
    uint64_t us = 150 + sim_below(w, 500);
    if (!w->healed && w->machines[from].slow_us)
        us += rng_below(&w->rng, w->machines[from].slow_us);
    if (!w->healed && w->machines[to].slow_us)
        us += rng_below(&w->rng, w->machines[to].slow_us);
    return us;
}

static void clear_queue(struct conn_end *e)
{
    while (e->first) {
        struct packet *p = e->first;
        e->first = p->next;
        free(p);
    }
    e->last = NULL;
}

static uint32_t new_conn(struct sim *w, bool link, const struct machine *a, const struct machine *b)
{
    if (w->n_conns == CONNS) {
        sim_fail(w, "more connections than a run should need");
        return 0;
    }
    struct conn *c = sim_alloc(sizeof *c);
    c->link = link;
    c->ends[0] = (struct conn_end){.machine = a->number, .boot = a->boot, .open = true};
    c->ends[1] = (struct conn_end){.machine = b->number, .boot = b->boot, .open = true};
    w->conns[w->n_conns] = c;
    w->live[w->n_live++] = w->n_conns;
    return w->n_conns++;
}

static void forget_closed(struct sim *w)
{
    for (uint32_t i = w->n_live; i-- > 0;) {
        struct conn *c = w->conns[w->live[i]];
        if (c->ends[0].open || c->ends[1].open)
            continue;
        clear_queue(&c->ends[0]);
        clear_queue(&c->ends[1]);
        w->live[i] = w->live[--w->n_live];
    }
}

struct conn_end *net_session(struct sim *w, const struct machine *m, uint64_t id,
                             uint32_t *ret_conn, uint32_t *ret_end)
{
    for (uint32_t i = 0; i < w->n_live; i++) {
        struct conn *c = w->conns[w->live[i]];
        for (uint32_t s = 0; s < 2 && !c->link; s++) {
            struct conn_end *e = &c->ends[s];
            if (e->open && e->machine == m->number && e->boot == m->boot && e->id == id) {
                *ret_conn = w->live[i];
                *ret_end = s;
                return e;
            }
        }
    }
    return NULL;
}

static void expect_read(struct sim *w, uint32_t conn, uint32_t end, uint64_t at)
{
    struct conn_end *e = &w->conns[conn]->ends[end];
    if (e->reading || !e->first)
        return;
    e->reading = true;
    struct event *r = sim_post(w, MAX_OF(at, e->first->due_us), EV_READ, NOBODY);
    r->x = conn;
    r->y = end;
}

void net_send(struct sim *w, uint32_t conn, uint32_t from_end, enum packet_kind kind,
              uint8_t channel, const void *bytes, size_t n, const void *more, size_t n_more)
{
    struct conn *c = w->conns[conn];
    struct conn_end *from = &c->ends[from_end], *to = &c->ends[1 - from_end];
    struct machine *there = &w->machines[to->machine];
    if (!to->open) {
        /* Nobody holds that end: a machine that is up answers with a reset. */
        if (there->powered && from->open && net_open(w, from->machine, to->machine)) {
            struct event *reset = sim_post(w, w->now + 1 * MS, EV_DOWN, NOBODY);
            reset->x = conn;
            reset->y = from_end;
        }
        return;
    }
    size_t cap = (sizeof(struct packet) + n + n_more + 15) / 16 * 16;
    struct packet *p = aligned_alloc(16, cap);
    if (!p)
        abort();
    *p = (struct packet){.kind = kind, .channel = channel, .len = (uint32_t)(n + n_more)};
    if (n)
        memcpy(p->bytes, bytes, n);
    if (n_more)
        memcpy(p->bytes + n, more, n_more);
    if (sim_has(w, SIM_STALLS) && sim_chance(w, 400))
        to->stalled_until_us = w->now + (uint64_t)(100 + sim_below(w, 2500)) * MS;
    p->due_us = MAX_OF(w->now + delay_us(w, from->machine, to->machine), to->last_us);
    to->last_us = p->due_us;
    if (to->last)
        to->last->next = p;
    else
        to->first = p;
    to->last = p;
    expect_read(w, conn, 1 - from_end, 0);
}

void net_down(struct sim *w, uint32_t conn, uint32_t end, enum node_down how)
{
    struct conn *c = w->conns[conn];
    struct conn_end *e = &c->ends[end];
    struct machine *m = &w->machines[e->machine];
    if (!e->open || !m->alive || m->boot != e->boot)
        return;
    if (m->asleep || (c->link && m->busy)) {
        uint64_t at = m->asleep ? m->wake_at_us + 1 * MS : m->busy_until_us + 1;
        struct event *again = sim_post(w, at, EV_DOWN, NOBODY);
        again->x = conn;
        again->y = end;
        return;
    }
    uint64_t id = e->id;
    net_close(w, conn, end);
    if (c->link)
        stage_link_lost(w, m, c->ends[1 - end].machine, false);
    else
        (void)machine_step(
            w, m,
            &(struct node_event){.type = NODE_EVENT_SESSION_DOWN, .session = id, .down = how});
}

/* This end gives the connection up; what it sent before still arrives. */
void net_close(struct sim *w, uint32_t conn, uint32_t end)
{
    struct conn_end *e = &w->conns[conn]->ends[end];
    if (!e->open)
        return;
    if (!w->conns[conn]->link)
        sim_trace(w, "%u closes session %llx to %u (conn %u)", e->machine,
                  (unsigned long long)e->id, w->conns[conn]->ends[1 - end].machine, conn);
    net_send(w, conn, end, PACKET_FIN, 0, NULL, 0, NULL, 0);
    e->open = false;
    clear_queue(e);
    forget_closed(w);
}

void net_cut(struct sim *w, uint32_t conn, uint32_t late_us)
{
    for (uint32_t s = 0; s < 2; s++) {
        struct conn_end *e = &w->conns[conn]->ends[s];
        struct packet **at = &e->first;
        uint32_t keep = sim_below(w, 4); /* of what is under way */
        while (*at && keep-- > 0)
            at = &(*at)->next;
        while (*at) {
            struct packet *p = *at;
            *at = p->next;
            free(p);
        }
        e->last = e->first;
        while (e->last && e->last->next)
            e->last = e->last->next;
        struct event *down =
            sim_post(w, w->now + 1 * MS + sim_below(w, late_us + 1), EV_DOWN, NOBODY);
        down->x = conn;
        down->y = s;
    }
}

/* The process is gone. Its system closes what it held, unless the power is gone too. */
void net_drop_machine(struct sim *w, struct machine *m, bool power)
{
    for (uint32_t i = w->n_live; i-- > 0;) {
        if (i >= w->n_live)
            continue;
        uint32_t conn = w->live[i];
        for (uint32_t s = 0; s < 2; s++) {
            struct conn_end *e = &w->conns[conn]->ends[s];
            if (!e->open || e->machine != m->number)
                continue;
            if (!power)
                net_send(w, conn, s, PACKET_FIN, 0, NULL, 0, NULL, 0);
            e->open = false;
            clear_queue(e);
        }
    }
    forget_closed(w);
}

/* --- reading --- */

static void deliver(struct sim *w, struct machine *m, uint32_t conn, uint32_t end, struct packet *p)
{
    struct conn *c = w->conns[conn];
    struct conn_end *e = &c->ends[end];
    struct machine *other = &w->machines[c->ends[1 - end].machine];
    if (p->kind == PACKET_FIN) {
        net_down(w, conn, end, NODE_DOWN_CLOSED);
    } else if (c->link) {
        stage_frame(w, m, conn, p->bytes, p->len);
    } else if (p->kind == PACKET_READY) {
        struct node_event ready = {.type = NODE_EVENT_SESSION_READY,
                                   .session = e->id,
                                   .inbound = true,
                                   .address = other->address,
                                   .psk_tag = e->psk_tag};
        ready.address.port = (uint16_t)(50000 + conn % 10000);
        memcpy(ready.peer_static, other->identity.static_public, sizeof ready.peer_static);
        e->ready = true;
        (void)machine_step(w, m, &ready);
    } else {
        enum err r = machine_step(w, m,
                                  &(struct node_event){.type = NODE_EVENT_MESSAGE,
                                                       .session = e->id,
                                                       .channel = p->channel,
                                                       .bytes = p->bytes,
                                                       .len = p->len});
        if (r == ERR_CORRUPT)
            sim_fail(w, "machine %u finds a message of %u on channel %u corrupt", m->number,
                     other->number, p->channel);
    }
}

/* When the head of the queue may be read; 0: now. */
static uint64_t not_before(struct sim *w, struct conn *c, uint32_t end)
{
    struct conn_end *e = &c->ends[end];
    struct machine *m = &w->machines[e->machine];
    uint32_t from = c->ends[1 - end].machine;
    if (m->asleep)
        return m->wake_at_us + 1;
    if (w->now < e->stalled_until_us)
        return e->stalled_until_us;
    if (!net_open(w, from, e->machine) || !net_open(w, e->machine, from)) {
        if (e->blocked_since_us == 0)
            e->blocked_since_us = w->now;
        uint64_t waited = w->now - e->blocked_since_us;
        return w->now + RETRANSMIT_US + waited; /* 0.2, 0.6, 1.4, 3.0 ... after the first try */
    }
    e->blocked_since_us = 0;
    if (c->link && (m->busy || !e->ready))
        return m->busy ? m->busy_until_us + 1 : w->now + 200;
    return 0;
}

void net_read(struct sim *w, const struct event *event)
{
    uint32_t conn = event->x, end = event->y;
    struct conn *c = w->conns[conn];
    struct conn_end *e = &c->ends[end];
    e->reading = false;
    if (!e->open || !e->first)
        return;
    uint64_t later = e->first->due_us > w->now ? e->first->due_us : not_before(w, c, end);
    if (later > 0) {
        expect_read(w, conn, end, MAX_OF(later, w->now + 1));
        return;
    }
    struct packet *p = e->first;
    e->first = p->next;
    if (!e->first)
        e->last = NULL;
    deliver(w, &w->machines[e->machine], conn, end, p);
    free(p);
    expect_read(w, conn, end, 0);
}

/* --- dialling --- */

static uint32_t machine_at(const struct sim *w, const struct address *a, uint16_t port)
{
    for (uint32_t i = 0; i < w->n_all; i++) {
        if (memcmp(w->machines[i].address.ip, a->ip, 4) == 0 && a->port == port)
            return i;
    }
    return MACHINES;
}

void net_dial(struct sim *w, struct machine *m, const struct node_effect *x)
{
    struct dial *d = sim_alloc(sizeof *d);
    check_dial(w, m, machine_at(w, &x->address, CONTROL_PORT));
    sim_trace(w, "%u dials %u.%u as session %llu", m->number, x->address.ip[3] - 1, x->address.port,
              (unsigned long long)x->session);
    *d = (struct dial){.session = x->session, .started_us = w->now, .psk_tag = x->psk_tag};
    d->to = machine_at(w, &x->address, CONTROL_PORT);
    memcpy(d->psk, x->psk, sizeof d->psk);
    sim_post(w, w->now + 300 + sim_below(w, 1 * MS), EV_DIAL, m->number)->p = d;
}

static void dial_failed(struct sim *w, struct machine *m, const struct dial *d, enum node_down how)
{
    (void)machine_step(
        w, m,
        &(struct node_event){.type = NODE_EVENT_SESSION_DOWN, .session = d->session, .down = how});
}

static void dial_answered(struct sim *w, struct machine *m, const struct dial *d)
{
    struct machine *to = &w->machines[d->to];
    struct session_psk psks[SESSION_PSKS_MAX];
    uint32_t n = node_psks(to->node, psks, SESSION_PSKS_MAX), k = 0;
    while (k < n && memcmp(psks[k].key, d->psk, sizeof d->psk) != 0)
        k++;
    if (k == n) {
        dial_failed(w, m, d, NODE_DOWN_DENIED);
        return;
    }
    uint32_t conn = new_conn(w, false, m, to);
    struct conn *c = w->conns[conn];
    if (!c)
        return;
    c->ends[0].id = d->session;
    c->ends[0].psk_tag = d->psk_tag;
    c->ends[1].id = ACCEPTED_BIT | ++to->next_accepted;
    c->ends[1].psk_tag = psks[k].tag;
    sim_trace(w, "%u accepts %u as session %llx (conn %u)", to->number, m->number,
              (unsigned long long)c->ends[1].id, conn);
    sim_post(w, w->now + delay_us(w, to->number, m->number), EV_READY, m->number)->x = conn;
    for (uint32_t s = 0; s < 2; s++) {
        struct event *e = sim_post(w, w->now + HANDSHAKE_US, EV_DEADLINE, NOBODY);
        e->x = conn;
        e->y = s;
    }
}

/* The first packet reaches the other machine, or does not. */
void net_dialled(struct sim *w, struct machine *m, struct event *e)
{
    struct dial *d = e->p;
    struct machine *to = d->to < MACHINES ? &w->machines[d->to] : NULL;
    if (w->now >= d->started_us + DIAL_US) {
        dial_failed(w, m, d, NODE_DOWN_TIMED_OUT);
        return;
    }
    if (!to || !to->powered || to->asleep || !net_open(w, m->number, d->to) ||
        !net_open(w, d->to, m->number)) {
        uint64_t wait = d->n_tries++ ? 2 * SECOND : 1 * SECOND;
        struct event *again =
            sim_post(w, MIN_OF(w->now + wait, d->started_us + DIAL_US), EV_DIAL, m->number);
        again->p = TAKE(e->p);
        return;
    }
    if (!to->alive)
        dial_failed(w, m, d, NODE_DOWN_REFUSED);
    else
        dial_answered(w, m, d);
}

void net_ready(struct sim *w, struct machine *m, uint32_t conn)
{
    struct conn *c = w->conns[conn];
    struct machine *to = &w->machines[c->ends[1].machine];
    if (!c->ends[0].open)
        return;
    struct node_event ready = {.type = NODE_EVENT_SESSION_READY,
                               .session = c->ends[0].id,
                               .address = to->address,
                               .psk_tag = c->ends[0].psk_tag};
    memcpy(ready.peer_static, to->identity.static_public, sizeof ready.peer_static);
    c->ends[0].ready = true;
    net_send(w, conn, 0, PACKET_READY, 0, NULL, 0, NULL, 0);
    if (machine_step(w, m, &ready) == ERR_NOT_FOUND) /* the node has given the dial up */
        net_close(w, conn, 0);
}

/* --- datagrams --- */

void net_datagram(struct sim *w, struct machine *m, const struct wire_message *msg)
{
    struct address to;
    uint32_t conn, end;
    const struct conn_end *e = net_session(w, m, msg->session, &conn, &end);
    if (!node_path_address(m->node, &msg->to, msg->path, &to) || !e || !e->ready)
        return;
    uint32_t there = w->conns[conn]->ends[1 - end].machine;
    if (machine_at(w, &to, CONTROL_PORT) != there || !net_open(w, m->number, there) ||
        msg->len > DATAGRAM_PAYLOAD_MAX)
        return;
    uint32_t copies = 1;
    uint64_t late = 0;
    if (sim_has(w, SIM_DATAGRAMS)) {
        if (sim_chance(w, 12))
            copies = 0;
        else if (sim_chance(w, 25))
            copies = 2;
        if (sim_chance(w, 20))
            late = rng_below(&w->rng, 400 * MS);
    }
    while (copies-- > 0) {
        struct datagram_in_flight *d = malloc(sizeof *d);
        if (!d)
            abort();
        d->conn = conn;
        d->end = 1 - end;
        d->channel = msg->channel;
        d->len = msg->len;
        memcpy(d->bytes, msg->bytes, msg->len);
        sim_post(w, w->now + late + copies * 300 + delay_us(w, m->number, there), EV_DATAGRAM,
                 there)
            ->p = d;
    }
}

void net_datagram_in(struct sim *w, struct machine *m, const struct datagram_in_flight *d)
{
    const struct conn *c = w->conns[d->conn];
    const struct conn_end *e = &c->ends[d->end];
    if (!e->open || !e->ready || e->boot != m->boot)
        return;
    struct node_event in = {.type = NODE_EVENT_DATAGRAM,
                            .session = e->id,
                            .address = w->machines[c->ends[1 - d->end].machine].address,
                            .channel = d->channel,
                            .bytes = d->bytes,
                            .len = d->len};
    if (machine_step(w, m, &in) == ERR_CORRUPT)
        sim_fail(w, "machine %u finds a datagram of channel %u corrupt", m->number, d->channel);
}

/* --- data links --- */

void net_dial_link(struct sim *w, struct machine *m, const struct node_effect *x)
{
    uint32_t to = machine_at(w, &x->address, DATA_PORT), conn, end;
    uint64_t session = node_session_of(m->node, &x->peer);
    const struct conn_end *e = net_session(w, m, session, &conn, &end);
    if (to == MACHINES || !e || !e->keyed || m->link_dialling[to])
        return;
    m->link_dialling[to] = true;
    bool lost = !net_open(w, m->number, to) || !net_open(w, to, m->number);
    struct event *d = sim_post(w, w->now + (lost ? 3 * SECOND : 1 * MS + sim_below(w, 3 * MS)),
                               EV_LINK_DIAL, m->number);
    d->x = to;
    d->y = conn;
}

static void hand_over(struct sim *w, struct machine *m, uint32_t conn)
{
    stage_mail(w, m, &(struct mail){.type = MAIL_LINK, .number = conn}, false);
}

void net_link_dialled(struct sim *w, struct machine *m, uint32_t peer, uint32_t session_conn)
{
    struct machine *to = &w->machines[peer];
    const struct conn *s = w->conns[session_conn];
    m->link_dialling[peer] = false;
    bool keyed = s->ends[0].open && s->ends[1].open && s->ends[0].keyed && s->ends[1].keyed;
    if (!keyed || !to->alive || to->asleep || !net_open(w, m->number, peer) ||
        !net_open(w, peer, m->number))
        return;
    uint32_t conn = new_conn(w, true, m, to);
    if (!w->conns[conn])
        return;
    hand_over(w, m, conn);
    hand_over(w, to, conn);
}

/* --- discovery --- */

static void instance_name(const struct machine *m, char ret[NODE_INSTANCE_MAX])
{
    static const char word[] = "machine-";
    memcpy(ret, word, sizeof word);
    ret[sizeof word - 1] = (char)('a' + m->number);
    ret[sizeof word] = 0;
}

/* To all that multicast reaches now; it is repeated, and sometimes lost. */
void net_announce(struct sim *w, struct machine *m, bool gone)
{
    for (uint32_t i = 0; i < w->n_all; i++) {
        struct machine *to = &w->machines[i];
        if (to == m || !to->alive || to->asleep || !net_open(w, m->number, i) ||
            (sim_has(w, SIM_DATAGRAMS) && sim_chance(w, 4)))
            continue;
        struct node_found *f = sim_alloc(sizeof *f);
        instance_name(m, f->instance);
        instance_name(m, f->name);
        f->gone = gone;
        if (!gone)
            node_tags(m->node, f->instance, f->cluster_tag, &f->n_cluster_tag, f->invite_tag,
                      &f->n_invite_tag);
        memcpy(f->addresses, m->shown, m->n_shown * sizeof m->shown[0]);
        f->n_addresses = m->n_shown;
        sim_post(w, w->now + 1 * MS + sim_below(w, 100 * MS), EV_FOUND, i)->p = f;
    }
}

void net_free(struct sim *w)
{
    for (uint32_t i = 0; i < w->n_conns; i++) {
        clear_queue(&w->conns[i]->ends[0]);
        clear_queue(&w->conns[i]->ends[1]);
        free(w->conns[i]);
    }
}
