/* Claiming: `state` holds the number of the call in its high and the next task in its low half. A
 * worker reads the state, then the call's fields, then claims by compare-and-swap; fields of
 * another call cannot slip in, because the swap fails once the state has moved on. */
#include "runtime/pool.h"
#include "base/clock.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

/* Longer than the gaps between the products of a layer, far shorter than anyone would notice. */
enum { SPIN_US = 50, SPINS_PER_LOOK = 64 };

struct worker {
    struct pool *pool;
    pthread_t thread;
    uint32_t index;
};

struct pool {
    uint32_t n_threads; /* with the caller */
    struct worker *workers;
    uint32_t n_started;

    _Atomic uint64_t state;
    _Atomic(pool_fn *) fn;
    _Atomic(void *) arg;
    _Atomic uint32_t n_tasks, n_done;

    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    atomic_uint n_asleep; /* workers waiting for `wake` */
    atomic_bool caller_waits, ending;
};

static inline void relax(void)
{
#if defined __x86_64__
    __builtin_ia32_pause();
#elif defined __aarch64__
    __asm__ volatile("yield");
#endif
}

static uint32_t call_of(uint64_t state)
{
    return (uint32_t)(state >> 32);
}

/* Counts `n` tasks of the present call of n_tasks as done. */
static void report_done(struct pool *pool, uint32_t n, uint32_t n_tasks)
{
    if (atomic_fetch_add(&pool->n_done, n) + n != n_tasks || !atomic_load(&pool->caller_waits))
        return;
    (void)pthread_mutex_lock(&pool->lock);
    (void)pthread_cond_signal(&pool->done);
    (void)pthread_mutex_unlock(&pool->lock);
}

/* Runs tasks of the present call until none is left unclaimed; returns the call's number. What it
 * did is counted at the end, which the call cannot pass before. */
static uint32_t work(struct pool *pool, uint32_t thread)
{
    uint64_t state = atomic_load(&pool->state);
    uint32_t n_mine = 0;
    for (;;) {
        pool_fn *fn = atomic_load_explicit(&pool->fn, memory_order_relaxed);
        void *arg = atomic_load_explicit(&pool->arg, memory_order_relaxed);
        uint32_t n = atomic_load_explicit(&pool->n_tasks, memory_order_relaxed);
        uint32_t task = (uint32_t)state;
        if (task >= n) {
            if (n_mine > 0)
                report_done(pool, n_mine, n);
            n_mine = 0;
            uint64_t now = atomic_load(&pool->state);
            if (now == state)
                return call_of(state);
            state = now;
            continue;
        }
        if (!atomic_compare_exchange_weak(&pool->state, &state, state + 1))
            continue;
        fn(arg, task, thread);
        n_mine++;
        state = atomic_load(&pool->state);
    }
}

/* True while the call `seen` is still the present one and nobody asked to end. */
static bool unchanged(struct pool *pool, uint32_t seen)
{
    return call_of(atomic_load(&pool->state)) == seen && !atomic_load(&pool->ending);
}

static void wait_for_call(struct pool *pool, uint32_t seen)
{
    uint64_t until = clock_monotonic_us() + SPIN_US;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (!unchanged(pool, seen))
                return;
            relax();
        }
    } while (clock_monotonic_us() < until);
    (void)pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->n_asleep, 1);
    while (unchanged(pool, seen))
        (void)pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->n_asleep, 1);
    (void)pthread_mutex_unlock(&pool->lock);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    (void)fesetenv(FE_DFL_ENV); /* also clears FTZ and DAZ that a library may have set */
    uint32_t seen = 0;
    while (!atomic_load(&w->pool->ending)) {
        wait_for_call(w->pool, seen);
        seen = work(w->pool, w->index);
    }
    return NULL;
}

static void wake_workers(struct pool *pool)
{
    if (atomic_load(&pool->n_asleep) == 0)
        return;
    (void)pthread_mutex_lock(&pool->lock);
    (void)pthread_cond_broadcast(&pool->wake);
    (void)pthread_mutex_unlock(&pool->lock);
}

static void wait_until_done(struct pool *pool, uint32_t n)
{
    uint64_t until = clock_monotonic_us() + SPIN_US;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (atomic_load(&pool->n_done) == n)
                return;
            relax();
        }
    } while (clock_monotonic_us() < until);
    (void)pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->caller_waits, true);
    while (atomic_load(&pool->n_done) != n)
        (void)pthread_cond_wait(&pool->done, &pool->lock);
    atomic_store(&pool->caller_waits, false);
    (void)pthread_mutex_unlock(&pool->lock);
}

void pool_run(struct pool *pool, pool_fn *fn, void *arg, uint32_t n_tasks)
{
    (void)fesetenv(FE_DFL_ENV);
    if (pool->n_threads == 1 || n_tasks <= 1) {
        for (uint32_t i = 0; i < n_tasks; i++)
            fn(arg, i, 0);
        return;
    }
    /* The last call's tasks are all done, so nobody can claim until the state is stored. The state
     * of an ended call with new fields: its low half is moved out of reach first. */
    uint64_t call = call_of(atomic_load(&pool->state));
    atomic_store(&pool->state, call << 32 | UINT32_MAX);
    atomic_store(&pool->fn, fn);
    atomic_store(&pool->arg, arg);
    atomic_store(&pool->n_tasks, n_tasks);
    atomic_store(&pool->n_done, 0);
    atomic_store(&pool->state, (uint64_t)(uint32_t)(call + 1) << 32);
    wake_workers(pool);
    (void)work(pool, 0);
    wait_until_done(pool, n_tasks);
}

uint32_t pool_threads(const struct pool *pool)
{
    return pool->n_threads;
}

static uint32_t cpus_usable(void)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);
#if defined __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        n = CPU_COUNT(&set);
#endif
    return n < 1 ? 1 : n > POOL_THREADS_MAX ? POOL_THREADS_MAX : (uint32_t)n;
}

enum err pool_new(uint32_t n_threads, struct pool **ret)
{
    if (n_threads > POOL_THREADS_MAX)
        return ERR_LIMIT;
    if (n_threads == 0)
        n_threads = cpus_usable();
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return ERR_NO_MEMORY;
    pool->n_threads = n_threads;
    (void)pthread_mutex_init(&pool->lock, NULL);
    (void)pthread_cond_init(&pool->wake, NULL);
    (void)pthread_cond_init(&pool->done, NULL);
    pool->workers = calloc(n_threads, sizeof *pool->workers);
    enum err e = pool->workers ? ERR_OK : ERR_NO_MEMORY;
    for (uint32_t i = 1; e == ERR_OK && i < n_threads; i++) {
        struct worker *w = &pool->workers[i];
        *w = (struct worker){.pool = pool, .index = i};
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0)
            e = ERR_IO;
        else
            pool->n_started++;
    }
    if (e != ERR_OK) {
        pool_free(pool);
        return e;
    }
    *ret = pool;
    return ERR_OK;
}

void pool_free(struct pool *pool)
{
    if (!pool)
        return;
    (void)pthread_mutex_lock(&pool->lock);
    atomic_store(&pool->ending, true);
    (void)pthread_cond_broadcast(&pool->wake);
    (void)pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 1; i <= pool->n_started; i++)
        (void)pthread_join(pool->workers[i].thread, NULL);
    (void)pthread_mutex_destroy(&pool->lock);
    (void)pthread_cond_destroy(&pool->wake);
    (void)pthread_cond_destroy(&pool->done);
    free(pool->workers);
    free(pool);
}
