/* PROTOCOL section 1, sentence by sentence, as conversations between trust cores. */
#include "tests/unit/trust_world.h"

#define assert_role(w, of, seen_by, role)                                                          \
    assert_int_equal(world_role((w), (of), (seen_by)), TRUST_ROLE_##role)

#define assert_reason(w, node, effect_kind, expected)                                              \
    do {                                                                                           \
        const struct trust_effect *effect_ =                                                       \
            world_effect((w), (node), TRUST_EFFECT_##effect_kind);                                 \
        assert_non_null(effect_);                                                                  \
        assert_string_equal(trust_reason_name(effect_->reason), expected);                         \
    } while (0)

static void assert_same_view(const struct world *w, int a, int b)
{
    struct session_psk psk_a, psk_b;
    trust_dial_psk(w->nodes[a].trust, &psk_a);
    trust_dial_psk(w->nodes[b].trust, &psk_b);
    assert_memory_equal(psk_a.key, psk_b.key, sizeof psk_a.key);
    assert_true(
        hash256_eq(trust_cluster_id(w->nodes[a].trust), trust_cluster_id(w->nodes[b].trust)));
    struct trust_member member_a, member_b;
    uint32_t i = 0;
    for (; trust_member_at(w->nodes[a].trust, i, &member_a); i++) {
        assert_true(trust_member_at(w->nodes[b].trust, i, &member_b));
        assert_true(node_id_eq(&member_a.id, &member_b.id));
        assert_int_equal(member_a.role, member_b.role);
        assert_int_equal(member_a.depth, member_b.depth);
        assert_true(node_id_eq(&member_a.issuer, &member_b.issuer));
    }
    assert_false(trust_member_at(w->nodes[b].trust, i, &member_b));
}

static void test_trust_founds_a_cluster_of_one_and_keeps_it(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 1, 1);
    struct world_node *node = &w.nodes[0];
    assert_int_equal(trust_origin(node->trust), TRUST_FOUNDED);
    assert_int_equal(node->n_writes, 1);
    assert_role(&w, 0, 0, MEMBER);
    assert_int_equal(trust_n_members(node->trust), 1);
    struct hash256 cluster = *trust_cluster_id(node->trust);
    struct session_psk before, after;
    trust_dial_psk(node->trust, &before);
    world_stop(&w, 0);
    world_start(&w, 0);
    trust_dial_psk(node->trust, &after);
    assert_int_equal(trust_origin(node->trust), TRUST_LOADED);
    assert_true(hash256_eq(&cluster, trust_cluster_id(node->trust)));
    assert_memory_equal(before.key, after.key, sizeof before.key);
    assert_true(trust_next_due(node->trust) == UINT64_MAX);
    world_deinit(&w);
}

static void test_trust_join_makes_members_of_both(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 2);
    uint64_t link = world_admit(&w, 0, 1, false);
    assert_true(world_is_trusted(&w, link));
    assert_non_null(world_effect(&w, 1, TRUST_EFFECT_JOINED));
    const struct trust_effect *seen = world_effect(&w, 0, TRUST_EFFECT_AUTHENTICATED);
    assert_non_null(seen);
    assert_true(node_id_eq(&seen->peer.id, &w.nodes[1].identity.id));
    assert_true(seen->peer.self.boot_id == w.nodes[1].boot_id);
    assert_string_equal(seen->peer.self.name, "node-1");
    assert_string_equal(seen->peer.self.version, "0.1.0");
    assert_int_equal(seen->peer.self.control_port, 1001);
    assert_int_equal(seen->peer.self.data_port, 2001);
    assert_int_equal(seen->peer.protocol, 2);
    assert_same_view(&w, 0, 1);
    assert_role(&w, 1, 0, MEMBER);
    /* Both hold it over a restart, and meet again with the secret, either way round. */
    for (int i = 0; i < 2; i++) {
        world_stop(&w, i);
        world_start(&w, i);
    }
    assert_true(world_is_trusted(&w, world_dial(&w, 0, 1)));
    assert_true(world_is_trusted(&w, world_dial(&w, 1, 0)));
    world_deinit(&w);
}

/* 1.3: without a secret nobody gets past the first message. */
static void test_trust_strangers_share_no_key(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 3);
    assert_int_equal(world_dial(&w, 0, 1), 0);
    assert_int_equal(world_dial(&w, 1, 0), 0);
    world_deinit(&w);
}

/* Every one of the members reaches every other, also those that joined through different doors. */
static void test_trust_members_reach_each_other_through_their_chains(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 4, 4);
    (void)world_admit(&w, 0, 1, false);
    world_stop(&w, 0); /* the founder never hears of the two that follow, until it is back */
    (void)world_admit(&w, 1, 2, false);
    (void)world_admit(&w, 2, 3, false);
    world_start(&w, 0);
    assert_role(&w, 3, 0, NONE);
    assert_true(world_is_trusted(&w, world_dial(&w, 3, 0)));
    assert_role(&w, 3, 0, MEMBER);
    assert_true(world_is_trusted(&w, world_dial(&w, 0, 2)));
    for (int i = 1; i < 4; i++)
        assert_same_view(&w, 0, i);
    world_deinit(&w);
}

static void test_trust_worker_may_not_admit_or_revoke(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 3, 5);
    uint64_t link = world_admit(&w, 0, 1, true);
    assert_true(world_is_trusted(&w, link));
    assert_role(&w, 1, 0, WORKER);
    assert_role(&w, 1, 1, WORKER);
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_INVITE}), ERR_DENIED);
    (void)world_admit(&w, 0, 2, false);
    assert_int_equal(world_revoke(&w, 1, 2), ERR_DENIED);
    assert_int_equal(world_step(&w, 0,
                                (struct trust_event){.kind = TRUST_APPROVE,
                                                     .key = w.nodes[1].identity.id,
                                                     .worker = true}),
                     ERR_EXISTS);
    /* Made a full member, it may. */
    assert_int_equal(
        world_step(&w, 0,
                   (struct trust_event){.kind = TRUST_APPROVE, .key = w.nodes[1].identity.id}),
        ERR_OK);
    world_run(&w);
    assert_role(&w, 1, 1, MEMBER);
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_INVITE}), ERR_OK);
    world_deinit(&w);
}

/* 1.6: once, in time, before a restart, from its issuer only. */
static void test_trust_token_is_good_once(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    world_init(&w, 3, 6);
    struct token token = world_invite(&w, 0, false);
    assert_true(world_join_with(&w, 1, 0, token, false, &e) != 0);
    assert_role(&w, 1, 0, MEMBER);
    assert_int_equal(world_join_with(&w, 2, 0, token, false, &e), 0);
    assert_int_equal(world_join_with(&w, 2, 1, token, false, &e), 0); /* not its issuer */
    assert_role(&w, 2, 0, NONE);
    world_deinit(&w);
}

static void test_trust_two_holders_of_a_token_race(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 3, 7);
    struct token token = world_invite(&w, 0, false);
    struct session_psk psk;
    for (int i = 1; i < 3; i++) {
        assert_int_equal(
            world_step(&w, i, (struct trust_event){.kind = TRUST_JOIN, .token = token}), ERR_OK);
        assert_true(trust_join_psk(w.nodes[i].trust, &psk));
        assert_true(world_connect(&w, i, 0, psk) != 0);
    }
    world_run(&w);
    assert_int_equal(trust_n_members(w.nodes[0].trust), 2);
    int loser = world_role(&w, 1, 0) == TRUST_ROLE_MEMBER ? 2 : 1;
    assert_reason(&w, loser, JOIN_FAILED, "token");
    assert_reason(&w, 0, REJECTED, "token");
    world_deinit(&w);
}

static void test_trust_token_expires(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    uint8_t tag[TOKEN_TAG_BYTES], expected[TOKEN_TAG_BYTES];
    world_init(&w, 2, 8);
    assert_int_equal(
        world_step(&w, 0, (struct trust_event){.kind = TRUST_INVITE, .ttl_us = 5000000}), ERR_OK);
    struct token token = w.nodes[0].token;
    assert_true(trust_invite_tag(w.nodes[0].trust, 0, w.now_us, tag));
    token_tag(&token, expected);
    assert_memory_equal(tag, expected, sizeof tag);
    assert_false(trust_invite_tag(w.nodes[0].trust, 1, w.now_us, tag));
    assert_true(trust_next_due(w.nodes[0].trust) == w.now_us + 5000000);
    /* A session that came up in time does not save a request that comes too late. */
    struct session_psk psk;
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_JOIN, .token = token}),
                     ERR_OK);
    assert_true(trust_join_psk(w.nodes[1].trust, &psk));
    w.now_us += 4999999;
    assert_true(world_connect(&w, 1, 0, psk) != 0);
    w.now_us += 1;
    world_run(&w);
    assert_role(&w, 1, 0, NONE);
    assert_reason(&w, 1, JOIN_FAILED, "token");
    assert_false(trust_invite_tag(w.nodes[0].trust, 0, w.now_us, tag));
    assert_int_equal(world_join_with(&w, 1, 0, token, false, &e), 0);
    world_deinit(&w);
}

/* The token's last moment passes between introduction and request: no step came between to clear
 * it. */
static bool expire_at_request(struct world *w, uint32_t number, struct world_message *m)
{
    (void)number;
    if (m->len == 2 && m->bytes[0] == 0x12) /* Join */
        w->now_us += TRUST_INVITE_US_DEFAULT;
    return true;
}

static void test_trust_token_expires_before_the_request(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    world_init(&w, 2, 44);
    struct token token = world_invite(&w, 0, false);
    w.meddle = expire_at_request;
    assert_true(world_join_with(&w, 1, 0, token, false, &e) != 0);
    assert_role(&w, 1, 0, NONE);
    assert_reason(&w, 0, REJECTED, "token");
    world_deinit(&w);
}

static void test_trust_token_dies_with_a_restart(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    world_init(&w, 2, 9);
    struct token token = world_invite(&w, 0, false);
    world_run(&w);
    world_stop(&w, 0);
    world_start(&w, 0);
    assert_int_equal(world_join_with(&w, 1, 0, token, false, &e), 0);
    world_deinit(&w);
}

/* The crash between "used" on disk and the signature: nobody was admitted, and the token is spent.
 */
static void test_trust_restart_between_used_and_sign(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    struct session_psk psk;
    world_init(&w, 2, 10);
    struct token token = world_invite(&w, 0, false);
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_JOIN, .token = token}),
                     ERR_OK);
    assert_true(trust_join_psk(w.nodes[1].trust, &psk));
    assert_true(world_connect(&w, 1, 0, psk) != 0);
    size_t before = w.nodes[0].n_writes;
    while (w.nodes[0].n_writes == before)
        world_deliver(&w);
    /* "Used" is on disk; nothing is signed, nothing was said. */
    assert_role(&w, 1, 0, NONE);
    assert_int_equal(w.n_queued, 0);
    assert_true(trust_next_due(w.nodes[0].trust) <= w.now_us);
    world_stop(&w, 0);
    world_start(&w, 0);
    world_run(&w);
    assert_role(&w, 1, 0, NONE);
    assert_int_equal(world_join_with(&w, 1, 0, token, false, &e), 0);
    /* A new token works. */
    (void)world_admit(&w, 0, 1, false);
    assert_role(&w, 1, 0, MEMBER);
    world_deinit(&w);
}

/* What is not on disk was not said: a joiner whose issuer cannot write is not admitted. */
static void test_trust_says_nothing_before_the_disk(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    world_init(&w, 2, 11);
    struct token token = world_invite(&w, 0, false);
    w.nodes[0].disk_is_cut = true;
    (void)world_join_with(&w, 1, 0, token, false, &e);
    assert_null(world_effect(&w, 1, TRUST_EFFECT_JOINED));
    world_deinit(&w);
}

static void test_trust_join_needs_leave_in_a_cluster_of_more(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    world_init(&w, 3, 12);
    uint64_t old = world_admit(&w, 0, 1, false);
    struct token token = world_invite(&w, 2, false);
    (void)world_join_with(&w, 1, 2, token, false, &e);
    assert_int_equal(e, ERR_DENIED);
    uint64_t link = world_join_with(&w, 1, 2, token, true, &e);
    assert_int_equal(e, ERR_OK);
    assert_true(world_is_trusted(&w, link));
    assert_false(w.links[old].up);
    assert_reason(&w, 0, REFUSED, "left");
    assert_same_view(&w, 1, 2);
    /* The old cluster still has its record, but the two share no secret now. */
    assert_int_equal(world_dial(&w, 1, 0), 0);
    assert_int_equal(world_dial(&w, 0, 1), 0);
    /* Nor does a token of one's own make sense. */
    token = world_invite(&w, 1, false);
    (void)world_join_with(&w, 1, 2, token, true, &e);
    assert_int_equal(e, ERR_EXISTS);
    world_deinit(&w);
}

static void test_trust_leave_starts_over_and_survives_a_restart(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 13);
    uint64_t link = world_admit(&w, 0, 1, false);
    struct hash256 old = *trust_cluster_id(w.nodes[1].trust);
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_LEAVE}), ERR_OK);
    world_run(&w);
    assert_false(w.links[link].up);
    assert_int_equal(trust_n_members(w.nodes[1].trust), 1);
    world_stop(&w, 1);
    world_start(&w, 1);
    assert_false(hash256_eq(&old, trust_cluster_id(w.nodes[1].trust)));
    assert_int_equal(world_dial(&w, 1, 0), 0);
    /* Its record is still there; a token brings it back. */
    assert_true(world_is_trusted(&w, world_admit(&w, 0, 1, false)));
    assert_same_view(&w, 0, 1);
    world_deinit(&w);
}

/* 1.5: for ever per key, with a new secret, and what the node admitted becomes pending. */
static void test_trust_revocation_closes_rotates_and_makes_pending(void **state)
{
    (void)state;
    struct world w;
    enum err e;
    world_init(&w, 5, 14);
    uint64_t link1 = world_admit(&w, 0, 1, false), link2 = world_admit(&w, 1, 2, false);
    (void)world_admit(&w, 0, 3, false);
    uint64_t link02 = world_dial(&w, 2, 0), link31 = world_dial(&w, 3, 1);
    uint64_t link03 = world_dial(&w, 0, 3);
    assert_true(world_is_trusted(&w, link02) && world_is_trusted(&w, link31));
    struct session_psk old, fresh;
    trust_dial_psk(w.nodes[0].trust, &old);
    world_forget_effects(&w);
    assert_int_equal(world_revoke(&w, 0, 1), ERR_OK);
    trust_dial_psk(w.nodes[0].trust, &fresh);
    assert_memory_not_equal(old.key, fresh.key, sizeof old.key);
    assert_role(&w, 1, 0, REVOKED);
    assert_role(&w, 2, 0, PENDING);
    const struct trust_effect *pending = world_effect(&w, 0, TRUST_EFFECT_PENDING);
    assert_non_null(pending);
    assert_true(node_id_eq(&pending->peer.id, &w.nodes[2].identity.id));
    assert_non_null(world_effect(&w, 0, TRUST_EFFECT_SECRETS_CHANGED));
    assert_false(w.links[link1].up || w.links[link02].up || w.links[link31].up);
    assert_true(w.links[link2].up); /* they have not heard: between outcasts, and no secret in it */
    assert_true(world_is_trusted(&w, link03));
    assert_same_view(&w, 0, 3);
    struct session_psk theirs;
    trust_dial_psk(w.nodes[2].trust, &theirs);
    assert_memory_equal(theirs.key, old.key, sizeof old.key);
    /* The gate still opens to the old secret; authority is missing. */
    for (int i = 1; i < 3; i++) {
        uint64_t link = world_dial(&w, i, 3);
        assert_true(link != 0);
        assert_false(world_is_up(&w, link, 3));
        assert_reason(&w, i, REFUSED, i == 1 ? "revoked" : "pending");
    }
    assert_int_equal(world_revoke(&w, 0, 1), ERR_EXISTS);
    assert_int_equal(
        world_step(&w, 0,
                   (struct trust_event){.kind = TRUST_APPROVE, .key = w.nodes[1].identity.id}),
        ERR_DENIED);
    /* For ever: not even with a token. */
    struct token token = world_invite(&w, 0, false);
    (void)world_join_with(&w, 1, 0, token, true, &e);
    assert_reason(&w, 1, JOIN_FAILED, "revoked");
    assert_role(&w, 1, 0, REVOKED);
    /* The pending one is approved, comes in with its old secret and gets the new one. */
    assert_int_equal(
        world_step(&w, 3,
                   (struct trust_event){.kind = TRUST_APPROVE, .key = w.nodes[2].identity.id}),
        ERR_OK);
    world_run(&w);
    assert_true(world_is_trusted(&w, world_dial(&w, 2, 0)));
    assert_same_view(&w, 0, 2);
    assert_false(w.links[link2].up);
    world_deinit(&w);
}

/* 1.2: a machine that slept through a rotation gets in with the old secret, dialling or dialled. */
static void test_trust_sleeper_gets_the_newest_secret(void **state)
{
    (void)state;
    for (int way = 0; way < 2; way++) {
        struct world w;
        world_init(&w, 4, 15);
        (void)world_admit(&w, 0, 1, false);
        (void)world_admit(&w, 0, 2, false);
        uint64_t link3 = world_admit(&w, 0, 3, false);
        world_stop(&w, 1);
        assert_int_equal(world_revoke(&w, 0, 2), ERR_OK);
        assert_true(world_is_trusted(&w, link3));
        world_start(&w, 1);
        struct session_psk psk;
        trust_dial_psk(w.nodes[3].trust, &psk);
        assert_int_equal(world_connect(&w, 3, 1, psk), 0); /* it does not know the new one yet */
        uint64_t link = world_dial(&w, 1, way ? 3 : 0);
        assert_true(world_is_trusted(&w, link));
        assert_same_view(&w, 1, 0);
        assert_role(&w, 2, 1, REVOKED);
        assert_true(world_connect(&w, 3, 1, psk) != 0);
        world_run(&w);
        world_deinit(&w);
    }
}

/* Two that revoke each other while they do not hear each other: all agree afterwards. */
static void test_trust_mutual_revocation_has_one_winner(void **state)
{
    (void)state;
    for (int seed = 20; seed < 26; seed++) {
        struct world w;
        world_init(&w, 5, (uint64_t)seed);
        /* Even seeds: 1 and 2 both from the founder, the smaller key wins. Odd: 2 from 3. */
        (void)world_admit(&w, 0, 1, false);
        (void)world_admit(&w, 0, 3, false);
        (void)world_admit(&w, seed % 2 ? 3 : 0, 2, false);
        for (int i = 1; i < 4; i++)
            (void)world_dial(&w, i, 0);
        for (uint64_t link = 1; link <= w.n_links; link++)
            world_drop_link(&w, link);
        world_run(&w);
        assert_same_view(&w, 1, 2);
        assert_int_equal(world_revoke(&w, 1, 2), ERR_OK);
        assert_int_equal(world_revoke(&w, 2, 1), ERR_OK);
        bool one_wins =
            seed % 2 || node_id_cmp(&w.nodes[1].identity.id, &w.nodes[2].identity.id) < 0;
        int winner = one_wins ? 1 : 2, loser = one_wins ? 2 : 1;
        /* The founder hears both, in either order; 3 hears from the founder. */
        (void)world_dial(&w, seed % 4 < 2 ? winner : loser, 0);
        (void)world_dial(&w, 3, 0);
        (void)world_dial(&w, seed % 4 < 2 ? loser : winner, 3);
        (void)world_dial(&w, winner, 0);
        (void)world_dial(&w, 3, 0);
        for (int i = 0; i < 4; i += 3) {
            assert_role(&w, winner, i, MEMBER);
            assert_role(&w, loser, i, REVOKED);
        }
        assert_role(&w, winner, winner, MEMBER);
        assert_same_view(&w, 0, 3);
        assert_same_view(&w, 0, winner);
        world_deinit(&w);
    }
}

/* The loser of a mutual revocation cannot get its way through a key that it admits for the purpose.
 */
static void test_trust_revoked_node_cannot_strike_back_through_a_new_key(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 5, 30);
    (void)world_admit(&w, 0, 1, false);
    (void)world_admit(&w, 1, 2, false); /* a longer chain than 1's */
    for (int i = 1; i < 3; i++)
        (void)world_dial(&w, i, 0);
    (void)world_admit(&w, 2, 3, false);
    for (uint64_t link = 1; link <= w.n_links; link++)
        world_drop_link(&w, link);
    /* 2, which will lose to 1, lets 3 revoke 1; but 3 cannot: its own chain runs through 1. */
    assert_int_equal(world_revoke(&w, 3, 1), ERR_DENIED);
    assert_int_equal(world_revoke(&w, 1, 2), ERR_OK);
    (void)world_dial(&w, 1, 0);
    assert_role(&w, 2, 0, REVOKED);
    assert_role(&w, 3, 0, PENDING);
    world_deinit(&w);

    /* The same with a chain of its own from the founder: 4 under 2, 1 and 2 both under the founder.
     */
    world_init(&w, 5, 31);
    (void)world_admit(&w, 0, 1, false);
    (void)world_admit(&w, 0, 2, false);
    int winner = node_id_cmp(&w.nodes[1].identity.id, &w.nodes[2].identity.id) < 0 ? 1 : 2;
    int loser = 3 - winner;
    (void)world_dial(&w, 1, 2);
    (void)world_admit(&w, loser, 4, false);
    for (uint64_t link = 1; link <= w.n_links; link++)
        world_drop_link(&w, link);
    assert_int_equal(world_revoke(&w, winner, loser), ERR_OK);
    assert_int_equal(world_revoke(&w, 4, winner), ERR_OK); /* it has not heard */
    (void)world_dial(&w, 4, 0);
    (void)world_dial(&w, winner, 0);
    (void)world_dial(&w, winner, 0);
    assert_role(&w, winner, 0, MEMBER);
    assert_role(&w, loser, 0, REVOKED);
    assert_role(&w, 4, 0, PENDING);
    world_deinit(&w);
}

static void test_trust_founder_and_oneself_are_not_revoked(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 3, 32);
    (void)world_admit(&w, 0, 1, false);
    assert_int_equal(world_revoke(&w, 1, 0), ERR_DENIED);
    assert_int_equal(world_revoke(&w, 1, 1), ERR_DENIED);
    assert_int_equal(world_revoke(&w, 0, 2), ERR_NOT_FOUND);
    world_deinit(&w);
}

static void test_trust_expelled_node_is_told_and_may_start_over(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 4, 33);
    (void)world_admit(&w, 0, 1, false);
    (void)world_admit(&w, 0, 2, false);
    for (uint64_t link = 1; link <= w.n_links; link++)
        world_drop_link(&w, link);
    assert_int_equal(world_revoke(&w, 0, 1), ERR_OK);
    (void)world_dial(&w, 1, 0);
    assert_reason(&w, 1, REFUSED, "revoked");
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_LEAVE}), ERR_OK);
    assert_role(&w, 1, 1, MEMBER);
    (void)world_admit(&w, 1, 3, false);
    assert_same_view(&w, 1, 3);
    world_deinit(&w);
}

/* 1.1: a cloned disk's stored trust belongs to a key that this machine does not have. */
static void test_trust_starts_over_with_another_key(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 34);
    (void)world_admit(&w, 0, 1, false);
    world_stop(&w, 1);
    struct hash256 machine = {{99}};
    identity_make((struct random_source){world_fill, &w.nodes[1].rng}, &machine,
                  &w.nodes[1].identity);
    world_start(&w, 1);
    world_run(&w);
    assert_int_equal(trust_origin(w.nodes[1].trust), TRUST_STARTED_OVER);
    assert_int_equal(trust_n_members(w.nodes[1].trust), 1);
    assert_int_equal(world_dial(&w, 1, 0), 0);
    world_deinit(&w);
}

/* The secret without a record, a static key that is not the identity's, ourselves, our clone. */
static void test_trust_holder_of_a_secret_is_no_member(void **state)
{
    (void)state;
    struct world w;
    struct session_psk psk;
    world_init(&w, 3, 35);
    (void)world_admit(&w, 0, 1, false);
    trust_dial_psk(w.nodes[0].trust, &psk);
    uint64_t link = world_connect(&w, 2, 0, psk);
    world_run(&w);
    assert_true(link != 0);
    assert_reason(&w, 0, REJECTED, "foreign");
    assert_reason(&w, 2, REJECTED, "foreign");
    assert_null(world_effect(&w, 2, TRUST_EFFECT_AUTHENTICATED));

    world_forget_effects(&w);
    struct identity honest = w.nodes[1].identity;
    memcpy(w.nodes[1].identity.static_public, w.nodes[2].identity.static_public, 32);
    (void)world_dial(&w, 1, 0); /* the session shows another static key than the identity signed */
    assert_reason(&w, 0, REJECTED, "impostor");
    w.nodes[1].identity = honest;

    world_forget_effects(&w);
    trust_dial_psk(w.nodes[0].trust, &psk);
    w.nodes[5].identity = w.nodes[0].identity; /* a clone: same key, same disk, another boot */
    w.nodes[5].protocol_min = 1;
    w.nodes[5].protocol_max = 2;
    w.nodes[5].n_disk = w.nodes[0].n_disk;
    w.nodes[5].disk = malloc(w.nodes[0].n_disk);
    memcpy(w.nodes[5].disk, w.nodes[0].disk, w.nodes[0].n_disk);
    rng_seed(&w.nodes[5].rng, 4711);
    world_start(&w, 5);
    (void)world_dial(&w, 5, 0);
    assert_reason(&w, 0, REJECTED, "clone");
    /* Others see both boots and tell them apart: discovery makes a conflict of it. */
    assert_true(world_is_trusted(&w, world_dial(&w, 5, 1)));
    assert_true(world_effect(&w, 1, TRUST_EFFECT_AUTHENTICATED)->peer.self.boot_id ==
                w.nodes[5].boot_id);
    world_deinit(&w);
}

static void test_trust_versions_must_overlap(void **state)
{
    (void)state;
    static const struct {
        uint16_t min, max;
        int expected; /* common version, 0: none */
    } cases[] = {{1, 1, 1}, {2, 3, 2}, {1, 9, 2}, {3, 4, 0}, {0, 0, 0}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world w;
        world_init(&w, 2, 36);
        (void)world_admit(&w, 0, 1, false);
        world_stop(&w, 1);
        w.nodes[1].protocol_min = cases[i].min;
        w.nodes[1].protocol_max = cases[i].max;
        world_start(&w, 1);
        world_forget_effects(&w);
        uint64_t link = world_dial(&w, 1, 0);
        assert_int_equal(world_is_trusted(&w, link), cases[i].expected != 0);
        if (cases[i].expected)
            assert_int_equal(world_effect(&w, 0, TRUST_EFFECT_AUTHENTICATED)->peer.protocol,
                             cases[i].expected);
        else
            assert_reason(&w, 0, REJECTED, "incompatible");
        world_deinit(&w);
    }
}

static void test_trust_silent_session_is_closed(void **state)
{
    (void)state;
    struct world w;
    struct session_psk psk;
    world_init(&w, 2, 37);
    (void)world_admit(&w, 0, 1, false);
    trust_dial_psk(w.nodes[1].trust, &psk);
    struct trust_event up = {.kind = TRUST_SESSION_UP, .session = 200, .psk_tag = psk.tag};
    w.n_links = 200;
    w.links[200].end[0] = 1;
    w.links[200].up = true;
    assert_int_equal(world_step(&w, 0, up), ERR_OK);
    assert_true(trust_next_due(w.nodes[0].trust) == w.now_us + TRUST_INTRODUCE_US);
    world_pass_time(&w, TRUST_INTRODUCE_US - 1);
    assert_true(w.links[200].up);
    world_pass_time(&w, 1);
    assert_false(w.links[200].up);
    assert_reason(&w, 0, REJECTED, "timeout");
    world_deinit(&w);
}

/* Lost messages are made up for when digests are compared again. */
static bool lose_items(struct world *w, uint32_t number, struct world_message *m)
{
    (void)number;
    return m->to != (int)w->meddle_at;
}

static void test_trust_digests_make_up_for_lost_messages(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 4, 38);
    uint64_t link = world_admit(&w, 0, 1, false);
    w.meddle = lose_items;
    w.meddle_at = 1;
    uint64_t link2 = world_admit(&w, 0, 2, false);
    assert_true(world_is_trusted(&w, link) && world_is_trusted(&w, link2));
    assert_role(&w, 2, 1, NONE);
    w.meddle = NULL;
    world_pass_time(&w, TRUST_DIGEST_US);
    assert_role(&w, 2, 1, MEMBER);
    assert_same_view(&w, 1, 2);
    world_deinit(&w);
}

/* 1.8 */
static void test_trust_cluster_tag_is_known_to_members_only(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 3, 39);
    (void)world_admit(&w, 0, 1, false);
    uint8_t nonce[CLUSTER_TAG_NONCE_BYTES] = {1, 2, 3}, tag[CLUSTER_TAG_BYTES];
    trust_cluster_tag(w.nodes[0].trust, nonce, "swift-otter", tag);
    assert_memory_equal(tag, nonce, sizeof nonce);
    assert_true(trust_check_cluster_tag(w.nodes[1].trust, tag, sizeof tag, "swift-otter"));
    assert_false(trust_check_cluster_tag(w.nodes[1].trust, tag, sizeof tag, "swift-otte"));
    assert_false(trust_check_cluster_tag(w.nodes[1].trust, tag, sizeof tag - 1, "swift-otter"));
    assert_false(trust_check_cluster_tag(w.nodes[2].trust, tag, sizeof tag, "swift-otter"));
    for (size_t i = 0; i < sizeof tag; i++) {
        tag[i] ^= 4;
        assert_false(trust_check_cluster_tag(w.nodes[1].trust, tag, sizeof tag, "swift-otter"));
        tag[i] ^= 4;
    }
    /* A member that announces with an older secret is still known. */
    (void)world_admit(&w, 0, 2, false);
    assert_int_equal(world_revoke(&w, 0, 2), ERR_OK);
    assert_true(trust_check_cluster_tag(w.nodes[0].trust, tag, sizeof tag, "swift-otter"));
    world_deinit(&w);
}

/* Whatever happens to any one message (lost, cut, a byte changed, said twice), nobody becomes a
 * member that should not, nothing crashes, and a second try with a new token works. */
static bool meddle_once(struct world *w, uint32_t number, struct world_message *m)
{
    if (number != w->meddle_at || w->meddle_how == UINT32_MAX)
        return true;
    uint32_t how = w->meddle_how;
    w->meddle_how = UINT32_MAX;
    if (how == 0)
        return false;
    if (how == 1) {
        (void)world_step(
            w, m->to,
            (struct trust_event){
                .kind = TRUST_MESSAGE, .session = m->link, .bytes = m->bytes, .len = m->len});
        return true;
    }
    if (how < 10) {
        m->len = m->len * (how - 2) / 8;
        return true;
    }
    if (m->len)
        m->bytes[(how * 7919u) % m->len] ^= (uint8_t)(1u << how % 8);
    return true;
}

static void test_trust_survives_meddling_at_every_message(void **state)
{
    (void)state;
    enum { MESSAGES = 8, WAYS = 70 };
    uint32_t n_joined = 0, n_failed = 0;
    for (uint32_t at = 0; at < MESSAGES; at++) {
        for (uint32_t how = 0; how < WAYS; how++) {
            struct world w;
            enum err e;
            world_init(&w, 3, 40);
            (void)world_admit(&w, 0, 1, false);
            struct token token = world_invite(&w, 0, true);
            w.n_passed = 0;
            w.meddle = meddle_once;
            w.meddle_at = at;
            w.meddle_how = how;
            (void)world_join_with(&w, 2, 0, token, false, &e);
            world_pass_time(&w, TRUST_JOIN_US);
            enum trust_role role = world_role(&w, 2, 0);
            assert_true(role == TRUST_ROLE_NONE || role == TRUST_ROLE_WORKER);
            bool joined =
                hash256_eq(trust_cluster_id(w.nodes[2].trust), trust_cluster_id(w.nodes[0].trust));
            assert_true(!joined || role == TRUST_ROLE_WORKER);
            assert_role(&w, 1, 0, MEMBER);
            assert_int_equal(trust_n_members(w.nodes[0].trust), joined || role ? 3 : 2);
            n_joined += joined;
            n_failed += !joined;
            w.meddle = NULL;
            if (!joined) {
                token = world_invite(&w, 0, false);
                (void)world_join_with(&w, 2, 0, token, false, &e);
                assert_int_equal(e, ERR_OK);
                assert_role(&w, 2, 0, MEMBER);
            }
            assert_true(trust_is_member(w.nodes[2].trust, &w.nodes[0].identity.id));
            world_deinit(&w);
        }
    }
    assert_true(n_joined > 20 && n_failed > 100);
}

/* Frames of members before they are known, or a join on a session that is no join: closed. */
static void test_trust_closes_on_words_out_of_turn(void **state)
{
    (void)state;
    static const struct {
        const char *what;
        uint8_t bytes[8];
        uint32_t len;
    } cases[] = {
        {"join", {0x12, 0}, 2},      {"welcome", {0x1a, 0}, 2}, {"digest", {0x2a, 0}, 2},
        {"items", {0x32, 0}, 2},     {"secrets", {0x3a, 0}, 2}, {"garbage", {0xff, 0xff}, 2},
        {"introduce", {0x0a, 0}, 2},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct world w;
        struct session_psk psk;
        world_init(&w, 2, 41);
        (void)world_admit(&w, 0, 1, false);
        world_forget_effects(&w);
        trust_dial_psk(w.nodes[1].trust, &psk);
        uint64_t link = world_connect(&w, 1, 0, psk);
        (void)world_step(&w, 0,
                         (struct trust_event){.kind = TRUST_MESSAGE,
                                              .session = link,
                                              .bytes = cases[i].bytes,
                                              .len = cases[i].len});
        world_run(&w);
        assert_reason(&w, 0, REJECTED, "malformed");
        assert_false(w.links[link].up);
        world_deinit(&w);
    }
}

static void test_trust_refuses_damaged_disks(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 42);
    (void)world_admit(&w, 0, 1, false);
    struct world_node *node = &w.nodes[0];
    struct trust_options options = {.random = {world_fill, &node->rng}};
    struct trust *t = NULL;
    for (size_t i = 0; i < node->n_disk; i++) {
        assert_int_equal(trust_new(&node->identity, node->disk, i, &options, &t), ERR_CORRUPT);
        node->disk[i] ^= 1;
        assert_int_equal(trust_new(&node->identity, node->disk, node->n_disk, &options, &t),
                         ERR_CORRUPT);
        node->disk[i] ^= 1;
    }
    assert_null(t);
    world_deinit(&w);
}

static void test_trust_text_of_peers_is_made_harmless(void **state)
{
    (void)state;
    struct world w;
    world_init(&w, 2, 43);
    struct trust_self self = {.protocol_min = 1, .protocol_max = 2};
    memset(self.name, 'x', sizeof self.name - 1);
    memcpy(self.name, "\x1b[31m\xc3\xa9\xff\xc0\xaf\xe2\x82", 12);
    assert_int_equal(world_step(&w, 1, (struct trust_event){.kind = TRUST_SELF, .self = &self}),
                     ERR_OK);
    (void)world_admit(&w, 0, 1, false);
    const struct trust_effect *seen = world_effect(&w, 0, TRUST_EFFECT_AUTHENTICATED);
    assert_non_null(seen);
    assert_memory_equal(seen->peer.self.name, "?[31m\xc3\xa9?????x", 13);
    world_deinit(&w);
}

/* Random histories of six nodes: admissions, revocations, approvals, restarts, departures, links
 * that come and go, messages that are lost. Once all can talk again, those who belong together see
 * the same. */
static bool lose_some(struct world *w, uint32_t number, struct world_message *m)
{
    (void)m;
    return (number * 2654435761u >> 16) % 8 != w->meddle_at;
}

static void do_something(struct world *w, struct rng *rng)
{
    enum err e;
    int a = (int)rng_below(rng, WORLD_NODES), b = (int)rng_below(rng, WORLD_NODES);
    struct trust_event event = {.key = w->nodes[b].identity.id, .worker = rng_below(rng, 4) == 0};
    switch (rng_below(rng, 12)) {
    case 0:
    case 1:
    case 2:
        event.kind = TRUST_INVITE;
        if (a != b && world_step(w, a, event) == ERR_OK)
            (void)world_join_with(w, b, a, w->nodes[a].token, rng_below(rng, 8) == 0, &e);
        break;
    case 3:
        (void)world_revoke(w, a, b);
        break;
    case 4:
        event.kind = TRUST_APPROVE;
        (void)world_step(w, a, event);
        break;
    case 5:
        world_stop(w, a);
        world_start(w, a);
        break;
    case 6:
        event.kind = TRUST_LEAVE;
        if (rng_below(rng, 6) == 0)
            (void)world_step(w, a, event);
        break;
    case 7:
    case 8:
        if (w->n_links)
            world_drop_link(w, 1 + rng_below(rng, w->n_links));
        break;
    default:
        if (a != b)
            (void)world_dial(w, a, b);
    }
    world_run(w);
}

static uint32_t check_agreement(struct world *w)
{
    uint32_t n_trusted = 0;
    for (int a = 0; a < WORLD_NODES; a++) {
        for (int b = 0; b < WORLD_NODES; b++) {
            if (a == b || !trust_is_member(w->nodes[a].trust, &w->nodes[b].identity.id) ||
                !trust_is_member(w->nodes[b].trust, &w->nodes[a].identity.id) ||
                !hash256_eq(trust_cluster_id(w->nodes[a].trust),
                            trust_cluster_id(w->nodes[b].trust)))
                continue;
            assert_true(world_is_trusted(w, world_dial(w, a, b)));
            assert_same_view(w, a, b);
            n_trusted++;
        }
    }
    return n_trusted;
}

static void test_trust_agrees_after_random_histories(void **state)
{
    (void)state;
    uint32_t n_trusted = 0;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        static struct world w;
        struct rng rng;
        rng_seed(&rng, seed);
        world_init(&w, WORLD_NODES, 1000 + seed);
        w.meddle = lose_some;
        w.meddle_at = seed % 3 ? 99 : 3; /* every third seed loses one message in eight */
        for (int i = 0; i < 60 && w.n_links < WORLD_LINKS - 160; i++) {
            do_something(&w, &rng);
            world_forget_effects(&w);
        }
        w.meddle = NULL;
        world_pass_time(&w, TRUST_JOIN_US);
        for (int round = 0; round < 2; round++) {
            for (int a = 0; a < WORLD_NODES; a++) {
                for (int b = 0; b < WORLD_NODES; b++) {
                    if (a != b)
                        (void)world_dial(&w, a, b);
                }
            }
            world_forget_effects(&w);
            world_pass_time(&w, TRUST_DIGEST_US);
        }
        n_trusted += check_agreement(&w);
        world_deinit(&w);
    }
    assert_true(n_trusted > 200);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trust_founds_a_cluster_of_one_and_keeps_it),
        cmocka_unit_test(test_trust_join_makes_members_of_both),
        cmocka_unit_test(test_trust_strangers_share_no_key),
        cmocka_unit_test(test_trust_members_reach_each_other_through_their_chains),
        cmocka_unit_test(test_trust_worker_may_not_admit_or_revoke),
        cmocka_unit_test(test_trust_token_is_good_once),
        cmocka_unit_test(test_trust_two_holders_of_a_token_race),
        cmocka_unit_test(test_trust_token_expires),
        cmocka_unit_test(test_trust_token_expires_before_the_request),
        cmocka_unit_test(test_trust_token_dies_with_a_restart),
        cmocka_unit_test(test_trust_restart_between_used_and_sign),
        cmocka_unit_test(test_trust_says_nothing_before_the_disk),
        cmocka_unit_test(test_trust_join_needs_leave_in_a_cluster_of_more),
        cmocka_unit_test(test_trust_leave_starts_over_and_survives_a_restart),
        cmocka_unit_test(test_trust_revocation_closes_rotates_and_makes_pending),
        cmocka_unit_test(test_trust_sleeper_gets_the_newest_secret),
        cmocka_unit_test(test_trust_mutual_revocation_has_one_winner),
        cmocka_unit_test(test_trust_revoked_node_cannot_strike_back_through_a_new_key),
        cmocka_unit_test(test_trust_founder_and_oneself_are_not_revoked),
        cmocka_unit_test(test_trust_expelled_node_is_told_and_may_start_over),
        cmocka_unit_test(test_trust_starts_over_with_another_key),
        cmocka_unit_test(test_trust_holder_of_a_secret_is_no_member),
        cmocka_unit_test(test_trust_versions_must_overlap),
        cmocka_unit_test(test_trust_silent_session_is_closed),
        cmocka_unit_test(test_trust_digests_make_up_for_lost_messages),
        cmocka_unit_test(test_trust_cluster_tag_is_known_to_members_only),
        cmocka_unit_test(test_trust_survives_meddling_at_every_message),
        cmocka_unit_test(test_trust_closes_on_words_out_of_turn),
        cmocka_unit_test(test_trust_refuses_damaged_disks),
        cmocka_unit_test(test_trust_text_of_peers_is_made_harmless),
        cmocka_unit_test(test_trust_agrees_after_random_histories),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
