#include "proto/trust_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

enum {
    EFFECTS_MAX = 8192,
    GENERATION_JUMP_MAX = 1 << 20, /* a secret from so far ahead would leave no room to rotate */
};

const char *trust_reason_name(enum trust_reason reason)
{
    static const char *const names[TRUST_REASON_N] = {
        [TRUST_REASON_NONE] = "none",
        [TRUST_REASON_MALFORMED] = "malformed",
        [TRUST_REASON_IMPOSTOR] = "impostor",
        [TRUST_REASON_FOREIGN] = "foreign",
        [TRUST_REASON_NOT_MEMBER] = "not_member",
        [TRUST_REASON_PENDING] = "pending",
        [TRUST_REASON_REVOKED] = "revoked",
        [TRUST_REASON_TOKEN] = "token",
        [TRUST_REASON_INCOMPATIBLE] = "incompatible",
        [TRUST_REASON_SELF] = "self",
        [TRUST_REASON_CLONE] = "clone",
        [TRUST_REASON_TIMEOUT] = "timeout",
        [TRUST_REASON_LEFT] = "left",
        [TRUST_REASON_BUSY] = "busy",
    };
    return (unsigned)reason < TRUST_REASON_N ? names[reason] : "unknown";
}

void trust_update_clear(struct trust_update *u)
{
    if (u->persist.data)
        sodium_memzero(u->persist.data, u->persist.cap);
    u->persist.len = 0;
    outbox_clear(&u->out);
    u->n_effects = 0;
    u->token = (struct token){{0}};
    u->expires_at_us = 0;
}

void trust_update_deinit(struct trust_update *u)
{
    if (!u)
        return;
    trust_update_clear(u);
    buf_deinit(&u->persist);
    outbox_deinit(&u->out);
    free(u->effects);
    *u = TRUST_UPDATE_INIT;
}

enum err trust_effect(struct trust_update *u, const struct trust_effect *effect)
{
    if (u->n_effects == u->cap_effects) {
        uint32_t cap = u->cap_effects ? u->cap_effects * 2 : 8;
        if (cap > EFFECTS_MAX)
            return ERR_NO_MEMORY;
        struct trust_effect *effects = realloc(u->effects, cap * sizeof *effects);
        if (!effects)
            return ERR_NO_MEMORY;
        u->effects = effects;
        u->cap_effects = cap;
    }
    u->effects[u->n_effects++] = *effect;
    return ERR_OK;
}

static enum err simple_effect(struct trust_update *u, enum trust_effect_kind kind)
{
    return trust_effect(u, &(struct trust_effect){.kind = kind});
}

/* Secrets. */

static int compare_secrets(const struct secret *a, const struct secret *b)
{
    if (a->generation != b->generation)
        return a->generation < b->generation ? -1 : 1;
    return memcmp(a->key, b->key, sizeof a->key);
}

bool trust_take_secret(struct trust *t, const struct secret *s)
{
    uint32_t at = 0;
    if (t->n_secrets &&
        s->generation > t->secrets[t->n_secrets - 1].generation + GENERATION_JUMP_MAX)
        return false;
    while (at < t->n_secrets && compare_secrets(&t->secrets[at], s) < 0)
        at++;
    if (at < t->n_secrets && compare_secrets(&t->secrets[at], s) == 0)
        return false;
    if (t->n_secrets == TRUST_SECRETS_MAX) { /* the oldest goes, which may be this one */
        if (at == 0)
            return false;
        memmove(&t->secrets[0], &t->secrets[1], (at - 1) * sizeof *s);
        at--;
    } else {
        memmove(&t->secrets[at + 1], &t->secrets[at], (t->n_secrets - at) * sizeof *s);
        t->n_secrets++;
    }
    t->secrets[at] = *s;
    t->secrets_fresh = t->dirty = true;
    return true;
}

static void rotate_secret(struct trust *t)
{
    struct secret s = {.generation = t->secrets[t->n_secrets - 1].generation + 1};
    t->random.fill(t->random.ctx, s.key, sizeof s.key);
    (void)trust_take_secret(t, &s);
    sodium_memzero(&s, sizeof s);
}

/* Tokens. */

struct open_token *trust_find_token(struct trust *t, uint64_t serial)
{
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        if (t->tokens[i].serial == serial && t->tokens[i].expires_at_us > t->now_us)
            return &t->tokens[i];
    }
    return NULL;
}

static void remove_token(struct trust *t, struct open_token *token)
{
    *token = t->tokens[--t->n_tokens];
    sodium_memzero(&t->tokens[t->n_tokens], sizeof *token);
    t->invites_fresh = true;
}

void trust_drop_tokens(struct trust *t)
{
    while (t->n_tokens)
        remove_token(t, &t->tokens[0]);
}

static void digest_token(const struct token *token, struct hash256 *ret)
{
    (void)crypto_generichash(ret->bytes, sizeof ret->bytes, token->bytes, sizeof token->bytes, NULL,
                             0);
}

void trust_spend_token(struct trust *t, struct open_token *token)
{
    if (t->n_used == TRUST_USED_MAX)
        memmove(&t->used[0], &t->used[1], (size_t)--t->n_used * sizeof t->used[0]);
    digest_token(&token->token, &t->used[t->n_used++]);
    remove_token(t, token);
    t->dirty = true;
}

/* The cluster and its set. */

enum err trust_found_cluster(struct trust *t)
{
    struct hash256 cluster;
    struct members *members;
    t->random.fill(t->random.ctx, cluster.bytes, sizeof cluster.bytes);
    TRY(members_new(&cluster, &t->identity.id, &members));
    members_free(t->members);
    t->members = members;
    t->cluster = cluster;
    t->founder = t->identity.id;
    t->n_secrets = 0;
    struct secret first = {.generation = 1};
    t->random.fill(t->random.ctx, first.key, sizeof first.key);
    (void)trust_take_secret(t, &first);
    sodium_memzero(&first, sizeof first);
    return ERR_OK;
}

enum err trust_note_fresh(struct trust *t, const struct hash256 *hash)
{
    if (t->n_fresh == t->cap_fresh) {
        uint32_t cap = t->cap_fresh ? t->cap_fresh * 2 : 8;
        struct hash256 *fresh = realloc(t->fresh, cap * sizeof *fresh);
        if (!fresh)
            return ERR_NO_MEMORY;
        t->fresh = fresh;
        t->cap_fresh = cap;
    }
    t->fresh[t->n_fresh++] = *hash;
    t->dirty = true;
    return ERR_OK;
}

enum err trust_take_item(struct trust *t, const Covey__Trust__Signed *item)
{
    bool is_new;
    if (item->signature.len != IDENTITY_SIGNATURE_BYTES)
        return ERR_CORRUPT;
    TRY(members_add(t->members, (enum item_kind)item->kind, item->body.data, item->body.len,
                    item->signature.data, &is_new));
    struct hash256 hash;
    item_hash((enum item_kind)item->kind, item->body.data, item->body.len, item->signature.data,
              &hash);
    return is_new ? trust_note_fresh(t, &hash) : ERR_OK;
}

enum err trust_close_all(struct trust *t, struct trust_update *u, uint64_t except,
                         enum trust_reason reason)
{
    for (uint32_t i = 0; i < t->n_talks; i++) {
        if (t->talks[i].session != except && t->talks[i].state != TALK_CLOSED)
            TRY(talk_reject(t, &t->talks[i], reason, u));
    }
    return ERR_OK;
}

static enum err set_up(struct trust *t, const uint8_t *stored, size_t n_stored)
{
    t->origin = stored ? TRUST_LOADED : TRUST_FOUNDED;
    if (stored) {
        enum err e = store_decode(t, stored, n_stored);
        if (e == ERR_STALE)
            t->origin = TRUST_STARTED_OVER;
        else if (e != ERR_OK)
            return e;
    }
    if (t->origin != TRUST_LOADED)
        TRY(trust_found_cluster(t));
    t->dirty = t->origin != TRUST_LOADED;
    t->secrets_fresh = false;
    return ERR_OK;
}

enum err trust_new(const struct identity *identity, const uint8_t *stored, size_t n_stored,
                   const struct trust_options *options, struct trust **ret)
{
    struct trust *t = calloc(1, sizeof *t);
    if (!t)
        return ERR_NO_MEMORY;
    t->identity = *identity;
    t->self = options->self;
    t->random = options->random;
    enum err e = set_up(t, stored, n_stored);
    if (e != ERR_OK) {
        trust_free(t);
        return e;
    }
    *ret = t;
    return ERR_OK;
}

void trust_free(struct trust *t)
{
    if (!t)
        return;
    members_free(t->members);
    free(t->talks);
    free(t->fresh);
    free(t->known);
    sodium_memzero(t, sizeof *t);
    free(t);
}

/* Requests. */

static bool may_admit(const struct trust *t)
{
    return members_role(t->members, &t->identity.id) == TRUST_ROLE_MEMBER;
}

static enum err invite(struct trust *t, const struct trust_event *event, struct trust_update *u)
{
    if (!may_admit(t))
        return ERR_DENIED;
    if (t->n_tokens == TRUST_TOKENS_MAX)
        return ERR_BUSY;
    struct open_token *token = &t->tokens[t->n_tokens++];
    *token = (struct open_token){
        .serial = ++t->last_serial,
        .expires_at_us = t->now_us + (event->ttl_us ? event->ttl_us : TRUST_INVITE_US_DEFAULT),
        .worker = event->worker,
    };
    t->random.fill(t->random.ctx, token->token.bytes, sizeof token->token.bytes);
    u->token = token->token;
    u->expires_at_us = token->expires_at_us;
    t->invites_fresh = true;
    return ERR_OK;
}

enum err trust_end_join(struct trust *t, struct trust_update *u)
{
    sodium_memzero(&t->join, sizeof t->join);
    for (uint32_t i = 0; i < t->n_talks; i++) {
        struct talk *talk = &t->talks[i];
        if (talk->psk_tag >> PSK_KIND_SHIFT == PSK_JOIN && talk->state != TALK_MEMBER &&
            talk->state != TALK_CLOSED) {
            talk->state = TALK_CLOSED;
            TRY(trust_effect(
                u, &(struct trust_effect){.kind = TRUST_EFFECT_CLOSE, .session = talk->session}));
        }
    }
    return ERR_OK;
}

static enum err join(struct trust *t, const struct trust_event *event, struct trust_update *u)
{
    if (members_count(t->members) > 1 && !event->leave)
        return ERR_DENIED;
    for (uint32_t i = 0; i < t->n_tokens; i++) {
        if (memcmp(t->tokens[i].token.bytes, event->token.bytes, TOKEN_BYTES) == 0)
            return ERR_EXISTS;
    }
    TRY(trust_end_join(t, u));
    t->join.open = true;
    t->join.leave = event->leave;
    t->join.token = event->token;
    t->join.serial = ++t->last_serial;
    return ERR_OK;
}

static enum err leave(struct trust *t, struct trust_update *u)
{
    TRY(trust_close_all(t, u, 0, TRUST_REASON_LEFT));
    TRY(trust_found_cluster(t));
    trust_drop_tokens(t);
    return trust_end_join(t, u);
}

static enum err note_signed(struct trust *t, enum item_kind kind, const struct node_id *subject)
{
    for (uint32_t i = 0; i < members_n_items(t->members); i++) {
        const struct item *item = members_item(t->members, i);
        if (item->kind == kind && node_id_eq(&item->subject, subject) &&
            node_id_eq(&item->issuer, &t->identity.id))
            TRY(trust_note_fresh(t, &item->hash));
    }
    return ERR_OK;
}

static enum err revoke_key(struct trust *t, const struct node_id *key)
{
    if (!may_admit(t) || node_id_eq(key, &t->identity.id) || node_id_eq(key, &t->founder))
        return ERR_DENIED;
    switch (members_role(t->members, key)) {
    case TRUST_ROLE_NONE:
        return ERR_NOT_FOUND;
    case TRUST_ROLE_REVOKED:
        return ERR_EXISTS;
    default:
        break;
    }
    if (!members_stands_without(t->members, &t->identity.id, key))
        return ERR_DENIED;
    TRY(members_revoke(t->members, &t->identity, key));
    TRY(note_signed(t, ITEM_REVOCATION, key));
    rotate_secret(t);
    return members_settle(t->members);
}

enum err trust_admit(struct trust *t, const struct node_id *key, bool worker,
                     struct trust_update *u)
{
    TRY(members_admit(t->members, &t->identity, key, !worker));
    TRY(note_signed(t, ITEM_RECORD, key));
    TRY(members_settle(t->members));
    struct trust_effect effect = {.kind = TRUST_EFFECT_ADMITTED};
    effect.peer.id = *key;
    return trust_effect(u, &effect);
}

static enum err approve(struct trust *t, const struct trust_event *event, struct trust_update *u)
{
    if (!may_admit(t))
        return ERR_DENIED;
    switch (members_role(t->members, &event->key)) {
    case TRUST_ROLE_NONE:
        return ERR_NOT_FOUND;
    case TRUST_ROLE_REVOKED:
        return ERR_DENIED;
    case TRUST_ROLE_MEMBER:
        return ERR_EXISTS;
    case TRUST_ROLE_WORKER:
        if (event->worker)
            return ERR_EXISTS;
        break;
    case TRUST_ROLE_PENDING:
        break;
    }
    return trust_admit(t, &event->key, event->worker, u);
}

static enum err handle(struct trust *t, const struct trust_event *event, struct trust_update *u)
{
    switch (event->kind) {
    case TRUST_TICK:
        return ERR_OK;
    case TRUST_SESSION_UP:
        return talk_up(t, event, u);
    case TRUST_MESSAGE:
        t->source = event->session;
        return talk_message(t, event, u);
    case TRUST_SESSION_DOWN:
        return talk_down(t, event->session, u);
    case TRUST_INVITE:
        return invite(t, event, u);
    case TRUST_CANCEL_INVITES:
        trust_drop_tokens(t);
        return ERR_OK;
    case TRUST_JOIN:
        return join(t, event, u);
    case TRUST_JOIN_CANCEL:
        return trust_end_join(t, u);
    case TRUST_LEAVE:
        return leave(t, u);
    case TRUST_REVOKE:
        return revoke_key(t, &event->key);
    case TRUST_APPROVE:
        return approve(t, event, u);
    case TRUST_SELF:
        t->self = *event->self;
        return ERR_OK;
    }
    return ERR_INVALID;
}

/* The end of each step: what time brings, and what follows from what changed. */

static enum err expire(struct trust *t, struct trust_update *u)
{
    for (uint32_t i = t->n_tokens; i-- > 0;) {
        if (t->tokens[i].expires_at_us <= t->now_us)
            remove_token(t, &t->tokens[i]);
    }
    for (uint32_t i = 0; i < t->n_talks; i++) {
        struct talk *talk = &t->talks[i];
        if (talk->state < TALK_MEMBER && talk->state != TALK_SIGN && talk->deadline_us <= t->now_us)
            TRY(talk_reject(t, talk, TRUST_REASON_TIMEOUT, u));
    }
    if (t->digest_due_us > t->now_us)
        return ERR_OK;
    t->digest_due_us = t->now_us + TRUST_DIGEST_US;
    for (uint32_t i = 0; i < t->n_talks; i++) {
        if (t->talks[i].state == TALK_MEMBER)
            TRY(talk_send_digest(t, &t->talks[i], u));
    }
    return ERR_OK;
}

static enum trust_role known_role(const struct trust *t, const struct node_id *id, uint32_t *at)
{
    assert(t->known || t->n_known == 0);
    while (*at < t->n_known && node_id_cmp(&t->known[*at].id, id) < 0)
        ++*at;
    return *at < t->n_known && node_id_eq(&t->known[*at].id, id) ? t->known[*at].role
                                                                 : TRUST_ROLE_NONE;
}

static bool belongs(enum trust_role role)
{
    return role == TRUST_ROLE_MEMBER || role == TRUST_ROLE_WORKER;
}

static enum err tell_role(struct trust *t, const struct trust_member *member, enum trust_role was,
                          struct trust_update *u)
{
    struct trust_effect effect = {.kind = TRUST_EFFECT_PENDING};
    effect.peer.id = member->id;
    if (!belongs(was) || belongs(member->role))
        return ERR_OK;
    if (node_id_eq(&member->id, &t->identity.id)) {
        effect.kind = TRUST_EFFECT_EXPELLED;
        effect.reason =
            member->role == TRUST_ROLE_REVOKED ? TRUST_REASON_REVOKED : TRUST_REASON_PENDING;
        trust_drop_tokens(t);
    } else if (member->role != TRUST_ROLE_PENDING) {
        return ERR_OK;
    }
    return trust_effect(u, &effect);
}

/* Compares with what the caller was told last. */
static enum err tell_roles(struct trust *t, struct trust_update *u)
{
    struct trust_member member;
    uint32_t n = 0, at = 0;
    bool changed = false;
    while (members_at(t->members, n, &member))
        n++;
    struct known_role *known = calloc(n ? n : 1, sizeof *known);
    if (!known)
        return ERR_NO_MEMORY;
    enum err e = ERR_OK;
    for (uint32_t i = 0; i < n && members_at(t->members, i, &member) && e == ERR_OK; i++) {
        enum trust_role was = known_role(t, &member.id, &at);
        changed = changed || was != member.role;
        known[i] = (struct known_role){member.id, member.role};
        e = tell_role(t, &member, was, u);
    }
    if (e == ERR_OK && (changed || n != t->n_known))
        e = simple_effect(u, TRUST_EFFECT_MEMBERS_CHANGED);
    if (e != ERR_OK) {
        free(known);
        return e;
    }
    free(t->known);
    t->known = known;
    t->n_known = n;
    return ERR_OK;
}

static enum err close_outsiders(struct trust *t, struct trust_update *u)
{
    for (uint32_t i = 0; i < t->n_talks; i++) {
        struct talk *talk = &t->talks[i];
        if (talk->state != TALK_MEMBER)
            continue;
        enum trust_role role = members_role(t->members, &talk->peer.id);
        if (!belongs(role))
            TRY(talk_reject(t, talk,
                            role == TRUST_ROLE_REVOKED   ? TRUST_REASON_REVOKED
                            : role == TRUST_ROLE_PENDING ? TRUST_REASON_PENDING
                                                         : TRUST_REASON_NOT_MEMBER,
                            u));
    }
    return ERR_OK;
}

static enum err finish(struct trust *t, struct trust_update *u)
{
    TRY(members_settle(t->members));
    TRY(expire(t, u));
    if (t->dirty || !t->known) {
        TRY(tell_roles(t, u));
        TRY(close_outsiders(t, u));
    }
    TRY(talk_spread(t, u));
    if (t->secrets_fresh)
        TRY(simple_effect(u, TRUST_EFFECT_SECRETS_CHANGED));
    if (t->invites_fresh)
        TRY(simple_effect(u, TRUST_EFFECT_INVITES_CHANGED));
    if (t->dirty)
        TRY(store_encode(t, &u->persist));
    t->n_fresh = 0;
    t->dirty = t->secrets_fresh = t->invites_fresh = false;
    return ERR_OK;
}

enum err trust_step(struct trust *t, const struct trust_event *event, struct trust_update *update)
{
    assert(update->persist.len == 0 && update->out.n == 0 && update->n_effects == 0);
    t->now_us = MAX_OF(t->now_us, event->now_us);
    t->source = 0;
    enum err e = ERR_OK, refused = ERR_OK;
    /* A joiner that is gone gets no record signed. */
    if (event->kind != TRUST_SESSION_DOWN)
        e = talk_sign(t, update);
    if (e == ERR_OK)
        refused = handle(t, event, update);
    if (e == ERR_OK && event->kind == TRUST_SESSION_DOWN)
        e = talk_sign(t, update);
    if (refused == ERR_NO_MEMORY)
        e = refused;
    if (e == ERR_OK)
        e = finish(t, update);
    if (e != ERR_OK)
        trust_update_clear(update);
    return e != ERR_OK ? e : refused;
}

uint64_t trust_next_due(const struct trust *t)
{
    uint64_t due = UINT64_MAX;
    if (t->dirty)
        return t->now_us;
    for (uint32_t i = 0; i < t->n_tokens; i++)
        due = MIN_OF(due, t->tokens[i].expires_at_us);
    for (uint32_t i = 0; i < t->n_talks; i++) {
        const struct talk *talk = &t->talks[i];
        if (talk->state == TALK_SIGN)
            return t->now_us;
        if (talk->state == TALK_MEMBER)
            due = MIN_OF(due, t->digest_due_us);
        else if (talk->state != TALK_CLOSED)
            due = MIN_OF(due, talk->deadline_us);
    }
    return due;
}
