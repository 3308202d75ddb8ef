/* The head of an epoch: takes OPENs of all entries, keeps their sequences and the stream of steps,
 * and watches the time. What goes into a step is in pipeline_schedule.c. */
#include "agent/pipeline_internal.h"

#include "base/util.h"

#include <assert.h>
#include <string.h>

/* --- sequences --- */

static struct sequence *sequence_find(struct pipeline *p, const struct request_id *request)
{
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        struct sequence *s = &p->sequences[i];
        if (s->used && request_id_eq(&s->request, request))
            return s;
    }
    return NULL;
}

/* What the slot holds stays for a prompt that begins in the same way. */
void head_leave_slot(struct pipeline *p, struct sequence *s)
{
    struct slot *slot = s->slot;
    if (!slot)
        return;
    s->slot = NULL;
    slot->sequence = NULL;
    slot->active = false;
    slot->used_at = p->now;
    slot->cut_due = true;
    slot->cut_request = s->request;
    slot->cut_attempt = s->attempt;
    slot->cut_n = slot->n;
}

static void sequence_end(struct pipeline *p, struct sequence *s)
{
    head_leave_slot(p, s);
    free(s->tokens);
    *s = (struct sequence){.used = false};
}

static void tell_entry(struct pipeline *p, const struct run *run, const struct node_id *entry,
                       const struct request_id *request, uint32_t attempt, enum err e)
{
    if (!is_self(p, entry)) {
        send_error(p, entry, run->alias, 0, request, attempt, e);
        return;
    }
    struct frame_error error = {*request, attempt, frame_error_of(e)};
    entry_on_error(p, entry, run->alias, &error);
}

static void sequence_fail(struct pipeline *p, struct sequence *s, enum err e)
{
    struct request_id request = s->request;
    struct node_id entry = s->entry;
    uint32_t attempt = s->attempt;
    const struct run *run = s->run;
    sequence_end(p, s);
    tell_entry(p, run, &entry, &request, attempt, e);
}

uint32_t head_sequences(const struct pipeline *p, const struct run *run)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++)
        n += p->sequences[i].used && (!run || p->sequences[i].run == run);
    return n;
}

static enum err open_check(const struct run *run, const struct frame_open *o)
{
    uint64_t n = (uint64_t)o->n_prompt + o->n_emitted;
    if (run->draining)
        return ERR_STALE;
    if (n >= run->plan.context)
        return ERR_LIMIT;
    if (o->n_prompt == 0 || (o->sampler.max_tokens > 0 && o->n_emitted >= o->sampler.max_tokens))
        return ERR_INVALID;
    for (uint64_t i = 0; i < n; i++) {
        if (o->token_ids[i] < 0)
            return ERR_INVALID;
    }
    return ERR_OK;
}

/* Positions that the sequence may fill; 0: more than there are blocks for, ever. */
static uint32_t open_limit(const struct run *run, const struct frame_open *o)
{
    uint32_t limit = run->plan.context;
    if (o->sampler.max_tokens > 0 && o->sampler.max_tokens < limit - o->n_prompt)
        limit = o->n_prompt + o->sampler.max_tokens;
    return kv_blocks_of(limit) <= run->pool.n ? limit : 0;
}

static enum err sequence_new(struct pipeline *p, struct run *run, const struct node_id *from,
                             const struct frame_open *o)
{
    TRY(open_check(run, o));
    uint32_t n = o->n_prompt + o->n_emitted, limit = open_limit(run, o);
    if (limit == 0)
        return ERR_LIMIT;
    struct sequence *s = NULL;
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX && !s; i++)
        s = p->sequences[i].used ? NULL : &p->sequences[i];
    if (!s)
        return ERR_BUSY;
    int32_t *tokens = malloc((size_t)limit * sizeof *tokens);
    if (!tokens)
        return ERR_NO_MEMORY;
    memcpy(tokens, o->token_ids, (size_t)n * sizeof *tokens);
    *s = (struct sequence){
        .used = true,
        .run = run,
        .request = o->request,
        .attempt = o->attempt,
        .entry = *from,
        .token_to = node_id_eq(&o->entry, from) ? *from : p->self,
        .sampler = o->sampler,
        .tokens = tokens,
        .n_prompt = o->n_prompt,
        .n_tokens = n,
        .limit = limit,
        .order = p->next_order++,
        .deadline_us = o->deadline_ms ? p->now + (uint64_t)o->deadline_ms * 1000 : UINT64_MAX,
        .said_at = p->now,
    };
    return ERR_OK;
}

void head_on_open(struct pipeline *p, struct run *run, const struct node_id *from,
                  const struct frame_open *o)
{
    struct sequence *old = sequence_find(p, &o->request);
    if (old && (!node_id_eq(&old->entry, from) || old->attempt >= o->attempt))
        return; /* not theirs, or late */
    if (old)
        sequence_end(p, old);
    run->last_use = p->now;
    enum err e = sequence_new(p, run, from, o);
    if (e != ERR_OK)
        tell_entry(p, run, from, &o->request, o->attempt, e);
}

void head_on_cancel(struct pipeline *p, const struct node_id *from,
                    const struct frame_cancel *cancel)
{
    struct sequence *s = sequence_find(p, &cancel->request);
    if (s && node_id_eq(&s->entry, from) && s->attempt <= cancel->attempt)
        sequence_end(p, s);
}

/* --- streams --- */

/* What ends a stream says nothing about a request: its entry shall try again. */
static enum err broken_err(enum err e)
{
    return e == ERR_NO_MEMORY || e == ERR_STALE ? e : ERR_IO;
}

void head_break(struct pipeline *p, struct run *run, enum err e)
{
    run->stream = STREAM_NONE;
    run->n_window = 0;
    run->link_wait_since = 0;
    ring_flush(run);
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        struct sequence *s = &p->sequences[i];
        if (!s->used || s->run != run)
            continue;
        if (s->slot)
            sequence_fail(p, s, broken_err(e));
        else if (run->draining) /* others may be gone already: the new plan is the better place */
            sequence_fail(p, s, ERR_STALE);
    }
    for (uint32_t i = 0; i < run->n_slots; i++)
        run->slots[i].cut_due = false; /* the next stream starts with idle slots */
}

void head_abandon(struct pipeline *p, struct run *run, enum err e)
{
    head_break(p, run, e);
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        if (p->sequences[i].used && p->sequences[i].run == run)
            sequence_fail(p, &p->sequences[i], e);
    }
}

void head_on_link_down(struct pipeline *p, struct run *run, const struct node_id *id)
{
    if (!run_is_head(run))
        return;
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        struct sequence *s = &p->sequences[i];
        if (s->used && s->run == run && node_id_eq(&s->entry, id))
            sequence_end(p, s); /* it opens again, if it lives */
    }
    if (run->stream != STREAM_NONE && run->plan.n_stages > 1 &&
        (node_id_eq(id, &run->plan.stages[1].node) || node_id_eq(id, run_tail(run))))
        head_break(p, run, ERR_CLOSED);
}

static void finish_sync(struct run *run)
{
    for (uint32_t i = 0; i < run->n_slots; i++)
        slot_truncate(run, &run->slots[i], run->slots[i].sync_n);
    run->stream = STREAM_OPEN;
    run->reset_due = run->n_slots > 1;
}

static bool links_up(struct pipeline *p, struct run *run)
{
    const struct node_id *next = &run->plan.stages[1].node, *tail = run_tail(run);
    bool up = true;
    if (!peer_is_up(p, next)) {
        peer_want(p, next);
        up = false;
    }
    if (!peer_is_up(p, tail)) {
        peer_want(p, tail);
        up = false;
    }
    if (up)
        run->link_wait_since = 0;
    else if (run->link_wait_since == 0)
        run->link_wait_since = p->now;
    return up;
}

static void start_stream(struct pipeline *p, struct run *run)
{
    if (run->plan.n_stages == 1) {
        run->reset_step = run->next_step++;
        run->stream = STREAM_OPEN;
        return;
    }
    struct ring_entry *e = links_up(p, run) ? ring_push(run) : NULL;
    if (!e)
        return;
    step_header(run, e);
    run->reset_step = e->frame.header.step;
    run->stream = STREAM_SYNC;
    run->sync_until = p->now + SYNC_US;
    run->sync_done = 1;
    bool any = false;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        slot->sync_n = slot->n;
        slot->sync_stages = 1;
        any = any || slot->n > 0;
    }
    if (!any)
        finish_sync(run); /* nothing that could be gone on from */
    pipeline_stage_pass(p, run, e);
}

static void have_slot(struct run *run, uint32_t stage, const struct frame_have *have)
{
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        if (have->slot != i || slot->attempt != have->attempt ||
            !request_id_eq(&slot->request, &have->request))
            continue;
        uint32_t n = have->n <= slot->n ? have->n : 0;
        struct hash128 hash = slot_hash_at(run, slot, n);
        if (memcmp(&hash, &have->hash, sizeof hash) != 0)
            n = 0;
        slot->sync_n = MIN_OF(slot->sync_n, n);
        slot->sync_stages |= UINT32_C(1) << stage;
    }
}

void head_on_have(struct pipeline *p, struct run *run, const struct node_id *from, uint64_t step,
                  const struct frame_have *have)
{
    static const struct request_id none;
    int stage = plan_stage_of(&run->plan, from);
    if (run->stream != STREAM_SYNC || step != run->reset_step || stage < 1)
        return;
    run->last_use = p->now;
    if (!request_id_eq(&have->request, &none)) {
        have_slot(run, (uint32_t)stage, have);
        return;
    }
    uint32_t bit = UINT32_C(1) << stage;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        if (!(run->slots[i].sync_stages & bit))
            run->slots[i].sync_n = 0;
    }
    run->sync_done |= bit;
    if (run->sync_done == (UINT32_C(1) << run->plan.n_stages) - 1)
        finish_sync(run);
}

void head_on_error(struct pipeline *p, struct run *run, uint64_t step,
                   const struct frame_error *error)
{
    static const struct request_id none;
    if (request_id_eq(&error->request, &none)) {
        if (run->stream != STREAM_NONE && step >= run->reset_step)
            head_break(p, run, frame_error_to(error->code));
        return;
    }
    struct sequence *s = sequence_find(p, &error->request);
    if (s && s->run == run && s->attempt == error->attempt)
        sequence_fail(p, s, broken_err(frame_error_to(error->code)));
}

/* --- results --- */

void head_on_credit(struct pipeline *p, struct run *run, uint64_t step)
{
    uint32_t n = 0;
    while (n < run->n_window && run->window[n].step <= step)
        n++;
    if (n == 0)
        return;
    run->n_window -= n;
    memmove(run->window, run->window + n, run->n_window * sizeof run->window[0]);
    run->credit_at = p->now;
    run->stall_said = false;
    run->last_use = p->now;
}

static void pass_token(struct pipeline *p, const struct run *run, const struct sequence *s,
                       const struct frame_token *token)
{
    if (is_self(p, &s->entry) || !is_self(p, &s->token_to))
        return;
    struct pipeline_send *send = send_new(p, &s->entry, FRAME_TOKEN, run->alias, 0);
    if (send)
        send->token = *token;
}

void head_on_token(struct pipeline *p, struct run *run, uint64_t step,
                   const struct frame_token *token)
{
    head_on_credit(p, run, step);
    struct sequence *s = sequence_find(p, &token->request);
    if (!s || s->run != run || !s->slot || s->attempt != token->attempt ||
        token->position < s->n_tokens)
        return;
    if (token->position != s->n_tokens || s->n_scheduled != s->n_tokens || token->id < 0) {
        head_break(p, run, ERR_CORRUPT);
        return;
    }
    s->tokens[s->n_tokens++] = token->id;
    s->said_at = p->now;
    pass_token(p, run, s, token);
    if (token->finish != FRAME_GOES_ON || s->n_tokens == s->limit)
        sequence_end(p, s);
}

/* Averages that follow what the last few steps took. */
static void follow(double *average, double value)
{
    *average = *average > 0 ? *average + (value - *average) / 4 : value;
}

void head_measure(struct run *run, uint32_t n_prompt_rows, uint32_t n_rows, uint32_t us)
{
    /* Shorter chunks say little about what a row costs more. */
    static const uint32_t chunk_min = 64;
    static const double row_us_min = 0.1;
    if (!run_is_head(run))
        return;
    if (n_prompt_rows == 0) {
        follow(&run->decode_us, us);
        run->n_mixed = 0;
        return;
    }
    bool mixed = n_rows > n_prompt_rows;
    if (mixed) {
        follow(&run->mixed_us, us);
        follow(&run->mixed_rows, n_prompt_rows);
        run->n_mixed++;
    }
    double row_us = ((double)us - (mixed ? run->decode_us : 0)) / n_prompt_rows;
    if (run->row_us <= 0 || (!mixed && n_prompt_rows >= chunk_min))
        follow(&run->row_us, MAX_OF(row_us, row_us_min));
}

void head_say_drained(struct pipeline *p, struct run *run)
{
    if (!run->draining || run->drained_said || head_sequences(p, run) > 0)
        return;
    run->drained_said = true;
    struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_DRAINED);
    effect->release.instance = run->instance;
    effect->release.epoch = run->plan.epoch;
}

void head_pump(struct pipeline *p, struct run *run)
{
    head_say_drained(p, run);
    if (head_sequences(p, run) > 0 && run->stream == STREAM_NONE)
        start_stream(p, run);
    while (run->stream == STREAM_OPEN && !p->busy.on) {
        if (effects_room(p) < EFFECTS_ROOM) {
            p->more = true;
            return;
        }
        if (!schedule_step(p, run))
            return;
    }
}

/* --- time --- */

static uint64_t window_predicted_us(const struct run *run)
{
    uint32_t n_rows = 0;
    for (uint32_t i = 0; i < run->n_window; i++)
        n_rows += run->window[i].n_rows;
    return predicted_us(&run->plan, run->n_window, n_rows);
}

static uint64_t stall_at(const struct run *run)
{
    return run->credit_at + MAX_OF(PIPELINE_STALL_US, 4 * window_predicted_us(run));
}

static uint64_t silence_at(const struct run *run)
{
    return run->credit_at + MAX_OF(PIPELINE_SILENCE_US, 16 * window_predicted_us(run));
}

/* With one stage the shell itself computes: it is slow, never silent. */
static bool watches_steps(const struct run *run)
{
    return run->n_window > 0 && run->plan.n_stages > 1;
}

static void say_alive(struct pipeline *p, const struct run *run, struct sequence *s)
{
    s->said_at = p->now;
    if (run->stream != STREAM_OPEN || run->stall_said)
        return;
    struct frame_have have = {.request = s->request, .attempt = s->attempt};
    if (s->slot) {
        have.n = s->slot->n;
        have.hash = s->slot->hash;
    }
    if (is_self(p, &s->entry)) {
        entry_on_have(p, &p->self, run->alias, &have);
        return;
    }
    struct pipeline_send *send = send_new(p, &s->entry, FRAME_HAVE, run->alias, 0);
    if (send)
        send->have = have;
}

static void sequence_timers(struct pipeline *p, struct run *run)
{
    bool links_late = run->link_wait_since != 0 && p->now - run->link_wait_since >= LINK_WAIT_US;
    if (links_late)
        run->link_wait_since = 0;
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        struct sequence *s = &p->sequences[i];
        if (!s->used || s->run != run)
            continue;
        if (p->now >= s->deadline_us)
            sequence_fail(p, s, ERR_TIMEOUT);
        else if (links_late)
            sequence_fail(p, s, ERR_IO);
        else if (p->now - s->said_at >= SIGN_OF_LIFE_US)
            say_alive(p, run, s);
    }
}

void head_timers(struct pipeline *p, struct run *run)
{
    if (watches_steps(run) && p->now >= silence_at(run)) {
        head_break(p, run, ERR_TIMEOUT);
    } else if (watches_steps(run) && !run->stall_said && p->now >= stall_at(run)) {
        run->stall_said = true;
        struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_STALL);
        effect->stall.epoch = run->plan.epoch;
        effect->stall.step = run->window[0].step;
        effect->stall.waited_us = p->now - run->credit_at;
        effect->stall.whole = 1;
    }
    if (run->stream == STREAM_SYNC && p->now >= run->sync_until) {
        for (uint32_t i = 0; i < run->n_slots; i++)
            run->slots[i].sync_n = 0;
        finish_sync(run);
    }
    sequence_timers(p, run);
}

uint64_t head_due(const struct pipeline *p, const struct run *run)
{
    uint64_t due = UINT64_MAX;
    if (watches_steps(run))
        due = run->stall_said ? silence_at(run) : MIN_OF(stall_at(run), silence_at(run));
    if (run->stream == STREAM_SYNC)
        due = MIN_OF(due, run->sync_until);
    if (run->link_wait_since != 0)
        due = MIN_OF(due, MIN_OF(run->link_wait_since + LINK_WAIT_US, p->now + WANT_LINK_US));
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        const struct sequence *s = &p->sequences[i];
        if (s->used && s->run == run)
            due = MIN_OF(due, MIN_OF(s->deadline_us, s->said_at + SIGN_OF_LIFE_US));
    }
    return due;
}
