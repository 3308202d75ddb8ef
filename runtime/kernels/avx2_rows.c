/* Work along rows, AVX2. Sums keep the 16 lanes of arithmetic.h 7 in two vectors; the last
 * n % 16 elements are padded with +0, which changes no lane. */
#include "runtime/kernels/avx2.h"
#include "runtime/kernels/c_ref.h"

static float sum_squares(const float *x, uint32_t n)
{
    __m256 a = _mm256_setzero_ps(), b = a;
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 u = _mm256_loadu_ps(x + i), v = _mm256_loadu_ps(x + i + 8);
        a = _mm256_fmadd_ps(u, u, a);
        b = _mm256_fmadd_ps(v, v, b);
    }
    if (i < n) {
        float rest[16] = {0};
        memcpy(rest, x + i, (n - i) * sizeof(float));
        __m256 u = _mm256_loadu_ps(rest), v = _mm256_loadu_ps(rest + 8);
        a = _mm256_fmadd_ps(u, u, a);
        b = _mm256_fmadd_ps(v, v, b);
    }
    return avx2_sum_lanes(a, b);
}

static void norm(const float *x, uint32_t n, float scale, const float *weight, float *y)
{
    const __m256 s = _mm256_set1_ps(scale);
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), s);
        _mm256_storeu_ps(y + i, weight ? _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)) : v);
    }
    for (; i < n; i++)
        y[i] = weight ? x[i] * scale * weight[i] : x[i] * scale;
}

AVX2_INLINE __m256 silu(__m256 x)
{
    __m256 e = avx2_exp(_mm256_xor_ps(x, _mm256_set1_ps(-0.f)));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.f), e));
}

AVX2_INLINE __m256 gelu(__m256 x)
{
    __m256 cubic = _mm256_mul_ps(_mm256_set1_ps(0.044715f), x);
    cubic = _mm256_fmadd_ps(cubic, _mm256_mul_ps(x, x), x);
    __m256 u = _mm256_mul_ps(_mm256_set1_ps(0x1.988454p-1f), cubic);
    __m256 e = avx2_exp(_mm256_mul_ps(_mm256_set1_ps(-2.f), u));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.f), e));
}

static void silu_mul_row(const float *gate, const float *up, uint32_t n, float *y)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i,
                         _mm256_mul_ps(silu(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
    for (; i < n; i++)
        y[i] = vm_siluf(gate[i]) * up[i];
}

static void gelu_mul_row(const float *gate, const float *up, uint32_t n, float *y)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i,
                         _mm256_mul_ps(gelu(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
    for (; i < n; i++)
        y[i] = vm_gelu_tanhf(gate[i]) * up[i];
}

static float exp_sum_row(const float *x, size_t n, float max, float *y)
{
    const __m256 m = _mm256_set1_ps(max);
    __m256 a = _mm256_setzero_ps(), b = a;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 u = avx2_exp(_mm256_sub_ps(_mm256_loadu_ps(x + i), m));
        __m256 v = avx2_exp(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8), m));
        _mm256_storeu_ps(y + i, u);
        _mm256_storeu_ps(y + i + 8, v);
        a = _mm256_add_ps(a, u);
        b = _mm256_add_ps(b, v);
    }
    if (i < n) {
        float rest[16] = {0};
        for (size_t j = i; j < n; j++)
            rest[j - i] = y[j] = vm_expf(x[j] - max);
        a = _mm256_add_ps(a, _mm256_loadu_ps(rest));
        b = _mm256_add_ps(b, _mm256_loadu_ps(rest + 8));
    }
    return avx2_sum_lanes(a, b);
}

static void add_row(float *y, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(y + i), _mm256_loadu_ps(x + i)));
    for (; i < n; i++)
        y[i] += x[i];
}

/* Eight pairs as vectors a and b, with their cos and sin. */
AVX2_INLINE void turn(__m256 *a, __m256 *b, __m256 c, __m256 s)
{
    __m256 minus = _mm256_xor_ps(_mm256_mul_ps(*b, s), _mm256_set1_ps(-0.f));
    __m256 first = _mm256_fmadd_ps(*a, c, minus);
    *b = _mm256_fmadd_ps(*a, s, _mm256_mul_ps(*b, c));
    *a = first;
}

/* 16 floats in pairs -> evens and odds, in the lane order that `join` undoes. */
AVX2_INLINE void part(const float *p, __m256 *even, __m256 *odd)
{
    __m256 u = _mm256_loadu_ps(p), v = _mm256_loadu_ps(p + 8);
    *even = _mm256_shuffle_ps(u, v, 0x88);
    *odd = _mm256_shuffle_ps(u, v, 0xdd);
}

AVX2_INLINE void join(float *p, __m256 even, __m256 odd)
{
    _mm256_storeu_ps(p, _mm256_unpacklo_ps(even, odd));
    _mm256_storeu_ps(p + 8, _mm256_unpackhi_ps(even, odd));
}

static void rope_head(enum rope_pairing pairing, const float *table, uint32_t n_dims, float *head)
{
    uint32_t half = n_dims / 2, i = 0;
    for (; i + 8 <= half; i += 8) {
        __m256 c, s, a, b;
        part(table + 2 * i, &c, &s);
        if (pairing == ROPE_NORM) {
            part(head + 2 * i, &a, &b);
            turn(&a, &b, c, s);
            join(head + 2 * i, a, b);
            continue;
        }
        /* part's order is 0 1 4 5 2 3 6 7: put cos and sin in that of memory */
        c = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(c), 0xd8));
        s = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(s), 0xd8));
        a = _mm256_loadu_ps(head + i);
        b = _mm256_loadu_ps(head + i + half);
        turn(&a, &b, c, s);
        _mm256_storeu_ps(head + i, a);
        _mm256_storeu_ps(head + i + half, b);
    }
    for (; i < half; i++) {
        float *pa = pairing == ROPE_NORM ? head + 2 * i : head + i;
        float *pb = pairing == ROPE_NORM ? pa + 1 : pa + half;
        float a = *pa, b = *pb, c = table[2 * i], s = table[2 * i + 1];
        *pa = fmaf(a, c, -(b * s));
        *pb = fmaf(a, s, b * c);
    }
}

static void halves(const float *x, uint32_t n, uint16_t *y)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++)
        y[i] = half_round(x[i]);
}

void avx2_rows(struct kernel_ops *ops)
{
    ops->sum_squares = sum_squares;
    ops->norm = norm;
    ops->silu_mul = silu_mul_row;
    ops->gelu_mul = gelu_mul_row;
    ops->exp_sum = exp_sum_row;
    ops->add = add_row;
    ops->rope = rope_head;
    ops->halves = halves;
}
