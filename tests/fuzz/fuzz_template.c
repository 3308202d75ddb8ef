/* Input: a template, a NUL, and the JSON of its variables (of the user). Small limits keep each run
 * short; whatever comes, it must end with text or with a sentence. */
#include "runtime/template.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(int condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *end = size ? memchr(data, 0, size) : NULL;
    size_t n = end ? (size_t)(end - data) : size;
    json_t *user =
        end ? json_loadb((const char *)end + 1, size - n - 1, JSON_ALLOW_NUL, NULL) : NULL;
    const struct tm now = {.tm_year = 126, .tm_mday = 5};
    const struct template_limits limits = {.output_bytes_max = 1 << 16,
                                           .memory_bytes_max = 1 << 20,
                                           .steps_max = 20000,
                                           .depth_max = 100};
    struct template *t;
    struct err_text text = {""};
    enum err e = template_new((const char *)data, n, &t, &text);
    if (e == ERR_OK) {
        struct buf out = BUF_INIT(1 << 16);
        struct text_spans spans = {0};
        const struct template_input input = {.user = user, .now = &now};
        e = template_render(t, &input, &limits, &out, &spans, &text);
        check(e == ERR_OK || (out.len == 0 && spans.n == 0));
        for (size_t i = 0; i < spans.n; i++)
            check(spans.v[i].begin < spans.v[i].end && spans.v[i].end <= out.len &&
                  (i == 0 || spans.v[i - 1].end < spans.v[i].begin));
        text_spans_deinit(&spans);
        buf_deinit(&out);
        template_free(t);
    }
    check(e == ERR_OK || e == ERR_INVALID || text.text[0]);
    json_decref(user);
    return 0;
}
