/* What the files of data_world share: the world, its queue of events, its links. */
#ifndef COVEY_TESTS_SIM_DATA_WORLD_INTERNAL_H
#define COVEY_TESTS_SIM_DATA_WORLD_INTERNAL_H

#include "agent/pipeline.h"
#include "base/rng.h"
#include "tests/sim/data_world.h"
#include "tests/sim/hash_stage.h"

enum {
    NODES = 6,
    REQUESTS = 64,
    EPOCHS = 64,
    INSTANCES = 128,
    CONNECTIONS = 4096,
    LAYERS = 8,
    CONTEXT = 320, /* at most */
    EVENTS_MAX = 3000000,
    OUTPUTS = 1 << 17,
    HEAL_US = 12 * 1000 * 1000,
    END_US = 200 * 1000 * 1000,
    MS = 1000,
};

enum kind {
    EV_TICK,
    EV_FRAME,
    EV_UP,
    EV_DOWN,
    EV_CONNECT,
    EV_COMPUTED,
    EV_SUBMIT,
    EV_CANCEL,
    EV_CUT,
    EV_KILL,
    EV_START,
    EV_REPLAN,
    EV_INSTALL,
    EV_COMMIT,
    EV_ROUTE,
    EV_DRAIN,
    EV_RETIRE,
    EV_HEAL,
};

struct event {
    uint64_t at, order;
    enum kind kind;
    uint32_t node, peer, boot, number;
    uint8_t *bytes; /* of a frame */
    size_t n_bytes;
};

struct connection {
    uint32_t side[2];
    uint64_t lost_from[2]; /* frames to this side that would come later are lost */
    uint64_t last_at[2];
    bool up[2], down[2];
};

struct instance {
    bool used, committed;
    uint32_t epoch;
    uint64_t last_step;
    struct hash_stage *stage;
};

struct job {
    struct pipeline_compute compute;
    struct stage_segment segments[STAGE_SEGMENTS_MAX];
    int32_t ids[STAGE_ROWS_MAX];
    uint8_t in[STAGE_ROWS_MAX * HASH_STAGE_ROW_BYTES], out[STAGE_ROWS_MAX * HASH_STAGE_ROW_BYTES];
    struct pipeline_sample samples[STAGE_SEGMENTS_MAX];
    struct frame_sampler samplers[STAGE_SEGMENTS_MAX];
    int32_t history[STAGE_SEGMENTS_MAX][CONTEXT];
    uint32_t blocks[STAGE_SEGMENTS_MAX][CONTEXT / STAGE_BLOCK + 1];
};

struct node {
    struct node_id id;
    bool alive;
    uint32_t boot;
    struct pipeline *p;
    uint64_t tick_at;
    struct instance instances[INSTANCES];
    bool busy;
    struct job job;
};

struct request {
    struct request_id id;
    uint32_t entry, boot;
    int32_t tokens[CONTEXT]; /* the oracle's */
    uint32_t n_prompt, n_tokens, n_got;
    enum frame_finish finish;
    struct frame_sampler sampler;
    uint64_t deadline_us;
    bool submitted, ended, cancelled, lost;
};

struct output {
    uint64_t epoch, step, hash;
    uint32_t stage;
};

struct world {
    struct data_world_options o;
    struct data_world_result *r;
    struct rng rng;
    uint64_t now, order;
    struct event *heap;
    uint32_t n_heap, cap_heap;
    struct node nodes[NODES];
    struct connection connections[CONNECTIONS];
    uint32_t n_connections;
    uint32_t pair[NODES][NODES]; /* connection + 1 */
    bool blocked[NODES][NODES];
    struct plan epochs[EPOCHS];
    uint32_t n_epochs;
    int current; /* epoch that is routed; -1 */
    uint64_t plan_busy_until;
    uint32_t next_instance;
    struct request requests[REQUESTS];
    uint32_t n_requests, n_slots, n_blocks, chunk_rows, context;
    bool healed;
    struct output *outputs;
    int32_t bases[3][CONTEXT];
};

/* Keeps the first failure. */
void world_fail(struct world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
uint32_t world_below(struct world *w, uint32_t n);
bool world_chance(struct world *w, uint32_t of);
void world_note(struct world *w, uint64_t v);
struct event *world_post(struct world *w, uint64_t at, enum kind kind, uint32_t node);
struct event world_pop(struct world *w);
struct connection *world_connection(struct world *w, uint32_t a, uint32_t b);
uint32_t world_side(const struct connection *c, uint32_t node);
uint32_t world_number(const struct world *w, const struct node_id *id);
void world_connect(struct world *w, uint32_t a, uint32_t b);
/* Each side loses what would come later than some moment soon, and hears of it up to late_us after.
 */
void world_cut(struct world *w, struct connection *c, uint32_t late_us);
void world_send(struct world *w, uint32_t from, const struct pipeline_send *send);

#endif
