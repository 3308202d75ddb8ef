/* What one stage of an epoch keeps: its slots with their tokens and KV blocks, and the ring of
 * steps. */
#include "agent/pipeline_internal.h"

#include "base/util.h"

#include <assert.h>
#include <string.h>

enum err slot_reserve(const struct run *run, struct slot *slot, uint32_t n)
{
    if (n <= slot->cap)
        return ERR_OK;
    int32_t *tokens = realloc(slot->tokens, (size_t)n * sizeof *tokens);
    if (!tokens)
        return ERR_NO_MEMORY;
    slot->tokens = tokens;
    struct hash128 *marks = realloc(slot->marks, (n / CHAIN_MARK + 1u) * sizeof *marks);
    if (!marks)
        return ERR_NO_MEMORY;
    slot->marks = marks;
    slot->marks[0] = run->chain_first;
    slot->cap = n;
    return ERR_OK;
}

struct hash128 slot_hash_at(const struct run *run, const struct slot *slot, uint32_t n)
{
    assert(n <= slot->n);
    if (n == slot->n)
        return slot->hash;
    struct hash128 hash = slot->cap ? slot->marks[n / CHAIN_MARK] : run->chain_first;
    for (uint32_t i = n / CHAIN_MARK * CHAIN_MARK; i < n; i++)
        hash = pipeline_chain_next(&hash, slot->tokens[i]);
    return hash;
}

void slot_truncate(struct run *run, struct slot *slot, uint32_t n)
{
    if (n >= slot->n)
        return;
    slot->hash = slot_hash_at(run, slot, n);
    slot->n = n;
    kv_cut(&run->pool, &slot->table, n);
}

enum err slot_grow(struct pipeline *p, struct run *run, struct slot *slot, uint32_t n)
{
    struct kv_copy copy;
    uint32_t copies;
    TRY(kv_grow(&run->pool, &slot->table, slot->n, slot->n + n, &copy, &copies));
    if (copies) {
        struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_COPY_BLOCK);
        effect->copy_block.instance = run->instance;
        effect->copy_block.from = copy.from;
        effect->copy_block.to = copy.to;
    }
    return ERR_OK;
}

enum err slot_share(struct run *run, const struct slot *from, struct slot *to, uint32_t n)
{
    assert(from != to && n <= from->n && n <= to->cap);
    TRY(kv_share(&run->pool, &from->table, &to->table, n));
    memcpy(to->tokens, from->tokens, n * sizeof *to->tokens);
    memcpy(to->marks, from->marks, (n / CHAIN_MARK + 1u) * sizeof *to->marks);
    to->n = n;
    to->hash = slot_hash_at(run, from, n);
    return ERR_OK;
}

struct hash128 slot_block_hash(const struct run *run, const struct slot *slot, uint32_t i)
{
    return slot_hash_at(run, slot, (i + 1) * STAGE_BLOCK);
}

void slot_append(struct slot *slot, const int32_t *ids, uint32_t n)
{
    assert(n <= slot->cap - slot->n);
    for (uint32_t i = 0; i < n; i++) {
        slot->tokens[slot->n++] = ids[i];
        slot->hash = pipeline_chain_next(&slot->hash, ids[i]);
        if (slot->n % CHAIN_MARK == 0)
            slot->marks[slot->n / CHAIN_MARK] = slot->hash;
    }
}

struct ring_entry *ring_at(struct run *run, uint32_t i)
{
    assert(i < run->ring_n);
    return &run->ring[(run->ring_first + i) % run->ring_cap];
}

struct ring_entry *ring_push(struct run *run)
{
    if (run->ring_n == run->ring_cap)
        return NULL;
    run->ring_n++;
    struct ring_entry *e = ring_at(run, run->ring_n - 1);
    e->state = RING_QUEUED;
    e->dropped = e->stalled = e->controls_done = false;
    e->rows = NULL;
    e->waits_since = 0;
    return e;
}

void ring_pop(struct run *run)
{
    assert(run->ring_n > 0 && ring_at(run, run->ring_n - 1)->state == RING_QUEUED);
    run->ring_n--;
}

void ring_flush(struct run *run)
{
    uint32_t keep = 0;
    while (keep < run->ring_n && ring_at(run, keep)->state != RING_QUEUED)
        ring_at(run, keep++)->dropped = true;
    run->ring_n = keep;
}

void ring_collect(struct run *run)
{
    while (run->ring_n > 0 && ring_at(run, 0)->state == RING_SPENT) {
        run->ring_first = (run->ring_first + 1) % run->ring_cap;
        run->ring_n--;
    }
}

enum err ring_keep_rows(struct run *run)
{
    for (uint32_t i = 0; i < run->ring_n; i++) {
        struct ring_entry *e = ring_at(run, i);
        size_t n = (size_t)e->frame.header.n_rows * run->row_bytes;
        if (e->state != RING_QUEUED || n == 0 || e->rows == e->buffer || !e->rows)
            continue;
        if (n > e->buffer_bytes) {
            float *buffer = realloc(e->buffer, n);
            if (!buffer)
                return ERR_NO_MEMORY;
            e->buffer = buffer;
            e->buffer_bytes = n;
        }
        memcpy(e->buffer, e->rows, n);
        e->rows = e->buffer;
    }
    return ERR_OK;
}

void run_deinit(struct run *run)
{
    for (uint32_t i = 0; run->slots && i < run->n_slots; i++) {
        free(run->slots[i].tokens);
        free(run->slots[i].marks);
    }
    for (uint32_t i = 0; run->ring && i < run->ring_cap; i++)
        free(run->ring[i].buffer);
    kv_pool_deinit(&run->pool);
    free(run->table_blocks);
    free(run->kept);
    free(run->slots);
    free(run->ring);
    free(run->opens);
    *run = (struct run){.state = RUN_FREE};
}

enum err run_init(struct run *run, const struct pipeline_install *install, uint32_t my_stage)
{
    const struct plan *plan = install->plan;
    uint32_t n_table = kv_blocks_of(plan->context);
    uint32_t n_blocks = install->n_blocks ? install->n_blocks : install->n_slots * n_table;
    *run = (struct run){
        .state = RUN_INSTALLED,
        .plan = *plan,
        .alias = epoch_alias(&plan->epoch),
        .my_stage = my_stage,
        .instance = install->instance,
        .n_slots = install->n_slots,
        .row_bytes = install->row_bytes,
        .chain_first = pipeline_chain_first(plan),
        .expected = 1,
        .next_step = 1,
        .ring_cap = plan->n_stages + WINDOW_EXTRA + RING_EXTRA,
    };
    run->slots = calloc(run->n_slots, sizeof *run->slots);
    run->ring = calloc(run->ring_cap, sizeof *run->ring);
    run->table_blocks = calloc((size_t)run->n_slots * n_table, sizeof *run->table_blocks);
    run->kept = calloc(n_blocks, sizeof *run->kept);
    bool wants_opens = run_is_tail(run) && !run_is_head(run);
    if (wants_opens)
        run->opens = calloc(PENDING_OPENS_MAX, sizeof *run->opens);
    enum err e = kv_pool_init(&run->pool, n_blocks);
    if (e != ERR_OK || !run->slots || !run->ring || !run->table_blocks || !run->kept ||
        (wants_opens && !run->opens)) {
        run_deinit(run);
        return ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < run->n_slots; i++) {
        run->slots[i].hash = run->chain_first;
        run->slots[i].table =
            (struct kv_table){.blocks = run->table_blocks + (size_t)i * n_table, .cap = n_table};
    }
    return ERR_OK;
}
