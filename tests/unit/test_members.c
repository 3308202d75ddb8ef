/* What follows from a set of records and revocations: against a plain reading of the rules in
 * proto/members.h on small random clusters, in any order of arrival. */
#include "base/rng.h"
#include "base/util.h"
#include "proto/members.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { N = 7, ITEMS = 24, NEVER = 1000 };

struct statement {
    enum item_kind kind;
    int issuer, subject;
    bool may_admit;
    uint8_t body[512], signature[IDENTITY_SIGNATURE_BYTES];
    size_t n_body;
};

struct room {
    struct rng rng;
    struct identity ids[N]; /* in order of key; one of them is the founder */
    int founder;
    struct hash256 cluster;
    struct statement statements[ITEMS];
    int n;
};

static void fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

static int compare_ids(const void *a, const void *b)
{
    return node_id_cmp(&((const struct identity *)a)->id, &((const struct identity *)b)->id);
}

/* Makes the statement with a set of its own in which the issuer has authority, and copies it out.
 */
static void make_statement(struct room *room, struct statement *s)
{
    struct members *m;
    assert_int_equal(members_new(&room->cluster, &room->ids[s->issuer].id, &m), ERR_OK);
    enum err e =
        s->kind == ITEM_RECORD
            ? members_admit(m, &room->ids[s->issuer], &room->ids[s->subject].id, s->may_admit)
            : members_revoke(m, &room->ids[s->issuer], &room->ids[s->subject].id);
    assert_int_equal(e, ERR_OK);
    const struct item *item = members_item(m, 0);
    assert_true(item->n_body <= sizeof s->body);
    memcpy(s->body, item->body, item->n_body);
    memcpy(s->signature, item->signature, sizeof s->signature);
    s->n_body = item->n_body;
    members_free(m);
}

static void room_init(struct room *room, uint64_t seed)
{
    struct hash256 machine = {{0}};
    memset(room, 0, sizeof *room);
    rng_seed(&room->rng, seed);
    for (int i = 0; i < N; i++)
        identity_make((struct random_source){fill, &room->rng}, &machine, &room->ids[i]);
    qsort(room->ids, N, sizeof room->ids[0], compare_ids);
    fill(&room->rng, room->cluster.bytes, sizeof room->cluster.bytes);
    room->founder = (int)rng_below(&room->rng, N);
    room->n = 6 + (int)rng_below(&room->rng, ITEMS - 6);
    for (int i = 0; i < room->n; i++) {
        struct statement *s = &room->statements[i];
        s->kind = rng_below(&room->rng, 5) ? ITEM_RECORD : ITEM_REVOCATION;
        s->issuer = rng_below(&room->rng, 5) ? (int)rng_below(&room->rng, N) : room->founder;
        do
            s->subject = (int)rng_below(&room->rng, N);
        while (s->subject == s->issuer);
        s->may_admit = rng_below(&room->rng, 3) != 0;
        make_statement(room, s);
    }
}

/* Adds the statements in a random order, again and again until no more is taken in. */
static struct members *gather(struct room *room)
{
    struct members *m;
    int order[ITEMS];
    assert_int_equal(members_new(&room->cluster, &room->ids[room->founder].id, &m), ERR_OK);
    for (int i = 0; i < room->n; i++) {
        int j = (int)rng_below(&room->rng, (uint64_t)i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    for (bool any = true; any;) {
        any = false;
        for (int i = 0; i < room->n; i++) {
            const struct statement *s = &room->statements[order[i]];
            bool is_new;
            enum err e = members_add(m, s->kind, s->body, s->n_body, s->signature, &is_new);
            assert_true(e == ERR_OK || e == ERR_DENIED);
            any = any || is_new;
        }
    }
    assert_int_equal(members_settle(m), ERR_OK);
    return m;
}

/* The shortest chain of authority to x that avoids the nodes in `out`, by trying all lengths. */
static int authority(const struct room *room, int x, unsigned out, int length)
{
    if (out >> x & 1)
        return NEVER;
    if (x == room->founder)
        return 0;
    int best = NEVER;
    for (int i = 0; i < room->n && length > 0; i++) {
        const struct statement *s = &room->statements[i];
        if (s->kind != ITEM_RECORD || s->subject != x || !s->may_admit)
            continue;
        int before = authority(room, s->issuer, out, MIN_OF(length, best) - 1);
        best = MIN_OF(best, before + 1);
    }
    return best;
}

static bool revokes(const struct room *room, int issuer, int subject)
{
    for (int i = 0; i < room->n; i++) {
        const struct statement *s = &room->statements[i];
        if (s->kind == ITEM_REVOCATION && s->issuer == issuer && s->subject == subject)
            return authority(room, issuer, 0, N) < NEVER;
    }
    return false;
}

static bool wins(const struct room *room, int a, int b)
{
    int depth_a = MIN_OF(authority(room, a, 0, N), NEVER);
    int depth_b = MIN_OF(authority(room, b, 0, N), NEVER);
    return depth_a != depth_b ? depth_a < depth_b : a < b;
}

static bool is_revoked(const struct room *room, int t)
{
    unsigned losers = 0;
    if (t == room->founder)
        return false;
    for (int x = 0; x < N; x++) {
        if (x != room->founder && revokes(room, t, x) && wins(room, t, x))
            losers |= 1u << x;
    }
    for (int i = 0; i < N; i++) {
        if (revokes(room, i, t) && authority(room, i, losers, N) < NEVER)
            return true;
    }
    return false;
}

static enum trust_role expected_role(const struct room *room, int x)
{
    unsigned revoked = 0;
    bool known = x == room->founder, any = false;
    for (int i = 0; i < N; i++)
        revoked |= (unsigned)is_revoked(room, i) << i;
    if (revoked >> x & 1)
        return TRUST_ROLE_REVOKED;
    if (authority(room, x, revoked, N) < NEVER)
        return TRUST_ROLE_MEMBER;
    for (int i = 0; i < room->n; i++) {
        const struct statement *s = &room->statements[i];
        if (s->kind != ITEM_RECORD || s->subject != x)
            continue;
        any = any || authority(room, s->issuer, revoked, N) < NEVER;
        known = known || authority(room, s->issuer, 0, N) < NEVER;
    }
    return any ? TRUST_ROLE_WORKER : known ? TRUST_ROLE_PENDING : TRUST_ROLE_NONE;
}

static void test_members_agree_with_the_rules_in_any_order(void **state)
{
    (void)state;
    int seen[TRUST_ROLE_REVOKED + 1] = {0};
    for (uint64_t seed = 1; seed <= 300; seed++) {
        static struct room room;
        room_init(&room, seed);
        struct members *a = gather(&room), *b = gather(&room), *copy;
        struct hash256 digest_a, digest_b;
        members_digest(a, &digest_a);
        members_digest(b, &digest_b);
        assert_true(hash256_eq(&digest_a, &digest_b));
        assert_int_equal(members_clone(a, &copy), ERR_OK);
        for (int x = 0; x < N; x++) {
            enum trust_role expected = expected_role(&room, x);
            enum trust_role role = members_role(a, &room.ids[x].id);
            if (role != expected)
                fail_msg("seed %d, node %d: %d, not %d", (int)seed, x, role, expected);
            assert_int_equal(members_role(b, &room.ids[x].id), expected);
            assert_int_equal(members_role(copy, &room.ids[x].id), expected);
            seen[expected]++;
        }
        members_free(a);
        members_free(b);
        members_free(copy);
    }
    for (int role = 0; role <= TRUST_ROLE_REVOKED; role++)
        print_message("role %d: %d\n", role, seen[role]);
    for (int role = 0; role <= TRUST_ROLE_REVOKED; role++)
        assert_true(seen[role] > 50);
}

/* A chain proves its end to one who knows the founder only; the items in their order do so for all.
 */
static void test_members_chain_convinces_a_newcomer(void **state)
{
    (void)state;
    int n_chains = 0;
    for (uint64_t seed = 1; seed <= 100; seed++) {
        static struct room room;
        room_init(&room, seed);
        struct members *m = gather(&room), *other;
        for (int x = 0; x < N; x++) {
            const struct item *chain[TRUST_CHAIN_MAX];
            bool is_new;
            uint32_t n = members_chain(m, &room.ids[x].id, chain);
            enum trust_role role = members_role(m, &room.ids[x].id);
            bool belongs = role == TRUST_ROLE_MEMBER || role == TRUST_ROLE_WORKER;
            assert_int_equal(n > 0, belongs && x != room.founder);
            assert_int_equal(members_new(&room.cluster, &room.ids[room.founder].id, &other),
                             ERR_OK);
            for (uint32_t i = 0; i < n; i++)
                assert_int_equal(members_add(other, chain[i]->kind, chain[i]->body,
                                             chain[i]->n_body, chain[i]->signature, &is_new),
                                 ERR_OK);
            assert_int_equal(members_settle(other), ERR_OK);
            if (belongs)
                assert_int_equal(members_role(other, &room.ids[x].id), role);
            members_free(other);
            n_chains += n > 1;
        }
        assert_int_equal(members_new(&room.cluster, &room.ids[room.founder].id, &other), ERR_OK);
        for (uint32_t i = 0; i < members_n_items(m); i++) {
            const struct item *item = members_item(m, i);
            bool is_new;
            assert_int_equal(
                members_add(other, item->kind, item->body, item->n_body, item->signature, &is_new),
                ERR_OK);
            assert_true(is_new);
        }
        struct hash256 digest_a, digest_b;
        members_digest(m, &digest_a);
        members_digest(other, &digest_b);
        assert_true(hash256_eq(&digest_a, &digest_b));
        members_free(other);
        members_free(m);
    }
    assert_true(n_chains > 50);
}

static void test_members_refuse_what_is_not_signed_for_this_cluster(void **state)
{
    (void)state;
    static struct room room, elsewhere;
    bool is_new;
    room_init(&room, 1);
    room_init(&elsewhere, 2);
    struct members *m;
    struct statement *s = &room.statements[0];
    *s = (struct statement){.kind = ITEM_RECORD,
                            .issuer = room.founder,
                            .subject = (room.founder + 1) % N,
                            .may_admit = true};
    make_statement(&room, s);
    assert_int_equal(members_new(&room.cluster, &room.ids[room.founder].id, &m), ERR_OK);
    for (size_t i = 0; i < s->n_body; i++) {
        s->body[i] ^= 1;
        assert_int_not_equal(members_add(m, s->kind, s->body, s->n_body, s->signature, &is_new),
                             ERR_OK);
        s->body[i] ^= 1;
    }
    s->signature[10] ^= 1;
    assert_int_equal(members_add(m, s->kind, s->body, s->n_body, s->signature, &is_new),
                     ERR_CORRUPT);
    s->signature[10] ^= 1;
    assert_int_equal(members_add(m, ITEM_REVOCATION, s->body, s->n_body, s->signature, &is_new),
                     ERR_CORRUPT);
    assert_int_equal(members_add(m, s->kind, s->body, 0, s->signature, &is_new), ERR_CORRUPT);
    assert_int_equal(members_add(m, s->kind, s->body, RECORD_BODY_MAX + 1, s->signature, &is_new),
                     ERR_CORRUPT);
    struct statement *foreign = &elsewhere.statements[0];
    assert_int_equal(
        members_add(m, foreign->kind, foreign->body, foreign->n_body, foreign->signature, &is_new),
        ERR_CORRUPT);
    assert_int_equal(members_n_items(m), 0);
    /* Fields that we do not know are kept, and the signature over them stays good. */
    s->body[s->n_body++] = 0x78; /* field 15, a number */
    s->body[s->n_body++] = 42;
    identity_sign(&room.ids[room.founder], "record", s->body, s->n_body, s->signature);
    assert_int_equal(members_add(m, s->kind, s->body, s->n_body, s->signature, &is_new), ERR_OK);
    assert_int_equal(members_item(m, 0)->n_body, s->n_body);
    assert_memory_equal(members_item(m, 0)->body, s->body, s->n_body);
    members_free(m);
}

/* The table's limits hold, and what is beyond them is refused rather than half taken in. */
static void test_members_stop_at_their_limits(void **state)
{
    (void)state;
    static struct room room;
    struct members *m;
    room_init(&room, 3);
    const struct identity *founder = &room.ids[room.founder];
    assert_int_equal(members_new(&room.cluster, &founder->id, &m), ERR_OK);
    enum err e = ERR_OK;
    uint32_t n = 0;
    while (e == ERR_OK) {
        struct node_id key;
        fill(&room.rng, key.bytes, sizeof key.bytes);
        e = members_admit(m, founder, &key, n % 2 == 0);
        n += e == ERR_OK;
    }
    assert_int_equal(e, ERR_LIMIT);
    assert_int_equal(members_settle(m), ERR_OK);
    assert_int_equal(n, TRUST_MEMBERS_MAX - 1);
    assert_int_equal(members_count(m), TRUST_MEMBERS_MAX);
    members_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_members_agree_with_the_rules_in_any_order),
        cmocka_unit_test(test_members_chain_convinces_a_newcomer),
        cmocka_unit_test(test_members_refuse_what_is_not_signed_for_this_cluster),
        cmocka_unit_test(test_members_stop_at_their_limits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
