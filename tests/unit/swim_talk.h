/* A conversation with one swim core for tests: peers are played by hand, a table says what happens
 * and what must be believed and sent. Peers marked as answering acknowledge every ping at once. */
#ifndef COVEY_TESTS_UNIT_SWIM_TALK_H
#define COVEY_TESTS_UNIT_SWIM_TALK_H

#include "discovery/swim.h"
#include "proto/swim.pb-c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { PEERS = 5 };

enum sent {
    SENT_PING = 1 << 0,
    SENT_ACK = 1 << 1,
    SENT_PING_REQUEST = 1 << 2,
    SENT_INDIRECT_ACK = 1 << 3,
    SENT_NACK = 1 << 4,
    SENT_DIGEST = 1 << 5,
    SENT_FULL_DIGEST = 1 << 6,
    SENT_WANT = 1 << 7,
    SENT_TELL = 1 << 8, /* a claim about the receiver itself */
    SENT_BY_SESSION = 1 << 9,
    SENT_RECORD = 1 << 10,
};

enum effects {
    EFFECT_STATE = 1 << SWIM_EFFECT_STATE,
    EFFECT_RECORD = 1 << SWIM_EFFECT_RECORD,
    EFFECT_REDIAL = 1 << SWIM_EFFECT_REDIAL,
    EFFECT_EDGE = 1 << SWIM_EFFECT_EDGE,
    EFFECT_SELF_CONFLICT = 1 << SWIM_EFFECT_SELF_CONFLICT,
    EFFECT_INCARNATION = 1 << SWIM_EFFECT_INCARNATION,
};

struct talk {
    struct swim *swim;
    struct swim_update update;
    uint64_t now;
    uint32_t answering; /* bit i: peer i acknowledges pings */
    uint64_t boot[PEERS + 1], incarnation[PEERS + 1];
    uint64_t last_ping[PEERS + 1], last_request[PEERS + 1];
    uint32_t sent[PEERS + 1], effects[PEERS + 1]; /* since the row began; 0 is the core itself */
    uint64_t n_effects;
};

static inline struct node_id peer_id(uint32_t i)
{
    struct node_id id = {{0}};
    id.bytes[0] = (uint8_t)(i + 1);
    id.bytes[31] = 0x5a;
    return id;
}

static inline uint32_t peer_index(const struct node_id *id)
{
    assert_in_range(id->bytes[0], 1, PEERS + 1);
    return id->bytes[0] - 1u;
}

static inline enum err step(struct talk *t, const struct swim_event *e);

static inline void message_init(struct talk *t, uint32_t from, Covey__Swim__Message *m)
{
    covey__swim__message__init(m);
    m->version = SWIM_VERSION;
    m->version_min = SWIM_VERSION_MIN;
    m->boot_id = t->boot[from];
    m->incarnation = t->incarnation[from];
    m->state = COVEY__SWIM__STATE__STATE_ALIVE;
    m->table_hash = swim_table_hash(t->swim);
}

static inline enum err say_on(struct talk *t, uint32_t from, const Covey__Swim__Message *m,
                              enum swim_event_type type, uint32_t path)
{
    static uint8_t bytes[1 << 16];
    size_t len = covey__swim__message__pack(m, bytes);
    struct swim_event e = {
        .type = type, .peer = peer_id(from), .path = path, .bytes = bytes, .len = (uint32_t)len};
    return step(t, &e);
}

static inline enum err say(struct talk *t, uint32_t from, const Covey__Swim__Message *m)
{
    return say_on(t, from, m, SWIM_EVENT_DATAGRAM, 1);
}

static inline void say_ack(struct talk *t, uint32_t from, uint64_t seq, uint32_t path)
{
    Covey__Swim__Message m;
    Covey__Swim__Ack ack;
    message_init(t, from, &m);
    covey__swim__ack__init(&ack);
    ack.seq = seq;
    m.ack = &ack;
    m.body_case = COVEY__SWIM__MESSAGE__BODY_ACK;
    assert_int_equal(say_on(t, from, &m, SWIM_EVENT_DATAGRAM, path), ERR_OK);
}

static inline uint32_t body_bit(const Covey__Swim__Message *m)
{
    switch (m->body_case) {
    case COVEY__SWIM__MESSAGE__BODY_PING:
        return SENT_PING;
    case COVEY__SWIM__MESSAGE__BODY_ACK:
        return SENT_ACK;
    case COVEY__SWIM__MESSAGE__BODY_PING_REQUEST:
        return SENT_PING_REQUEST;
    case COVEY__SWIM__MESSAGE__BODY_INDIRECT_ACK:
        return SENT_INDIRECT_ACK;
    case COVEY__SWIM__MESSAGE__BODY_NACK:
        return SENT_NACK;
    case COVEY__SWIM__MESSAGE__BODY_DIGEST:
        return m->digest->full ? SENT_FULL_DIGEST : SENT_DIGEST;
    case COVEY__SWIM__MESSAGE__BODY_WANT:
        return SENT_WANT;
    default:
        return 0;
    }
}

static inline void note_sent(struct talk *t, const struct wire_message *w)
{
    assert_int_equal(w->channel, CHANNEL_SWIM);
    Covey__Swim__Message *m = covey__swim__message__unpack(NULL, w->len, w->bytes);
    assert_non_null(m);
    uint32_t to = peer_index(&w->to), bits = body_bit(m);
    for (size_t i = 0; i < m->n_claims; i++)
        if (memcmp(m->claims[i]->member.data, w->to.bytes, 32) == 0)
            bits |= SENT_TELL;
    bits |= m->n_records > 0 ? SENT_RECORD : 0;
    bits |= w->way == WAY_SESSION ? SENT_BY_SESSION : 0;
    t->sent[to] |= bits;
    if (bits & SENT_PING) {
        t->last_ping[to] = m->ping->seq;
        if (t->answering >> to & 1)
            say_ack(t, to, m->ping->seq, w->path);
    }
    if (bits & SENT_PING_REQUEST)
        t->last_request[to] = m->ping_request->seq;
    covey__swim__message__free_unpacked(m, NULL);
}

static inline enum err step(struct talk *t, const struct swim_event *e)
{
    struct swim_update u = SWIM_UPDATE_INIT;
    enum err result = swim_step(t->swim, e, t->now, &u);
    for (uint32_t i = 0; i < u.n_effects; i++)
        t->effects[peer_index(&u.effects[i].peer)] |= 1u << u.effects[i].type;
    t->n_effects += u.n_effects;
    for (uint32_t i = 0; i < u.outbox.n; i++)
        note_sent(t, &u.outbox.messages[i]);
    swim_update_deinit(&u);
    return result;
}

static inline void run(struct talk *t, uint64_t us)
{
    uint64_t until = t->now + us;
    while (swim_next_due(t->swim) <= until) {
        t->now = swim_next_due(t->swim);
        struct swim_event e = {.type = SWIM_EVENT_TICK};
        assert_int_equal(step(t, &e), ERR_OK);
    }
    t->now = until;
}

static inline struct swim_member_view view(struct talk *t, uint32_t who)
{
    struct swim_member_view v = {.state = swim_self_state(t->swim),
                                 .incarnation = swim_self_incarnation(t->swim)};
    struct node_id id = peer_id(who);
    if (who != 0)
        assert_true(swim_member(t->swim, &id, &v));
    return v;
}

static inline void forget_row(struct talk *t)
{
    memset(t->sent, 0, sizeof t->sent);
    memset(t->effects, 0, sizeof t->effects);
}

/* The core is peer 0; peers 1..n are members with one path each, not heard of yet. */
static inline void talk_init(struct talk *t, uint32_t n)
{
    memset(t, 0, sizeof *t);
    t->now = 1000000;
    struct swim_options o;
    swim_options_default(&o);
    o.self = peer_id(0);
    o.boot_id = 100;
    o.rng_seed = 1;
    assert_int_equal(swim_new(&o, t->now, &t->swim), ERR_OK);
    uint32_t path = 1;
    for (uint32_t i = 1; i <= n; i++) {
        t->boot[i] = 100 + i;
        t->incarnation[i] = 1;
        struct swim_event e = {.type = SWIM_EVENT_MEMBER_ADD, .peer = peer_id(i)};
        assert_int_equal(step(t, &e), ERR_OK);
        struct swim_event p = {
            .type = SWIM_EVENT_PATHS, .peer = peer_id(i), .paths = &path, .n_paths = 1};
        assert_int_equal(step(t, &p), ERR_OK);
    }
    t->boot[0] = 100;
    forget_row(t);
}

static inline void talk_deinit(struct talk *t)
{
    swim_free(t->swim);
}

enum act {
    DO_NOTHING,
    DO_SPEAK,        /* who: a message without a body, with this boot, incarnation, state, rival */
    DO_CLAIM,        /* who says this about `about` */
    DO_PING,         /* who pings us */
    DO_ACK,          /* who answers our last ping to it */
    DO_PING_REQUEST, /* who asks us to probe `about` */
    DO_INDIRECT_ACK, /* who has reached `about` for us */
    DO_NACK,         /* who has not */
    DO_SESSION,      /* who: session */
    DO_ANSWER,       /* who answers pings from now on */
    DO_KEEP_SILENT,
    DO_EVENT, /* event */
};

struct row {
    const char *text;
    uint64_t ms; /* first, so long passes */
    enum act act;
    uint32_t who, about;
    uint64_t boot, incarnation; /* 0: the peer's own */
    enum swim_state state;
    uint64_t rival;
    enum swim_session session;
    enum swim_event_type event;
    /* Then: */
    uint32_t of; /* member `of` is in state `is` */
    enum swim_state is;
    uint32_t to, sent,
        not_sent; /* during the row, peer `to` was sent all of these, none of those */
    uint32_t on, effects, not_effects;
    uint64_t self_incarnation; /* 0: not checked */
};

static inline void do_claim(struct talk *t, const struct row *r, Covey__Swim__Message *m)
{
    struct node_id about = peer_id(r->about), by = peer_id(r->who);
    ProtobufCBinaryData by_data = {sizeof by.bytes, by.bytes};
    Covey__Swim__Claim c, *claims = &c;
    covey__swim__claim__init(&c);
    c.member.data = about.bytes;
    c.member.len = sizeof about.bytes;
    c.boot_id = r->boot ? r->boot : t->boot[r->about];
    c.incarnation = r->incarnation ? r->incarnation : t->incarnation[r->about];
    c.state = (Covey__Swim__State)r->state;
    c.rival = r->rival;
    if (r->state == SWIM_SUSPECT) {
        c.by = &by_data;
        c.n_by = 1;
    }
    m->claims = &claims;
    m->n_claims = 1;
    assert_int_equal(say(t, r->who, m), ERR_OK);
    m->claims = NULL;
    m->n_claims = 0;
}

static inline void do_speak(struct talk *t, const struct row *r, Covey__Swim__Message *m)
{
    if (r->boot)
        t->boot[r->who] = r->boot;
    if (r->incarnation)
        t->incarnation[r->who] = r->incarnation;
    m->boot_id = t->boot[r->who];
    m->incarnation = t->incarnation[r->who];
    m->state = r->state ? (Covey__Swim__State)r->state : COVEY__SWIM__STATE__STATE_ALIVE;
    m->rival = r->rival;
    assert_int_equal(say(t, r->who, m), ERR_OK);
}

static inline void do_body(struct talk *t, const struct row *r, Covey__Swim__Message *m)
{
    struct node_id about = peer_id(r->about);
    ProtobufCBinaryData target = {sizeof about.bytes, about.bytes};
    Covey__Swim__Ping ping;
    Covey__Swim__PingRequest request;
    Covey__Swim__IndirectAck ack;
    Covey__Swim__Nack nack;
    covey__swim__ping__init(&ping);
    covey__swim__ping_request__init(&request);
    covey__swim__indirect_ack__init(&ack);
    covey__swim__nack__init(&nack);
    ping.seq = 77;
    request.seq = 78;
    request.target = ack.target = nack.target = target;
    request.timeout_us = 100000;
    ack.seq = nack.seq = t->last_request[r->who];
    ack.boot_id = t->boot[r->about];
    if (r->act == DO_PING) {
        m->ping = &ping;
        m->body_case = COVEY__SWIM__MESSAGE__BODY_PING;
    } else if (r->act == DO_PING_REQUEST) {
        m->ping_request = &request;
        m->body_case = COVEY__SWIM__MESSAGE__BODY_PING_REQUEST;
    } else if (r->act == DO_INDIRECT_ACK) {
        m->indirect_ack = &ack;
        m->body_case = COVEY__SWIM__MESSAGE__BODY_INDIRECT_ACK;
    } else {
        m->nack = &nack;
        m->body_case = COVEY__SWIM__MESSAGE__BODY_NACK;
    }
    assert_int_equal(say(t, r->who, m), ERR_OK);
}

static inline void do_act(struct talk *t, const struct row *r)
{
    Covey__Swim__Message m;
    message_init(t, r->who, &m);
    struct swim_event e = {
        .type = r->event, .peer = peer_id(r->who), .session = r->session, .boot_id = r->boot};
    switch (r->act) {
    case DO_NOTHING:
        break;
    case DO_SPEAK:
        do_speak(t, r, &m);
        break;
    case DO_CLAIM:
        do_claim(t, r, &m);
        break;
    case DO_ACK:
        say_ack(t, r->who, t->last_ping[r->who], 1);
        break;
    case DO_PING:
    case DO_PING_REQUEST:
    case DO_INDIRECT_ACK:
    case DO_NACK:
        do_body(t, r, &m);
        break;
    case DO_SESSION:
        e.type = SWIM_EVENT_SESSION;
        assert_int_equal(step(t, &e), ERR_OK);
        break;
    case DO_ANSWER:
        t->answering |= 1u << r->who;
        break;
    case DO_KEEP_SILENT:
        t->answering &= ~(1u << r->who);
        break;
    case DO_EVENT:
        assert_int_equal(step(t, &e), ERR_OK);
        break;
    }
}

static inline void converse(struct talk *t, const struct row *rows, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct row *r = &rows[i];
        forget_row(t);
        run(t, r->ms * 1000);
        do_act(t, r);
        bool good =
            view(t, r->of).state == r->is && (t->sent[r->to] & r->sent) == r->sent &&
            !(t->sent[r->to] & r->not_sent) && (t->effects[r->on] & r->effects) == r->effects &&
            !(t->effects[r->on] & r->not_effects) &&
            (r->self_incarnation == 0 || swim_self_incarnation(t->swim) == r->self_incarnation);
        if (!good)
            fail_msg("row %zu, %s: member %u is %s; sent to %u: %x; effects on %u: %x; our "
                     "incarnation %llu",
                     i, r->text, r->of, swim_state_name(view(t, r->of).state), r->to,
                     t->sent[r->to], r->on, t->effects[r->on],
                     (unsigned long long)swim_self_incarnation(t->swim));
    }
}

#define CONVERSE(n_peers, rows)                                                                    \
    do {                                                                                           \
        struct talk t;                                                                             \
        talk_init(&t, (n_peers));                                                                  \
        converse(&t, (rows), sizeof(rows) / sizeof((rows)[0]));                                    \
        talk_deinit(&t);                                                                           \
    } while (0)

#endif
