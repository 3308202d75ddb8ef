/* Tokens, identities and the files that hold them. */
#include "base/rng.h"
#include "base/util.h"
#include "proto/identity_file.h"
#include "proto/noise.h"
#include "proto/token.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static void fill(void *ctx, uint8_t *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (uint8_t)rng_u64(ctx);
}

/* The check value of CRC-12/DECT (also called X-CRC-12) in the catalogue of parametrised CRC
 * algorithms (reveng.sourceforge.io): f5b over "123456789". */
static void test_token_crc_agrees_with_the_catalogue(void **state)
{
    (void)state;
    assert_int_equal(token_crc12((const uint8_t *)"123456789", 9), 0xf5b);
}

/* Made with Python: n = 0xff00443214c74254b635cf84653a56d7 << 12 | crc, then
 * "".join("0123456789ABCDEFGHJKMNPQRSTVWXYZ"[n >> 5 * (27 - i) & 31] for i in range(28)). */
static void test_token_is_written_in_crockford_base32(void **state)
{
    (void)state;
    struct token t = {{0xff, 0x00, 0x44, 0x32, 0x14, 0xc7, 0x42, 0x54, 0xb6, 0x35, 0xcf, 0x84, 0x65,
                       0x3a, 0x56, 0xd7}};
    char text[TOKEN_TEXT_MAX];
    token_format(&t, text);
    assert_int_equal(strlen(text), TOKEN_CHARS);
    assert_string_equal(text, "ZW048CGMRX159DHNSY26AEJPTZGG");
    struct token back;
    assert_int_equal(token_parse(text, &back), ERR_OK);
    assert_memory_equal(&back, &t, sizeof t);
}

static void test_token_reads_what_people_write(void **state)
{
    (void)state;
    struct rng rng;
    rng_seed(&rng, 1);
    for (int i = 0; i < 200; i++) {
        struct token t, back;
        char text[TOKEN_TEXT_MAX], loose[3 * TOKEN_TEXT_MAX];
        fill(&rng, t.bytes, sizeof t.bytes);
        token_format(&t, text);
        size_t n = 0;
        for (size_t k = 0; k < TOKEN_CHARS; k++) {
            char c = text[k];
            if (k % 4 == 0 && k)
                loose[n++] = i % 2 ? '-' : ' ';
            if (c == '0')
                c = i % 3 ? 'o' : 'O';
            else if (c == '1')
                c = i % 3 == 0 ? 'l' : i % 3 == 1 ? 'I' : 'i';
            else if (c >= 'A' && i % 2)
                c = (char)(c - 'A' + 'a');
            loose[n++] = c;
        }
        loose[n++] = '\n';
        loose[n] = 0;
        assert_int_equal(token_parse(loose, &back), ERR_OK);
        assert_memory_equal(&back, &t, sizeof t);
    }
}

/* Every wrong character and every swap of neighbours is noticed, not only most. */
static void test_token_notices_typos(void **state)
{
    (void)state;
    static const char alphabet[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    struct rng rng;
    rng_seed(&rng, 2);
    for (int i = 0; i < 50; i++) {
        struct token t, back;
        char text[TOKEN_TEXT_MAX + 1], wrong[64];
        fill(&rng, t.bytes, sizeof t.bytes);
        token_format(&t, text);
        for (size_t k = 0; k < TOKEN_CHARS; k++) {
            for (size_t c = 0; c < 32; c++) {
                memcpy(wrong, text, sizeof text);
                wrong[k] = alphabet[c];
                assert_int_equal(token_parse(wrong, &back),
                                 alphabet[c] == text[k] ? ERR_OK : ERR_INVALID);
            }
            memcpy(wrong, text, sizeof text);
            wrong[k] = text[k + 1];
            wrong[k + 1] = text[k];
            if (k + 1 < TOKEN_CHARS && text[k] != text[k + 1])
                assert_int_equal(token_parse(wrong, &back), ERR_INVALID);
            memcpy(wrong, text, sizeof text);
            wrong[k] = 0;
            assert_int_equal(token_parse(wrong, &back), ERR_INVALID);
        }
        (void)snprintf(wrong, sizeof wrong, "%s0", text);
        assert_int_equal(token_parse(wrong, &back), ERR_INVALID);
        (void)snprintf(wrong, sizeof wrong, "%.27sU", text);
        assert_int_equal(token_parse(wrong, &back), ERR_INVALID);
    }
}

static void test_token_psk_and_tag_differ(void **state)
{
    (void)state;
    struct token a = {{1}}, b = {{2}};
    uint8_t psk_a[32], psk_b[32], tag_a[TOKEN_TAG_BYTES], tag_b[TOKEN_TAG_BYTES];
    token_psk(&a, psk_a);
    token_psk(&b, psk_b);
    token_tag(&a, tag_a);
    token_tag(&b, tag_b);
    assert_memory_not_equal(psk_a, psk_b, 32);
    assert_memory_not_equal(tag_a, tag_b, sizeof tag_a);
    assert_memory_not_equal(psk_a, tag_a, sizeof tag_a);
}

static void test_identity_comes_back_from_its_stored_form(void **state)
{
    (void)state;
    struct rng rng;
    rng_seed(&rng, 3);
    struct hash256 machine = {{7}};
    struct identity id, back;
    uint8_t stored[IDENTITY_STORED_BYTES], public_key[32];
    identity_make((struct random_source){fill, &rng}, &machine, &id);
    identity_encode(&id, stored);
    assert_int_equal(identity_decode(stored, sizeof stored, &back), ERR_OK);
    assert_memory_equal(&back, &id, sizeof id);
    noise_public_key(id.static_secret, public_key);
    assert_memory_equal(public_key, id.static_public, 32);
    for (size_t i = 0; i < sizeof stored; i++) {
        assert_int_equal(identity_decode(stored, i, &back), ERR_CORRUPT);
        stored[i] ^= 0x20;
        assert_int_not_equal(identity_decode(stored, sizeof stored, &back), ERR_OK);
        stored[i] ^= 0x20;
    }
    stored[7] = 2;
    assert_int_equal(identity_decode(stored, sizeof stored, &back), ERR_UNSUPPORTED);
}

/* RFC 8032, section 7.1, test 1: the public key of this seed. */
static void test_identity_key_is_ed25519(void **state)
{
    (void)state;
    struct hash256 machine = {{0}};
    struct identity id;
    uint8_t stored[IDENTITY_STORED_BYTES], seed[32];
    char hex[HEX_ID_MAX];
    struct rng rng;
    rng_seed(&rng, 4);
    identity_make((struct random_source){fill, &rng}, &machine, &id);
    assert_true(hex_decode("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60", seed,
                           sizeof seed));
    memcpy(id.sign_secret, seed, sizeof seed);
    identity_encode(&id, stored);
    assert_int_equal(identity_decode(stored, sizeof stored, &id), ERR_OK);
    hex_of_32(id.id.bytes, hex);
    assert_string_equal(hex, "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
}

static void test_identity_signatures_are_bound_to_their_kind(void **state)
{
    (void)state;
    struct rng rng;
    rng_seed(&rng, 5);
    struct hash256 machine = {{0}};
    struct identity id, other;
    uint8_t signature[IDENTITY_SIGNATURE_BYTES];
    const uint8_t text[] = "admit them";
    identity_make((struct random_source){fill, &rng}, &machine, &id);
    identity_make((struct random_source){fill, &rng}, &machine, &other);
    identity_sign(&id, "record", text, sizeof text, signature);
    assert_true(identity_verify(&id.id, "record", text, sizeof text, signature));
    assert_false(identity_verify(&id.id, "revocation", text, sizeof text, signature));
    assert_false(identity_verify(&id.id, "record", text, sizeof text - 1, signature));
    assert_false(identity_verify(&other.id, "record", text, sizeof text, signature));
    signature[40] ^= 1;
    assert_false(identity_verify(&id.id, "record", text, sizeof text, signature));
    assert_true(identity_verify_static(&id.id, id.static_public, id.static_signature));
    assert_false(identity_verify_static(&id.id, other.static_public, id.static_signature));
}

struct folder {
    char path[64], file[96], extra[96];
};

static void folder_make(struct folder *f)
{
    (void)snprintf(f->path, sizeof f->path, "/tmp/covey-test-XXXXXX");
    assert_non_null(mkdtemp(f->path));
    (void)snprintf(f->file, sizeof f->file, "%s/key", f->path);
    (void)snprintf(f->extra, sizeof f->extra, "%s/key.new", f->path);
}

static void folder_remove(struct folder *f)
{
    (void)unlink(f->file);
    (void)unlink(f->extra);
    assert_int_equal(rmdir(f->path), 0);
}

static void test_identity_file_lasts_and_notices_another_machine(void **state)
{
    (void)state;
    struct folder f;
    struct rng rng;
    struct hash256 here = {{1}}, there = {{2}}, nowhere = {{0}};
    struct identity first, again;
    enum identity_origin origin;
    struct err_text text;
    struct random_source random = {fill, &rng};
    struct stat st;
    rng_seed(&rng, 6);
    folder_make(&f);
    assert_int_equal(identity_file_open(f.file, &here, random, &first, &origin, &text), ERR_OK);
    assert_int_equal(origin, IDENTITY_NEW);
    assert_int_equal(stat(f.file, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    assert_int_not_equal(access(f.extra, F_OK), 0);
    assert_int_equal(identity_file_open(f.file, &here, random, &again, &origin, &text), ERR_OK);
    assert_int_equal(origin, IDENTITY_LOADED);
    assert_memory_equal(&again, &first, sizeof first);
    /* A machine without an id proves nothing. */
    assert_int_equal(identity_file_open(f.file, &nowhere, random, &again, &origin, &text), ERR_OK);
    assert_int_equal(origin, IDENTITY_LOADED);
    assert_int_equal(identity_file_open(f.file, &there, random, &again, &origin, &text), ERR_OK);
    assert_int_equal(origin, IDENTITY_CLONED);
    assert_false(node_id_eq(&again.id, &first.id));
    assert_int_equal(identity_file_open(f.file, &there, random, &first, &origin, &text), ERR_OK);
    assert_int_equal(origin, IDENTITY_LOADED);
    assert_true(node_id_eq(&again.id, &first.id));
    folder_remove(&f);
}

static void test_identity_file_that_is_wrong_is_not_replaced(void **state)
{
    (void)state;
    struct folder f;
    struct rng rng;
    struct hash256 here = {{1}};
    struct identity id;
    enum identity_origin origin;
    struct err_text text;
    struct random_source random = {fill, &rng};
    rng_seed(&rng, 7);
    folder_make(&f);
    assert_int_equal(secret_file_write(f.file, (const uint8_t *)"hello", 5), ERR_OK);
    assert_int_equal(identity_file_open(f.file, &here, random, &id, &origin, &text), ERR_CORRUPT);
    assert_non_null(strstr(text.text, f.file));
    struct buf b = BUF_INIT(100);
    assert_int_equal(secret_file_read(f.file, &b), ERR_OK);
    assert_string_equal(buf_cstr(&b), "hello");
    b.len = 0;
    b.max = 4;
    assert_int_equal(secret_file_read(f.file, &b), ERR_LIMIT);
    assert_int_equal(chmod(f.file, 0640), 0);
    assert_int_equal(identity_file_open(f.file, &here, random, &id, &origin, &text), ERR_DENIED);
    assert_non_null(strstr(text.text, "chmod 600"));
    assert_int_equal(secret_file_read("/tmp/covey-test-none/key", &b), ERR_NOT_FOUND);
    assert_int_equal(secret_file_write("/tmp/covey-test-none/key", b.data, 1), ERR_IO);
    buf_deinit(&b);
    folder_remove(&f);
}

static void test_machine_id_is_the_same_twice(void **state)
{
    (void)state;
    struct hash256 a, b;
    enum err e = machine_id_digest(&a);
    assert_true(e == ERR_OK || e == ERR_NOT_FOUND);
    assert_int_equal(machine_id_digest(&b), e);
    if (e == ERR_OK)
        assert_true(hash256_eq(&a, &b));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_token_crc_agrees_with_the_catalogue),
        cmocka_unit_test(test_token_is_written_in_crockford_base32),
        cmocka_unit_test(test_token_reads_what_people_write),
        cmocka_unit_test(test_token_notices_typos),
        cmocka_unit_test(test_token_psk_and_tag_differ),
        cmocka_unit_test(test_identity_comes_back_from_its_stored_form),
        cmocka_unit_test(test_identity_key_is_ed25519),
        cmocka_unit_test(test_identity_signatures_are_bound_to_their_kind),
        cmocka_unit_test(test_identity_file_lasts_and_notices_another_machine),
        cmocka_unit_test(test_identity_file_that_is_wrong_is_not_replaced),
        cmocka_unit_test(test_machine_id_is_the_same_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
