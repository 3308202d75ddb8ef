/* What the files of the data-plane core share. Nobody else includes this.
 *
 *   pipeline.c         events, epochs, peers, effects, timers
 *   pipeline_stage.c   one stage of one epoch: steps in order, computing, the tail
 *   pipeline_head.c    the head: sequences, streams, time
 *   pipeline_schedule.c  the head: admission, building steps, room in the KV cache
 *   pipeline_entry.c   requests of clients: OPEN, tokens, recovery
 *   pipeline_relay.c   passing a request on for an entry that cannot reach the head
 *   pipeline_slot.c    slots with their tokens and KV blocks, the ring of steps
 *   pipeline_chain.c   the hash chain over tokens
 *
 * Words: a *run* is one epoch's plan with this node's stage; a *sequence* is a request in the hands
 * of its head; a *slot* is a list of tokens whose KV is held, of a sequence that runs or of one
 * that is over ("idle": kept for prompts that begin alike); a *stream* is an unbroken series of
 * steps of one run. A stream starts with a step without rows and controls. Every stage then reports
 * the KV that it holds (HAVE for each slot, one for request zero at the end) and the head goes on
 * from the least. When a link of the stages breaks, when a stage fails or stays silent, the stream
 * is over: running sequences go back to their entries with ERROR, which open the next attempt
 * (PROTOCOL 3.12). Step numbers never come twice, so a late frame of an old stream is never
 * executed.
 *
 * Blocks. Every stage has its own kv_pool and replays the controls and segments of the steps in
 * their order, so the head alone decides what fits: where two parts of slots are one block at the
 * head, they are one block at every stage. Streams keep that true: at their start the head cuts its
 * slots until none shares a block with another, and the first step with something in it tells
 * every stage how long each slot is. */
#ifndef COVEY_AGENT_PIPELINE_INTERNAL_H
#define COVEY_AGENT_PIPELINE_INTERNAL_H

#include "agent/kv_blocks.h"
#include "agent/pipeline.h"

enum {
    WINDOW_EXTRA = 1, /* steps under way: stages + this, so that none waits for credit */
    RING_EXTRA = 3,   /* a start of stream and one that computes, beside the window */
    RING_MAX = PLAN_STAGES_MAX + WINDOW_EXTRA + RING_EXTRA,
    CHAIN_MARK = STAGE_BLOCK,      /* a hash is kept for each so many positions of a slot */
    EFFECTS_ROOM = 256,            /* no unit of work of the pump has more effects */
    WANT_LINK_US = 1000 * 1000,    /* between two WANT_LINK for one peer */
    LINK_WAIT_US = 2000 * 1000,    /* the head waits so long for its links */
    DETOUR_US = 1000 * 1000,       /* the entry waits so long for its links to head and tail */
    SYNC_US = 1000 * 1000,         /* the head waits so long for HAVE */
    REUSE_MIN = 8,                 /* a shorter common prefix is computed again */
    OPEN_WAIT_US = 2000 * 1000,    /* the tail waits so long for the OPEN of an admitted sequence */
    SIGN_OF_LIFE_US = 1000 * 1000, /* HAVE to entries that got no token */
    STATS_US = 1000 * 1000,
    BACKOFF_FIRST_US = 20 * 1000,
    BACKOFF_MAX_US = 1000 * 1000,
    RELAYS_MAX = 64,
    PENDING_OPENS_MAX = 2 * PIPELINE_SLOTS_MAX,
};

struct peer {
    struct node_id id;
    bool used, up;
    uint64_t wanted_at; /* last WANT_LINK; 0: never */
};

struct route {
    bool used;    /* the model is known */
    bool present; /* there is a plan */
    struct hash256 model;
    struct plan plan;
    uint64_t alias;
    enum err reason; /* why there is none */
    struct err_text text;
};

/* --- entry --- */

enum request_state {
    REQUEST_FREE = 0,
    REQUEST_WAITING, /* for a route, a link or the end of a pause */
    REQUEST_OPENED,  /* the head has it */
    REQUEST_ENDED,   /* freed at the next call, since effects may still point into it */
};

struct request {
    enum request_state state;
    struct request_id id;
    struct hash256 model;
    int32_t *tokens; /* prompt, then answer; [cap] */
    uint32_t n_prompt, n_tokens, cap;
    struct frame_sampler sampler;
    uint64_t deadline_us; /* UINT64_MAX: none */
    uint32_t attempt, fruitless;
    enum err last_err; /* why the last attempt ended */
    /* of this attempt */
    uint64_t alias;
    struct node_id head, tail;
    uint32_t context;
    bool via_head;        /* tokens come from the head, since the tail cannot be reached */
    uint64_t silence_us;  /* then the attempt is over */
    uint64_t patience_us; /* then the request is */
    uint32_t have_n;
    uint32_t n_cached; /* of the first attempt */
    uint64_t heard_at;
    /* times */
    uint64_t submitted_at, opened_at, first_token_at, last_token_at;
    uint64_t progress_at, retry_at, wait_at;
};

/* --- stage --- */

struct slot {
    struct request_id request; /* the last one that was admitted */
    uint32_t attempt;
    bool active;
    uint32_t limit;  /* positions that it may fill */
    int32_t *tokens; /* [cap]: those whose KV is held or being computed */
    uint32_t cap;
    uint32_t n;
    struct hash128 hash;   /* of all n */
    struct hash128 *marks; /* [cap / CHAIN_MARK + 1]: hash of the first k × CHAIN_MARK */
    struct kv_table table; /* the blocks of the n positions, no more */
    /* tail */
    bool opened;
    struct frame_sampler sampler;
    struct node_id token_to;
    uint32_t token_limit; /* length of the whole answer with its prompt, at most */
    /* head */
    struct sequence *sequence; /* that runs here; NULL: idle */
    uint64_t used_at;
    bool cut_due; /* the next step says that this one is over */
    struct request_id cut_request;
    uint32_t cut_attempt, cut_n;
    uint32_t sync_n;      /* least that the stages hold, while a stream starts */
    uint32_t sync_stages; /* bit for each stage that has said something */
};

enum ring_state { RING_QUEUED = 0, RING_COMPUTING, RING_SPENT };

/* A step at this stage. */
struct ring_entry {
    enum ring_state state;
    bool dropped; /* its result is not wanted any more */
    bool stalled; /* said so */
    bool controls_done;
    struct frame frame; /* segments' token ids point into `tokens` */
    int32_t tokens[FRAME_ROWS_MAX];
    uint32_t slot_of[FRAME_SEGMENTS_MAX];
    const float *rows; /* input: of the frame, or `buffer` */
    float *buffer;     /* taken when first needed, kept */
    size_t buffer_bytes;
    uint64_t waits_since; /* for an OPEN; 0: does not */
};

struct pending_open {
    bool used;
    uint64_t at;
    struct request_id request;
    uint32_t attempt;
    struct frame_sampler sampler;
    struct node_id token_to;
    uint32_t token_limit;
};

enum run_state {
    RUN_FREE = 0,
    RUN_INSTALLED,
    RUN_CURRENT,
    RUN_PREVIOUS, /* another epoch of the model is current; executes on */
};

enum stream_state { STREAM_NONE = 0, STREAM_SYNC, STREAM_OPEN };

struct window_step {
    uint64_t step;
    uint32_t n_rows;
};

struct run {
    enum run_state state;
    bool draining, drained_said;
    bool suspended; /* we slept since it was confirmed (2.5) */
    struct plan plan;
    uint64_t alias;
    uint32_t my_stage, instance, n_slots, row_bytes;
    struct hash128 chain_first;
    struct slot *slots; /* [n_slots] */
    struct kv_pool pool;
    uint32_t *table_blocks; /* [n_slots, blocks of the context]: of the slots' tables */
    uint8_t *kept;          /* [n_blocks]: for counting */
    uint64_t last_use;

    struct ring_entry *ring; /* [ring_cap], oldest at ring_first */
    uint32_t ring_cap, ring_first, ring_n;

    /* stage that is not the head */
    uint64_t expected;    /* next step of the stream */
    uint64_t stream_step; /* the start of the stream */
    uint64_t error_at;    /* last ERROR to the head */
    bool broken;
    struct pending_open *opens; /* [PENDING_OPENS_MAX] at a tail that is not the head */

    /* head */
    enum stream_state stream;
    uint64_t next_step, reset_step;
    uint64_t sync_until;
    uint32_t sync_done;                  /* bit for each stage that has reported */
    uint64_t link_wait_since;            /* 0: does not wait */
    struct window_step window[RING_MAX]; /* steps under way, oldest first */
    uint32_t n_window;
    uint64_t credit_at; /* last advance */
    bool stall_said;
    uint64_t turn;    /* order of the sequence whose prompt is next, for fairness between them */
    bool reset_due;   /* the stages are to be told how long their slots are */
    double decode_us; /* measured here: a step without prompt rows; 0: not yet */
    double row_us;    /* what a row adds to a step of many */
    double mixed_us, mixed_rows; /* what steps of both took, and how many prompt rows they had */
    uint32_t n_mixed;            /* since the last step without prompt rows */

    /* measurements */
    uint64_t stats_at, stats_decode_us, stats_prefill_us;
    uint32_t n_decode_steps, n_prefill_rows;
};

/* --- head --- */

struct sequence {
    bool used;
    struct run *run;
    struct request_id request;
    uint32_t attempt;
    struct node_id entry;    /* whose OPEN it was */
    struct node_id token_to; /* whom the tail tells: the entry, or this node, which passes on */
    struct frame_sampler sampler;
    int32_t *tokens; /* [limit]: prompt and answer */
    uint32_t n_prompt, n_tokens, limit;
    uint32_t n_scheduled; /* positions that were sent through the stages */
    bool cached_said;     /* the entry knows how much of the prompt was held */
    struct slot *slot;    /* NULL: queued */
    uint64_t order;       /* of arrival */
    uint64_t deadline_us; /* UINT64_MAX: none */
    uint64_t said_at;     /* last token or HAVE to the entry */
};

/* --- relay --- */

struct relay {
    bool used;
    struct request_id request;
    uint32_t attempt;
    struct node_id origin; /* the entry, or another relay */
    struct node_id head, tail;
    uint64_t alias;
};

struct pipeline {
    struct node_id self;
    uint32_t chunk_rows;
    uint64_t now;
    struct peer peers[PIPELINE_PEERS_MAX];
    struct route routes[PIPELINE_MODELS_MAX];
    struct request requests[PIPELINE_REQUESTS_MAX];
    struct run runs[PIPELINE_EPOCHS_MAX];
    struct sequence sequences[PIPELINE_SEQUENCES_MAX];
    struct relay relays[RELAYS_MAX];
    uint64_t next_order;
    uint32_t run_turn;
    bool slept; /* and the control core has not said so yet */

    /* the computation under way */
    struct {
        bool on;
        uint32_t instance;
        uint64_t epoch, step, since;
        struct run *run; /* NULL: retired meanwhile */
        struct epoch retired;
    } busy;
    struct stage_segment segments[STAGE_SEGMENTS_MAX];
    struct pipeline_sample samples[STAGE_SEGMENTS_MAX];
    uint32_t sample_slots[STAGE_SEGMENTS_MAX];
    uint32_t n_samples;

    uint64_t steps_done, n_preempted;
    bool more; /* the pump stopped for want of room for effects */
    struct pipeline_effect effects[PIPELINE_EFFECTS_MAX];
    uint32_t n_effects;
};

/* pipeline.c */
struct pipeline_effect *effect_new(struct pipeline *p, enum pipeline_effect_type type);
uint32_t effects_room(const struct pipeline *p);
bool peer_is_up(const struct pipeline *p, const struct node_id *id);
/* Asks for a link, at most once in WANT_LINK_US. */
void peer_want(struct pipeline *p, const struct node_id *id);
/* A SEND to fill in; NULL (and a WANT_LINK) when the link is down. Never to this node itself. */
struct pipeline_send *send_new(struct pipeline *p, const struct node_id *to, uint8_t type,
                               uint64_t epoch, uint64_t step);
bool is_self(const struct pipeline *p, const struct node_id *id);
void send_error(struct pipeline *p, const struct node_id *to, uint64_t epoch, uint64_t step,
                const struct request_id *request, uint32_t attempt, enum err e);
struct run *run_by_alias(struct pipeline *p, uint64_t alias);
bool run_executes(const struct run *run); /* committed, and confirmed since we last slept */
static inline const struct node_id *run_head(const struct run *run)
{
    return &run->plan.stages[0].node;
}
static inline const struct node_id *run_tail(const struct run *run)
{
    return &run->plan.stages[run->plan.n_stages - 1].node;
}
static inline bool run_is_tail(const struct run *run)
{
    return run->my_stage + 1 == run->plan.n_stages;
}
static inline bool run_is_head(const struct run *run)
{
    return run->my_stage == 0;
}
struct route *route_of(struct pipeline *p, const struct hash256 *model);

/* pipeline_slot.c */
enum err run_init(struct run *run, const struct pipeline_install *install, uint32_t my_stage);
void run_deinit(struct run *run);
/* Room for n positions: ERR_NO_MEMORY. */
enum err slot_reserve(const struct run *run, struct slot *slot, uint32_t n);
void slot_truncate(struct run *run, struct slot *slot, uint32_t n);
/* Blocks for n positions more, and DO_COPY_BLOCK where one is shared; ERR_NO_MEMORY and ERR_LIMIT
 * change nothing. slot_append of n, or slot_truncate, follows. */
enum err slot_grow(struct pipeline *p, struct run *run, struct slot *slot, uint32_t n);
void slot_append(struct slot *slot, const int32_t *ids, uint32_t n);
/* The first n positions of `from`, in place of what it had. Has room for them: slot_reserve. */
enum err slot_share(struct run *run, const struct slot *from, struct slot *to, uint32_t n);
/* Identity of block i, when it is full: the chain up to its end. By it blocks are the same on all
 * nodes. */
struct hash128 slot_block_hash(const struct run *run, const struct slot *slot, uint32_t i);
struct hash128 slot_hash_at(const struct run *run, const struct slot *slot, uint32_t n);
struct ring_entry *ring_at(struct run *run, uint32_t i);
/* A new youngest entry, NULL when the ring is full. */
struct ring_entry *ring_push(struct run *run);
/* Takes the youngest back, unseen. */
void ring_pop(struct run *run);
/* Drops all that has not been computed; what computes is not wanted any more. */
void ring_flush(struct run *run);
/* Before the effects of a call are overwritten: spent entries go. */
void ring_collect(struct run *run);
/* At the end of a call: rows that are still to be computed are copied. */
enum err ring_keep_rows(struct run *run);

/* pipeline_stage.c */
void stage_break(struct pipeline *p, struct run *run, enum err e);
/* Ends the stream without telling the head. */
void stage_quit(struct pipeline *p, struct run *run);
enum err stage_on_step(struct pipeline *p, struct run *run, const struct node_id *from,
                       const struct frame *f);
void stage_on_open(struct pipeline *p, struct run *run, const struct frame *f);
void stage_on_link_down(struct pipeline *p, struct run *run, const struct node_id *id);
enum err stage_on_computed(struct pipeline *p, const struct pipeline_computed *c);
enum err stage_on_failed(struct pipeline *p, uint32_t instance, uint64_t step, enum err e);
/* Executes queued steps until one computes. */
void stage_pump(struct pipeline *p, struct run *run);
/* Passes a step without rows on (or, at the tail, gives credit for it). */
void pipeline_stage_pass(struct pipeline *p, struct run *run, struct ring_entry *e);
/* Hands an entry whose slots are known to the shell. */
void stage_compute(struct pipeline *p, struct run *run, struct ring_entry *e);
void stage_timers(struct pipeline *p, struct run *run);
uint64_t stage_due(const struct pipeline *p, const struct run *run);
uint64_t predicted_us(const struct plan *plan, uint32_t n_steps, uint32_t n_rows);

/* pipeline_head.c */
void head_on_open(struct pipeline *p, struct run *run, const struct node_id *from,
                  const struct frame_open *open);
void head_on_cancel(struct pipeline *p, const struct node_id *from,
                    const struct frame_cancel *cancel);
void head_on_token(struct pipeline *p, struct run *run, uint64_t step,
                   const struct frame_token *token);
void head_on_credit(struct pipeline *p, struct run *run, uint64_t step);
void head_on_have(struct pipeline *p, struct run *run, const struct node_id *from, uint64_t step,
                  const struct frame_have *have);
/* A stage could not reach the one that waits for the tokens. */
void head_on_error(struct pipeline *p, struct run *run, uint64_t step,
                   const struct frame_error *error);
void head_on_link_down(struct pipeline *p, struct run *run, const struct node_id *id);
/* Ends the stream: running sequences go back to their entries. */
void head_break(struct pipeline *p, struct run *run, enum err e);
/* Ends all sequences of a run, queued ones too. */
void head_abandon(struct pipeline *p, struct run *run, enum err e);
/* Says so, once, when a draining epoch has no sequences left. */
void head_say_drained(struct pipeline *p, struct run *run);
void head_pump(struct pipeline *p, struct run *run);
void head_timers(struct pipeline *p, struct run *run);
uint64_t head_due(const struct pipeline *p, const struct run *run);
uint32_t head_sequences(const struct pipeline *p, const struct run *run);
/* What the computation of a step at the head took, for the size of the next ones. */
void head_measure(struct run *run, uint32_t n_prompt_rows, uint32_t n_rows, uint32_t us);
/* The slot is nobody's from now on; the stages hear of it with the next step. */
void head_leave_slot(struct pipeline *p, struct sequence *s);

/* pipeline_schedule.c */
/* False when there is nothing (more) to be sent now. */
bool schedule_step(struct pipeline *p, struct run *run);
void step_header(struct run *run, struct ring_entry *e);

/* pipeline_entry.c */
enum err entry_submit(struct pipeline *p, const struct pipeline_submit *submit);
void entry_cancel(struct pipeline *p, const struct request_id *id);
void entry_on_route(struct pipeline *p, const struct route *route);
void entry_on_link_down(struct pipeline *p, const struct node_id *id);
void entry_on_token(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_token *token);
void entry_on_have(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                   const struct frame_have *have);
void entry_on_cached(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                     const struct frame_cached *cached);
void entry_on_error(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_error *error);
void entry_on_stale(struct pipeline *p, const struct node_id *from, uint64_t epoch);
void entry_pump(struct pipeline *p);
void entry_timers(struct pipeline *p);
uint64_t entry_due(const struct pipeline *p);
void entry_collect(struct pipeline *p);

/* pipeline_relay.c. False: no route by that epoch is known here. */
bool relay_on_open(struct pipeline *p, const struct node_id *from, const struct frame *f);
void relay_on_cancel(struct pipeline *p, const struct node_id *from,
                     const struct frame_cancel *cancel);
void relay_on_token(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_token *token);
void relay_on_have(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                   const struct frame_have *have);
void relay_on_cached(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                     const struct frame_cached *cached);
void relay_on_error(struct pipeline *p, const struct node_id *from, uint64_t epoch,
                    const struct frame_error *error);
void relay_on_stale(struct pipeline *p, const struct node_id *from, uint64_t epoch);
void relay_on_link_down(struct pipeline *p, const struct node_id *id);

#endif
