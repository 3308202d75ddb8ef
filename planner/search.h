/* The best layer split for a model on a topology, and why.
 *
 * Exact where layers are alike: over all ordered subsets of up to 16 nodes and all layer counts, no
 * plan has a smaller objective. The time of a pipeline is a sum, so for a given set, head and tail
 * the layers are dealt to the fastest nodes first up to their memory (an exchange argument proves
 * it), and the order in between is a shortest Hamiltonian path: Held and Karp (1962), with lower
 * bounds from the dealing alone. Where layers are not alike, all orders of up to five nodes are cut
 * exactly; of more nodes the order is searched with the mean layer, and only its cut is exact.
 *
 * Context: what was asked for. By default: the best plan for min(4,096, the model's own) positions
 * is found first; when none fits, the largest context from 2,048 up that fits anywhere. Then the
 * context grows in steps of 256, on the same nodes in the same order, with layers dealt anew, as
 * long as the predicted time grows by no more than 5 %: a longer context never forces a worse
 * split. */
#ifndef COVEY_PLANNER_SEARCH_H
#define COVEY_PLANNER_SEARCH_H

#include "planner/cost.h"

enum {
    SEARCH_CONTEXT_MIN = 2048, /* by default no less than this, unless the model's own is smaller */
    SEARCH_CONTEXT_BASE = 4096, /* the context for which the split is chosen by default */
    SEARCH_CONTEXT_STEP = 256,
    SEARCH_CANDIDATES_MAX = 2 * NODES_MAX + 1,
};

struct search_options {
    uint32_t context;      /* positions; 0: by the rule above */
    uint32_t n_concurrent; /* streams, for the throughput that is reported; 0 means 1 */
    uint8_t precision;     /* enum precision; written into the plan */
    uint8_t objective;     /* enum objective */
};
#define SEARCH_OPTIONS_INIT ((struct search_options){0})

/* Fills everything of the plan but its epoch (which stays zero: the planner numbers and seals it).
 * ERR_NO_FIT with a sentence that says how much is missing, ERR_INVALID for a shape or context that
 * makes no sense, ERR_NO_MEMORY. */
enum err search_plan(const struct topology *t, const struct model_shape *shape,
                     const struct search_options *options, struct plan *ret, struct err_text *text);

enum verdict {
    VERDICT_CHOSEN,
    VERDICT_SLOWER,       /* it would work, but another is faster */
    VERDICT_NO_MEMORY,    /* the layers do not fit */
    VERDICT_NOT_ELIGIBLE, /* a node that does not count now */
    VERDICT_NO_RATES,     /* a node whose speed is not known yet */
    VERDICT_NO_PLAN,      /* no plan of that size: memory, links or unlike arithmetic */
};

/* One thing that was considered: each node alone, and the best plan of each number of nodes. */
struct search_candidate {
    enum verdict verdict;
    uint32_t n_nodes;    /* of the plan looked for */
    struct plan plan;    /* n_stages is 0 when there is none */
    struct cost cost;    /* valid when plan.n_stages > 0 */
    struct err_text why; /* a sentence: what it costs, or what is missing */
};

/* Up to `max` candidates at the chosen plan's context (or at the one asked for), the chosen one
 * first. ERR_INVALID, ERR_NO_MEMORY; that nothing fits is not an error here. */
enum err search_explain(const struct topology *t, const struct model_shape *shape,
                        const struct search_options *options, struct search_candidate *ret,
                        uint32_t max, uint32_t *ret_n);

#endif
