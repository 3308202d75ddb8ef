#include "agent/inference.h"

#include "agent/peer_fds.h"

#include "agent/mapping_guard.h"
#include "agent/pipeline.h"
#include "base/clock.h"
#include "base/util.h"
#include "runtime/pool.h"
#include "runtime/sampler.h"
#include "transport/link_tcp.h"
#include "transport/net.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert((int)PLAN_KV_BLOCK == (int)STAGE_BLOCK && (int)PLAN_SLOTS_MAX == PIPELINE_SLOTS_MAX,
               "plans, stages and the data plane mean the same blocks and slots");
_Static_assert((int)PRECISION_F32 == (int)STAGE_F32 &&
                   (int)PRECISION_FAST_KV8 == (int)STAGE_FAST_KV8,
               "plans and stages number precisions alike");

enum {
    INSTANCES_MAX = 32,
    LINKS_MAX = 64, /* PIPELINE_PEERS_MAX and LINK_WAIT_MAX */
    SPIN_US = 40,
    IDLE_WAIT_US = 10 * 1000 * 1000,
    PROGRESS_US = 100 * 1000,
    MAILS_PER_TURN = 64,
    FRAMES_PER_TURN = 64,
    MEASURED_TOKENS_MIN = 16, /* an answer of fewer tokens says little about speed */
    LINK_SILENT_MS = 2000,    /* a link whose other end acknowledges nothing for so long is cut */
    SEND_WAIT_US = 2 * 1000 * 1000, /* a peer that takes nothing for so long is as good as gone */
};

enum inference_mail {
    MAIL_INSTALL = 1, /* body: struct install_mail; owned: struct plan */
    MAIL_COMMIT,
    MAIL_DRAIN,
    MAIL_RETIRE,
    MAIL_ROUTE, /* owned: struct plan */
    MAIL_NO_ROUTE,
    MAIL_SUBMIT, /* owned: struct call */
    MAIL_CANCEL,
    MAIL_LINK, /* body: struct link_mail */
    MAIL_UNLINK,
    MAIL_SLEPT, /* body: uint64_t, of slept_us */
    MAIL_STOP,
};

struct install_mail {
    struct stage *stage;
    struct model *model;
};

struct no_route_mail {
    struct hash256 model;
    enum err reason;
    char text[ERR_TEXT_MAX];
};

struct link_mail {
    int fd;
    struct hello_result result;
};

struct instance {
    struct stage *stage; /* NULL: free */
    struct model *model;
    struct sampler *sampler; /* of a tail */
    struct epoch epoch;
    uint32_t n_vocab, n_embd;
    bool is_tail;
    bool broken; /* its file failed under us: nothing it computes can be trusted */
};

struct client {
    struct call *call; /* NULL: free */
    struct request_id request;
    struct hash256 model;
};

struct inference {
    struct inference_options options;
    struct mailbox *mailbox;
    struct mailbox_sender *to_self; /* the loop thread's end */
    struct mailbox_sender *to_loop; /* this thread's end */
    pthread_t thread;
    bool started, stopping;
    struct log log;

    struct pipeline *pipeline;
    struct instance instances[INSTANCES_MAX];
    struct client clients[PIPELINE_REQUESTS_MAX];
    struct link *links[LINKS_MAX];
    struct node_id peers[LINKS_MAX];
    int link_fds[LINKS_MAX]; /* the links own them */
    unsigned n_links;
    struct buf scratch;

    float *rows_out; /* [STAGE_ROWS_MAX, n_embd] */
    size_t rows_out_floats;
    float *logits; /* [segments with logits, n_vocab] */
    size_t logits_floats;
    struct pipeline_sampled sampled[STAGE_SEGMENTS_MAX];

    bool has_computed; /* a computation is done and not yet told to the core */
    struct pipeline_event computed;
    uint64_t progress_due_us;
    uint64_t slept_us; /* of clock_slept_us: sleep that is known here */

    pthread_mutex_t view_mutex;
    struct inference_view view;
};

/* ---- what the loop thread calls ---- */

static void drop_plan(void *owned)
{
    free(owned);
}

static void drop_call(void *owned)
{
    struct call *c = owned;
    call_fail(c, ERR_CLOSED, "this node is stopping");
    call_unref(c);
}

static enum err post_plan(struct inference *inf, uint32_t type, const void *body, size_t n,
                          const struct plan *plan)
{
    struct plan *copy = malloc(sizeof *copy);
    if (!copy)
        return ERR_NO_MEMORY;
    *copy = *plan;
    enum err e = mailbox_send_owned(inf->to_self, type, body, n, copy, drop_plan);
    if (e != ERR_OK)
        free(copy);
    return e;
}

enum err inference_install(struct inference *inf, const struct plan *plan, struct stage *take_stage,
                           struct model *take_model)
{
    struct install_mail m = {take_stage, take_model};
    return post_plan(inf, MAIL_INSTALL, &m, sizeof m, plan);
}

enum err inference_commit(struct inference *inf, const struct epoch *epoch)
{
    return mailbox_send(inf->to_self, MAIL_COMMIT, epoch, sizeof *epoch);
}

enum err inference_drain(struct inference *inf, const struct epoch *epoch)
{
    return mailbox_send(inf->to_self, MAIL_DRAIN, epoch, sizeof *epoch);
}

enum err inference_retire(struct inference *inf, const struct epoch *epoch)
{
    return mailbox_send(inf->to_self, MAIL_RETIRE, epoch, sizeof *epoch);
}

enum err inference_route(struct inference *inf, const struct plan *plan)
{
    return post_plan(inf, MAIL_ROUTE, NULL, 0, plan);
}

enum err inference_no_route(struct inference *inf, const struct hash256 *model, enum err reason,
                            const char *text)
{
    struct no_route_mail m = {.model = *model, .reason = reason};
    (void)snprintf(m.text, sizeof m.text, "%s", text ? text : "");
    return mailbox_send(inf->to_self, MAIL_NO_ROUTE, &m, sizeof m);
}

enum err inference_submit(struct inference *inf, struct call *take_call)
{
    return mailbox_send_owned(inf->to_self, MAIL_SUBMIT, NULL, 0, take_call, drop_call);
}

enum err inference_cancel(struct inference *inf, const struct request_id *request)
{
    return mailbox_send(inf->to_self, MAIL_CANCEL, request, sizeof *request);
}

static void close_fd(struct inference *inf, int fd)
{
    peer_fds_remove(inf->options.fds, fd);
    (void)close(fd);
}

enum err inference_link(struct inference *inf, int fd, const struct hello_result *result)
{
    struct link_mail m = {fd, *result};
    enum err e = peer_fds_add(inf->options.fds, &result->peer, fd);
    if (e == ERR_OK)
        e = mailbox_send(inf->to_self, MAIL_LINK, &m, sizeof m);
    if (e != ERR_OK)
        close_fd(inf, fd);
    return e;
}

enum err inference_unlink(struct inference *inf, const struct node_id *peer)
{
    return mailbox_send(inf->to_self, MAIL_UNLINK, peer, sizeof *peer);
}

enum err inference_slept(struct inference *inf, uint64_t slept_us)
{
    return mailbox_send(inf->to_self, MAIL_SLEPT, &slept_us, sizeof slept_us);
}

void inference_look(struct inference *inf, struct inference_view *ret)
{
    (void)pthread_mutex_lock(&inf->view_mutex);
    *ret = inf->view;
    (void)pthread_mutex_unlock(&inf->view_mutex);
}

/* ---- the thread ---- */

static void tell_loop(struct inference *inf, enum loop_mail type, const void *body, size_t n)
{
    enum err e = mailbox_send(inf->to_loop, type, body, n);
    if (e != ERR_OK)
        log_warning(&inf->log, "a message to the loop was lost (%s)", err_name(e));
}

static enum err step(struct inference *inf, const struct pipeline_event *event);

static struct client *client_of(struct inference *inf, const struct request_id *id)
{
    for (int i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        if (inf->clients[i].call && request_id_eq(&inf->clients[i].request, id))
            return &inf->clients[i];
    }
    return NULL;
}

static int link_index(const struct inference *inf, const struct node_id *peer)
{
    for (unsigned i = 0; i < inf->n_links; i++) {
        if (node_id_eq(&inf->peers[i], peer))
            return (int)i;
    }
    return -1;
}

static void link_lost(struct inference *inf, int i)
{
    struct node_id peer = inf->peers[i];
    peer_fds_remove(inf->options.fds, inf->link_fds[i]);
    link_free(inf->links[i]);
    inf->links[i] = inf->links[--inf->n_links];
    inf->peers[i] = inf->peers[inf->n_links];
    inf->link_fds[i] = inf->link_fds[inf->n_links];
    tell_loop(inf, LOOP_LINK, &(struct mail_link){peer, false}, sizeof(struct mail_link));
    (void)step(inf, &(struct pipeline_event){.type = PIPELINE_LINK_DOWN, .link = peer});
}

/* Links that broke while effects were carried out are dropped afterwards, not in the middle. */
struct broken {
    struct node_id peers[LINKS_MAX];
    unsigned n;
};

static void note_broken(struct broken *b, const struct node_id *peer)
{
    if (b->n < LINKS_MAX)
        b->peers[b->n++] = *peer;
}

static void send_frame(struct inference *inf, const struct pipeline_send *s, struct broken *broken)
{
    int i = link_index(inf, &s->to);
    if (i < 0)
        return;
    struct frame small;
    const struct frame *f = pipeline_frame(s, &small);
    enum err e = link_send_frame(inf->links[i], f, s->rows, &inf->scratch);
    if (e == ERR_AGAIN) {
        e = link_flush_wait(inf->links[i], SEND_WAIT_US);
        if (e == ERR_OK)
            e = link_send_frame(inf->links[i], f, s->rows, &inf->scratch);
    }
    if (e != ERR_OK) {
        log_warning(&inf->log, "a data link broke while sending (%s)", err_name(e));
        note_broken(broken, &s->to);
    }
}

static void token_to_client(struct inference *inf, const struct pipeline_effect *x)
{
    struct client *c = client_of(inf, &x->token.request);
    if (!c)
        return;
    struct call_item item = {.kind = CALL_ITEM_TOKEN,
                             .token_id = x->token.sampled.id,
                             .position = x->token.index,
                             .logprob = x->token.sampled.logprob,
                             .n_top = x->token.sampled.n_logprobs};
    for (uint32_t i = 0; i < item.n_top && i < CALL_LOGPROBS_MAX; i++) {
        item.top_ids[i] = x->token.sampled.top_ids[i];
        item.top_logprobs[i] = x->token.sampled.top_logprobs[i];
    }
    if (call_push(c->call, &item) != ERR_OK) /* the client is gone or does not read */
        (void)mailbox_send(inf->to_loop, LOOP_CALL_DROPPED, &c->request, sizeof c->request);
}

static void end_to_client(struct inference *inf, const struct pipeline_effect *x)
{
    struct client *c = client_of(inf, &x->end.request);
    if (!c)
        return;
    struct call_item item = {
        .kind = CALL_ITEM_END,
        .error = x->end.err,
        .n_prompt = x->end.timings.n_prompt,
        .n_cached = x->end.timings.n_cached,
        .n_generated = x->end.timings.n_emitted,
        .prompt_ms = (double)(x->end.timings.queued_us + x->end.timings.prefill_us) / 1e3,
        .generate_ms = (double)x->end.timings.decode_us / 1e3};
    (void)snprintf(item.finish, sizeof item.finish, "%s",
                   x->end.finish == FRAME_END_TOKEN ? "stop" : "length");
    (void)snprintf(item.text, sizeof item.text, "%s", x->end.text ? x->end.text : "");
    (void)call_push(c->call, &item);
    if (x->end.err == ERR_OK)
        call_reply(c->call, ERR_OK, NULL);
    else
        call_fail(c->call, x->end.err, "%s", item.text);
    call_unref(c->call);
    c->call = NULL;
    struct mail_used used = {.model = c->model};
    if (x->end.timings.n_emitted >= MEASURED_TOKENS_MIN)
        used.token_us = (double)x->end.timings.decode_us / (x->end.timings.n_emitted - 1);
    tell_loop(inf, LOOP_USED, &used, sizeof used);
}

static void release_instance(struct inference *inf, uint32_t i)
{
    if (i >= INSTANCES_MAX || !inf->instances[i].stage)
        return;
    struct mail_released m = {inf->instances[i].epoch, i};
    stage_free(inf->instances[i].stage);
    model_unref(inf->instances[i].model);
    sampler_free(inf->instances[i].sampler);
    inf->instances[i] = (struct instance){.stage = NULL};
    tell_loop(inf, LOOP_RELEASED, &m, sizeof m);
}

static void carry_out(struct inference *inf, const struct pipeline_effect *x, struct broken *broken)
{
    switch (x->type) {
    case PIPELINE_DO_SEND:
        send_frame(inf, &x->send, broken);
        break;
    case PIPELINE_DO_WANT_LINK:
        tell_loop(inf, LOOP_WANT_LINK, &x->want_link, sizeof x->want_link);
        break;
    case PIPELINE_DO_TOKEN:
        token_to_client(inf, x);
        break;
    case PIPELINE_DO_END:
        end_to_client(inf, x);
        break;
    case PIPELINE_DO_COPY_BLOCK: {
        struct instance *in = &inf->instances[x->copy_block.instance];
        assert(x->copy_block.instance < INSTANCES_MAX && in->stage);
        enum err e = stage_copy_block(in->stage, x->copy_block.from, x->copy_block.to);
        assert(e == ERR_OK);
        (void)e;
        break;
    }
    case PIPELINE_DO_RELEASE:
        release_instance(inf, x->release.instance);
        break;
    case PIPELINE_DO_DRAINED:
        tell_loop(inf, LOOP_DRAINED, &x->release.epoch, sizeof x->release.epoch);
        break;
    case PIPELINE_DO_STATS: {
        struct mail_stats m = {x->stats.epoch,          x->stats.stage,     x->stats.n_decode_steps,
                               x->stats.n_prefill_rows, x->stats.decode_us, x->stats.prefill_us};
        tell_loop(inf, LOOP_STATS, &m, sizeof m);
        break;
    }
    case PIPELINE_DO_STALL: {
        struct mail_stall m = {x->stall.epoch, x->stall.stage, x->stall.step, x->stall.waited_us};
        tell_loop(inf, LOOP_STALL, &m, sizeof m);
        break;
    }
    case PIPELINE_DO_COMPUTE:
        break; /* after all others: see step */
    }
}

static enum err room_for(float **buffer, size_t *have, size_t need)
{
    if (need <= *have)
        return ERR_OK;
    float *p = realloc(*buffer, need * sizeof *p);
    if (!p)
        return ERR_NO_MEMORY;
    *buffer = p;
    *have = need;
    return ERR_OK;
}

static enum err sample(const struct instance *in, const struct pipeline_sample *s,
                       const float *logits, struct pipeline_sampled *ret)
{
    const struct frame_sampler *f = s->sampler;
    struct sampler_params params = SAMPLER_PARAMS_INIT;
    params.temperature = f->temperature;
    params.top_k = f->top_k;
    params.top_p = f->top_p;
    params.min_p = f->min_p;
    params.typical_p = f->typical_p > 0 ? f->typical_p : 1.0f;
    params.repetition_penalty = f->repetition_penalty;
    params.frequency_penalty = f->frequency_penalty;
    params.presence_penalty = f->presence_penalty;
    struct sampler_bias biases[FRAME_BIASES_MAX];
    for (uint32_t i = 0; i < f->n_biases; i++)
        biases[i] = (struct sampler_bias){f->bias_ids[i], f->biases[i]};
    params.biases = biases;
    params.n_biases = f->n_biases;
    params.seed = f->seed;
    params.n_top = f->n_logprobs;
    params.want_logprob = f->want_logprob != 0 || f->n_logprobs > 0;
    TRY(sampler_check(&params, in->n_vocab, NULL)); /* a peer sent them */
    struct sampler_choice r;
    sampler_choose(in->sampler, &params, logits, s->position, s->history, s->n_history, &r);
    *ret =
        (struct pipeline_sampled){.id = r.id, .logprob = r.logprob, .n_logprobs = (uint8_t)r.n_top};
    for (uint32_t i = 0; i < r.n_top && i < FRAME_LOGPROBS_MAX; i++) {
        ret->top_ids[i] = r.top[i].id;
        ret->top_logprobs[i] = r.top[i].logprob;
    }
    return ERR_OK;
}

/* Executes a DO_COMPUTE at once, while its views are valid; the core is told later. */
static void compute(struct inference *inf, const struct pipeline_compute *c)
{
    struct instance *in = &inf->instances[c->instance];
    assert(c->instance < INSTANCES_MAX && in->stage);
    uint64_t start_us = clock_monotonic_us(), n_holes = mapping_guard_count();
    enum err e = room_for(&inf->rows_out, &inf->rows_out_floats, (size_t)c->n_rows * in->n_embd);
    if (e == ERR_OK && in->is_tail)
        e = room_for(&inf->logits, &inf->logits_floats, (size_t)(c->n_samples + 1) * in->n_vocab);
    if (e == ERR_OK)
        e = stage_forward(in->stage, c->segments, c->n_segments, c->rows_in,
                          in->is_tail ? NULL : inf->rows_out, in->is_tail ? inf->logits : NULL);
    for (uint32_t i = 0; e == ERR_OK && i < c->n_samples; i++)
        e = sample(in, &c->samples[i], inf->logits + (size_t)i * in->n_vocab, &inf->sampled[i]);
    if (mapping_guard_count() != n_holes && !in->broken) {
        in->broken = true;
        log_error(&inf->log, "%s: its file was cut short or cannot be read any more",
                  model_info(in->model)->name);
        tell_loop(inf, LOOP_BROKEN, &in->epoch, sizeof in->epoch);
    }
    if (in->broken)
        e = ERR_IO;
    inf->has_computed = true;
    if (e != ERR_OK) {
        log_error(&inf->log, "a step could not be computed (%s)", err_name(e));
        inf->computed = (struct pipeline_event){.type = PIPELINE_COMPUTE_FAILED,
                                                .failed = {c->instance, c->step, e}};
        return;
    }
    inf->computed = (struct pipeline_event){
        .type = PIPELINE_COMPUTED,
        .computed = {.instance = c->instance,
                     .step = c->step,
                     .rows = in->is_tail ? NULL : inf->rows_out,
                     .sampled = inf->sampled,
                     .compute_us = (uint32_t)(clock_monotonic_us() - start_us)}};
}

static enum err step(struct inference *inf, const struct pipeline_event *event)
{
    struct pipeline_update u = {NULL, 0};
    struct broken broken = {.n = 0};
    const struct pipeline_compute *todo = NULL;
    enum err e = pipeline_step(inf->pipeline, event, clock_monotonic_us(), &u);
    for (uint32_t i = 0; i < u.n; i++) {
        if (u.effects[i].type == PIPELINE_DO_COMPUTE)
            todo = &u.effects[i].compute;
        else
            carry_out(inf, &u.effects[i], &broken);
    }
    if (todo)
        compute(inf, todo);
    for (unsigned i = 0; i < broken.n; i++) {
        int k = link_index(inf, &broken.peers[i]);
        if (k >= 0)
            link_lost(inf, k);
    }
    return e;
}

/* ---- mail ---- */

static void on_install(struct inference *inf, const struct mail *m)
{
    const struct install_mail *in = m->bytes;
    const struct plan *plan = m->owned;
    uint32_t i = 0;
    while (i < INSTANCES_MAX && inf->instances[i].stage)
        i++;
    int at = plan_stage_of(plan, &inf->options.self);
    if (i == INSTANCES_MAX || at < 0) {
        log_error(&inf->log, "no room for another plan");
        stage_free(in->stage);
        model_unref(in->model);
        return;
    }
    const struct model_info *info = model_info(in->model);
    inf->instances[i] = (struct instance){.stage = in->stage,
                                          .model = in->model,
                                          .epoch = plan->epoch,
                                          .n_vocab = info->n_vocab,
                                          .n_embd = info->n_embd,
                                          .is_tail = (uint32_t)at + 1 == plan->n_stages};
    enum err e =
        inf->instances[i].is_tail ? sampler_new(info->n_vocab, &inf->instances[i].sampler) : ERR_OK;
    if (e == ERR_OK)
        e = step(inf, &(struct pipeline_event){.type = PIPELINE_INSTALL,
                                               .install = {.plan = plan,
                                                           .instance = i,
                                                           .n_slots = plan_slots(plan),
                                                           .n_blocks = plan_kv_blocks(plan),
                                                           .row_bytes = 4 * info->n_embd}});
    if (e != ERR_OK) {
        log_error(&inf->log, "a plan could not be installed (%s)", err_name(e));
        release_instance(inf, i);
    }
}

static void on_submit(struct inference *inf, struct mail *m)
{
    struct call *call = TAKE(m->owned);
    struct chat_submit *s = call_submit(call);
    struct pipeline_event e = {.type = PIPELINE_SUBMIT,
                               .submit = {.request = s->request,
                                          .model = s->model,
                                          .prompt = s->prompt_ids,
                                          .n_prompt = s->n_prompt_ids}};
    struct frame_sampler *f = &e.submit.sampler;
    f->temperature = s->sampler.temperature;
    f->top_p = s->sampler.top_p;
    f->min_p = s->sampler.min_p;
    f->typical_p = s->sampler.typical_p;
    f->n_biases = (uint16_t)s->n_biases;
    for (uint32_t i = 0; i < s->n_biases; i++) {
        f->bias_ids[i] = s->biases[i].id;
        f->biases[i] = s->biases[i].bias;
    }
    f->top_k = s->sampler.top_k;
    f->repetition_penalty = s->sampler.repetition_penalty;
    f->frequency_penalty = s->sampler.frequency_penalty;
    f->presence_penalty = s->sampler.presence_penalty;
    f->max_tokens = s->max_tokens;
    f->seed = s->seed;
    f->flags = s->ignore_eos ? FRAME_SAMPLER_IGNORE_END : 0;
    f->n_logprobs = (uint8_t)MIN_OF(s->sampler.n_top, (uint32_t)FRAME_LOGPROBS_MAX);
    f->want_logprob = s->sampler.want_logprob ? 1 : 0;
    f->n_end_ids = (uint8_t)MIN_OF(s->n_end_ids, (uint32_t)FRAME_END_IDS_MAX);
    memcpy(f->end_ids, s->end_ids, f->n_end_ids * sizeof f->end_ids[0]);
    if (s->deadline_ms)
        e.submit.deadline_us = clock_monotonic_us() + (uint64_t)s->deadline_ms * 1000;
    struct client *c = NULL;
    for (int i = 0; !c && i < PIPELINE_REQUESTS_MAX; i++) {
        if (!inf->clients[i].call)
            c = &inf->clients[i];
    }
    enum err r = ERR_BUSY;
    if (c) {
        *c = (struct client){call, s->request, s->model};
        r = step(inf, &e);
    }
    if (r == ERR_OK)
        return;
    if (c)
        c->call = NULL;
    call_fail(call, r,
              r == ERR_BUSY ? "this node already holds as many requests as it can: try again soon"
                            : "the request cannot be served (%s)",
              err_name(r));
    call_unref(call);
}

static void on_link(struct inference *inf, const struct link_mail *m)
{
    int old = link_index(inf, &m->result.peer);
    if (old >= 0)
        link_lost(inf, old);
    if (inf->n_links == LINKS_MAX) {
        close_fd(inf, m->fd);
        return;
    }
    struct link_tcp_options options = {
        .fd = m->fd, .keys = m->result.keys, .frame_bytes_max = m->result.frame_bytes_max};
    net_os_give_up_after(m->fd, LINK_SILENT_MS);
    enum err e = link_tcp_new(&options, &inf->links[inf->n_links]);
    if (e != ERR_OK) {
        log_warning(&inf->log, "a data link could not be made (%s)", err_name(e));
        close_fd(inf, m->fd);
        return;
    }
    inf->link_fds[inf->n_links] = m->fd;
    inf->peers[inf->n_links++] = m->result.peer;
    tell_loop(inf, LOOP_LINK, &(struct mail_link){m->result.peer, true}, sizeof(struct mail_link));
    (void)step(inf, &(struct pipeline_event){.type = PIPELINE_LINK_UP, .link = m->result.peer});
}

static void on_no_route(struct inference *inf, const struct no_route_mail *m)
{
    (void)step(inf, &(struct pipeline_event){
                        .type = PIPELINE_NO_ROUTE,
                        .no_route = {.model = m->model, .reason = m->reason, .text = m->text}});
}

static void on_epoch(struct inference *inf, enum pipeline_event_type type, const struct mail *m)
{
    struct pipeline_event e = {.type = type};
    memcpy(&e.epoch, m->bytes, sizeof e.epoch);
    (void)step(inf, &e);
}

/* The loop's word: the control core knows, so each COMMIT that follows confirms its epoch. */
static void on_slept(struct inference *inf, const uint64_t *slept_us)
{
    inf->slept_us = MAX_OF(inf->slept_us, *slept_us);
    (void)step(inf, &(struct pipeline_event){.type = PIPELINE_SUSPEND});
    while (inf->n_links > 0)
        link_lost(inf, 0);
}

/* This thread may wake before the loop: nothing is executed until that has heard of it (2.5). */
static void watch_sleep(struct inference *inf)
{
    uint64_t slept_us = clock_slept_us();
    if (slept_us <= inf->slept_us + CLOCK_SLEEP_US)
        return;
    inf->slept_us = slept_us;
    (void)step(inf, &(struct pipeline_event){.type = PIPELINE_SLEPT});
    tell_loop(inf, LOOP_SLEPT, &slept_us, sizeof slept_us);
}

static void on_mail(struct inference *inf, struct mail *m)
{
    switch (m->type) {
    case MAIL_INSTALL:
        on_install(inf, m);
        break;
    case MAIL_COMMIT:
        on_epoch(inf, PIPELINE_COMMIT, m);
        break;
    case MAIL_DRAIN:
        on_epoch(inf, PIPELINE_DRAIN, m);
        break;
    case MAIL_RETIRE:
        on_epoch(inf, PIPELINE_RETIRE, m);
        break;
    case MAIL_ROUTE:
        (void)step(inf, &(struct pipeline_event){.type = PIPELINE_ROUTE, .route = m->owned});
        break;
    case MAIL_NO_ROUTE:
        on_no_route(inf, m->bytes);
        break;
    case MAIL_SUBMIT:
        on_submit(inf, m);
        break;
    case MAIL_CANCEL: {
        struct pipeline_event e = {.type = PIPELINE_CANCEL};
        memcpy(&e.cancel, m->bytes, sizeof e.cancel);
        (void)step(inf, &e);
        break;
    }
    case MAIL_LINK:
        on_link(inf, m->bytes);
        break;
    case MAIL_UNLINK: {
        int i = link_index(inf, m->bytes);
        if (i >= 0)
            link_lost(inf, i);
        break;
    }
    case MAIL_SLEPT:
        on_slept(inf, m->bytes);
        break;
    case MAIL_STOP:
        inf->stopping = true;
        break;
    default:
        break;
    }
}

static void read_mail(struct inference *inf)
{
    struct mail m;
    for (int i = 0; i < MAILS_PER_TURN && mailbox_receive(inf->mailbox, &m) == ERR_OK; i++) {
        on_mail(inf, &m);
        mail_clear(&m);
    }
}

/* Frames that wait on link i. False when the link is gone (another now has its place). */
static bool read_link(struct inference *inf, unsigned i)
{
    struct node_id peer = inf->peers[i];
    for (int k = 0; k < FRAMES_PER_TURN; k++) {
        const uint8_t *bytes;
        size_t n;
        enum err e = link_receive(inf->links[i], &bytes, &n);
        if (e == ERR_AGAIN)
            return true;
        struct frame frame;
        if (e == ERR_OK)
            e = frame_decode(bytes, n, &frame);
        if (e == ERR_UNSUPPORTED)
            continue; /* optional, of a later version */
        if (e == ERR_OK && frame.header.type == FRAME_BYE)
            e = ERR_CLOSED;
        if (e == ERR_OK)
            e = step(inf,
                     &(struct pipeline_event){.type = PIPELINE_FRAME, .frame = {peer, &frame}});
        int at = link_index(inf, &peer);
        if (at < 0)
            return false;
        if (e == ERR_CLOSED || e == ERR_CORRUPT || e == ERR_IO || e == ERR_TIMEOUT) {
            if (e == ERR_CORRUPT)
                log_warning(&inf->log, "a peer broke the rules of the data plane: link closed");
            link_lost(inf, at);
            return false;
        }
        if ((unsigned)at != i)
            return false;
        if (inf->has_computed)
            return true; /* the core is told first */
    }
    return true;
}

static void read_links(struct inference *inf, uint64_t ready)
{
    for (unsigned i = 0; i < inf->n_links && i < 64; i++) {
        if ((ready >> i & 1) && !read_link(inf, i))
            return; /* the order has changed: the next wait tells again */
    }
}

static void publish(struct inference *inf)
{
    (void)pthread_mutex_lock(&inf->view_mutex);
    pipeline_progress(inf->pipeline, &inf->view.progress);
    inf->view.n_requests =
        pipeline_requests(inf->pipeline, inf->view.requests, PIPELINE_REQUESTS_MAX);
    (void)pthread_mutex_unlock(&inf->view_mutex);
    uint64_t now_us = clock_monotonic_us();
    if (inf->view.progress.n_requests + inf->view.progress.n_sequences > 0 &&
        now_us >= inf->progress_due_us) {
        struct mail_progress m = {inf->view.progress.steps_done, 0, inf->view.progress.n_requests};
        (void)mailbox_send(inf->to_loop, LOOP_PROGRESS, &m, sizeof m);
        inf->progress_due_us = now_us + PROGRESS_US;
    }
}

static void turn(struct inference *inf)
{
    uint64_t now_us = clock_monotonic_us(), due_us = pipeline_next_due(inf->pipeline);
    uint64_t wait_us = IDLE_WAIT_US;
    if (inf->has_computed || due_us <= now_us)
        wait_us = 0;
    else if (due_us - now_us < wait_us)
        wait_us = due_us - now_us;
    struct link_ready ready = {0};
    bool busy = inf->view.progress.n_sequences + inf->view.progress.n_requests > 0;
    enum err e = link_wait(inf->links, inf->n_links, mailbox_fd(inf->mailbox), wait_us,
                           busy && !inf->has_computed ? SPIN_US : 0, &ready);
    watch_sleep(inf);
    if (e == ERR_OK && ready.extra)
        read_mail(inf);
    if (inf->has_computed) {
        inf->has_computed = false;
        struct pipeline_event done = inf->computed;
        (void)step(inf, &done);
    }
    if (e == ERR_OK && !inf->has_computed)
        read_links(inf, ready.links);
    if (!inf->has_computed && pipeline_next_due(inf->pipeline) <= clock_monotonic_us())
        (void)step(inf, &(struct pipeline_event){.type = PIPELINE_TICK});
    publish(inf);
}

static void *run(void *context)
{
    struct inference *inf = context;
    while (!inf->stopping)
        turn(inf);
    while (inf->n_links > 0)
        link_lost(inf, 0);
    for (int i = 0; i < PIPELINE_REQUESTS_MAX; i++) {
        struct call *c = inf->clients[i].call;
        if (!c)
            continue;
        struct call_item item = {.kind = CALL_ITEM_END, .error = ERR_CLOSED};
        (void)snprintf(item.text, sizeof item.text, "this node is stopping");
        (void)call_push(c, &item);
        call_fail(c, ERR_CLOSED, "this node is stopping");
        call_unref(c);
        inf->clients[i].call = NULL;
    }
    return NULL;
}

enum err inference_new(const struct inference_options *options, struct inference **ret,
                       struct err_text *text)
{
    struct inference *inf = calloc(1, sizeof *inf);
    if (!inf)
        return ERR_NO_MEMORY;
    inf->options = *options;
    inf->slept_us = clock_slept_us();
    inf->scratch = BUF_INIT(FRAME_OPEN_BYTES_MAX + FRAME_STEP_HEADER_MAX);
    if (options->log)
        inf->log = *options->log;
    inf->log.room = "inference";
    (void)pthread_mutex_init(&inf->view_mutex, NULL);
    struct pipeline_options po = {.self = options->self};
    enum err e = pipeline_new(&po, &inf->pipeline);
    if (e == ERR_OK)
        e = mailbox_new("inference", &inf->mailbox);
    if (e == ERR_OK)
        e = mailbox_sender_new(inf->mailbox, &inf->to_self);
    if (e == ERR_OK)
        e = mailbox_sender_new(options->loop, &inf->to_loop);
    if (e != ERR_OK) {
        inference_free(inf);
        return err_set(text, e, "the inference thread cannot be made (%s)", err_name(e));
    }
    *ret = inf;
    return ERR_OK;
}

enum err inference_start(struct inference *inf)
{
    if (pthread_create(&inf->thread, NULL, run, inf) != 0)
        return ERR_IO;
    inf->started = true;
    return ERR_OK;
}

void inference_stop(struct inference *inf)
{
    if (!inf->started)
        return;
    while (mailbox_send(inf->to_self, MAIL_STOP, NULL, 0) == ERR_BUSY)
        (void)usleep(1000); /* the mailbox is full: the thread is reading it */
    (void)pthread_join(inf->thread, NULL);
    inf->started = false;
}

void inference_free(struct inference *inf)
{
    if (!inf)
        return;
    for (int i = 0; i < INSTANCES_MAX; i++) {
        stage_free(inf->instances[i].stage);
        model_unref(inf->instances[i].model);
        sampler_free(inf->instances[i].sampler);
    }
    pipeline_free(inf->pipeline);
    mailbox_sender_free(inf->to_self);
    mailbox_sender_free(inf->to_loop);
    mailbox_free(inf->mailbox);
    buf_deinit(&inf->scratch);
    free(inf->rows_out);
    free(inf->logits);
    (void)pthread_mutex_destroy(&inf->view_mutex);
    free(inf);
}
