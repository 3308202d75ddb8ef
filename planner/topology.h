/* What a planner decides from: one snapshot of nodes, directed edges and the model's shape
 * (PROTOCOL 2.6). Plain values, filled by agent/node (from gossip) or by a test. */
#ifndef COVEY_PLANNER_TOPOLOGY_H
#define COVEY_PLANNER_TOPOLOGY_H

#include "planner/plan.h"

struct topology_node {
    struct node_id id;
    uint64_t boot_id;
    bool eligible; /* alive, awake for 20 s after sleep, not draining, not in conflict */
    uint32_t arithmetic_version;
    uint8_t backend;
    uint64_t budget_bytes;     /* for weights, KV, activations and 8 MiB (PROTOCOL 5.3) */
    double stream_bytes_per_s; /* weight bytes that decoding streams, all threads together */
    double macs_per_s;         /* multiply-adds of prompt processing, all threads together */
};

struct topology_edge {
    bool up;
    double latency_us;  /* one way: half of the measured round trip */
    double bytes_per_s; /* measured bandwidth; 0 when not known yet */
};

struct topology {
    uint32_t n_nodes;
    struct topology_node nodes[NODES_MAX];
    struct topology_edge edges[NODES_MAX][NODES_MAX]; /* [from][to] */
};

/* Bytes and arithmetic of a model for one context length and precision. Filled from runtime/model
 * by agent. */
struct model_shape {
    struct hash256 model;
    char name[MODEL_NAME_MAX];
    uint32_t n_layers;
    uint32_t context_max;                   /* the model's own */
    uint32_t hidden;                        /* row width of activations, in F32 elements */
    uint64_t layer_bytes[MODEL_LAYERS_MAX]; /* weights of each layer */
    uint64_t embedding_bytes;               /* held by the head */
    uint64_t output_bytes;                  /* norm and output matrix, held by the tail */
    bool output_is_embedding;               /* tied: one node that is head and tail holds it once */
    uint64_t kv_bytes_per_position;         /* of one layer, all KV heads, keys and values */
    uint64_t layer_macs;  /* multiply-adds of one layer for one row, without attention */
    uint64_t output_macs; /* of the output matrix for one row */
    uint64_t activation_bytes_per_row; /* working memory of a stage for one row of a step */
};

#endif
