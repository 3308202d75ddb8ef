/* Frames from a hostile member into a core that is head, middle stage, tail and entry at once.
 *
 * Input: records of {op u8, peer u8, length u16, bytes}. Op 0 hands `bytes` to the core as a frame:
 * its epoch, step, boundary and row size are replaced by plausible ones for a part of the ops, so
 * that the mutations reach beyond the first checks. Other ops are links, time and results. */
#include "agent/pipeline.h"
#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { EPOCHS = 4, ROW_BYTES = 16, CONTEXT = 150, BLOCKS = 4, RECORDS_MAX = 400 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct target {
    struct pipeline *p;
    struct plan plans[EPOCHS];
    uint64_t now;
    bool busy;
    struct pipeline_compute compute;
};

static struct node_id node_of(unsigned n)
{
    struct node_id id = {{(uint8_t)(n % 4 + 1)}};
    return id;
}

static void apply(struct target *t, const struct pipeline_update *u)
{
    for (uint32_t i = 0; i < u->n; i++) {
        const struct pipeline_effect *e = &u->effects[i];
        if (e->type == PIPELINE_DO_COMPUTE) {
            uint64_t sum = 0;
            if (t->busy)
                abort();
            t->busy = true;
            t->compute = e->compute;
            for (uint32_t k = 0; k < e->compute.n_segments; k++) {
                const struct stage_segment *s = &e->compute.segments[k];
                if (s->position > CONTEXT || s->n_rows > CONTEXT - s->position)
                    abort();
                for (uint32_t n = 0; n <= (s->position + s->n_rows - 1) / STAGE_BLOCK; n++)
                    if (s->blocks[n] >= BLOCKS)
                        abort();
                for (uint32_t n = 0; n < s->n_rows; n++)
                    sum += (uint32_t)s->token_ids[n];
            }
            for (uint32_t k = 0; k < e->compute.n_samples; k++)
                for (uint32_t n = 0; n < e->compute.samples[k].n_history; n++)
                    sum += (uint32_t)e->compute.samples[k].history[n];
            const float *rows = e->compute.rows_in;
            if (rows && rows[(size_t)e->compute.n_rows * ROW_BYTES / 4 - 1] > 0)
                sum++;
            if (sum == 12345678901234u)
                abort(); /* so that everything above is really read */
        }
        if (e->type == PIPELINE_DO_SEND) {
            static uint8_t bytes[FRAME_STEP_HEADER_MAX];
            struct frame scratch;
            size_t n;
            if (frame_encode(pipeline_frame(&e->send, &scratch), bytes, sizeof bytes, &n) != ERR_OK)
                abort(); /* what we send must be sendable */
        }
    }
}

static void give(struct target *t, const struct pipeline_event *event)
{
    struct pipeline_update u;
    (void)pipeline_step(t->p, event, t->now, &u);
    apply(t, &u);
}

/* This node is number 0: alone in epoch 0, then head, middle and tail of three. */
static void set_up(struct target *t)
{
    struct pipeline_options o = {.self = node_of(0)};
    if (pipeline_new(&o, &t->p) != ERR_OK)
        abort();
    for (unsigned i = 1; i < 4; i++) {
        struct pipeline_event up = {.type = PIPELINE_LINK_UP, .link = node_of(i)};
        give(t, &up);
    }
    for (unsigned i = 0; i < EPOCHS; i++) {
        struct plan *plan = &t->plans[i];
        *plan = PLAN_INIT;
        plan->epoch.term = plan->epoch.sequence = i + 1;
        plan->model.bytes[0] = (uint8_t)i;
        plan->context = CONTEXT;
        plan->n_stages = i == 0 ? 1 : 3;
        plan->n_layers = plan->n_stages;
        for (unsigned k = 0; k < plan->n_stages; k++)
            plan->stages[k] =
                (struct plan_stage){.node = node_of((k + 4 - (i == 0 ? 0 : i - 1)) % 4),
                                    .first_layer = k,
                                    .n_layers = 1};
        plan_seal(plan);
        struct pipeline_event event = {.type = PIPELINE_INSTALL,
                                       .install = {plan, i, 4, ROW_BYTES, BLOCKS}};
        give(t, &event);
        event = (struct pipeline_event){.type = PIPELINE_COMMIT};
        event.epoch = plan->epoch;
        give(t, &event);
        event = (struct pipeline_event){.type = PIPELINE_ROUTE, .route = plan};
        give(t, &event);
        int32_t prompt[20] = {1, 2, 3};
        event = (struct pipeline_event){.type = PIPELINE_SUBMIT,
                                        .submit = {.request = {{(uint8_t)(i + 1)}},
                                                   .model = plan->model,
                                                   .prompt = prompt,
                                                   .n_prompt = 20,
                                                   .sampler = {.max_tokens = 20}}};
        give(t, &event);
    }
}

static void give_frame(struct target *t, uint8_t op, uint8_t peer, const uint8_t *bytes, size_t n)
{
    static _Alignas(FRAME_ALIGN) uint8_t copy[1 << 16];
    struct frame f;
    memcpy(copy, bytes, n);
    if (n < FRAME_HEADER_BYTES || frame_decode(copy, n, &f) != ERR_OK)
        return;
    if (op & 1)
        f.header.epoch = epoch_alias(&t->plans[op >> 1 & 3].epoch);
    if (op & 8)
        f.header.boundary = (uint16_t)(op >> 1 & 1);
    struct pipeline_event event = {.type = PIPELINE_FRAME};
    event.frame.from = node_of(peer);
    event.frame.frame = &f;
    give(t, &event);
}

static void finish_compute(struct target *t, uint8_t fails)
{
    static const float rows[STAGE_ROWS_MAX * ROW_BYTES / sizeof(float)];
    struct pipeline_sampled sampled[STAGE_SEGMENTS_MAX];
    memset(sampled, 0, sizeof sampled);
    if (!t->busy)
        return;
    t->busy = false;
    struct pipeline_event event = {.type = PIPELINE_COMPUTE_FAILED};
    if (fails & 1) {
        event.failed.instance = t->compute.instance;
        event.failed.step = t->compute.step;
        event.failed.err = ERR_IO;
    } else {
        event.type = PIPELINE_COMPUTED;
        event.computed = (struct pipeline_computed){.instance = t->compute.instance,
                                                    .step = t->compute.step,
                                                    .rows = t->compute.is_tail ? NULL : rows,
                                                    .sampled = sampled};
    }
    give(t, &event);
}

static void one_record(struct target *t, uint8_t op, uint8_t peer, const uint8_t *bytes, size_t n)
{
    struct pipeline_event event = {.type = PIPELINE_TICK};
    switch (op >> 5) {
    default:
        give_frame(t, op, peer, bytes, n);
        break;
    case 4:
        event.type = PIPELINE_LINK_DOWN;
        event.link = node_of(peer % 3 + 1u);
        give(t, &event);
        break;
    case 5:
        event.type = PIPELINE_LINK_UP;
        event.link = node_of(peer % 3 + 1u);
        give(t, &event);
        break;
    case 6:
        t->now += (uint64_t)peer * 50 * 1000;
        give(t, &event);
        break;
    case 7:
        finish_compute(t, peer);
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct target t = {.now = 1};
    struct reader r = reader_of(data, size);
    set_up(&t);
    for (unsigned i = 0; i < RECORDS_MAX && r.left > 4; i++) {
        uint8_t op = read_u8(&r), peer = read_u8(&r);
        size_t n = read_u16(&r);
        n = n < r.left ? n : r.left;
        one_record(&t, op, peer, read_view(&r, n), n);
    }
    pipeline_free(t.p);
    return 0;
}
