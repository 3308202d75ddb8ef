/* The sealed session and the sealed datagrams: two ends in one process, bytes passed by hand. */
#include "base/buf.h"
#include "base/rng.h"
#include "proto/datagram.h"
#include "proto/noise.h"
#include "proto/session.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

static void make_psk(struct session_psk *psk, uint8_t byte, uint64_t tag)
{
    memset(psk->key, byte, sizeof psk->key);
    psk->tag = tag;
}

struct pair {
    struct rng rng;
    uint8_t secret[2][32], public_key[2][32];
    struct session *s[2];
    struct session_event ready[2];
};

/* The initiator has psk `byte`; the responder accepts 1, 2 and 3 under the tags 10, 20 and 30. */
static void pair_start(struct pair *p, uint64_t seed, uint8_t byte)
{
    memset(p, 0, sizeof *p);
    rng_seed(&p->rng, seed);
    struct session_psk psks[3], mine;
    for (uint8_t i = 0; i < 3; i++)
        make_psk(&psks[i], (uint8_t)(i + 1), (uint64_t)(i + 1) * 10);
    make_psk(&mine, byte, 77);
    for (int i = 0; i < 2; i++) {
        fill(&p->rng, p->secret[i], 32);
        noise_public_key(p->secret[i], p->public_key[i]);
        assert_int_equal(session_new(
                             &(struct session_options){
                                 .role = (enum session_role)i,
                                 .static_public = p->public_key[i],
                                 .static_secret = p->secret[i],
                                 .psks = i == SESSION_INITIATOR ? &mine : psks,
                                 .n_psks = i == SESSION_INITIATOR ? 1 : 3,
                                 .random = {fill, &p->rng},
                             },
                             &p->s[i]),
                         ERR_OK);
    }
}

static void pair_end(struct pair *p)
{
    session_free(p->s[0]);
    session_free(p->s[1]);
}

/* Takes all output of one end, as a copy. */
static size_t take_output(struct session *s, uint8_t *to, size_t max)
{
    size_t n;
    const uint8_t *bytes = session_output(s, &n);
    assert_true(n <= max);
    if (n)
        memcpy(to, bytes, n);
    session_output_consume(s, n);
    return n;
}

/* Passes what `from` has to say to the other end, in pieces of `piece` bytes; the last event. */
static enum err pass(struct pair *p, int from, size_t piece, struct session_event *ret)
{
    static uint8_t bytes[SESSION_OUTPUT_MAX];
    size_t n = take_output(p->s[from], bytes, sizeof bytes), at = 0;
    *ret = (struct session_event){.kind = SESSION_EVENT_NONE};
    while (at < n) {
        size_t used, k = MIN_OF(piece, n - at);
        struct session_event event;
        enum err e = session_feed(p->s[!from], bytes + at, k, &used, &event);
        if (e != ERR_OK)
            return e;
        at += used;
        if (event.kind != SESSION_EVENT_NONE)
            *ret = event;
    }
    return ERR_OK;
}

static void pair_ready(struct pair *p, size_t piece)
{
    struct session_event none;
    assert_int_equal(pass(p, 0, piece, &none), ERR_OK);
    assert_int_equal(pass(p, 1, piece, &p->ready[0]), ERR_OK);
    assert_int_equal(pass(p, 0, piece, &p->ready[1]), ERR_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(p->ready[i].kind, SESSION_EVENT_READY);
}

static void test_session_tells_peer_and_psk(void **state)
{
    (void)state;
    for (uint8_t psk = 1; psk <= 3; psk++) {
        struct pair p;
        pair_start(&p, psk, psk);
        pair_ready(&p, psk == 1 ? 1 : 1000);
        assert_memory_equal(p.ready[0].peer_static, p.public_key[1], 32);
        assert_memory_equal(p.ready[1].peer_static, p.public_key[0], 32);
        assert_int_equal(p.ready[0].psk_tag, 77);
        assert_int_equal(p.ready[1].psk_tag, psk * 10);
        uint8_t a[32], b[32], c[32];
        assert_int_equal(session_export(p.s[0], "probe", a), ERR_OK);
        assert_int_equal(session_export(p.s[1], "probe", b), ERR_OK);
        assert_int_equal(session_export(p.s[1], "data", c), ERR_OK);
        assert_memory_equal(a, b, 32);
        assert_memory_not_equal(a, c, 32);
        pair_end(&p);
    }
}

static void test_session_carries_frames_in_any_pieces(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 17, 1000, FRAME_PAYLOAD_MAX};
    static const size_t pieces[] = {1, 3, 4096, 1 << 20};
    static uint8_t payload[FRAME_PAYLOAD_MAX];
    struct pair p;
    pair_start(&p, 5, 2);
    assert_int_equal(session_send(p.s[0], 1, 0, payload, 1), ERR_AGAIN);
    pair_ready(&p, 7);
    for (size_t i = 0; i < ARRAY_LEN(sizes) * ARRAY_LEN(pieces); i++) {
        size_t n = sizes[i % ARRAY_LEN(sizes)], piece = pieces[i / ARRAY_LEN(sizes)];
        int from = (int)(i % 2);
        fill(&p.rng, payload, n);
        struct session_event event;
        assert_int_equal(session_send(p.s[from], (uint8_t)(i + 1), 9, payload, n), ERR_OK);
        assert_int_equal(pass(&p, from, piece, &event), ERR_OK);
        assert_int_equal(event.kind, SESSION_EVENT_FRAME);
        assert_int_equal(event.channel, i + 1);
        assert_int_equal(event.flags, 9);
        assert_int_equal(event.len, n);
        if (n)
            assert_memory_equal(event.bytes, payload, n);
    }
    assert_int_equal(session_send(p.s[0], 1, 0, payload, FRAME_PAYLOAD_MAX + 1), ERR_LIMIT);
    enum err e = ERR_OK;
    for (int i = 0; i < 100 && e == ERR_OK; i++)
        e = session_send(p.s[0], 1, 0, payload, FRAME_PAYLOAD_MAX);
    assert_int_equal(e, ERR_BUSY);
    pair_end(&p);
}

/* A stranger gets not one byte in answer. */
static void test_session_drops_strangers_at_the_first_message(void **state)
{
    (void)state;
    struct pair p;
    struct session_event event;
    size_t n;
    pair_start(&p, 6, 4);
    assert_int_equal(pass(&p, 0, 1000, &event), ERR_DENIED);
    (void)session_output(p.s[1], &n);
    assert_int_equal(n, 0);
    size_t used;
    uint8_t more[1] = {0};
    assert_int_equal(session_feed(p.s[1], more, 1, &used, &event), ERR_DENIED);
    pair_end(&p);

    static const struct {
        size_t at;
        uint8_t value;
        enum err expected;
    } cases[] = {{0, 'C', ERR_CORRUPT},
                 {6, 1, ERR_CORRUPT},
                 {7, 2, ERR_UNSUPPORTED},
                 {8, 0x55, ERR_DENIED},
                 {55, 0x55, ERR_DENIED}};
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        uint8_t first[SESSION_FIRST_BYTES];
        pair_start(&p, 7, 1);
        assert_int_equal(take_output(p.s[0], first, sizeof first), SESSION_FIRST_BYTES);
        first[cases[i].at] = first[cases[i].at] == cases[i].value ? 0xaa : cases[i].value;
        assert_int_equal(session_feed(p.s[1], first, sizeof first, &used, &event),
                         cases[i].expected);
        (void)session_output(p.s[1], &n);
        assert_int_equal(n, 0);
        pair_end(&p);
    }
}

/* A recorded first message is answered (it carries the psk) but leads nowhere; a recorded session
 * is refused at its third message. */
static void test_session_cannot_be_replayed(void **state)
{
    (void)state;
    struct pair p;
    uint8_t recorded[2][4096], scratch[4096];
    size_t n[2], used;
    struct session_event event;
    pair_start(&p, 8, 1);
    n[0] = take_output(p.s[0], recorded[0], sizeof recorded[0]);
    assert_int_equal(session_feed(p.s[1], recorded[0], n[0], &used, &event), ERR_OK);
    n[1] = take_output(p.s[1], scratch, sizeof scratch);
    assert_int_equal(session_feed(p.s[0], scratch, n[1], &used, &event), ERR_OK);
    assert_int_equal(session_send(p.s[0], 3, 0, (const uint8_t *)"secret", 6), ERR_OK);
    n[1] = take_output(p.s[0], recorded[1], sizeof recorded[1]);
    struct session_psk psk;
    make_psk(&psk, 1, 1);
    struct session *again;
    assert_int_equal(session_new(&(struct session_options){.role = SESSION_RESPONDER,
                                                           .static_public = p.public_key[1],
                                                           .static_secret = p.secret[1],
                                                           .psks = &psk,
                                                           .n_psks = 1,
                                                           .random = {fill, &p.rng}},
                                 &again),
                     ERR_OK);
    assert_int_equal(session_feed(again, recorded[0], n[0], &used, &event), ERR_OK);
    assert_int_equal(session_feed(again, recorded[1], n[1], &used, &event), ERR_DENIED);
    session_free(again);
    pair_end(&p);
}

/* Frames swapped, repeated, left out, cut or changed in any byte end the session. */
static void test_session_refuses_frames_out_of_order(void **state)
{
    (void)state;
    enum { SWAPPED, REPEATED, LEFT_OUT, CHANGED };
    const size_t frame = 6 + SESSION_FRAME_OVERHEAD;
    for (size_t i = 0; i < CHANGED + frame; i++) {
        struct pair p;
        static uint8_t bytes[2 * FRAME_PAYLOAD_MAX]; /* zeros follow, for a length that grew */
        size_t used, at = 0;
        struct session_event event;
        pair_start(&p, 9, 3);
        pair_ready(&p, 1000);
        for (int k = 0; k < 3; k++)
            assert_int_equal(session_send(p.s[0], 1, 0, (const uint8_t *)"abcdef", 6), ERR_OK);
        size_t n = take_output(p.s[0], bytes, sizeof bytes);
        assert_int_equal(n, 3 * frame);
        if (i == SWAPPED) {
            uint8_t keep[64];
            memcpy(keep, bytes, frame);
            memcpy(bytes, bytes + frame, frame);
            memcpy(bytes + frame, keep, frame);
        } else if (i == REPEATED) {
            memcpy(bytes + frame, bytes, frame);
        } else if (i == LEFT_OUT) {
            memcpy(bytes + frame, bytes + 2 * frame, frame);
        } else {
            bytes[i - CHANGED] ^= 1;
        }
        enum err e = ERR_OK;
        int n_frames = 0;
        while (at < sizeof bytes && e == ERR_OK) {
            e = session_feed(p.s[1], bytes + at, sizeof bytes - at, &used, &event);
            at += used;
            n_frames += event.kind == SESSION_EVENT_FRAME;
        }
        assert_int_not_equal(e, ERR_OK);
        assert_int_equal(n_frames, i == REPEATED || i == LEFT_OUT ? 1 : 0);
        pair_end(&p);
    }
}

static void test_session_refuses_lengths_before_it_allocates(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {0, 17, FRAME_PAYLOAD_MAX + 19, 1u << 30, UINT32_MAX};
    for (size_t i = 0; i < ARRAY_LEN(lengths); i++) {
        struct pair p;
        uint8_t bytes[4];
        size_t used;
        struct session_event event;
        pair_start(&p, 10, 1);
        pair_ready(&p, 1000);
        struct writer w = writer_of(bytes, sizeof bytes);
        write_u32(&w, lengths[i]);
        assert_int_equal(session_feed(p.s[1], bytes, 4, &used, &event), ERR_CORRUPT);
        assert_int_equal(session_send(p.s[1], 1, 0, bytes, 1), ERR_CORRUPT);
        pair_end(&p);
    }
}

static void test_session_goes_on_after_rekeying(void **state)
{
    (void)state;
    struct pair p;
    struct session_event event;
    pair_start(&p, 11, 1);
    pair_ready(&p, 1000);
    for (uint32_t i = 0; i < SESSION_REKEY_FRAMES + 10; i++) {
        assert_int_equal(session_send(p.s[0], 1, 0, (const uint8_t *)&i, sizeof i), ERR_OK);
        if (i % 64 == 63 || i >= SESSION_REKEY_FRAMES) {
            assert_int_equal(pass(&p, 0, 1 << 20, &event), ERR_OK);
            assert_memory_equal(event.bytes, &i, sizeof i);
        }
    }
    pair_end(&p);
}

static void test_session_options_are_checked(void **state)
{
    (void)state;
    struct session_psk psks[2];
    uint8_t key[32] = {1};
    struct session *s = NULL;
    make_psk(&psks[0], 1, 1);
    make_psk(&psks[1], 2, 2);
    struct session_options o = {.role = SESSION_INITIATOR,
                                .static_public = key,
                                .static_secret = key,
                                .psks = psks,
                                .n_psks = 2};
    assert_int_equal(session_new(&o, &s), ERR_INVALID);
    o.n_psks = 0;
    o.role = SESSION_RESPONDER;
    assert_int_equal(session_new(&o, &s), ERR_INVALID);
    o.n_psks = SESSION_PSKS_MAX + 1;
    assert_int_equal(session_new(&o, &s), ERR_INVALID);
    assert_null(s);
}

static void datagram_pair(struct datagram d[2])
{
    uint8_t master[32] = {42};
    datagram_init(&d[0], master, SESSION_INITIATOR);
    datagram_init(&d[1], master, SESSION_RESPONDER);
    assert_true(d[0].send_id != d[0].receive_id);
}

static void test_datagram_goes_each_way_once(void **state)
{
    (void)state;
    struct datagram d[2];
    datagram_pair(d);
    for (int from = 0; from < 2; from++) {
        static uint8_t payload[DATAGRAM_PAYLOAD_MAX], out[DATAGRAM_PAYLOAD_MAX];
        uint8_t bytes[DATAGRAM_BYTES_MAX], channel;
        size_t n, n_out;
        uint64_t id;
        memset(payload, from + 1, sizeof payload);
        assert_int_equal(datagram_seal(&d[from], 2, payload, sizeof payload, bytes, &n), ERR_OK);
        assert_int_equal(n, DATAGRAM_BYTES_MAX);
        assert_int_equal(datagram_key_id(bytes, n, &id), ERR_OK);
        assert_true(id == d[!from].receive_id);
        assert_int_equal(datagram_open(&d[from], bytes, n, out, &n_out, &channel), ERR_DENIED);
        for (size_t i = 0; i < n; i += 13) {
            bytes[i] ^= 0x10;
            assert_int_not_equal(datagram_open(&d[!from], bytes, n, out, &n_out, &channel), ERR_OK);
            bytes[i] ^= 0x10;
        }
        assert_int_equal(datagram_open(&d[!from], bytes, n, out, &n_out, &channel), ERR_OK);
        assert_int_equal(channel, 2);
        assert_int_equal(n_out, sizeof payload);
        assert_memory_equal(out, payload, n_out);
        assert_int_equal(datagram_open(&d[!from], bytes, n, out, &n_out, &channel), ERR_STALE);
        assert_int_equal(
            datagram_open(&d[!from], bytes, DATAGRAM_OVERHEAD - 1, out, &n_out, &channel),
            ERR_CORRUPT);
        assert_int_equal(datagram_seal(&d[from], 2, payload, DATAGRAM_PAYLOAD_MAX + 1, bytes, &n),
                         ERR_LIMIT);
    }
}

/* Against the plain definition: accepted when never seen and not older than the window. */
static void test_datagram_window_agrees_with_its_definition(void **state)
{
    (void)state;
    enum { N = 20000 };
    struct datagram d[2];
    struct rng rng;
    rng_seed(&rng, 3);
    datagram_pair(d);
    static bool seen[N * 40];
    memset(seen, 0, sizeof seen);
    uint64_t head = 1, highest = 0;
    bool any = false;
    int n_accepted = 0, n_stale = 0;
    for (int i = 0; i < N; i++) {
        uint64_t jump = rng_below(&rng, 100);
        head += jump == 0 ? rng_below(&rng, 3000) : rng_below(&rng, 2);
        uint64_t back = rng_below(&rng, rng_below(&rng, 10) == 0 ? 1500 : 20);
        uint64_t counter = head > back ? head - back : 0;
        assert_true(counter < ARRAY_LEN(seen));
        uint8_t bytes[DATAGRAM_BYTES_MAX], out[DATAGRAM_PAYLOAD_MAX], channel;
        size_t n, n_out;
        d[0].send_counter = counter;
        assert_int_equal(datagram_seal(&d[0], 1, NULL, 0, bytes, &n), ERR_OK);
        bool expected = !seen[counter] && (!any || counter + DATAGRAM_WINDOW > highest);
        enum err e = datagram_open(&d[1], bytes, n, out, &n_out, &channel);
        assert_int_equal(e, expected ? ERR_OK : ERR_STALE);
        n_accepted += expected;
        n_stale += !expected;
        seen[counter] = true;
        highest = any ? MAX_OF(highest, counter) : counter;
        any = true;
    }
    assert_true(n_accepted > 1000 && n_stale > 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_session_tells_peer_and_psk),
        cmocka_unit_test(test_session_carries_frames_in_any_pieces),
        cmocka_unit_test(test_session_drops_strangers_at_the_first_message),
        cmocka_unit_test(test_session_cannot_be_replayed),
        cmocka_unit_test(test_session_refuses_frames_out_of_order),
        cmocka_unit_test(test_session_refuses_lengths_before_it_allocates),
        cmocka_unit_test(test_session_goes_on_after_rekeying),
        cmocka_unit_test(test_session_options_are_checked),
        cmocka_unit_test(test_datagram_goes_each_way_once),
        cmocka_unit_test(test_datagram_window_agrees_with_its_definition),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
