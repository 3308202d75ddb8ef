/* The inside of the swim core, shared by swim.c (events, timers, queries), swim_claim.c (claims,
 * suspicion, refutation, conflict), swim_probe.c (paths and probes), gossip.c (messages out, the
 * spreading of news), gossip_record.c (records and digests) and swim_wire.c (messages in). Nobody
 * else includes it. */
#ifndef COVEY_DISCOVERY_SWIM_INTERNAL_H
#define COVEY_DISCOVERY_SWIM_INTERNAL_H

#include "base/util.h"
#include "discovery/swim.h"
#include "proto/swim.pb-c.h"

enum {
    BY_MAX = 4,         /* the first suspector and the confirmations that are kept */
    ATTEMPTS_MAX = 256, /* pings in flight; older ones are forgotten */
    HELPERS_MAX = 8,    /* of one probe */
    NODES_ALL = 65,     /* [0] is ourselves */
    PATH_DOWN_AFTER =
        5,      /* lost in a row: at 10 % loss that is one false alarm in 2 * 10^5 probes */
    CROWD = 16, /* so many members probe a suspect at once, the others leave it */
    MESSAGE_CLAIMS_MAX = NODES_ALL,
    MESSAGE_RECORDS_MAX = 128,
    REPLY_MESSAGES_MAX = 16, /* to one digest or want; the next round brings the rest */
};
_Static_assert(NODES_ALL == SWIM_MEMBERS_MAX + 1, "ourselves and the others");

/* A claim with this incarnation or more is refused: nothing could refute it. */
#define INCARNATION_LIMIT (UINT64_C(1) << 62)
#define VERSION_LIMIT (UINT64_C(1) << 62)
#define PATH_SESSION UINT32_MAX /* a ping that goes over the session */
#define NEVER UINT64_MAX

#define MILLISECONDS(n) ((uint64_t)(n)*1000)
#define TELL_GAP_US MILLISECONDS(50) /* between unasked answers to one member */
#define DIGEST_PATIENCE_US                                                                         \
    MILLISECONDS(700)                   /* differing hashes: gossip gets so long to cure it        \
                                         */
#define DIGEST_GAP_US MILLISECONDS(500) /* between full digests to one member, at first */
#define DIGEST_GAP_MAX_US MILLISECONDS(10000)
#define DIGEST_ANSWER_GAP_US MILLISECONDS(200)
#define EDGE_REPORT_GAP_US MILLISECONDS(5000)
#define REFUSED_DOUBT_US MILLISECONDS(50) /* heard so long after the session closed: not dead */

struct claim {
    uint64_t boot_id, incarnation; /* incarnation 0: nothing is known */
    enum swim_state state;         /* ALIVE .. LEFT; their order is the claims' order */
    uint64_t rival;
    uint32_t n_by;
    struct node_id by[BY_MAX];
};

struct record {
    bool present;
    bool urgent;         /* our own, new: goes out with the next burst */
    uint32_t sends_left; /* > 0: rides on messages */
    uint64_t version, boot_id;
    uint32_t len;
    uint8_t *bytes;
};

struct path {
    uint32_t id;
    bool up;
    uint32_t n_rtt, next_rtt; /* ring */
    uint32_t rtt_us[SWIM_RTT_SAMPLES];
    uint32_t outcomes, n_outcomes; /* one bit for each of the last 32 probes: 1 = lost */
    uint32_t lost_in_row;
    uint64_t reported_p50_us, reported_at_us;
};

struct probe {
    bool active, asked;
    uint64_t seq, started_us, direct_at_us, end_at_us;
    uint32_t n_asked, n_nacks;
    struct node_id nacks[HELPERS_MAX];
};

struct node {
    struct node_id id;
    uint64_t id_hash;
    struct claim claim;
    bool lost;         /* UNKNOWN for too long, or refused while UNKNOWN */
    bool incompatible; /* our own view */
    uint64_t added_us, since_us, heard_us;
    bool session_up;
    uint64_t session_closed_us;
    uint64_t step, progress_at_us;
    uint32_t layers_done;

    uint32_t n_paths, path_turn;
    struct path paths[SWIM_PATHS_MAX];
    struct probe probe;

    uint64_t suspected_us; /* the suspicion's clock starts here */
    uint32_t suspicion_health;

    uint32_t sends_left;  /* of the claim */
    uint32_t bursts_left; /* it is urgent for so many bursts */
    uint32_t n_queued;    /* records with sends_left > 0 */
    bool tell; /* it speaks of itself with an older claim than ours: the next message tells it */
    uint64_t told_us;

    uint64_t differs_since_us; /* its hash is not ours; 0: equal */
    uint64_t digest_at_us, digest_gap_us, answered_us;

    struct record records[SWIM_RECORD_KINDS_MAX];
};

/* One ping in flight; the slot is seq % ATTEMPTS_MAX. */
struct attempt {
    bool open;    /* not answered, not given up */
    bool tainted; /* we were late meanwhile: no round-trip sample */
    uint64_t seq;
    struct node_id peer;
    uint32_t path;
    uint64_t sent_us, expires_us;
    bool relay; /* for another member */
    struct node_id relay_for;
    uint64_t relay_seq;
};

/* A message being put together. Lives in struct swim: too large for a stack frame. */
struct draft {
    Covey__Swim__Message message;
    Covey__Swim__Ping ping;
    Covey__Swim__Ack ack;
    Covey__Swim__PingRequest ping_request;
    Covey__Swim__IndirectAck indirect_ack;
    Covey__Swim__Nack nack;
    Covey__Swim__Digest digest;
    Covey__Swim__Want want;
    Covey__Swim__Claim claims[MESSAGE_CLAIMS_MAX];
    Covey__Swim__Claim *claim_pointers[MESSAGE_CLAIMS_MAX];
    ProtobufCBinaryData by[MESSAGE_CLAIMS_MAX][BY_MAX];
    Covey__Swim__Record records[MESSAGE_RECORDS_MAX];
    Covey__Swim__Record *record_pointers[MESSAGE_RECORDS_MAX];
    Covey__Swim__OwnerVersions owners[NODES_ALL];
    Covey__Swim__OwnerVersions *owner_pointers[NODES_ALL];
    Covey__Swim__RecordVersion versions[NODES_ALL][SWIM_RECORD_KINDS_MAX];
    Covey__Swim__RecordVersion *version_pointers[NODES_ALL][SWIM_RECORD_KINDS_MAX];
    size_t len, limit; /* bytes so far (0: not counted yet) and at most */
    bool no_news;      /* draft_send adds nothing */
    uint8_t packed[FRAME_PAYLOAD_MAX];
};

struct swim {
    struct swim_options o;
    struct rng rng;
    uint64_t now_us, due_us;
    bool silent; /* left or asleep: we neither speak nor judge */
    uint64_t awake_since_us;
    uint32_t health;
    bool was_late; /* in this round */
    uint64_t step;
    uint32_t layers_done;

    uint32_t n_nodes;
    struct node nodes[NODES_ALL]; /* [0] is ourselves */

    uint64_t next_seq;
    struct attempt attempts[ATTEMPTS_MAX];
    uint64_t attempts_due_us; /* the first to expire, unless attempts_changed */
    bool attempts_changed;

    struct node_id order[NODES_ALL]; /* this round's members, shuffled */
    uint32_t n_order, next_order;
    uint64_t probe_at_us, reprobe_at_us, gossip_at_us, digest_at_us;
    uint32_t reprobe_turn;

    uint64_t rival_incarnation; /* the highest seen under our key by another boot */
    uint64_t conflict_seen_us, conflict_claim_at_us;

    bool hash_valid;
    uint64_t hash;

    enum err failure; /* ERR_NO_MEMORY of this step, for effects */
    struct draft draft;
};

/* swim.c */
struct node *node_find(struct swim *s, const struct node_id *id);
enum swim_state node_state(const struct node *n);
/* Alive, suspect or in conflict: takes part in probing and gossip. */
bool node_is_live(const struct node *n);
uint32_t n_live(const struct swim *s); /* without ourselves */
struct swim_effect *effect_add(struct swim *s, struct swim_update *u, enum swim_effect_type type,
                               const struct node *n);
void emit_state(struct swim *s, struct swim_update *u, struct node *n, enum swim_state old);
void health_worse(struct swim *s, uint32_t by);
void health_better(struct swim *s);

/* swim_claim.c */
/* < 0, 0, > 0 by (incarnation, state, boot_id). */
int claim_cmp(const struct claim *a, const struct claim *b);
void claim_hear(struct swim *s, struct swim_update *u, struct node *n, const struct claim *c);
/* Our probe failed; the n helpers could not reach it either. */
void claim_suspect(struct swim *s, struct swim_update *u, struct node *n);
void claim_dead(struct swim *s, struct swim_update *u, struct node *n);
/* Our own new claim: a higher incarnation with this state. */
void claim_meet_rival(struct swim *s, struct swim_update *u, uint64_t boot_id);
void claim_self(struct swim *s, struct swim_update *u, enum swim_state state);
void claim_timers(struct swim *s, struct swim_update *u);
uint64_t claim_due(const struct swim *s);

/* swim_probe.c */
void probe_paths(struct swim *s, struct swim_update *u, struct node *n, const uint32_t *ids,
                 uint32_t n_ids);
void probe_start(struct swim *s, struct swim_update *u, struct node *n);
/* Starts a probe that does not wait for a direct answer before it asks helpers. */
void probe_urgently(struct swim *s, struct swim_update *u, struct node *n);
void probe_forget(struct swim *s, struct node *n);
void probe_paths_down(struct swim *s, struct swim_update *u, struct node *n);
void probe_on_ack(struct swim *s, struct swim_update *u, struct node *n, uint64_t seq);
void probe_on_request(struct swim *s, struct swim_update *u, struct node *n,
                      const struct node_id *target, uint64_t seq, uint64_t timeout_us);
void probe_on_indirect_ack(struct swim *s, const struct node_id *target, uint64_t seq,
                           uint64_t boot_id);
void probe_on_nack(struct swim *s, const struct node *n, const struct node_id *target,
                   uint64_t seq);
void probe_timers(struct swim *s, struct swim_update *u);
uint64_t probe_due(const struct swim *s);
/* Our own absence of `late_us` is nobody's fault. */
void probe_shift(struct swim *s, uint64_t late_us);
void path_view(const struct path *p, struct swim_path_view *ret);
/* Up, least loss, least p50; NULL when none is up. */
const struct path *path_best(const struct node *n);

/* gossip.c */
uint64_t hash_bytes(const uint8_t *bytes, size_t n);
uint64_t gossip_hash(struct swim *s);
/* The way for what is not a probe: datagrams while a path is up (or none is named), else the
 * session. */
enum way gossip_way(const struct node *n);
/* Begins a message; set a body in s->draft, then send it. */
struct draft *draft_begin(struct swim *s, enum way way);
/* False when it does not fit. */
bool draft_add_claim(struct draft *d, struct node *n);
bool draft_add_record(struct draft *d, struct node *n, uint8_t kind);
/* Adds the news that fits and sends. `to` is told what we hold about it when it should know. */
void draft_send(struct swim *s, struct swim_update *u, struct node *to, uint32_t path,
                enum way way);
void gossip_claim(struct swim *s, struct node *n); /* news: the claim of n changed */
void gossip_record(struct swim *s, struct node *n, uint8_t kind, bool urgent);
/* Sends the claim that we hold about `to` to itself, unless that was done just now. */
void gossip_tell(struct swim *s, struct swim_update *u, struct node *to);
void gossip_timers(struct swim *s, struct swim_update *u);
uint64_t gossip_due(const struct swim *s);

/* gossip_record.c */
enum err record_set(struct swim *s, struct swim_update *u, uint8_t kind, const uint8_t *bytes,
                    uint32_t len);
void record_hear(struct swim *s, struct swim_update *u, const Covey__Swim__Record *r);
void records_free(struct node *n);
void digest_short(struct swim *s, struct swim_update *u, struct node *to);
void digest_full(struct swim *s, struct swim_update *u, struct node *to);
void digest_hear(struct swim *s, struct swim_update *u, struct node *from,
                 const Covey__Swim__Message *m);
void want_hear(struct swim *s, struct swim_update *u, struct node *from,
               const Covey__Swim__Want *want);
/* The hash that came with a message: a lasting difference brings a full digest. */
void digest_compare(struct swim *s, struct swim_update *u, struct node *from, uint64_t hash);

/* swim_wire.c */
enum err wire_hear(struct swim *s, struct swim_update *u, struct node *from, uint32_t path,
                   enum way way, const uint8_t *bytes, uint32_t len);
/* Exactly 32 bytes, else false. */
bool wire_id(const ProtobufCBinaryData *data, struct node_id *ret);
/* A claim that may be believed: known state, numbers within limits. */
bool wire_claim(const Covey__Swim__Claim *c, struct node_id *ret_member, struct claim *ret);

#endif
