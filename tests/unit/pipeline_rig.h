/* Up to three data-plane cores, driven by hand: frames are delivered when the test says so, and
 * computations answered with made-up tokens: what is sampled at position n is 1000 + n. */
#ifndef COVEY_TESTS_UNIT_PIPELINE_RIG_H
#define COVEY_TESTS_UNIT_PIPELINE_RIG_H

#include "agent/pipeline.h"
#include "base/util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { CONTEXT = 600, ROW_BYTES = 16, SEEN_MAX = 4096, MS = 1000, SECOND = 1000 * 1000 };

/* What came out of one core and was not yet asked for. */
struct seen {
    struct pipeline_effect effects[PIPELINE_EFFECTS_MAX];
    uint32_t n;
};

struct rig {
    struct pipeline *p[3];
    struct node_id id[3];
    uint64_t now;
    struct seen *seen;        /* [3] */
    uint32_t step_us, row_us; /* what a computation takes */
    struct stage_segment segments[3][STAGE_SEGMENTS_MAX];
};

static inline struct node_id node_of(uint8_t n)
{
    struct node_id id = {{n}};
    return id;
}

static inline void give(struct rig *r, uint32_t at, const struct pipeline_event *event,
                        enum err want)
{
    struct pipeline_update u;
    assert_int_equal(pipeline_step(r->p[at], event, r->now, &u), want);
    struct seen *s = &r->seen[at];
    for (uint32_t i = 0; i < u.n; i++) {
        assert_true(s->n < PIPELINE_EFFECTS_MAX);
        s->effects[s->n] = u.effects[i];
        if (u.effects[i].type == PIPELINE_DO_COMPUTE)
            memcpy(r->segments[at], u.effects[i].compute.segments,
                   u.effects[i].compute.n_segments * sizeof r->segments[at][0]);
        s->n++;
    }
}

static inline const struct pipeline_effect *find(const struct rig *r, uint32_t at,
                                                 enum pipeline_effect_type type)
{
    for (uint32_t i = 0; i < r->seen[at].n; i++) {
        if (r->seen[at].effects[i].type == type)
            return &r->seen[at].effects[i];
    }
    return NULL;
}

static inline const struct pipeline_send *find_send(const struct rig *r, uint32_t at, uint8_t type)
{
    for (uint32_t i = 0; i < r->seen[at].n; i++) {
        const struct pipeline_effect *e = &r->seen[at].effects[i];
        if (e->type == PIPELINE_DO_SEND && e->send.type == type)
            return &e->send;
    }
    return NULL;
}

static inline void forget(struct rig *r, uint32_t at)
{
    r->seen[at].n = 0;
}

static inline void set_up(struct rig *r)
{
    *r = (struct rig){.now = 1000};
    r->seen = calloc(3, sizeof *r->seen);
    assert_non_null(r->seen);
    for (uint32_t i = 0; i < 3; i++) {
        r->id[i] = node_of((uint8_t)(i + 1));
        struct pipeline_options o = {.self = r->id[i]};
        assert_int_equal(pipeline_new(&o, &r->p[i]), ERR_OK);
    }
}

static inline void tear_down(struct rig *r)
{
    for (uint32_t i = 0; i < 3; i++)
        pipeline_free(r->p[i]);
    free(r->seen);
}

/* Stages on nodes 0 to n - 1. */
static inline struct plan plan_of(const struct rig *r, uint32_t n_stages, uint64_t sequence)
{
    struct plan plan = PLAN_INIT;
    plan.epoch.term = 1;
    plan.epoch.sequence = sequence;
    plan.model.bytes[0] = 9;
    plan.n_layers = n_stages;
    plan.context = CONTEXT;
    plan.n_stages = n_stages;
    for (uint32_t i = 0; i < n_stages; i++)
        plan.stages[i] = (struct plan_stage){.node = r->id[i], .first_layer = i, .n_layers = 1};
    plan_seal(&plan);
    return plan;
}

static inline void tell(struct rig *r, uint32_t at, enum pipeline_event_type type,
                        const struct plan *plan)
{
    struct pipeline_event event = {.type = type};
    event.epoch = plan->epoch;
    give(r, at, &event, ERR_OK);
}

static inline void install_kv(struct rig *r, const struct plan *plan, uint32_t instance,
                              uint32_t n_slots, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < plan->n_stages; i++) {
        struct pipeline_event event = {.type = PIPELINE_INSTALL,
                                       .install = {plan, instance, n_slots, ROW_BYTES, n_blocks}};
        give(r, i, &event, ERR_OK);
        tell(r, i, PIPELINE_COMMIT, plan);
    }
}

static inline void install(struct rig *r, const struct plan *plan, uint32_t instance,
                           uint32_t n_slots)
{
    install_kv(r, plan, instance, n_slots, 0);
}

static inline void route(struct rig *r, uint32_t at, const struct plan *plan)
{
    give(r, at, &(struct pipeline_event){.type = PIPELINE_ROUTE, .route = plan}, ERR_OK);
}

static inline void link_event(struct rig *r, uint32_t at, enum pipeline_event_type type,
                              uint32_t other)
{
    give(r, at, &(struct pipeline_event){.type = type, .link = r->id[other]}, ERR_OK);
}

static inline void link_pair(struct rig *r, enum pipeline_event_type type, uint32_t a, uint32_t b)
{
    link_event(r, a, type, b);
    link_event(r, b, type, a);
}

static inline struct pipeline_event submit_of(uint8_t number, const int32_t *prompt,
                                              uint32_t n_prompt, uint32_t max_tokens)
{
    return (struct pipeline_event){.type = PIPELINE_SUBMIT,
                                   .submit = {.request = {{number}},
                                              .model = {{9}},
                                              .prompt = prompt,
                                              .n_prompt = n_prompt,
                                              .sampler = {.max_tokens = max_tokens}}};
}

static inline void submit(struct rig *r, uint32_t at, uint8_t number, const int32_t *prompt,
                          uint32_t n_prompt, uint32_t max_tokens)
{
    struct pipeline_event event = submit_of(number, prompt, n_prompt, max_tokens);
    give(r, at, &event, ERR_OK);
}

/* Hands the frames that `from` sent to `to` over, in order; others stay. */
static inline void deliver(struct rig *r, uint32_t from, uint32_t to)
{
    static _Alignas(FRAME_ALIGN) uint8_t bytes[FRAME_STEP_HEADER_MAX + STAGE_ROWS_MAX * ROW_BYTES];
    struct seen *s = &r->seen[from];
    uint32_t kept = 0, n = s->n;
    for (uint32_t i = 0; i < n; i++) {
        const struct pipeline_effect *e = &s->effects[i];
        if (e->type != PIPELINE_DO_SEND || !node_id_eq(&e->send.to, &r->id[to])) {
            s->effects[kept++] = s->effects[i];
            continue;
        }
        struct frame scratch, f;
        size_t len;
        assert_int_equal(
            frame_encode(pipeline_frame(&e->send, &scratch), bytes, sizeof bytes, &len), ERR_OK);
        memset(bytes + len, 0, e->send.n_row_bytes);
        assert_int_equal(frame_decode(bytes, len + e->send.n_row_bytes, &f), ERR_OK);
        struct pipeline_event event = {.type = PIPELINE_FRAME};
        event.frame.from = r->id[from];
        event.frame.frame = &f;
        give(r, to, &event, ERR_OK);
    }
    s->n = kept;
}

/* Answers the computation under way. */
static inline bool compute(struct rig *r, uint32_t at)
{
    static const float rows[STAGE_ROWS_MAX * ROW_BYTES / sizeof(float)];
    const struct pipeline_effect *e = find(r, at, PIPELINE_DO_COMPUTE);
    if (!e)
        return false;
    struct pipeline_sampled sampled[STAGE_SEGMENTS_MAX] = {{0}};
    uint32_t n = 0;
    for (uint32_t i = 0; i < e->compute.n_segments; i++) {
        const struct stage_segment *s = &r->segments[at][i];
        if (s->logits != STAGE_LOGITS_NONE)
            sampled[n++].id = (int32_t)(1000 + s->position + s->n_rows);
    }
    assert_int_equal(n, e->compute.n_samples);
    struct pipeline_event event = {
        .type = PIPELINE_COMPUTED,
        .computed = {.instance = e->compute.instance,
                     .step = e->compute.step,
                     .rows = e->compute.is_tail ? NULL : rows,
                     .sampled = sampled,
                     .compute_us = r->step_us + r->row_us * e->compute.n_rows}};
    struct seen *s = &r->seen[at];
    uint32_t i = (uint32_t)(e - s->effects);
    memmove(s->effects + i, s->effects + i + 1, (s->n - i - 1) * sizeof s->effects[0]);
    s->n--;
    give(r, at, &event, ERR_OK);
    return true;
}

/* Until nothing moves: frames among the first n nodes, and computations. */
static inline void settle(struct rig *r, uint32_t n)
{
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t a = 0; a < n; a++) {
            for (uint32_t b = 0; b < n; b++) {
                uint32_t before = r->seen[a].n;
                if (a != b)
                    deliver(r, a, b);
                moved = moved || r->seen[a].n != before;
            }
            moved = compute(r, a) || moved;
        }
    }
}

static inline void tick(struct rig *r, uint32_t at)
{
    give(r, at, &(struct pipeline_event){.type = PIPELINE_TICK}, ERR_OK);
}

/* Ticks at every due time up to `until`. */
static inline void pass_time(struct rig *r, uint32_t at, uint64_t until)
{
    for (uint32_t i = 0; i < 1000; i++) {
        uint64_t due = pipeline_next_due(r->p[at]);
        if (due > until)
            break;
        r->now = MAX_OF(r->now, due);
        tick(r, at);
    }
    assert_true(pipeline_next_due(r->p[at]) > until);
    r->now = until;
    tick(r, at);
}

static inline uint32_t count_tokens(const struct rig *r, uint32_t at)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < r->seen[at].n; i++)
        n += r->seen[at].effects[i].type == PIPELINE_DO_TOKEN;
    return n;
}

#endif
