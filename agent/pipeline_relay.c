/* Relays: an entry that cannot reach the head of the active plan gives its OPEN to a member that
 * can (PROTOCOL 3.11). That member opens in its own name and passes on what comes back: tokens,
 * signs of life, errors. It holds no tokens, and nothing that recovery needs. */
#include "agent/pipeline_internal.h"

#include <string.h>

static struct relay *relay_find(struct pipeline *p, const struct request_id *request)
{
    for (uint32_t i = 0; i < RELAYS_MAX; i++) {
        if (p->relays[i].used && request_id_eq(&p->relays[i].request, request))
            return &p->relays[i];
    }
    return NULL;
}

static const struct route *route_by_alias(const struct pipeline *p, uint64_t alias)
{
    for (uint32_t i = 0; i < PIPELINE_MODELS_MAX; i++) {
        if (p->routes[i].used && p->routes[i].present && p->routes[i].alias == alias)
            return &p->routes[i];
    }
    return NULL;
}

static struct relay *relay_get(struct pipeline *p, const struct node_id *from,
                               const struct frame_open *o)
{
    struct relay *relay = relay_find(p, &o->request);
    if (relay)
        return node_id_eq(&relay->origin, from) && relay->attempt < o->attempt ? relay : NULL;
    for (uint32_t i = 0; i < RELAYS_MAX && !relay; i++)
        relay = p->relays[i].used ? NULL : &p->relays[i];
    return relay;
}

bool relay_on_open(struct pipeline *p, const struct node_id *from, const struct frame *f)
{
    const struct route *route = route_by_alias(p, f->header.epoch);
    if (!route || is_self(p, &route->plan.stages[0].node) ||
        node_id_eq(from, &route->plan.stages[0].node))
        return false;
    const struct node_id *head = &route->plan.stages[0].node;
    const struct node_id *tail = &route->plan.stages[route->plan.n_stages - 1].node;
    struct relay *relay = peer_is_up(p, head) ? relay_get(p, from, &f->open) : NULL;
    if (!relay) {
        peer_want(p, head);
        send_error(p, from, f->header.epoch, 0, &f->open.request, f->open.attempt, ERR_IO);
        return true;
    }
    *relay = (struct relay){
        .used = true,
        .request = f->open.request,
        .attempt = f->open.attempt,
        .origin = *from,
        .head = *head,
        .tail = *tail,
        .alias = f->header.epoch,
    };
    struct pipeline_send *send = send_new(p, head, FRAME_OPEN, relay->alias, 0);
    send->open = f->open; /* the ids are a view of the frame */
    send->open.entry = peer_is_up(p, tail) ? p->self : *head;
    return true;
}

/* The relay that waits for this, if it is from where it should be. */
static struct relay *relay_for(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                               const struct request_id *request, uint32_t attempt)
{
    struct relay *relay = relay_find(p, request);
    bool ok = relay && relay->alias == epoch && relay->attempt == attempt &&
              (node_id_eq(from, &relay->head) || node_id_eq(from, &relay->tail));
    return ok ? relay : NULL;
}

void relay_on_token(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_token *token)
{
    struct relay *relay = relay_for(p, from, epoch, &token->request, token->attempt);
    if (!relay)
        return;
    struct pipeline_send *send = send_new(p, &relay->origin, FRAME_TOKEN, epoch, 0);
    if (send)
        send->token = *token;
    relay->used = token->finish == FRAME_GOES_ON;
}

void relay_on_have(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                   const struct frame_have *have)
{
    const struct relay *relay = relay_for(p, from, epoch, &have->request, have->attempt);
    struct pipeline_send *send = relay ? send_new(p, &relay->origin, FRAME_HAVE, epoch, 0) : NULL;
    if (send)
        send->have = *have;
}

void relay_on_cached(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                     const struct frame_cached *cached)
{
    const struct relay *relay = relay_for(p, from, epoch, &cached->request, cached->attempt);
    struct pipeline_send *send = relay ? send_new(p, &relay->origin, FRAME_CACHED, epoch, 0) : NULL;
    if (send)
        send->cached = *cached;
}

static void relay_fail(struct pipeline *p, struct relay *relay, enum err e)
{
    relay->used = false;
    send_error(p, &relay->origin, relay->alias, 0, &relay->request, relay->attempt, e);
}

void relay_on_error(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_error *error)
{
    struct relay *relay = relay_for(p, from, epoch, &error->request, error->attempt);
    if (relay)
        relay_fail(p, relay, frame_error_to(error->code));
}

void relay_on_stale(struct pipeline *p, const struct node_id *from, uint64_t epoch)
{
    for (uint32_t i = 0; i < RELAYS_MAX; i++) {
        struct relay *relay = &p->relays[i];
        if (relay->used && relay->alias == epoch && node_id_eq(from, &relay->head))
            relay_fail(p, relay, ERR_STALE);
    }
}

static void relay_cancel(struct pipeline *p, struct relay *relay)
{
    relay->used = false;
    struct pipeline_send *send = peer_is_up(p, &relay->head)
                                     ? send_new(p, &relay->head, FRAME_CANCEL, relay->alias, 0)
                                     : NULL;
    if (!send)
        return;
    send->cancel.request = relay->request;
    send->cancel.attempt = relay->attempt;
}

void relay_on_cancel(struct pipeline *p, const struct node_id *from,
                     const struct frame_cancel *cancel)
{
    struct relay *relay = relay_find(p, &cancel->request);
    if (relay && node_id_eq(&relay->origin, from) && relay->attempt <= cancel->attempt)
        relay_cancel(p, relay);
}

void relay_on_link_down(struct pipeline *p, const struct node_id *id)
{
    for (uint32_t i = 0; i < RELAYS_MAX; i++) {
        struct relay *relay = &p->relays[i];
        if (!relay->used)
            continue;
        if (node_id_eq(&relay->origin, id))
            relay_cancel(p, relay);
        else if (node_id_eq(&relay->head, id) || node_id_eq(&relay->tail, id))
            relay_fail(p, relay, ERR_IO);
    }
}
