/* Kinds of mail to the loop thread. Bodies are the structs below; owned pointers as noted. */
#ifndef COVEY_AGENT_MAIL_H
#define COVEY_AGENT_MAIL_H

#include "agent/pipeline.h"
#include "base/address.h"
#include "base/err.h"
#include "base/id.h"
#include "planner/plan.h"

#include <stdint.h>

enum loop_mail {
    /* HTTP threads */
    LOOP_CALL = 1,     /* owned: struct call (a reference) */
    LOOP_CALL_DROPPED, /* body: struct request_id of a chat whose client is gone */
    /* inference thread */
    LOOP_WANT_LINK, /* struct node_id */
    LOOP_LINK,      /* struct mail_link */
    LOOP_RELEASED,  /* struct mail_released */
    LOOP_DRAINED,   /* struct epoch */
    LOOP_STATS,     /* struct mail_stats */
    LOOP_STALL,     /* struct mail_stall */
    LOOP_USED,      /* struct mail_used */
    LOOP_BROKEN,    /* struct epoch: the file of its stage cannot be read any more */
    LOOP_SLEPT,     /* uint64_t: clock_slept_us, which has jumped */
    LOOP_PROGRESS,  /* struct mail_progress, while it computes, at most every 100 ms */
    /* loader and other workers */
    LOOP_PREPARED,   /* struct mail_prepared */
    LOOP_MODEL_NEWS, /* struct hash256: what the store holds of it has changed */
    LOOP_NEED_BULK,  /* struct node_id: the loader wants a bulk connection to it */
    LOOP_BANDWIDTH,  /* struct mail_bandwidth */
    LOOP_CALIBRATED, /* struct mail_calibrated */
    LOOP_SPARE_DONE, /* struct mail_spare */
    LOOP_SIGNAL,     /* body: int */
};

struct mail_link {
    struct node_id peer;
    bool up;
};

struct mail_released {
    struct epoch epoch;
    uint32_t instance;
};

/* A request of this model ended. */
struct mail_used {
    struct hash256 model;
    double token_us; /* from token to token; 0: too few to say */
};

struct mail_stats {
    struct epoch epoch;
    uint32_t stage, n_decode_steps, n_prefill_rows;
    uint64_t decode_us, prefill_us;
};

struct mail_stall {
    struct epoch epoch;
    uint32_t stage;
    uint64_t step, waited_us;
};

struct mail_progress {
    uint64_t steps_done;
    uint32_t layers_done;
    uint32_t n_requests;
};

struct mail_prepared {
    struct epoch epoch;
    struct hash256 model;
    enum err error; /* ERR_OK: `stage` and `model` are ready, see loader_take */
    char text[ERR_TEXT_MAX];
};

struct mail_bandwidth {
    struct node_id peer;
    struct address address;
    double bytes_per_s;
};

/* An order of loader_spare ended. */
struct mail_spare {
    struct hash256 model;
    enum err error; /* ERR_CANCELLED: something else came first */
    uint64_t got_bytes;
};

struct mail_calibrated {
    double stream_bytes_per_s, macs_per_s;
};

#endif
