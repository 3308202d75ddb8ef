/* Conversations with whole node cores: joining with tokens that are not accepted
 * (PROTOCOL 1.3, 1.6), which addresses of a member are kept, and who is shown as discovered. Two
 * cores are joined by hand: what one dials reaches the other only at its true address. */
#include "agent/node.h"
#include "base/rng.h"
#include "base/util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>
#include <sodium.h>
#include <stdlib.h>
#include <string.h>

enum { QUEUE_MAX = 512, ENDS_MAX = 256, PORT = 26840, N = 2 };
#define SECOND UINT64_C(1000000)

struct mail {
    unsigned to;
    struct node_event event;
    uint8_t *bytes; /* owned */
};

struct world {
    struct rng rng[N];
    struct identity identity[N];
    struct node *node[N];
    uint64_t now_us;
    struct mail queue[QUEUE_MAX];
    uint32_t n_queue;
    uint64_t ends[N][ENDS_MAX]; /* ends[0][k] and ends[1][k] are the two ends of session k */
    uint32_t n_sessions, n_dials;
    enum node_down elsewhere; /* how a dial to another address ends */
    bool silent;              /* … or never does */
    char token[ERR_TEXT_MAX];
    bool answered;
    enum err answer;
    char text[ERR_TEXT_MAX];
    uint64_t answered_us;
};

static void fill(void *context, uint8_t *to, size_t n)
{
    struct rng *r = context;
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(r);
}

static struct address address_at(unsigned host)
{
    return (struct address){.family = 4, .ip = {192, 0, 2, (uint8_t)host}, .port = PORT};
}

static struct address home(unsigned who)
{
    return address_at(who + 1);
}

static bool is_home(const struct address *a, unsigned who)
{
    struct address at = home(who);
    return memcmp(a->ip, at.ip, 4) == 0 && a->port == at.port;
}

static void post(struct world *w, unsigned to, const struct node_event *event)
{
    assert_true(w->n_queue < QUEUE_MAX);
    struct mail *m = &w->queue[w->n_queue++];
    *m = (struct mail){.to = to, .event = *event};
    if (event->len > 0) {
        m->bytes = malloc(event->len);
        assert_non_null(m->bytes);
        memcpy(m->bytes, event->bytes, event->len);
    }
}

static int session_at(const struct world *w, unsigned end, uint64_t session)
{
    for (uint32_t k = 0; session && k < w->n_sessions; k++) {
        if (w->ends[end][k] == session)
            return (int)k;
    }
    return -1;
}

static void on_dial(struct world *w, unsigned from, const struct node_effect *e)
{
    struct session_psk psks[SESSION_PSKS_MAX];
    unsigned to = 1 - from;
    w->n_dials++;
    if (!is_home(&e->address, to)) {
        if (!w->silent)
            post(w, from,
                 &(struct node_event){
                     .type = NODE_EVENT_SESSION_DOWN, .session = e->session, .down = w->elsewhere});
        return;
    }
    uint32_t n = node_psks(w->node[to], psks, SESSION_PSKS_MAX), at = 0;
    while (at < n && memcmp(psks[at].key, e->psk, sizeof e->psk) != 0)
        at++;
    if (at == n) { /* dropped without a word */
        post(w, from,
             &(struct node_event){
                 .type = NODE_EVENT_SESSION_DOWN, .session = e->session, .down = NODE_DOWN_DENIED});
        return;
    }
    uint32_t k = w->n_sessions++;
    assert_true(k < ENDS_MAX);
    w->ends[from][k] = e->session;
    w->ends[to][k] = UINT64_C(1) << 63 | (k + 1);
    struct node_event own = {.type = NODE_EVENT_SESSION_READY,
                             .session = e->session,
                             .address = e->address,
                             .psk_tag = e->psk_tag};
    struct node_event other = {.type = NODE_EVENT_SESSION_READY,
                               .session = w->ends[to][k],
                               .inbound = true,
                               .address = home(from),
                               .psk_tag = psks[at].tag};
    memcpy(own.peer_static, w->identity[to].static_public, sizeof own.peer_static);
    memcpy(other.peer_static, w->identity[from].static_public, sizeof other.peer_static);
    post(w, to, &other);
    post(w, from, &own);
}

static void on_effect(struct world *w, unsigned from, const struct node_effect *e)
{
    int k = e->type == NODE_EFFECT_CLOSE ? session_at(w, from, e->session) : -1;
    if (k >= 0)
        post(
            w, 1 - from,
            &(struct node_event){.type = NODE_EVENT_SESSION_DOWN, .session = w->ends[1 - from][k]});
    if (e->type == NODE_EFFECT_DIAL)
        on_dial(w, from, e);
    if (e->type == NODE_EFFECT_ANSWER && from == 0)
        memcpy(w->token, e->text, sizeof w->token);
    if (e->type == NODE_EFFECT_ANSWER && from == 1) {
        w->answered = true;
        w->answer = e->error;
        w->answered_us = w->now_us;
        memcpy(w->text, e->text, sizeof w->text);
    }
}

static void carry(struct world *w, unsigned from, const struct wire_message *m)
{
    uint64_t session = m->session ? m->session : node_session_of(w->node[from], &m->to);
    int k = session_at(w, from, session);
    struct address to;
    bool datagram = m->way != WAY_SESSION;
    if (k < 0 || (datagram && (!node_path_address(w->node[from], &m->to, m->path, &to) ||
                               !is_home(&to, 1 - from))))
        return;
    post(w, 1 - from,
         &(struct node_event){.type = datagram ? NODE_EVENT_DATAGRAM : NODE_EVENT_MESSAGE,
                              .session = w->ends[1 - from][k],
                              .address = home(from),
                              .channel = m->channel,
                              .bytes = m->bytes,
                              .len = m->len});
}

static void step(struct world *w, unsigned who, const struct node_event *event)
{
    struct node_update u = NODE_UPDATE_INIT;
    (void)node_step(w->node[who], event, w->now_us, &u);
    for (uint32_t i = 0; i < u.n_effects; i++)
        on_effect(w, who, &u.effects[i]);
    for (uint32_t i = 0; i < u.outbox.n; i++)
        carry(w, who, &u.outbox.messages[i]);
    node_update_deinit(&u);
}

static void drain(struct world *w)
{
    while (w->n_queue > 0) {
        struct mail m = w->queue[0];
        memmove(&w->queue[0], &w->queue[1], --w->n_queue * sizeof w->queue[0]);
        m.event.bytes = m.bytes;
        step(w, m.to, &m.event);
        free(m.bytes);
    }
}

static void pass(struct world *w, uint64_t us)
{
    uint64_t until = w->now_us + us;
    while (w->now_us < until) {
        uint64_t due = MIN_OF(node_next_due(w->node[0]), node_next_due(w->node[1]));
        w->now_us = MIN_OF(until, MAX_OF(due, w->now_us + 1000));
        for (unsigned i = 0; i < N; i++)
            step(w, i, &(struct node_event){.type = NODE_EVENT_TICK});
        drain(w);
    }
}

static void start_node(struct world *w, unsigned i, const struct node_options *more)
{
    struct hash256 machine = {{(uint8_t)(i + 1)}};
    struct err_text text;
    rng_seed(&w->rng[i], i + 1);
    identity_make((struct random_source){fill, &w->rng[i]}, &machine, &w->identity[i]);
    struct node_options o = {.identity = &w->identity[i],
                             .boot_id = i + 1,
                             .random = {fill, &w->rng[i]},
                             .version = "0.1.0",
                             .control_port = PORT,
                             .data_port = PORT + 1,
                             .arithmetic_version = 1001,
                             .wall_ms = 1800000000000};
    (void)snprintf(o.name, sizeof o.name, "n%u", i);
    if (more) {
        o.remembered = more->remembered;
        o.remembered_ids = more->remembered_ids;
        o.n_remembered = more->n_remembered;
    }
    assert_int_equal(node_new(&o, w->now_us, &w->node[i], &text), ERR_OK);
}

static int setup(void **state)
{
    struct world *w = calloc(1, sizeof *w);
    if (!w || sodium_init() < 0)
        return -1;
    w->now_us = SECOND;
    for (unsigned i = 0; i < N; i++)
        start_node(w, i, NULL);
    pass(w, 6 * SECOND);
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    struct world *w = *state;
    for (uint32_t i = 0; i < w->n_queue; i++)
        free(w->queue[i].bytes);
    for (unsigned i = 0; i < N; i++)
        node_free(w->node[i]);
    free(w);
    return 0;
}

/* Node 1 hears of `host` as a person's --peer (given), or from mDNS. */
static void find(struct world *w, const char *instance, unsigned host, bool given)
{
    struct node_found f = {.given = given, .n_addresses = 1};
    (void)snprintf(f.instance, sizeof f.instance, "%s", instance);
    (void)snprintf(f.name, sizeof f.name, "%s", instance);
    f.addresses[0] = address_at(host);
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
    drain(w);
}

/* Node 1 is told of node 0 by `n` addresses, of which only the last leads to it: the others say
 * nothing. */
static void find_among_silent(struct world *w, uint32_t n)
{
    struct node_found f = {.given = true, .n_addresses = n, .instance = "peer:many"};
    for (uint32_t i = 0; i < n; i++)
        f.addresses[i] = address_at(i + 1 < n ? 50 + i : 1);
    w->silent = true;
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
    drain(w);
}

static void make_token(struct world *w, uint64_t ttl_us)
{
    step(w, 0, &(struct node_event){.type = NODE_EVENT_INVITE, .call = 1, .ttl_us = ttl_us});
    assert_int_equal(strlen(w->token), 28);
}

static uint64_t join(struct world *w, const char *token, uint64_t wait_us)
{
    uint64_t began_us = w->now_us;
    w->answered = false;
    step(w, 1, &(struct node_event){.type = NODE_EVENT_JOIN, .call = 2, .text = token});
    drain(w);
    while (!w->answered && w->now_us < began_us + wait_us)
        pass(w, SECOND / 10);
    return w->answered ? w->answered_us - began_us : UINT64_MAX;
}

static void check_not_accepted(struct world *w, uint64_t took_us)
{
    assert_true(w->answered);
    assert_int_equal(w->answer, ERR_DENIED);
    assert_non_null(strstr(w->text, "token"));
    assert_non_null(strstr(w->text, "covey invite"));
    assert_true(took_us <= 3 * SECOND);
}

/* ---- joining ---- */

static void test_a_good_token_joins(void **state)
{
    struct world *w = *state;
    find(w, "peer:a", 1, true);
    make_token(w, 600 * SECOND);
    assert_true(join(w, w->token, 3 * SECOND) < 3 * SECOND);
    assert_int_equal(w->answer, ERR_OK);
}

static void test_an_expired_token_is_denied_soon(void **state)
{
    struct world *w = *state;
    make_token(w, SECOND);
    pass(w, 2 * SECOND);
    find(w, "peer:a", 1, true);
    check_not_accepted(w, join(w, w->token, 30 * SECOND));
}

/* Addresses that swallow everything cost a quarter of a second each, whatever becomes of the token.
 */
static void test_silent_addresses_do_not_delay_a_join(void **state)
{
    struct world *w = *state;
    for (uint32_t n = 2; n <= NODE_ADDRESSES_MAX; n += 3) {
        find_among_silent(w, n);
        make_token(w, SECOND);
        pass(w, 5 * SECOND);
        check_not_accepted(w, join(w, w->token, 30 * SECOND)); /* it has expired */
    }
    make_token(w, 600 * SECOND);
    assert_true(join(w, w->token, 30 * SECOND) < 3 * SECOND);
    assert_int_equal(w->answer, ERR_OK);
    pass(w, 30 * SECOND);
    assert_int_not_equal(node_session_of(w->node[1], &w->identity[0].id), 0);
}

static void test_a_used_token_is_denied_soon(void **state)
{
    struct world *w = *state;
    find(w, "peer:a", 1, true);
    make_token(w, 600 * SECOND);
    (void)join(w, w->token, 3 * SECOND);
    assert_int_equal(w->answer, ERR_OK);
    step(w, 1, &(struct node_event){.type = NODE_EVENT_LEAVE, .call = 3});
    drain(w);
    pass(w, 5 * SECOND);
    check_not_accepted(w, join(w, w->token, 30 * SECOND));
}

static void test_a_malformed_token_is_denied_at_once(void **state)
{
    struct world *w = *state;
    find(w, "peer:a", 1, true);
    make_token(w, 600 * SECOND);
    w->token[5] = w->token[5] == '0' ? '1' : '0';
    assert_int_equal(join(w, w->token, SECOND), 0);
    check_not_accepted(w, 0);
    assert_int_equal(join(w, "hello", SECOND), 0);
    check_not_accepted(w, 0);
}

static void test_an_unreachable_host_is_no_fault_of_the_token(void **state)
{
    struct world *w = *state;
    make_token(w, 600 * SECOND);
    find(w, "peer:nobody", 99, true);
    for (int i = 0; i < 3; i++) {
        w->elsewhere = i == 0 ? NODE_DOWN_REFUSED : NODE_DOWN_TIMED_OUT;
        w->silent = i == 2;
        uint64_t took_us = join(w, w->token, 30 * SECOND);
        assert_int_equal(w->answer, ERR_TIMEOUT);
        assert_in_range(took_us, 20 * SECOND, 21 * SECOND);
    }
}

static void test_a_denial_elsewhere_does_not_hurt_where_the_issuer_is_slow(void **state)
{
    struct world *w = *state;
    make_token(w, 600 * SECOND);
    find(w, "peer:wrong", 98, true);
    w->elsewhere = NODE_DOWN_DENIED;
    w->answered = false;
    step(w, 1, &(struct node_event){.type = NODE_EVENT_JOIN, .call = 2, .text = w->token});
    drain(w);
    pass(w, SECOND * 9 / 10); /* its name is looked up meanwhile */
    assert_false(w->answered);
    find(w, "peer:a", 1, true);
    pass(w, SECOND);
    assert_true(w->answered);
    assert_int_equal(w->answer, ERR_OK);
}

static void test_without_an_announced_invitation_all_that_are_found_are_asked(void **state)
{
    struct world *w = *state;
    make_token(w, SECOND);
    pass(w, 2 * SECOND);
    find(w, "covey-1", 1, false); /* shows no invitation any more */
    check_not_accepted(w, join(w, w->token, 30 * SECOND));
    make_token(w, 600 * SECOND); /* not announced yet */
    assert_true(join(w, w->token, 30 * SECOND) < 3 * SECOND);
    assert_int_equal(w->answer, ERR_OK);
}

static void test_with_nobody_found_the_join_times_out(void **state)
{
    struct world *w = *state;
    make_token(w, 600 * SECOND);
    uint64_t took_us = join(w, w->token, 30 * SECOND);
    assert_int_equal(w->answer, ERR_TIMEOUT);
    assert_in_range(took_us, 20 * SECOND, 21 * SECOND);
    assert_int_equal(w->n_dials, 0);
}

/* ---- addresses ---- */

static void pair(struct world *w)
{
    find(w, "peer:a", 1, true);
    make_token(w, 600 * SECOND);
    (void)join(w, w->token, 3 * SECOND);
    assert_int_equal(w->answer, ERR_OK);
    pass(w, 5 * SECOND);
}

static void test_a_token_of_the_own_cluster_is_no_fault(void **state)
{
    struct world *w = *state;
    struct node_local local = {.cores = 1};
    pair(w);
    step(w, 0, &(struct node_event){.type = NODE_EVENT_LOCAL, .local = &local});
    make_token(w, 600 * SECOND);
    pass(w, 3 * SECOND); /* it is gossiped */
    assert_int_equal(join(w, w->token, SECOND), 0);
    assert_int_equal(w->answer, ERR_OK);
    assert_non_null(strstr(w->text, "a member already"));
    assert_non_null(strstr(w->text, "own cluster"));
    struct token other = {{1, 2, 3}};
    char text[TOKEN_TEXT_MAX];
    token_format(&other, text);
    assert_int_equal(join(w, text, SECOND), 0);
    assert_int_equal(w->answer, ERR_DENIED);
    assert_non_null(strstr(w->text, "--leave"));
}

static struct node_view view_of(struct world *w, unsigned of)
{
    static struct node_view views[64];
    uint32_t n = node_views(w->node[1 - of], views, 64);
    for (uint32_t i = 0; i < n; i++) {
        if (node_id_eq(&views[i].id, &w->identity[of].id))
            return views[i];
    }
    fail_msg("n%u does not know n%u", 1 - of, of);
    return views[0];
}

static uint32_t n_up(const struct node_view *v)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < v->n_paths; i++)
        n += v->paths[i].up;
    return n;
}

static bool has_path(const struct node_view *v, unsigned host)
{
    struct address a = address_at(host);
    for (uint32_t i = 0; i < v->n_paths; i++) {
        if (memcmp(v->paths[i].address.ip, a.ip, 4) == 0)
            return true;
    }
    return false;
}

/* mDNS names addresses that do not lead to the node; the one that does is not pushed out. */
static void announce_dead(struct world *w, unsigned first_host)
{
    struct node_found f = {.instance = "peer:a", .name = "n0"};
    for (unsigned i = 0; i < NODE_ADDRESSES_MAX; i++)
        f.addresses[f.n_addresses++] = address_at(first_host + i);
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
    drain(w);
}

static void test_dead_addresses_do_not_push_out_the_one_that_works(void **state)
{
    struct world *w = *state;
    w->elsewhere = NODE_DOWN_TIMED_OUT;
    pair(w);
    struct node_view v = view_of(w, 0);
    assert_int_equal(n_up(&v), 1);
    for (unsigned round = 0; round < 5; round++) {
        announce_dead(w, 20 + 8 * round);
        pass(w, 3 * SECOND);
        v = view_of(w, 0);
        assert_true(has_path(&v, 1));
        assert_int_equal(n_up(&v), 1);
        assert_string_equal(v.state, "alive");
    }
    assert_int_equal(v.n_paths, NODE_ADDRESSES_MAX);
    assert_true(has_path(&v, 20 + 8 * 4 + 7)); /* the newest of the others */
}

static void test_addresses_long_dead_are_forgotten(void **state)
{
    struct world *w = *state;
    w->elsewhere = NODE_DOWN_TIMED_OUT;
    pair(w);
    announce_dead(w, 20);
    pass(w, 60 * SECOND);
    struct node_view v = view_of(w, 0);
    assert_int_equal(v.n_paths, NODE_ADDRESSES_MAX);
    pass(w, 660 * SECOND);
    v = view_of(w, 0);
    assert_int_equal(v.n_paths, 1);
    assert_int_equal(n_up(&v), 1);
}

static void test_only_addresses_that_led_to_a_member_are_remembered(void **state)
{
    struct world *w = *state;
    struct node_id ids[64];
    struct address list[64];
    w->elsewhere = NODE_DOWN_TIMED_OUT;
    pair(w);
    announce_dead(w, 20);
    assert_int_equal(node_remembered(w->node[1], ids, list, 64), 1);
    assert_true(is_home(&list[0], 0));
}

/* ---- who is discovered ---- */

static uint32_t n_discovered(struct world *w, unsigned who)
{
    static struct node_view views[2 * NODE_FOUND_MAX];
    uint32_t n = node_views(w->node[who], views, 2 * NODE_FOUND_MAX), k = 0;
    for (uint32_t i = 0; i < n; i++)
        k += strcmp(views[i].state, "discovered") == 0;
    return k;
}

static void test_a_stranger_with_two_names_is_shown_once(void **state)
{
    struct world *w = *state;
    find(w, "covey-old", 50, false);
    assert_int_equal(n_discovered(w, 1), 1);
    pass(w, SECOND);
    find(w, "covey-new", 50, false);
    find(w, "peer:stranger", 50, true);
    assert_int_equal(n_discovered(w, 1), 1);
    find(w, "covey-other", 51, false);
    assert_int_equal(n_discovered(w, 1), 2);
    struct node_found gone = {.instance = "covey-new", .gone = true};
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &gone});
    gone = (struct node_found){.instance = "covey-other", .gone = true};
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &gone});
    assert_int_equal(n_discovered(w, 1), 1); /* the old name has not expired */
}

static void test_a_member_is_not_also_discovered(void **state)
{
    struct world *w = *state;
    w->elsewhere = NODE_DOWN_DENIED;
    find(w, "covey-before", 1, false); /* announced before it was a member */
    pair(w);
    assert_int_equal(n_discovered(w, 1), 0);
    find(w, "covey-late", 1, false); /* an old announcement that arrives late */
    pass(w, SECOND);
    assert_int_equal(n_discovered(w, 1), 0);
}

static bool is_shown(const struct world *w, unsigned who, const char *name)
{
    static struct node_view views[2 * NODE_FOUND_MAX];
    uint32_t n = node_views(w->node[who], views, 2 * NODE_FOUND_MAX);
    for (uint32_t i = 0; i < n; i++) {
        if (strcmp(views[i].name, name) == 0)
            return true;
    }
    return false;
}

static void stranger(struct world *w, unsigned k)
{
    struct node_found f = {.n_addresses = 1, .n_cluster_tag = NODE_TAG_MAX};
    (void)snprintf(f.instance, sizeof f.instance, "flood-%u", k);
    (void)snprintf(f.name, sizeof f.name, "flood-%u", k);
    f.addresses[0] =
        (struct address){.family = 4, .ip = {10, 1, (uint8_t)(k >> 8), (uint8_t)k}, .port = PORT};
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &f});
    drain(w);
}

/* Ten thousand names that nothing vouches for: they push out each other, not the node that a person
 * gave nor the one whose tag is ours; and who comes after them is found. */
static void test_a_flood_of_names_pushes_out_its_own(void **state)
{
    struct world *w = *state;
    w->elsewhere = NODE_DOWN_DENIED;
    pair(w);
    find(w, "peer:given", 60, true);
    struct node_found ours = {.instance = "covey-ours", .name = "ours", .n_addresses = 1};
    uint8_t invite[NODE_TAG_MAX];
    uint32_t n_invite = 0;
    node_tags(w->node[0], ours.instance, ours.cluster_tag, &ours.n_cluster_tag, invite, &n_invite);
    ours.addresses[0] = address_at(61);
    step(w, 1, &(struct node_event){.type = NODE_EVENT_FOUND, .found = &ours});
    drain(w);
    for (unsigned k = 0; k < 10000; k++)
        stranger(w, k);
    /* not shown as strangers: announcements of the member, and the one whose tag is ours */
    assert_in_range(n_discovered(w, 1), NODE_FOUND_MAX - 4, NODE_FOUND_MAX);
    assert_true(is_shown(w, 1, "peer:given"));
    assert_false(is_shown(w, 1, "flood-0"));
    assert_true(is_shown(w, 1, "flood-9999"));
    assert_true(node_trusts_found(w->node[1], "covey-ours"));
    assert_true(node_trusts_found(w->node[1], "peer:given"));
    assert_false(node_trusts_found(w->node[1], "flood-9999"));
    find(w, "newcomer", 62, false);
    assert_true(is_shown(w, 1, "newcomer"));
}

#define CASE(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_a_good_token_joins),
        CASE(test_an_expired_token_is_denied_soon),
        CASE(test_silent_addresses_do_not_delay_a_join),
        CASE(test_a_token_of_the_own_cluster_is_no_fault),
        CASE(test_a_used_token_is_denied_soon),
        CASE(test_a_malformed_token_is_denied_at_once),
        CASE(test_an_unreachable_host_is_no_fault_of_the_token),
        CASE(test_a_denial_elsewhere_does_not_hurt_where_the_issuer_is_slow),
        CASE(test_without_an_announced_invitation_all_that_are_found_are_asked),
        CASE(test_with_nobody_found_the_join_times_out),
        CASE(test_a_flood_of_names_pushes_out_its_own),
        CASE(test_dead_addresses_do_not_push_out_the_one_that_works),
        CASE(test_addresses_long_dead_are_forgotten),
        CASE(test_only_addresses_that_led_to_a_member_are_remembered),
        CASE(test_a_stranger_with_two_names_is_shown_once),
        CASE(test_a_member_is_not_also_discovered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
