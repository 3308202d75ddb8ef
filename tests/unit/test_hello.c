#include "transport/hello.h"

#include "base/util.h"
#include "transport/frame.h"
#include "transport/hello_net.h"
#include "transport/link_tcp.h"

#include <setjmp.h>
#include <stdarg.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include <cmocka.h>

enum { GUARD_MS = 10000, STRANGERS = HELLO_PENDING_MAX + 1 };

/* A whole conversation made by Python's hashlib.blake2b (keyed, with salt and person as libsodium's
 * crypto_kdf uses them), from the layout in transport/hello.c: secret 100 … 131, nonces "I" and "R"
 * sixteen times, boot ids 0x1111 and 0x2222, kind DATA. */
static const char initiator_hex[] =
    "434f56455944415401000101000000003fcdd81698b4a97249494949494949494949494949494949"
    "0100030007000000efcdab000000000011110000000000002222000000000000fe03000000000000"
    "00001000000000000000000000000000effee0e95aba581704947d5faca05248dc277af0cd014959"
    "13a8115c1369278f";
static const char responder_hex[] =
    "434f56455944415401000102000000003fcdd81698b4a97252525252525252525252525252525252"
    "0200050008000000badcfe000000000022220000000000001111000000000000fe01000000000000"
    "00000800000000000000000000000000b1ba4a0918fbec0c14594346b392b23a6a1eaffb8c67f704"
    "ce3e6aa9cd6f479a";
static const char proof_hex[] = "d2e0637e7399eae89156f19b11bfd393fad26c4fd5656858f23900f449fb56ef";
static const char traffic_hex[] =
    "950f6ea56b5c7084c1e6d357e5097ae81b5889aefefc9f8f8ccfce29b7cbe9a0a6341cd9bd7abb1a"
    "b84879a3ac113378f95c39df9dfcf8dd74fb86cfed6605c4";

static struct hello_key key_of(int end)
{
    struct hello_key k = {.peer = {{(uint8_t)(end ? 1 : 2)}},
                          .own_boot_id = end ? 0x2222 : 0x1111,
                          .peer_boot_id = end ? 0x1111 : 0x2222};
    for (int i = 0; i < 32; i++)
        k.secret[i] = (uint8_t)(100 + i);
    return k;
}

static struct hello_facts facts_of(int end)
{
    return end ? (struct hello_facts){2, 5, 0, 8, 0xfedcba, 1 << 19, 0x1fe}
               : (struct hello_facts){1, 3, 0, 7, 0xabcdef, 1 << 20, 0x3fe};
}

static struct hello_gate *gate_with(struct hello_key key)
{
    struct hello_gate *g;
    assert_int_equal(hello_gate_new(&g), ERR_OK);
    assert_int_equal(hello_gate_add(g, &key), ERR_OK);
    return g;
}

static struct hello *initiator(struct hello_key key, uint8_t kind, struct hello_facts own,
                               const char *nonce)
{
    struct hello *h;
    assert_int_equal(hello_new_initiator(&key, kind, &own, (const uint8_t *)nonce, &h), ERR_OK);
    return h;
}

static struct hello *responder(struct hello_gate *g, struct hello_facts own, const char *nonce)
{
    struct hello *h;
    assert_int_equal(hello_new_responder(g, &own, (const uint8_t *)nonce, &h), ERR_OK);
    return h;
}

static void check_hex(const uint8_t *bytes, size_t n, const char *hex)
{
    uint8_t expected[HELLO_BYTES];
    char start[2 * HELLO_BYTES + 1] = "";
    memcpy(start, hex, 2 * n);
    assert_true(hex_decode(start, expected, n));
    assert_memory_equal(bytes, expected, n);
}

#define I_NONCE "IIIIIIIIIIIIIIII"
#define R_NONCE "RRRRRRRRRRRRRRRR"

static void test_conversation_is_as_others_compute_it(void **state)
{
    (void)state;
    struct hello_gate *g = gate_with(key_of(1));
    struct hello *a = initiator(key_of(0), HELLO_DATA, facts_of(0), I_NONCE);
    struct hello *b = responder(g, facts_of(1), R_NONCE);
    struct hello_update first, answer, proof, end;
    assert_int_equal(hello_step(a, NULL, 0, &first), ERR_OK);
    assert_int_equal(first.n_out, HELLO_BYTES);
    check_hex(first.out, HELLO_BYTES, initiator_hex);
    assert_int_equal(hello_wants(b), HELLO_BYTES);
    assert_int_equal(hello_step(b, first.out, first.n_out, &answer), ERR_OK);
    check_hex(answer.out, HELLO_BYTES, responder_hex);
    assert_false(answer.done);
    assert_int_equal(hello_step(a, answer.out, answer.n_out, &proof), ERR_OK);
    assert_true(proof.done);
    check_hex(proof.out, HELLO_PROOF_BYTES, proof_hex);
    assert_int_equal(hello_wants(b), HELLO_PROOF_BYTES);
    assert_int_equal(hello_step(b, proof.out, proof.n_out, &end), ERR_OK);
    assert_true(end.done);
    assert_int_equal(hello_wants(a) + hello_wants(b), 0);
    struct hello_result x, y;
    hello_result_get(a, &x);
    hello_result_get(b, &y);
    check_hex(x.keys.send, 32, traffic_hex);
    check_hex(x.keys.receive, 32, traffic_hex + 64);
    assert_memory_equal(y.keys.receive, x.keys.send, 32);
    assert_memory_equal(y.keys.send, x.keys.receive, 32);
    assert_int_equal(x.keys.cipher, SEAL_CHACHA20_POLY1305);
    assert_int_equal(x.protocol, 3);
    assert_int_equal(y.protocol, 3);
    assert_int_equal(x.frame_bytes_max, 1 << 19);
    assert_int_equal(y.theirs.arithmetic_version, 7);
    assert_int_equal(x.theirs.kernel_digest, 0xfedcba);
    assert_int_equal(x.peer.bytes[0], 2);
    assert_int_equal(y.peer.bytes[0], 1);
    assert_int_equal(y.kind, HELLO_DATA);
    hello_free(a);
    hello_free(b);
    hello_gate_free(g);
}

/* Every single changed bit of every message is refused, and a refusal is final. */
static void test_every_changed_bit_is_refused(void **state)
{
    (void)state;
    uint8_t first[HELLO_BYTES], answer[HELLO_BYTES], proof[HELLO_PROOF_BYTES];
    assert_true(hex_decode(initiator_hex, first, sizeof first));
    assert_true(hex_decode(responder_hex, answer, sizeof answer));
    assert_true(hex_decode(proof_hex, proof, sizeof proof));
    struct hello_update u;
    for (unsigned bit = 0; bit < HELLO_BYTES * 8; bit++) {
        struct hello_gate *g = gate_with(key_of(1));
        struct hello *a = initiator(key_of(0), HELLO_DATA, facts_of(0), I_NONCE);
        struct hello *b = responder(g, facts_of(1), R_NONCE);
        struct hello *c = responder(g, facts_of(1), R_NONCE);
        uint8_t mask = (uint8_t)(1u << bit % 8);
        first[bit / 8] ^= mask;
        assert_int_not_equal(hello_step(b, first, sizeof first, &u), ERR_OK);
        first[bit / 8] ^= mask;
        assert_int_equal(hello_step(b, first, 0, &u), ERR_INVALID);
        assert_int_equal(hello_step(a, NULL, 0, &u), ERR_OK);
        answer[bit / 8] ^= mask;
        assert_int_not_equal(hello_step(a, answer, sizeof answer, &u), ERR_OK);
        answer[bit / 8] ^= mask;
        if (bit < HELLO_PROOF_BYTES * 8) {
            assert_int_equal(hello_step(c, first, sizeof first, &u), ERR_OK);
            proof[bit / 8] ^= mask;
            assert_int_equal(hello_step(c, proof, sizeof proof, &u), ERR_DENIED);
            proof[bit / 8] ^= mask;
        }
        hello_free(a);
        hello_free(b);
        hello_free(c);
        hello_gate_free(g);
    }
}

static enum err first_step(struct hello_gate *g, const uint8_t first[HELLO_BYTES])
{
    struct hello_update u;
    struct hello *b = responder(g, facts_of(1), R_NONCE);
    enum err e = hello_step(b, first, HELLO_BYTES, &u);
    hello_free(b);
    return e;
}

static void test_replays_and_reflections_are_refused(void **state)
{
    (void)state;
    uint8_t first[HELLO_BYTES], proof[HELLO_PROOF_BYTES];
    assert_true(hex_decode(initiator_hex, first, sizeof first));
    assert_true(hex_decode(proof_hex, proof, sizeof proof));
    struct hello_gate *g = gate_with(key_of(1));
    assert_int_equal(first_step(g, first), ERR_OK);
    assert_int_equal(first_step(g, first), ERR_DENIED);
    hello_gate_free(g);
    /* A responder that forgot the nonce answers, but the captured proof fits no other nonce. */
    g = gate_with(key_of(1));
    struct hello *b = responder(g, facts_of(1), "another nonce ..");
    struct hello_update u;
    assert_int_equal(hello_step(b, first, sizeof first, &u), ERR_OK);
    assert_int_equal(hello_step(b, proof, sizeof proof, &u), ERR_DENIED);
    hello_free(b);
    hello_gate_free(g);
    /* Sent back to its own sender. */
    g = gate_with(key_of(0));
    assert_int_equal(first_step(g, first), ERR_DENIED);
    struct hello *a = initiator(key_of(0), HELLO_DATA, facts_of(0), I_NONCE);
    assert_int_equal(hello_step(a, NULL, 0, &u), ERR_OK);
    assert_int_not_equal(hello_step(a, first, sizeof first, &u), ERR_OK);
    hello_free(a);
    hello_gate_free(g);
    /* After a restart of either end. */
    struct hello_key restarted = key_of(1);
    restarted.own_boot_id++;
    g = gate_with(restarted);
    assert_int_equal(first_step(g, first), ERR_DENIED);
    hello_gate_free(g);
}

static void test_gate_forgets_ended_sessions(void **state)
{
    (void)state;
    uint8_t first[HELLO_BYTES], proof[HELLO_PROOF_BYTES];
    assert_true(hex_decode(initiator_hex, first, sizeof first));
    assert_true(hex_decode(proof_hex, proof, sizeof proof));
    struct hello_key k = key_of(1), newer = k;
    newer.secret[0]++;
    struct hello_gate *g = gate_with(k);
    assert_int_equal(hello_gate_add(g, &newer), ERR_OK);
    assert_int_equal(hello_gate_find(g, &k.peer)->secret[0], newer.secret[0]);
    struct hello *b = responder(g, facts_of(1), R_NONCE);
    struct hello_update u;
    assert_int_equal(hello_step(b, first, sizeof first, &u), ERR_OK);
    hello_gate_remove(g, k.secret);
    assert_int_equal(hello_step(b, proof, sizeof proof, &u), ERR_DENIED);
    hello_free(b);
    hello_gate_remove_peer(g, &k.peer);
    assert_null(hello_gate_find(g, &k.peer));
    for (int i = 0; i < HELLO_KEYS_MAX; i++) {
        k.secret[0] = (uint8_t)i;
        assert_int_equal(hello_gate_add(g, &k), ERR_OK);
        assert_int_equal(hello_gate_add(g, &k), ERR_OK);
    }
    k.secret[1]++;
    assert_int_equal(hello_gate_add(g, &k), ERR_LIMIT);
    hello_gate_free(g);
}

/* The whole conversation between two sets of facts; what the initiator ends with. */
static enum err converse(struct hello_facts x, struct hello_facts y, uint8_t *ret_cipher)
{
    struct hello_gate *g = gate_with(key_of(1));
    struct hello *a = initiator(key_of(0), HELLO_BULK, x, I_NONCE);
    struct hello *b = responder(g, y, R_NONCE);
    struct hello_update u;
    assert_int_equal(hello_step(a, NULL, 0, &u), ERR_OK);
    assert_int_equal(hello_step(b, u.out, u.n_out, &u), ERR_OK);
    enum err e = hello_step(a, u.out, u.n_out, &u);
    if (e == ERR_OK) {
        assert_int_equal(hello_step(b, u.out, u.n_out, &u), ERR_OK);
        struct hello_result r;
        hello_result_get(b, &r);
        *ret_cipher = r.keys.cipher;
        assert_int_equal(r.kind, HELLO_BULK);
    }
    hello_free(a);
    hello_free(b);
    hello_gate_free(g);
    return e;
}

static void test_versions_and_features_are_negotiated(void **state)
{
    (void)state;
    struct hello_facts x = facts_of(0), y = facts_of(1);
    uint8_t cipher = 0;
    x.features = y.features = HELLO_AES;
    assert_int_equal(converse(x, y, &cipher), ERR_OK);
    assert_int_equal(cipher, seal_has_aes() ? SEAL_AES_256_GCM : SEAL_CHACHA20_POLY1305);
    y.features = 0;
    assert_int_equal(converse(x, y, &cipher), ERR_OK);
    assert_int_equal(cipher, SEAL_CHACHA20_POLY1305);
    y.protocol_min = 4;
    assert_int_equal(converse(x, y, &cipher), ERR_UNSUPPORTED);
    y = facts_of(1);
    y.frame_bytes_max = 100;
    assert_int_equal(converse(x, y, &cipher), ERR_UNSUPPORTED);
}

/* ---- over sockets ---- */

struct lab {
    uv_loop_t loop;
    uv_timer_t guard;
    bool late;
    struct hello_gate *gate;
    struct data_port *port;
    int n_in, n_out;
    int in_fd, out_fd;
    enum err out_err;
    struct hello_result in, out;
};

static void on_guard(uv_timer_t *timer)
{
    ((struct lab *)timer->data)->late = true;
}

#define RUN_UNTIL(lab, condition)                                                                  \
    do {                                                                                           \
        (lab)->late = false;                                                                       \
        (void)uv_timer_start(&(lab)->guard, on_guard, GUARD_MS, 0);                                \
        while (!(condition) && !(lab)->late)                                                       \
            (void)uv_run(&(lab)->loop, UV_RUN_ONCE);                                               \
        (void)uv_timer_stop(&(lab)->guard);                                                        \
        assert_true(condition);                                                                    \
    } while (0)

static void on_in(void *context, int fd, const struct hello_result *r)
{
    struct lab *lab = context;
    lab->n_in++;
    lab->in_fd = fd;
    lab->in = *r;
}

static void on_out(void *context, enum err e, int fd, const struct hello_result *r)
{
    struct lab *lab = context;
    lab->n_out++;
    lab->out_err = e;
    lab->out_fd = fd;
    if (r)
        lab->out = *r;
}

static struct lab *lab_new(void)
{
    struct lab *lab = calloc(1, sizeof *lab);
    assert_int_equal(uv_loop_init(&lab->loop), 0);
    assert_int_equal(uv_timer_init(&lab->loop, &lab->guard), 0);
    lab->guard.data = lab;
    lab->gate = gate_with(key_of(1));
    struct data_port_options o = {
        .gate = lab->gate, .own = facts_of(1), .context = lab, .on_connection = on_in};
    struct err_text text;
    assert_int_equal(data_port_new(&lab->loop, &o, &lab->port, &text), ERR_OK);
    return lab;
}

static void lab_free(struct lab *lab)
{
    data_port_close(lab->port);
    uv_close((uv_handle_t *)&lab->guard, NULL);
    while (uv_run(&lab->loop, UV_RUN_DEFAULT))
        ;
    assert_int_equal(uv_loop_close(&lab->loop), 0);
    hello_gate_free(lab->gate);
    free(lab);
}

static struct address port_address(const struct lab *lab)
{
    struct address a;
    assert_int_equal(net_address_parse("127.0.0.1", data_port_port(lab->port), &a), ERR_OK);
    return a;
}

static void dial(struct lab *lab, struct hello_key key)
{
    struct data_dial_options o = {.to = port_address(lab),
                                  .kind = HELLO_DATA,
                                  .key = key,
                                  .own = facts_of(0),
                                  .context = lab,
                                  .on_done = on_out};
    struct data_dial *d;
    lab->n_out = 0;
    assert_int_equal(data_dial_new(&lab->loop, &o, &d), ERR_OK);
    RUN_UNTIL(lab, lab->n_out == 1);
}

static int raw_connection(struct lab *lab)
{
    struct address to = port_address(lab);
    struct sockaddr_storage s;
    socklen_t n = net_address_to(&to, &s);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&s, n), 0);
    return fd;
}

static bool is_closed(int fd)
{
    struct pollfd p = {fd, POLLIN, 0};
    char byte;
    return poll(&p, 1, 0) == 1 && recv(fd, &byte, 1, MSG_DONTWAIT) <= 0;
}

static void test_dial_gives_a_working_link(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    dial(lab, key_of(0));
    assert_int_equal(lab->out_err, ERR_OK);
    /* Sent before the other side has taken the proof: no byte of it may be lost. */
    struct link_tcp_options o = {
        .fd = lab->out_fd, .keys = lab->out.keys, .frame_bytes_max = lab->out.frame_bytes_max};
    struct link *a, *b;
    assert_int_equal(link_tcp_new(&o, &a), ERR_OK);
    struct buf scratch = BUF_INIT(4096);
    struct frame *f = calloc(1, sizeof *f);
    f->header.type = FRAME_BYE;
    assert_int_equal(link_send_frame(a, f, NULL, &scratch), ERR_OK);
    RUN_UNTIL(lab, lab->n_in == 1);
    assert_int_equal(data_port_pending(lab->port), 0);
    o = (struct link_tcp_options){
        .fd = lab->in_fd, .keys = lab->in.keys, .frame_bytes_max = lab->in.frame_bytes_max};
    assert_int_equal(link_tcp_new(&o, &b), ERR_OK);
    struct link_ready ready;
    const uint8_t *bytes;
    size_t n;
    assert_int_equal(link_wait(&b, 1, -1, GUARD_MS * 1000ull, 0, &ready), ERR_OK);
    assert_int_equal(link_receive(b, &bytes, &n), ERR_OK);
    assert_int_equal(frame_decode(bytes, n, f), ERR_OK);
    assert_int_equal(f->header.type, FRAME_BYE);
    free(f);
    buf_deinit(&scratch);
    link_free(a);
    link_free(b);
    lab_free(lab);
}

static void test_wrong_key_is_shut_out(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct hello_key wrong = key_of(0);
    wrong.secret[5]++;
    dial(lab, wrong);
    assert_int_equal(lab->out_err, ERR_CLOSED);
    struct hello_key restarted = key_of(0);
    restarted.own_boot_id++;
    dial(lab, restarted);
    assert_int_equal(lab->out_err, ERR_CLOSED);
    assert_int_equal(lab->n_in, 0);
    assert_int_equal(data_port_pending(lab->port), 0);
    lab_free(lab);
}

/* Random bytes are closed after the fixed size, and what comes after it is never read. */
static void test_noise_is_closed(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    int fd = raw_connection(lab);
    uint8_t noise[HELLO_BYTES];
    memset(noise, 0x5a, sizeof noise);
    assert_int_equal(send(fd, noise, sizeof noise, 0), sizeof noise);
    RUN_UNTIL(lab, is_closed(fd));
    assert_int_equal(lab->n_in, 0);
    (void)close(fd);
    lab_free(lab);
}

/* One more than may wait: the oldest goes, the newest stay, and a member still gets in. */
static void test_strangers_are_bounded(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    int fds[STRANGERS];
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = raw_connection(lab);
        assert_int_equal(send(fds[i], "COVEY", 5, 0), 5);
    }
    RUN_UNTIL(lab, is_closed(fds[0]));
    assert_int_equal(data_port_pending(lab->port), HELLO_PENDING_MAX);
    assert_false(is_closed(fds[STRANGERS - 1]));
    dial(lab, key_of(0));
    assert_int_equal(lab->out_err, ERR_OK);
    RUN_UNTIL(lab, lab->n_in == 1);
    assert_true(data_port_pending(lab->port) < HELLO_PENDING_MAX);
    closep(&lab->in_fd);
    closep(&lab->out_fd);
    for (int i = 0; i < STRANGERS; i++)
        (void)close(fds[i]);
    RUN_UNTIL(lab, data_port_pending(lab->port) == 0);
    lab_free(lab);
}

static void test_silence_meets_the_deadline(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    int fd = raw_connection(lab);
    RUN_UNTIL(lab, data_port_pending(lab->port) == 1);
    RUN_UNTIL(lab, is_closed(fd)); /* HELLO_TIMEOUT_MS */
    assert_int_equal(data_port_pending(lab->port), 0);
    (void)close(fd);
    lab_free(lab);
}

/* A captured conversation, sent again as it was. */
static void test_captured_conversation_gets_nowhere(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    uint8_t first[HELLO_BYTES], proof[HELLO_PROOF_BYTES];
    assert_true(hex_decode(initiator_hex, first, sizeof first));
    assert_true(hex_decode(proof_hex, proof, sizeof proof));
    for (int i = 0; i < 2; i++) {
        int fd = raw_connection(lab);
        assert_int_equal(send(fd, first, sizeof first, 0), sizeof first);
        assert_int_equal(send(fd, proof, sizeof proof, MSG_NOSIGNAL), sizeof proof);
        uint8_t answer[HELLO_BYTES];
        struct pollfd p = {fd, POLLIN, 0};
        RUN_UNTIL(lab, (uv_run(&lab->loop, UV_RUN_NOWAIT), poll(&p, 1, 0)) == 1);
        if (i == 0) /* the nonce is new to this responder, so it answers */
            assert_int_equal(recv(fd, answer, sizeof answer, MSG_WAITALL), sizeof answer);
        RUN_UNTIL(lab, is_closed(fd));
        (void)close(fd);
    }
    assert_int_equal(lab->n_in, 0);
    lab_free(lab);
}

static void test_cancelled_dial_is_silent(void **state)
{
    (void)state;
    struct lab *lab = lab_new();
    struct data_dial_options o = {.to = port_address(lab),
                                  .kind = HELLO_DATA,
                                  .key = key_of(0),
                                  .own = facts_of(0),
                                  .context = lab,
                                  .on_done = on_out};
    struct data_dial *d;
    assert_int_equal(data_dial_new(&lab->loop, &o, &d), ERR_OK);
    data_dial_cancel(d);
    o.kind = 0;
    assert_int_equal(data_dial_new(&lab->loop, &o, &d), ERR_INVALID);
    for (int i = 0; i < 4; i++)
        (void)uv_run(&lab->loop, UV_RUN_NOWAIT);
    assert_int_equal(lab->n_out, 0);
    lab_free(lab);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_conversation_is_as_others_compute_it),
        cmocka_unit_test(test_every_changed_bit_is_refused),
        cmocka_unit_test(test_replays_and_reflections_are_refused),
        cmocka_unit_test(test_gate_forgets_ended_sessions),
        cmocka_unit_test(test_versions_and_features_are_negotiated),
        cmocka_unit_test(test_dial_gives_a_working_link),
        cmocka_unit_test(test_wrong_key_is_shut_out),
        cmocka_unit_test(test_noise_is_closed),
        cmocka_unit_test(test_strangers_are_bounded),
        cmocka_unit_test(test_silence_meets_the_deadline),
        cmocka_unit_test(test_captured_conversation_gets_nowhere),
        cmocka_unit_test(test_cancelled_dial_is_silent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
