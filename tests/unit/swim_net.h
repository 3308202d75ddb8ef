/* A virtual network of swim cores for tests: hosts with a clock each, datagrams with loss, delay,
 * reordering and duplication over up to two paths, sessions that are dialled, closed, refused or
 * time out, cuts in one direction, crashes, restarts, sleep and stalls. Everything follows from a
 * seed. After every step it checks that incarnations and versions never go back. */
#ifndef COVEY_TESTS_UNIT_SWIM_NET_H
#define COVEY_TESTS_UNIT_SWIM_NET_H

#include "base/rng.h"
#include "discovery/swim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NET_HOSTS = 16, NET_PATHS = 2, NET_PACKETS = 1 << 16, NET_KINDS = 4 };

#define NET_S UINT64_C(1000000)
#define NET_MS UINT64_C(1000)

#define NET_CHECK(net, condition)                                                                  \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "%s:%d: seed %llu at %llu us: %s\n", __FILE__, __LINE__,         \
                          (unsigned long long)(net)->seed, (unsigned long long)(net)->now,         \
                          #condition);                                                             \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

enum packet_type { PACKET_DATAGRAM, PACKET_MESSAGE, PACKET_SESSION };

struct packet {
    uint64_t at, order; /* order breaks ties */
    enum packet_type type;
    uint32_t from, to, path;
    uint64_t boot, from_boot; /* of the receiver (sessions) and the sender when sent */
    enum swim_session session;
    uint32_t len;
    uint8_t *bytes;
};

struct host {
    struct swim *swim;
    bool up;      /* the process runs */
    bool powered; /* the machine answers dials (with a refusal when the process is down) */
    bool asleep;
    bool member[NET_HOSTS];
    uint64_t boot;
    uint64_t floor;        /* what the agent stored of its incarnation */
    bool forgets;          /* restarts without the stored floor */
    uint64_t clock_behind; /* its monotonic clock stands still while it sleeps */
    uint64_t slept_at, stalled_until;
    bool session[NET_HOSTS], dialling[NET_HOSTS];
    uint64_t last_session_at[NET_HOSTS]; /* messages of a session keep their order */
    uint64_t incarnation[NET_HOSTS];     /* as it last held them, for the checks */
    uint64_t version[NET_HOSTS][NET_KINDS];
    uint64_t n_datagrams, n_redials, n_self_conflicts, n_deaths;
    uint64_t n_steps;
};

struct net {
    uint64_t seed, now, order;
    struct rng rng;
    uint32_t n, n_paths;
    uint64_t delay_min, delay_max;
    double loss, duplicate;
    bool cut[NET_PATHS][NET_HOSTS][NET_HOSTS]; /* [path][from][to] */
    bool block_datagrams;                      /* UDP is filtered everywhere */
    uint32_t clone, clone_seen_by;             /* this host has another one's id; bits: by whom */
    struct node_id ids[NET_HOSTS];
    struct host hosts[NET_HOSTS];
    struct packet *heap;
    uint32_t n_heap;
    struct swim_update update;
};

static inline struct node_id net_make_id(uint32_t i)
{
    struct node_id id;
    struct rng r;
    rng_seed(&r, 1000 + i);
    for (size_t b = 0; b < sizeof id.bytes; b++)
        id.bytes[b] = (uint8_t)rng_u64(&r);
    return id;
}

static inline struct node_id net_id(const struct net *net, uint32_t i)
{
    return net->ids[i];
}

/* Where host `from` finds this id: with a clone in the house, some find the one, some the other. */
static inline uint32_t net_index(struct net *net, uint32_t from, const struct node_id *id)
{
    if (net->clone != 0 && node_id_eq(&net->ids[net->clone], id) &&
        (net->clone_seen_by >> from & 1))
        return net->clone;
    for (uint32_t i = 0; i < net->n; i++)
        if (node_id_eq(&net->ids[i], id))
            return i;
    NET_CHECK(net, false);
    return 0;
}

static inline bool packet_before(const struct packet *a, const struct packet *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static inline void net_push(struct net *net, struct packet p)
{
    NET_CHECK(net, net->n_heap < NET_PACKETS);
    p.order = net->order++;
    uint32_t i = net->n_heap++;
    for (; i > 0 && packet_before(&p, &net->heap[(i - 1) / 2]); i = (i - 1) / 2)
        net->heap[i] = net->heap[(i - 1) / 2];
    net->heap[i] = p;
}

static inline struct packet net_pop(struct net *net)
{
    struct packet top = net->heap[0], last = net->heap[--net->n_heap];
    uint32_t i = 0;
    for (;;) {
        uint32_t child = 2 * i + 1;
        if (child >= net->n_heap)
            break;
        if (child + 1 < net->n_heap && packet_before(&net->heap[child + 1], &net->heap[child]))
            child++;
        if (!packet_before(&net->heap[child], &last))
            break;
        net->heap[i] = net->heap[child];
        i = child;
    }
    net->heap[i] = last;
    return top;
}

static inline uint64_t net_delay(struct net *net)
{
    return net->delay_min + rng_below(&net->rng, net->delay_max - net->delay_min + 1);
}

static inline bool net_reaches(const struct net *net, uint32_t from, uint32_t to)
{
    for (uint32_t p = 0; p < net->n_paths; p++)
        if (!net->cut[p][from][to])
            return true;
    return false;
}

static inline uint64_t net_clock(const struct net *net, uint32_t i)
{
    return net->now - net->hosts[i].clock_behind;
}

static inline void net_session_event(struct net *net, uint32_t at, uint32_t about, uint64_t delay,
                                     enum swim_session session)
{
    net_push(net, (struct packet){.at = net->now + delay,
                                  .type = PACKET_SESSION,
                                  .from = about,
                                  .to = at,
                                  .boot = net->hosts[at].boot,
                                  .from_boot = net->hosts[about].boot,
                                  .session = session});
}

static inline void net_dial(struct net *net, uint32_t i, uint32_t j)
{
    struct host *a = &net->hosts[i], *b = &net->hosts[j];
    a->n_redials++;
    if (a->session[j] || a->dialling[j])
        return;
    a->dialling[j] = true;
    bool reachable = net_reaches(net, i, j) && net_reaches(net, j, i) && b->powered && !b->asleep;
    uint64_t delay = 2 * net_delay(net);
    if (!reachable) {
        net_session_event(net, i, j, NET_S, SWIM_SESSION_TIMED_OUT);
    } else if (!b->up) {
        net_session_event(net, i, j, delay, SWIM_SESSION_REFUSED);
    } else {
        net_session_event(net, i, j, delay, SWIM_SESSION_UP);
        net_session_event(net, j, i, delay, SWIM_SESSION_UP);
    }
}

static inline void net_send(struct net *net, uint32_t i, const struct wire_message *m)
{
    struct host *h = &net->hosts[i];
    uint32_t j = net_index(net, i, &m->to);
    NET_CHECK(net, m->channel == CHANNEL_SWIM);
    struct packet p = {.from = i, .to = j, .path = m->path, .len = m->len};
    p.boot = net->hosts[j].boot;
    p.from_boot = h->boot;
    int copies = 1;
    if (m->way == WAY_SESSION) {
        if (!h->session[j] || !net_reaches(net, i, j))
            return;
        p.type = PACKET_MESSAGE;
        uint64_t at = net->now + net_delay(net);
        h->last_session_at[j] = at > h->last_session_at[j] ? at : h->last_session_at[j];
        p.at = h->last_session_at[j];
    } else {
        h->n_datagrams++;
        if (p.path == 0) {
            p.path = swim_best_path(h->swim, &m->to);
            p.path = p.path ? p.path : 1 + (uint32_t)rng_below(&net->rng, net->n_paths);
        }
        if (net->cut[p.path - 1][i][j] || net->block_datagrams || rng_unit(&net->rng) < net->loss)
            return;
        copies += rng_unit(&net->rng) < net->duplicate;
    }
    for (; copies > 0; copies--) {
        p.at = p.type == PACKET_DATAGRAM ? net->now + net_delay(net) : p.at;
        p.bytes = malloc(m->len);
        NET_CHECK(net, p.bytes);
        memcpy(p.bytes, m->bytes, m->len);
        net_push(net, p);
    }
}

/* The member that a step was about each time, all of them every now and then. */
static inline void net_check_host(struct net *net, uint32_t i, const struct swim_event *e)
{
    struct host *h = &net->hosts[i];
    for (uint32_t j = 0; j < net->n; j++) {
        if (h->n_steps % 16 != 0 && !node_id_eq(&net->ids[j], &e->peer) && i != j)
            continue;
        struct node_id id = net_id(net, j);
        struct swim_member_view v = {.incarnation = swim_self_incarnation(h->swim)};
        if (j != i && !swim_member(h->swim, &id, &v))
            continue;
        NET_CHECK(net, v.incarnation >= h->incarnation[j]);
        h->incarnation[j] = v.incarnation;
        for (uint32_t k = 0; k < NET_KINDS; k++) {
            struct swim_record_view r;
            if (!swim_record(h->swim, &id, (uint8_t)k, &r))
                continue;
            NET_CHECK(net, r.version >= h->version[j][k]);
            h->version[j][k] = r.version;
        }
    }
}

static inline enum err net_step(struct net *net, uint32_t i, const struct swim_event *e)
{
    struct host *h = &net->hosts[i];
    struct swim_update *u = &net->update;
    h->n_steps++;
    enum err result = swim_step(h->swim, e, net_clock(net, i), u);
    NET_CHECK(net, result != ERR_CORRUPT && result != ERR_NO_MEMORY);
    NET_CHECK(net, swim_next_due(h->swim) > net_clock(net, i));
    for (uint32_t m = 0; m < u->outbox.n; m++)
        net_send(net, i, &u->outbox.messages[m]);
    for (uint32_t n = 0; n < u->n_effects; n++) {
        const struct swim_effect *effect = &u->effects[n];
        if (effect->type == SWIM_EFFECT_REDIAL)
            net_dial(net, i, net_index(net, i, &effect->peer));
        if (effect->type == SWIM_EFFECT_INCARNATION)
            h->floor = effect->incarnation;
        if (getenv("SWIM_TRACE") && effect->type == SWIM_EFFECT_STATE)
            (void)fprintf(stderr, "  %llu us: host %u: %u %s -> %s, incarnation %llu\n",
                          (unsigned long long)net->now, i, net_index(net, i, &effect->peer),
                          swim_state_name(effect->old), swim_state_name(effect->new),
                          (unsigned long long)effect->incarnation);
        h->n_self_conflicts += effect->type == SWIM_EFFECT_SELF_CONFLICT;
        h->n_deaths += effect->type == SWIM_EFFECT_STATE && effect->new == SWIM_DEAD;
    }
    swim_update_clear(u);
    net_check_host(net, i, e);
    return result;
}

static inline void net_event(struct net *net, uint32_t i, enum swim_event_type type)
{
    struct swim_event e = {.type = type};
    (void)net_step(net, i, &e);
}

static inline void net_record(struct net *net, uint32_t i, uint8_t kind, const void *bytes,
                              uint32_t len)
{
    struct swim_event e = {.type = SWIM_EVENT_SET_RECORD, .kind = kind, .bytes = bytes, .len = len};
    NET_CHECK(net, net_step(net, i, &e) == ERR_OK);
}

static inline void net_start(struct net *net, uint32_t i, void (*adjust)(struct swim_options *))
{
    struct host *h = &net->hosts[i];
    struct swim_options o;
    swim_options_default(&o);
    o.self = net_id(net, i);
    h->boot = rng_u64(&net->rng) | 1;
    o.boot_id = h->boot;
    o.incarnation_floor = h->forgets ? 0 : h->floor;
    o.rng_seed = rng_u64(&net->rng);
    if (adjust)
        adjust(&o);
    NET_CHECK(net, swim_new(&o, net_clock(net, i), &h->swim) == ERR_OK);
    h->up = h->powered = true;
    memset(h->incarnation, 0, sizeof h->incarnation);
    memset(h->version, 0, sizeof h->version);
    memset(h->session, 0, sizeof h->session);
    memset(h->dialling, 0, sizeof h->dialling);
    uint32_t paths[NET_PATHS] = {1, 2};
    for (uint32_t j = 0; j < net->n; j++) {
        if (node_id_eq(&net->ids[j], &net->ids[i]))
            continue;
        struct swim_event add = {.type = SWIM_EVENT_MEMBER_ADD, .peer = net_id(net, j)};
        (void)net_step(net, i, &add);
        struct swim_event with = {.type = SWIM_EVENT_PATHS,
                                  .peer = net_id(net, j),
                                  .paths = paths,
                                  .n_paths = net->n_paths};
        (void)net_step(net, i, &with);
    }
}

static inline void net_init(struct net *net, uint64_t seed, uint32_t n)
{
    memset(net, 0, sizeof *net);
    net->seed = seed;
    net->now = NET_S;
    rng_seed(&net->rng, seed);
    net->n = n;
    net->n_paths = 1;
    net->delay_min = 50;
    net->delay_max = 500;
    net->update = SWIM_UPDATE_INIT;
    net->heap = malloc(NET_PACKETS * sizeof *net->heap);
    NET_CHECK(net, net->heap);
    for (uint32_t i = 0; i < n; i++)
        net->ids[i] = net_make_id(i);
}

static inline void net_start_all(struct net *net)
{
    for (uint32_t i = 0; i < net->n; i++)
        net_start(net, i, NULL);
}

static inline void net_deinit(struct net *net)
{
    for (uint32_t i = 0; i < net->n_heap; i++)
        free(net->heap[i].bytes);
    for (uint32_t i = 0; i < net->n; i++)
        swim_free(net->hosts[i].swim);
    free(net->heap);
    swim_update_deinit(&net->update);
}

static inline void net_close_sessions(struct net *net, uint32_t i, bool they_notice)
{
    for (uint32_t j = 0; j < net->n; j++) {
        if (net->hosts[j].session[i] && they_notice && net_reaches(net, i, j))
            net_session_event(net, j, i, net_delay(net), SWIM_SESSION_CLOSED);
        net->hosts[i].session[j] = false;
    }
}

/* The process dies: its kernel closes the sessions and refuses dials. */
static inline void net_kill(struct net *net, uint32_t i)
{
    net_close_sessions(net, i, true);
    swim_free(net->hosts[i].swim);
    net->hosts[i].swim = NULL;
    net->hosts[i].up = false;
}

/* The machine dies: silence. */
static inline void net_crash(struct net *net, uint32_t i)
{
    net_close_sessions(net, i, false);
    swim_free(net->hosts[i].swim);
    net->hosts[i].swim = NULL;
    net->hosts[i].up = net->hosts[i].powered = false;
}

static inline void net_sleep(struct net *net, uint32_t i)
{
    net->hosts[i].asleep = true;
    net->hosts[i].slept_at = net->now;
}

static inline void net_wake(struct net *net, uint32_t i)
{
    struct host *h = &net->hosts[i];
    h->asleep = false;
    h->clock_behind += net->now - h->slept_at;
    net_close_sessions(net, i, true);
    memset(h->dialling, 0, sizeof h->dialling);
    net_event(net, i, SWIM_EVENT_SLEPT);
}

static inline void net_cut_pair(struct net *net, uint32_t i, uint32_t j, bool cut)
{
    for (uint32_t p = 0; p < NET_PATHS; p++)
        net->cut[p][i][j] = cut;
}

/* Two sides; bit i of `side` says where host i is. */
static inline void net_partition(struct net *net, uint32_t side, bool cut)
{
    for (uint32_t i = 0; i < net->n; i++)
        for (uint32_t j = 0; j < net->n; j++)
            if (((side >> i) & 1) != ((side >> j) & 1))
                net_cut_pair(net, i, j, cut);
}

static inline void net_deliver(struct net *net, const struct packet *p)
{
    struct host *h = &net->hosts[p->to];
    if (!h->up || h->asleep)
        return;
    struct swim_event e = {.peer = net_id(net, p->from),
                           .path = p->path,
                           .bytes = p->bytes,
                           .len = p->len,
                           .session = p->session};
    struct host *other = &net->hosts[p->from];
    if (p->type == PACKET_SESSION) {
        if (h->boot != p->boot)
            return;
        h->dialling[p->from] = false;
        bool up = p->session == SWIM_SESSION_UP;
        /* A session to a process that is gone meanwhile, or one more beside the first. */
        if (up && (!other->up || other->boot != p->from_boot || h->session[p->from]))
            return;
        if (p->session == SWIM_SESSION_CLOSED && other->up && other->session[p->to] &&
            h->session[p->from])
            return;
        h->session[p->from] = up || (h->session[p->from] && p->session != SWIM_SESSION_CLOSED);
        e.type = SWIM_EVENT_SESSION;
    } else {
        if (p->type == PACKET_MESSAGE && (h->boot != p->boot || !h->session[p->from]))
            return;
        e.type = p->type == PACKET_MESSAGE ? SWIM_EVENT_MESSAGE : SWIM_EVENT_DATAGRAM;
    }
    (void)net_step(net, p->to, &e);
}

static inline bool net_runs(const struct net *net, uint32_t i)
{
    const struct host *h = &net->hosts[i];
    return h->up && !h->asleep && h->stalled_until <= net->now;
}

/* When host i must next be called, in the network's time. */
static inline uint64_t net_due(const struct net *net, uint32_t i)
{
    const struct host *h = &net->hosts[i];
    if (!h->up || h->asleep)
        return UINT64_MAX;
    uint64_t due = swim_next_due(h->swim);
    if (due == UINT64_MAX)
        return due;
    due += h->clock_behind;
    return due > h->stalled_until ? due : h->stalled_until;
}

static inline void net_run_until(struct net *net, uint64_t until)
{
    for (;;) {
        uint64_t due = UINT64_MAX;
        uint32_t who = 0;
        for (uint32_t i = 0; i < net->n; i++) {
            uint64_t d = net_due(net, i);
            if (d < due) {
                due = d;
                who = i;
            }
        }
        uint64_t packet_at = net->n_heap > 0 ? net->heap[0].at : UINT64_MAX;
        if (due > until && packet_at > until)
            break;
        if (due <= packet_at) { /* timers first, as libuv has it */
            net->now = due > net->now ? due : net->now;
            net_event(net, who, SWIM_EVENT_TICK);
            continue;
        }
        net->now = packet_at > net->now ? packet_at : net->now;
        struct packet p = net_pop(net);
        struct host *h = &net->hosts[p.to];
        if (h->up && h->stalled_until > net->now) {
            p.at = h->stalled_until + 1; /* waits in the socket */
            net_push(net, p);
            continue;
        }
        net_deliver(net, &p);
        free(p.bytes);
    }
    net->now = until;
}

static inline void net_run(struct net *net, uint64_t us)
{
    net_run_until(net, net->now + us);
}

static inline struct swim_member_view net_view(struct net *net, uint32_t i, uint32_t j)
{
    struct swim_member_view v;
    struct node_id id = net_id(net, j);
    NET_CHECK(net, swim_member(net->hosts[i].swim, &id, &v));
    return v;
}

static inline enum swim_state net_state(struct net *net, uint32_t i, uint32_t j)
{
    return net_view(net, i, j).state;
}

/* Every running host holds the same table, every running one is alive in it and every other is
 * not. */
static inline bool net_agrees(struct net *net)
{
    uint64_t hash = 0;
    bool first = true;
    for (uint32_t i = 0; i < net->n; i++) {
        if (!net->hosts[i].up || net->hosts[i].asleep)
            continue;
        uint64_t h = swim_table_hash(net->hosts[i].swim);
        if (!first && h != hash)
            return false;
        hash = h;
        first = false;
        for (uint32_t j = 0; j < net->n; j++) {
            if (j == i)
                continue;
            bool runs = net->hosts[j].up && !net->hosts[j].asleep;
            struct swim_member_view v = net_view(net, i, j);
            if (runs ? v.state != SWIM_ALIVE || v.boot_id != net->hosts[j].boot
                     : v.state == SWIM_ALIVE || v.state == SWIM_SUSPECT)
                return false;
        }
    }
    return true;
}

static inline void net_print(struct net *net)
{
    for (uint32_t i = 0; i < net->n; i++) {
        if (!net->hosts[i].up)
            continue;
        (void)fprintf(stderr, "  host %u (inc %llu, %s, health %u):", i,
                      (unsigned long long)swim_self_incarnation(net->hosts[i].swim),
                      swim_state_name(swim_self_state(net->hosts[i].swim)),
                      swim_health(net->hosts[i].swim));
        for (uint32_t j = 0; j < net->n; j++) {
            if (j == i)
                continue;
            struct swim_member_view v = net_view(net, i, j);
            (void)fprintf(stderr, " %u=%s/%llu", j, swim_state_name(v.state),
                          (unsigned long long)v.incarnation);
        }
        (void)fprintf(stderr, "\n");
    }
}

/* Runs until net_agrees, at most `us`. */
static inline bool net_settles(struct net *net, uint64_t us)
{
    uint64_t until = net->now + us;
    while (!net_agrees(net)) {
        if (net->now >= until) {
            net_print(net);
            return false;
        }
        net_run(net, 20 * NET_MS);
    }
    return true;
}

#endif
