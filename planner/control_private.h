/* The inside of the control core, shared by its files only.
 *
 *   control.c         the step, timers, accessors
 *   control_wire.c    messages in and out, the loop back to ourselves
 *   control_elect.c   claims, heartbeats, who is followed (3.1 to 3.6)
 *   control_member.c  this node as a participant and as an entry (3.7 to 3.11)
 *   control_plan.c    this node as the planner: reports, adoption, commands (3.6 to 3.10)
 *   control_change.c  this node as the planner: when and to what a plan changes
 *   control_wanted.c  the replicated map of wanted models (3.13) and what is persisted (3.1)
 */
#ifndef COVEY_PLANNER_CONTROL_PRIVATE_H
#define COVEY_PLANNER_CONTROL_PRIVATE_H

#include "base/rng.h"
#include "planner/control.h"
#include "planner/plan_wire.h"
#include "proto/control.pb-c.h"

enum {
    TRACKED_MAX = 64,       /* epochs that a planner follows */
    SHAPES_MAX = 48,        /* (model, precision) */
    LOOP_MAX = 256,         /* messages to ourselves within one step */
    REASON_MAX = 320,       /* bytes of a refusal with the NUL */
    RESEND_US = 500 * 1000, /* a command that is not yet reported done */
    BUSY_TICK_US = 100 * 1000,
    FRESH_US = 1500 * 1000,         /* hearsay younger than this is followed, older is doubted */
    ADOPT_US = 2 * 1000 * 1000,     /* a new planner waits so long for reports */
    CONSIDER_US = 10 * 1000 * 1000, /* between two searches that nothing forces */
    NO_FIT_RETRY_US = 5 * 1000 * 1000,
    SEARCH_SPACING_US = 200 * 1000,    /* between two searches in a world that keeps changing */
    FLAP_US = 1000 * 1000,             /* a session that breaks may be redialled in this time */
    PROMISE_US = 2 * CONTROL_CLAIM_US, /* an answer to a claim binds so long */
};

enum role { ROLE_FOLLOW, ROLE_CLAIM, ROLE_PLAN };
enum verb { VERB_COMMIT = 1, VERB_ABORT, VERB_RETIRE, VERB_DRAIN, VERB_CANNOT_MOVE };

struct wanted {
    struct hash256 model;
    char name[MODEL_NAME_MAX];
    uint64_t clock;
    struct node_id node;
    bool wanted;
    uint8_t precision;
    uint32_t context, keep_alive_s;
    uint64_t used_us; /* the latest use that this node knows of, on its own clock; not replicated */
};

struct local {
    struct plan plan;
    uint32_t stage;
    enum epoch_state state;
    bool committing; /* COMMIT was handed to the shell */
    bool suspended;
    bool releasing;    /* failed while it ran: its memory is not free yet */
    bool cannot_move;  /* the planner has no place for it: leaving need not wait */
    uint64_t since_us; /* of the state */
    enum err error;
    char reason[REASON_MAX];
};

struct no_fit {
    struct hash256 model;
    bool refused; /* a member cannot: waiting does not help */
    char sentence[ERR_TEXT_MAX];
};

/* What runs, as the planner tells it; the planner's own copy is made by itself. */
struct state {
    uint32_t n_active, n_no_fit;
    struct plan active[CONTROL_MODELS_MAX];
    struct no_fit no_fit[CONTROL_MODELS_MAX];
};

enum { AT_UNKNOWN = 255 }; /* not reported yet; else enum epoch_state */
enum track {
    TRACK_FOUND, /* reported, not yet judged */
    TRACK_NEXT,
    TRACK_ACTIVE,
    TRACK_DRAIN,
    TRACK_RETIRE,
    TRACK_ABORT,
};
enum phase { PHASE_ROOM, PHASE_PREPARE, PHASE_COMMIT };

struct tracked {
    struct plan plan;
    enum track track;
    enum phase phase; /* of TRACK_NEXT */
    uint8_t at[PLAN_STAGES_MAX];
    uint64_t sent_us[PLAN_STAGES_MAX]; /* the present command to this stage; 0: not yet */
    uint64_t since_us;                 /* of track or phase */
    uint64_t broken_us;                /* since when it cannot run; 0: it can */
    bool lost;                         /* and that is no passing matter */
    enum err error;                    /* of a refusal */
    uint32_t failed_stage;
    char reason[REASON_MAX];
};

struct report_epoch {
    struct hash256 hash, model;
    uint64_t memory_bytes;
};

/* The last report of a member, under this leadership. */
struct member {
    struct node_id id;
    uint64_t boot_id;
    bool heard, leaving, want_full;
    uint64_t serial; /* of the last report */
    uint64_t reserved_bytes;
    uint32_t n_epochs;
    struct report_epoch epochs[CONTROL_LOCAL_MAX];
};

struct refusal {
    struct node_id node;
    uint64_t boot_id, until_us;
    char reason[REASON_MAX];
};

struct member_clock {
    struct node_id node;
    int64_t ahead_ms; /* of ours, when last heard */
};

/* A wanted model in the planner's eyes. */
struct instance {
    struct hash256 model;
    uint64_t not_before_us;    /* after a failure: no search before */
    uint64_t retry_us;         /* where nothing fitted: then again, or when the world changes */
    uint64_t should_us;        /* since when a participant should not be one; 0: none */
    uint64_t consider_us;      /* 0: nothing to consider */
    uint64_t considered_us;    /* when last searched without need */
    uint64_t changed_us;       /* when the active plan last changed; 0: never */
    uint64_t searched_version; /* the state of the world in which nothing fitted */
    uint32_t n_failures;
    bool retire_first; /* the last try was refused for want of memory */
    bool cannot_move;
    char sentence[ERR_TEXT_MAX]; /* why nothing runs */
    bool refused;                /* the sentence is a refusal */
    struct refusal refusals[NODES_MAX];
    uint32_t n_refusals;
};

struct shape_slot {
    uint8_t precision;
    struct model_shape shape;
};

struct loop_message {
    uint8_t *bytes;
    size_t n;
};

struct control {
    struct control_options options;
    struct rng rng;
    uint64_t now_us, started_us;
    struct control_view view;
    struct topology weighed; /* the last one that differed enough to count as a change */
    uint64_t wall_ms;        /* of the present step; 0: not known */
    struct member_clock clocks[NODES_MAX];
    uint32_t n_clocks;
    bool has_view, leaving, left, slept;
    uint64_t leave_due_us;

    /* Election. planner_id is zero when none is known; told_* is what the shell knows. */
    enum role role;
    uint64_t term_seen;
    struct node_id planner_id, told_planner;
    uint64_t planner_term, told_term;
    uint64_t planner_heard_us;
    bool planner_direct;   /* heard by ourselves, not told by others */
    struct node_id teller; /* who told us */
    uint64_t contact_us;   /* last command authority: heartbeat of the followed, or our own role */
    struct node_id promised;
    uint64_t promised_term, promised_us;
    uint64_t claim_term, claim_us, next_claim_us, asked_us;
    uint32_t n_refused;
    uint32_t n_waiting;
    struct node_id waiting[NODES_MAX];

    /* Wanted models. */
    struct wanted wanted[CONTROL_WANTED_MAX];
    uint32_t n_wanted;
    uint64_t hybrid_clock;
    bool persist_due;
    bool disk_full; /* what is to be persisted waits; no term rises */

    /* Participant and entry. */
    struct local locals[CONTROL_LOCAL_MAX];
    uint32_t n_locals;
    struct state state;
    bool report_due, report_full;
    uint64_t report_serial;

    /* Planner. */
    bool settled, full_due;
    uint64_t adopt_us, heartbeat_us, sequence, version;
    struct member members[NODES_MAX];
    uint32_t n_members;
    struct tracked tracked[TRACKED_MAX];
    uint32_t n_tracked;
    struct instance instances[CONTROL_MODELS_MAX];
    uint32_t n_instances;
    uint64_t told_digest;

    struct shape_slot *shapes[SHAPES_MAX];
    uint32_t n_shapes;

    /* Of the present step. */
    struct control_update *update;
    struct loop_message loop[LOOP_MAX];
    uint32_t loop_first, loop_n;
    enum err failed; /* ERR_NO_MEMORY met on the way */
};

/* control.c */
int control_view_index(const struct control *c, const struct node_id *id);
bool control_reachable(const struct control *c, const struct node_id *id);
/* Membership holds it alive, though its session may just be broken. */
bool control_counts(const struct control *c, const struct node_id *id);
bool control_is_self(const struct control *c, const struct node_id *id);
struct control_effect *control_effect(struct control *c, enum control_effect_kind kind);
void control_effect_plan(struct control *c, enum control_effect_kind kind, const struct local *l);
void control_note(struct control *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
const struct model_shape *control_shape_find(const struct control *c, const struct hash256 *model,
                                             uint8_t precision);

/* control_wire.c */
ProtobufCBinaryData control_view_bytes(const uint8_t *bytes, size_t n);
bool control_take_id(const ProtobufCBinaryData *b, struct node_id *ret);
bool control_take_hash(const ProtobufCBinaryData *b, struct hash256 *ret);
char *control_view_text(const char *text);
void control_send_message(struct control *c, const struct node_id *to,
                          const Covey__Control__Message *m);
void control_send_all(struct control *c, const Covey__Control__Message *m, bool with_self);
void control_send_command(struct control *c, const struct node_id *to, enum verb verb,
                          const struct hash256 *hash);
void control_send_prepare(struct control *c, const struct node_id *to, const struct plan *p);
void control_send_heartbeat(struct control *c, const struct node_id *to, bool full, bool resigns);
void control_send_state(struct control *c, const struct node_id *to);
void control_send_sync(struct control *c, const struct node_id *to);
void control_send_report(struct control *c, const struct node_id *to, bool full);
void control_send_claim_answer(struct control *c, const struct node_id *to, uint64_t term,
                               bool agree);
enum err control_message_in(struct control *c, const struct node_id *from, const uint8_t *bytes,
                            size_t n);
void control_loop_drain(struct control *c);
void control_loop_clear(struct control *c);

/* control_elect.c */
void control_term_raise(struct control *c, uint64_t term);
/* May this node act with the term? One that cannot be written down must not be used (3.1). */
bool control_term_allowed(const struct control *c, uint64_t term);
void control_elect_disk(struct control *c, bool full, uint64_t term_on_disk);
bool control_planner_lives(const struct control *c);
/* Is (term, from) an authority for this node? Follows a better planner than the one before. */
bool control_authority(struct control *c, const struct node_id *from, uint64_t term);
void control_elect_tick(struct control *c);
void control_elect_reach_changed(struct control *c);
void control_elect_forget(struct control *c);
void control_planner_resign(struct control *c);
void control_planner_retake(struct control *c, uint64_t above);
void control_claim_in(struct control *c, const struct node_id *from,
                      const Covey__Control__Claim *m);
enum err control_claim_answer_in(struct control *c, const struct node_id *from,
                                 const Covey__Control__ClaimAnswer *m);
enum err control_heartbeat_in(struct control *c, const struct node_id *from,
                              const Covey__Control__Heartbeat *m);
void control_hearsay(struct control *c, const struct node_id *teller, const struct node_id *planner,
                     uint64_t term, uint64_t age_us);
void control_tell_planner(struct control *c);
uint64_t control_elect_due(const struct control *c);

/* control_member.c */
uint64_t control_state_digest(const struct state *s);
enum err control_prepare_in(struct control *c, const struct node_id *from,
                            const Covey__Control__Prepare *m);
enum err control_command_in(struct control *c, const struct node_id *from,
                            const Covey__Control__Command *m);
enum err control_state_in(struct control *c, const struct node_id *from,
                          const Covey__Control__State *m);
enum err control_member_event(struct control *c, const struct control_event *e);
void control_member_slept(struct control *c);
void control_member_tick(struct control *c);
uint64_t control_member_due(const struct control *c);

/* control_plan.c */
void control_planner_start(struct control *c);
void control_planner_stop(struct control *c);
enum err control_report_in(struct control *c, const struct node_id *from,
                           const Covey__Control__Report *m);
void control_planner_drive(struct control *c);
bool control_planner_busy(const struct control *c);
struct tracked *control_tracked_of(struct control *c, const struct hash256 *model,
                                   enum track track);
struct tracked *control_tracked_add(struct control *c, const struct plan *p, enum track track);
void control_track_as(struct control *c, struct tracked *t, enum track track);
struct member *control_member_of(struct control *c, const struct node_id *id);
/* A participant that the planner can still command under this plan. */
bool control_stage_alive(struct control *c, const struct tracked *t, uint32_t stage);
/* Cannot run: a participant is gone or two neighbours do not reach each other. */
bool control_plan_broken(struct control *c, const struct tracked *t);

/* control_change.c */
struct instance *control_instance_of(struct control *c, const struct hash256 *model);
void control_instance_drive(struct control *c, struct instance *i, const struct wanted *w);
void control_instance_end(struct control *c, const struct hash256 *model);
/* The objective of a plan on the present topology for its model; INFINITY when it does not fit. */
double control_plan_objective(struct control *c, const struct plan *p);
void control_view_changed(struct control *c);
/* Those that refused the model are asked again at once. */
void control_refusals_forget(struct control *c, const struct hash256 *model);
/* Does the planner say that a member refused? */
bool control_is_refused(const struct control *c, const struct hash256 *model);

/* control_wanted.c */
struct wanted *control_wanted_find(struct control *c, const struct hash256 *model);
enum err control_wanted_event(struct control *c, const struct control_event *e);
enum err control_wanted_in(struct control *c, const struct node_id *from,
                           const Covey__Control__WantedMap *m);
void control_wanted_send(struct control *c, const struct node_id *to, bool answer);
void control_wanted_expire(struct control *c);
uint64_t control_wanted_digest(const struct control *c);
enum err control_persist_write(struct control *c);
enum err control_persist_read(struct control *c, const void *bytes, size_t n);

#endif
