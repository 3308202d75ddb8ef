/* Rules of the data-plane core, one by one, with frames and computations by hand. */
#include "tests/unit/pipeline_rig.h"

static int32_t prompt_of[CONTEXT + 8];

static void fill_prompt(void)
{
    for (int32_t i = 0; i < CONTEXT + 8; i++)
        prompt_of[i] = i + 1;
}

/* --- */

static void test_one_node_needs_no_frames(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 2);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 10, 5);
    settle(&r, 1);
    assert_int_equal(count_tokens(&r, 0), 5);
    const struct pipeline_effect *end = find(&r, 0, PIPELINE_DO_END);
    assert_non_null(end);
    assert_int_equal(end->end.err, ERR_OK);
    assert_int_equal(end->end.finish, FRAME_LENGTH);
    assert_null(find_send(&r, 0, FRAME_STEP));
    tear_down(&r);
}

/* A chat client sends the whole conversation again: only what is new is computed. */
static void test_conversation_reuses_what_a_slot_holds(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 2);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 20, 5); /* computes 20 + 4 positions */
    settle(&r, 1);
    forget(&r, 0);
    int32_t next[40];
    memcpy(next, prompt_of, 20 * sizeof next[0]);
    for (int32_t i = 20; i < 40; i++)
        next[i] = i < 25 ? 1000 + i : 7;
    submit(&r, 0, 2, next, 40, 5);
    assert_non_null(find(&r, 0, PIPELINE_DO_COMPUTE));
    assert_int_equal(r.segments[0][0].position, 24);
    assert_int_equal(r.segments[0][0].n_rows, 16);
    /* A third conversation takes the other slot and starts at 0. */
    settle(&r, 1);
    forget(&r, 0);
    next[0] = 99;
    submit(&r, 0, 3, next, 40, 5);
    assert_int_equal(r.segments[0][0].position, 0);
    assert_int_equal(r.segments[0][0].n_rows, 40);
    tear_down(&r);
}

/* A long prompt goes in chunks; another's next token rides along with each of them. */
static void test_long_prompt_does_not_stop_others(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 4);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of + 1, 4, 100);
    compute(&r, 0);
    compute(&r, 0);
    submit(&r, 0, 2, prompt_of, 500, 2);
    compute(&r, 0);
    uint32_t n_chunks = 0, n_rows = 0;
    while (find(&r, 0, PIPELINE_DO_COMPUTE)->compute.n_segments == 2) {
        const struct pipeline_effect *e = find(&r, 0, PIPELINE_DO_COMPUTE);
        assert_int_equal(r.segments[0][0].n_rows, 1);
        assert_true(e->compute.n_rows <= PIPELINE_CHUNK_ROWS);
        n_rows += r.segments[0][1].n_rows;
        n_chunks++;
        compute(&r, 0);
        if (n_rows >= 500)
            break;
    }
    assert_int_equal(n_rows, 500);
    assert_int_equal(n_chunks, 4);
    tear_down(&r);
}

/* The head sends the next chunk while the one before is still under way. */
static void test_chunks_of_one_prompt_flow_at_once(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 3, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    link_pair(&r, PIPELINE_LINK_UP, 1, 2);
    link_pair(&r, PIPELINE_LINK_UP, 0, 2);
    install(&r, &plan, 1, 4);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 599, 1);
    uint32_t n = 0;
    while (compute(&r, 0))
        n++;
    assert_int_equal(n, 4); /* stages + 1, then it waits for credit */
    settle(&r, 3);
    assert_int_equal(count_tokens(&r, 0), 1);
    tear_down(&r);
}

/* Rule 3.12: after a break the stream goes on from the least that all stages hold. */
static void test_stream_goes_on_from_the_least(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    install(&r, &plan, 1, 4);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 300, 3);
    deliver(&r, 0, 1);
    assert_true(compute(&r, 0)); /* 128 rows */
    deliver(&r, 0, 1);
    assert_true(compute(&r, 1));
    assert_true(compute(&r, 0)); /* 128 more, lost on the way */
    link_pair(&r, PIPELINE_LINK_DOWN, 0, 1);
    forget(&r, 1);
    while (compute(&r, 0))
        ;
    forget(&r, 0);
    r.now += SECOND;
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    assert_null(find(&r, 0, PIPELINE_DO_COMPUTE)); /* waits for HAVE */
    deliver(&r, 0, 1);
    assert_non_null(find_send(&r, 1, FRAME_HAVE));
    assert_int_equal(find_send(&r, 1, FRAME_HAVE)->have.n, 128);
    deliver(&r, 1, 0);
    assert_non_null(find(&r, 0, PIPELINE_DO_COMPUTE));
    assert_int_equal(r.segments[0][0].position, 128);
    settle(&r, 2);
    assert_int_equal(count_tokens(&r, 0), 3);
    tear_down(&r);
}

static void test_uncommitted_epoch_is_stale(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan old = plan_of(&r, 2, 1), plan = plan_of(&r, 2, 2);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    install(&r, &plan, 1, 4);
    struct pipeline_event event = {.type = PIPELINE_INSTALL, .install = {&old, 2, 4, ROW_BYTES}};
    give(&r, 1, &event, ERR_OK); /* installed, not committed */
    struct frame f = {.header = {.type = FRAME_STEP, .epoch = epoch_alias(&old.epoch), .step = 1}};
    event = (struct pipeline_event){.type = PIPELINE_FRAME};
    event.frame.from = r.id[0];
    event.frame.frame = &f;
    forget(&r, 1);
    give(&r, 1, &event, ERR_OK);
    const struct pipeline_send *stale = find_send(&r, 1, FRAME_STALE);
    assert_non_null(stale);
    assert_true(stale->epoch == epoch_alias(&old.epoch));
    assert_true(stale->stale.current_epoch == epoch_alias(&plan.epoch));
    assert_null(find_send(&r, 1, FRAME_HAVE));
    /* And the entry whose OPEN was stale waits for a new plan, then opens again. */
    route(&r, 0, &old);
    forget(&r, 0);
    submit(&r, 0, 1, prompt_of, 3, 2); /* node 0 is head of `old`, which it does not have */
    assert_null(find(&r, 0, PIPELINE_DO_COMPUTE));
    route(&r, 0, &plan);
    settle(&r, 2);
    assert_int_equal(count_tokens(&r, 0), 2);
    tear_down(&r);
}

static void test_one_current_and_one_earlier_epoch(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plans[3];
    for (uint32_t i = 0; i < 3; i++) {
        plans[i] = plan_of(&r, 1, i + 1);
        forget(&r, 0);
        install(&r, &plans[i], i + 1, 4);
    }
    const struct pipeline_effect *release = find(&r, 0, PIPELINE_DO_RELEASE);
    assert_non_null(release);
    assert_int_equal(release->release.instance, 1);
    struct pipeline_event event = {.type = PIPELINE_COMMIT};
    event.epoch = plans[0].epoch;
    give(&r, 0, &event, ERR_NOT_FOUND);
    /* An aborted plan: the one before is current again. */
    tell(&r, 0, PIPELINE_RETIRE, &plans[2]);
    tell(&r, 0, PIPELINE_COMMIT, &plans[1]);
    route(&r, 0, &plans[1]);
    submit(&r, 0, 1, prompt_of, 3, 2);
    settle(&r, 1);
    assert_int_equal(count_tokens(&r, 0), 2);
    tear_down(&r);
}

static void test_draining_epoch_finishes_and_says_so(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan old = plan_of(&r, 1, 1), plan = plan_of(&r, 1, 2);
    install(&r, &old, 1, 4);
    route(&r, 0, &old);
    submit(&r, 0, 1, prompt_of, 3, 4);
    install(&r, &plan, 2, 4);
    tell(&r, 0, PIPELINE_DRAIN, &old);
    assert_null(find(&r, 0, PIPELINE_DO_DRAINED));
    submit(&r, 0, 2, prompt_of, 3, 4); /* refused there, waits for the route */
    route(&r, 0, &plan);
    while (compute(&r, 0))
        ;
    const struct pipeline_effect *drained = find(&r, 0, PIPELINE_DO_DRAINED);
    assert_non_null(drained);
    assert_true(epoch_eq(&drained->release.epoch, &old.epoch));
    assert_int_equal(count_tokens(&r, 0), 8);
    tear_down(&r);
}

/* The shell hears once for each instance that nobody needs it any more, and not while it computes.
 */
static void test_retired_epoch_is_released_after_its_computation(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 5, 4);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 3, 4);
    tell(&r, 0, PIPELINE_RETIRE, &plan);
    assert_null(find(&r, 0, PIPELINE_DO_RELEASE));
    assert_true(compute(&r, 0));
    assert_non_null(find(&r, 0, PIPELINE_DO_RELEASE));
    assert_int_equal(find(&r, 0, PIPELINE_DO_RELEASE)->release.instance, 5);
    assert_int_equal(count_tokens(&r, 0), 0);
    tear_down(&r);
}

/* 2.5, alone: the step under way is dropped, nothing follows it, and after the confirmation the
 * answer goes on where it was. */
static void test_after_sleep_an_answer_waits_for_confirmation(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 2);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 10, 5);
    assert_true(compute(&r, 0));
    assert_int_equal(count_tokens(&r, 0), 1);
    give(&r, 0, &(struct pipeline_event){.type = PIPELINE_SLEPT}, ERR_OK);
    tell(&r, 0, PIPELINE_COMMIT, &plan); /* given before the sleep */
    assert_true(compute(&r, 0));
    assert_false(compute(&r, 0));
    assert_int_equal(count_tokens(&r, 0), 1);
    give(&r, 0, &(struct pipeline_event){.type = PIPELINE_SUSPEND}, ERR_OK);
    pass_time(&r, 0, r.now + UINT64_C(20) * 1000 * 1000);
    assert_false(compute(&r, 0));
    tell(&r, 0, PIPELINE_COMMIT, &plan);
    const struct pipeline_effect *again = find(&r, 0, PIPELINE_DO_COMPUTE);
    assert_non_null(again);
    assert_int_equal(again->compute.n_rows, 1); /* the KV is there still */
    settle(&r, 1);
    assert_int_equal(count_tokens(&r, 0), 5);
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.err, ERR_OK);
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.timings.n_attempts, 2);
    tear_down(&r);
}

static void test_without_confirmation_a_request_ends_after_thirty_seconds(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 2);
    route(&r, 0, &plan);
    give(&r, 0, &(struct pipeline_event){.type = PIPELINE_SUSPEND}, ERR_OK);
    submit(&r, 0, 1, prompt_of, 10, 5);
    uint64_t end_us = r.now + PIPELINE_NO_PLAN_US;
    pass_time(&r, 0, end_us - 1);
    assert_null(find(&r, 0, PIPELINE_DO_END));
    pass_time(&r, 0, end_us);
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.err, ERR_TIMEOUT);
    assert_true(find(&r, 0, PIPELINE_DO_END)->end.text[0] != 0);
    tear_down(&r);
}

/* A middle stage drops what waits for it, and calls frames of an unconfirmed epoch stale. */
static void test_after_sleep_a_stage_takes_no_step(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    install(&r, &plan, 1, 2);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 10, 5);
    deliver(&r, 0, 1);
    deliver(&r, 1, 0);
    assert_true(compute(&r, 0));
    give(&r, 1, &(struct pipeline_event){.type = PIPELINE_SUSPEND}, ERR_OK);
    forget(&r, 1);
    deliver(&r, 0, 1);
    assert_null(find(&r, 1, PIPELINE_DO_COMPUTE));
    assert_non_null(find_send(&r, 1, FRAME_STALE));
    tell(&r, 1, PIPELINE_COMMIT, &plan);
    for (uint32_t i = 0; i < 50 && !find(&r, 0, PIPELINE_DO_END); i++) {
        settle(&r, 2);
        pass_time(&r, 0, r.now + 100 * 1000);
    }
    assert_non_null(find(&r, 0, PIPELINE_DO_END));
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.err, ERR_OK);
    assert_int_equal(count_tokens(&r, 0), 5);
    tear_down(&r);
}

static void test_limits_are_errors(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 4);
    route(&r, 0, &plan);
    struct pipeline_event event = submit_of(1, prompt_of, CONTEXT, 1);
    give(&r, 0, &event, ERR_OK); /* no room for a token */
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.err, ERR_LIMIT);
    event = submit_of(2, prompt_of, 0, 1);
    give(&r, 0, &event, ERR_INVALID);
    int32_t negative[2] = {1, -1};
    event = submit_of(2, negative, 2, 1);
    give(&r, 0, &event, ERR_INVALID);
    for (uint8_t i = 0; i < PIPELINE_REQUESTS_MAX; i++)
        submit(&r, 0, (uint8_t)(i + 10), prompt_of, 4, 3);
    event = submit_of(200, prompt_of, 4, 3);
    give(&r, 0, &event, ERR_BUSY);
    event = submit_of(10, prompt_of, 4, 3);
    give(&r, 0, &event, ERR_EXISTS);
    settle(&r, 1);
    assert_int_equal(count_tokens(&r, 0), 3 * PIPELINE_REQUESTS_MAX);
    tear_down(&r);
}

/* A head takes 64 sequences, whoever sends them; the next entry hears "busy". */
static void test_full_head_is_busy(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 2);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    route(&r, 0, &plan);
    route(&r, 1, &plan);
    for (uint8_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++)
        submit(&r, 0, (uint8_t)(i + 10), prompt_of, 4, 3);
    submit(&r, 1, 200, prompt_of, 4, 3);
    deliver(&r, 1, 0);
    deliver(&r, 0, 1);
    const struct pipeline_effect *end = find(&r, 1, PIPELINE_DO_END);
    assert_non_null(end);
    assert_int_equal(end->end.err, ERR_BUSY);
    tear_down(&r);
}

static void test_no_plan_ends_after_thirty_seconds(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    submit(&r, 0, 1, prompt_of, 4, 3);
    pass_time(&r, 0, 1000 + 29 * SECOND);
    assert_null(find(&r, 0, PIPELINE_DO_END));
    pass_time(&r, 0, 1000 + 30 * SECOND);
    const struct pipeline_effect *end = find(&r, 0, PIPELINE_DO_END);
    assert_non_null(end);
    assert_int_equal(end->end.err, ERR_TIMEOUT);
    assert_true(strlen(end->end.text) > 0);
    assert_true(pipeline_next_due(r.p[0]) == UINT64_MAX);
    tear_down(&r);
}

/* A head that cannot be reached is waited for as long as a plan. */
static void test_unreachable_head_ends_after_thirty_seconds(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    route(&r, 2, &plan);
    submit(&r, 2, 1, prompt_of, 4, 3);
    assert_non_null(find(&r, 2, PIPELINE_DO_WANT_LINK));
    pass_time(&r, 2, 1000 + 30 * SECOND);
    const struct pipeline_effect *end = find(&r, 2, PIPELINE_DO_END);
    assert_non_null(end);
    assert_int_equal(end->end.err, ERR_TIMEOUT);
    assert_non_null(strstr(end->end.text, "could not be reached"));
    tear_down(&r);
}

static void test_final_reason_ends_new_requests_at_once(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct pipeline_event event = {.type = PIPELINE_NO_ROUTE};
    event.no_route.model.bytes[0] = 9;
    event.no_route.reason = ERR_AGAIN;
    give(&r, 0, &event, ERR_OK);
    submit(&r, 0, 1, prompt_of, 4, 3);
    assert_null(find(&r, 0, PIPELINE_DO_END));
    event.no_route.reason = ERR_NO_FIT;
    event.no_route.text = "needs 3 GiB more";
    give(&r, 0, &event, ERR_OK);
    const struct pipeline_effect *end = find(&r, 0, PIPELINE_DO_END);
    assert_non_null(end);
    assert_int_equal(end->end.err, ERR_NO_FIT);
    assert_string_equal(end->end.text, "needs 3 GiB more");
    tear_down(&r);
}

static void test_deadline_and_cancel_end_requests(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 1);
    route(&r, 0, &plan);
    struct pipeline_event event = submit_of(1, prompt_of, 4, 0);
    event.submit.deadline_us = r.now + 50 * MS;
    give(&r, 0, &event, ERR_OK);
    submit(&r, 0, 2, prompt_of, 4, 0);
    pass_time(&r, 0, r.now + 50 * MS);
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.err, ERR_TIMEOUT);
    forget(&r, 0);
    event = (struct pipeline_event){.type = PIPELINE_CANCEL, .cancel = {{2}}};
    give(&r, 0, &event, ERR_OK);
    assert_int_equal(find(&r, 0, PIPELINE_DO_END)->end.err, ERR_CANCELLED);
    struct pipeline_progress progress;
    pipeline_progress(r.p[0], &progress);
    assert_int_equal(progress.n_requests, 0);
    assert_int_equal(progress.n_sequences, 0);
    assert_int_equal(progress.n_slots_used, 0);
    tear_down(&r);
}

/* An entry outside the plan; its tail cannot be reached, so the head passes the tokens on. */
static void test_head_stands_in_for_a_tail_out_of_reach(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 2);
    install(&r, &plan, 1, 4);
    route(&r, 2, &plan);
    submit(&r, 2, 1, prompt_of, 4, 3);
    settle(&r, 3);
    assert_int_equal(count_tokens(&r, 2), 0);
    pass_time(&r, 2, r.now + 1100 * MS);
    settle(&r, 3);
    assert_int_equal(count_tokens(&r, 2), 3);
    assert_non_null(find(&r, 2, PIPELINE_DO_END));
    tear_down(&r);
}

/* Rule 3.11: the head is out of reach, node 1 (here the tail) is not. */
static void test_member_passes_a_request_on(void **state)
{
    (void)state;
    for (uint32_t n_stages = 1; n_stages <= 2; n_stages++) {
        struct rig r;
        set_up(&r);
        struct plan plan = plan_of(&r, n_stages, 1);
        link_pair(&r, PIPELINE_LINK_UP, 0, 1);
        link_pair(&r, PIPELINE_LINK_UP, 1, 2);
        install(&r, &plan, 1, 4);
        route(&r, 1, &plan);
        route(&r, 2, &plan);
        submit(&r, 2, 1, prompt_of, 4, 3);
        settle(&r, 3);
        assert_null(find_send(&r, 2, FRAME_OPEN));
        pass_time(&r, 2, r.now + 1100 * MS);
        settle(&r, 3);
        assert_int_equal(count_tokens(&r, 2), 3);
        assert_int_equal(find(&r, 2, PIPELINE_DO_END)->end.err, ERR_OK);
        /* The relay loses the head: the entry hears it at once and tries again. */
        submit(&r, 2, 2, prompt_of, 4, 3);
        pass_time(&r, 2, r.now + 1100 * MS);
        deliver(&r, 2, 1);
        assert_non_null(find_send(&r, 1, FRAME_OPEN));
        forget(&r, 1);
        link_event(&r, 1, PIPELINE_LINK_DOWN, 0);
        assert_non_null(find_send(&r, 1, FRAME_ERROR));
        tear_down(&r);
    }
}

static void token_to_entry(struct rig *r, const struct plan *plan, uint32_t attempt,
                           uint32_t position, int32_t id)
{
    struct frame f = {
        .header = {.type = FRAME_TOKEN, .epoch = epoch_alias(&plan->epoch)},
        .token = {.request = {{1}}, .attempt = attempt, .position = position, .id = id}};
    struct pipeline_event event = {.type = PIPELINE_FRAME};
    event.frame.from = r->id[1];
    event.frame.frame = &f;
    give(r, 2, &event, ERR_OK);
}

static void test_each_position_is_accepted_once(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_event(&r, 2, PIPELINE_LINK_UP, 0);
    link_event(&r, 2, PIPELINE_LINK_UP, 1);
    route(&r, 2, &plan);
    submit(&r, 2, 1, prompt_of, 4, 30);
    assert_int_equal(find_send(&r, 2, FRAME_OPEN)->open.attempt, 1);
    token_to_entry(&r, &plan, 1, 4, 50);
    token_to_entry(&r, &plan, 1, 4, 50); /* an equal one */
    token_to_entry(&r, &plan, 0, 5, 60); /* of another attempt */
    token_to_entry(&r, &plan, 2, 5, 60);
    token_to_entry(&r, &plan, 1, 5, 51);
    assert_int_equal(count_tokens(&r, 2), 2);
    forget(&r, 2);
    token_to_entry(&r, &plan, 1, 8, 52); /* two were lost: the next attempt */
    assert_int_equal(count_tokens(&r, 2), 0);
    assert_non_null(find_send(&r, 2, FRAME_CANCEL));
    const struct pipeline_send *open = find_send(&r, 2, FRAME_OPEN);
    assert_non_null(open);
    assert_int_equal(open->open.attempt, 2);
    assert_int_equal(open->open.n_emitted, 2);
    assert_int_equal(open->open.token_ids[5], 51);
    tear_down(&r);
}

static void test_slow_stage_is_said_once(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 1, 1);
    install(&r, &plan, 1, 1);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt_of, 4, 3);
    pass_time(&r, 0, r.now + 900 * MS);
    assert_null(find(&r, 0, PIPELINE_DO_STALL));
    pass_time(&r, 0, r.now + 2 * SECOND);
    uint32_t n = 0;
    for (uint32_t i = 0; i < r.seen[0].n; i++)
        n += r.seen[0].effects[i].type == PIPELINE_DO_STALL;
    assert_int_equal(n, 1);
    tear_down(&r);
}

/* Rule 3.12: whoever stays silent is left; every request ends even if nothing ever answers. */
static void test_silent_cluster_ends_requests(void **state)
{
    (void)state;
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_event(&r, 2, PIPELINE_LINK_UP, 0);
    link_event(&r, 2, PIPELINE_LINK_UP, 1);
    route(&r, 2, &plan);
    submit(&r, 2, 1, prompt_of, 4, 30);
    pass_time(&r, 2, 1000 + 29 * SECOND);
    assert_null(find(&r, 2, PIPELINE_DO_END));
    uint32_t n = 0;
    for (uint32_t i = 0; i < r.seen[2].n; i++)
        n += r.seen[2].effects[i].type == PIPELINE_DO_SEND &&
             r.seen[2].effects[i].send.type == FRAME_OPEN;
    assert_true(n > 1);
    pass_time(&r, 2, 1000 + 30 * SECOND);
    assert_non_null(find(&r, 2, PIPELINE_DO_END));
    tear_down(&r);
}

/* The chain is a public rule of the protocol; BLAKE2b-128 by Python's hashlib:
 *   h = blake2b(b"covey chain 1\0" + bytes([9]) + bytes(31) + bytes(6), digest_size=16).digest()
 *   for t in (1, 2): h = blake2b(h + t.to_bytes(4, "little"), digest_size=16).digest() */
static void test_chain_is_as_specified(void **state)
{
    (void)state;
    static const uint8_t first[16] = {0x00, 0x88, 0xd6, 0x16, 0x20, 0x69, 0x2b, 0x9c,
                                      0x2c, 0xf3, 0xff, 0x31, 0x6c, 0x7e, 0x7d, 0x69};
    static const uint8_t after[16] = {0x65, 0x40, 0xa3, 0x03, 0xf0, 0x1b, 0xd4, 0xb0,
                                      0x63, 0xf8, 0xaf, 0xfd, 0x02, 0xff, 0xe5, 0xf1};
    struct plan plan = PLAN_INIT;
    plan.model.bytes[0] = 9;
    struct hash128 h = pipeline_chain_first(&plan);
    assert_memory_equal(h.bytes, first, 16);
    h = pipeline_chain_next(&h, 1);
    h = pipeline_chain_next(&h, 2);
    assert_memory_equal(h.bytes, after, 16);
}

int main(void)
{
    fill_prompt();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_node_needs_no_frames),
        cmocka_unit_test(test_conversation_reuses_what_a_slot_holds),
        cmocka_unit_test(test_long_prompt_does_not_stop_others),
        cmocka_unit_test(test_chunks_of_one_prompt_flow_at_once),
        cmocka_unit_test(test_stream_goes_on_from_the_least),
        cmocka_unit_test(test_uncommitted_epoch_is_stale),
        cmocka_unit_test(test_one_current_and_one_earlier_epoch),
        cmocka_unit_test(test_draining_epoch_finishes_and_says_so),
        cmocka_unit_test(test_retired_epoch_is_released_after_its_computation),
        cmocka_unit_test(test_after_sleep_an_answer_waits_for_confirmation),
        cmocka_unit_test(test_without_confirmation_a_request_ends_after_thirty_seconds),
        cmocka_unit_test(test_after_sleep_a_stage_takes_no_step),
        cmocka_unit_test(test_limits_are_errors),
        cmocka_unit_test(test_full_head_is_busy),
        cmocka_unit_test(test_no_plan_ends_after_thirty_seconds),
        cmocka_unit_test(test_unreachable_head_ends_after_thirty_seconds),
        cmocka_unit_test(test_final_reason_ends_new_requests_at_once),
        cmocka_unit_test(test_deadline_and_cancel_end_requests),
        cmocka_unit_test(test_head_stands_in_for_a_tail_out_of_reach),
        cmocka_unit_test(test_member_passes_a_request_on),
        cmocka_unit_test(test_each_position_is_accepted_once),
        cmocka_unit_test(test_slow_stage_is_said_once),
        cmocka_unit_test(test_silent_cluster_ends_requests),
        cmocka_unit_test(test_chain_is_as_specified),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
