/* The head builds steps: who runs, whose rows come next, and room for them in the KV cache.
 *
 * Admission is optimistic: a sequence is let in, in the order of arrival, when its prompt and a
 * block more fit beside those that run, not its whole answer. What its prompt has in common with
 * the tokens of any slot is shared, not computed; what a running prompt is about to have in common
 * with it is waited for, so that of many requests with one long beginning only the first computes
 * it. Idle slots go, the one unused for longest first, when blocks or slots are needed. A sequence
 * that needs a block when there is none waits; when nothing is under way any more and all wait, the
 * one that came last goes back to the front of the queue, and what it has is computed again later.
 * The one that came first is never put back, and alone every sequence fits, so it always ends.
 *
 * A step has the next token of every sequence that has one, then rows of prompts in turn. When
 * others wait for tokens, so many that by the times of the last few steps this one takes
 * PROMPT_SHARE more than without them; every PLAIN_EVERY-th has none, so that what a step takes
 * without is known while prompts enter and the machine gets slower or faster.
 *
 * The order of the controls in a step is the order in which they are made here; the slots of this
 * node change in that same order. */
#include "agent/pipeline_internal.h"

#include "base/util.h"

#include <assert.h>
#include <string.h>

enum {
    /* Free controls that an admission wants: what the slot had, ADMIT, SHARE. */
    ADMIT_CONTROLS = 3,
    /* A longer prefix that a running prompt is about to compute is waited for. */
    AWAIT_MIN = STAGE_BLOCK / 2,
    /* Kernels take rows in groups of so many: fewer cost as much. */
    ROW_GROUP = 8,
    PLAIN_EVERY = 16,
};
/* Prompt rows of a step may take this part of what a step without them takes: 2 is the goal for the
 * longest of many steps, so this leaves room for those that take longer than the others. */
#define PROMPT_SHARE 0.75

void step_header(struct run *run, struct ring_entry *e)
{
    e->frame.header = (struct frame_header){
        .type = FRAME_STEP, .epoch = run->alias, .step = run->next_step++, .slice_n = 1};
    e->frame.step.n_controls = 0;
    e->frame.step.rows = NULL;
}

/* --- controls --- */

static uint32_t number_of(const struct run *run, const struct slot *slot)
{
    return (uint32_t)(slot - run->slots);
}

static uint32_t controls_left(const struct ring_entry *e)
{
    return FRAME_CONTROLS_MAX - e->frame.step.n_controls;
}

static void add_control(struct ring_entry *e, const struct frame_control *c)
{
    assert(controls_left(e) > 0);
    e->frame.step.controls[e->frame.step.n_controls++] = *c;
}

/* An idle slot keeps its first n positions. */
static void cut_idle(struct run *run, struct ring_entry *e, struct slot *slot, uint32_t n)
{
    assert(!slot->sequence && !slot->cut_due);
    slot_truncate(run, slot, n);
    /* With one slot it is enough that rows begin where they begin; earlier versions know no more.
     */
    if (run->n_slots == 1)
        return;
    add_control(e, &(struct frame_control){.kind = n > 0 ? FRAME_CUT : FRAME_FREE,
                                           .attempt = slot->attempt,
                                           .slot = number_of(run, slot),
                                           .n = n,
                                           .request = slot->request});
}

/* Sequences that are over, or were put back. */
static void add_cuts(struct run *run, struct ring_entry *e)
{
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        if (!slot->cut_due)
            continue;
        slot->cut_due = false;
        add_control(e, &(struct frame_control){.kind = slot->cut_n > 0 ? FRAME_CUT : FRAME_FREE,
                                               .attempt = slot->cut_attempt,
                                               .slot = i,
                                               .n = slot->cut_n,
                                               .request = slot->cut_request});
    }
}

/* Cuts slots until none has a block in common with another; of those that have, the longest stays.
 * Stages that missed steps may hold as two blocks what is one here. */
static void unshare(struct run *run)
{
    bool done[PIPELINE_SLOTS_MAX] = {false};
    memset(run->kept, 0, run->pool.n * sizeof *run->kept);
    for (uint32_t k = 0; k < run->n_slots; k++) {
        uint32_t at = UINT32_MAX;
        for (uint32_t i = 0; i < run->n_slots; i++) {
            if (!done[i] && (at == UINT32_MAX || run->slots[i].n > run->slots[at].n))
                at = i;
        }
        struct slot *slot = &run->slots[at];
        done[at] = true;
        for (uint32_t b = 0; b < slot->table.n; b++) {
            uint8_t *kept = &run->kept[slot->table.blocks[b]];
            if (*kept)
                slot_truncate(run, slot, b * STAGE_BLOCK);
            else
                *kept = 1;
        }
    }
}

/* The first step of a stream with something in it says what all slots have. */
static void add_resets(struct run *run, struct ring_entry *e)
{
    static const struct request_id whoever;
    run->reset_due = false;
    unshare(run);
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct slot *slot = &run->slots[i];
        bool some = slot->n > 0;
        add_control(e, &(struct frame_control){.kind = some ? FRAME_CUT : FRAME_FREE,
                                               .attempt = some ? slot->attempt : 0,
                                               .slot = i,
                                               .n = slot->n,
                                               .request = some ? slot->request : whoever});
    }
}

/* --- room in the KV cache --- */

/* Blocks that a running sequence has been promised: of its tokens so far, and one more. */
static uint32_t blocks_promised(const struct sequence *s)
{
    return MIN_OF(kv_blocks_of(s->n_tokens) + 1, kv_blocks_of(s->limit));
}

static uint32_t keep(struct run *run, const struct kv_table *table, uint32_t n)
{
    uint32_t fresh = 0;
    for (uint32_t b = 0; b < n; b++) {
        uint8_t *kept = &run->kept[table->blocks[b]];
        fresh += *kept == 0;
        *kept = 1;
    }
    return fresh;
}

/* Does `s`, beginning with n_common positions of `from`, fit beside those that run? Everything that
 * only idle slots hold can go. */
static bool fits(struct run *run, const struct sequence *s, const struct slot *from,
                 uint32_t n_common)
{
    uint32_t n_running = 0, need = blocks_promised(s), begun = kv_blocks_of(n_common);
    uint64_t kept = 0;
    memset(run->kept, 0, run->pool.n * sizeof *run->kept);
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct slot *slot = &run->slots[i];
        if (!slot->sequence)
            continue;
        n_running++;
        kept += keep(run, &slot->table, slot->table.n);
        uint32_t promised = blocks_promised(slot->sequence);
        kept += promised - MIN_OF(promised, slot->table.n);
    }
    if (n_running == 0)
        return true;
    /* A part of a block that a running sequence holds will be copied. */
    if (n_common % STAGE_BLOCK > 0 && run->kept[from->table.blocks[begun - 1]])
        need++;
    if (begun > 0)
        kept += keep(run, &from->table, begun);
    return kept + need - MIN_OF(need, begun) <= run->pool.n;
}

/* The idle slot that was unused for longest, but not `but`; empty ones first if `any`. */
static struct slot *oldest_idle(struct run *run, const struct slot *but, bool empty_too)
{
    struct slot *oldest = NULL;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        if (slot->sequence || slot == but)
            continue;
        if (slot->n == 0) {
            if (empty_too)
                return slot;
            continue;
        }
        if (!oldest || slot->used_at < oldest->used_at)
            oldest = slot;
    }
    return oldest;
}

/* Makes room for n rows of the slot by forgetting idle ones. False: none is left. */
static bool make_room(struct run *run, struct ring_entry *e, const struct slot *slot, uint32_t n)
{
    for (;;) {
        if (kv_need(&run->pool, &slot->table, slot->n, slot->n + n) <= run->pool.n_free)
            return true;
        struct slot *victim = oldest_idle(run, NULL, false);
        if (!victim || controls_left(e) == 0)
            return false;
        cut_idle(run, e, victim, 0);
    }
}

/* --- admission --- */

/* How the first n tokens begin, of which `s` must compute one at least. */
static uint32_t common_prefix(const int32_t *tokens, uint32_t n, const struct sequence *s)
{
    uint32_t common = 0, max = MIN_OF(n, s->n_tokens - 1);
    while (common < max && tokens[common] == s->tokens[common])
        common++;
    return common;
}

/* Is a sequence that runs about to compute much more of this prompt than n_common positions? */
static bool prefix_comes(const struct run *run, const struct sequence *s, uint32_t n_common)
{
    for (uint32_t i = 0; i < run->n_slots; i++) {
        const struct sequence *other = run->slots[i].sequence;
        if (other && other->n_tokens - other->n_scheduled >= AWAIT_MIN &&
            common_prefix(other->tokens, other->n_tokens, s) >= n_common + AWAIT_MIN)
            return true;
    }
    return false;
}

/* Where a queued sequence goes, and what it begins with. */
struct place {
    struct slot *slot;  /* idle */
    struct slot *share; /* whose positions it begins with; the slot itself: it goes on in it */
    uint32_t n_common;
};

/* False: no slot is idle. */
static bool find_place(struct run *run, const struct sequence *s, struct place *ret)
{
    struct place place = {.slot = NULL};
    for (uint32_t i = 0; i < run->n_slots; i++) {
        uint32_t n = common_prefix(run->slots[i].tokens, run->slots[i].n, s);
        /* of equals, an idle one: it may be taken over */
        if (n > place.n_common || (place.share && n == place.n_common && place.share->sequence &&
                                   !run->slots[i].sequence)) {
            place.n_common = n;
            place.share = &run->slots[i];
        }
    }
    if (place.n_common < REUSE_MIN) {
        place.n_common = 0;
        place.share = NULL;
    }
    const struct slot *from = place.share;
    bool goes_on = from && !from->sequence && from->n - place.n_common < STAGE_BLOCK;
    place.slot = goes_on ? place.share : oldest_idle(run, from, true);
    if (!place.slot && from && !from->sequence)
        place.slot = place.share; /* the last one that is idle */
    *ret = place;
    return place.slot != NULL;
}

/* The tail learns how to sample: from its own slot when it is this node, else by an OPEN. */
static enum err tell_tail(struct pipeline *p, struct run *run, const struct sequence *s)
{
    struct slot *slot = s->slot;
    if (run_is_tail(run)) {
        slot->opened = true;
        slot->sampler = s->sampler;
        slot->token_to = s->token_to;
        slot->token_limit = s->limit;
        return ERR_OK;
    }
    struct pipeline_send *send =
        send_new(p, run_tail(run), FRAME_OPEN, run->alias, run->reset_step);
    if (!send)
        return ERR_CLOSED;
    send->open.request = s->request;
    send->open.attempt = s->attempt;
    send->open.entry = s->token_to;
    send->open.sampler = s->sampler;
    send->open.context_max = s->limit;
    return ERR_OK;
}

static void tell_cached(struct pipeline *p, const struct run *run, struct sequence *s, uint32_t n)
{
    if (s->cached_said || n == 0)
        return;
    struct frame_cached cached = {s->request, s->attempt, n};
    if (is_self(p, &s->entry)) {
        entry_on_cached(p, &p->self, run->alias, &cached);
    } else {
        struct pipeline_send *send = send_new(p, &s->entry, FRAME_CACHED, run->alias, 0);
        if (send)
            send->cached = cached;
    }
}

static enum err admit(struct pipeline *p, struct run *run, struct ring_entry *e, struct sequence *s,
                      const struct place *place)
{
    struct slot *slot = place->slot;
    assert(slot);
    uint32_t stays = place->share == slot ? place->n_common : 0;
    bool shares = place->share && place->share != slot;
    if (slot->n > stays)
        cut_idle(run, e, slot, stays);
    TRY(slot_reserve(run, slot, s->limit));
    slot->sequence = s;
    slot->active = true;
    slot->request = s->request;
    slot->attempt = s->attempt;
    slot->limit = s->limit;
    s->slot = slot;
    s->n_scheduled = place->n_common;
    add_control(e, &(struct frame_control){.kind = FRAME_ADMIT,
                                           .attempt = s->attempt,
                                           .slot = number_of(run, slot),
                                           .n = s->limit,
                                           .request = s->request});
    if (shares) {
        TRY(slot_share(run, place->share, slot, place->n_common));
        place->share->used_at = p->now;
        add_control(e, &(struct frame_control){.kind = FRAME_SHARE,
                                               .from = number_of(run, place->share),
                                               .slot = number_of(run, slot),
                                               .n = place->n_common,
                                               .request = s->request});
    }
    tell_cached(p, run, s, place->n_common);
    s->cached_said = true;
    return tell_tail(p, run, s);
}

static struct sequence *next_queued(struct pipeline *p, const struct run *run)
{
    struct sequence *first = NULL;
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++) {
        struct sequence *s = &p->sequences[i];
        if (s->used && s->run == run && !s->slot && (!first || s->order < first->order))
            first = s;
    }
    return first;
}

static enum err admit_all(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    for (;;) {
        struct sequence *s = next_queued(p, run);
        struct place place;
        if (!s || controls_left(e) < ADMIT_CONTROLS || !find_place(run, s, &place) ||
            prefix_comes(run, s, place.n_common) || !fits(run, s, place.share, place.n_common))
            return ERR_OK;
        TRY(admit(p, run, e, s, &place));
    }
}

/* --- rows --- */

static void add_rows(struct pipeline *p, struct run *run, struct ring_entry *e, struct slot *slot,
                     uint32_t n)
{
    struct frame_header *h = &e->frame.header;
    struct sequence *s = slot->sequence;
    uint32_t position = s->n_scheduled;
    bool is_last = position + n == s->n_tokens, is_prompt = position < s->n_prompt || n > 1;
    int32_t *ids = e->tokens + h->n_rows;
    memcpy(ids, s->tokens + position, n * sizeof *ids);
    assert(slot->n == position);
    e->slot_of[h->n_segments] = number_of(run, slot);
    e->frame.step.segments[h->n_segments] = (struct frame_segment){
        .request = s->request,
        .attempt = s->attempt,
        .position = position,
        .n = n,
        .kv_len = position,
        .prefix_hash = slot->hash,
        .flags = (is_prompt ? (uint32_t)FRAME_SEGMENT_PREFILL : 0) |
                 (is_last ? (uint32_t)FRAME_SEGMENT_LOGITS_LAST : 0) |
                 (is_last && is_prompt ? (uint32_t)FRAME_SEGMENT_LAST_CHUNK : 0),
        .token_ids = ids,
    };
    h->n_segments++;
    h->n_rows += n;
    enum err err = slot_grow(p, run, slot, n);
    assert(err == ERR_OK); /* there is room: make_room */
    (void)err;
    slot_append(slot, ids, n);
    s->n_scheduled += n;
}

static uint32_t rows_due(const struct slot *slot)
{
    return slot->sequence ? slot->sequence->n_tokens - slot->sequence->n_scheduled : 0;
}

/* The slots that run, in the order of their sequences' arrival. */
static uint32_t running(struct run *run, struct slot *ret[PIPELINE_SLOTS_MAX])
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        struct slot *slot = &run->slots[i];
        if (!slot->sequence)
            continue;
        uint32_t at = n++;
        for (; at > 0 && ret[at - 1]->sequence->order > slot->sequence->order; at--)
            ret[at] = ret[at - 1];
        ret[at] = slot;
    }
    return n;
}

/* Does its client wait for the next token, not for the first or for what is computed again? */
static bool streams(const struct sequence *s)
{
    return s->n_scheduled >= s->n_prompt && s->n_tokens - s->n_scheduled <= 1;
}

/* Rows of prompts beside which a step takes as long as it may. Before the first such step, half of
 * what the time of a row in larger steps suggests: in small ones a row costs more. Then from what
 * the last ones took, and at most twice as many as they had. */
static double rows_beside(const struct run *run, double token_us, double row_us)
{
    double spare_us = PROMPT_SHARE * token_us;
    if (!(run->mixed_us > 0))
        return spare_us / row_us / 2;
    double n = run->mixed_rows + (token_us + spare_us - run->mixed_us) / row_us;
    return MIN_OF(n, 2 * run->mixed_rows + ROW_GROUP);
}

/* Rows of prompts that this step, which has n_rows already, may have. */
static uint32_t prompt_budget(const struct pipeline *p, const struct run *run, uint32_t n_rows,
                              uint32_t n_streams)
{
    uint32_t max = p->chunk_rows > n_rows ? p->chunk_rows - n_rows : 1;
    double token_us = run->decode_us > 0 ? run->decode_us : run->plan.predicted_token_us;
    double row_us = run->row_us > 0 ? run->row_us : run->plan.predicted_prefill_us;
    if (n_streams == 0 || !(token_us > 0) || !(row_us > 0))
        return max;
    if (n_rows > 0 && run->n_mixed + 1 >= PLAIN_EVERY)
        return 0;
    double n = rows_beside(run, token_us, row_us);
    if (n >= max)
        return max;
    uint32_t rows = n > 1 ? (uint32_t)n : 1;
    return rows > ROW_GROUP ? rows / ROW_GROUP * ROW_GROUP : rows;
}

/* As many rows of the slot as there is room for, up to n. */
static uint32_t add_some(struct pipeline *p, struct run *run, struct ring_entry *e,
                         struct slot *slot, uint32_t n)
{
    if (n == 0 || e->frame.header.n_segments == STAGE_SEGMENTS_MAX)
        return 0;
    while (!make_room(run, e, slot, n)) {
        uint32_t whole = (slot->n + n - 1) / STAGE_BLOCK * STAGE_BLOCK; /* a block less */
        if (whole <= slot->n)
            return 0;
        n = whole - slot->n;
    }
    add_rows(p, run, e, slot, n);
    return n;
}

/* First the next token of each sequence, then prompts in turn up to the budget. */
static void fill_rows(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    const struct frame_header *h = &e->frame.header;
    struct slot *slots[PIPELINE_SLOTS_MAX];
    uint32_t n_running = running(run, slots), n_streams = 0, first = 0;
    for (uint32_t i = 0; i < n_running; i++) {
        n_streams += streams(slots[i]->sequence);
        if (rows_due(slots[i]) == 1)
            (void)add_some(p, run, e, slots[i], 1);
    }
    while (first < n_running && slots[first]->sequence->order < run->turn)
        first++;
    uint32_t budget = prompt_budget(p, run, h->n_rows, n_streams);
    for (uint32_t i = 0; i < n_running && budget > 0; i++) {
        struct slot *slot = slots[(first + i) % n_running];
        uint32_t n = add_some(p, run, e, slot, MIN_OF(rows_due(slot), budget));
        budget -= n;
        if (n > 0)
            run->turn = slot->sequence->order + 1;
    }
}

/* --- a step --- */

/* The sequence that came last goes back into the queue; false when it is the only one. */
static bool put_back(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    struct slot *slots[PIPELINE_SLOTS_MAX];
    uint32_t n = running(run, slots);
    if (n < 2)
        return false;
    struct sequence *s = slots[n - 1]->sequence;
    head_leave_slot(p, s);
    s->n_scheduled = 0;
    p->n_preempted++;
    add_cuts(run, e);
    return true;
}

static bool any_due(const struct run *run)
{
    for (uint32_t i = 0; i < run->n_slots; i++) {
        if (rows_due(&run->slots[i]) > 0)
            return true;
    }
    return false;
}

/* Is there anything to say or to compute? Controls alone wait for a quiet moment. */
static bool step_due(struct pipeline *p, const struct run *run)
{
    bool idle_slot = false, cut = false;
    for (uint32_t i = 0; i < run->n_slots; i++) {
        idle_slot = idle_slot || !run->slots[i].sequence;
        cut = cut || run->slots[i].cut_due;
    }
    return any_due(run) || (idle_slot && next_queued(p, run)) || (cut && run->n_window == 0);
}

static enum err fill_step(struct pipeline *p, struct run *run, struct ring_entry *e)
{
    const struct frame_header *h = &e->frame.header;
    if (run->reset_due)
        add_resets(run, e);
    add_cuts(run, e);
    TRY(admit_all(p, run, e));
    fill_rows(p, run, e);
    while (h->n_segments == 0 && run->n_window == 0 && any_due(run)) {
        if (controls_left(e) == 0)
            return ERR_OK; /* the next step goes on */
        if (!put_back(p, run, e))
            return ERR_NO_MEMORY;
        fill_rows(p, run, e);
    }
    return ERR_OK;
}

bool schedule_step(struct pipeline *p, struct run *run)
{
    if (run->n_window >= run->plan.n_stages + WINDOW_EXTRA || !step_due(p, run))
        return false;
    struct ring_entry *e = ring_push(run);
    if (!e)
        return false;
    step_header(run, e);
    enum err err = fill_step(p, run, e);
    if (err != ERR_OK) {
        head_break(p, run, err);
        return false;
    }
    struct frame_header *h = &e->frame.header;
    if (h->n_segments == 0 && e->frame.step.n_controls == 0) { /* all wait for room */
        ring_pop(run);
        run->next_step--;
        return false;
    }
    if (run->n_window == 0)
        run->credit_at = p->now;
    run->window[run->n_window++] = (struct window_step){h->step, h->n_rows};
    run->last_use = p->now;
    if (h->n_segments > 0)
        stage_compute(p, run, e);
    else
        pipeline_stage_pass(p, run, e);
    return true;
}
