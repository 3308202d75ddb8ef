/* F32, F16 and BF16 weights times F32 activations, AVX2: few rows straight from the file with 8
 * transposed outputs per vector, many rows on panels of 16 outputs by 6 rows; and quantising rows
 * of activations. */
#include "runtime/kernels/avx2.h"

enum { PREFETCH_AHEAD = 512, STEP = 8 };

/* ---- few rows */

AVX2_INLINE __m256 unpack_pd(__m256 a, __m256 b, const bool high)
{
    __m256d x = _mm256_castps_pd(a), y = _mm256_castps_pd(b);
    return _mm256_castpd_ps(high ? _mm256_unpackhi_pd(x, y) : _mm256_unpacklo_pd(x, y));
}

/* 4 columns of 8 rows of F32 -> 4 vectors, lane = row. */
AVX2_INLINE void transpose_f32(const uint8_t *p, size_t stride, __m256 v[4])
{
    __m256 a[4];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < 4; r++) {
        __m128 low = _mm_loadu_ps((const float *)(const void *)(p + r * stride));
        __m128 high = _mm_loadu_ps((const float *)(const void *)(p + (r + 4) * stride));
        a[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
    }
    __m256 b0 = _mm256_unpacklo_ps(a[0], a[1]), b1 = _mm256_unpackhi_ps(a[0], a[1]);
    __m256 b2 = _mm256_unpacklo_ps(a[2], a[3]), b3 = _mm256_unpackhi_ps(a[2], a[3]);
    v[0] = unpack_pd(b0, b2, false);
    v[1] = unpack_pd(b0, b2, true);
    v[2] = unpack_pd(b1, b3, false);
    v[3] = unpack_pd(b1, b3, true);
}

/* 8 columns of 8 rows of 16 bits -> 8 vectors of 8. */
AVX2_INLINE void transpose_u16(const uint8_t *p, size_t stride, __m128i v[8])
{
    __m128i a[8], b[8];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < 8; r++)
        a[r] = _mm_loadu_si128((const __m128i *)(const void *)(p + r * stride));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) { /* columns 4h..4h+3 */
        __m128i c0 = _mm_unpacklo_epi32(b[h], b[2 + h]), c1 = _mm_unpackhi_epi32(b[h], b[2 + h]);
        __m128i d0 = _mm_unpacklo_epi32(b[4 + h], b[6 + h]);
        __m128i d1 = _mm_unpackhi_epi32(b[4 + h], b[6 + h]);
        v[4 * h] = _mm_unpacklo_epi64(c0, d0);
        v[4 * h + 1] = _mm_unpackhi_epi64(c0, d0);
        v[4 * h + 2] = _mm_unpacklo_epi64(c1, d1);
        v[4 * h + 3] = _mm_unpackhi_epi64(c1, d1);
    }
}

AVX2_INLINE __m256 open_16(const enum dense_type t, __m128i v)
{
    if (t == DENSE_F16)
        return _mm256_cvtph_ps(v);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

/* STEP columns of 8 rows as F32. */
AVX2_INLINE void open_step(const enum dense_type t, const uint8_t *p, size_t stride, __m256 v[STEP])
{
    if (t == DENSE_F32) {
        transpose_f32(p, stride, v);
        transpose_f32(p + 16, stride, v + 4);
        return;
    }
    __m128i u[8];
    transpose_u16(p, stride, u);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = open_16(t, u[i]);
}

static float open_one(enum dense_type t, const uint8_t *p)
{
    return t == DENSE_F32   ? float_of_bits(load_u32(p))
           : t == DENSE_F16 ? load_half(p)
                            : bf16_open(load_u16(p));
}

/* One column of 8 rows: for the last n_in % STEP. */
static __m256 open_column(enum dense_type t, const uint8_t *p, size_t stride)
{
    float v[8];
    for (uint32_t r = 0; r < 8; r++)
        v[r] = open_one(t, p + r * stride);
    return _mm256_loadu_ps(v);
}

AVX2_INLINE void few_any(const enum dense_type t, const uint32_t R, const uint8_t *w, size_t stride,
                         uint32_t n_in, const float *x, size_t ldx, float (*out)[PANEL_OUTS],
                         bool resume)
{
    const uint32_t size = t == DENSE_F32 ? 4 : 2;
    __m256 acc[FEW_ROWS];
    uint32_t k = 0;
    for (uint32_t r = 0; r < R; r++)
        acc[r] = resume ? _mm256_loadu_ps(out[r]) : _mm256_setzero_ps();
    for (; k + STEP <= n_in; k += STEP) {
        __m256 v[STEP];
        if (k * size % 64 == 0)
            for (uint32_t r = 0; r < 8; r++)
                _mm_prefetch((const char *)w + r * stride + k * size + PREFETCH_AHEAD, _MM_HINT_T0);
        open_step(t, w + k * size, stride, v);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < STEP; i++) {
            AVX2_KEEP(v[i]);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < R; r++)
                acc[r] = _mm256_fmadd_ps(v[i], _mm256_broadcast_ss(x + r * ldx + k + i), acc[r]);
        }
    }
    for (; k < n_in; k++) {
        __m256 v = open_column(t, w + k * size, stride);
        for (uint32_t r = 0; r < R; r++)
            acc[r] = _mm256_fmadd_ps(v, _mm256_broadcast_ss(x + r * ldx + k), acc[r]);
    }
    for (uint32_t r = 0; r < R; r++)
        _mm256_storeu_ps(out[r], _mm256_add_ps(acc[r], _mm256_setzero_ps()));
}

/* ---- panels */

AVX2_INLINE void pack_any(const enum dense_type t, const uint8_t *w, size_t stride, uint32_t n_in,
                          float *panel, size_t ldp)
{
    const uint32_t size = t == DENSE_F32 ? 4 : 2;
    uint32_t k = 0;
    for (; k + STEP <= n_in; k += STEP) {
        __m256 v[STEP];
        open_step(t, w + k * size, stride, v);
#pragma GCC unroll 8
        for (uint32_t i = 0; i < STEP; i++)
            _mm256_storeu_ps(panel + (k + i) * ldp, v[i]);
    }
    for (; k < n_in; k++)
        _mm256_storeu_ps(panel + k * ldp, open_column(t, w + k * size, stride));
}

AVX2_INLINE void tile_rows(const uint32_t R, const float *w, size_t ldp, uint32_t n_in,
                           const float *x, size_t ldx, float *y, size_t ldy, bool resume)
{
    __m256 acc[DENSE_ROWS][2];
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        acc[r][0] = resume ? _mm256_loadu_ps(y + r * ldy) : _mm256_setzero_ps();
        acc[r][1] = resume ? _mm256_loadu_ps(y + r * ldy + 8) : _mm256_setzero_ps();
    }
    for (uint32_t k = 0; k < n_in; k++, w += ldp, x += ldx) {
        __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
        AVX2_KEEP(w0);
        AVX2_KEEP(w1);
#pragma GCC unroll 6
        for (uint32_t r = 0; r < R; r++) {
            __m256 v = _mm256_broadcast_ss(x + r);
            acc[r][0] = _mm256_fmadd_ps(w0, v, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(w1, v, acc[r][1]);
        }
    }
#pragma GCC unroll 6
    for (uint32_t r = 0; r < R; r++) {
        _mm256_storeu_ps(y + r * ldy, _mm256_add_ps(acc[r][0], _mm256_setzero_ps()));
        _mm256_storeu_ps(y + r * ldy + 8, _mm256_add_ps(acc[r][1], _mm256_setzero_ps()));
    }
}

static void dense_tile(const float *panel, size_t ldp, uint32_t n_in, const float *tile, size_t ldx,
                       uint32_t n_rows, float *y, size_t ldy, bool resume)
{
    switch (n_rows) {
    case 6:
        tile_rows(6, panel, ldp, n_in, tile, ldx, y, ldy, resume);
        break;
    case 5:
        tile_rows(5, panel, ldp, n_in, tile, ldx, y, ldy, resume);
        break;
    case 4:
        tile_rows(4, panel, ldp, n_in, tile, ldx, y, ldy, resume);
        break;
    default:
        for (uint32_t r = 0; r < n_rows; r++)
            tile_rows(1, panel, ldp, n_in, tile + r, ldx, y + r * ldy, ldy, resume);
    }
}

#define DENSE(T)                                                                                   \
    static void few_##T(const uint8_t *w, size_t stride, uint32_t n_in, const float *x,            \
                        size_t ldx, uint32_t n_rows, float(*out)[PANEL_OUTS], bool resume)         \
    {                                                                                              \
        if (n_rows == 1)                                                                           \
            few_any(DENSE_##T, 1, w, stride, n_in, x, ldx, out, resume);                           \
        else if (n_rows == 2)                                                                      \
            few_any(DENSE_##T, 2, w, stride, n_in, x, ldx, out, resume);                           \
        else if (n_rows == 3)                                                                      \
            few_any(DENSE_##T, 3, w, stride, n_in, x, ldx, out, resume);                           \
        else                                                                                       \
            few_any(DENSE_##T, 4, w, stride, n_in, x, ldx, out, resume);                           \
    }                                                                                              \
    static void pack_##T(const uint8_t *w, size_t stride, uint32_t n_in, float *panel, size_t ldp) \
    {                                                                                              \
        pack_any(DENSE_##T, w, stride, n_in, panel, ldp);                                          \
    }
DENSE(F32)
DENSE(F16)
DENSE(BF16)

/* ---- quantising activations */

AVX2_INLINE uint32_t largest_bits(const float *x)
{
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i top = _mm256_setzero_si256();
    for (int i = 0; i < 4; i++) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)(x + 8 * i));
        top = _mm256_max_epi32(top, _mm256_and_si256(v, mask));
    }
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(t);
}

AVX2_INLINE __m256i round_8(const float *x, __m256 id)
{
    const __m256 top = _mm256_set1_ps(127.f), bottom = _mm256_set1_ps(-127.f);
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), id);
    v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q)); /* NaN -> 0 */
    v = _mm256_max_ps(_mm256_min_ps(v, top), bottom);
    return _mm256_cvtps_epi32(v); /* to nearest, ties to even */
}

/* -32 times the pairs of 16 bytes: their sums over k mod 4 < 2 and >= 2, as int16. */
AVX2_INLINE uint32_t pair_of_sums(__m128i q, int16_t sums[2])
{
    __m128i s = _mm_madd_epi16(_mm_cvtepi8_epi16(q), _mm_set1_epi16(1)); /* k, k+1: 8 columns */
    __m128i t = _mm_madd_epi16(_mm_cvtepi8_epi16(_mm_srli_si128(q, 8)), _mm_set1_epi16(1));
    s = _mm_add_epi32(s, t);
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    sums[0] = (int16_t)_mm_cvtsi128_si32(s);
    sums[1] = (int16_t)_mm_extract_epi32(s, 1);
    return (uint16_t)(-32 * sums[0]) | (uint32_t)(uint16_t)(-32 * sums[1]) << 16;
}

AVX2_INLINE void put_u32(uint8_t *p, uint32_t v)
{
    memcpy(p, &v, 4);
}

static void quantise(const float *x, uint32_t n_blocks, uint32_t n_rows, uint32_t r, uint8_t *tile)
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const size_t n = n_rows;
    for (uint32_t b = 0; b < n_blocks; b++, x += BLOCK, tile += n * TILE_ROW_BYTES) {
        float a = float_of_bits(largest_bits(x));
        bool zero = a < BLOCK_ZERO_BELOW;
        float d = zero ? 0 : a / 127.f;
        __m256 id = _mm256_set1_ps(zero ? 0 : 127.f / a);
        __m256i low = _mm256_packs_epi32(round_8(x, id), round_8(x + 8, id));
        __m256i high = _mm256_packs_epi32(round_8(x + 16, id), round_8(x + 24, id));
        __m256i q = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(void *)(tile + 32 * (size_t)r), q);
        int16_t s0[2], s1[2];
        uint32_t c0 = pair_of_sums(_mm256_castsi256_si128(q), s0);
        uint32_t c1 = pair_of_sums(_mm256_extracti128_si256(q, 1), s1);
        int first = s0[0] + s1[0], second = s0[1] + s1[1];
        uint8_t *p = tile + 32 * n + 4 * (size_t)r;
        put_u32(p, bits_of_float(d));
        put_u32(p + 4 * n, bits_of_float(d * (float)(first + second)));
        put_u32(p + 8 * n, (uint16_t)(-8 * first) | (uint32_t)(uint16_t)(-8 * second) << 16);
        put_u32(p + 12 * n, (uint16_t)(-16 * first) | (uint32_t)(uint16_t)(-16 * second) << 16);
        put_u32(p + 16 * n, c0);
        put_u32(p + 20 * n, c1);
    }
}

void avx2_dense(struct kernel_ops *ops)
{
    ops->dense_few[DENSE_F32] = few_F32;
    ops->dense_few[DENSE_F16] = few_F16;
    ops->dense_few[DENSE_BF16] = few_BF16;
    ops->dense_pack[DENSE_F32] = pack_F32;
    ops->dense_pack[DENSE_F16] = pack_F16;
    ops->dense_pack[DENSE_BF16] = pack_BF16;
    ops->dense_tile = dense_tile;
    ops->quantise = quantise;
}
