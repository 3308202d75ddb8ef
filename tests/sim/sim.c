/* The queue of events and the run. */
#include "tests/sim/sim_internal.h"

#include "base/util.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    EVENTS_MAX = 8 * 1000 * 1000,
    AGREE_US = 5 * SECOND, /* all views after healing */
    RUN_US = 60 * SECOND,  /* refusals and naps have passed by then */
    END_US = 110 * SECOND, /* after healing */
};

void *sim_alloc(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    if (!p)
        abort();
    return p;
}

void sim_fail(struct sim *w, const char *format, ...)
{
    if (w->r->failure[0])
        return;
    int n = snprintf(w->r->failure, sizeof w->r->failure,
                     "seed %llu at %.6f s: ", (unsigned long long)w->o.seed, (double)w->now / 1e6);
    va_list args;
    va_start(args, format);
    (void)vsnprintf(w->r->failure + n, sizeof w->r->failure - (size_t)n, format, args);
    va_end(args);
}

void sim_trace(struct sim *w, const char *format, ...)
{
    if (!w->o.trace)
        return;
    (void)fprintf(stderr, "%10.6f ", (double)w->now / 1e6);
    va_list args;
    va_start(args, format);
    (void)vfprintf(stderr, format, args);
    va_end(args);
    (void)fputc('\n', stderr);
}

uint32_t sim_below(struct sim *w, uint32_t n)
{
    return (uint32_t)rng_below(&w->rng, n);
}

bool sim_chance(struct sim *w, uint32_t of)
{
    return sim_below(w, of) == 0;
}

void sim_note(struct sim *w, uint64_t v)
{
    w->r->digest = (w->r->digest ^ v) * 0x100000001b3u + (w->r->digest >> 29);
}

bool sim_has(const struct sim *w, enum sim_fault fault)
{
    return !w->healed && (w->o.faults & (uint32_t)fault) != 0;
}

uint32_t sim_number(const struct sim *w, const struct node_id *id)
{
    uint32_t i = 0;
    while (i < w->n && !node_id_eq(&w->machines[i].identity.id, id))
        i++;
    return i < w->n ? i : MACHINES;
}

/* The monotonic clock of a machine, which stands still while it sleeps. */
uint64_t sim_local_us(const struct sim *w, const struct machine *m)
{
    return w->now + m->offset_us - m->slept_us;
}

/* --- the queue --- */

static bool earlier(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static struct event *push(struct sim *w, const struct event *e)
{
    if (w->n_heap == w->cap_heap) {
        w->cap_heap = w->cap_heap ? 2 * w->cap_heap : 256;
        w->heap = realloc(w->heap, w->cap_heap * sizeof *w->heap);
        if (!w->heap)
            abort();
    }
    uint32_t i = w->n_heap++;
    while (i > 0 && earlier(e, &w->heap[(i - 1) / 2])) {
        w->heap[i] = w->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    w->heap[i] = *e;
    return &w->heap[i];
}

/* The event may be filled further until the next call: its place in the order is fixed. */
struct event *sim_post(struct sim *w, uint64_t at, enum kind kind, uint32_t machine)
{
    struct event e = {
        .at = MAX_OF(at, w->now), .order = w->order++, .kind = kind, .machine = machine};
    if (machine < MACHINES)
        e.boot = w->machines[machine].boot;
    return push(w, &e);
}

static struct event pop(struct sim *w)
{
    struct event first = w->heap[0], last = w->heap[--w->n_heap];
    uint32_t i = 0;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= w->n_heap)
            break;
        if (c + 1 < w->n_heap && earlier(&w->heap[c + 1], &w->heap[c]))
            c++;
        if (!earlier(&w->heap[c], &last))
            break;
        w->heap[i] = w->heap[c];
        i = c;
    }
    if (w->n_heap > 0)
        w->heap[i] = last;
    return first;
}

/* --- events --- */

static void check_healing(struct sim *w)
{
    char what[256] = "";
    uint64_t since = w->now - w->heal_us;
    if (!w->agreed && check_agree(w, what)) {
        w->agreed = true;
        w->r->agreed_us = since;
    } else if (!w->agreed && since > AGREE_US) {
        sim_fail(w, "views differ %.1f s after healing: %s", (double)since / 1e6, what);
    }
    if (!w->ran && check_runs(w, what)) {
        w->ran = true;
        w->r->ran_us = since;
        chaos_last_requests(w);
    } else if (!w->ran && since > RUN_US) {
        sim_fail(w, "%.1f s after healing: %s", (double)since / 1e6, what);
    }
    sim_post(w, w->now + 100 * MS, EV_CHECK, NOBODY);
}

static bool all_done(const struct sim *w)
{
    if (!w->healed || !w->agreed || !w->ran)
        return false;
    for (uint32_t i = 0; i < w->n_requests; i++) {
        if (w->requests[i].state != REQUEST_DONE)
            return false;
    }
    return true;
}

static void handle_machine(struct sim *w, struct machine *m, struct event *e)
{
    switch (e->kind) {
    case EV_TICK:
        if (m->tick_at_us == e->at)
            machine_tick(w, m);
        break;
    case EV_PIPE_TICK:
        if (m->pipe_tick_at_us == e->at)
            stage_tick(w, m);
        break;
    case EV_DATAGRAM:
        net_datagram_in(w, m, e->p);
        break;
    case EV_DIAL:
        net_dialled(w, m, e);
        break;
    case EV_READY:
        net_ready(w, m, e->x);
        break;
    case EV_LINK_DIAL:
        net_link_dialled(w, m, e->x, e->y);
        break;
    case EV_MEASURED:
        (void)machine_step(w, m,
                           &(struct node_event){.type = NODE_EVENT_BANDWIDTH,
                                                .peer = w->machines[e->x].identity.id,
                                                .address = w->machines[e->x].address,
                                                .bytes_per_s = e->y});
        break;
    case EV_FOUND:
        (void)machine_step(w, m, &(struct node_event){.type = NODE_EVENT_FOUND, .found = e->p});
        break;
    case EV_ANNOUNCE:
        net_announce(w, m, false);
        sim_post(w, w->now + 4 * SECOND + sim_below(w, 2 * SECOND), EV_ANNOUNCE, m->number);
        break;
    case EV_INBOX:
        stage_inbox(w, m);
        break;
    case EV_LOOP_MAIL:
        machine_mail(w, m);
        break;
    case EV_COMPUTED:
        stage_computed(w, m);
        break;
    case EV_LOADED:
        machine_loaded(w, m, e->x);
        break;
    case EV_STOP_LATE:
        machine_kill(w, m, false, true);
        break;
    default:
        break;
    }
}

static void handle(struct sim *w, struct event *e)
{
    if (e->machine < MACHINES) {
        struct machine *m = &w->machines[e->machine];
        if (!m->alive || m->boot != e->boot)
            return;
        if (m->asleep) { /* it does this when it wakes */
            struct event later = *e;
            e->p = NULL;
            bool tick = (later.kind == EV_TICK && m->tick_at_us == later.at) ||
                        (later.kind == EV_PIPE_TICK && m->pipe_tick_at_us == later.at);
            later.at = m->wake_at_us + 1;
            later.order = w->order++;
            if (tick && later.kind == EV_TICK)
                m->tick_at_us = later.at;
            if (tick && later.kind == EV_PIPE_TICK)
                m->pipe_tick_at_us = later.at;
            (void)push(w, &later);
            return;
        }
        handle_machine(w, m, e);
        return;
    }
    switch (e->kind) {
    case EV_READ:
        net_read(w, e);
        break;
    case EV_DEADLINE: {
        struct conn_end *end = &w->conns[e->x]->ends[e->y];
        if (end->open && !end->keyed)
            net_down(w, e->x, e->y, NODE_DOWN_TIMED_OUT);
        break;
    }
    case EV_DOWN:
        net_down(w, e->x, e->y, NODE_DOWN_CLOSED);
        break;
    case EV_START:
        w->machines[e->x].powered = true;
        if (!w->machines[e->x].alive)
            machine_start(w, &w->machines[e->x]);
        break;
    case EV_WAKE:
        machine_wake(w, &w->machines[e->x]);
        break;
    case EV_PERSON:
        chaos_person(w);
        break;
    case EV_WANT:
        chaos_want(w, e->x, e->y != 0);
        break;
    case EV_SUBMIT:
        chaos_submit(w, e->x);
        break;
    case EV_CANCEL:
        chaos_cancel(w, e->x);
        break;
    case EV_NAP:
        chaos_nap(w, e->x);
        break;
    case EV_CLONE_GONE:
        chaos_clone_gone(w);
        break;
    case EV_FAULT:
        chaos_fault(w);
        break;
    case EV_DISK:
        machine_disk(w, &w->machines[e->x], false);
        break;
    case EV_UNBLOCK:
        chaos_unblock(w, e->x, e->y);
        break;
    case EV_HEAL:
        chaos_heal(w);
        break;
    case EV_CHECK:
        check_healing(w);
        break;
    default:
        break;
    }
}

static void tear_down(struct sim *w)
{
    for (uint32_t i = 0; i < w->n_heap; i++)
        free(w->heap[i].p);
    free(w->heap);
    for (uint32_t i = 0; i < w->n_all; i++) {
        struct machine *m = &w->machines[i];
        if (m->alive)
            machine_kill(w, m, true, false);
        free(m->trust_bytes);
        free(m->control_bytes);
        identity_wipe(&m->identity);
    }
    net_free(w);
    free(w->outputs);
    free(w);
}

void sim_run(const struct sim_options *options, struct sim_result *ret)
{
    struct sim *w = sim_alloc(sizeof *w);
    *ret = (struct sim_result){.digest = 1};
    w->o = *options;
    w->r = ret;
    w->outputs = sim_alloc(OUTPUTS * sizeof *w->outputs);
    rng_seed(&w->rng, options->seed);
    chaos_begin(w);
    uint32_t n_events = 0;
    while (w->n_heap > 0 && !ret->failure[0] && !all_done(w)) {
        struct event e = pop(w);
        w->now = e.at;
        sim_note(w, e.at ^ ((uint64_t)e.kind << 56) ^ e.x);
        handle(w, &e);
        free(e.p);
        if (++n_events > EVENTS_MAX)
            sim_fail(w, "the cluster never rests");
        if (w->healed && w->now > w->heal_us + END_US)
            break;
    }
    if (!ret->failure[0])
        check_all_ended(w);
    ret->virtual_us = w->now;
    ret->n_plans = w->n_plans;
    tear_down(w);
}
