/* Whole clusters of the production cores on a virtual clock: first safety, then that a healthy
 * cluster recovers.
 *
 *   test_sim                      every world, with its number of seeds
 *   COVEY_SEED=N test_sim         that seed alone; COVEY_TRACE=1 says what happens
 *   COVEY_SEEDS=N test_sim        so many seeds of each world; COVEY_FIRST=N: from there on
 *   COVEY_WORLD=NAME test_sim     that world alone
 *   test_sim --finds N [WORLD]    ends well when one of N seeds of each world, or of that one,
 * breaks a promise: for cores with a planted fault */
#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <sodium.h>

struct world_kind {
    const char *name;
    uint32_t faults, n_machines, n_seeds;
};

static const struct world_kind KINDS[] = {
    {"quiet", 0, 0, 40},
    {"datagrams", SIM_DATAGRAMS, 0, 60},
    {"cuts", SIM_CUTS | SIM_STALLS | SIM_DATAGRAMS, 0, 110},
    {"partitions", SIM_PARTITIONS | SIM_ONE_WAY | SIM_DATAGRAMS, 0, 160},
    {"crashes", SIM_CRASHES | SIM_CLOCKS | SIM_LOADS, 0, 170},
    {"sleep", SIM_SLEEP | SIM_LEAVES | SIM_SLOW, 0, 120},
    {"alone", SIM_SLEEP | SIM_NAPS, 1, 60},
    {"memory", SIM_MEMORY | SIM_WANTS | SIM_LOADS, 0, 100},
    {"revokes", SIM_REVOKES | SIM_CUTS | SIM_PARTITIONS | SIM_DATAGRAMS, 0, 60},
    {"addresses", SIM_DEAD_ADDRESSES | SIM_CUTS | SIM_CRASHES | SIM_PARTITIONS, 0, 60},
    {"clones", SIM_CLONES | SIM_DATAGRAMS, 0, 40},
    {"disks", SIM_DISKS | SIM_CRASHES | SIM_PARTITIONS, 0, 60},
    {"all", SIM_ALL, 0, 225},
};
enum { N_KINDS = sizeof KINDS / sizeof KINDS[0] };

static uint64_t number_from(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static void run_one(const struct world_kind *kind, uint64_t seed, struct sim_result *r)
{
    struct sim_options o = {.seed = seed,
                            .n_machines = kind->n_machines,
                            .faults = kind->faults,
                            .trace = getenv("COVEY_TRACE") != NULL};
    sim_run(&o, r);
}

static int find_a_failure(uint64_t n, const char *world)
{
    for (uint64_t seed = 1; seed <= n; seed++) {
        for (int i = N_KINDS; i-- > 0;) {
            struct sim_result r;
            if (world[0] && strcmp(world, KINDS[i].name) != 0)
                continue;
            run_one(&KINDS[i], seed, &r);
            if (!r.failure[0])
                continue;
            (void)printf("found in world %s: %s\n", KINDS[i].name, r.failure);
            return 0;
        }
    }
    (void)printf("not found in %llu seeds of each world\n", (unsigned long long)n);
    return 1;
}

static uint32_t run_kind(const struct world_kind *kind)
{
    uint64_t first = number_from("COVEY_SEED", number_from("COVEY_FIRST", 1));
    uint64_t last =
        getenv("COVEY_SEED") ? first : first - 1 + number_from("COVEY_SEEDS", kind->n_seeds);
    struct sim_result sum = {.n_machines = 0};
    uint32_t n_failed = 0;
    double virtual_s = 0, agreed_s = 0, ran_s = 0;
    struct timespec a, b;
    (void)clock_gettime(CLOCK_MONOTONIC, &a);
    for (uint64_t seed = first; seed <= last; seed++) {
        struct sim_result r;
        run_one(kind, seed, &r);
        if (r.failure[0] && n_failed++ < 5)
            (void)printf("%s: %s\n  again: COVEY_WORLD=%s COVEY_SEED=%llu ./test_sim\n", kind->name,
                         r.failure, kind->name, (unsigned long long)seed);
        (void)fflush(stdout);
        sum.n_machines += r.n_machines;
        sum.n_steps += r.n_steps;
        sum.n_answers += r.n_answers;
        sum.n_errors += r.n_errors;
        sum.n_lost += r.n_lost;
        sum.n_tokens += r.n_tokens;
        sum.n_plans += r.n_plans;
        sum.n_faults += r.n_faults;
        virtual_s += (double)r.virtual_us / 1e6;
        agreed_s = (double)r.agreed_us / 1e6 > agreed_s ? (double)r.agreed_us / 1e6 : agreed_s;
        ran_s = (double)r.ran_us / 1e6 > ran_s ? (double)r.ran_us / 1e6 : ran_s;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &b);
    double s = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) / 1e9;
    double n = (double)(last - first + 1);
    (void)printf("%-10s %4.0f seeds in %5.1f s (%.1f/s): %u machines, %.0f s virtual, %u steps, %u "
                 "plans, %u faults; %u answers, %u errors, %u lost, %u tokens; views agree within "
                 "%.1f s, models run within %.1f s; %u FAILED\n",
                 kind->name, n, s, n / s, sum.n_machines, virtual_s, sum.n_steps, sum.n_plans,
                 sum.n_faults, sum.n_answers, sum.n_errors, sum.n_lost, sum.n_tokens, agreed_s,
                 ran_s, n_failed);
    (void)fflush(stdout);
    return n_failed;
}

/* The same seed is the same run, to the last event: else no failure could be replayed. */
static uint32_t check_repeats(void)
{
    struct sim_result a, b;
    run_one(&KINDS[N_KINDS - 1], 5, &a);
    run_one(&KINDS[N_KINDS - 1], 5, &b);
    if (a.digest == b.digest && a.n_steps == b.n_steps && a.n_steps > 0)
        return 0;
    (void)printf("the same seed gives two different runs\n");
    return 1;
}

int main(int argc, char **argv)
{
    if (sodium_init() < 0)
        return 1;
    if (argc >= 3 && strcmp(argv[1], "--finds") == 0)
        return find_a_failure(strtoull(argv[2], NULL, 10), argc > 3 ? argv[3] : "");
    const char *only = getenv("COVEY_WORLD");
    uint32_t n_failed = only ? 0 : check_repeats();
    for (int i = 0; i < N_KINDS; i++) {
        if (!only || strcmp(only, KINDS[i].name) == 0)
            n_failed += run_kind(&KINDS[i]);
    }
    return n_failed > 0;
}
