/* Queries of agent/node: for status pages, the shell and tests. */
#include "agent/node_internal.h"

#include <stdio.h>
#include <string.h>

uint32_t node_psks(const struct node *n, struct session_psk *ret, uint32_t max)
{
    struct session_psk all[SESSION_PSKS_MAX];
    uint32_t k = trust_psks(n->trust, n->now_us, all);
    k = MIN_OF(k, max);
    memcpy(ret, all, k * sizeof all[0]);
    return k;
}

void node_tags(const struct node *n, const char *instance, uint8_t cluster_tag[NODE_TAG_MAX],
               uint32_t *n_cluster_tag, uint8_t invite_tag[NODE_TAG_MAX], uint32_t *n_invite_tag)
{
    uint8_t nonce[CLUSTER_TAG_NONCE_BYTES];
    n->options.random.fill(n->options.random.ctx, nonce, sizeof nonce);
    trust_cluster_tag(n->trust, nonce, instance, cluster_tag);
    *n_cluster_tag = CLUSTER_TAG_BYTES;
    *n_invite_tag = 0;
    uint8_t tag[TOKEN_TAG_BYTES];
    for (uint32_t i = 0; *n_invite_tag + TOKEN_TAG_BYTES <= NODE_TAG_MAX; i++) {
        if (!trust_invite_tag(n->trust, i, n->now_us, tag))
            break;
        memcpy(invite_tag + *n_invite_tag, tag, sizeof tag);
        *n_invite_tag += TOKEN_TAG_BYTES;
    }
}

bool node_path_address(const struct node *n, const struct node_id *peer, uint32_t path,
                       struct address *ret)
{
    const struct peer *p = peer_find(n, peer);
    if (!p)
        return false;
    if (path == 0)
        path = swim_best_path(n->swim, peer);
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        if (p->addresses[i].path == path || (path == 0 && i == 0)) {
            *ret = p->addresses[i].address;
            return true;
        }
    }
    return false;
}

bool node_data_address(const struct node *n, const struct node_id *peer, struct address *ret)
{
    const struct peer *p = peer_find(n, peer);
    if (!p || p->data_port == 0 || !node_path_address(n, peer, 0, ret))
        return false;
    ret->port = p->data_port;
    return true;
}

uint64_t node_session_of(const struct node *n, const struct node_id *peer)
{
    const struct peer *p = peer_find(n, peer);
    return p ? p->session : 0;
}

struct node_id node_self(const struct node *n)
{
    return n->identity.id;
}

bool node_planner(const struct node *n, struct node_id *ret, uint64_t *ret_term)
{
    return control_planner(n->control, ret, ret_term);
}

const struct control *node_control(const struct node *n)
{
    return n->control;
}

const struct trust *node_trust(const struct node *n)
{
    return n->trust;
}

const struct swim *node_swim(const struct node *n)
{
    return n->swim;
}

static void view_of_peer(const struct node *n, const struct peer *p, struct node_view *v)
{
    struct swim_member_view m;
    bool has = swim_member(n->swim, &p->id, &m);
    *v = (struct node_view){.id = p->id,
                            .member = true,
                            .has_id = true,
                            .state = swim_state_name(has ? m.state : SWIM_UNKNOWN),
                            .boot_id = has ? m.boot_id : 0,
                            .local = p->local,
                            .worker = trust_role(n->trust, &p->id) == TRUST_ROLE_WORKER,
                            .control_port = p->self.control_port,
                            .data_port = p->data_port};
    memcpy(v->name, p->name, sizeof v->name);
    memcpy(v->version, p->version, sizeof v->version);
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        struct node_path_view *path = &v->paths[v->n_paths++];
        *path = (struct node_path_view){.address = p->addresses[i].address,
                                        .bytes_per_s = p->addresses[i].bytes_per_s};
        for (uint32_t k = 0; has && k < m.n_paths; k++) {
            if (m.paths[k].id != p->addresses[i].path)
                continue;
            path->up = m.paths[k].up;
            path->rtt_us = (double)m.paths[k].rtt_p50_us;
            path->rtt_p99_us = (double)m.paths[k].rtt_p99_us;
        }
    }
}

static void view_of_found(const struct found *f, struct node_view *v)
{
    *v = (struct node_view){.state = f->is.given ? "no answer" : "discovered"};
    (void)snprintf(v->name, sizeof v->name, "%s", f->is.name[0] ? f->is.name : f->is.instance);
    for (uint32_t i = 0; i < f->is.n_addresses; i++)
        v->paths[v->n_paths++] = (struct node_path_view){.address = f->is.addresses[i]};
    if (f->is.n_addresses)
        v->control_port = f->is.addresses[0].port;
}

/* A stranger, and by its newest announcement: one that went away without a goodbye leaves its name
 * behind until that expires, and may be here again under another. */
static bool is_news(const struct node *n, const struct found *f)
{
    if (!f->used || f->is.gone || f->has_peer || f->is_self || f->ours)
        return false;
    for (uint32_t i = 0; i < f->is.n_addresses; i++) {
        const struct address *a = &f->is.addresses[i];
        if (address_is_of_member(n, a))
            return false;
        for (const struct found *g = n->found; g < n->found + NODE_FOUND_MAX; g++) {
            bool newer = g->heard_us > f->heard_us || (g->heard_us == f->heard_us && g > f);
            bool better = f->is.given != g->is.given ? f->is.given : newer;
            for (uint32_t k = 0; g->used && g != f && better && k < g->is.n_addresses; k++) {
                if (address_same_place(&g->is.addresses[k], a))
                    return false;
            }
        }
    }
    return true;
}

uint32_t node_views(const struct node *n, struct node_view *ret, uint32_t max)
{
    uint32_t k = 0;
    if (k < max) {
        struct node_view *v = &ret[k++];
        *v =
            (struct node_view){.id = n->identity.id,
                               .self = true,
                               .member = true,
                               .has_id = true,
                               .state = swim_state_name(swim_self_state(n->swim)),
                               .boot_id = n->options.boot_id,
                               .local = n->local,
                               .worker = trust_role(n->trust, &n->identity.id) == TRUST_ROLE_WORKER,
                               .control_port = n->options.control_port,
                               .data_port = n->options.data_port};
        memcpy(v->name, n->options.name, sizeof v->name);
        memcpy(v->version, n->options.version, sizeof v->version);
    }
    for (uint32_t i = 0; i < n->n_peers && k < max; i++)
        view_of_peer(n, &n->peers[i], &ret[k++]);
    for (int i = 0; i < NODE_FOUND_MAX && k < max; i++) {
        const struct found *f = &n->found[i];
        if (is_news(n, f))
            view_of_found(f, &ret[k++]);
    }
    return k;
}
