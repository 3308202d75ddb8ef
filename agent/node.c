#include "agent/node_internal.h"

#include <assert.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EFFECTS_MAX = 4096, SOFTWARE_PROTOCOL = 1 };

/* ---- updates ---- */

static void effect_deinit(struct node_effect *e)
{
    if (e->bytes) {
        sodium_memzero(e->bytes, e->n_bytes);
        free(e->bytes);
    }
    free(e->plan);
    sodium_memzero(e->psk, sizeof e->psk);
}

void node_update_clear(struct node_update *u)
{
    outbox_clear(&u->outbox);
    for (uint32_t i = 0; i < u->n_effects; i++)
        effect_deinit(&u->effects[i]);
    u->n_effects = 0;
}

void node_update_deinit(struct node_update *u)
{
    node_update_clear(u);
    outbox_deinit(&u->outbox);
    free(u->effects);
    *u = NODE_UPDATE_INIT;
}

struct node_effect *node_effect(struct node *n, enum node_effect_type type)
{
    struct node_update *u = n->u;
    if (u->n_effects == EFFECTS_MAX)
        return NULL;
    if (u->n_effects == u->cap_effects) {
        uint32_t cap = u->cap_effects ? u->cap_effects * 2 : 16;
        struct node_effect *effects = realloc(u->effects, cap * sizeof *effects);
        if (!effects)
            return NULL;
        u->effects = effects;
        u->cap_effects = cap;
    }
    struct node_effect *e = &u->effects[u->n_effects++];
    *e = (struct node_effect){.type = type};
    return e;
}

void node_note(struct node *n, const char *word, const char *format, ...)
{
    struct node_effect *e = node_effect(n, NODE_EFFECT_NOTE);
    if (!e)
        return;
    e->word = word;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
}

void node_answer(struct node *n, uint64_t call, enum err error, const char *format, ...)
{
    struct node_effect *e = call ? node_effect(n, NODE_EFFECT_ANSWER) : NULL;
    if (!e)
        return;
    e->call = call;
    e->error = error;
    va_list args;
    va_start(args, format);
    (void)vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
}

static void persist(struct node *n, enum node_effect_type type, const struct buf *b)
{
    if (b->len == 0)
        return;
    struct node_effect *e = node_effect(n, type);
    uint8_t *copy = e ? malloc(b->len) : NULL;
    /* Without memory to store it, what rests on it must not happen: better to stop here than to
     * forget a promise. */
    assert(copy);
    memcpy(copy, b->data, b->len);
    e->bytes = copy;
    e->n_bytes = b->len;
}

enum err node_send(struct node *n, const struct node_id *to, uint8_t channel, const uint8_t *bytes,
                   uint32_t len)
{
    struct peer *p = peer_find(n, to);
    if (!p || !p->session)
        return ERR_CLOSED;
    struct wire_message m = {.to = *to,
                             .session = p->session,
                             .channel = channel,
                             .way = WAY_SESSION,
                             .len = len,
                             .bytes = (uint8_t *)bytes};
    return outbox_push(&n->u->outbox, &m);
}

/* Messages of a core that names nodes: each goes to the session that is kept, or is lost as if by
 * the network. */
static void pass_on(struct node *n, const struct outbox *box)
{
    for (uint32_t i = 0; i < box->n; i++) {
        struct wire_message m = box->messages[i];
        if (m.session == 0) {
            struct peer *p = peer_find(n, &m.to);
            if (!p || !p->session)
                continue;
            m.session = p->session;
        }
        (void)outbox_push(&n->u->outbox, &m);
    }
}

/* ---- trust ---- */

static void join_failed(struct node *n, enum trust_reason reason)
{
    uint64_t call = n->join_call;
    n->join_call = 0;
    if (reason == TRUST_REASON_TOKEN)
        node_answer(n, call, ERR_DENIED, "%s", NODE_TOKEN_REFUSED);
    else
        node_answer(n, call, ERR_DENIED, "the other node refused (%s)", trust_reason_name(reason));
    sessions_retag(n);
}

static void joined(struct node *n, const struct node_id *issuer)
{
    char name[SHORT_ID_MAX];
    short_of_32(issuer->bytes, name);
    uint64_t call = n->join_call;
    n->join_call = 0;
    node_answer(n, call, ERR_OK, "joined the cluster of %s", name);
    node_note(n, "joined", "joined the cluster of %s", name);
    peer_sync_with_trust(n);
    sessions_retag(n);
}

static void on_trust_effect(struct node *n, const struct trust_effect *x)
{
    char name[SHORT_ID_MAX];
    switch (x->kind) {
    case TRUST_EFFECT_AUTHENTICATED:
        sessions_authenticated(n, x->session, &x->peer);
        break;
    case TRUST_EFFECT_REJECTED:
    case TRUST_EFFECT_REFUSED:
        sessions_rejected(n, x->session, x->reason);
        if (x->kind == TRUST_EFFECT_REJECTED && x->reason == TRUST_REASON_CLONE)
            (void)node_feed_swim(
                n, &(struct swim_event){.type = SWIM_EVENT_RIVAL, .boot_id = x->peer.self.boot_id});
        if (x->reason != TRUST_REASON_SELF)
            node_note(n, "refused", "a connection was refused (%s)", trust_reason_name(x->reason));
        break;
    case TRUST_EFFECT_CLOSE: {
        /* After what the outbox holds for it: the shell flushes before it closes. */
        struct node_effect *e = node_effect(n, NODE_EFFECT_CLOSE);
        if (e)
            e->session = x->session;
        sessions_down(n, x->session, NODE_DOWN_DENIED);
        break;
    }
    case TRUST_EFFECT_JOINED:
        joined(n, &x->peer.id);
        break;
    case TRUST_EFFECT_JOIN_FAILED:
        join_failed(n, x->reason);
        break;
    case TRUST_EFFECT_ADMITTED:
        short_of_32(x->peer.id.bytes, name);
        node_note(n, "admitted", "%s is a member now", name);
        break;
    case TRUST_EFFECT_MEMBERS_CHANGED:
        peer_sync_with_trust(n);
        break;
    case TRUST_EFFECT_INVITES_CHANGED:
        records_publish_facts(n); /* members know their own cluster's invitations */
        n->tags_changed = true;
        sessions_retag(n);
        break;
    case TRUST_EFFECT_SECRETS_CHANGED:
        n->tags_changed = true;
        sessions_retag(n);
        break;
    case TRUST_EFFECT_PENDING:
        node_note(n, "pending", "a member's admission is void: invite it again");
        break;
    case TRUST_EFFECT_EXPELLED:
        node_note(n, "expelled", "this node is no longer a member of its cluster");
        break;
    }
}

enum err node_feed_trust(struct node *n, struct trust_event *event)
{
    struct trust_update u = TRUST_UPDATE_INIT;
    event->now_us = n->now_us;
    enum err e = trust_step(n->trust, event, &u);
    persist(n, NODE_EFFECT_PERSIST_TRUST, &u.persist);
    pass_on(n, &u.out);
    for (uint32_t i = 0; i < u.n_effects; i++)
        on_trust_effect(n, &u.effects[i]);
    if (event->kind == TRUST_INVITE && e == ERR_OK) {
        struct node_effect *a = node_effect(n, NODE_EFFECT_ANSWER);
        if (a) {
            a->call = n->invite_call;
            a->expires_in_us = u.expires_at_us > n->now_us ? u.expires_at_us - n->now_us : 0;
            token_format(&u.token, a->text);
        }
        n->tags_changed = true;
    }
    trust_update_deinit(&u);
    return e;
}

/* ---- membership ---- */

static void on_state(struct node *n, const struct swim_effect *x)
{
    struct peer *p = peer_find(n, &x->peer);
    node_note(n, "state", "%s: %s", p && p->name[0] ? p->name : "a member",
              swim_state_name(x->new));
    if (p && x->new == SWIM_ALIVE && !p->session && !p->dialling)
        p->dial_due_us = n->now_us;
    /* What waits in a session to a dead member is sent again at intervals that double with the
     * silence: after a healed partition a new session is there sooner. */
    if (p && x->new == SWIM_DEAD && p->session)
        sessions_close(n, p->session);
    n->links_due_us = MIN_OF(n->links_due_us, n->now_us);
    plan_view_changed(n);
}

static void on_swim_effect(struct node *n, const struct swim_effect *x)
{
    switch (x->type) {
    case SWIM_EFFECT_STATE:
        on_state(n, x);
        break;
    case SWIM_EFFECT_RECORD:
        records_changed(n, &x->peer, x->kind);
        break;
    case SWIM_EFFECT_REDIAL:
        sessions_redial(n, &x->peer);
        break;
    case SWIM_EFFECT_EDGE:
        n->links_due_us = MIN_OF(n->links_due_us, n->now_us + LINKS_RECORD_US);
        break;
    case SWIM_EFFECT_SELF_CONFLICT:
        node_note(n, "conflict",
                  "another process lives under this node's key (a copied data folder?): stop one "
                  "of the two");
        break;
    case SWIM_EFFECT_INCARNATION:
        break;
    }
}

enum err node_feed_swim(struct node *n, const struct swim_event *event)
{
    struct swim_update u = SWIM_UPDATE_INIT;
    enum err e = swim_step(n->swim, event, n->now_us, &u);
    pass_on(n, &u.outbox);
    for (uint32_t i = 0; i < u.n_effects; i++)
        on_swim_effect(n, &u.effects[i]);
    swim_update_deinit(&u);
    return e;
}

enum err node_feed_control(struct node *n, const struct control_event *event)
{
    struct control_update u;
    control_update_init(&u);
    struct control_event with_time = *event;
    with_time.wall_ms = n->wall_base_ms + (n->now_us - n->started_us) / 1000;
    enum err e = control_step(n->control, &with_time, n->now_us, &u);
    persist(n, NODE_EFFECT_PERSIST_CONTROL, &u.persist);
    plan_control_effects(n, &u);
    pass_on(n, &u.outbox);
    plan_report_commits(n, &u);
    control_update_deinit(&u);
    return e;
}

/* ---- life ---- */

static enum err make_cores(struct node *n, struct err_text *text)
{
    const struct node_options *o = &n->options;
    struct trust_options t = {.random = o->random};
    t.self = (struct trust_self){.boot_id = o->boot_id,
                                 .control_port = o->control_port,
                                 .data_port = o->data_port,
                                 .protocol_min = SOFTWARE_PROTOCOL,
                                 .protocol_max = SOFTWARE_PROTOCOL};
    (void)snprintf(t.self.name, sizeof t.self.name, "%s", o->name);
    (void)snprintf(t.self.version, sizeof t.self.version, "%s", o->version);
    enum err e = trust_new(&n->identity, o->trust_bytes, o->n_trust_bytes, &t, &n->trust);
    if (e != ERR_OK)
        return err_set(text, e,
                       "the stored cluster membership cannot be read (%s): restore it from a "
                       "backup, or remove "
                       "the file `trust` in the data folder and join again",
                       err_name(e));
    struct swim_options s;
    swim_options_default(&s);
    s.self = n->identity.id;
    s.boot_id = o->boot_id;
    s.rng_seed = rng_u64(&n->rng);
    TRY(swim_new(&s, n->now_us, &n->swim));
    struct control_options c = {.self = n->identity.id,
                                .boot_id = o->boot_id,
                                .seed = rng_u64(&n->rng),
                                .arithmetic_version =
                                    plan_arithmetic(o->arithmetic_version, o->kernel_digest),
                                .backend = BACKEND_NATIVE};
    e = control_new(&c, o->control_bytes, o->n_control_bytes, &n->control);
    if (e != ERR_OK)
        return err_set(
            text, e,
            "the stored plans cannot be read (%s): remove the file `control` in the data folder",
            err_name(e));
    return ERR_OK;
}

enum err node_new(const struct node_options *options, uint64_t now_us, struct node **ret,
                  struct err_text *text)
{
    struct node *n = calloc(1, sizeof *n);
    if (!n)
        return ERR_NO_MEMORY;
    n->options = *options;
    n->identity = *options->identity;
    n->options.identity = &n->identity;
    n->now_us = n->started_us = now_us;
    n->wall_base_ms = options->wall_ms;
    n->links_due_us = UINT64_MAX;
    n->view_due_us = UINT64_MAX;
    uint64_t seed;
    options->random.fill(options->random.ctx, (uint8_t *)&seed, sizeof seed);
    rng_seed(&n->rng, seed);
    n->options.remembered = NULL;
    n->options.remembered_ids = NULL;
    enum err e = ERR_OK;
    n->options.remembered = NULL; /* the caller's */
    n->options.remembered_ids = NULL;
    if (options->n_remembered) {
        size_t k = options->n_remembered;
        struct address *a = calloc(k, sizeof *a);
        struct node_id *ids = calloc(k, sizeof *ids);
        if (a && ids) {
            memcpy(a, options->remembered, k * sizeof *a);
            memcpy(ids, options->remembered_ids, k * sizeof *ids);
        } else {
            e = ERR_NO_MEMORY;
        }
        n->options.remembered = a;
        n->options.remembered_ids = ids;
    }
    if (e == ERR_OK)
        e = make_cores(n, text);
    if (e != ERR_OK) {
        node_free(n);
        return e;
    }
    *ret = n;
    return ERR_OK;
}

void node_free(struct node *n)
{
    if (!n)
        return;
    trust_free(n->trust);
    swim_free(n->swim);
    control_free(n->control);
    free((void *)n->options.remembered);
    free((void *)n->options.remembered_ids);
    identity_wipe(&n->identity);
    free(n);
}

static enum err on_message(struct node *n, const struct node_event *e)
{
    struct node_session *s = session_find(n, e->session);
    if (!s)
        return ERR_NOT_FOUND;
    if (e->channel == CHANNEL_TRUST)
        return node_feed_trust(
            n, &(struct trust_event){
                   .kind = TRUST_MESSAGE, .session = e->session, .bytes = e->bytes, .len = e->len});
    /* Authority first: nothing else is read before both sides have checked it (PROTOCOL 1.4). */
    struct peer *p = s->state == SESSION_AUTHENTICATED ? peer_find(n, &s->peer) : NULL;
    if (!p)
        return ERR_DENIED;
    switch (e->channel) {
    case CHANNEL_SWIM:
        return node_feed_swim(
            n, &(struct swim_event){
                   .type = SWIM_EVENT_MESSAGE, .peer = p->id, .bytes = e->bytes, .len = e->len});
    case CHANNEL_CONTROL:
        return node_feed_control(
            n, &(struct control_event){
                   .kind = CONTROL_MESSAGE, .from = p->id, .bytes = e->bytes, .n_bytes = e->len});
    case CHANNEL_NODE:
        return records_message(n, p, e->bytes, e->len);
    default:
        return ERR_OK; /* of a later version */
    }
}

static enum err on_datagram(struct node *n, const struct node_event *e)
{
    struct node_session *s = session_find(n, e->session);
    struct peer *p = s && s->state == SESSION_AUTHENTICATED ? peer_find(n, &s->peer) : NULL;
    if (!p || e->channel != CHANNEL_SWIM)
        return ERR_DENIED;
    struct swim_event x = {
        .type = SWIM_EVENT_DATAGRAM, .peer = p->id, .bytes = e->bytes, .len = e->len};
    x.path = sessions_path_of(n, p, &e->address);
    return node_feed_swim(n, &x);
}

static enum err on_join(struct node *n, const struct node_event *e)
{
    struct trust_event t = {.kind = TRUST_JOIN, .leave = e->leave};
    if (n->join_call) {
        node_answer(n, e->call, ERR_BUSY, "this node is joining already: wait for that to end");
        return ERR_BUSY;
    }
    if (token_parse(e->text ? e->text : "", &t.token) != ERR_OK) {
        node_answer(n, e->call, ERR_DENIED,
                    "that is not a token: one has 28 letters and digits, and a mistyped one is "
                    "noticed. Copy it again, or make a new one with `covey invite`");
        return ERR_INVALID;
    }
    enum err r = node_feed_trust(n, &t);
    uint8_t tag[TOKEN_TAG_BYTES];
    token_tag(&t.token, tag);
    if (r == ERR_DENIED && records_invited_by_member(n, tag)) {
        node_answer(n, e->call, ERR_OK,
                    "that invitation is to this node's own cluster: it is a member already");
        return ERR_OK;
    }
    if (r != ERR_OK) {
        node_answer(n, e->call, r,
                    r == ERR_DENIED ? "this node is in a cluster with others already: where the "
                                      "token is of another one, `covey join --leave TOKEN` leaves "
                                      "this one first"
                    : r == ERR_EXISTS
                        ? "this node made that invitation itself: use it on the other machine"
                        : "cannot join just now");
        return r;
    }
    sessions_join(n, e->call);
    return ERR_OK;
}

static enum err on_invite(struct node *n, const struct node_event *e)
{
    n->invite_call = e->call;
    struct trust_event t = {.kind = TRUST_INVITE, .ttl_us = e->ttl_us, .worker = e->worker};
    enum err r = node_feed_trust(n, &t);
    if (r != ERR_OK)
        node_answer(n, e->call, r,
                    r == ERR_DENIED ? "this node may not admit others: ask a full member"
                                    : "too many invitations are open: wait until one expires");
    return r;
}

static enum err on_revoke(struct node *n, const struct node_event *e)
{
    struct trust_event t = {.kind = TRUST_REVOKE, .key = e->peer};
    enum err r = node_feed_trust(n, &t);
    node_answer(n, e->call, r,
                r == ERR_OK          ? "revoked for ever; the cluster has a new secret"
                : r == ERR_NOT_FOUND ? "no member has that key"
                : r == ERR_EXISTS    ? "it is revoked already"
                                     : "this node may not revoke that one");
    return r;
}

static enum err on_leave(struct node *n, const struct node_event *e)
{
    struct trust_event t = {.kind = TRUST_LEAVE};
    enum err r = node_feed_trust(n, &t);
    node_answer(n, e->call, r,
                r == ERR_OK ? "left the cluster; this node is on its own now" : "could not leave");
    return r;
}

static enum err on_local(struct node *n, const struct node_local *l)
{
    n->local = *l;
    n->has_local = true;
    records_publish_facts(n);
    return ERR_OK;
}

static enum err on_model(struct node *n, const struct node_model *m)
{
    uint32_t i = 0;
    while (i < n->n_models && !hash256_eq(&n->models[i].shape.model, &m->shape.model))
        i++;
    if (i == NODE_MODELS_MAX)
        return ERR_LIMIT;
    bool is_new = i == n->n_models;
    n->models[i] = *m;
    n->n_models += is_new;
    records_publish_models(n);
    plan_send_shape(n, &n->models[i].shape);
    return ERR_OK;
}

static enum err on_model_gone(struct node *n, const struct hash256 *id)
{
    for (uint32_t i = 0; i < n->n_models; i++) {
        if (hash256_eq(&n->models[i].shape.model, id)) {
            n->models[i] = n->models[--n->n_models];
            records_publish_models(n);
            return ERR_OK;
        }
    }
    return ERR_NOT_FOUND;
}

static enum err on_stop(struct node *n)
{
    if (n->stopping)
        return ERR_OK;
    n->stopping = true;
    records_publish_facts(n);
    return node_feed_control(n, &(struct control_event){.kind = CONTROL_LEAVING});
}

static enum err on_slept(struct node *n)
{
    for (int i = 0; i < NODE_SESSIONS_MAX; i++) {
        if (n->sessions[i].id)
            sessions_close(n, n->sessions[i].id);
    }
    (void)node_feed_swim(n, &(struct swim_event){.type = SWIM_EVENT_SLEPT});
    n->asleep_until_us = n->now_us + AWAKE_US;
    records_publish_facts(n);
    return node_feed_control(n, &(struct control_event){.kind = CONTROL_SLEPT});
}

static enum err dispatch(struct node *n, const struct node_event *e)
{
    bool handled = false;
    enum err r = plan_event(n, e, &handled);
    if (handled)
        return r;
    switch (e->type) {
    case NODE_EVENT_TICK:
        return ERR_OK;
    case NODE_EVENT_SESSION_READY:
        return sessions_ready(n, e);
    case NODE_EVENT_MESSAGE:
        return on_message(n, e);
    case NODE_EVENT_SESSION_DOWN:
        sessions_down(n, e->session, e->down);
        return ERR_OK;
    case NODE_EVENT_DATAGRAM:
        return on_datagram(n, e);
    case NODE_EVENT_FOUND:
        return sessions_found(n, e->found);
    case NODE_EVENT_LOCAL:
        if (e->wall_ms) /* it may have been set since */
            n->wall_base_ms = e->wall_ms - (n->now_us - n->started_us) / 1000;
        return on_local(n, e->local);
    case NODE_EVENT_MODEL:
        return on_model(n, e->model);
    case NODE_EVENT_MODEL_GONE:
        return on_model_gone(n, &e->model_id);
    case NODE_EVENT_BANDWIDTH:
        sessions_bandwidth(n, e);
        return ERR_OK;
    case NODE_EVENT_LINK:
        sessions_link(n, &e->peer, e->up);
        return ERR_OK;
    case NODE_EVENT_WANT_LINK:
        return sessions_want_link(n, &e->peer);
    case NODE_EVENT_BUSY:
        return node_feed_swim(n, &(struct swim_event){.type = SWIM_EVENT_BUSY,
                                                      .step = e->step,
                                                      .layers_done = e->layers_done});
    case NODE_EVENT_SLEPT:
        return on_slept(n);
    case NODE_EVENT_DISK:
        return node_feed_control(n, &(struct control_event){.kind = CONTROL_DISK,
                                                            .full = e->full,
                                                            .term = n->term_on_disk});
    case NODE_EVENT_INVITE:
        return on_invite(n, e);
    case NODE_EVENT_JOIN:
        return on_join(n, e);
    case NODE_EVENT_LEAVE:
        return on_leave(n, e);
    case NODE_EVENT_REVOKE:
        return on_revoke(n, e);
    case NODE_EVENT_STOP:
        return on_stop(n);
    default:
        return ERR_INVALID;
    }
}

static void run_timers(struct node *n)
{
    if (trust_next_due(n->trust) <= n->now_us)
        (void)node_feed_trust(n, &(struct trust_event){.kind = TRUST_TICK});
    if (swim_next_due(n->swim) <= n->now_us)
        (void)node_feed_swim(n, &(struct swim_event){.type = SWIM_EVENT_TICK});
    sessions_tick(n);
    records_tick(n);
    if (n->view_due_us <= n->now_us)
        plan_send_view(n);
    if (control_next_due(n->control) <= n->now_us)
        (void)node_feed_control(n, &(struct control_event){.kind = CONTROL_TICK});
}

enum err node_step(struct node *n, const struct node_event *event, uint64_t now_us,
                   struct node_update *u)
{
    n->now_us = MAX_OF(now_us, n->now_us);
    n->u = u;
    if (event->type != NODE_EVENT_DISK || !event->full)
        n->term_on_disk = control_term_seen(n->control); /* the last update was carried out */
    if (!n->announced) {                                 /* the first step founds and announces */
        n->announced = n->tags_changed = true;
        (void)node_feed_trust(n, &(struct trust_event){.kind = TRUST_TICK});
        peer_sync_with_trust(n);
    }
    enum err e = dispatch(n, event);
    run_timers(n);
    if (n->tags_changed) {
        n->tags_changed = false;
        (void)node_effect(n, NODE_EFFECT_ANNOUNCE);
    }
    n->u = NULL;
    return e;
}

uint64_t node_next_due(const struct node *n)
{
    uint64_t due = MIN_OF(trust_next_due(n->trust), swim_next_due(n->swim));
    due = MIN_OF(due, control_next_due(n->control));
    due = MIN_OF(due, sessions_next_due(n));
    due = MIN_OF(due, records_next_due(n));
    return MIN_OF(due, n->view_due_us);
}
