/* The nth allocation fails, for every n: the constructors of proto, and a whole conversation of the
 * trust core. Linked with --wrap, so that only our own libraries are met. */
#include <stdbool.h>
#include <stddef.h>

/* Counts down to the allocation that fails; negative: none does. */
struct alloc_plan {
    long countdown;
    bool failed;
    long n_live;
};
static struct alloc_plan *alloc_plan(void);

#define WORLD_BEFORE_STEP alloc_plan()->countdown = world_countdown(w)
#define WORLD_AFTER_STEP world_keep_countdown(w)
struct world;
static long world_countdown(struct world *w);
static void world_keep_countdown(struct world *w);

#include "tests/unit/trust_world.h"

#include "proto/noise.h"

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);

static struct alloc_plan *alloc_plan(void)
{
    static struct alloc_plan plan = {.countdown = -1}; /* the wrapped functions have no context */
    return &plan;
}

static bool fails(void)
{
    struct alloc_plan *plan = alloc_plan();
    if (plan->countdown < 0)
        return false;
    if (plan->countdown-- > 0)
        return false;
    plan->failed = true;
    return true;
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

/* Only the cores are to meet the failure, not the world around them. */
static long held_countdown = -1;

static long world_countdown(struct world *w)
{
    (void)w;
    return held_countdown;
}

static void world_keep_countdown(struct world *w)
{
    (void)w;
    held_countdown = alloc_plan()->countdown;
    alloc_plan()->countdown = -1;
}

static void test_session_new_survives_every_failure(void **state)
{
    (void)state;
    struct rng rng;
    uint8_t secret[32] = {1}, public_key[32];
    struct session_psk psk = {.tag = 1};
    noise_public_key(secret, public_key);
    rng_seed(&rng, 1);
    for (int role = 0; role < 2; role++) {
        for (long n = 0;; n++) {
            struct session *s = NULL;
            *alloc_plan() = (struct alloc_plan){.countdown = n};
            enum err e = session_new(&(struct session_options){.role = (enum session_role)role,
                                                               .static_public = public_key,
                                                               .static_secret = secret,
                                                               .psks = &psk,
                                                               .n_psks = 1,
                                                               .random = {world_fill, &rng}},
                                     &s);
            alloc_plan()->countdown = -1;
            assert_int_equal(e, alloc_plan()->failed ? ERR_NO_MEMORY : ERR_OK);
            assert_true((s != NULL) == (e == ERR_OK));
            session_free(s);
            if (e == ERR_OK)
                break;
        }
    }
}

static void test_trust_new_survives_every_failure(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 3, 1);
    (void)world_admit(&w, 0, 1, false);
    (void)world_admit(&w, 1, 2, true);
    struct world_node *node = &w.nodes[1];
    struct trust_options options = {.random = {world_fill, &node->rng}};
    for (int stored = 0; stored < 2; stored++) {
        for (long n = 0;; n++) {
            struct trust *t = NULL;
            *alloc_plan() = (struct alloc_plan){.countdown = n};
            enum err e = trust_new(&node->identity, stored ? node->disk : NULL,
                                   stored ? node->n_disk : 0, &options, &t);
            alloc_plan()->countdown = -1;
            assert_int_equal(e, alloc_plan()->failed ? ERR_NO_MEMORY : ERR_OK);
            assert_true((t != NULL) == (e == ERR_OK));
            trust_free(t);
            if (e == ERR_OK)
                break;
        }
    }
    world_deinit(&w);
}

/* Join, revoke, approve: wherever memory fails, the conversation may fail, but the state is whole:
 * what is on disk loads, and with memory back all of it works. */
static void test_trust_conversation_survives_every_failure(void **state)
{
    (void)state;
    bool failed = true;
    for (long n = 0; failed; n++) {
        struct world w;
        enum err e;
        world_init(&w, 4, 2);
        *alloc_plan() = (struct alloc_plan){.countdown = -1};
        held_countdown = n;
        (void)world_step(&w, 0, (struct trust_event){.kind = TRUST_INVITE});
        (void)world_join_with(&w, 1, 0, w.nodes[0].token, false, &e);
        (void)world_step(&w, 1, (struct trust_event){.kind = TRUST_INVITE});
        (void)world_join_with(&w, 2, 1, w.nodes[1].token, false, &e);
        (void)world_dial(&w, 2, 0);
        (void)world_revoke(&w, 0, 1);
        (void)world_step(
            &w, 0, (struct trust_event){.kind = TRUST_APPROVE, .key = w.nodes[2].identity.id});
        world_run(&w);
        failed = alloc_plan()->failed;
        held_countdown = -1;
        for (int i = 0; i < 4; i++) {
            world_stop(&w, i);
            world_start(&w, i);
        }
        world_run(&w);
        (void)world_step(&w, 2, (struct trust_event){.kind = TRUST_LEAVE});
        world_run(&w);
        (void)world_admit(&w, 0, 2, false);
        (void)world_admit(&w, 0, 3, false);
        assert_int_equal(world_role(&w, 3, 2), TRUST_ROLE_MEMBER);
        world_deinit(&w);
    }
}

/* Where "used" could not be written down for want of memory, nothing is signed until it was. */
static void test_trust_signs_only_after_used_is_on_disk(void **state)
{
    (void)state;
    int n_held_up = 0;
    bool failed = true;
    for (long n = 0; failed; n++) {
        struct world w;
        struct session_psk psk;
        world_init(&w, 2, 3);
        struct token token = world_invite(&w, 0, false);
        (void)world_step(&w, 1, (struct trust_event){.kind = TRUST_JOIN, .token = token});
        assert_true(trust_join_psk(w.nodes[1].trust, &psk));
        assert_true(world_connect(&w, 1, 0, psk) != 0);
        while (!(w.queue[0].len == 2 && w.queue[0].bytes[0] == 0x12)) /* until Join is next */
            world_deliver(&w);
        *alloc_plan() = (struct alloc_plan){.countdown = -1};
        held_countdown = n;
        size_t before = w.nodes[0].n_writes;
        world_deliver(&w);
        failed = alloc_plan()->failed;
        held_countdown = -1;
        if (w.nodes[0].n_writes == before && w.links[1].up) {
            (void)world_step(&w, 0, (struct trust_event){.kind = TRUST_TICK});
            assert_int_equal(world_role(&w, 1, 0), TRUST_ROLE_NONE);
            n_held_up += w.nodes[0].n_writes > before;
        }
        world_run(&w);
        world_deinit(&w);
    }
    assert_true(n_held_up > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_session_new_survives_every_failure),
        cmocka_unit_test(test_trust_new_survives_every_failure),
        cmocka_unit_test(test_trust_conversation_survives_every_failure),
        cmocka_unit_test(test_trust_signs_only_after_used_is_on_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
