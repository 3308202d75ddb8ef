/* Whole clusters of the production cores on a virtual clock. Each machine is a node core
 * (agent/node.h), a data-plane core (agent/pipeline.h) and a small shell that does what
 * agent/serve_node.c, agent/serve_mail.c and agent/inference.c do, with virtual sockets, a virtual
 * disk and stages that hash (tests/sim/hash_stage.h).
 *
 * Everything follows from the seed. What must hold is checked as it happens (sim_check.c names the
 * rules); the first broken promise is written to `failure`. */
#ifndef COVEY_TESTS_SIM_SIM_H
#define COVEY_TESTS_SIM_SIM_H

#include <stdbool.h>
#include <stdint.h>

enum sim_fault {
    SIM_DATAGRAMS = 1, /* lost, late, twice, out of order */
    SIM_STALLS = 2,    /* sessions and links stand still for a while */
    SIM_CUTS = 4,      /* sessions and links break, each side losing what was under way */
    SIM_PARTITIONS = 8,
    SIM_ONE_WAY = 16, /* partitions of one direction */
    SIM_CRASHES = 32, /* and restarts with what was on the disk */
    SIM_SLEEP = 64,
    SIM_CLOCKS = 128,           /* wall time jumps */
    SIM_SLOW = 256,             /* machines that take their time */
    SIM_LEAVES = 512,           /* polite stops, leaving the cluster, joining again */
    SIM_LOADS = 1024,           /* stages that cannot be loaded */
    SIM_WANTS = 2048,           /* a second model comes and goes */
    SIM_MEMORY = 4096,          /* other programs take memory and give it back */
    SIM_NAPS = 8192,            /* sleep in the middle of an answer */
    SIM_REVOKES = 16384,        /* members are expelled */
    SIM_DEAD_ADDRESSES = 32768, /* discovery shows addresses where nobody answers */
    SIM_CLONES = 65536,         /* a second machine starts from a copy of another one's disk */
    SIM_DISKS = 131072,         /* disks are full for a while */
    SIM_ANY_EVENT = SIM_REVOKES | SIM_CLONES | SIM_CUTS | SIM_PARTITIONS | SIM_CRASHES | SIM_SLEEP |
                    SIM_LEAVES | SIM_MEMORY | SIM_DISKS,
    SIM_ALL = 16383,
};

struct sim_options {
    uint64_t seed;
    uint32_t n_machines; /* 1 to 12; 0: by the seed, 2 to 12 */
    uint32_t faults;     /* of enum sim_fault */
    uint32_t chaos_ms;   /* how long they come; 0: by the seed */
    bool trace;          /* what happens, to stderr */
};

struct sim_result {
    char failure[512]; /* "": all promises held */
    uint32_t n_machines, n_steps, n_computed, n_answers, n_errors, n_lost, n_tokens, n_plans,
        n_faults;
    uint64_t agreed_us, ran_us; /* after healing */
    uint64_t virtual_us;
    uint64_t digest; /* of everything that happened */
};

void sim_run(const struct sim_options *options, struct sim_result *ret);

#endif
