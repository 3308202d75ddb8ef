/* The data plane of one node, as a core: no sockets, clocks, threads or randomness inside.
 *
 * It plays every role of PROTOCOL 3.11, 3.12 and 4 at once: entry (holds the client's request),
 * head (first stage: schedules steps for all entries), middle stage, tail (samples; sends tokens to
 * head and entry). A plan with one node goes the same way without frames.
 *
 * The shell feeds events to pipeline_step and carries out the effects that come back, in their
 * order. In production that is the inference thread with real links and stages; in the simulator it
 * is virtual links and stages that hash. The shell owns links, stages ("instances", named by a
 * number that means nothing here) and the clients; this core owns requests, epochs, slots, KV
 * blocks and step order. Not here: loading stages, sampling arithmetic, stop strings (the entry's
 * client side looks for them and cancels), the control plane that says which plan is installed,
 * committed or retired.
 *
 * Views. Pointers in an event are read during the call only, but for three that may come back in
 * its effects: the rows of a STEP frame as a COMPUTE's input, the token ids of an OPEN that is
 * passed on, the rows of COMPUTED in a SEND. So a frame and the output rows must live until the
 * effects of that call are carried out. Pointers in effects are valid until the next call. A shell
 * that computes later than that copies.
 *
 * Memory is taken when epochs are installed and requests come, within the maxima below; nothing is
 * allocated per token. */
#ifndef COVEY_AGENT_PIPELINE_H
#define COVEY_AGENT_PIPELINE_H

#include "planner/plan.h"
#include "runtime/stage.h"
#include "transport/frame.h"

enum {
    PIPELINE_REQUESTS_MAX = 64,  /* held as entry; more: ERR_BUSY */
    PIPELINE_SEQUENCES_MAX = 64, /* queued and running as head, all epochs together; more: BUSY */
    PIPELINE_SLOTS_MAX = 64,     /* of an epoch: sequences that run and those that are kept */
    PIPELINE_EPOCHS_MAX = 16,    /* installed, committed and draining together */
    PIPELINE_MODELS_MAX = 16,    /* routes */
    PIPELINE_PEERS_MAX = 64,
    PIPELINE_EFFECTS_MAX = 1024, /* of one call */
    PIPELINE_CHUNK_ROWS = 128,   /* rows of one step: bounds how long a prompt delays others */
    PIPELINE_NO_PLAN_US = 30 * 1000 * 1000, /* 3.12: then the request ends with an error */
    PIPELINE_SILENCE_US = 5 * 1000 * 1000,  /* neither token nor sign of life: next attempt */
    PIPELINE_STALL_US = 1000 * 1000,        /* 2.4: max(this, 4 x predicted) */
    PIPELINE_FRUITLESS_ATTEMPTS_MAX = 24,   /* attempts in a row without one more token */
};

struct pipeline;

struct pipeline_options {
    struct node_id self;
    uint32_t chunk_rows; /* 0: PIPELINE_CHUNK_ROWS; at most STAGE_ROWS_MAX */
};

enum pipeline_event_type {
    PIPELINE_TICK = 0,
    /* The control plane. An epoch is installed (stage loaded), committed, perhaps draining, and
     * retired. For each model one epoch is current and one draining: COMMIT demotes the current one
     * and retires the one before it. COMMIT of a demoted or draining epoch makes it current again
     * (after an ABORT). DRAIN: no new requests at its head; DO_DRAINED when the last has ended. */
    PIPELINE_INSTALL, /* ERR_EXISTS, ERR_INVALID, ERR_BUSY, ERR_NO_MEMORY */
    PIPELINE_COMMIT,  /* these three: ERR_NOT_FOUND */
    PIPELINE_DRAIN,
    PIPELINE_RETIRE,
    /* After sleep (2.5). SUSPEND is the control core's word: nothing is executed of any epoch until
     * COMMIT confirms it (again); sequences go back to their entries and what is being computed is
     * dropped. SLEPT is the same for a shell that saw it first, from its own clocks: a COMMIT that
     * comes between it and SUSPEND was given before the sleep and confirms nothing. */
    PIPELINE_SUSPEND,
    PIPELINE_SLEPT,
    /* The active plan of a model, on nodes with or without a part in it; replaces the last one. */
    PIPELINE_ROUTE,    /* ERR_BUSY: too many models */
    PIPELINE_NO_ROUTE, /* there is no plan now; new requests end with `reason` if it is final */
    /* The client's side. */
    PIPELINE_SUBMIT, /* ERR_BUSY, ERR_LIMIT, ERR_INVALID, ERR_EXISTS, ERR_NO_MEMORY: no END follows
                      */
    PIPELINE_CANCEL, /* DO_END with ERR_CANCELLED follows; unknown ids are ignored */
    /* Links. LINK_UP for a link that is up counts as down and up. */
    PIPELINE_LINK_UP,
    PIPELINE_LINK_DOWN,
    PIPELINE_FRAME, /* ERR_CORRUPT: the sender broke the rules; the shell may close the link */
    /* Answers to DO_COMPUTE. */
    PIPELINE_COMPUTED,
    PIPELINE_COMPUTE_FAILED,
};

struct pipeline_install {
    const struct plan *plan; /* this node is one of its stages, once */
    uint32_t instance;       /* of the loaded stage */
    uint32_t n_slots;        /* the same on all nodes of the plan, 1 to PIPELINE_SLOTS_MAX */
    uint32_t row_bytes;      /* of an activation row: 4 x n_embd */
    uint32_t n_blocks;       /* of the KV cache, the same on all nodes; 0: n_slots x context */
};

struct pipeline_submit {
    struct request_id request; /* fresh and random */
    struct hash256 model;      /* manifest id */
    const int32_t *prompt;     /* [n_prompt] */
    uint32_t n_prompt;         /* at least 1 */
    struct frame_sampler
        sampler;          /* with max_tokens (0: to the end of the context), end ids, seed */
    uint64_t deadline_us; /* absolute, on the clock of now_us; 0: none */
};

/* One sampled token, in the order of the samples of DO_COMPUTE. */
struct pipeline_sampled {
    int32_t id;
    float logprob;
    uint8_t n_logprobs;
    int32_t top_ids[FRAME_LOGPROBS_MAX];
    float top_logprobs[FRAME_LOGPROBS_MAX];
};

struct pipeline_computed {
    uint32_t instance;
    uint64_t step;
    const float *rows;                      /* [n_rows, row_bytes / 4]; NULL from a tail */
    const struct pipeline_sampled *sampled; /* [n_samples] from a tail */
    uint32_t compute_us;                    /* measured */
};

struct pipeline_event {
    enum pipeline_event_type type;
    union {
        struct pipeline_install install;
        struct epoch epoch;       /* COMMIT, DRAIN, RETIRE */
        const struct plan *route; /* ROUTE */
        struct {
            struct hash256 model;
            enum err reason;  /* ERR_NO_FIT, ERR_NOT_FOUND, ERR_UNSUPPORTED: final; else: wait */
            const char *text; /* a sentence, copied; may be NULL */
        } no_route;
        struct pipeline_submit submit;
        struct request_id cancel;
        struct node_id link; /* LINK_UP, LINK_DOWN */
        struct {
            struct node_id from;       /* authenticated by the link */
            const struct frame *frame; /* decoded */
        } frame;
        struct pipeline_computed computed;
        struct {
            uint32_t instance;
            uint64_t step;
            enum err err;
        } failed;
    };
};

enum pipeline_effect_type {
    PIPELINE_DO_SEND = 1,  /* see pipeline_frame; a frame is lost only together with its link: a
                              shell that cannot send reports LINK_DOWN */
    PIPELINE_DO_COMPUTE,   /* at most one under way in the whole core */
    PIPELINE_DO_WANT_LINK, /* please connect; repeated while it is wanted */
    PIPELINE_DO_TOKEN,     /* to the client, each position once, in order */
    PIPELINE_DO_END,       /* to the client, once for each accepted SUBMIT; the last of a request */
    PIPELINE_DO_COPY_BLOCK, /* of a stage's KV, before what follows is computed */
    PIPELINE_DO_RELEASE,    /* the instance is not used any more (epoch retired) */
    PIPELINE_DO_DRAINED,    /* at the head: a draining epoch has no requests left */
    PIPELINE_DO_STATS,      /* what a stage measured, at most once a second */
    PIPELINE_DO_STALL,      /* a stage or a step does not advance; said once for each step */
};

/* What the tail samples: one token for each segment with logits, from the last row. */
struct pipeline_sample {
    uint32_t segment;  /* index in segments */
    uint32_t position; /* of the token to be sampled: for Philox(seed, position) */
    const struct frame_sampler *sampler; /* with seed */
    const int32_t *history;              /* [n_history] ids before it, prompt included */
    uint32_t n_history;
};

struct pipeline_compute {
    uint32_t instance;
    uint64_t epoch; /* alias */
    uint64_t step;
    uint32_t n_segments, n_rows;
    const struct stage_segment *segments; /* for stage_forward */
    const float *rows_in;                 /* [n_rows, row_bytes / 4]; NULL at a head */
    uint32_t is_tail;                     /* 1: COMPUTED gives samples; 0: it gives rows */
    uint32_t n_samples;
    const struct pipeline_sample *samples;
};

struct pipeline_timings {
    uint64_t queued_us;  /* from SUBMIT to the first OPEN that was sent */
    uint64_t prefill_us; /* from there to the first token */
    uint64_t decode_us;  /* from the first to the last token */
    uint32_t n_prompt, n_emitted;
    uint32_t n_cached; /* of the prompt: their KV was held already */
    uint32_t n_attempts;
};

/* A small frame (or the STEP that `step` points to), not yet encoded. */
struct pipeline_send {
    struct node_id to;
    uint8_t type; /* enum frame_type */
    uint64_t epoch, step_number;
    const struct frame *step; /* of a STEP */
    const float *rows; /* of a STEP: the second piece for the link, after the encoded frame */
    size_t n_row_bytes;
    union {
        struct frame_open open;
        struct frame_token token;
        struct frame_cancel cancel;
        struct frame_credit credit;
        struct frame_have have;
        struct frame_stale stale;
        struct frame_error error;
        struct frame_cached cached;
    };
};

struct pipeline_effect {
    enum pipeline_effect_type type;
    union {
        struct pipeline_send send;
        struct pipeline_compute compute;
        struct node_id want_link;
        struct {
            struct request_id request;
            uint32_t position; /* in the sequence, prompt included */
            uint32_t index;    /* in the answer, from 0 */
            struct pipeline_sampled sampled;
        } token;
        struct {
            struct request_id request;
            enum err err;             /* ERR_OK: a whole answer */
            enum frame_finish finish; /* END_TOKEN or LENGTH when ERR_OK */
            const char *text;         /* a sentence for a person when not ERR_OK, else "" */
            struct pipeline_timings timings;
        } end;
        struct {
            uint32_t instance, from, to;
        } copy_block;
        struct {
            uint32_t instance;
            struct epoch epoch;
        } release; /* RELEASE, DRAINED */
        struct {
            struct epoch epoch;
            uint32_t stage;
            uint32_t n_decode_steps, n_prefill_rows; /* since the last STATS of this epoch */
            uint64_t decode_us, prefill_us;          /* sums of compute_us of steps without and with
                                                        prompt rows */
        } stats;
        struct {
            struct epoch epoch;
            uint32_t stage; /* whose step does not return: this node's, or 0 with `whole` */
            uint64_t step;
            uint64_t waited_us;
            uint32_t whole; /* 1: seen by the head, the step is somewhere in the stages */
        } stall;
    };
};

struct pipeline_update {
    const struct pipeline_effect *effects;
    uint32_t n;
};

/* ERR_INVALID, ERR_NO_MEMORY. */
enum err pipeline_new(const struct pipeline_options *options, struct pipeline **ret);
void pipeline_free(struct pipeline *p);

/* Takes one event. The effects in *update (never NULL pointers, n may be 0) are to be carried out
 * whatever the result is; they live until the next call. Errors: see the event types. */
enum err pipeline_step(struct pipeline *p, const struct pipeline_event *event, uint64_t now_us,
                       struct pipeline_update *update);

/* When a TICK is due, UINT64_MAX when nothing waits. */
uint64_t pipeline_next_due(const struct pipeline *p);

/* The frame of a SEND, for link_send_frame(link, frame, send->rows, ...): the STEP itself, or
 * `scratch` filled in. */
const struct frame *pipeline_frame(const struct pipeline_send *send, struct frame *scratch);

/* For probe answers, status and tests. */
struct pipeline_progress {
    uint64_t steps_done;              /* by this node's stages since the start */
    uint64_t busy_since_us;           /* of the computation under way; 0: none */
    uint32_t n_requests;              /* held as entry */
    uint32_t n_sequences;             /* as head: running and queued */
    uint32_t n_slots_used;            /* by running sequences, on this node's stages */
    uint32_t n_blocks, n_blocks_used; /* of all stages' KV caches; used: by running and kept */
    uint64_t n_preempted;             /* sequences put back into the queue, as head */
};
void pipeline_progress(const struct pipeline *p, struct pipeline_progress *ret);

/* Time of the last frame or step of an epoch (3.10); 0 when it is not installed. */
uint64_t pipeline_last_use_us(const struct pipeline *p, const struct epoch *epoch);

/* How status shows a request that this node holds as entry. */
struct pipeline_request_info {
    struct request_id request;
    struct hash256 model;
    uint64_t epoch; /* alias of the plan that it runs on; 0: waits for one */
    uint32_t n_prompt, n_emitted, attempt;
};
/* Fills up to max; returns how many. */
uint32_t pipeline_requests(const struct pipeline *p, struct pipeline_request_info *ret,
                           uint32_t max);

/* The chain over tokens by which KV is known (PROTOCOL 3.12): first = of the empty chain. BLAKE2b
 * of 16 bytes over the hash before and one token id, so it does not depend on chunks. */
struct hash128 pipeline_chain_first(const struct plan *plan);
struct hash128 pipeline_chain_next(const struct hash128 *hash, int32_t token_id);

#endif
