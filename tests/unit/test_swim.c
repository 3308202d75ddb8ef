/* The rules of PROTOCOL.md section 2 and 1.7 as conversations with one core: a table of what
 * happens, and what must be believed and sent. Peers are played by hand; those marked as answering
 * acknowledge every ping at once. */
#include "discovery/swim.h"
#include "proto/swim.pb-c.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { PEERS = 5, RECORDS_SEEN = 64 };

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

static struct node_id peer_id(uint32_t i)
{
    struct node_id id = {{0}};
    id.bytes[0] = (uint8_t)(i + 1);
    id.bytes[31] = 0x5a;
    return id;
}

static uint32_t peer_index(const struct node_id *id)
{
    assert_in_range(id->bytes[0], 1, PEERS + 1);
    return id->bytes[0] - 1u;
}

static enum err step(struct talk *t, const struct swim_event *e);

static void message_init(struct talk *t, uint32_t from, Covey__Swim__Message *m)
{
    covey__swim__message__init(m);
    m->version = SWIM_VERSION;
    m->version_min = SWIM_VERSION_MIN;
    m->boot_id = t->boot[from];
    m->incarnation = t->incarnation[from];
    m->state = COVEY__SWIM__STATE__STATE_ALIVE;
    m->table_hash = swim_table_hash(t->swim);
}

static enum err say_on(struct talk *t, uint32_t from, const Covey__Swim__Message *m,
                       enum swim_event_type type, uint32_t path)
{
    static uint8_t bytes[1 << 16];
    size_t len = covey__swim__message__pack(m, bytes);
    struct swim_event e = {
        .type = type, .peer = peer_id(from), .path = path, .bytes = bytes, .len = (uint32_t)len};
    return step(t, &e);
}

static enum err say(struct talk *t, uint32_t from, const Covey__Swim__Message *m)
{
    return say_on(t, from, m, SWIM_EVENT_DATAGRAM, 1);
}

static void say_ack(struct talk *t, uint32_t from, uint64_t seq, uint32_t path)
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

static uint32_t body_bit(const Covey__Swim__Message *m)
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

static void note_sent(struct talk *t, const struct wire_message *w)
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

static enum err step(struct talk *t, const struct swim_event *e)
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

static void run(struct talk *t, uint64_t us)
{
    uint64_t until = t->now + us;
    while (swim_next_due(t->swim) <= until) {
        t->now = swim_next_due(t->swim);
        struct swim_event e = {.type = SWIM_EVENT_TICK};
        assert_int_equal(step(t, &e), ERR_OK);
    }
    t->now = until;
}

static struct swim_member_view view(struct talk *t, uint32_t who)
{
    struct swim_member_view v = {.state = swim_self_state(t->swim),
                                 .incarnation = swim_self_incarnation(t->swim)};
    struct node_id id = peer_id(who);
    if (who != 0)
        assert_true(swim_member(t->swim, &id, &v));
    return v;
}

static void forget_row(struct talk *t)
{
    memset(t->sent, 0, sizeof t->sent);
    memset(t->effects, 0, sizeof t->effects);
}

/* The core is peer 0; peers 1..n are members with one path each, not heard of yet. */
static void talk_init(struct talk *t, uint32_t n)
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

static void talk_deinit(struct talk *t)
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

static void do_claim(struct talk *t, const struct row *r, Covey__Swim__Message *m)
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
}

static void do_speak(struct talk *t, const struct row *r, Covey__Swim__Message *m)
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

static void do_body(struct talk *t, const struct row *r, Covey__Swim__Message *m)
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

static void do_act(struct talk *t, const struct row *r)
{
    Covey__Swim__Message m;
    message_init(t, r->who, &m);
    struct swim_event e = {.type = r->event, .peer = peer_id(r->who), .session = r->session};
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

static void converse(struct talk *t, const struct row *rows, size_t n)
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

static void test_first_contact(void **state)
{
    (void)state;
    const struct row ours[] = {
        {"added, nobody has heard it", 0, .of = 1, .is = SWIM_UNKNOWN},
        {"it is tried", 1100, .of = 1, .is = SWIM_UNKNOWN, .to = 1, .sent = SENT_PING, .on = 1,
         .effects = EFFECT_REDIAL},
        {"it speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE, .on = 1, .effects = EFFECT_STATE},
    };
    CONVERSE(1, ours);
    const struct row others[] = {
        {"peer 1 speaks", 0, DO_SPEAK, 1, .of = 2, .is = SWIM_UNKNOWN},
        {"and says that 2 lives", 0, DO_CLAIM, 1, 2, .state = SWIM_ALIVE, .of = 2,
         .is = SWIM_ALIVE},
    };
    CONVERSE(2, others);
    const struct row never[] = {
        {"not yet", 4900, .of = 1, .is = SWIM_UNKNOWN},
        {"five seconds without contact", 200, .of = 1, .is = SWIM_DEAD, .on = 1,
         .effects = EFFECT_STATE},
        {"it is still tried", 1100, .of = 1, .is = SWIM_DEAD, .to = 1, .sent = SENT_PING, .on = 1,
         .effects = EFFECT_REDIAL},
        {"and may come", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
    };
    CONVERSE(1, never);
}

static void test_silence_with_two_nodes(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"it answers", 0, DO_ANSWER, 1, .of = 1, .is = SWIM_UNKNOWN},
        {"it speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"stays", 5000, DO_KEEP_SILENT, 1, .of = 1, .is = SWIM_ALIVE, .to = 1, .sent = SENT_PING},
        {"at most half a second to the next probe, then 300 ms", 850, .of = 1, .is = SWIM_SUSPECT,
         .on = 1, .effects = EFFECT_STATE},
        {"the suspect is told", 0, DO_PING, 1, .of = 1, .is = SWIM_SUSPECT, .to = 1,
         .sent = SENT_ACK | SENT_TELL},
        {"it does not refute, but it was heard", 950, .of = 1, .is = SWIM_SUSPECT},
        {"and was not heard again", 1000, .of = 1, .is = SWIM_DEAD, .on = 1,
         .effects = EFFECT_STATE},
        {"the dead speaks with its old incarnation: it is told", 100, DO_PING, 1, .of = 1,
         .is = SWIM_DEAD, .to = 1, .sent = SENT_ACK | SENT_TELL},
        {"and refutes", 0, DO_SPEAK, 1, .incarnation = 2, .of = 1, .is = SWIM_ALIVE},
    };
    CONVERSE(1, rows);
}

static void test_helpers(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"1 lives", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"2 lives", 0, DO_SPEAK, 2, .of = 2, .is = SWIM_ALIVE},
        {"2 answers", 0, DO_ANSWER, 2, .of = 2, .is = SWIM_ALIVE},
        {"1 does not: its dial times out, 2 is asked", 0, DO_SESSION, 1,
         .session = SWIM_SESSION_TIMED_OUT, .of = 1, .is = SWIM_ALIVE, .to = 2,
         .sent = SENT_PING_REQUEST},
        {"2 sees it", 10, DO_INDIRECT_ACK, 2, 1, .of = 1, .is = SWIM_ALIVE},
        {"so no suspicion comes of that", 250, .of = 1, .is = SWIM_ALIVE},
        {"asked again", 0, DO_SESSION, 1, .session = SWIM_SESSION_TIMED_OUT, .of = 1,
         .is = SWIM_ALIVE, .to = 2, .sent = SENT_PING_REQUEST},
        {"2 does not see it either", 200, DO_NACK, 2, 1, .of = 1, .is = SWIM_ALIVE},
        {"suspect", 400, .of = 1, .is = SWIM_SUSPECT},
        {"the nack confirmed: the suspicion is a short one", 950, .of = 1, .is = SWIM_DEAD},
    };
    CONVERSE(2, rows);
    const struct row unconfirmed[] = {
        {"1 lives", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"2 lives", 0, DO_SPEAK, 2, .of = 2, .is = SWIM_ALIVE},
        {"2 says that it cannot reach 1", 0, DO_CLAIM, 2, 1, .state = SWIM_SUSPECT, .of = 1,
         .is = SWIM_SUSPECT, .to = 1, .sent = SENT_TELL},
        {"we reach it, so it is not ours to bury", 20, DO_ACK, 1, .of = 1, .is = SWIM_SUSPECT},
        {"it answers from now on", 0, DO_ANSWER, 1, .of = 1, .is = SWIM_SUSPECT},
        {"more than the longest suspicion", 3100, .of = 1, .is = SWIM_SUSPECT},
        {"it refutes", 0, DO_SPEAK, 1, .incarnation = 2, .of = 1, .is = SWIM_ALIVE},
    };
    CONVERSE(2, unconfirmed);
}

static void test_we_help(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"1 lives", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"2 lives", 0, DO_SPEAK, 2, .of = 2, .is = SWIM_ALIVE},
        {"1 asks for 2", 0, DO_PING_REQUEST, 1, 2, .of = 2, .is = SWIM_ALIVE, .to = 2,
         .sent = SENT_PING},
        {"2 answers", 20, DO_ACK, 2, .of = 2, .is = SWIM_ALIVE, .to = 1, .sent = SENT_INDIRECT_ACK,
         .not_sent = SENT_NACK},
        {"1 asks again", 0, DO_PING_REQUEST, 1, 2, .of = 2, .is = SWIM_ALIVE},
        {"2 is silent", 101, .of = 2, .is = SWIM_ALIVE, .to = 1, .sent = SENT_NACK,
         .not_sent = SENT_INDIRECT_ACK},
    };
    CONVERSE(2, rows);
}

static void test_sessions(void **state)
{
    (void)state;
    const struct row refused[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"session", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1, .is = SWIM_ALIVE,
         .to = 1, .sent = SENT_DIGEST | SENT_BY_SESSION},
        {"answers the first ping", 1, DO_ACK, 1, .of = 1, .is = SWIM_ALIVE},
        {"a second dial fails, which means nothing", 1, DO_SESSION, 1,
         .session = SWIM_SESSION_REFUSED, .of = 1, .is = SWIM_ALIVE},
        {"closed: a hint", 10, DO_SESSION, 1, .session = SWIM_SESSION_CLOSED, .of = 1,
         .is = SWIM_ALIVE, .to = 1, .sent = SENT_PING, .on = 1, .effects = EFFECT_REDIAL},
        {"refused: dead", 1, DO_SESSION, 1, .session = SWIM_SESSION_REFUSED, .of = 1,
         .is = SWIM_DEAD, .on = 1, .effects = EFFECT_STATE},
    };
    CONVERSE(1, refused);
    const struct row heard[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"session", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1, .is = SWIM_ALIVE},
        {"closed", 10, DO_SESSION, 1, .session = SWIM_SESSION_CLOSED, .of = 1, .is = SWIM_ALIVE},
        {"but it speaks well after that", 80, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"so the refusal came from somebody else", 1, DO_SESSION, 1,
         .session = SWIM_SESSION_REFUSED, .of = 1, .is = SWIM_ALIVE, .to = 1, .sent = SENT_PING},
    };
    CONVERSE(1, heard);
    const struct row unknown[] = {
        {"refused before it was ever heard", 1, DO_SESSION, 1, .session = SWIM_SESSION_REFUSED,
         .of = 1, .is = SWIM_DEAD, .on = 1, .effects = EFFECT_STATE},
    };
    CONVERSE(1, unknown);
    const struct row timed_out[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"no answer to the dial", 10, DO_SESSION, 1, .session = SWIM_SESSION_TIMED_OUT, .of = 1,
         .is = SWIM_ALIVE},
        {"nor to pings", 510, .of = 1, .is = SWIM_SUSPECT},
    };
    CONVERSE(1, timed_out);
    const struct row incompatible[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"handshake", 0, DO_SESSION, 1, .session = SWIM_SESSION_INCOMPATIBLE, .of = 1,
         .is = SWIM_INCOMPATIBLE, .on = 1, .effects = EFFECT_STATE},
        {"updated meanwhile", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1,
         .is = SWIM_ALIVE},
    };
    CONVERSE(1, incompatible);
}

static void test_refutation(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE, .self_incarnation = 1},
        {"suspects us", 0, DO_CLAIM, 1, 0, .incarnation = 1, .state = SWIM_SUSPECT,
         .is = SWIM_ALIVE, .on = 0, .effects = EFFECT_INCARNATION, .self_incarnation = 2},
        {"an old suspicion", 0, DO_CLAIM, 1, 0, .incarnation = 1, .state = SWIM_DEAD,
         .is = SWIM_ALIVE, .not_effects = EFFECT_INCARNATION, .self_incarnation = 2},
        {"we died in a later life", 0, DO_CLAIM, 1, 0, .incarnation = 9, .state = SWIM_DEAD,
         .is = SWIM_ALIVE, .self_incarnation = 10},
        {"we left, it is said", 0, DO_CLAIM, 1, 0, .incarnation = 10, .state = SWIM_LEFT,
         .is = SWIM_ALIVE, .self_incarnation = 11},
    };
    CONVERSE(1, rows);
}

/* All pairs of claims: the larger by (incarnation, state, boot_id) stays, in either order. */
static void test_claims_are_totally_ordered(void **state)
{
    (void)state;
    const struct {
        uint64_t incarnation;
        enum swim_state state;
        uint64_t boot;
    } rising[] = {
        {1, SWIM_ALIVE, 201},   {1, SWIM_ALIVE, 202},   {1, SWIM_CONFLICT, 201},
        {1, SWIM_SUSPECT, 201}, {1, SWIM_SUSPECT, 202}, {1, SWIM_DEAD, 201},
        {1, SWIM_ASLEEP, 201},  {1, SWIM_LEFT, 201},    {2, SWIM_ALIVE, 201},
        {2, SWIM_DEAD, 201},    {3, SWIM_ALIVE, 202},
    };
    size_t n = sizeof rising / sizeof rising[0];
    for (size_t a = 0; a < n; a++) {
        for (size_t b = 0; b < n; b++) {
            struct talk t;
            talk_init(&t, 2);
            size_t last = a > b ? a : b;
            struct row rows[] = {
                {"first", 0, DO_CLAIM, 1, 2, rising[a].boot, rising[a].incarnation, rising[a].state,
                 .of = 2, .is = rising[a].state},
                {"second", 0, DO_CLAIM, 1, 2, rising[b].boot, rising[b].incarnation,
                 rising[b].state, .of = 2, .is = rising[last].state},
            };
            converse(&t, rows, 2);
            assert_int_equal(view(&t, 2).incarnation, rising[last].incarnation);
            assert_int_equal(view(&t, 2).boot_id, rising[last].boot);
            talk_deinit(&t);
        }
    }
}

static void test_goodbyes(void **state)
{
    (void)state;
    const struct row left[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"session", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1, .is = SWIM_ALIVE},
        {"says goodbye", 0, DO_SPEAK, 1, .incarnation = 2, .state = SWIM_LEFT, .of = 1,
         .is = SWIM_LEFT},
        {"closes: nobody redials", 0, DO_SESSION, 1, .session = SWIM_SESSION_CLOSED, .of = 1,
         .is = SWIM_LEFT, .on = 1, .not_effects = EFFECT_REDIAL},
        {"refused is not news", 0, DO_SESSION, 1, .session = SWIM_SESSION_REFUSED, .of = 1,
         .is = SWIM_LEFT},
        {"it is left alone", 5000, .of = 1, .is = SWIM_LEFT, .to = 1, .not_sent = SENT_PING,
         .on = 1, .not_effects = EFFECT_REDIAL},
        {"a new process of it comes", 0, DO_SPEAK, 1, .boot = 999, .incarnation = 1, .of = 1,
         .is = SWIM_LEFT, .to = 1, .sent = SENT_TELL},
        {"and jumps", 0, DO_SPEAK, 1, .boot = 999, .incarnation = 3, .rival = 101, .of = 1,
         .is = SWIM_ALIVE},
        {"it goes to sleep", 0, DO_SPEAK, 1, .incarnation = 4, .state = SWIM_ASLEEP, .of = 1,
         .is = SWIM_ASLEEP},
        {"and is left alone", 5000, .of = 1, .is = SWIM_ASLEEP, .to = 1, .not_sent = SENT_PING,
         .on = 1, .not_effects = EFFECT_REDIAL},
    };
    CONVERSE(1, left);
    const struct row ours[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"session", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1, .is = SWIM_ALIVE},
        {"we sleep", 0, DO_EVENT, .event = SWIM_EVENT_GOING_ASLEEP, .is = SWIM_ASLEEP, .to = 1,
         .sent = SENT_BY_SESSION, .self_incarnation = 2},
        {"the sleeper says nothing", 0, DO_PING, 1, .is = SWIM_ASLEEP, .to = 1,
         .not_sent = SENT_ACK},
        {"and judges nobody", 60000, .of = 1, .is = SWIM_ALIVE},
        {"we wake", 0, DO_EVENT, .event = SWIM_EVENT_SLEPT, .is = SWIM_ALIVE, .on = 1,
         .effects = EFFECT_REDIAL, .self_incarnation = 3},
        {"nobody is dead for that", 100, .of = 1, .is = SWIM_ALIVE},
        {"we leave", 0, DO_EVENT, .event = SWIM_EVENT_LEAVING, .is = SWIM_LEFT,
         .self_incarnation = 4},
        {"and refute nothing", 0, DO_CLAIM, 1, 0, .incarnation = 4, .state = SWIM_DEAD,
         .is = SWIM_LEFT, .self_incarnation = 4},
    };
    CONVERSE(1, ours);
}

static void test_restart_and_conflict(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE, .self_incarnation = 1},
        {"a former process of ours is remembered", 0, DO_CLAIM, 1, 0, .boot = 50, .incarnation = 7,
         .state = SWIM_DEAD, .is = SWIM_ALIVE, .self_incarnation = 8,
         .not_effects = EFFECT_SELF_CONFLICT},
        {"by another even later", 0, DO_CLAIM, 1, 0, .boot = 50, .incarnation = 8,
         .state = SWIM_ALIVE, .is = SWIM_ALIVE, .not_effects = EFFECT_SELF_CONFLICT},
        {"a process before that one, which it knew", 0, DO_CLAIM, 1, 0, .boot = 50,
         .incarnation = 9, .state = SWIM_ALIVE, .rival = 40, .is = SWIM_ALIVE,
         .self_incarnation = 10, .not_effects = EFFECT_SELF_CONFLICT},
        {"it names us: it lives", 0, DO_CLAIM, 1, 0, .boot = 50, .incarnation = 11,
         .state = SWIM_ALIVE, .rival = 100, .is = SWIM_CONFLICT, .self_incarnation = 12,
         .effects = EFFECT_SELF_CONFLICT | EFFECT_STATE},
        {"we repeat ourselves", 1001, .is = SWIM_CONFLICT, .self_incarnation = 13},
        {"and so does it", 0, DO_CLAIM, 1, 0, .boot = 50, .incarnation = 14, .state = SWIM_CONFLICT,
         .rival = 100, .is = SWIM_CONFLICT},
        {"not long enough", 3400, .is = SWIM_CONFLICT},
        {"an old word of it is no sign of life", 0, DO_CLAIM, 1, 0, .boot = 50, .incarnation = 11,
         .state = SWIM_ALIVE, .rival = 100, .is = SWIM_CONFLICT},
        {"it fell silent", 200, .is = SWIM_ALIVE, .effects = EFFECT_STATE},
    };
    CONVERSE(1, rows);
    const struct row seen[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"answers", 0, DO_ANSWER, 1, .of = 1, .is = SWIM_ALIVE},
        {"is in conflict", 0, DO_SPEAK, 1, .incarnation = 5, .state = SWIM_CONFLICT, .rival = 9,
         .of = 1, .is = SWIM_CONFLICT},
        {"and still probed", 600, .of = 1, .is = SWIM_CONFLICT, .to = 1, .sent = SENT_PING},
    };
    CONVERSE(1, seen);
}

static void test_restart_is_an_effect_though_it_stays_alive(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"the same again", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE, .on = 1,
         .not_effects = EFFECT_STATE},
        {"refutes something", 0, DO_SPEAK, 1, .incarnation = 2, .of = 1, .is = SWIM_ALIVE, .on = 1,
         .not_effects = EFFECT_STATE},
        {"another process", 0, DO_SPEAK, 1, .boot = 999, .incarnation = 3, .of = 1,
         .is = SWIM_ALIVE, .on = 1, .effects = EFFECT_STATE},
    };
    CONVERSE(1, rows);
}

static void test_lateness_of_ours_kills_nobody(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    const struct row before[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"is suspected", 1000, .of = 1, .is = SWIM_SUSPECT},
    };
    converse(&t, before, 2);
    t.now = swim_next_due(t.swim) + 10 * 1000000;
    struct swim_event tick = {.type = SWIM_EVENT_TICK};
    assert_int_equal(step(&t, &tick), ERR_OK);
    assert_int_equal(view(&t, 1).state, SWIM_SUSPECT);
    assert_int_equal(swim_health(t.swim), 8);
    run(&t, 500000); /* what waited in the socket is read by then */
    assert_int_equal(view(&t, 1).state, SWIM_SUSPECT);
    talk_deinit(&t);
}

static void test_version(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    Covey__Swim__Message m;
    message_init(&t, 1, &m);
    m.version = SWIM_VERSION + 5;
    m.version_min = SWIM_VERSION + 4;
    assert_int_equal(say(&t, 1, &m), ERR_OK);
    assert_int_equal(view(&t, 1).state, SWIM_INCOMPATIBLE);
    m.version_min = SWIM_VERSION; /* newer, but it can still talk to us */
    assert_int_equal(say(&t, 1, &m), ERR_OK);
    assert_int_equal(view(&t, 1).state, SWIM_ALIVE);
    talk_deinit(&t);
}

static void test_strangers_and_nonsense(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    Covey__Swim__Message m;
    t.boot[4] = 104;
    t.incarnation[4] = 1;
    message_init(&t, 4, &m);
    assert_int_equal(say(&t, 4, &m), ERR_NOT_FOUND);
    const struct row about[] = {
        {"speaks of a stranger", 0, DO_CLAIM, 1, 4, .state = SWIM_ALIVE, .of = 1, .is = SWIM_ALIVE},
    };
    converse(&t, about, 1);
    assert_int_equal(swim_n_members(t.swim), 1);
    const struct {
        uint64_t boot, incarnation;
        int state;
    } bad[] = {
        {0, 2, 1},   {101, 0, 1}, {101, UINT64_MAX, 1}, {101, 2, SWIM_DEAD}, {101, 2, SWIM_SUSPECT},
        {101, 2, 0}, {101, 2, 7}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        message_init(&t, 1, &m);
        m.boot_id = bad[i].boot;
        m.incarnation = bad[i].incarnation;
        m.state = (Covey__Swim__State)bad[i].state;
        assert_int_equal(say(&t, 1, &m), ERR_CORRUPT);
        assert_int_equal(view(&t, 1).incarnation, 1);
    }
    struct swim_event e = {.type = SWIM_EVENT_DATAGRAM, .peer = peer_id(1)};
    e.bytes = (const uint8_t *)"\xff\xff\xff\xff";
    e.len = 4;
    assert_int_equal(step(&t, &e), ERR_CORRUPT);
    e.len = 0;
    assert_int_equal(step(&t, &e), ERR_CORRUPT);
    talk_deinit(&t);
}

static void test_maxima(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    struct swim_update u = SWIM_UPDATE_INIT;
    for (uint32_t i = 1; i <= SWIM_MEMBERS_MAX; i++) {
        struct swim_event e = {.type = SWIM_EVENT_MEMBER_ADD};
        memset(e.peer.bytes, (int)(100 + i), 32);
        enum err expect = i < SWIM_MEMBERS_MAX ? ERR_OK : ERR_LIMIT;
        assert_int_equal(swim_step(t.swim, &e, t.now, &u), expect);
    }
    assert_int_equal(swim_n_members(t.swim), SWIM_MEMBERS_MAX);
    swim_update_deinit(&u);
    uint32_t paths[SWIM_PATHS_MAX + 1] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    struct swim_event e = {.type = SWIM_EVENT_PATHS,
                           .peer = peer_id(1),
                           .paths = paths,
                           .n_paths = SWIM_PATHS_MAX + 1};
    assert_int_equal(step(&t, &e), ERR_LIMIT);
    paths[3] = 0;
    e.n_paths = 4;
    assert_int_equal(step(&t, &e), ERR_INVALID);
    static const uint8_t large[SWIM_RECORD_BYTES_MAX + 1];
    struct swim_event r = {.type = SWIM_EVENT_SET_RECORD, .bytes = large, .len = sizeof large};
    assert_int_equal(step(&t, &r), ERR_LIMIT);
    r.len--;
    assert_int_equal(step(&t, &r), ERR_OK);
    r.kind = SWIM_RECORD_KINDS_MAX;
    assert_int_equal(step(&t, &r), ERR_INVALID);
    talk_deinit(&t);
}

/* Round trips of 100, 200, ... 1000 us: by nearest rank p50 is 500 and p99 is 1000. */
static void test_round_trips(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    struct row speak = {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE};
    converse(&t, &speak, 1);
    for (uint64_t i = 1; i <= 10; i++) {
        uint64_t before = t.last_ping[1];
        while (t.last_ping[1] == before) {
            t.now = swim_next_due(t.swim);
            struct swim_event tick = {.type = SWIM_EVENT_TICK};
            assert_int_equal(step(&t, &tick), ERR_OK);
        }
        t.now += (11 - i) * 100;
        say_ack(&t, 1, t.last_ping[1], 1);
    }
    struct swim_member_view v = view(&t, 1);
    assert_int_equal(v.n_paths, 1);
    assert_true(v.paths[0].up);
    assert_int_equal(v.paths[0].n_samples, 10);
    assert_int_equal(v.paths[0].rtt_p50_us, 500);
    assert_int_equal(v.paths[0].rtt_p99_us, 1000);
    struct node_id id = peer_id(1);
    assert_int_equal(swim_best_path(t.swim, &id), 1);
    /* A forged answer, an answer twice, an answer by another: nothing. */
    say_ack(&t, 1, t.last_ping[1], 1);
    say_ack(&t, 1, t.last_ping[1] + 1000, 1);
    assert_int_equal(view(&t, 1).paths[0].n_samples, 10);
    talk_deinit(&t);
}

static void test_progress_of_a_computation(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    Covey__Swim__Message m;
    message_init(&t, 1, &m);
    m.step = 9;
    m.layers_done = 3;
    assert_int_equal(say(&t, 1, &m), ERR_OK);
    uint64_t at = t.now;
    t.now += 1000;
    assert_int_equal(say(&t, 1, &m), ERR_OK);
    struct swim_member_view v = view(&t, 1);
    assert_int_equal(v.step, 9);
    assert_int_equal(v.layers_done, 3);
    assert_int_equal(v.progress_at_us, at);
    assert_int_equal(v.last_heard_us, t.now);
    talk_deinit(&t);
}

static enum err say_record(struct talk *t, uint32_t from, uint32_t owner, uint32_t kind,
                           uint64_t version, uint64_t boot, const char *value)
{
    Covey__Swim__Message m;
    Covey__Swim__Record r, *records = &r;
    struct node_id id = peer_id(owner);
    message_init(t, from, &m);
    covey__swim__record__init(&r);
    r.owner.data = id.bytes;
    r.owner.len = sizeof id.bytes;
    r.kind = kind;
    r.version = version;
    r.boot_id = boot;
    r.value.data = (uint8_t *)(uintptr_t)value;
    r.value.len = strlen(value);
    m.records = &records;
    m.n_records = 1;
    return say(t, from, &m);
}

static void assert_record(struct talk *t, uint32_t owner, uint8_t kind, uint64_t version,
                          const char *value)
{
    struct swim_record_view r;
    struct node_id id = peer_id(owner);
    assert_true(swim_record(t->swim, &id, kind, &r));
    assert_int_equal(r.version, version);
    assert_int_equal(r.len, strlen(value));
    assert_memory_equal(r.bytes, value, r.len);
}

static void test_records(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 2);
    struct row speak = {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE};
    converse(&t, &speak, 1);
    forget_row(&t);
    struct swim_event set = {
        .type = SWIM_EVENT_SET_RECORD, .kind = 2, .bytes = (const uint8_t *)"one", .len = 3};
    assert_int_equal(step(&t, &set), ERR_OK);
    assert_record(&t, 0, 2, 1, "one");
    run(&t, 60000);
    assert_true(t.sent[1] & SENT_RECORD); /* with the next burst */
    assert_int_equal(step(&t, &set), ERR_OK);
    assert_record(&t, 0, 2, 1, "one");
    /* Another's: newer versions only, then the larger boot_id. */
    assert_int_equal(say_record(&t, 1, 2, 5, 7, 102, "seven"), ERR_OK);
    assert_int_equal(say_record(&t, 1, 2, 5, 6, 900, "six"), ERR_OK);
    assert_record(&t, 2, 5, 7, "seven");
    assert_int_equal(say_record(&t, 1, 2, 5, 7, 900, "late"), ERR_OK);
    assert_record(&t, 2, 5, 7, "late");
    /* Ours from a former life: we jump above it, or take it over when we have none. */
    assert_int_equal(say_record(&t, 1, 0, 2, 30, 50, "old"), ERR_OK);
    assert_record(&t, 0, 2, 31, "one");
    assert_int_equal(say_record(&t, 1, 0, 3, 4, 50, "mine"), ERR_OK);
    assert_record(&t, 0, 3, 4, "mine");
    set.kind = 3;
    assert_int_equal(step(&t, &set), ERR_OK);
    assert_record(&t, 0, 3, 5, "one");
    /* Nonsense. */
    struct swim_record_view r;
    struct node_id id = peer_id(2);
    uint64_t hash = swim_table_hash(t.swim);
    assert_int_equal(say_record(&t, 1, 2, 16, 1, 1, "kind"), ERR_OK);
    assert_int_equal(say_record(&t, 1, 2, 6, 0, 1, "version"), ERR_OK);
    assert_int_equal(say_record(&t, 1, 2, 6, UINT64_MAX, 1, "version"), ERR_OK);
    assert_int_equal(say_record(&t, 1, 2, 6, 1, 0, "boot"), ERR_OK);
    assert_int_equal(say_record(&t, 1, 4, 6, 1, 1, "stranger"), ERR_OK);
    assert_false(swim_record(t.swim, &id, 6, &r));
    assert_int_equal(swim_table_hash(t.swim), hash);
    talk_deinit(&t);
}

static void test_record_too_large_for_a_datagram(void **state)
{
    (void)state;
    static const uint8_t large[SWIM_RECORD_BYTES_MAX] = {1};
    struct talk t;
    talk_init(&t, 2);
    const struct row rows[] = {
        {"1 speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"2 speaks", 0, DO_SPEAK, 2, .of = 2, .is = SWIM_ALIVE},
        {"session", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1, .is = SWIM_ALIVE},
    };
    converse(&t, rows, 3);
    forget_row(&t);
    struct swim_event set = {
        .type = SWIM_EVENT_SET_RECORD, .kind = 1, .bytes = large, .len = sizeof large};
    assert_int_equal(step(&t, &set), ERR_OK);
    assert_int_equal(t.sent[1] & (SENT_RECORD | SENT_BY_SESSION), SENT_RECORD | SENT_BY_SESSION);
    assert_false(t.sent[2] & SENT_RECORD);
    talk_deinit(&t);
}

static enum err say_digest(struct talk *t, uint32_t from, Covey__Swim__Digest *digest)
{
    Covey__Swim__Message m;
    message_init(t, from, &m);
    m.table_hash ^= 1;
    m.digest = digest;
    m.body_case = COVEY__SWIM__MESSAGE__BODY_DIGEST;
    return say_on(t, from, &m, SWIM_EVENT_MESSAGE, 0);
}

static void test_digests(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 2);
    const struct row rows[] = {
        {"1 speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"session", 0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1, .is = SWIM_ALIVE},
    };
    converse(&t, rows, 2);
    assert_int_equal(say_record(&t, 1, 2, 5, 7, 102, "seven"), ERR_OK);
    forget_row(&t);
    Covey__Swim__Digest digest;
    covey__swim__digest__init(&digest);
    t.now += 1000000;
    assert_int_equal(say_digest(&t, 1, &digest), ERR_OK);
    assert_int_equal(t.sent[1] & (SENT_FULL_DIGEST | SENT_BY_SESSION),
                     SENT_FULL_DIGEST | SENT_BY_SESSION);
    forget_row(&t);
    t.now += 1000000;
    struct node_id owner = peer_id(2);
    Covey__Swim__RecordVersion version, *versions = &version;
    Covey__Swim__OwnerVersions owners_one, *owners = &owners_one;
    covey__swim__record_version__init(&version);
    covey__swim__owner_versions__init(&owners_one);
    version.kind = 4;
    version.version = 3;
    version.boot_id = 102;
    owners_one.owner.data = owner.bytes;
    owners_one.owner.len = sizeof owner.bytes;
    owners_one.records = &versions;
    owners_one.n_records = 1;
    digest.full = 1;
    digest.owners = &owners;
    digest.n_owners = 1;
    assert_int_equal(say_digest(&t, 1, &digest), ERR_OK);
    assert_int_equal(t.sent[1] & (SENT_WANT | SENT_RECORD), SENT_WANT | SENT_RECORD);
    talk_deinit(&t);
}

/* 65 nodes with 16 records each: a full digest still is one frame. */
static void test_full_table_fits_a_frame(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    struct row session = {"session",         0, DO_SESSION, 1, .session = SWIM_SESSION_UP, .of = 1,
                          .is = SWIM_UNKNOWN};
    converse(&t, &session, 1);
    struct swim_update u = SWIM_UPDATE_INIT;
    for (uint32_t i = 2; i <= SWIM_MEMBERS_MAX; i++) {
        struct swim_event e = {.type = SWIM_EVENT_MEMBER_ADD, .peer = peer_id(i)};
        assert_int_equal(swim_step(t.swim, &e, t.now, &u), ERR_OK);
    }
    t.boot[1] = UINT64_MAX;
    for (uint32_t i = 0; i <= SWIM_MEMBERS_MAX; i++) {
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
            Covey__Swim__Message m;
            Covey__Swim__Record r, *records = &r;
            Covey__Swim__Claim c, *claims = &c;
            struct node_id id = peer_id(i);
            message_init(&t, 1, &m);
            covey__swim__record__init(&r);
            covey__swim__claim__init(&c);
            r.owner.data = c.member.data = id.bytes;
            r.owner.len = c.member.len = sizeof id.bytes;
            r.kind = k;
            r.version = UINT64_C(1) << 61;
            r.boot_id = c.boot_id = c.rival = UINT64_MAX;
            c.incarnation = UINT64_C(1) << 61;
            c.state = COVEY__SWIM__STATE__STATE_SUSPECT;
            m.records = &records;
            m.claims = &claims;
            m.n_records = 1;
            m.n_claims = i > 1;
            static uint8_t bytes[4096];
            size_t len = covey__swim__message__pack(&m, bytes);
            struct swim_event e = {.type = SWIM_EVENT_MESSAGE,
                                   .peer = peer_id(1),
                                   .bytes = bytes,
                                   .len = (uint32_t)len};
            assert_int_equal(swim_step(t.swim, &e, t.now, &u), ERR_OK);
            swim_update_clear(&u);
        }
    }
    Covey__Swim__Message m;
    Covey__Swim__Digest digest;
    covey__swim__digest__init(&digest);
    message_init(&t, 1, &m);
    m.table_hash ^= 1;
    m.digest = &digest;
    m.body_case = COVEY__SWIM__MESSAGE__BODY_DIGEST;
    static uint8_t bytes[4096];
    struct swim_event e = {.type = SWIM_EVENT_MESSAGE, .peer = peer_id(1), .bytes = bytes};
    e.len = (uint32_t)covey__swim__message__pack(&m, bytes);
    assert_int_equal(swim_step(t.swim, &e, t.now + 300000, &u), ERR_OK);
    bool found = false;
    for (uint32_t i = 0; i < u.outbox.n; i++) {
        const struct wire_message *w = &u.outbox.messages[i];
        Covey__Swim__Message *sent = covey__swim__message__unpack(NULL, w->len, w->bytes);
        assert_non_null(sent);
        if (sent->body_case == COVEY__SWIM__MESSAGE__BODY_DIGEST && sent->digest->full) {
            found = true;
            assert_int_equal(sent->digest->n_owners, SWIM_MEMBERS_MAX + 1);
            assert_int_equal(sent->n_claims, SWIM_MEMBERS_MAX + 1);
        }
        covey__swim__message__free_unpacked(sent, NULL);
    }
    assert_true(found);
    swim_update_deinit(&u);
    talk_deinit(&t);
}

static void test_removed_member_is_forgotten(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 2);
    struct row speak = {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE};
    converse(&t, &speak, 1);
    uint64_t hash = swim_table_hash(t.swim);
    struct row other = {"speaks", 0, DO_SPEAK, 2, .of = 2, .is = SWIM_ALIVE};
    converse(&t, &other, 1);
    assert_int_equal(say_record(&t, 2, 2, 5, 7, 102, "seven"), ERR_OK);
    struct swim_event e = {.type = SWIM_EVENT_MEMBER_REMOVE, .peer = peer_id(2)};
    assert_int_equal(step(&t, &e), ERR_OK);
    assert_int_equal(step(&t, &e), ERR_NOT_FOUND);
    assert_int_equal(swim_table_hash(t.swim), hash);
    struct swim_record_view r;
    assert_false(swim_record(t.swim, &e.peer, 5, &r));
    e.type = SWIM_EVENT_MEMBER_ADD;
    assert_int_equal(step(&t, &e), ERR_OK);
    assert_int_equal(view(&t, 2).state, SWIM_UNKNOWN);
    talk_deinit(&t);
}

static void test_options_are_checked(void **state)
{
    (void)state;
    struct swim_options good, o;
    struct swim *s = NULL;
    swim_options_default(&good);
    good.self = peer_id(0);
    good.boot_id = 1;
    o = good;
    o.boot_id = 0;
    assert_int_equal(swim_new(&o, 0, &s), ERR_INVALID);
    o = good;
    memset(&o.self, 0, sizeof o.self);
    assert_int_equal(swim_new(&o, 0, &s), ERR_INVALID);
    o = good;
    o.round_us = 0;
    assert_int_equal(swim_new(&o, 0, &s), ERR_INVALID);
    o = good;
    o.n_helpers = 100;
    assert_int_equal(swim_new(&o, 0, &s), ERR_INVALID);
    assert_null(s);
    o = good;
    o.incarnation_floor = 41;
    assert_int_equal(swim_new(&o, 0, &s), ERR_OK);
    assert_int_equal(swim_self_incarnation(s), 42);
    swim_free(s);
    swim_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_contact),
        cmocka_unit_test(test_silence_with_two_nodes),
        cmocka_unit_test(test_helpers),
        cmocka_unit_test(test_we_help),
        cmocka_unit_test(test_sessions),
        cmocka_unit_test(test_refutation),
        cmocka_unit_test(test_claims_are_totally_ordered),
        cmocka_unit_test(test_goodbyes),
        cmocka_unit_test(test_restart_and_conflict),
        cmocka_unit_test(test_restart_is_an_effect_though_it_stays_alive),
        cmocka_unit_test(test_lateness_of_ours_kills_nobody),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_strangers_and_nonsense),
        cmocka_unit_test(test_maxima),
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_progress_of_a_computation),
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_record_too_large_for_a_datagram),
        cmocka_unit_test(test_digests),
        cmocka_unit_test(test_full_table_fits_a_frame),
        cmocka_unit_test(test_removed_member_is_forgotten),
        cmocka_unit_test(test_options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
