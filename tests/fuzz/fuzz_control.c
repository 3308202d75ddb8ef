/* Hostile members: messages of the control channel into a core that follows, claims or plans.
 *
 * Input: one byte that chooses the start, then records of (kind u8, length u16, bytes): a message
 * from one of two members, a jump of time, a message back from our own shell. Whatever comes,
 * reservations stay within the limit, one epoch of an instance is current, and the core goes on. */
#include "planner/control.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { LIMIT = 100 << 20, PENDING_MAX = 64 };

struct world {
    struct control *c;
    struct control_update u;
    uint64_t now_us;
    struct control_event pending[PENDING_MAX]; /* what the shell will answer */
    uint32_t n_pending;
};

static struct node_id id_of(uint8_t who)
{
    struct node_id id;
    memset(id.bytes, who, sizeof id.bytes);
    return id;
}

static void check(const struct control *c)
{
    if (control_reserved_bytes(c) > LIMIT)
        abort();
    for (uint32_t i = 0; i < control_n_local(c); i++) {
        struct control_local a, b;
        uint32_t n_current = 0;
        control_local_at(c, i, &a);
        for (uint32_t k = 0; k < control_n_local(c); k++) {
            control_local_at(c, k, &b);
            n_current += b.state == EPOCH_CURRENT && hash256_eq(&a.plan->model, &b.plan->model);
        }
        if (n_current > 1)
            abort();
    }
    for (uint32_t i = 0; i < control_n_models(c); i++) {
        struct control_model m;
        control_model_at(c, i, &m);
        if (strlen(m.name) >= MODEL_NAME_MAX || (m.active && plan_check(m.active) != ERR_OK))
            abort();
    }
}

static void feed(struct world *w, const struct control_event *e)
{
    (void)control_step(w->c, e, w->now_us, &w->u);
    for (uint32_t i = 0; i < w->u.n_effects; i++) {
        const struct control_effect *f = &w->u.effects[i];
        enum control_event_kind answer = f->kind == CONTROL_PREPARE  ? CONTROL_PREPARED
                                         : f->kind == CONTROL_COMMIT ? CONTROL_COMMITTED
                                                                     : CONTROL_RETIRED;
        if (f->kind <= CONTROL_RETIRE && w->n_pending < PENDING_MAX)
            w->pending[w->n_pending++] =
                (struct control_event){.kind = answer, .epoch = f->plan.epoch.hash};
    }
    control_update_clear(&w->u);
    check(w->c);
}

static void start(struct world *w, uint8_t choice)
{
    struct control_options o = {id_of(1), 1001, 7, 1, BACKEND_NATIVE};
    struct control_view *v = calloc(1, sizeof *v);
    if (!v || control_new(&o, NULL, 0, &w->c) != ERR_OK)
        abort();
    control_update_init(&w->u);
    w->now_us = 5000000;
    v->topology.n_nodes = 3;
    for (uint32_t i = 0; i < 3; i++) {
        v->topology.nodes[i] = (struct topology_node){
            id_of((uint8_t)(i + 1)), 1001 + i, true, 1, 0, LIMIT, 10e9, 100e9};
        v->peers[i].reachable = true;
        for (uint32_t k = 0; k < 3; k++)
            v->topology.edges[i][k] = (struct topology_edge){i != k, 100, 100e6};
    }
    struct model_shape s;
    memset(&s, 0, sizeof s);
    memset(s.model.bytes, 0x77, 32);
    s.n_layers = 10;
    s.context_max = 2048;
    s.hidden = 64;
    for (uint32_t i = 0; i < 10; i++)
        s.layer_bytes[i] = 10 << 20;
    feed(w, &(struct control_event){.kind = CONTROL_VIEW, .view = v});
    feed(w, &(struct control_event){.kind = CONTROL_MODEL, .shape = &s});
    feed(w, &(struct control_event){.kind = CONTROL_WANT, .model = s.model, .model_name = "ten"});
    for (uint32_t i = 0; i < (choice & 31u); i++) { /* to a claim, and to the office */
        w->now_us += 100000;
        feed(w, &(struct control_event){.kind = CONTROL_TICK});
    }
    free(v);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1)
        return 0;
    struct world *w = calloc(1, sizeof *w);
    if (!w)
        abort();
    start(w, data[0]);
    struct reader r = reader_of(data + 1, size - 1);
    for (uint32_t i = 0; i < 200 && r.left >= 3; i++) {
        uint8_t kind = read_u8(&r);
        size_t n = read_u16(&r);
        if (n > r.left)
            n = r.left;
        const uint8_t *bytes = read_view(&r, n);
        if (kind % 4 < 2) {
            feed(w, &(struct control_event){.kind = CONTROL_MESSAGE,
                                            .from = id_of((uint8_t)(2 + kind % 2)),
                                            .bytes = bytes,
                                            .n_bytes = n});
        } else if (kind % 4 == 2) {
            w->now_us += UINT64_C(50000) * (1u + (n ? bytes[0] : 0u));
            feed(w, &(struct control_event){.kind = CONTROL_TICK});
        } else if (w->n_pending > 0) {
            struct control_event e = w->pending[--w->n_pending];
            feed(w, &e);
        }
    }
    control_free(w->c);
    control_update_deinit(&w->u);
    free(w);
    return 0;
}
