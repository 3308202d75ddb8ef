/* Messages out, and the spreading of news.
 *
 * Every message carries our claim about ourselves in its header; other news rides on whatever is
 * sent anyway, the least often sent first (which is the newest; SWIM section 4.1), each item about
 * lambda * log2(n + 1) times. News of a state also goes to a few random members in bursts of its
 * own (a departure from SWIM, whose news waits for probes). */
#include "discovery/swim_internal.h"

static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

uint64_t hash_bytes(const uint8_t *bytes, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t i = 0; i < n; i++)
        h = (h ^ bytes[i]) * 0x100000001b3u;
    return mix(h);
}

/* A sum over all entries, so that their order does not matter. Not against forgery: only members
 * send hashes. */
uint64_t gossip_hash(struct swim *s)
{
    if (s->hash_valid)
        return s->hash;
    uint64_t h = 0;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        const struct node *n = &s->nodes[i];
        const struct claim *c = &n->claim;
        if (c->incarnation != 0)
            h += mix(n->id_hash ^ mix(c->boot_id ^ mix(c->incarnation * 8 + c->state)));
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
            const struct record *r = &n->records[k];
            if (r->present)
                h += mix(~n->id_hash ^ mix(r->boot_id ^ mix(r->version * 16 + k)));
        }
    }
    s->hash = h;
    s->hash_valid = true;
    return h;
}

enum way gossip_way(const struct node *n)
{
    if (!n->session_up || n->n_paths == 0)
        return WAY_DATAGRAM;
    for (uint32_t i = 0; i < n->n_paths; i++)
        if (n->paths[i].up)
            return WAY_DATAGRAM;
    return WAY_SESSION;
}

struct draft *draft_begin(struct swim *s, enum way way)
{
    struct draft *d = &s->draft;
    covey__swim__message__init(&d->message);
    covey__swim__ping__init(&d->ping);
    covey__swim__ack__init(&d->ack);
    covey__swim__ping_request__init(&d->ping_request);
    covey__swim__indirect_ack__init(&d->indirect_ack);
    covey__swim__nack__init(&d->nack);
    covey__swim__digest__init(&d->digest);
    covey__swim__want__init(&d->want);
    const struct claim *me = &s->nodes[0].claim;
    d->message.version = SWIM_VERSION;
    d->message.version_min = SWIM_VERSION_MIN;
    d->message.boot_id = me->boot_id;
    d->message.incarnation = me->incarnation;
    d->message.state = (Covey__Swim__State)me->state;
    d->message.rival = me->rival;
    d->message.table_hash = gossip_hash(s);
    d->message.step = s->step;
    d->message.layers_done = s->layers_done;
    d->message.claims = d->claim_pointers;
    d->message.records = d->record_pointers;
    d->len = 0;
    d->limit = way == WAY_DATAGRAM ? DATAGRAM_PAYLOAD_MAX : FRAME_PAYLOAD_MAX;
    d->no_news = false;
    return d;
}

/* With its tag (two bytes: the field numbers are 16 or more) and length. */
static bool draft_fits(struct draft *d, size_t n)
{
    if (d->len == 0)
        d->len = covey__swim__message__get_packed_size(&d->message);
    size_t whole = n + 2 + (n < 128 ? 1 : n < 16384 ? 2 : 3);
    if (d->len + whole > d->limit)
        return false;
    d->len += whole;
    return true;
}

bool draft_add_claim(struct draft *d, struct node *n)
{
    size_t i = d->message.n_claims;
    if (i == MESSAGE_CLAIMS_MAX)
        return false;
    Covey__Swim__Claim *c = &d->claims[i];
    covey__swim__claim__init(c);
    c->member.data = n->id.bytes;
    c->member.len = sizeof n->id.bytes;
    c->boot_id = n->claim.boot_id;
    c->incarnation = n->claim.incarnation;
    c->state = (Covey__Swim__State)n->claim.state;
    c->rival = n->claim.rival;
    c->by = d->by[i];
    c->n_by = n->claim.n_by;
    for (uint32_t j = 0; j < n->claim.n_by; j++) {
        d->by[i][j].data = n->claim.by[j].bytes;
        d->by[i][j].len = sizeof n->claim.by[j].bytes;
    }
    if (!draft_fits(d, covey__swim__claim__get_packed_size(c)))
        return false;
    d->claim_pointers[i] = c;
    d->message.n_claims++;
    return true;
}

bool draft_add_record(struct draft *d, struct node *n, uint8_t kind)
{
    size_t i = d->message.n_records;
    if (i == MESSAGE_RECORDS_MAX)
        return false;
    struct record *record = &n->records[kind];
    Covey__Swim__Record *r = &d->records[i];
    covey__swim__record__init(r);
    r->owner.data = n->id.bytes;
    r->owner.len = sizeof n->id.bytes;
    r->kind = kind;
    r->version = record->version;
    r->boot_id = record->boot_id;
    r->value.data = record->bytes;
    r->value.len = record->len;
    if (!draft_fits(d, covey__swim__record__get_packed_size(r)))
        return false;
    d->record_pointers[i] = r;
    d->message.n_records++;
    return true;
}

static bool draft_has_claim(const struct draft *d, const struct node *n)
{
    for (size_t i = 0; i < d->message.n_claims; i++)
        if (d->claims[i].member.data == n->id.bytes)
            return true;
    return false;
}

static void add_news_claims(struct swim *s, struct node *to)
{
    struct draft *d = &s->draft;
    for (;;) {
        struct node *newest = NULL;
        for (uint32_t i = 1; i < s->n_nodes; i++) {
            struct node *n = &s->nodes[i];
            if (n->sends_left > (newest ? newest->sends_left : 0) && n != to &&
                !draft_has_claim(d, n))
                newest = n;
        }
        if (!newest || !draft_add_claim(d, newest))
            return;
        newest->sends_left--;
    }
}

static bool draft_has_record(const struct draft *d, const struct node *n, uint32_t kind)
{
    for (size_t i = 0; i < d->message.n_records; i++)
        if (d->records[i].owner.data == n->id.bytes && d->records[i].kind == kind)
            return true;
    return false;
}

static void add_news_records(struct swim *s, struct node *to)
{
    struct draft *d = &s->draft;
    for (;;) {
        struct node *owner = NULL;
        uint32_t kind = 0, sends = 0;
        for (uint32_t i = 0; i < s->n_nodes; i++) {
            struct node *n = &s->nodes[i];
            if (n->n_queued == 0 || n == to)
                continue;
            for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
                if (n->records[k].sends_left <= sends || draft_has_record(d, n, k))
                    continue;
                owner = n;
                kind = k;
                sends = n->records[k].sends_left;
            }
        }
        if (!owner || !draft_add_record(d, owner, (uint8_t)kind))
            return;
        if (--owner->records[kind].sends_left == 0)
            owner->n_queued--;
    }
}

/* True when there is something in it that `to` may not know. */
static bool add_news(struct swim *s, struct node *to)
{
    struct draft *d = &s->draft;
    enum swim_state held = to->claim.incarnation != 0 ? to->claim.state : SWIM_ALIVE;
    bool told = false;
    if ((to->tell || held > SWIM_CONFLICT) && to->claim.incarnation != 0 &&
        draft_add_claim(d, to)) {
        to->tell = false;
        told = true;
    }
    add_news_claims(s, to);
    add_news_records(s, to);
    bool ours = s->nodes[0].sends_left > 0;
    if (ours)
        s->nodes[0].sends_left--;
    return ours || told || d->message.n_claims > 0 || d->message.n_records > 0;
}

static void draft_push(struct swim *s, struct swim_update *u, struct node *to, uint32_t path,
                       enum way way)
{
    struct draft *d = &s->draft;
    size_t len = covey__swim__message__get_packed_size(&d->message);
    if (len > d->limit)
        return;
    (void)covey__swim__message__pack(&d->message, d->packed);
    struct wire_message m = {
        .to = to->id,
        .path = path,
        .channel = CHANNEL_SWIM,
        .way = (uint8_t)way,
        .len = (uint32_t)len,
        .bytes = d->packed,
    };
    (void)outbox_push(&u->outbox, &m); /* a full box is a lost message */
}

void draft_send(struct swim *s, struct swim_update *u, struct node *to, uint32_t path, enum way way)
{
    if (!s->draft.no_news)
        (void)add_news(s, to);
    draft_push(s, u, to, path, way);
}

/* ceil(log2(n + 1)) with n members, ourselves included, times lambda. */
static uint32_t sends_limit(const struct swim *s)
{
    uint32_t n = n_live(s) + 2, log2 = 0;
    while (n > 1u << log2)
        log2++;
    return s->o.gossip_lambda * log2;
}

void gossip_claim(struct swim *s, struct node *n)
{
    n->sends_left = sends_limit(s);
    n->bursts_left = n->sends_left / MAX_OF(s->o.gossip_fanout, 1u) + 1;
    if (s->gossip_at_us == NEVER)
        s->gossip_at_us = s->now_us;
}

void gossip_record(struct swim *s, struct node *n, uint8_t kind, bool urgent)
{
    struct record *r = &n->records[kind];
    if (r->sends_left == 0)
        n->n_queued++;
    r->sends_left = sends_limit(s);
    r->urgent = urgent;
    if (urgent && s->gossip_at_us == NEVER)
        s->gossip_at_us = s->now_us;
}

void gossip_tell(struct swim *s, struct swim_update *u, struct node *to)
{
    if (to->claim.incarnation == 0 || (to->told_us != 0 && s->now_us < to->told_us + TELL_GAP_US))
        return;
    to->told_us = s->now_us;
    to->tell = true;
    enum way way = to->session_up ? WAY_SESSION : WAY_DATAGRAM;
    (void)draft_begin(s, way);
    draft_send(s, u, to, 0, way);
}

/* Uses up one burst; true when there is something urgent. */
static bool take_urgent(struct swim *s)
{
    bool any = false;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        if (n->bursts_left > 0) {
            n->bursts_left--;
            any = true;
        }
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX && n->n_queued > 0; k++) {
            any = any || n->records[k].urgent;
            n->records[k].urgent = false;
        }
    }
    return any;
}

static void burst(struct swim *s, struct swim_update *u)
{
    struct node *live[NODES_ALL];
    uint32_t n = 0;
    for (uint32_t i = 1; i < s->n_nodes; i++)
        if (node_is_live(&s->nodes[i]))
            live[n++] = &s->nodes[i];
    for (uint32_t i = 0; i < s->o.gossip_fanout && n > 0; i++) {
        uint64_t at = rng_below(&s->rng, n);
        struct node *to = live[at];
        live[at] = live[--n];
        enum way way = gossip_way(to);
        (void)draft_begin(s, way);
        if (add_news(s, to))
            draft_push(s, u, to, 0, way);
    }
}

void gossip_timers(struct swim *s, struct swim_update *u)
{
    if (s->now_us >= s->gossip_at_us) {
        if (take_urgent(s)) {
            burst(s, u);
            s->gossip_at_us = s->now_us + s->o.gossip_gap_us;
        } else {
            s->gossip_at_us = NEVER;
        }
    }
    if (s->now_us < s->digest_at_us)
        return;
    s->digest_at_us = s->now_us + s->o.digest_us;
    struct node *to = NULL;
    uint32_t seen = 0;
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        if (node_is_live(n) && rng_below(&s->rng, ++seen) == 0)
            to = n;
    }
    if (to)
        digest_short(s, u, to);
}

uint64_t gossip_due(const struct swim *s)
{
    return s->n_nodes > 1 ? MIN_OF(s->gossip_at_us, s->digest_at_us) : s->gossip_at_us;
}
