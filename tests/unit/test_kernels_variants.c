/* Every variant that this CPU can run gives the bits of the C reference computing one row alone:
 * for all types, odd sizes, any row count, threads, slices, extreme values. */
#include "base/rng.h"
#include "runtime/kernels/half.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/synthetic.h"
#include "runtime/pool.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { CANDIDATES = 20, ROWS_MAX = 17 };

struct fixture {
    struct pool *pools[3];
    struct kernels *reference;
    struct kernels *candidates[CANDIDATES];
    unsigned n;
};

static int setup(void **state)
{
    static struct fixture f;
    *state = &f;
    for (uint32_t t = 0; t < 3; t++)
        if (pool_new(t + 1, &f.pools[t]) != ERR_OK)
            return 1;
    if (kernels_new(f.pools[0], KERNELS_C, &f.reference) != ERR_OK)
        return 1;
    for (unsigned v = KERNELS_BEST; v < KERNELS_VARIANTS; v++)
        for (uint32_t t = 0; t < 3; t++) {
            if (t == 2 && v != KERNELS_BEST && v != KERNELS_AVX2 && v != KERNELS_AVX512 &&
                v != KERNELS_AMX && v != KERNELS_NEON_DOTPROD && v != KERNELS_NEON_I8MM)
                continue;
            enum err e = kernels_new(f.pools[t], (enum kernels_variant)v, &f.candidates[f.n]);
            if (e == ERR_OK)
                f.n++;
            else if (e != ERR_UNSUPPORTED)
                return 1;
        }
    printf("# variants:");
    for (unsigned i = 0; i < f.n; i++)
        printf(" %s%s/%u", kernels_variant_name(kernels_variant(f.candidates[i])),
               kernels_use_library(f.candidates[i]) ? "+library" : "",
               pool_threads(kernels_pool(f.candidates[i])));
    printf("\n");
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    for (unsigned i = 0; i < f->n; i++)
        kernels_free(f->candidates[i]);
    kernels_free(f->reference);
    for (int t = 0; t < 3; t++)
        pool_free(f->pools[t]);
    return 0;
}

static void expect_equal(const struct fixture *f, unsigned candidate, const char *what,
                         const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bits_of_float(got[i]) != bits_of_float(want[i]))
            fail_msg("%s with %u threads, %s, element %zu: %a, reference %a",
                     kernels_variant_name(kernels_variant(f->candidates[candidate])),
                     pool_threads(kernels_pool(f->candidates[candidate])), what, i, (double)got[i],
                     (double)want[i]);
}

static void *aligned(size_t n)
{
    void *p = aligned_alloc(64, (n + 63) & ~(size_t)63);
    assert_non_null(p);
    return p;
}

/* ---- products */

struct shape {
    uint32_t n_out, n_in, slice;
};

enum values { VALUES_RANDOM, VALUES_HIGH, VALUES_LOW, VALUES_EQUAL, VALUES_COUNT };

/* Weights and activations at the ends of their ranges, where integer sums are largest. */
static void fill_extreme(struct rng *rng, enum values values, const struct matrix *w, uint8_t *data,
                         float *x, uint32_t n_rows)
{
    const struct tensor_traits *t = tensor_traits(w->type);
    size_t bytes = w->n_out * w->row_bytes, n = (size_t)n_rows * w->n_in;
    synthetic_weights(rng, w->type, data, bytes);
    synthetic_floats(rng, x, n, 1);
    if (values == VALUES_RANDOM)
        return;
    for (size_t i = 0; i < n; i++)
        x[i] = values == VALUES_HIGH  ? 1e15f
               : values == VALUES_LOW ? -3e-32f
                                      : (i % 3 ? 1.f : -1.f);
    if (!t->quantised)
        return;
    /* every block keeps its scales, which are finite; the rest goes to one end */
    for (size_t i = 0; i < bytes; i += t->block_bytes) {
        uint8_t *p = data + i;
        size_t from =
            w->type == TENSOR_Q2_K || w->type == TENSOR_Q3_K || w->type == TENSOR_Q6_K ? 0 : 4;
        size_t to = w->type == TENSOR_Q2_K   ? 80
                    : w->type == TENSOR_Q3_K ? 108
                    : w->type == TENSOR_Q6_K ? 208
                                             : t->block_bytes;
        uint8_t byte = values == VALUES_HIGH ? 0xff : values == VALUES_LOW ? 0x00 : 0x80;
        memset(p + from, byte, to - from);
        if (w->type == TENSOR_Q6_K) /* the largest scales, of either sign */
            memset(p + 192, values == VALUES_HIGH ? 0x7f : 0x80, 16);
    }
}

/* Every row count up to ROWS_MAX, or a few that use each path and its edges. */
enum counts { COUNTS_ALL, COUNTS_SOME };

static bool counts_has(enum counts counts, uint32_t rows)
{
    return counts == COUNTS_ALL || rows == 1 || rows == 3 || rows == 8 || rows == 13;
}

static void check_product(struct fixture *f, const struct matrix *w, const float *x,
                          struct matmul_options options, const char *what, enum counts counts)
{
    float *want = aligned(sizeof(float) * ROWS_MAX * w->n_out);
    float *got = aligned(sizeof(float) * ROWS_MAX * w->n_out);
    void *memory = aligned(activations_bytes(ROWS_MAX, w->n_in));
    unsigned form = activations_form(w->type, options.precision);
    struct activations a;
    for (uint32_t m = 0; m < (counts == COUNTS_ALL ? ROWS_MAX : 13); m++) {
        activations_prepare(f->reference, &a, memory, x + m * w->n_in, w->n_in, 1, w->n_in, form);
        matmul(f->reference, w, &a, &options, want + m * w->n_out, w->n_out);
    }
    for (unsigned c = 0; c < f->n; c++)
        for (uint32_t rows = 1; rows <= ROWS_MAX; rows++) {
            if (!counts_has(counts, rows))
                continue;
            char text[160];
            (void)snprintf(text, sizeof text, "%s %s %ux%u slice %u precision %d rows %u",
                           tensor_traits(w->type)->name, what, w->n_out, w->n_in, options.slice,
                           (int)options.precision, rows);
            memset(got, 0xff, sizeof(float) * ROWS_MAX * w->n_out);
            activations_prepare(f->candidates[c], &a, memory, x, w->n_in, rows, w->n_in, form);
            matmul(f->candidates[c], w, &a, &options, got, w->n_out);
            expect_equal(f, c, text, got, want, (size_t)rows * w->n_out);
            for (size_t i = (size_t)rows * w->n_out; i < ROWS_MAX * w->n_out; i++)
                if (!isnan(got[i]))
                    fail_msg("%s: wrote beyond the rows", text);
        }
    free(want), free(got), free(memory);
}

static void check_type(struct fixture *f, enum tensor_type type)
{
    const struct shape quantised[] = {{8, 256, 0}, {21, 512, 256}, {7, 256, 0}, {40, 768, 0}};
    const struct shape small[] = {{24, 32, 0}, {17, 160, 64}, {1, 96, 0}, {16, 352, 32}};
    const struct shape dense[] = {{9, 5, 0}, {16, 33, 0}, {40, 100, 32}, {13, 2100, 0}};
    const struct tensor_traits *t = tensor_traits(type);
    struct rng rng;
    rng_seed(&rng, 11 + (uint64_t)type);
    const struct shape *sets[2] = {quantised, t->block_elements == 256 ? NULL
                                              : t->quantised           ? small
                                                                       : dense};
    for (int set = 0; set < 2; set++)
        for (int i = 0; i < 4 && sets[set]; i++) {
            struct shape s = sets[set][i];
            struct matrix w = {type, s.n_out, s.n_in, tensor_row_bytes(type, s.n_in), NULL};
            /* exactly as many bytes as the matrix has, so that a sanitizer sees reads beyond */
            uint8_t *data = malloc(s.n_out * w.row_bytes);
            float *x = malloc(sizeof(float) * ROWS_MAX * s.n_in);
            assert_true(data && x);
            w.data = data;
            for (unsigned values = 0; values < VALUES_COUNT; values++) {
                fill_extreme(&rng, (enum values)values, &w, data, x, ROWS_MAX);
                char what[32];
                (void)snprintf(what, sizeof what, "values %u", values);
                struct matmul_options options = {KERNELS_FAST, s.slice};
                check_product(f, &w, x, options, what,
                              values == VALUES_RANDOM && i == 1 ? COUNTS_ALL : COUNTS_SOME);
                options.precision = KERNELS_F32;
                if (t->quantised && values == VALUES_RANDOM && i < 2)
                    check_product(f, &w, x, options, what, COUNTS_SOME);
            }
            free(data), free(x);
        }
}

static void test_products_of_dense_types(void **state)
{
    check_type(*state, TENSOR_F32);
    check_type(*state, TENSOR_F16);
    check_type(*state, TENSOR_BF16);
}

static void test_products_of_quantised_types(void **state)
{
    for (uint32_t type = 0; type < TENSOR_TYPES; type++)
        if (tensor_traits(type) && tensor_traits(type)->quantised)
            check_type(*state, (enum tensor_type)type);
}

/* More columns than one panel buffer or chunk holds: chains go on from chunk to chunk. */
static void test_products_of_long_rows(void **state)
{
    static const enum tensor_type types[] = {TENSOR_F16, TENSOR_Q8_0, TENSOR_Q6_K};
    struct rng rng;
    rng_seed(&rng, 12);
    static const uint32_t slices[][2] = {{27136, 0}, {27136, 8192}, {32768, 32}};
    for (unsigned i = 0; i < ARRAY_LEN(types); i++)
        for (unsigned j = 0; j < (i == 0 ? ARRAY_LEN(slices) : 1); j++) {
            uint32_t n_in = slices[j][0];
            struct matrix w = {types[i], 9, n_in, tensor_row_bytes(types[i], n_in), NULL};
            uint8_t *data = malloc(w.n_out * w.row_bytes);
            float *x = malloc(sizeof(float) * ROWS_MAX * w.n_in);
            w.data = data;
            synthetic_weights(&rng, w.type, data, w.n_out * w.row_bytes);
            synthetic_floats(&rng, x, (size_t)ROWS_MAX * w.n_in, 1);
            check_product(*state, &w, x, (struct matmul_options){KERNELS_FAST, slices[j][1]},
                          "long", COUNTS_SOME);
            free(data), free(x);
        }
}

/* So many rows and slices that they do not fit one pass: each row as the reference alone. */
static void test_products_of_many_rows_and_slices(void **state)
{
    struct fixture *f = *state;
    enum { ROWS = 150, OUT = 9, IN = 4096, CHECKED = 30 };
    static const enum tensor_type types[] = {TENSOR_F16, TENSOR_Q4_1};
    struct rng rng;
    rng_seed(&rng, 17);
    float *x = aligned(sizeof(float) * ROWS * IN), *y = aligned(sizeof(float) * ROWS * OUT);
    float *want = aligned(sizeof(float) * ROWS * OUT);
    void *memory = aligned(activations_bytes(ROWS, IN)), *data = aligned(OUT * IN * 4);
    for (unsigned i = 0; i < ARRAY_LEN(types); i++) {
        struct matrix w = {types[i], OUT, IN, tensor_row_bytes(types[i], IN), data};
        struct matmul_options options = {KERNELS_FAST, 32};
        unsigned form = activations_form(w.type, KERNELS_FAST);
        struct activations a;
        synthetic_weights(&rng, w.type, data, OUT * w.row_bytes);
        synthetic_floats(&rng, x, ROWS * IN, 1);
        for (uint32_t m = 0; m < CHECKED; m++) {
            uint32_t row = m * (ROWS - 1) / (CHECKED - 1);
            activations_prepare(f->reference, &a, memory, x + row * IN, IN, 1, IN, form);
            matmul(f->reference, &w, &a, &options, want + m * OUT, OUT);
        }
        for (unsigned c = 0; c < f->n; c++) {
            activations_prepare(f->candidates[c], &a, memory, x, IN, ROWS, IN, form);
            matmul(f->candidates[c], &w, &a, &options, y, OUT);
            for (uint32_t m = 0; m < CHECKED; m++)
                expect_equal(f, c, "many rows", y + m * (ROWS - 1) / (CHECKED - 1) * OUT,
                             want + m * OUT, OUT);
        }
    }
    free(x), free(y), free(want), free(memory), free(data);
}

/* NaN and infinity in activations: bits are not promised, but no row spoils another and a bad row
 * does not come out as finite numbers. */
static void test_bad_activations_stay_in_their_row(void **state)
{
    struct fixture *f = *state;
    enum { OUT = 16, IN = 256, ROWS = 9 };
    static const enum tensor_type types[] = {TENSOR_F32, TENSOR_F16, TENSOR_Q8_0, TENSOR_Q4_1,
                                             TENSOR_Q6_K};
    static float x[ROWS * IN], clean[ROWS * OUT], y[ROWS * OUT];
    struct rng rng;
    rng_seed(&rng, 13);
    uint8_t *data = aligned(OUT * IN * 4), *memory = aligned(activations_bytes(ROWS, IN));
    for (unsigned i = 0; i < ARRAY_LEN(types); i++)
        for (unsigned c = 0; c < f->n; c++) {
            struct matrix w = {types[i], OUT, IN, tensor_row_bytes(types[i], IN), data};
            synthetic_weights(&rng, w.type, data, OUT * w.row_bytes);
            synthetic_floats(&rng, x, ROWS * IN, 1);
            struct activations a;
            struct matmul_options options = {KERNELS_FAST, 0};
            unsigned form = activations_form(w.type, KERNELS_FAST);
            activations_prepare(f->candidates[c], &a, memory, x, IN, ROWS, IN, form);
            matmul(f->candidates[c], &w, &a, &options, clean, OUT);
            x[3 * IN + 77] = NAN;
            x[5 * IN + 200] = INFINITY;
            activations_prepare(f->candidates[c], &a, memory, x, IN, ROWS, IN, form);
            matmul(f->candidates[c], &w, &a, &options, y, OUT);
            for (int m = 0; m < ROWS; m++)
                for (int n = 0; n < OUT; n++)
                    if (m == 3 || m == 5)
                        assert_true(!isfinite(y[m * OUT + n]));
                    else
                        assert_memory_equal(&y[m * OUT + n], &clean[m * OUT + n], 4);
        }
    free(data), free(memory);
}

/* ---- rows */

static void test_row_work(void **state)
{
    struct fixture *f = *state;
    static const uint32_t sizes[] = {1, 7, 8, 16, 31, 33, 576, 1000};
    enum { ROWS = 5, N = 1000 };
    static float x[ROWS * N], u[ROWS * N], want[ROWS * N], got[ROWS * N];
    struct rng rng;
    rng_seed(&rng, 14);
    synthetic_floats(&rng, x, ROWS * N, 4);
    synthetic_floats(&rng, u, ROWS * N, 4);
    x[3] = 1e30f, x[4] = -1e30f, x[5] = 1e-40f, x[6] = 0, x[7] = -0.f, x[8] = 88.73f, x[9] = -87.4f;
    for (unsigned c = 0; c < f->n; c++)
        for (unsigned s = 0; s < ARRAY_LEN(sizes); s++) {
            uint32_t n = sizes[s];
            struct kernels *k = f->candidates[c], *r = f->reference;
#define SAME(what, call_want, call_got)                                                            \
    do {                                                                                           \
        memset(want, 0, sizeof want);                                                              \
        memset(got, 0, sizeof got);                                                                \
        call_want;                                                                                 \
        call_got;                                                                                  \
        expect_equal(f, c, what, got, want, ROWS *N);                                              \
    } while (0)
            SAME("silu", silu_mul(r, x, u, N, ROWS, n, want, N),
                 silu_mul(k, x, u, N, ROWS, n, got, N));
            SAME("gelu", gelu_tanh_mul(r, x, u, N, ROWS, n, want, N),
                 gelu_tanh_mul(k, x, u, N, ROWS, n, got, N));
            SAME("norm", rms_norm(r, u, N, ROWS, n, x, 1e-6f, want, N),
                 rms_norm(k, u, N, ROWS, n, x, 1e-6f, got, N));
            SAME("norm without weight", rms_norm(r, u, N, ROWS, n, NULL, 1e-6f, want, N),
                 rms_norm(k, u, N, ROWS, n, NULL, 1e-6f, got, N));
            SAME("exp", want[N] = exp_sum(r, u, n, 3, want), got[N] = exp_sum(k, u, n, 3, got));
            SAME("add", add_to(r, want, x, n), add_to(k, got, x, n));
            SAME("bias", add_bias(r, want, N, ROWS, n, x), add_bias(k, got, N, ROWS, n, x));
        }
}

static void test_rope(void **state)
{
    struct fixture *f = *state;
    static const uint32_t dims[][2] = {{8, 8}, {64, 64}, {96, 96}, {80, 20}, {128, 6}};
    enum { ROWS = 3, HEADS = 3, N = HEADS * 128 };
    static float x[ROWS * N], want[ROWS * N], got[ROWS * N], table[ROWS * 128];
    const uint32_t positions[ROWS] = {1, 77, 100000};
    struct rng rng;
    rng_seed(&rng, 15);
    synthetic_floats(&rng, x, ROWS * N, 2);
    for (unsigned c = 0; c < f->n; c++)
        for (unsigned i = 0; i < 2 * ARRAY_LEN(dims); i++) {
            struct rope rope = {(enum rope_pairing)(i % 2), dims[i / 2][1], 1e6f, 1, NULL};
            memcpy(want, x, sizeof x);
            memcpy(got, x, sizeof x);
            rope_table(f->reference, &rope, positions, ROWS, table);
            rope_apply(f->reference, &rope, table, want, N, ROWS, HEADS, dims[i / 2][0]);
            rope_table(f->candidates[c], &rope, positions, ROWS, table);
            rope_apply(f->candidates[c], &rope, table, got, N, ROWS, HEADS, dims[i / 2][0]);
            expect_equal(f, c, "rope", got, want, ROWS * N);
        }
}

/* ---- attention */

enum { POSITIONS = 150, BLOCKS = 3 };

struct heads {
    uint32_t n_heads, n_kv_heads, dim, window;
    enum kernels_precision precision;
};

struct cache {
    struct kv_layout layout;
    void *blocks[2][BLOCKS]; /* two sequences */
    void *workspace;
};

static void cache_new(struct cache *cache, const struct heads *h)
{
    cache->layout = (struct kv_layout){h->n_kv_heads, h->dim, h->precision};
    size_t n = kv_block_bytes(&cache->layout);
    for (int i = 0; i < 2 * BLOCKS; i++) {
        cache->blocks[i / BLOCKS][i % BLOCKS] = aligned(n);
        memset(cache->blocks[i / BLOCKS][i % BLOCKS], 0xff, n); /* NaN: never to be used */
    }
    cache->workspace =
        aligned(attention_workspace_bytes(&cache->layout, h->n_heads, 2 * POSITIONS, POSITIONS));
}

static void cache_free(struct cache *cache)
{
    for (int i = 0; i < 2 * BLOCKS; i++)
        free(cache->blocks[i / BLOCKS][i % BLOCKS]);
    free(cache->workspace);
}

/* Two sequences of POSITIONS rows each, in pieces of `step` rows of both at once. */
static void run_attention(struct kernels *k, const struct heads *h, uint32_t step, const float *kv,
                          const float *q, float *out)
{
    struct cache cache;
    cache_new(&cache, h);
    size_t width = (size_t)h->n_heads * h->dim, kv_width = (size_t)h->n_kv_heads * h->dim;
    float *in_q = aligned(sizeof(float) * 2 * step * width);
    float *in_k = aligned(sizeof(float) * 2 * step * kv_width);
    float *in_v = aligned(sizeof(float) * 2 * step * kv_width);
    float *to = aligned(sizeof(float) * 2 * step * width);
    for (uint32_t from = 0; from < POSITIONS; from += step) {
        uint32_t n = MIN_OF(step, POSITIONS - from);
        struct kv_segment s[2] = {{cache.blocks[0], from, n}, {cache.blocks[1], from, n}};
        for (uint32_t i = 0; i < 2; i++) {
            size_t row = (size_t)i * POSITIONS + from;
            memcpy(in_q + i * n * width, q + row * width, sizeof(float) * n * width);
            memcpy(in_k + i * n * kv_width, kv + row * kv_width, sizeof(float) * n * kv_width);
            memcpy(in_v + i * n * kv_width, kv + (2 * POSITIONS + row) * kv_width,
                   sizeof(float) * n * kv_width);
        }
        kv_write(k, &cache.layout, s, 2, in_k, kv_width, in_v, kv_width);
        struct attention a = {&cache.layout, h->n_heads, h->window, 0.3f,           s, 2, in_q,
                              width,         to,         width,     cache.workspace};
        attention(k, &a);
        for (uint32_t i = 0; i < 2; i++)
            memcpy(out + ((size_t)i * POSITIONS + from) * width, to + i * n * width,
                   sizeof(float) * n * width);
    }
    free(in_q), free(in_k), free(in_v), free(to);
    cache_free(&cache);
}

static void test_attention(void **state)
{
    struct fixture *f = *state;
    static const struct heads cases[] = {
        {6, 2, 64, 0, KERNELS_FAST}, {4, 4, 16, 0, KERNELS_FAST}, {8, 1, 24, 0, KERNELS_FAST},
        {2, 1, 24, 0, KERNELS_FAST}, {4, 2, 8, 0, KERNELS_F32},   {6, 2, 40, 70, KERNELS_FAST},
        {7, 1, 16, 1, KERNELS_FAST}, {2, 2, 136, 0, KERNELS_F32}, {3, 3, 32, 64, KERNELS_F32},
    };
    static const uint32_t steps[] = {1, 7, POSITIONS};
    struct rng rng;
    rng_seed(&rng, 16);
    for (unsigned i = 0; i < ARRAY_LEN(cases); i++) {
        const struct heads *h = &cases[i];
        size_t n = (size_t)2 * POSITIONS * h->n_heads * h->dim;
        size_t n_kv = (size_t)4 * POSITIONS * h->n_kv_heads * h->dim;
        float *q = aligned(sizeof(float) * n), *kv = aligned(sizeof(float) * n_kv);
        float *want = aligned(sizeof(float) * n), *got = aligned(sizeof(float) * n);
        synthetic_floats(&rng, q, n, 1);
        synthetic_floats(&rng, kv, n_kv, 1);
        run_attention(f->reference, h, 1, kv, q, want);
        for (unsigned c = 0; c < f->n; c++)
            for (unsigned s = 0; s < ARRAY_LEN(steps); s++) {
                char text[80];
                (void)snprintf(text, sizeof text, "attention case %u, %u rows at once", i,
                               steps[s]);
                run_attention(f->candidates[c], h, steps[s], kv, q, got);
                expect_equal(f, c, text, got, want, n);
            }
        free(q), free(kv), free(want), free(got);
    }
}

static void test_digests_are_equal(void **state)
{
    struct fixture *f = *state;
    uint64_t want = kernels_digest(f->reference);
    assert_true(want != 0);
    printf("# digest %016llx\n", (unsigned long long)want);
    for (unsigned c = 0; c < f->n; c++)
        assert_true(kernels_digest(f->candidates[c]) == want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_of_dense_types),
        cmocka_unit_test(test_products_of_quantised_types),
        cmocka_unit_test(test_products_of_long_rows),
        cmocka_unit_test(test_products_of_many_rows_and_slices),
        cmocka_unit_test(test_bad_activations_stay_in_their_row),
        cmocka_unit_test(test_row_work),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_digests_are_equal),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
