#include "transport/link_tcp.h"

#include "base/clock.h"
#include "base/id.h"
#include "base/util.h"

#include <setjmp.h>
#include <stdarg.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

enum { WAIT_US = 10 * 1000 * 1000, FRAME_MAX = 1 << 20 };

/* ---- sealed records ---- */

/* Key 00 01 … 1f, nonce = four zeros and the counter, AD = the length: made by the classes
 * ChaCha20Poly1305 and AESGCM of Python's `cryptography` for "first record" and then "second". */
static const char chacha_hex[] = "1c0000007ed13042d9c6d4b4700e2e05ce58a2a3df17cf27a2d1e0c5e2d5367d"
                                 "16000000ec329030db4e9b0e0797d0e7258e865ce40d0336ebbb";
static const char aes_hex[] = "1c00000068d5c7adc10cf1d86bc7db5135aef0d637cffbb3ddfcdc51484e4799"
                              "1600000096f2165f10a561d738f5746959c697f91db01b77f193";

static void check_seal(uint8_t cipher, const char *hex)
{
    uint8_t key[32], expected[58], got[58];
    for (int i = 0; i < 32; i++)
        key[i] = (uint8_t)i;
    assert_true(hex_decode(hex, expected, sizeof expected));
    struct seal *s, *o;
    assert_int_equal(seal_new(cipher, key, &s), ERR_OK);
    assert_int_equal(seal_new(cipher, key, &o), ERR_OK);
    seal_record(s, (const uint8_t *)"first record", 12, got);
    static const uint8_t second[6] = {'s', 'e', 'c', 'o', 'n', 'd'};
    memcpy(got + 32 + SEAL_PREFIX_BYTES, second, sizeof second);
    seal_record(s, got + 32 + SEAL_PREFIX_BYTES, 6, got + 32); /* in place */
    assert_memory_equal(got, expected, sizeof got);
    uint8_t plain[16];
    size_t n = 0;
    assert_int_equal(seal_record_length(got, &n), ERR_OK);
    assert_int_equal(n, 12);
    assert_int_equal(seal_open(o, got, n, plain), ERR_OK);
    assert_memory_equal(plain, "first record", 12);
    got[32 + SEAL_PREFIX_BYTES] ^= 1;
    assert_int_equal(seal_open(o, got + 32, 6, plain), ERR_CORRUPT);
    seal_free(s);
    seal_free(o);
}

static void test_records_are_as_others_seal_them(void **state)
{
    (void)state;
    check_seal(SEAL_CHACHA20_POLY1305, chacha_hex);
    if (seal_has_aes())
        check_seal(SEAL_AES_256_GCM, aes_hex);
    struct seal *s;
    assert_int_equal(seal_new(9, (const uint8_t *)"01234567890123456789012345678901", &s),
                     ERR_UNSUPPORTED);
    assert_int_equal(seal_record_length((const uint8_t *)"\0\0\0\x40", &(size_t){0}), ERR_CORRUPT);
    assert_int_equal(seal_record_length((const uint8_t *)"\x10\0\0\0", &(size_t){0}), ERR_CORRUPT);
}

/* ---- two ends ---- */

static void tcp_pair(int ret[2])
{
    int l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    assert_int_equal(bind(l, (struct sockaddr *)&a, n), 0);
    assert_int_equal(listen(l, 1), 0);
    assert_int_equal(getsockname(l, (struct sockaddr *)&a, &n), 0);
    ret[0] = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(ret[0], (struct sockaddr *)&a, n), 0);
    ret[1] = accept(l, NULL, NULL);
    assert_true(ret[1] >= 0);
    (void)close(l);
}

static struct seal_keys keys_of(int end, uint8_t cipher)
{
    struct seal_keys k = {.cipher = cipher};
    memset(k.send, end ? 2 : 1, sizeof k.send);
    memset(k.receive, end ? 1 : 2, sizeof k.receive);
    return k;
}

static struct link *link_on(int fd, int end, uint8_t cipher, uint32_t max, size_t queue)
{
    struct link_tcp_options o = {
        .fd = fd, .keys = keys_of(end, cipher), .frame_bytes_max = max, .queue_bytes_max = queue};
    struct link *l;
    assert_int_equal(link_tcp_new(&o, &l), ERR_OK);
    return l;
}

static void link_pair(struct link *ret[2], uint8_t cipher, uint32_t max)
{
    int fds[2];
    tcp_pair(fds);
    for (int i = 0; i < 2; i++)
        ret[i] = link_on(fds[i], i, cipher, max, 0);
}

static void fill(uint8_t *p, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        p[i] = (uint8_t)(seed >> 24);
    }
}

static void put_len(uint8_t *frame, size_t n)
{
    struct writer w = writer_of(frame, 4);
    write_u32(&w, (uint32_t)n);
}

/* Receives the next frame on links[1] while links[0] gets rid of what is queued. */
static enum err pump(struct link *links[2], const uint8_t **ret, size_t *ret_n)
{
    for (;;) {
        enum err e = link_receive(links[1], ret, ret_n);
        if (e != ERR_AGAIN)
            return e;
        struct link_ready ready;
        e = link_wait(links, 2, -1, WAIT_US, 0, &ready);
        if (e != ERR_OK)
            return e;
    }
}

static void send_and_check(struct link *links[2], size_t n, size_t n_first, uint32_t seed)
{
    uint8_t *frame = malloc(n);
    fill(frame, n, seed);
    put_len(frame, n);
    struct link_piece pieces[2] = {{frame, n_first}, {frame + n_first, n - n_first}};
    assert_int_equal(link_send(links[0], pieces, n_first == n ? 1 : 2), ERR_OK);
    const uint8_t *got;
    size_t n_got = 0;
    assert_int_equal(pump(links, &got, &n_got), ERR_OK);
    assert_int_equal(n_got, n);
    assert_int_equal((uintptr_t)got % FRAME_ALIGN, 0);
    assert_memory_equal(got, frame, 16);
    assert_memory_equal(got + 32, frame + 32, n - 32);
    free(frame);
}

static void check_sizes(uint8_t cipher)
{
    static const size_t sizes[] = {32,    33,    64,    4095,   4096,   4097,   16384 + 144,
                                   65535, 65536, 65537, 131072, 200000, 524288, FRAME_MAX};
    struct link *links[2];
    link_pair(links, cipher, FRAME_MAX);
    for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
        send_and_check(links, sizes[i], sizes[i], (uint32_t)i);
        send_and_check(links, sizes[i], 32, (uint32_t)i + 100);
        if (sizes[i] > 5000)
            send_and_check(links, sizes[i], 4999, (uint32_t)i + 200);
    }
    struct link_stats a, b;
    link_stats_get(links[0], &a);
    link_stats_get(links[1], &b);
    assert_int_equal(a.n_frames_sent, b.n_frames_received);
    assert_int_equal(a.n_bytes_sent, b.n_bytes_received);
    assert_int_equal(a.n_bytes_queued, 0);
    link_free(links[0]);
    link_free(links[1]);
}

static void test_frames_of_every_size_pass(void **state)
{
    (void)state;
    check_sizes(SEAL_CHACHA20_POLY1305);
    if (seal_has_aes())
        check_sizes(SEAL_AES_256_GCM);
}

static void test_largest_step_passes(void **state)
{
    (void)state;
    enum { ROW = 16384 };
    struct link *links[2];
    link_pair(links, SEAL_CHACHA20_POLY1305, FRAME_STEP_HEADER_MAX + FRAME_ROWS_MAX * ROW);
    float *rows = malloc((size_t)FRAME_ROWS_MAX * ROW);
    fill((uint8_t *)rows, (size_t)FRAME_ROWS_MAX * ROW, 7);
    int32_t ids[FRAME_ROWS_MAX] = {3, 2, 1};
    struct frame *f = calloc(2, sizeof *f);
    f->header = (struct frame_header){
        .type = FRAME_STEP, .epoch = 5, .step = 6, .row_bytes = ROW, .n_segments = 1};
    f->step.segments[0] = (struct frame_segment){.n = FRAME_ROWS_MAX, .token_ids = ids};
    struct buf scratch = BUF_INIT(FRAME_OPEN_BYTES_MAX);
    assert_int_equal(link_send_frame(links[0], f, rows, &scratch), ERR_OK);
    const uint8_t *got;
    size_t n = 0;
    assert_int_equal(pump(links, &got, &n), ERR_OK);
    assert_int_equal(frame_decode(got, n, &f[1]), ERR_OK);
    assert_int_equal(f[1].header.link_seq, 1);
    assert_memory_equal(f[1].step.rows, rows, (size_t)FRAME_ROWS_MAX * ROW);
    assert_memory_equal(f[1].step.segments[0].token_ids, ids, sizeof ids);
    buf_deinit(&scratch);
    free(f);
    free(rows);
    link_free(links[0]);
    link_free(links[1]);
}

static void send_small(struct link *l, size_t n, enum err expected)
{
    uint8_t frame[256] = {0};
    put_len(frame, n);
    struct link_piece p = {frame, n};
    assert_int_equal(link_send(l, &p, 1), expected);
}

static void test_order_and_acknowledgement(void **state)
{
    (void)state;
    struct link *links[2];
    link_pair(links, SEAL_CHACHA20_POLY1305, FRAME_MAX);
    const uint8_t *got;
    size_t n;
    for (int i = 0; i < 100; i++)
        send_small(links[0], 32 + (size_t)i, ERR_OK);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(pump(links, &got, &n), ERR_OK);
        assert_int_equal(n, 32 + i);
    }
    struct link *back[2] = {links[1], links[0]};
    send_small(links[1], 40, ERR_OK);
    assert_int_equal(pump(back, &got, &n), ERR_OK);
    struct link_stats s;
    link_stats_get(links[0], &s);
    assert_int_equal(s.peer_ack, 100);
    send_small(links[0], 31, ERR_INVALID);
    uint8_t lie[64] = {99};
    assert_int_equal(link_send(links[0], &(struct link_piece){lie, 64}, 1), ERR_INVALID);
    link_set_frame_bytes_max(links[0], 1);
    uint8_t *big = calloc(1, FRAME_STEP_HEADER_MAX + 1);
    put_len(big, FRAME_STEP_HEADER_MAX + 1);
    assert_int_equal(link_send(links[0], &(struct link_piece){big, FRAME_STEP_HEADER_MAX + 1}, 1),
                     ERR_LIMIT);
    send_small(links[0], 64, ERR_OK); /* none of these has hurt the link */
    assert_int_equal(pump(links, &got, &n), ERR_OK);
    free(big);
    link_free(links[0]);
    link_free(links[1]);
}

/* Bytes that arrive one by one are put together. */
static void test_slow_bytes_are_put_together(void **state)
{
    (void)state;
    int fds[2];
    tcp_pair(fds);
    struct link *l = link_on(fds[1], 1, SEAL_CHACHA20_POLY1305, FRAME_MAX, 0);
    struct seal_keys k = keys_of(0, SEAL_CHACHA20_POLY1305);
    struct seal *s;
    assert_int_equal(seal_new(k.cipher, k.send, &s), ERR_OK);
    uint8_t frame[100], sealed[100 + 2 * SEAL_OVERHEAD];
    fill(frame, sizeof frame, 1);
    put_len(frame, sizeof frame);
    frame_stamp(frame, 1, 0);
    seal_record(s, frame, 60, sealed);
    seal_record(s, frame + 60, 40, sealed + 60 + SEAL_OVERHEAD);
    const uint8_t *got;
    size_t n = 0;
    struct link_ready ready;
    for (size_t i = 0; i < sizeof sealed; i++) {
        assert_int_equal(link_receive(l, &got, &n), ERR_AGAIN);
        assert_int_equal(send(fds[0], sealed + i, 1, 0), 1);
        assert_int_equal(link_wait(&l, 1, -1, WAIT_US, 50, &ready), ERR_OK);
        assert_int_equal(ready.links, 1);
    }
    assert_int_equal(link_receive(l, &got, &n), ERR_OK);
    assert_int_equal(n, sizeof frame);
    assert_memory_equal(got, frame, sizeof frame);
    seal_free(s);
    link_free(l);
    (void)close(fds[0]);
}

/* What a hostile or broken peer may send: content sealed rightly (when `key_ok`), each a record. */
struct evil {
    const char *what;
    uint32_t len;
    uint8_t link_seq, ack;
    uint8_t n_first; /* bytes of the first record */
    uint8_t n_second;
    uint8_t key_ok;
    uint32_t raw_prefix; /* not 0: just these 4 bytes */
    enum err expected;
};

static const struct evil evils[] = {
    {"good", 64, 1, 0, 64, 0, 1, 0, ERR_OK},
    {"1 GiB record", 64, 1, 0, 0, 0, 1, 1u << 30, ERR_CORRUPT},
    {"record of nothing", 64, 1, 0, 0, 0, 1, 16, ERR_CORRUPT},
    {"1 GiB frame", 1u << 30, 1, 0, 64, 0, 1, 0, ERR_CORRUPT},
    {"frame above the link's maximum", FRAME_MAX + 1, 1, 0, 64, 0, 1, 0, ERR_CORRUPT},
    {"frame shorter than its record", 63, 1, 0, 64, 0, 1, 0, ERR_CORRUPT},
    {"record beyond its frame", 100, 1, 0, 64, 37, 1, 0, ERR_CORRUPT},
    {"half a header", 64, 1, 0, 31, 0, 1, 0, ERR_CORRUPT},
    {"sequence from 2", 64, 2, 0, 64, 0, 1, 0, ERR_CORRUPT},
    {"acknowledges what was not sent", 64, 1, 1, 64, 0, 1, 0, ERR_CORRUPT},
    {"wrong key", 64, 1, 0, 64, 0, 0, 0, ERR_CORRUPT},
    {"frame cut by the end", 100, 1, 0, 64, 0, 1, 0, ERR_CLOSED},
};

static enum err receive_evil(const struct evil *e)
{
    int fds[2];
    tcp_pair(fds);
    struct link *l = link_on(fds[1], 1, SEAL_CHACHA20_POLY1305, FRAME_MAX, 0);
    struct seal_keys k = keys_of(0, SEAL_CHACHA20_POLY1305);
    k.send[0] ^= e->key_ok ? 0 : 1;
    struct seal *s;
    assert_int_equal(seal_new(k.cipher, k.send, &s), ERR_OK);
    uint8_t frame[256] = {0}, sealed[400];
    size_t n = 4;
    put_len(frame, e->len);
    frame_stamp(frame, e->link_seq, e->ack);
    if (e->raw_prefix) {
        put_len(sealed, e->raw_prefix);
    } else {
        seal_record(s, frame, e->n_first, sealed);
        n = (size_t)e->n_first + SEAL_OVERHEAD;
    }
    if (e->n_second) {
        seal_record(s, frame + e->n_first, e->n_second, sealed + n);
        n += (size_t)e->n_second + SEAL_OVERHEAD;
    }
    assert_int_equal(send(fds[0], sealed, n, 0), n);
    (void)close(fds[0]);
    struct link *links[2] = {NULL, l};
    const uint8_t *got;
    enum err result = pump(links, &got, &n);
    if (result != ERR_OK) /* dead for ever */
        assert_int_equal(link_receive(l, &got, &n), result);
    seal_free(s);
    link_free(l);
    return result;
}

static void test_hostile_records_end_the_link(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(evils); i++) {
        if (receive_evil(&evils[i]) != evils[i].expected)
            fail_msg("%s", evils[i].what);
    }
}

static void test_repeated_record_ends_the_link(void **state)
{
    (void)state;
    int fds[2];
    tcp_pair(fds);
    struct link *l = link_on(fds[1], 1, SEAL_CHACHA20_POLY1305, FRAME_MAX, 0);
    struct seal_keys k = keys_of(0, SEAL_CHACHA20_POLY1305);
    struct seal *s;
    assert_int_equal(seal_new(k.cipher, k.send, &s), ERR_OK);
    uint8_t frame[64] = {64}, sealed[64 + SEAL_OVERHEAD];
    frame_stamp(frame, 1, 0);
    seal_record(s, frame, 64, sealed);
    assert_int_equal(send(fds[0], sealed, sizeof sealed, 0), sizeof sealed);
    assert_int_equal(send(fds[0], sealed, sizeof sealed, 0), sizeof sealed);
    struct link *links[2] = {NULL, l};
    const uint8_t *got;
    size_t n;
    assert_int_equal(pump(links, &got, &n), ERR_OK);
    assert_int_equal(pump(links, &got, &n), ERR_CORRUPT);
    seal_free(s);
    link_free(l);
    (void)close(fds[0]);
}

/* A peer that does not read: the queue has an end, and what was accepted arrives when it reads. */
static void test_stalled_peer_is_bounded(void **state)
{
    (void)state;
    int fds[2];
    tcp_pair(fds);
    int small = 65536; /* so that writes are partial */
    (void)setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    enum { QUEUE = 1 << 20, N = 100000 };
    struct link *links[2] = {link_on(fds[0], 0, SEAL_CHACHA20_POLY1305, FRAME_MAX, QUEUE),
                             link_on(fds[1], 1, SEAL_CHACHA20_POLY1305, FRAME_MAX, QUEUE)};
    uint8_t *frame = calloc(1, N);
    put_len(frame, N);
    struct link_piece p = {frame, N};
    enum err e;
    int n_sent = 0;
    while ((e = link_send(links[0], &p, 1)) == ERR_OK && n_sent < 1000)
        n_sent++;
    assert_int_equal(e, ERR_AGAIN);
    struct link_stats s;
    link_stats_get(links[0], &s);
    assert_true(s.n_bytes_queued <= QUEUE && s.n_bytes_queued > QUEUE - 2 * N);
    assert_int_equal(s.n_again, 1);
    struct link_ready ready;
    assert_int_equal(link_wait(links, 1, -1, 20000, 20, &ready), ERR_TIMEOUT);
    assert_int_equal(link_flush_wait(links[0], 1000), ERR_TIMEOUT);
    const uint8_t *got;
    size_t n;
    for (int i = 0; i < n_sent; i++) {
        assert_int_equal(pump(links, &got, &n), ERR_OK);
        assert_int_equal(n, N);
    }
    assert_int_equal(link_send(links[0], &p, 1), ERR_OK);
    assert_int_equal(pump(links, &got, &n), ERR_OK);
    free(frame);
    link_free(links[0]);
    link_free(links[1]);
}

static void test_wait_keeps_its_deadline_and_sees_everything(void **state)
{
    (void)state;
    struct link *links[2];
    link_pair(links, SEAL_CHACHA20_POLY1305, FRAME_MAX);
    struct link_ready ready;
    uint64_t begin = clock_monotonic_us();
    assert_int_equal(link_wait(links, 2, -1, 3000, 100, &ready), ERR_TIMEOUT);
    assert_true(clock_monotonic_us() - begin >= 3000);
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(write(pipes[1], "x", 1), 1);
    assert_int_equal(link_wait(links, 2, pipes[0], WAIT_US, 0, &ready), ERR_OK);
    assert_true(ready.extra);
    assert_int_equal(ready.links, 0);
    send_small(links[1], 64, ERR_OK);
    send_small(links[1], 64, ERR_OK);
    assert_int_equal(link_wait(links, 2, -1, WAIT_US, 50, &ready), ERR_OK);
    assert_int_equal(ready.links, 1);
    const uint8_t *got;
    size_t n;
    struct link *back[2] = {links[1], links[0]};
    assert_int_equal(pump(back, &got, &n), ERR_OK);
    /* The second was read along with the first: the descriptor is silent, the wait is not. */
    assert_int_equal(link_wait(links, 2, -1, 0, 0, &ready), ERR_OK);
    assert_int_equal(ready.links, 1);
    assert_int_equal(pump(back, &got, &n), ERR_OK);
    link_free(links[1]);
    assert_int_equal(link_wait(links, 1, -1, WAIT_US, 0, &ready), ERR_OK);
    assert_int_equal(link_receive(links[0], &got, &n), ERR_CLOSED);
    link_free(links[0]);
    (void)close(pipes[0]);
    (void)close(pipes[1]);
}

static void *echo(void *context)
{
    struct link *l = context;
    for (;;) {
        const uint8_t *got;
        size_t n;
        enum err e = link_receive(l, &got, &n);
        struct link_ready ready;
        if (e == ERR_AGAIN)
            e = link_wait(&l, 1, -1, WAIT_US, 20, &ready);
        else if (e == ERR_OK)
            e = link_send(l, &(struct link_piece){got, n}, 1);
        if (e != ERR_OK)
            return NULL;
    }
}

static void test_two_threads_echo(void **state)
{
    (void)state;
    struct link *links[2];
    link_pair(links, SEAL_CHACHA20_POLY1305, FRAME_MAX);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, echo, links[1]), 0);
    static uint8_t frame[17000];
    struct link *own[2] = {NULL, links[0]};
    for (uint32_t i = 0; i < 2000; i++) {
        size_t n = 32 + i * 8, n_got;
        fill(frame, n, i);
        put_len(frame, n);
        assert_int_equal(link_send(links[0], &(struct link_piece){frame, n}, 1), ERR_OK);
        const uint8_t *got;
        assert_int_equal(pump(own, &got, &n_got), ERR_OK);
        assert_int_equal(n_got, n);
        assert_memory_equal(got + 32, frame + 32, n - 32);
    }
    link_free(links[0]);
    assert_int_equal(pthread_join(thread, NULL), 0);
    link_free(links[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_records_are_as_others_seal_them),
        cmocka_unit_test(test_frames_of_every_size_pass),
        cmocka_unit_test(test_largest_step_passes),
        cmocka_unit_test(test_order_and_acknowledgement),
        cmocka_unit_test(test_slow_bytes_are_put_together),
        cmocka_unit_test(test_hostile_records_end_the_link),
        cmocka_unit_test(test_repeated_record_ends_the_link),
        cmocka_unit_test(test_stalled_peer_is_bounded),
        cmocka_unit_test(test_wait_keeps_its_deadline_and_sees_everything),
        cmocka_unit_test(test_two_threads_echo),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
