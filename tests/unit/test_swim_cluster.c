/* Whole clusters of swim cores on a virtual network: first safety (incarnations and versions never
 * go back, checked by swim_net.h after every step; a live node is never finally dead), then that a
 * healthy network brings all views together. A failing seed is printed. */
#include "base/util.h"
#include "tests/unit/swim_net.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static uint64_t seeds(uint64_t n)
{
    const char *factor = getenv("SWIM_SEEDS_FACTOR");
    uint64_t times = factor ? strtoull(factor, NULL, 10) : 1;
    return n * (times > 0 ? times : 1);
}

static void test_everybody_meets(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(30); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 15));
        net_start_all(&net);
        NET_CHECK(&net, net_settles(&net, 3 * NET_S));
        net_deinit(&net);
    }
}

/* How long until every survivor holds `dead` for dead, at most `limit`. */
static uint64_t time_to_death(struct net *net, uint32_t dead, uint64_t limit)
{
    uint64_t start = net->now;
    for (; net->now < start + limit; net_run(net, 10 * NET_MS)) {
        bool all = true;
        for (uint32_t i = 0; i < net->n && all; i++)
            all = !net->hosts[i].up || net_state(net, i, dead) == SWIM_DEAD;
        if (all)
            break;
    }
    return net->now - start;
}

static void meet(struct net *net)
{
    net_start_all(net);
    NET_CHECK(net, net_settles(net, 3 * NET_S));
    net_run(net, rng_below(&net->rng, 3 * NET_S));
}

/* DESIGN.md section 4: a silent node within 2 s at the 99th percentile, without loss. */
static void test_silent_crash_is_seen_within_two_seconds(void **state)
{
    (void)state;
    for (uint32_t n = 2; n <= 16; n += n < 6 ? 1 : 5) {
        uint64_t late = 0, runs = seeds(100), worst = 0, sum = 0;
        for (uint64_t seed = 1; seed <= runs; seed++) {
            struct net net;
            net_init(&net, seed * 100 + n, n);
            meet(&net);
            uint32_t dead = (uint32_t)rng_below(&net.rng, n);
            net_crash(&net, dead);
            uint64_t took = time_to_death(&net, dead, 10 * NET_S);
            late += took > 2 * NET_S;
            worst = took > worst ? took : worst;
            sum += took;
            net_deinit(&net);
        }
        (void)fprintf(stderr,
                      "%2u nodes: a silent crash known to all after %llu ms (mean), %llu ms "
                      "(worst), %llu of %llu late\n",
                      n, (unsigned long long)(sum / MAX_OF(runs, 1u) / 1000),
                      (unsigned long long)(worst / 1000), (unsigned long long)late,
                      (unsigned long long)runs);
        assert_true(late * 100 <= runs);
    }
}

/* PROTOCOL 2.2: closed, redialled, refused: dead. */
static void test_killed_process_is_seen_within_300_ms(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 15));
        meet(&net);
        uint32_t dead = (uint32_t)rng_below(&net.rng, net.n);
        net_kill(&net, dead);
        NET_CHECK(&net, time_to_death(&net, dead, 10 * NET_S) <= 300 * NET_MS);
        net_deinit(&net);
    }
}

static uint64_t count_deaths(const struct net *net)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < net->n; i++)
        n += net->hosts[i].n_deaths;
    return n;
}

/* Loss, delay, reordering, duplicates: nobody who lives is called dead for good. */
static void test_lossy_network_kills_nobody(void **state)
{
    (void)state;
    uint64_t deaths = 0, node_seconds = 0;
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 9));
        net.loss = 0.02 * (double)(seed % 6);
        net.duplicate = 0.05;
        net.delay_max = 500 + rng_below(&net.rng, 20 * NET_MS);
        net_start_all(&net);
        net_run(&net, 20 * NET_S);
        deaths += count_deaths(&net);
        node_seconds += UINT64_C(20) * net.n;
        net.loss = 0;
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        net_deinit(&net);
    }
    (void)fprintf(stderr, "up to 10 %% loss: %llu passing false deaths in %llu node minutes\n",
                  (unsigned long long)deaths, (unsigned long long)(node_seconds / 60));
    assert_true(deaths * 60 <= node_seconds); /* less than one a node minute; they pass */
}

static void test_one_way_cut_costs_the_edge_not_the_node(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 3 + (uint32_t)(seed % 6));
        meet(&net);
        uint32_t i = (uint32_t)rng_below(&net.rng, net.n);
        uint32_t j = (i + 1 + (uint32_t)rng_below(&net.rng, net.n - 1)) % net.n;
        uint64_t deaths = count_deaths(&net);
        net_cut_pair(&net, i, j, true);
        net_run(&net, 15 * NET_S);
        NET_CHECK(&net, count_deaths(&net) == deaths);
        NET_CHECK(&net, net_settles(&net, 2 * NET_S));
        NET_CHECK(&net, net.hosts[i].incarnation[i] == 1); /* helpers saw it: not even suspected */
        NET_CHECK(&net, net.hosts[j].incarnation[j] == 1);
        NET_CHECK(&net, !net_view(&net, i, j).paths[0].up);
        NET_CHECK(&net, !net_view(&net, j, i).paths[0].up);
        net_cut_pair(&net, i, j, false);
        net_run(&net, 5 * NET_S);
        NET_CHECK(&net, net_view(&net, i, j).paths[0].up && net_view(&net, j, i).paths[0].up);
        net_deinit(&net);
    }
}

static void test_one_of_two_cables_is_cut(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(40); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 4));
        net.n_paths = 2;
        meet(&net);
        net.cut[0][0][1] = net.cut[0][1][0] = true;
        net_run(&net, 6 * NET_S);
        struct swim_member_view v = net_view(&net, 0, 1);
        NET_CHECK(&net, count_deaths(&net) == 0 && v.state == SWIM_ALIVE);
        NET_CHECK(&net, v.incarnation == 1); /* it was not even suspected */
        NET_CHECK(&net, !v.paths[0].up && v.paths[1].up && v.paths[1].loss < 0.2);
        net.cut[0][0][1] = net.cut[0][1][0] = false;
        net_run(&net, 4 * NET_S);
        v = net_view(&net, 0, 1);
        NET_CHECK(&net, v.paths[0].up && v.paths[1].up);
        net_deinit(&net);
    }
}

static void test_partition_heals(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 15));
        meet(&net);
        uint32_t side = 1 + (uint32_t)rng_below(&net.rng, (1u << net.n) - 2);
        net_partition(&net, side, true);
        net_run(&net, 3 * NET_S + rng_below(&net.rng, 20 * NET_S));
        for (uint32_t i = 0; i < net.n; i++)
            for (uint32_t j = 0; j < net.n && net.n > 2; j++)
                NET_CHECK(&net, i == j || ((side >> i & 1) == (side >> j & 1)) ==
                                              (net_state(&net, i, j) == SWIM_ALIVE));
        net_record(&net, 0, 1, &seed, sizeof seed);
        net_record(&net, net.n - 1, 2, &seed, sizeof seed);
        net_partition(&net, side, false);
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        net_deinit(&net);
    }
}

/* A new boot_id, with and without the stored incarnation, quickly or after its death was spread. */
static void test_restarted_node_wins_over_its_past(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(80); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 9));
        meet(&net);
        uint32_t i = (uint32_t)rng_below(&net.rng, net.n);
        net.hosts[i].forgets = seed & 1;
        for (int round = 0; round < 3; round++) {
            net_record(&net, i, 3, &round, sizeof round);
            net_run(&net, 300 * NET_MS);
            if (seed & 2)
                net_kill(&net, i);
            else
                net_crash(&net, i);
            net_run(&net, rng_below(&net.rng, seed & 4 ? 5 * NET_S : 200 * NET_MS));
            net_start(&net, i, NULL);
            if (round == 1)
                net_record(&net, i, 3, "new", 3);
            NET_CHECK(&net, net_settles(&net, 5 * NET_S));
            for (uint32_t j = 0; j < net.n; j++)
                NET_CHECK(&net, net.hosts[j].n_self_conflicts == 0);
        }
        net_deinit(&net);
    }
}

/* PROTOCOL 2.5: a sleeper comes back, and kills nobody for having slept. */
static void test_sleeper_comes_back(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 7));
        meet(&net);
        uint32_t i = (uint32_t)rng_below(&net.rng, net.n);
        bool says_so = seed & 1;
        if (says_so)
            net_event(&net, i, SWIM_EVENT_GOING_ASLEEP);
        net_run(&net, 2 * NET_MS);
        uint64_t before = net.hosts[i].n_deaths;
        net_sleep(&net, i);
        net_run(&net, 3 * NET_S + rng_below(&net.rng, seed & 2 ? 600 * NET_S : 5 * NET_S));
        for (uint32_t j = 0; j < net.n; j++)
            NET_CHECK(&net, j == i || net_state(&net, j, i) == (says_so ? SWIM_ASLEEP : SWIM_DEAD));
        net_wake(&net, i);
        NET_CHECK(&net, swim_awake_since_us(net.hosts[i].swim) == net_clock(&net, i));
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        NET_CHECK(&net, net.hosts[i].n_deaths == before);
        net_deinit(&net);
    }
}

/* A process that is starved for some time, again and again: at most 1 s it is not called dead, and
 * it calls nobody dead however long it was away. */
static void test_starved_node_neither_dies_nor_kills(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 7));
        meet(&net);
        uint32_t i = (uint32_t)rng_below(&net.rng, net.n);
        uint64_t longest = seed & 1 ? 1000 * NET_MS : 8 * NET_S;
        for (int round = 0; round < 10; round++) {
            net.hosts[i].stalled_until = net.now + rng_below(&net.rng, longest);
            net_run(&net, longest + rng_below(&net.rng, NET_S));
        }
        for (uint32_t j = 0; j < net.n; j++)
            NET_CHECK(&net, (j != i && longest > NET_S) || net.hosts[j].n_deaths == 0);
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        net_deinit(&net);
    }
}

/* Full compute load everywhere: every loop is late by up to 250 ms, all the time. */
static void test_loaded_cluster_kills_nobody(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(40); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 7));
        meet(&net);
        for (int round = 0; round < 150; round++) {
            for (uint32_t i = 0; i < net.n; i++)
                if (net.hosts[i].stalled_until <= net.now)
                    net.hosts[i].stalled_until = net.now + rng_below(&net.rng, 250 * NET_MS);
            net_run(&net, 100 * NET_MS);
        }
        NET_CHECK(&net, count_deaths(&net) == 0);
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        net_deinit(&net);
    }
}

static uint32_t record_len(uint32_t host, uint32_t kind)
{
    return kind == 0 ? SWIM_RECORD_BYTES_MAX : 20 * kind * (host + 1);
}

/* Records small and large reach everybody, also those without a session to the owner. */
static void test_records_reach_everybody(void **state)
{
    (void)state;
    static uint8_t bytes[SWIM_RECORD_BYTES_MAX];
    for (uint64_t seed = 1; seed <= seeds(60); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 15));
        net.loss = seed % 3 == 0 ? 0.1 : 0;
        meet(&net);
        if (net.n > 2 && seed % 2 == 0)
            net_cut_pair(&net, 0, 1, true);
        for (uint32_t i = 0; i < net.n; i++) {
            for (uint32_t k = 0; k < NET_KINDS; k++) {
                memset(bytes, (int)(i * NET_KINDS + k + 1), sizeof bytes);
                net_record(&net, i, (uint8_t)k, bytes, record_len(i, k));
            }
        }
        net_run(&net, 6 * NET_S);
        for (uint32_t i = 0; i < net.n; i++) {
            for (uint32_t j = 0; j < net.n; j++) {
                for (uint32_t k = 0; k < NET_KINDS; k++) {
                    struct swim_record_view r;
                    struct node_id owner = net_id(&net, j);
                    NET_CHECK(&net, swim_record(net.hosts[i].swim, &owner, (uint8_t)k, &r));
                    NET_CHECK(&net, r.len == record_len(j, k));
                    NET_CHECK(&net, r.bytes[r.len - 1] == j * NET_KINDS + k + 1);
                }
            }
        }
        net_deinit(&net);
    }
}

static bool all_see(struct net *net, uint32_t who, enum swim_state is, uint64_t boot)
{
    for (uint32_t i = 0; i < net->n; i++) {
        if (i == who || i == net->clone || i == 1)
            continue;
        struct swim_member_view v = net_view(net, i, who);
        if (v.state != is || (boot != 0 && v.boot_id != boot))
            return false;
    }
    return true;
}

/* PROTOCOL 1.7: host 1 and a clone of it, each seen by some of the others; then one of them stops.
 */
static void test_cloned_key_is_excluded_until_one_stops(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(40); seed++) {
        struct net net;
        net_init(&net, seed, 4 + (uint32_t)(seed % 6));
        net.clone = net.n - 1;
        net.ids[net.clone] = net.ids[1];
        net.loss = seed % 4 == 0 ? 0.05 : 0;
        uint32_t seen_by = (uint32_t)rng_below(&net.rng, 1u << net.n) | 1; /* by 0, not by 2 */
        seen_by &= ~(1u << 2);
        for (uint32_t i = 0; i < net.clone; i++)
            net_start(&net, i, NULL);
        net_run(&net, 3 * NET_S);
        NET_CHECK(&net, all_see(&net, 1, SWIM_ALIVE, net.hosts[1].boot));
        net_start(&net, net.clone, NULL);
        net.clone_seen_by = seen_by;
        net_run(&net, 4 * NET_S);
        NET_CHECK(&net, all_see(&net, 1, SWIM_CONFLICT, 0));
        NET_CHECK(&net, swim_self_state(net.hosts[1].swim) == SWIM_CONFLICT);
        NET_CHECK(&net, swim_self_state(net.hosts[net.clone].swim) == SWIM_CONFLICT);
        NET_CHECK(&net, net.hosts[1].n_self_conflicts == 1);
        net_run(&net, 10 * NET_S); /* and that lasts */
        NET_CHECK(&net, swim_self_state(net.hosts[1].swim) == SWIM_CONFLICT);
        NET_CHECK(&net, swim_self_state(net.hosts[net.clone].swim) == SWIM_CONFLICT);
        uint32_t stops = seed & 1 ? 1 : net.clone, stays = seed & 1 ? net.clone : 1;
        if (seed & 2)
            net_kill(&net, stops);
        else
            net_crash(&net, stops);
        net.clone_seen_by = seed & 1 ? UINT32_MAX : 0;
        net_run(&net, 9 * NET_S);
        NET_CHECK(&net, swim_self_state(net.hosts[stays].swim) == SWIM_ALIVE);
        NET_CHECK(&net, all_see(&net, 1, SWIM_ALIVE, net.hosts[stays].boot));
        net_deinit(&net);
    }
}

/* UDP is filtered: the sessions alone keep everybody alive, and records travel. */
static void test_blocked_datagrams(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(20); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 5));
        net.block_datagrams = true;
        net_start_all(&net);
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        uint64_t deaths = count_deaths(&net);
        net_run(&net, 20 * NET_S);
        NET_CHECK(&net, count_deaths(&net) == deaths);
        net_record(&net, 0, 1, &seed, sizeof seed);
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        NET_CHECK(&net, net.hosts[0].incarnation[0] == 1); /* not even suspected */
        net_crash(&net, 0);
        NET_CHECK(&net, time_to_death(&net, 0, 10 * NET_S) < 5 * NET_S);
        net_deinit(&net);
    }
}

static void test_idle_is_cheap(void **state)
{
    (void)state;
    for (uint32_t n = 2; n <= 16; n *= 2) {
        struct net net;
        net_init(&net, 7, n);
        meet(&net);
        net_run(&net, 5 * NET_S);
        uint64_t before = net.hosts[0].n_datagrams, steps = net.hosts[0].n_steps;
        net_run(&net, 60 * NET_S);
        double per_s = (double)(net.hosts[0].n_datagrams - before) / 60;
        (void)fprintf(stderr,
                      "%2u idle nodes: each sends %.1f datagrams/s and takes %.1f steps/s\n", n,
                      per_s, (double)(net.hosts[0].n_steps - steps) / 60);
        assert_true(per_s <= (n == 2 ? 5 : 20));
        net_deinit(&net);
    }
}

/* Everything at once, and then peace. */
static void disturb(struct net *net)
{
    uint32_t i = (uint32_t)rng_below(&net->rng, net->n), j = (i + 1) % net->n;
    struct host *h = &net->hosts[i];
    uint64_t what = rng_below(&net->rng, 10);
    if (what == 0 && h->up && !h->asleep)
        net_crash(net, i);
    else if (what == 1 && h->up && !h->asleep)
        net_kill(net, i);
    else if (what <= 3 && !h->up)
        net_start(net, i, NULL);
    else if (what == 4 && h->up && !h->asleep)
        net_sleep(net, i);
    else if (what == 5 && h->up && h->asleep)
        net_wake(net, i);
    else if (what == 6)
        net_cut_pair(net, i, j, rng_below(&net->rng, 2) != 0);
    else if (what == 7)
        net_partition(net, (uint32_t)rng_below(&net->rng, 1u << net->n),
                      rng_below(&net->rng, 2) != 0);
    else if (what == 8 && net_runs(net, i))
        h->stalled_until = net->now + rng_below(&net->rng, 3 * NET_S);
    else if (net_runs(net, i))
        net_record(net, i, (uint8_t)rng_below(&net->rng, NET_KINDS), &net->now, sizeof net->now);
}

static void test_views_agree_after_chaos(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= seeds(150); seed++) {
        struct net net;
        net_init(&net, seed, 2 + (uint32_t)(seed % 11));
        net.n_paths = 1 + seed % 2;
        net.loss = seed % 5 == 0 ? 0.1 : 0;
        net.duplicate = 0.02;
        net.delay_max = seed % 3 == 0 ? 30 * NET_MS : 500;
        net_start_all(&net);
        for (uint32_t i = 0; i < net.n; i++)
            net.hosts[i].forgets = rng_below(&net.rng, 2);
        for (int k = 0; k < 25; k++) {
            disturb(&net);
            net_run(&net, rng_below(&net.rng, 1500 * NET_MS));
        }
        net.loss = 0;
        net_partition(&net, 0, false);
        memset(net.cut, 0, sizeof net.cut);
        for (uint32_t i = 0; i < net.n; i++) {
            net.hosts[i].stalled_until = 0;
            if (!net.hosts[i].up && rng_below(&net.rng, 2))
                net_start(&net, i, NULL);
            if (net.hosts[i].up && net.hosts[i].asleep)
                net_wake(&net, i);
        }
        NET_CHECK(&net, net_settles(&net, 5 * NET_S));
        net_deinit(&net);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everybody_meets),
        cmocka_unit_test(test_silent_crash_is_seen_within_two_seconds),
        cmocka_unit_test(test_killed_process_is_seen_within_300_ms),
        cmocka_unit_test(test_lossy_network_kills_nobody),
        cmocka_unit_test(test_one_way_cut_costs_the_edge_not_the_node),
        cmocka_unit_test(test_one_of_two_cables_is_cut),
        cmocka_unit_test(test_partition_heals),
        cmocka_unit_test(test_restarted_node_wins_over_its_past),
        cmocka_unit_test(test_sleeper_comes_back),
        cmocka_unit_test(test_starved_node_neither_dies_nor_kills),
        cmocka_unit_test(test_loaded_cluster_kills_nobody),
        cmocka_unit_test(test_records_reach_everybody),
        cmocka_unit_test(test_cloned_key_is_excluded_until_one_stops),
        cmocka_unit_test(test_blocked_datagrams),
        cmocka_unit_test(test_idle_is_cheap),
        cmocka_unit_test(test_views_agree_after_chaos),
    };
    cmocka_set_test_filter(getenv("SWIM_TEST"));
    return cmocka_run_group_tests(tests, NULL, NULL);
}
