/* Who holds which bytes of which model: what this node says of itself (MODELS records), what others
 * say, and what both mean for second copies (agent/spare.h). */
#include "agent/node_internal.h"

#include "proto/node.pb-c.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COMPUTES_US = 1500 * 1000 }; /* so long after its last step a member is taken to compute */

/* ---- what we say ---- */

static void pack_runs(const struct node_model *m, uint32_t n_runs, uint32_t *ret,
                      Covey__Node__HeldModel *held)
{
    if (m->present_bytes == m->n_bytes)
        return; /* says it all */
    n_runs = MIN_OF(n_runs, MIN_OF(m->n_runs, (uint32_t)SPARE_RUNS_MAX));
    for (size_t i = 0; i < n_runs; i++) {
        ret[2 * i] = m->runs[i].first;
        ret[2 * i + 1] = m->runs[i].n;
    }
    held->runs = ret;
    held->n_runs = (size_t)2 * n_runs;
}

/* Runs that do not fit the record are not told: nobody then counts on these blocks. */
void records_publish_models(struct node *n)
{
    Covey__Node__HeldModel held[NODE_MODELS_MAX], *pointers[NODE_MODELS_MAX];
    uint32_t runs[NODE_MODELS_MAX][2 * SPARE_RUNS_MAX];
    Covey__Node__Models m = COVEY__NODE__MODELS__INIT;
    m.n_models = n->n_models;
    m.models = pointers;
    for (uint32_t n_runs = SPARE_RUNS_MAX;; n_runs /= 2) {
        for (uint32_t i = 0; i < n->n_models; i++) {
            held[i] = (Covey__Node__HeldModel)COVEY__NODE__HELD_MODEL__INIT;
            held[i].model.data = n->models[i].shape.model.bytes;
            held[i].model.len = sizeof n->models[i].shape.model.bytes;
            held[i].name = n->models[i].shape.name;
            held[i].bytes = n->models[i].n_bytes;
            held[i].present_bytes = n->models[i].present_bytes;
            pack_runs(&n->models[i], n_runs, runs[i], &held[i]);
            pointers[i] = &held[i];
        }
        if (n_runs == 0 ||
            protobuf_c_message_get_packed_size(&m.base) <= (size_t)SWIM_RECORD_BYTES_MAX)
            break;
    }
    records_set(n, RECORD_MODELS, &m.base);
}

/* ---- what others say ---- */

static Covey__Node__Models *models_of(const struct node *n, const struct node_id *id)
{
    struct swim_record_view r;
    if (!swim_record(n->swim, id, RECORD_MODELS, &r))
        return NULL;
    return covey__node__models__unpack(NULL, r.len, r.bytes);
}

static void add_held(struct node_held *ret, uint32_t max, uint32_t *n_ret, const struct hash256 *id,
                     const char *name, uint64_t bytes, uint64_t present,
                     const struct node_id *holder)
{
    for (uint32_t i = 0; i < *n_ret; i++) {
        if (!hash256_eq(&ret[i].model, id))
            continue;
        if (present > ret[i].present_bytes) {
            ret[i].present_bytes = present;
            ret[i].holder = *holder;
        }
        return;
    }
    if (*n_ret == max)
        return;
    struct node_held *h = &ret[(*n_ret)++];
    *h = (struct node_held){
        .model = *id, .n_bytes = bytes, .present_bytes = present, .holder = *holder};
    (void)snprintf(h->name, sizeof h->name, "%.95s", name);
}

static bool is_live(const struct node *n, const struct peer *p)
{
    struct swim_member_view v;
    return p->session != 0 && swim_member(n->swim, &p->id, &v) && v.state == SWIM_ALIVE;
}

uint32_t node_held(const struct node *n, struct node_held *ret, uint32_t max)
{
    uint32_t n_ret = 0;
    for (uint32_t i = 0; i < n->n_models; i++)
        add_held(ret, max, &n_ret, &n->models[i].shape.model, n->models[i].shape.name,
                 n->models[i].n_bytes, n->models[i].present_bytes, &n->identity.id);
    for (uint32_t i = 0; i < n->n_peers; i++) {
        if (!is_live(n, &n->peers[i]))
            continue;
        Covey__Node__Models *m = models_of(n, &n->peers[i].id);
        for (size_t k = 0; m && k < m->n_models; k++) {
            struct hash256 id;
            if (m->models[k]->model.len != sizeof id.bytes)
                continue;
            memcpy(id.bytes, m->models[k]->model.data, sizeof id.bytes);
            add_held(ret, max, &n_ret, &id, m->models[k]->name, m->models[k]->bytes,
                     m->models[k]->present_bytes, &n->peers[i].id);
        }
        if (m)
            covey__node__models__free_unpacked(m, NULL);
    }
    return n_ret;
}

static uint64_t present_at(const struct node *n, const struct peer *p, const struct hash256 *model)
{
    Covey__Node__Models *m = models_of(n, &p->id);
    uint64_t present = 0;
    for (size_t k = 0; m && k < m->n_models; k++) {
        if (m->models[k]->model.len == sizeof model->bytes &&
            memcmp(m->models[k]->model.data, model->bytes, sizeof model->bytes) == 0)
            present = m->models[k]->present_bytes;
    }
    if (m)
        covey__node__models__free_unpacked(m, NULL);
    return present;
}

uint32_t node_holders(const struct node *n, const struct hash256 *model, struct node_id *ret,
                      uint32_t max)
{
    uint64_t amounts[PEERS_MAX];
    uint32_t n_ret = 0;
    for (uint32_t i = 0; i < n->n_peers; i++) {
        const struct peer *p = &n->peers[i];
        uint64_t amount = is_live(n, p) ? present_at(n, p, model) : 0;
        if (amount == 0)
            continue;
        uint32_t at = n_ret;
        while (at > 0 && amounts[at - 1] < amount)
            at--;
        if (at >= max)
            continue;
        uint32_t last = n_ret < max ? n_ret++ : max - 1;
        for (uint32_t k = last; k > at; k--) {
            ret[k] = ret[k - 1];
            amounts[k] = amounts[k - 1];
        }
        ret[at] = p->id;
        amounts[at] = amount;
    }
    return n_ret;
}

/* ---- second copies ---- */

static bool is_wanted_id(const struct spare_model *m, const ProtobufCBinaryData *id)
{
    return id->len == sizeof m->id.bytes && memcmp(m->id.bytes, id->data, id->len) == 0;
}

static void hold(struct spare_model *m, uint32_t member, uint64_t n_bytes, uint64_t present_bytes,
                 const uint32_t *runs, size_t n_words)
{
    struct spare_holding *h = &m->held[member];
    if (m->n_bytes == 0)
        m->n_bytes = MIN_OF(n_bytes, (uint64_t)SPARE_BLOCKS_MAX * SPARE_BLOCK_BYTES);
    uint64_t n_blocks = (m->n_bytes + SPARE_BLOCK_BYTES - 1) / SPARE_BLOCK_BYTES, at = 0;
    h->n_runs = 0;
    if (n_bytes != m->n_bytes || n_blocks == 0)
        return; /* it speaks of something else */
    if (present_bytes == n_bytes) {
        h->runs[h->n_runs++] = (struct spare_run){0, (uint32_t)n_blocks};
        return;
    }
    for (size_t i = 0; i + 1 < n_words && h->n_runs < SPARE_RUNS_MAX; i += 2) {
        uint64_t end = (uint64_t)runs[i] + runs[i + 1];
        if (runs[i] < at || runs[i + 1] == 0 || end > n_blocks)
            return;
        h->runs[h->n_runs++] = (struct spare_run){runs[i], runs[i + 1]};
        at = end;
    }
}

static void add_peer(const struct node *n, const struct peer *p, struct spare_view *v)
{
    struct swim_member_view s;
    uint32_t at = v->n_members++;
    bool computes = swim_member(n->swim, &p->id, &s) && s.progress_at_us > 0 &&
                    n->now_us < s.progress_at_us + COMPUTES_US;
    bool takes = p->has_facts && p->awake && !p->draining;
    v->members[at] = (struct spare_member){
        .id = p->id, .room_bytes = takes ? p->local.room_bytes : 0, .computes = computes};
    Covey__Node__Models *m = models_of(n, &p->id);
    for (size_t k = 0; m && k < m->n_models; k++) {
        const Covey__Node__HeldModel *h = m->models[k];
        for (uint32_t i = 0; i < v->n_models; i++) {
            if (is_wanted_id(&v->models[i], &h->model))
                hold(&v->models[i], at, h->bytes, h->present_bytes, h->runs, h->n_runs);
        }
    }
    if (m)
        covey__node__models__free_unpacked(m, NULL);
}

static void add_self(const struct node *n, struct spare_view *v)
{
    bool takes = !n->stopping && !n->asleep_until_us;
    v->self = v->n_members++;
    v->members[v->self] =
        (struct spare_member){.id = n->identity.id, .room_bytes = takes ? n->local.room_bytes : 0};
    for (uint32_t k = 0; k < n->n_models; k++) {
        const struct node_model *m = &n->models[k];
        uint32_t words[2 * SPARE_RUNS_MAX], n_words = 0;
        for (uint32_t i = 0; i < m->n_runs && i < SPARE_RUNS_MAX; i++) {
            words[n_words++] = m->runs[i].first;
            words[n_words++] = m->runs[i].n;
        }
        for (uint32_t i = 0; i < v->n_models; i++) {
            if (hash256_eq(&v->models[i].id, &m->shape.model))
                hold(&v->models[i], v->self, m->n_bytes, m->present_bytes, words, n_words);
        }
    }
}

void node_spare_view(const struct node *n, struct spare_view *ret)
{
    memset(ret, 0, sizeof *ret);
    uint32_t n_wanted = control_n_models(n->control);
    for (uint32_t i = 0; i < n_wanted && ret->n_models < SPARE_MODELS_MAX; i++) {
        struct control_model m;
        control_model_at(n->control, i, &m);
        ret->models[ret->n_models++].id = m.model;
    }
    add_self(n, ret);
    for (uint32_t i = 0; i < n->n_peers && ret->n_members < SPARE_MEMBERS_MAX; i++) {
        if (is_live(n, &n->peers[i]))
            add_peer(n, &n->peers[i], ret);
    }
}
