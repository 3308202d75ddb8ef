/* The Noise handshake against tests/vectors/noise_xx.txt (its head says where they come from), and
 * the ways in which a message may be wrong. */
#include "base/id.h"
#include "proto/noise.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char prologue_hex[] = "4a6f686e2047616c74";
static const char psk_hex[] = "54686973206973206d7920417573747269616e20706572737065637469766521";
static const char *const keys_hex[2][2] = {
    {"e61ef9919cde45dd5f82166404bd08e38bceb5dfdfded0a34c8df7ed542214d1",
     "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"},
    {"4a3acbfdb163dec651dfa3194dece676d437029c62a408b4c5ea9114246e4893",
     "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"},
};

static void start(struct noise_handshake *h, enum noise_pattern pattern, enum noise_role role)
{
    uint8_t prologue[9], psk[32], secret[32], public_key[32], ephemeral[32];
    assert_true(hex_decode(prologue_hex, prologue, sizeof prologue));
    assert_true(hex_decode(psk_hex, psk, sizeof psk));
    assert_true(hex_decode(keys_hex[role][0], secret, sizeof secret));
    assert_true(hex_decode(keys_hex[role][1], ephemeral, sizeof ephemeral));
    noise_public_key(secret, public_key);
    noise_start(h, &(struct noise_options){.pattern = pattern,
                                           .role = role,
                                           .prologue = prologue,
                                           .n_prologue = sizeof prologue,
                                           .static_public = public_key,
                                           .static_secret = secret,
                                           .ephemeral_secret = ephemeral,
                                           .psk = pattern == NOISE_XX ? NULL : psk});
}

struct vector_run {
    struct noise_handshake side[2];
    struct noise_cipher send[2], receive[2];
    int line;
};

/* One line of the file: the writer's bytes are the vector's, and the reader gets the payload back.
 */
static void run_line(struct vector_run *run, const char *payload_hex, const char *cipher_hex)
{
    uint8_t payload[256], expected[512], message[512], read[256];
    size_t n = strlen(payload_hex) / 2, n_expected = strlen(cipher_hex) / 2;
    assert_true(hex_decode(payload_hex, payload, n) &&
                hex_decode(cipher_hex, expected, n_expected));
    int writer = run->line % 2;
    struct noise_handshake *w = &run->side[writer], *r = &run->side[!writer];
    if (run->line < NOISE_MESSAGES) {
        assert_int_equal(noise_overhead(w) + n, n_expected);
        assert_int_equal(noise_write(w, payload, n, message), ERR_OK);
        assert_int_equal(noise_read(r, message, n_expected, read), ERR_OK);
    } else {
        assert_int_equal(noise_seal(&run->send[writer], NULL, 0, payload, n, message), ERR_OK);
        assert_int_equal(noise_open(&run->receive[!writer], NULL, 0, message, n_expected, read),
                         ERR_OK);
    }
    assert_memory_equal(message, expected, n_expected);
    assert_memory_equal(read, payload, n);
    if (++run->line == NOISE_MESSAGES) {
        uint8_t exported[2][NOISE_HASH_BYTES];
        for (int i = 0; i < 2; i++)
            noise_split(&run->side[i], &run->send[i], &run->receive[i], exported[i]);
        assert_memory_equal(exported[0], exported[1], NOISE_HASH_BYTES);
        assert_memory_equal(run->side[0].peer_static, run->side[1].static_public, 32);
        assert_memory_equal(run->side[1].peer_static, run->side[0].static_public, 32);
    }
}

static void test_noise_agrees_with_published_vectors(void **state)
{
    (void)state;
    static const char *const names[NOISE_PATTERN_N] = {"Noise_XX_", "Noise_XXpsk0_",
                                                       "Noise_XXpsk3_"};
    char path[4096], line[2048], hash[256] = "";
    (void)snprintf(path, sizeof path, "%s/tests/vectors/noise_xx.txt", getenv("COVEY_SOURCE"));
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    struct vector_run run = {.line = 99};
    int n_lines = 0, n_hashes = 0;
    while (fgets(line, sizeof line, f)) {
        char a[1024], b[1024];
        if (line[0] == '#' || sscanf(line, "%1023s %1023s", a, b) != 2)
            continue;
        if (strcmp(a, "protocol") == 0) {
            for (int p = 0; p < NOISE_PATTERN_N; p++) {
                if (strncmp(b, names[p], strlen(names[p])) != 0)
                    continue;
                for (int i = 0; i < 2; i++)
                    start(&run.side[i], (enum noise_pattern)p, (enum noise_role)i);
                run.line = 0;
            }
            hash[0] = 0;
        } else if (strcmp(a, "hash") == 0) {
            (void)snprintf(hash, sizeof hash, "%.255s", b);
        } else {
            run_line(&run, a, b);
            n_lines++;
            uint8_t expected[NOISE_HASH_BYTES];
            if (run.line == 2 && hash[0]) {
                assert_true(hex_decode(hash, expected, sizeof expected));
                assert_memory_equal(run.side[0].hash, expected, sizeof expected);
                assert_memory_equal(run.side[1].hash, expected, sizeof expected);
                n_hashes++;
            }
        }
    }
    (void)fclose(f);
    assert_int_equal(n_lines, 18);
    assert_int_equal(n_hashes, 1);
}

/* Every bit of every handshake message matters: with one flipped the reader or, for a bare
 * ephemeral key, the next reader refuses. */
static void test_noise_notices_every_changed_bit(void **state)
{
    (void)state;
    for (int at = 0; at < NOISE_MESSAGES; at++) {
        for (size_t bit = 0;; bit++) {
            struct noise_handshake side[2];
            start(&side[0], NOISE_XX_PSK0, NOISE_INITIATOR);
            start(&side[1], NOISE_XX_PSK0, NOISE_RESPONDER);
            bool past_end = false, refused = false;
            for (int i = 0; i <= at; i++) {
                uint8_t message[256], none[1];
                size_t n = noise_overhead(&side[i % 2]);
                assert_true(n <= sizeof message);
                assert_int_equal(noise_write(&side[i % 2], NULL, 0, message), ERR_OK);
                past_end = i == at && bit >= 8 * n;
                if (i == at && !past_end)
                    message[bit / 8] ^= (uint8_t)(1 << (bit % 8));
                refused = noise_read(&side[!(i % 2)], message, n, none) != ERR_OK;
            }
            if (past_end)
                break;
            assert_true(refused);
        }
    }
}

static void test_noise_refuses_another_psk_at_the_first_message(void **state)
{
    (void)state;
    struct noise_handshake side[2];
    start(&side[0], NOISE_XX_PSK0, NOISE_INITIATOR);
    start(&side[1], NOISE_XX_PSK0, NOISE_RESPONDER);
    side[1].psk[31] ^= 1;
    uint8_t message[64], none[1];
    size_t n = noise_overhead(&side[0]);
    assert_int_equal(noise_write(&side[0], NULL, 0, message), ERR_OK);
    assert_int_equal(noise_read(&side[1], message, n, none), ERR_DENIED);
}

/* A key of low order would make the shared secret known to all. */
static void test_noise_refuses_keys_of_low_order(void **state)
{
    (void)state;
    struct noise_handshake h;
    start(&h, NOISE_XX, NOISE_RESPONDER);
    uint8_t message[32] = {0}, out[256];
    assert_int_equal(noise_read(&h, message, sizeof message, out), ERR_OK);
    assert_int_equal(noise_write(&h, NULL, 0, out), ERR_DENIED);
}

static void test_noise_rekey_keeps_both_ends_together(void **state)
{
    (void)state;
    struct noise_cipher a = {.has_key = true, .nonce = 7}, b = a, old = a;
    uint8_t text[5] = "hello", sealed[5 + NOISE_TAG_BYTES], out[5];
    noise_rekey(&a);
    noise_rekey(&b);
    assert_memory_not_equal(a.key, old.key, sizeof a.key);
    assert_int_equal(noise_seal(&a, NULL, 0, text, 5, sealed), ERR_OK);
    assert_int_equal(noise_open(&old, NULL, 0, sealed, sizeof sealed, out), ERR_DENIED);
    assert_int_equal(noise_open(&b, NULL, 0, sealed, sizeof sealed, out), ERR_OK);
    assert_memory_equal(out, text, 5);
    a.nonce = UINT64_MAX;
    assert_int_equal(noise_seal(&a, NULL, 0, text, 5, sealed), ERR_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_noise_agrees_with_published_vectors),
        cmocka_unit_test(test_noise_notices_every_changed_bit),
        cmocka_unit_test(test_noise_refuses_another_psk_at_the_first_message),
        cmocka_unit_test(test_noise_refuses_keys_of_low_order),
        cmocka_unit_test(test_noise_rekey_keeps_both_ends_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
