/* Who is alive, and what everybody says about himself: membership and gossip, as a pure core.
 *
 * Duty: failure detection, the spreading of members' states, and the spreading of small versioned
 * records (PROTOCOL.md section 2 and 1.7). No sockets, clocks, threads or randomness: it takes
 * events and the monotonic time, and hands out messages and effects. Who is a member is decided
 * elsewhere (trust) and told by MEMBER_ADD and MEMBER_REMOVE; what others send is ignored. Bytes
 * arrive already authenticated as coming from a node.
 *
 * Sources: SWIM (Das, Gupta, Motivala: "SWIM: Scalable Weakly-consistent Infection-style Process
 * Group Membership Protocol", DSN 2002), Lifeguard (Dadgar, Phillips, Currey: "Lifeguard: SWIM-ing
 * with Situational Awareness", 2017). Departures, each for small clusters that want death within 2
 * s:
 *  - A death is not final: a claim with a higher incarnation wins over it, since a partition heals
 *    and a node restarts. Claims are totally ordered by (incarnation, state, boot_id).
 *  - The probe period shrinks with the number of members (down to probe_gap_min_us), so that
 *    someone probes each member twice a second.
 *  - A helper's nack counts as a confirmation of the suspicion (Lifeguard waits for the helper's
 * own suspicion), and who hears of a suspicion probes the suspect at once, which brings refutation
 * or confirmation early.
 *  - News of a state is sent to a few random members at once, besides riding on probes.
 *  - Being called late ourselves (the loop was starved) counts as ill health, and that time is not
 *    held against others: every deadline moves by it.
 *  - Every message carries a hash of all claims and record versions; a lasting difference starts a
 *    reconciliation, besides the periodic one.
 *  - Dead members are probed now and then, since both sides of a healed partition hold each other
 *    dead.
 *
 * Life of a member: UNKNOWN when added (listed as "discovered": known by name, nobody has heard it)
 * until we or another member make contact, then alive; UNKNOWN without contact for
 * contact_timeout_us becomes dead, only here, and is not gossiped. */
#ifndef COVEY_DISCOVERY_SWIM_H
#define COVEY_DISCOVERY_SWIM_H

#include "base/err.h"
#include "base/id.h"
#include "base/rng.h"
#include "proto/wire.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    SWIM_MEMBERS_MAX = 64,            /* the others; we come on top */
    SWIM_PATHS_MAX = 8,               /* between us and one member */
    SWIM_RECORD_KINDS_MAX = 16,       /* kinds are 0..15 */
    SWIM_RECORD_BYTES_MAX = 8 * 1024, /* of one record */
    SWIM_RECORD_DATAGRAM_MAX = 640,   /* larger ones go over the session */
    SWIM_RTT_SAMPLES = 32,            /* per path, for p50 and p99 */
    SWIM_VERSION = 1,                 /* of this channel's messages */
    SWIM_VERSION_MIN = 1,
};

enum swim_state {
    SWIM_UNKNOWN = 0, /* added, nobody has heard it yet; shown as "discovered" */
    SWIM_ALIVE,
    SWIM_CONFLICT, /* two live boot_ids under one key (PROTOCOL 1.7): excluded */
    SWIM_SUSPECT,
    SWIM_DEAD,         /* timed out or refused */
    SWIM_ASLEEP,       /* said so itself */
    SWIM_LEFT,         /* goodbye */
    SWIM_INCOMPATIBLE, /* speaks only versions that we do not; our own view, not gossiped */
    SWIM_STATE_N
};
/* "discovered", "alive", "conflict", "suspect", "dead", "asleep", "left", "incompatible". */
const char *swim_state_name(enum swim_state state);

struct swim_options {
    struct node_id self;
    uint64_t boot_id; /* random per start, not 0 */
    /* The highest own incarnation known from before (stored by the agent); we start above it. 0 is
     * safe: others tell us what they hold and we jump above that. */
    uint64_t incarnation_floor;
    uint64_t rng_seed;
    /* Timing. */
    uint64_t round_us;         /* every member is probed once in a round ... */
    uint64_t probe_gap_min_us; /* ... but probes are no closer than this */
    uint64_t direct_min_us;    /* least and most time for a direct answer: 3 * p99 + direct_slack */
    uint64_t direct_max_us;
    uint64_t direct_slack_us;
    uint64_t indirect_us; /* then so long for helpers */
    uint32_t n_helpers;   /* k of SWIM */
    uint64_t suspicion_min_us;
    uint64_t suspicion_max_us;
    uint32_t n_confirmations;    /* bring the suspicion from max down to min */
    uint64_t contact_timeout_us; /* UNKNOWN becomes dead */
    uint64_t reprobe_us;         /* one dead or unknown member is tried each time */
    uint64_t gossip_gap_us;      /* between bursts of news */
    uint32_t gossip_fanout;
    uint32_t gossip_lambda;     /* each item is sent about lambda * log2(n + 1) times */
    uint64_t digest_us;         /* a random member is compared with */
    uint64_t late_us;           /* a call later than this after next_due is ill health */
    uint32_t health_max;        /* Lifeguard's S: timeouts grow up to 1 + S times */
    uint64_t conflict_claim_us; /* in conflict: we repeat our claim */
    uint64_t conflict_quiet_us; /* and it ends when the rival is silent for so long */
};
/* Fills the timing; self, boot_id, incarnation_floor and rng_seed are zero. */
void swim_options_default(struct swim_options *ret);

enum swim_event_type {
    SWIM_EVENT_TICK,          /* swim_next_due() has come */
    SWIM_EVENT_MEMBER_ADD,    /* peer */
    SWIM_EVENT_MEMBER_REMOVE, /* peer: forgotten with all its records */
    SWIM_EVENT_PATHS,      /* peer, paths, n_paths: replaces the list; known ids keep their stats */
    SWIM_EVENT_SESSION,    /* peer, session */
    SWIM_EVENT_DATAGRAM,   /* peer, path (as it came in), bytes, len */
    SWIM_EVENT_MESSAGE,    /* peer, bytes, len: from the session */
    SWIM_EVENT_SET_RECORD, /* kind, bytes, len: our own; unchanged bytes change nothing */
    SWIM_EVENT_BUSY,       /* step, layers_done */
    SWIM_EVENT_RIVAL,      /* boot_id: just now another process proved that it has our key */
    SWIM_EVENT_SLEPT,      /* we were asleep until now (PROTOCOL 2.5) */
    SWIM_EVENT_GOING_ASLEEP, /* tells everybody */
    SWIM_EVENT_LEAVING,      /* says goodbye to everybody; afterwards we refute nothing */
};

/* REFUSED and TIMED_OUT are outcomes of a dial; they are ignored while another session to the peer
 * is up, so an up session ends with CLOSED. */
enum swim_session {
    SWIM_SESSION_UP,
    SWIM_SESSION_CLOSED,       /* was up; a hint: REDIAL is asked for at once */
    SWIM_SESSION_REFUSED,      /* nobody listens at any of its addresses: dead */
    SWIM_SESSION_TIMED_OUT,    /* no answer: helpers are asked, then suspect */
    SWIM_SESSION_INCOMPATIBLE, /* the handshake found no common version */
};

struct swim_event {
    enum swim_event_type type;
    struct node_id peer;
    enum swim_session session;
    uint32_t path;         /* never 0 for a real path; 0: not known */
    const uint32_t *paths; /* best first; none of them 0 */
    uint32_t n_paths;
    uint8_t kind;
    const uint8_t *bytes;
    uint32_t len;
    uint64_t step;
    uint32_t layers_done;
    uint64_t boot_id;
};

struct swim_path_view {
    uint32_t id;
    bool up; /* answered lately; a path starts as down until its first answer */
    uint32_t
        n_samples; /* round trips measured, at most SWIM_RTT_SAMPLES; when 0 the next two are 0 */
    uint64_t rtt_p50_us, rtt_p99_us;
    double loss; /* 0..1 over the last 32 probes of this path */
};

enum swim_effect_type {
    SWIM_EFFECT_STATE,  /* peer went from `old` to `new`, or stayed alive under a new boot_id;
                           also about ourselves (alive, conflict, asleep, left) */
    SWIM_EFFECT_RECORD, /* peer's (or our own) record `kind` changed: swim_record() has it */
    SWIM_EFFECT_REDIAL, /* dial peer now, unless a session or a dial is there */
    SWIM_EFFECT_EDGE,   /* our path to peer went up or down, or its figures moved by a quarter */
    SWIM_EFFECT_SELF_CONFLICT, /* another process lives under our key, with boot_id */
    SWIM_EFFECT_INCARNATION,   /* ours is now `incarnation`: store it when convenient */
};

struct swim_effect {
    enum swim_effect_type type;
    struct node_id peer;
    enum swim_state old, new;
    uint64_t boot_id;
    uint64_t incarnation;
    uint8_t kind;
    struct swim_path_view path;
};

/* Filled by steps, emptied by the caller. Messages are on CHANNEL_SWIM. */
struct swim_update {
    struct outbox outbox;
    struct swim_effect *effects;
    uint32_t n_effects, cap_effects;
};
#define SWIM_UPDATE_INIT ((struct swim_update){OUTBOX_INIT, NULL, 0, 0})
void swim_update_clear(struct swim_update *u);
void swim_update_deinit(struct swim_update *u);

struct swim;

/* ERR_INVALID for a zero boot_id or self, or timings of zero; ERR_NO_MEMORY. */
enum err swim_new(const struct swim_options *options, uint64_t now_us, struct swim **ret);
void swim_free(struct swim *s);

/* Takes one event; appends to `u` what is to be done. now_us is the monotonic time and never
 * decreases. Timers that have come due run in any step.
 * ERR_CORRUPT: bytes from a member that do not decode (they are ignored); ERR_NOT_FOUND: peer is no
 * member; ERR_LIMIT: a maximum would be exceeded (member table, paths, record bytes);
 * ERR_INVALID: an argument makes no sense; ERR_NO_MEMORY: effects may be missing from `u`, the
 * queries below are right. The core stays usable after each. */
enum err swim_step(struct swim *s, const struct swim_event *event, uint64_t now_us,
                   struct swim_update *u);
/* When to send the next TICK. */
uint64_t swim_next_due(const struct swim *s);

struct swim_member_view {
    struct node_id id;
    enum swim_state state;
    uint64_t boot_id, incarnation; /* 0 while UNKNOWN */
    uint64_t last_heard_us;        /* directly, from this boot_id; 0: never */
    uint64_t since_us;             /* in this state (and boot_id) */
    bool session_up;
    uint64_t step; /* its computation as it last told us, and when that last changed (0: never) */
    uint32_t layers_done;
    uint64_t progress_at_us;
    uint32_t n_paths;
    struct swim_path_view paths[SWIM_PATHS_MAX];
};
uint32_t swim_n_members(const struct swim *s);
/* i < swim_n_members(); the order changes with MEMBER_REMOVE only. */
void swim_member_at(const struct swim *s, uint32_t i, struct swim_member_view *ret);
/* False when `id` is no member. */
bool swim_member(const struct swim *s, const struct node_id *id, struct swim_member_view *ret);
/* The path that probes find best: up, least loss, least p50. 0 when none is up. */
uint32_t swim_best_path(const struct swim *s, const struct node_id *id);

enum swim_state swim_self_state(const struct swim *s);
uint64_t swim_self_incarnation(const struct swim *s);
uint64_t swim_awake_since_us(const struct swim *s); /* start, or the last SLEPT */
uint32_t swim_health(const struct swim *s);         /* 0: well; health_max: starved */
/* Equal hashes: equal claims and record versions. */
uint64_t swim_table_hash(const struct swim *s);

struct swim_record_view {
    uint64_t version;
    uint64_t boot_id;
    const uint8_t *bytes; /* valid until the next step */
    uint32_t len;
};
/* False when there is none. owner may be ourselves. */
bool swim_record(const struct swim *s, const struct node_id *owner, uint8_t kind,
                 struct swim_record_view *ret);

#endif
