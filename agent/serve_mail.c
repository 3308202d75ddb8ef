/* Mail from other threads to the loop. */
#include "agent/agent.h"

#include "base/clock.h"
#include "base/util.h"

#include <stdio.h>
#include <string.h>

enum { MAILS_PER_WAKE = 256 };

static void on_prepared(struct agent *a, struct mail *m)
{
    const struct mail_prepared *p = m->bytes;
    struct loaded *loaded = m->owned;
    struct agent_epoch *e = agent_epoch_find(a, &p->epoch);
    if (!e || e->state == AGENT_ABORTED) {
        if (e)
            agent_epoch_forget(e);
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_RETIRED, .epoch = p->epoch});
        return; /* mail_clear frees what was loaded */
    }
    enum err r = p->error;
    if (r == ERR_OK)
        r = inference_install(a->inference, e->plan, loaded->stage, loaded->model);
    if (r == ERR_OK) {
        loaded->stage = NULL; /* the inference thread's now */
        loaded->model = NULL;
        e->state = AGENT_INSTALLED;
        (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_PREPARED, .epoch = p->epoch});
        return;
    }
    agent_epoch_forget(e);
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_PREPARE_FAILED,
                                             .epoch = p->epoch,
                                             .error = r,
                                             .text = p->text[0] ? p->text : err_name(r)});
}

static void on_released(struct agent *a, const struct mail_released *r)
{
    struct agent_epoch *e = agent_epoch_find(a, &r->epoch);
    if (e)
        agent_epoch_forget(e);
    (void)agent_step(a, &(struct node_event){.type = NODE_EVENT_RETIRED, .epoch = r->epoch});
}

static void on_stats(struct agent *a, const struct mail_stats *s)
{
    const struct agent_epoch *e = agent_epoch_find(a, &s->epoch);
    if (!e || s->n_decode_steps == 0)
        return;
    log_debug(&a->log, "stage %u: %.2f ms a token over %u steps", s->stage,
              (double)s->decode_us / 1e3 / s->n_decode_steps, s->n_decode_steps);
}

static void on_stall(struct agent *a, const struct mail_stall *s)
{
    char text[128];
    (void)snprintf(text, sizeof text, "stage %u has not finished step %llu for %.1f s", s->stage,
                   (unsigned long long)s->step, (double)s->waited_us / 1e6);
    agent_event_out(a, "stall", text);
}

static void on_calibrated(struct agent *a, const struct mail_calibrated *c)
{
    a->local.stream_bytes_per_s = c->stream_bytes_per_s;
    a->local.macs_per_s = c->macs_per_s;
    char text[128];
    (void)snprintf(text, sizeof text,
                   "this node streams %.1f GB/s of weights and computes %.1f G multiply-adds/s",
                   c->stream_bytes_per_s / 1e9, c->macs_per_s / 1e9);
    agent_event_out(a, "calibrated", text);
    agent_refresh_local(a);
}

static void on_need_bulk(struct agent *a, const struct node_id *peer)
{
    struct address to;
    if (node_data_address(a->node, peer, &to))
        agent_dial_data(a, peer, &to, HELLO_BULK);
    else
        (void)loader_bulk(a->loader, peer, -1, NULL);
}

static void on_mail(struct agent *a, struct mail *m)
{
    struct node_event e = {.type = NODE_EVENT_TICK};
    switch (m->type) {
    case LOOP_CALL:
        agent_on_call(a, TAKE(m->owned));
        break;
    case LOOP_CALL_DROPPED:
        (void)inference_cancel(a->inference, m->bytes);
        break;
    case LOOP_WANT_LINK:
        e.type = NODE_EVENT_WANT_LINK;
        memcpy(&e.peer, m->bytes, sizeof e.peer);
        (void)agent_step(a, &e);
        break;
    case LOOP_LINK: {
        const struct mail_link *l = m->bytes;
        e.type = NODE_EVENT_LINK;
        e.peer = l->peer;
        e.up = l->up;
        (void)agent_step(a, &e);
        break;
    }
    case LOOP_RELEASED:
        on_released(a, m->bytes);
        break;
    case LOOP_DRAINED:
        (void)inference_retire(a->inference, m->bytes);
        break;
    case LOOP_STATS:
        on_stats(a, m->bytes);
        break;
    case LOOP_STALL:
        on_stall(a, m->bytes);
        break;
    case LOOP_USED: {
        const struct mail_used *used = m->bytes;
        e.type = NODE_EVENT_USED;
        e.model_id = used->model;
        if (used->token_us > 0) {
            a->measured_model = used->model;
            a->measured_token_us = used->token_us;
        }
        (void)agent_step(a, &e);
        break;
    }
    case LOOP_BROKEN:
        agent_stage_broken(a, m->bytes);
        break;
    case LOOP_SLEPT: {
        uint64_t slept_us;
        memcpy(&slept_us, m->bytes, sizeof slept_us);
        agent_slept(a, slept_us);
        break;
    }
    case LOOP_PROGRESS: {
        const struct mail_progress *p = m->bytes;
        e.type = NODE_EVENT_BUSY;
        e.step = p->steps_done;
        e.layers_done = p->layers_done;
        (void)agent_step(a, &e);
        if (a->spare.running) /* a second copy gives way at once */
            agent_spare_tick(a, clock_monotonic_us());
        break;
    }
    case LOOP_PREPARED:
        on_prepared(a, m);
        break;
    case LOOP_MODEL_NEWS:
        agent_tell_models(a, m->bytes);
        agent_model_runs(a, m->bytes);
        break;
    case LOOP_NEED_BULK:
        on_need_bulk(a, m->bytes);
        break;
    case LOOP_BANDWIDTH: {
        const struct mail_bandwidth *b = m->bytes;
        e.type = NODE_EVENT_BANDWIDTH;
        e.peer = b->peer;
        e.address = b->address;
        e.bytes_per_s = b->bytes_per_s;
        (void)agent_step(a, &e);
        break;
    }
    case LOOP_SPARE_DONE:
        agent_spare_done(a, m->bytes);
        break;
    case LOOP_CALIBRATED:
        on_calibrated(a, m->bytes);
        break;
    default:
        break;
    }
}

void agent_read_mail(struct agent *a)
{
    struct mail m;
    for (int i = 0; i < MAILS_PER_WAKE && mailbox_receive(a->mailbox, &m) == ERR_OK; i++) {
        on_mail(a, &m);
        mail_clear(&m);
    }
}
