/* The trust core: who is a member of our cluster, and the conversation that proves it (PROTOCOL 1).
 *
 * A node founds a cluster of one at its first start. Authority is a chain of signed membership
 * records back to the founder; the cluster secrets are only the gate that keeps strangers from a
 * handshake. Records and revocations form a set that only grows and is reconciled between members,
 * so that all who hold the same set draw the same conclusions, in whatever order it came:
 *
 * - A revocation counts when its issuer was ever admitted with the right to admit, whatever became
 * of it later (a revocation is for ever). Of two that revoke each other the one with the shorter
 * chain to the founder wins, then the smaller key; the loser's revocation is void. A revocation of
 * the founder is void: a lost founder means a new cluster.
 * - A member is the founder, or has a record from a member that may admit, and is not revoked. A
 * node whose only issuers are revoked is pending until a member admits it again (TRUST_APPROVE).
 *
 * The caller gives every session that finished its handshake to TRUST_SESSION_UP, and passes frames
 * of CHANNEL_TRUST to TRUST_MESSAGE. It lets no frame of another channel through before
 * TRUST_EFFECT_AUTHENTICATED for that session. `update.persist` must be on disk before anything
 * else in the update is done and before the next call: rule 1.6 rests on it.
 *
 * Not here: sockets, the search for peers, liveness, boot_id conflicts (discovery). */
#ifndef COVEY_PROTO_TRUST_H
#define COVEY_PROTO_TRUST_H

#include "base/buf.h"
#include "base/err.h"
#include "base/id.h"
#include "base/util.h"
#include "proto/identity.h"
#include "proto/random.h"
#include "proto/session.h"
#include "proto/token.h"
#include "proto/wire.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    TRUST_RECORDS_MAX = 1024,
    TRUST_REVOCATIONS_MAX = 512,
    TRUST_MEMBERS_MAX = 512, /* distinct keys in the set */
    TRUST_SECRETS_MAX = 32,  /* the newest are kept; a machine that slept longer joins again */
    TRUST_TOKENS_MAX = 16,   /* open at once */
    TRUST_USED_MAX = 64,     /* spent tokens remembered on disk */
    TRUST_SESSIONS_MAX = 1024,
    TRUST_CHAIN_MAX = 32, /* longest chain of admissions that counts */
    TRUST_STORED_MAX = 1024 * 1024,
    TRUST_NAME_MAX = 64,                  /* with the NUL */
    TRUST_VERSION_MAX = 32,               /* with the NUL */
    TRUST_INTRODUCE_US = 3 * 1000 * 1000, /* from session up to authenticated */
    TRUST_JOIN_US = 10 * 1000 * 1000,     /* from JOIN to WELCOME: two writes to disk */
    TRUST_DIGEST_US = 60 * 1000 * 1000,   /* digests are compared again, should a message be lost */
    TRUST_INVITE_US_DEFAULT = 600 * 1000 * 1000,
};

enum { CLUSTER_TAG_NONCE_BYTES = 8, CLUSTER_TAG_BYTES = CLUSTER_TAG_NONCE_BYTES + 16 };

/* What a node says of itself when it introduces itself. */
struct trust_self {
    uint64_t boot_id; /* random at each start */
    char name[TRUST_NAME_MAX];
    char version[TRUST_VERSION_MAX]; /* of the software */
    uint16_t control_port, data_port;
    uint16_t protocol_min, protocol_max;
};

struct trust_options {
    struct trust_self self;
    struct random_source random;
};

enum trust_origin {
    TRUST_FOUNDED, /* nothing was stored */
    TRUST_LOADED,
    TRUST_STARTED_OVER /* what was stored belongs to another key (a cloned disk) */
};

enum trust_event_kind {
    TRUST_TICK,
    TRUST_SESSION_UP,   /* session, peer_static, psk_tag */
    TRUST_MESSAGE,      /* session, bytes, len */
    TRUST_SESSION_DOWN, /* session */
    TRUST_INVITE,       /* ttl_us (0: the default), worker: update.token is the answer */
    TRUST_CANCEL_INVITES,
    TRUST_JOIN, /* token, leave: then dial with trust_join_psk() whoever shows trust_join_tag() */
    TRUST_JOIN_CANCEL,
    TRUST_LEAVE,   /* forget the cluster and found another: also `covey cluster reset` */
    TRUST_REVOKE,  /* key */
    TRUST_APPROVE, /* key, worker: admit a pending node */
    TRUST_SELF,    /* self: name or ports changed; for introductions from now on */
};

struct trust_event {
    enum trust_event_kind kind;
    uint64_t now_us; /* monotonic, and stops while the machine sleeps */
    uint64_t session;
    uint8_t peer_static[SESSION_KEY_BYTES];
    uint64_t
        psk_tag; /* as the session reported it: from trust_psks(), or of the psk dialled with */
    const uint8_t *bytes;
    uint32_t len;
    uint64_t ttl_us;
    bool worker, leave;
    struct token token;
    struct node_id key;
    const struct trust_self *self;
};

/* Why a session was not accepted, or one that was is closed. */
enum trust_reason {
    TRUST_REASON_NONE,
    TRUST_REASON_MALFORMED,  /* bytes that break the conversation */
    TRUST_REASON_IMPOSTOR,   /* the session's key does not belong to the identity it claims */
    TRUST_REASON_FOREIGN,    /* a member of another cluster */
    TRUST_REASON_NOT_MEMBER, /* no chain of records to the founder */
    TRUST_REASON_PENDING,    /* its issuer was revoked */
    TRUST_REASON_REVOKED,
    TRUST_REASON_TOKEN,        /* the token is spent, expired or not ours */
    TRUST_REASON_INCOMPATIBLE, /* no common protocol version */
    TRUST_REASON_SELF,         /* we dialled ourselves */
    TRUST_REASON_CLONE,        /* our own key with another boot_id */
    TRUST_REASON_TIMEOUT,
    TRUST_REASON_LEFT, /* we left that cluster */
    TRUST_REASON_BUSY, /* too many sessions, or the cluster is full */
    TRUST_REASON_N
};
/* A word for logs and JSON. Never NULL. */
const char *trust_reason_name(enum trust_reason reason);

enum trust_effect_kind {
    TRUST_EFFECT_AUTHENTICATED, /* session, peer: other channels may be read and written from now on
                                 */
    TRUST_EFFECT_REJECTED,      /* session, reason, peer as far as known: by us. CLOSE follows */
    TRUST_EFFECT_REFUSED,       /* session, reason: the peer will not have us. CLOSE follows */
    TRUST_EFFECT_CLOSE,         /* session: close it after what the outbox holds for it is sent */
    TRUST_EFFECT_JOINED,        /* peer.id: we are a member of its cluster now */
    TRUST_EFFECT_JOIN_FAILED,   /* reason */
    TRUST_EFFECT_ADMITTED,      /* peer.id: joined with a token of ours, or approved by us */
    TRUST_EFFECT_MEMBERS_CHANGED,
    TRUST_EFFECT_SECRETS_CHANGED, /* dial with, accept and announce anew */
    TRUST_EFFECT_INVITES_CHANGED, /* announce and accept anew */
    TRUST_EFFECT_PENDING,         /* peer.id: became pending by a revocation */
    TRUST_EFFECT_EXPELLED,        /* we are revoked (reason REVOKED) or pending ourselves */
};

/* What the peer said of itself; valid text, whatever was sent. */
struct trust_peer {
    struct node_id id;
    struct trust_self self;
    uint16_t protocol; /* the highest that both speak */
};

struct trust_effect {
    enum trust_effect_kind kind;
    uint64_t session;
    enum trust_reason reason;
    struct trust_peer peer;
};

struct trust_update {
    struct buf persist; /* when not empty: to disk first */
    struct outbox out;  /* frames of CHANNEL_TRUST, addressed by `session` */
    struct trust_effect *effects;
    uint32_t n_effects, cap_effects;
    struct token token;     /* of TRUST_INVITE */
    uint64_t expires_at_us; /* of TRUST_INVITE, on the clock of now_us */
};
#define TRUST_UPDATE_INIT                                                                          \
    ((struct trust_update){.persist = BUF_INIT(TRUST_STORED_MAX), .out = OUTBOX_INIT})
/* Empties it for the next step, keeping its memory. */
void trust_update_clear(struct trust_update *u);
void trust_update_deinit(struct trust_update *u);

struct trust;

/* `stored` is what the last `persist` held, or NULL at the first start. Do a TRUST_TICK next: a
 * cluster founded here is persisted by it. ERR_CORRUPT: damaged (never replaced silently);
 * ERR_UNSUPPORTED: of a later version; ERR_NO_MEMORY. */
enum err trust_new(const struct identity *identity, const uint8_t *stored, size_t n_stored,
                   const struct trust_options *options, struct trust **ret);
void trust_free(struct trust *t);
DEFINE_CLEANUP(struct trust, trust_free)

/* One event. The update must be empty; do what it says also when a request is refused. Outcomes of
 * requests (nothing but requests is refused): TRUST_INVITE: ERR_DENIED (a worker, or not a member),
 * ERR_BUSY. TRUST_JOIN: ERR_DENIED (in a cluster of more than one, without `leave`), ERR_EXISTS (a
 * token of our own). TRUST_REVOKE: ERR_DENIED (a worker; ourselves, the founder, or one that our
 * own membership rests on), ERR_NOT_FOUND, ERR_EXISTS. TRUST_APPROVE: ERR_DENIED, ERR_NOT_FOUND
 * (never admitted by anyone), ERR_EXISTS. ERR_LIMIT: the set is full. ERR_NO_MEMORY for any event:
 * the core stays consistent. */
enum err trust_step(struct trust *t, const struct trust_event *event, struct trust_update *update);
/* When the next TRUST_TICK is due; UINT64_MAX: no need. */
uint64_t trust_next_due(const struct trust *t);

enum trust_origin trust_origin(const struct trust *t);
const struct node_id *trust_self_id(const struct trust *t);
const struct node_id *trust_founder(const struct trust *t);
/* Names the cluster; not secret, but shown to members only. */
const struct hash256 *trust_cluster_id(const struct trust *t);

enum trust_role {
    TRUST_ROLE_NONE,
    TRUST_ROLE_MEMBER,
    TRUST_ROLE_WORKER,
    TRUST_ROLE_PENDING,
    TRUST_ROLE_REVOKED
};
struct trust_member {
    struct node_id id;
    enum trust_role role;
    struct node_id issuer; /* the one whose admission counts; the founder is its own */
    uint32_t depth;        /* admissions from the founder; UINT32_MAX when there is no chain */
};
bool trust_is_member(const struct trust *t, const struct node_id *id);
enum trust_role trust_role(const struct trust *t, const struct node_id *id);
/* Every key of the set (members, pending, revoked) in order of key, i from 0; false past the last.
 */
bool trust_member_at(const struct trust *t, uint32_t i, struct trust_member *ret);
uint32_t trust_n_members(const struct trust *t); /* roles member and worker, ourselves included */

/* What a responder accepts: every secret held and the psk of every open token, at most
 * SESSION_PSKS_MAX; returns how many. */
uint32_t trust_psks(const struct trust *t, uint64_t now_us,
                    struct session_psk ret[SESSION_PSKS_MAX]);
/* What an initiator dials a member with: the newest secret. */
void trust_dial_psk(const struct trust *t, struct session_psk *ret);
/* The same for the attempt-th dial in a row (from 0) that this member dropped at the first message:
 * after the newest the older ones in turn. A departure from "dials with the newest" (1.2): where
 * both sides of a partition rotate the secret, neither has the other's newest, and they would never
 * meet. */
void trust_dial_psk_at(const struct trust *t, uint32_t attempt, struct session_psk *ret);
/* While a join is open: what to dial the issuer with, and the invite tag to look for. */
bool trust_join_psk(const struct trust *t, struct session_psk *ret);
bool trust_join_tag(const struct trust *t, uint8_t ret[TOKEN_TAG_BYTES]);

/* The i-th open invite's tag, to announce; false past the last. */
bool trust_invite_tag(const struct trust *t, uint32_t i, uint64_t now_us,
                      uint8_t ret[TOKEN_TAG_BYTES]);

/* mDNS cluster tag (1.8): nonce, HMAC-SHA256(newest secret, nonce and instance name) cut to 16
 * bytes. The check tries every secret held. */
void trust_cluster_tag(const struct trust *t, const uint8_t nonce[CLUSTER_TAG_NONCE_BYTES],
                       const char *instance, uint8_t ret[CLUSTER_TAG_BYTES]);
bool trust_check_cluster_tag(const struct trust *t, const uint8_t *tag, size_t n,
                             const char *instance);

/* The peer of an authenticated session; false when it is none. */
bool trust_session_peer(const struct trust *t, uint64_t session, struct trust_peer *ret);

#endif
