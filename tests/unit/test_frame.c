#include "transport/frame.h"

#include <setjmp.h>
#include <stdarg.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A STEP packed by Python's struct module from the field list of PROTOCOL 4:
 *   '<IBBHQQQQIHHHBBIIHH' header; '<IIII' + 16 control; 16 + '<IIII' + 16 + '<I' + '<3i' segment;
 *   zeros to a multiple of 16; '<6f' rows. */
static const char step_hex[] =
    "b80000000100a0008877665544332211000000000000000000000000000000000900000000000000"
    "000000000c0000000100000008000000030000000100010001000000020000000300000004000000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0200000064000000"
    "0300000064000000202122232425262728292a2b2c2d2e2f0700000005000000ffffffff07000000"
    "0000803f0000004000004040000080400000a0400000c040";

static uint8_t *aligned(size_t n)
{
    uint8_t *p = aligned_alloc(FRAME_ALIGN, (n + FRAME_ALIGN) / FRAME_ALIGN * FRAME_ALIGN);
    assert_non_null(p);
    return p;
}

static struct frame *new_frame(uint8_t type)
{
    struct frame *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->header.type = type;
    f->header.epoch = 77;
    return f;
}

static uint8_t *step_bytes(size_t *ret_n)
{
    *ret_n = (sizeof step_hex - 1) / 2;
    uint8_t *b = aligned(*ret_n);
    assert_true(hex_decode(step_hex, b, *ret_n));
    return b;
}

static void test_step_is_read_as_others_wrote_it(void **state)
{
    (void)state;
    size_t n;
    uint8_t *b = step_bytes(&n);
    struct frame *f = calloc(1, sizeof *f);
    assert_int_equal(frame_decode(b, n, f), ERR_OK);
    assert_int_equal(f->header.epoch, 0x1122334455667788);
    assert_int_equal(f->header.step, 9);
    assert_int_equal(f->header.boundary, 12);
    assert_int_equal(f->header.n_rows, 3);
    assert_int_equal(f->header.n_segments, 1);
    assert_int_equal(f->step.n_controls, 1);
    assert_int_equal(f->step.controls[0].kind, FRAME_ADMIT);
    assert_int_equal(f->step.controls[0].slot, 3);
    assert_int_equal(f->step.controls[0].request.bytes[15], 15);
    const struct frame_segment *s = &f->step.segments[0];
    assert_int_equal(s->request.bytes[0], 16);
    assert_int_equal(s->position, 100);
    assert_int_equal(s->kv_len, 100);
    assert_int_equal(s->flags,
                     FRAME_SEGMENT_PREFILL | FRAME_SEGMENT_LAST_CHUNK | FRAME_SEGMENT_LOGITS_LAST);
    assert_int_equal(s->token_ids[1], -1);
    assert_true(f->step.rows[5] == 6.0f);
    assert_ptr_equal((const uint8_t *)f->step.rows, b + f->header.header_len);

    /* and written as they write it */
    uint8_t *again = aligned(n);
    size_t n_again = 0;
    assert_int_equal(frame_encode(f, again, n, &n_again), ERR_OK);
    assert_int_equal(n_again, f->header.header_len);
    assert_memory_equal(again, b, n_again);
    free(again);
    free(f);
    free(b);
}

/* ADMIT of slot 2 and SHARE of 40 positions of slot 5, packed as above. */
static const char share_hex[] =
    "80000000010080004d00000000000000000000000000000000000000000000000900000000000000"
    "000000000c0000000100000000000000000000000000020001000000010000000200000064000000"
    "07000000000000000000000000000000040000000500000002000000280000000700000000000000"
    "0000000000000000";

static void test_share_names_both_slots(void **state)
{
    (void)state;
    size_t n = (sizeof share_hex - 1) / 2, n_again;
    uint8_t *b = aligned(n), *again = aligned(n);
    struct frame *f = calloc(1, sizeof *f);
    assert_true(f && hex_decode(share_hex, b, n));
    assert_int_equal(frame_decode(b, n, f), ERR_OK);
    assert_int_equal(f->step.n_controls, 2);
    const struct frame_control *c = &f->step.controls[1];
    assert_int_equal(c->kind, FRAME_SHARE);
    assert_int_equal(c->from, 5);
    assert_int_equal(c->slot, 2);
    assert_int_equal(c->n, 40);
    assert_int_equal(c->request.bytes[0], 7);
    f->header.epoch = 77;
    assert_int_equal(frame_encode(f, again, n, &n_again), ERR_OK);
    assert_int_equal(n_again, n);
    assert_memory_equal(again, b, n);
    free(f);
    free(again);
    free(b);
}

static void test_every_cut_and_every_flip_is_survived(void **state)
{
    (void)state;
    size_t n;
    uint8_t *b = step_bytes(&n);
    struct frame *f = calloc(1, sizeof *f);
    for (size_t cut = 0; cut < n; cut++)
        assert_int_equal(frame_decode(b, cut, f), ERR_CORRUPT);
    for (size_t at = 0; at < n; at++) {
        for (int bit = 0; bit < 8; bit++) {
            b[at] ^= (uint8_t)(1 << bit);
            (void)frame_decode(b, n, f);
            b[at] ^= (uint8_t)(1 << bit);
        }
    }
    assert_int_equal(frame_decode(b, n, f), ERR_OK);
    free(f);
    free(b);
}

static void check_change(size_t at, uint32_t value, size_t width)
{
    size_t n;
    uint8_t *b = step_bytes(&n);
    struct frame *f = calloc(1, sizeof *f);
    memcpy(b + at, &value, width);
    assert_int_equal(frame_decode(b, n, f), ERR_CORRUPT);
    free(f);
    free(b);
}

static void test_step_with_a_lie_is_refused(void **state)
{
    (void)state;
    check_change(0, 1u << 30, 4);  /* len: 1 GiB */
    check_change(0, 63, 4);        /* len: less than a header */
    check_change(4, 200, 1);       /* unknown type, not optional */
    check_change(6, 65520, 2);     /* header_len beyond len */
    check_change(6, 71, 2);        /* header_len not aligned */
    check_change(40, 4, 4);        /* fragment_offset */
    check_change(50, 1, 1);        /* collective */
    check_change(51, 1, 1);        /* dtype */
    check_change(52, 12, 4);       /* row_bytes: not what the payload has */
    check_change(52, 1u << 31, 4); /* row_bytes × n_rows overflows 32 bits */
    check_change(56, 4, 4);        /* n_rows: not the sum */
    check_change(60, 65, 2);       /* n_segments above its maximum */
    check_change(60, 2, 2);        /* a segment that is not there */
    check_change(62, 129, 2);      /* n_controls above its maximum */
    check_change(64, 5, 4);        /* kind of control */
    check_change(64, 257, 4);      /* kind that is 1 in its low byte */
    check_change(120, 0, 4);       /* n of a segment */
    check_change(120, 513, 4);
    check_change(144, 12, 4); /* logits last and all */
    check_change(144, 16, 4); /* unknown segment flag */
}

static void test_unknown_type_is_skipped_when_optional(void **state)
{
    (void)state;
    size_t n;
    uint8_t *b = step_bytes(&n);
    struct frame *f = calloc(1, sizeof *f);
    b[4] = 99;
    b[5] = FRAME_OPTIONAL;
    assert_int_equal(frame_decode(b, n, f), ERR_UNSUPPORTED);
    assert_int_equal(f->header.type, 99);
    free(f);
    free(b);
}

/* Encodes, decodes into *ret, and demands that every cut and a longer body are refused. */
static uint8_t *round_trip(const struct frame *f, struct frame *ret)
{
    size_t n = frame_encoded_bytes(f), n_out = 0;
    uint8_t *b = aligned(n + 4);
    assert_int_equal(frame_encode(f, b, n - 1, &n_out), ERR_LIMIT);
    assert_int_equal(frame_encode(f, b, n, &n_out), ERR_OK);
    assert_int_equal(n_out, n);
    frame_stamp(b, 5, 6);
    for (size_t cut = 64; cut < n && cut < 4096; cut++) {
        uint32_t len = (uint32_t)cut;
        memcpy(b, &len, 4);
        assert_int_equal(frame_decode(b, cut, ret), ERR_CORRUPT);
    }
    uint32_t len = (uint32_t)n + 1;
    memcpy(b, &len, 4);
    assert_int_equal(frame_decode(b, n + 1, ret), ERR_CORRUPT);
    len = (uint32_t)n;
    memcpy(b, &len, 4);
    assert_int_equal(frame_decode(b, n, ret), ERR_OK);
    assert_int_equal(ret->header.link_seq, 5);
    assert_int_equal(ret->header.ack, 6);
    assert_int_equal(ret->header.epoch, 77);
    return b;
}

static void test_open_round_trip(void **state)
{
    (void)state;
    int32_t ids[5] = {1, 2, 3, 4, -5};
    struct frame *f = new_frame(FRAME_OPEN), *g = new_frame(0);
    f->open = (struct frame_open){
        .request = {{1, 2, 3}},
        .attempt = 4,
        .entry = {{9, 8, 7}},
        .sampler = {.temperature = 0.5f,
                    .top_p = 0.9f,
                    .min_p = 0.05f,
                    .typical_p = 0.75f,
                    .n_biases = 2,
                    .bias_ids = {5, 49151},
                    .biases = {-100, 0.5f},
                    .repetition_penalty = 1.1f,
                    .frequency_penalty = -0.25f,
                    .presence_penalty = 2.0f,
                    .top_k = 40,
                    .max_tokens = 128,
                    .seed = 1ull << 63,
                    .flags = FRAME_SAMPLER_IGNORE_END,
                    .n_logprobs = 20,
                    .want_logprob = 1,
                    .n_end_ids = 2,
                    .end_ids = {7, 11}},
        .n_prompt = 3,
        .n_emitted = 2,
        .token_ids = ids,
        .context_max = 2048,
        .deadline_ms = 30000,
    };
    uint8_t *b = round_trip(f, g);
    assert_memory_equal(g->open.token_ids, ids, sizeof ids);
    const int32_t *view = g->open.token_ids;
    g->open.token_ids = ids;
    assert_memory_equal(&g->open, &f->open, sizeof f->open);
    assert_true((const uint8_t *)view > b);
    free(b);

    f->open.sampler.top_p = NAN;
    uint8_t small[1024];
    size_t n;
    assert_int_equal(frame_encode(f, small, sizeof small, &n), ERR_INVALID);
    f->open.sampler.top_p = 1;
    f->open.sampler.biases[1] = NAN;
    assert_int_equal(frame_encode(f, small, sizeof small, &n), ERR_INVALID);
    f->open.sampler.biases[1] = 0;
    f->open.n_emitted = FRAME_TOKENS_MAX - 2;
    assert_int_equal(frame_encode(f, small, sizeof small, &n), ERR_LIMIT);
    free(f);
    free(g);
}

static void test_open_holds_a_million_tokens(void **state)
{
    (void)state;
    int32_t *ids = malloc(FRAME_TOKENS_MAX * sizeof *ids);
    for (int32_t i = 0; i < FRAME_TOKENS_MAX; i++)
        ids[i] = i;
    struct frame *f = new_frame(FRAME_OPEN), *g = new_frame(0);
    f->open.n_prompt = FRAME_TOKENS_MAX;
    f->open.token_ids = ids;
    size_t n = frame_encoded_bytes(f);
    assert_true(n <= FRAME_OPEN_BYTES_MAX);
    uint8_t *b = aligned(n);
    assert_int_equal(frame_encode(f, b, n, &n), ERR_OK);
    assert_int_equal(frame_decode(b, n, g), ERR_OK);
    assert_memory_equal(g->open.token_ids, ids, FRAME_TOKENS_MAX * sizeof *ids);
    free(b);
    free(f);
    free(g);
    free(ids);
}

static void test_token_round_trip(void **state)
{
    (void)state;
    struct frame *f = new_frame(FRAME_TOKEN), *g = new_frame(0);
    f->token = (struct frame_token){.request = {{1}},
                                    .attempt = 2,
                                    .position = 3,
                                    .id = 4,
                                    .finish = FRAME_LENGTH,
                                    .n_logprobs = 2,
                                    .logprob = -0.5f,
                                    .top_ids = {4, 5},
                                    .top_logprobs = {-0.5f, -INFINITY}};
    free(round_trip(f, g));
    assert_memory_equal(&f->token, &g->token, sizeof f->token);
    f->token.n_logprobs = FRAME_LOGPROBS_MAX + 1;
    uint8_t small[1024];
    size_t n;
    assert_int_equal(frame_encode(f, small, sizeof small, &n), ERR_LIMIT);
    free(f);
    free(g);
}

/* Its last four bytes may be missing: then it is of slot 0. */
static void check_have_with_slot(struct frame *f, struct frame *g)
{
    size_t n = FRAME_HEADER_BYTES + 44, n_out;
    uint8_t *b = aligned(n);
    f->have.slot = 9;
    assert_int_equal(frame_encode(f, b, n, &n_out), ERR_OK);
    assert_int_equal(n_out, n);
    assert_int_equal(frame_decode(b, n, g), ERR_OK);
    assert_int_equal(g->have.slot, 9);
    for (uint32_t cut = FRAME_HEADER_BYTES; cut < n; cut++) {
        memcpy(b, &cut, sizeof cut);
        assert_int_equal(frame_decode(b, cut, g), cut == n - 4 ? ERR_OK : ERR_CORRUPT);
    }
    free(b);
}

static void test_small_frames_round_trip(void **state)
{
    (void)state;
    struct frame *f = new_frame(FRAME_CANCEL), *g = new_frame(0);
    f->cancel = (struct frame_cancel){{{1}}, 2};
    free(round_trip(f, g));
    assert_memory_equal(&f->cancel, &g->cancel, sizeof f->cancel);
    f->header.type = FRAME_CREDIT;
    f->credit = (struct frame_credit){1ull << 40, 3};
    free(round_trip(f, g));
    assert_int_equal(g->credit.n_bytes, 1ull << 40);
    assert_int_equal(g->credit.n_steps, 3);
    f->header.type = FRAME_HAVE;
    f->have = (struct frame_have){{{1}}, 2, 3, {{4}}, 0};
    free(round_trip(f, g));
    assert_memory_equal(&f->have, &g->have, sizeof f->have);
    check_have_with_slot(f, g);
    f->have.slot = 0; /* not sent: 40 bytes, as earlier versions write it */
    assert_int_equal(frame_encoded_bytes(f), FRAME_HEADER_BYTES + 40);
    f->header.type = FRAME_CACHED;
    f->header.flags = FRAME_OPTIONAL;
    f->cached = (struct frame_cached){{{1}}, 2, 3};
    free(round_trip(f, g));
    assert_memory_equal(&f->cached, &g->cached, sizeof f->cached);
    f->header.flags = 0;
    f->header.type = FRAME_STALE;
    f->stale.current_epoch = 78;
    free(round_trip(f, g));
    assert_int_equal(g->stale.current_epoch, 78);
    f->header.type = FRAME_ERROR;
    f->error = (struct frame_error){{{1}}, 2, FRAME_E_STALE};
    free(round_trip(f, g));
    assert_int_equal(g->error.code, FRAME_E_STALE);
    f->header.type = FRAME_BYE;
    f->bye.code = FRAME_E_BUSY;
    free(round_trip(f, g));
    assert_int_equal(g->bye.code, FRAME_E_BUSY);
    free(f);
    free(g);
}

static void test_step_keeps_its_maxima(void **state)
{
    (void)state;
    int32_t ids[FRAME_ROWS_MAX] = {0};
    struct frame *f = new_frame(FRAME_STEP), *g = new_frame(0);
    f->header.n_segments = FRAME_SEGMENTS_MAX;
    f->step.n_controls = FRAME_CONTROLS_MAX;
    for (int i = 0; i < FRAME_CONTROLS_MAX; i++)
        f->step.controls[i].kind = FRAME_FREE;
    for (int i = 0; i < FRAME_SEGMENTS_MAX; i++)
        f->step.segments[i] =
            (struct frame_segment){.n = FRAME_ROWS_MAX / FRAME_SEGMENTS_MAX, .token_ids = ids};
    uint8_t *b = aligned(FRAME_STEP_HEADER_MAX);
    size_t n = 0;
    assert_int_equal(frame_encode(f, b, FRAME_STEP_HEADER_MAX, &n), ERR_OK);
    assert_int_equal(n, FRAME_STEP_HEADER_MAX);
    assert_int_equal(frame_decode(b, n, g), ERR_OK);
    f->step.segments[3].n++;
    assert_int_equal(frame_encode(f, b, FRAME_STEP_HEADER_MAX, &n), ERR_LIMIT);
    f->header.n_segments = 65;
    assert_int_equal(frame_encode(f, b, FRAME_STEP_HEADER_MAX, &n), ERR_LIMIT);
    free(b);
    free(f);
    free(g);
}

static void test_errors_cross_the_wire(void **state)
{
    (void)state;
    for (int e = ERR_OK; e < ERR_N; e++) {
        uint16_t code = frame_error_of((enum err)e);
        assert_true(e == ERR_OK ? code == 0 : code > 0);
        if (code > FRAME_E_OTHER)
            assert_int_equal(frame_error_to(code), e);
    }
    assert_int_equal(frame_error_to(60000), ERR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_step_is_read_as_others_wrote_it),
        cmocka_unit_test(test_share_names_both_slots),
        cmocka_unit_test(test_every_cut_and_every_flip_is_survived),
        cmocka_unit_test(test_step_with_a_lie_is_refused),
        cmocka_unit_test(test_unknown_type_is_skipped_when_optional),
        cmocka_unit_test(test_open_round_trip),
        cmocka_unit_test(test_open_holds_a_million_tokens),
        cmocka_unit_test(test_token_round_trip),
        cmocka_unit_test(test_small_frames_round_trip),
        cmocka_unit_test(test_step_keeps_its_maxima),
        cmocka_unit_test(test_errors_cross_the_wire),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
