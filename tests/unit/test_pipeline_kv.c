/* The head's use of the KV cache and of steps: sharing, copy on write, eviction, sequences that are
 * put back, fairness, the size of chunks. A context of 600 positions is ten blocks. */
#include "tests/unit/pipeline_rig.h"

enum { PROMPT_MAX = 560, BLOCK = STAGE_BLOCK };

/* Prompts of different `base` begin differently; equal ones are alike for `n_alike` tokens. */
static const int32_t *prompt(int32_t ids[PROMPT_MAX], int32_t base, int32_t n_alike, int32_t rest)
{
    for (int32_t i = 0; i < PROMPT_MAX; i++)
        ids[i] = (i < n_alike ? base : rest) * 10000 + i;
    return ids;
}

static void set_up_one(struct rig *r, struct plan *plan, uint32_t n_slots, uint32_t n_blocks)
{
    set_up(r);
    *plan = plan_of(r, 1, 1);
    install_kv(r, plan, 1, n_slots, n_blocks);
    route(r, 0, plan);
}

static const struct pipeline_effect *end_of(const struct rig *r, uint32_t at, uint8_t number)
{
    for (uint32_t i = 0; i < r->seen[at].n; i++) {
        const struct pipeline_effect *e = &r->seen[at].effects[i];
        if (e->type == PIPELINE_DO_END && e->end.request.bytes[0] == number)
            return e;
    }
    return NULL;
}

static uint32_t used_blocks(const struct rig *r, uint32_t at)
{
    struct pipeline_progress progress;
    pipeline_progress(r->p[at], &progress);
    return progress.n_blocks_used;
}

/* A prompt that begins like what a running sequence has: whole blocks are shared, the last is
 * copied before it is written. */
static void test_running_sequence_is_shared(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct plan plan;
    struct rig r;
    set_up_one(&r, &plan, 4, 0);
    submit(&r, 0, 1, prompt(ids, 1, PROMPT_MAX, 1), 120, 50);
    assert_true(compute(&r, 0));
    uint32_t first[2];
    memcpy(first, r.segments[0][0].blocks, sizeof first);
    submit(&r, 0, 2, prompt(ids, 1, 100, 2), 120, 50);
    assert_null(find(&r, 0, PIPELINE_DO_COPY_BLOCK));
    assert_true(compute(&r, 0)); /* the next step is the first with both */
    const struct pipeline_effect *copy = find(&r, 0, PIPELINE_DO_COPY_BLOCK);
    const struct pipeline_effect *step = find(&r, 0, PIPELINE_DO_COMPUTE);
    assert_true(copy && step && copy < step);
    assert_int_equal(step->compute.n_segments, 2);
    const struct stage_segment *a = &r.segments[0][0], *b = &r.segments[0][1];
    assert_int_equal(b->position, 100);
    assert_int_equal(b->n_rows, 20);
    assert_int_equal(a->blocks[0], first[0]);
    assert_int_equal(b->blocks[0], first[0]);
    /* Who writes first takes the copy; in the end each writes a block of its own. */
    assert_int_equal(copy->copy_block.from, first[1]);
    assert_true(a->blocks[1] != b->blocks[1]);
    assert_true(copy->copy_block.to == a->blocks[1] || copy->copy_block.to == b->blocks[1]);
    assert_int_equal(used_blocks(&r, 0), 3);
    settle(&r, 1);
    assert_int_equal(end_of(&r, 0, 1)->end.timings.n_cached, 0);
    assert_int_equal(end_of(&r, 0, 2)->end.timings.n_cached, 100);
    assert_int_equal(count_tokens(&r, 0), 100);
    tear_down(&r);
}

/* The entry is elsewhere and hears it from the head. */
static void test_entry_hears_what_was_held(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 2);
    link_pair(&r, PIPELINE_LINK_UP, 1, 2);
    install_kv(&r, &plan, 1, 4, 0);
    route(&r, 2, &plan);
    submit(&r, 2, 1, prompt(ids, 1, PROMPT_MAX, 1), 200, 5);
    settle(&r, 3);
    submit(&r, 2, 2, prompt(ids, 1, 150, 2), 200, 5);
    settle(&r, 3);
    assert_int_equal(end_of(&r, 2, 1)->end.timings.n_cached, 0);
    assert_int_equal(end_of(&r, 2, 2)->end.timings.n_cached, 150);
    assert_int_equal(used_blocks(&r, 0), used_blocks(&r, 1));
    tear_down(&r);
}

static uint32_t cached_of(struct rig *r, uint8_t number, int32_t base)
{
    int32_t ids[PROMPT_MAX];
    forget(r, 0);
    submit(r, 0, number, prompt(ids, base, PROMPT_MAX, base), 120, 2);
    settle(r, 1);
    return end_of(r, 0, number)->end.timings.n_cached;
}

/* Idle slots go when blocks are needed, the one unused for longest first. */
static void test_oldest_idle_slot_goes_first(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct plan plan;
    struct rig r;
    set_up_one(&r, &plan, 64, 10);
    for (uint8_t i = 1; i <= 4; i++) { /* 120 tokens and an answer: two blocks each */
        r.now += SECOND;
        assert_int_equal(cached_of(&r, i, i), 0);
    }
    assert_int_equal(used_blocks(&r, 0), 8);
    r.now += SECOND;
    assert_int_equal(cached_of(&r, 5, 1), 119); /* the oldest is used again, by two slots now */
    r.now += SECOND;
    forget(&r, 0);
    submit(&r, 0, 6, prompt(ids, 9, PROMPT_MAX, 9), 250, 2); /* four blocks */
    settle(&r, 1);
    r.now += SECOND;
    assert_int_equal(cached_of(&r, 7, 1), 119);
    r.now += SECOND;
    assert_int_equal(cached_of(&r, 8, 4), 119);
    r.now += SECOND;
    assert_int_equal(cached_of(&r, 9, 2), 0);
    tear_down(&r);
}

/* Each token of each request once and in order. */
static void check_tokens(const struct rig *r, uint8_t number, uint32_t n)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < r->seen[0].n; i++) {
        const struct pipeline_effect *e = &r->seen[0].effects[i];
        if (e->type != PIPELINE_DO_TOKEN || e->token.request.bytes[0] != number)
            continue;
        assert_int_equal(e->token.index, next);
        assert_int_equal(e->token.sampled.id, 1000 + e->token.position);
        next++;
    }
    assert_int_equal(next, n);
}

/* Two that fit as they begin and not as they end: the later one is put back, and nobody notices. */
static void test_last_one_is_put_back_when_blocks_run_out(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct plan plan;
    struct rig r;
    struct pipeline_progress progress;
    set_up_one(&r, &plan, 64, 10);
    submit(&r, 0, 1, prompt(ids, 1, PROMPT_MAX, 1), 200, 300);
    submit(&r, 0, 2, prompt(ids, 2, PROMPT_MAX, 2), 200, 300);
    submit(&r, 0, 3, prompt(ids, 3, PROMPT_MAX, 3), 20, 3); /* no room: after them */
    settle(&r, 1);
    pipeline_progress(r.p[0], &progress);
    assert_true(progress.n_preempted >= 1);
    assert_int_equal(progress.n_slots_used, 0);
    check_tokens(&r, 1, 300);
    check_tokens(&r, 2, 300);
    check_tokens(&r, 3, 3);
    assert_true(end_of(&r, 0, 1) < end_of(&r, 0, 2));
    for (uint8_t i = 1; i <= 3; i++) {
        assert_int_equal(end_of(&r, 0, i)->end.err, ERR_OK);
        assert_int_equal(end_of(&r, 0, i)->end.timings.n_attempts, 1);
    }
    tear_down(&r);
}

/* Of requests with one long beginning the first computes it, the others wait for it and share. */
static void test_prefix_that_comes_is_waited_for(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct plan plan;
    struct rig r;
    set_up_one(&r, &plan, 64, 0);
    for (uint8_t i = 1; i <= 5; i++)
        submit(&r, 0, i, prompt(ids, 1, 500, i + 10), 520, 2);
    uint32_t n_rows = 0;
    for (const struct pipeline_effect *e; (e = find(&r, 0, PIPELINE_DO_COMPUTE));) {
        n_rows += e->compute.n_rows;
        assert_true(compute(&r, 0));
    }
    assert_int_equal(n_rows, 500 + 5 * (20 + 1));
    for (uint8_t i = 1; i <= 5; i++)
        assert_int_equal(end_of(&r, 0, i)->end.timings.n_cached, i == 1 ? 0 : 500);
    tear_down(&r);
}

static void test_what_can_never_fit_is_refused(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct plan plan;
    struct rig r;
    set_up_one(&r, &plan, 64, 5); /* half of the context */
    submit(&r, 0, 1, prompt(ids, 1, PROMPT_MAX, 1), 200, 0);
    assert_int_equal(end_of(&r, 0, 1)->end.err, ERR_LIMIT);
    assert_true(strlen(end_of(&r, 0, 1)->end.text) > 0);
    submit(&r, 0, 2, ids, 200, 121);
    assert_int_equal(end_of(&r, 0, 2)->end.err, ERR_LIMIT);
    submit(&r, 0, 3, ids, 200, 120); /* 320 positions, to the last */
    settle(&r, 1);
    assert_int_equal(end_of(&r, 0, 3)->end.err, ERR_OK);
    check_tokens(&r, 3, 120);
    tear_down(&r);
}

/* Long prompts go in turn, a chunk each. */
static void test_prompts_take_turns(void **state)
{
    (void)state;
    int32_t ids[3][PROMPT_MAX];
    struct plan plan;
    struct rig r;
    set_up_one(&r, &plan, 64, 0);
    for (uint8_t i = 0; i < 3; i++)
        submit(&r, 0, (uint8_t)(i + 1), prompt(ids[i], i + 1, PROMPT_MAX, i + 1), 500, 1);
    uint32_t done[3] = {0};
    for (const struct pipeline_effect *e; (e = find(&r, 0, PIPELINE_DO_COMPUTE));) {
        assert_true(e->compute.n_rows <= PIPELINE_CHUNK_ROWS);
        for (uint32_t i = 0; i < e->compute.n_segments; i++) {
            const struct stage_segment *s = &r.segments[0][i];
            done[s->token_ids[0] / 10000 - 1] += s->n_rows;
        }
        uint32_t most = MAX_OF(done[0], MAX_OF(done[1], done[2]));
        uint32_t least = MIN_OF(done[0], MIN_OF(done[1], done[2]));
        if (most < 500)
            assert_true(most - least <= PIPELINE_CHUNK_ROWS);
        assert_true(compute(&r, 0));
    }
    assert_int_equal(count_tokens(&r, 0), 3);
    tear_down(&r);
}

/* While somebody waits for tokens, a prompt gets so many rows that a step takes twice as long at
 * most; alone it gets whole chunks. */
static void test_prompt_does_not_slow_streams_more_than_twofold(void **state)
{
    (void)state;
    static const uint32_t times[][2] = {{5000, 100}, {2000, 400}, {900, 1000}, {20000, 30}};
    int32_t ids[PROMPT_MAX];
    for (size_t k = 0; k < ARRAY_LEN(times); k++) {
        struct plan plan;
        struct rig r;
        set_up_one(&r, &plan, 64, 0);
        r.step_us = times[k][0];
        r.row_us = times[k][1];
        uint32_t token_us = r.step_us + r.row_us, n_steps = 0;
        submit(&r, 0, 1, prompt(ids, 1, PROMPT_MAX, 1), 300, 290);
        assert_int_equal(find(&r, 0, PIPELINE_DO_COMPUTE)->compute.n_rows, PIPELINE_CHUNK_ROWS);
        for (uint32_t i = 0; i < 10; i++)
            assert_true(compute(&r, 0));
        submit(&r, 0, 2, prompt(ids, 2, PROMPT_MAX, 2), 250, 1);
        assert_true(compute(&r, 0));
        while (!end_of(&r, 0, 2)) {
            uint32_t n_rows = find(&r, 0, PIPELINE_DO_COMPUTE)->compute.n_rows;
            assert_int_equal(r.segments[0][0].n_rows, 1);
            assert_int_equal(r.segments[0][0].token_ids[0] / 1000, 1); /* of the first */
            /* one row more than that there must be, or the prompt would never end */
            assert_true(r.step_us + r.row_us * n_rows <= 2 * token_us || n_rows == 2);
            n_steps++;
            assert_true(compute(&r, 0));
        }
        assert_true(n_steps >= 2);
        tear_down(&r);
    }
}

/* After a break: no block is in two slots at the head, and the stages hear what each slot has. */
static void test_stream_begins_with_slots_that_share_nothing(void **state)
{
    (void)state;
    int32_t ids[PROMPT_MAX];
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    install_kv(&r, &plan, 1, 4, 0);
    route(&r, 0, &plan);
    submit(&r, 0, 1, prompt(ids, 1, PROMPT_MAX, 1), 200, 3);
    settle(&r, 2);
    submit(&r, 0, 2, prompt(ids, 1, 130, 2), 300, 3); /* longer, shares two blocks */
    settle(&r, 2);
    assert_int_equal(used_blocks(&r, 0), 4 + 5 - 2);
    link_pair(&r, PIPELINE_LINK_DOWN, 0, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    forget(&r, 0);
    forget(&r, 1);
    submit(&r, 0, 3, prompt(ids, 5, PROMPT_MAX, 5), 20, 3);
    deliver(&r, 0, 1); /* the start */
    deliver(&r, 1, 0); /* what the stage holds */
    assert_true(compute(&r, 0));
    const struct pipeline_send *step = find_send(&r, 0, FRAME_STEP);
    assert_non_null(step);
    const struct frame_step *s = &step->step->step;
    assert_int_equal(s->n_controls, 5);
    assert_int_equal(s->controls[0].kind, FRAME_FREE); /* the shorter of the two */
    assert_int_equal(s->controls[1].kind, FRAME_CUT);
    assert_int_equal(s->controls[1].n, 302);
    assert_int_equal(s->controls[2].kind, FRAME_FREE);
    assert_int_equal(s->controls[3].kind, FRAME_FREE);
    assert_int_equal(s->controls[4].kind, FRAME_ADMIT);
    settle(&r, 2);
    assert_int_equal(used_blocks(&r, 0), 5 + 1);
    assert_int_equal(used_blocks(&r, 1), 5 + 1);
    assert_int_equal(end_of(&r, 0, 3)->end.err, ERR_OK);
    tear_down(&r);
}

static void step_to_tail(struct rig *r, const struct plan *plan, uint64_t number,
                         const struct frame_control *controls, uint16_t n)
{
    struct frame *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->header = (struct frame_header){.type = FRAME_STEP,
                                      .epoch = epoch_alias(&plan->epoch),
                                      .step = number,
                                      .boundary = 1,
                                      .slice_n = 1};
    f->step.n_controls = n;
    if (n > 0)
        memcpy(f->step.controls, controls, n * sizeof controls[0]);
    struct pipeline_event event = {.type = PIPELINE_FRAME};
    event.frame.from = r->id[0];
    event.frame.frame = f;
    give(r, 1, &event, ERR_OK);
    free(f);
}

/* A head that shares what is not there ends its own stream, nothing else. */
static void test_stage_refuses_to_share_what_is_not_there(void **state)
{
    (void)state;
    const struct frame_control admit = {
        .kind = FRAME_ADMIT, .attempt = 1, .slot = 1, .n = 100, .request = {{7}}};
    const struct frame_control bad[] = {
        {.kind = FRAME_SHARE, .from = 0, .slot = 1, .n = 1, .request = {{7}}}, /* it has none */
        {.kind = FRAME_SHARE, .from = 1, .slot = 1, .n = 0, .request = {{7}}},
        {.kind = FRAME_SHARE, .from = 4, .slot = 1, .n = 0, .request = {{7}}},
        {.kind = FRAME_SHARE, .from = 0, .slot = 4, .n = 0, .request = {{7}}},
        {.kind = FRAME_SHARE, .from = 0, .slot = 2, .n = 0, .request = {{7}}}, /* not admitted */
        {.kind = FRAME_SHARE, .from = 0, .slot = 1, .n = 0, .request = {{8}}}, /* another's */
        {.kind = FRAME_FREE, .attempt = 1, .slot = 4, .request = {{0}}},
        {.kind = FRAME_CUT, .attempt = 2, .slot = 1, .request = {{7}}},
        {.kind = FRAME_ADMIT, .attempt = 1, .slot = 2, .n = 601, .request = {{7}}},
        {.kind = FRAME_ADMIT, .attempt = 1, .slot = 1, .n = 10, .request = {{9}}},
    };
    struct rig r;
    set_up(&r);
    struct plan plan = plan_of(&r, 2, 1);
    link_pair(&r, PIPELINE_LINK_UP, 0, 1);
    install_kv(&r, &plan, 1, 4, 0);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        step_to_tail(&r, &plan, 10 * i + 1, NULL, 0); /* a new stream */
        const struct frame_control controls[2] = {admit, bad[i]};
        forget(&r, 1);
        step_to_tail(&r, &plan, 10 * i + 2, controls, 1);
        assert_non_null(find_send(&r, 1, FRAME_CREDIT));
        assert_null(find_send(&r, 1, FRAME_ERROR));
        step_to_tail(&r, &plan, 10 * i + 3, controls + 1, 1);
        assert_non_null(find_send(&r, 1, FRAME_ERROR));
        assert_int_equal(find_send(&r, 1, FRAME_ERROR)->error.code, FRAME_E_CORRUPT);
    }
    tear_down(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_running_sequence_is_shared),
        cmocka_unit_test(test_entry_hears_what_was_held),
        cmocka_unit_test(test_oldest_idle_slot_goes_first),
        cmocka_unit_test(test_last_one_is_put_back_when_blocks_run_out),
        cmocka_unit_test(test_prefix_that_comes_is_waited_for),
        cmocka_unit_test(test_what_can_never_fit_is_refused),
        cmocka_unit_test(test_prompts_take_turns),
        cmocka_unit_test(test_prompt_does_not_slow_streams_more_than_twofold),
        cmocka_unit_test(test_stream_begins_with_slots_that_share_nothing),
        cmocka_unit_test(test_stage_refuses_to_share_what_is_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
