/* The blocks of a KV cache as a core: who holds which, counted, without the bytes.
 *
 * A cache has n blocks of STAGE_BLOCK positions. A table is the list of blocks of one sequence, the
 * first for its first positions. Sequences that begin alike hold the same blocks; a block is
 * written only while one table holds it, so who goes on from a part of a shared block gets a copy
 * (copy on write), which the caller has the stage make. Everything is deterministic: the same calls
 * give the same numbers. The caller owns the storage of the tables.
 *
 * Not here: tokens, which sequence is kept and which goes (agent/pipeline_slot.c and
 * pipeline_schedule.c). */
#ifndef COVEY_AGENT_KV_BLOCKS_H
#define COVEY_AGENT_KV_BLOCKS_H

#include "base/err.h"

#include <stdint.h>

struct kv_pool {
    uint32_t n, n_free;
    uint32_t *refs; /* [n]: tables that hold it */
    uint32_t *free; /* [n_free]: the last one is given next */
};

struct kv_table {
    uint32_t *blocks; /* [cap] */
    uint32_t n, cap;
};

struct kv_copy {
    uint32_t from, to;
};

/* Blocks of so many positions. */
uint32_t kv_blocks_of(uint32_t n_positions);

/* ERR_NO_MEMORY. */
enum err kv_pool_init(struct kv_pool *pool, uint32_t n);
void kv_pool_deinit(struct kv_pool *pool);

/* Free blocks that it takes to write the positions from `position` up to `end`: what is beyond the
 * table, and a copy of a shared block that `position` is in. The table holds `position` positions,
 * no block more. */
uint32_t kv_need(const struct kv_pool *pool, const struct kv_table *table, uint32_t position,
                 uint32_t end);

/* Takes them. *ret_copies says whether *ret_copy is to be made before anything is written.
 * ERR_LIMIT (beyond cap) and ERR_NO_MEMORY change nothing. */
enum err kv_grow(struct kv_pool *pool, struct kv_table *table, uint32_t position, uint32_t end,
                 struct kv_copy *ret_copy, uint32_t *ret_copies);

/* Gives back what the first n positions do not need. */
void kv_cut(struct kv_pool *pool, struct kv_table *table, uint32_t n_positions);

/* `to` lets go what it has and holds the blocks of the first n positions of `from`, another table,
 * which has that many. ERR_LIMIT (beyond cap) changes nothing. */
enum err kv_share(struct kv_pool *pool, const struct kv_table *from, struct kv_table *to,
                  uint32_t n_positions);

#endif
