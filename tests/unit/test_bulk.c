#include "transport/bulk.h"

#include "base/clock.h"
#include "base/util.h"
#include "transport/bulk_wire.h"
#include "transport/link_tcp.h"

#include <setjmp.h>
#include <stdarg.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

enum {
    FILE_BYTES = 5 * BULK_BLOCK_BYTES + 12345,
    BLOCKS = 6,
    WAIT_MS = 10000,
};

/* ---- hashes ---- */

/* Made by Python's hashlib.blake2b (digest_size 32) and the recursive definition of RFC 6962
 * section 2.1 with the prefixes 0 and 1: leaf i is three bytes of value i. */
static const struct {
    unsigned n;
    const char *hex;
} roots[] = {
    {0, "03170a2e7597b7b7e3d84c05391d139a62b157e78786d8c082f29dcf4c111314"},
    {1, "11da6d1f761ddf9bdb4c9d6e5303ebd41f61858d0a5647a1a7bfe089bf921be9"},
    {2, "dd214b3897757689ba40687fd5b6c0064941f4784bac7a1dd734d0f64b5a23e6"},
    {3, "c3fb076e98841e5ea103044f15d732c002d81a219dda9e98a958bdac902f453b"},
    {5, "49a5412d47635ea239764b48b359330bd9db546dd546491bcfb2724bc5c0bf14"},
    {7, "1723120e0eb489e2a61cbd83c7714979993dacca3b021bf6d3921d73ad9a819a"},
    {8, "9b602a6d2f70dfbab9bbbf88b9577e8fe6ead58864650a7b3e0d083604fa4e41"},
    {13, "a0f0293df3713219af37229078431c0d7afc748299af9c2cceb0919d64fdb0df"},
};

static void test_tree_is_as_others_compute_it(void **state)
{
    (void)state;
    struct hash256 leaves[13];
    for (int i = 0; i < 13; i++)
        leaves[i] = bulk_leaf_hash((uint8_t[3]){(uint8_t)i, (uint8_t)i, (uint8_t)i}, 3);
    for (size_t i = 0; i < ARRAY_LEN(roots); i++) {
        char hex[HEX_ID_MAX];
        hex_of_32(bulk_tree_root(leaves, roots[i].n).bytes, hex);
        assert_string_equal(hex, roots[i].hex);
    }
}

/* ---- two ends ---- */

static const struct hash256 model = {{7, 7, 7}};

struct shop {
    uint8_t *file;
    uint8_t present; /* bit per block */
    int cut_after;   /* reads until the connection is cut; -1: never */
    int fd;          /* of the server, to be cut */
    int n_reads;
};

static enum err shop_read(void *context, const struct hash256 *manifest, uint32_t file,
                          uint64_t offset, size_t n, void *to)
{
    struct shop *s = context;
    if (!hash256_eq(manifest, &model) || file != 0 || offset + n > FILE_BYTES ||
        !(s->present >> (offset / BULK_BLOCK_BYTES) & 1))
        return ERR_NOT_FOUND;
    if (s->cut_after >= 0 && s->n_reads == s->cut_after)
        (void)shutdown(s->fd, SHUT_RDWR);
    s->n_reads++;
    memcpy(to, s->file + offset, n);
    return ERR_OK;
}

static enum err shop_have(void *context, const struct hash256 *manifest, uint32_t file,
                          uint32_t first, uint32_t n_blocks, uint8_t *ret)
{
    struct shop *s = context;
    if (!hash256_eq(manifest, &model) || file != 0)
        return ERR_NOT_FOUND;
    for (uint32_t i = 0; i < n_blocks && first + i < BLOCKS; i++) {
        if (s->present >> (first + i) & 1)
            ret[i / 8] |= (uint8_t)(1 << i % 8);
    }
    return ERR_OK;
}

struct cellar {
    uint8_t *file;
    uint8_t asked, got, missing; /* bit per block */
    enum err why;
    int n_puts;
    enum err put_err;
};

static bool cellar_next(void *context, struct bulk_range *ret)
{
    struct cellar *c = context;
    for (uint32_t b = 0; b < BLOCKS; b++) {
        if (((c->got | c->asked | c->missing) >> b & 1) == 0) {
            uint64_t left = FILE_BYTES - (uint64_t)b * BULK_BLOCK_BYTES;
            *ret = (struct bulk_range){.offset = (uint64_t)b * BULK_BLOCK_BYTES};
            ret->n_bytes = (uint32_t)MIN_OF(left, (uint64_t)BULK_BLOCK_BYTES);
            c->asked |= (uint8_t)(1 << b);
            return true;
        }
    }
    return false;
}

static enum err cellar_put(void *context, const struct bulk_range *range, const void *bytes,
                           const struct hash256 *hash)
{
    struct cellar *c = context;
    struct hash256 h = bulk_leaf_hash(bytes, range->n_bytes);
    assert_true(hash256_eq(&h, hash));
    uint8_t bit = (uint8_t)(1 << range->offset / BULK_BLOCK_BYTES);
    assert_int_equal(c->got & bit, 0); /* nothing comes twice */
    c->got |= bit;
    c->n_puts++;
    memcpy(c->file + range->offset, bytes, range->n_bytes);
    return c->put_err;
}

static enum err cellar_missing(void *context, const struct bulk_range *range, enum err why)
{
    struct cellar *c = context;
    c->missing |= (uint8_t)(1 << range->offset / BULK_BLOCK_BYTES);
    c->why = why;
    return ERR_OK;
}

struct two {
    struct link *client, *server;
    struct shop *shop;
    pthread_t thread;
    enum err served;
    struct bandwidth answered;
};

static struct link *link_on(int fd, int end)
{
    struct link_tcp_options o = {.fd = fd, .frame_bytes_max = BULK_FRAME_BYTES_MAX};
    o.keys.cipher = SEAL_CHACHA20_POLY1305;
    memset(o.keys.send, end ? 2 : 1, 32);
    memset(o.keys.receive, end ? 1 : 2, 32);
    struct link *l;
    assert_int_equal(link_tcp_new(&o, &l), ERR_OK);
    return l;
}

static void connect_two(struct two *t)
{
    int l = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    assert_int_equal(bind(l, (struct sockaddr *)&a, n), 0);
    assert_int_equal(listen(l, 1), 0);
    assert_int_equal(getsockname(l, (struct sockaddr *)&a, &n), 0);
    int client = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(client, (struct sockaddr *)&a, n), 0);
    int server = accept(l, NULL, NULL);
    (void)close(l);
    t->client = link_on(client, 0);
    t->server = link_on(server, 1);
    if (t->shop)
        t->shop->fd = server;
}

static void *serve(void *context)
{
    struct two *t = context;
    struct bulk_source source = {t->shop, shop_read, shop_have};
    t->served = bulk_serve(t->server, &source, -1);
    return NULL;
}

static void begin(struct two *t, struct shop *shop)
{
    t->shop = shop;
    connect_two(t);
    assert_int_equal(pthread_create(&t->thread, NULL, serve, t), 0);
}

static enum err end(struct two *t)
{
    link_free(t->client);
    assert_int_equal(pthread_join(t->thread, NULL), 0);
    link_free(t->server);
    return t->served;
}

static struct shop shop_of(uint8_t present)
{
    struct shop s = {.file = malloc(FILE_BYTES), .present = present, .cut_after = -1};
    uint32_t x = 1;
    for (size_t i = 0; i < FILE_BYTES; i++) {
        x = x * 1664525u + 1013904223u;
        s.file[i] = (uint8_t)(x >> 24);
    }
    return s;
}

static struct bulk_sink sink_of(struct cellar *c)
{
    return (struct bulk_sink){c, model, cellar_next, cellar_put, cellar_missing};
}

static void test_file_crosses(void **state)
{
    (void)state;
    struct shop shop = shop_of(0x3f);
    struct cellar c = {.file = malloc(FILE_BYTES)};
    struct bulk_sink sink = sink_of(&c);
    struct two t;
    begin(&t, &shop);
    assert_int_equal(bulk_fetch(t.client, &sink, WAIT_MS, -1), ERR_OK);
    assert_int_equal(c.got, 0x3f);
    assert_memory_equal(c.file, shop.file, FILE_BYTES);
    assert_int_equal(end(&t), ERR_OK);
    free(c.file);
    free(shop.file);
}

static void test_fetch_goes_on_after_a_cut(void **state)
{
    (void)state;
    struct shop shop = shop_of(0x3f);
    struct cellar c = {.file = malloc(FILE_BYTES)};
    struct bulk_sink sink = sink_of(&c);
    int n_cuts = 0;
    enum err e = ERR_CLOSED;
    while (e != ERR_OK && n_cuts < 10) {
        struct two t;
        shop.n_reads = 0;
        shop.cut_after = n_cuts < 2 ? 2 : -1;
        c.asked = 0; /* what was under way is wanted again */
        begin(&t, &shop);
        e = bulk_fetch(t.client, &sink, WAIT_MS, -1);
        n_cuts += e != ERR_OK;
        (void)end(&t);
    }
    assert_int_equal(e, ERR_OK);
    assert_int_equal(n_cuts, 2);
    assert_int_equal(c.n_puts, BLOCKS); /* each once in all */
    assert_memory_equal(c.file, shop.file, FILE_BYTES);
    free(c.file);
    free(shop.file);
}

static void test_absent_blocks_are_named(void **state)
{
    (void)state;
    struct shop shop = shop_of(0x35);
    struct cellar c = {.file = malloc(FILE_BYTES)};
    struct bulk_sink sink = sink_of(&c);
    struct two t;
    begin(&t, &shop);
    uint8_t bits[2] = {0xff, 0xff};
    assert_int_equal(bulk_ask_map(t.client, &model, 0, 0, 9, WAIT_MS, bits), ERR_OK);
    assert_int_equal(bits[0], 0x35);
    assert_int_equal(bits[1], 0);
    assert_int_equal(bulk_ask_map(t.client, &model, 0, 2, 4, WAIT_MS, bits), ERR_OK);
    assert_int_equal(bits[0], 0x35 >> 2);
    struct hash256 other = {{8}};
    assert_int_equal(bulk_ask_map(t.client, &other, 0, 0, 9, WAIT_MS, bits), ERR_NOT_FOUND);
    assert_int_equal(bulk_ask_map(t.client, &model, 0, 0, 0, WAIT_MS, bits), ERR_INVALID);
    assert_int_equal(bulk_fetch(t.client, &sink, WAIT_MS, -1), ERR_OK);
    assert_int_equal(c.got, 0x35);
    assert_int_equal(c.missing, 0x0a);
    assert_int_equal(c.why, ERR_NOT_FOUND);
    assert_int_equal(end(&t), ERR_OK);
    free(c.file);
    free(shop.file);
}

static void test_full_disk_ends_the_fetch(void **state)
{
    (void)state;
    struct shop shop = shop_of(0x3f);
    struct cellar c = {.file = malloc(FILE_BYTES), .put_err = ERR_NO_FIT};
    struct bulk_sink sink = sink_of(&c);
    struct two t;
    begin(&t, &shop);
    assert_int_equal(bulk_fetch(t.client, &sink, WAIT_MS, -1), ERR_NO_FIT);
    assert_int_equal(c.n_puts, 1);
    (void)end(&t);
    free(c.file);
    free(shop.file);
}

static void test_silent_server_and_stop_end_the_fetch(void **state)
{
    (void)state;
    struct cellar c = {.got = 0};
    struct bulk_sink sink = sink_of(&c);
    struct two t = {.shop = NULL};
    connect_two(&t);
    assert_int_equal(bulk_fetch(t.client, &sink, 10, -1), ERR_TIMEOUT);
    c.asked = 0;
    int pipes[2];
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(write(pipes[1], "x", 1), 1);
    assert_int_equal(bulk_fetch(t.client, &sink, WAIT_MS, pipes[0]), ERR_CANCELLED);
    struct shop shop = {.present = 0};
    struct bulk_source source = {&shop, shop_read, shop_have};
    enum err e = bulk_serve(t.server, &source, pipes[0]);
    assert_int_equal(e, ERR_CANCELLED);
    link_free(t.client);
    link_free(t.server);
    (void)close(pipes[0]);
    (void)close(pipes[1]);
}

/* ---- hostile requests and answers ---- */

static size_t get_frame(uint8_t *to, uint32_t file, uint32_t n_bytes, uint64_t offset)
{
    struct writer w = writer_of(to, 256);
    bulk_begin(&w, BULK_GET, 5, 48);
    write_bytes(&w, model.bytes, 32);
    write_u32(&w, file);
    write_u32(&w, n_bytes);
    write_u64(&w, offset);
    return w.len;
}

static void test_requests_out_of_bounds_get_a_code(void **state)
{
    (void)state;
    static const struct bulk_range bad[] = {
        {0, 0, 0},
        {0, BULK_BLOCK_BYTES + 1, 0},
        {0, 2, BULK_BLOCK_BYTES - 1},
        {0, 1, UINT64_MAX},
        {0, 2, UINT64_MAX},
        {0, 1, INT64_MAX},
        {BULK_FILES_MAX, 1, 0},
        {UINT32_MAX, UINT32_MAX, UINT64_MAX},
    };
    struct shop shop = shop_of(0x3f);
    struct two t;
    begin(&t, &shop);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        uint8_t frame[256];
        struct bulk_wait w = {clock_monotonic_us() + WAIT_MS * 1000ull, -1};
        size_t n = get_frame(frame, bad[i].file, bad[i].n_bytes, bad[i].offset);
        assert_int_equal(bulk_send(t.client, frame, n, &w), ERR_OK);
        struct bulk_head h;
        assert_int_equal(bulk_receive(t.client, &w, &h), ERR_OK);
        assert_int_equal(h.type, BULK_ERROR);
        assert_int_equal(h.tag, 5);
        assert_int_equal(read_u16(&h.body), FRAME_E_INVALID);
    }
    assert_int_equal(shop.n_reads, 0);
    assert_int_equal(end(&t), ERR_OK);
    free(shop.file);
}

static void test_malformed_request_ends_the_connection(void **state)
{
    (void)state;
    struct shop shop = shop_of(0);
    for (int i = 0; i < 3; i++) {
        struct two t;
        begin(&t, &shop);
        uint8_t frame[256];
        struct bulk_wait w = {clock_monotonic_us() + WAIT_MS * 1000ull, -1};
        size_t n = get_frame(frame, 0, 1, 0);
        if (i == 0)
            frame[4] = BULK_CHUNK; /* not a request */
        else if (i == 1)
            frame[0] = (uint8_t)--n; /* too short */
        else
            frame[6] = 64; /* a header of another length */
        assert_int_equal(bulk_send(t.client, frame, n, &w), ERR_OK);
        assert_int_equal(pthread_join(t.thread, NULL), 0);
        assert_int_equal(t.served, ERR_CORRUPT);
        link_free(t.client);
        link_free(t.server);
    }
    free(shop.file);
}

enum lie { WRONG_TAG, WRONG_TYPE, SHORT_CHUNK, NO_CODE, WRONG_HASH, LIES };

/* Answers the first request with a lie. */
static void send_lie(struct link *l, enum lie lie)
{
    static uint8_t frame[LINK_HEADER_BYTES + 32 + BULK_BLOCK_BYTES];
    struct bulk_wait w = {clock_monotonic_us() + WAIT_MS * 1000ull, -1};
    struct writer out = writer_of(frame, sizeof frame);
    size_t n = lie == SHORT_CHUNK ? 32 + 100 : 32 + BULK_BLOCK_BYTES;
    uint8_t type = lie == WRONG_TYPE ? BULK_MAP : lie == NO_CODE ? BULK_ERROR : BULK_CHUNK;
    if (lie == NO_CODE)
        n = 2;
    bulk_begin(&out, type, lie == WRONG_TAG ? 1 : 0, n);
    assert_int_equal(bulk_send(l, frame, LINK_HEADER_BYTES + n, &w), ERR_OK);
    assert_int_equal(bulk_wait_room(l, &w), ERR_OK);
}

struct liar {
    struct link *link;
    enum lie lie;
};

static void *lying(void *context)
{
    struct liar *l = context;
    send_lie(l->link, l->lie);
    return NULL;
}

static void test_lying_answers_are_refused(void **state)
{
    (void)state;
    for (int lie = 0; lie < LIES; lie++) {
        struct two t = {.shop = NULL};
        struct cellar c = {.got = 0x3e};
        struct bulk_sink sink = sink_of(&c);
        connect_two(&t);
        struct liar liar = {t.server, (enum lie)lie};
        assert_int_equal(pthread_create(&t.thread, NULL, lying, &liar), 0);
        enum err e = bulk_fetch(t.client, &sink, WAIT_MS, -1);
        assert_int_equal(pthread_join(t.thread, NULL), 0);
        assert_int_equal(c.n_puts, 0);
        if (lie == WRONG_HASH) {
            assert_int_equal(e, ERR_OK);
            assert_int_equal(c.missing, 1);
            assert_int_equal(c.why, ERR_CORRUPT);
        } else {
            assert_int_equal(e, ERR_CORRUPT);
        }
        link_free(t.client);
        link_free(t.server);
    }
}

/* ---- bandwidth ---- */

static void *answer_bandwidth(void *context)
{
    struct two *t = context;
    t->served = bandwidth_answer(t->server, &t->answered);
    return NULL;
}

static void test_bandwidth_is_told_to_both(void **state)
{
    (void)state;
    struct two t = {.shop = NULL};
    struct bandwidth b;
    connect_two(&t);
    assert_int_equal(pthread_create(&t.thread, NULL, answer_bandwidth, &t), 0);
    assert_int_equal(bandwidth_measure(t.client, &b), ERR_OK);
    assert_int_equal(pthread_join(t.thread, NULL), 0);
    assert_int_equal(t.served, ERR_OK);
    assert_true(b.to_peer_bytes_per_s > 0 && b.from_peer_bytes_per_s > 0);
    assert_int_equal(b.to_peer_bytes_per_s, t.answered.from_peer_bytes_per_s);
    assert_int_equal(b.from_peer_bytes_per_s, t.answered.to_peer_bytes_per_s);
    struct link_stats s;
    link_stats_get(t.client, &s);
    assert_true(s.n_bytes_sent < BANDWIDTH_BYTES_MAX + BANDWIDTH_BYTES_MAX / 8);
    link_free(t.server);
    assert_int_equal(bandwidth_measure(t.client, &b), ERR_CLOSED);
    link_free(t.client);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tree_is_as_others_compute_it),
        cmocka_unit_test(test_file_crosses),
        cmocka_unit_test(test_fetch_goes_on_after_a_cut),
        cmocka_unit_test(test_absent_blocks_are_named),
        cmocka_unit_test(test_full_disk_ends_the_fetch),
        cmocka_unit_test(test_silent_server_and_stop_end_the_fetch),
        cmocka_unit_test(test_requests_out_of_bounds_get_a_code),
        cmocka_unit_test(test_malformed_request_ends_the_connection),
        cmocka_unit_test(test_lying_answers_are_refused),
        cmocka_unit_test(test_bandwidth_is_told_to_both),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
