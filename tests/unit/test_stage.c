/* Stages against reference values from other engines, and against themselves: the bits must not
 * depend on threads, chunks, splits or batch companions. */
#include "tests/unit/reference.h"

#include <math.h>

enum { N_GREEDY = 16 };

/* Prompt, all_argmax, last logits and greedy continuation of one tiny model. */
static void check_tiny(const char *file, const char *json, const char *part,
                       const struct chain_options *options, double tolerance)
{
    json_t *all = reference_load(json);
    const json_t *ref = json_object_get(all, part);
    int32_t ids[64], greedy[N_GREEDY], most[64];
    uint32_t n = reference_ids(json_object_get(ref, "prompt"), ids);
    assert_int_equal(reference_ids(json_object_get(ref, "greedy"), greedy), N_GREEDY);
    assert_int_equal(reference_ids(json_object_get(ref, "all_argmax"), most), n);
    const json_t *logits = json_object_get(ref, "logits");
    char path[4096];
    reference_path(file, path);
    struct chain c;
    chain_open(&c, path, options);
    struct stage_segment s = {.n_rows = n, .token_ids = ids, .logits = STAGE_LOGITS_ALL};
    chain_step(&c, &s, 1);
    const float *last = c.logits + (size_t)(n - 1) * c.n_vocab;
    assert_int_equal(json_array_size(logits), c.n_vocab);
    double worst = 0;
    for (uint32_t i = 0; i < c.n_vocab; i++)
        worst = fmax(worst, fabs((double)last[i] - json_number_value(json_array_get(logits, i))));
    if (!(worst <= tolerance))
        fail_msg("%s: a logit is off by %g", file, worst);
    if (options->precision == STAGE_F32) {
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(argmax_of(c.logits + (size_t)i * c.n_vocab, c.n_vocab), most[i]);
        for (uint32_t i = 0; i < N_GREEDY; i++) {
            assert_int_equal(argmax_of(last, c.n_vocab), greedy[i]);
            last = chain_feed(&c, &greedy[i], 1, n + i);
        }
    }
    chain_close(&c);
    json_decref(all);
}

static void test_stage_f32_agrees_with_transformers(void **state)
{
    (void)state;
    struct chain_options f32 = {.precision = STAGE_F32};
    check_tiny("tiny_llama_f32.gguf", "tiny_llama.json", "f32", &f32, 1e-4);
    f32.variant = 1; /* the C reference */
    check_tiny("tiny_llama_f32.gguf", "tiny_llama.json", "f32", &f32, 1e-4);
}

static void test_stage_f32_agrees_for_other_storage_types(void **state)
{
    (void)state;
    struct chain_options f32 = {.precision = STAGE_F32};
    check_tiny("tiny_llama_f16.gguf", "tiny_llama.json", "f16", &f32, 1e-4);
    check_tiny("tiny_llama_q8_0.gguf", "tiny_llama.json", "q8_0", &f32, 1e-4);
    check_tiny("tiny_llama_q4_1.gguf", "tiny_llama.json", "q4_1", &f32, 1e-4);
    check_tiny("tiny_rope3_q8_0.gguf", "tiny_rope3.json", "q8_0", &f32, 1e-4);
    check_tiny("tiny_split.gguf", "tiny_split.json", "mixed", &f32, 1e-4);
}

/* Precision `fast` rounds activations and the KV cache: near, not equal. F32 weights see only the
 * rounding of the cache. */
static void test_stage_fast_is_near(void **state)
{
    (void)state;
    struct chain_options fast = {.precision = STAGE_FAST};
    check_tiny("tiny_llama_f32.gguf", "tiny_llama.json", "f32", &fast, 0.02);
    check_tiny("tiny_llama_f16.gguf", "tiny_llama.json", "f16", &fast, 0.02);
    check_tiny("tiny_llama_q8_0.gguf", "tiny_llama.json", "q8_0", &fast, 0.25);
    check_tiny("tiny_llama_q4_1.gguf", "tiny_llama.json", "q4_1", &fast, 0.25);
    check_tiny("tiny_split.gguf", "tiny_split.json", "mixed", &fast, 0.25);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stage_f32_agrees_with_transformers),
        cmocka_unit_test(test_stage_f32_agrees_for_other_storage_types),
        cmocka_unit_test(test_stage_fast_is_near),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
