#include "runtime/gguf.h"
#include "tests/unit/reference.h"

static uint8_t *read_file(const char *file, size_t *ret_n)
{
    char path[4096];
    reference_path(file, path);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    uint8_t *bytes = malloc(1 << 20);
    assert_non_null(bytes);
    *ret_n = fread(bytes, 1, 1 << 20, f);
    (void)fclose(f);
    return bytes;
}

static void test_model_describes_the_file(void **state)
{
    (void)state;
    char path[4096];
    reference_path("tiny_llama_q4_1.gguf", path);
    struct model *m;
    struct err_text text;
    assert_int_equal(model_open(path, &m, &text), ERR_OK);
    const struct model_info *info = model_info(m);
    /* From the config.json that the file was made of. */
    assert_string_equal(info->architecture, "llama");
    assert_int_equal(info->n_layers, 4);
    assert_int_equal(info->n_embd, 64);
    assert_int_equal(info->n_heads, 4);
    assert_int_equal(info->n_kv_heads, 2);
    assert_int_equal(info->head_dim, 16);
    assert_int_equal(info->n_ff, 96);
    assert_int_equal(info->n_vocab, 512);
    assert_int_equal(info->context_max, 512);
    assert_false(info->output_is_embedding);
    const uint64_t qkv = 64u * 64 + 64 * 32 * 2, others = 64u * 64 + 64 * 96 * 3;
    assert_int_equal(info->layer_macs, 2 * qkv + others);
    assert_int_equal(info->layer_bytes[0], (qkv + others) / 32 * 20 + 2u * 64 * 4);
    assert_int_equal(info->output_macs, 2 * 64 * 512);
    assert_int_equal(info->output_bytes, 64 * 512 / 32 * 20 + 64 * 4);
    assert_int_equal(info->embedding_bytes, 64 * 512 / 32 * 20);
    assert_int_equal(info->kv_bytes_per_position, 2 * 32 * 2);
    assert_int_equal(info->file_bytes, gguf_file_bytes(model_gguf(m)));
    model_unref(model_ref(m));
    model_unref(m);
    reference_path("tiny_rope3_q8_0.gguf", path);
    assert_int_equal(model_open(path, &m, &text), ERR_OK);
    assert_true(model_info(m)->output_is_embedding);
    model_unref(m);
}

static bool covered(const struct byte_range *r, uint32_t n, const struct gguf_tensor *t)
{
    for (uint32_t i = 0; i < n; i++)
        if (r[i].offset <= t->offset && t->offset + t->n_bytes <= r[i].offset + r[i].n_bytes)
            return true;
    return false;
}

/* Whether layers [first, first + n) need a tensor, by its name. */
static bool needed(const struct gguf_tensor *t, uint32_t first, uint32_t n, uint32_t n_layers,
                   bool tied)
{
    char name[80];
    unsigned layer;
    gguf_string_copy(t->name, name, sizeof name);
    if (sscanf(name, "blk.%u.", &layer) == 1)
        return layer >= first && layer < first + n;
    bool tail = first + n == n_layers;
    if (strcmp(name, "token_embd.weight") == 0)
        return first == 0 || (tail && tied);
    return strcmp(name, "rope_freqs.weight") == 0 || tail;
}

static void test_model_ranges_hold_what_layers_need(void **state)
{
    (void)state;
    static const char *const files[] = {"tiny_split.gguf", "tiny_rope3_q8_0.gguf"};
    for (size_t f = 0; f < ARRAY_LEN(files); f++) {
        char path[4096];
        reference_path(files[f], path);
        struct model *m;
        struct err_text text;
        assert_int_equal(model_open(path, &m, &text), ERR_OK);
        const struct model_info *info = model_info(m);
        const struct gguf *g = model_gguf(m);
        for (uint32_t first = 0; first < info->n_layers; first++) {
            for (uint32_t n = 1; first + n <= info->n_layers; n++) {
                struct byte_range r[64];
                uint32_t n_ranges = 0;
                assert_int_equal(model_ranges(m, first, n, r, 64, &n_ranges), ERR_OK);
                for (uint32_t i = 0; i < n_ranges; i++) {
                    assert_true(r[i].offset >= info->header_bytes);
                    assert_true(r[i].offset + r[i].n_bytes <= info->file_bytes);
                    if (i > 0)
                        assert_true(r[i - 1].offset + r[i - 1].n_bytes < r[i].offset);
                }
                for (uint32_t i = 0; i < gguf_n_tensors(g); i++) {
                    const struct gguf_tensor *t = gguf_tensor_at(g, i);
                    assert_int_equal(covered(r, n_ranges, t), needed(t, first, n, info->n_layers,
                                                                     info->output_is_embedding));
                }
            }
        }
        struct byte_range r[1];
        uint32_t n_ranges;
        assert_int_equal(model_ranges(m, 0, info->n_layers, r, 0, &n_ranges), ERR_LIMIT);
        assert_int_equal(model_ranges(m, 0, info->n_layers + 1, r, 1, &n_ranges), ERR_INVALID);
        assert_int_equal(model_ranges(m, info->n_layers, 1, r, 1, &n_ranges), ERR_INVALID);
        assert_int_equal(model_ranges(m, 1, UINT32_MAX, r, 1, &n_ranges), ERR_INVALID);
        model_unref(m);
    }
}

/* One change to a good file: the first (or the nth) occurrence of `from`, at `skip` bytes behind
 * it, becomes `to`. */
struct change {
    const char *from;
    size_t skip;
    const void *to;
    size_t n_to;
    enum err err;
    const char *says;
};

#define U32(v) (const uint32_t[]){v}, 4
#define F32(v) (const float[]){v}, 4

static const struct change changes[] = {
    {"general.architecture", 24 + 8, "mamba", 5, ERR_UNSUPPORTED, "the architecture mamba is not"},
    {"general.architecture", 0, "generel", 7, ERR_CORRUPT, "general.architecture is missing"},
    {"llama.block_count", 17 + 4, U32(0), ERR_CORRUPT, "llama.block_count"},
    {"llama.block_count", 17 + 4, U32(600), ERR_CORRUPT, "llama.block_count"},
    {"llama.block_count", 17 + 4, U32(5), ERR_CORRUPT, "blk.4.attn_norm.weight is missing"},
    {"llama.block_count", 17 + 4, U32(3), ERR_UNSUPPORTED, "does not belong to the architecture"},
    {"llama.context_length", 20 + 4, U32(UINT32_MAX), ERR_CORRUPT, "llama.context_length"},
    {"llama.embedding_length", 22 + 4, U32(32), ERR_CORRUPT, "token_embd.weight has the shape"},
    {"llama.embedding_length", 22 + 4, U32(1 << 30), ERR_CORRUPT, "llama.embedding_length"},
    {"llama.feed_forward_length", 25 + 4, U32(64), ERR_CORRUPT, "ffn_gate.weight has the shape"},
    {"llama.attention.head_count", 26 + 4, U32(5), ERR_CORRUPT, "head_count_kv"},
    {"llama.attention.head_count", 26 + 4, U32(8), ERR_CORRUPT, "attn_q.weight has the shape"},
    {"llama.attention.head_count_kv", 29 + 4, U32(3), ERR_CORRUPT, "head_count_kv"},
    {"llama.attention.head_count_kv", 29 + 4, U32(4), ERR_CORRUPT, "attn_k.weight has the shape"},
    {"llama.attention.key_length", 26 + 4, U32(12), ERR_UNSUPPORTED, "heads of 12 and 16"},
    {"llama.attention.value_length", 28 + 4, U32(8), ERR_UNSUPPORTED, "heads of 16 and 8"},
    {"llama.rope.dimension_count", 26 + 4, U32(15), ERR_CORRUPT, "rope.dimension_count"},
    {"llama.rope.dimension_count", 26 + 4, U32(18), ERR_CORRUPT, "rope.dimension_count"},
    {"llama.rope.freq_base", 20 + 4, F32(-1.0f), ERR_CORRUPT, "rope.freq_base"},
    {"llama.rope.freq_base", 20 + 4, U32(0x7fc00000), ERR_CORRUPT, "rope.freq_base"},
    {"llama.attention.layer_norm_rms_epsilon", 38 + 4, F32(-1.0f), ERR_CORRUPT, "epsilon"},
    {"llama.attention.layer_norm_rms_epsilon", 6, "attentiom", 9, ERR_CORRUPT, "epsilon"},
    {"blk.2.ffn_up.weight", 4, "9", 1, ERR_CORRUPT, "blk.2.ffn_up.weight is missing"},
    {"output_norm.weight", 0, "qutput", 6, ERR_CORRUPT, "output_norm.weight is missing"},
    /* A tied output would be legal, but then `qutput.weight` has no place. */
    {"\x0d\0\0\0\0\0\0\0output.weight", 8, "qutput", 6, ERR_UNSUPPORTED, "qutput.weight does not"},
    {"blk.1.attn_norm.weight", 22 + 4 + 8, U32(24), ERR_UNSUPPORTED, "stored as I8"},
    {"blk.1.attn_q.weight", 19 + 4 + 16, U32(26), ERR_UNSUPPORTED, "stored as I32"},
};

/* The same for a file of gemma3: windows and factors. */
static const struct change gemma_changes[] = {
    {"gemma3.attention.sliding_window", 31 + 4, U32(UINT32_MAX), ERR_CORRUPT, "sliding_window"},
    {"gemma3.attention.sliding_window", 31 + 4, U32(MODEL_CONTEXT_MAX + 1), ERR_CORRUPT,
     "sliding_window"},
    {"gemma3.attention.sliding_window", 31, U32(6), ERR_CORRUPT, "sliding_window"}, /* a float */
    {"gemma3.attention.scale", 22 + 4, F32(-1.0f), ERR_CORRUPT, "gemma3.attention.scale"},
    {"gemma3.attention.scale", 22 + 4, U32(0x7fc00000), ERR_CORRUPT, "gemma3.attention.scale"},
    {"gemma3.attention.scale", 22 + 4, U32(0x7f800000), ERR_CORRUPT, "gemma3.attention.scale"},
    {"blk.2.post_ffw_norm.weight", 4, "9", 1, ERR_CORRUPT, "blk.2.post_ffw_norm.weight is missing"},
    {"blk.0.attn_q_norm.weight", 24 + 4, U32(8), ERR_CORRUPT, "attn_q_norm.weight has the shape"},
};

/* Where the bytes of `from` are; the length is that of the string but for a leading binary one. */
static size_t find(const uint8_t *bytes, size_t n, const char *from)
{
    size_t n_from = from[0] == '\x0d' ? 8 + strlen(from + 8) : strlen(from);
    for (size_t i = 0; i + n_from <= n; i++) {
        uint8_t next = i + n_from < n ? bytes[i + n_from] : 0;
        if (memcmp(bytes + i, from, n_from) == 0 && (next < 'a' || next > 'z') && next != '_')
            return i;
    }
    fail_msg("%s: not in the file", from);
    return 0;
}

static void check_changes(const char *file, const struct change *list, size_t n_list)
{
    size_t n;
    uint8_t *bytes = read_file(file, &n);
    uint8_t *copy = malloc(n);
    assert_non_null(copy);
    for (size_t i = 0; i < n_list; i++) {
        const struct change *c = &list[i];
        memcpy(copy, bytes, n);
        memcpy(copy + find(bytes, n, c->from) + c->skip, c->to, c->n_to);
        struct gguf *g;
        struct model *m;
        struct err_text text = {""};
        assert_int_equal(gguf_open_memory(copy, n, "file", &g, &text), ERR_OK);
        enum err e = model_open_gguf(g, &m, &text);
        if (e != c->err || !strstr(text.text, c->says) || strncmp(text.text, "file: ", 6) != 0)
            fail_msg("%s, case %zu (%s): %d \"%s\"", file, i, c->says, (int)e, text.text);
    }
    free(copy);
    free(bytes);
}

static void test_model_says_what_is_wrong(void **state)
{
    (void)state;
    check_changes("tiny_llama_f32.gguf", changes, ARRAY_LEN(changes));
    check_changes("tiny_gemma3_f32.gguf", gemma_changes, ARRAY_LEN(gemma_changes));
}

static void test_model_knows_windows(void **state)
{
    (void)state;
    char path[4096];
    struct model *m;
    struct err_text text;
    reference_path("tiny_gemma3_f32.gguf", path);
    assert_int_equal(model_open(path, &m, &text), ERR_OK);
    /* From the config.json that the file was made of. */
    const struct model_info *info = model_info(m);
    assert_int_equal(info->window, 8);
    assert_int_equal(info->window_period, 6);
    assert_int_equal(info->kv_bytes_per_position, 16 * 2 * 2);
    assert_int_equal(info->layer_macs, 64u * 64 * 2 + 64u * 16 * 2 + 64u * 96 * 3);
    model_unref(m);
    reference_path("tiny_qwen2_f32.gguf", path);
    assert_int_equal(model_open(path, &m, &text), ERR_OK);
    assert_int_equal(model_info(m)->window, 0);
    assert_int_equal(model_info(m)->kv_bytes_per_position, 32 * 2 * 2);
    model_unref(m);
    /* A window of 0 is none: the last layer's kind for all, and the file is still good. */
    size_t n;
    uint8_t *bytes = read_file("tiny_gemma3_f32.gguf", &n);
    memcpy(bytes + find(bytes, n, "gemma3.attention.sliding_window") + 31 + 4, U32(0));
    struct gguf *g;
    assert_int_equal(gguf_open_memory(bytes, n, "file", &g, &text), ERR_OK);
    assert_int_equal(model_open_gguf(g, &m, &text), ERR_OK);
    assert_int_equal(model_info(m)->window, 0);
    model_unref(m);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_describes_the_file),
        cmocka_unit_test(test_model_ranges_hold_what_layers_need),
        cmocka_unit_test(test_model_knows_windows),
        cmocka_unit_test(test_model_says_what_is_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
