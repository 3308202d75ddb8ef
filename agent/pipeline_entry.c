/* The entry: holds the requests of this node's clients, opens them at the head of the active plan,
 * hands each token out once, and recovers by opening again (PROTOCOL 3.12). */
#include "agent/pipeline_internal.h"

#include "base/util.h"

#include <string.h>

static struct request *request_find(struct pipeline *p, const struct request_id *id)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if ((r->state == REQUEST_WAITING || r->state == REQUEST_OPENED) &&
            request_id_eq(&r->id, id))
            return r;
    }
    return NULL;
}

static void cancel_at_head(struct pipeline *p, const struct request *r)
{
    if (r->state != REQUEST_OPENED)
        return;
    struct frame_cancel cancel = {r->id, r->attempt};
    if (is_self(p, &r->head)) {
        head_on_cancel(p, &p->self, &cancel);
    } else if (peer_is_up(p, &r->head)) {
        struct pipeline_send *send = send_new(p, &r->head, FRAME_CANCEL, r->alias, 0);
        if (send)
            send->cancel = cancel;
    }
}

static void request_end(struct pipeline *p, struct request *r, enum err e, uint8_t finish,
                        const char *text)
{
    if (e != ERR_OK)
        cancel_at_head(p, r);
    r->state = REQUEST_ENDED;
    struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_END);
    struct pipeline_timings *t = &effect->end.timings;
    effect->end.request = r->id;
    effect->end.err = e;
    effect->end.finish = (enum frame_finish)finish;
    effect->end.text = text;
    t->n_prompt = r->n_prompt;
    t->n_emitted = r->n_tokens - r->n_prompt;
    t->n_attempts = r->attempt;
    t->n_cached = r->n_cached;
    t->queued_us = (r->opened_at ? r->opened_at : p->now) - r->submitted_at;
    if (t->n_emitted > 0) {
        t->prefill_us = r->first_token_at - r->opened_at;
        t->decode_us = r->last_token_at - r->first_token_at;
    }
}

static uint64_t backoff_us(uint32_t fruitless)
{
    return fruitless > 6 ? BACKOFF_MAX_US
                         : MIN_OF(BACKOFF_MAX_US, (uint64_t)BACKOFF_FIRST_US << fruitless);
}

/* The attempt is over; the next one begins when it can. */
static void request_retry(struct pipeline *p, struct request *r, enum err e)
{
    cancel_at_head(p, r);
    r->state = REQUEST_WAITING;
    r->last_err = e;
    r->alias = 0;
    r->wait_at = 0;
    r->retry_at = r->fruitless == 0 ? p->now : p->now + backoff_us(r->fruitless);
    if (++r->fruitless > PIPELINE_FRUITLESS_ATTEMPTS_MAX)
        request_end(p, r, ERR_IO, 0,
                    "the machines that share this model failed again and again at this request");
}

/* --- the client's side --- */

static enum err submit_check(struct pipeline *p, const struct pipeline_submit *s)
{
    if (s->n_prompt == 0 || !s->prompt || s->sampler.n_end_ids > FRAME_END_IDS_MAX ||
        s->sampler.n_logprobs > FRAME_LOGPROBS_MAX)
        return ERR_INVALID;
    if (s->n_prompt >= FRAME_TOKENS_MAX)
        return ERR_LIMIT;
    for (uint32_t i = 0; i < s->n_prompt; i++) {
        if (s->prompt[i] < 0)
            return ERR_INVALID;
    }
    return request_find(p, &s->request) ? ERR_EXISTS : ERR_OK;
}

enum err entry_submit(struct pipeline *p, const struct pipeline_submit *s)
{
    TRY(submit_check(p, s));
    struct request *r = NULL;
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX && !r; i++)
        r = p->requests[i].state == REQUEST_FREE ? &p->requests[i] : NULL;
    if (!r)
        return ERR_BUSY;
    int32_t *tokens = malloc((size_t)s->n_prompt * sizeof *tokens);
    if (!tokens)
        return ERR_NO_MEMORY;
    memcpy(tokens, s->prompt, (size_t)s->n_prompt * sizeof *tokens);
    *r = (struct request){
        .state = REQUEST_WAITING,
        .id = s->request,
        .model = s->model,
        .tokens = tokens,
        .n_prompt = s->n_prompt,
        .n_tokens = s->n_prompt,
        .cap = s->n_prompt,
        .sampler = s->sampler,
        .deadline_us = s->deadline_us ? s->deadline_us : UINT64_MAX,
        .submitted_at = p->now,
        .progress_at = p->now,
        .retry_at = p->now,
        .patience_us = PIPELINE_NO_PLAN_US,
    };
    return ERR_OK;
}

void entry_cancel(struct pipeline *p, const struct request_id *id)
{
    struct request *r = request_find(p, id);
    if (r)
        request_end(p, r, ERR_CANCELLED, FRAME_STOPPED, "cancelled");
}

void entry_collect(struct pipeline *p)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if (r->state == REQUEST_ENDED) {
            free(r->tokens);
            *r = (struct request){.state = REQUEST_FREE};
        }
    }
}

/* --- opening --- */

static bool reason_is_final(enum err e)
{
    return e == ERR_NO_FIT || e == ERR_NOT_FOUND || e == ERR_UNSUPPORTED;
}

/* Positions that the sequence may have with this plan; 0 when it does not fit (it has ended). */
static uint32_t fit_context(struct pipeline *p, struct request *r, const struct plan *plan)
{
    uint32_t limit = plan->context;
    if (r->n_tokens >= limit) {
        request_end(p, r, ERR_LIMIT, 0,
                    r->n_tokens == r->n_prompt
                        ? "the prompt has as many tokens as the context of the running plan, or "
                          "more"
                        : "the context of the new plan is too short to go on with this answer");
        return 0;
    }
    if (r->sampler.max_tokens > 0 && r->sampler.max_tokens < limit - r->n_prompt)
        limit = r->n_prompt + r->sampler.max_tokens;
    if (limit > r->cap) {
        int32_t *tokens = realloc(r->tokens, (size_t)limit * sizeof *tokens);
        if (!tokens) {
            request_end(p, r, ERR_NO_MEMORY, 0, "not enough memory to hold the answer");
            return 0;
        }
        r->tokens = tokens;
        r->cap = limit;
    }
    return limit;
}

/* A member that may reach the head for us: other stages first, each attempt another one. Those that
 * we have no link to are asked for one. */
static const struct node_id *choose_relay(struct pipeline *p, const struct request *r,
                                          const struct plan *plan)
{
    const struct node_id *up[PIPELINE_PEERS_MAX + PLAN_STAGES_MAX];
    uint32_t n = 0;
    for (uint32_t i = 1; i < plan->n_stages; i++) {
        const struct node_id *id = &plan->stages[i].node;
        if (is_self(p, id))
            continue;
        if (peer_is_up(p, id))
            up[n++] = id;
        else
            peer_want(p, id);
    }
    for (uint32_t i = 0; i < PIPELINE_PEERS_MAX; i++) {
        const struct peer *peer = &p->peers[i];
        if (!peer->used || plan_stage_of(plan, &peer->id) >= 0)
            continue;
        if (peer->up)
            up[n++] = &peer->id;
        else
            peer_want(p, &peer->id);
    }
    return n ? up[r->fruitless % n] : NULL;
}

/* Whom to send the OPEN to. The best is the head, with tokens straight from the tail; after a
 * while the head passes tokens on, or a relay everything. NULL: not yet. */
static const struct node_id *choose_way(struct pipeline *p, struct request *r,
                                        const struct plan *plan)
{
    const struct node_id *head = &plan->stages[0].node;
    const struct node_id *tail = &plan->stages[plan->n_stages - 1].node;
    bool tail_up = peer_is_up(p, tail), head_up = peer_is_up(p, head);
    r->via_head = false;
    if (is_self(p, head) || (head_up && tail_up))
        return head; /* a head sees to its tail itself */
    if (!head_up)
        peer_want(p, head);
    if (!tail_up)
        peer_want(p, tail);
    if (r->wait_at == 0)
        r->wait_at = p->now + DETOUR_US;
    if (p->now < r->wait_at)
        return NULL;
    r->via_head = true;
    return head_up ? head : choose_relay(p, r, plan);
}

static void open_at_head(struct pipeline *p, struct request *r)
{
    struct frame_open open = {
        .request = r->id,
        .attempt = r->attempt,
        .entry = r->via_head ? r->head : p->self,
        .sampler = r->sampler,
        .n_prompt = r->n_prompt,
        .n_emitted = r->n_tokens - r->n_prompt,
        .token_ids = r->tokens,
        .context_max = r->context,
    };
    if (r->deadline_us != UINT64_MAX) {
        uint64_t ms = (r->deadline_us - p->now) / 1000 + 1;
        open.deadline_ms = (uint32_t)MIN_OF(ms, UINT32_MAX);
    }
    if (is_self(p, &r->head)) {
        struct run *run = run_by_alias(p, r->alias);
        if (run && run_executes(run) && run_is_head(run))
            head_on_open(p, run, &p->self, &open);
        else
            entry_on_stale(p, &p->self, r->alias);
        return;
    }
    struct pipeline_send *send = send_new(p, &r->head, FRAME_OPEN, r->alias, 0);
    if (send)
        send->open = open;
}

static void try_open(struct pipeline *p, struct request *r)
{
    const struct route *route = route_of(p, &r->model);
    if (!route || !route->present) {
        r->patience_us = PIPELINE_NO_PLAN_US;
        /* An answer that has begun may outlive a passing reason, but the shell says that nothing
         * fits only when that lasts: to wait on would only delay the bad news. */
        bool final = route && reason_is_final(route->reason) &&
                     (r->attempt == 0 || route->reason == ERR_NO_FIT);
        if (final)
            request_end(p, r, route->reason, 0,
                        route->text.text[0] ? route->text.text : "no plan runs this model");
        return;
    }
    const struct plan *plan = &route->plan;
    const struct run *own = run_by_alias(p, route->alias);
    if (own && own->suspended && run_is_head(own)) {
        r->patience_us = PIPELINE_NO_PLAN_US;
        return; /* until it is confirmed */
    }
    const struct node_id *head = choose_way(p, r, plan);
    if (!head)
        return;
    uint32_t limit = fit_context(p, r, plan);
    if (limit == 0)
        return;
    r->attempt++;
    r->state = REQUEST_OPENED;
    r->alias = route->alias;
    r->head = *head;
    r->tail = plan->stages[plan->n_stages - 1].node;
    r->context = limit;
    r->silence_us = PIPELINE_SILENCE_US + 4 * predicted_us(plan, 1, PIPELINE_CHUNK_ROWS);
    r->patience_us = MAX_OF(PIPELINE_NO_PLAN_US, 4 * r->silence_us); /* some attempts */
    r->silence_us <<= MIN_OF(r->fruitless, 1u);
    r->have_n = 0;
    r->heard_at = p->now;
    if (r->opened_at == 0)
        r->opened_at = p->now;
    open_at_head(p, r);
}

void entry_pump(struct pipeline *p)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if (r->state != REQUEST_WAITING || p->now < r->retry_at)
            continue;
        if (effects_room(p) < EFFECTS_ROOM) {
            p->more = true;
            return;
        }
        try_open(p, r);
    }
}

void entry_on_route(struct pipeline *p, const struct route *route)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if (r->state == REQUEST_WAITING && hash256_eq(&r->model, &route->model)) {
            r->retry_at = p->now;
            r->wait_at = 0;
        }
    }
}

/* --- what comes back --- */

static bool from_attempt(const struct request *r, const struct node_id *from, uint64_t epoch,
                         uint32_t attempt)
{
    return r && r->state == REQUEST_OPENED && r->alias == epoch && r->attempt == attempt &&
           (node_id_eq(from, &r->head) || node_id_eq(from, &r->tail));
}

static void accept(struct pipeline *p, struct request *r, const struct frame_token *t)
{
    r->tokens[r->n_tokens++] = t->id;
    r->fruitless = 0;
    r->heard_at = r->progress_at = r->last_token_at = p->now;
    if (t->position == r->n_prompt)
        r->first_token_at = p->now;
    struct pipeline_effect *effect = effect_new(p, PIPELINE_DO_TOKEN);
    effect->token.request = r->id;
    effect->token.position = t->position;
    effect->token.index = t->position - r->n_prompt;
    struct pipeline_sampled *s = &effect->token.sampled;
    s->id = t->id;
    s->logprob = t->logprob;
    s->n_logprobs = MIN_OF(t->n_logprobs, FRAME_LOGPROBS_MAX);
    memcpy(s->top_ids, t->top_ids, sizeof s->top_ids);
    memcpy(s->top_logprobs, t->top_logprobs, sizeof s->top_logprobs);
    if (t->finish == FRAME_END_TOKEN || t->finish == FRAME_LENGTH)
        request_end(p, r, ERR_OK, t->finish, "");
    else if (t->finish == FRAME_STOPPED)
        request_retry(p, r, ERR_CANCELLED); /* not by us */
}

void entry_on_token(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_token *t)
{
    struct request *r = request_find(p, &t->request);
    if (!from_attempt(r, from, epoch, t->attempt) || (r->via_head && !node_id_eq(from, &r->head)) ||
        (!r->via_head && !node_id_eq(from, &r->tail)))
        return;
    if (t->position < r->n_tokens) {
        if (t->position < r->n_prompt || r->tokens[t->position] != t->id)
            request_retry(p, r, ERR_CORRUPT);
        return; /* an equal one came before */
    }
    if (t->position > r->n_tokens || t->id < 0) {
        request_retry(p, r, ERR_CLOSED); /* one was lost */
        return;
    }
    if (r->n_tokens >= r->context) {
        request_retry(p, r, ERR_CORRUPT);
        return;
    }
    accept(p, r, t);
}

void entry_on_have(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                   const struct frame_have *have)
{
    struct request *r = request_find(p, &have->request);
    if (!from_attempt(r, from, epoch, have->attempt))
        return;
    r->heard_at = r->progress_at = p->now;
    r->have_n = have->n;
}

void entry_on_cached(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                     const struct frame_cached *cached)
{
    struct request *r = request_find(p, &cached->request);
    if (from_attempt(r, from, epoch, cached->attempt) && r->attempt == 1)
        r->n_cached = MIN_OF(cached->n, r->n_prompt);
}

void entry_on_error(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_error *error)
{
    struct request *r = request_find(p, &error->request);
    if (!from_attempt(r, from, epoch, error->attempt))
        return;
    enum err e = frame_error_to(error->code);
    switch (e) {
    case ERR_BUSY:
        if (r->n_tokens == r->n_prompt) {
            request_end(p, r, e, 0, "too many requests wait for this model already");
            return;
        }
        break;
    case ERR_LIMIT:
        request_end(p, r, e, 0, "the request does not fit the context of the running plan");
        return;
    case ERR_INVALID:
    case ERR_UNSUPPORTED:
        request_end(p, r, e, 0, "the machine that runs the first layers refused the request");
        return;
    case ERR_TIMEOUT:
        if (p->now + UINT64_C(1000) * 1000 >= r->deadline_us) {
            request_end(p, r, e, 0, "the time allowed for this request is over");
            return;
        }
        break;
    default:
        break;
    }
    request_retry(p, r, e);
}

void entry_on_stale(struct pipeline *p, const struct node_id *from, uint64_t epoch)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if (r->state == REQUEST_OPENED && r->alias == epoch && node_id_eq(from, &r->head))
            request_retry(p, r, ERR_STALE);
    }
}

void entry_on_link_down(struct pipeline *p, const struct node_id *id)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if (r->state == REQUEST_OPENED &&
            (node_id_eq(id, &r->head) || (!r->via_head && node_id_eq(id, &r->tail))))
            request_retry(p, r, ERR_CLOSED);
    }
}

/* --- time --- */

static const char *no_progress_text(struct pipeline *p, const struct request *r)
{
    const struct route *route = route_of(p, &r->model);
    if (!route || !route->present)
        return route && route->text.text[0] ? route->text.text
                                            : "no plan ran this model for 30 seconds";
    const struct run *own = run_by_alias(p, route->alias);
    if (own && own->suspended)
        return "this machine slept, and nobody confirmed the plan again within 30 seconds";
    if (!peer_is_up(p, &route->plan.stages[0].node))
        return "the machine that runs the first layers could not be reached for 30 seconds";
    return "the machines that share this model made no progress for 30 seconds";
}

void entry_timers(struct pipeline *p)
{
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct request *r = &p->requests[i];
        if (r->state != REQUEST_WAITING && r->state != REQUEST_OPENED)
            continue;
        if (p->now >= r->deadline_us)
            request_end(p, r, ERR_TIMEOUT, 0, "the time allowed for this request is over");
        else if (p->now - r->progress_at >= r->patience_us)
            request_end(p, r, ERR_TIMEOUT, 0, no_progress_text(p, r));
        else if (r->state == REQUEST_OPENED && p->now - r->heard_at >= r->silence_us)
            request_retry(p, r, ERR_TIMEOUT);
    }
}

uint64_t entry_due(const struct pipeline *p)
{
    uint64_t due = UINT64_MAX;
    for (uint32_t i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        const struct request *r = &p->requests[i];
        if (r->state != REQUEST_WAITING && r->state != REQUEST_OPENED)
            continue;
        due = MIN_OF(due, MIN_OF(r->deadline_us, r->progress_at + r->patience_us));
        if (r->state == REQUEST_OPENED)
            due = MIN_OF(due, r->heard_at + r->silence_us);
        else if (r->retry_at > p->now)
            due = MIN_OF(due, r->retry_at);
        else
            due = MIN_OF(due, r->wait_at > p->now ? r->wait_at : p->now + WANT_LINK_US);
    }
    return due;
}
