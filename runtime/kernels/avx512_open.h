/* Opening blocks of 16 weight rows at once with AVX-512: as avx2_open.h, bytes are transposed as
 * dwords, so that lane = output from the start. Same values as block_open. Fields of a few bytes
 * come by whole loads of 16 bytes as well: inserting them one by one costs a shuffle each. */
#ifndef COVEY_RUNTIME_KERNELS_AVX512_OPEN_H
#define COVEY_RUNTIME_KERNELS_AVX512_OPEN_H

#include "runtime/kernels/avx2_open.h"
#include "runtime/kernels/avx512.h"

/* Bytes ahead in each of 16 streams. */
enum { WIDE_PREFETCH = 512 };

/* 32 columns of 16 rows. v[j]: columns 4j..4j+3 as the bytes of each row's dword, as stored (those
 * of PANEL_I8 signed). */
struct block16 {
    __m512i v[8];
    __m512 dw, mw;
    __m512 sc[2];  /* integer scales of both halves as F32 */
    __m512i mn[2]; /* integer minima of both halves, each in both int16 */
};

/* What a K type's block of 256 keeps for its eight parts. */
struct super16 {
    __m512 dw[8], mw[8];
    __m512i low[16], high[8], scales[4];
};

/* 16 bytes of rows r, r + 4, r + 8, r + 12. */
AVX2_INLINE __m512i avx512_rows_16(const uint8_t *p, size_t stride, unsigned r)
{
    __m512i a =
        _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)(p + r * stride)));
    p += 4 * stride;
    a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(const void *)(p + r * stride)), 1);
    p += 4 * stride;
    a = _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(const void *)(p + r * stride)), 2);
    p += 4 * stride;
    return _mm512_inserti32x4(a, _mm_loadu_si128((const __m128i *)(const void *)(p + r * stride)),
                              3);
}

/* 16 bytes of 16 rows -> 4 vectors of dwords. Those that the caller does not use cost little. */
AVX2_INLINE void avx512_transpose(const uint8_t *p, size_t stride, __m512i v[4])
{
    __m512i a0 = avx512_rows_16(p, stride, 0), a1 = avx512_rows_16(p, stride, 1);
    __m512i a2 = avx512_rows_16(p, stride, 2), a3 = avx512_rows_16(p, stride, 3);
    __m512i b0 = _mm512_unpacklo_epi32(a0, a1), b1 = _mm512_unpackhi_epi32(a0, a1);
    __m512i b2 = _mm512_unpacklo_epi32(a2, a3), b3 = _mm512_unpackhi_epi32(a2, a3);
    v[0] = _mm512_unpacklo_epi64(b0, b2);
    v[1] = _mm512_unpackhi_epi64(b0, b2);
    v[2] = _mm512_unpacklo_epi64(b1, b3);
    v[3] = _mm512_unpackhi_epi64(b1, b3);
}

/* Low halves of the dwords, then the high ones, as 16 bits. */
AVX2_INLINE __m512i avx512_halves_apart(__m512i d)
{
    const __m512i order =
        _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1, 30, 28, 26, 24,
                         22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_epi16(order, d);
}

AVX2_INLINE __m512 avx512_low_half(__m512i d)
{
    return _mm512_cvtph_ps(_mm512_castsi512_si256(avx512_halves_apart(d)));
}

AVX2_INLINE void avx512_two_halves(__m512i d, __m512 *low, __m512 *high)
{
    __m512i apart = avx512_halves_apart(d);
    *low = _mm512_cvtph_ps(_mm512_castsi512_si256(apart));
    *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(apart, 1));
}

AVX2_INLINE __m512i avx512_low_nibbles(__m512i v)
{
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}

AVX2_INLINE __m512i avx512_high_nibbles(__m512i v)
{
    return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}

AVX2_INLINE void avx512_nibbles(const uint8_t *p, size_t stride, __m512i v[8])
{
    avx512_transpose(p, stride, v);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        v[j + 4] = avx512_high_nibbles(v[j]);
        v[j] = avx512_low_nibbles(v[j]);
    }
}

/* Bit k of each row's dword becomes bit 4 of column k. */
AVX2_INLINE void avx512_fifth_bits(__m512i bits, __m512i v[8])
{
    const __m512i even = _mm512_set1_epi32(0x08040201), odd = _mm512_set1_epi32((int)0x80402010);
    const __m512i base = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i byte = _mm512_shuffle_epi8(bits, _mm512_add_epi8(base, _mm512_set1_epi8((char)j)));
        __mmask64 first = _mm512_test_epi8_mask(byte, even);
        __mmask64 second = _mm512_test_epi8_mask(byte, odd);
        v[2 * j] = _mm512_mask_add_epi8(v[2 * j], first, v[2 * j], _mm512_set1_epi8(16));
        v[2 * j + 1] =
            _mm512_mask_add_epi8(v[2 * j + 1], second, v[2 * j + 1], _mm512_set1_epi8(16));
    }
}

/* Scales and minima of Q4_K and Q5_K for all eight parts; arithmetic on whole dwords of 4 bytes. */
AVX2_INLINE void avx512_k_scales(const uint8_t *p, size_t stride, struct super16 *s)
{
    const __m512i six = _mm512_set1_epi32(0x3f3f3f3f), four = _mm512_set1_epi32(0x0f0f0f0f);
    const __m512i two = _mm512_set1_epi32(0x03030303), byte = _mm512_set1_epi32(255);
    __m512i v[4], sc[2], mn[2]; /* v[0]: d, dmin; v[1..3]: the 12 bytes */
    avx512_transpose(p, stride, v);
    sc[0] = _mm512_and_si512(v[1], six);
    mn[0] = _mm512_and_si512(v[2], six);
    __m512i high = _mm512_and_si512(_mm512_srli_epi32(v[1], 6), two);
    sc[1] = _mm512_or_si512(_mm512_and_si512(v[3], four), _mm512_slli_epi32(high, 4));
    high = _mm512_and_si512(_mm512_srli_epi32(v[2], 6), two);
    mn[1] = _mm512_and_si512(_mm512_srli_epi32(v[3], 4), four);
    mn[1] = _mm512_or_si512(mn[1], _mm512_slli_epi32(high, 4));
    __m512 d, dmin;
    avx512_two_halves(v[0], &d, &dmin);
    dmin = _mm512_xor_ps(dmin, _mm512_set1_ps(-0.f));
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m512i a = _mm512_and_si512(_mm512_srli_epi32(sc[j / 4], 8 * (unsigned)(j % 4)), byte);
        __m512i b = _mm512_and_si512(_mm512_srli_epi32(mn[j / 4], 8 * (unsigned)(j % 4)), byte);
        s->dw[j] = _mm512_mul_ps(d, _mm512_cvtepi32_ps(a));
        s->mw[j] = _mm512_mul_ps(dmin, _mm512_cvtepi32_ps(b));
    }
}

/* The sixteen 6-bit scales of Q3_K, less 32; p: the 12 bytes, which are not the block's first. */
AVX2_INLINE void avx512_q3_scales(const uint8_t *p, size_t stride, __m512i scales[4])
{
    const __m512i four = _mm512_set1_epi32(0x0f0f0f0f), two = _mm512_set1_epi32(0x03030303);
    __m512i v[4]; /* v[1..3]: the 12 bytes */
    avx512_transpose(p - 4, stride, v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i low =
            _mm512_and_si512(_mm512_srli_epi32(v[1 + i % 2], (unsigned)(i / 2 * 4)), four);
        __m512i high = _mm512_and_si512(_mm512_srli_epi32(v[3], (unsigned)(2 * i)), two);
        low = _mm512_or_si512(low, _mm512_slli_epi32(high, 4));
        scales[i] = _mm512_sub_epi8(low, _mm512_set1_epi8(32));
    }
}

/* The half at the very end of a block that ends at `end`. */
AVX2_INLINE __m512 avx512_last_half(const uint8_t *end, size_t stride)
{
    __m512i v[4];
    avx512_transpose(end - 16, stride, v);
    return avx512_low_half(_mm512_srli_epi32(v[3], 16));
}

/* Once per block of the file. */
AVX2_INLINE void avx512_open_super(const enum tensor_type t, const uint8_t *p, size_t stride,
                                   struct super16 *s)
{
    __m512i v[4];
    if (t == TENSOR_Q4_K || t == TENSOR_Q5_K)
        avx512_k_scales(p, stride, s);
    if (t == TENSOR_Q5_K) {
        avx512_transpose(p + 16, stride, s->high);
        avx512_transpose(p + 32, stride, s->high + 4);
    }
    if (t == TENSOR_Q6_K) {
        s->dw[0] = avx512_last_half(p + 210, stride);
        avx512_transpose(p + 192, stride, s->scales);
    }
    if (t == TENSOR_Q3_K) {
        s->dw[0] = avx512_last_half(p + 110, stride);
        avx512_q3_scales(p + 96, stride, s->scales);
        avx512_transpose(p, stride, s->high);
        avx512_transpose(p + 16, stride, s->high + 4);
    }
    if (t == TENSOR_Q2_K) {
        avx512_transpose(p + 68, stride, v);
        avx512_two_halves(v[3], &s->dw[0], &s->mw[0]);
        s->mw[0] = _mm512_xor_ps(s->mw[0], _mm512_set1_ps(-0.f));
        avx512_transpose(p, stride, s->scales);
    }
}

/* Once per `outer`: transposes each byte of quants once. */
AVX2_INLINE void avx512_open_outer(const enum tensor_type t, const uint8_t *p, size_t stride,
                                   uint32_t outer, struct super16 *s)
{
    if (t == TENSOR_Q6_K) {
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++)
            avx512_transpose(p + outer * 64 + 16 * i, stride, s->low + 4 * i);
        avx512_transpose(p + 128 + outer * 32, stride, s->high);
        avx512_transpose(p + 144 + outer * 32, stride, s->high + 4);
    } else if (avx2_is_k(t)) {
        const uint32_t at = t == TENSOR_Q5_K ? 48 : t == TENSOR_Q3_K ? 32 : 16;
        avx512_transpose(p + at + outer * 32, stride, s->low);
        avx512_transpose(p + at + 16 + outer * 32, stride, s->low + 4);
    }
}

/* Scale bytes 2j and 2j + 1 of each row, j the part, as signed integers. */
AVX2_INLINE void avx512_part_scales(const struct super16 *s, uint32_t outer, const uint32_t inner,
                                    __m512i sc[2])
{
    __m512i scales = s->scales[outer * 2 + inner / 2];
    sc[0] = _mm512_srai_epi32(_mm512_slli_epi32(scales, inner % 2 ? 8 : 24), 24);
    sc[1] = _mm512_srai_epi32(_mm512_slli_epi32(scales, inner % 2 ? 0 : 16), 24);
}

AVX2_INLINE void avx512_open_q6_k(uint32_t outer, const uint32_t inner, const struct super16 *s,
                                  struct block16 *b)
{
    const __m512i *low = s->low + 8 * (inner % 2);
    __m512i sc[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i nibble = inner < 2 ? avx512_low_nibbles(low[i]) : avx512_high_nibbles(low[i]);
        __m512i top = inner == 0   ? _mm512_slli_epi16(s->high[i], 4)
                      : inner == 1 ? _mm512_slli_epi16(s->high[i], 2)
                      : inner == 2 ? s->high[i]
                                   : _mm512_srli_epi16(s->high[i], 2);
        b->v[i] = _mm512_or_si512(nibble, _mm512_and_si512(top, _mm512_set1_epi8(0x30)));
    }
    b->dw = s->dw[0];
    avx512_part_scales(s, outer, inner, sc);
    b->sc[0] = _mm512_cvtepi32_ps(sc[0]);
    b->sc[1] = _mm512_cvtepi32_ps(sc[1]);
}

/* Bits 2 inner and 2 inner + 1 of each byte. */
AVX2_INLINE __m512i avx512_two_bits(__m512i v, const uint32_t inner)
{
    v = inner == 0   ? v
        : inner == 1 ? _mm512_srli_epi16(v, 2)
        : inner == 2 ? _mm512_srli_epi16(v, 4)
                     : _mm512_srli_epi16(v, 6);
    return _mm512_and_si512(v, _mm512_set1_epi8(3));
}

AVX2_INLINE void avx512_open_q3_k(uint32_t outer, const uint32_t inner, const struct super16 *s,
                                  struct block16 *b)
{
    const __m512i bit = _mm512_set1_epi8((char)(1u << (4 * outer + inner)));
    __m512i sc[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i v = avx512_two_bits(s->low[i], inner);
        __mmask64 high = _mm512_test_epi8_mask(s->high[i], bit);
        v = _mm512_add_epi8(v, _mm512_set1_epi8(28));
        b->v[i] = _mm512_mask_add_epi8(v, high, v, _mm512_set1_epi8(4));
    }
    b->dw = s->dw[0];
    avx512_part_scales(s, outer, inner, sc);
    b->sc[0] = _mm512_cvtepi32_ps(sc[0]);
    b->sc[1] = _mm512_cvtepi32_ps(sc[1]);
}

AVX2_INLINE void avx512_open_q2_k(uint32_t outer, const uint32_t inner, const struct super16 *s,
                                  struct block16 *b)
{
    __m512i sc[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        b->v[i] = avx512_two_bits(s->low[i], inner);
    b->dw = s->dw[0];
    b->mw = s->mw[0];
    avx512_part_scales(s, outer, inner, sc);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m512i mn = _mm512_and_si512(_mm512_srli_epi32(sc[h], 4), _mm512_set1_epi32(15));
        b->mn[h] = _mm512_or_si512(mn, _mm512_slli_epi32(mn, 16));
        b->sc[h] = _mm512_cvtepi32_ps(_mm512_and_si512(sc[h], _mm512_set1_epi32(15)));
    }
}

AVX2_INLINE void avx512_open_k(const enum tensor_type t, uint32_t outer, const uint32_t inner,
                               const struct super16 *s, struct block16 *b)
{
    const uint32_t part = 2 * outer + inner;
    const __m512i bit = _mm512_set1_epi8((char)(1u << part));
    b->dw = s->dw[part];
    b->mw = s->mw[part];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b->v[i] = inner ? avx512_high_nibbles(s->low[i]) : avx512_low_nibbles(s->low[i]);
        if (t == TENSOR_Q5_K)
            b->v[i] = _mm512_mask_add_epi8(b->v[i], _mm512_test_epi8_mask(s->high[i], bit), b->v[i],
                                           _mm512_set1_epi8(16));
    }
}

AVX2_INLINE void avx512_open_table(const uint8_t *p, size_t stride, __m128i table, __m512i v[8])
{
    avx512_nibbles(p, stride, v);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        v[i] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), v[i]);
}

/* MXFP4's scales: half of 2 to the power e - 127, e in the dword's lowest byte. */
AVX2_INLINE __m512 avx512_powers(__m512i d)
{
    __m512i e = _mm512_and_si512(d, _mm512_set1_epi32(255));
    __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
    __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23);
    __mmask16 is_small = _mm512_cmplt_epi32_mask(e, _mm512_set1_epi32(2));
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(normal, is_small, small));
}

/* Scales, minima and fifth bits of the types with blocks of 32, from the block's first 16 bytes. */
AVX2_INLINE void avx512_open_small(const enum tensor_type t, const uint8_t *p, size_t stride,
                                   struct block16 *b)
{
    __m512i v[4];
    avx512_transpose(p, stride, v);
    if (t == TENSOR_MXFP4)
        b->dw = avx512_powers(v[0]);
    else if (t == TENSOR_Q4_1 || t == TENSOR_Q5_1)
        avx512_two_halves(v[0], &b->dw, &b->mw);
    else
        b->dw = avx512_low_half(v[0]);
    if (t == TENSOR_Q5_0)
        avx512_fifth_bits(_mm512_or_si512(_mm512_srli_epi32(v[0], 16), _mm512_slli_epi32(v[1], 16)),
                          b->v);
    if (t == TENSOR_Q5_1)
        avx512_fifth_bits(v[1], b->v);
}

AVX2_INLINE void avx512_open_block(const enum tensor_type t, const uint8_t *p, size_t stride,
                                   uint32_t outer, const uint32_t inner, const struct super16 *s,
                                   struct block16 *b)
{
    switch (t) {
    case TENSOR_Q2_K:
        avx512_open_q2_k(outer, inner, s, b);
        return;
    case TENSOR_Q3_K:
        avx512_open_q3_k(outer, inner, s, b);
        return;
    case TENSOR_Q6_K:
        avx512_open_q6_k(outer, inner, s, b);
        return;
    case TENSOR_Q4_K:
    case TENSOR_Q5_K:
        avx512_open_k(t, outer, inner, s, b);
        return;
    case TENSOR_Q8_0:
        avx512_transpose(p + 2, stride, b->v);
        avx512_transpose(p + 18, stride, b->v + 4);
        break;
    case TENSOR_IQ4_NL:
        avx512_open_table(
            p + 2, stride,
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
            b->v);
        break;
    case TENSOR_MXFP4:
        avx512_open_table(p + 1, stride,
                          _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
                          b->v);
        break;
    default:
        avx512_nibbles(p + avx2_block_bytes(t) - 16, stride, b->v);
    }
    avx512_open_small(t, p, stride, b);
}

#endif
