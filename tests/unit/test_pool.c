#include "base/clock.h"
#include "runtime/pool.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>

#include <cmocka.h>

enum { TASKS = 1000 };

struct count {
    atomic_uint runs[TASKS];
    atomic_uint bad_threads;
    uint32_t n_threads;
};

static void count_task(void *arg, uint32_t task, uint32_t thread)
{
    struct count *c = arg;
    atomic_fetch_add(&c->runs[task], 1);
    if (thread >= c->n_threads)
        atomic_fetch_add(&c->bad_threads, 1);
}

static void test_pool_runs_every_task_once(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 5; threads++) {
        _cleanup_(pool_freep) struct pool *pool = NULL;
        assert_int_equal(pool_new(threads, &pool), ERR_OK);
        assert_int_equal(pool_threads(pool), threads);
        static struct count c;
        for (uint32_t n = 0; n < 300; n++) {
            uint32_t n_tasks = n % 7 == 0 ? TASKS : n % 40;
            memset(&c, 0, sizeof c);
            c.n_threads = threads;
            pool_run(pool, count_task, &c, n_tasks);
            for (uint32_t i = 0; i < TASKS; i++)
                assert_int_equal(c.runs[i], i < n_tasks ? 1 : 0);
            assert_int_equal(c.bad_threads, 0);
        }
    }
}

static void test_pool_refuses_too_many_threads(void **state)
{
    (void)state;
    struct pool *pool = NULL;
    assert_int_equal(pool_new(POOL_THREADS_MAX + 1, &pool), ERR_LIMIT);
    assert_null(pool);
    pool_free(NULL);
}

/* Workers sleep after a while; a call must still wake them and end. */
static void meet(void *arg, uint32_t task, uint32_t thread)
{
    atomic_uint *here = arg;
    (void)task;
    (void)thread;
    atomic_fetch_add(here, 1);
    while (atomic_load(here) < 2) /* ends only when two threads are inside at once */
        continue;
}

static void test_pool_wakes_a_sleeping_worker(void **state)
{
    (void)state;
    _cleanup_(pool_freep) struct pool *pool = NULL;
    assert_int_equal(pool_new(2, &pool), ERR_OK);
    for (int i = 0; i < 20; i++) {
        atomic_uint here = 0;
        uint64_t until = clock_monotonic_us() + (uint64_t)(i % 3) * 200;
        while (clock_monotonic_us() < until) /* the worker: still spinning to surely asleep */
            continue;
        pool_run(pool, meet, &here, 2);
        assert_int_equal(here, 2);
    }
}

#if defined __x86_64__
#include <xmmintrin.h>

static void halve(void *arg, uint32_t task, uint32_t thread)
{
    float *results = arg;
    (void)thread;
    volatile float smallest_normal = 0x1p-126f;
    results[task] = smallest_normal * 0.5f;
}

static void test_pool_keeps_subnormals(void **state)
{
    (void)state;
    _mm_setcsr(_mm_getcsr() | 0x8040); /* FTZ and DAZ, as -ffast-math libraries leave them */
    _cleanup_(pool_freep) struct pool *pool = NULL;
    assert_int_equal(pool_new(3, &pool), ERR_OK);
    float results[64] = {0};
    pool_run(pool, halve, results, 64);
    for (int i = 0; i < 64; i++)
        assert_true(results[i] == 0x1p-127f);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pool_runs_every_task_once),
        cmocka_unit_test(test_pool_refuses_too_many_threads),
        cmocka_unit_test(test_pool_wakes_a_sleeping_worker),
#if defined __x86_64__
        cmocka_unit_test(test_pool_keeps_subnormals),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
