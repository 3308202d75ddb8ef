/* The C reference against outside truth: gguf's dequantised values, plain binary64 sums, libm. */
#include "base/rng.h"
#include "runtime/kernels/half.h"
#include "runtime/kernels/kernels.h"
#include "runtime/kernels/synthetic.h"
#include "runtime/pool.h"
#include "runtime/vmath.h"
#include "tests/unit/kernels_vectors.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

struct fixture {
    struct pool *pool;
    struct kernels *k;
};

static int setup(void **state)
{
    static struct fixture f;
    *state = &f;
    return pool_new(1, &f.pool) != ERR_OK || kernels_new(f.pool, KERNELS_C, &f.k) != ERR_OK;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    kernels_free(f->k);
    pool_free(f->pool);
    return 0;
}

static void test_open_equals_gguf(void **state)
{
    struct fixture *f = *state;
#define CASE(T, name)                                                                              \
    {                                                                                              \
        T, name##_bytes, name##_floats                                                             \
    }
    const struct {
        enum tensor_type type;
        const uint8_t *bytes;
        const uint32_t *floats;
    } cases[] = {
        CASE(TENSOR_Q4_0, q4_0), CASE(TENSOR_Q4_1, q4_1),     CASE(TENSOR_Q5_0, q5_0),
        CASE(TENSOR_Q5_1, q5_1), CASE(TENSOR_Q8_0, q8_0),     CASE(TENSOR_Q2_K, q2_k),
        CASE(TENSOR_Q3_K, q3_k), CASE(TENSOR_Q4_K, q4_k),     CASE(TENSOR_Q5_K, q5_k),
        CASE(TENSOR_Q6_K, q6_k), CASE(TENSOR_IQ4_NL, iq4_nl), CASE(TENSOR_MXFP4, mxfp4),
    };
    for (unsigned i = 0; i < ARRAY_LEN(cases); i++) {
        struct matrix w = {cases[i].type, 1, 256, tensor_row_bytes(cases[i].type, 256),
                           cases[i].bytes};
        float y[256];
        matrix_row(f->k, &w, 0, y);
        for (int j = 0; j < 256; j++)
            if (y[j] != float_of_bits(cases[i].floats[j])) /* -0 and +0 count as equal */
                fail_msg("%s element %d: %a, gguf has %a", tensor_traits(cases[i].type)->name, j,
                         (double)y[j], (double)float_of_bits(cases[i].floats[j]));
    }
}

/* All finite halves: ldexp gives the value independently; rounding back gives the same half. */
static void test_half_is_exact(void **state)
{
    (void)state;
    for (uint32_t h = 0; h < 0x10000; h++) {
        uint32_t e = h >> 10 & 31, m = h & 1023;
        if (e == 31)
            continue;
        double v = e ? ldexp(1024 + m, (int)e - 25) : ldexp(m, -24);
        v = h & 0x8000 ? -v : v;
        assert_true((double)f32_of_f16((uint16_t)h) == v);
        assert_int_equal(f16_of_f32((float)v), h);
    }
    /* ties to even, both ways; overflow */
    assert_int_equal(f16_of_f32(1 + 0x1p-11f), 0x3c00);
    assert_int_equal(f16_of_f32(1 + 3 * 0x1p-11f), 0x3c02);
    assert_int_equal(f16_of_f32(0x1p-25f), 0);
    assert_int_equal(f16_of_f32(3 * 0x1p-25f), 2);
    assert_int_equal(f16_of_f32(65519.f), 0x7bff);
    assert_int_equal(f16_of_f32(65520.f), 0x7c00);
    assert_true(isnan(f32_of_f16(f16_of_f32(NAN))));
}

/* Against a product in binary64 with weights opened by matrix_row. In precision f32 only rounding
 * separates them; in `fast` also the rounding of activations to 8 bits: |x| / 254 per element. */
static void test_matmul_is_near_binary64(void **state)
{
    struct fixture *f = *state;
    enum { OUT = 11, IN = 512, ROWS = 6 };
    struct rng rng;
    rng_seed(&rng, 7);
    float *x = malloc(sizeof(float) * ROWS * IN), *y = malloc(sizeof(float) * ROWS * OUT);
    float *row = malloc(sizeof(float) * IN);
    void *data = malloc(OUT * IN * 4), *memory = aligned_alloc(64, activations_bytes(ROWS, IN));
    for (uint32_t type = 0; type < TENSOR_TYPES; type++) {
        if (!tensor_traits(type))
            continue;
        struct matrix w = {(enum tensor_type)type, OUT, IN, tensor_row_bytes(type, IN), data};
        synthetic_weights(&rng, w.type, data, OUT * w.row_bytes);
        synthetic_floats(&rng, x, ROWS * IN, 1);
        for (unsigned mode = 0; mode < 8; mode++) {
            struct matmul_options o = {mode & 1 ? KERNELS_F32 : KERNELS_FAST, mode & 2 ? 256 : 0};
            uint32_t rows = mode & 4 ? ROWS : 3;
            struct activations a;
            activations_prepare(f->k, &a, memory, x, IN, rows, IN,
                                activations_form(w.type, o.precision));
            matmul(f->k, &w, &a, &o, y, OUT);
            bool exact = a.forms & ACTIVATIONS_DENSE;
            for (uint32_t n = 0; n < OUT; n++) {
                matrix_row(f->k, &w, n, row);
                for (uint32_t m = 0; m < rows; m++) {
                    double sum = 0, size = 0;
                    for (uint32_t k = 0; k < IN; k++) {
                        double p = (double)row[k] * (double)x[m * IN + k];
                        float top = 0;
                        for (uint32_t i = k / 32 * 32; i < k / 32 * 32 + 32; i++)
                            top = fmaxf(top, fabsf(x[m * IN + i]));
                        sum += p;
                        size += exact ? fabs(p) * 1e-6
                                      : fabs((double)row[k]) * (double)top / 253 + fabs(p) * 1e-6;
                    }
                    if (!(fabs(sum - (double)y[m * OUT + n]) <= size))
                        fail_msg("%s mode %u row %u out %u: %g, binary64 %g, allowed %g",
                                 tensor_traits(type)->name, mode, m, n, (double)y[m * OUT + n], sum,
                                 size);
                }
            }
        }
    }
    free(x), free(y), free(row), free(data), free(memory);
}

/* Worked out by hand: d = 0.5, m = -1, all nibbles 3; x = 0 but x[5] = 127 and x[20] = -254.
 * a = 254, d_x = 2, q[5] = 63.5 -> 64 (even), q[20] = -127, sum = -63, s_x = -126.
 * 0.5 * (3 * -63) * 2 = -189, then -1 * -126: -63. */
static void test_matmul_q4_1_by_hand(void **state)
{
    struct fixture *f = *state;
    uint8_t block[20] = {0x00, 0x38, 0x00, 0xbc};
    for (int i = 4; i < 20; i++)
        block[i] = 0x33;
    float x[32] = {[5] = 127, [20] = -254}, y = 0;
    struct matrix w = {TENSOR_Q4_1, 1, 32, 20, block};
    struct activations a;
    static _Alignas(64) uint8_t memory[4096];
    assert_true(activations_bytes(1, 32) <= sizeof memory);
    activations_prepare(f->k, &a, memory, x, 32, 1, 32, ACTIVATIONS_QUANTISED);
    matmul(f->k, &w, &a, &(struct matmul_options){KERNELS_FAST, 0}, &y, 1);
    assert_true(y == -63.f);
}

/* The tree over slices, with sums that tell it from a chain: B = 2^24 swallows a 1 that is added to
 * it alone. (B + 1) + (1 - B) = 1, and the odd last slice makes 2; a chain gives 1. */
static void test_slices_add_as_a_tree(void **state)
{
    struct fixture *f = *state;
    enum { IN = 160 };
    float w[IN] = {0}, x[IN], y = 0;
    const float slices[5] = {0x1p24f, 1, 1, -0x1p24f, 1};
    for (int i = 0; i < IN; i++)
        x[i] = 1;
    for (int i = 0; i < 5; i++)
        w[i * 32 + 3] = slices[i];
    float tree = ((slices[0] + slices[1]) + (slices[2] + slices[3])) + slices[4];
    float chain = (((slices[0] + slices[1]) + slices[2]) + slices[3]) + slices[4];
    struct matrix m = {TENSOR_F32, 1, IN, IN * 4, w};
    struct activations a;
    static _Alignas(64) uint8_t memory[16384];
    assert_true(activations_bytes(1, IN) <= sizeof memory);
    activations_prepare(f->k, &a, memory, x, IN, 1, IN, ACTIVATIONS_DENSE);
    matmul(f->k, &m, &a, &(struct matmul_options){KERNELS_FAST, 32}, &y, 1);
    assert_true(y == tree && tree == 2);
    matmul(f->k, &m, &a, &(struct matmul_options){KERNELS_FAST, 0}, &y, 1);
    assert_true(y == chain && chain == 1);
}

static double ulps(float got, double truth)
{
    int e;
    (void)frexp(truth, &e);
    return fabs((double)got - truth) / ldexp(1, e - 24);
}

static void test_exp_is_within_two_ulp(void **state)
{
    (void)state;
    double worst = 0;
    for (uint32_t u = 0; u < 0x42b17000u; u += 4999)
        for (uint32_t sign = 0; sign < 2; sign++) {
            float x = float_of_bits(u | sign << 31);
            if (x < VM_EXP_LOW || x > VM_EXP_HIGH)
                continue;
            double truth = exp((double)x);
            if (truth > 0x1p-126)
                worst = fmax(worst, ulps(vm_expf(x), truth));
        }
    assert_true(worst < 2);
    assert_true(vm_expf(0) == 1 && vm_expf(-0.f) == 1);
    assert_true(vm_expf(-INFINITY) == 0 && vm_expf(-100) == 0);
    assert_true(isinf(vm_expf(89)) && isinf(vm_expf(INFINITY)) && isnan(vm_expf(NAN)));
}

static void test_binary64_functions_are_near_libm(void **state)
{
    (void)state;
    struct rng rng;
    rng_seed(&rng, 3);
    for (int i = 0; i < 20000; i++) {
        double x = (rng_unit(&rng) - 0.5) * 1400, s, c;
        assert_true(fabs(vm_exp(x) / exp(x) - 1) < 1e-15 * (1 + fabs(x) / 50));
        double p = exp((rng_unit(&rng) - 0.5) * 1000);
        assert_true(fabs(vm_log(p) - log(p)) <= 1e-15 * fabs(log(p)) + 1e-16);
        double angle = rng_unit(&rng) * (i % 2 ? 1e6 : 10);
        vm_sincos(angle, &s, &c);
        assert_true(fabs(s - sin(angle)) < 4e-16 + angle * 2e-19);
        assert_true(fabs(c - cos(angle)) < 4e-16 + angle * 2e-19);
    }
    const double bad[] = {NAN, INFINITY, -INFINITY, 1e300};
    for (unsigned i = 0; i < ARRAY_LEN(bad); i++) {
        double s = 2, c = 2;
        vm_sincos(bad[i], &s, &c);
        assert_true(s == 0 && c == 1);
    }
    assert_true(vm_exp(0) == 1 && vm_log(1) == 0 && isinf(vm_log(0)) && isnan(vm_log(-1)));
    assert_true(fabs(vm_log(5e-324) + 744.4400719213812) < 1e-12);
}

static void test_rms_norm_and_activations_are_near_binary64(void **state)
{
    struct fixture *f = *state;
    enum { N = 77 };
    struct rng rng;
    rng_seed(&rng, 4);
    float x[N], w[N], y[N];
    synthetic_floats(&rng, x, N, 1);
    synthetic_floats(&rng, w, N, 1);
    double sum = 0;
    for (int i = 0; i < N; i++)
        sum += (double)x[i] * (double)x[i];
    rms_norm(f->k, x, N, 1, N, w, 1e-5f, y, N);
    for (int i = 0; i < N; i++) {
        double truth = (double)x[i] / sqrt(sum / N + 1e-5) * (double)w[i];
        assert_true(fabs((double)y[i] - truth) <= fabs(truth) * 4e-7);
    }
    silu_mul(f->k, x, w, N, 1, N, y, N);
    for (int i = 0; i < N; i++) {
        double v = (double)x[i], truth = v / (1 + exp(-v)) * (double)w[i];
        assert_true(fabs((double)y[i] - truth) <= fabs(truth) * 4e-7);
    }
    gelu_tanh_mul(f->k, x, w, N, 1, N, y, N);
    for (int i = 0; i < N; i++) {
        double v = (double)x[i], u = sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v);
        double truth = 0.5 * v * (1 + tanh(u)) * (double)w[i];
        assert_true(fabs((double)y[i] - truth) <= fabs(v * (double)w[i]) * 2e-6);
    }
}

static void test_rope_turns_pairs(void **state)
{
    struct fixture *f = *state;
    enum { DIM = 64, TURNED = 48 };
    const uint32_t positions[2] = {0, 1234};
    float factors[TURNED / 2], table[2 * TURNED], x[2][2 * DIM], y[2][2 * DIM];
    for (int pairing = 0; pairing < 2; pairing++) {
        for (int i = 0; i < TURNED / 2; i++)
            factors[i] = i < 10 ? 1 : 8;
        struct rope rope = {(enum rope_pairing)pairing, TURNED, 10000, 0.5f, factors};
        struct rng rng;
        rng_seed(&rng, 5);
        synthetic_floats(&rng, x[0], 4 * DIM, 1);
        memcpy(y, x, sizeof x);
        assert_int_equal(rope_table_elements(&rope, 2), 2 * TURNED);
        rope_table(f->k, &rope, positions, 2, table);
        rope_apply(f->k, &rope, table, y[0], 2 * DIM, 2, 2, DIM);
        assert_memory_equal(x[0], y[0], sizeof x[0]); /* position 0 */
        for (int h = 0; h < 2; h++) {
            float *a = x[1] + h * DIM, *b = y[1] + h * DIM;
            for (int i = 0; i < TURNED / 2; i++) {
                int p = pairing == ROPE_NORM ? 2 * i : i;
                int q = pairing == ROPE_NORM ? p + 1 : i + TURNED / 2;
                double t = 1234 * 0.5 * pow(10000, -2.0 * i / TURNED) / (double)factors[i];
                double va = (double)a[p] * cos(t) - (double)a[q] * sin(t);
                double vb = (double)a[p] * sin(t) + (double)a[q] * cos(t);
                double size = fabs((double)a[p]) + fabs((double)a[q]);
                assert_true(fabs((double)b[p] - va) < 2e-7 * size);
                assert_true(fabs((double)b[q] - vb) < 2e-7 * size);
            }
            assert_memory_equal(a + TURNED, b + TURNED, (DIM - TURNED) * sizeof(float));
        }
    }
}

/* Plain softmax attention in binary64; in `fast` the same K and V rounded to F16. */
static void test_attention_is_near_binary64(void **state)
{
    struct fixture *f = *state;
    enum { HEADS = 4, KV = 2, DIM = 24, N = 150, Q = HEADS * DIM, KD = KV * DIM };
    struct rng rng;
    rng_seed(&rng, 6);
    static float keys[N * KD], values[N * KD], q[N * Q], out[N * Q];
    synthetic_floats(&rng, keys, N * KD, 1);
    synthetic_floats(&rng, values, N * KD, 1);
    synthetic_floats(&rng, q, N * Q, 1);
    for (unsigned mode = 0; mode < 4; mode++) {
        bool fast = !(mode & 1);
        uint32_t window = mode & 2 ? 50 : 0;
        struct kv_layout layout = {KV, DIM, fast ? KERNELS_FAST : KERNELS_F32};
        void *blocks[3], *workspace;
        for (int i = 0; i < 3; i++) {
            blocks[i] = aligned_alloc(64, kv_block_bytes(&layout));
            memset(blocks[i], 0xff, kv_block_bytes(&layout)); /* NaN where nothing was written */
        }
        workspace =
            aligned_alloc(64, attention_workspace_bytes(&layout, HEADS, N, N) / 64 * 64 + 64);
        struct kv_segment s = {blocks, 0, N};
        kv_write(f->k, &layout, &s, 1, keys, KD, values, KD);
        struct attention a = {&layout, HEADS, window, 0.2f, &s, 1, q, Q, out, Q, workspace};
        attention(f->k, &a);
        for (int row = 0; row < N; row++)
            for (int h = 0; h < HEADS; h++) {
                double e[N], l = 0, top = -1e30;
                int kv = h / (HEADS / KV), low = window && row >= 50 ? row - 49 : 0;
                for (int p = low; p <= row; p++) {
                    e[p] = 0;
                    for (int d = 0; d < DIM; d++) {
                        float key = keys[p * KD + kv * DIM + d];
                        key = fast ? f32_of_f16(f16_of_f32(key)) : key;
                        e[p] += (double)key * (double)q[row * Q + h * DIM + d] * 0.2;
                    }
                    top = fmax(top, e[p]);
                }
                for (int p = low; p <= row; p++)
                    l += e[p] = exp(e[p] - top);
                for (int d = 0; d < DIM; d++) {
                    double sum = 0, size = 0;
                    for (int p = low; p <= row; p++) {
                        float v = values[p * KD + kv * DIM + d];
                        v = fast ? f32_of_f16(f16_of_f32(v)) : v;
                        sum += e[p] / l * (double)v;
                        size += e[p] / l * fabs((double)v);
                    }
                    double got = (double)out[row * Q + h * DIM + d];
                    if (!(fabs(got - sum) <= size * 2e-4 + 1e-6))
                        fail_msg("mode %u row %d head %d dim %d: %g, binary64 %g", mode, row, h, d,
                                 got, sum);
                }
            }
        for (int i = 0; i < 3; i++)
            free(blocks[i]);
        free(workspace);
    }
}

static void test_traits_know_the_types(void **state)
{
    (void)state;
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_K, 512), 288);
    assert_int_equal(tensor_row_bytes(TENSOR_Q4_K, 128), 0);
    assert_int_equal(tensor_row_bytes(TENSOR_F16, 7), 14);
    assert_int_equal(tensor_row_bytes(4, 256), 0);
    assert_int_equal(tensor_row_bytes(TENSOR_F32, (uint64_t)1 << 40), 0);
    assert_null(tensor_traits(4));
    assert_null(tensor_traits(TENSOR_TYPES));
    assert_null(tensor_traits(UINT32_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open_equals_gguf),
        cmocka_unit_test(test_half_is_exact),
        cmocka_unit_test(test_matmul_is_near_binary64),
        cmocka_unit_test(test_matmul_q4_1_by_hand),
        cmocka_unit_test(test_slices_add_as_a_tree),
        cmocka_unit_test(test_exp_is_within_two_ulp),
        cmocka_unit_test(test_binary64_functions_are_near_libm),
        cmocka_unit_test(test_rms_norm_and_activations_are_near_binary64),
        cmocka_unit_test(test_rope_turns_pairs),
        cmocka_unit_test(test_attention_is_near_binary64),
        cmocka_unit_test(test_traits_know_the_types),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
