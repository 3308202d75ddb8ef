/* The control core's rules one by one: the life of a plan, as participant and as planner
 * (PROTOCOL 3.6 to 3.11, 2.5), and leaving. */
#include "tests/unit/control_lab.h"

/* ---- 3.7 to 3.10: the participant ---- */

static void test_a_plan_is_prepared_committed_and_becomes_current(void **state)
{
    struct lab *l = *state;
    l->obedient = false;
    follow_ann(l);
    struct plan p = plan_of(ANN, 4, 1, "\x02\x01");
    prepare(l, ANN, 4, &p);
    assert_int_equal(did(l, CONTROL_PREPARE)->stage, 1);
    assert_int_equal(control_reserved_bytes(l->c), 58 << 20);
    assert_int_equal(reported(l, ANN, &p)->state, EPOCH_PREPARING);
    prepare(l, ANN, 4, &p); /* asked again, nothing is done twice */
    assert_int_equal(control_n_local(l->c), 1);
    command(l, ANN, 4, COMMIT, &p); /* too early */
    assert_null(did(l, CONTROL_COMMIT));
    struct control_event e = {.kind = CONTROL_PREPARED, .epoch = p.epoch.hash};
    assert_int_equal(feed(l, &e), ERR_OK);
    assert_int_equal(reported(l, ANN, &p)->state, EPOCH_PREPARED);
    command(l, ANN, 4, COMMIT, &p);
    assert_non_null(did(l, CONTROL_COMMIT));
    assert_int_equal(reported(l, ANN, &p)->state, EPOCH_PREPARED); /* until the shell says so */
    e.kind = CONTROL_COMMITTED;
    assert_int_equal(feed(l, &e), ERR_OK);
    assert_int_equal(reported(l, ANN, &p)->state, EPOCH_COMMITTED);
    tell_state(l, ANN, 4, &p);
    assert_int_equal(local_state(l, &p), EPOCH_CURRENT);
    assert_true(epoch_eq(&did(l, CONTROL_ACTIVE)->plan.epoch, &p.epoch));
    assert_non_null(control_active(l->c, &p.model));
}

/* Each plan here is refused, with the reason, and reserves nothing. */
static void test_refusals_of_a_participant(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    struct plan boot = plan_of(ANN, 4, 1, "\x01\x02"), big = plan_of(ANN, 4, 2, "\x01"),
                other = plan_of(ANN, 4, 3, "\x01\x02"), elsewhere = plan_of(ANN, 4, 4, "\x02\x03");
    boot.stages[0].boot_id++;
    plan_seal(&boot);
    other.arithmetic_version = 2;
    plan_seal(&other);
    const struct {
        const struct plan *p;
        enum err e;
    } table[] = {
        {&boot, ERR_STALE}, {&big, ERR_NO_FIT}, {&other, ERR_UNSUPPORTED}, {&elsewhere, ERR_STALE}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        prepare(l, ANN, 4, table[i].p);
        const Covey__Control__EpochState *r = reported(l, ANN, table[i].p);
        assert_non_null(r);
        assert_int_equal(r->state, EPOCH_FAILED);
        assert_int_equal(r->error, table[i].e);
        assert_true(strlen(r->reason) > 0);
        command(l, ANN, 4, ABORT, table[i].p);
    }
    assert_null(did(l, CONTROL_PREPARE));
    assert_int_equal(control_reserved_bytes(l->c), 0);
    assert_int_equal(control_n_local(l->c), 0);
}

static void test_reservations_never_exceed_the_limit(void **state)
{
    struct lab *l = *state;
    l->obedient = false;
    follow_ann(l);
    node(l, ME)->budget_bytes = 116 << 20; /* twice 58 MiB, to the byte */
    show(l);
    struct plan a = plan_of(ANN, 4, 1, "\x02\x01"), b = plan_of(ANN, 4, 2, "\x01\x02"),
                c = plan_of(ANN, 4, 3, "\x01\x03");
    memset(b.model.bytes, 0x78, 32);
    plan_seal(&b);
    memset(c.model.bytes, 0x79, 32);
    plan_seal(&c);
    prepare(l, ANN, 4, &a);
    prepare(l, ANN, 4, &b);
    prepare(l, ANN, 4, &c);
    assert_int_equal(control_reserved_bytes(l->c), 116 << 20);
    assert_int_equal(local_state(l, &c), EPOCH_FAILED);
    /* Aborted memory counts until the shell has freed it. */
    command(l, ANN, 4, ABORT, &a);
    assert_int_equal(control_reserved_bytes(l->c), 116 << 20);
    struct control_event e = {.kind = CONTROL_RETIRED, .epoch = a.epoch.hash};
    assert_int_equal(feed(l, &e), ERR_OK);
    assert_int_equal(control_reserved_bytes(l->c), 58 << 20);
}

/* The file of a stage fails while it runs: it is stopped, its memory counts until it is free, and
 * the reason stays in the reports. */
static void test_what_runs_and_fails_is_stopped_with_its_reason(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    struct plan p = plan_of(ANN, 4, 1, "\x01\x02");
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    prepare(l, ANN, 4, &p);
    command(l, ANN, 4, COMMIT, &p);
    assert_int_equal(local_state(l, &p), EPOCH_COMMITTED);
    uint64_t held = control_reserved_bytes(l->c);
    assert_true(held > 0);
    l->obedient = false;
    forget(l);
    assert_int_equal(feed(l, &(struct control_event){.kind = CONTROL_PREPARE_FAILED,
                                                     .epoch = p.epoch.hash,
                                                     .error = ERR_STALE,
                                                     .reason = "/m.gguf has changed"}),
                     ERR_OK);
    assert_non_null(did(l, CONTROL_RETIRE));
    assert_int_equal(local_state(l, &p), EPOCH_FAILED);
    assert_string_equal(find(l, ANN, BODY(REPORT))->report->epochs[0]->reason,
                        "/m.gguf has changed");
    assert_int_equal(control_reserved_bytes(l->c), held);
    struct control_event e = {.kind = CONTROL_RETIRED, .epoch = p.epoch.hash};
    assert_int_equal(feed(l, &e), ERR_OK);
    assert_int_equal(control_reserved_bytes(l->c), 0);
    assert_int_equal(local_state(l, &p), EPOCH_FAILED);
    command(l, ANN, 4, RETIRE, &p);
    assert_int_equal(local_state(l, &p), EPOCH_NONE);
}

static void test_commands_of_old_terms_and_others_are_ignored(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    struct plan p = plan_of(BOB, 3, 1, "\x01\x02"), q = plan_of(ANN, 4, 1, "\x01\x02");
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    prepare(l, BOB, 3, &p);
    assert_null(did(l, CONTROL_PREPARE));
    assert_int_equal(find(l, ANN, BODY(REPORT))->report->planner.data[0], ANN);
    prepare(l, ANN, 4, &q);
    command(l, BOB, 3, COMMIT, &q);
    command(l, ANN, 3, COMMIT, &q);
    assert_null(did(l, CONTROL_COMMIT));
    prepare(l, BOB, 5, &p); /* a higher term is followed; what was prepared before is dropped */
    assert_int_equal(local_state(l, &p), EPOCH_PREPARED);
    assert_int_equal(local_state(l, &q), EPOCH_NONE);
}

static void test_a_prepared_plan_lapses_after_a_minute_without_planner(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    struct plan p = plan_of(ANN, 4, 1, "\x01\x02");
    prepare(l, ANN, 4, &p);
    reach(l, ANN, false);
    reach(l, BOB, false);
    l->view.peers[0].reachable = true;
    show(l);
    /* Alone it soon plans itself; a planner's own word counts as one. So it is put to silence by
     * leaving, which claims nothing. */
    assert_int_equal(local_state(l, &p), EPOCH_PREPARED);
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    run(l, CONTROL_LAPSE_US - SECOND);
    assert_int_equal(local_state(l, &p), EPOCH_PREPARED);
    run(l, 2 * SECOND);
    assert_int_equal(local_state(l, &p), EPOCH_NONE);
    assert_non_null(did(l, CONTROL_ABORT));
}

static void test_a_running_plan_outlives_its_planner_while_frames_flow(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct plan p = plan_of(ANN, 4, 1, "\x01\x02");
    prepare(l, ANN, 4, &p);
    command(l, ANN, 4, COMMIT, &p);
    tell_state(l, ANN, 4, &p);
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    reach(l, ANN, false);
    reach(l, BOB, false);
    show(l);
    for (uint32_t i = 0; i < 4; i++) {
        run(l, 30 * SECOND);
        (void)feed(l, &(struct control_event){.kind = CONTROL_USED, .model = model_hash()});
    }
    assert_int_equal(local_state(l, &p), EPOCH_CURRENT);
    run(l, CONTROL_LAPSE_US + SECOND);
    assert_int_equal(local_state(l, &p), EPOCH_NONE);
    assert_non_null(did(l, CONTROL_RETIRE));
}

static void test_the_replaced_epoch_drains_for_thirty_seconds_at_most(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    struct plan a = plan_of(ANN, 4, 1, "\x01\x02"), b = plan_of(ANN, 4, 2, "\x02\x01");
    prepare(l, ANN, 4, &a);
    command(l, ANN, 4, COMMIT, &a);
    tell_state(l, ANN, 4, &a);
    prepare(l, ANN, 4, &b);
    command(l, ANN, 4, COMMIT, &b);
    assert_int_equal(local_state(l, &a), EPOCH_CURRENT); /* until all have committed */
    assert_int_equal(local_state(l, &b), EPOCH_COMMITTED);
    l->obedient = false;
    tell_state(l, ANN, 4, &b);
    assert_int_equal(local_state(l, &a), EPOCH_DRAINING);
    assert_int_equal(local_state(l, &b), EPOCH_CURRENT);
    for (uint32_t i = 0; i < 29; i++) {
        heartbeat(l, ANN, 4);
        run(l, SECOND);
    }
    assert_null(did(l, CONTROL_RETIRE));
    heartbeat(l, ANN, 4);
    run(l, 2 * SECOND);
    assert_true(epoch_eq(&did(l, CONTROL_RETIRE)->plan.epoch, &a.epoch));
    assert_int_equal(local_state(l, &b), EPOCH_CURRENT);
}

/* 3.9: where the one before last still drains when the next is committed, it ends at once. */
static void test_a_third_epoch_of_an_instance_makes_the_first_go(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    struct plan a = plan_of(ANN, 4, 1, "\x01\x02"), b = plan_of(ANN, 4, 2, "\x02\x01"),
                c = plan_of(ANN, 4, 3, "\x01\x03");
    const struct plan *both[] = {&a, &b};
    for (uint32_t i = 0; i < 2; i++) {
        prepare(l, ANN, 4, both[i]);
        command(l, ANN, 4, COMMIT, both[i]);
        struct control_event committed = {.kind = CONTROL_COMMITTED, .epoch = both[i]->epoch.hash};
        assert_int_equal(feed(l, &committed), ERR_OK);
        l->obedient = i == 0; /* the shell does not finish draining a */
        tell_state(l, ANN, 4, both[i]);
        l->obedient = true;
        if (i == 0)
            continue;
        assert_int_equal(local_state(l, &a), EPOCH_DRAINING);
    }
    l->obedient = false;
    prepare(l, ANN, 4, &c);
    (void)feed(l, &(struct control_event){.kind = CONTROL_PREPARED, .epoch = c.epoch.hash});
    command(l, ANN, 4, COMMIT, &c);
    assert_true(epoch_eq(&did(l, CONTROL_RETIRE)->plan.epoch, &a.epoch));
    assert_int_equal(local_state(l, &a), EPOCH_GOING);
    assert_int_equal(local_state(l, &b), EPOCH_CURRENT);
}

static void test_an_aborted_commit_leaves_the_old_epoch(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    struct plan a = plan_of(ANN, 4, 1, "\x01\x02"), b = plan_of(ANN, 4, 2, "\x02\x01");
    prepare(l, ANN, 4, &a);
    command(l, ANN, 4, COMMIT, &a);
    tell_state(l, ANN, 4, &a);
    prepare(l, ANN, 4, &b);
    command(l, ANN, 4, COMMIT, &b);
    command(l, ANN, 4, ABORT, &b);
    assert_int_equal(local_state(l, &b), EPOCH_NONE);
    assert_int_equal(local_state(l, &a), EPOCH_CURRENT);
}

static void test_after_sleep_nothing_runs_until_confirmed(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    struct plan a = plan_of(ANN, 4, 1, "\x01\x02"), b = plan_of(ANN, 4, 2, "\x02\x01");
    prepare(l, ANN, 4, &a);
    command(l, ANN, 4, COMMIT, &a);
    tell_state(l, ANN, 4, &a);
    prepare(l, ANN, 4, &b);
    (void)feed(l, &(struct control_event){.kind = CONTROL_SLEPT});
    assert_true(epoch_eq(&did(l, CONTROL_SUSPEND)->plan.epoch, &a.epoch));
    assert_true(epoch_eq(&did(l, CONTROL_ABORT)->plan.epoch, &b.epoch));
    assert_null(control_active(l->c, &a.model));
    heartbeat(l, ANN, 4);
    assert_null(did(l, CONTROL_RESUME));
    tell_state(l, ANN, 4, &a);
    assert_true(epoch_eq(&did(l, CONTROL_RESUME)->plan.epoch, &a.epoch));
}

static void test_alone_the_plan_is_confirmed_at_once(void **state)
{
    struct lab *l = *state;
    become_planner(l, 1);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    const struct plan p = did(l, CONTROL_PREPARE)->plan;
    assert_int_equal(p.n_stages, 1);
    (void)feed(l, &(struct control_event){.kind = CONTROL_PREPARED, .epoch = p.epoch.hash});
    (void)feed(l, &(struct control_event){.kind = CONTROL_COMMITTED, .epoch = p.epoch.hash});
    run(l, SECOND);
    assert_int_equal(local_state(l, &p), EPOCH_CURRENT);
    uint64_t term = control_term_seen(l->c);
    (void)feed(l, &(struct control_event){.kind = CONTROL_SLEPT});
    assert_true(epoch_eq(&did(l, CONTROL_SUSPEND)->plan.epoch, &p.epoch));
    assert_true(epoch_eq(&did(l, CONTROL_RESUME)->plan.epoch, &p.epoch));
    assert_true(control_term_seen(l->c) > term);
    assert_int_equal(local_state(l, &p), EPOCH_CURRENT);
}

/* ---- 3.6 to 3.8: the planner ---- */

static struct plan start_two_stage_plan(struct lab *l)
{
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct plan p = prepared_plan(l, ANN);
    assert_int_equal(p.n_stages, 2);
    return p;
}

static void test_commit_only_when_all_are_prepared_active_only_when_all_committed(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARING});
    run(l, SECOND);
    assert_null(did(l, CONTROL_COMMIT));
    assert_false(commanded(l, ANN, COMMIT, &p));
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    assert_non_null(did(l, CONTROL_COMMIT));
    assert_true(commanded(l, ANN, COMMIT, &p));
    assert_null(did(l, CONTROL_ACTIVE));
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    assert_true(epoch_eq(&did(l, CONTROL_ACTIVE)->plan.epoch, &p.epoch));
    assert_int_equal(find(l, ANN, BODY(STATE))->state->n_active, 1);
    assert_int_equal(local_state(l, &p), EPOCH_CURRENT);
}

static void test_a_commit_that_is_not_complete_in_two_seconds_is_aborted(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    forget(l);
    run(l, CONTROL_COMMIT_US - 100 * MS);
    assert_true(commanded(l, ANN, COMMIT, &p)); /* repeated */
    assert_false(commanded(l, ANN, ABORT, &p));
    run(l, 300 * MS);
    assert_true(commanded(l, ANN, ABORT, &p));
    assert_int_equal(local_state(l, &p), EPOCH_NONE);
    assert_null(did(l, CONTROL_ACTIVE));
}

static void test_a_refusal_moves_the_plan_to_others(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    node(l, ANN)->stream_bytes_per_s = 30e9; /* preferred at first */
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct plan p = prepared_plan(l, ANN);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_FAILED, .error = ERR_IO});
    struct plan q = prepared_plan(l, BOB);
    struct node_id ann = id_of(ANN);
    assert_int_equal(plan_stage_of(&q, &ann), -1);
    assert_true(commanded(l, ANN, ABORT, &p));
}

static void test_no_room_for_both_retires_first(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    struct plan p = start_two_stage_plan(l);
    struct node_id ann = id_of(ANN);
    uint64_t ann_holds = p.stages[plan_stage_of(&p, &ann)].memory_bytes;
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED, .reserved = ann_holds});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED, .reserved = ann_holds});
    assert_non_null(did(l, CONTROL_ACTIVE));
    forget(l);
    assert_int_equal(want(l, 1024, 0),
                     ERR_OK); /* another context: a new plan, and no room for two */
    assert_true(commanded(l, ANN, RETIRE, &p));
    assert_non_null(did(l, CONTROL_INACTIVE));
    run(l, SECOND);
    assert_null(find(l, ANN, BODY(PREPARE)));
    report(l, ANN, (struct report){0}); /* it is gone there */
    struct plan q = prepared_plan(l, ANN);
    assert_int_equal(q.context, 1024);
    assert_true(epoch_cmp(&q.epoch, &p.epoch) > 0);
}

static void test_a_participant_that_fails_is_replaced_at_once(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    node(l, ANN)->stream_bytes_per_s = 30e9;
    show(l);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    assert_non_null(did(l, CONTROL_ACTIVE));
    forget(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_FAILED, .error = ERR_STALE});
    assert_non_null(did(l, CONTROL_INACTIVE));
    assert_true(commanded(l, ANN, RETIRE, &p));
    run(l, 300 * MS);
    struct plan q = prepared_plan(l, BOB);
    struct node_id ann = id_of(ANN);
    assert_int_equal(plan_stage_of(&q, &ann), -1);
}

/* Nobody else can: that is told as a refusal, and a new wish asks the one again at once. */
static void test_a_refusal_is_told_and_a_new_wish_asks_again(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    forget(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_FAILED, .error = ERR_STALE});
    report(l, ANN, (struct report){0});
    run(l, SECOND);
    struct control_model m;
    control_model_at(l->c, 0, &m);
    assert_null(m.active);
    assert_true(m.refused);
    assert_non_null(strstr(m.no_fit, "refused"));
    forget(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    run(l, 300 * MS);
    (void)prepared_plan(l, ANN);
    control_model_at(l->c, 0, &m);
    assert_false(m.refused);
}

static void test_a_lost_participant_is_replaced_at_once(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    node(l, ANN)->stream_bytes_per_s = 30e9;
    show(l);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    assert_non_null(did(l, CONTROL_ACTIVE));
    forget(l);
    reach(l, ANN, false);
    show(l);
    assert_non_null(did(l, CONTROL_INACTIVE));
    run(l, 300 * MS); /* our own old part goes first: there is no room for two */
    struct plan q = prepared_plan(l, BOB);
    struct node_id ann = id_of(ANN);
    assert_int_equal(plan_stage_of(&q, &ann), -1);
}

/* A report that was overtaken by a newer one of the same boot must not take a plan back. */
static void test_a_report_that_comes_late_is_skipped(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    assert_non_null(control_active(l->c, &p.model));
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED, .stale = true});
    assert_non_null(control_active(l->c, &p.model));
    report(l, ANN, (struct report){.boot_id = 77, .stale = true}); /* another boot is no old news */
    assert_null(control_active(l->c, &p.model));
}

/* A session that breaks and returns within a second changes nothing; a second later the plan moves.
 */
static void test_a_session_that_flaps_moves_no_plan(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    node(l, ANN)->stream_bytes_per_s = 30e9;
    show(l);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    forget(l);
    l->view.peers[ANN - 1].reachable = false; /* membership still has it alive */
    show(l);
    run(l, 800 * MS);
    assert_non_null(control_active(l->c, &p.model));
    assert_int_equal(l->n_effects, 0);
    l->view.peers[ANN - 1].reachable = true;
    show(l);
    run(l, 5 * SECOND);
    assert_non_null(control_active(l->c, &p.model));
    l->view.peers[ANN - 1].reachable = false;
    show(l);
    run(l, 1200 * MS);
    assert_null(control_active(l->c, &p.model));
    struct plan q = prepared_plan(l, BOB);
    struct node_id ann = id_of(ANN);
    assert_int_equal(plan_stage_of(&q, &ann), -1);
}

/* A suspicion that passes moves nothing; one that stays, or a drain, moves the plan while it runs.
 */
static void test_a_participant_that_does_not_count_is_replaced_while_it_runs(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    for (uint8_t who = ME; who <= BOB; who++)
        node(l, who)->budget_bytes = 200 << 20;
    node(l, ANN)->stream_bytes_per_s = 30e9;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct plan p = prepared_plan(l, ANN);
    assert_int_equal(p.n_stages, 1);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    forget(l);
    for (uint32_t i = 0; i < 2; i++) {
        node(l, ANN)->eligible = false;
        show(l);
        run(l, 1500 * MS);
        report(l, ANN, (struct report){.plan = &p, .state = EPOCH_CURRENT});
        assert_null(did(l, CONTROL_PREPARE));
        node(l, ANN)->eligible = true;
        show(l);
        run(l, SECOND);
    }
    l->obedient = false;
    node(l, ANN)->eligible = false;
    show(l);
    run(l, 3500 * MS);
    assert_non_null(did(l, CONTROL_PREPARE)); /* here or at Bob's: both are equal */
    assert_true(epoch_eq(&control_active(l->c, &p.model)->epoch, &p.epoch));
}

static void test_a_join_is_used_only_when_it_gains_ten_percent(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    reach(l, BOB, false);
    show(l);
    struct plan p = start_two_stage_plan(l);
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_PREPARED});
    report(l, ANN, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
    assert_non_null(did(l, CONTROL_ACTIVE));
    for (uint32_t i = 0; i < 70; i++) { /* past the minute */
        run(l, SECOND);
        report(l, ANN, (struct report){.plan = &p, .state = EPOCH_CURRENT});
    }
    forget(l);
    node(l, BOB)->stream_bytes_per_s = 10.5e9; /* little faster */
    node(l, BOB)->budget_bytes = 100 << 20;
    reach(l, BOB, true);
    show(l);
    report(l, BOB, (struct report){0});
    for (uint32_t i = 0; i < 5; i++) {
        run(l, SECOND);
        report(l, ANN, (struct report){.plan = &p, .state = EPOCH_CURRENT});
        report(l, BOB, (struct report){0});
    }
    assert_null(find(l, BOB, BODY(PREPARE)));
    node(l, BOB)->stream_bytes_per_s = 40e9;
    node(l, BOB)->budget_bytes = 1 << 30; /* all by itself, four times as fast */
    show(l);
    run(l, SECOND);
    assert_null(find(l, BOB, BODY(PREPARE))); /* it settles first */
    for (uint32_t i = 0; i < 12; i++) {
        run(l, SECOND);
        report(l, ANN, (struct report){.plan = &p, .state = EPOCH_CURRENT});
        report(l, BOB, (struct report){0});
    }
    struct plan q = prepared_plan(l, BOB);
    assert_int_equal(q.n_stages, 1);
    assert_non_null(control_active(l->c, &p.model)); /* the old one runs meanwhile */
    report(l, BOB, (struct report){.plan = &q, .state = EPOCH_PREPARED});
    report(l, BOB, (struct report){.plan = &q, .state = EPOCH_COMMITTED});
    assert_true(epoch_eq(&control_active(l->c, &p.model)->epoch, &q.epoch));
    assert_true(commanded(l, ANN, DRAIN, &p));
}

static void test_a_new_planner_adopts_what_runs_under_its_old_epoch(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct plan p = plan_of(ANN, 4, 1, "\x01\x03");
    prepare(l, ANN, 4, &p);
    command(l, ANN, 4, COMMIT, &p);
    tell_state(l, ANN, 4, &p);
    forget(l);
    reach(l, ANN, false);
    show(l);
    while (!find(l, BOB, BODY(CLAIM)))
        run(l, MS);
    answer(l, BOB, find(l, BOB, BODY(CLAIM))->claim->term, true, 0, 0);
    assert_true(control_is_planner(l->c));
    report(l, BOB, (struct report){.plan = &p, .state = EPOCH_CURRENT, .with_plan = true});
    run(l, 5 * SECOND);
    assert_true(epoch_eq(&control_active(l->c, &p.model)->epoch, &p.epoch));
    assert_int_equal(local_state(l, &p), EPOCH_CURRENT);
    assert_null(find(l, BOB, BODY(PREPARE)));
    assert_null(did(l, CONTROL_INACTIVE));
    assert_int_equal(find(l, BOB, BODY(STATE))->state->active[0]->term, 4);
}

/* A member that lives but was not met yet may run the model already: it is waited for, not for
 * ever. */
static void test_a_new_planner_waits_for_whom_it_will_meet(void **state)
{
    struct lab *l = *state;
    lab_start(l, 2);
    node(l, ME)->budget_bytes = 1 << 30;
    l->view.peers[1].awaited = true;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    while (!control_is_planner(l->c))
        run(l, MS);
    run(l, SECOND);
    assert_null(did(l, CONTROL_PREPARE));
    run(l, 2 * SECOND);
    assert_non_null(did(l, CONTROL_PREPARE));
}

/* 3.6: half committed, all at least prepared: finished. One not prepared: aborted. */
static void test_a_new_planner_finishes_a_commit_or_aborts(void **state)
{
    for (uint32_t i = 0; i < 2; i++) {
        if (i > 0) {
            (void)teardown(state);
            (void)setup(state);
        }
        struct lab *l = *state;
        follow_ann(l);
        know_model(l);
        assert_int_equal(want(l, 0, 0), ERR_OK);
        struct plan p = plan_of(ANN, 4, 1, "\x01\x03");
        prepare(l, ANN, 4, &p);
        command(l, ANN, 4, COMMIT, &p);
        assert_int_equal(local_state(l, &p), EPOCH_COMMITTED);
        forget(l);
        reach(l, ANN, false);
        show(l);
        while (!find(l, BOB, BODY(CLAIM)))
            run(l, MS);
        answer(l, BOB, find(l, BOB, BODY(CLAIM))->claim->term, true, 0, 0);
        report(l, BOB,
               (struct report){.plan = &p,
                               .state = i == 0 ? EPOCH_PREPARED : EPOCH_PREPARING,
                               .with_plan = true});
        assert_int_equal(commanded(l, BOB, COMMIT, &p), i == 0);
        assert_int_equal(commanded(l, BOB, ABORT, &p) || commanded(l, BOB, RETIRE, &p), i == 1);
        if (i == 0) {
            report(l, BOB, (struct report){.plan = &p, .state = EPOCH_COMMITTED});
            assert_true(epoch_eq(&control_active(l->c, &p.model)->epoch, &p.epoch));
        } else {
            assert_int_equal(local_state(l, &p), EPOCH_NONE);
        }
    }
}

static void test_of_two_instances_the_faster_stays(void **state)
{
    struct lab *l = *state;
    become_planner(l, 3);
    node(l, ANN)->budget_bytes = node(l, ME)->budget_bytes = 1 << 30;
    node(l, ANN)->stream_bytes_per_s = 30e9;
    reach(l, ANN, false);
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct hash256 model = model_hash();
    struct plan own = *control_active(l->c, &model);
    assert_int_equal(own.n_stages, 1);
    struct plan theirs = plan_of(ANN, 1, 1, "\x02");
    reach(l, ANN, true);
    show(l);
    report(l, ANN, (struct report){.plan = &theirs, .state = EPOCH_CURRENT, .with_plan = true});
    assert_true(epoch_eq(&control_active(l->c, &model)->epoch, &theirs.epoch));
    assert_true(epoch_eq(&did(l, CONTROL_DRAIN)->plan.epoch, &own.epoch));
    assert_int_equal(local_state(l, &own), EPOCH_NONE);
}

static void test_no_fit_is_told_to_all_and_ends_when_memory_comes(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    node(l, ANN)->budget_bytes = 1 << 20;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    assert_non_null(strstr(did(l, CONTROL_NO_FIT)->text.text, "more memory is needed"));
    assert_int_equal(find(l, ANN, BODY(STATE))->state->n_no_fit, 1);
    struct control_model m;
    assert_int_equal(control_n_models(l->c), 1);
    control_model_at(l->c, 0, &m);
    assert_null(m.active);
    assert_true(strlen(m.no_fit) > 0);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    run(l, SECOND);
    assert_non_null(control_active(l->c, &m.model));
    assert_string_equal(did(l, CONTROL_NO_FIT)->text.text, "");
}

static void test_a_model_without_description_waits(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    assert_non_null(strstr(did(l, CONTROL_NO_FIT)->text.text, "not arrived"));
    know_model(l);
    run(l, SECOND);
    (void)prepared_plan(l, ANN);
}

/* ---- leaving ---- */

static void test_plans_move_before_a_node_leaves(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    node(l, ME)->budget_bytes = node(l, ANN)->budget_bytes = 1 << 30;
    show(l);
    know_model(l);
    node(l, ME)->stream_bytes_per_s = 20e9;
    show(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    struct hash256 model = model_hash();
    struct plan p = *control_active(l->c, &model);
    assert_int_equal(p.stages[0].node.bytes[0], ME);
    forget(l);
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    assert_null(did(l, CONTROL_LEFT));
    struct plan q = prepared_plan(l, ANN);
    report(l, ANN, (struct report){.plan = &q, .state = EPOCH_PREPARED});
    assert_null(did(l, CONTROL_LEFT));
    report(l, ANN, (struct report){.plan = &q, .state = EPOCH_COMMITTED});
    assert_non_null(did(l, CONTROL_LEFT));
    assert_true(find(l, ANN, BODY(HEARTBEAT))->heartbeat->resigns);
    assert_int_equal(find(l, ANN, BODY(STATE))->state->active[0]->stages[0]->node.data[0], ANN);
}

static void test_leaving_does_not_wait_for_what_cannot_move(void **state)
{
    struct lab *l = *state;
    lab_start(l, 1);
    node(l, ME)->budget_bytes = 1 << 30;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    run(l, SECOND);
    struct hash256 model = model_hash();
    assert_non_null(control_active(l->c, &model));
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    run(l, SECOND);
    assert_non_null(did(l, CONTROL_LEFT));
}

static void test_leaving_does_not_wait_where_nobody_stays(void **state)
{
    struct lab *l = *state;
    become_planner(l, 2);
    node(l, ME)->budget_bytes = node(l, ANN)->budget_bytes = 1 << 30;
    node(l, ME)->stream_bytes_per_s = 20e9;
    show(l);
    know_model(l);
    assert_int_equal(want(l, 0, 0), ERR_OK);
    forget(l);
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    assert_null(did(l, CONTROL_LEFT)); /* it could move to ann */
    report(l, ANN, (struct report){.leaving = true});
    assert_non_null(did(l, CONTROL_LEFT));
}

static void test_a_follower_does_not_wait_where_nobody_stays(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    struct plan p = plan_of(ANN, 4, 1, "\x01\x02");
    prepare(l, ANN, 4, &p);
    command(l, ANN, 4, COMMIT, &p);
    tell_state(l, ANN, 4, &p);
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    assert_null(did(l, CONTROL_LEFT));
    for (uint8_t who = 1; who <= l->view.topology.n_nodes; who++)
        node(l, who)->eligible = false; /* what gossip says of nodes that stop */
    show(l);
    assert_non_null(did(l, CONTROL_LEFT));
}

static void test_leaving_ends_after_ten_seconds(void **state)
{
    struct lab *l = *state;
    follow_ann(l);
    struct plan p = plan_of(ANN, 4, 1, "\x01\x02");
    prepare(l, ANN, 4, &p);
    command(l, ANN, 4, COMMIT, &p);
    tell_state(l, ANN, 4, &p);
    (void)feed(l, &(struct control_event){.kind = CONTROL_LEAVING});
    assert_true(find(l, ANN, BODY(REPORT))->report->leaving);
    for (uint32_t i = 0; i < 9; i++) {
        heartbeat(l, ANN, 4);
        run(l, SECOND);
    }
    assert_null(did(l, CONTROL_LEFT));
    heartbeat(l, ANN, 4);
    run(l, 2 * SECOND);
    assert_non_null(did(l, CONTROL_LEFT));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_a_plan_is_prepared_committed_and_becomes_current),
        CASE(test_refusals_of_a_participant),
        CASE(test_reservations_never_exceed_the_limit),
        CASE(test_what_runs_and_fails_is_stopped_with_its_reason),
        CASE(test_commands_of_old_terms_and_others_are_ignored),
        CASE(test_a_prepared_plan_lapses_after_a_minute_without_planner),
        CASE(test_a_running_plan_outlives_its_planner_while_frames_flow),
        CASE(test_the_replaced_epoch_drains_for_thirty_seconds_at_most),
        CASE(test_a_third_epoch_of_an_instance_makes_the_first_go),
        CASE(test_an_aborted_commit_leaves_the_old_epoch),
        CASE(test_after_sleep_nothing_runs_until_confirmed),
        CASE(test_alone_the_plan_is_confirmed_at_once),
        CASE(test_commit_only_when_all_are_prepared_active_only_when_all_committed),
        CASE(test_a_commit_that_is_not_complete_in_two_seconds_is_aborted),
        CASE(test_a_refusal_moves_the_plan_to_others),
        CASE(test_no_room_for_both_retires_first),
        CASE(test_a_participant_that_fails_is_replaced_at_once),
        CASE(test_a_refusal_is_told_and_a_new_wish_asks_again),
        CASE(test_a_lost_participant_is_replaced_at_once),
        CASE(test_a_report_that_comes_late_is_skipped),
        CASE(test_a_session_that_flaps_moves_no_plan),
        CASE(test_a_participant_that_does_not_count_is_replaced_while_it_runs),
        CASE(test_a_join_is_used_only_when_it_gains_ten_percent),
        CASE(test_a_new_planner_adopts_what_runs_under_its_old_epoch),
        CASE(test_a_new_planner_waits_for_whom_it_will_meet),
        CASE(test_a_new_planner_finishes_a_commit_or_aborts),
        CASE(test_of_two_instances_the_faster_stays),
        CASE(test_no_fit_is_told_to_all_and_ends_when_memory_comes),
        CASE(test_a_model_without_description_waits),
        CASE(test_plans_move_before_a_node_leaves),
        CASE(test_leaving_does_not_wait_for_what_cannot_move),
        CASE(test_leaving_does_not_wait_where_nobody_stays),
        CASE(test_a_follower_does_not_wait_where_nobody_stays),
        CASE(test_leaving_ends_after_ten_seconds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
