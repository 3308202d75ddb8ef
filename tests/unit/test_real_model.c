/* Real models against llama.cpp and transformers (tests/reference/README.md says which and how).
 * The first argument names the model, whose file must be in the folder that COVEY_MODELS names. */
#include "runtime/logits_tool.h"
#include "tests/unit/reference.h"

#include <math.h>
#include <unistd.h>

enum { TOP = 5, PATH = 48, EVERY = 8, PERPLEXITY_ROWS = 64 };

struct real_model {
    const char *name, *file, *reference;
    /* Longer prompts are left out in precision f32, which opens all weights for each step: time. */
    uint32_t f32_prompt_max;
    uint32_t cuts[3]; /* first layers of second stages that are tried */
};

static const struct real_model MODELS[] = {
    {"smollm2", "smollm2-135m.gguf", "smollm2-135m-q4_1.json", 1024, {1, 15, 29}},
    {"gemma3", "gemma3-270m.gguf", "gemma3-270m-q4_k_m.json", 110, {1, 6, 17}},
    {"qwen2", "qwen2.5-coder-0.5b.gguf", "qwen2.5-coder-0.5b-q4_k_m.json", 110, {1, 12, 23}},
};

static void model_path(const struct real_model *model, char path[4096])
{
    const char *folder = getenv("COVEY_MODELS");
    (void)snprintf(path, 4096, "%s/%s", folder ? folder : "", model->file);
}

static double lse_of(const float *x, uint32_t n)
{
    double most = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < n; i++)
        most = fmax(most, (double)x[i]);
    for (uint32_t i = 0; i < n; i++)
        sum += exp((double)x[i] - most);
    return most + log(sum);
}

/* Differences of what is listed for one row. */
struct tally {
    double sum, most; /* of log-probabilities */
    uint32_t n;
};

static void tally_add(struct tally *t, double difference)
{
    t->sum += fabs(difference);
    t->most = fmax(t->most, fabs(difference));
    t->n++;
}

static double mean(const struct tally *t)
{
    return t->sum / t->n;
}

/* The logit that an engine lists for an id; false when it does not list it. */
static bool listed(const json_t *row, int64_t id, double *ret)
{
    const json_t *top = json_object_get(row, "top");
    for (size_t i = 0; i < json_array_size(top); i++) {
        const json_t *pair = json_array_get(top, i);
        if (json_integer_value(json_array_get(pair, 0)) == id) {
            *ret = json_number_value(json_array_get(pair, 1));
            return true;
        }
    }
    return false;
}

/* Logits, lse, mean and deviation of one row within 2e-3. */
static void check_f32_row(const json_t *row, const float *x, uint32_t n_vocab)
{
    const json_t *top = json_object_get(row, "top");
    assert_int_equal(json_array_size(top), TOP);
    for (size_t i = 0; i < TOP; i++) {
        const json_t *pair = json_array_get(top, i);
        double want = json_number_value(json_array_get(pair, 1));
        double got = (double)x[json_integer_value(json_array_get(pair, 0))];
        if (!(fabs(got - want) <= 2e-3))
            fail_msg("logit %f instead of %f", got, want);
    }
    double sum = 0, squares = 0, average;
    for (uint32_t i = 0; i < n_vocab; i++)
        sum += (double)x[i];
    average = sum / n_vocab;
    for (uint32_t i = 0; i < n_vocab; i++)
        squares += ((double)x[i] - average) * ((double)x[i] - average);
    assert_true(fabs(lse_of(x, n_vocab) - reference_real(row, "lse")) <= 2e-3);
    assert_true(fabs(average - reference_real(row, "mean")) <= 2e-3);
    assert_true(fabs(sqrt(squares / n_vocab) - reference_real(row, "std")) <= 2e-3);
}

/* Greedy tokens along the path: equal wherever the margin is above twice the tolerance. */
static void check_choice(const json_t *path, uint32_t i, const float *x, uint32_t n_vocab)
{
    double margin = json_number_value(json_array_get(json_object_get(path, "margins"), i));
    int64_t want = json_integer_value(json_array_get(json_object_get(path, "ids"), i));
    if (margin > 4e-3)
        assert_int_equal(argmax_of(x, n_vocab), want);
}

/* Feeds ids, then the path in one step; row i of the result predicts path[i]. The first row comes
 * from the last prompt token. */
static void feed_path(struct chain *c, const json_t *ids, const json_t *path, float *first)
{
    int32_t prompt[1024], more[PATH];
    uint32_t n = reference_ids(ids, prompt);
    assert_int_equal(reference_ids(json_object_get(path, "ids"), more), PATH);
    memcpy(first, chain_feed(c, prompt, n, 0), c->n_vocab * sizeof(float));
    struct stage_segment s = {
        .position = n, .n_rows = PATH, .token_ids = more, .logits = STAGE_LOGITS_ALL};
    chain_step(c, &s, 1);
}

static void test_f32_agrees_with_other_engines(void **state)
{
    const struct real_model *model = *state;
    char path[4096];
    model_path(model, path);
    json_t *ref = reference_load(model->reference);
    struct chain_options options = {.precision = STAGE_F32, .n_threads = 2, .context = 1024};
    struct chain c;
    chain_open(&c, path, &options);
    float *first = malloc(c.n_vocab * sizeof *first);
    assert_non_null(first);
    size_t i;
    json_t *prompt;
    json_array_foreach(json_object_get(ref, "prompts"), i, prompt)
    {
        if (json_array_size(json_object_get(prompt, "ids")) > model->f32_prompt_max)
            continue;
        const json_t *want = json_object_get(json_object_get(prompt, "logits"), "f32");
        const json_t *along = json_object_get(prompt, "path");
        feed_path(&c, json_object_get(prompt, "ids"), along, first);
        for (uint32_t k = 0; k <= PATH; k++) {
            const float *x = k == 0 ? first : c.logits + (size_t)(k - 1) * c.n_vocab;
            char name[8];
            (void)snprintf(name, sizeof name, "%u", k);
            if (k % EVERY == 0)
                check_f32_row(json_object_get(want, name), x, c.n_vocab);
            if (k < PATH)
                check_choice(along, k, x, c.n_vocab);
        }
        const json_t *chat = json_object_get(prompt, "chat");
        along = json_object_get(chat, "path");
        feed_path(&c, json_object_get(chat, "ids"), along, first);
        check_f32_row(json_object_get(json_object_get(chat, "logits_last"), "f32"), first,
                      c.n_vocab);
        for (uint32_t k = 0; k < PATH; k++)
            check_choice(along, k, k == 0 ? first : c.logits + (size_t)(k - 1) * c.n_vocab,
                         c.n_vocab);
    }
    free(first);
    chain_close(&c);
    json_decref(ref);
}

/* exp of the mean of -log p(ids[i] | ids[:i]). */
static double perplexity(struct chain *c, const json_t *part)
{
    int32_t ids[STAGE_ROWS_MAX];
    uint32_t n = reference_ids(json_object_get(part, "ids"), ids);
    double sum = 0;
    for (uint32_t at = 0; at < n; at += PERPLEXITY_ROWS) {
        uint32_t n_rows = MIN_OF(n - at, (uint32_t)PERPLEXITY_ROWS);
        struct stage_segment s = {
            .position = at, .n_rows = n_rows, .token_ids = ids + at, .logits = STAGE_LOGITS_ALL};
        chain_step(c, &s, 1);
        for (uint32_t i = 0; i < n_rows && at + i + 1 < n; i++) {
            const float *x = c->logits + (size_t)i * c->n_vocab;
            sum += lse_of(x, c->n_vocab) - (double)x[ids[at + i + 1]];
        }
    }
    return exp(sum / (n - 1));
}

static void test_f32_perplexity(void **state)
{
    const struct real_model *model = *state;
    char path[4096];
    model_path(model, path);
    json_t *ref = reference_load(model->reference);
    const json_t *part = json_object_get(ref, "perplexity");
    struct chain_options options = {.precision = STAGE_F32, .n_threads = 2, .context = 512};
    struct chain c;
    chain_open(&c, path, &options);
    double got = perplexity(&c, part), want = reference_real(part, "f32");
    print_message("perplexity %.5f, f32 %.5f\n", got, want);
    assert_true(fabs(got - want) <= 1e-4 * want);
    chain_close(&c);
    json_decref(ref);
}

/* Precision fast may be no farther from the truth than llama.cpp is with its rounded activations:
 * in the log-probabilities that both list, and in perplexity. */
static void test_fast_is_no_farther_than_llama_cpp(void **state)
{
    const struct real_model *model = *state;
    char path[4096];
    model_path(model, path);
    json_t *ref = reference_load(model->reference);
    struct chain_options options = {.precision = STAGE_FAST, .n_threads = 2, .context = 1024};
    struct chain c;
    chain_open(&c, path, &options);
    float *first = malloc(c.n_vocab * sizeof *first);
    assert_non_null(first);
    struct tally ours = {0}, theirs = {0}, all = {0};
    size_t i;
    json_t *prompt;
    json_array_foreach(json_object_get(ref, "prompts"), i, prompt)
    {
        const json_t *logits = json_object_get(prompt, "logits");
        feed_path(&c, json_object_get(prompt, "ids"), json_object_get(prompt, "path"), first);
        for (uint32_t k = 0; k <= PATH; k += EVERY) {
            const float *x = k == 0 ? first : c.logits + (size_t)(k - 1) * c.n_vocab;
            char name[8];
            (void)snprintf(name, sizeof name, "%u", k);
            const json_t *f32 = json_object_get(json_object_get(logits, "f32"), name);
            const json_t *q = json_object_get(json_object_get(logits, "q"), name);
            double lse = lse_of(x, c.n_vocab);
            for (size_t t = 0; t < TOP; t++) {
                const json_t *pair = json_array_get(json_object_get(f32, "top"), t);
                int64_t id = json_integer_value(json_array_get(pair, 0));
                double truth =
                    json_number_value(json_array_get(pair, 1)) - reference_real(f32, "lse");
                double other;
                tally_add(&all, (double)x[id] - lse - truth);
                if (!listed(q, id, &other))
                    continue;
                tally_add(&ours, (double)x[id] - lse - truth);
                tally_add(&theirs, other - reference_real(q, "lse") - truth);
            }
        }
    }
    const json_t *part = json_object_get(ref, "perplexity");
    double truth = reference_real(part, "f32"), p = perplexity(&c, part),
           q = reference_real(part, "q");
    print_message("log-probabilities: ours mean %.5f most %.5f, llama.cpp mean %.5f most %.5f (%u "
                  "values); ours over all %u: mean %.5f most %.5f; perplexity: f32 %.5f ours %.5f "
                  "llama.cpp %.5f\n",
                  mean(&ours), ours.most, mean(&theirs), theirs.most, ours.n, all.n, mean(&all),
                  all.most, truth, p, q);
    assert_true(ours.n > 200);
    assert_true(mean(&ours) <= mean(&theirs));
    assert_true(ours.most <= theirs.most);
    assert_true(fabs(p - truth) <= fabs(q - truth));
    free(first);
    chain_close(&c);
    json_decref(ref);
}

/* 64 tokens of the perplexity text. */
static void digest(const char *path, const json_t *ref, const struct logits_options *options,
                   uint8_t ret[32])
{
    int32_t ids[STAGE_ROWS_MAX];
    (void)reference_ids(json_object_get(json_object_get(ref, "perplexity"), "ids"), ids);
    struct buf out = BUF_INIT(1 << 20);
    struct err_text text = {""};
    if (logits_run(path, ids, 64, options, &out, ret, &text) != ERR_OK)
        fail_msg("%s", text.text);
    buf_deinit(&out);
}

static void test_same_bits_on_any_split(void **state)
{
    const struct real_model *model = *state;
    char path[4096];
    model_path(model, path);
    json_t *ref = reference_load(model->reference);
    const uint32_t *cuts = model->cuts;
    const struct logits_options fast[] = {
        {.n_threads = 1, .chunk = 512},
        {.n_threads = 2, .chunk = 512},
        {.n_threads = 1, .chunk = 1},
        {.n_threads = 2, .chunk = 7},
        {.n_threads = 1, .chunk = 32},
        {.n_threads = 2, .n_cuts = 1, .cuts = {cuts[0]}},
        {.n_threads = 2, .n_cuts = 1, .cuts = {cuts[1]}, .chunk = 7},
        {.n_threads = 2, .n_cuts = 1, .cuts = {cuts[2]}},
        {.n_threads = 2, .n_cuts = 2, .cuts = {cuts[0], cuts[1]}, .chunk = 32},
        {.n_threads = 1, .n_cuts = 2, .cuts = {cuts[1], cuts[2]}},
    };
    uint8_t want[32], got[32];
    digest(path, ref, &fast[0], want);
    for (size_t i = 1; i < ARRAY_LEN(fast); i++) {
        digest(path, ref, &fast[i], got);
        assert_memory_equal(got, want, 32);
    }
    const struct logits_options f32[] = {
        {.precision = STAGE_F32, .n_threads = 1, .chunk = 512},
        {.precision = STAGE_F32, .n_threads = 2, .chunk = 7, .n_cuts = 1, .cuts = {cuts[1]}},
    };
    digest(path, ref, &f32[0], want);
    digest(path, ref, &f32[1], got);
    assert_memory_equal(got, want, 32);
    json_decref(ref);
}

int main(int argc, char **argv)
{
    char path[4096];
    const char *ci = getenv("CI");
    const struct real_model *model = NULL;
    for (size_t i = 0; i < ARRAY_LEN(MODELS) && argc > 1; i++)
        if (strcmp(argv[1], MODELS[i].name) == 0)
            model = &MODELS[i];
    if (!model) {
        (void)fprintf(stderr, "usage: %s smollm2|gemma3|qwen2 [TEST]\n", argv[0]);
        return 2;
    }
    model_path(model, path);
    if (access(path, R_OK) != 0) {
        bool fatal = ci && strcmp(ci, "true") == 0;
        (void)fprintf(stderr, "%s: COVEY_MODELS names no folder with %s\n",
                      fatal ? "failed" : "skipped", model->file);
        return fatal ? 1 : 77; /* 77: meson counts it as skipped */
    }
    void *state = (void *)(uintptr_t)model;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_f32_agrees_with_other_engines, state),
        cmocka_unit_test_prestate(test_f32_perplexity, state),
        cmocka_unit_test_prestate(test_fast_is_no_farther_than_llama_cpp, state),
        cmocka_unit_test_prestate(test_same_bits_on_any_split, state),
    };
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
