#include "agent/spare.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

enum { BOUNDS_MAX = 2 * SPARE_MEMBERS_MAX * SPARE_RUNS_MAX + 2 };

/* ---- dividing ---- */

bool spare_holds(const struct spare_holding *h, uint32_t block)
{
    for (uint32_t i = 0; i < h->n_runs; i++) {
        if (block >= h->runs[i].first && block - h->runs[i].first < h->runs[i].n)
            return true;
    }
    return false;
}

static uint32_t n_blocks_of(const struct spare_model *m)
{
    uint64_t n = m->n_bytes / SPARE_BLOCK_BYTES + (m->n_bytes % SPARE_BLOCK_BYTES != 0);
    return (uint32_t)MIN_OF(n, (uint64_t)SPARE_BLOCKS_MAX);
}

static uint64_t bytes_of(const struct spare_model *m, uint32_t first, uint32_t n)
{
    uint64_t from = (uint64_t)first * SPARE_BLOCK_BYTES;
    return MIN_OF(from + (uint64_t)n * SPARE_BLOCK_BYTES, m->n_bytes) - from;
}

static uint64_t present_of(const struct spare_holding *h)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < h->n_runs; i++)
        n += h->runs[i].n;
    return n;
}

static int by_number(const void *a, const void *b)
{
    const uint32_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

/* Where any run begins or ends, ascending and without doubles: between two of them every member
 * holds all or nothing. */
static uint32_t bounds_of(const struct spare_view *v, const struct spare_model *m, uint32_t *ret)
{
    uint32_t n_blocks = n_blocks_of(m), n = 0, n_ret = 0;
    ret[n++] = 0;
    ret[n++] = n_blocks;
    for (uint32_t i = 0; i < v->n_members; i++) {
        for (uint32_t k = 0; k < m->held[i].n_runs; k++) {
            const struct spare_run *r = &m->held[i].runs[k];
            if (r->first >= n_blocks || r->n > n_blocks - r->first)
                continue;
            ret[n++] = r->first;
            ret[n++] = r->first + r->n;
        }
    }
    qsort(ret, n, sizeof *ret, by_number);
    for (uint32_t i = 0; i < n; i++) {
        if (n_ret == 0 || ret[n_ret - 1] != ret[i])
            ret[n_ret++] = ret[i];
    }
    return n_ret;
}

static bool takes_before(const struct spare_view *v, const uint64_t *room,
                         const struct spare_model *m, uint32_t a, uint32_t b)
{
    uint64_t have_a = present_of(&m->held[a]), have_b = present_of(&m->held[b]);
    if (have_a != have_b)
        return have_a > have_b;
    if (room[a] != room[b])
        return room[a] > room[b];
    return memcmp(v->members[a].id.bytes, v->members[b].id.bytes, sizeof v->members[a].id.bytes) <
           0;
}

static uint32_t takers_of(const struct spare_view *v, const uint64_t *room,
                          const struct spare_model *m, uint32_t *ret)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->n_members; i++) {
        if (room[i] < SPARE_BLOCK_BYTES)
            continue;
        uint32_t at = n++;
        for (; at > 0 && takes_before(v, room, m, i, ret[at - 1]); at--)
            ret[at] = ret[at - 1];
        ret[at] = i;
    }
    return n;
}

static void add_own(struct spare_share *s, uint32_t first, uint32_t n)
{
    struct spare_run *last = s->n_own ? &s->own[s->n_own - 1] : NULL;
    if (last && last->first + last->n == first)
        last->n += n;
    else if (s->n_own < SPARE_ORDER_RUNS_MAX)
        s->own[s->n_own++] = (struct spare_run){first, n};
}

/* A run that `sole` alone holds goes to those that come first, as far as their room reaches. */
static void give_away(const struct spare_view *v, const struct spare_model *m, uint64_t *room,
                      const uint32_t *takers, uint32_t n_takers, struct spare_run run,
                      struct spare_share *s)
{
    for (uint32_t i = 0; i < n_takers && run.n > 0; i++) {
        uint32_t t = takers[i];
        if (spare_holds(&m->held[t], run.first))
            continue;
        uint32_t n = (uint32_t)MIN_OF((uint64_t)run.n, room[t] / SPARE_BLOCK_BYTES);
        if (n == 0)
            continue;
        room[t] -= (uint64_t)n * SPARE_BLOCK_BYTES;
        s->takes_bytes[t] += bytes_of(m, run.first, n);
        if (t == v->self)
            add_own(s, run.first, n);
        run.first += n;
        run.n -= n;
    }
    if (run.n > 0)
        s->homeless_bytes += bytes_of(m, run.first, run.n);
}

static void divide_one(const struct spare_view *v, const struct spare_model *m, uint64_t *room,
                       uint32_t *bounds, struct spare_share *s)
{
    uint32_t takers[SPARE_MEMBERS_MAX];
    uint32_t n_takers = takers_of(v, room, m, takers), n_bounds = bounds_of(v, m, bounds);
    *s = (struct spare_share){.n_own = 0};
    for (uint32_t b = 0; b + 1 < n_bounds; b++) {
        struct spare_run run = {bounds[b], bounds[b + 1] - bounds[b]};
        uint32_t n_holders = 0, holder = 0;
        for (uint32_t i = 0; i < v->n_members; i++) {
            if (spare_holds(&m->held[i], run.first)) {
                n_holders++;
                holder = i;
            }
        }
        uint64_t bytes = bytes_of(m, run.first, run.n);
        if (n_holders == 0) {
            s->nowhere_bytes += bytes;
        } else if (n_holders > 1) {
            s->twice_bytes += bytes;
        } else {
            s->once_bytes += bytes;
            s->sole[holder] = true;
            give_away(v, m, room, takers, n_takers, run, s);
        }
    }
}

void spare_divide(const struct spare_view *v, struct spare_share *ret)
{
    uint64_t room[SPARE_MEMBERS_MAX];
    uint32_t bounds[BOUNDS_MAX];
    bool done[SPARE_MODELS_MAX] = {false};
    for (uint32_t i = 0; i < v->n_members; i++)
        room[i] = v->members[i].room_bytes;
    for (uint32_t k = 0; k < v->n_models; k++) {
        uint32_t next = v->n_models;
        for (uint32_t i = 0; i < v->n_models; i++) {
            if (!done[i] &&
                (next == v->n_models || memcmp(v->models[i].id.bytes, v->models[next].id.bytes,
                                               sizeof v->models[i].id.bytes) < 0))
                next = i;
        }
        done[next] = true;
        divide_one(v, &v->models[next], room, bounds, &ret[next]);
    }
}

/* ---- pace ---- */

static bool somebody_computes(const struct spare_view *v)
{
    for (uint32_t i = 0; i < v->n_members; i++) {
        if (v->members[i].computes)
            return true;
    }
    return false;
}

static void order_of(const struct spare_model *m, const struct spare_share *s,
                     struct spare_order *ret)
{
    uint32_t left = SPARE_ORDER_BLOCKS;
    *ret = (struct spare_order){.model = m->id};
    for (uint32_t i = 0; i < s->n_own && left > 0; i++) {
        uint32_t n = MIN_OF(s->own[i].n, left);
        ret->runs[ret->n_runs++] = (struct spare_run){s->own[i].first, n};
        left -= n;
    }
}

enum spare_action spare_step(struct spare_pace *p, const struct spare_view *view,
                             const struct spare_share *shares, bool busy, uint64_t now_us,
                             struct spare_order *ret)
{
    const struct spare_model *first = NULL;
    const struct spare_share *share = NULL;
    bool still_wanted = false;
    for (uint32_t i = 0; i < view->n_models; i++) {
        if (shares[i].n_own == 0)
            continue;
        still_wanted |= p->running && hash256_eq(&view->models[i].id, &p->model);
        if (!first) {
            first = &view->models[i];
            share = &shares[i];
        }
    }
    if (busy || somebody_computes(view))
        p->quiet_from_us = now_us + SPARE_QUIET_US;
    if (!p->has_work && first)
        p->work_since_us = now_us;
    p->has_work = first != NULL;
    bool quiet = now_us >= p->quiet_from_us;
    if (p->running)
        return quiet && still_wanted ? SPARE_WAIT : SPARE_STOP;
    if (!first || !quiet || now_us < p->work_since_us + SPARE_SETTLE_US || now_us < p->retry_us)
        return SPARE_WAIT;
    order_of(first, share, ret);
    p->running = true;
    p->model = first->id;
    return SPARE_FETCH;
}

void spare_done(struct spare_pace *p, enum err how, uint64_t got_bytes, uint64_t now_us)
{
    p->running = false;
    if (how == ERR_CANCELLED)
        return;
    if (how == ERR_OK && got_bytes > 0) {
        p->n_failed = 0;
        return;
    }
    uint64_t rest_us = (uint64_t)SPARE_RETRY_US << MIN_OF(p->n_failed, 10u);
    p->retry_us = now_us + MIN_OF(rest_us, (uint64_t)SPARE_RETRY_MAX_US);
    p->n_failed++;
}

uint64_t spare_next_due(const struct spare_pace *p, uint64_t now_us)
{
    return now_us + (p->running || p->has_work ? SPARE_WATCH_US : SPARE_LOOK_US);
}
