/* Second copies: the shell's part. What gossip says goes to the core (agent/spare.h), what it
 * orders to the loader; and what both mean, as JSON for people. */
#include "agent/agent.h"

#include "agent/spare.h"
#include "base/clock.h"
#include "base/util.h"

#include <stdlib.h>

enum {
    MARGIN_SHARE = 10, /* a tenth of the disk stays free … */
    ROOM_STEP = 64 << 20,
};
#define MARGIN_MIN_BYTES (UINT64_C(10) << 30) /* … and at least this much */

uint64_t agent_spare_room(const struct agent *a)
{
    uint64_t total = 0, free_bytes = store_free_bytes(a->store, &total);
    uint64_t margin = MAX_OF(total / MARGIN_SHARE, MARGIN_MIN_BYTES);
    if (a->config.spare_margin != UINT64_MAX)
        margin = a->config.spare_margin;
    if (!a->config.spare_copies || free_bytes <= margin)
        return 0;
    return (free_bytes - margin) / ROOM_STEP * ROOM_STEP;
}

/* ---- fetching ---- */

static bool is_busy(struct agent *a)
{
    for (int i = 0; i < AGENT_EPOCHS_MAX; i++) {
        if (a->epochs[i].plan && a->epochs[i].state == AGENT_LOADING)
            return true;
    }
    struct inference_view *v = malloc(sizeof *v);
    bool busy = true;
    if (v) {
        inference_look(a->inference, v);
        busy = v->progress.n_requests + v->progress.n_sequences > 0;
    }
    free(v);
    return busy || a->stopping;
}

struct agent_spares *agent_spares_new(struct agent *a)
{
    struct agent_spares *s = malloc(sizeof *s);
    if (!s)
        return NULL;
    node_spare_view(a->node, &s->view);
    spare_divide(&s->view, s->shares);
    s->busy = is_busy(a);
    return s;
}

void agent_spare_tick(struct agent *a, uint64_t now_us)
{
    a->spare_due_us = spare_next_due(&a->spare, now_us);
    if (!a->spare.running && control_n_models(node_control(a->node)) == 0)
        return;
    struct agent_spares *s = agent_spares_new(a);
    struct spare_order *order = malloc(sizeof *order);
    if (s && order) {
        enum spare_action what = spare_step(&a->spare, &s->view, s->shares, s->busy, now_us, order);
        struct node_id holders[LOADER_HOLDERS_MAX];
        if (what == SPARE_STOP)
            loader_spare_stop(a->loader);
        if (what == SPARE_FETCH) {
            uint32_t n = node_holders(a->node, &order->model, holders, LOADER_HOLDERS_MAX);
            enum err e = loader_spare(a->loader, order, holders, n);
            if (e != ERR_OK)
                spare_done(&a->spare, e, 0, now_us);
        }
        a->spare_due_us = spare_next_due(&a->spare, now_us);
    }
    free(order);
    free(s);
}

void agent_spare_done(struct agent *a, const struct mail_spare *m)
{
    uint64_t now_us = clock_monotonic_us();
    spare_done(&a->spare, m->error, m->got_bytes, now_us);
    if (!a->stopping)
        agent_spare_tick(a, now_us);
}

/* ---- for people ---- */

static const struct spare_share *share_of(const struct agent_spares *s, const struct hash256 *model,
                                          const struct spare_model **ret)
{
    for (uint32_t i = 0; s && i < s->view.n_models; i++) {
        if (hash256_eq(&s->view.models[i].id, model) && s->view.models[i].n_bytes > 0) {
            *ret = &s->view.models[i];
            return &s->shares[i];
        }
    }
    return NULL;
}

static json_t *node_hex(const struct node_id *id)
{
    char hex[HEX_ID_MAX];
    hex_of_32(id->bytes, hex);
    return json_string(hex);
}

json_t *agent_spare_fatal(const struct agent_spares *s, const struct hash256 *model)
{
    const struct spare_model *m;
    const struct spare_share *share = share_of(s, model, &m);
    json_t *fatal = json_array();
    for (uint32_t i = 0; share && i < s->view.n_members; i++) {
        if (share->sole[i])
            (void)json_array_append_new(fatal, node_hex(&s->view.members[i].id));
    }
    return fatal;
}

static const char *state_word(const struct agent_spares *s, const struct spare_share *share)
{
    uint64_t taken = 0;
    bool computes = s->busy;
    for (uint32_t i = 0; i < s->view.n_members; i++) {
        taken += share->takes_bytes[i];
        computes |= s->view.members[i].computes;
    }
    if (share->nowhere_bytes > 0)
        return "bytes missing";
    if (share->once_bytes == 0)
        return "complete";
    if (s->view.n_members == 1)
        return "no other member";
    if (taken == 0)
        return "no room";
    return computes ? "paused" : "copying";
}

json_t *agent_spare_json(const struct agent_spares *s, const struct hash256 *model)
{
    const struct spare_model *m;
    const struct spare_share *share = share_of(s, model, &m);
    if (!share)
        return json_null();
    json_t *takers = json_array();
    for (uint32_t i = 0; i < s->view.n_members; i++) {
        if (share->takes_bytes[i] > 0)
            (void)json_array_append_new(takers, json_pack("{s:o, s:I}", "node",
                                                          node_hex(&s->view.members[i].id), "bytes",
                                                          (json_int_t)share->takes_bytes[i]));
    }
    return json_pack("{s:s, s:i, s:I, s:I, s:I, s:o}", "state", state_word(s, share), "percent",
                     (int)(share->twice_bytes * 100 / m->n_bytes), "twice_bytes",
                     (json_int_t)share->twice_bytes, "no_room_bytes",
                     (json_int_t)share->homeless_bytes, "missing_bytes",
                     (json_int_t)share->nowhere_bytes, "takers", takers);
}
