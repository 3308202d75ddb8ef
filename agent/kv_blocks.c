#include "agent/kv_blocks.h"

#include "runtime/stage.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

uint32_t kv_blocks_of(uint32_t n_positions)
{
    return n_positions / STAGE_BLOCK + (n_positions % STAGE_BLOCK > 0);
}

enum err kv_pool_init(struct kv_pool *pool, uint32_t n)
{
    *pool = (struct kv_pool){.n = n, .n_free = n};
    pool->refs = calloc(n, sizeof *pool->refs);
    pool->free = malloc(n * sizeof *pool->free);
    if (!pool->refs || !pool->free) {
        kv_pool_deinit(pool);
        return ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n; i++)
        pool->free[i] = n - 1 - i;
    return ERR_OK;
}

void kv_pool_deinit(struct kv_pool *pool)
{
    free(pool->refs);
    free(pool->free);
    *pool = (struct kv_pool){.n = 0};
}

static uint32_t take(struct kv_pool *pool)
{
    assert(pool->n_free > 0);
    uint32_t block = pool->free[--pool->n_free];
    assert(pool->refs[block] == 0);
    pool->refs[block] = 1;
    return block;
}

static void let_go(struct kv_pool *pool, uint32_t block)
{
    assert(pool->refs[block] > 0);
    if (--pool->refs[block] == 0)
        pool->free[pool->n_free++] = block;
}

/* Is the block that `position` begins in, if it holds something, also another's? */
static bool copies(const struct kv_pool *pool, const struct kv_table *table, uint32_t position)
{
    return position % STAGE_BLOCK > 0 && pool->refs[table->blocks[position / STAGE_BLOCK]] > 1;
}

uint32_t kv_need(const struct kv_pool *pool, const struct kv_table *table, uint32_t position,
                 uint32_t end)
{
    assert(table->n == kv_blocks_of(position) && position <= end);
    if (position == end)
        return 0;
    return kv_blocks_of(end) - table->n + copies(pool, table, position);
}

enum err kv_grow(struct kv_pool *pool, struct kv_table *table, uint32_t position, uint32_t end,
                 struct kv_copy *ret_copy, uint32_t *ret_copies)
{
    uint32_t n = kv_blocks_of(end);
    *ret_copies = 0;
    if (n > table->cap)
        return ERR_LIMIT;
    if (kv_need(pool, table, position, end) > pool->n_free)
        return ERR_NO_MEMORY;
    if (position < end && copies(pool, table, position)) {
        uint32_t *at = &table->blocks[position / STAGE_BLOCK];
        *ret_copy = (struct kv_copy){.from = *at, .to = take(pool)};
        *ret_copies = 1;
        let_go(pool, *at);
        *at = ret_copy->to;
    }
    while (position < end && table->n < n)
        table->blocks[table->n++] = take(pool);
    return ERR_OK;
}

void kv_cut(struct kv_pool *pool, struct kv_table *table, uint32_t n_positions)
{
    while (table->n > kv_blocks_of(n_positions))
        let_go(pool, table->blocks[--table->n]);
}

enum err kv_share(struct kv_pool *pool, const struct kv_table *from, struct kv_table *to,
                  uint32_t n_positions)
{
    uint32_t n = kv_blocks_of(n_positions);
    assert(from != to && n <= from->n);
    if (n > to->cap)
        return ERR_LIMIT;
    for (uint32_t i = 0; i < n; i++)
        pool->refs[from->blocks[i]]++;
    kv_cut(pool, to, 0);
    memcpy(to->blocks, from->blocks, n * sizeof *to->blocks);
    to->n = n;
    return ERR_OK;
}
