/* Records, and the reconciliation of what two members hold.
 *
 * A record is ordered by (version, boot_id). Its owner alone raises the version; an owner that
 * hears a record of its own that is not below its present one (it restarted without memory, or from
 * a backup) jumps above it, and takes over one that it does not have. Others keep what they were
 * told.
 *
 * Reconciliation (anti-entropy, Demers et al., "Epidemic Algorithms for Replicated Database
 * Maintenance", 1987): a full digest lists all record versions beside all claims; the answer is
 * what is newer on the other side, and a want for the rest. */
#include "discovery/swim_internal.h"

#include <string.h>

void records_free(struct node *n)
{
    for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
        free(n->records[k].bytes);
        n->records[k] = (struct record){0};
    }
    n->n_queued = 0;
}

/* Copies the bytes into the record; false (and nothing changed) without memory. */
static bool record_store(struct swim *s, struct record *r, const uint8_t *bytes, uint32_t len)
{
    uint8_t *copy = malloc(len ? len : 1);
    if (!copy) {
        s->failure = ERR_NO_MEMORY;
        return false;
    }
    if (len > 0)
        memcpy(copy, bytes, len);
    free(r->bytes);
    r->bytes = copy;
    r->len = len;
    r->present = true;
    s->hash_valid = false;
    return true;
}

static void emit_record(struct swim *s, struct swim_update *u, struct node *n, uint8_t kind)
{
    struct swim_effect *e = effect_add(s, u, SWIM_EFFECT_RECORD, n);
    if (e)
        e->kind = kind;
}

/* Small ones ride on messages; large ones of our own go to every session at once, and reach members
 * without a session to us by digest. */
static void publish(struct swim *s, struct swim_update *u, uint8_t kind)
{
    struct node *me = &s->nodes[0];
    if (me->records[kind].len <= SWIM_RECORD_DATAGRAM_MAX) {
        gossip_record(s, me, kind, true);
        return;
    }
    for (uint32_t i = 1; i < s->n_nodes && !s->silent; i++) {
        if (!s->nodes[i].session_up)
            continue;
        struct draft *d = draft_begin(s, WAY_SESSION);
        d->no_news = true;
        if (draft_add_record(d, me, kind))
            draft_send(s, u, &s->nodes[i], 0, WAY_SESSION);
    }
}

static void queue_drop(struct node *n, struct record *r)
{
    if (r->sends_left > 0)
        n->n_queued--;
    r->sends_left = 0;
    r->urgent = false;
}

enum err record_set(struct swim *s, struct swim_update *u, uint8_t kind, const uint8_t *bytes,
                    uint32_t len)
{
    if (kind >= SWIM_RECORD_KINDS_MAX || (len > 0 && !bytes))
        return ERR_INVALID;
    if (len > SWIM_RECORD_BYTES_MAX)
        return ERR_LIMIT;
    struct node *me = &s->nodes[0];
    struct record *r = &me->records[kind];
    if (r->present && r->boot_id == s->o.boot_id && r->len == len &&
        (len == 0 || memcmp(r->bytes, bytes, len) == 0))
        return ERR_OK;
    if (!record_store(s, r, bytes, len))
        return ERR_NO_MEMORY;
    queue_drop(me, r);
    r->version = MIN_OF(r->version + 1, VERSION_LIMIT - 1);
    r->boot_id = s->o.boot_id;
    publish(s, u, kind);
    emit_record(s, u, me, kind);
    return ERR_OK;
}

static int version_cmp(uint64_t version, uint64_t boot_id, const struct record *r)
{
    if (!r->present || version != r->version)
        return !r->present || version > r->version ? 1 : -1;
    return (boot_id > r->boot_id) - (boot_id < r->boot_id);
}

static void hear_own(struct swim *s, struct swim_update *u, const Covey__Swim__Record *r)
{
    uint8_t kind = (uint8_t)r->kind;
    struct node *me = &s->nodes[0];
    struct record *own = &me->records[kind];
    if (!own->present) {
        if (!record_store(s, own, r->value.data, (uint32_t)r->value.len))
            return;
        own->version = r->version;
        own->boot_id = r->boot_id;
        emit_record(s, u, me, kind);
        return;
    }
    bool same = r->version == own->version && r->boot_id == own->boot_id;
    if (same || r->version < own->version)
        return;
    own->version = MIN_OF(r->version + 1, VERSION_LIMIT - 1);
    own->boot_id = s->o.boot_id;
    s->hash_valid = false;
    publish(s, u, kind);
}

void record_hear(struct swim *s, struct swim_update *u, const Covey__Swim__Record *r)
{
    struct node_id owner;
    if (!wire_id(&r->owner, &owner) || r->kind >= SWIM_RECORD_KINDS_MAX || r->version == 0 ||
        r->version >= VERSION_LIMIT || r->boot_id == 0 || r->value.len > SWIM_RECORD_BYTES_MAX)
        return;
    struct node *n = node_find(s, &owner);
    if (!n)
        return;
    if (n == &s->nodes[0]) {
        hear_own(s, u, r);
        return;
    }
    uint8_t kind = (uint8_t)r->kind;
    struct record *held = &n->records[kind];
    if (version_cmp(r->version, r->boot_id, held) <= 0 ||
        !record_store(s, held, r->value.data, (uint32_t)r->value.len))
        return;
    held->version = r->version;
    held->boot_id = r->boot_id;
    queue_drop(n, held);
    if (held->len <= SWIM_RECORD_DATAGRAM_MAX)
        gossip_record(s, n, kind, false);
    emit_record(s, u, n, kind);
}

static enum way digest_way(const struct node *n)
{
    return n->session_up ? WAY_SESSION : WAY_DATAGRAM;
}

void digest_short(struct swim *s, struct swim_update *u, struct node *to)
{
    struct draft *d = draft_begin(s, digest_way(to));
    d->message.digest = &d->digest;
    d->message.body_case = COVEY__SWIM__MESSAGE__BODY_DIGEST;
    draft_send(s, u, to, 0, digest_way(to));
}

static void add_version(struct draft *d, Covey__Swim__OwnerVersions *o, size_t owner, uint32_t kind,
                        uint64_t version, uint64_t boot_id)
{
    Covey__Swim__RecordVersion *v = &d->versions[owner][o->n_records];
    covey__swim__record_version__init(v);
    v->kind = kind;
    v->version = version;
    v->boot_id = boot_id;
    d->version_pointers[owner][o->n_records++] = v;
}

/* The list for node n, not yet linked into a message. */
static Covey__Swim__OwnerVersions *begin_owner(struct draft *d, size_t i, struct node *n)
{
    Covey__Swim__OwnerVersions *o = &d->owners[i];
    covey__swim__owner_versions__init(o);
    o->owner.data = n->id.bytes;
    o->owner.len = sizeof n->id.bytes;
    o->records = d->version_pointers[i];
    d->owner_pointers[i] = o;
    return o;
}

/* Without a session it goes as a datagram when it is small enough, else not at all. */
void digest_full(struct swim *s, struct swim_update *u, struct node *to)
{
    enum way way = digest_way(to);
    struct draft *d = draft_begin(s, way);
    d->message.digest = &d->digest;
    d->message.body_case = COVEY__SWIM__MESSAGE__BODY_DIGEST;
    d->digest.full = 1;
    d->digest.owners = d->owner_pointers;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        Covey__Swim__OwnerVersions *o = begin_owner(d, d->digest.n_owners, &s->nodes[i]);
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
            const struct record *r = &s->nodes[i].records[k];
            if (r->present)
                add_version(d, o, d->digest.n_owners, k, r->version, r->boot_id);
        }
        d->digest.n_owners += o->n_records > 0;
    }
    d->no_news = true;
    for (uint32_t i = 0; i < s->n_nodes; i++)
        if (s->nodes[i].claim.incarnation != 0 && !draft_add_claim(d, &s->nodes[i]))
            return;
    draft_send(s, u, to, 0, way);
}

/* Puts records into messages, a new one whenever one is full. */
struct reply {
    struct node *to;
    enum way way;
    uint32_t n_messages;
    bool open; /* the draft holds something */
};

static void reply_flush(struct swim *s, struct swim_update *u, struct reply *reply)
{
    if (!reply->open)
        return;
    draft_send(s, u, reply->to, 0, reply->way);
    reply->n_messages++;
    reply->open = false;
}

static void reply_record(struct swim *s, struct swim_update *u, struct reply *reply, struct node *n,
                         uint8_t kind)
{
    for (int attempt = 0; attempt < 2 && reply->n_messages < REPLY_MESSAGES_MAX; attempt++) {
        if (!reply->open)
            draft_begin(s, reply->way)->no_news = true;
        if (draft_add_record(&s->draft, n, kind)) {
            reply->open = true;
            return;
        }
        reply_flush(s, u, reply);
    }
}

/* What `from` listed, by our numbers of nodes. */
struct listed {
    uint64_t version[NODES_ALL][SWIM_RECORD_KINDS_MAX], boot_id[NODES_ALL][SWIM_RECORD_KINDS_MAX];
};

static void read_versions(struct swim *s, Covey__Swim__OwnerVersions *const *owners, size_t n,
                          struct listed *ret)
{
    memset(ret, 0, sizeof *ret);
    for (size_t i = 0; i < n && i < NODES_ALL; i++) {
        struct node_id id;
        struct node *node = wire_id(&owners[i]->owner, &id) ? node_find(s, &id) : NULL;
        for (size_t j = 0; node && j < owners[i]->n_records; j++) {
            const Covey__Swim__RecordVersion *v = owners[i]->records[j];
            if (v->kind >= SWIM_RECORD_KINDS_MAX || v->version >= VERSION_LIMIT)
                continue;
            ret->version[node - s->nodes][v->kind] = v->version;
            ret->boot_id[node - s->nodes][v->kind] = v->boot_id;
        }
    }
}

/* Our claims that are above theirs, or that they did not list. */
static bool add_newer_claims(struct swim *s, const Covey__Swim__Message *m)
{
    struct draft *d = &s->draft;
    bool any = false;
    for (uint32_t i = 1; i < s->n_nodes; i++) {
        struct node *n = &s->nodes[i];
        bool newer = n->claim.incarnation != 0;
        for (size_t j = 0; newer && j < m->n_claims; j++) {
            struct node_id id;
            struct claim theirs;
            if (wire_claim(m->claims[j], &id, &theirs) && node_id_eq(&id, &n->id))
                newer = claim_cmp(&n->claim, &theirs) > 0;
        }
        if (newer)
            any = draft_add_claim(d, n) || any;
    }
    return any;
}

static void answer_full(struct swim *s, struct swim_update *u, struct node *from,
                        const Covey__Swim__Message *m)
{
    struct listed theirs;
    read_versions(s, m->digest->owners, m->digest->n_owners, &theirs);
    struct reply reply = {.to = from, .way = digest_way(from)};
    struct draft *d = draft_begin(s, reply.way);
    d->no_news = true;
    d->want.owners = d->owner_pointers;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        Covey__Swim__OwnerVersions *o = begin_owner(d, d->want.n_owners, &s->nodes[i]);
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
            uint64_t version = theirs.version[i][k], boot_id = theirs.boot_id[i][k];
            if (version != 0 && version_cmp(version, boot_id, &s->nodes[i].records[k]) > 0)
                add_version(d, o, d->want.n_owners, k, version, boot_id);
        }
        d->want.n_owners += o->n_records > 0;
    }
    if (d->want.n_owners > 0) {
        d->message.want = &d->want;
        d->message.body_case = COVEY__SWIM__MESSAGE__BODY_WANT;
        reply.open = true;
    }
    reply.open = add_newer_claims(s, m) || reply.open;
    for (uint32_t i = 0; i < s->n_nodes; i++) {
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++) {
            const struct record *r = &s->nodes[i].records[k];
            struct record listed = {.present = theirs.version[i][k] != 0,
                                    .version = theirs.version[i][k],
                                    .boot_id = theirs.boot_id[i][k]};
            if (r->present && version_cmp(r->version, r->boot_id, &listed) > 0)
                reply_record(s, u, &reply, &s->nodes[i], (uint8_t)k);
        }
    }
    reply_flush(s, u, &reply);
}

void digest_hear(struct swim *s, struct swim_update *u, struct node *from,
                 const Covey__Swim__Message *m)
{
    if (m->table_hash == gossip_hash(s))
        return;
    if (from->answered_us != 0 && s->now_us < from->answered_us + DIGEST_ANSWER_GAP_US)
        return;
    from->answered_us = s->now_us;
    if (m->digest->full)
        answer_full(s, u, from, m);
    else
        digest_full(s, u, from);
}

void want_hear(struct swim *s, struct swim_update *u, struct node *from,
               const Covey__Swim__Want *want)
{
    struct listed theirs;
    read_versions(s, want->owners, want->n_owners, &theirs);
    struct reply reply = {.to = from, .way = digest_way(from)};
    for (uint32_t i = 0; i < s->n_nodes; i++)
        for (uint32_t k = 0; k < SWIM_RECORD_KINDS_MAX; k++)
            if (theirs.version[i][k] != 0 && s->nodes[i].records[k].present)
                reply_record(s, u, &reply, &s->nodes[i], (uint8_t)k);
    reply_flush(s, u, &reply);
}

void digest_compare(struct swim *s, struct swim_update *u, struct node *from, uint64_t hash)
{
    if (hash == gossip_hash(s)) {
        from->differs_since_us = 0;
        from->digest_gap_us = DIGEST_GAP_US;
        return;
    }
    if (from->differs_since_us == 0)
        from->differs_since_us = s->now_us;
    if (s->now_us < from->differs_since_us + DIGEST_PATIENCE_US || s->now_us < from->digest_at_us)
        return;
    from->digest_at_us = s->now_us + from->digest_gap_us;
    from->digest_gap_us = MIN_OF(from->digest_gap_us * 2, DIGEST_GAP_MAX_US);
    digest_full(s, u, from);
}
