/* Records, their reconciliation, and the maxima, in conversations with one core. */
#include "tests/unit/swim_talk.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_maxima),
        cmocka_unit_test(test_records),
        cmocka_unit_test(test_record_too_large_for_a_datagram),
        cmocka_unit_test(test_digests),
        cmocka_unit_test(test_full_table_fits_a_frame),
        cmocka_unit_test(test_removed_member_is_forgotten),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
