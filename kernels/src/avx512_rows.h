/* Neuron-major rows for AVX-512 with VNNI: 16 blocks of a row at a time, 8 rows share the
 * arrangement of the activations. The 16 block terms are exact products; they are then added one by
 * one, in block order, as everywhere. */
#ifndef POLYNEURON_AVX512_ROWS_H
#define POLYNEURON_AVX512_ROWS_H

#include "lanes.h"
#include "rows.h"

#define ROW_GROUP 8
#define CHUNK_BLOCKS 16

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

ALWAYS_INLINE __m512 chunk_terms(const int type, const uint8_t *row, size_t cols, size_t first,
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

/* `count` rows, x (cols) -> out (count) */
ALWAYS_INLINE void dot_group(const int type, const int count, float *out,
                             const uint8_t *const row[], size_t cols, const struct act_block *x)
{
    float acc[ROW_GROUP] = {0};
    size_t b = 0;
    for (; b + CHUNK_BLOCKS <= cols / BLOCK_COLS; b += CHUNK_BLOCKS) {
        struct act_chunk acts;
        float terms[ROW_GROUP][CHUNK_BLOCKS];
        arrange_acts(type, &acts, x + b);
        for (int r = 0; r < count; r++)
            _mm512_storeu_ps(terms[r], chunk_terms(type, row[r], cols, b, &acts));
        for (int k = 0; k < CHUNK_BLOCKS; k++)
            for (int r = 0; r < count; r++)
                acc[r] += terms[r][k];
    }
    for (int r = 0; r < count; r++)
        out[r] = dot_row_blocks(type, row[r], cols, x, b, acc[r]);
}

ALWAYS_INLINE void dot_rows_quant(const int type, float *out, const void *rows,
                                  size_t row_stride_bytes, const uint32_t *row_ids,
                                  size_t num_rows, size_t cols, const struct act_block *x)
{
    const uint8_t *row[ROW_GROUP];
    size_t i = 0;
    for (; i + ROW_GROUP <= num_rows; i += ROW_GROUP) {
        for (int r = 0; r < ROW_GROUP; r++)
            row[r] = row_at(rows, row_stride_bytes, row_ids, i + r);
        dot_group(type, ROW_GROUP, out + i, row, cols, x);
    }
    for (; i < num_rows; i++) {
        row[0] = row_at(rows, row_stride_bytes, row_ids, i);
        dot_group(type, 1, out + i, row, cols, x);
    }
}

static void dot_rows_avx512(int type, float *out, const void *rows, size_t stride,
                            const uint32_t *row_ids, size_t num_rows, size_t cols, const void *x)
{
    switch (type) {
    case STORAGE_Q4:
        dot_rows_quant(STORAGE_Q4, out, rows, stride, row_ids, num_rows, cols, x);
        break;
    case STORAGE_Q4M:
        dot_rows_quant(STORAGE_Q4M, out, rows, stride, row_ids, num_rows, cols, x);
        break;
    case STORAGE_Q8:
        dot_rows_quant(STORAGE_Q8, out, rows, stride, row_ids, num_rows, cols, x);
        break;
    default:
        for (size_t i = 0; i < num_rows; i++)
            out[i] = dot_row_floats(type, row_at(rows, stride, row_ids, i), cols, x);
    }
}

#endif
