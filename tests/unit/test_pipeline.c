/* The data-plane core in a cluster on a virtual clock (tests/sim/data_world) and by hand.
 *
 *   COVEY_SEED=N  runs that seed alone, in every world;  COVEY_SEEDS=N  so many of each world. */
#include "agent/pipeline.h"
#include "tests/sim/data_world.h"
#include "tests/sim/hash_stage.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t number_from(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static void run_worlds(const char *name, const struct data_world_options *options, uint64_t n)
{
    uint64_t first = number_from("COVEY_SEED", 1);
    uint64_t last = getenv("COVEY_SEED") ? first : number_from("COVEY_SEEDS", n);
    struct data_world_result sum = {.n_tokens = 0};
    uint32_t n_failed = 0;
    for (uint64_t seed = first; seed <= last; seed++) {
        struct data_world_options o = *options;
        struct data_world_result r;
        o.seed = seed;
        if (o.n_nodes == 0)
            o.n_nodes = 1 + (uint32_t)(seed % 6);
        data_world_run(&o, &r);
        if (r.failure[0] && n_failed++ < 5)
            print_message("%s: %s\n  again: COVEY_SEED=%llu test_pipeline\n", name, r.failure,
                          (unsigned long long)seed);
        sum.n_tokens += r.n_tokens;
        sum.n_answers += r.n_answers;
        sum.n_errors += r.n_errors;
        sum.n_attempts += r.n_attempts;
        sum.n_frames += r.n_frames;
        sum.n_steps += r.n_steps;
        sum.n_reused += r.n_reused;
        sum.n_copies += r.n_copies;
        sum.n_preempted += r.n_preempted;
    }
    print_message(
        "%s: %u answers, %u errors, %u attempts, %u tokens, %u steps, %u frames, %u tokens "
        "shared, %u blocks copied, %u sequences put back\n",
        name, sum.n_answers, sum.n_errors, sum.n_attempts, sum.n_tokens, sum.n_steps, sum.n_frames,
        sum.n_reused, sum.n_copies, sum.n_preempted);
    assert_int_equal(n_failed, 0);
    assert_true(sum.n_answers > 0);
}

static void test_answers_of_one_node(void **state)
{
    (void)state;
    run_worlds("one node", &(struct data_world_options){.n_nodes = 1, .n_requests = 8}, 20);
}

static void test_answers_of_a_quiet_cluster(void **state)
{
    (void)state;
    run_worlds("quiet", &(struct data_world_options){.n_requests = 10}, 200);
}

/* Many at once in a small KV cache: prompts that begin alike, too many for all to fit. */
static void test_answers_of_a_crowd(void **state)
{
    (void)state;
    run_worlds("crowd", &(struct data_world_options){.n_requests = 30, .crowd = true}, 150);
}

static void test_answers_of_a_crowd_through_everything(void **state)
{
    (void)state;
    run_worlds("crowd, all",
               &(struct data_world_options){.n_requests = 30,
                                            .crowd = true,
                                            .cuts = true,
                                            .kills = true,
                                            .replans = true,
                                            .cancels = true,
                                            .failures = true,
                                            .losses = true},
               300);
}

static void test_answers_through_replacement_of_plans(void **state)
{
    (void)state;
    run_worlds("replans", &(struct data_world_options){.n_requests = 10, .replans = true}, 400);
}

static void test_answers_through_cut_links(void **state)
{
    (void)state;
    run_worlds("cuts", &(struct data_world_options){.n_requests = 10, .cuts = true}, 500);
}

static void test_answers_through_deaths(void **state)
{
    (void)state;
    run_worlds("kills", &(struct data_world_options){.n_requests = 10, .kills = true}, 500);
}

static void test_answers_through_failing_and_stalling_stages(void **state)
{
    (void)state;
    run_worlds("stages",
               &(struct data_world_options){.n_requests = 10, .failures = true, .stalls = true},
               300);
}

static void test_answers_through_links_that_lose_frames(void **state)
{
    (void)state;
    run_worlds("losses", &(struct data_world_options){.n_requests = 8, .losses = true}, 300);
}

static void test_answers_through_relays(void **state)
{
    (void)state;
    run_worlds("relays",
               &(struct data_world_options){.n_nodes = 5,
                                            .n_requests = 10,
                                            .island = true,
                                            .replans = true,
                                            .kills = true,
                                            .cancels = true},
               200);
}

static void test_answers_through_everything_at_once(void **state)
{
    (void)state;
    run_worlds("all",
               &(struct data_world_options){.n_requests = 12,
                                            .cuts = true,
                                            .kills = true,
                                            .replans = true,
                                            .cancels = true,
                                            .deadlines = true,
                                            .failures = true,
                                            .stalls = true},
               1000);
}

static void test_same_seed_same_run(void **state)
{
    (void)state;
    struct data_world_options o = {
        .seed = 5, .n_nodes = 5, .n_requests = 12, .cuts = true, .kills = true, .replans = true};
    struct data_world_result a, b;
    data_world_run(&o, &a);
    data_world_run(&o, &b);
    assert_true(a.digest == b.digest && a.n_frames == b.n_frames);
}

/* For cores with a planted fault (tests/sim/planted.list): well when one of n seeds finds it. */
static int finds(uint64_t n)
{
    for (uint64_t seed = 1; seed <= n; seed++) {
        struct data_world_options o = {.seed = seed,
                                       .n_nodes = 1 + (uint32_t)(seed % 4),
                                       .n_requests = 30,
                                       .crowd = true,
                                       .cuts = seed % 2 == 0,
                                       .losses = seed % 2 == 0};
        struct data_world_result r;
        data_world_run(&o, &r);
        if (r.failure[0]) {
            print_message("found: %s\n", r.failure);
            return 0;
        }
    }
    print_message("not found with %llu seeds\n", (unsigned long long)n);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--finds") == 0)
        return finds(strtoull(argv[2], NULL, 10));
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers_of_one_node),
        cmocka_unit_test(test_answers_of_a_quiet_cluster),
        cmocka_unit_test(test_answers_of_a_crowd),
        cmocka_unit_test(test_answers_of_a_crowd_through_everything),
        cmocka_unit_test(test_answers_through_replacement_of_plans),
        cmocka_unit_test(test_answers_through_cut_links),
        cmocka_unit_test(test_answers_through_deaths),
        cmocka_unit_test(test_answers_through_failing_and_stalling_stages),
        cmocka_unit_test(test_answers_through_links_that_lose_frames),
        cmocka_unit_test(test_answers_through_relays),
        cmocka_unit_test(test_answers_through_everything_at_once),
        cmocka_unit_test(test_same_seed_same_run),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
