/* Several trust cores in one process, with a disk each and sessions between them. For tests.
 *
 * The handshake is reduced to what trust sees of it: the dialler's psk is looked for among those
 * that the other end accepts; none: the connection is dropped at the first message. */
#ifndef COVEY_TESTS_TRUST_WORLD_H
#define COVEY_TESTS_TRUST_WORLD_H

#include "base/rng.h"
#include "proto/trust.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Around each step of a core. */
#ifndef WORLD_BEFORE_STEP
#define WORLD_BEFORE_STEP (void)0
#define WORLD_AFTER_STEP (void)0
#endif

enum { WORLD_NODES = 6, WORLD_LINKS = 256, WORLD_QUEUE = 4096, WORLD_EFFECTS = 512 };

struct world_node {
    struct rng rng;
    struct identity identity;
    struct trust *trust;
    uint64_t boot_id;
    uint8_t *disk;
    size_t n_disk, n_writes;
    struct trust_effect effects[WORLD_EFFECTS];
    uint32_t n_effects;
    struct token token; /* of the last invite */
    uint16_t protocol_min, protocol_max;
    bool disk_is_cut; /* writes are lost, and so is what follows them */
};

struct world_message {
    int to;
    uint64_t link;
    uint8_t *bytes;
    uint32_t len;
};

struct world {
    struct world_node nodes[WORLD_NODES];
    uint64_t now_us;
    struct {
        int end[2];
        bool up, closing;
    } links[WORLD_LINKS + 1];
    uint64_t n_links;
    struct world_message queue[WORLD_QUEUE];
    uint32_t n_queued, n_passed;
    /* May change a message on its way; false loses it. */
    bool (*meddle)(struct world *w, uint32_t number, struct world_message *m);
    uint32_t meddle_at, meddle_how;
};

static inline void world_fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

static inline void world_start(struct world *w, int i)
{
    struct world_node *node = &w->nodes[i];
    struct trust_options options = {.random = {world_fill, &node->rng}};
    node->boot_id = rng_u64(&node->rng);
    options.self.boot_id = node->boot_id;
    (void)snprintf(options.self.name, sizeof options.self.name, "node-%d", i);
    (void)snprintf(options.self.version, sizeof options.self.version, "0.1.0");
    options.self.control_port = (uint16_t)(1000 + i);
    options.self.data_port = (uint16_t)(2000 + i);
    options.self.protocol_min = node->protocol_min;
    options.self.protocol_max = node->protocol_max;
    assert_int_equal(trust_new(&node->identity, node->disk, node->n_disk, &options, &node->trust),
                     ERR_OK);
}

/* Does what an update says, in the order that the contract asks for. */
static inline void world_apply(struct world *w, int i, struct trust_update *u)
{
    struct world_node *node = &w->nodes[i];
    if (u->persist.len && node->disk_is_cut)
        return;
    if (u->persist.len) {
        free(node->disk);
        node->disk = malloc(u->persist.len);
        memcpy(node->disk, u->persist.data, u->persist.len);
        node->n_disk = u->persist.len;
        node->n_writes++;
    }
    for (uint32_t k = 0; k < u->out.n; k++) {
        struct wire_message *m = &u->out.messages[k];
        assert_int_equal(m->channel, CHANNEL_TRUST);
        assert_true(m->session >= 1 && m->session <= w->n_links);
        assert_true(w->n_queued < WORLD_QUEUE);
        int to = w->links[m->session].end[w->links[m->session].end[0] == i];
        struct world_message *slot = &w->queue[w->n_queued++];
        *slot = (struct world_message){to, m->session, malloc(m->len ? m->len : 1), m->len};
        memcpy(slot->bytes, m->bytes, m->len);
    }
    for (uint32_t k = 0; k < u->n_effects; k++) {
        assert_true(node->n_effects < WORLD_EFFECTS);
        node->effects[node->n_effects++] = u->effects[k];
        if (u->effects[k].kind == TRUST_EFFECT_CLOSE)
            w->links[u->effects[k].session].closing = true;
    }
}

static inline enum err world_step(struct world *w, int i, struct trust_event event)
{
    struct trust_update u = TRUST_UPDATE_INIT;
    event.now_us = w->now_us;
    WORLD_BEFORE_STEP;
    enum err e = trust_step(w->nodes[i].trust, &event, &u);
    WORLD_AFTER_STEP;
    if (event.kind == TRUST_INVITE && e == ERR_OK)
        w->nodes[i].token = u.token;
    world_apply(w, i, &u);
    trust_update_deinit(&u);
    return e;
}

static inline void world_drop_link(struct world *w, uint64_t link)
{
    if (!w->links[link].up)
        return;
    w->links[link].up = false;
    for (int k = 0; k < 2; k++) {
        if (w->nodes[w->links[link].end[k]].trust)
            (void)world_step(w, w->links[link].end[k],
                             (struct trust_event){.kind = TRUST_SESSION_DOWN, .session = link});
    }
}

static inline void world_deliver(struct world *w)
{
    struct world_message m = w->queue[0];
    memmove(&w->queue[0], &w->queue[1], --w->n_queued * sizeof m);
    bool pass = w->links[m.link].up && w->nodes[m.to].trust;
    if (pass && w->meddle)
        pass = w->meddle(w, w->n_passed, &m);
    if (pass) {
        w->n_passed++;
        (void)world_step(
            w, m.to,
            (struct trust_event){
                .kind = TRUST_MESSAGE, .session = m.link, .bytes = m.bytes, .len = m.len});
    }
    free(m.bytes);
}

/* Until nothing is on its way and nothing is due. */
static inline void world_run(struct world *w)
{
    for (int rounds = 0; rounds < 100000; rounds++) {
        if (w->n_queued) {
            world_deliver(w);
            continue;
        }
        bool idle = true;
        for (uint64_t link = 1; link <= w->n_links; link++) {
            if (w->links[link].up && w->links[link].closing) {
                world_drop_link(w, link);
                idle = false;
            }
        }
        for (int i = 0; i < WORLD_NODES; i++) {
            if (w->nodes[i].trust && !w->nodes[i].disk_is_cut &&
                trust_next_due(w->nodes[i].trust) <= w->now_us) {
                (void)world_step(w, i, (struct trust_event){.kind = TRUST_TICK});
                idle = false;
            }
        }
        if (idle && !w->n_queued)
            return;
    }
    fail_msg("the conversation does not end");
}

static inline void world_pass_time(struct world *w, uint64_t us)
{
    w->now_us += us;
    for (int i = 0; i < WORLD_NODES; i++) {
        if (w->nodes[i].trust)
            (void)world_step(w, i, (struct trust_event){.kind = TRUST_TICK});
    }
    world_run(w);
}

static inline void world_init(struct world *w, int n_nodes, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->now_us = 1000000;
    for (int i = 0; i < n_nodes; i++) {
        struct world_node *node = &w->nodes[i];
        struct hash256 machine = {{(uint8_t)(i + 1)}};
        rng_seed(&node->rng, seed * 100 + (uint64_t)i);
        identity_make((struct random_source){world_fill, &node->rng}, &machine, &node->identity);
        node->protocol_min = 1;
        node->protocol_max = 2;
        world_start(w, i);
    }
    world_run(w);
}

static inline void world_stop(struct world *w, int i)
{
    for (uint64_t link = 1; link <= w->n_links; link++) {
        if (w->links[link].end[0] == i || w->links[link].end[1] == i)
            world_drop_link(w, link);
    }
    trust_free(w->nodes[i].trust);
    w->nodes[i].trust = NULL;
}

static inline void world_deinit(struct world *w)
{
    for (uint32_t k = 0; k < w->n_queued; k++)
        free(w->queue[k].bytes);
    for (int i = 0; i < WORLD_NODES; i++) {
        trust_free(w->nodes[i].trust);
        free(w->nodes[i].disk);
    }
}

/* 0 when `to` knows no such psk: dropped at the first message. Else the link, not yet run. */
static inline uint64_t world_connect(struct world *w, int from, int to, struct session_psk psk)
{
    struct session_psk accepted[SESSION_PSKS_MAX];
    uint32_t n = trust_psks(w->nodes[to].trust, w->now_us, accepted), at = 0;
    while (at < n && memcmp(accepted[at].key, psk.key, sizeof psk.key) != 0)
        at++;
    if (at == n)
        return 0;
    assert_true(w->n_links < WORLD_LINKS);
    uint64_t link = ++w->n_links;
    w->links[link].end[0] = from;
    w->links[link].end[1] = to;
    w->links[link].up = true;
    for (int k = 0; k < 2; k++) {
        struct trust_event up = {.kind = TRUST_SESSION_UP,
                                 .session = link,
                                 .psk_tag = k == 0 ? psk.tag : accepted[at].tag};
        memcpy(up.peer_static, w->nodes[k == 0 ? to : from].identity.static_public, 32);
        (void)world_step(w, k == 0 ? from : to, up);
    }
    return link;
}

static inline uint64_t world_dial(struct world *w, int from, int to)
{
    uint64_t link = 0;
    for (uint32_t attempt = 0; link == 0 && attempt < TRUST_SECRETS_MAX; attempt++) {
        struct session_psk psk;
        trust_dial_psk_at(w->nodes[from].trust, attempt, &psk);
        link = world_connect(w, from, to, psk);
    }
    world_run(w);
    return link;
}

/* `from` invites and `to` joins with the token; what `to` said to the request. */
static inline uint64_t world_join_with(struct world *w, int joiner, int issuer, struct token token,
                                       bool leave, enum err *ret)
{
    struct session_psk psk;
    *ret = world_step(w, joiner,
                      (struct trust_event){.kind = TRUST_JOIN, .token = token, .leave = leave});
    if (*ret != ERR_OK)
        return 0;
    assert_true(trust_join_psk(w->nodes[joiner].trust, &psk));
    uint64_t link = world_connect(w, joiner, issuer, psk);
    world_run(w);
    return link;
}

static inline struct token world_invite(struct world *w, int issuer, bool worker)
{
    assert_int_equal(
        world_step(w, issuer, (struct trust_event){.kind = TRUST_INVITE, .worker = worker}),
        ERR_OK);
    return w->nodes[issuer].token;
}

static inline uint64_t world_admit(struct world *w, int issuer, int joiner, bool worker)
{
    enum err e;
    uint64_t link = world_join_with(w, joiner, issuer, world_invite(w, issuer, worker), false, &e);
    assert_int_equal(e, ERR_OK);
    assert_true(link != 0);
    return link;
}

static inline bool world_is_up(const struct world *w, uint64_t link, int node)
{
    struct trust_peer peer;
    return link && trust_session_peer(w->nodes[node].trust, link, &peer);
}

/* Both ends hold the link for authenticated. */
static inline bool world_is_trusted(const struct world *w, uint64_t link)
{
    return link && world_is_up(w, link, w->links[link].end[0]) &&
           world_is_up(w, link, w->links[link].end[1]);
}

static inline enum trust_role world_role(const struct world *w, int of, int seen_by)
{
    return trust_role(w->nodes[seen_by].trust, &w->nodes[of].identity.id);
}

/* The last effect of the kind, or NULL. */
static inline const struct trust_effect *world_effect(const struct world *w, int i,
                                                      enum trust_effect_kind kind)
{
    const struct trust_effect *found = NULL;
    for (uint32_t k = 0; k < w->nodes[i].n_effects; k++) {
        if (w->nodes[i].effects[k].kind == kind)
            found = &w->nodes[i].effects[k];
    }
    return found;
}

static inline void world_forget_effects(struct world *w)
{
    for (int i = 0; i < WORLD_NODES; i++)
        w->nodes[i].n_effects = 0;
}

static inline enum err world_revoke(struct world *w, int by, int of)
{
    enum err e = world_step(
        w, by, (struct trust_event){.kind = TRUST_REVOKE, .key = w->nodes[of].identity.id});
    world_run(w);
    return e;
}

#endif
