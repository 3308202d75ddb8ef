/* Plans to and from protobuf. The unpacked message is only a parse: nothing of it is kept before
 * plan_check has passed. */
#include "planner/plan_wire.h"

#include "base/util.h"

#include <string.h>

static ProtobufCBinaryData view_32(const uint8_t bytes[32])
{
    /* protobuf-c has no const here; packing only reads. */
    union {
        const uint8_t *in;
        uint8_t *out;
    } u = {.in = bytes};
    return (ProtobufCBinaryData){32, u.out};
}

static bool take_32(const ProtobufCBinaryData *b, uint8_t ret[32])
{
    if (b->len != 32)
        return false;
    memcpy(ret, b->data, 32);
    return true;
}

void plan_to_message(const struct plan *p, struct plan_message *storage)
{
    Covey__Control__Plan *m = &storage->plan;
    covey__control__plan__init(m);
    union {
        const char *in;
        char *out;
    } name = {.in = p->model_name};
    m->term = p->epoch.term;
    m->planner = view_32(p->epoch.planner.bytes);
    m->sequence = p->epoch.sequence;
    m->hash = view_32(p->epoch.hash.bytes);
    m->model = view_32(p->model.bytes);
    m->model_name = name.out;
    m->n_layers = p->n_layers;
    m->context = p->context;
    m->kv_positions = p->kv_positions;
    m->precision = p->precision;
    m->backend = p->backend;
    m->arithmetic_version = p->arithmetic_version;
    m->token_us = p->predicted_token_us;
    m->prefill_us = p->predicted_prefill_us;
    m->n_stages = p->n_stages < PLAN_STAGES_MAX ? p->n_stages : PLAN_STAGES_MAX;
    m->stages = storage->pointers;
    for (size_t i = 0; i < m->n_stages; i++) {
        Covey__Control__Stage *s = &storage->stages[i];
        covey__control__stage__init(s);
        s->node = view_32(p->stages[i].node.bytes);
        s->boot_id = p->stages[i].boot_id;
        s->first_layer = p->stages[i].first_layer;
        s->n_layers = p->stages[i].n_layers;
        s->memory_bytes = p->stages[i].memory_bytes;
        storage->pointers[i] = s;
    }
}

enum err plan_from_message(const Covey__Control__Plan *m, struct plan *ret)
{
    if (m->n_stages < 1 || m->n_stages > PLAN_STAGES_MAX || m->precision > UINT8_MAX ||
        m->backend > UINT8_MAX || !m->model_name || strlen(m->model_name) >= MODEL_NAME_MAX)
        return ERR_CORRUPT;
    struct plan p;
    memset(&p, 0, sizeof p); /* plans are copied and hashed whole: no stray padding */
    if (!take_32(&m->planner, p.epoch.planner.bytes) || !take_32(&m->hash, p.epoch.hash.bytes) ||
        !take_32(&m->model, p.model.bytes))
        return ERR_CORRUPT;
    p.epoch.term = m->term;
    p.epoch.sequence = m->sequence;
    memcpy(p.model_name, m->model_name, strlen(m->model_name));
    p.n_layers = m->n_layers;
    p.context = m->context;
    p.kv_positions = m->kv_positions;
    p.precision = (uint8_t)m->precision;
    p.backend = (uint8_t)m->backend;
    p.arithmetic_version = m->arithmetic_version;
    p.predicted_token_us = m->token_us;
    p.predicted_prefill_us = m->prefill_us;
    p.n_stages = (uint32_t)m->n_stages;
    for (uint32_t i = 0; i < p.n_stages; i++) {
        const Covey__Control__Stage *s = m->stages[i];
        if (!take_32(&s->node, p.stages[i].node.bytes))
            return ERR_CORRUPT;
        p.stages[i].boot_id = s->boot_id;
        p.stages[i].first_layer = s->first_layer;
        p.stages[i].n_layers = s->n_layers;
        p.stages[i].memory_bytes = s->memory_bytes;
    }
    TRY(plan_check(&p));
    *ret = p;
    return ERR_OK;
}

enum err plan_encode(const struct plan *p, struct buf *ret)
{
    struct plan_message storage;
    plan_to_message(p, &storage);
    size_t n = covey__control__plan__get_packed_size(&storage.plan);
    uint8_t *to;
    if (n > PLAN_WIRE_MAX)
        return ERR_LIMIT;
    TRY(buf_reserve(ret, n, &to));
    ret->len += covey__control__plan__pack(&storage.plan, to);
    return ERR_OK;
}

enum err plan_decode(const void *bytes, size_t n, struct plan *ret)
{
    if (n > PLAN_WIRE_MAX)
        return ERR_LIMIT;
    Covey__Control__Plan *m = covey__control__plan__unpack(NULL, n, bytes);
    if (!m)
        return ERR_CORRUPT;
    enum err e = plan_from_message(m, ret);
    covey__control__plan__free_unpacked(m, NULL);
    return e;
}
