/* Messages in: decoding with a bound on memory, checking, and handing the parts to their owners.
 *
 * The sender is authenticated and a member; what it says is still checked, and a message that
 * breaks the format changes nothing at all. */
#include "discovery/swim_internal.h"

#include <string.h>

/* protobuf-c makes an object of some dozens of bytes for an empty entry of two. */
enum { DECODE_BYTES_MAX = 1024 * 1024 };

static void *budget_alloc(void *data, size_t n)
{
    size_t *left = data;
    if (n > *left)
        return NULL;
    *left -= n;
    return malloc(n ? n : 1);
}

static void budget_free(void *data, void *p)
{
    (void)data;
    free(p);
}

bool wire_id(const ProtobufCBinaryData *data, struct node_id *ret)
{
    if (data->len != sizeof ret->bytes)
        return false;
    memcpy(ret->bytes, data->data, sizeof ret->bytes);
    return true;
}

static bool state_is_known(Covey__Swim__State state)
{
    return state >= COVEY__SWIM__STATE__STATE_ALIVE && state <= COVEY__SWIM__STATE__STATE_LEFT;
}

bool wire_claim(const Covey__Swim__Claim *c, struct node_id *ret_member, struct claim *ret)
{
    if (!wire_id(&c->member, ret_member) || !state_is_known(c->state) || c->boot_id == 0 ||
        c->incarnation == 0 || c->incarnation >= INCARNATION_LIMIT)
        return false;
    *ret = (struct claim){
        .boot_id = c->boot_id,
        .incarnation = c->incarnation,
        .state = (enum swim_state)c->state,
        .rival = c->rival,
    };
    for (size_t i = 0; i < c->n_by && ret->n_by < BY_MAX; i++)
        if (wire_id(&c->by[i], &ret->by[ret->n_by]))
            ret->n_by++;
    return true;
}

/* The sender about itself: never suspect or dead. */
static bool header_claim(const Covey__Swim__Message *m, struct claim *ret)
{
    bool by_others =
        m->state == COVEY__SWIM__STATE__STATE_SUSPECT || m->state == COVEY__SWIM__STATE__STATE_DEAD;
    if (!state_is_known(m->state) || by_others || m->boot_id == 0 || m->incarnation == 0 ||
        m->incarnation >= INCARNATION_LIMIT)
        return false;
    *ret = (struct claim){
        .boot_id = m->boot_id,
        .incarnation = m->incarnation,
        .state = (enum swim_state)m->state,
        .rival = m->rival,
    };
    return true;
}

static bool hear_version(struct swim *s, struct swim_update *u, struct node *from,
                         const Covey__Swim__Message *m)
{
    bool compatible = m->version >= SWIM_VERSION_MIN && m->version_min <= SWIM_VERSION;
    if (from->incompatible != compatible)
        return compatible;
    enum swim_state old = node_state(from);
    from->incompatible = !compatible;
    if (node_state(from) != old)
        emit_state(s, u, from, old);
    return compatible;
}

static void hear_header(struct swim *s, struct swim_update *u, struct node *from,
                        const struct claim *c, const Covey__Swim__Message *m)
{
    claim_hear(s, u, from, c);
    if (from->claim.boot_id == c->boot_id) {
        from->heard_us = s->now_us;
        if (m->step != from->step || m->layers_done != from->layers_done) {
            from->step = m->step;
            from->layers_done = m->layers_done;
            from->progress_at_us = s->now_us;
        }
    }
    if (claim_cmp(c, &from->claim) < 0)
        from->tell = true;
}

static void hear_ping(struct swim *s, struct swim_update *u, struct node *from, uint32_t path,
                      enum way way, uint64_t seq)
{
    struct draft *d = draft_begin(s, way);
    d->ack.seq = seq;
    d->message.ack = &d->ack;
    d->message.body_case = COVEY__SWIM__MESSAGE__BODY_ACK;
    draft_send(s, u, from, path, way);
}

static void hear_body(struct swim *s, struct swim_update *u, struct node *from, uint32_t path,
                      enum way way, const Covey__Swim__Message *m)
{
    struct node_id target;
    switch (m->body_case) {
    case COVEY__SWIM__MESSAGE__BODY_PING:
        hear_ping(s, u, from, path, way, m->ping->seq);
        break;
    case COVEY__SWIM__MESSAGE__BODY_ACK:
        probe_on_ack(s, u, from, m->ack->seq);
        break;
    case COVEY__SWIM__MESSAGE__BODY_PING_REQUEST:
        if (wire_id(&m->ping_request->target, &target))
            probe_on_request(s, u, from, &target, m->ping_request->seq,
                             m->ping_request->timeout_us);
        break;
    case COVEY__SWIM__MESSAGE__BODY_INDIRECT_ACK:
        if (wire_id(&m->indirect_ack->target, &target))
            probe_on_indirect_ack(s, &target, m->indirect_ack->seq, m->indirect_ack->boot_id);
        break;
    case COVEY__SWIM__MESSAGE__BODY_NACK:
        if (wire_id(&m->nack->target, &target))
            probe_on_nack(s, from, &target, m->nack->seq);
        break;
    case COVEY__SWIM__MESSAGE__BODY_DIGEST:
        digest_hear(s, u, from, m);
        break;
    case COVEY__SWIM__MESSAGE__BODY_WANT:
        want_hear(s, u, from, m->want);
        break;
    default:
        break; /* only news, or a body of a later version */
    }
}

enum err wire_hear(struct swim *s, struct swim_update *u, struct node *from, uint32_t path,
                   enum way way, const uint8_t *bytes, uint32_t len)
{
    if (len == 0 || len > (way == WAY_DATAGRAM ? DATAGRAM_PAYLOAD_MAX : FRAME_PAYLOAD_MAX))
        return ERR_CORRUPT;
    size_t budget = DECODE_BYTES_MAX;
    ProtobufCAllocator allocator = {budget_alloc, budget_free, &budget};
    Covey__Swim__Message *m = covey__swim__message__unpack(&allocator, len, bytes);
    if (!m)
        return ERR_CORRUPT;
    struct claim header;
    enum err e = ERR_OK;
    if (!header_claim(m, &header)) {
        e = ERR_CORRUPT;
    } else if (hear_version(s, u, from, m)) {
        hear_header(s, u, from, &header, m);
        for (size_t i = 0; i < m->n_claims; i++) {
            struct node_id id;
            struct claim c;
            struct node *n = wire_claim(m->claims[i], &id, &c) ? node_find(s, &id) : NULL;
            /* What it says of itself stands in the header. */
            if (n && n != from)
                claim_hear(s, u, n, &c);
        }
        for (size_t i = 0; i < m->n_records; i++)
            record_hear(s, u, m->records[i]);
        hear_body(s, u, from, path, way, m);
        if (from->tell)
            gossip_tell(s, u, from);
        digest_compare(s, u, from, m->table_hash);
    }
    covey__swim__message__free_unpacked(m, &allocator);
    return e;
}
