#include "runtime/gguf.h"

#include "base/buf.h"
#include "base/util.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

/* What a file is built from; each case of the table below changes one thing. */
struct recipe {
    const char *magic;
    uint32_t version;
    uint64_t n_pairs, n_tensors; /* as claimed */
    uint64_t key_length;         /* of the first key; 0: the true one */
    const char *extra_key;       /* one more pair behind the others */
    uint32_t extra_type, extra_element;
    uint64_t extra_n;
    const char *tensor_name; /* the second tensor */
    uint64_t dims[4];
    uint32_t n_dims, type;
    uint64_t offset;
    uint64_t data_bytes;
};

static const struct recipe good = {
    .magic = "GGUF",
    .version = 3,
    .n_pairs = 8,
    .n_tensors = 2,
    .extra_key = "x.extra",
    .extra_type = GGUF_U32,
    .extra_n = 7,
    .tensor_name = "b.weight",
    .dims = {64, 2, 1, 1},
    .n_dims = 2,
    .type = 3, /* Q4_1: 2 blocks of 20 bytes in a row */
    .offset = 32,
    .data_bytes = 32 + 80,
};

static void put(struct buf *b, const void *bytes, size_t n)
{
    assert_int_equal(buf_append(b, bytes, n), ERR_OK);
}

static void put_u32(struct buf *b, uint32_t v)
{
    put(b, &v, sizeof v);
}

static void put_u64(struct buf *b, uint64_t v)
{
    put(b, &v, sizeof v);
}

static void put_string(struct buf *b, const char *s)
{
    put_u64(b, strlen(s));
    put(b, s, strlen(s));
}

static void put_key(struct buf *b, const char *key, uint32_t type)
{
    put_string(b, key);
    put_u32(b, type);
}

static void put_pairs(struct buf *b, const struct recipe *r)
{
    put_u64(b, r->key_length ? r->key_length : strlen("general.architecture"));
    put(b, "general.architecture", strlen("general.architecture"));
    put_u32(b, GGUF_STRING);
    put_string(b, "llama");
    const int16_t negative = -5;
    put_key(b, "x.i16", GGUF_I16);
    put(b, &negative, sizeof negative);
    const double pi = 3.25;
    put_key(b, "x.f64", GGUF_F64);
    put(b, &pi, sizeof pi);
    put_key(b, "x.yes", GGUF_BOOL);
    put(b, "\1", 1);
    put_key(b, "x.words", GGUF_ARRAY);
    put_u32(b, GGUF_STRING);
    put_u64(b, 3);
    put_string(b, "one");
    put_string(b, "");
    put_string(b, "three");
    put_key(b, "x.bytes", GGUF_ARRAY);
    put_u32(b, GGUF_I8);
    put_u64(b, 2);
    put(b, "\xff\x02", 2);
    put_key(b, "x.big", GGUF_U64);
    put_u64(b, UINT64_C(1) << 40);
    put_key(b, r->extra_key, r->extra_type);
    if (r->extra_type == GGUF_ARRAY) {
        put_u32(b, r->extra_element);
        put_u64(b, r->extra_n);
    } else if (r->extra_type == GGUF_BOOL) {
        put(b, &r->extra_n, 1);
    } else if (r->extra_type == GGUF_STRING || r->extra_type == GGUF_U64) {
        put_u64(b, r->extra_n);
    } else {
        put_u32(b, (uint32_t)r->extra_n);
    }
}

static void put_file(struct buf *b, const struct recipe *r)
{
    put(b, r->magic, 4);
    put_u32(b, r->version);
    put_u64(b, r->n_tensors);
    put_u64(b, r->n_pairs);
    put_pairs(b, r);
    put_string(b, "a.weight");
    put_u32(b, 1);
    put_u64(b, 3);
    put_u32(b, 0);
    put_u64(b, 0);
    put_string(b, r->tensor_name);
    put_u32(b, r->n_dims);
    for (uint32_t i = 0; i < r->n_dims && i < 4; i++)
        put_u64(b, r->dims[i]);
    put_u32(b, r->type);
    put_u64(b, r->offset);
    while (b->len % 32)
        put(b, "", 1);
    for (uint64_t i = 0; i < r->data_bytes; i++)
        put(b, "\x55", 1);
}

/* Opens a copy of exact size, so that a sanitizer sees a read past the end. */
static enum err open_copy(const void *bytes, size_t n, struct gguf **ret, void **ret_copy,
                          struct err_text *text)
{
    *ret_copy = malloc(n ? n : 1);
    assert_non_null(*ret_copy);
    memcpy(*ret_copy, bytes, n);
    enum err e = gguf_open_memory(*ret_copy, n, "some.gguf", ret, text);
    if (e != ERR_OK) {
        assert_non_null(strstr(text->text, "some.gguf: "));
        assert_true(strlen(text->text) > 20);
    }
    return e;
}

static void test_gguf_reads_what_was_written(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        struct recipe r = good;
        r.version = version;
        struct buf b = BUF_INIT(1 << 16);
        put_file(&b, &r);
        struct gguf *g;
        struct err_text text;
        assert_int_equal(gguf_open_memory(b.data, b.len, "x", &g, &text), ERR_OK);
        assert_int_equal(gguf_n_pairs(g), 8);
        assert_true(gguf_string_eq(gguf_key(g, 1), "x.i16"));
        struct gguf_string s;
        assert_int_equal(gguf_get_string(g, "general.architecture", &s), ERR_OK);
        assert_true(gguf_string_eq(s, "llama"));
        int64_t i = 0;
        uint32_t u = 9;
        uint64_t u64 = 0;
        float f = 0;
        bool yes = false;
        assert_int_equal(gguf_get_i64(g, "x.i16", &i), ERR_OK);
        assert_int_equal(i, -5);
        assert_int_equal(gguf_get_u32(g, "x.i16", &u), ERR_INVALID);
        assert_int_equal(gguf_get_u32(g, "x.big", &u), ERR_INVALID);
        assert_int_equal(gguf_get_u32(g, "x.none", &u), ERR_NOT_FOUND);
        assert_int_equal(u, 9);
        assert_int_equal(gguf_get_u64(g, "x.big", &u64), ERR_OK);
        assert_true(u64 == UINT64_C(1) << 40);
        assert_int_equal(gguf_get_f32(g, "x.f64", &f), ERR_OK);
        assert_true(f == 3.25f);
        assert_int_equal(gguf_get_f32(g, "x.i16", &f), ERR_INVALID);
        assert_int_equal(gguf_get_bool(g, "x.yes", &yes), ERR_OK);
        assert_true(yes);
        struct gguf_array a;
        assert_int_equal(gguf_get_array(g, "x.words", &a), ERR_OK);
        assert_int_equal(a.n, 3);
        assert_true(gguf_string_eq(gguf_array_string(&a, 0), "one"));
        assert_true(gguf_string_eq(gguf_array_string(&a, 1), ""));
        assert_true(gguf_string_eq(gguf_array_string(&a, 2), "three"));
        assert_int_equal(gguf_array_string(&a, 3).n, 0);
        assert_false(gguf_array_int(&a, 0, &i));
        assert_int_equal(gguf_get_array(g, "x.bytes", &a), ERR_OK);
        assert_true(gguf_array_int(&a, 0, &i) && i == -1);
        assert_true(gguf_array_int(&a, 1, &i) && i == 2);
        assert_false(gguf_array_int(&a, 2, &i));
        const struct gguf_tensor *t = gguf_tensor(g, "b.weight");
        assert_non_null(t);
        assert_null(gguf_tensor(g, "b.weigh"));
        assert_int_equal(t->n_bytes, 80);
        assert_int_equal(t->offset, gguf_header_bytes(g) + 32);
        assert_int_equal(t->dims[0] * 1000 + t->dims[1], 64002);
        gguf_free(g);
        buf_deinit(&b);
    }
}

struct broken {
    const char *says; /* part of the sentence */
    enum err err;
    struct recipe r; /* fields that are 0 here are those of `good` */
    uint64_t zero;   /* OR of the Z_ bits: fields that shall be 0 */
};

enum { Z_DIM0 = 1, Z_NDIMS = 2, Z_DATA = 4, Z_OFFSET = 8 };

static struct recipe mix(const struct broken *c)
{
    struct recipe m = good;
    const struct recipe *r = &c->r;
#define OVER(field)                                                                                \
    if (r->field)                                                                                  \
    m.field = r->field
    OVER(magic);
    OVER(version);
    OVER(n_pairs);
    OVER(n_tensors);
    OVER(key_length);
    OVER(extra_key);
    OVER(extra_type);
    OVER(extra_element);
    OVER(extra_n);
    OVER(tensor_name);
    OVER(n_dims);
    OVER(type);
    OVER(offset);
    OVER(data_bytes);
    for (int i = 0; i < 4; i++)
        OVER(dims[i]);
#undef OVER
    if (c->zero & Z_DIM0)
        m.dims[0] = 0;
    if (c->zero & Z_NDIMS)
        m.n_dims = 0;
    if (c->zero & Z_DATA)
        m.data_bytes = 0;
    if (c->zero & Z_OFFSET)
        m.offset = 0;
    return m;
}

static const struct broken broken[] = {
    {"not a GGUF file", ERR_CORRUPT, {.magic = "GGML"}, 0},
    {"GGUF version 1", ERR_UNSUPPORTED, {.version = 1}, 0},
    {"GGUF version 4", ERR_UNSUPPORTED, {.version = 4}, 0},
    {"big-endian", ERR_UNSUPPORTED, {.version = 0x03000000}, 0},
    {"metadata values, more than", ERR_CORRUPT, {.n_pairs = UINT64_MAX}, 0},
    {"metadata values, more than", ERR_CORRUPT, {.n_pairs = 1000}, 0},
    {"tensors, more than", ERR_CORRUPT, {.n_tensors = UINT64_C(1) << 60}, 0},
    {"claims a length of 18446744073709551615", ERR_CORRUPT, {.key_length = UINT64_MAX}, 0},
    {"unknown type 13", ERR_CORRUPT, {.extra_type = 13}, 0},
    {"neither true nor false", ERR_CORRUPT, {.extra_type = GGUF_BOOL, .extra_n = 2}, 0},
    {"claims a length of", ERR_CORRUPT, {.extra_type = GGUF_STRING, .extra_n = 1 << 20}, 0},
    {"x.extra holds arrays",
     ERR_UNSUPPORTED,
     {.extra_type = GGUF_ARRAY, .extra_element = GGUF_ARRAY, .extra_n = 1},
     0},
    {"unknown type 77",
     ERR_CORRUPT,
     {.extra_type = GGUF_ARRAY, .extra_element = 77, .extra_n = 1},
     0},
    {"claims 4611686018427387905 elements",
     ERR_CORRUPT,
     {.extra_type = GGUF_ARRAY, .extra_element = GGUF_U32, .extra_n = (UINT64_C(1) << 62) + 1},
     0},
    {"claims 4096 elements",
     ERR_CORRUPT,
     {.extra_type = GGUF_ARRAY, .extra_element = GGUF_STRING, .extra_n = 4096},
     0},
    {"x.yes occurs twice", ERR_CORRUPT, {.extra_key = "x.yes"}, 0},
    {"general.alignment", ERR_CORRUPT, {.extra_key = "general.alignment", .extra_n = 48}, 0},
    {"general.alignment", ERR_CORRUPT, {.extra_key = "general.alignment", .extra_n = 1 << 30}, 0},
    {"is not aligned to 64", ERR_CORRUPT, {.extra_key = "general.alignment", .extra_n = 64}, 0},
    {"a.weight occurs twice", ERR_CORRUPT, {.tensor_name = "a.weight"}, 0},
    {"has 5 dimensions", ERR_CORRUPT, {.n_dims = 5}, 0},
    {"has 0 dimensions", ERR_CORRUPT, {0}, Z_NDIMS},
    {"impossible dimensions", ERR_CORRUPT, {0}, Z_DIM0},
    {"impossible dimensions", ERR_CORRUPT, {.dims = {UINT64_C(1) << 62, 4}}, 0},
    {"impossible dimensions", ERR_CORRUPT, {.dims = {UINT64_MAX - 31, 1}}, 0},
    {"no whole number of Q4_1 blocks", ERR_CORRUPT, {.dims = {48, 2}}, 0},
    {"b.weight has the unknown type 4", ERR_UNSUPPORTED, {.type = 4}, 0},
    {"b.weight has the unknown type 4294967295", ERR_UNSUPPORTED, {.type = UINT32_MAX}, 0},
    {"is not aligned to 32", ERR_CORRUPT, {.offset = 33}, 0},
    {"lies beyond any file", ERR_CORRUPT, {.offset = UINT64_MAX - 31}, 0},
    {"cut short: the tensor b.weight", ERR_CORRUPT, {.data_bytes = 32 + 79}, 0},
    {"cut short: the tensor a.weight", ERR_CORRUPT, {0}, Z_DATA},
    {"a.weight and b.weight overlap", ERR_CORRUPT, {0}, Z_OFFSET},
};

static void test_gguf_says_what_is_wrong(void **state)
{
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(broken); i++) {
        struct recipe r = mix(&broken[i]);
        struct buf b = BUF_INIT(1 << 16);
        put_file(&b, &r);
        struct gguf *g = NULL;
        struct err_text text = {""};
        void *copy;
        enum err e = open_copy(b.data, b.len, &g, &copy, &text);
        if (e != broken[i].err || !strstr(text.text, broken[i].says))
            fail_msg("case %zu: %d, \"%s\" instead of \"%s\"", i, e, text.text, broken[i].says);
        free(copy);
        buf_deinit(&b);
    }
}

static void test_gguf_cut_anywhere_is_a_sentence(void **state)
{
    (void)state;
    struct buf b = BUF_INIT(1 << 16);
    put_file(&b, &good);
    for (size_t n = 0; n < b.len; n++) {
        struct gguf *g;
        struct err_text text;
        void *copy;
        assert_int_equal(open_copy(b.data, n, &g, &copy, &text), ERR_CORRUPT);
        free(copy);
    }
    buf_deinit(&b);
}

/* Every single byte set to some values: opens or says why not, and reads nothing outside. */
static void test_gguf_mutations_do_no_harm(void **state)
{
    (void)state;
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    struct buf b = BUF_INIT(1 << 16);
    put_file(&b, &good);
    for (size_t at = 0; at < b.len; at++) {
        for (size_t v = 0; v < sizeof values; v++) {
            uint8_t old = b.data[at];
            b.data[at] = values[v];
            struct gguf *g;
            struct err_text text;
            void *copy;
            if (open_copy(b.data, b.len, &g, &copy, &text) == ERR_OK) {
                for (uint32_t i = 0; i < gguf_n_tensors(g); i++) {
                    const struct gguf_tensor *t = gguf_tensor_at(g, i);
                    assert_true(t->offset + t->n_bytes <= b.len);
                }
                gguf_free(g);
            }
            free(copy);
            b.data[at] = old;
        }
    }
    buf_deinit(&b);
}

/* A file of full size whose tensor data are a hole opens, and only asked-for parts are mapped. */
static void test_gguf_opens_a_sparse_file(void **state)
{
    (void)state;
    struct recipe r = good;
    r.dims[1] = 1 << 20;
    r.data_bytes = 0;
    struct buf b = BUF_INIT(1 << 16);
    put_file(&b, &r);
    char path[] = "/tmp/covey-test-gguf-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, b.data, b.len), (ssize_t)b.len);
    off_t whole = (off_t)b.len + 32 + ((off_t)40 << 20);
    assert_int_equal(ftruncate(fd, whole), 0);
    assert_int_equal(pwrite(fd, "there", 5, whole - 5), 5);
    struct gguf *g;
    struct err_text text;
    assert_int_equal(gguf_open(path, &g, &text), ERR_OK);
    assert_int_equal(gguf_file_bytes(g), whole);
    struct gguf_mapping m;
    assert_int_equal(gguf_map(g, (uint64_t)whole - 5, 5, &m), ERR_OK);
    struct gguf_mapping none;
    assert_int_equal(gguf_map(g, (uint64_t)whole - 5, 6, &none), ERR_INVALID);
    assert_int_equal(gguf_map(g, UINT64_MAX, 2, &none), ERR_INVALID);
    gguf_free(g);
    assert_memory_equal(m.data, "there", 5);
    gguf_unmap(&m);
    assert_int_equal(ftruncate(fd, whole - 1), 0);
    assert_int_equal(gguf_open(path, &g, &text), ERR_CORRUPT);
    assert_non_null(strstr(text.text, "cut short"));
    assert_non_null(strstr(text.text, path));
    (void)close(fd);
    (void)unlink(path);
    assert_int_equal(gguf_open(path, &g, &text), ERR_NOT_FOUND);
    assert_int_equal(gguf_open("/tmp", &g, &text), ERR_INVALID);
    buf_deinit(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_reads_what_was_written),
        cmocka_unit_test(test_gguf_says_what_is_wrong),
        cmocka_unit_test(test_gguf_cut_anywhere_is_a_sentence),
        cmocka_unit_test(test_gguf_mutations_do_no_harm),
        cmocka_unit_test(test_gguf_opens_a_sparse_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
