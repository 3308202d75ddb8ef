/* Events in, effects out: epochs, routes, peers, the order of work within one call. */
#include "agent/pipeline_internal.h"

#include "base/util.h"

#include <assert.h>
#include <string.h>

/* --- effects and peers --- */

struct pipeline_effect *effect_new(struct pipeline *p, enum pipeline_effect_type type)
{
    /* Each handler's effects and each unit of the pump are bounded; see EFFECTS_ROOM. */
    assert(p->n_effects < PIPELINE_EFFECTS_MAX);
    struct pipeline_effect *effect = &p->effects[p->n_effects++];
    memset(effect, 0, sizeof *effect);
    effect->type = type;
    return effect;
}

uint32_t effects_room(const struct pipeline *p)
{
    return PIPELINE_EFFECTS_MAX - p->n_effects;
}

bool is_self(const struct pipeline *p, const struct node_id *id)
{
    return node_id_eq(&p->self, id);
}

static struct peer *peer_find(struct pipeline *p, const struct node_id *id)
{
    for (uint32_t i = 0; i < PIPELINE_PEERS_MAX; i++) {
        if (p->peers[i].used && node_id_eq(&p->peers[i].id, id))
            return &p->peers[i];
    }
    return NULL;
}

/* Makes room by forgetting one that is down. NULL when all are up. */
static struct peer *peer_get(struct pipeline *p, const struct node_id *id)
{
    struct peer *peer = peer_find(p, id);
    for (uint32_t i = 0; i < PIPELINE_PEERS_MAX && !peer; i++)
        peer = p->peers[i].used ? NULL : &p->peers[i];
    for (uint32_t i = 0; i < PIPELINE_PEERS_MAX && !peer; i++)
        peer = p->peers[i].up ? NULL : &p->peers[i];
    if (peer && (!peer->used || !node_id_eq(&peer->id, id)))
        *peer = (struct peer){.id = *id, .used = true};
    return peer;
}

bool peer_is_up(const struct pipeline *p, const struct node_id *id)
{
    if (is_self(p, id))
        return true;
    for (uint32_t i = 0; i < PIPELINE_PEERS_MAX; i++) {
        if (p->peers[i].used && node_id_eq(&p->peers[i].id, id))
            return p->peers[i].up;
    }
    return false;
}

void peer_want(struct pipeline *p, const struct node_id *id)
{
    struct peer *peer = is_self(p, id) ? NULL : peer_get(p, id);
    if (!peer || peer->up || (peer->wanted_at != 0 && p->now - peer->wanted_at < WANT_LINK_US))
        return;
    peer->wanted_at = p->now;
    effect_new(p, PIPELINE_DO_WANT_LINK)->want_link = *id;
}

struct pipeline_send *send_new(struct pipeline *p, const struct node_id *to, uint8_t type,
                               uint64_t epoch, uint64_t step)
{
    assert(!is_self(p, to));
    if (!peer_is_up(p, to)) {
        peer_want(p, to);
        return NULL;
    }
    struct pipeline_send *send = &effect_new(p, PIPELINE_DO_SEND)->send;
    send->to = *to;
    send->type = type;
    send->epoch = epoch;
    send->step_number = step;
    return send;
}

void send_error(struct pipeline *p, const struct node_id *to, uint64_t epoch, uint64_t step,
                const struct request_id *request, uint32_t attempt, enum err e)
{
    struct pipeline_send *send = send_new(p, to, FRAME_ERROR, epoch, step);
    if (!send)
        return;
    send->error.request = *request;
    send->error.attempt = attempt;
    send->error.code = frame_error_of(e);
}

const struct frame *pipeline_frame(const struct pipeline_send *send, struct frame *scratch)
{
    if (send->type == FRAME_STEP)
        return send->step;
    struct frame *f = scratch;
    f->header =
        (struct frame_header){.type = send->type, .epoch = send->epoch, .step = send->step_number};
    switch (send->type) {
    case FRAME_OPEN:
        f->open = send->open;
        break;
    case FRAME_TOKEN:
        f->token = send->token;
        break;
    case FRAME_CANCEL:
        f->cancel = send->cancel;
        break;
    case FRAME_CREDIT:
        f->credit = send->credit;
        break;
    case FRAME_HAVE:
        f->have = send->have;
        break;
    case FRAME_STALE:
        f->stale = send->stale;
        break;
    case FRAME_CACHED:
        f->header.flags = FRAME_OPTIONAL;
        f->cached = send->cached;
        break;
    default:
        f->error = send->error;
        break;
    }
    return f;
}

/* --- epochs and routes --- */

bool run_executes(const struct run *run)
{
    return (run->state == RUN_CURRENT || run->state == RUN_PREVIOUS) && !run->suspended;
}

struct run *run_by_alias(struct pipeline *p, uint64_t alias)
{
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        if (p->runs[i].state != RUN_FREE && p->runs[i].alias == alias)
            return &p->runs[i];
    }
    return NULL;
}

static struct run *run_by_epoch(struct pipeline *p, const struct epoch *epoch)
{
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        if (p->runs[i].state != RUN_FREE && epoch_eq(&p->runs[i].plan.epoch, epoch))
            return &p->runs[i];
    }
    return NULL;
}

struct route *route_of(struct pipeline *p, const struct hash256 *model)
{
    for (uint32_t i = 0; i < PIPELINE_MODELS_MAX; i++) {
        if (p->routes[i].used && hash256_eq(&p->routes[i].model, model))
            return &p->routes[i];
    }
    return NULL;
}

/* A known one; else a new one, in place of one without a plan when the table is full. */
static struct route *route_get(struct pipeline *p, const struct hash256 *model)
{
    struct route *route = route_of(p, model);
    for (uint32_t i = 0; i < PIPELINE_MODELS_MAX && !route; i++)
        route = p->routes[i].used ? NULL : &p->routes[i];
    for (uint32_t i = 0; i < PIPELINE_MODELS_MAX && !route; i++)
        route = p->routes[i].present ? NULL : &p->routes[i];
    if (route && (!route->used || !hash256_eq(&route->model, model)))
        *route = (struct route){.used = true, .model = *model};
    return route;
}

static enum err on_install(struct pipeline *p, const struct pipeline_install *install)
{
    const struct plan *plan = install->plan;
    if (plan->n_stages == 0 || plan->n_stages > PLAN_STAGES_MAX || plan->context == 0 ||
        plan->context > FRAME_TOKENS_MAX || install->n_slots == 0 ||
        install->n_slots > PIPELINE_SLOTS_MAX || install->n_blocks > STAGE_BLOCKS_MAX ||
        install->row_bytes == 0 || install->row_bytes % 4 != 0 ||
        install->row_bytes > FRAME_ROW_BYTES_MAX)
        return ERR_INVALID;
    int my_stage = plan_stage_of(plan, &p->self);
    if (my_stage < 0)
        return ERR_INVALID;
    for (uint32_t i = 0; i < plan->n_stages; i++) {
        if (i != (uint32_t)my_stage && is_self(p, &plan->stages[i].node))
            return ERR_INVALID;
    }
    if (run_by_epoch(p, &plan->epoch) || run_by_alias(p, epoch_alias(&plan->epoch)))
        return ERR_EXISTS;
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        if (p->runs[i].state == RUN_FREE)
            return run_init(&p->runs[i], install, (uint32_t)my_stage);
    }
    return ERR_BUSY;
}

static void retire(struct pipeline *p, struct run *run)
{
    if (run_is_head(run))
        head_abandon(p, run, ERR_STALE);
    if (p->busy.on && p->busy.run == run) {
        p->busy.run = NULL; /* RELEASE follows the result */
        p->busy.retired = run->plan.epoch;
    } else {
        struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_RELEASE);
        effect->release.instance = run->instance;
        effect->release.epoch = run->plan.epoch;
    }
    run_deinit(run);
}

static void want_neighbours(struct pipeline *p, const struct run *run)
{
    const struct plan *plan = &run->plan;
    if (run->my_stage + 1 < plan->n_stages)
        peer_want(p, &plan->stages[run->my_stage + 1].node);
    if (run->my_stage > 0) {
        peer_want(p, &plan->stages[run->my_stage - 1].node);
        peer_want(p, run_head(run));
    } else {
        peer_want(p, run_tail(run));
    }
}

/* One current and one earlier epoch for each model (3.9). */
static void commit(struct pipeline *p, struct run *run)
{
    run->suspended = p->slept;
    if (run->state == RUN_CURRENT) {
        run->draining = run->drained_said = false;
        return;
    }
    struct run *current = NULL, *previous = NULL;
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        struct run *other = &p->runs[i];
        if (other == run || !hash256_eq(&other->plan.model, &run->plan.model))
            continue;
        if (other->state == RUN_CURRENT)
            current = other;
        else if (other->state == RUN_PREVIOUS)
            previous = other;
    }
    if (current) {
        if (previous)
            retire(p, previous);
        current->state = RUN_PREVIOUS;
    }
    run->state = RUN_CURRENT;
    run->draining = run->drained_said = false;
    run->last_use = p->now;
    want_neighbours(p, run);
}

static enum err on_epoch(struct pipeline *p, const struct pipeline_event *event)
{
    struct run *run = run_by_epoch(p, &event->epoch);
    if (!run)
        return ERR_NOT_FOUND;
    if (event->type == PIPELINE_COMMIT)
        commit(p, run);
    else if (event->type == PIPELINE_DRAIN)
        run->draining = true;
    else
        retire(p, run);
    return ERR_OK;
}

/* Rule 2.5: nothing is executed until it is confirmed, and requests go on by rule 3.12. */
static void suspend_all(struct pipeline *p)
{
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        struct run *run = &p->runs[i];
        if (run->state == RUN_FREE || run->suspended)
            continue;
        run->suspended = true;
        if (!run_is_head(run)) {
            stage_quit(p, run);
            continue;
        }
        head_abandon(p, run, ERR_STALE);
        head_say_drained(p, run);
    }
}

static enum err on_route(struct pipeline *p, const struct plan *plan)
{
    if (plan->n_stages == 0 || plan->n_stages > PLAN_STAGES_MAX || plan->context == 0 ||
        plan->context > FRAME_TOKENS_MAX)
        return ERR_INVALID;
    struct route *route = route_get(p, &plan->model);
    if (!route)
        return ERR_BUSY;
    route->present = true;
    route->plan = *plan;
    route->alias = epoch_alias(&plan->epoch);
    route->text.text[0] = 0;
    entry_on_route(p, route);
    return ERR_OK;
}

static enum err on_no_route(struct pipeline *p, const struct pipeline_event *event)
{
    struct route *route = route_get(p, &event->no_route.model);
    if (!route)
        return ERR_BUSY;
    route->present = false;
    (void)err_set(&route->text, event->no_route.reason, "%s",
                  event->no_route.text ? event->no_route.text : "");
    route->reason = event->no_route.reason;
    entry_on_route(p, route);
    return ERR_OK;
}

/* --- links and frames --- */

static void on_link_down(struct pipeline *p, const struct node_id *id)
{
    struct peer *peer = peer_find(p, id);
    if (!peer || !peer->up)
        return;
    peer->up = false;
    peer->wanted_at = 0;
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        struct run *run = &p->runs[i];
        if (!run_executes(run))
            continue;
        head_on_link_down(p, run, id);
        stage_on_link_down(p, run, id);
    }
    relay_on_link_down(p, id);
    entry_on_link_down(p, id);
}

static enum err on_link_up(struct pipeline *p, const struct node_id *id)
{
    if (is_self(p, id))
        return ERR_INVALID;
    on_link_down(p, id);
    struct peer *peer = peer_get(p, id);
    if (!peer)
        return ERR_BUSY;
    peer->up = true;
    return ERR_OK;
}

static void say_stale(struct pipeline *p, const struct node_id *to, const struct frame *f,
                      const struct run *known)
{
    struct pipeline_send *send = send_new(p, to, FRAME_STALE, f->header.epoch, f->header.step);
    if (!send)
        return;
    for (uint32_t i = 0; known && i < PIPELINE_EPOCHS_MAX; i++) {
        const struct run *run = &p->runs[i];
        if (run->state == RUN_CURRENT && hash256_eq(&run->plan.model, &known->plan.model))
            send->stale.current_epoch = run->alias;
    }
}

static void on_stale(struct pipeline *p, struct run *run, const struct node_id *from,
                     const struct frame *f)
{
    entry_on_stale(p, from, f->header.epoch);
    relay_on_stale(p, from, f->header.epoch);
    if (!run || plan_stage_of(&run->plan, from) < 1)
        return;
    static const struct frame_error stale = {.code = FRAME_E_STALE};
    if (run_is_head(run))
        head_on_error(p, run, f->header.step, &stale);
    else if (run->my_stage + 1 < run->plan.n_stages && f->header.step >= run->stream_step &&
             node_id_eq(from, &run->plan.stages[run->my_stage + 1].node))
        stage_break(p, run, ERR_STALE);
}

static void on_open(struct pipeline *p, struct run *run, const struct node_id *from,
                    const struct frame *f, const struct run *known)
{
    if (run && run_is_head(run))
        head_on_open(p, run, from, &f->open);
    else if (run && run_is_tail(run) && node_id_eq(from, run_head(run)))
        stage_on_open(p, run, f);
    else if (!relay_on_open(p, from, f))
        say_stale(p, from, f, known);
}

/* What comes back to a head or an entry. */
static void on_answer(struct pipeline *p, struct run *run, const struct node_id *from,
                      const struct frame *f)
{
    const struct frame_header *h = &f->header;
    bool heads = run && run_is_head(run);
    bool from_tail = heads && node_id_eq(from, run_tail(run));
    bool from_stage = heads && plan_stage_of(&run->plan, from) > 0;
    switch (h->type) {
    case FRAME_TOKEN:
        if (from_tail)
            head_on_token(p, run, h->step, &f->token);
        entry_on_token(p, from, h->epoch, &f->token);
        relay_on_token(p, from, h->epoch, &f->token);
        break;
    case FRAME_CREDIT:
        if (from_tail)
            head_on_credit(p, run, h->step);
        break;
    case FRAME_HAVE:
        if (from_stage && h->step > 0)
            head_on_have(p, run, from, h->step, &f->have);
        entry_on_have(p, from, h->epoch, &f->have);
        relay_on_have(p, from, h->epoch, &f->have);
        break;
    case FRAME_CACHED:
        entry_on_cached(p, from, h->epoch, &f->cached);
        relay_on_cached(p, from, h->epoch, &f->cached);
        break;
    default:
        if (from_stage)
            head_on_error(p, run, h->step, &f->error);
        entry_on_error(p, from, h->epoch, &f->error);
        relay_on_error(p, from, h->epoch, &f->error);
        break;
    }
}

static enum err on_frame(struct pipeline *p, const struct node_id *from, const struct frame *f)
{
    if (!peer_is_up(p, from) || is_self(p, from))
        return ERR_INVALID;
    struct run *known = f->header.epoch ? run_by_alias(p, f->header.epoch) : NULL;
    struct run *run = known && run_executes(known) ? known : NULL;
    switch (f->header.type) {
    case FRAME_STEP:
        if (run)
            return stage_on_step(p, run, from, f);
        say_stale(p, from, f, known);
        return ERR_OK;
    case FRAME_OPEN:
        on_open(p, run, from, f, known);
        return ERR_OK;
    case FRAME_CANCEL:
        head_on_cancel(p, from, &f->cancel);
        relay_on_cancel(p, from, &f->cancel);
        return ERR_OK;
    case FRAME_STALE:
        on_stale(p, run, from, f);
        return ERR_OK;
    case FRAME_TOKEN:
    case FRAME_CREDIT:
    case FRAME_HAVE:
    case FRAME_CACHED:
    case FRAME_ERROR:
        on_answer(p, run, from, f);
        return ERR_OK;
    default:
        return ERR_OK; /* BYE is the link's */
    }
}

/* --- one call --- */

static void on_tick(struct pipeline *p)
{
    entry_timers(p);
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        struct run *run = &p->runs[i];
        if (!run_executes(run))
            continue;
        if (run_is_head(run))
            head_timers(p, run);
        stage_timers(p, run);
    }
}

static enum err dispatch(struct pipeline *p, const struct pipeline_event *event)
{
    switch (event->type) {
    case PIPELINE_TICK:
        on_tick(p);
        return ERR_OK;
    case PIPELINE_INSTALL:
        return on_install(p, &event->install);
    case PIPELINE_COMMIT:
    case PIPELINE_DRAIN:
    case PIPELINE_RETIRE:
        return on_epoch(p, event);
    case PIPELINE_SUSPEND:
    case PIPELINE_SLEPT:
        p->slept = event->type == PIPELINE_SLEPT;
        suspend_all(p);
        return ERR_OK;
    case PIPELINE_ROUTE:
        return on_route(p, event->route);
    case PIPELINE_NO_ROUTE:
        return on_no_route(p, event);
    case PIPELINE_SUBMIT:
        return entry_submit(p, &event->submit);
    case PIPELINE_CANCEL:
        entry_cancel(p, &event->cancel);
        return ERR_OK;
    case PIPELINE_LINK_UP:
        return on_link_up(p, &event->link);
    case PIPELINE_LINK_DOWN:
        on_link_down(p, &event->link);
        return ERR_OK;
    case PIPELINE_FRAME:
        return on_frame(p, &event->frame.from, event->frame.frame);
    case PIPELINE_COMPUTED:
        return stage_on_computed(p, &event->computed);
    case PIPELINE_COMPUTE_FAILED:
        return stage_on_failed(p, event->failed.instance, event->failed.step, event->failed.err);
    }
    return ERR_INVALID;
}

/* The epoch after the one that computed last has the first chance. */
static void pump(struct pipeline *p)
{
    entry_pump(p);
    uint32_t first = p->run_turn;
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        uint32_t at = (first + i) % PIPELINE_EPOCHS_MAX;
        struct run *run = &p->runs[at];
        bool was_busy = p->busy.on;
        if (!run_executes(run))
            continue;
        if (run_is_head(run))
            head_pump(p, run);
        else
            stage_pump(p, run);
        if (!was_busy && p->busy.on)
            p->run_turn = (at + 1) % PIPELINE_EPOCHS_MAX;
    }
}

enum err pipeline_step(struct pipeline *p, const struct pipeline_event *event, uint64_t now_us,
                       struct pipeline_update *update)
{
    p->now = now_us;
    p->n_effects = 0;
    p->more = false;
    entry_collect(p);
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        if (p->runs[i].state != RUN_FREE)
            ring_collect(&p->runs[i]);
    }
    enum err e = dispatch(p, event);
    pump(p);
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        struct run *run = &p->runs[i];
        if (run->state != RUN_FREE && ring_keep_rows(run) != ERR_OK)
            stage_break(p, run, ERR_NO_MEMORY);
    }
    update->effects = p->effects;
    update->n = p->n_effects;
    return e;
}

uint64_t pipeline_next_due(const struct pipeline *p)
{
    if (p->more)
        return p->now;
    uint64_t due = entry_due(p);
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        const struct run *run = &p->runs[i];
        if (!run_executes(run))
            continue;
        if (run_is_head(run))
            due = MIN_OF(due, head_due(p, run));
        due = MIN_OF(due, stage_due(p, run));
    }
    return due;
}

enum err pipeline_new(const struct pipeline_options *options, struct pipeline **ret)
{
    if (options->chunk_rows > STAGE_ROWS_MAX)
        return ERR_INVALID;
    struct pipeline *p = calloc(1, sizeof *p);
    if (!p)
        return ERR_NO_MEMORY;
    p->self = options->self;
    p->chunk_rows = options->chunk_rows ? options->chunk_rows : PIPELINE_CHUNK_ROWS;
    *ret = p;
    return ERR_OK;
}

void pipeline_free(struct pipeline *p)
{
    if (!p)
        return;
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++)
        free(p->requests[i].tokens);
    for (uint32_t i = 0; i < PIPELINE_SEQUENCES_MAX; i++)
        free(p->sequences[i].tokens);
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++)
        run_deinit(&p->runs[i]);
    free(p);
}

/* --- what others may know --- */

void pipeline_progress(const struct pipeline *p, struct pipeline_progress *ret)
{
    *ret = (struct pipeline_progress){
        .steps_done = p->steps_done,
        .busy_since_us = p->busy.on ? p->busy.since : 0,
        .n_sequences = head_sequences(p, NULL),
        .n_preempted = p->n_preempted,
    };
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++)
        ret->n_requests +=
            p->requests[i].state == REQUEST_WAITING || p->requests[i].state == REQUEST_OPENED;
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        const struct run *run = &p->runs[i];
        for (uint32_t k = 0; k < run->n_slots; k++)
            ret->n_slots_used += run->slots[k].active;
        ret->n_blocks += run->pool.n;
        ret->n_blocks_used += run->pool.n - run->pool.n_free;
    }
}

uint64_t pipeline_last_use_us(const struct pipeline *p, const struct epoch *epoch)
{
    for (uint32_t i = 0; i < PIPELINE_EPOCHS_MAX; i++) {
        if (p->runs[i].state != RUN_FREE && epoch_eq(&p->runs[i].plan.epoch, epoch))
            return p->runs[i].last_use;
    }
    return 0;
}

uint32_t pipeline_requests(const struct pipeline *p, struct pipeline_request_info *ret,
                           uint32_t max)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX && n < max; i++) {
        const struct request *r = &p->requests[i];
        if (r->state != REQUEST_WAITING && r->state != REQUEST_OPENED)
            continue;
        ret[n++] = (struct pipeline_request_info){
            .request = r->id,
            .model = r->model,
            .epoch = r->alias,
            .n_prompt = r->n_prompt,
            .n_emitted = r->n_tokens - r->n_prompt,
            .attempt = r->attempt,
        };
    }
    return n;
}
