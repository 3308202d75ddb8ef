/* Any bytes as a GGUF file: opens with all its values in reach, or is refused with a sentence; and
 * the same for the model in it. */
#include "runtime/gguf.h"
#include "runtime/model.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint64_t read_value(const struct gguf *g, const char *key)
{
    struct gguf_array a;
    struct gguf_string s = {0};
    int64_t i = 0;
    uint64_t u = 0, sum = 0;
    double d = 0;
    float f = 0;
    bool b = false;
    if (gguf_get_array(g, key, &a) == ERR_OK) {
        for (uint64_t k = 0; k < a.n && k < 1000; k++) {
            s = gguf_array_string(&a, k);
            sum += s.n > 0 ? (uint8_t)s.data[s.n - 1] : 0;
            sum += gguf_array_int(&a, k, &i) + gguf_array_float(&a, k, &d);
        }
        s = gguf_array_string(&a, a.n);
    }
    sum += gguf_get_string(g, key, &s) + gguf_get_i64(g, key, &i) + gguf_get_u64(g, key, &u);
    sum += gguf_get_f32(g, key, &f) + gguf_get_bool(g, key, &b);
    return sum + u + s.n;
}

static void read_all(const struct gguf *g, const uint8_t *data, size_t size)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < gguf_n_pairs(g); i++) {
        struct gguf_string key = gguf_key(g, i);
        char name[256];
        gguf_string_copy(key, name, sizeof name);
        sum += read_value(g, name) + gguf_value_type(g, i);
    }
    for (uint32_t i = 0; i < gguf_n_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        if (t->n_bytes > size || t->offset > size - t->n_bytes || t->n_bytes == 0)
            abort();
        sum += data[t->offset] + data[t->offset + t->n_bytes - 1];
    }
    volatile uint64_t keep = sum;
    (void)keep;
}

static void read_model(struct gguf *take_gguf)
{
    struct model *m = NULL;
    struct err_text text = {""};
    if (model_open_gguf(take_gguf, &m, &text) != ERR_OK) {
        if (!strstr(text.text, "input: "))
            abort();
        return;
    }
    const struct model_info *info = model_info(m);
    struct byte_range *r = malloc(MODEL_RANGES_MAX * sizeof *r);
    uint32_t n = 0;
    if (!r)
        abort();
    if (model_ranges(m, 0, info->n_layers, r, MODEL_RANGES_MAX, &n) == ERR_OK)
        for (uint32_t i = 0; i < n; i++)
            if (r[i].offset < info->header_bytes || r[i].n_bytes > info->file_bytes ||
                r[i].offset > info->file_bytes - r[i].n_bytes)
                abort();
    free(r);
    model_unref(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct gguf *g = NULL;
    struct err_text text = {""};
    if (gguf_open_memory(data, size, "input", &g, &text) != ERR_OK) {
        if (!strstr(text.text, "input: "))
            abort();
        return 0;
    }
    read_all(g, data, size);
    read_model(g);
    return 0;
}
