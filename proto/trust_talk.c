/* The conversation on CHANNEL_TRUST: introduction, joining, and reconciling the set. */
#include "proto/trust_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <sodium.h>

typedef Covey__Trust__Message Message;

enum { PIECE_BYTES = 48 * 1024 }; /* of Items; a larger one would not fit a frame with its head */

struct talk *talk_find(struct trust *t, uint64_t session)
{
    for (uint32_t i = 0; i < t->n_talks; i++) {
        if (t->talks[i].session == session)
            return &t->talks[i];
    }
    return NULL;
}

static enum psk_kind kind_of(const struct talk *talk)
{
    return (enum psk_kind)(talk->psk_tag >> PSK_KIND_SHIFT);
}

static uint64_t serial_of(const struct talk *talk)
{
    return talk->psk_tag & ((UINT64_C(1) << PSK_KIND_SHIFT) - 1);
}

static enum err send_message(const struct talk *talk, const Message *m, struct trust_update *u)
{
    size_t n = covey__trust__message__get_packed_size(m);
    assert(n <= FRAME_PAYLOAD_MAX);
    _cleanup_(freep) uint8_t *bytes = malloc(n ? n : 1);
    if (!bytes)
        return ERR_NO_MEMORY;
    (void)covey__trust__message__pack(m, bytes);
    enum err e = outbox_push(&u->out, &(struct wire_message){.session = talk->session,
                                                             .to = talk->peer.id,
                                                             .channel = CHANNEL_TRUST,
                                                             .way = WAY_SESSION,
                                                             .len = (uint32_t)n,
                                                             .bytes = bytes});
    sodium_memzero(bytes, n); /* secrets may be in it */
    /* A full box loses the message: the next digest makes up for it. */
    return e == ERR_LIMIT ? ERR_OK : e;
}

static enum err send_reject(const struct talk *talk, enum trust_reason reason,
                            struct trust_update *u)
{
    Message m = COVEY__TRUST__MESSAGE__INIT;
    Covey__Trust__Reject reject = COVEY__TRUST__REJECT__INIT;
    reject.reason = reason;
    m.what_case = COVEY__TRUST__MESSAGE__WHAT_REJECT;
    m.reject = &reject;
    return send_message(talk, &m, u);
}

/* Tells the caller how the talk ended, and that a join ended with it. */
static enum err end_talk(struct trust *t, struct talk *talk, enum trust_effect_kind kind,
                         enum trust_reason reason, struct trust_update *u)
{
    struct trust_effect effect = {
        .kind = kind, .session = talk->session, .reason = reason, .peer = talk->peer};
    talk->state = TALK_CLOSED;
    TRY(trust_effect(u, &effect));
    effect.kind = TRUST_EFFECT_CLOSE;
    TRY(trust_effect(u, &effect));
    bool is_late = t->join.session != 0 && t->join.session != talk->session;
    bool is_flake = t->join.session == 0 && reason == TRUST_REASON_TIMEOUT;
    if (kind_of(talk) != PSK_JOIN || !t->join.open || is_late || is_flake ||
        serial_of(talk) != t->join.serial)
        return ERR_OK;
    effect.kind = TRUST_EFFECT_JOIN_FAILED;
    TRY(trust_effect(u, &effect));
    return trust_end_join(t, u);
}

enum err talk_reject(struct trust *t, struct talk *talk, enum trust_reason reason,
                     struct trust_update *u)
{
    if (talk->state == TALK_CLOSED)
        return ERR_OK;
    TRY(send_reject(talk, reason, u));
    return end_talk(t, talk, TRUST_EFFECT_REJECTED, reason, u);
}

/* Introductions. */

enum { PLEA_MAX = 64, PLEA_BYTES = 24 * 1024 };

/* Our own revocations, as many as fit beside the chain. */
static size_t view_revocations(const struct trust *t, Covey__Trust__Signed items[PLEA_MAX],
                               Covey__Trust__Signed *pointers[PLEA_MAX])
{
    size_t n = 0, n_bytes = 0;
    for (uint32_t i = members_n_items(t->members); i-- > 0 && n < PLEA_MAX;) {
        const struct item *item = members_item(t->members, i);
        if (item->kind != ITEM_REVOCATION || !node_id_eq(&item->issuer, &t->identity.id) ||
            n_bytes + item->n_body > PLEA_BYTES)
            continue;
        n_bytes += item->n_body;
        pb_item(item, &items[n]);
        pointers[n] = &items[n];
        n++;
    }
    return n;
}

static enum err send_introduction(struct trust *t, const struct talk *talk, struct trust_update *u)
{
    Message m = COVEY__TRUST__MESSAGE__INIT;
    Covey__Trust__Introduce intro = COVEY__TRUST__INTRODUCE__INIT;
    const struct item *chain[TRUST_CHAIN_MAX];
    Covey__Trust__Signed items[TRUST_CHAIN_MAX], *pointers[TRUST_CHAIN_MAX];
    Covey__Trust__Signed plea[PLEA_MAX], *plea_pointers[PLEA_MAX];
    intro.id = pb_view(t->identity.id.bytes, sizeof t->identity.id.bytes);
    intro.static_signature = pb_view(t->identity.static_signature, IDENTITY_SIGNATURE_BYTES);
    intro.boot_id = t->self.boot_id;
    intro.version = t->self.version;
    intro.name = t->self.name;
    intro.protocol_min = t->self.protocol_min;
    intro.protocol_max = t->self.protocol_max;
    intro.control_port = t->self.control_port;
    intro.data_port = t->self.data_port;
    if (kind_of(talk) != PSK_JOIN) {
        intro.cluster = pb_view(t->cluster.bytes, sizeof t->cluster.bytes);
        intro.n_chain = members_chain(t->members, &t->identity.id, chain);
        for (size_t i = 0; i < intro.n_chain; i++) {
            pb_item(chain[i], &items[i]);
            pointers[i] = &items[i];
        }
        intro.chain = pointers;
        intro.n_revocations = view_revocations(t, plea, plea_pointers);
        intro.revocations = plea_pointers;
    }
    m.what_case = COVEY__TRUST__MESSAGE__WHAT_INTRODUCE;
    m.introduce = &intro;
    return send_message(talk, &m, u);
}

/* The number of bytes of the UTF-8 character at s, 0 when it is none that may be shown. */
static size_t character_at(const uint8_t *s)
{
    if (s[0] < 0x80)
        return s[0] >= 0x20 && s[0] != 0x7f;
    size_t n = s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : s[0] >= 0xe0 ? 3 : s[0] >= 0xc2 ? 2 : 0;
    if (n == 0 || s[0] >= 0xf5 || (s[0] == 0xc2 && s[1] < 0xa0)) /* C1 controls */
        return 0;
    for (size_t i = 1; i < n; i++) {
        if ((s[i] & 0xc0) != 0x80) /* stops at the NUL too */
            return 0;
    }
    bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    bool outside = (s[0] == 0xed && s[1] >= 0xa0) || (s[0] == 0xf4 && s[1] >= 0x90);
    return overlong || outside ? 0 : n;
}

/* As much as fits, with '?' for what is not text. */
static void copy_text(char *to, size_t cap, const char *from)
{
    size_t at = 0;
    while (*from) {
        size_t n = character_at((const uint8_t *)from);
        if (at + MAX_OF(n, 1u) >= cap)
            break;
        if (n)
            memcpy(to + at, from, n);
        else
            to[at] = '?';
        n = MAX_OF(n, 1u);
        at += n;
        from += n;
    }
    to[at] = 0;
}

static enum trust_reason read_peer(const struct trust *t, const struct talk *talk,
                                   const Covey__Trust__Introduce *intro, struct trust_peer *ret)
{
    if (intro->id.len != sizeof ret->id.bytes ||
        intro->static_signature.len != IDENTITY_SIGNATURE_BYTES ||
        intro->protocol_min > UINT16_MAX || intro->protocol_max > UINT16_MAX ||
        intro->control_port > UINT16_MAX || intro->data_port > UINT16_MAX)
        return TRUST_REASON_MALFORMED;
    *ret = (struct trust_peer){{{0}}};
    memcpy(ret->id.bytes, intro->id.data, sizeof ret->id.bytes);
    if (!identity_verify_static(&ret->id, talk->peer_static, intro->static_signature.data))
        return TRUST_REASON_IMPOSTOR;
    ret->self.boot_id = intro->boot_id;
    copy_text(ret->self.name, sizeof ret->self.name, intro->name);
    copy_text(ret->self.version, sizeof ret->self.version, intro->version);
    ret->self.control_port = (uint16_t)intro->control_port;
    ret->self.data_port = (uint16_t)intro->data_port;
    ret->self.protocol_min = (uint16_t)intro->protocol_min;
    ret->self.protocol_max = (uint16_t)intro->protocol_max;
    ret->protocol = MIN_OF(ret->self.protocol_max, t->self.protocol_max);
    if (node_id_eq(&ret->id, &t->identity.id))
        return ret->self.boot_id == t->self.boot_id ? TRUST_REASON_SELF : TRUST_REASON_CLONE;
    if (ret->protocol < MAX_OF(ret->self.protocol_min, t->self.protocol_min))
        return TRUST_REASON_INCOMPATIBLE;
    return TRUST_REASON_NONE;
}

static bool is_our_cluster(const struct trust *t, const ProtobufCBinaryData *cluster)
{
    return cluster->len == sizeof t->cluster.bytes &&
           memcmp(cluster->data, t->cluster.bytes, sizeof t->cluster.bytes) == 0;
}

static bool belongs(enum trust_role role)
{
    return role == TRUST_ROLE_MEMBER || role == TRUST_ROLE_WORKER;
}

static enum err authenticate(struct trust *t, struct talk *talk, struct trust_update *u)
{
    talk->state = TALK_MEMBER;
    if (t->digest_due_us <= t->now_us)
        t->digest_due_us = t->now_us + TRUST_DIGEST_US;
    TRY(trust_effect(u, &(struct trust_effect){.kind = TRUST_EFFECT_AUTHENTICATED,
                                               .session = talk->session,
                                               .peer = talk->peer}));
    return talk_send_digest(t, talk, u);
}

/* A peer that is out may have overruled the one who put it out (1.5) where we did not hear it: its
 * own revocations are taken in if with them it is a member, and not otherwise, for else one that
 * was revoked could revoke whom it likes. */
static enum err hear_plea(struct trust *t, const struct talk *talk,
                          const Covey__Trust__Introduce *intro)
{
    _cleanup_(members_freep) struct members *with = NULL;
    struct hash256 fresh[PLEA_MAX];
    uint32_t n_fresh = 0;
    TRY(members_clone(t->members, &with));
    for (size_t i = 0; i < intro->n_revocations && n_fresh < PLEA_MAX; i++) {
        const Covey__Trust__Signed *item = intro->revocations[i];
        bool is_new = false;
        if (item->kind != COVEY__TRUST__KIND__KIND_REVOCATION ||
            item->signature.len != IDENTITY_SIGNATURE_BYTES)
            continue;
        enum err e = members_add(with, ITEM_REVOCATION, item->body.data, item->body.len,
                                 item->signature.data, &is_new);
        if (e == ERR_NO_MEMORY)
            return e;
        if (is_new)
            item_hash(ITEM_REVOCATION, item->body.data, item->body.len, item->signature.data,
                      &fresh[n_fresh++]);
    }
    TRY(members_settle(with));
    if (n_fresh == 0 || !belongs(members_role(with, &talk->peer.id)))
        return ERR_OK;
    for (uint32_t i = 0; i < n_fresh; i++)
        TRY(trust_note_fresh(t, &fresh[i]));
    members_free(t->members);
    t->members = TAKE(with);
    return ERR_OK;
}

/* Rule 1.4 for a session between members. */
static enum err introduce_member(struct trust *t, struct talk *talk,
                                 const Covey__Trust__Introduce *intro, struct trust_update *u)
{
    if (!is_our_cluster(t, &intro->cluster))
        return talk_reject(t, talk, TRUST_REASON_FOREIGN, u);
    for (size_t i = 0; i < intro->n_chain && i < TRUST_CHAIN_MAX; i++) {
        enum err e = trust_take_item(t, intro->chain[i]);
        if (e == ERR_NO_MEMORY)
            return e;
        if (e != ERR_OK)
            break; /* the rest hangs on this one; the verdict is below */
    }
    TRY(members_settle(t->members));
    if (intro->n_revocations && !belongs(members_role(t->members, &talk->peer.id)))
        TRY(hear_plea(t, talk, intro));
    switch (members_role(t->members, &talk->peer.id)) {
    case TRUST_ROLE_MEMBER:
    case TRUST_ROLE_WORKER:
        return authenticate(t, talk, u);
    case TRUST_ROLE_PENDING:
        return talk_reject(t, talk, TRUST_REASON_PENDING, u);
    case TRUST_ROLE_REVOKED:
        return talk_reject(t, talk, TRUST_REASON_REVOKED, u);
    case TRUST_ROLE_NONE:
        break;
    }
    return talk_reject(t, talk, TRUST_REASON_NOT_MEMBER, u);
}

/* Why the token's holder cannot be admitted, if so. */
static enum trust_reason check_joiner(struct trust *t, const struct talk *talk)
{
    const struct open_token *token = trust_find_token(t, serial_of(talk));
    enum trust_role role = members_role(t->members, &talk->peer.id);
    if (role == TRUST_ROLE_REVOKED)
        return TRUST_REASON_REVOKED;
    if (!token || members_role(t->members, &t->identity.id) != TRUST_ROLE_MEMBER)
        return TRUST_REASON_TOKEN;
    /* One that has a record already is welcome: it left, or our welcome was lost. */
    return TRUST_REASON_NONE;
}

static enum err on_introduce(struct trust *t, struct talk *talk,
                             const Covey__Trust__Introduce *intro, struct trust_update *u)
{
    if (talk->state != TALK_INTRODUCE)
        return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
    enum trust_reason reason = read_peer(t, talk, intro, &talk->peer);
    if (reason != TRUST_REASON_NONE)
        return talk_reject(t, talk, reason, u);
    switch (kind_of(talk)) {
    case PSK_SECRET:
        return introduce_member(t, talk, intro, u);
    case PSK_TOKEN:
        reason = check_joiner(t, talk);
        if (reason != TRUST_REASON_NONE)
            return talk_reject(t, talk, reason, u);
        talk->state = TALK_JOIN;
        talk->deadline_us = t->now_us + TRUST_JOIN_US;
        return ERR_OK;
    case PSK_JOIN:
        break;
    }
    talk->state = TALK_QUEUED;
    return talk_join_next(t, u);
}

/* Joining. */

enum err talk_join_next(struct trust *t, struct trust_update *u)
{
    if (!t->join.open || t->join.session != 0)
        return ERR_OK;
    for (uint32_t i = 0; i < t->n_talks; i++) {
        struct talk *talk = &t->talks[i];
        if (talk->state != TALK_QUEUED || serial_of(talk) != t->join.serial)
            continue;
        Message m = COVEY__TRUST__MESSAGE__INIT;
        Covey__Trust__Join join = COVEY__TRUST__JOIN__INIT;
        m.what_case = COVEY__TRUST__MESSAGE__WHAT_JOIN;
        m.join = &join;
        t->join.session = talk->session;
        talk->state = TALK_WELCOME;
        talk->deadline_us = t->now_us + TRUST_JOIN_US;
        return send_message(talk, &m, u);
    }
    return ERR_OK;
}

static enum err on_join(struct trust *t, struct talk *talk, struct trust_update *u)
{
    if (talk->state != TALK_JOIN)
        return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
    enum trust_reason reason = check_joiner(t, talk);
    if (reason != TRUST_REASON_NONE)
        return talk_reject(t, talk, reason, u);
    struct open_token *token = trust_find_token(t, serial_of(talk));
    talk->worker = token->worker;
    talk->state = TALK_SIGN;
    trust_spend_token(t, token);
    return ERR_OK;
}

static enum err send_welcome(struct trust *t, const struct talk *talk, struct trust_update *u)
{
    Message m = COVEY__TRUST__MESSAGE__INIT;
    Covey__Trust__Welcome welcome = COVEY__TRUST__WELCOME__INIT;
    Covey__Trust__Secret secrets[TRUST_SECRETS_MAX], *secret_pointers[TRUST_SECRETS_MAX];
    Covey__Trust__Signed items[2 * TRUST_CHAIN_MAX], *item_pointers[2 * TRUST_CHAIN_MAX];
    const struct item *chain[2 * TRUST_CHAIN_MAX];
    for (uint32_t i = 0; i < t->n_secrets; i++) {
        covey__trust__secret__init(&secrets[i]);
        secrets[i].generation = t->secrets[i].generation;
        secrets[i].key = pb_view(t->secrets[i].key, sizeof t->secrets[i].key);
        secret_pointers[i] = &secrets[i];
    }
    uint32_t n = members_chain(t->members, &t->identity.id, chain);
    n += members_chain(t->members, &talk->peer.id, chain + n);
    for (uint32_t i = 0; i < n; i++) {
        pb_item(chain[i], &items[i]);
        item_pointers[i] = &items[i];
    }
    welcome.cluster = pb_view(t->cluster.bytes, sizeof t->cluster.bytes);
    welcome.founder = pb_view(t->founder.bytes, sizeof t->founder.bytes);
    welcome.n_secrets = t->n_secrets;
    welcome.secrets = secret_pointers;
    welcome.n_items = n;
    welcome.items = item_pointers;
    m.what_case = COVEY__TRUST__MESSAGE__WHAT_WELCOME;
    m.welcome = &welcome;
    return send_message(talk, &m, u);
}

static enum err sign_one(struct trust *t, struct talk *talk, struct trust_update *u)
{
    if (members_role(t->members, &t->identity.id) != TRUST_ROLE_MEMBER)
        return talk_reject(t, talk, TRUST_REASON_TOKEN, u);
    enum err e = trust_admit(t, &talk->peer.id, talk->worker, u);
    if (e == ERR_NO_MEMORY)
        return e;
    if (e != ERR_OK || !belongs(members_role(t->members, &talk->peer.id)))
        return talk_reject(t, talk, TRUST_REASON_BUSY, u);
    TRY(send_welcome(t, talk, u));
    return authenticate(t, talk, u);
}

enum err talk_sign(struct trust *t, struct trust_update *u)
{
    if (t->dirty) /* "used" did not get to disk */
        return ERR_OK;
    for (uint32_t i = 0; i < t->n_talks; i++) {
        if (t->talks[i].state == TALK_SIGN)
            TRY(sign_one(t, &t->talks[i], u));
    }
    return ERR_OK;
}

/* The set that the welcome describes makes us a member, and the one that welcomes us may admit. */
static enum trust_reason check_welcome(struct trust *t, const struct talk *talk,
                                       const Covey__Trust__Welcome *welcome,
                                       struct members *members)
{
    for (size_t i = 0; i < welcome->n_items; i++) {
        const Covey__Trust__Signed *item = welcome->items[i];
        bool is_new;
        if (item->signature.len != IDENTITY_SIGNATURE_BYTES ||
            members_add(members, (enum item_kind)item->kind, item->body.data, item->body.len,
                        item->signature.data, &is_new) != ERR_OK)
            return TRUST_REASON_MALFORMED;
    }
    if (members_settle(members) != ERR_OK)
        return TRUST_REASON_BUSY;
    if (!belongs(members_role(members, &t->identity.id)) ||
        members_role(members, &talk->peer.id) != TRUST_ROLE_MEMBER)
        return TRUST_REASON_NOT_MEMBER;
    return TRUST_REASON_NONE;
}

static enum err become_member(struct trust *t, struct talk *talk,
                              const Covey__Trust__Welcome *welcome, struct members *members,
                              struct trust_update *u)
{
    bool is_other = members != t->members;
    memset(&t->join, 0, sizeof t->join);
    if (is_other) {
        members_free(t->members);
        t->members = members;
        trust_drop_tokens(t);
        memcpy(t->cluster.bytes, welcome->cluster.data, sizeof t->cluster.bytes);
        memcpy(t->founder.bytes, welcome->founder.data, sizeof t->founder.bytes);
        t->n_secrets = 0;
    }
    t->dirty = true;
    for (size_t i = 0; i < welcome->n_secrets; i++) {
        struct secret secret;
        if (pb_secret(welcome->secrets[i], &secret))
            (void)trust_take_secret(t, &secret);
    }
    if (is_other)
        TRY(trust_close_all(t, u, talk->session, TRUST_REASON_LEFT));
    TRY(trust_effect(u, &(struct trust_effect){.kind = TRUST_EFFECT_JOINED,
                                               .session = talk->session,
                                               .peer = talk->peer}));
    return authenticate(t, talk, u);
}

static enum err on_welcome(struct trust *t, struct talk *talk, const Covey__Trust__Welcome *welcome,
                           struct trust_update *u)
{
    struct secret first;
    struct node_id founder;
    struct hash256 cluster;
    if (talk->state != TALK_WELCOME || welcome->cluster.len != sizeof cluster.bytes ||
        welcome->founder.len != sizeof founder.bytes || welcome->n_secrets == 0 ||
        !pb_secret(welcome->secrets[0], &first))
        return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
    memcpy(cluster.bytes, welcome->cluster.data, sizeof cluster.bytes);
    memcpy(founder.bytes, welcome->founder.data, sizeof founder.bytes);
    if (hash256_eq(&cluster, &t->cluster)) { /* pending, and admitted again by a token */
        if (!node_id_eq(&founder, &t->founder))
            return talk_reject(t, talk, TRUST_REASON_FOREIGN, u);
        t->dirty = true;
        enum trust_reason reason = check_welcome(t, talk, welcome, t->members);
        return reason == TRUST_REASON_NONE ? become_member(t, talk, welcome, t->members, u)
                                           : talk_reject(t, talk, reason, u);
    }
    if (members_count(t->members) > 1 && !t->join.leave) /* somebody joined us meanwhile */
        return talk_reject(t, talk, TRUST_REASON_BUSY, u);
    _cleanup_(members_freep) struct members *members = NULL;
    TRY(members_new(&cluster, &founder, &members));
    enum trust_reason reason = check_welcome(t, talk, welcome, members);
    if (reason != TRUST_REASON_NONE)
        return talk_reject(t, talk, reason, u);
    return become_member(t, talk, welcome, TAKE(members), u);
}

/* Reconciling. */

static void digest_of(const struct trust *t, struct hash256 *ret)
{
    struct hash256 items;
    crypto_generichash_state state;
    members_digest(t->members, &items);
    (void)crypto_generichash_init(&state, NULL, 0, sizeof ret->bytes);
    (void)crypto_generichash_update(&state, items.bytes, sizeof items.bytes);
    for (uint32_t i = 0; i < t->n_secrets; i++)
        (void)crypto_generichash_update(&state, t->secrets[i].key, sizeof t->secrets[i].key);
    (void)crypto_generichash_final(&state, ret->bytes, sizeof ret->bytes);
}

enum err talk_send_digest(struct trust *t, struct talk *talk, struct trust_update *u)
{
    Message m = COVEY__TRUST__MESSAGE__INIT;
    Covey__Trust__Digest digest = COVEY__TRUST__DIGEST__INIT;
    struct hash256 hash;
    TRY(members_settle(t->members));
    digest_of(t, &hash);
    digest.digest = pb_view(hash.bytes, sizeof hash.bytes);
    m.what_case = COVEY__TRUST__MESSAGE__WHAT_DIGEST;
    m.digest = &digest;
    return send_message(talk, &m, u);
}

static enum err send_secrets(struct trust *t, const struct talk *talk, struct trust_update *u)
{
    Message m = COVEY__TRUST__MESSAGE__INIT;
    Covey__Trust__Secrets message = COVEY__TRUST__SECRETS__INIT;
    Covey__Trust__Secret secrets[TRUST_SECRETS_MAX], *pointers[TRUST_SECRETS_MAX];
    for (uint32_t i = 0; i < t->n_secrets; i++) {
        covey__trust__secret__init(&secrets[i]);
        secrets[i].generation = t->secrets[i].generation;
        secrets[i].key = pb_view(t->secrets[i].key, sizeof t->secrets[i].key);
        pointers[i] = &secrets[i];
    }
    message.n_secrets = t->n_secrets;
    message.secrets = pointers;
    m.what_case = COVEY__TRUST__MESSAGE__WHAT_SECRETS;
    m.secrets = &message;
    return send_message(talk, &m, u);
}

/* Items that are packed into one message until it is full. */
struct piece {
    Covey__Trust__Signed items[PIECE_BYTES / 128], *pointers[PIECE_BYTES / 128];
    size_t n, n_bytes;
};

static enum err send_piece(const struct talk *talk, struct piece *piece, struct trust_update *u)
{
    Message m = COVEY__TRUST__MESSAGE__INIT;
    Covey__Trust__Items items = COVEY__TRUST__ITEMS__INIT;
    if (piece->n == 0)
        return ERR_OK;
    items.n_items = piece->n;
    items.items = piece->pointers;
    m.what_case = COVEY__TRUST__MESSAGE__WHAT_ITEMS;
    m.items = &items;
    piece->n = piece->n_bytes = 0;
    return send_message(talk, &m, u);
}

static bool is_fresh(const struct trust *t, const struct item *item)
{
    for (uint32_t i = 0; i < t->n_fresh; i++) {
        if (hash256_eq(&t->fresh[i], &item->hash))
            return true;
    }
    return false;
}

static enum err fill_pieces(struct trust *t, const struct talk *talk, bool fresh_only,
                            struct piece *piece, struct trust_update *u)
{
    for (uint32_t i = 0; i < members_n_items(t->members); i++) {
        const struct item *item = members_item(t->members, i);
        size_t n_bytes = item->n_body + 96; /* signature, tags and lengths */
        if (fresh_only && !is_fresh(t, item))
            continue;
        if (piece->n_bytes + n_bytes > PIECE_BYTES || piece->n == ARRAY_LEN(piece->items))
            TRY(send_piece(talk, piece, u));
        pb_item(item, &piece->items[piece->n]);
        piece->pointers[piece->n] = &piece->items[piece->n];
        piece->n++;
        piece->n_bytes += n_bytes;
    }
    return send_piece(talk, piece, u);
}

static enum err send_some(struct trust *t, const struct talk *talk, bool fresh_only,
                          struct trust_update *u)
{
    struct piece *piece = calloc(1, sizeof *piece);
    if (!piece)
        return ERR_NO_MEMORY;
    enum err e = fill_pieces(t, talk, fresh_only, piece, u);
    free(piece);
    return e;
}

static enum err send_all_items(struct trust *t, const struct talk *talk, struct trust_update *u)
{
    return send_some(t, talk, false, u);
}

static enum err send_news(struct trust *t, const struct talk *talk, struct trust_update *u)
{
    return send_some(t, talk, true, u);
}

enum err talk_spread(struct trust *t, struct trust_update *u)
{
    for (uint32_t i = 0; i < t->n_talks && (t->n_fresh || t->secrets_fresh); i++) {
        struct talk *talk = &t->talks[i];
        if (talk->state != TALK_MEMBER || talk->session == t->source)
            continue;
        if (t->n_fresh)
            TRY(send_news(t, talk, u));
        if (t->secrets_fresh)
            TRY(send_secrets(t, talk, u));
    }
    return ERR_OK;
}

static enum err on_digest(struct trust *t, struct talk *talk, const Covey__Trust__Digest *digest,
                          struct trust_update *u)
{
    struct hash256 ours;
    if (digest->digest.len != sizeof ours.bytes)
        return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
    digest_of(t, &ours);
    if (memcmp(digest->digest.data, ours.bytes, sizeof ours.bytes) == 0)
        return ERR_OK;
    TRY(send_all_items(t, talk, u));
    return send_secrets(t, talk, u);
}

static enum err on_items(struct trust *t, struct talk *talk, const Covey__Trust__Items *items,
                         struct trust_update *u)
{
    for (size_t i = 0; i < items->n_items; i++) {
        const Covey__Trust__Signed *item = items->items[i];
        if (item->kind != COVEY__TRUST__KIND__KIND_RECORD &&
            item->kind != COVEY__TRUST__KIND__KIND_REVOCATION)
            continue; /* of a later version */
        enum err e = trust_take_item(t, item);
        if (e == ERR_NO_MEMORY)
            return e;
        if (e == ERR_CORRUPT)
            return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
        /* ERR_DENIED: its issuer comes later, and this one with the next digest. ERR_LIMIT: full.
         */
    }
    return ERR_OK;
}

static enum err on_secrets(struct trust *t, struct talk *talk, const Covey__Trust__Secrets *secrets,
                           struct trust_update *u)
{
    for (size_t i = 0; i < secrets->n_secrets; i++) {
        struct secret secret;
        if (!pb_secret(secrets->secrets[i], &secret))
            return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
        (void)trust_take_secret(t, &secret);
        sodium_memzero(&secret, sizeof secret);
    }
    return ERR_OK;
}

/* What comes from the caller. */

enum err talk_up(struct trust *t, const struct trust_event *event, struct trust_update *u)
{
    assert(event->session != 0 && !talk_find(t, event->session));
    if (t->n_talks == TRUST_SESSIONS_MAX)
        return trust_effect(u, &(struct trust_effect){.kind = TRUST_EFFECT_CLOSE,
                                                      .session = event->session,
                                                      .reason = TRUST_REASON_BUSY});
    if (t->n_talks == t->cap_talks) {
        uint32_t cap = t->cap_talks ? t->cap_talks * 2 : 8;
        struct talk *talks = realloc(t->talks, cap * sizeof *talks);
        if (!talks)
            return ERR_NO_MEMORY;
        t->talks = talks;
        t->cap_talks = cap;
    }
    struct talk *talk = &t->talks[t->n_talks++];
    *talk = (struct talk){.session = event->session,
                          .psk_tag = event->psk_tag,
                          .deadline_us = t->now_us + TRUST_INTRODUCE_US};
    memcpy(talk->peer_static, event->peer_static, sizeof talk->peer_static);
    bool is_stale =
        kind_of(talk) == PSK_JOIN && (!t->join.open || serial_of(talk) != t->join.serial);
    if (is_stale || (kind_of(talk) == PSK_TOKEN && !trust_find_token(t, serial_of(talk))))
        return talk_reject(t, talk, TRUST_REASON_TOKEN, u);
    return send_introduction(t, talk, u);
}

static enum err dispatch(struct trust *t, struct talk *talk, const Message *m,
                         struct trust_update *u)
{
    switch (m->what_case) {
    case COVEY__TRUST__MESSAGE__WHAT_INTRODUCE:
        return on_introduce(t, talk, m->introduce, u);
    case COVEY__TRUST__MESSAGE__WHAT_JOIN:
        return on_join(t, talk, u);
    case COVEY__TRUST__MESSAGE__WHAT_WELCOME:
        return on_welcome(t, talk, m->welcome, u);
    case COVEY__TRUST__MESSAGE__WHAT_REJECT:
        return end_talk(t, talk, TRUST_EFFECT_REFUSED,
                        m->reject->reason < TRUST_REASON_N ? (enum trust_reason)m->reject->reason
                                                           : TRUST_REASON_NONE,
                        u);
    case COVEY__TRUST__MESSAGE__WHAT_DIGEST:
    case COVEY__TRUST__MESSAGE__WHAT_ITEMS:
    case COVEY__TRUST__MESSAGE__WHAT_SECRETS:
        break;
    default: /* of a later version */
        return ERR_OK;
    }
    if (talk->state != TALK_MEMBER)
        return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
    if (m->what_case == COVEY__TRUST__MESSAGE__WHAT_DIGEST)
        return on_digest(t, talk, m->digest, u);
    if (m->what_case == COVEY__TRUST__MESSAGE__WHAT_ITEMS)
        return on_items(t, talk, m->items, u);
    return on_secrets(t, talk, m->secrets, u);
}

enum err talk_message(struct trust *t, const struct trust_event *event, struct trust_update *u)
{
    struct talk *talk = talk_find(t, event->session);
    if (!talk || talk->state == TALK_CLOSED)
        return ERR_OK; /* was on its way when we closed */
    Message *m = event->len <= FRAME_PAYLOAD_MAX
                     ? covey__trust__message__unpack(NULL, event->len, event->bytes)
                     : NULL;
    if (!m)
        return talk_reject(t, talk, TRUST_REASON_MALFORMED, u);
    enum err e = dispatch(t, talk, m, u);
    covey__trust__message__free_unpacked(m, NULL);
    return e;
}

enum err talk_down(struct trust *t, uint64_t session, struct trust_update *u)
{
    struct talk *talk = talk_find(t, session);
    if (!talk)
        return ERR_OK;
    *talk = t->talks[--t->n_talks];
    if (t->join.session != session)
        return ERR_OK;
    t->join.session = 0;
    return talk_join_next(t, u);
}
