/* One stage of one epoch: takes steps in order, applies their controls, computes their rows and
 * passes them on; at the tail samples become tokens. */
#include "agent/pipeline_internal.h"

#include "base/util.h"

#include <assert.h>
#include <string.h>

enum { ERROR_AGAIN_US = 100 * 1000 };

uint64_t predicted_us(const struct plan *plan, uint32_t n_steps, uint32_t n_rows)
{
    double us = n_steps * plan->predicted_token_us + n_rows * plan->predicted_prefill_us;
    if (!(us > 0)) /* nothing predicted, or no number */
        return 0;
    return us < 600e6 ? (uint64_t)us : (uint64_t)600e6;
}

static const struct node_id *stage_node(const struct run *run, uint32_t stage)
{
    return &run->plan.stages[stage].node;
}

static const struct request_id no_request;

static bool is_start(const struct frame *f)
{
    return f->step.n_controls == 0 && f->header.n_segments == 0;
}

void stage_quit(struct pipeline *p, struct run *run)
{
    run->broken = true;
    run->error_at = p->now;
    ring_flush(run);
}

void stage_break(struct pipeline *p, struct run *run, enum err e)
{
    if (run_is_head(run)) {
        head_break(p, run, e);
        return;
    }
    if (run->broken)
        return;
    stage_quit(p, run);
    send_error(p, run_head(run), run->alias, run->stream_step, &no_request, 0, e);
}

/* --- steps that arrive --- */

static bool shape_ok(const struct run *run, const struct frame *f)
{
    const struct frame_header *h = &f->header;
    if (h->n_segments > STAGE_SEGMENTS_MAX || h->n_rows > STAGE_ROWS_MAX ||
        f->step.n_controls > FRAME_CONTROLS_MAX)
        return false;
    if (h->boundary != run->plan.stages[run->my_stage].first_layer)
        return false;
    uint32_t n_rows = 0;
    for (uint32_t i = 0; i < h->n_segments; i++) {
        const struct frame_segment *s = &f->step.segments[i];
        if (s->n == 0 || s->n > STAGE_ROWS_MAX || s->flags & FRAME_SEGMENT_LOGITS_ALL)
            return false;
        n_rows += s->n;
    }
    return n_rows == h->n_rows && (n_rows == 0 || (h->row_bytes == run->row_bytes && f->step.rows));
}

static void entry_fill(struct ring_entry *e, const struct frame *f)
{
    struct frame_step *s = &e->frame.step;
    e->frame.header = f->header;
    s->n_controls = f->step.n_controls;
    s->rows = NULL;
    memcpy(s->controls, f->step.controls, s->n_controls * sizeof s->controls[0]);
    memcpy(s->segments, f->step.segments, f->header.n_segments * sizeof s->segments[0]);
    int32_t *to = e->tokens;
    for (uint32_t i = 0; i < f->header.n_segments; i++) {
        memcpy(to, s->segments[i].token_ids, s->segments[i].n * sizeof *to);
        s->segments[i].token_ids = to;
        to += s->segments[i].n;
    }
    e->rows = f->step.rows;
}

static enum err enqueue(struct pipeline *p, struct run *run, const struct frame *f)
{
    struct ring_entry *e = shape_ok(run, f) ? ring_push(run) : NULL;
    if (!e) {
        stage_break(p, run, ERR_CORRUPT);
        return ERR_CORRUPT;
    }
    entry_fill(e, f);
    run->expected = f->header.step + 1;
    return ERR_OK;
}

enum err stage_on_step(struct pipeline *p, struct run *run, const struct node_id *from,
                       const struct frame *f)
{
    uint64_t step = f->header.step;
    if (run_is_head(run) || !node_id_eq(from, stage_node(run, run->my_stage - 1)) ||
        step == UINT64_MAX)
        return ERR_CORRUPT;
    run->last_use = p->now;
    if (step < run->expected)
        return ERR_OK; /* of a stream that is over */
    if (is_start(f)) {
        ring_flush(run);
        run->broken = false;
        run->stream_step = step;
        return enqueue(p, run, f);
    }
    if (!run->broken && step == run->expected && run->stream_step > 0)
        return enqueue(p, run, f);
    if (!run->broken) {
        stage_break(p, run, ERR_STALE); /* something was lost on the way */
    } else if (p->now - run->error_at >= ERROR_AGAIN_US) {
        run->error_at = p->now;
        send_error(p, run_head(run), run->alias, step, &no_request, 0, ERR_STALE);
    }
    return ERR_OK;
}

static void open_slot(struct slot *slot, const struct pending_open *open)
{
    slot->opened = true;
    slot->sampler = open->sampler;
    slot->token_to = open->token_to;
    slot->token_limit = open->token_limit;
}

/* The head tells the tail how to sample; this may come before or after the ADMIT. A second one for
 * a slot that knows already is for the next ADMIT of a sequence that was put back. */
void stage_on_open(struct pipeline *p, struct run *run, const struct frame *f)
{
    const struct frame_open *o = &f->open;
    struct pending_open open = {true,       p->now,   o->request,    o->attempt,
                                o->sampler, o->entry, o->context_max};
    run->last_use = p->now;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        if (slot->active && !slot->opened && slot->attempt == o->attempt &&
            request_id_eq(&slot->request, &o->request)) {
            open_slot(slot, &open);
            return;
        }
    }
    struct pending_open *to = &run->opens[0];
    for (uint32_t i = 0; i < PENDING_OPENS_MAX && to->used; i++) {
        if (!run->opens[i].used || run->opens[i].at < to->at)
            to = &run->opens[i]; /* free, or the oldest */
    }
    *to = open;
}

void stage_on_link_down(struct pipeline *p, struct run *run, const struct node_id *id)
{
    if (run_is_head(run))
        return;
    bool is_last = run_is_tail(run);
    if (node_id_eq(id, stage_node(run, run->my_stage - 1)) ||
        (is_last ? node_id_eq(id, run_head(run))
                 : node_id_eq(id, stage_node(run, run->my_stage + 1))))
        stage_break(p, run, ERR_CLOSED);
}

/* --- executing --- */

static struct slot *slot_find(struct run *run, const struct request_id *request, uint32_t attempt)
{
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        if (slot->active && slot->attempt == attempt && request_id_eq(&slot->request, request))
            return slot;
    }
    return NULL;
}

static enum err admit(struct run *run, const struct frame_control *c)
{
    if (c->slot >= run->n_slots || c->n == 0 || c->n > run->plan.context)
        return ERR_CORRUPT;
    struct slot *slot = &run->slots[c->slot];
    if (slot->active)
        return ERR_CORRUPT;
    TRY(slot_reserve(run, slot, c->n));
    slot->active = true;
    slot->request = c->request;
    slot->attempt = c->attempt;
    slot->limit = c->n;
    slot->opened = false;
    for (uint32_t i = 0; run->opens && i < PENDING_OPENS_MAX; i++) {
        struct pending_open *open = &run->opens[i];
        if (open->used && open->attempt == c->attempt &&
            request_id_eq(&open->request, &c->request)) {
            open_slot(slot, open);
            open->used = false;
        }
    }
    return ERR_OK;
}

static enum err share(struct run *run, const struct frame_control *c)
{
    if (c->slot >= run->n_slots || c->from >= run->n_slots || c->slot == c->from)
        return ERR_CORRUPT;
    const struct slot *from = &run->slots[c->from];
    struct slot *to = &run->slots[c->slot];
    if (!to->active || !request_id_eq(&to->request, &c->request) || c->n > from->n ||
        c->n > to->limit)
        return ERR_CORRUPT;
    return slot_share(run, from, to, c->n);
}

/* CUT and FREE. */
static enum err leave(struct run *run, const struct frame_control *c)
{
    if (c->slot >= run->n_slots)
        return ERR_CORRUPT;
    struct slot *slot = &run->slots[c->slot];
    bool whoever = c->kind == FRAME_FREE && request_id_eq(&c->request, &no_request);
    if (!whoever && (slot->attempt != c->attempt || !request_id_eq(&slot->request, &c->request)))
        return ERR_CORRUPT;
    slot->active = false;
    slot_truncate(run, slot, c->kind == FRAME_CUT ? c->n : 0);
    return ERR_OK;
}

static enum err apply_controls(struct run *run, const struct frame *f)
{
    for (uint32_t i = 0; i < f->step.n_controls; i++) {
        const struct frame_control *c = &f->step.controls[i];
        TRY(c->kind == FRAME_ADMIT   ? admit(run, c)
            : c->kind == FRAME_SHARE ? share(run, c)
                                     : leave(run, c));
    }
    return ERR_OK;
}

/* The slots of the segments. ERR_AGAIN: the tail does not know yet how to sample. */
static enum err find_segments(struct run *run, struct ring_entry *e)
{
    const struct frame *f = &e->frame;
    uint64_t seen = 0;
    for (uint32_t i = 0; i < f->header.n_segments; i++) {
        const struct frame_segment *s = &f->step.segments[i];
        struct slot *slot = slot_find(run, &s->request, s->attempt);
        if (!slot || s->position > slot->n || s->kv_len != s->position ||
            s->n > slot->limit - MIN_OF(slot->limit, s->position))
            return ERR_CORRUPT;
        uint32_t at = (uint32_t)(slot - run->slots);
        struct hash128 hash = slot_hash_at(run, slot, s->position);
        if (seen >> at & 1 || memcmp(&hash, &s->prefix_hash, sizeof hash) != 0)
            return ERR_CORRUPT;
        seen |= UINT64_C(1) << at;
        if (run_is_tail(run) && s->flags & FRAME_SEGMENT_LOGITS_LAST && !slot->opened)
            return ERR_AGAIN;
        e->slot_of[i] = at;
    }
    return ERR_OK;
}

/* Blocks for all rows, then the rows: tokens without KV would be told as KV. */
static enum err place_segments(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    TRY(find_segments(run, e));
    const struct frame *f = &e->frame;
    enum err err = ERR_OK;
    uint32_t n = 0;
    for (; n < f->header.n_segments && err == ERR_OK; n++) {
        const struct frame_segment *s = &f->step.segments[n];
        slot_truncate(run, &run->slots[e->slot_of[n]], s->position);
        err = slot_grow(p, run, &run->slots[e->slot_of[n]], s->n);
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct frame_segment *s = &f->step.segments[i];
        struct slot *slot = &run->slots[e->slot_of[i]];
        if (err == ERR_OK)
            slot_append(slot, s->token_ids, s->n);
        else
            kv_cut(&run->pool, &slot->table, slot->n);
    }
    return err;
}

static void forward(struct pipeline *p, struct run *run, struct ring_entry *e, const float *rows)
{
    struct frame_header *h = &e->frame.header;
    uint32_t next = run->my_stage + 1;
    struct pipeline_send *send =
        send_new(p, stage_node(run, next), FRAME_STEP, run->alias, h->step);
    if (!send) {
        stage_break(p, run, ERR_CLOSED);
        return;
    }
    h->boundary = (uint16_t)run->plan.stages[next].first_layer;
    h->row_bytes = h->n_rows ? run->row_bytes : 0;
    send->step = &e->frame;
    send->rows = h->n_rows ? rows : NULL;
    send->n_row_bytes = (size_t)h->n_rows * h->row_bytes;
}

static void credit(struct pipeline *p, struct run *run, uint64_t step)
{
    if (run_is_head(run)) {
        head_on_credit(p, run, step);
        return;
    }
    struct pipeline_send *send = send_new(p, run_head(run), FRAME_CREDIT, run->alias, step);
    if (send)
        send->credit.n_steps = 1;
    else
        stage_break(p, run, ERR_CLOSED);
}

static void pass_on(struct pipeline *p, struct run *run, struct ring_entry *e, const float *rows)
{
    if (run_is_tail(run))
        credit(p, run, e->frame.header.step);
    else
        forward(p, run, e, rows);
}

void pipeline_stage_pass(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    e->state = RING_SPENT;
    pass_on(p, run, e, NULL);
}

static void say_have(struct pipeline *p, struct run *run, const struct slot *slot)
{
    struct pipeline_send *send =
        send_new(p, run_head(run), FRAME_HAVE, run->alias, run->stream_step);
    if (!send || !slot)
        return;
    send->have.request = slot->request;
    send->have.attempt = slot->attempt;
    send->have.n = slot->n;
    send->have.hash = slot->hash;
    send->have.slot = (uint32_t)(slot - run->slots);
}

static void start_stream(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    e->state = RING_SPENT;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        run->slots[i].active = false;
        if (run->slots[i].n > 0)
            say_have(p, run, &run->slots[i]);
    }
    say_have(p, run, NULL);
    if (!run_is_tail(run))
        forward(p, run, e, NULL);
}

static void execute(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    enum err err = e->controls_done ? ERR_OK : apply_controls(run, &e->frame);
    e->controls_done = true;
    if (err == ERR_OK)
        err = place_segments(p, run, e);
    if (err == ERR_AGAIN) {
        if (e->waits_since == 0)
            e->waits_since = p->now;
        return;
    }
    e->waits_since = 0;
    if (err != ERR_OK) {
        stage_break(p, run, err);
        return;
    }
    if (e->frame.header.n_segments > 0) {
        stage_compute(p, run, e);
        return;
    }
    pipeline_stage_pass(p, run, e);
}

void stage_pump(struct pipeline *p, struct run *run)
{
    for (uint32_t i = 0; i < run->ring_n && !p->busy.on; i++) {
        struct ring_entry *e = ring_at(run, i);
        if (e->state == RING_SPENT)
            continue;
        if (effects_room(p) < EFFECTS_ROOM) {
            p->more = true;
            return;
        }
        if (is_start(&e->frame))
            start_stream(p, run, e);
        else
            execute(p, run, e);
        if (i < run->ring_n && ring_at(run, i)->state == RING_QUEUED)
            return; /* waits for an OPEN */
    }
}

static void add_sample(struct pipeline *p, struct run *run, uint32_t segment, uint32_t at,
                       uint32_t position)
{
    const struct slot *slot = &run->slots[at];
    p->sample_slots[p->n_samples] = at;
    p->samples[p->n_samples++] = (struct pipeline_sample){
        .segment = segment,
        .position = position,
        .sampler = &slot->sampler,
        .history = slot->tokens,
        .n_history = position,
    };
}

void stage_compute(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    assert(!p->busy.on);
    const struct frame *f = &e->frame;
    p->n_samples = 0;
    for (uint32_t i = 0; i < f->header.n_segments; i++) {
        const struct frame_segment *s = &f->step.segments[i];
        bool logits = run_is_tail(run) && s->flags & FRAME_SEGMENT_LOGITS_LAST;
        p->segments[i] = (struct stage_segment){
            .blocks = run->slots[e->slot_of[i]].table.blocks,
            .position = s->position,
            .n_rows = s->n,
            .token_ids = s->token_ids,
            .logits = logits ? STAGE_LOGITS_LAST : STAGE_LOGITS_NONE,
        };
        if (logits)
            add_sample(p, run, i, e->slot_of[i], s->position + s->n);
    }
    e->state = RING_COMPUTING;
    p->busy.on = true;
    p->busy.instance = run->instance;
    p->busy.epoch = run->alias;
    p->busy.step = f->header.step;
    p->busy.since = p->now;
    p->busy.run = run;
    struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_COMPUTE);
    effect->compute = (struct pipeline_compute){
        .instance = run->instance,
        .epoch = run->alias,
        .step = f->header.step,
        .n_segments = f->header.n_segments,
        .n_rows = f->header.n_rows,
        .segments = p->segments,
        .rows_in = run_is_head(run) ? NULL : e->rows,
        .is_tail = run_is_tail(run),
        .n_samples = p->n_samples,
        .samples = p->samples,
    };
}

/* --- results --- */

static uint8_t finish_of(const struct slot *slot, int32_t id, uint32_t position)
{
    const struct frame_sampler *s = &slot->sampler;
    if (!(s->flags & FRAME_SAMPLER_IGNORE_END)) {
        for (uint32_t i = 0; i < s->n_end_ids; i++) {
            if (s->end_ids[i] == id)
                return FRAME_END_TOKEN;
        }
    }
    return position + 1 >= slot->token_limit ? FRAME_LENGTH : FRAME_GOES_ON;
}

static bool send_token(struct pipeline *p, struct run *run, const struct node_id *to, uint64_t step,
                       const struct frame_token *token)
{
    struct pipeline_send *send = send_new(p, to, FRAME_TOKEN, run->alias, step);
    if (send)
        send->token = *token;
    return send != NULL;
}

/* The head first: it can schedule the next step. */
static void tell_token(struct pipeline *p, struct run *run, const struct node_id *to, uint64_t step,
                       const struct frame_token *token)
{
    const struct node_id *head = run_head(run);
    if (is_self(p, head))
        head_on_token(p, run, step, token);
    else if (!send_token(p, run, head, step, token))
        stage_break(p, run, ERR_CLOSED);
    if (is_self(p, to)) {
        entry_on_token(p, &p->self, run->alias, token);
        relay_on_token(p, &p->self, run->alias, token);
    } else if ((is_self(p, head) || !node_id_eq(to, head)) &&
               !send_token(p, run, to, step, token)) {
        struct frame_error error = {token->request, token->attempt, frame_error_of(ERR_CLOSED)};
        if (is_self(p, head))
            head_on_error(p, run, step, &error);
        else
            send_error(p, head, run->alias, step, &error.request, error.attempt, ERR_CLOSED);
    }
}

static void take_samples(struct pipeline *p, struct run *run, const struct ring_entry *e,
                         const struct pipeline_sampled *sampled)
{
    uint64_t step = e->frame.header.step;
    uint32_t n_samples = p->n_samples; /* a token may make other things happen, but no COMPUTE */
    for (uint32_t i = 0; i < n_samples; i++) {
        const struct frame_segment *s = &e->frame.step.segments[p->samples[i].segment];
        const struct slot *slot = &run->slots[p->sample_slots[i]];
        struct frame_token token = {
            .request = s->request,
            .attempt = s->attempt,
            .position = p->samples[i].position,
            .id = sampled[i].id,
            .finish = finish_of(slot, sampled[i].id, p->samples[i].position),
            .n_logprobs = MIN_OF(sampled[i].n_logprobs, FRAME_LOGPROBS_MAX),
            .logprob = sampled[i].logprob,
        };
        memcpy(token.top_ids, sampled[i].top_ids, sizeof token.top_ids);
        memcpy(token.top_logprobs, sampled[i].top_logprobs, sizeof token.top_logprobs);
        struct node_id to = slot->token_to;
        tell_token(p, run, &to, step, &token);
    }
    if (n_samples == 0 || run_is_head(run))
        credit(p, run, step);
}

static void measure(struct pipeline *p, struct run *run, const struct ring_entry *e, uint32_t us)
{
    uint32_t n_prompt_rows = 0;
    for (uint32_t i = 0; i < e->frame.header.n_segments; i++) {
        const struct frame_segment *s = &e->frame.step.segments[i];
        n_prompt_rows += s->flags & FRAME_SEGMENT_PREFILL ? s->n : 0;
    }
    head_measure(run, n_prompt_rows, e->frame.header.n_rows, us);
    run->n_prefill_rows += n_prompt_rows;
    run->n_decode_steps += n_prompt_rows == 0;
    *(n_prompt_rows ? &run->stats_prefill_us : &run->stats_decode_us) += us;
    if (p->now - run->stats_at < STATS_US)
        return;
    struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_STATS);
    effect->stats.epoch = run->plan.epoch;
    effect->stats.stage = run->my_stage;
    effect->stats.n_decode_steps = run->n_decode_steps;
    effect->stats.n_prefill_rows = run->n_prefill_rows;
    effect->stats.decode_us = run->stats_decode_us;
    effect->stats.prefill_us = run->stats_prefill_us;
    run->stats_at = p->now;
    run->n_decode_steps = run->n_prefill_rows = 0;
    run->stats_decode_us = run->stats_prefill_us = 0;
}

static struct ring_entry *computing(struct run *run)
{
    for (uint32_t i = 0; i < run->ring_n; i++) {
        if (ring_at(run, i)->state == RING_COMPUTING)
            return ring_at(run, i);
    }
    return NULL;
}

/* The computation is over; its entry, or NULL when its epoch was retired meanwhile. */
static enum err end_compute(struct pipeline *p, uint32_t instance, uint64_t step,
                            struct run **ret_run, struct ring_entry **ret)
{
    if (!p->busy.on || p->busy.instance != instance || p->busy.step != step)
        return ERR_INVALID;
    struct run *run = p->busy.run;
    p->busy.on = false;
    p->busy.run = NULL;
    p->steps_done++;
    *ret_run = run;
    *ret = NULL;
    if (!run) {
        struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_RELEASE);
        effect->release.instance = instance;
        effect->release.epoch = p->busy.retired;
        return ERR_OK;
    }
    run->last_use = p->now;
    *ret = computing(run);
    assert(*ret);
    (*ret)->state = RING_SPENT;
    return ERR_OK;
}

enum err stage_on_computed(struct pipeline *p, const struct pipeline_computed *c)
{
    struct run *run;
    struct ring_entry *e;
    TRY(end_compute(p, c->instance, c->step, &run, &e));
    if (!e)
        return ERR_OK;
    measure(p, run, e, c->compute_us);
    if (e->dropped)
        return ERR_OK;
    if (!run_is_tail(run)) {
        assert(c->rows);
        forward(p, run, e, c->rows);
        return ERR_OK;
    }
    assert(c->sampled || p->n_samples == 0);
    take_samples(p, run, e, c->sampled);
    return ERR_OK;
}

enum err stage_on_failed(struct pipeline *p, uint32_t instance, uint64_t step, enum err err)
{
    struct run *run;
    struct ring_entry *e;
    TRY(end_compute(p, instance, step, &run, &e));
    if (!e)
        return ERR_OK;
    /* What was being written is not there. */
    for (uint32_t i = 0; i < e->frame.header.n_segments; i++)
        slot_truncate(run, &run->slots[e->slot_of[i]], e->frame.step.segments[i].position);
    if (!e->dropped)
        stage_break(p, run, err);
    return ERR_OK;
}

/* --- time --- */

static uint64_t compute_stall_us(struct run *run, const struct ring_entry *e)
{
    return MAX_OF(PIPELINE_STALL_US, 4 * predicted_us(&run->plan, 1, e->frame.header.n_rows));
}

void stage_timers(struct pipeline *p, struct run *run)
{
    for (uint32_t i = 0; i < run->ring_n; i++) {
        struct ring_entry *e = ring_at(run, i);
        if (e->state == RING_COMPUTING && !e->stalled &&
            p->now - p->busy.since >= compute_stall_us(run, e)) {
            e->stalled = true;
            struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_STALL);
            effect->stall.epoch = run->plan.epoch;
            effect->stall.stage = run->my_stage;
            effect->stall.step = e->frame.header.step;
            effect->stall.waited_us = p->now - p->busy.since;
        }
        if (e->state == RING_QUEUED && e->waits_since != 0 &&
            p->now - e->waits_since >= OPEN_WAIT_US)
            stage_break(p, run, ERR_TIMEOUT);
    }
}

uint64_t stage_due(const struct pipeline *p, const struct run *run)
{
    uint64_t due = UINT64_MAX;
    for (uint32_t i = 0; i < run->ring_n; i++) {
        const struct ring_entry *e = &run->ring[(run->ring_first + i) % run->ring_cap];
        if (e->state == RING_COMPUTING && !e->stalled)
            due = MIN_OF(due, p->busy.since +
                                  MAX_OF(PIPELINE_STALL_US,
                                         4 * predicted_us(&run->plan, 1, e->frame.header.n_rows)));
        if (e->state == RING_QUEUED && e->waits_since != 0)
            due = MIN_OF(due, e->waits_since + OPEN_WAIT_US);
    }
    return due;
}
