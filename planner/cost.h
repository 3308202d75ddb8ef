/* The cost model of DESIGN section 5 for layer splits: what a plan costs in time and memory.
 *
 * Pure arithmetic over measured rates. A stage's time is, for its layers and (at the tail) for the
 * output matrix, bytes / stream rate or multiply-adds / arithmetic rate, whichever is larger; the
 * head also reads one embedding row. Between stages: latency + bytes / bandwidth; from the tail
 * back to the head only a token. All times are in microseconds.
 *
 * One chunk of a prompt is in the pipeline at a time (this version of the data plane), so a prompt
 * costs the sum over its stages, not the slowest of them. */
#ifndef COVEY_PLANNER_COST_H
#define COVEY_PLANNER_COST_H

#include "planner/topology.h"

enum {
    COST_STEP_ROWS = 512, /* a stage's working memory: the largest step of runtime/stage.h */
    COST_RESERVE_BYTES = 8 << 20, /* PROTOCOL 5.3 */
    /* The KV cache that all sequences of a plan share has so many contexts, where memory allows. */
    COST_KV_CONTEXTS = 8,
    COST_DEPTH = 1024,       /* positions that a chat has behind it, as far as the context goes */
    COST_PREFILL_ROWS = 256, /* rows of a typical prompt chunk: weights are read once for it */
    COST_FRAME_BYTES = 128,  /* header and tag of a data frame; a token's frame whole */
    COST_CHAT_PROMPT_TOKENS = 256, /* what OBJECTIVE_CHAT weighs: one turn reads so much */
    COST_CHAT_OUTPUT_TOKENS = 256, /* and writes so much */
};
/* Bandwidth of a path that nobody has measured yet: 100 Mbit/s, the slowest cable and a fair Wi-Fi.
 * Cautious: a fast path gains by being measured, a slow one is not chosen by mistake. */
#define COST_UNKNOWN_BYTES_PER_S 12.5e6

enum objective {
    OBJECTIVE_CHAT = 0,   /* time of one turn: COST_CHAT_PROMPT_TOKENS in, .._OUTPUT_TOKENS out */
    OBJECTIVE_TOKEN = 1,  /* time per output token */
    OBJECTIVE_PREFILL = 2 /* time to first token */
};

struct cost_stage {
    double token_us;     /* this stage, for one output token */
    double prefill_us;   /* this stage, for one prompt token */
    double token_hop_us; /* to the next stage; from the tail: the token to the head (0 if alone) */
    double prefill_hop_us; /* to the next stage, for one prompt token; 0 from the tail */
    uint64_t memory_bytes; /* needed */
    uint64_t budget_bytes; /* available */
};

struct cost {
    double objective_us;
    double token_us;      /* per output token of one stream */
    double prefill_us;    /* per prompt token */
    double tokens_per_s;  /* of all streams together, with n_concurrent of them */
    bool fits;            /* memory, edges, eligibility, equal arithmetic */
    bool bottleneck_link; /* the slowest part is the hop that leaves `bottleneck`, not the stage */
    uint32_t bottleneck;  /* stage with the longest time per output token */
    uint32_t n_stages;
    struct cost_stage stages[PLAN_STAGES_MAX];
};

/* Can the planner use this node at all: eligible, with known finite rates. */
bool cost_node_usable(const struct topology_node *node);
/* Both directions up and sane: neighbours in a plan need both (PROTOCOL 2.6). */
bool cost_edge_usable(const struct topology *t, uint32_t a, uint32_t b);

/* Layers [first, first + n) and the bytes of their weights. */
struct cost_run {
    uint32_t first, n;
    uint64_t bytes;
};
struct cost_run cost_run_of(const struct model_shape *shape, uint32_t first, uint32_t n);

/* So many positions as whole blocks of KV. */
uint32_t cost_whole_blocks(uint32_t n_positions);
/* Bytes to reserve for a stage: weights, KV for so many positions (whole blocks of them),
 * activations and COST_RESERVE_BYTES. The head adds the embedding, the tail the output; when tied,
 * one stage that is both holds the larger of the two once. Saturates instead of overflowing. */
uint64_t cost_stage_memory(const struct model_shape *shape, struct cost_run run,
                           uint32_t n_positions);
double cost_stage_token_us(const struct topology_node *node, const struct model_shape *shape,
                           struct cost_run run, uint32_t context);
double cost_stage_prefill_us(const struct topology_node *node, const struct model_shape *shape,
                             struct cost_run run);
/* One step's activations from a stage to the next, and a token from tail to head. */
double cost_hop_token_us(const struct topology_edge *edge, const struct model_shape *shape);
double cost_hop_prefill_us(const struct topology_edge *edge, const struct model_shape *shape);
double cost_hop_back_us(const struct topology_edge *edge);
/* The objective's value from time per output token and per prompt token. */
double cost_objective(enum objective objective, double token_us, double prefill_us);

/* The KV cache that a plan with its nodes and layers may have: COST_KV_CONTEXTS of its context, but
 * a node's part stays within half of its budget, so that the next plan of the model can be loaded
 * beside it; where one context alone takes more, half of what is left. At least the context. */
uint32_t cost_kv_positions(const struct topology *t, const struct model_shape *shape,
                           const struct plan *p);
/* Gives the plan a KV cache of so many positions, and its stages the memory that they need then.
 * The seal is broken. */
void cost_give_kv(const struct model_shape *shape, uint32_t kv_positions, struct plan *p);

/* Everything about a plan on this topology; `n_concurrent` streams (at least 1) for tokens_per_s.
 * ERR_NOT_FOUND when a participant is not in the topology (or has another boot_id); an edge that is
 * down or a budget that is too small clears `fits` and leaves the rest filled in. */
enum err cost_plan(const struct topology *t, const struct model_shape *shape, const struct plan *p,
                   enum objective objective, uint32_t n_concurrent, struct cost *ret);

#endif
