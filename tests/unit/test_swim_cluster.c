/* Whole clusters of swim cores on a virtual network: first safety (incarnations and versions never
 * go back, checked by swim_net.h after every step; a live node is never finally dead), then that a
 * healthy network brings all views together. A failing seed is printed. */
#include "tests/unit/swim_net.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

static uint64_t seeds(uint64_t n)
{
    const char *factor = getenv("SWIM_SEEDS_FACTOR");
    return factor ? n * strtoull(factor, NULL, 10) : n;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_everybody_meets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
