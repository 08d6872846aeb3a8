/* Neuron-major rows for AVX-512 with VNNI: dot products of 16 blocks of a row at a time, and the
 * terms of axpy. */
#ifndef POLYNEURON_AVX512_ROWS_H
#define POLYNEURON_AVX512_ROWS_H

#include "row_groups.h"

/* Activations of 16 blocks in the order of the weights' registers. */
struct act_chunk { __m512i quants[8]; __m512i sum; __m512 scale; };

ALWAYS_INLINE __m512i four_halves(const struct act_block *x, int first, size_t offset)
{
    __m128i part[4];
    for (int k = 0; k < 4; k++)
        part[k] = _mm_loadu_si128((const void *)(x[first + k].quants + offset));
    __m512i value = _mm512_castsi128_si512(part[0]);
    value = _mm512_inserti32x4(value, part[1], 1);
    value = _mm512_inserti32x4(value, part[2], 2);
    return _mm512_inserti32x4(value, part[3], 3);
}

/* 4-bit: quants[j], quants[4 + j] = columns 0..15, 16..31 of blocks 4j..4j+3.
 * 8-bit: quants[j] = blocks 2j, 2j+1. */
ALWAYS_INLINE void arrange_acts(const int type, struct act_chunk *chunk, const struct act_block *x)
{
    const __m512i step = _mm512_mullo_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(sizeof(struct act_block)));
    chunk->scale = _mm512_i32gather_ps(step, &x->scale, 1);
    chunk->sum = _mm512_i32gather_epi32(step, &x->sum, 1);
    for (int j = 0; j < 4; j++)
        if (type != STORAGE_Q8) {
            chunk->quants[j] = four_halves(x, 4 * j, 0);
            chunk->quants[4 + j] = four_halves(x, 4 * j, 16);
        }
    for (int j = 0; j < 8; j++)
        if (type == STORAGE_Q8) {
            __m256i low = _mm256_loadu_si256((const void *)x[2 * j].quants);
            __m256i high = _mm256_loadu_si256((const void *)x[2 * j + 1].quants);
            chunk->quants[j] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
        }
}

/* Sums the 4 words of every 128-bit lane: word j of lane k = the sum of lane k of v[j]. */
ALWAYS_INLINE __m512i sum_words(const __m512i v[4])
{
    __m512i first = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]),
                                     _mm512_unpackhi_epi32(v[0], v[1]));
    __m512i second = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]),
                                      _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(first, second),
                            _mm512_unpackhi_epi64(first, second));
}

ALWAYS_INLINE __m512i chunk_isum_4_bit(const uint8_t *quants, const struct act_chunk *acts)
{
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i dots[4];
    for (int j = 0; j < 4; j++) {
        __m512i packed = _mm512_loadu_si512(quants + 64 * j);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
        dots[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_and_si512(packed, nibble),
                                      acts->quants[j]);
        dots[j] = _mm512_dpbusd_epi32(dots[j], high, acts->quants[4 + j]);
    }
    /* word j of lane k is block 4j + k */
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sum_words(dots));
}

ALWAYS_INLINE __m512i chunk_isum_8_bit(const uint8_t *quants, const struct act_chunk *acts)
{
    __m512i dots[8];
    for (int j = 0; j < 8; j++) {
        __m512i shifted = _mm512_xor_si512(_mm512_loadu_si512(quants + 64 * j),
                                           _mm512_set1_epi8((char)0x80));
        dots[j] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), shifted, acts->quants[j]);
    }
    /* lanes 0, 1 belong to block 2j and lanes 2, 3 to block 2j + 1 */
    __m512i low = sum_words(dots), high = sum_words(dots + 4);
    __m512i sums = _mm512_add_epi32(_mm512_shuffle_i32x4(low, high, 0x88),
                                    _mm512_shuffle_i32x4(low, high, 0xDD));
    return _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), sums);
}

ALWAYS_INLINE vf chunk_terms(const int type, const uint8_t *row, size_t cols, size_t first,
                                 const struct act_chunk *acts)
{
    const uint8_t *quants = row + first * row_quant_bytes(type);
    __m512i isum = type == STORAGE_Q8 ? chunk_isum_8_bit(quants, acts)
                                      : chunk_isum_4_bit(quants, acts);
    if (type != STORAGE_Q4M)
        isum = _mm512_sub_epi32(isum, _mm512_slli_epi32(acts->sum, type == STORAGE_Q4 ? 3 : 7));
    const uint8_t *scales = row_halves(type, row, cols, 0) + 2 * first;
    const uint8_t *mins = row_halves(type, row, cols, 1) + 2 * first;
    __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(isum),
                                  _mm512_cvtph_ps(_mm256_loadu_si256((const void *)scales)));
    if (type == STORAGE_Q4M)
        scaled = _mm512_add_ps(scaled, _mm512_mul_ps(
            _mm512_cvtph_ps(_mm256_loadu_si256((const void *)mins)),
            _mm512_cvtepi32_ps(acts->sum)));
    return _mm512_mul_ps(scaled, acts->scale);
}

ALWAYS_INLINE void transpose_terms(float columns[VF][ROW_GROUP], const vf terms[ROW_GROUP])
{
    __m512d quad[2][4];             /* lane k of quad[h][j]: rows 4h..4h+3 of term 4k + j */
    for (int h = 0; h < 2; h++) {
        const vf *row = terms + 4 * h;
        __m512d low01 = (__m512d)_mm512_unpacklo_ps(row[0], row[1]);
        __m512d low23 = (__m512d)_mm512_unpacklo_ps(row[2], row[3]);
        __m512d high01 = (__m512d)_mm512_unpackhi_ps(row[0], row[1]);
        __m512d high23 = (__m512d)_mm512_unpackhi_ps(row[2], row[3]);
        quad[h][0] = _mm512_unpacklo_pd(low01, low23);
        quad[h][1] = _mm512_unpackhi_pd(low01, low23);
        quad[h][2] = _mm512_unpacklo_pd(high01, high23);
        quad[h][3] = _mm512_unpackhi_pd(high01, high23);
    }
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    for (int j = 0; j < 4; j++) {
        __m512d lanes02 = _mm512_permutex2var_pd(quad[0][j], even, quad[1][j]);
        __m512d lanes13 = _mm512_permutex2var_pd(quad[0][j], odd, quad[1][j]);
        _mm256_storeu_pd((void *)columns[j], _mm512_castpd512_pd256(lanes02));
        _mm256_storeu_pd((void *)columns[4 + j], _mm512_castpd512_pd256(lanes13));
        _mm256_storeu_pd((void *)columns[8 + j], _mm512_extractf64x4_pd(lanes02, 1));
        _mm256_storeu_pd((void *)columns[12 + j], _mm512_extractf64x4_pd(lanes13, 1));
    }
}

/* sum (32) += 32 signed bytes * scale * coef */
ALWAYS_INLINE void add_bytes(vf sum[2], const uint8_t *quants, float scale, float coef)
{
    for (int k = 0; k < 2; k++) {
        __m512i bytes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(quants + 16 * k)));
        sum[k] = sum[k] + (vf)_mm512_cvtepi32_ps(bytes) * scale * coef;
    }
}

/* sum (32) += (32 nibbles, less 8 or plus min) * coef. A block has 16 terms to choose from: they
 * are computed once, and the nibbles pick them; the permutation looks at 4 bits of its index. */
ALWAYS_INLINE void add_nibbles(const int type, vf sum[2], const uint8_t *quants, float scale,
                               float min, float coef)
{
    const vf values = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf term = type == STORAGE_Q4 ? (values - 8.0f) * scale * coef
                                       : (values * scale + min) * coef;
    __m512i nibbles = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)quants));
    sum[0] = sum[0] + (vf)_mm512_permutexvar_ps(nibbles, term);
    sum[1] = sum[1] + (vf)_mm512_permutexvar_ps(_mm512_srli_epi32(nibbles, 4), term);
}

#endif
