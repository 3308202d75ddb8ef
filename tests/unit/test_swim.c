/* The rules of PROTOCOL.md section 2 and 1.7 as conversations with one core. */
#include "tests/unit/swim_talk.h"

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

/* A handshake proved that another process has our key: no gossip is needed for that. */
static void test_rival_that_proved_our_key(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"answers", 0, DO_ANSWER, 1, .of = 1, .is = SWIM_ALIVE},
        {"we met ourselves", 0, DO_EVENT, .boot = 100, .event = SWIM_EVENT_RIVAL, .is = SWIM_ALIVE,
         .self_incarnation = 1, .not_effects = EFFECT_SELF_CONFLICT | EFFECT_STATE},
        {"another process", 0, DO_EVENT, .boot = 50, .event = SWIM_EVENT_RIVAL, .is = SWIM_CONFLICT,
         .self_incarnation = 2,
         .effects = EFFECT_SELF_CONFLICT | EFFECT_STATE | EFFECT_INCARNATION},
        {"it is said once", 0, DO_EVENT, .boot = 50, .event = SWIM_EVENT_RIVAL, .is = SWIM_CONFLICT,
         .self_incarnation = 2, .not_effects = EFFECT_SELF_CONFLICT | EFFECT_STATE},
        {"but to everybody, and again", 1001, .is = SWIM_CONFLICT, .self_incarnation = 3, .to = 1,
         .sent = SENT_PING},
        {"it lives on", 2000, DO_EVENT, .boot = 50, .event = SWIM_EVENT_RIVAL, .is = SWIM_CONFLICT},
        {"its silence counts from there", 3400, .is = SWIM_CONFLICT},
        {"it fell silent", 200, .is = SWIM_ALIVE, .effects = EFFECT_STATE},
        {"and is back", 0, DO_EVENT, .boot = 51, .event = SWIM_EVENT_RIVAL, .is = SWIM_CONFLICT,
         .effects = EFFECT_SELF_CONFLICT | EFFECT_STATE},
        {"we leave", 0, DO_EVENT, .event = SWIM_EVENT_LEAVING, .is = SWIM_LEFT},
        {"nothing is disputed any more", 0, DO_EVENT, .boot = 52, .event = SWIM_EVENT_RIVAL,
         .is = SWIM_LEFT, .not_effects = EFFECT_SELF_CONFLICT | EFFECT_STATE},
    };
    CONVERSE(1, rows);
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
    t.now = swim_next_due(t.swim) + UINT64_C(10000000);
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

/* What waited while we slept is nobody's fault (PROTOCOL 2.5): a suspicion starts anew. */
static void test_sleep_of_ours_kills_nobody(void **state)
{
    (void)state;
    const struct row rows[] = {
        {"speaks", 0, DO_SPEAK, 1, .of = 1, .is = SWIM_ALIVE},
        {"answers", 0, DO_ANSWER, 1, .of = 1, .is = SWIM_ALIVE},
        {"knows another", 0, DO_CLAIM, 1, 2, .state = SWIM_ALIVE, .of = 2, .is = SWIM_ALIVE},
        {"and suspects it", 0, DO_CLAIM, 1, 2, .state = SWIM_SUSPECT, .of = 2, .is = SWIM_SUSPECT},
        {"nearly dead", 850, .of = 2, .is = SWIM_SUSPECT},
        {"we slept", 0, DO_EVENT, .event = SWIM_EVENT_SLEPT, .of = 2, .is = SWIM_SUSPECT},
        {"one shortest suspicion later", 899, .of = 2, .is = SWIM_SUSPECT},
        {"it comes back", 0, DO_SPEAK, 2, .incarnation = 2, .of = 2, .is = SWIM_ALIVE},
    };
    CONVERSE(2, rows);
}

/* Two good paths get samples in turn, though the member never fails to answer. */
static void test_every_path_is_measured(void **state)
{
    (void)state;
    struct talk t;
    talk_init(&t, 1);
    uint32_t paths[] = {1, 2};
    struct swim_event e = {
        .type = SWIM_EVENT_PATHS, .peer = peer_id(1), .paths = paths, .n_paths = 2};
    t.answering = 1u << 1;
    assert_int_equal(step(&t, &e), ERR_OK);
    run(&t, 10000000);
    struct swim_member_view v = view(&t, 1);
    assert_int_equal(v.n_paths, 2);
    assert_in_range(v.paths[0].n_samples, 9, 13); /* 20 rounds, and one when each was new */
    assert_in_range(v.paths[1].n_samples, 9, 13);
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
        cmocka_unit_test(test_rival_that_proved_our_key),
        cmocka_unit_test(test_restart_is_an_effect_though_it_stays_alive),
        cmocka_unit_test(test_lateness_of_ours_kills_nobody),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_strangers_and_nonsense),
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_progress_of_a_computation),
        cmocka_unit_test(test_sleep_of_ours_kills_nobody),
        cmocka_unit_test(test_every_path_is_measured),
        cmocka_unit_test(test_options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
