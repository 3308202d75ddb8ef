/* Who holds which KV block: random operations against a simple model in which every table has the
 * content of its positions written out, and every block what was written into it. */
#include "agent/kv_blocks.h"
#include "base/rng.h"
#include "base/util.h"
#include "runtime/stage.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { TABLES = 12, CAP = 6, BLOCKS_MAX = 40, POSITIONS = CAP * STAGE_BLOCK };

/* What is in a position: who wrote it and when; no two writes are alike. */
typedef uint32_t content;

struct world {
    struct rng rng;
    struct kv_pool pool;
    struct kv_table tables[TABLES];
    uint32_t storage[TABLES][CAP];
    uint32_t lengths[TABLES];
    content wanted[TABLES][POSITIONS];
    content blocks[BLOCKS_MAX][STAGE_BLOCK];
    content next;
    uint32_t n_copies, n_full;
};

static uint32_t below(struct world *w, uint32_t n)
{
    return (uint32_t)rng_below(&w->rng, n);
}

/* Blocks that are held, counted from the tables. */
static uint32_t check(const struct world *w)
{
    uint32_t refs[BLOCKS_MAX] = {0}, held = 0;
    for (uint32_t t = 0; t < TABLES; t++) {
        const struct kv_table *table = &w->tables[t];
        assert_int_equal(table->n, (w->lengths[t] + STAGE_BLOCK - 1) / STAGE_BLOCK);
        for (uint32_t b = 0; b < table->n; b++) {
            assert_true(table->blocks[b] < w->pool.n);
            refs[table->blocks[b]]++;
        }
        for (uint32_t p = 0; p < w->lengths[t]; p++)
            assert_int_equal(w->blocks[table->blocks[p / STAGE_BLOCK]][p % STAGE_BLOCK],
                             w->wanted[t][p]);
    }
    for (uint32_t b = 0; b < w->pool.n; b++) {
        assert_int_equal(w->pool.refs[b], refs[b]);
        held += refs[b] > 0;
    }
    assert_int_equal(w->pool.n_free, w->pool.n - held);
    bool seen[BLOCKS_MAX] = {false};
    for (uint32_t i = 0; i < w->pool.n_free; i++) {
        uint32_t b = w->pool.free[i];
        assert_true(b < w->pool.n && !seen[b] && refs[b] == 0);
        seen[b] = true;
    }
    return held;
}

static void grow(struct world *w, uint32_t t)
{
    struct kv_table *table = &w->tables[t];
    uint32_t at = w->lengths[t], n = 1 + below(w, below(w, 4) ? 20 : 200), copies = 9;
    uint32_t need = kv_need(&w->pool, table, at, at + n);
    struct kv_copy copy = {0, 0};
    enum err e = kv_grow(&w->pool, table, at, at + n, &copy, &copies);
    if (at + n > POSITIONS) {
        assert_int_equal(e, ERR_LIMIT);
        return;
    }
    if (need > w->pool.n_free + (e == ERR_OK ? need : 0)) {
        assert_int_equal(e, ERR_NO_MEMORY);
        w->n_full++;
        return;
    }
    assert_int_equal(e, ERR_OK);
    if (copies) {
        assert_int_equal(copies, 1);
        memcpy(w->blocks[copy.to], w->blocks[copy.from], sizeof w->blocks[0]);
        w->n_copies++;
    }
    for (uint32_t p = at; p < at + n; p++) {
        w->wanted[t][p] = ++w->next;
        w->blocks[table->blocks[p / STAGE_BLOCK]][p % STAGE_BLOCK] = w->next;
    }
    w->lengths[t] += n;
}

static void share(struct world *w, uint32_t from, uint32_t to)
{
    uint32_t n = below(w, w->lengths[from] + 1);
    assert_int_equal(kv_share(&w->pool, &w->tables[from], &w->tables[to], n), ERR_OK);
    memcpy(w->wanted[to], w->wanted[from], n * sizeof w->wanted[0][0]);
    w->lengths[to] = n;
}

static void cut(struct world *w, uint32_t t)
{
    uint32_t n = below(w, 3) ? below(w, w->lengths[t] + 1) : 0;
    kv_cut(&w->pool, &w->tables[t], n);
    w->lengths[t] = n;
}

static void test_random_operations_equal_the_simple_model(void **state)
{
    (void)state;
    uint32_t n_copies = 0, n_full = 0;
    for (uint64_t seed = 1; seed <= 40; seed++) {
        struct world *w = calloc(1, sizeof *w);
        assert_non_null(w);
        rng_seed(&w->rng, seed);
        assert_int_equal(kv_pool_init(&w->pool, 4 + below(w, BLOCKS_MAX - 4)), ERR_OK);
        for (uint32_t t = 0; t < TABLES; t++)
            w->tables[t] = (struct kv_table){.blocks = w->storage[t], .cap = CAP};
        for (uint32_t i = 0; i < 2000; i++) {
            uint32_t t = below(w, TABLES), other = (t + 1 + below(w, TABLES - 1)) % TABLES;
            switch (below(w, 5)) {
            default:
                grow(w, t);
                break;
            case 3:
                share(w, t, other);
                break;
            case 4:
                cut(w, t);
                break;
            }
            (void)check(w);
        }
        for (uint32_t t = 0; t < TABLES; t++) {
            kv_cut(&w->pool, &w->tables[t], 0);
            w->lengths[t] = 0;
        }
        assert_int_equal(check(w), 0);
        n_copies += w->n_copies;
        n_full += w->n_full;
        kv_pool_deinit(&w->pool);
        free(w);
    }
    assert_true(n_copies > 1000 && n_full > 1000);
}

/* Numbers are part of what stages on other nodes replay: the last one let go is given first. */
static void test_numbers_are_the_same_each_time(void **state)
{
    (void)state;
    struct kv_pool pool;
    uint32_t storage[2][4], copies;
    struct kv_table a = {storage[0], 0, 4}, b = {storage[1], 0, 4};
    struct kv_copy copy;
    assert_int_equal(kv_pool_init(&pool, 4), ERR_OK);
    assert_int_equal(kv_grow(&pool, &a, 0, 100, &copy, &copies), ERR_OK);
    assert_int_equal(a.blocks[0], 0);
    assert_int_equal(a.blocks[1], 1);
    assert_int_equal(kv_share(&pool, &a, &b, 70), ERR_OK);
    assert_int_equal(b.blocks[1], 1);
    /* `b` goes on from the middle of block 1, which `a` holds as well. */
    assert_int_equal(kv_need(&pool, &b, 70, 71), 1);
    assert_int_equal(kv_grow(&pool, &b, 70, 71, &copy, &copies), ERR_OK);
    assert_int_equal(copies, 1);
    assert_int_equal(copy.from, 1);
    assert_int_equal(copy.to, 2);
    /* Now each has its own; the first is shared still, and never written: 64 is a whole block. */
    assert_int_equal(kv_need(&pool, &a, 100, 101), 0);
    assert_int_equal(kv_need(&pool, &b, 71, 200), 2);
    assert_int_equal(kv_grow(&pool, &b, 71, 200, &copy, &copies), ERR_NO_MEMORY);
    assert_int_equal(b.n, 2);
    kv_cut(&pool, &a, 64);
    assert_int_equal(kv_grow(&pool, &b, 71, 200, &copy, &copies), ERR_OK);
    assert_int_equal(b.blocks[2], 1);
    assert_int_equal(kv_grow(&pool, &b, 200, 257, &copy, &copies), ERR_LIMIT);
    kv_pool_deinit(&pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_operations_equal_the_simple_model),
        cmocka_unit_test(test_numbers_are_the_same_each_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
