/* The addresses of a peer: which of them are known to lead to it, and which are forgotten.
 *
 * Discovery, hearsay and the memory of earlier runs name addresses; only what comes from one under
 * the seal of a session proves it. There is room for few, so proved ones stay, and of the others
 * the one that has been silent longest goes first. */
#include "agent/node_internal.h"

#include <assert.h>
#include <string.h>

bool address_same_place(const struct address *a, const struct address *b)
{
    return a->family == b->family && a->port == b->port &&
           memcmp(a->ip, b->ip, a->family == 4 ? 4 : 16) == 0;
}

void peer_paths_changed(struct node *n, struct peer *p)
{
    uint32_t paths[NODE_ADDRESSES_MAX];
    for (uint32_t i = 0; i < p->n_addresses; i++)
        paths[i] = p->addresses[i].path;
    (void)node_feed_swim(
        n, &(struct swim_event){
               .type = SWIM_EVENT_PATHS, .peer = p->id, .paths = paths, .n_paths = p->n_addresses});
}

/* Probes that came through: a path is up when one did and none has failed since. Gives the number
 * of paths that are up. */
static uint32_t note_proofs(const struct node *n, struct peer *p)
{
    struct swim_member_view v;
    uint32_t n_up = 0;
    if (!swim_member(n->swim, &p->id, &v))
        return 0;
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        for (uint32_t k = 0; k < v.n_paths; k++) {
            if (v.paths[k].id != p->addresses[i].path || !v.paths[k].up)
                continue;
            p->addresses[i].proved_us = n->now_us;
            n_up++;
        }
    }
    return n_up;
}

static uint64_t heard_us(const struct peer_address *a)
{
    return MAX_OF(a->proved_us, a->added_us);
}

/* The address that makes room for a new one: silent, and longest so; `n_addresses` when there is
 * none. Hearsay (not `first`) takes the place of none but the long dead. */
static uint32_t victim(struct node *n, struct peer *p, bool first)
{
    uint32_t at = p->n_addresses;
    (void)note_proofs(n, p);
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        const struct peer_address *a = &p->addresses[i];
        if (a->proved_us == n->now_us || (!first && n->now_us < heard_us(a) + ADDRESS_DEAD_US))
            continue;
        if (at == p->n_addresses || heard_us(a) <= heard_us(&p->addresses[at]))
            at = i;
    }
    return at;
}

static void drop_at(struct peer *p, uint32_t at)
{
    p->n_addresses--;
    memmove(&p->addresses[at], &p->addresses[at + 1],
            (p->n_addresses - at) * sizeof p->addresses[0]);
}

struct peer_address *peer_add_address(struct node *n, struct peer *p, const struct address *a,
                                      bool first)
{
    if (a->family == 0 || a->port == 0)
        return NULL;
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        if (address_eq(&p->addresses[i].address, a)) {
            if (a->interface[0])
                memcpy(p->addresses[i].address.interface, a->interface, sizeof a->interface);
            return &p->addresses[i];
        }
    }
    if (p->n_addresses == NODE_ADDRESSES_MAX) {
        uint32_t gone = victim(n, p, first);
        if (gone == p->n_addresses)
            return NULL;
        drop_at(p, gone);
    }
    uint32_t at = p->n_addresses++;
    if (first) {
        memmove(&p->addresses[1], &p->addresses[0], at * sizeof p->addresses[0]);
        at = 0;
    }
    p->addresses[at] = (struct peer_address){.address = *a,
                                             .path = ++n->next_path,
                                             .added_us = n->now_us,
                                             .measure_due_us = n->now_us + MEASURE_FIRST_US};
    peer_paths_changed(n, p);
    (void)node_effect(n, NODE_EFFECT_REMEMBER);
    return &p->addresses[at];
}

const struct address *peer_dial_address(struct node *n, struct peer *p)
{
    struct swim_member_view v;
    assert(p->n_addresses > 0);
    if (p->n_failed == 0 && swim_member(n->swim, &p->id, &v)) {
        for (uint32_t i = 0; i < p->n_addresses; i++) {
            uint32_t at = (p->next_address + i) % p->n_addresses;
            for (uint32_t k = 0; k < v.n_paths; k++) {
                if (v.paths[k].id == p->addresses[at].path && v.paths[k].up) {
                    p->next_address = at + 1;
                    return &p->addresses[at].address;
                }
            }
        }
    }
    return &p->addresses[p->next_address++ % p->n_addresses].address;
}

/* While a peer is reached, what has not led to it for long is forgotten. */
static void forget_dead(struct node *n, struct peer *p)
{
    const struct node_session *s = session_find(n, p->session);
    if (note_proofs(n, p) == 0 || !s || n->now_us < s->since_us + ADDRESS_DEAD_US)
        return;
    uint32_t before = p->n_addresses;
    for (uint32_t i = p->n_addresses; i-- > 0;) {
        if (n->now_us >= heard_us(&p->addresses[i]) + ADDRESS_DEAD_US)
            drop_at(p, i);
    }
    if (p->n_addresses == before)
        return;
    peer_paths_changed(n, p);
    (void)node_effect(n, NODE_EFFECT_REMEMBER);
}

void addresses_tick(struct node *n)
{
    if (n->now_us < n->addresses_due_us)
        return;
    n->addresses_due_us = n->now_us + ADDRESS_CHECK_US;
    for (uint32_t i = 0; i < n->n_peers; i++)
        forget_dead(n, &n->peers[i]);
}

bool address_is_of_member(const struct node *n, const struct address *a)
{
    for (uint32_t i = 0; i < n->n_peers; i++) {
        const struct peer *p = &n->peers[i];
        for (uint32_t k = 0; p->session && k < p->n_addresses; k++) {
            if (p->addresses[k].proved_us > 0 && address_same_place(&p->addresses[k].address, a))
                return true;
        }
    }
    return false;
}

/* What earlier runs remembered and this one has not proved is kept for a peer that was not reached
 * at all, and dropped for one that was. */
uint32_t node_remembered(const struct node *n, struct node_id *ret_ids, struct address *ret,
                         uint32_t max)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < n->n_peers; i++) {
        const struct peer *p = &n->peers[i];
        bool reached = false;
        for (uint32_t j = 0; j < p->n_addresses; j++)
            reached |= p->addresses[j].proved_us > 0;
        for (uint32_t j = 0; j < p->n_addresses && k < max; j++) {
            if (reached && p->addresses[j].proved_us == 0)
                continue;
            ret_ids[k] = p->id;
            ret[k++] = p->addresses[j].address;
        }
    }
    return k;
}
