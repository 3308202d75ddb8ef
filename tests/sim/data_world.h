/* A cluster of data-plane cores on a virtual clock: links that delay, stall, lose their last frames
 * and come back; stages that hash; a planner that is always right; clients that ask, cancel and go
 * on talking. Every answer is compared with the one-node oracle as it comes.
 *
 * Everything follows from the seed. A broken promise is written to `failure` (the first one). */
#ifndef COVEY_TESTS_SIM_DATA_WORLD_H
#define COVEY_TESTS_SIM_DATA_WORLD_H

#include <stdbool.h>
#include <stdint.h>

struct data_world_options {
    uint64_t seed;
    uint32_t n_nodes;  /* 1 to 6 */
    uint32_t n_stages; /* at most; 0: any */
    uint32_t n_requests;
    bool cuts, kills, replans, cancels, deadlines, failures, stalls;
    bool island; /* node 0 is in no plan and reaches node 1 alone: needs relays */
    bool crowd;  /* all requests within a second, long, with few prompts and little KV */
    bool losses; /* links break their promise and lose single frames: must only cost time */
};

struct data_world_result {
    char failure[512]; /* "": all promises held */
    uint32_t n_tokens, n_answers, n_errors, n_attempts, n_frames, n_steps;
    uint32_t n_reused, n_copies, n_preempted;
    uint64_t virtual_us;
    uint64_t digest; /* of everything that happened */
};

void data_world_run(const struct data_world_options *options, struct data_world_result *ret);

#endif
