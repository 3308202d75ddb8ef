/* What the parts of the trust core share: trust.c (life, requests, queries), trust_talk.c (the
 * conversation), trust_store.c (the form on disk). Private to proto. */
#ifndef COVEY_PROTO_TRUST_INTERNAL_H
#define COVEY_PROTO_TRUST_INTERNAL_H

#include "proto/members.h"
#include "proto/trust.h"
#include "proto/trust.pb-c.h"

struct secret {
    uint64_t generation;
    uint8_t key[SESSION_KEY_BYTES];
};

/* What a psk's tag says: the kind in the highest byte, below it the token's or the join's serial.
 */
enum psk_kind { PSK_SECRET = 1, PSK_TOKEN = 2, PSK_JOIN = 3 };
enum { PSK_KIND_SHIFT = 56 };

struct open_token {
    struct token token;
    uint64_t serial, expires_at_us;
    bool worker;
};

enum talk_state {
    TALK_INTRODUCE, /* waits for the peer's introduction */
    TALK_JOIN,      /* issuer: waits for the joiner's request */
    TALK_SIGN,      /* issuer: "used" is on its way to disk; the next step signs */
    TALK_QUEUED,    /* joiner: another session to the issuer has the request */
    TALK_WELCOME,   /* joiner: waits for the welcome */
    TALK_MEMBER,    /* authenticated */
    TALK_CLOSED,    /* given up; the caller is closing it */
};

struct talk {
    uint64_t session, psk_tag, deadline_us;
    enum talk_state state;
    uint8_t peer_static[SESSION_KEY_BYTES];
    struct trust_peer peer; /* once introduced */
    bool worker;            /* of the token that is being redeemed */
};

struct known_role {
    struct node_id id;
    enum trust_role role;
};

struct trust {
    struct identity identity;
    struct trust_self self;
    struct random_source random;
    enum trust_origin origin;
    struct hash256 cluster;
    struct node_id founder;
    struct members *members;
    struct secret
        secrets[TRUST_SECRETS_MAX]; /* in order of (generation, key); the last is newest */
    uint32_t n_secrets;
    struct hash256 used[TRUST_USED_MAX]; /* digests of spent tokens, the latest last */
    uint32_t n_used;
    struct open_token tokens[TRUST_TOKENS_MAX];
    uint32_t n_tokens;
    struct {
        bool open, leave;
        struct token token;
        uint64_t serial;
        uint64_t session; /* the one that carries the request; 0: none yet */
    } join;
    struct talk *talks;
    uint32_t n_talks, cap_talks;
    uint64_t last_serial, now_us, digest_due_us;
    /* Of the step that runs: */
    bool dirty;         /* what is on disk is old */
    bool secrets_fresh; /* tell the others */
    bool invites_fresh;
    uint64_t source;       /* the session that the news came from; 0: ourselves */
    struct hash256 *fresh; /* items that are news */
    uint32_t n_fresh, cap_fresh;
    struct known_role *known; /* as last told to the caller, in order of key */
    uint32_t n_known;
};

/* trust.c */
enum err trust_effect(struct trust_update *u, const struct trust_effect *effect);
enum err trust_found_cluster(struct trust *t);
/* Adds and remembers what is news. As members_add. */
enum err trust_take_item(struct trust *t, const Covey__Trust__Signed *item);
/* Notes that the item (just signed by us) is news. */
enum err trust_note_fresh(struct trust *t, const struct hash256 *hash);
/* Signs a record and tells the caller. As members_admit. */
enum err trust_admit(struct trust *t, const struct node_id *key, bool worker,
                     struct trust_update *u);
/* Takes in a secret; false when it was known. */
bool trust_take_secret(struct trust *t, const struct secret *s);
void trust_drop_tokens(struct trust *t);
struct open_token *trust_find_token(struct trust *t, uint64_t serial);
void trust_spend_token(struct trust *t, struct open_token *token);
/* The join is over, however it went: what was dialled for it and is no member session closes. */
enum err trust_end_join(struct trust *t, struct trust_update *u);
/* Every session but `except` is told `reason` and closed. */
enum err trust_close_all(struct trust *t, struct trust_update *u, uint64_t except,
                         enum trust_reason reason);

/* trust_talk.c */
struct talk *talk_find(struct trust *t, uint64_t session);
enum err talk_up(struct trust *t, const struct trust_event *event, struct trust_update *u);
enum err talk_message(struct trust *t, const struct trust_event *event, struct trust_update *u);
enum err talk_down(struct trust *t, uint64_t session, struct trust_update *u);
/* Refuses the peer: tells it, tells the caller, closes. */
enum err talk_reject(struct trust *t, struct talk *talk, enum trust_reason reason,
                     struct trust_update *u);
enum err talk_send_digest(struct trust *t, struct talk *talk, struct trust_update *u);
/* Sends the news of this step to every authenticated session but the source. */
enum err talk_spread(struct trust *t, struct trust_update *u);
/* Signs what waits in TALK_SIGN: "used" is on disk. */
enum err talk_sign(struct trust *t, struct trust_update *u);
/* The next queued session carries the join, where none does. */
enum err talk_join_next(struct trust *t, struct trust_update *u);

/* trust_store.c */
enum err store_encode(const struct trust *t, struct buf *ret);
enum err store_decode(struct trust *t, const uint8_t *bytes, size_t n);
ProtobufCBinaryData pb_view(const uint8_t *bytes, size_t n);
bool pb_secret(const Covey__Trust__Secret *from, struct secret *ret);
/* A view of the item, for packing. */
void pb_item(const struct item *from, Covey__Trust__Signed *ret);

#endif
