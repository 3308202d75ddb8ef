/* What gossip carries for the node: its facts and its links (models: node_holdings.c); and the
 * shapes of models, which a planner asks for on the node channel. */
#include "agent/node_internal.h"

#include "discovery/mdns_txt.h"
#include "proto/node.pb-c.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

void records_set(struct node *n, uint8_t kind, const ProtobufCMessage *m)
{
    uint8_t bytes[SWIM_RECORD_BYTES_MAX];
    if (protobuf_c_message_get_packed_size(m) > sizeof bytes)
        return;
    size_t len = protobuf_c_message_pack(m, bytes);
    (void)node_feed_swim(
        n, &(struct swim_event){
               .type = SWIM_EVENT_SET_RECORD, .kind = kind, .bytes = bytes, .len = (uint32_t)len});
}

static bool is_awake(const struct node *n)
{
    uint64_t since = swim_awake_since_us(n->swim);
    bool slept = since > 0 && since != n->started_us;
    return !slept || n->now_us >= since + AWAKE_US;
}

void records_publish_facts(struct node *n)
{
    if (!n->has_local)
        return;
    Covey__Node__Facts f = COVEY__NODE__FACTS__INIT;
    const struct node_local *l = &n->local;
    f.name = n->options.name;
    f.version = n->options.version;
    f.memory_total_bytes = l->memory_total_bytes;
    f.memory_available_bytes = l->memory_available_bytes;
    f.memory_limit_bytes = l->memory_limit_bytes;
    f.budget_bytes = l->budget_bytes;
    f.cores = l->cores;
    f.threads = l->threads;
    f.stream_bytes_per_s = l->stream_bytes_per_s;
    f.macs_per_s = l->macs_per_s;
    f.on_mains = l->on_mains;
    f.wired = l->wired;
    f.up_since_ms = n->options.wall_ms;
    f.arithmetic_version = l->arithmetic_version;
    f.backend = l->backend;
    f.kernel_digest = l->kernel_digest;
    f.draining = n->stopping;
    f.awake = is_awake(n);
    f.data_port = n->options.data_port;
    f.room_bytes = l->room_bytes;
    uint8_t cluster_tag[NODE_TAG_MAX], invite_tags[NODE_TAG_MAX];
    uint32_t n_cluster_tag, n_invite_tags;
    node_tags(n, "", cluster_tag, &n_cluster_tag, invite_tags, &n_invite_tags);
    f.invite_tags = (ProtobufCBinaryData){n_invite_tags, invite_tags};
    records_set(n, RECORD_FACTS, &f.base);
    plan_view_changed(n);
}

bool records_invited_by_member(const struct node *n, const uint8_t tag[TOKEN_TAG_BYTES])
{
    bool found = false;
    for (uint32_t i = 0; !found && i < n->n_peers; i++) {
        struct swim_record_view r;
        if (!swim_record(n->swim, &n->peers[i].id, RECORD_FACTS, &r))
            continue;
        Covey__Node__Facts *m = covey__node__facts__unpack(NULL, r.len, r.bytes);
        for (size_t at = 0; m && at + TOKEN_TAG_BYTES <= m->invite_tags.len; at += TOKEN_TAG_BYTES)
            found |= memcmp(m->invite_tags.data + at, tag, TOKEN_TAG_BYTES) == 0;
        if (m)
            covey__node__facts__free_unpacked(m, NULL);
    }
    return found;
}

/* The best path of a peer: up and quickest. */
static const struct peer_address *best_path(const struct node *n, const struct peer *p,
                                            double *ret_rtt_us)
{
    struct swim_member_view v;
    if (!swim_member(n->swim, &p->id, &v))
        return NULL;
    uint32_t best = swim_best_path(n->swim, &p->id);
    *ret_rtt_us = 0;
    for (uint32_t i = 0; i < v.n_paths; i++) {
        if (v.paths[i].id == best && v.paths[i].n_samples > 0)
            *ret_rtt_us = (double)v.paths[i].rtt_p50_us;
    }
    for (uint32_t i = 0; best && i < p->n_addresses; i++) {
        if (p->addresses[i].path == best)
            return &p->addresses[i];
    }
    return NULL;
}

/* ---- addresses by hearsay ----
 * Members that joined through the same one have not met: where multicast is blocked, what the
 * others call each other by is the only way. A link-local address means nothing on another machine,
 * and a loopback one only to those that reach its teller over loopback too. */

enum { HEARSAY_BYTES_MAX = 3 + 16 };

static uint32_t pack_address(const struct address *a, uint8_t ret[HEARSAY_BYTES_MAX])
{
    uint32_t n_ip = a->family == 4 ? 4 : 16;
    ret[0] = a->family;
    ret[1] = (uint8_t)(a->port >> 8);
    ret[2] = (uint8_t)a->port;
    memcpy(ret + 3, a->ip, n_ip);
    return 3 + n_ip;
}

static bool take_address(const ProtobufCBinaryData *b, struct address *ret)
{
    if (b->len != 3 + 4 && b->len != 3 + 16)
        return false;
    *ret = (struct address){.family = b->data[0], .port = (uint16_t)(b->data[1] << 8 | b->data[2])};
    memcpy(ret->ip, b->data + 3, b->len - 3);
    return ret->port != 0 && ret->family == (b->len == 3 + 4 ? 4 : 6);
}

static uint32_t told_address(const struct peer *p, uint8_t ret[HEARSAY_BYTES_MAX])
{
    const struct peer_address *best = NULL;
    for (uint32_t i = 0; p->session && i < p->n_addresses; i++) {
        const struct peer_address *a = &p->addresses[i];
        if (!address_is_link_local(&a->address) && (!best || a->proved_us > best->proved_us))
            best = a;
    }
    return best ? pack_address(&best->address, ret) : 0;
}

static bool reached_by_loopback(const struct peer *p)
{
    for (uint32_t i = 0; p->session && i < p->n_addresses; i++) {
        if (address_is_loopback(&p->addresses[i].address))
            return true;
    }
    return false;
}

static void hear_address(struct node *n, struct peer *about, const struct peer *teller,
                         const Covey__Node__Link *l)
{
    struct address a;
    if (!l->up || about->session || !take_address(&l->address, &a) || address_is_link_local(&a))
        return;
    if (address_is_loopback(&a) && !reached_by_loopback(teller))
        return;
    (void)peer_add_address(n, about, &a, false);
}

/* Addresses of `only`, or of everybody when NULL, from the links that `teller` has told. */
static void hear_from(struct node *n, const struct peer *teller, const struct peer *only)
{
    struct swim_record_view r;
    if (!swim_record(n->swim, &teller->id, RECORD_LINKS, &r))
        return;
    Covey__Node__Links *m = covey__node__links__unpack(NULL, r.len, r.bytes);
    for (size_t i = 0; m && i < m->n_links; i++) {
        struct node_id id;
        if (m->links[i]->peer.len != sizeof id.bytes)
            continue;
        memcpy(id.bytes, m->links[i]->peer.data, sizeof id.bytes);
        struct peer *about = peer_find(n, &id);
        if (about && about != teller && (!only || only == about))
            hear_address(n, about, teller, m->links[i]);
    }
    if (m)
        covey__node__links__free_unpacked(m, NULL);
}

void records_hear_addresses(struct node *n, const struct peer *about)
{
    for (uint32_t i = 0; i < n->n_peers; i++)
        hear_from(n, &n->peers[i], about);
}

void records_publish_links(struct node *n)
{
    Covey__Node__Link links[PEERS_MAX], *pointers[PEERS_MAX];
    uint8_t addresses[PEERS_MAX][HEARSAY_BYTES_MAX];
    Covey__Node__Links m = COVEY__NODE__LINKS__INIT;
    for (uint32_t i = 0; i < n->n_peers; i++) {
        struct peer *p = &n->peers[i];
        struct swim_member_view v;
        double rtt_us = 0;
        const struct peer_address *a = best_path(n, p, &rtt_us);
        links[m.n_links] = (Covey__Node__Link)COVEY__NODE__LINK__INIT;
        Covey__Node__Link *l = &links[m.n_links];
        l->peer.data = p->id.bytes;
        l->peer.len = sizeof p->id.bytes;
        l->up = p->session != 0 && swim_member(n->swim, &p->id, &v) && v.state == SWIM_ALIVE;
        l->rtt_us = rtt_us;
        l->bytes_per_s = a ? a->bytes_per_s : 0;
        l->address.data = addresses[i];
        l->address.len = told_address(p, addresses[i]);
        pointers[m.n_links++] = l;
    }
    m.links = pointers;
    records_set(n, RECORD_LINKS, &m.base);
    n->links_due_us = UINT64_MAX;
    plan_view_changed(n);
}

static void take_facts(struct peer *p, const uint8_t *bytes, uint32_t len)
{
    Covey__Node__Facts *f = covey__node__facts__unpack(NULL, len, bytes);
    if (!f)
        return;
    bool shows = mdns_text_ok(f->name, strlen(f->name));
    (void)snprintf(p->name, sizeof p->name, "%.63s", shows ? f->name : "?");
    (void)snprintf(p->version, sizeof p->version, "%.31s", f->version);
    p->local = (struct node_local){.memory_total_bytes = f->memory_total_bytes,
                                   .memory_available_bytes = f->memory_available_bytes,
                                   .memory_limit_bytes = f->memory_limit_bytes,
                                   .budget_bytes = f->budget_bytes,
                                   .cores = f->cores,
                                   .threads = f->threads,
                                   .stream_bytes_per_s = f->stream_bytes_per_s,
                                   .macs_per_s = f->macs_per_s,
                                   .on_mains = f->on_mains,
                                   .wired = f->wired,
                                   .arithmetic_version = f->arithmetic_version,
                                   .backend = (uint8_t)f->backend,
                                   .kernel_digest = f->kernel_digest,
                                   .room_bytes = f->room_bytes};
    p->draining = f->draining;
    p->awake = f->awake;
    p->up_since_ms = f->up_since_ms;
    if (f->data_port > 0 && f->data_port < 65536)
        p->data_port = (uint16_t)f->data_port;
    p->has_facts = true;
    covey__node__facts__free_unpacked(f, NULL);
}

void records_changed(struct node *n, const struct node_id *owner, uint8_t kind)
{
    struct peer *p = peer_find(n, owner);
    struct swim_record_view r;
    if (!p || !swim_record(n->swim, owner, kind, &r))
        return;
    if (kind == RECORD_FACTS)
        take_facts(p, r.bytes, r.len);
    if (kind == RECORD_LINKS)
        hear_from(n, p, NULL);
    if (kind == RECORD_FACTS || kind == RECORD_LINKS)
        plan_view_changed(n);
}

/* ---- shapes ---- */

static enum err send_node_message(struct node *n, const struct node_id *to,
                                  const Covey__Node__NodeMessage *m)
{
    uint8_t bytes[8192];
    if (covey__node__node_message__get_packed_size(m) > sizeof bytes)
        return ERR_LIMIT;
    size_t len = covey__node__node_message__pack(m, bytes);
    return node_send(n, to, CHANNEL_NODE, bytes, (uint32_t)len);
}

enum err records_request_link(struct node *n, const struct node_id *to)
{
    Covey__Node__LinkRequest r = COVEY__NODE__LINK_REQUEST__INIT;
    Covey__Node__NodeMessage m = COVEY__NODE__NODE_MESSAGE__INIT;
    m.body_case = COVEY__NODE__NODE_MESSAGE__BODY_LINK_REQUEST;
    m.link_request = &r;
    return send_node_message(n, to, &m);
}

const struct model_shape *node_shape(const struct node *n, const struct hash256 *model)
{
    for (uint32_t i = 0; i < n->n_models; i++) {
        if (hash256_eq(&n->models[i].shape.model, model))
            return &n->models[i].shape;
    }
    for (uint32_t i = 0; i < n->n_shapes; i++) {
        if (hash256_eq(&n->shapes[i].model, model))
            return &n->shapes[i];
    }
    return NULL;
}

static uint32_t pack_layers(const struct model_shape *s, Covey__Node__LayerRun *runs,
                            Covey__Node__LayerRun **pointers)
{
    uint32_t n_runs = 0;
    for (uint32_t i = 0; i < s->n_layers; i++) {
        if (n_runs > 0 && runs[n_runs - 1].bytes == s->layer_bytes[i]) {
            runs[n_runs - 1].count++;
            continue;
        }
        runs[n_runs] = (Covey__Node__LayerRun)COVEY__NODE__LAYER_RUN__INIT;
        runs[n_runs].count = 1;
        runs[n_runs].bytes = s->layer_bytes[i];
        pointers[n_runs] = &runs[n_runs];
        n_runs++;
    }
    return n_runs;
}

static enum err send_shape(struct node *n, const struct node_id *to, const struct model_shape *s)
{
    Covey__Node__LayerRun runs[MODEL_LAYERS_MAX], *pointers[MODEL_LAYERS_MAX];
    Covey__Node__Shape p = COVEY__NODE__SHAPE__INIT;
    struct model_shape copy = *s;
    p.model.data = copy.model.bytes;
    p.model.len = sizeof copy.model.bytes;
    p.name = copy.name;
    p.model_layers = s->n_layers;
    p.context_max = s->context_max;
    p.hidden = s->hidden;
    p.layer_runs = pointers;
    p.embedding_bytes = s->embedding_bytes;
    p.output_bytes = s->output_bytes;
    p.output_is_embedding = s->output_is_embedding;
    p.kv_bytes_per_position = s->kv_bytes_per_position;
    p.layer_macs = s->layer_macs;
    p.output_macs = s->output_macs;
    p.activation_bytes_per_row = s->activation_bytes_per_row;
    p.n_layer_runs = pack_layers(s, runs, pointers);
    Covey__Node__NodeMessage m = COVEY__NODE__NODE_MESSAGE__INIT;
    m.body_case = COVEY__NODE__NODE_MESSAGE__BODY_SHAPE;
    m.shape = &p;
    return send_node_message(n, to, &m);
}

/* Every number of a peer's shape is checked before a planner divides by it. */
static bool take_shape(const Covey__Node__Shape *p, struct model_shape *s)
{
    *s = (struct model_shape){.n_layers = p->model_layers,
                              .context_max = p->context_max,
                              .hidden = p->hidden,
                              .embedding_bytes = p->embedding_bytes,
                              .output_bytes = p->output_bytes,
                              .output_is_embedding = p->output_is_embedding,
                              .kv_bytes_per_position = p->kv_bytes_per_position,
                              .layer_macs = p->layer_macs,
                              .output_macs = p->output_macs,
                              .activation_bytes_per_row = p->activation_bytes_per_row};
    const uint64_t most = (uint64_t)1 << 50;
    if (p->model.len != sizeof s->model.bytes || strlen(p->name) >= sizeof s->name ||
        s->n_layers == 0 || s->n_layers > MODEL_LAYERS_MAX || s->context_max == 0 ||
        s->hidden == 0 || s->hidden > 1u << 20 || s->embedding_bytes > most ||
        s->output_bytes > most || s->kv_bytes_per_position > most >> 20 || s->layer_macs > most ||
        s->output_macs > most || s->activation_bytes_per_row > most >> 20)
        return false;
    memcpy(s->model.bytes, p->model.data, sizeof s->model.bytes);
    (void)snprintf(s->name, sizeof s->name, "%s", p->name);
    uint32_t at = 0;
    for (size_t i = 0; i < p->n_layer_runs; i++) {
        const Covey__Node__LayerRun *r = p->layer_runs[i];
        if (r->count > s->n_layers - at || r->bytes > most)
            return false;
        for (uint32_t k = 0; k < r->count; k++)
            s->layer_bytes[at++] = r->bytes;
    }
    return at == s->n_layers;
}

static void shape_arrived(struct node *n, const struct model_shape *s)
{
    bool asked = false;
    for (int i = 0; i < SHAPE_REQUESTS_MAX; i++) {
        struct shape_request *r = &n->shape_requests[i];
        if (r->used && hash256_eq(&r->model, &s->model)) {
            r->used = false;
            asked = true;
        }
    }
    if (!asked || node_shape(n, &s->model))
        return;
    if (n->n_shapes == NODE_MODELS_MAX) { /* the oldest goes; it can be asked for again */
        memmove(n->shapes, n->shapes + 1, (NODE_MODELS_MAX - 1) * sizeof n->shapes[0]);
        n->n_shapes--;
    }
    n->shapes[n->n_shapes++] = *s;
    plan_send_shape(n, s);
}

enum err records_message(struct node *n, struct peer *p, const uint8_t *bytes, uint32_t len)
{
    Covey__Node__NodeMessage *m = covey__node__node_message__unpack(NULL, len, bytes);
    if (!m)
        return ERR_CORRUPT;
    enum err e = ERR_OK;
    struct hash256 id;
    struct model_shape shape;
    switch (m->body_case) {
    case COVEY__NODE__NODE_MESSAGE__BODY_SHAPE_REQUEST:
        if (m->shape_request->model.len != sizeof id.bytes) {
            e = ERR_CORRUPT;
            break;
        }
        memcpy(id.bytes, m->shape_request->model.data, sizeof id.bytes);
        const struct model_shape *known = node_shape(n, &id);
        if (known)
            e = send_shape(n, &p->id, known);
        break;
    case COVEY__NODE__NODE_MESSAGE__BODY_SHAPE:
        if (take_shape(m->shape, &shape))
            shape_arrived(n, &shape);
        else
            e = ERR_CORRUPT;
        break;
    case COVEY__NODE__NODE_MESSAGE__BODY_LINK_REQUEST:
        sessions_link_requested(n, p);
        break;
    default:
        break; /* of a later version */
    }
    covey__node__node_message__free_unpacked(m, NULL);
    return e;
}

static void ask_for_shape(struct node *n, struct shape_request *r)
{
    struct node_id holders[PEERS_MAX];
    uint32_t n_holders = node_holders(n, &r->model, holders, PEERS_MAX);
    Covey__Node__ShapeRequest q = COVEY__NODE__SHAPE_REQUEST__INIT;
    Covey__Node__NodeMessage m = COVEY__NODE__NODE_MESSAGE__INIT;
    q.model.data = r->model.bytes;
    q.model.len = sizeof r->model.bytes;
    m.body_case = COVEY__NODE__NODE_MESSAGE__BODY_SHAPE_REQUEST;
    m.shape_request = &q;
    for (uint32_t i = 0; i < n_holders && i < 3; i++)
        (void)send_node_message(n, &holders[i], &m);
    r->due_us = n->now_us + SHAPE_RETRY_US;
}

void records_want_shape(struct node *n, const struct hash256 *model)
{
    if (node_shape(n, model))
        return;
    struct shape_request *free_slot = NULL;
    for (int i = 0; i < SHAPE_REQUESTS_MAX; i++) {
        struct shape_request *r = &n->shape_requests[i];
        if (r->used && hash256_eq(&r->model, model))
            return;
        if (!r->used)
            free_slot = r;
    }
    if (!free_slot)
        return;
    *free_slot = (struct shape_request){.model = *model, .used = true, .due_us = n->now_us};
}

void node_want_shape(struct node *n, const struct hash256 *model)
{
    records_want_shape(n, model);
}

void records_tick(struct node *n)
{
    for (int i = 0; i < SHAPE_REQUESTS_MAX; i++) {
        struct shape_request *r = &n->shape_requests[i];
        if (r->used && n->now_us >= r->due_us)
            ask_for_shape(n, r);
    }
    if (n->now_us >= n->links_due_us)
        records_publish_links(n);
    if (n->asleep_until_us && n->now_us >= n->asleep_until_us) {
        n->asleep_until_us = 0;
        records_publish_facts(n);
    }
}

uint64_t records_next_due(const struct node *n)
{
    uint64_t due = n->links_due_us;
    for (int i = 0; i < SHAPE_REQUESTS_MAX; i++) {
        if (n->shape_requests[i].used)
            due = MIN_OF(due, n->shape_requests[i].due_us);
    }
    if (n->asleep_until_us)
        due = MIN_OF(due, n->asleep_until_us);
    return due;
}
