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
    for (uint32_t variant = 0; variant <= 1; variant++) { /* the best, and the C reference */
        f32.variant = variant;
        check_tiny("tiny_llama_f32.gguf", "tiny_llama.json", "f32", &f32, 1e-4);
        check_tiny("tiny_gemma3_f32.gguf", "tiny_gemma3.json", "f32", &f32, 1e-4);
        check_tiny("tiny_qwen2_f32.gguf", "tiny_qwen2.json", "f32", &f32, 1e-4);
    }
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
    check_tiny("tiny_gemma3_f32.gguf", "tiny_gemma3.json", "f32", &fast, 0.02);
    check_tiny("tiny_qwen2_f32.gguf", "tiny_qwen2.json", "f32", &fast, 0.02);
    check_tiny("tiny_llama_f16.gguf", "tiny_llama.json", "f16", &fast, 0.02);
    check_tiny("tiny_llama_q8_0.gguf", "tiny_llama.json", "q8_0", &fast, 0.25);
    check_tiny("tiny_llama_q4_1.gguf", "tiny_llama.json", "q4_1", &fast, 0.25);
    check_tiny("tiny_split.gguf", "tiny_split.json", "mixed", &fast, 0.25);
}

/* Beside the rounding of `fast`, the KV cache has 8 bits. */
static void test_stage_fast_kv8_is_near(void **state)
{
    (void)state;
    struct chain_options kv8 = {.precision = STAGE_FAST_KV8};
    check_tiny("tiny_llama_f32.gguf", "tiny_llama.json", "f32", &kv8, 0.25);
    check_tiny("tiny_llama_q8_0.gguf", "tiny_llama.json", "q8_0", &kv8, 0.25);
    check_tiny("tiny_split.gguf", "tiny_split.json", "mixed", &kv8, 0.25);
}

enum { RUN = 64 };

/* The fixed run of 64 tokens. */
static void fixed_ids(int32_t ids[RUN], uint32_t n_vocab)
{
    uint32_t x = 12345;
    for (int i = 0; i < RUN; i++) {
        x = x * 1664525u + 1013904223u;
        ids[i] = (int32_t)(x >> 8) % (int32_t)n_vocab;
    }
}

/* Logits of the run, fed in chunks. */
static float *run_chunks(const char *file, const struct chain_options *options, uint32_t chunk)
{
    char path[4096];
    reference_path(file, path);
    struct chain c;
    chain_open(&c, path, options);
    int32_t ids[RUN];
    fixed_ids(ids, c.n_vocab);
    float *ret = malloc((size_t)RUN * c.n_vocab * sizeof(float));
    assert_non_null(ret);
    for (uint32_t at = 0; at < RUN; at += chunk) {
        uint32_t take = MIN_OF(chunk, RUN - at);
        struct stage_segment s = {
            .position = at, .n_rows = take, .token_ids = ids + at, .logits = STAGE_LOGITS_ALL};
        chain_step(&c, &s, 1);
        memcpy(ret + (size_t)at * c.n_vocab, c.logits, (size_t)take * c.n_vocab * sizeof(float));
    }
    chain_close(&c);
    return ret;
}

enum { SPLIT_VOCAB = 320, SPLIT_LAYERS = 6 };

/* A model whose bits are compared. */
struct split_model {
    const char *file;
    uint32_t n_layers, n_vocab;
};

static const struct split_model SPLIT_MODELS[] = {
    {"tiny_split.gguf", SPLIT_LAYERS, SPLIT_VOCAB},
    {"tiny_gemma3_f32.gguf", 6, 512},
    {"tiny_qwen2_f32.gguf", 3, 512},
};

static void check_same(const struct split_model *m, const struct chain_options *options,
                       uint32_t chunk, const float *want)
{
    float *got = run_chunks(m->file, options, chunk);
    const void *ours = got, *theirs = want;
    if (memcmp(ours, theirs, (size_t)RUN * m->n_vocab * sizeof(float)) != 0)
        fail_msg("other bits: %s variant %u threads %u chunk %u cuts %u %u precision %d", m->file,
                 options->variant, options->n_threads, chunk, options->cuts[0], options->cuts[1],
                 (int)options->precision);
    free(got);
}

static void check_all_splits(const struct split_model *m, enum stage_precision precision,
                             uint32_t variant)
{
    static const uint32_t chunks[] = {1, 7, 32, 512};
    struct chain_options o = {.precision = precision, .variant = 1, .n_threads = 1};
    float *want = run_chunks(m->file, &o, RUN); /* the C reference, one thread, one chunk */
    o.variant = variant;
    for (uint32_t threads = 1; threads <= 3; threads++) {
        for (size_t i = 0; i < ARRAY_LEN(chunks); i++) {
            o.n_threads = threads;
            check_same(m, &o, chunks[i], want);
        }
    }
    o.n_threads = 2;
    for (uint32_t a = 1; a < m->n_layers; a++) {
        for (uint32_t b = a; b < m->n_layers; b++) {
            o.cuts[0] = a;
            o.cuts[1] = b > a ? b : 0; /* two stages, or three */
            check_same(m, &o, chunks[(a + b) % ARRAY_LEN(chunks)], want);
        }
    }
    free(want);
}

static void test_stage_bits_do_not_depend_on_the_split(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(SPLIT_MODELS); i++) {
        check_all_splits(&SPLIT_MODELS[i], STAGE_FAST, 1);
        check_all_splits(&SPLIT_MODELS[i], STAGE_FAST, 0);
        check_all_splits(&SPLIT_MODELS[i], STAGE_F32, 0);
        check_all_splits(&SPLIT_MODELS[i], STAGE_FAST_KV8, 1);
        check_all_splits(&SPLIT_MODELS[i], STAGE_FAST_KV8, 0);
    }
}

/* Three sequences in one stage, their blocks in no order: their rows are mixed into steps of every
 * kind, one of them is cut back and fed again, and each gives the bits that it gives alone. */
static void test_stage_bits_do_not_depend_on_companions(void **state)
{
    (void)state;
    static const uint32_t table[3][2] = {{4, 0}, {2, 5}, {3, 1}};
    struct chain_options o = {.n_threads = 2, .n_blocks = 6, .context = 100, .cuts = {2}};
    float *want = run_chunks("tiny_split.gguf", &o, RUN);
    size_t row = SPLIT_VOCAB;
    char path[4096];
    reference_path("tiny_split.gguf", path);
    struct chain c;
    chain_open(&c, path, &o);
    int32_t ids[RUN];
    fixed_ids(ids, c.n_vocab);
    const uint32_t *a = table[0], *b = table[1], *d = table[2];
    struct stage_segment first[] = {
        {.blocks = d, .position = 0, .n_rows = 40, .token_ids = ids + 20},
        {.blocks = b, .position = 0, .n_rows = 3, .token_ids = ids, .logits = STAGE_LOGITS_ALL},
        {.blocks = a, .position = 0, .n_rows = 5, .token_ids = ids, .logits = STAGE_LOGITS_LAST},
        {.blocks = b,
         .position = 3,
         .n_rows = 9,
         .token_ids = ids + 3,
         .logits = STAGE_LOGITS_LAST},
    };
    chain_step(&c, first, 4);
    assert_memory_equal(c.logits, want, 3 * row * sizeof(float));
    assert_memory_equal(c.logits + 3 * row, want + 4 * row, row * sizeof(float));
    assert_memory_equal(c.logits + 4 * row, want + 11 * row, row * sizeof(float));
    /* The third begins again with other tokens. */
    struct stage_segment second[] = {
        {.blocks = b, .position = 12, .n_rows = 1, .token_ids = ids + 12, .logits = 1},
        {.blocks = d, .position = 0, .n_rows = 30, .token_ids = ids, .logits = STAGE_LOGITS_LAST},
        {.blocks = a, .position = 5, .n_rows = 1, .token_ids = ids + 5},
    };
    chain_step(&c, second, 3);
    assert_memory_equal(c.logits, want + 12 * row, row * sizeof(float));
    assert_memory_equal(c.logits + row, want + 29 * row, row * sizeof(float));
    /* The second goes on from position 6. */
    struct stage_segment third[] = {
        {.blocks = a, .position = 6, .n_rows = 58, .token_ids = ids + 6, .logits = 1},
        {.blocks = b, .position = 6, .n_rows = 2, .token_ids = ids + 6, .logits = STAGE_LOGITS_ALL},
    };
    chain_step(&c, third, 2);
    assert_memory_equal(c.logits, want + 63 * row, row * sizeof(float));
    assert_memory_equal(c.logits + row, want + 6 * row, 2 * row * sizeof(float));
    chain_close(&c);
    free(want);
}

/* Sequences that begin alike share what is whole and copy what is not; writing to the copy does not
 * change what the other reads. */
static void test_stage_shares_and_copies_blocks(void **state)
{
    (void)state;
    enum { LONG = 200, FORK = 100 };
    struct chain_options o = {.n_threads = 2, .n_blocks = 9, .context = 256, .cuts = {3}};
    char path[4096];
    reference_path("tiny_split.gguf", path);
    struct chain alone, c;
    chain_open(&alone, path, &o);
    chain_open(&c, path, &o);
    int32_t one[LONG], other[LONG];
    for (int i = 0; i < LONG; i++) {
        one[i] = (i * 37 + 11) % SPLIT_VOCAB;
        other[i] = i < FORK ? one[i] : (i * 53 + 5) % SPLIT_VOCAB;
    }
    size_t row = SPLIT_VOCAB;
    float want[2][SPLIT_VOCAB];
    memcpy(want[0], chain_feed(&alone, one, LONG, 0), sizeof want[0]);
    memcpy(want[1], chain_feed(&alone, other, LONG, 0), sizeof want[1]);
    static const uint32_t tables[2][4] = {{7, 3, 8, 1}, {7, 4, 0, 6}};
    struct stage_segment begin = {.blocks = tables[0], .n_rows = FORK + 10, .token_ids = one};
    chain_step(&c, &begin, 1);
    for (uint32_t i = 0; i < c.n_stages; i++)
        assert_int_equal(stage_copy_block(c.stages[i], 3, 4), ERR_OK);
    struct stage_segment both[] = {
        {tables[0], FORK + 10, LONG - FORK - 10, one + FORK + 10, STAGE_LOGITS_LAST},
        {tables[1], FORK, LONG - FORK, other + FORK, STAGE_LOGITS_LAST},
    };
    chain_step(&c, both, 2);
    assert_memory_equal(c.logits, want[0], sizeof want[0]);
    assert_memory_equal(c.logits + row, want[1], sizeof want[1]);
    assert_int_equal(stage_copy_block(c.stages[0], 9, 0), ERR_INVALID);
    assert_int_equal(stage_copy_block(c.stages[0], 0, 9), ERR_INVALID);
    chain_close(&c);
    chain_close(&alone);
}

static void test_stage_refuses_bad_steps(void **state)
{
    (void)state;
    struct chain_options o = {.n_threads = 1, .n_blocks = 3, .context = 130};
    char path[4096];
    reference_path("tiny_split.gguf", path);
    struct chain c;
    chain_open(&c, path, &o);
    const int32_t ids[140] = {5, 6, 7}, low[1] = {-1}, high[1] = {SPLIT_VOCAB};
    struct stage_segment ok = {.n_rows = 10, .token_ids = ids};
    chain_step(&c, &ok, 1);
    static const uint32_t far[] = {0, 3, 1}, two[] = {2, 1, 0};
    const struct stage_segment bad[] = {
        {.blocks = far, .n_rows = 65, .token_ids = ids},
        {.blocks = far, .position = 64, .n_rows = 1, .token_ids = ids},
        {.position = 131, .n_rows = 1, .token_ids = ids},
        {.position = UINT32_MAX, .n_rows = 1, .token_ids = ids},
        {.position = 10, .n_rows = 121, .token_ids = ids},
        {.position = 10, .n_rows = UINT32_MAX, .token_ids = ids},
        {.position = 10, .n_rows = 0, .token_ids = ids},
        {.position = 10, .n_rows = 1},
        {.position = 10, .n_rows = 1, .token_ids = low},
        {.position = 10, .n_rows = 1, .token_ids = high},
        {.position = 10, .n_rows = 1, .token_ids = ids, .logits = (enum stage_logits)3},
    };
    for (size_t i = 0; i < ARRAY_LEN(bad); i++)
        assert_int_equal(stage_forward(c.stages[0], &bad[i], 1, NULL, NULL, c.logits), ERR_INVALID);
    struct stage_segment want_logits = {
        .position = 10, .n_rows = 1, .token_ids = ids, .logits = STAGE_LOGITS_LAST};
    assert_int_equal(stage_forward(c.stages[0], &want_logits, 1, NULL, NULL, NULL), ERR_INVALID);
    assert_int_equal(stage_forward(c.stages[0], &ok, 0, NULL, NULL, c.logits), ERR_INVALID);
    /* Two that write one position: of the same sequence, and of two that share a block. */
    struct stage_segment twice[] = {ok, ok};
    assert_int_equal(stage_forward(c.stages[0], twice, 2, NULL, NULL, c.logits), ERR_INVALID);
    struct stage_segment clash[] = {{.position = 60, .n_rows = 10, .token_ids = ids},
                                    {.blocks = two, .position = 69, .n_rows = 1, .token_ids = ids}};
    assert_int_equal(stage_forward(c.stages[0], clash, 2, NULL, NULL, c.logits), ERR_INVALID);
    clash[1].position = 70;
    assert_int_equal(stage_forward(c.stages[0], clash, 2, NULL, NULL, c.logits), ERR_OK);

    struct err_text text = {""};
    struct stage *s;
    const struct stage_options wrong[] = {
        {.first_layer = 0, .n_layers = 7, .context = 20},
        {.first_layer = 6, .n_layers = 1, .context = 20},
        {.first_layer = 1, .n_layers = UINT32_MAX, .context = 20},
        {.first_layer = 0, .n_layers = 0, .context = 20},
        {.first_layer = 0, .n_layers = 6, .context = 0},
        {.first_layer = 0, .n_layers = 6, .context = 2049},
        {.first_layer = 0, .n_layers = 6, .context = 20, .n_blocks = STAGE_BLOCKS_MAX + 1},
    };
    for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
        assert_int_equal(stage_new(c.model, c.pool, &wrong[i], &s, &text), ERR_INVALID);
        assert_non_null(strstr(text.text, "tiny_split.gguf"));
        assert_int_equal(stage_memory_bytes(c.model, &wrong[i]), 0);
    }
    struct stage_options small = {.n_layers = 6, .context = 20}, large = small, many = small;
    large.context = 2048;
    many.n_blocks = 32;
    assert_true(stage_memory_bytes(c.model, &small) < stage_memory_bytes(c.model, &large));
    assert_true(stage_memory_bytes(c.model, &small) < stage_memory_bytes(c.model, &many));
    struct stage_options kv8 = many;
    kv8.precision = STAGE_FAST_KV8;
    assert_true(stage_memory_bytes(c.model, &kv8) < stage_memory_bytes(c.model, &many));
    chain_close(&c);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stage_f32_agrees_with_transformers),
        cmocka_unit_test(test_stage_f32_agrees_for_other_storage_types),
        cmocka_unit_test(test_stage_fast_is_near),
        cmocka_unit_test(test_stage_fast_kv8_is_near),
        cmocka_unit_test(test_stage_bits_do_not_depend_on_the_split),
        cmocka_unit_test(test_stage_bits_do_not_depend_on_companions),
        cmocka_unit_test(test_stage_shares_and_copies_blocks),
        cmocka_unit_test(test_stage_refuses_bad_steps),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
