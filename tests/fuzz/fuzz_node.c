/* Messages and datagrams of a hostile member into a whole node core.
 *
 * Two cores are made and paired as people do it, with sessions carried by hand; then the input
 * speaks for the second: records of {channel u8, flags u8, length u16 (little-endian), bytes}, each
 * handed to the first node as a message of their authenticated session (bit 0 of flags: as a
 * datagram). Bits 1 to 3 let time pass. Whatever comes, the node must go on. */
#include "agent/node.h"
#include "base/rng.h"

#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { QUEUE_MAX = 256, RECORDS_MAX = 64, PORT = 26840, STEPS_MAX = 4000 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct mail {
    unsigned to;
    struct node_event event;
    uint8_t *bytes; /* owned */
};

struct pair {
    struct rng rng[2];
    struct identity identity[2];
    struct node *node[2];
    uint64_t now_us;
    struct mail queue[QUEUE_MAX];
    uint32_t n_queue;
    uint64_t ends[2][8]; /* ends[0][k] and ends[1][k] are the two ends of session k */
    uint32_t n_sessions;
    char token[ERR_TEXT_MAX];
    uint64_t member_session; /* on node 0, when paired */
    bool muted;              /* node 1 says nothing of its own any more */
};

static void fill(void *context, uint8_t *to, size_t n)
{
    struct rng *r = context;
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(r);
}

static struct address address_of(unsigned i)
{
    return (struct address){.family = 4, .ip = {10, 0, 0, (uint8_t)(i + 1)}, .port = PORT};
}

static void post(struct pair *w, unsigned to, const struct node_event *event)
{
    if (w->n_queue == QUEUE_MAX)
        return;
    struct mail *m = &w->queue[w->n_queue++];
    *m = (struct mail){.to = to, .event = *event};
    if (event->len > 0) {
        m->bytes = malloc(event->len);
        if (!m->bytes)
            abort();
        memcpy(m->bytes, event->bytes, event->len);
    }
}

static int session_at(const struct pair *w, unsigned end, uint64_t session)
{
    for (uint32_t k = 0; k < w->n_sessions; k++) {
        if (w->ends[end][k] == session)
            return (int)k;
    }
    return -1;
}

static void on_dial(struct pair *w, unsigned from, const struct node_effect *e)
{
    struct session_psk psks[SESSION_PSKS_MAX];
    unsigned to = 1 - from;
    uint32_t n = node_psks(w->node[to], psks, SESSION_PSKS_MAX), at = 0;
    while (at < n && memcmp(psks[at].key, e->psk, sizeof e->psk) != 0)
        at++;
    if (at == n || w->n_sessions == 8 || w->muted) {
        post(w, from,
             &(struct node_event){
                 .type = NODE_EVENT_SESSION_DOWN, .session = e->session, .down = NODE_DOWN_DENIED});
        return;
    }
    uint32_t k = w->n_sessions++;
    w->ends[from][k] = e->session;
    w->ends[to][k] = UINT64_C(1) << 63 | (k + 1);
    struct node_event own = {.type = NODE_EVENT_SESSION_READY,
                             .session = e->session,
                             .address = e->address,
                             .psk_tag = e->psk_tag};
    struct node_event other = {.type = NODE_EVENT_SESSION_READY,
                               .session = w->ends[to][k],
                               .inbound = true,
                               .address = address_of(from),
                               .psk_tag = psks[at].tag};
    memcpy(own.peer_static, w->identity[to].static_public, sizeof own.peer_static);
    memcpy(other.peer_static, w->identity[from].static_public, sizeof other.peer_static);
    post(w, to, &other);
    post(w, from, &own);
}

static void on_effect(struct pair *w, unsigned from, const struct node_effect *e)
{
    if (e->type == NODE_EFFECT_DIAL)
        on_dial(w, from, e);
    if (e->type == NODE_EFFECT_ANSWER && from == 0 && !w->token[0])
        memcpy(w->token, e->text, sizeof w->token);
    if (e->type == NODE_EFFECT_PEER && from == 0)
        w->member_session = e->session;
    int k = e->type == NODE_EFFECT_CLOSE ? session_at(w, from, e->session) : -1;
    if (k >= 0 && !(from == 0 && w->muted))
        post(
            w, 1 - from,
            &(struct node_event){.type = NODE_EVENT_SESSION_DOWN, .session = w->ends[1 - from][k]});
}

static void step(struct pair *w, unsigned who, const struct node_event *event)
{
    struct node_update u = NODE_UPDATE_INIT;
    (void)node_step(w->node[who], event, w->now_us, &u);
    for (uint32_t i = 0; i < u.n_effects; i++)
        on_effect(w, who, &u.effects[i]);
    for (uint32_t i = 0; i < u.outbox.n && !w->muted; i++) {
        const struct wire_message *m = &u.outbox.messages[i];
        uint64_t session = m->session ? m->session : node_session_of(w->node[who], &m->to);
        int k = session_at(w, who, session);
        if (k >= 0)
            post(w, 1 - who,
                 &(struct node_event){.type = m->way == WAY_SESSION ? NODE_EVENT_MESSAGE
                                                                    : NODE_EVENT_DATAGRAM,
                                      .session = w->ends[1 - who][k],
                                      .address = address_of(who),
                                      .channel = m->channel,
                                      .bytes = m->bytes,
                                      .len = m->len});
    }
    node_update_deinit(&u);
}

static void drain(struct pair *w)
{
    for (uint32_t i = 0; w->n_queue > 0 && i < STEPS_MAX; i++) {
        struct mail m = w->queue[0];
        memmove(&w->queue[0], &w->queue[1], --w->n_queue * sizeof w->queue[0]);
        m.event.bytes = m.bytes;
        if (!(m.to == 1 && w->muted))
            step(w, m.to, &m.event);
        free(m.bytes);
    }
}

static void pass_time(struct pair *w, uint64_t us)
{
    uint64_t until = w->now_us + us;
    for (int i = 0; i < 200 && w->now_us < until; i++) {
        uint64_t due = node_next_due(w->node[0]);
        if (!w->muted && node_next_due(w->node[1]) < due)
            due = node_next_due(w->node[1]);
        w->now_us = due <= w->now_us ? w->now_us + 1000 : due < until ? due : until;
        step(w, 0, &(struct node_event){.type = NODE_EVENT_TICK});
        if (!w->muted)
            step(w, 1, &(struct node_event){.type = NODE_EVENT_TICK});
        drain(w);
    }
}

static void start(struct pair *w)
{
    w->now_us = 1000000;
    for (unsigned i = 0; i < 2; i++) {
        struct hash256 machine = {{(uint8_t)(i + 1)}};
        struct err_text text;
        rng_seed(&w->rng[i], i + 1);
        identity_make((struct random_source){fill, &w->rng[i]}, &machine, &w->identity[i]);
        struct node_options o = {.identity = &w->identity[i],
                                 .boot_id = i + 1,
                                 .random = {fill, &w->rng[i]},
                                 .name = "n",
                                 .version = "0.1.0",
                                 .control_port = PORT,
                                 .data_port = PORT + 1,
                                 .arithmetic_version = 1001,
                                 .wall_ms = 1800000000000};
        if (node_new(&o, w->now_us, &w->node[i], &text) != ERR_OK)
            abort();
        struct node_local local = {.memory_total_bytes = 1u << 30,
                                   .budget_bytes = 1u << 30,
                                   .cores = 1,
                                   .threads = 1,
                                   .stream_bytes_per_s = 1e10,
                                   .macs_per_s = 1e11,
                                   .on_mains = true,
                                   .arithmetic_version = 1001};
        step(w, i, &(struct node_event){.type = NODE_EVENT_LOCAL, .local = &local});
    }
    struct node_found found = {.instance = "peer:10.0.0.1:26840", .given = true, .n_addresses = 1};
    found.addresses[0] = address_of(0);
    step(w, 0, &(struct node_event){.type = NODE_EVENT_INVITE, .call = 1, .ttl_us = 600000000});
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &found});
    step(w, 1, &(struct node_event){.type = NODE_EVENT_JOIN, .call = 1, .text = w->token});
    drain(w);
    for (int i = 0; i < 50 && !w->member_session; i++)
        pass_time(w, 100000);
    if (!w->member_session)
        abort(); /* the target would test nothing */
    w->muted = true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (sodium_init() < 0)
        abort();
    struct pair *w = calloc(1, sizeof *w);
    if (!w)
        abort();
    start(w);
    for (int i = 0; i < RECORDS_MAX && size >= 4; i++) {
        uint32_t len = (uint32_t)data[2] | (uint32_t)data[3] << 8;
        uint8_t channel = data[0], flags = data[1];
        data += 4;
        size -= 4;
        if (len > size)
            len = (uint32_t)size;
        step(w, 0,
             &(struct node_event){.type = flags & 1 ? NODE_EVENT_DATAGRAM : NODE_EVENT_MESSAGE,
                                  .session = w->member_session,
                                  .address = address_of(1),
                                  .channel = channel,
                                  .bytes = data,
                                  .len = len});
        drain(w);
        data += len;
        size -= len;
        if (flags & 14)
            pass_time(w, (uint64_t)(flags & 14) * 50000);
    }
    pass_time(w, 3000000);
    for (uint32_t i = 0; i < w->n_queue; i++)
        free(w->queue[i].bytes);
    node_free(w->node[0]);
    node_free(w->node[1]);
    free(w);
    return 0;
}
