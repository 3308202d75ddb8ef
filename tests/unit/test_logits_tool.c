#include "runtime/logits_tool.h"
#include "tests/unit/reference.h"

#include <math.h>
#include <unistd.h>

static void test_ids_are_parsed_or_refused(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint32_t n;
        int32_t ids[4];
    } good[] = {
        {"1 2\n3", 3, {1, 2, 3}},
        {"[0, 2147483647]", 2, {0, INT32_MAX}},
        {"# all of it\n7;8 # 9\n10", 3, {7, 8, 10}},
        {"5", 1, {5}},
    };
    static const char *const bad[] = {
        "", " \n", "# 1", "-1", "1.5", "2147483648", "abc", "99999999999999999999999999", "1 \x80"};
    struct err_text text;
    int32_t *ids = NULL;
    uint32_t n = 0;
    for (size_t i = 0; i < ARRAY_LEN(good); i++) {
        assert_int_equal(logits_parse_ids(good[i].text, strlen(good[i].text), &ids, &n, &text),
                         ERR_OK);
        assert_int_equal(n, good[i].n);
        assert_memory_equal(ids, good[i].ids, n * sizeof *ids);
        free(ids);
    }
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        text.text[0] = '\0';
        assert_int_equal(logits_parse_ids(bad[i], strlen(bad[i]), &ids, &n, &text), ERR_CORRUPT);
        assert_true(strlen(text.text) > 10);
    }
    assert_int_equal(logits_parse_ids("1\0002", 3, &ids, &n, &text), ERR_CORRUPT);
}

/* Runs the tiny llama's prompt from a file; the output is the caller's. */
static void run_file(const struct logits_options *options, struct buf *out)
{
    char path[4096], ids_path[] = "/tmp/covey-test-ids-XXXXXX";
    int fd = mkstemp(ids_path);
    assert_true(fd >= 0);
    json_t *all = reference_load("tiny_llama.json");
    char *prompt = json_dumps(json_object_get(json_object_get(all, "f32"), "prompt"), 0);
    assert_non_null(prompt);
    assert_int_equal(write(fd, prompt, strlen(prompt)), (ssize_t)strlen(prompt));
    (void)close(fd);
    reference_path("tiny_llama_f32.gguf", path);
    struct err_text text = {""};
    if (logits_run_file(path, ids_path, options, out, &text) != ERR_OK)
        fail_msg("%s", text.text);
    (void)unlink(ids_path);
    free(prompt);
    json_decref(all);
}

/* The largest at each position are those of transformers, with their logits. */
static void test_lines_name_the_largest(void **state)
{
    (void)state;
    struct logits_options o = {.precision = STAGE_F32, .n_threads = 1, .chunk = 6, .top = 3};
    struct buf out = BUF_INIT(1 << 16);
    run_file(&o, &out);
    json_t *all = reference_load("tiny_llama.json");
    const json_t *ref = json_object_get(all, "f32"), *logits = json_object_get(ref, "logits");
    const json_t *most = json_object_get(ref, "all_argmax");
    const char *line = buf_cstr(&out);
    for (unsigned i = 0; i < json_array_size(most); i++) {
        unsigned position, id[3];
        double logit[3];
        assert_int_equal(sscanf(line, "%u %u:%lf %u:%lf %u:%lf", &position, &id[0], &logit[0],
                                &id[1], &logit[1], &id[2], &logit[2]),
                         7);
        assert_int_equal(position, i);
        assert_int_equal(id[0], json_integer_value(json_array_get(most, i)));
        assert_true(logit[0] >= logit[1] && logit[1] >= logit[2]);
        for (int k = 0; k < 3 && i + 1 == json_array_size(most); k++)
            assert_true(fabs(logit[k] - json_number_value(json_array_get(logits, id[k]))) < 1e-4);
        line = strchr(line, '\n') + 1;
    }
    assert_int_equal(strncmp(line, "sha256 ", 7), 0);
    assert_int_equal(strspn(line + 7, "0123456789abcdef"), 64);
    assert_string_equal(line + 71, " positions 20\n");
    struct logits_options other = {
        .precision = STAGE_F32, .n_threads = 2, .n_cuts = 1, .cuts = {3}};
    struct buf again = BUF_INIT(1 << 16);
    run_file(&other, &again);
    assert_string_equal(buf_cstr(&again), line); /* the same digest, and nothing else */
    buf_deinit(&again);
    buf_deinit(&out);
    json_decref(all);
}

static void test_bad_wishes_are_sentences(void **state)
{
    (void)state;
    char path[4096];
    reference_path("tiny_llama_f32.gguf", path);
    static const struct logits_options bad[] = {
        {.n_threads = 1, .chunk = STAGE_ROWS_MAX + 1},
        {.n_threads = 1, .top = LOGITS_TOP_MAX + 1},
        {.n_threads = 1, .n_cuts = LOGITS_CUTS_MAX + 1},
        {.n_threads = 1, .n_cuts = 1, .cuts = {0}},
        {.n_threads = 1, .n_cuts = 1, .cuts = {4}},
        {.n_threads = 1, .n_cuts = 2, .cuts = {2, 2}},
    };
    const int32_t ids[2] = {1, 512};
    struct buf out = BUF_INIT(1 << 16);
    for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
        struct err_text text = {""};
        assert_int_equal(logits_run(path, ids, 1, &bad[i], &out, NULL, &text), ERR_INVALID);
        assert_true(strlen(text.text) > 10);
    }
    struct logits_options fine = {.n_threads = 1};
    struct err_text text = {""};
    assert_int_equal(logits_run(path, ids, 2, &fine, &out, NULL, &text), ERR_INVALID);
    assert_non_null(strstr(text.text, "below 512"));
    assert_int_equal(logits_run("/none.gguf", ids, 1, &fine, &out, NULL, &text), ERR_NOT_FOUND);
    assert_int_equal(logits_run_file(path, "/none.ids", &fine, &out, &text), ERR_IO);
    assert_non_null(strstr(text.text, "/none.ids: "));
    buf_deinit(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ids_are_parsed_or_refused),
        cmocka_unit_test(test_lines_name_the_largest),
        cmocka_unit_test(test_bad_wishes_are_sentences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
