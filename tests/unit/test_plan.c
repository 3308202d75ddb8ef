/* Plans: checks, seal, wire. The seal's expected value comes from an independent computation
 * (Python's hashlib over the canonical bytes,
 * see below). */
#include "base/buf.h"
#include "planner/plan_wire.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static struct plan two_stages(void)
{
    struct plan p;
    memset(&p, 0, sizeof p);
    p.epoch.term = 7;
    p.epoch.sequence = 3;
    memset(p.epoch.planner.bytes, 0xaa, 32);
    memset(p.model.bytes, 0x55, 32);
    strcpy(p.model_name, "tiny");
    p.n_layers = 5;
    p.context = 2048;
    p.arithmetic_version = 1;
    p.predicted_token_us = 1500.5;
    p.predicted_prefill_us = 0.25;
    p.n_stages = 2;
    memset(p.stages[0].node.bytes, 1, 32);
    memset(p.stages[1].node.bytes, 2, 32);
    p.stages[0].boot_id = 11;
    p.stages[1].boot_id = 12;
    p.stages[0].n_layers = 2;
    p.stages[1].first_layer = 2;
    p.stages[1].n_layers = 3;
    p.stages[0].memory_bytes = 1000;
    p.stages[1].memory_bytes = 2000;
    plan_seal(&p);
    return p;
}

/* python3 -c 'import hashlib,struct as s
 * b=b"covey plan
 * v1\0\0\0"+s.pack("<Q",7)+b"\xaa"*32+s.pack("<Q",3)+b"\x55"*32+s.pack("<I",4)+b"tiny"
 * b+=s.pack("<IIBBIddI",5,2048,0,0,1,1500.5,.25,2)
 * for n,boot,f,l,m in((1,11,0,2,1000),(2,12,2,3,2000)): b+=bytes([n])*32+s.pack("<QIIQ",boot,f,l,m)
 * print(hashlib.blake2b(b,digest_size=32).hexdigest())' */
#define SEAL_EXPECTED "d77b39df9c9cfd70e447a91bb9130ef18b25b95018b4db662cbdd988258a2f5a"

static void test_seal_is_blake2b_of_the_canonical_bytes(void **state)
{
    (void)state;
    struct plan p = two_stages();
    char hex[HEX_ID_MAX];
    hex_of_32(p.epoch.hash.bytes, hex);
    assert_string_equal(hex, SEAL_EXPECTED);
    assert_int_equal(plan_check(&p), ERR_OK);
    assert_true(epoch_alias(&p.epoch) != 0);
}

typedef void change(struct plan *p);
static void gap(struct plan *p)
{
    p->stages[1].first_layer = 3;
    p->stages[1].n_layers = 2;
}
static void overlap(struct plan *p)
{
    p->stages[1].first_layer = 1;
    p->stages[1].n_layers = 4;
}
static void too_short(struct plan *p)
{
    p->stages[1].n_layers = 2;
}
static void too_long(struct plan *p)
{
    p->stages[1].n_layers = UINT32_MAX;
}
static void empty_stage(struct plan *p)
{
    p->stages[0].n_layers = 0;
    p->stages[1].first_layer = 0;
    p->stages[1].n_layers = 5;
}
static void same_node_twice(struct plan *p)
{
    p->stages[1].node = p->stages[0].node;
}
static void no_stages(struct plan *p)
{
    p->n_stages = 0;
}
static void many_stages(struct plan *p)
{
    p->n_stages = PLAN_STAGES_MAX + 1;
}
static void no_context(struct plan *p)
{
    p->context = 0;
}
static void not_a_number(struct plan *p)
{
    p->predicted_token_us = NAN;
}
static void unended_name(struct plan *p)
{
    memset(p->model_name, 'a', sizeof p->model_name);
}
static void escape_in_name(struct plan *p)
{
    p->model_name[1] = '\033';
}

static void test_check_refuses_what_makes_no_sense(void **state)
{
    (void)state;
    change *changes[] = {gap,         overlap,         too_short,    too_long,
                         empty_stage, same_node_twice, no_stages,    many_stages,
                         no_context,  not_a_number,    unended_name, escape_in_name};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        struct plan p = two_stages();
        changes[i](&p);
        plan_seal(&p);
        assert_int_equal(plan_check(&p), ERR_CORRUPT);
    }
    struct plan p = two_stages();
    p.precision = 9;
    plan_seal(&p);
    assert_int_equal(plan_check(&p), ERR_UNSUPPORTED);
}

static void test_every_field_is_sealed(void **state)
{
    (void)state;
    struct plan p;
#define TAMPER(field)                                                                              \
    p = two_stages();                                                                              \
    p.field++;                                                                                     \
    assert_int_equal(plan_check(&p), ERR_CORRUPT)
    TAMPER(epoch.term);
    TAMPER(epoch.sequence);
    TAMPER(epoch.planner.bytes[31]);
    TAMPER(epoch.hash.bytes[0]);
    TAMPER(model.bytes[0]);
    TAMPER(model_name[0]);
    TAMPER(context);
    TAMPER(precision);
    TAMPER(arithmetic_version);
    TAMPER(stages[0].boot_id);
    TAMPER(stages[1].memory_bytes);
    TAMPER(stages[1].node.bytes[0]);
    TAMPER(predicted_token_us);
    TAMPER(predicted_prefill_us);
}

static void test_wire_round_trip_and_every_cut(void **state)
{
    (void)state;
    struct plan p = two_stages(), back;
    struct buf b = BUF_INIT(PLAN_WIRE_MAX);
    assert_int_equal(plan_encode(&p, &b), ERR_OK);
    assert_int_equal(plan_decode(b.data, b.len, &back), ERR_OK);
    assert_memory_equal(&p, &back, sizeof p);
    for (size_t n = 0; n < b.len; n++)
        assert_int_not_equal(plan_decode(b.data, n, &back), ERR_OK);
    for (size_t i = 0; i < b.len; i++) {
        b.data[i] ^= 0x10;
        if (plan_decode(b.data, b.len, &back) == ERR_OK) /* then it was no byte of a known field */
            assert_memory_equal(&p, &back, sizeof p);
        b.data[i] ^= 0x10;
    }
    buf_deinit(&b);
}

static void test_epochs_are_ordered_by_term_planner_sequence(void **state)
{
    (void)state;
    struct epoch a = two_stages().epoch, b = a;
    assert_true(epoch_eq(&a, &b));
    b.sequence++;
    assert_true(epoch_cmp(&a, &b) < 0);
    a.planner.bytes[0] = 0xab;
    assert_true(epoch_cmp(&a, &b) > 0);
    b.term++;
    assert_true(epoch_cmp(&a, &b) < 0);
    memset(a.hash.bytes, 0, sizeof a.hash.bytes);
    assert_true(epoch_alias(&a) == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seal_is_blake2b_of_the_canonical_bytes),
        cmocka_unit_test(test_check_refuses_what_makes_no_sense),
        cmocka_unit_test(test_every_field_is_sealed),
        cmocka_unit_test(test_wire_round_trip_and_every_cut),
        cmocka_unit_test(test_epochs_are_ordered_by_term_planner_sequence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
