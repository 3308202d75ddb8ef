/* A plan: who runs which layers of which model. A plain value; copied freely, compared by its
 * epoch. PROTOCOL 3.2: an epoch is (term, planner, sequence, hash of the plan), with a 64-bit alias
 * on the wire. */
#ifndef COVEY_PLANNER_PLAN_H
#define COVEY_PLANNER_PLAN_H

#include "base/err.h"
#include "base/id.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    PLAN_STAGES_MAX = 16,
    MODEL_NAME_MAX = 96, /* bytes with the NUL */
    MODEL_LAYERS_MAX = 512,
    NODES_MAX = 16,      /* nodes that a plan considers */
    PLAN_SLOTS_MAX = 64, /* sequences that run at once, and those whose KV is kept */
    PLAN_KV_BLOCK = 64,  /* positions of a block of KV (runtime/stage.h) */
    PLAN_KV_POSITIONS_MAX = PLAN_KV_BLOCK << 20,
};

enum precision {
    PRECISION_FAST = 0,     /* activations rounded to 8 bits for quantised weights, KV F16 */
    PRECISION_F32 = 1,      /* everything F32 */
    PRECISION_FAST_KV8 = 2, /* like FAST, but KV Q8_0: half the memory for it */
    PRECISION_N
};
enum backend { BACKEND_NATIVE = 0 };

struct epoch {
    uint64_t term;
    struct node_id planner;
    uint64_t sequence;
    struct hash256 hash; /* over everything else in the plan */
};

struct plan_stage {
    struct node_id node;
    uint64_t boot_id;      /* the incarnation of the participant that was planned for (3.1) */
    uint32_t first_layer;  /* of the model */
    uint32_t n_layers;     /* at least 1; the head also embeds, the tail also computes logits */
    uint64_t memory_bytes; /* to be reserved: weights + KV cache + activations + 8 MiB */
};

struct plan {
    struct epoch epoch;
    struct hash256 model; /* manifest id */
    char model_name[MODEL_NAME_MAX];
    uint32_t n_layers;
    uint32_t context;            /* positions of one sequence, at most */
    uint32_t kv_positions;       /* of the KV cache that all sequences share: whole blocks, at least
                                    the context. 0, from earlier versions: one sequence at a time */
    uint8_t precision;           /* enum precision */
    uint8_t backend;             /* enum backend */
    uint32_t arithmetic_version; /* participants must match */
    uint32_t n_stages;           /* stage 0 is the head, the last one the tail */
    struct plan_stage stages[PLAN_STAGES_MAX];
    double predicted_token_us;   /* time per output token of one stream */
    double predicted_prefill_us; /* time per prompt token */
};

#define PLAN_INIT ((struct plan){.n_stages = 0})

/* "fast", "f32", "fast-kv8"; "?" for others. ERR_INVALID. */
const char *precision_name(uint32_t precision);
enum err precision_parse(const char *name, uint8_t *ret);
/* How the KV is stored, as GGUF names it: "f16", "f32", "q8_0". */
const char *precision_kv_name(uint32_t precision);

/* Sequences that a stage knows at once, and blocks of its KV cache (0: of one context). */
uint32_t plan_slots(const struct plan *p);
uint32_t plan_kv_blocks(const struct plan *p);

/* Stage i of the plan that `id` executes, or -1. */
int plan_stage_of(const struct plan *p, const struct node_id *id);
/* Fills epoch.hash from all other fields. */
void plan_seal(struct plan *p);
/* ERR_CORRUPT unless layers are covered once in order, no node comes twice, counts are within
 * limits, numbers are finite and the hash is right. ERR_UNSUPPORTED when only the precision or the
 * backend is unknown to this version. */
enum err plan_check(const struct plan *p);
/* The 64 bits that frames carry: never 0. */
uint64_t epoch_alias(const struct epoch *e);
/* Order of (term, planner, sequence). */
int epoch_cmp(const struct epoch *a, const struct epoch *b);
bool epoch_eq(const struct epoch *a, const struct epoch *b);

#endif
