/* The split search against brute force, its context rule, and its sentences. The brute force here
 * enumerates every ordered subset and every way to cut the layers, and takes costs from
 * cost_plan only. */
#include "base/rng.h"
#include "planner/search.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static struct model_shape shape_of(uint32_t n_layers, uint64_t layer_bytes)
{
    struct model_shape s;
    memset(&s, 0, sizeof s);
    memset(s.model.bytes, 0x33, 32);
    strcpy(s.name, "sample");
    s.n_layers = n_layers;
    s.context_max = 8192;
    s.hidden = 576;
    for (uint32_t i = 0; i < n_layers; i++)
        s.layer_bytes[i] = layer_bytes;
    s.embedding_bytes = 28 << 20;
    s.output_bytes = (28 << 20) + 2304;
    s.output_is_embedding = true;
    s.kv_bytes_per_position = 768;
    s.layer_macs = 3540000;
    s.output_macs = 28311552;
    s.activation_bytes_per_row = 16384;
    return s;
}

static struct topology empty_topology(uint32_t n)
{
    struct topology t;
    memset(&t, 0, sizeof t);
    t.n_nodes = n;
    for (uint32_t i = 0; i < n; i++) {
        struct topology_node *node = &t.nodes[i];
        node->id.bytes[0] = (uint8_t)(i + 1);
        node->boot_id = 100 + i;
        node->eligible = true;
        node->arithmetic_version = 1;
        node->budget_bytes = 1ull << 30;
        node->stream_bytes_per_s = 10e9;
        node->macs_per_s = 100e9;
        for (uint32_t j = 0; j < n; j++)
            t.edges[i][j] = (struct topology_edge){i != j, 100, 100e6};
    }
    return t;
}

/* A cluster in which everything varies: memory so that one node is sometimes enough and sometimes
 * all are too little, missing edges, unknown bandwidth, odd arithmetic, nodes that do not count. */
static struct topology random_topology(struct rng *r, uint32_t n, uint64_t whole)
{
    struct topology t = empty_topology(n);
    double plenty = 0.3 + 2.2 * rng_unit(r), slow_links = pow(10, 4 * rng_unit(r));
    for (uint32_t i = 0; i < n; i++) {
        struct topology_node *node = &t.nodes[i];
        node->eligible = rng_below(r, 12) != 0;
        node->arithmetic_version = rng_below(r, 10) == 0 ? 2 : 1;
        node->budget_bytes = (uint64_t)((double)whole * plenty * rng_unit(r));
        node->stream_bytes_per_s = rng_below(r, 30) == 0 ? NAN : 1e9 * (1 + 20 * rng_unit(r));
        node->macs_per_s = rng_below(r, 30) == 0 ? 0 : 1e9 * (1 + 200 * rng_unit(r));
        for (uint32_t j = 0; j < n; j++) {
            struct topology_edge *e = &t.edges[i][j];
            e->up = i != j && rng_below(r, 10) != 0;
            e->latency_us = slow_links * rng_unit(r);
            e->bytes_per_s = rng_below(r, 5) == 0 ? 0 : 1e6 * (1 + 2000 * rng_unit(r));
        }
    }
    return t;
}

struct brute {
    const struct topology *t;
    const struct model_shape *shape;
    enum objective objective;
    struct plan p;
    double best;
    double best_of[NODES_MAX + 1];
};

static void brute_cut(struct brute *b, uint32_t stage, uint32_t first)
{
    uint32_t left = b->shape->n_layers - first;
    struct plan_stage *s = &b->p.stages[stage];
    s->first_layer = first;
    if (stage + 1 < b->p.n_stages) {
        for (uint32_t n = 1; n + (b->p.n_stages - stage - 1) <= left; n++) {
            s->n_layers = n;
            brute_cut(b, stage + 1, first + n);
        }
        return;
    }
    s->n_layers = left;
    struct cost c;
    assert_int_equal(cost_plan(b->t, b->shape, &b->p, b->objective, 1, &c), ERR_OK);
    if (!c.fits)
        return;
    if (c.objective_us < b->best)
        b->best = c.objective_us;
    if (c.objective_us < b->best_of[b->p.n_stages])
        b->best_of[b->p.n_stages] = c.objective_us;
}

static void brute_order(struct brute *b, uint32_t used)
{
    if (b->p.n_stages > 0)
        brute_cut(b, 0, 0);
    if (b->p.n_stages == b->shape->n_layers)
        return;
    for (uint32_t i = 0; i < b->t->n_nodes; i++) {
        if (used >> i & 1 || !b->t->nodes[i].eligible)
            continue;
        struct plan_stage *s = &b->p.stages[b->p.n_stages++];
        s->node = b->t->nodes[i].id;
        s->boot_id = b->t->nodes[i].boot_id;
        brute_order(b, used | 1u << i);
        b->p.n_stages--;
    }
}

static struct brute brute_force(const struct topology *t, const struct model_shape *shape,
                                enum objective objective, uint32_t context)
{
    struct brute b;
    memset(&b, 0, sizeof b);
    b.t = t;
    b.shape = shape;
    b.objective = objective;
    b.p.n_layers = shape->n_layers;
    b.p.context = context;
    b.best = INFINITY;
    for (uint32_t k = 0; k <= NODES_MAX; k++)
        b.best_of[k] = INFINITY;
    brute_order(&b, 0);
    return b;
}

static void assert_close(double a, double b, uint64_t seed)
{
    if (fabs(a - b) > 1e-9 * fabs(b))
        fail_msg("seed %llu: %.17g is not %.17g", (unsigned long long)seed, a, b);
}

enum { CLUSTERS = 1500 };

static void test_search_equals_brute_force(void **state)
{
    (void)state;
    uint32_t n_fit = 0, n_split = 0;
    for (uint64_t seed = 0; seed < CLUSTERS; seed++) {
        struct rng r;
        rng_seed(&r, seed);
        uint32_t n = seed % 8 == 0 ? 7 : 1 + (uint32_t)rng_below(&r, 6);
        struct model_shape shape =
            shape_of(n == 7 ? 5 : 1 + (uint32_t)rng_below(&r, 7), (1 + rng_below(&r, 400)) << 20);
        shape.embedding_bytes = rng_below(&r, 200) << 20;
        shape.output_is_embedding = rng_below(&r, 2);
        shape.output_bytes =
            shape.output_is_embedding ? shape.embedding_bytes + 4096 : rng_below(&r, 200) << 20;
        shape.layer_macs = rng_below(&r, 200000000);
        shape.output_macs = rng_below(&r, 200000000);
        struct search_options o = SEARCH_OPTIONS_INIT;
        o.context = 1 + (uint32_t)rng_below(&r, 8192);
        o.objective = (uint8_t)rng_below(&r, 3);
        uint64_t whole =
            cost_stage_memory(&shape, cost_run_of(&shape, 0, shape.n_layers), o.context);
        struct topology t = random_topology(&r, n, whole);
        struct brute b = brute_force(&t, &shape, o.objective, o.context);
        struct plan p;
        struct err_text text;
        enum err e = search_plan(&t, &shape, &o, &p, &text);
        if (isinf(b.best)) {
            assert_int_equal(e, ERR_NO_FIT);
            continue;
        }
        assert_int_equal(e, ERR_OK);
        struct cost c;
        assert_int_equal(cost_plan(&t, &shape, &p, o.objective, 1, &c), ERR_OK);
        assert_true(c.fits);
        assert_close(c.objective_us, b.best, seed);
        n_fit++;
        n_split += p.n_stages > 1;

        struct search_candidate *list = calloc(SEARCH_CANDIDATES_MAX, sizeof *list);
        assert_non_null(list);
        uint32_t n_list;
        assert_int_equal(search_explain(&t, &shape, &o, list, SEARCH_CANDIDATES_MAX, &n_list),
                         ERR_OK);
        assert_int_equal(list[0].verdict, VERDICT_CHOSEN);
        for (uint32_t i = 0; i < n_list; i++)
            if (list[i].verdict == VERDICT_SLOWER && list[i].n_nodes > 1)
                assert_close(list[i].cost.objective_us, b.best_of[list[i].n_nodes], seed);
            else if (list[i].verdict == VERDICT_NO_PLAN)
                assert_true(isinf(b.best_of[list[i].n_nodes]));
        free(list);
    }
    /* The clusters must be of both kinds, or the comparison says little. */
    assert_true(n_fit > CLUSTERS / 3);
    assert_true(n_split > CLUSTERS / 10);
}

/* Layers of unlike sizes, as mixed quantisation makes them: exact for up to five nodes; beyond that
 * what is found fits and is no better than the best. */
static void test_unlike_layers_are_cut_as_they_are(void **state)
{
    (void)state;
    uint32_t n_fit = 0, n_split = 0, n_found_of_six = 0;
    for (uint64_t seed = 0; seed < 1000; seed++) {
        struct rng r;
        rng_seed(&r, seed);
        uint32_t n = 2 + (uint32_t)rng_below(&r, 5);
        struct model_shape shape = shape_of(3 + (uint32_t)rng_below(&r, n == 6 ? 3 : 5), 1 << 20);
        for (uint32_t i = 0; i < shape.n_layers; i++)
            shape.layer_bytes[i] = (80 + rng_below(&r, 60)) << 20;
        struct search_options o = {.context = 2048};
        uint64_t whole = cost_stage_memory(&shape, cost_run_of(&shape, 0, shape.n_layers), 2048);
        struct topology t = random_topology(&r, n, whole);
        struct brute b = brute_force(&t, &shape, OBJECTIVE_CHAT, 2048);
        uint32_t n_usable = 0;
        for (uint32_t i = 0; i < n; i++)
            n_usable += cost_node_usable(&t.nodes[i]);
        struct plan p;
        enum err e = search_plan(&t, &shape, &o, &p, NULL);
        if (isinf(b.best) || n_usable <= 5)
            assert_int_equal(e, isinf(b.best) ? ERR_NO_FIT : ERR_OK);
        if (e != ERR_OK)
            continue;
        struct cost c;
        assert_int_equal(cost_plan(&t, &shape, &p, OBJECTIVE_CHAT, 1, &c), ERR_OK);
        assert_true(c.fits);
        n_fit++;
        n_split += p.n_stages > 1;
        if (n_usable <= 5)
            assert_close(c.objective_us, b.best, seed);
        else
            assert_true(c.objective_us >= b.best * (1 - 1e-9));
        n_found_of_six += n_usable > 5;
    }
    print_message("%u fit, %u split, %u of six nodes\n", n_fit, n_split, n_found_of_six);
    assert_true(n_fit > 400 && n_split > 150 && n_found_of_six > 10);
}

static void test_one_node_is_chosen_when_it_is_faster(void **state)
{
    (void)state;
    struct topology t = empty_topology(3);
    struct model_shape shape = shape_of(30, 2 << 20);
    struct search_options o = SEARCH_OPTIONS_INIT;
    struct plan p;
    t.nodes[1].stream_bytes_per_s = 12e9;
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_OK);
    assert_int_equal(p.n_stages, 1);
    assert_memory_equal(&p.stages[0].node, &t.nodes[1].id, sizeof t.nodes[1].id);
    assert_int_equal(p.stages[0].boot_id, 101);
    assert_int_equal(p.context, 8192);
    assert_true(p.predicted_token_us > 0);
}

/* The numbers are worked out by hand: 4 layers of 10 MB and no other bytes; node 0 streams 10 GB/s
 * (1 ms a layer), node 1 5 GB/s (2 ms), room for 3 layers each; a hop is 100 us + 2,432 bytes at
 * 100 MB/s (24.32 us) there and 100 us + 128 bytes (1.28 us) back. So 3 x 1000 + 2000 + 225.6 us,
 * plus one embedding row of 2,304 bytes at the head (0.2304 us). */
static void test_cost_of_a_split_by_hand(void **state)
{
    (void)state;
    struct model_shape shape = shape_of(4, 10000000);
    shape.embedding_bytes = shape.output_bytes = 0;
    shape.kv_bytes_per_position = 0;
    shape.layer_macs = shape.output_macs = 1;
    shape.activation_bytes_per_row = 0;
    struct topology t = empty_topology(2);
    t.nodes[1].stream_bytes_per_s = 5e9;
    t.nodes[0].budget_bytes = t.nodes[1].budget_bytes = 30000000 + COST_RESERVE_BYTES;
    struct search_options o = {.context = 2048, .objective = OBJECTIVE_TOKEN};
    struct plan p;
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_OK);
    assert_int_equal(p.n_stages, 2);
    assert_memory_equal(&p.stages[0].node, &t.nodes[0].id, sizeof t.nodes[0].id);
    assert_int_equal(p.stages[0].n_layers, 3);
    assert_int_equal(p.stages[0].memory_bytes, 30000000 + (8 << 20));
    assert_true(fabs(p.predicted_token_us - 5225.8304) < 1e-4);
}

static void test_default_context_grows_without_a_worse_split(void **state)
{
    (void)state;
    struct topology t = empty_topology(2);
    struct model_shape shape = shape_of(30, 2 << 20);
    struct search_options o = SEARCH_OPTIONS_INIT;
    struct plan p;
    /* Alone it fits up to a little over 5,000 positions. */
    t.nodes[0].budget_bytes = cost_stage_memory(&shape, cost_run_of(&shape, 0, 30), 5000);
    t.nodes[1].budget_bytes = cost_stage_memory(&shape, cost_run_of(&shape, 0, 30), 2100);
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_OK);
    assert_int_equal(p.n_stages, 1);
    assert_int_equal(p.context, 4864); /* 4096 + 3 x 256 <= 5000 */
    /* Nobody alone, and no split, has room for 4,096: the most that fits from 2,048 up. */
    t.n_nodes = 1;
    t.nodes[0].budget_bytes = cost_stage_memory(&shape, cost_run_of(&shape, 0, 30), 3333);
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_OK);
    assert_int_equal(p.context, 3328);
    t.nodes[0].budget_bytes = cost_stage_memory(&shape, cost_run_of(&shape, 0, 30), 1984);
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_NO_FIT);
    /* A short model: its own context. */
    shape.context_max = 512;
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_OK);
    assert_int_equal(p.context, 512);
    o.context = 513;
    assert_int_equal(search_plan(&t, &shape, &o, &p, NULL), ERR_INVALID);
}

static void test_no_fit_says_how_much_is_missing(void **state)
{
    (void)state;
    struct topology t = empty_topology(2);
    struct model_shape shape = shape_of(30, 64 << 20);
    struct search_options o = SEARCH_OPTIONS_INIT;
    struct plan p;
    struct err_text text;
    t.nodes[0].budget_bytes = t.nodes[1].budget_bytes = 500 << 20;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_NO_FIT);
    assert_non_null(strstr(text.text, "the 2 machines that can take part offer 1000 MiB"));
    assert_non_null(strstr(text.text, "more memory is needed"));
    t.nodes[0].budget_bytes = t.nodes[1].budget_bytes = 1500 << 20;
    t.edges[1][0].up = false;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_NO_FIT);
    assert_non_null(strstr(text.text, "reach each other"));
    t.nodes[0].eligible = t.nodes[1].eligible = false;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_NO_FIT);
    assert_non_null(strstr(text.text, "no machine can take part"));
}

static void test_hostile_numbers_do_no_harm(void **state)
{
    (void)state;
    struct topology t = empty_topology(3);
    struct model_shape shape = shape_of(30, UINT64_MAX / 2);
    struct search_options o = SEARCH_OPTIONS_INIT;
    struct plan p;
    struct err_text text;
    shape.kv_bytes_per_position = UINT64_MAX;
    for (uint32_t i = 0; i < 3; i++)
        t.nodes[i].budget_bytes = UINT64_MAX - 1;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_NO_FIT);
    shape.n_layers = MODEL_LAYERS_MAX + 1;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_INVALID);
    shape.n_layers = 0;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_INVALID);
    t.n_nodes = 0;
    shape.n_layers = 1;
    assert_int_equal(search_plan(&t, &shape, &o, &p, &text), ERR_NO_FIT);
}

/* Not an assertion on time: the figure is printed. 16 unlike nodes, 80 layers, links that hardly
 * cost anything (nothing can be pruned early), and memory for which about ten nodes are needed. */
static void test_sixteen_nodes_and_eighty_layers(void **state)
{
    (void)state;
    struct model_shape shape = shape_of(80, 450 << 20);
    double slowest = 0;
    for (uint64_t seed = 0; seed < 6; seed++) {
        struct rng r;
        rng_seed(&r, seed);
        struct topology t = empty_topology(16);
        for (uint32_t i = 0; i < 16; i++) {
            t.nodes[i].budget_bytes = (2 + (seed % 3) * 2 + rng_below(&r, 3)) << 30;
            t.nodes[i].stream_bytes_per_s = seed == 5 ? 10e9 : 5e9 + 1e9 * rng_unit(&r);
            for (uint32_t j = 0; j < 16; j++)
                t.edges[i][j].latency_us = seed % 2 ? 1 + rng_unit(&r) : 300 * rng_unit(&r);
        }
        struct search_options o = SEARCH_OPTIONS_INIT;
        struct plan p;
        struct timespec a, b;
        (void)clock_gettime(CLOCK_MONOTONIC, &a);
        enum err e = search_plan(&t, &shape, &o, &p, NULL);
        (void)clock_gettime(CLOCK_MONOTONIC, &b);
        double ms = (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6;
        slowest = ms > slowest ? ms : slowest;
        print_message("16 nodes x 80 layers, seed %llu: %s, %u stages, %.1f ms\n",
                      (unsigned long long)seed, err_name(e), e == ERR_OK ? p.n_stages : 0, ms);
        if (e == ERR_OK) {
            struct cost c;
            assert_int_equal(cost_plan(&t, &shape, &p, OBJECTIVE_CHAT, 1, &c), ERR_OK);
            assert_true(c.fits);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_search_equals_brute_force),
        cmocka_unit_test(test_unlike_layers_are_cut_as_they_are),
        cmocka_unit_test(test_one_node_is_chosen_when_it_is_faster),
        cmocka_unit_test(test_cost_of_a_split_by_hand),
        cmocka_unit_test(test_default_context_grows_without_a_worse_split),
        cmocka_unit_test(test_no_fit_says_how_much_is_missing),
        cmocka_unit_test(test_hostile_numbers_do_no_harm),
        cmocka_unit_test(test_sixteen_nodes_and_eighty_layers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
