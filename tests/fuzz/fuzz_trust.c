/* Messages of the trust channel into a core, and what is on disk into trust_new.
 *
 * First byte 255: the rest is what is on disk; its checksum is made good, so that what lies behind
 * it is reached. Else the input is a series of {who u8, length u16, bytes}: a message from 0  a
 * peer whose session has the secret, not introduced 1  a joiner with a token, not introduced 2  a
 * member 3  to a joiner, from its issuer Keys and randomness are always the same, so that
 * signatures in the corpus are good. The corpus was written by this file, built with
 * -DWRITE_CORPUS: see the end. */
#include "base/buf.h"
#include "base/rng.h"
#include "proto/trust.h"

#include <stdlib.h>
#include <string.h>

#include <sodium.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FOUNDER, MEMBER, JOINER, NODES };
enum { FROM_PEER, FROM_JOINER, FROM_MEMBER, TO_JOINER, WAYS };
/* Links and the node at each end; the receiver of fuzzed messages is named first. */
static const int link_ends[WAYS][2] = {
    {FOUNDER, MEMBER}, {FOUNDER, JOINER}, {FOUNDER, MEMBER}, {JOINER, FOUNDER}};

struct node {
    struct rng rng;
    struct identity identity;
    struct trust *trust;
    struct trust_update update;
};

enum { QUEUE_MAX = 64 };
struct message {
    int to;
    uint64_t session;
    uint8_t *bytes;
    uint32_t len;
};

struct cluster {
    struct node nodes[NODES];
    struct message queue[QUEUE_MAX]; /* on their way, where they are handed over */
    int n_queued;
    struct token token;
    bool replay; /* hand messages to their receivers; else drop them */
    void (*tap)(struct cluster *c, int way, int to, const uint8_t *bytes, size_t n);
};

static void must(bool good)
{
    if (!good)
        abort();
}

static void fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

/* Sessions are numbered way + 1 at both ends. */
static enum err step(struct cluster *c, int i, struct trust_event event)
{
    struct trust_update u = TRUST_UPDATE_INIT;
    event.now_us = 1;
    enum err e = trust_step(c->nodes[i].trust, &event, &u);
    if (event.kind == TRUST_INVITE)
        c->token = u.token;
    for (uint32_t k = 0; k < u.out.n; k++) {
        int way = (int)u.out.messages[k].session - 1;
        int to = link_ends[way][link_ends[way][0] == i];
        if (c->tap)
            c->tap(c, way, to, u.out.messages[k].bytes, u.out.messages[k].len);
        if (!c->replay)
            continue;
        must(c->n_queued < QUEUE_MAX);
        struct message *m = &c->queue[c->n_queued++];
        *m = (struct message){to, u.out.messages[k].session, malloc(u.out.messages[k].len + 1),
                              u.out.messages[k].len};
        must(m->bytes != NULL);
        memcpy(m->bytes, u.out.messages[k].bytes, m->len);
    }
    trust_update_deinit(&u);
    while (trust_next_due(c->nodes[i].trust) <= 1 && event.kind != TRUST_TICK)
        (void)step(c, i, (struct trust_event){.kind = TRUST_TICK});
    return e;
}

static void hand_over_all(struct cluster *c)
{
    for (int i = 0; i < c->n_queued; i++) { /* more may come as we go */
        struct message m = c->queue[i];
        (void)step(
            c, m.to,
            (struct trust_event){
                .kind = TRUST_MESSAGE, .session = m.session, .bytes = m.bytes, .len = m.len});
        free(m.bytes);
    }
    c->n_queued = 0;
}

static void session_up(struct cluster *c, int way, uint64_t tag_of_first, uint64_t tag_of_second)
{
    for (int k = 1; k >= 0; k--) {
        struct trust_event up = {.kind = TRUST_SESSION_UP,
                                 .session = (uint64_t)way + 1,
                                 .psk_tag = k ? tag_of_second : tag_of_first};
        memcpy(up.peer_static, c->nodes[link_ends[way][!k]].identity.static_public, 32);
        (void)step(c, link_ends[way][k], up);
    }
    hand_over_all(c);
}

static uint64_t token_tag_at(struct cluster *c, int i)
{
    struct session_psk psks[SESSION_PSKS_MAX];
    uint32_t n = trust_psks(c->nodes[i].trust, 1, psks);
    return psks[n - 1].tag;
}

static void open_cluster(struct cluster *c)
{
    struct session_psk psk;
    for (int i = 0; i < NODES; i++) {
        struct node *node = &c->nodes[i];
        struct hash256 machine = {{1}};
        rng_seed(&node->rng, (uint64_t)i + 1);
        struct trust_options options = {
            .self = {.boot_id = 5, .protocol_min = 1, .protocol_max = 1},
            .random = {fill, &node->rng}};
        identity_make(options.random, &machine, &node->identity);
        must(trust_new(&node->identity, NULL, 0, &options, &node->trust) == ERR_OK);
        must(step(c, i, (struct trust_event){.kind = TRUST_TICK}) == ERR_OK);
    }
    c->replay = true;
    /* The member joins over way 2, and stays. */
    must(step(c, FOUNDER, (struct trust_event){.kind = TRUST_INVITE}) == ERR_OK);
    must(step(c, MEMBER, (struct trust_event){.kind = TRUST_JOIN, .token = c->token}) == ERR_OK);
    must(trust_join_psk(c->nodes[MEMBER].trust, &psk));
    session_up(c, FROM_MEMBER, token_tag_at(c, FOUNDER), psk.tag);
    must(trust_n_members(c->nodes[FOUNDER].trust) == 2);
}

/* The sessions that are fuzzed from their start. */
static void open_rest(struct cluster *c, bool replay)
{
    struct session_psk psk;
    c->replay = false;
    must(step(c, FOUNDER, (struct trust_event){.kind = TRUST_INVITE}) == ERR_OK);
    must(step(c, JOINER, (struct trust_event){.kind = TRUST_JOIN, .token = c->token}) == ERR_OK);
    must(trust_join_psk(c->nodes[JOINER].trust, &psk));
    uint64_t join_tag = psk.tag, token = token_tag_at(c, FOUNDER);
    trust_dial_psk(c->nodes[MEMBER].trust, &psk);
    c->replay = replay;
    session_up(c, FROM_PEER, psk.tag, psk.tag);
    session_up(c, FROM_JOINER, token, join_tag);
    if (!replay)
        session_up(c, TO_JOINER, join_tag, token);
}

static void close_cluster(struct cluster *c)
{
    for (int i = 0; i < NODES; i++)
        trust_free(c->nodes[i].trust);
}

static void try_stored(const uint8_t *data, size_t size)
{
    struct rng rng;
    struct identity identity;
    struct hash256 machine = {{1}};
    struct trust_options options = {.random = {fill, &rng}};
    struct trust *t = NULL;
    uint8_t *stored = malloc(size + 32);
    if (!stored)
        return;
    rng_seed(&rng, FOUNDER + 1);
    identity_make(options.random, &machine, &identity);
    memcpy(stored, data, size);
    (void)crypto_generichash(stored + size, 32, stored, size, NULL, 0);
    if (trust_new(&identity, stored, size + 32, &options, &t) == ERR_OK) {
        struct trust_update u = TRUST_UPDATE_INIT;
        struct trust_event tick = {.kind = TRUST_TICK, .now_us = 1};
        must(trust_step(t, &tick, &u) == ERR_OK);
        must(trust_n_members(t) <= TRUST_MEMBERS_MAX);
        trust_update_deinit(&u);
        trust_free(t);
    }
    free(stored);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    if (data[0] == 255) {
        try_stored(data + 1, size - 1);
        return 0;
    }
    struct cluster c = {0};
    open_cluster(&c);
    open_rest(&c, false);
    struct reader r = reader_of(data, size);
    while (r.left > 3) {
        int way = read_u8(&r) % WAYS;
        size_t n = read_u16(&r);
        n = MIN_OF(n, r.left);
        (void)step(&c, link_ends[way][0],
                   (struct trust_event){.kind = TRUST_MESSAGE,
                                        .session = (uint64_t)way + 1,
                                        .bytes = read_view(&r, n),
                                        .len = (uint32_t)n});
    }
    /* Whatever was said: the founder is one, nobody is revoked who was not, and no more came in
     * than there were tokens. */
    must(trust_role(c.nodes[FOUNDER].trust, &c.nodes[FOUNDER].identity.id) == TRUST_ROLE_MEMBER);
    must(trust_is_member(c.nodes[FOUNDER].trust, &c.nodes[MEMBER].identity.id));
    must(trust_n_members(c.nodes[FOUNDER].trust) <= 3);
    close_cluster(&c);
    return 0;
}

#ifdef WRITE_CORPUS
/* cc -DWRITE_CORPUS ... fuzz_trust.c && ./a.out FOLDER: one file for each message of a whole
 * conversation, and one for each way with all of its messages. */
#include <stdio.h>

static const char *folder;
static struct buf all[WAYS];

static void write_file(const char *name, int number, const void *bytes, size_t n)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s%d", folder, name, number);
    FILE *f = fopen(path, "wb");
    must(f && fwrite(bytes, 1, n, f) == n);
    (void)fclose(f);
}

static void tap(struct cluster *c, int way, int to, const uint8_t *bytes, size_t n)
{
    static int number;
    (void)c;
    if (way == FROM_JOINER && to == JOINER)
        way = TO_JOINER;
    else if (to != FOUNDER)
        return;
    struct buf one = BUF_INIT(1 << 20);
    uint8_t head[3] = {(uint8_t)way, (uint8_t)n, (uint8_t)(n >> 8)};
    must(buf_append(&one, head, 3) == ERR_OK && buf_append(&one, bytes, n) == ERR_OK);
    must(buf_append(&all[way], one.data, one.len) == ERR_OK);
    write_file("message", number++, one.data, one.len);
    buf_deinit(&one);
}

int main(int argc, char **argv)
{
    must(argc == 2);
    folder = argv[1];
    for (int i = 0; i < WAYS; i++)
        all[i] = BUF_INIT(1 << 20);
    struct cluster c = {.tap = NULL};
    open_cluster(&c);
    c.tap = tap;
    open_rest(&c, true);
    (void)step(&c, MEMBER,
               (struct trust_event){.kind = TRUST_REVOKE, .key = c.nodes[JOINER].identity.id});
    hand_over_all(&c);
    for (int i = 0; i < WAYS; i++)
        write_file("way", i, all[i].data, all[i].len);
    struct trust_update u = TRUST_UPDATE_INIT;
    struct trust_event event = {.kind = TRUST_REVOKE, .key = c.nodes[MEMBER].identity.id};
    must(trust_step(c.nodes[FOUNDER].trust, &event, &u) == ERR_OK);
    struct buf stored = BUF_INIT(1 << 20);
    must(buf_append(&stored, "\xff", 1) == ERR_OK &&
         buf_append(&stored, u.persist.data, u.persist.len - 32) == ERR_OK);
    write_file("stored", 0, stored.data, stored.len);
    return 0;
}
#endif
