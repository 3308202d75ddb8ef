/* Opening blocks of 8 weight rows at once with AVX2: bytes are transposed as dwords, so that lane =
 * output from the start and no sum ever goes across lanes. Included by the few-rows and the packing
 * kernels. Same values as block_open. */
#ifndef COVEY_RUNTIME_KERNELS_AVX2_OPEN_H
#define COVEY_RUNTIME_KERNELS_AVX2_OPEN_H

#include "runtime/kernels/avx2.h"

/* 32 columns of 8 rows. v[j]: columns 4j..4j+3 as the bytes of each row's dword. */
struct block8 {
    __m256i v[8];
    __m256 dw, mw;
    __m256i sc[2], mn[2];
};

/* What a K type's block of 256 keeps for its eight parts. */
struct super8 {
    __m256 dw[8], mw[8];
    __m256i low[16], high[8], scales[4];
};

AVX2_INLINE bool avx2_is_k(enum tensor_type t)
{
    return t >= TENSOR_Q2_K && t <= TENSOR_Q6_K;
}

AVX2_INLINE uint32_t avx2_block_bytes(enum tensor_type t)
{
    return t == TENSOR_Q4_0 || t == TENSOR_IQ4_NL ? 18
           : t == TENSOR_Q4_1                     ? 20
           : t == TENSOR_Q5_0                     ? 22
           : t == TENSOR_Q5_1                     ? 24
           : t == TENSOR_Q8_0                     ? 34
           : t == TENSOR_MXFP4                    ? 17
           : t == TENSOR_Q2_K                     ? 84
           : t == TENSOR_Q3_K                     ? 110
           : t == TENSOR_Q4_K                     ? 144
           : t == TENSOR_Q5_K                     ? 176
                                                  : 210;
}

AVX2_INLINE enum panel_kind avx2_kind(enum tensor_type t)
{
    return t == TENSOR_Q4_0                       ? PANEL_U4C
           : t == TENSOR_Q4_1 || t == TENSOR_Q4_K ? PANEL_U4M
           : t == TENSOR_Q5_0                     ? PANEL_U5C
           : t == TENSOR_Q5_1 || t == TENSOR_Q5_K ? PANEL_U5M
           : t == TENSOR_Q6_K || t == TENSOR_Q3_K ? PANEL_S6
           : t == TENSOR_Q2_K                     ? PANEL_S2M
                                                  : PANEL_I8;
}

AVX2_INLINE __m256i avx2_rows_16(const uint8_t *p, size_t stride, unsigned r)
{
    __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(p + r * stride));
    __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(p + (r + 4) * stride));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

/* 16 bytes of 8 rows -> 4 vectors of dwords. */
AVX2_INLINE void avx2_transpose(const uint8_t *p, size_t stride, __m256i v[4])
{
    __m256i a0 = avx2_rows_16(p, stride, 0), a1 = avx2_rows_16(p, stride, 1);
    __m256i a2 = avx2_rows_16(p, stride, 2), a3 = avx2_rows_16(p, stride, 3);
    __m256i b0 = _mm256_unpacklo_epi32(a0, a1), b1 = _mm256_unpackhi_epi32(a0, a1);
    __m256i b2 = _mm256_unpacklo_epi32(a2, a3), b3 = _mm256_unpackhi_epi32(a2, a3);
    v[0] = _mm256_unpacklo_epi64(b0, b2);
    v[1] = _mm256_unpackhi_epi64(b0, b2);
    v[2] = _mm256_unpacklo_epi64(b1, b3);
    v[3] = _mm256_unpackhi_epi64(b1, b3);
}

AVX2_INLINE __m128i avx2_four_dwords(const uint8_t *p, size_t stride)
{
    __m128i d = _mm_cvtsi32_si128((int)load_u32(p));
    d = _mm_insert_epi32(d, (int)load_u32(p + stride), 1);
    d = _mm_insert_epi32(d, (int)load_u32(p + 2 * stride), 2);
    return _mm_insert_epi32(d, (int)load_u32(p + 3 * stride), 3);
}

/* One dword of each of 8 rows. */
AVX2_INLINE __m256i avx2_dwords(const uint8_t *p, size_t stride)
{
    __m128i low = avx2_four_dwords(p, stride), high = avx2_four_dwords(p + 4 * stride, stride);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

/* Dwords of two halves each -> two vectors of F32. */
AVX2_INLINE void avx2_two_halves(__m256i d, __m256 *low, __m256 *high)
{
    __m256i a = _mm256_and_si256(d, _mm256_set1_epi32(0xffff)), b = _mm256_srli_epi32(d, 16);
    __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
    *low = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
    *high = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
}

/* One half of each of 8 rows. */
AVX2_INLINE __m256 avx2_halves(const uint8_t *p, size_t stride)
{
    __m128i h = _mm_cvtsi32_si128(load_u16(p));
    h = _mm_insert_epi16(h, load_u16(p + stride), 1);
    h = _mm_insert_epi16(h, load_u16(p + 2 * stride), 2);
    h = _mm_insert_epi16(h, load_u16(p + 3 * stride), 3);
    h = _mm_insert_epi16(h, load_u16(p + 4 * stride), 4);
    h = _mm_insert_epi16(h, load_u16(p + 5 * stride), 5);
    h = _mm_insert_epi16(h, load_u16(p + 6 * stride), 6);
    h = _mm_insert_epi16(h, load_u16(p + 7 * stride), 7);
    return _mm256_cvtph_ps(h);
}

AVX2_INLINE __m256i avx2_low_nibbles(__m256i v)
{
    return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

AVX2_INLINE __m256i avx2_high_nibbles(__m256i v)
{
    return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}

AVX2_INLINE void avx2_nibbles(const uint8_t *p, size_t stride, __m256i v[8])
{
    avx2_transpose(p, stride, v);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        v[j + 4] = avx2_high_nibbles(v[j]);
        v[j] = avx2_low_nibbles(v[j]);
    }
}

/* Bit k of each row's dword becomes bit 4 of column k. */
AVX2_INLINE void avx2_fifth_bits(__m256i bits, __m256i v[8])
{
    const __m256i even = _mm256_set1_epi32(0x08040201), odd = _mm256_set1_epi32((int)0x80402010);
    const __m256i base = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404,
                                           0x08080808, 0x0c0c0c0c);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i mask = j % 2 ? odd : even;
        __m256i byte = _mm256_add_epi8(base, _mm256_set1_epi8((char)(j / 2)));
        __m256i b = _mm256_and_si256(_mm256_shuffle_epi8(bits, byte), mask);
        b = _mm256_and_si256(_mm256_cmpeq_epi8(b, mask), _mm256_set1_epi8(16));
        v[j] = _mm256_or_si256(v[j], b);
    }
}

/* Scales and minima of Q4_K and Q5_K for all eight parts; arithmetic on whole dwords of 4 bytes. */
AVX2_INLINE void avx2_k_scales(const uint8_t *p, size_t stride, struct super8 *s)
{
    const __m256i six = _mm256_set1_epi32(0x3f3f3f3f), four = _mm256_set1_epi32(0x0f0f0f0f);
    const __m256i two = _mm256_set1_epi32(0x03030303), byte = _mm256_set1_epi32(255);
    __m256i v[4], sc[2], mn[2]; /* v[0]: d, dmin; v[1..3]: the 12 bytes */
    avx2_transpose(p, stride, v);
    sc[0] = _mm256_and_si256(v[1], six);
    mn[0] = _mm256_and_si256(v[2], six);
    __m256i high = _mm256_and_si256(_mm256_srli_epi32(v[1], 6), two);
    sc[1] = _mm256_or_si256(_mm256_and_si256(v[3], four), _mm256_slli_epi32(high, 4));
    high = _mm256_and_si256(_mm256_srli_epi32(v[2], 6), two);
    mn[1] = _mm256_and_si256(_mm256_srli_epi32(v[3], 4), four);
    mn[1] = _mm256_or_si256(mn[1], _mm256_slli_epi32(high, 4));
    __m256 d, dmin;
    avx2_two_halves(v[0], &d, &dmin);
    dmin = _mm256_xor_ps(dmin, _mm256_set1_ps(-0.f));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i a = _mm256_and_si256(_mm256_srli_epi32(sc[j / 4], 8 * (j % 4)), byte);
        __m256i b = _mm256_and_si256(_mm256_srli_epi32(mn[j / 4], 8 * (j % 4)), byte);
        s->dw[j] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(a));
        s->mw[j] = _mm256_mul_ps(dmin, _mm256_cvtepi32_ps(b));
    }
}

/* The sixteen 6-bit scales of Q3_K, less 32; arithmetic on whole dwords of 4 bytes. */
AVX2_INLINE void avx2_q3_scales(const uint8_t *p, size_t stride, __m256i scales[4])
{
    const __m256i four = _mm256_set1_epi32(0x0f0f0f0f), two = _mm256_set1_epi32(0x03030303);
    __m256i low[2] = {avx2_dwords(p, stride), avx2_dwords(p + 4, stride)};
    __m256i top = avx2_dwords(p + 8, stride);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256i v = _mm256_and_si256(_mm256_srli_epi32(low[i % 2], i / 2 * 4), four);
        __m256i high = _mm256_and_si256(_mm256_srli_epi32(top, 2 * i), two);
        v = _mm256_or_si256(v, _mm256_slli_epi32(high, 4));
        scales[i] = _mm256_sub_epi8(v, _mm256_set1_epi8(32));
    }
}

/* Parts come as `outer` (a loop) and `inner` (unrolled): part number outer * n_inner + inner. */
AVX2_INLINE uint32_t avx2_n_inner(enum tensor_type t)
{
    return t == TENSOR_Q4_K || t == TENSOR_Q5_K ? 2 : avx2_is_k(t) ? 4 : 1;
}

AVX2_INLINE uint32_t avx2_n_outer(enum tensor_type t)
{
    return avx2_is_k(t) ? 8 / avx2_n_inner(t) : 1;
}

/* Once per block of the file. */
AVX2_INLINE void avx2_open_super(const enum tensor_type t, const uint8_t *p, size_t stride,
                                 struct super8 *s)
{
    if (t == TENSOR_Q4_K || t == TENSOR_Q5_K)
        avx2_k_scales(p, stride, s);
    if (t == TENSOR_Q5_K) {
        avx2_transpose(p + 16, stride, s->high);
        avx2_transpose(p + 32, stride, s->high + 4);
    }
    if (t == TENSOR_Q6_K) {
        s->dw[0] = avx2_halves(p + 208, stride);
        avx2_transpose(p + 192, stride, s->scales);
    }
    if (t == TENSOR_Q3_K) {
        s->dw[0] = avx2_halves(p + 108, stride);
        avx2_q3_scales(p + 96, stride, s->scales);
        avx2_transpose(p, stride, s->high);
        avx2_transpose(p + 16, stride, s->high + 4);
    }
    if (t == TENSOR_Q2_K) {
        avx2_two_halves(avx2_dwords(p + 80, stride), &s->dw[0], &s->mw[0]);
        s->mw[0] = _mm256_xor_ps(s->mw[0], _mm256_set1_ps(-0.f));
        avx2_transpose(p, stride, s->scales);
    }
}

/* Once per `outer`: transposes each byte of quants once. */
AVX2_INLINE void avx2_open_outer(const enum tensor_type t, const uint8_t *p, size_t stride,
                                 uint32_t outer, struct super8 *s)
{
    if (t == TENSOR_Q4_K || t == TENSOR_Q5_K) {
        const uint8_t *q = p + (t == TENSOR_Q4_K ? 16 : 48) + outer * 32;
        avx2_transpose(q, stride, s->low);
        avx2_transpose(q + 16, stride, s->low + 4);
    }
    if (t == TENSOR_Q2_K || t == TENSOR_Q3_K) {
        const uint8_t *q = p + (t == TENSOR_Q2_K ? 16 : 32) + outer * 32;
        avx2_transpose(q, stride, s->low);
        avx2_transpose(q + 16, stride, s->low + 4);
    }
    if (t == TENSOR_Q6_K) {
        for (uint32_t i = 0; i < 4; i++)
            avx2_transpose(p + outer * 64 + 16 * i, stride, s->low + 4 * i);
        avx2_transpose(p + 128 + outer * 32, stride, s->high);
        avx2_transpose(p + 144 + outer * 32, stride, s->high + 4);
    }
}

/* Scale bytes 2j and 2j + 1 of each row, j the part: each as both bytes of both int16 of the lane.
 */
AVX2_INLINE void avx2_part_scales(const struct super8 *s, uint32_t outer, const uint32_t inner,
                                  __m256i sc[2])
{
    const __m256i base = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404,
                                           0x08080808, 0x0c0c0c0c);
    __m256i scales = s->scales[outer * 2 + inner / 2];
    __m256i first = _mm256_add_epi8(base, _mm256_set1_epi8((char)(2 * (inner % 2))));
    sc[0] = _mm256_shuffle_epi8(scales, first);
    sc[1] = _mm256_shuffle_epi8(scales, _mm256_add_epi8(first, _mm256_set1_epi8(1)));
}

AVX2_INLINE void avx2_open_q6_k(uint32_t outer, const uint32_t inner, const struct super8 *s,
                                struct block8 *b)
{
    const __m256i *low = s->low + 8 * (inner % 2);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i nibble = inner < 2 ? avx2_low_nibbles(low[i]) : avx2_high_nibbles(low[i]);
        __m256i top = inner == 0   ? _mm256_slli_epi16(s->high[i], 4)
                      : inner == 1 ? _mm256_slli_epi16(s->high[i], 2)
                      : inner == 2 ? s->high[i]
                                   : _mm256_srli_epi16(s->high[i], 2);
        b->v[i] = _mm256_or_si256(nibble, _mm256_and_si256(top, _mm256_set1_epi8(0x30)));
    }
    b->dw = s->dw[0];
    avx2_part_scales(s, outer, inner, b->sc);
    b->sc[0] = _mm256_srai_epi16(b->sc[0], 8);
    b->sc[1] = _mm256_srai_epi16(b->sc[1], 8);
}

AVX2_INLINE void avx2_open_q3_k(uint32_t outer, const uint32_t inner, const struct super8 *s,
                                struct block8 *b)
{
    __m128i count = _mm_cvtsi32_si128((int)(4 * outer + inner));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m256i v = _mm256_srli_epi16(s->low[i], (int)(2 * inner));
        __m256i bit = _mm256_srl_epi16(s->high[i], count);
        v = _mm256_and_si256(v, _mm256_set1_epi8(3));
        bit = _mm256_slli_epi16(_mm256_and_si256(bit, _mm256_set1_epi8(1)), 2);
        b->v[i] = _mm256_add_epi8(_mm256_or_si256(v, bit), _mm256_set1_epi8(28));
    }
    b->dw = s->dw[0];
    avx2_part_scales(s, outer, inner, b->sc);
    b->sc[0] = _mm256_srai_epi16(b->sc[0], 8);
    b->sc[1] = _mm256_srai_epi16(b->sc[1], 8);
}

AVX2_INLINE void avx2_open_q2_k(uint32_t outer, const uint32_t inner, const struct super8 *s,
                                struct block8 *b)
{
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        b->v[i] =
            _mm256_and_si256(_mm256_srli_epi16(s->low[i], (int)(2 * inner)), _mm256_set1_epi8(3));
    b->dw = s->dw[0];
    b->mw = s->mw[0];
    avx2_part_scales(s, outer, inner, b->sc);
    for (int h = 0; h < 2; h++) {
        b->mn[h] = _mm256_srli_epi16(b->sc[h], 12);
        b->sc[h] = _mm256_and_si256(_mm256_srli_epi16(b->sc[h], 8), _mm256_set1_epi16(15));
    }
}

AVX2_INLINE void avx2_open_k(const enum tensor_type t, uint32_t outer, const uint32_t inner,
                             const struct super8 *s, struct block8 *b)
{
    uint32_t part = 2 * outer + inner;
    b->dw = s->dw[part];
    b->mw = s->mw[part];
    __m128i count = _mm_cvtsi32_si128((int)part);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b->v[i] = inner ? avx2_high_nibbles(s->low[i]) : avx2_low_nibbles(s->low[i]);
        if (t == TENSOR_Q5_K) {
            __m256i bit =
                _mm256_and_si256(_mm256_srl_epi16(s->high[i], count), _mm256_set1_epi8(1));
            b->v[i] = _mm256_or_si256(b->v[i], _mm256_slli_epi16(bit, 4));
        }
    }
}

AVX2_INLINE void avx2_open_table(const uint8_t *p, size_t stride, __m128i table, __m256i v[8])
{
    avx2_nibbles(p, stride, v);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), v[i]);
}

/* MXFP4's scales: half of 2 to the power e - 127. */
AVX2_INLINE __m256 avx2_powers(const uint8_t *p, size_t stride)
{
    uint32_t u[8];
    for (uint32_t r = 0; r < 8; r++) {
        uint32_t e = p[r * stride];
        u[r] = e < 2 ? 0x00200000u << e : (e - 1) << 23;
    }
    return _mm256_castsi256_ps(_mm256_loadu_si256((const __m256i *)(const void *)u));
}

/* mn0 * sum(q of the first 16) + mn1 * sum(q of the last 16), from the pairs of -32 sum(q). */
AVX2_INLINE __m256i avx2_minimum_sum(const __m256i mn[2], const uint8_t *pairs, uint32_t layout)
{
    __m256i first = _mm256_set1_epi32((int)load_u32(pairs + 8 * layout));
    __m256i last = _mm256_set1_epi32((int)load_u32(pairs + 12 * layout));
    __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(first, mn[0]), _mm256_madd_epi16(last, mn[1]));
    return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_srai_epi32(sum, 5));
}

AVX2_INLINE void avx2_open_block(const enum tensor_type t, const uint8_t *p, size_t stride,
                                 uint32_t outer, const uint32_t inner, const struct super8 *s,
                                 struct block8 *b)
{
    switch (t) {
    case TENSOR_Q4_0:
        avx2_nibbles(p + 2, stride, b->v);
        b->dw = avx2_halves(p, stride);
        break;
    case TENSOR_Q4_1:
        avx2_nibbles(p + 4, stride, b->v);
        avx2_two_halves(avx2_dwords(p, stride), &b->dw, &b->mw);
        break;
    case TENSOR_Q5_0:
        avx2_nibbles(p + 6, stride, b->v);
        avx2_fifth_bits(avx2_dwords(p + 2, stride), b->v);
        b->dw = avx2_halves(p, stride);
        break;
    case TENSOR_Q5_1:
        avx2_nibbles(p + 8, stride, b->v);
        avx2_fifth_bits(avx2_dwords(p + 4, stride), b->v);
        avx2_two_halves(avx2_dwords(p, stride), &b->dw, &b->mw);
        break;
    case TENSOR_Q8_0:
        avx2_transpose(p + 2, stride, b->v);
        avx2_transpose(p + 18, stride, b->v + 4);
        b->dw = avx2_halves(p, stride);
        break;
    case TENSOR_IQ4_NL:
        avx2_open_table(
            p + 2, stride,
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
            b->v);
        b->dw = avx2_halves(p, stride);
        break;
    case TENSOR_MXFP4:
        avx2_open_table(p + 1, stride,
                        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
                        b->v);
        b->dw = avx2_powers(p, stride);
        break;
    case TENSOR_Q2_K:
        avx2_open_q2_k(outer, inner, s, b);
        break;
    case TENSOR_Q3_K:
        avx2_open_q3_k(outer, inner, s, b);
        break;
    case TENSOR_Q6_K:
        avx2_open_q6_k(outer, inner, s, b);
        break;
    default:
        avx2_open_k(t, outer, inner, s, b);
    }
}

#endif
