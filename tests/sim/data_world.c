/* What happens in a data_world: stages, the planner, nodes and clients. */
#include "tests/sim/data_world_internal.h"

#include "base/util.h"

#include <stdlib.h>
#include <string.h>

/* --- stages --- */

static uint64_t hash_bytes(const void *bytes, size_t n)
{
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    return h;
}

static struct output *output_of(struct world *w, uint64_t epoch, uint64_t step, uint32_t stage)
{
    uint64_t h = (epoch ^ (step * 0x9e3779b97f4a7c15u) ^ stage) * 0xbf58476d1ce4e5b9u;
    for (uint32_t i = (uint32_t)(h >> 40) % OUTPUTS;; i = (i + 1) % OUTPUTS) {
        struct output *o = &w->outputs[i];
        if (o->epoch == 0 || (o->epoch == epoch && o->step == step && o->stage == stage))
            return o;
    }
}

static void check_compute(struct world *w, uint32_t at, const struct pipeline_compute *c)
{
    struct node *node = &w->nodes[at];
    struct instance *in = c->instance < INSTANCES ? &node->instances[c->instance] : NULL;
    if (node->busy)
        world_fail(w, "node %u: a second computation while one is under way", at);
    if (!in || !in->used) {
        world_fail(w, "node %u computes on an instance that is not there", at);
        return;
    }
    const struct plan *plan = &w->epochs[in->epoch];
    if (!in->committed || c->epoch != epoch_alias(&plan->epoch))
        world_fail(w, "node %u computes for an epoch that is not committed here", at);
    if (c->step <= in->last_step)
        world_fail(w, "node %u: step %llu after %llu", at, (unsigned long long)c->step,
                   (unsigned long long)in->last_step);
    in->last_step = c->step;
    int stage = plan_stage_of(plan, &node->id);
    if (stage > 0) {
        struct output *o = output_of(w, c->epoch, c->step, (uint32_t)stage - 1);
        if (o->epoch == 0 || !c->rows_in ||
            o->hash != hash_bytes(c->rows_in, (size_t)c->n_rows * HASH_STAGE_ROW_BYTES))
            world_fail(w, "node %u: rows of step %llu are not those of the stage before", at,
                       (unsigned long long)c->step);
    }
    if ((bool)c->is_tail != ((uint32_t)stage + 1 == plan->n_stages))
        world_fail(w, "node %u: is_tail is wrong", at);
}

static void start_compute(struct world *w, uint32_t at, const struct pipeline_compute *c)
{
    struct node *node = &w->nodes[at];
    struct job *job = &node->job;
    check_compute(w, at, c);
    job->compute = *c;
    uint32_t n_ids = 0;
    for (uint32_t i = 0; i < c->n_segments; i++) {
        const struct stage_segment *s = &c->segments[i];
        job->segments[i] = *s;
        job->segments[i].token_ids = job->ids + n_ids;
        job->segments[i].blocks = job->blocks[i];
        memcpy(job->blocks[i], s->blocks,
               ((s->position + s->n_rows - 1) / STAGE_BLOCK + 1) * sizeof job->blocks[0][0]);
        memcpy(job->ids + n_ids, s->token_ids, s->n_rows * sizeof job->ids[0]);
        n_ids += s->n_rows;
    }
    if (n_ids != c->n_rows)
        world_fail(w, "node %u: rows of the segments do not add up", at);
    if (c->rows_in)
        memcpy(job->in, c->rows_in, (size_t)c->n_rows * HASH_STAGE_ROW_BYTES);
    for (uint32_t i = 0; i < c->n_samples; i++) {
        job->samples[i] = c->samples[i];
        job->samplers[i] = *c->samples[i].sampler;
        memcpy(job->history[i], c->samples[i].history,
               c->samples[i].n_history * sizeof job->history[0][0]);
    }
    node->busy = true;
    uint64_t us = 500 + world_below(w, 3 * MS) + 20 * c->n_rows;
    if (w->o.stalls && !w->healed && world_chance(w, 400))
        us += (1 + world_below(w, 8)) * 1000 * MS;
    world_post(w, w->now + us, EV_COMPUTED, at);
}

/* --- events into a core, effects out of it --- */

static void step(struct world *w, uint32_t at, const struct pipeline_event *event);

static void on_token(struct world *w, uint32_t at, const struct pipeline_effect *e)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        struct request *q = &w->requests[i];
        if (!q->submitted || !request_id_eq(&q->id, &e->token.request))
            continue;
        uint32_t position = e->token.position;
        if (q->entry != at || q->ended)
            world_fail(w, "request %u: a token at the wrong place or time", i);
        else if (position != q->n_prompt + q->n_got || e->token.index != q->n_got)
            world_fail(w, "request %u: position %u after %u tokens", i, position, q->n_got);
        else if (position >= q->n_tokens || q->tokens[position] != e->token.sampled.id)
            world_fail(w, "request %u: token %d at position %u is not the oracle's", i,
                       e->token.sampled.id, position);
        q->n_got++;
        w->r->n_tokens++;
        world_note(w, (uint64_t)e->token.sampled.id + i);
        return;
    }
    world_fail(w, "a token for nobody");
}

static void follow_up(struct world *w, const struct request *q);

static void on_end(struct world *w, uint32_t at, const struct pipeline_effect *e)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        struct request *q = &w->requests[i];
        if (!q->submitted || !request_id_eq(&q->id, &e->end.request))
            continue;
        if (q->ended || q->entry != at)
            world_fail(w, "request %u ends twice or elsewhere", i);
        q->ended = true;
        w->r->n_reused += e->end.timings.n_cached;
        w->r->n_attempts += e->end.timings.n_attempts;
        world_note(w, (uint64_t)e->end.err);
        if (e->end.err == ERR_OK) {
            w->r->n_answers++;
            if (q->n_prompt + q->n_got != q->n_tokens || e->end.finish != q->finish)
                world_fail(w, "request %u: %u tokens and finish %d, the oracle has %u and %d", i,
                           q->n_got, (int)e->end.finish, q->n_tokens - q->n_prompt, (int)q->finish);
            follow_up(w, q);
            return;
        }
        w->r->n_errors++;
        bool allowed =
            (q->cancelled && e->end.err == ERR_CANCELLED) ||
            (q->deadline_us != 0 && e->end.err == ERR_TIMEOUT && w->now + 1 * MS >= q->deadline_us);
        if (!allowed || e->end.text[0] == 0)
            world_fail(w, "request %u (attempt %u) ends with %s: %s", i, e->end.timings.n_attempts,
                       err_name(e->end.err), e->end.text);
        return;
    }
    world_fail(w, "an end for nobody");
}

static void apply(struct world *w, uint32_t at, const struct pipeline_update *u)
{
    struct node *node = &w->nodes[at];
    for (uint32_t i = 0; i < u->n; i++) {
        const struct pipeline_effect *e = &u->effects[i];
        world_note(w, (uint64_t)e->type + (w->now << 8));
        switch (e->type) {
        case PIPELINE_DO_SEND:
            world_send(w, at, &e->send);
            break;
        case PIPELINE_DO_COMPUTE:
            start_compute(w, at, &e->compute);
            break;
        case PIPELINE_DO_WANT_LINK: {
            struct event *c = world_post(w, w->now + world_below(w, 20 * MS), EV_CONNECT, at);
            c->peer = world_number(w, &e->want_link);
            break;
        }
        case PIPELINE_DO_TOKEN:
            on_token(w, at, e);
            break;
        case PIPELINE_DO_END:
            on_end(w, at, e);
            break;
        case PIPELINE_DO_RELEASE: {
            struct instance *in = &node->instances[e->release.instance];
            if (!in->used)
                world_fail(w, "node %u releases an instance twice", at);
            hash_stage_free(in->stage);
            *in = (struct instance){.used = false};
            break;
        }
        case PIPELINE_DO_COPY_BLOCK: {
            struct instance *in = &node->instances[e->copy_block.instance];
            if (node->busy || !in->used ||
                hash_stage_copy_block(in->stage, e->copy_block.from, e->copy_block.to) != ERR_OK)
                world_fail(w, "node %u cannot copy a block", at);
            w->r->n_copies++;
            break;
        }
        case PIPELINE_DO_DRAINED:
        case PIPELINE_DO_STATS:
        case PIPELINE_DO_STALL:
            break;
        }
    }
}

static void step(struct world *w, uint32_t at, const struct pipeline_event *event)
{
    struct node *node = &w->nodes[at];
    struct pipeline_update u;
    enum err e = pipeline_step(node->p, event, w->now, &u);
    if (e != ERR_OK)
        world_fail(w, "node %u answers %s to event %d", at, err_name(e), (int)event->type);
    apply(w, at, &u);
    uint64_t due = pipeline_next_due(node->p);
    if (due != UINT64_MAX && (node->tick_at <= w->now || due < node->tick_at)) {
        node->tick_at = MAX_OF(due, w->now);
        world_post(w, node->tick_at, EV_TICK, at);
    }
}

static void finish_compute(struct world *w, uint32_t at)
{
    struct node *node = &w->nodes[at];
    struct job *job = &node->job;
    const struct pipeline_compute *c = &job->compute;
    struct instance *in = &node->instances[c->instance];
    node->busy = false;
    w->r->n_steps++;
    struct pipeline_event event = {.type = PIPELINE_COMPUTED};
    if (w->o.failures && !w->healed && world_chance(w, 150)) {
        hash_stage_spoil(in->stage, job->segments, c->n_segments);
        event.type = PIPELINE_COMPUTE_FAILED;
        event.failed.instance = c->instance;
        event.failed.step = c->step;
        event.failed.err = world_chance(w, 2) ? ERR_NO_MEMORY : ERR_INVALID;
        step(w, at, &event);
        return;
    }
    uint64_t logits[STAGE_SEGMENTS_MAX];
    struct pipeline_sampled sampled[STAGE_SEGMENTS_MAX];
    if (hash_stage_forward(in->stage, job->segments, c->n_segments,
                           c->rows_in ? (const float *)(const void *)job->in : NULL,
                           c->is_tail ? NULL : (float *)(void *)job->out,
                           c->is_tail ? logits : NULL) != ERR_OK)
        world_fail(w, "node %u: a segment that the stage refuses", at);
    memset(sampled, 0, sizeof sampled);
    for (uint32_t i = 0; i < c->n_samples; i++)
        sampled[i].id = hash_stage_sample(logits[i], &job->samplers[i], job->samples[i].position,
                                          job->history[i], job->samples[i].n_history);
    if (!c->is_tail) {
        uint32_t stage = (uint32_t)plan_stage_of(&w->epochs[in->epoch], &node->id);
        *output_of(w, c->epoch, c->step, stage) =
            (struct output){c->epoch, c->step,
                            hash_bytes(job->out, (size_t)c->n_rows * HASH_STAGE_ROW_BYTES), stage};
    }
    event.computed.instance = c->instance;
    event.computed.step = c->step;
    event.computed.rows = c->is_tail ? NULL : (const float *)(const void *)job->out;
    event.computed.sampled = sampled;
    event.computed.compute_us = 1000;
    step(w, at, &event);
}

/* --- the planner --- */

static void random_plan(struct world *w, struct plan *plan)
{
    uint32_t order[NODES], n = 0;
    for (uint32_t i = w->o.island; i < w->o.n_nodes; i++) {
        if (w->nodes[i].alive)
            order[n++] = i;
    }
    for (uint32_t i = 0; i + 1 < n; i++) {
        uint32_t k = i + world_below(w, n - i), t = order[i];
        order[i] = order[k];
        order[k] = t;
    }
    uint32_t max = MIN_OF(n, w->o.n_stages ? w->o.n_stages : 4);
    *plan = PLAN_INIT;
    plan->n_stages = w->o.n_stages ? max : 1 + world_below(w, max);
    plan->epoch.term = 1;
    plan->epoch.sequence = w->n_epochs + 1;
    plan->model.bytes[0] = 7;
    plan->n_layers = LAYERS;
    plan->context = w->context;
    plan->predicted_token_us = 8 * MS;
    plan->predicted_prefill_us = 200;
    uint32_t first = 0;
    for (uint32_t i = 0; i < plan->n_stages; i++) {
        uint32_t left = LAYERS - first, later = plan->n_stages - 1 - i;
        uint32_t layers = later == 0 ? left : 1 + world_below(w, left - later);
        plan->stages[i] = (struct plan_stage){
            .node = w->nodes[order[i]].id, .first_layer = first, .n_layers = layers};
        first += layers;
    }
    plan_seal(plan);
}

static void replan(struct world *w)
{
    if (w->n_epochs == EPOCHS)
        return;
    if (w->now < w->plan_busy_until) {
        world_post(w, w->plan_busy_until + 1, EV_REPLAN, NODES);
        return;
    }
    uint32_t number = w->n_epochs;
    struct plan *plan = &w->epochs[number];
    random_plan(w, plan);
    if (plan->n_stages == 0)
        return;
    w->n_epochs++;
    bool abort_it = w->o.replans && !w->healed && w->current >= 0 && world_chance(w, 6);
    uint64_t t = w->now;
    for (uint32_t i = 0; i < plan->n_stages; i++) {
        uint32_t at = world_number(w, &plan->stages[i].node);
        world_post(w, t + world_below(w, 20 * MS), EV_INSTALL, at)->number = number;
        if (!abort_it || world_chance(w, 2))
            world_post(w, t + 30 * MS + world_below(w, 30 * MS), EV_COMMIT, at)->number = number;
        if (abort_it)
            world_post(w, t + 70 * MS + world_below(w, 100 * MS), EV_RETIRE, at)->number = number;
    }
    w->plan_busy_until = t + 300 * MS;
    int old = w->current;
    for (uint32_t i = 0; i < w->o.n_nodes; i++) {
        if (abort_it && plan_stage_of(&w->epochs[old], &w->nodes[i].id) >= 0)
            world_post(w, t + 180 * MS + world_below(w, 50 * MS), EV_COMMIT, i)->number =
                (uint32_t)old;
        if (!abort_it)
            world_post(w, t + 70 * MS + world_below(w, 80 * MS), EV_ROUTE, i)->number = number;
    }
    if (abort_it)
        return;
    w->current = (int)number;
    for (uint32_t i = 0; old >= 0 && i < w->epochs[old].n_stages; i++) {
        uint32_t at = world_number(w, &w->epochs[old].stages[i].node);
        uint64_t drain = t + 70 * MS + world_below(w, 100 * MS);
        world_post(w, drain, EV_DRAIN, at)->number = (uint32_t)old;
        world_post(w, drain + world_below(w, 2000) * MS, EV_RETIRE, at)->number = (uint32_t)old;
    }
}

static void install(struct world *w, uint32_t at, uint32_t number)
{
    struct node *node = &w->nodes[at];
    const struct plan *plan = &w->epochs[number];
    int stage = plan_stage_of(plan, &node->id);
    uint32_t n = 0;
    while (n < INSTANCES && node->instances[n].used)
        n++;
    if (stage < 0 || n == INSTANCES)
        return;
    node->instances[n] = (struct instance){
        .used = true,
        .epoch = number,
        .stage = hash_stage_new(&(struct hash_stage_options){
            .model = 7,
            .first_layer = plan->stages[stage].first_layer,
            .n_layers = plan->stages[stage].n_layers,
            .n_layers_model = LAYERS,
            .context = w->context,
            .n_blocks = w->n_blocks,
        }),
    };
    step(w, at,
         &(struct pipeline_event){.type = PIPELINE_INSTALL,
                                  .install = {.plan = plan,
                                              .instance = n,
                                              .n_slots = w->n_slots,
                                              .n_blocks = w->n_blocks,
                                              .row_bytes = HASH_STAGE_ROW_BYTES}});
}

static void tell_epoch(struct world *w, uint32_t at, uint32_t number, enum pipeline_event_type type)
{
    struct node *node = &w->nodes[at];
    uint32_t n_committed = 0;
    bool found = false;
    for (uint32_t i = 0; i < INSTANCES; i++) {
        struct instance *in = &node->instances[i];
        if (in->used && in->epoch == number && type == PIPELINE_COMMIT)
            in->committed = true;
        found = found || (in->used && in->epoch == number);
    }
    if (!found)
        return; /* died between install and now, or retired by a later commit */
    struct pipeline_event event = {.type = type};
    event.epoch = w->epochs[number].epoch;
    bool was_busy = node->busy;
    struct pipeline_update u;
    enum err e = pipeline_step(node->p, &event, w->now, &u);
    if (e != ERR_OK && !(was_busy && e == ERR_NOT_FOUND))
        world_fail(w, "node %u answers %s to epoch event %d", at, err_name(e), (int)type);
    apply(w, at, &u);
    step(w, at, &(struct pipeline_event){.type = PIPELINE_TICK});
    for (uint32_t i = 0; i < INSTANCES; i++)
        n_committed += node->instances[i].used && node->instances[i].committed;
    if (n_committed > 2 + (uint32_t)node->busy)
        world_fail(w, "node %u has %u committed epochs of one model", at, n_committed);
}

/* --- nodes and clients --- */

static void kill_node(struct world *w, uint32_t at)
{
    struct node *node = &w->nodes[at];
    uint32_t n_alive = 0;
    for (uint32_t i = 0; i < w->o.n_nodes; i++)
        n_alive += w->nodes[i].alive;
    if (!node->alive || n_alive < 2)
        return;
    for (uint32_t i = 0; i < w->o.n_nodes; i++) {
        struct connection *c = i == at ? NULL : world_connection(w, at, i);
        if (c) {
            world_cut(w, c, 300 * MS);
            c->down[world_side(c, at)] = true;
        }
    }
    for (uint32_t i = 0; i < w->n_requests; i++) {
        struct request *q = &w->requests[i];
        if (q->entry == at && q->submitted && !q->ended)
            q->ended = q->lost = true;
    }
    for (uint32_t i = 0; i < INSTANCES; i++) {
        hash_stage_free(node->instances[i].stage);
        node->instances[i] = (struct instance){.used = false};
    }
    pipeline_free(node->p);
    node->p = NULL;
    node->alive = node->busy = false;
    node->tick_at = 0;
    node->boot++;
    world_post(w, w->now + (400 + world_below(w, 3000)) * MS, EV_START, at);
    if (w->current >= 0 && plan_stage_of(&w->epochs[w->current], &node->id) >= 0)
        world_post(w, w->now + (100 + world_below(w, 2000)) * MS, EV_REPLAN, NODES);
}

static void start_node(struct world *w, uint32_t at)
{
    struct node *node = &w->nodes[at];
    if (pipeline_new(&(struct pipeline_options){.self = node->id, .chunk_rows = w->chunk_rows},
                     &node->p) != ERR_OK)
        abort();
    node->alive = true;
    if (w->o.island && at < 2) { /* members hold links; here the only one that there can be */
        struct event *e = world_post(w, w->now + 10 * MS, EV_CONNECT, 0);
        e->peer = 1;
    }
    if (w->current >= 0)
        world_post(w, w->now + world_below(w, 100 * MS), EV_ROUTE, at)->number =
            (uint32_t)w->current;
}

static void make_request(struct world *w, const int32_t *prompt, uint32_t n_prompt, uint64_t at)
{
    if (w->n_requests == REQUESTS)
        return;
    uint32_t number = w->n_requests++;
    struct request *q = &w->requests[number];
    for (uint32_t i = 0; i < sizeof q->id.bytes; i++)
        q->id.bytes[i] = (uint8_t)world_below(w, 256);
    q->entry = world_below(w, w->o.n_nodes);
    q->n_prompt = n_prompt;
    memcpy(q->tokens, prompt, n_prompt * sizeof *prompt);
    q->sampler.seed = rng_u64(&w->rng);
    q->sampler.max_tokens = world_chance(w, 5) ? 0 : 1 + world_below(w, w->o.crowd ? 150 : 50);
    q->sampler.flags = world_chance(w, 4) ? FRAME_SAMPLER_IGNORE_END : 0;
    q->sampler.n_end_ids = (uint8_t)world_below(w, w->o.crowd ? 2 : FRAME_END_IDS_MAX);
    for (uint32_t i = 0; i < q->sampler.n_end_ids; i++)
        q->sampler.end_ids[i] = (int32_t)world_below(w, HASH_STAGE_VOCABULARY);
    q->n_tokens =
        hash_stage_answer(7, LAYERS, w->context, &q->sampler, q->tokens, n_prompt, &q->finish);
    if (w->o.deadlines && world_chance(w, 3))
        q->deadline_us = at + (20 + world_below(w, 3000)) * MS;
    world_post(w, at, EV_SUBMIT, q->entry)->number = number;
    if (w->o.cancels && world_chance(w, 3))
        world_post(w, at + world_below(w, 1000) * MS, EV_CANCEL, q->entry)->number = number;
}

/* The client says something more and sends the whole conversation again. */
static void follow_up(struct world *w, const struct request *q)
{
    int32_t prompt[CONTEXT];
    uint32_t more = 1 + world_below(w, 8);
    if (w->now > HEAL_US || q->n_tokens + more >= w->context || world_chance(w, 3))
        return;
    memcpy(prompt, q->tokens, q->n_tokens * sizeof *prompt);
    for (uint32_t i = 0; i < more; i++)
        prompt[q->n_tokens + i] = (int32_t)world_below(w, HASH_STAGE_VOCABULARY);
    make_request(w, prompt, q->n_tokens + more, w->now + 1 + world_below(w, 500) * MS);
}

static void first_requests(struct world *w, uint32_t n, uint64_t from, uint32_t span_ms)
{
    for (uint32_t i = 0; i < n; i++) {
        int32_t prompt[CONTEXT];
        uint32_t n_prompt = 1 + world_below(w, w->o.crowd ? 130 : w->context - 20),
                 base = world_below(w, 3);
        uint32_t n_base = world_below(w, n_prompt + 1);
        if (w->o.crowd)
            n_base = world_chance(w, 4) ? n_prompt : n_prompt - n_prompt / 8;
        for (uint32_t k = 0; k < n_prompt; k++)
            prompt[k] =
                k < n_base ? w->bases[base][k] : (int32_t)world_below(w, HASH_STAGE_VOCABULARY);
        make_request(w, prompt, n_prompt, from + world_below(w, span_ms) * MS);
    }
}

static void submit(struct world *w, uint32_t number)
{
    struct request *q = &w->requests[number];
    struct node *node = &w->nodes[q->entry];
    if (!node->alive) {
        q->ended = q->lost = true;
        return;
    }
    q->submitted = true;
    step(w, q->entry,
         &(struct pipeline_event){.type = PIPELINE_SUBMIT,
                                  .submit = {.request = q->id,
                                             .model = {.bytes = {7}},
                                             .prompt = q->tokens,
                                             .n_prompt = q->n_prompt,
                                             .sampler = q->sampler,
                                             .deadline_us = q->deadline_us}});
}

static void cancel(struct world *w, uint32_t number)
{
    struct request *q = &w->requests[number];
    if (!q->submitted || q->ended || !w->nodes[q->entry].alive)
        return;
    q->cancelled = true;
    step(w, q->entry, &(struct pipeline_event){.type = PIPELINE_CANCEL, .cancel = q->id});
    if (!q->ended)
        world_fail(w, "request %u goes on after it was cancelled", number);
}

static void cut_something(struct world *w)
{
    uint32_t a = world_below(w, w->o.n_nodes), b = world_below(w, w->o.n_nodes);
    if (a == b)
        return;
    struct connection *c = world_connection(w, a, b);
    if (c)
        world_cut(w, c, 300 * MS);
    if (world_chance(w, 3))
        w->blocked[MIN_OF(a, b)][MAX_OF(a, b)] = true; /* until all is healed */
}

static void make_island(struct world *w)
{
    for (uint32_t i = 2; w->o.island && i < w->o.n_nodes; i++)
        w->blocked[0][i] = true;
}

static void heal(struct world *w)
{
    w->healed = true;
    memset(w->blocked, 0, sizeof w->blocked);
    make_island(w);
    world_post(w, w->now + 1000 * MS, EV_REPLAN, NODES);
    first_requests(w, 2, w->now + 6000 * MS, 100); /* everything works again */
}

/* --- one event --- */

static void on_link(struct world *w, const struct event *e)
{
    struct connection *c = &w->connections[e->number - 1];
    uint32_t s = world_side(c, e->node), other = c->side[1 - s];
    bool alive = w->nodes[e->node].alive && w->nodes[e->node].boot == e->boot;
    struct pipeline_event event = {.type = PIPELINE_LINK_UP, .link = w->nodes[other].id};
    if (e->kind == EV_UP) {
        if (c->down[s] || !alive)
            return;
        c->up[s] = true;
    } else {
        event.type = PIPELINE_LINK_DOWN;
        c->down[s] = true;
        uint32_t *pair = &w->pair[MIN_OF(e->node, other)][MAX_OF(e->node, other)];
        if (c->down[1 - s] && *pair == e->number)
            *pair = 0;
        if (!c->up[s] || !alive)
            return;
    }
    step(w, e->node, &event);
}

static void on_frame(struct world *w, const struct event *e)
{
    const struct connection *c = &w->connections[e->number - 1];
    uint32_t s = world_side(c, e->node);
    if (!w->nodes[e->node].alive || w->nodes[e->node].boot != e->boot || c->down[s] ||
        e->at >= c->lost_from[s])
        return;
    if (!c->up[s]) { /* this side has not heard of the link yet */
        struct event *again = world_post(w, w->now + 1 * MS, EV_FRAME, e->node);
        again->peer = e->peer;
        again->number = e->number;
        again->n_bytes = e->n_bytes;
        again->bytes = aligned_alloc(16, (e->n_bytes + 15) / 16 * 16);
        memcpy(again->bytes, e->bytes, e->n_bytes);
        return;
    }
    struct frame f;
    if (frame_decode(e->bytes, e->n_bytes, &f) != ERR_OK) {
        world_fail(w, "a frame that cannot be decoded");
        return;
    }
    step(w, e->node,
         &(struct pipeline_event){.type = PIPELINE_FRAME,
                                  .frame = {.from = w->nodes[e->peer].id, .frame = &f}});
}

static void handle(struct world *w, const struct event *e)
{
    bool here = e->node < NODES && w->nodes[e->node].alive && w->nodes[e->node].boot == e->boot;
    switch (e->kind) {
    case EV_TICK:
        if (here && w->nodes[e->node].tick_at == e->at)
            step(w, e->node, &(struct pipeline_event){.type = PIPELINE_TICK});
        break;
    case EV_FRAME:
        on_frame(w, e);
        break;
    case EV_UP:
    case EV_DOWN:
        on_link(w, e);
        break;
    case EV_CONNECT:
        world_connect(w, e->node, e->peer);
        break;
    case EV_COMPUTED:
        if (here)
            finish_compute(w, e->node);
        break;
    case EV_SUBMIT:
        submit(w, e->number);
        break;
    case EV_CANCEL:
        cancel(w, e->number);
        break;
    case EV_CUT:
        cut_something(w);
        break;
    case EV_KILL:
        kill_node(w, e->node);
        break;
    case EV_START:
        if (!w->nodes[e->node].alive)
            start_node(w, e->node);
        break;
    case EV_REPLAN:
        replan(w);
        break;
    case EV_INSTALL:
        if (here)
            install(w, e->node, e->number);
        break;
    case EV_COMMIT:
        if (here)
            tell_epoch(w, e->node, e->number, PIPELINE_COMMIT);
        break;
    case EV_DRAIN:
        if (here)
            tell_epoch(w, e->node, e->number, PIPELINE_DRAIN);
        break;
    case EV_RETIRE:
        if (here)
            tell_epoch(w, e->node, e->number, PIPELINE_RETIRE);
        break;
    case EV_ROUTE:
        if (here)
            step(w, e->node,
                 &(struct pipeline_event){.type = PIPELINE_ROUTE, .route = &w->epochs[e->number]});
        break;
    case EV_HEAL:
        heal(w);
        break;
    }
}

static void set_up(struct world *w)
{
    rng_seed(&w->rng, w->o.seed);
    w->n_slots = w->o.crowd || world_chance(w, 3) ? PIPELINE_SLOTS_MAX : 1 + world_below(w, 6);
    if (w->o.crowd && world_chance(w, 4))
        w->n_slots = 2 + world_below(w, 8);
    w->chunk_rows = world_chance(w, 3) ? 0 : 1 + world_below(w, 40);
    w->context = w->o.crowd || world_chance(w, 3) ? CONTEXT : 96;
    /* From room for one sequence to room for some. */
    w->n_blocks = (w->context + STAGE_BLOCK - 1) / STAGE_BLOCK;
    w->n_blocks += world_below(w, w->o.crowd ? 6 : 3 * w->n_blocks);
    w->current = -1;
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t k = 0; k < CONTEXT; k++)
            w->bases[i][k] = (int32_t)world_below(w, HASH_STAGE_VOCABULARY);
    }
    for (uint32_t i = 0; i < w->o.n_nodes; i++) {
        rng_u64(&w->rng);
        for (uint32_t k = 0; k < sizeof w->nodes[i].id.bytes; k++)
            w->nodes[i].id.bytes[k] = (uint8_t)world_below(w, 256);
        start_node(w, i);
    }
    make_island(w);
    world_post(w, 0, EV_REPLAN, NODES);
    world_post(w, HEAL_US, EV_HEAL, NODES);
    if (w->o.crowd) /* twice, so that some find what others left */
        first_requests(w, w->o.n_requests / 2, 5000 * MS, 500);
    first_requests(w, w->o.crowd ? w->o.n_requests / 2 : w->o.n_requests, 0,
                   w->o.crowd ? 500 : 8000);
    for (uint32_t i = 0; w->o.cuts && i < 1 + world_below(w, 5); i++)
        world_post(w, world_below(w, 10000) * MS, EV_CUT, NODES);
    for (uint32_t i = 0; w->o.kills && i < 1 + world_below(w, 3); i++)
        world_post(w, world_below(w, 9000) * MS, EV_KILL, world_below(w, w->o.n_nodes));
    for (uint32_t i = 0; w->o.replans && i < 1 + world_below(w, 5); i++)
        world_post(w, world_below(w, 11000) * MS, EV_REPLAN, NODES);
}

/* Nothing of the requests is left, and retiring gives every instance back. */
static void check_empty(struct world *w)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        if (!w->requests[i].ended)
            world_fail(w, "request %u at node %u does not end (%u tokens)", i, w->requests[i].entry,
                       w->requests[i].n_got);
    }
    for (uint32_t i = 0; i < w->o.n_nodes; i++) {
        if (!w->nodes[i].alive)
            continue;
        struct pipeline_progress progress;
        pipeline_progress(w->nodes[i].p, &progress);
        if (progress.n_requests + progress.n_sequences + progress.n_slots_used != 0)
            world_fail(w, "node %u still holds %u requests, %u sequences, %u slots", i,
                       progress.n_requests, progress.n_sequences, progress.n_slots_used);
        w->r->n_preempted += (uint32_t)progress.n_preempted;
        for (uint32_t k = 0; k < w->n_epochs; k++)
            tell_epoch(w, i, k, PIPELINE_RETIRE);
        for (uint32_t k = 0; k < INSTANCES; k++) {
            if (w->nodes[i].instances[k].used && !w->nodes[i].busy)
                world_fail(w, "node %u does not release instance %u", i, k);
        }
    }
}

static bool all_ended(const struct world *w)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        if (!w->requests[i].ended)
            return false;
    }
    return w->healed;
}

static void tear_down(struct world *w)
{
    for (uint32_t i = 0; i < w->n_heap; i++)
        free(w->heap[i].bytes);
    free(w->heap);
    for (uint32_t i = 0; i < w->o.n_nodes; i++) {
        for (uint32_t k = 0; k < INSTANCES; k++)
            hash_stage_free(w->nodes[i].instances[k].stage);
        pipeline_free(w->nodes[i].p);
    }
    free(w->outputs);
    free(w);
}

void data_world_run(const struct data_world_options *options, struct data_world_result *ret)
{
    struct world *w = calloc(1, sizeof *w);
    if (!w)
        abort();
    *ret = (struct data_world_result){.digest = 1};
    w->o = *options;
    w->r = ret;
    w->outputs = calloc(OUTPUTS, sizeof *w->outputs);
    if (!w->outputs)
        abort();
    set_up(w);
    uint32_t n_events = 0;
    uint64_t quiet_until = UINT64_MAX;
    while (w->n_heap > 0 && !ret->failure[0]) {
        struct event e = world_pop(w);
        w->now = e.at;
        if (all_ended(w) && quiet_until == UINT64_MAX)
            quiet_until = w->now + 3000 * MS; /* what is still under way arrives */
        if (w->now > quiet_until || w->now > END_US) {
            free(e.bytes);
            break;
        }
        handle(w, &e);
        free(e.bytes);
        if (++n_events > EVENTS_MAX)
            world_fail(w, "the cluster never rests");
    }
    if (!ret->failure[0])
        check_empty(w);
    ret->virtual_us = w->now;
    tear_down(w);
}
