#include "runtime/sampler.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result. */
static void test_philox_known_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], result[4];
    } vectors[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof vectors / sizeof vectors[0]; i++) {
        uint32_t r[4];
        philox4x32_10(vectors[i].counter, vectors[i].key, r);
        assert_memory_equal(r, vectors[i].result, sizeof r);
    }
    /* The first vector again: the upper 53 bits of its first two words. */
    double u = sampler_uniform(0, 0);
    assert_true(u == (double)(0x6627e8d5e169c58dull >> 11) / 9007199254740992.0);
}

enum { N = 6 };

/* Probabilities 0.30 0.05 0.30 0.20 0.10 0.05. */
static const double chances[N] = {0.30, 0.05, 0.30, 0.20, 0.10, 0.05};

static void fill(float logits[N])
{
    for (int i = 0; i < N; i++)
        logits[i] = (float)log(chances[i]) + 3.0f;
}

/* How often each id is chosen at 20,000 positions. */
static void count(const struct sampler_params *params, const float *logits, double ret[N])
{
    struct sampler *s;
    struct sampler_choice c;
    assert_int_equal(sampler_new(N, &s), ERR_OK);
    assert_int_equal(sampler_check(params, N, NULL), ERR_OK);
    memset(ret, 0, N * sizeof *ret);
    for (uint64_t p = 0; p < 20000; p++) {
        sampler_choose(s, params, logits, p, NULL, 0, &c);
        ret[c.id] += 1.0 / 20000;
    }
    sampler_free(s);
}

static void check_counts(const struct sampler_params *params, const double want[N])
{
    float logits[N];
    double got[N];
    fill(logits);
    count(params, logits, got);
    for (int i = 0; i < N; i++) {
        if (want[i] == 0.0)
            assert_true(got[i] == 0.0);
        else
            assert_true(fabs(got[i] - want[i]) < 0.012); /* above 3.5 standard deviations */
    }
}

static void test_choices_follow_the_probabilities(void **state)
{
    (void)state;
    struct sampler_params p = SAMPLER_PARAMS_INIT;
    check_counts(&p, chances);
    /* Temperature 2: square roots, renormalised. */
    double roots[N], sum = 0;
    for (int i = 0; i < N; i++)
        sum += roots[i] = sqrt(chances[i]);
    for (int i = 0; i < N; i++)
        roots[i] /= sum;
    p.temperature = 2.0f;
    check_counts(&p, roots);
}

/* By hand: the entropy of these chances is 1.574; -log p is 1.204 for 0.3, 1.609 for 0.2, 2.303 for
 * 0.1, 2.996 for 0.05: 0.2 is the most typical, then both 0.3, then 0.1. */
static void test_typical_keeps_what_surprises_as_expected(void **state)
{
    (void)state;
    struct sampler_params p = SAMPLER_PARAMS_INIT;
    p.typical_p = 0.15f;
    check_counts(&p, (const double[N]){0, 0, 0, 1, 0, 0});
    p.typical_p = 0.45f; /* of equals the lower id */
    check_counts(&p, (const double[N]){0.6, 0, 0, 0.4, 0, 0});
    p.typical_p = 0.75f;
    check_counts(&p, (const double[N]){0.375, 0, 0.375, 0.25, 0, 0});
    p.typical_p = 0.85f;
    check_counts(&p, (const double[N]){1 / 3.0, 0, 1 / 3.0, 2 / 9.0, 1 / 9.0, 0});
    /* After top-k: of 3/8, 3/8 and 1/4 the entropy is 1.082; 0.981 is nearer to it than 1.386. */
    p.top_k = 3;
    p.typical_p = 0.6f;
    check_counts(&p, (const double[N]){0.5, 0, 0.5, 0, 0, 0});
}

static void test_truncation_keeps_the_likeliest(void **state)
{
    (void)state;
    struct sampler_params p = SAMPLER_PARAMS_INIT;
    p.top_k = 3;
    check_counts(&p, (const double[N]){0.375, 0, 0.375, 0.25, 0, 0});
    p.top_k = 1; /* of equals the lower id */
    check_counts(&p, (const double[N]){1, 0, 0, 0, 0, 0});
    p = SAMPLER_PARAMS_INIT;
    p.top_p = 0.75f; /* 0.3 + 0.3 + 0.2 reaches it */
    check_counts(&p, (const double[N]){0.375, 0, 0.375, 0.25, 0, 0});
    p.top_p = 0.55f;
    check_counts(&p, (const double[N]){0.5, 0, 0.5, 0, 0, 0});
    p.top_k = 3; /* of 0.8, 0.7 is 0.56: two are enough */
    p.top_p = 0.7f;
    check_counts(&p, (const double[N]){0.5, 0, 0.5, 0, 0, 0});
    p = SAMPLER_PARAMS_INIT;
    p.min_p = 0.5f; /* of 0.3 */
    check_counts(&p, (const double[N]){0.375, 0, 0.375, 0.25, 0, 0});
    p = SAMPLER_PARAMS_INIT;
    p.top_p = 0.00001f;
    check_counts(&p, (const double[N]){1, 0, 0, 0, 0, 0});
    p = SAMPLER_PARAMS_INIT;
    p.top_k = N + 5; /* as off */
    check_counts(&p, chances);
}

static struct sampler_choice choose(const struct sampler_params *params, const float *logits,
                                    const int32_t *history, uint32_t n)
{
    struct sampler *s;
    struct sampler_choice c;
    assert_int_equal(sampler_new(N, &s), ERR_OK);
    sampler_choose(s, params, logits, 7, history, n, &c);
    struct sampler_choice again;
    sampler_choose(s, params, logits, 7, history, n, &again);
    assert_memory_equal(&c, &again, sizeof c); /* no state */
    sampler_free(s);
    return c;
}

static void test_greedy_and_logprobs(void **state)
{
    (void)state;
    struct sampler_params p = SAMPLER_PARAMS_INIT;
    float logits[N];
    fill(logits);
    p.temperature = 0.0f;
    p.want_logprob = true;
    p.n_top = 4;
    struct sampler_choice c = choose(&p, logits, NULL, 0);
    static const int32_t order[4] = {0, 2, 3, 4};
    assert_int_equal(c.id, 0);
    assert_true(fabs((double)c.logprob - log(0.3)) < 1e-6);
    assert_int_equal(c.n_top, 4);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(c.top[i].id, order[i]);
        assert_true(fabs((double)c.top[i].logprob - log(chances[order[i]])) < 1e-6);
    }
    p.n_top = SAMPLER_TOP_MAX;
    c = choose(&p, logits, NULL, 0);
    assert_int_equal(c.n_top, N);
    assert_int_equal(c.top[4].id, 1);
    assert_int_equal(c.top[5].id, 5);
}

static void test_biases_and_penalties(void **state)
{
    (void)state;
    struct sampler_params p = SAMPLER_PARAMS_INIT;
    float logits[N];
    fill(logits);
    p.temperature = 0.0f;
    struct sampler_bias ban[2] = {{0, -INFINITY}, {2, -100.0f}};
    p.biases = ban;
    p.n_biases = 2;
    assert_int_equal(choose(&p, logits, NULL, 0).id, 3);
    p.n_biases = 0;
    /* 0 and 2 have equal logits of about 1.8, 3 has 1.39, 4 has 0.7. */
    const int32_t history[5] = {0, 2, 2, -4, 999};
    p.presence_penalty = 0.2f;
    assert_int_equal(choose(&p, logits, history, 5).id, 0);
    p.frequency_penalty = 0.1f; /* 2 twice */
    assert_int_equal(choose(&p, logits, history, 5).id, 0);
    p.presence_penalty = 0.5f;
    assert_int_equal(choose(&p, logits, history, 5).id, 3);
    p.presence_penalty = p.frequency_penalty = 0.0f;
    p.repetition_penalty = 1.2f; /* 1.8 / 1.2 = 1.5: still the largest */
    assert_int_equal(choose(&p, logits, history, 5).id, 0);
    p.repetition_penalty = 1.5f;
    assert_int_equal(choose(&p, logits, history, 5).id, 3);
    float negative[N] = {-1.0f, -1.1f, -9, -9, -9, -9};
    p.repetition_penalty = 1.2f; /* -1 * 1.2 */
    assert_int_equal(choose(&p, negative, history, 1).id, 1);
    /* The log-probability is the model's own, without bias. */
    p = SAMPLER_PARAMS_INIT;
    p.temperature = 0.0f;
    p.biases = ban;
    p.n_biases = 2;
    p.want_logprob = true;
    assert_true(fabs((double)choose(&p, logits, NULL, 0).logprob - log(0.2)) < 1e-6);
}

static void test_odd_numbers_do_no_harm(void **state)
{
    (void)state;
    static const float rows[][N] = {
        {NAN, 1.0f, NAN, 0.5f, -INFINITY, NAN},
        {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
        {NAN, NAN, NAN, NAN, NAN, NAN},
        {0, INFINITY, 0, 0, 0, 0},
        {-3e38f, 3e38f, -3e38f, 0, 0, 0},
    };
    static const int32_t greedy[] = {1, 0, 0, 1, 1};
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        struct sampler_params p = SAMPLER_PARAMS_INIT;
        p.want_logprob = true;
        p.n_top = 2;
        p.top_p = 0.9f;
        p.min_p = 0.1f;
        struct sampler_choice c = choose(&p, rows[r], NULL, 0);
        assert_in_range(c.id, 0, N - 1);
        assert_true(c.logprob <= 0.0f);
        p.temperature = 1e-38f;
        assert_in_range(choose(&p, rows[r], NULL, 0).id, 0, N - 1);
        p.temperature = 0.0f;
        assert_int_equal(choose(&p, rows[r], NULL, 0).id, greedy[r]);
    }
}

static void test_parameters_out_of_range_are_refused(void **state)
{
    (void)state;
    struct sampler_bias outside = {N, 1.0f}, nan = {0, NAN};
    struct sampler_params p[18];
    for (int i = 0; i < 18; i++)
        p[i] = SAMPLER_PARAMS_INIT;
    p[0].temperature = -1.0f;
    p[1].temperature = NAN;
    p[2].temperature = INFINITY;
    p[3].top_p = 0.0f;
    p[4].top_p = 1.5f;
    p[5].top_p = NAN;
    p[6].min_p = -0.1f;
    p[7].min_p = NAN;
    p[8].repetition_penalty = 0.0f;
    p[9].frequency_penalty = NAN;
    p[10].presence_penalty = INFINITY;
    p[11].n_top = SAMPLER_TOP_MAX + 1;
    p[12].n_biases = SAMPLER_BIASES_MAX + 1;
    p[13].biases = &outside;
    p[13].n_biases = 1;
    p[14].biases = &nan;
    p[14].n_biases = 1;
    p[15].typical_p = 0.0f;
    p[16].typical_p = NAN;
    for (int i = 0; i < 17; i++) {
        struct err_text text = {""};
        assert_int_equal(sampler_check(&p[i], N, &text), ERR_INVALID);
        assert_true(strlen(text.text) > 10);
    }
    assert_int_equal(sampler_check(&p[17], N, NULL), ERR_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_known_answers),
        cmocka_unit_test(test_choices_follow_the_probabilities),
        cmocka_unit_test(test_truncation_keeps_the_likeliest),
        cmocka_unit_test(test_typical_keeps_what_surprises_as_expected),
        cmocka_unit_test(test_greedy_and_logprobs),
        cmocka_unit_test(test_biases_and_penalties),
        cmocka_unit_test(test_odd_numbers_do_no_harm),
        cmocka_unit_test(test_parameters_out_of_range_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
