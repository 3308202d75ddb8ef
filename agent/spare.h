/* Second copies: with disk to spare, two members hold each byte of a wanted model (PROTOCOL 3.14).
 *
 * A core. Every node divides the same way what gossip says: each run of blocks that one living
 * member alone holds is given to one other member with room. So nobody has to command it, and two
 * do not fetch the same, but for the moment that their views differ. Which node fetches how much
 * also tells whose loss would be fatal, and how far the copy is.
 *
 * The pace is here too: a node fetches its part only while nothing is computed, nothing is loaded
 * and the work has been there for a while; piece by piece, so that each piece follows the view of
 * its time; and after a failure it rests. What is over two copies stays: nothing is deleted.
 * Fetching is the loader's (agent/loader.h), the view is agent/node's. */
#ifndef COVEY_AGENT_SPARE_H
#define COVEY_AGENT_SPARE_H

#include "base/err.h"
#include "base/id.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    SPARE_BLOCK_BYTES = 1 << 20, /* of the manifest */
    SPARE_BLOCKS_MAX = 1 << 22,  /* of one model */
    SPARE_MEMBERS_MAX = 65,      /* membership's limit, and ourselves */
    SPARE_MODELS_MAX = 16,       /* wanted at once */
    SPARE_RUNS_MAX = 32,         /* runs of blocks that gossip tells of one model at one member */
    SPARE_ORDER_RUNS_MAX = 64,
    SPARE_ORDER_BLOCKS = 256, /* of one piece */

    SPARE_SETTLE_US = 3 * 1000 * 1000, /* a plan that was just made fetches first */
    SPARE_QUIET_US = 2 * 1000 * 1000,  /* after the last sign of a request */
    SPARE_RETRY_US = 5 * 1000 * 1000,  /* x 2^n after failures */
    SPARE_RETRY_MAX_US = 300 * 1000 * 1000,
    SPARE_LOOK_US = 3 * 1000 * 1000, /* how often to look while there is nothing to do */
    SPARE_WATCH_US = 500 * 1000,     /* and while there is */
};

struct spare_run {
    uint32_t first, n; /* blocks */
};

struct spare_member {
    struct node_id id;
    uint64_t room_bytes; /* that it gives to second copies; 0: none */
    bool computes;       /* a request is computed there just now */
};

/* Runs in ascending order, which do not touch; others are ignored from there on. */
struct spare_holding {
    uint32_t n_runs;
    struct spare_run runs[SPARE_RUNS_MAX];
};

struct spare_model {
    struct hash256 id;
    uint64_t n_bytes;
    struct spare_holding held[SPARE_MEMBERS_MAX]; /* by member */
};

/* What gossip says now: living members with this node among them, and wanted models that a member
 * holds. */
struct spare_view {
    uint32_t n_members, self;
    struct spare_member members[SPARE_MEMBERS_MAX];
    uint32_t n_models;
    struct spare_model models[SPARE_MODELS_MAX];
};

/* How one model is divided. */
struct spare_share {
    uint64_t twice_bytes;         /* held by two members or more */
    uint64_t once_bytes;          /* held by one alone */
    uint64_t nowhere_bytes;       /* held by none */
    uint64_t homeless_bytes;      /* held by one alone, and no other has room */
    bool sole[SPARE_MEMBERS_MAX]; /* it alone holds some block: its loss would be fatal */
    uint64_t takes_bytes[SPARE_MEMBERS_MAX];
    uint32_t n_own; /* what this node is to fetch; cut where the table ends */
    struct spare_run own[SPARE_ORDER_RUNS_MAX];
};

/* Fills ret [view->n_models]. Among members with room the one that holds most of the model comes
 * first, so that a copy that was begun is ended by the same one; then the one with most room, then
 * the smaller key. Models share the room in the order of their ids. */
void spare_divide(const struct spare_view *view, struct spare_share *ret);

/* What a member holds of a block: for tests and for views. */
bool spare_holds(const struct spare_holding *h, uint32_t block);

struct spare_order {
    struct hash256 model;
    uint32_t n_runs;
    struct spare_run runs[SPARE_ORDER_RUNS_MAX]; /* SPARE_ORDER_BLOCKS blocks at most */
};

struct spare_pace {
    bool running;
    struct hash256 model; /* while running */
    bool has_work;
    uint64_t work_since_us, quiet_from_us, retry_us;
    uint32_t n_failed; /* in a row */
};

enum spare_action {
    SPARE_WAIT,
    SPARE_FETCH, /* the order; spare_done ends it */
    SPARE_STOP,  /* end the one that runs; spare_done still comes */
};

/* `busy`: this node computes, serves a request, or loads its part of a plan. */
enum spare_action spare_step(struct spare_pace *p, const struct spare_view *view,
                             const struct spare_share *shares, bool busy, uint64_t now_us,
                             struct spare_order *ret);
/* ERR_CANCELLED is no failure. An order that ended well and brought nothing counts as one, since it
 * would be given again for ever. */
void spare_done(struct spare_pace *p, enum err how, uint64_t got_bytes, uint64_t now_us);
/* When to call spare_step again. */
uint64_t spare_next_due(const struct spare_pace *p, uint64_t now_us);

#endif
