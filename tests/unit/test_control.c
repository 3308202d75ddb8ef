/* The control core's rules one by one: election and the wanted models (PROTOCOL 3.1 to 3.6, 3.13),
 * as conversations with a single core. Plans are in test_control_plan.c, whole clusters in
 * test_control_cluster.c. */
#include "tests/unit/control_lab.h"

/* ---- 3.1 to 3.6: election ---- */

static void test_alone_it_plans_after_listening(void **state)
{
    struct lab *l = *state;
    lab_start(l, 1);
    run(l, CONTROL_START_US - 1);
    assert_false(control_is_planner(l->c));
    run(l, 2);
    assert_true(control_is_planner(l->c));
    assert_int_equal(control_term_seen(l->c), 1);
    assert_int_equal(did(l, CONTROL_PLANNER)->term, 1);
}

static void test_a_sole_member_plans_at_once(void **state)
{
    struct lab *l = *state;
    lab_start(l, 1);
    l->view.sole = true;
    l->view.topology.nodes[0].eligible = false;
    show(l);
    run(l, 1);
    assert_false(control_is_planner(l->c)); /* not measured yet */
    l->view.topology.nodes[0].eligible = true;
    show(l);
    run(l, 1);
    assert_true(control_is_planner(l->c));
}

static void test_term_is_on_disk_before_the_claim_leaves(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    run(l, 1200 * MS);
    uint64_t term = find(l, ANN, BODY(CLAIM))->claim->term;
    /* What was synced with that update starts a core that has seen the term. */
    control_free(l->c);
    struct control_options o = {id_of(ME), 5, 7, 1, BACKEND_NATIVE};
    assert_int_equal(control_new(&o, l->persisted, l->n_persisted, &l->c), ERR_OK);
    assert_int_equal(control_term_seen(l->c), term);
    assert_int_equal(control_n_local(l->c), 0);
}

/* A disk that is full: no term is used that it does not hold, and the node lives. */
static void test_full_disk_claims_nothing(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    l->disk_full = true;
    run(l, 30 * SECOND);
    assert_null(find(l, ANN, BODY(CLAIM)));
    assert_false(control_is_planner(l->c));
    assert_int_equal(control_term_seen(l->c), 0);
    l->disk_full = false;
    assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_DISK}), ERR_OK);
    run(l, SECOND);
    uint64_t term = find(l, ANN, BODY(CLAIM))->claim->term;
    answer(l, ANN, term, true, 0, 0);
    assert_true(control_is_planner(l->c));
}

static void test_full_disk_agrees_to_no_claim(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    l->disk_full = true;
    for (uint64_t term = 5; term < 7; term++) { /* at the first it does not know it yet */
        claim(l, ANN, term, true);
        assert_null(find(l, ANN, BODY(CLAIM_ANSWER))); /* nor a refusal: others need a planner */
        assert_int_equal(control_term_seen(l->c), 0);
    }
    l->disk_full = false;
    assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_DISK}), ERR_OK);
    claim(l, ANN, 7, true);
    assert_true(find(l, ANN, BODY(CLAIM_ANSWER))->claim_answer->agree);
    assert_int_equal(control_term_seen(l->c), 7);
}

static void test_full_disk_follows_no_new_planner(void **state)
{
    struct lab *l = *state;
    struct node_id planner;
    uint64_t term;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    heartbeat(l, ANN, 3);
    assert_true(control_planner(l->c, &planner, &term));
    l->disk_full = true;
    heartbeat(l, ANN, 3); /* a term that the disk holds */
    assert_true(control_planner(l->c, &planner, &term));
    for (uint64_t next = 9; next < 11; next++) {
        forget(l);
        heartbeat(l, ANN, next);
        if (control_planner(l->c, &planner, &term))
            assert_int_equal(term, 3);
        assert_int_equal(control_term_seen(l->c), 3);
        const Message *told = find(l, ANN, BODY(REPORT)); /* it may know what runs here */
        assert_true(!told || told->report->term_seen == 3);
    }
    l->disk_full = false;
    assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_DISK}), ERR_OK);
    heartbeat(l, ANN, 10);
    assert_true(control_planner(l->c, &planner, &term));
    assert_int_equal(term, 10);
}

/* Its members know a term that it cannot take: somebody else has to plan. */
static void test_full_disk_planner_makes_way(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    while (!find(l, ANN, BODY(CLAIM)))
        run(l, MS);
    answer(l, ANN, find(l, ANN, BODY(CLAIM))->claim->term, true, 0, 0);
    assert_true(control_is_planner(l->c));
    uint64_t term = control_term_seen(l->c);
    l->disk_full = true;
    run(l, 10 * SECOND);
    assert_true(control_is_planner(l->c)); /* of a term that the disk holds */
    report(l, ANN, (struct report){.term_seen = term + 4});
    assert_false(control_is_planner(l->c));
    assert_int_equal(control_term_seen(l->c), term);
    run(l, 30 * SECOND);
    assert_false(control_is_planner(l->c));
}

static void test_persisted_bytes_that_lie_are_refused(void **state)
{
    struct lab *l = *state;
    lab_start(l, 1);
    run(l, SECOND);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct control_options o = {id_of(ME), 5, 7, 1, BACKEND_NATIVE};
    struct control *c = NULL;
    l->persisted[l->n_persisted - 3] ^= 0xff;
    for (size_t n = 1; n < l->n_persisted; n++)
        if (control_new(&o, l->persisted, n, &c) == ERR_OK) {
            control_free(c);
            c = NULL;
        }
    assert_int_equal(control_new(&o, "\xff\xff\xff", 3, &c), ERR_CORRUPT);
}

static void test_claim_waits_for_all_or_500_ms(void **state)
{
    struct lab *l = *state;
    lab_start(l, 3);
    reach(l, ANN, true);
    reach(l, BOB, true);
    show(l);
    while (!find(l, ANN, BODY(CLAIM)))
        run(l, MS);
    uint64_t term = find(l, ANN, BODY(CLAIM))->claim->term;
    assert_non_null(find(l, BOB, BODY(CLAIM)));
    answer(l, ANN, term, true, 0, 0);
    assert_false(control_is_planner(l->c));
    run(l, CONTROL_CLAIM_US - 2 * MS);
    assert_false(control_is_planner(l->c)); /* Bob may still answer */
    run(l, 3 * MS);
    assert_true(control_is_planner(l->c)); /* he does not count */
    assert_int_equal(find(l, ANN, BODY(HEARTBEAT))->heartbeat->term, term);
}

static void test_one_refusal_ends_a_claim(void **state)
{
    struct lab *l = *state;
    lab_start(l, 3);
    reach(l, ANN, true);
    reach(l, BOB, true);
    show(l);
    while (!find(l, ANN, BODY(CLAIM)))
        run(l, MS);
    uint64_t term = find(l, ANN, BODY(CLAIM))->claim->term, started = l->now_us;
    answer(l, ANN, term, true, 0, 0);
    answer(l, BOB, term, false, 0, 0);
    assert_false(control_is_planner(l->c));
    forget(l);
    run(l, CONTROL_RETRY_MIN_US - MS);
    assert_null(find(l, ANN, BODY(CLAIM)));
    run(l, CONTROL_RETRY_MAX_US + 100 * MS);
    assert_non_null(find(l, ANN, BODY(CLAIM)));
    assert_true(find(l, ANN, BODY(CLAIM))->claim->term > term);
    assert_true(l->now_us - started < SECOND);
    /* Late answers to the first claim mean nothing. */
    answer(l, ANN, term, true, 0, 0);
    answer(l, BOB, term, true, 0, 0);
    assert_false(control_is_planner(l->c));
}

static void test_back_off_grows_to_ten_seconds(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    uint64_t last = 0, gap = 0;
    for (uint32_t i = 0; i < 12; i++) {
        while (!find(l, ANN, BODY(CLAIM)))
            run(l, MS);
        gap = last ? l->now_us - last : 0;
        last = l->now_us;
        assert_true(gap <= CONTROL_RETRY_LIMIT_US + MS);
        uint64_t term = find(l, ANN, BODY(CLAIM))->claim->term;
        forget(l);
        answer(l, ANN, term, false, 0, 0);
    }
    assert_true(gap > CONTROL_RETRY_LIMIT_US / 2);
}

static void test_refused_for_a_living_planner_it_follows_that_one(void **state)
{
    struct lab *l = *state;
    lab_start(l, 3);
    reach(l, ANN, true);
    show(l);
    while (!find(l, ANN, BODY(CLAIM)))
        run(l, MS);
    answer(l, ANN, find(l, ANN, BODY(CLAIM))->claim->term, false, CARL, 9);
    struct node_id who;
    uint64_t term;
    assert_true(control_planner(l->c, &who, &term));
    assert_int_equal(who.bytes[0], CARL);
    assert_int_equal(term, 9);
    forget(l);
    run(l, 2 * SECOND);
    assert_null(find(l, ANN, BODY(CLAIM)));
    assert_non_null(find(l, ANN, BODY(SYNC))); /* it asks the teller whether that still holds */
    run(l, CONTROL_HEARSAY_US);
    assert_non_null(find(l, ANN, BODY(CLAIM))); /* and claims when nobody says so any more */
}

static void test_claims_are_refused_while_a_planner_lives(void **state)
{
    struct lab *l = *state;
    lab_start(l, 3);
    reach(l, ANN, true);
    reach(l, BOB, true);
    show(l);
    heartbeat(l, ANN, 4);
    claim(l, BOB, 9, true);
    const Covey__Control__ClaimAnswer *a = find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer;
    assert_false(a->agree);
    assert_int_equal(a->planner.data[0], ANN);
    assert_int_equal(a->planner_term, 4);
    /* Silent for long enough: then it may be. */
    run(l, CONTROL_SILENCE_US + MS);
    claim(l, BOB, 9, true);
    assert_true(find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer->agree);
    assert_int_equal(control_term_seen(l->c), 9);
    assert_int_equal(find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer->term_seen, 9);
}

static void test_an_agreement_binds_and_its_term_is_spent(void **state)
{
    struct lab *l = *state;
    lab_start(l, 3);
    reach(l, ANN, true);
    reach(l, BOB, true);
    show(l);
    claim(l, ANN, 5, true);
    assert_true(find(l, ANN, BODY(CLAIM_ANSWER))->claim_answer->agree);
    claim(l, BOB, 5, true); /* one term, one planner */
    assert_false(find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer->agree);
    claim(l, BOB, 6, true); /* while Ann may still win */
    assert_false(find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer->agree);
    claim(l, ANN, 5, true); /* asked again, answered the same */
    assert_true(find(l, ANN, BODY(CLAIM_ANSWER))->claim_answer->agree);
    run(l, SECOND + 200 * MS);
    claim(l, BOB, 6, true);
    assert_true(find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer->agree);
    claim(l, BOB, 4, true); /* terms never go back */
    assert_false(find(l, BOB, BODY(CLAIM_ANSWER))->claim_answer->agree);
}

/* 3.4: mains, wired, longest up, key, in this order. */
static void test_preference_among_claimants(void **state)
{
    static const struct {
        struct control_peer mine;
        bool mains, wired;
        uint64_t up_ms;
        bool agree; /* to theirs, while we claim */
    } table[] = {
        {{true, true, true, 100}, false, true, 900, false},
        {{true, false, true, 900}, true, false, 100, true},
        {{true, true, false, 900}, true, true, 100, true},
        {{true, true, true, 900}, true, true, 100, false},
        {{true, true, true, 100}, true, true, 900, true},
        {{true, true, true, 100}, true, true, 100, true}, /* Ann's key is larger than ours */
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        if (i > 0) {
            (void)teardown(state);
            (void)setup(state);
        }
        struct lab *l = *state;
        lab_start(l, 2);
        reach(l, ANN, true);
        l->view.peers[0] = table[i].mine;
        show(l);
        while (!find(l, ANN, BODY(CLAIM)))
            run(l, MS);
        Covey__Control__Claim b = COVEY__CONTROL__CLAIM__INIT;
        b.term = find(l, ANN, BODY(CLAIM))->claim->term;
        b.mains = table[i].mains;
        b.wired = table[i].wired;
        b.up_ms = table[i].up_ms;
        Message m = COVEY__CONTROL__MESSAGE__INIT;
        m.body_case = BODY(CLAIM);
        m.claim = &b;
        assert_int_equal(say(l, ANN, &m), ERR_OK);
        assert_int_equal(find(l, ANN, BODY(CLAIM_ANSWER))->claim_answer->agree, table[i].agree);
        if (table[i].agree) { /* then our own claim is withdrawn */
            answer(l, ANN, b.term, true, 0, 0);
            assert_false(control_is_planner(l->c));
        }
    }
}

static void test_two_planners_meet_and_the_lower_resigns(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    uint64_t term = control_term_seen(l->c);
    forget(l);
    heartbeat(l, ANN, term - 0); /* same term, larger key */
    assert_false(control_is_planner(l->c));
    struct node_id who;
    uint64_t t;
    assert_true(control_planner(l->c, &who, &t));
    assert_int_equal(who.bytes[0], ANN);
    assert_true(find(l, BOB, BODY(HEARTBEAT))->heartbeat->resigns);
    assert_non_null(find(l, ANN, BODY(REPORT)));
}

static void test_a_lower_planner_is_shown_the_higher(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    uint64_t term = control_term_seen(l->c);
    forget(l);
    heartbeat(l, ANN, term - 1);
    assert_true(control_is_planner(l->c));
    assert_int_equal(find(l, ANN, BODY(HEARTBEAT))->heartbeat->term, term);
}

static void test_a_planner_that_is_not_reached_both_ways_is_not_followed(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    reach(l, BOB, false);
    show(l);
    heartbeat(l, BOB, 99);
    assert_true(control_is_planner(l->c));
}

static void test_it_resigns_to_a_planner_that_a_member_hears(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    report(l, ANN, (struct report){.follows = CARL, .follows_term = 50, .term_seen = 50});
    assert_false(control_is_planner(l->c));
    struct node_id who;
    uint64_t term;
    assert_true(control_planner(l->c, &who, &term));
    assert_int_equal(who.bytes[0], CARL);
}

static void test_a_planner_takes_a_higher_term_when_one_was_seen(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    report(l, ANN, (struct report){.term_seen = 40});
    assert_true(control_is_planner(l->c));
    assert_int_equal(control_term_seen(l->c), 41);
    assert_int_equal(find(l, ANN, BODY(HEARTBEAT))->heartbeat->term, 41);
}

static void test_a_term_out_of_all_bounds_is_corrupt(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    Covey__Control__Heartbeat b = COVEY__CONTROL__HEARTBEAT__INIT;
    b.term = UINT64_MAX;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(HEARTBEAT);
    m.heartbeat = &b;
    assert_int_equal(say(l, ANN, &m), ERR_CORRUPT);
    assert_int_equal(control_term_seen(l->c), 0);
}

/* ---- 3.13: wanted models ---- */

static void tell_wanted(struct lab *l, uint8_t from, uint64_t clock, uint8_t by, bool wanted,
                        uint32_t context)
{
    struct hash256 model = model_hash();
    struct node_id node_id = id_of(by);
    Covey__Control__Wanted e = COVEY__CONTROL__WANTED__INIT;
    Covey__Control__Wanted *entries[1] = {&e};
    char name[] = "ten";
    e.model = (ProtobufCBinaryData){32, model.bytes};
    e.node = (ProtobufCBinaryData){32, node_id.bytes};
    e.model_name = name;
    e.clock = clock;
    e.wanted = wanted;
    e.context = context;
    Covey__Control__WantedMap b = COVEY__CONTROL__WANTED_MAP__INIT;
    b.n_entries = 1;
    b.entries = entries;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(WANTED);
    m.wanted = &b;
    assert_int_equal(say(l, from, &m), ERR_OK);
}

static void test_last_writer_wins_by_clock_then_node(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    reach(l, ANN, true);
    show(l);
    struct control_model m;
    static const struct {
        uint64_t clock;
        uint8_t by;
        bool wanted;
        uint32_t context, expected; /* 0: not wanted then */
    } table[] = {
        {100, BOB, true, 512, 512},  {99, CARL, true, 256, 512}, {100, ANN, true, 256, 512},
        {100, CARL, true, 768, 768}, {101, ANN, false, 0, 0},    {100, CARL, true, 768, 0},
        {102, ANN, true, 128, 128},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        tell_wanted(l, ANN, table[i].clock, table[i].by, table[i].wanted, table[i].context);
        assert_int_equal(control_n_models(l->c), table[i].expected != 0);
        if (!table[i].expected)
            continue;
        control_model_at(l->c, 0, &m);
        assert_int_equal(m.context, table[i].expected);
    }
    /* Our own word is later than anything heard, even with a wall clock that is far behind. */
    tell_wanted(l, ANN, UINT64_C(1) << 61, ANN, true, 64);
    assert_int_equal(want(l, 2048, 0), ERR_OK);
    control_model_at(l->c, 0, &m);
    assert_int_equal(m.context, 2048);
    assert_true(find(l, ANN, BODY(WANTED))->wanted->entries[0]->clock > UINT64_C(1) << 61);
}

static void test_wants_survive_a_restart_with_their_clock(void **state)
{
    struct lab *l = *state;
    lab_start(l, 1);
    assert_int_equal(want(l, 1024, 60), ERR_OK);
    control_free(l->c);
    lab_start(l, 1);
    struct control_model m;
    assert_int_equal(control_n_models(l->c), 1);
    control_model_at(l->c, 0, &m);
    assert_string_equal(m.name, "ten");
    assert_int_equal(m.context, 1024);
    assert_int_equal(m.keep_alive_s, 60);
}

static void test_keep_alive_runs_from_the_last_use_anywhere(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 60), ERR_OK);
    struct hash256 model = model_hash();
    assert_non_null(control_active(l->c, &model));
    run(l, 50 * SECOND);
    report(l, ANN, (struct report){.used_age_ms = 10000}); /* used there ten seconds ago */
    run(l, 49 * SECOND);
    assert_non_null(control_active(l->c, &model));
    run(l, 3 * SECOND);
    assert_null(control_active(l->c, &model));
    assert_int_equal(control_n_models(l->c), 0);
    assert_int_equal(control_n_local(l->c), 0);
    assert_false(find(l, ANN, BODY(WANTED))->wanted->entries[0]->wanted);
}

static void test_maps_that_differ_are_exchanged(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    reach(l, ANN, true);
    show(l); /* a session came up */
    assert_true(find(l, ANN, BODY(WANTED))->wanted->answer);
    forget(l);
    heartbeat(l, ANN, 3); /* its digest is 0: not ours */
    assert_true(find(l, ANN, BODY(WANTED))->wanted->answer);
    forget(l);
    Covey__Control__WantedMap b = COVEY__CONTROL__WANTED_MAP__INIT;
    b.answer = true;
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(WANTED);
    m.wanted = &b;
    assert_int_equal(say(l, ANN, &m), ERR_OK);
    assert_int_equal(find(l, ANN, BODY(WANTED))->wanted->n_entries, 1);
}

/* The shift is that of the numbers told; zero means that nothing was told. */
static void test_clocks_of_others_are_compared(void **state)
{
    struct lab *l = *state;
    struct node_id ann = id_of(ANN);
    int64_t ahead_ms = 0;
    follow_ann(l);
    assert_false(control_clock_ahead(l->c, &ann, &ahead_ms));
    Covey__Control__Heartbeat b = COVEY__CONTROL__HEARTBEAT__INIT;
    b.term = 4;
    b.wall_ms = UINT64_C(1700000090000);
    Message m = COVEY__CONTROL__MESSAGE__INIT;
    m.body_case = BODY(HEARTBEAT);
    m.heartbeat = &b;
    uint8_t bytes[256];
    struct control_event e = {.kind = CONTROL_MESSAGE,
                              .wall_ms = UINT64_C(1700000000000),
                              .from = ann,
                              .bytes = bytes,
                              .n_bytes = covey__control__message__pack(&m, bytes)};
    assert_int_equal(feed(l, &e), ERR_OK);
    assert_true(control_clock_ahead(l->c, &ann, &ahead_ms));
    assert_int_equal(ahead_ms, 90000);
    b.wall_ms = UINT64_C(1699999000000);
    e.n_bytes = covey__control__message__pack(&m, bytes);
    assert_int_equal(feed(l, &e), ERR_OK);
    assert_true(control_clock_ahead(l->c, &ann, &ahead_ms));
    assert_int_equal(ahead_ms, -1000000);
}

static void test_too_many_wants_are_refused(void **state)
{
    struct lab *l = *state;
    lab_start(l, 1);
    struct control_event e = {.kind = CONTROL_WANT, .model_name = "m"};
    for (uint32_t i = 0; i < CONTROL_MODELS_MAX; i++) {
        e.model.bytes[0] = (uint8_t)i;
        assert_int_equal(feed(l, &e), ERR_OK);
    }
    e.model.bytes[0] = 99;
    assert_int_equal(feed(l, &e), ERR_LIMIT);
    /* Tombstones do not fill the table for ever. */
    for (uint32_t round = 0; round < 20; round++)
        for (uint32_t i = 0; i < CONTROL_MODELS_MAX; i++) {
            struct control_event u = {.kind = CONTROL_UNWANT};
            u.model.bytes[0] = (uint8_t)i;
            u.model.bytes[1] = (uint8_t)round;
            assert_int_equal(feed(l, &u), ERR_OK);
            e.model = u.model;
            e.model.bytes[1]++;
            assert_int_equal(feed(l, &e), ERR_OK);
        }
    assert_int_equal(control_n_models(l->c), CONTROL_MODELS_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_alone_it_plans_after_listening),
        CASE(test_a_sole_member_plans_at_once),
        CASE(test_term_is_on_disk_before_the_claim_leaves),
        CASE(test_full_disk_claims_nothing),
        CASE(test_full_disk_agrees_to_no_claim),
        CASE(test_full_disk_follows_no_new_planner),
        CASE(test_full_disk_planner_makes_way),
        CASE(test_persisted_bytes_that_lie_are_refused),
        CASE(test_claim_waits_for_all_or_500_ms),
        CASE(test_one_refusal_ends_a_claim),
        CASE(test_back_off_grows_to_ten_seconds),
        CASE(test_refused_for_a_living_planner_it_follows_that_one),
        CASE(test_claims_are_refused_while_a_planner_lives),
        CASE(test_an_agreement_binds_and_its_term_is_spent),
        CASE(test_preference_among_claimants),
        CASE(test_two_planners_meet_and_the_lower_resigns),
        CASE(test_a_lower_planner_is_shown_the_higher),
        CASE(test_a_planner_that_is_not_reached_both_ways_is_not_followed),
        CASE(test_it_resigns_to_a_planner_that_a_member_hears),
        CASE(test_a_planner_takes_a_higher_term_when_one_was_seen),
        CASE(test_a_term_out_of_all_bounds_is_corrupt),
        CASE(test_last_writer_wins_by_clock_then_node),
        CASE(test_wants_survive_a_restart_with_their_clock),
        CASE(test_keep_alive_runs_from_the_last_use_anywhere),
        CASE(test_maps_that_differ_are_exchanged),
        CASE(test_clocks_of_others_are_compared),
        CASE(test_too_many_wants_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
