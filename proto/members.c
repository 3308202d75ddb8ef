#include "proto/members.h"

#include "proto/trust.pb-c.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

enum { FAR = TRUST_CHAIN_MAX + 1 }; /* no chain */

struct node {
    struct node_id id;
    uint32_t depth_any, admit_any; /* shortest chain, and of authority; revocations aside */
    uint32_t depth, admit;         /* the same without the revoked */
    uint32_t issuer, admit_issuer; /* the last before this one on those two chains */
    bool revoked;
    bool out; /* scratch: taken out of the chains being walked */
};

/* An item's place among the nodes. */
struct edge {
    uint32_t issuer, subject;
};

struct members {
    struct hash256 cluster;
    struct node_id founder;
    struct item *items; /* records and revocations, in sending order after settling */
    uint32_t n_items, cap_items, n_records, n_revocations;
    size_t n_bytes;     /* of all bodies */
    struct node *nodes; /* in order of key */
    struct edge *edges; /* of each item */
    uint32_t n_nodes;
    uint32_t n_unsettled; /* items added since, each with at most one new key */
    bool settled;
};

enum err members_new(const struct hash256 *cluster, const struct node_id *founder,
                     struct members **ret)
{
    _cleanup_(members_freep) struct members *m = calloc(1, sizeof *m);
    if (!m)
        return ERR_NO_MEMORY;
    m->cluster = *cluster;
    m->founder = *founder;
    TRY(members_settle(m));
    *ret = TAKE(m);
    return ERR_OK;
}

void members_free(struct members *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; i < m->n_items; i++)
        free(m->items[i].body);
    free(m->items);
    free(m->nodes);
    free(m->edges);
    free(m);
}

enum err members_clone(const struct members *m, struct members **ret)
{
    _cleanup_(members_freep) struct members *copy = NULL;
    TRY(members_new(&m->cluster, &m->founder, &copy));
    copy->items = calloc(m->cap_items ? m->cap_items : 1, sizeof *copy->items);
    if (!copy->items)
        return ERR_NO_MEMORY;
    copy->cap_items = m->cap_items;
    for (uint32_t i = 0; i < m->n_items; i++) {
        struct item item = m->items[i];
        item.body = malloc(item.n_body);
        if (!item.body)
            return ERR_NO_MEMORY;
        memcpy(item.body, m->items[i].body, item.n_body);
        copy->items[copy->n_items++] = item;
    }
    copy->n_records = m->n_records;
    copy->n_revocations = m->n_revocations;
    copy->n_bytes = m->n_bytes;
    copy->settled = false;
    TRY(members_settle(copy));
    *ret = TAKE(copy);
    return ERR_OK;
}

static const char *statement_word(enum item_kind kind)
{
    return kind == ITEM_RECORD ? "record" : "revocation";
}

void item_hash(enum item_kind kind, const uint8_t *body, size_t n_body,
               const uint8_t signature[IDENTITY_SIGNATURE_BYTES], struct hash256 *ret)
{
    crypto_generichash_state state;
    uint8_t kind_byte = (uint8_t)kind;
    (void)crypto_generichash_init(&state, NULL, 0, sizeof ret->bytes);
    (void)crypto_generichash_update(&state, &kind_byte, 1);
    (void)crypto_generichash_update(&state, signature, IDENTITY_SIGNATURE_BYTES);
    (void)crypto_generichash_update(&state, body, n_body);
    (void)crypto_generichash_final(&state, ret->bytes, sizeof ret->bytes);
}

static bool take_key(const ProtobufCBinaryData *from, struct node_id *ret)
{
    if (from->len != sizeof ret->bytes)
        return false;
    memcpy(ret->bytes, from->data, sizeof ret->bytes);
    return true;
}

static bool is_cluster(const struct members *m, const ProtobufCBinaryData *from)
{
    return from->len == sizeof m->cluster.bytes &&
           memcmp(from->data, m->cluster.bytes, sizeof m->cluster.bytes) == 0;
}

/* Reads what the body states. */
static bool parse_body(const struct members *m, struct item *item)
{
    bool good = false;
    if (item->kind == ITEM_RECORD) {
        Covey__Trust__Record *r = covey__trust__record__unpack(NULL, item->n_body, item->body);
        if (!r)
            return false;
        good = is_cluster(m, &r->cluster) && take_key(&r->subject, &item->subject) &&
               take_key(&r->issuer, &item->issuer);
        item->may_admit = r->may_admit;
        covey__trust__record__free_unpacked(r, NULL);
    } else {
        Covey__Trust__Revocation *r =
            covey__trust__revocation__unpack(NULL, item->n_body, item->body);
        if (!r)
            return false;
        good = is_cluster(m, &r->cluster) && take_key(&r->subject, &item->subject) &&
               take_key(&r->issuer, &item->issuer);
        covey__trust__revocation__free_unpacked(r, NULL);
    }
    return good && !node_id_eq(&item->subject, &item->issuer);
}

static struct node *find_node(const struct members *m, const struct node_id *id)
{
    uint32_t low = 0, high = m->n_nodes;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int order = node_id_cmp(&m->nodes[middle].id, id);
        if (order == 0)
            return &m->nodes[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static enum err check_authority(struct members *m, const struct node_id *issuer)
{
    const struct node *node = find_node(m, issuer);
    if ((!node || node->admit_any >= FAR) && !m->settled) {
        TRY(members_settle(m));
        node = find_node(m, issuer);
    }
    return node && node->admit_any < FAR ? ERR_OK : ERR_DENIED;
}

/* The item that says the same, though perhaps in other bytes. */
static struct item *find_same(const struct members *m, const struct item *item)
{
    for (uint32_t i = 0; i < m->n_items; i++) {
        struct item *other = &m->items[i];
        if (other->kind == item->kind && other->may_admit == item->may_admit &&
            node_id_eq(&other->subject, &item->subject) &&
            node_id_eq(&other->issuer, &item->issuer))
            return other;
    }
    return NULL;
}

static enum err append_item(struct members *m, struct item *item)
{
    uint32_t *count = item->kind == ITEM_RECORD ? &m->n_records : &m->n_revocations;
    uint32_t limit = item->kind == ITEM_RECORD ? TRUST_RECORDS_MAX : TRUST_REVOCATIONS_MAX;
    if (*count >= limit || m->n_bytes + item->n_body > MEMBERS_BYTES_MAX)
        return ERR_LIMIT;
    if (!m->settled && m->n_nodes + m->n_unsettled >= TRUST_MEMBERS_MAX)
        TRY(members_settle(m));
    if (!find_node(m, &item->subject) && m->n_nodes + m->n_unsettled >= TRUST_MEMBERS_MAX)
        return ERR_LIMIT;
    if (m->n_items == m->cap_items) {
        uint32_t cap = m->cap_items ? m->cap_items * 2 : 16;
        struct item *items = realloc(m->items, cap * sizeof *items);
        if (!items)
            return ERR_NO_MEMORY;
        m->items = items;
        m->cap_items = cap;
    }
    m->items[m->n_items++] = *item;
    ++*count;
    m->n_bytes += item->n_body;
    m->n_unsettled++;
    m->settled = false;
    return ERR_OK;
}

static enum err add_item(struct members *m, struct item *item, bool *ret_new)
{
    item_hash(item->kind, item->body, item->n_body, item->signature, &item->hash);
    for (uint32_t i = 0; i < m->n_items; i++) {
        if (hash256_eq(&m->items[i].hash, &item->hash))
            return ERR_OK;
    }
    if (!parse_body(m, item))
        return ERR_CORRUPT;
    TRY(check_authority(m, &item->issuer));
    if (!identity_verify(&item->issuer, statement_word(item->kind), item->body, item->n_body,
                         item->signature))
        return ERR_CORRUPT;
    struct item *same = find_same(m, item);
    if (!same) {
        TRY(append_item(m, item));
    } else {
        /* Every node keeps the same one of the two: that with the smaller hash. */
        if (memcmp(same->hash.bytes, item->hash.bytes, sizeof item->hash.bytes) < 0)
            return ERR_OK;
        m->n_bytes = m->n_bytes - same->n_body + item->n_body;
        free(same->body);
        *same = *item;
    }
    item->body = NULL;
    *ret_new = true;
    return ERR_OK;
}

enum err members_add(struct members *m, enum item_kind kind, const uint8_t *body, size_t n_body,
                     const uint8_t signature[IDENTITY_SIGNATURE_BYTES], bool *ret_new)
{
    *ret_new = false;
    size_t limit = kind == ITEM_RECORD       ? RECORD_BODY_MAX
                   : kind == ITEM_REVOCATION ? REVOCATION_BODY_MAX
                                             : 0;
    if (n_body == 0 || n_body > limit)
        return ERR_CORRUPT;
    struct item item = {.kind = kind, .n_body = (uint32_t)n_body, .body = malloc(n_body)};
    if (!item.body)
        return ERR_NO_MEMORY;
    memcpy(item.body, body, n_body);
    memcpy(item.signature, signature, sizeof item.signature);
    enum err e = add_item(m, &item, ret_new);
    free(item.body);
    return e;
}

static enum err sign_and_add(struct members *m, const struct identity *issuer, enum item_kind kind,
                             const uint8_t *body, size_t n)
{
    uint8_t signature[IDENTITY_SIGNATURE_BYTES];
    bool is_new;
    identity_sign(issuer, statement_word(kind), body, n, signature);
    return members_add(m, kind, body, n, signature, &is_new);
}

static ProtobufCBinaryData view(const uint8_t *bytes, size_t n)
{
    union {
        const uint8_t *in;
        uint8_t *out; /* protobuf-c only reads it when packing */
    } data = {bytes};
    return (ProtobufCBinaryData){.len = n, .data = data.out};
}

enum err members_admit(struct members *m, const struct identity *issuer,
                       const struct node_id *subject, bool may_admit)
{
    Covey__Trust__Record r = COVEY__TRUST__RECORD__INIT;
    uint8_t body[256];
    r.cluster = view(m->cluster.bytes, sizeof m->cluster.bytes);
    r.subject = view(subject->bytes, sizeof subject->bytes);
    r.issuer = view(issuer->id.bytes, sizeof issuer->id.bytes);
    r.may_admit = may_admit;
    size_t n = covey__trust__record__get_packed_size(&r);
    assert(n <= sizeof body);
    (void)covey__trust__record__pack(&r, body);
    return sign_and_add(m, issuer, ITEM_RECORD, body, n);
}

enum err members_revoke(struct members *m, const struct identity *issuer,
                        const struct node_id *subject)
{
    Covey__Trust__Revocation r = COVEY__TRUST__REVOCATION__INIT;
    ProtobufCBinaryData *admitted = calloc(TRUST_MEMBERS_MAX, sizeof *admitted);
    uint8_t *body = malloc(REVOCATION_BODY_MAX);
    enum err e = ERR_NO_MEMORY;
    if (!admitted || !body)
        goto out;
    for (uint32_t i = 0; i < m->n_items && r.n_admitted < TRUST_MEMBERS_MAX; i++) {
        const struct item *item = &m->items[i];
        if (item->kind == ITEM_RECORD && node_id_eq(&item->issuer, subject))
            admitted[r.n_admitted++] = view(item->subject.bytes, sizeof item->subject.bytes);
    }
    r.cluster = view(m->cluster.bytes, sizeof m->cluster.bytes);
    r.subject = view(subject->bytes, sizeof subject->bytes);
    r.issuer = view(issuer->id.bytes, sizeof issuer->id.bytes);
    r.admitted = admitted;
    size_t n = covey__trust__revocation__get_packed_size(&r);
    assert(n <= REVOCATION_BODY_MAX);
    (void)covey__trust__revocation__pack(&r, body);
    e = sign_and_add(m, issuer, ITEM_REVOCATION, body, n);
out:
    free(admitted);
    free(body);
    return e;
}

/* What follows from the set. */

static int compare_nodes(const void *a, const void *b)
{
    return node_id_cmp(&((const struct node *)a)->id, &((const struct node *)b)->id);
}

static enum err collect_nodes(struct members *m)
{
    size_t cap = 1 + 2 * (size_t)m->n_items;
    struct node *nodes = calloc(cap, sizeof *nodes);
    struct edge *edges = calloc(m->n_items ? m->n_items : 1, sizeof *edges);
    if (!nodes || !edges) {
        free(nodes);
        free(edges);
        return ERR_NO_MEMORY;
    }
    uint32_t n = 0, n_unique = 0;
    nodes[n++].id = m->founder;
    for (uint32_t i = 0; i < m->n_items; i++) {
        nodes[n++].id = m->items[i].subject;
        nodes[n++].id = m->items[i].issuer;
    }
    qsort(nodes, n, sizeof *nodes, compare_nodes);
    for (uint32_t i = 0; i < n; i++) {
        if (i == 0 || !node_id_eq(&nodes[i].id, &nodes[n_unique - 1].id))
            nodes[n_unique++] = nodes[i];
    }
    free(m->nodes);
    free(m->edges);
    m->nodes = nodes;
    m->edges = edges;
    m->n_nodes = n_unique;
    return ERR_OK;
}

static uint32_t index_of(const struct members *m, const struct node_id *id)
{
    const struct node *node = find_node(m, id);
    assert(node);
    return (uint32_t)(node - m->nodes);
}

static void link_items(struct members *m)
{
    for (uint32_t i = 0; i < m->n_items; i++) {
        m->edges[i].subject = index_of(m, &m->items[i].subject);
        m->edges[i].issuer = index_of(m, &m->items[i].issuer);
    }
}

/* A shorter chain, or one as short whose last issuer has the smaller key. */
static bool improves(uint32_t depth, uint32_t issuer, uint32_t *best, uint32_t *best_issuer)
{
    if (depth > *best || (depth == *best && issuer >= *best_issuer))
        return false;
    *best = depth;
    *best_issuer = issuer;
    return true;
}

/* Shortest chains from the founder through those that are not `out`. */
static void walk_chains(struct members *m)
{
    for (uint32_t i = 0; i < m->n_nodes; i++) {
        struct node *node = &m->nodes[i];
        node->depth = node->admit = node_id_eq(&node->id, &m->founder) && !node->out ? 0 : FAR;
        node->issuer = node->admit_issuer = node->depth == 0 ? i : UINT32_MAX;
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t i = 0; i < m->n_items; i++) {
            struct edge edge = m->edges[i];
            struct node *subject = &m->nodes[edge.subject];
            uint32_t depth = m->nodes[edge.issuer].admit + 1;
            if (m->items[i].kind != ITEM_RECORD || subject->out || depth >= FAR)
                continue;
            if (improves(depth, edge.issuer, &subject->depth, &subject->issuer))
                changed = true;
            if (m->items[i].may_admit &&
                improves(depth, edge.issuer, &subject->admit, &subject->admit_issuer))
                changed = true;
        }
    }
}

static bool wins(const struct members *m, uint32_t a, uint32_t b)
{
    uint32_t depth_a = m->nodes[a].admit_any, depth_b = m->nodes[b].admit_any;
    return depth_a != depth_b ? depth_a < depth_b : a < b; /* nodes are in order of key */
}

static bool is_revocation_by_authority(const struct members *m, uint32_t i)
{
    return m->items[i].kind == ITEM_REVOCATION && m->nodes[m->edges[i].issuer].admit_any < FAR;
}

/* Takes out whom t revoked and wins against; says whether there was any. */
static bool take_out_losers(struct members *m, uint32_t t)
{
    bool any = false;
    for (uint32_t i = 0; i < m->n_nodes; i++)
        m->nodes[i].out = false;
    for (uint32_t i = 0; i < m->n_items; i++) {
        uint32_t subject = m->edges[i].subject;
        if (is_revocation_by_authority(m, i) && m->edges[i].issuer == t &&
            !node_id_eq(&m->nodes[subject].id, &m->founder) && wins(m, t, subject))
            any = m->nodes[subject].out = true;
    }
    return any;
}

static void work_out_revocations(struct members *m)
{
    for (uint32_t t = 0; t < m->n_nodes; t++) {
        struct node *target = &m->nodes[t];
        bool has_losers = false, walked = false;
        if (node_id_eq(&target->id, &m->founder))
            continue;
        for (uint32_t i = 0; i < m->n_items && !target->revoked; i++) {
            if (!is_revocation_by_authority(m, i) || m->edges[i].subject != t)
                continue;
            if (!walked) {
                has_losers = target->admit_any < FAR && take_out_losers(m, t);
                if (has_losers)
                    walk_chains(m);
                walked = true;
            }
            target->revoked = !has_losers || m->nodes[m->edges[i].issuer].admit < FAR;
        }
    }
}

/* Items by their issuer's distance from the founder, so that a receiver knows each issuer in time;
 * revocations last. */
static uint32_t sending_rank(const struct members *m, const struct item *item)
{
    const struct node *issuer = find_node(m, &item->issuer);
    return (item->kind == ITEM_REVOCATION ? FAR + 1 : 0) + (issuer ? issuer->admit_any : FAR);
}

static void sort_items(struct members *m)
{
    /* Insertion from the end: the set is nearly sorted already. */
    for (uint32_t i = 1; i < m->n_items; i++) {
        struct item item = m->items[i];
        uint32_t rank = sending_rank(m, &item), at = i;
        for (; at > 0 && sending_rank(m, &m->items[at - 1]) > rank; at--)
            m->items[at] = m->items[at - 1];
        m->items[at] = item;
    }
}

enum err members_settle(struct members *m)
{
    if (m->settled)
        return ERR_OK;
    TRY(collect_nodes(m));
    link_items(m);
    walk_chains(m);
    for (uint32_t i = 0; i < m->n_nodes; i++) {
        m->nodes[i].depth_any = m->nodes[i].depth;
        m->nodes[i].admit_any = m->nodes[i].admit;
    }
    sort_items(m);
    link_items(m);
    work_out_revocations(m);
    for (uint32_t i = 0; i < m->n_nodes; i++)
        m->nodes[i].out = m->nodes[i].revoked;
    walk_chains(m);
    m->settled = true;
    m->n_unsettled = 0;
    return ERR_OK;
}

static enum trust_role role_of(const struct node *node)
{
    if (!node)
        return TRUST_ROLE_NONE;
    if (node->revoked)
        return TRUST_ROLE_REVOKED;
    if (node->admit < FAR)
        return TRUST_ROLE_MEMBER;
    if (node->depth < FAR)
        return TRUST_ROLE_WORKER;
    return node->depth_any < FAR ? TRUST_ROLE_PENDING : TRUST_ROLE_NONE;
}

enum trust_role members_role(const struct members *m, const struct node_id *id)
{
    return role_of(find_node(m, id));
}

bool members_at(const struct members *m, uint32_t i, struct trust_member *ret)
{
    if (i >= m->n_nodes)
        return false;
    const struct node *node = &m->nodes[i];
    *ret = (struct trust_member){.id = node->id, .role = role_of(node), .depth = UINT32_MAX};
    uint32_t issuer = node->admit < FAR ? node->admit_issuer : node->issuer;
    if (node->depth < FAR) {
        ret->issuer = m->nodes[issuer].id;
        ret->depth = node->admit < FAR ? node->admit : node->depth;
    }
    return true;
}

uint32_t members_count(const struct members *m)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->n_nodes; i++) {
        enum trust_role role = role_of(&m->nodes[i]);
        n += role == TRUST_ROLE_MEMBER || role == TRUST_ROLE_WORKER;
    }
    return n;
}

bool members_stands_without(const struct members *m, const struct node_id *id,
                            const struct node_id *without)
{
    /* Spread from the founder, keeping away from `without`: a small copy of walk_chains that leaves
     * the settled state alone. */
    bool reached[TRUST_MEMBERS_MAX + 1] = {false};
    if (m->n_nodes > ARRAY_LEN(reached) || node_id_eq(&m->founder, without))
        return false;
    reached[index_of(m, &m->founder)] = true;
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t i = 0; i < m->n_items; i++) {
            const struct item *item = &m->items[i];
            uint32_t subject = m->edges[i].subject;
            if (item->kind != ITEM_RECORD || !item->may_admit || !reached[m->edges[i].issuer] ||
                reached[subject] || m->nodes[subject].revoked ||
                node_id_eq(&item->subject, without))
                continue;
            changed = reached[subject] = true;
        }
    }
    const struct node *node = find_node(m, id);
    return node && reached[node - m->nodes];
}

static const struct item *find_record(const struct members *m, uint32_t issuer, uint32_t subject,
                                      bool may_admit)
{
    for (uint32_t i = 0; i < m->n_items; i++) {
        if (m->items[i].kind == ITEM_RECORD && m->items[i].may_admit == may_admit &&
            m->edges[i].issuer == issuer && m->edges[i].subject == subject)
            return &m->items[i];
    }
    return NULL;
}

uint32_t members_chain(const struct members *m, const struct node_id *id,
                       const struct item *ret[TRUST_CHAIN_MAX])
{
    const struct node *node = find_node(m, id);
    if (!node || node->depth >= FAR)
        return 0;
    /* Only the last link may be a worker's record. */
    bool may_admit = node->admit < FAR;
    uint32_t n = may_admit ? node->admit : node->depth;
    for (uint32_t at = n; at > 0; at--) {
        uint32_t issuer = may_admit ? node->admit_issuer : node->issuer;
        ret[at - 1] = find_record(m, issuer, (uint32_t)(node - m->nodes), may_admit);
        assert(ret[at - 1]);
        node = &m->nodes[issuer];
        may_admit = true;
    }
    return n;
}

uint32_t members_n_items(const struct members *m)
{
    return m->n_items;
}

const struct item *members_item(const struct members *m, uint32_t i)
{
    assert(i < m->n_items);
    return &m->items[i];
}

static int compare_hashes(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(struct hash256));
}

void members_digest(const struct members *m, struct hash256 *ret)
{
    struct hash256 hashes[TRUST_RECORDS_MAX + TRUST_REVOCATIONS_MAX];
    assert(m->n_items <= ARRAY_LEN(hashes));
    for (uint32_t i = 0; i < m->n_items; i++)
        hashes[i] = m->items[i].hash;
    qsort(hashes, m->n_items, sizeof *hashes, compare_hashes);
    (void)crypto_generichash(ret->bytes, sizeof ret->bytes, hashes[0].bytes,
                             m->n_items * sizeof *hashes, m->cluster.bytes,
                             sizeof m->cluster.bytes);
}
