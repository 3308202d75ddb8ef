/* The nth allocation fails, for every n: the constructors of the runtime. Linked with --wrap, so
 * that only our own libraries are met; leaks are found by the sanitizer build. */
#include "runtime/logits_tool.h"
#include "runtime/sampler.h"
#include "tests/unit/reference.h"

/* Counts down to the allocation that fails; negative: none does. */
struct alloc_plan {
    long countdown;
    bool failed;
};

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);
void *__real_aligned_alloc(size_t alignment, size_t n);
char *__real_strdup(const char *s);
void *__wrap_malloc(size_t n);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t n);
void *__wrap_aligned_alloc(size_t alignment, size_t n);
char *__wrap_strdup(const char *s);

static struct alloc_plan *alloc_plan(void)
{
    static struct alloc_plan plan = {.countdown = -1}; /* the wrapped functions have no context */
    return &plan;
}

static bool fails(void)
{
    struct alloc_plan *plan = alloc_plan();
    if (plan->countdown < 0 || plan->countdown-- > 0)
        return false;
    plan->failed = true;
    return true;
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

void *__wrap_aligned_alloc(size_t alignment, size_t n)
{
    return fails() ? NULL : __real_aligned_alloc(alignment, n);
}

char *__wrap_strdup(const char *s)
{
    return fails() ? NULL : __real_strdup(s);
}

/* What is tried: makes its thing and takes it down again. */
typedef enum err attempt(void *arg, struct err_text *text);

static void fail_everywhere(attempt *fn, void *arg)
{
    for (long n = 0;; n++) {
        struct err_text text = {""};
        *alloc_plan() = (struct alloc_plan){.countdown = n};
        enum err e = fn(arg, &text);
        alloc_plan()->countdown = -1;
        assert_int_equal(e, alloc_plan()->failed ? ERR_NO_MEMORY : ERR_OK);
        if (e == ERR_OK) {
            assert_true(n > 0);
            return;
        }
    }
}

static enum err try_model(void *arg, struct err_text *text)
{
    struct model *m = NULL;
    enum err e = model_open(arg, &m, text);
    struct byte_range r[64];
    uint32_t n;
    if (e == ERR_OK)
        e = model_ranges(m, 0, 2, r, 64, &n);
    else
        assert_non_null(strstr(text->text, "tiny_split.gguf: "));
    model_unref(m);
    return e;
}

struct stage_parts {
    struct model *model;
    struct pool *pool;
};

static enum err try_stage(void *arg, struct err_text *text)
{
    struct stage_parts *p = arg;
    struct stage_options o = {.first_layer = 3, .n_layers = 3, .context = 70, .n_blocks = 3};
    struct stage *s = NULL;
    enum err e = stage_new(p->model, p->pool, &o, &s, text);
    stage_free(s);
    return e;
}

static enum err try_sampler(void *arg, struct err_text *text)
{
    (void)arg;
    (void)text;
    struct sampler *s = NULL;
    enum err e = sampler_new(100, &s);
    sampler_free(s);
    return e;
}

static enum err try_logits(void *arg, struct err_text *text)
{
    int32_t *ids = NULL;
    uint32_t n = 0;
    TRY(logits_parse_ids("[3, 4, 5]", 9, &ids, &n, text));
    struct logits_options o = {.n_threads = 1, .top = 1, .n_cuts = 1, .cuts = {2}};
    struct buf out = BUF_INIT(1 << 16);
    enum err e = logits_run(arg, ids, n, &o, &out, NULL, text);
    free(ids);
    buf_deinit(&out);
    return e;
}

static void test_constructors_survive_every_failure(void **state)
{
    (void)state;
    char path[4096];
    struct err_text text;
    struct stage_parts parts;
    reference_path("tiny_split.gguf", path);
    fail_everywhere(try_model, path);
    fail_everywhere(try_sampler, NULL);
    assert_int_equal(model_open(path, &parts.model, &text), ERR_OK);
    assert_int_equal(pool_new(1, &parts.pool), ERR_OK);
    fail_everywhere(try_stage, &parts);
    pool_free(parts.pool);
    model_unref(parts.model);
    fail_everywhere(try_logits, path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_constructors_survive_every_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
