/* Addresses, dialling, and which session of a pair is kept.
 *
 * Both ends of a pair may dial at once. Of two sessions that came up within SIMULTANEOUS_US of each
 * other the one that the smaller key dialled is kept, by both; otherwise the newer one is (the
 * older is a corpse that we have not noticed). */
#include "agent/node_internal.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

struct node_session *session_find(struct node *n, uint64_t id)
{
    for (int i = 0; id && i < NODE_SESSIONS_MAX; i++) {
        if (n->sessions[i].id == id)
            return &n->sessions[i];
    }
    return NULL;
}

static struct node_session *session_new_slot(struct node *n)
{
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        if (n->sessions[i].id == 0) {
            n->sessions[i] = (struct node_session){.since_us = n->now_us};
            return &n->sessions[i];
        }
    }
    return NULL;
}

struct peer *peer_find(const struct node *n, const struct node_id *id)
{
    for (uint32_t i = 0; i < n->n_peers; i++) {
        if (node_id_eq(&n->peers[i].id, id))
            return (struct peer *)&n->peers[i];
    }
    return NULL;
}

static struct found *found_find(struct node *n, const char *instance)
{
    for (int i = 0; instance[0] && i < NODE_FOUND_MAX; i++) {
        if (n->found[i].used && strcmp(n->found[i].is.instance, instance) == 0)
            return &n->found[i];
    }
    return NULL;
}

static void peer_remove(struct node *n, uint32_t i)
{
    struct peer *p = &n->peers[i];
    struct node_id id = p->id;
    if (p->session)
        sessions_close(n, p->session);
    (void)node_feed_swim(n, &(struct swim_event){.type = SWIM_EVENT_MEMBER_REMOVE, .peer = id});
    struct node_effect *e = node_effect(n, NODE_EFFECT_UNLINK);
    if (e)
        e->peer = id;
    n->peers[i] = n->peers[--n->n_peers];
}

void peer_sync_with_trust(struct node *n)
{
    for (uint32_t i = 0; i < n->n_peers;) {
        if (trust_is_member(n->trust, &n->peers[i].id))
            i++;
        else
            peer_remove(n, i);
    }
    struct trust_member m;
    for (uint32_t i = 0; trust_member_at(n->trust, i, &m); i++) {
        if (m.role != TRUST_ROLE_MEMBER && m.role != TRUST_ROLE_WORKER)
            continue;
        if (node_id_eq(&m.id, &n->identity.id) || peer_find(n, &m.id))
            continue;
        if (n->n_peers == PEERS_MAX) {
            node_note(n, "limit", "more than %d members: the others are not used", PEERS_MAX);
            break;
        }
        struct peer *p = &n->peers[n->n_peers++];
        *p = (struct peer){.id = m.id,
                           .dial_due_us = n->now_us,
                           .dial_wait_us = DIAL_FIRST_US,
                           .lived_us = STABLE_US};
        (void)node_feed_swim(n, &(struct swim_event){.type = SWIM_EVENT_MEMBER_ADD, .peer = m.id});
        for (uint32_t k = 0; k < n->options.n_remembered; k++) {
            if (node_id_eq(&n->options.remembered_ids[k], &m.id))
                (void)peer_add_address(n, p, &n->options.remembered[k], false);
        }
        records_hear_addresses(n, p);
    }
    plan_view_changed(n);
}

static void merge_found(struct node *n, struct found *f, struct peer *p)
{
    for (uint32_t i = 0; i < f->is.n_addresses; i++)
        (void)peer_add_address(n, p, &f->is.addresses[i], true);
    if (!p->name[0])
        memcpy(p->name, f->is.name, sizeof p->name);
}

/* The found entry is this peer: it was dialled by its name, or has an address of it. */
static bool found_is_peer(const struct found *f, const struct peer *p, const char *instance)
{
    if (instance[0] && strcmp(instance, f->is.instance) == 0)
        return true;
    for (uint32_t i = 0; i < f->is.n_addresses; i++) {
        for (uint32_t k = 0; k < p->n_addresses; k++) {
            if (address_same_place(&f->is.addresses[i], &p->addresses[k].address))
                return true;
        }
    }
    return false;
}

static void claim(struct node *n, struct found *f, struct peer *p)
{
    f->has_peer = true;
    f->peer = p->id;
    merge_found(n, f, p);
}

static void claim_found(struct node *n, struct peer *p, const struct node_session *s)
{
    for (int i = 0; i < NODE_FOUND_MAX; i++) {
        struct found *f = &n->found[i];
        if (f->used && !f->is.gone && found_is_peer(f, p, s->instance))
            claim(n, f, p);
    }
}

/* One of ours, with which there is a session already: no reason to dial it again. */
static void claim_connected(struct node *n, struct found *f)
{
    for (uint32_t i = 0; f->ours && !f->has_peer && i < n->n_peers; i++) {
        if (n->peers[i].session && found_is_peer(f, &n->peers[i], ""))
            claim(n, f, &n->peers[i]);
    }
}

/* Of several addresses one has led to the issuer: its token is to be shown once. */
static void end_other_join_dials(struct node *n, const struct node_session *s)
{
    struct found *f = found_find(n, s->instance);
    if (f)
        f->dialling = s->id;
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        const struct node_session *other = &n->sessions[i];
        if (other->id && other->state == SESSION_DIALLING && other->purpose == PURPOSE_JOIN &&
            strcmp(other->instance, s->instance) == 0)
            sessions_close(n, other->id);
    }
}

enum err sessions_ready(struct node *n, const struct node_event *e)
{
    struct node_session *s = session_find(n, e->session);
    if (!s) {
        if (!e->inbound)
            return ERR_NOT_FOUND;
        s = session_new_slot(n);
        if (!s) {
            struct node_effect *close_it = node_effect(n, NODE_EFFECT_CLOSE);
            if (close_it)
                close_it->session = e->session;
            return ERR_BUSY;
        }
        s->id = e->session;
        s->inbound = true;
        s->address = e->address;
    }
    bool joins = s->state == SESSION_DIALLING && s->purpose == PURPOSE_JOIN;
    s->state = SESSION_OPEN;
    if (joins)
        end_other_join_dials(n, s);
    struct trust_event up = {.kind = TRUST_SESSION_UP,
                             .now_us = n->now_us,
                             .session = e->session,
                             .psk_tag = e->psk_tag};
    memcpy(up.peer_static, e->peer_static, sizeof up.peer_static);
    return node_feed_trust(n, &up);
}

static void tell_session(struct node *n, const struct node_id *id, enum swim_session what)
{
    (void)node_feed_swim(
        n, &(struct swim_event){.type = SWIM_EVENT_SESSION, .peer = *id, .session = what});
}

/* True when the session `new` is to be kept, `old` to be closed. */
static bool prefer_new(const struct node *n, const struct node_session *old,
                       const struct node_session *new, const struct node_id *peer)
{
    if (old->boot_id != new->boot_id || n->now_us - old->since_us > SIMULTANEOUS_US)
        return true;
    if (old->inbound == new->inbound)
        return true;
    bool self_is_smaller = node_id_cmp(&n->identity.id, peer) < 0;
    return new->inbound ? !self_is_smaller : self_is_smaller;
}

static void adopt(struct node *n, struct peer *p, struct node_session *s)
{
    p->session = s->id;
    p->dialling = 0;
    n->links_due_us = n->now_us; /* what was said while there was no session is over */
    p->n_failed = p->n_failed_refused = p->n_dropped = p->n_rounds = 0;
    p->dialled_us = 0;
    struct node_effect *e = node_effect(n, NODE_EFFECT_PEER);
    if (e) {
        e->session = s->id;
        e->peer = p->id;
    }
}

void sessions_authenticated(struct node *n, uint64_t session, const struct trust_peer *who)
{
    struct node_session *s = session_find(n, session);
    if (!s)
        return;
    peer_sync_with_trust(n);
    struct peer *p = peer_find(n, &who->id);
    if (!p) { /* a member beyond our table */
        sessions_close(n, session);
        return;
    }
    s->state = SESSION_AUTHENTICATED;
    s->since_us = n->now_us;
    s->peer = who->id;
    s->boot_id = who->self.boot_id;
    p->self = who->self;
    p->introduced = true;
    (void)snprintf(p->name, sizeof p->name, "%s", who->self.name);
    (void)snprintf(p->version, sizeof p->version, "%s", who->self.version);
    p->data_port = who->self.data_port;
    struct node_session *old = session_find(n, p->session);
    if (old && old != s && !prefer_new(n, old, s, &p->id)) {
        sessions_close(n, session);
        return;
    }
    uint64_t corpse = old && old != s ? old->id : 0;
    adopt(n, p, s);
    if (corpse)
        sessions_close(n, corpse);
    struct address at = s->address;
    at.port = s->inbound ? who->self.control_port : at.port;
    struct peer_address *proved = peer_add_address(n, p, &at, true);
    if (proved) {
        proved->proved_us = n->now_us;
        p->next_address = (uint32_t)(proved - p->addresses); /* tried first next time */
    }
    claim_found(n, p, s);
    if (!corpse) {
        tell_session(n, &p->id, SWIM_SESSION_UP);
        (void)node_feed_control(n,
                                &(struct control_event){.kind = CONTROL_SESSION_UP, .from = p->id});
        node_note(n, "session", "connected to %s", p->name);
    }
    plan_view_changed(n);
}

/* A dial for a member came to nothing: after a round over all addresses gossip is told. */
static void dial_failed(struct node *n, struct peer *p, enum node_down how)
{
    p->dialling = 0;
    p->n_failed++;
    p->n_dropped += how == NODE_DOWN_DENIED;
    if (how == NODE_DOWN_REFUSED)
        p->n_failed_refused++;
    bool round_over = p->n_failed >= p->n_addresses;
    p->dial_due_us = n->now_us + (round_over ? p->dial_wait_us : 0);
    if (!round_over)
        return;
    bool refused = p->n_failed_refused == p->n_failed;
    if (!p->session && (refused || n->now_us >= p->dialled_us + DIAL_SILENT_US)) {
        tell_session(n, &p->id, refused ? SWIM_SESSION_REFUSED : SWIM_SESSION_TIMED_OUT);
        p->dialled_us = 0;
    }
    p->n_rounds++;
    p->dial_wait_us = MIN_OF(p->dial_wait_us * 2, (uint64_t)DIAL_MEMBER_MAX_US);
    p->dial_due_us += rng_below(&n->rng, p->dial_wait_us / 4 + 1);
    p->n_failed = p->n_failed_refused = 0;
}

/* Is another session on its way that may be this peer's? One that replaces the one that closed may
 * not have said its name yet, and to dial now would replace it in turn, and so on for ever. */
static bool may_be_coming(const struct node *n, const struct peer *p)
{
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        const struct node_session *s = &n->sessions[i];
        bool new =
            s->id && s->state != SESSION_AUTHENTICATED && n->now_us < s->since_us + SIMULTANEOUS_US;
        if (new && (node_id_is_zero(&s->peer) || node_id_eq(&s->peer, &p->id)))
            return true;
    }
    return false;
}

static void note_join_dial(struct found *f, const struct node_session *was, enum node_down how)
{
    bool denied = how == NODE_DOWN_DENIED;
    f->n_join_denied += denied;
    f->n_join_failed += !denied;
    if (denied)
        f->join_answers |= 1u << was->nth;
}

void sessions_down(struct node *n, uint64_t session, enum node_down how)
{
    struct node_session *s = session_find(n, session);
    if (!s)
        return;
    struct node_session was = *s;
    *s = (struct node_session){0};
    if (was.state != SESSION_DIALLING)
        (void)node_feed_trust(n, &(struct trust_event){.kind = TRUST_SESSION_DOWN,
                                                       .now_us = n->now_us,
                                                       .session = session});
    struct found *f = found_find(n, was.instance);
    if (f && was.purpose == PURPOSE_JOIN && was.state == SESSION_DIALLING)
        note_join_dial(f, &was, how);
    if (f && f->dialling == session) {
        uint64_t most = n->join_call ? DIAL_JOIN_US : DIAL_STRANGER_MAX_US;
        most = f->is_clone ? DIAL_CLONE_US : most;
        f->is_clone = false;
        f->dialling = 0;
        f->n_dropped += how == NODE_DOWN_DENIED;
        bool others = f->is.n_addresses > 1 && f->next_address % f->is.n_addresses != 0 &&
                      !(n->join_call && f->join_answers);
        if (others)
            f->dial_due_us = n->now_us; /* the other addresses first */
        else
            f->dial_due_us = n->now_us + MIN_OF(f->dial_wait_us, most);
        f->dial_wait_us = MIN_OF(f->dial_wait_us * 2, (uint64_t)DIAL_STRANGER_MAX_US);
    }
    bool known = !node_id_is_zero(&was.peer);
    struct peer *p = known ? peer_find(n, &was.peer) : NULL;
    if (p && p->dialling == session && p->session != session)
        dial_failed(n, p, how);
    if (p && p->session == session) {
        p->session = 0;
        n->links_due_us = MIN_OF(n->links_due_us, n->now_us + LINKS_RECORD_US);
        p->dial_due_us = n->now_us + (may_be_coming(n, p) ? DIAL_REPLACED_US : 0);
        /* One that hardly lived was closed by a peer that still holds another, perhaps without
         * knowing that it is dead: give it time to find out. */
        p->lived_us = n->now_us - was.since_us;
        if (p->lived_us < STABLE_US) {
            p->dial_due_us = n->now_us + p->dial_wait_us + rng_below(&n->rng, p->dial_wait_us);
            p->dial_wait_us = MIN_OF(p->dial_wait_us * 2, (uint64_t)DIAL_MEMBER_MAX_US);
        } else {
            p->dial_wait_us = DIAL_FIRST_US;
        }
        tell_session(n, &p->id, SWIM_SESSION_CLOSED);
        (void)node_feed_control(
            n, &(struct control_event){.kind = CONTROL_SESSION_DOWN, .from = p->id});
        node_note(n, "session", "the connection to %s closed", p->name);
        plan_view_changed(n);
    }
}

void sessions_close(struct node *n, uint64_t session)
{
    struct node_effect *e = node_effect(n, NODE_EFFECT_CLOSE);
    if (e)
        e->session = session;
    sessions_down(n, session, NODE_DOWN_CLOSED);
}

void sessions_rejected(struct node *n, uint64_t session, enum trust_reason reason)
{
    struct node_session *s = session_find(n, session);
    struct found *f = s ? found_find(n, s->instance) : NULL;
    if (f && reason == TRUST_REASON_SELF)
        f->is_self = true;
    if (f && reason == TRUST_REASON_CLONE)
        f->is_clone = true;
}

/* ---- what discovery says ---- */

static void judge(struct node *n, struct found *f)
{
    uint8_t wanted[TOKEN_TAG_BYTES];
    f->ours =
        trust_check_cluster_tag(n->trust, f->is.cluster_tag, f->is.n_cluster_tag, f->is.instance);
    f->invites = false;
    if (!n->join_call || !trust_join_tag(n->trust, wanted))
        return;
    for (uint32_t at = 0; at + TOKEN_TAG_BYTES <= f->is.n_invite_tag; at += TOKEN_TAG_BYTES)
        f->invites |= memcmp(f->is.invite_tag + at, wanted, TOKEN_TAG_BYTES) == 0;
    f->invites |= f->is.given;
}

void sessions_retag(struct node *n)
{
    for (int i = 0; i < NODE_FOUND_MAX; i++) {
        struct found *f = &n->found[i];
        if (!f->used)
            continue;
        judge(n, f);
        claim_connected(n, f);
        f->dial_due_us = n->now_us;
        f->dial_wait_us = DIAL_FIRST_US;
    }
}

static bool is_trusted(const struct found *f)
{
    return f->ours || f->invites || f->is.given || f->has_peer || f->dialling;
}

/* A free place, or that of the one that has been known longest without anything to vouch for it: a
 * flood of names pushes out its own. NULL: all are vouched for. */
static struct found *found_place(struct node *n)
{
    struct found *oldest = NULL;
    for (int i = 0; i < NODE_FOUND_MAX; i++) {
        struct found *f = &n->found[i];
        if (!f->used)
            return f;
        if (!is_trusted(f) && (!oldest || f->order < oldest->order))
            oldest = f;
    }
    if (oldest)
        oldest->used = false;
    return oldest;
}

bool node_trusts_found(const struct node *n, const char *instance)
{
    for (int i = 0; i < NODE_FOUND_MAX; i++) {
        const struct found *f = &n->found[i];
        if (f->used && strcmp(f->is.instance, instance) == 0)
            return is_trusted(f);
    }
    return false;
}

enum err sessions_found(struct node *n, const struct node_found *is)
{
    if (!is->instance[0] || is->n_addresses > NODE_ADDRESSES_MAX ||
        is->n_cluster_tag > NODE_TAG_MAX || is->n_invite_tag > NODE_TAG_MAX)
        return ERR_INVALID;
    struct found *f = found_find(n, is->instance);
    if (is->gone) {
        /* mDNS only introduces: a record that expires ends no session and kills nobody. */
        if (f)
            f->used = false;
        return ERR_OK;
    }
    if (!f)
        f = found_place(n);
    if (!f)
        return ERR_BUSY;
    if (!f->used)
        *f = (struct found){.used = true, .order = ++n->found_order};
    f->is = *is;
    f->join_answers = 0; /* the addresses may be others */
    f->heard_us = n->now_us;
    f->dial_due_us = n->now_us;
    f->dial_wait_us = DIAL_FIRST_US;
    judge(n, f);
    claim_connected(n, f);
    struct peer *p = f->has_peer ? peer_find(n, &f->peer) : NULL;
    if (p) {
        merge_found(n, f, p);
        if (!p->session && !p->dialling)
            p->dial_due_us = n->now_us;
    }
    return ERR_OK;
}

/* ---- dialling ---- */

/* `attempt` counts the first messages in a row that were dropped: the next secret is tried then
 * (proto/trust.h). */
static struct node_session *dial(struct node *n, const struct address *a, enum purpose purpose,
                                 uint32_t attempt, const struct node_id *peer, const char *instance)
{
    struct session_psk psk;
    if (purpose == PURPOSE_JOIN) {
        if (!trust_join_psk(n->trust, &psk))
            return NULL;
    } else {
        trust_dial_psk_at(n->trust, attempt, &psk);
    }
    struct node_session *s = session_new_slot(n);
    struct node_effect *e = s ? node_effect(n, NODE_EFFECT_DIAL) : NULL;
    if (!e)
        return NULL;
    s->patience_us = DIAL_DEADLINE_US;
    s->id = ++n->next_session;
    s->state = SESSION_DIALLING;
    s->purpose = purpose;
    s->address = *a;
    if (peer)
        s->peer = *peer;
    (void)snprintf(s->instance, sizeof s->instance, "%s", instance ? instance : "");
    e->session = s->id;
    e->address = *a;
    memcpy(e->psk, psk.key, sizeof e->psk);
    e->psk_tag = psk.tag;
    return s;
}

static uint64_t patience_us(uint32_t n_addresses, uint32_t n_rounds)
{
    if (n_addresses <= 1)
        return DIAL_DEADLINE_US;
    return MIN_OF((uint64_t)DIAL_DEADLINE_US, (uint64_t)DIAL_PATIENCE_US << MIN_OF(n_rounds, 4u));
}

/* Where another address has led to the peer in this run, one that never has gets little time: after
 * a partition the good one must come round soon. */
static uint64_t peer_patience_us(const struct peer *p, const struct address *a)
{
    bool proved = false, any = false;
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        bool this = p->addresses[i].proved_us > 0;
        any = any || this;
        proved = proved || (this && address_eq(&p->addresses[i].address, a));
    }
    return any && !proved ? DIAL_PATIENCE_US : patience_us(p->n_addresses, p->n_rounds);
}

static void dial_peer(struct node *n, struct peer *p)
{
    if (p->session || p->dialling || p->n_addresses == 0 || n->now_us < p->dial_due_us ||
        n->stopping)
        return;
    const struct address *a = peer_dial_address(n, p);
    struct node_session *s = dial(n, a, PURPOSE_MEMBER, p->n_dropped, &p->id, NULL);
    if (!s) {
        p->dial_due_us = n->now_us + DIAL_FIRST_US;
        return;
    }
    p->dialling = s->id;
    p->dialled_us = p->dialled_us ? p->dialled_us : n->now_us;
    s->patience_us = peer_patience_us(p, a);
}

/* May the token be this one's? */
static bool joins_at(const struct node *n, const struct found *f)
{
    return f->used && !f->is.gone && !f->is_self && f->is.n_addresses > 0 &&
           (f->invites || (n->join_wide && !f->ours));
}

/* When the next address is dialled beside one that has not answered yet; UINT64_MAX: it is not. */
static uint64_t stagger_due(const struct node *n, const struct found *f)
{
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        const struct node_session *s = &n->sessions[i];
        if (s->id == f->dialling)
            return s->state == SESSION_DIALLING && s->purpose == PURPOSE_JOIN &&
                           f->next_address % f->is.n_addresses != 0 && f->join_answers == 0
                       ? s->since_us + DIAL_STAGGER_US
                       : UINT64_MAX;
    }
    return UINT64_MAX;
}

static uint64_t found_due(const struct node *n, const struct found *f)
{
    return f->dialling ? stagger_due(n, f) : f->dial_due_us;
}

/* The next in turn; of those that were not reached when others were none is tried again. */
static uint32_t next_address(const struct node *n, struct found *f)
{
    bool known = n->join_call && f->join_answers;
    for (uint32_t k = 0; known && k < f->is.n_addresses; k++) {
        if (f->join_answers >> (f->next_address % f->is.n_addresses) & 1)
            break;
        f->next_address++;
    }
    return f->next_address++ % f->is.n_addresses;
}

static bool wants_dial(const struct node *n, const struct found *f)
{
    if (!f->used || f->is.gone || f->is_self || f->is.n_addresses == 0 || n->stopping)
        return false;
    if (n->join_call && f->dialling)
        return joins_at(n, f) && stagger_due(n, f) != UINT64_MAX;
    if (f->dialling)
        return false;
    if (n->join_call)
        return joins_at(n, f);
    if (f->has_peer)
        return false; /* the peer's own dialling does it */
    return f->ours || f->is.given;
}

static void dial_found(struct node *n, struct found *f)
{
    if (!wants_dial(n, f) || n->now_us < found_due(n, f))
        return;
    uint32_t round = f->next_address / f->is.n_addresses, nth = next_address(n, f);
    const struct address *a = &f->is.addresses[nth];
    struct node_session *s =
        dial(n, a, n->join_call ? PURPOSE_JOIN : PURPOSE_FOUND, f->n_dropped, NULL, f->is.instance);
    if (!s) {
        f->dial_due_us = n->now_us + DIAL_FIRST_US;
        return;
    }
    f->dialling = s->id;
    s->nth = nth;
    s->patience_us = patience_us(f->is.n_addresses, round);
}

void sessions_redial(struct node *n, const struct node_id *id)
{
    struct peer *p = peer_find(n, id);
    bool hurt = p && p->lived_us < STABLE_US; /* sessions_down has set when */
    if (p && !p->session && !p->dialling && !hurt) {
        p->dial_due_us = n->now_us + (may_be_coming(n, p) ? DIAL_REPLACED_US : 0);
        dial_peer(n, p);
    }
}

/* ---- joining ----
 *
 * Who does not hold a token's secret drops the handshake without a word (PROTOCOL 1.3), so that a
 * token that is used up or has expired looks like any stranger's. A machine that can be reached and
 * drops it again and again does not accept it: people are told so. */

void sessions_join(struct node *n, uint64_t call)
{
    n->join_call = call;
    n->join_began_us = n->now_us;
    n->join_wide = false;
    for (int i = 0; i < NODE_FOUND_MAX; i++)
        n->found[i].n_join_denied = n->found[i].n_join_failed = n->found[i].join_answers = 0;
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) { /* dials that would be for nothing now */
        const struct node_session *s = &n->sessions[i];
        if (s->id && s->state == SESSION_DIALLING && s->purpose == PURPOSE_FOUND)
            sessions_close(n, s->id);
    }
    for (int i = 0; i < NODE_FOUND_MAX; i++)
        n->found[i].next_address = 0;
    sessions_retag(n);
}

static void join_ends(struct node *n, enum err e, const char *text)
{
    uint64_t call = n->join_call;
    n->join_call = 0;
    (void)node_feed_trust(n, &(struct trust_event){.kind = TRUST_JOIN_CANCEL});
    node_answer(n, call, e, "%s", text);
    sessions_retag(n);
}

static uint64_t join_verdict_us(const struct node *n)
{
    if (!n->join_wide)
        return n->join_began_us + JOIN_VERDICT_US;
    return MAX_OF(n->join_began_us + JOIN_VERDICT_WIDE_US, n->started_us + JOIN_BROWSE_US);
}

/* All that could be reached have denied it often enough. One that cannot be reached may still be
 * the right one only where nobody else answers. */
static bool join_is_denied(const struct node *n)
{
    bool denied = false;
    for (int i = 0; i < NODE_FOUND_MAX; i++) {
        const struct found *f = &n->found[i];
        if (!joins_at(n, f))
            continue;
        uint32_t dials = f->n_join_denied + f->n_join_failed;
        bool sure = f->n_join_denied >= JOIN_DENIED_MIN && dials >= JOIN_DIALS_MAX;
        if (!sure && (f->n_join_denied > 0 || f->n_join_failed == 0))
            return false; /* not tried enough, or its handshake is under way */
        denied |= sure;
    }
    return denied;
}

static void join_tick(struct node *n)
{
    if (!n->join_call)
        return;
    if (!n->join_wide && n->now_us >= n->join_began_us + JOIN_WIDE_US) {
        bool shown = false;
        for (int i = 0; i < NODE_FOUND_MAX; i++)
            shown |= n->found[i].used && n->found[i].invites;
        n->join_wide = !shown;
    }
    if (n->now_us >= n->join_began_us + JOIN_DEADLINE_US)
        join_ends(n, ERR_TIMEOUT,
                  "no node that holds this invitation was found: is it still running, on the same "
                  "network, and the token not older than its time? `--peer HOST` names it where "
                  "multicast is blocked");
    else if (n->now_us >= join_verdict_us(n) && join_is_denied(n))
        join_ends(n, ERR_DENIED, NODE_TOKEN_REFUSED);
}

static uint64_t join_due(const struct node *n)
{
    if (!n->join_call)
        return UINT64_MAX;
    uint64_t due = n->join_began_us + JOIN_DEADLINE_US, wide_us = n->join_began_us + JOIN_WIDE_US;
    if (n->now_us < wide_us)
        due = MIN_OF(due, wide_us);
    if (n->now_us < join_verdict_us(n))
        due = MIN_OF(due, join_verdict_us(n));
    return due;
}

static void expire_dials(struct node *n)
{
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        struct node_session *s = &n->sessions[i];
        if (s->id && s->state == SESSION_DIALLING && n->now_us >= s->since_us + s->patience_us) {
            uint64_t id = s->id;
            struct node_effect *e = node_effect(n, NODE_EFFECT_CLOSE);
            if (e)
                e->session = id;
            sessions_down(n, id, NODE_DOWN_TIMED_OUT);
        }
    }
}

/* ---- links and bandwidth ---- */

static bool dials_links(const struct node *n, const struct peer *p)
{
    return node_id_cmp(&n->identity.id, &p->id) < 0;
}

static void dial_link(struct node *n, struct peer *p)
{
    struct address a;
    if (!p->session || !node_data_address(n, &p->id, &a))
        return;
    struct node_effect *e = node_effect(n, NODE_EFFECT_DIAL_LINK);
    if (e) {
        e->peer = p->id;
        e->address = a;
        e->session = p->session;
    }
}

enum err sessions_want_link(struct node *n, const struct node_id *id)
{
    struct peer *p = peer_find(n, id);
    if (!p)
        return ERR_NOT_FOUND;
    if (p->link_up || !p->session)
        return ERR_OK;
    if (dials_links(n, p)) {
        dial_link(n, p);
    } else if (!p->link_wanted) {
        p->link_wanted = true;
        p->link_due_us = n->now_us + LINK_REQUEST_US;
        return records_request_link(n, id);
    }
    return ERR_OK;
}

void sessions_link_requested(struct node *n, struct peer *p)
{
    if (!p->link_up && dials_links(n, p))
        dial_link(n, p);
}

void sessions_link(struct node *n, const struct node_id *id, bool up)
{
    struct peer *p = peer_find(n, id);
    if (!p)
        return;
    p->link_up = up;
    p->link_wanted = false;
}

void sessions_bandwidth(struct node *n, const struct node_event *e)
{
    struct peer *p = peer_find(n, &e->peer);
    for (uint32_t i = 0; p && i < p->n_addresses; i++) {
        struct peer_address *a = &p->addresses[i];
        struct address with_port = e->address; /* which names the data port */
        with_port.port = a->address.port;
        if (!address_same_place(&a->address, &with_port))
            continue;
        if (dials_links(n, p))
            n->measuring_until_us = n->now_us;
        bool measured = e->bytes_per_s > 0;
        a->measure_due_us = n->now_us + (measured ? MEASURE_EVERY_US : MEASURE_RETRY_US);
        if (measured) {
            a->bytes_per_s = e->bytes_per_s;
            a->measured_us = n->now_us;
            n->links_due_us = MIN_OF(n->links_due_us, n->now_us);
        }
        return;
    }
}

static bool path_is_up(const struct node *n, const struct peer *p, uint32_t path)
{
    struct swim_member_view v;
    if (!swim_member(n->swim, &p->id, &v) || v.state != SWIM_ALIVE)
        return false;
    for (uint32_t i = 0; i < v.n_paths; i++) {
        if (v.paths[i].id == path)
            return v.paths[i].up;
    }
    return false;
}

/* One measurement at a time, and the smaller key of a pair does it for both. */
static void measure(struct node *n, struct peer *p)
{
    if (!p->session || !dials_links(n, p) || p->data_port == 0 || n->now_us < n->measuring_until_us)
        return;
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        struct peer_address *a = &p->addresses[i];
        if (n->now_us < a->measure_due_us || !path_is_up(n, p, a->path))
            continue;
        struct node_effect *e = node_effect(n, NODE_EFFECT_MEASURE);
        if (!e)
            return;
        e->peer = p->id;
        e->address = a->address;
        e->address.port = p->data_port;
        e->session = p->session;
        n->measuring_until_us = n->now_us + MEASURE_RETRY_US;
        a->measure_due_us = n->now_us + MEASURE_RETRY_US;
        return;
    }
}

uint32_t sessions_path_of(struct node *n, struct peer *p, const struct address *from)
{
    for (uint32_t i = 0; i < p->n_addresses; i++) {
        if (address_same_place(&p->addresses[i].address, from))
            return p->addresses[i].path;
    }
    /* An address of its that we did not know, proved by the seal. */
    struct peer_address *a = peer_add_address(n, p, from, false);
    if (!a)
        return 0;
    a->proved_us = n->now_us;
    return a->path;
}

void sessions_tick(struct node *n)
{
    expire_dials(n);
    join_tick(n);
    addresses_tick(n);
    for (int i = 0; i < NODE_FOUND_MAX; i++)
        dial_found(n, &n->found[i]);
    for (uint32_t i = 0; i < n->n_peers; i++) {
        struct peer *p = &n->peers[i];
        dial_peer(n, p);
        measure(n, p);
        if (p->link_wanted && n->now_us >= p->link_due_us) {
            p->link_wanted = false;
            if (!p->link_up)
                dial_link(n, p);
        }
    }
}

uint64_t sessions_next_due(const struct node *n)
{
    uint64_t due = join_due(n);
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        if (n->sessions[i].id && n->sessions[i].state == SESSION_DIALLING)
            due = MIN_OF(due, n->sessions[i].since_us + n->sessions[i].patience_us);
    }
    for (int i = 0; i < NODE_FOUND_MAX; i++) {
        if (wants_dial(n, &n->found[i]))
            due = MIN_OF(due, found_due(n, &n->found[i]));
    }
    for (uint32_t i = 0; i < n->n_peers; i++) {
        const struct peer *p = &n->peers[i];
        if (!p->session && !p->dialling && p->n_addresses > 0 && !n->stopping)
            due = MIN_OF(due, p->dial_due_us);
        if (p->link_wanted)
            due = MIN_OF(due, p->link_due_us);
        bool measures = p->session && dials_links(n, p) && p->data_port != 0;
        for (uint32_t k = 0; measures && k < p->n_addresses; k++) {
            if (path_is_up(n, p, p->addresses[k].path))
                due = MIN_OF(due, MAX_OF(p->addresses[k].measure_due_us, n->measuring_until_us));
        }
    }
    return due;
}
