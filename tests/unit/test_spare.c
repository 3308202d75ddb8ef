/* Who fetches which second copy, and when. The plain rule, block by block, is the measure for the
 * division in runs. */
#include "agent/spare.h"
#include "base/rng.h"
#include "base/util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MIB = SPARE_BLOCK_BYTES };
#define SECONDS(n) ((uint64_t)(n)*1000000)

static int setup(void **state)
{
    *state = calloc(1, sizeof(struct spare_view));
    return *state ? 0 : -1;
}

static int teardown(void **state)
{
    free(*state);
    return 0;
}

static void add_member(struct spare_view *v, uint8_t key, uint64_t room_blocks)
{
    struct spare_member *m = &v->members[v->n_members++];
    m->id.bytes[0] = key;
    m->room_bytes = room_blocks * MIB;
}

static struct spare_model *add_model(struct spare_view *v, uint8_t key, uint64_t n_bytes)
{
    struct spare_model *m = &v->models[v->n_models++];
    m->id.bytes[0] = key;
    m->n_bytes = n_bytes;
    return m;
}

static void hold(struct spare_model *m, uint32_t member, uint32_t first, uint32_t n)
{
    struct spare_holding *h = &m->held[member];
    h->runs[h->n_runs++] = (struct spare_run){first, n};
}

static void test_spare_only_holder_and_one_with_room(void **state)
{
    struct spare_view *v = *state;
    struct spare_share s[SPARE_MODELS_MAX];
    add_member(v, 1, 100);
    add_member(v, 2, 100);
    struct spare_model *m = add_model(v, 1, 10 * MIB - 5); /* the last block is short */
    hold(m, 0, 0, 10);
    v->self = 1;
    spare_divide(v, s);
    assert_true(s[0].sole[0]);
    assert_false(s[0].sole[1]);
    assert_int_equal(s[0].once_bytes, 10 * MIB - 5);
    assert_int_equal(s[0].takes_bytes[1], 10 * MIB - 5);
    assert_int_equal(s[0].n_own, 1);
    assert_int_equal(s[0].own[0].first, 0);
    assert_int_equal(s[0].own[0].n, 10);
    v->self = 0;
    spare_divide(v, s);
    assert_int_equal(s[0].n_own, 0);
    hold(m, 1, 0, 10);
    spare_divide(v, s);
    assert_false(s[0].sole[0]);
    assert_int_equal(s[0].twice_bytes, 10 * MIB - 5);
    assert_int_equal(s[0].once_bytes + s[0].homeless_bytes + s[0].nowhere_bytes, 0);
}

static void test_spare_most_present_then_room_then_key(void **state)
{
    struct spare_view *v = *state;
    struct spare_share s[SPARE_MODELS_MAX];
    add_member(v, 9, 0);
    add_member(v, 7, 50);
    add_member(v, 5, 50);
    add_member(v, 3, 40);
    struct spare_model *m = add_model(v, 1, 20 * MIB);
    hold(m, 0, 0, 20);
    spare_divide(v, s);
    assert_int_equal(s[0].takes_bytes[2], 20 * MIB); /* as much room as 7, smaller key */
    hold(m, 3, 0, 1);
    spare_divide(v, s);
    assert_int_equal(s[0].takes_bytes[3], 19 * MIB); /* began already */
    v->members[3].room_bytes = 4 * MIB + 17;
    spare_divide(v, s);
    assert_int_equal(s[0].takes_bytes[3], 4 * MIB);
    assert_int_equal(s[0].takes_bytes[2], 15 * MIB);
    assert_int_equal(s[0].homeless_bytes, 0);
}

static void test_spare_without_room_is_homeless(void **state)
{
    struct spare_view *v = *state;
    struct spare_share s[SPARE_MODELS_MAX];
    add_member(v, 1, 100); /* has it all: its room helps nobody */
    add_member(v, 2, 0);
    add_member(v, 3, 2);
    struct spare_model *m = add_model(v, 1, 8 * MIB);
    hold(m, 0, 0, 7); /* and one block is nowhere */
    hold(m, 1, 0, 3);
    spare_divide(v, s);
    assert_int_equal(s[0].twice_bytes, 3 * MIB);
    assert_int_equal(s[0].once_bytes, 4 * MIB);
    assert_int_equal(s[0].takes_bytes[2], 2 * MIB);
    assert_int_equal(s[0].homeless_bytes, 2 * MIB);
    assert_int_equal(s[0].nowhere_bytes, 1 * MIB);
    assert_true(s[0].sole[0]);
}

static void test_spare_models_share_the_room_by_id(void **state)
{
    struct spare_view *v = *state;
    struct spare_share s[SPARE_MODELS_MAX];
    add_member(v, 1, 0);
    add_member(v, 2, 10);
    hold(add_model(v, 8, 9 * MIB), 0, 0, 9);
    hold(add_model(v, 4, 6 * MIB), 0, 0, 6);
    spare_divide(v, s);
    assert_int_equal(s[1].takes_bytes[1], 6 * MIB);
    assert_int_equal(s[0].takes_bytes[1], 4 * MIB);
    assert_int_equal(s[0].homeless_bytes, 5 * MIB);
}

/* The rule in plain words, for one block after another. */
static void check_by_blocks(const struct spare_view *v, const struct spare_share *s, uint32_t n)
{
    uint32_t sole[SPARE_MEMBERS_MAX] = {0}, n_once = 0, n_twice = 0;
    for (uint32_t b = 0; b < n; b++) {
        uint32_t holders = 0, last = 0;
        for (uint32_t i = 0; i < v->n_members; i++) {
            if (spare_holds(&v->models[0].held[i], b)) {
                holders++;
                last = i;
            }
        }
        n_once += holders == 1;
        n_twice += holders > 1;
        sole[last] += holders == 1;
    }
    assert_int_equal(s->once_bytes, (uint64_t)n_once * MIB);
    assert_int_equal(s->twice_bytes, (uint64_t)n_twice * MIB);
    assert_int_equal(s->nowhere_bytes, (uint64_t)(n - n_once - n_twice) * MIB);
    for (uint32_t i = 0; i < v->n_members; i++)
        assert_int_equal(s->sole[i], sole[i] > 0);
}

static void random_view(struct rng *r, struct spare_view *v, uint32_t n_blocks)
{
    memset(v, 0, sizeof *v);
    uint32_t n = 1 + (uint32_t)rng_below(r, 6);
    for (uint32_t i = 0; i < n; i++)
        add_member(v, (uint8_t)(10 + 7 * i % 5 + 5 * i), rng_below(r, 2) ? rng_below(r, 40) : 0);
    struct spare_model *m = add_model(v, 1, (uint64_t)n_blocks * MIB);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t at = 0; at < n_blocks;) {
            uint32_t k = 1 + (uint32_t)rng_below(r, n_blocks - at);
            if (rng_below(r, 2))
                hold(m, i, at, k);
            at += k + 1;
        }
    }
}

/* Whoever looks gives each lone block to the same one, who lacks it and has the room; what nobody
 * takes, nobody could. */
static void test_spare_all_agree_on_random_views(void **state)
{
    struct spare_view *v = *state;
    struct spare_share s[SPARE_MODELS_MAX];
    struct rng r;
    rng_seed(&r, 5);
    for (int round = 0; round < 2000; round++) {
        uint32_t n = 1 + (uint32_t)rng_below(&r, 30);
        random_view(&r, v, n);
        uint32_t taken[32] = {0};
        uint64_t homeless = 0;
        for (uint32_t i = 0; i < v->n_members; i++) {
            v->self = i;
            spare_divide(v, s);
            check_by_blocks(v, s, n);
            uint64_t own = 0;
            for (uint32_t k = 0; k < s[0].n_own; k++) {
                own += (uint64_t)s[0].own[k].n * MIB;
                for (uint32_t b = 0; b < s[0].own[k].n; b++) {
                    taken[s[0].own[k].first + b]++;
                    assert_false(spare_holds(&v->models[0].held[i], s[0].own[k].first + b));
                }
            }
            assert_int_equal(own, s[0].takes_bytes[i]);
            assert_true(own <= v->members[i].room_bytes);
            homeless = s[0].homeless_bytes;
        }
        uint64_t n_taken = 0, left[SPARE_MEMBERS_MAX];
        for (uint32_t i = 0; i < v->n_members; i++)
            left[i] = v->members[i].room_bytes - s[0].takes_bytes[i];
        for (uint32_t b = 0; b < n; b++) {
            uint32_t holders = 0;
            for (uint32_t i = 0; i < v->n_members; i++)
                holders += spare_holds(&v->models[0].held[i], b);
            assert_true(taken[b] <= (holders == 1));
            n_taken += taken[b];
            for (uint32_t i = 0; holders == 1 && !taken[b] && i < v->n_members; i++)
                assert_true(left[i] < MIB || spare_holds(&v->models[0].held[i], b));
        }
        assert_int_equal(n_taken * MIB + homeless, s[0].once_bytes);
    }
}

static void test_spare_more_runs_than_an_order_takes(void **state)
{
    struct spare_view *v = *state;
    struct spare_share s[SPARE_MODELS_MAX];
    for (uint8_t i = 0; i < 5; i++)
        add_member(v, i, i == 4 ? 10000 : 0);
    struct spare_model *m = add_model(v, 1, (uint64_t)400 * MIB);
    for (uint32_t i = 0; i < 128; i++)
        hold(m, i / SPARE_RUNS_MAX, 3 * i, 2);
    v->self = 4;
    spare_divide(v, s);
    assert_int_equal(s[0].n_own, SPARE_ORDER_RUNS_MAX);
    assert_int_equal(s[0].takes_bytes[4], 256 * MIB);
    assert_int_equal(s[0].own[SPARE_ORDER_RUNS_MAX - 1].first, 3 * (SPARE_ORDER_RUNS_MAX - 1));
}

/* ---- pace ---- */

struct pacing {
    struct spare_view *v;
    struct spare_share s[SPARE_MODELS_MAX];
    struct spare_pace p;
    struct spare_order order;
};

static struct pacing pacing_of(struct spare_view *v)
{
    add_member(v, 1, 0);
    add_member(v, 2, 1000);
    hold(add_model(v, 1, 600 * (uint64_t)MIB), 0, 0, 600);
    v->self = 1;
    return (struct pacing){.v = v};
}

static enum spare_action look(struct pacing *x, bool busy, uint64_t now_us)
{
    spare_divide(x->v, x->s);
    return spare_step(&x->p, x->v, x->s, busy, now_us, &x->order);
}

static void test_spare_begins_when_settled_and_quiet(void **state)
{
    struct pacing x = pacing_of(*state);
    assert_int_equal(look(&x, false, SECONDS(100)), SPARE_WAIT);
    assert_int_equal(look(&x, false, SECONDS(102)), SPARE_WAIT);
    assert_int_equal(look(&x, true, SECONDS(103)), SPARE_WAIT); /* a request */
    assert_int_equal(look(&x, false, SECONDS(104)), SPARE_WAIT);
    assert_int_equal(look(&x, false, SECONDS(105)), SPARE_FETCH);
    assert_int_equal(x.order.n_runs, 1);
    assert_int_equal(x.order.runs[0].first, 0);
    assert_int_equal(x.order.runs[0].n, SPARE_ORDER_BLOCKS);
    assert_int_equal(look(&x, false, SECONDS(106)), SPARE_WAIT); /* one at a time */
    spare_done(&x.p, ERR_OK, MIB, SECONDS(110));
    hold(&x.v->models[0], 1, 0, SPARE_ORDER_BLOCKS);
    assert_int_equal(look(&x, false, SECONDS(110)), SPARE_FETCH); /* and on at once */
    assert_int_equal(x.order.runs[0].first, SPARE_ORDER_BLOCKS);
}

static void test_spare_gives_way_to_requests_anywhere(void **state)
{
    struct pacing x = pacing_of(*state);
    (void)look(&x, false, SECONDS(100));
    assert_int_equal(look(&x, false, SECONDS(103)), SPARE_FETCH);
    x.v->members[0].computes = true;
    assert_int_equal(look(&x, false, SECONDS(104)), SPARE_STOP);
    spare_done(&x.p, ERR_CANCELLED, MIB, SECONDS(104));
    x.v->members[0].computes = false;
    assert_int_equal(look(&x, false, SECONDS(105)), SPARE_WAIT);
    assert_int_equal(look(&x, false, SECONDS(106)), SPARE_FETCH);
    assert_int_equal(look(&x, true, SECONDS(107)), SPARE_STOP);
}

static void test_spare_stops_when_no_longer_wanted_or_made_by_another(void **state)
{
    struct pacing x = pacing_of(*state);
    (void)look(&x, false, SECONDS(100));
    assert_int_equal(look(&x, false, SECONDS(103)), SPARE_FETCH);
    add_member(x.v, 3, 0);
    hold(&x.v->models[0], 2, 0, 600);
    assert_int_equal(look(&x, false, SECONDS(104)), SPARE_STOP);
    spare_done(&x.p, ERR_CANCELLED, 0, SECONDS(104));
    assert_int_equal(look(&x, false, SECONDS(105)), SPARE_WAIT);
    x.v->n_members = 2;
    (void)look(&x, false, SECONDS(106));
    assert_int_equal(look(&x, false, SECONDS(108)), SPARE_WAIT); /* settles anew */
    assert_int_equal(look(&x, false, SECONDS(109)), SPARE_FETCH);
    x.v->n_models = 0; /* covey stop */
    assert_int_equal(look(&x, false, SECONDS(110)), SPARE_STOP);
}

static void test_spare_rests_after_failures(void **state)
{
    struct pacing x = pacing_of(*state);
    uint64_t now_us = SECONDS(100);
    (void)look(&x, false, now_us);
    now_us += SECONDS(3);
    for (int i = 0; i < 12; i++) {
        uint64_t rest_us = MIN_OF((uint64_t)SPARE_RETRY_US << i, (uint64_t)SPARE_RETRY_MAX_US);
        assert_int_equal(look(&x, false, now_us), SPARE_FETCH);
        /* nothing came, though nothing failed: the same for ever without a rest */
        spare_done(&x.p, i % 2 ? ERR_IO : ERR_OK, 0, now_us);
        assert_int_equal(look(&x, false, now_us + rest_us - 1), SPARE_WAIT);
        now_us += rest_us;
    }
    assert_int_equal(look(&x, false, now_us), SPARE_FETCH);
    spare_done(&x.p, ERR_OK, MIB, now_us);
    assert_int_equal(look(&x, false, now_us), SPARE_FETCH);
    assert_true(spare_next_due(&x.p, now_us) == now_us + SPARE_WATCH_US);
}

int main(void)
{
#define CASE(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(test_spare_only_holder_and_one_with_room),
        CASE(test_spare_most_present_then_room_then_key),
        CASE(test_spare_without_room_is_homeless),
        CASE(test_spare_models_share_the_room_by_id),
        CASE(test_spare_all_agree_on_random_views),
        CASE(test_spare_more_runs_than_an_order_takes),
        CASE(test_spare_begins_when_settled_and_quiet),
        CASE(test_spare_gives_way_to_requests_anywhere),
        CASE(test_spare_stops_when_no_longer_wanted_or_made_by_another),
        CASE(test_spare_rests_after_failures),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
