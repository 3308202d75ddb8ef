/* The shell around a machine's data-plane core: what agent/inference.c does on its thread. Mail to
 * and from the loop is late by a little, as between threads; while a step is computed neither mail
 * nor frames are read. */
#include "tests/sim/sim_internal.h"

#include "base/util.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROGRESS_US = 100 * MS };

static void step(struct sim *w, struct machine *m, const struct pipeline_event *event);

uint64_t sim_hash(const void *bytes, size_t n)
{
    uint64_t h = 1469598103934665603u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    return h;
}

void stage_start(struct sim *w, struct machine *m)
{
    struct pipeline_options o = {.self = m->identity.id,
                                 .chunk_rows = w->o.seed % 3 ? 0 : 1 + (uint32_t)(w->o.seed % 40)};
    if (pipeline_new(&o, &m->pipeline) != ERR_OK)
        abort();
    m->progress_due_us = 0;
    memset(m->links, 0, sizeof m->links);
}

static void clear_box(struct mailbox_sim *box)
{
    while (box->first) {
        struct mail *mail = box->first;
        box->first = mail->next;
        free(mail->plan);
        free(mail);
    }
    *box = (struct mailbox_sim){.first = NULL};
}

void stage_stop(struct sim *w, struct machine *m)
{
    (void)w;
    for (uint32_t i = 0; i < INSTANCES; i++) {
        hash_stage_free(m->instances[i].hash);
        m->instances[i] = (struct instance){.used = false};
    }
    clear_box(&m->inbox);
    clear_box(&m->loop);
    pipeline_free(m->pipeline);
    m->pipeline = NULL;
    m->busy = false;
}

void stage_mail(struct sim *w, struct machine *m, const struct mail *mail, bool to_loop)
{
    struct mailbox_sim *box = to_loop ? &m->loop : &m->inbox;
    struct mail *copy = sim_alloc(sizeof *copy);
    *copy = *mail;
    copy->next = NULL;
    copy->sleep = m->n_sleeps_told;
    copy->due_us = MAX_OF(w->now + 5 + sim_below(w, 100), box->last_us);
    if (sim_has(w, SIM_SLOW) && sim_chance(w, 50))
        copy->due_us += sim_below(w, 50 * MS);
    box->last_us = copy->due_us;
    if (box->last)
        box->last->next = copy;
    else
        box->first = copy;
    box->last = copy;
    sim_post(w, copy->due_us, to_loop ? EV_LOOP_MAIL : EV_INBOX, m->number);
}

static void schedule(struct sim *w, struct machine *m)
{
    uint64_t due = pipeline_next_due(m->pipeline), now = sim_local_us(w, m);
    if (due == UINT64_MAX)
        return;
    uint64_t at = w->now + (due > now ? due - now : 1);
    if (m->pipe_tick_at_us > w->now && m->pipe_tick_at_us <= at)
        return;
    m->pipe_tick_at_us = at;
    sim_post(w, at, EV_PIPE_TICK, m->number);
}

/* --- effects --- */

static void send_frame(struct sim *w, struct machine *m, const struct pipeline_send *s)
{
    uint32_t to = sim_number(w, &s->to);
    if (to == MACHINES || m->links[to] == 0)
        return;
    uint32_t conn = m->links[to] - 1;
    struct frame scratch;
    const struct frame *f = pipeline_frame(s, &scratch);
    size_t n = frame_encoded_bytes(f), n_written = 0;
    uint8_t *bytes = sim_alloc(n);
    if (frame_encode(f, bytes, n, &n_written) != ERR_OK || n_written != n)
        sim_fail(w, "machine %u makes a frame of type %u that cannot be encoded", m->number,
                 s->type);
    uint32_t end = w->conns[conn]->ends[0].machine == m->number ? 0 : 1;
    net_send(w, conn, end, PACKET_DATA, 0, bytes, n, s->rows, s->rows ? s->n_row_bytes : 0);
    free(bytes);
}

static void release(struct sim *w, struct machine *m, uint32_t i)
{
    struct instance *in = i < INSTANCES ? &m->instances[i] : NULL;
    if (!in || !in->used) {
        sim_fail(w, "machine %u releases an instance that is not there", m->number);
        return;
    }
    struct mail mail = {.type = MAIL_RELEASED, .epoch = in->plan.epoch};
    hash_stage_free(in->hash);
    *in = (struct instance){.used = false};
    stage_mail(w, m, &mail, true);
}

static void end_of_request(struct sim *w, struct machine *m, const struct pipeline_effect *x)
{
    check_end(w, m, x);
    for (uint32_t i = 0; i < w->n_requests; i++) {
        if (request_id_eq(&w->requests[i].id, &x->end.request))
            stage_mail(
                w, m,
                &(struct mail){.type = MAIL_USED, .model = w->shapes[w->requests[i].model].model},
                true);
    }
}

/* Executed at once, while the views are valid; the core hears of it when the time has passed. */
static void compute(struct sim *w, struct machine *m, const struct pipeline_compute *c)
{
    if (m->busy)
        sim_fail(w, "machine %u starts a second computation", m->number);
    check_compute(w, m, c);
    if (w->r->failure[0])
        return;
    struct instance *in = &m->instances[c->instance];
    uint64_t us = 150 + sim_below(w, 400) + (uint64_t)(8 * c->n_rows / m->speed);
    uint64_t logits[STAGE_SEGMENTS_MAX];
    m->computed = (struct pipeline_event){.type = PIPELINE_COMPUTED};
    if (sim_has(w, SIM_SLOW) && sim_chance(w, 300))
        us += (uint64_t)(200 + sim_below(w, 4000)) * MS;
    if (hash_stage_forward(in->hash, c->segments, c->n_segments, c->rows_in,
                           c->is_tail ? NULL : (float *)(void *)m->rows_out,
                           c->is_tail ? logits : NULL) != ERR_OK)
        sim_fail(w, "machine %u: a segment that the stage refuses", m->number);
    memset(m->sampled, 0, sizeof m->sampled);
    for (uint32_t i = 0; i < c->n_samples; i++) {
        const struct pipeline_sample *s = &c->samples[i];
        m->sampled[i].id =
            hash_stage_sample(logits[i], s->sampler, s->position, s->history, s->n_history);
    }
    if (!c->is_tail)
        check_output(w, in, c, m->rows_out);
    m->computed.computed.instance = c->instance;
    m->computed.computed.step = c->step;
    m->computed.computed.rows = c->is_tail ? NULL : (const float *)(const void *)m->rows_out;
    m->computed.computed.sampled = m->sampled;
    m->computed.computed.compute_us = (uint32_t)us;
    m->busy = true;
    m->busy_sleep = m->n_sleeps;
    m->busy_until_us = w->now + us;
    w->r->n_computed++;
    sim_post(w, m->busy_until_us, EV_COMPUTED, m->number);
}

static void carry_out(struct sim *w, struct machine *m, const struct pipeline_effect *x)
{
    switch (x->type) {
    case PIPELINE_DO_SEND:
        check_send(w, m, &x->send);
        send_frame(w, m, &x->send);
        break;
    case PIPELINE_DO_WANT_LINK:
        stage_mail(w, m, &(struct mail){.type = MAIL_WANT_LINK, .peer = x->want_link}, true);
        break;
    case PIPELINE_DO_TOKEN:
        check_token(w, m, x);
        break;
    case PIPELINE_DO_END:
        end_of_request(w, m, x);
        break;
    case PIPELINE_DO_RELEASE:
        release(w, m, x->release.instance);
        break;
    case PIPELINE_DO_DRAINED:
        stage_mail(w, m, &(struct mail){.type = MAIL_DRAINED, .epoch = x->release.epoch}, true);
        break;
    case PIPELINE_DO_COPY_BLOCK:
        if (hash_stage_copy_block(m->instances[x->copy_block.instance].hash, x->copy_block.from,
                                  x->copy_block.to) != ERR_OK)
            sim_fail(w, "machine %u cannot copy a block", m->number);
        break;
    case PIPELINE_DO_STATS:
    case PIPELINE_DO_STALL:
    case PIPELINE_DO_COMPUTE: /* after all others */
        break;
    }
}

static enum err step_result(struct sim *w, struct machine *m, const struct pipeline_event *event)
{
    struct pipeline_update u = {NULL, 0};
    const struct pipeline_compute *todo = NULL;
    enum err e = pipeline_step(m->pipeline, event, sim_local_us(w, m), &u);
    for (uint32_t i = 0; i < u.n; i++) {
        if (u.effects[i].type == PIPELINE_DO_COMPUTE)
            todo = &u.effects[i].compute;
        else
            carry_out(w, m, &u.effects[i]);
    }
    if (todo)
        compute(w, m, todo);
    schedule(w, m);
    return e;
}

static void step(struct sim *w, struct machine *m, const struct pipeline_event *event)
{
    (void)step_result(w, m, event);
}

/* --- links --- */

void stage_link_lost(struct sim *w, struct machine *m, uint32_t peer, bool close_it)
{
    uint32_t conn = m->links[peer];
    if (conn == 0)
        return;
    struct conn *c = w->conns[conn - 1];
    uint32_t end = c->ends[0].machine == m->number ? 0 : 1;
    if (!close_it && c->ends[end].open)
        return; /* an older one went down */
    m->links[peer] = 0;
    net_close(w, conn - 1, end);
    struct node_id id = w->machines[peer].identity.id;
    stage_mail(w, m, &(struct mail){.type = MAIL_LINK_STATE, .peer = id, .up = false}, true);
    step(w, m, &(struct pipeline_event){.type = PIPELINE_LINK_DOWN, .link = id});
}

static void link_up(struct sim *w, struct machine *m, uint32_t conn)
{
    struct conn *c = w->conns[conn];
    uint32_t end = c->ends[0].machine == m->number ? 0 : 1;
    uint32_t peer = c->ends[1 - end].machine;
    if (!c->ends[end].open)
        return;
    stage_link_lost(w, m, peer, true);
    m->links[peer] = conn + 1;
    c->ends[end].ready = true;
    struct node_id id = w->machines[peer].identity.id;
    stage_mail(w, m, &(struct mail){.type = MAIL_LINK_STATE, .peer = id, .up = true}, true);
    step(w, m, &(struct pipeline_event){.type = PIPELINE_LINK_UP, .link = id});
}

void stage_frame(struct sim *w, struct machine *m, uint32_t conn, const uint8_t *bytes, size_t n)
{
    struct conn *c = w->conns[conn];
    uint32_t peer = c->ends[c->ends[0].machine == m->number ? 1 : 0].machine;
    struct frame f;
    if (frame_decode(bytes, n, &f) != ERR_OK) {
        sim_fail(w, "machine %u gets a frame that cannot be decoded", m->number);
        return;
    }
    if (m->links[peer] != conn + 1)
        return;
    enum err e = step_result(
        w, m,
        &(struct pipeline_event){.type = PIPELINE_FRAME,
                                 .frame = {.from = w->machines[peer].identity.id, .frame = &f}});
    if (e == ERR_CORRUPT)
        sim_fail(w, "machine %u finds a frame of type %u from %u corrupt", m->number, f.header.type,
                 peer);
    if (e == ERR_CLOSED || e == ERR_CORRUPT || e == ERR_IO || e == ERR_TIMEOUT)
        stage_link_lost(w, m, peer, true);
}

/* --- mail --- */

static void install(struct sim *w, struct machine *m, const struct plan *plan)
{
    uint32_t i = 0;
    while (i < INSTANCES && m->instances[i].used)
        i++;
    int at = plan_stage_of(plan, &m->identity.id);
    if (i == INSTANCES || at < 0) {
        sim_fail(w, "machine %u has no room for another stage", m->number);
        return;
    }
    const struct plan_stage *s = &plan->stages[at];
    m->instances[i] = (struct instance){.used = true, .plan = *plan, .stage = (uint32_t)at};
    m->instances[i].hash = hash_stage_new(&(struct hash_stage_options){
        .model = plan->model.bytes[0],
        .first_layer = s->first_layer,
        .n_layers = s->n_layers,
        .n_layers_model = LAYERS,
        .context = plan->context,
        .n_blocks = plan_kv_blocks(plan),
    });
    enum err e =
        step_result(w, m,
                    &(struct pipeline_event){.type = PIPELINE_INSTALL,
                                             .install = {.plan = plan,
                                                         .instance = i,
                                                         .n_slots = plan_slots(plan),
                                                         .n_blocks = plan_kv_blocks(plan),
                                                         .row_bytes = HASH_STAGE_ROW_BYTES}});
    if (e != ERR_OK)
        sim_fail(w, "machine %u cannot install a plan (%s)", m->number, err_name(e));
}

static void on_epoch(struct sim *w, struct machine *m, enum pipeline_event_type type,
                     const struct mail *mail)
{
    const struct epoch *epoch = &mail->epoch;
    for (uint32_t i = 0; i < INSTANCES; i++) {
        struct instance *in = &m->instances[i];
        if (in->used && epoch_eq(&in->plan.epoch, epoch) && type == PIPELINE_COMMIT) {
            in->committed = true;
            in->sleep = mail->sleep;
        }
    }
    struct pipeline_event e = {.type = type};
    e.epoch = *epoch;
    step(w, m, &e);
}

static void on_submit(struct sim *w, struct machine *m, uint32_t number)
{
    struct request *q = &w->requests[number];
    if (q->state != REQUEST_RUNNING)
        return;
    struct pipeline_event e = {.type = PIPELINE_SUBMIT,
                               .submit = {.request = q->id,
                                          .model = w->shapes[q->model].model,
                                          .prompt = q->tokens,
                                          .n_prompt = q->n_prompt,
                                          .sampler = q->sampler,
                                          .deadline_us = q->deadline_us}};
    enum err r = step_result(w, m, &e);
    if (r == ERR_OK)
        return;
    q->state = REQUEST_DONE;
    w->r->n_errors++;
    if (r != ERR_BUSY || q->must_succeed)
        sim_fail(w, "request %u is refused by machine %u (%s)", number, m->number, err_name(r));
}

static void on_mail(struct sim *w, struct machine *m, const struct mail *mail)
{
    switch (mail->type) {
    case MAIL_INSTALL:
        install(w, m, mail->plan);
        break;
    case MAIL_COMMIT:
        on_epoch(w, m, PIPELINE_COMMIT, mail);
        break;
    case MAIL_DRAIN:
        on_epoch(w, m, PIPELINE_DRAIN, mail);
        break;
    case MAIL_RETIRE:
        on_epoch(w, m, PIPELINE_RETIRE, mail);
        break;
    case MAIL_ROUTE:
        step(w, m, &(struct pipeline_event){.type = PIPELINE_ROUTE, .route = mail->plan});
        break;
    case MAIL_NO_ROUTE:
        step(w, m,
             &(struct pipeline_event){
                 .type = PIPELINE_NO_ROUTE,
                 .no_route = {.model = mail->model, .reason = mail->error, .text = mail->text}});
        break;
    case MAIL_SUBMIT:
        on_submit(w, m, mail->number);
        break;
    case MAIL_CANCEL:
        step(w, m,
             &(struct pipeline_event){.type = PIPELINE_CANCEL,
                                      .cancel = w->requests[mail->number].id});
        break;
    case MAIL_LINK:
        link_up(w, m, mail->number);
        break;
    case MAIL_UNLINK:
        if (mail->number < w->n)
            stage_link_lost(w, m, mail->number, true);
        break;
    case MAIL_SLEPT:
        step(w, m, &(struct pipeline_event){.type = PIPELINE_SUSPEND});
        for (uint32_t i = 0; i < w->n; i++)
            stage_link_lost(w, m, i, true);
        break;
    default:
        break;
    }
}

void stage_inbox(struct sim *w, struct machine *m)
{
    while (!m->busy && m->inbox.first && m->inbox.first->due_us <= w->now) {
        struct mail *mail = m->inbox.first;
        m->inbox.first = mail->next;
        if (!m->inbox.first)
            m->inbox.last = NULL;
        on_mail(w, m, mail);
        free(mail->plan);
        free(mail);
    }
}

void stage_tick(struct sim *w, struct machine *m)
{
    if (m->busy) {
        m->pipe_tick_at_us = m->busy_until_us + 1;
        sim_post(w, m->pipe_tick_at_us, EV_PIPE_TICK, m->number);
        return;
    }
    m->pipe_tick_at_us = 0;
    step(w, m, &(struct pipeline_event){.type = PIPELINE_TICK});
}

/* Its thread sees at once that the clocks have jumped, and tells the loop. */
static void say_slept(struct sim *w, struct machine *m)
{
    bool was_busy = m->busy;
    m->busy = true; /* a core that asks for something now is wrong */
    step(w, m, &(struct pipeline_event){.type = PIPELINE_SLEPT});
    m->busy = was_busy;
    stage_mail(w, m, &(struct mail){.type = MAIL_WOKEN}, true);
}

/* A computation that was cut in two by the sleep ends first. */
void stage_woken(struct sim *w, struct machine *m)
{
    if (!m->busy)
        say_slept(w, m);
}

/* Mail first, then what was computed; frames come after. */
void stage_computed(struct sim *w, struct machine *m)
{
    struct pipeline_progress p;
    m->busy = false;
    struct pipeline_event done = m->computed;
    bool stale = m->busy_sleep != m->n_sleeps;
    if (stale)
        say_slept(w, m);
    while (m->inbox.first && m->inbox.first->due_us <= w->now) {
        struct mail *mail = m->inbox.first;
        m->inbox.first = mail->next;
        if (!m->inbox.first)
            m->inbox.last = NULL;
        m->busy = true; /* the core may ask for nothing before it is told */
        on_mail(w, m, mail);
        m->busy = false;
        free(mail->plan);
        free(mail);
    }
    m->stale_result = stale;
    step(w, m, &done);
    m->stale_result = false;
    pipeline_progress(m->pipeline, &p);
    if (p.n_requests + p.n_sequences > 0 && w->now >= m->progress_due_us) {
        stage_mail(w, m, &(struct mail){.type = MAIL_PROGRESS, .step = p.steps_done}, true);
        m->progress_due_us = w->now + PROGRESS_US;
    }
}
