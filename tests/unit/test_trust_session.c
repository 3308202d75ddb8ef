/* Trust over real sealed sessions: what the agent will do, with bytes instead of sockets. */
#include "base/rng.h"
#include "proto/session.h"
#include "proto/trust.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

struct end {
    struct rng rng;
    struct identity identity;
    struct trust *trust;
    struct session *session;
    struct token token;
    bool authenticated, joined, closed;
};

static void fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

static enum err step(struct end *e, struct trust_event event)
{
    struct trust_update u = TRUST_UPDATE_INIT;
    event.now_us = 1;
    enum err result = trust_step(e->trust, &event, &u);
    e->token = u.token;
    for (uint32_t i = 0; i < u.out.n; i++) {
        assert_int_equal(u.out.messages[i].channel, CHANNEL_TRUST);
        assert_int_equal(session_send(e->session, CHANNEL_TRUST, 0, u.out.messages[i].bytes,
                                      u.out.messages[i].len),
                         ERR_OK);
    }
    for (uint32_t i = 0; i < u.n_effects; i++) {
        e->authenticated |= u.effects[i].kind == TRUST_EFFECT_AUTHENTICATED;
        e->joined |= u.effects[i].kind == TRUST_EFFECT_JOINED;
        e->closed |= u.effects[i].kind == TRUST_EFFECT_CLOSE;
    }
    trust_update_deinit(&u);
    return result;
}

static void end_init(struct end *e, uint64_t seed)
{
    struct hash256 machine = {{1}};
    memset(e, 0, sizeof *e);
    rng_seed(&e->rng, seed);
    struct trust_options options = {.self = {.boot_id = seed,
                                             .name = "n",
                                             .version = "1",
                                             .protocol_min = 1,
                                             .protocol_max = 1},
                                    .random = {fill, &e->rng}};
    identity_make(options.random, &machine, &e->identity);
    assert_int_equal(trust_new(&e->identity, NULL, 0, &options, &e->trust), ERR_OK);
    assert_int_equal(step(e, (struct trust_event){.kind = TRUST_TICK}), ERR_OK);
}

static void end_deinit(struct end *e)
{
    session_free(e->session);
    trust_free(e->trust);
}

static void open_session(struct end *e, enum session_role role, const struct session_psk *psk)
{
    struct session_psk psks[SESSION_PSKS_MAX];
    uint32_t n = trust_psks(e->trust, 1, psks);
    session_free(e->session);
    e->authenticated = e->joined = e->closed = false;
    assert_int_equal(
        session_new(&(struct session_options){.role = role,
                                              .static_public = e->identity.static_public,
                                              .static_secret = e->identity.static_secret,
                                              .psks = psk ? psk : psks,
                                              .n_psks = psk ? 1 : n,
                                              .random = {fill, &e->rng}},
                    &e->session),
        ERR_OK);
}

/* Passes all that `from` has to say; the first failure of the receiver. */
static enum err pass(struct end *from, struct end *to, size_t *ret_n)
{
    size_t n, at = 0;
    const uint8_t *out = session_output(from->session, &n);
    uint8_t *bytes = malloc(n ? n : 1);
    if (n)
        memcpy(bytes, out, n);
    session_output_consume(from->session, n);
    *ret_n = n;
    enum err e = ERR_OK;
    while (at < n && e == ERR_OK) {
        size_t used;
        struct session_event event;
        e = session_feed(to->session, bytes + at, n - at, &used, &event);
        at += used;
        if (event.kind == SESSION_EVENT_READY) {
            struct trust_event up = {
                .kind = TRUST_SESSION_UP, .session = 1, .psk_tag = event.psk_tag};
            memcpy(up.peer_static, event.peer_static, sizeof up.peer_static);
            (void)step(to, up);
        } else if (event.kind == SESSION_EVENT_FRAME) {
            assert_int_equal(event.channel, CHANNEL_TRUST);
            (void)step(to, (struct trust_event){.kind = TRUST_MESSAGE,
                                                .session = 1,
                                                .bytes = event.bytes,
                                                .len = event.len});
            while (trust_next_due(to->trust) <= 1)
                (void)step(to, (struct trust_event){.kind = TRUST_TICK});
        }
    }
    free(bytes);
    return e;
}

static enum err run(struct end *a, struct end *b)
{
    for (size_t n = 1, m = 1; n + m > 0;) {
        enum err e = pass(a, b, &n);
        if (e == ERR_OK)
            e = pass(b, a, &m);
        if (e != ERR_OK)
            return e;
    }
    return ERR_OK;
}

static void close_both(struct end *a, struct end *b)
{
    (void)step(a, (struct trust_event){.kind = TRUST_SESSION_DOWN, .session = 1});
    (void)step(b, (struct trust_event){.kind = TRUST_SESSION_DOWN, .session = 1});
}

static void test_trust_joins_and_meets_again_over_sealed_sessions(void **state)
{
    (void)state;
    struct end issuer, joiner, stranger;
    struct session_psk psk;
    size_t n;
    end_init(&issuer, 1);
    end_init(&joiner, 2);
    end_init(&stranger, 3);
    assert_int_equal(step(&issuer, (struct trust_event){.kind = TRUST_INVITE}), ERR_OK);
    assert_int_equal(step(&joiner, (struct trust_event){.kind = TRUST_JOIN, .token = issuer.token}),
                     ERR_OK);
    assert_true(trust_join_psk(joiner.trust, &psk));
    open_session(&issuer, SESSION_RESPONDER, NULL);
    open_session(&joiner, SESSION_INITIATOR, &psk);
    assert_int_equal(run(&joiner, &issuer), ERR_OK);
    assert_true(issuer.authenticated && joiner.authenticated && joiner.joined);
    assert_true(trust_is_member(issuer.trust, &joiner.identity.id));
    close_both(&issuer, &joiner);

    /* The spent token opens nothing: the very first message is dropped in silence. */
    open_session(&issuer, SESSION_RESPONDER, NULL);
    open_session(&stranger, SESSION_INITIATOR, &psk);
    assert_int_equal(run(&stranger, &issuer), ERR_DENIED);
    (void)session_output(issuer.session, &n);
    assert_int_equal(n, 0);
    /* Nor does the stranger's own secret. */
    trust_dial_psk(stranger.trust, &psk);
    open_session(&issuer, SESSION_RESPONDER, NULL);
    open_session(&stranger, SESSION_INITIATOR, &psk);
    assert_int_equal(run(&stranger, &issuer), ERR_DENIED);

    for (int i = 0; i < 2; i++) {
        struct end *from = i ? &issuer : &joiner, *to = i ? &joiner : &issuer;
        trust_dial_psk(from->trust, &psk);
        open_session(to, SESSION_RESPONDER, NULL);
        open_session(from, SESSION_INITIATOR, &psk);
        assert_int_equal(run(from, to), ERR_OK);
        assert_true(from->authenticated && to->authenticated);
        close_both(from, to);
    }
    end_deinit(&issuer);
    end_deinit(&joiner);
    end_deinit(&stranger);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trust_joins_and_meets_again_over_sealed_sessions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
