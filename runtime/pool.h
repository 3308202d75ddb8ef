/* A fixed set of compute threads that run the tasks of one call at a time.
 *
 * The caller is thread 0 and takes part. Tasks are claimed one by one (dynamic shares): results
 * must not depend on who does what, which the arithmetic (kernels/arithmetic.h) guarantees. Workers
 * spin for some tens of microseconds after a call and then sleep, so idle costs nothing. Every
 * thread computes with the default floating-point environment (no FTZ/DAZ).
 * Owned by one thread: pool_run is never called from two threads at once, nor from a task. */
#ifndef COVEY_RUNTIME_POOL_H
#define COVEY_RUNTIME_POOL_H

#include "base/err.h"
#include "base/util.h"

#include <stdint.h>

struct pool;

enum { POOL_THREADS_MAX = 256 };

/* `n_threads` counts the caller; 0 means one per CPU this process may use. ERR_LIMIT above the
 * maximum, ERR_NO_MEMORY, ERR_IO when the system gives no thread. */
enum err pool_new(uint32_t n_threads, struct pool **ret);
/* Ends and joins the workers. NULL is fine. */
void pool_free(struct pool *pool);
DEFINE_CLEANUP(struct pool, pool_free)

uint32_t pool_threads(const struct pool *pool);

/* One task: its number, 0 <= task < n_tasks, and who runs it, 0 <= thread < pool_threads. */
typedef void pool_fn(void *arg, uint32_t task, uint32_t thread);

/* Runs all tasks and returns when the last has ended; what they wrote is then visible. */
void pool_run(struct pool *pool, pool_fn *fn, void *arg, uint32_t n_tasks);

#endif
