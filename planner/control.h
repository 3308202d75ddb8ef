/* The control core: who plans, and the life of a plan (PROTOCOL section 3). One per agent.
 *
 * Duty: elects a planner by claims, keeps the replicated map of wanted models, and, where this node
 * is the planner, searches splits and takes them through prepare, commit and retire; where it is a
 * participant, obeys the planner's commands as far as terms, boot ids and memory allow. A core: no
 * I/O, no clock, no randomness of its own; everything comes in as an event and goes out as an
 * update. Messages are protobuf (proto/control.proto) on CHANNEL_CONTROL, WAY_SESSION.
 *
 * The shell's part. It executes an update in this order: first `persist` is written and synced
 * (when it is not empty), then effects in their order, then the outbox is sent. Where `persist`
 * cannot be written it tells CONTROL_DISK before anything else, executes the effects, which concern
 * this node alone, and drops the outbox, as if the network had lost it. It calls
 * control_step for every event and at control_next_due. Requests, frames, KV and bytes of models
 * are not here.
 *
 * How messages are used, beyond the letter of the protocol: commands and reports are state, not
 * news. The planner repeats a command until the participant's report shows it done, and each
 * heartbeat (1 s) is answered by a report, so that a lost session needs no case of its own. A
 * planner that meets a term above its own without a living holder takes a still higher one, since a
 * failed claim may have raised it; running epochs keep the term they were made in. */
#ifndef COVEY_PLANNER_CONTROL_H
#define COVEY_PLANNER_CONTROL_H

#include "base/buf.h"
#include "planner/search.h"
#include "proto/wire.h"

enum {
    CONTROL_MODELS_MAX = 16,   /* wanted at once */
    CONTROL_WANTED_MAX = 64,   /* entries of the map, tombstones included */
    CONTROL_LOCAL_MAX = 32,    /* epochs that a participant holds */
    CONTROL_EFFECTS_MAX = 512, /* of one update */
    CONTROL_PERSIST_MAX = 32 * 1024,

    CONTROL_START_US = 700 * 1000,     /* a fresh node listens this long before it claims (3.4) */
    CONTROL_CLAIM_US = 500 * 1000,     /* 3.4: who answers within this time must agree */
    CONTROL_RETRY_MIN_US = 150 * 1000, /* 3.4: random back-off x 2^n */
    CONTROL_RETRY_MAX_US = 300 * 1000,
    CONTROL_RETRY_LIMIT_US = 10 * 1000 * 1000,
    CONTROL_HEARTBEAT_US = 1000 * 1000,
    CONTROL_SILENCE_US = 3 * 1000 * 1000,    /* without a heartbeat: the planner does not live */
    CONTROL_HEARSAY_US = 5 * 1000 * 1000,    /* the same for a planner that only others hear */
    CONTROL_COMMIT_US = 2 * 1000 * 1000,     /* 3.8 */
    CONTROL_RETIRE_US = 10 * 1000 * 1000,    /* RETIRE before PREPARE unconfirmed: excluded */
    CONTROL_LAPSE_US = 60 * 1000 * 1000,     /* 3.7, 3.10: without a planner */
    CONTROL_DRAIN_US = 30 * 1000 * 1000,     /* 3.10 */
    CONTROL_SETTLE_US = 2 * 1000 * 1000,     /* after a join, before it is considered */
    CONTROL_REBALANCE_US = 60 * 1000 * 1000, /* between two changes that nothing forced */
    CONTROL_REFUSED_US = 30 * 1000 * 1000,   /* a node that refused is not asked again */
    CONTROL_LEAVE_US = 10 * 1000 * 1000,     /* SIGTERM waits this long for plans to move */
};
#define CONTROL_GAIN 0.10 /* predicted gain that justifies a change */

struct control;

struct control_options {
    struct node_id self;
    uint64_t boot_id;
    uint64_t seed;               /* for back-off only */
    uint32_t arithmetic_version; /* what this node executes */
    uint8_t backend;
};

/* Preference among claimants (3.4), and whether messages reach the node. */
struct control_peer {
    bool reachable; /* alive in membership and a session is up, both ways; true for ourselves */
    bool mains;     /* mains power */
    bool wired;
    uint64_t up_ms; /* how long it is up */
    bool awaited;   /* alive, but there was no session with it since we started */
};

/* What membership and measurements say now. Includes this node; its budget_bytes is the limit for
 * its reservations. peers[i] belongs to topology.nodes[i]. */
struct control_view {
    bool sole; /* the cluster has no other member: there is nobody to listen for */
    struct topology topology;
    struct control_peer peers[NODES_MAX];
};

enum control_event_kind {
    CONTROL_TICK,           /* control_next_due has come (or any time) */
    CONTROL_MESSAGE,        /* from, bytes, n_bytes */
    CONTROL_VIEW,           /* view: whenever something in it changed; copied */
    CONTROL_MODEL,          /* shape, precision: known here (file or gossip); copied */
    CONTROL_WANT,           /* model, model_name, context (0: default), precision, keep_alive_s */
    CONTROL_UNWANT,         /* model */
    CONTROL_PREPARED,       /* epoch: loaded, memory reserved */
    CONTROL_PREPARE_FAILED, /* epoch, error, reason; its memory is free again. Of an epoch that
                               runs: it cannot be computed any more; RETIRE follows */
    CONTROL_COMMITTED,      /* epoch: frames of it are executed from now on */
    CONTROL_RETIRED,        /* epoch: its memory is free again (after ABORT, RETIRE or DRAIN) */
    CONTROL_SLEPT,          /* 2.5: we slept; sessions are gone */
    CONTROL_AWAKE,          /* 20 s later: we count again */
    CONTROL_LEAVING,        /* SIGTERM: plans move first; CONTROL_LEFT follows */
    CONTROL_SESSION_UP,     /* from */
    CONTROL_SESSION_DOWN,   /* from */
    CONTROL_USED,           /* model: a request used it just now (frames flow, 3.10 and 3.13) */
    CONTROL_DISK, /* full, term: whether `persist` can be written. Full: no step came since the one
                     whose persist failed, and none of its messages was sent; `term` is what the
                     disk holds. A higher one is forgotten, and until the disk has room none is
                     claimed, promised or followed. What runs goes on */
};

struct control_event {
    enum control_event_kind kind;
    uint64_t wall_ms; /* Unix time (hybrid clock, comparing clocks); may be off; 0: not known */
    struct node_id from;
    const uint8_t *bytes;
    size_t n_bytes;
    const struct control_view *view;
    const struct model_shape *shape;
    struct hash256 model;
    const char *model_name;
    uint32_t context;
    uint32_t keep_alive_s; /* 0: for ever */
    uint8_t precision;
    struct hash256 epoch; /* plan.epoch.hash */
    uint64_t term;
    bool full;
    enum err error;
    const char *reason;
};

enum control_effect_kind {
    /* For this node as a participant; `plan` whole and `stage` ours. */
    CONTROL_PREPARE, /* reserve memory, fetch, load; answer PREPARED or PREPARE_FAILED */
    CONTROL_COMMIT,  /* execute its frames from now on; answer COMMITTED */
    CONTROL_ABORT,   /* forget it, even while it loads; answer RETIRED (or PREPARE_FAILED) */
    CONTROL_DRAIN,   /* no new requests; answer RETIRED when the last has ended */
    CONTROL_RETIRE,  /* stop at once and free; answer RETIRED */
    CONTROL_SUSPEND, /* 2.5: execute nothing of it until RESUME */
    CONTROL_RESUME,
    /* For this node as an entry, on every node. */
    CONTROL_ACTIVE,   /* plan: route requests for plan.model by it; replaces the one before */
    CONTROL_INACTIVE, /* model: nothing runs now; hold requests (30 s) */
    CONTROL_NO_FIT,   /* model, text: why nothing runs; an empty text: no longer so */
    /* To know. */
    CONTROL_PLANNER, /* node, term; a zero node: none is known */
    CONTROL_NOTE,    /* text: for the event stream */
    CONTROL_LEFT,    /* after LEAVING: nothing holds us any more */
};

struct control_effect {
    enum control_effect_kind kind;
    uint32_t stage;
    uint64_t term;
    struct node_id node;
    struct hash256 model;
    struct plan plan; /* for PREPARE to RESUME and ACTIVE */
    bool refused;     /* for NO_FIT: a member cannot do its part, so waiting does not help */
    struct err_text text;
};

struct control_update {
    struct buf persist; /* len > 0: write and sync this before anything else */
    struct control_effect *effects;
    uint32_t n_effects, cap_effects;
    struct outbox outbox;
};

void control_update_init(struct control_update *u);
void control_update_clear(struct control_update *u);
void control_update_deinit(struct control_update *u);

/* `persisted` is what the last update's persist held before this start, or NULL. ERR_CORRUPT when
 * it does not parse (a caller may then start with NULL, and says so), ERR_NO_MEMORY. */
enum err control_new(const struct control_options *options, const void *persisted,
                     size_t n_persisted, struct control **ret);
void control_free(struct control *c);

/* One event at `now_us` (monotonic, never going back). Adds to the update, which the caller clears
 * between steps. ERR_CORRUPT for a message that breaks its format (the sender is a member: close
 * its session), ERR_INVALID for an event that makes no sense, ERR_LIMIT for one want too many,
 * ERR_NO_MEMORY: the core stays consistent in each case, and what the update holds is to be
 * executed all the same. */
enum err control_step(struct control *c, const struct control_event *event, uint64_t now_us,
                      struct control_update *update);
/* When to call with CONTROL_TICK, in the step's clock; UINT64_MAX when never. */
uint64_t control_next_due(const struct control *c);

/* Views for status pages and tests; pointers hold until the next step. */

/* Whom this node follows, itself included; false (and a zero id) while no living planner is known.
 */
bool control_planner(const struct control *c, struct node_id *ret_id, uint64_t *ret_term);
bool control_is_planner(const struct control *c);
uint64_t control_term_seen(const struct control *c);

enum epoch_state {
    EPOCH_NONE = 0,
    EPOCH_PREPARING = 1,
    EPOCH_PREPARED = 2,
    EPOCH_COMMITTED = 3, /* executes; not yet known to be active */
    EPOCH_CURRENT = 4,   /* the active one of its instance */
    EPOCH_DRAINING = 5,
    EPOCH_GOING = 6,  /* aborted or retired, memory not yet free */
    EPOCH_FAILED = 7, /* refused */
};
const char *epoch_state_name(enum epoch_state state);

struct control_local {
    const struct plan *plan;
    uint32_t stage;
    enum epoch_state state;
    bool suspended;
};
uint32_t control_n_local(const struct control *c);
void control_local_at(const struct control *c, uint32_t i, struct control_local *ret);
uint64_t control_reserved_bytes(const struct control *c);

struct control_model {
    struct hash256 model;
    const char *name;
    uint32_t context, keep_alive_s;
    uint8_t precision;
    const struct plan *active; /* NULL: none */
    const char *no_fit;        /* "" or why nothing runs */
    bool refused;              /* because a member cannot do its part */
};
/* Wanted models only. */
uint32_t control_n_models(const struct control *c);
void control_model_at(const struct control *c, uint32_t i, struct control_model *ret);
/* How far a member's clock goes ahead of ours (negative: behind), from its last heartbeat or
 * report: the planner hears all members, others hear the planner. False: not heard. */
bool control_clock_ahead(const struct control *c, const struct node_id *id, int64_t *ret_ms);
/* The active plan of a model, or NULL. */
const struct plan *control_active(const struct control *c, const struct hash256 *model);

#endif
