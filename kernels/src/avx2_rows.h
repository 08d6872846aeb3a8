/* Dot products of neuron-major rows for AVX2: 8 blocks of a row at a time. */
#ifndef POLYNEURON_AVX2_ROWS_H
#define POLYNEURON_AVX2_ROWS_H

#include "row_groups.h"

/* One block of a row, x int8 -> 8 partial sums */
ALWAYS_INLINE __m256i block_dot(const int type, const uint8_t *quants, const int8_t *x)
{
    const __m256i acts = _mm256_loadu_si256((const void *)x);
    __m256i pairs;
    if (type == STORAGE_Q8) {
        __m256i weights = _mm256_loadu_si256((const void *)quants);
        pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(acts, weights));
    } else {
        __m128i packed = _mm_loadu_si128((const void *)quants);
        __m256i both = _mm256_set_m128i(_mm_srli_epi16(packed, 4), packed);
        pairs = _mm256_maddubs_epi16(_mm256_and_si256(both, _mm256_set1_epi8(15)), acts);
    }
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

/* word j = the sum of the 8 words of dots[j] */
ALWAYS_INLINE __m256i sum_words(const __m256i dots[8])
{
    __m256i low = _mm256_hadd_epi32(_mm256_hadd_epi32(dots[0], dots[1]),
                                    _mm256_hadd_epi32(dots[2], dots[3]));
    __m256i high = _mm256_hadd_epi32(_mm256_hadd_epi32(dots[4], dots[5]),
                                     _mm256_hadd_epi32(dots[6], dots[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                            _mm256_permute2x128_si256(low, high, 0x31));
}

/* Activations of 8 blocks, their sums and scales in registers */
struct act_chunk { const struct act_block *blocks; __m256i sum; vf scale; };

ALWAYS_INLINE void arrange_acts(const int type, struct act_chunk *chunk, const struct act_block *x)
{
    const __m256i step = _mm256_setr_epi32(0, 40, 80, 120, 160, 200, 240, 280);
    _Static_assert(sizeof(struct act_block) == 40, "the steps above");
    (void)type;
    chunk->blocks = x;
    chunk->sum = _mm256_i32gather_epi32(&x->sum, step, 1);
    chunk->scale = _mm256_i32gather_ps(&x->scale, step, 1);
}

/* The terms of blocks first..first + 7 of a row */
ALWAYS_INLINE vf chunk_terms(const int type, const uint8_t *row, size_t cols, size_t first,
                             const struct act_chunk *acts)
{
    const uint8_t *quants = row + first * row_quant_bytes(type);
    __m256i dots[8];
    for (int j = 0; j < 8; j++)
        dots[j] = block_dot(type, quants + j * row_quant_bytes(type), acts->blocks[j].quants);
    __m256i isum = sum_words(dots);
    if (type == STORAGE_Q4)
        isum = _mm256_sub_epi32(isum, _mm256_slli_epi32(acts->sum, 3));
    const uint8_t *scales = row_halves(type, row, cols, 0) + 2 * first;
    const uint8_t *mins = row_halves(type, row, cols, 1) + 2 * first;
    vf scaled = (vf)_mm256_cvtepi32_ps(isum) * load_f16((const void *)scales);
    if (type == STORAGE_Q4M)
        scaled = scaled + load_f16((const void *)mins) * (vf)_mm256_cvtepi32_ps(acts->sum);
    return scaled * acts->scale;
}

ALWAYS_INLINE void transpose_terms(float columns[VF][ROW_GROUP], const vf terms[ROW_GROUP])
{
    __m256d quad[2][4];             /* lane k of quad[h][j]: rows 4h..4h+3 of term 4k + j */
    for (int h = 0; h < 2; h++) {
        const vf *row = terms + 4 * h;
        __m256d low01 = (__m256d)_mm256_unpacklo_ps(row[0], row[1]);
        __m256d low23 = (__m256d)_mm256_unpacklo_ps(row[2], row[3]);
        __m256d high01 = (__m256d)_mm256_unpackhi_ps(row[0], row[1]);
        __m256d high23 = (__m256d)_mm256_unpackhi_ps(row[2], row[3]);
        quad[h][0] = _mm256_unpacklo_pd(low01, low23);
        quad[h][1] = _mm256_unpackhi_pd(low01, low23);
        quad[h][2] = _mm256_unpacklo_pd(high01, high23);
        quad[h][3] = _mm256_unpackhi_pd(high01, high23);
    }
    for (int j = 0; j < 4; j++) {
        __m256d low = _mm256_permute2f128_pd(quad[0][j], quad[1][j], 0x20);
        __m256d high = _mm256_permute2f128_pd(quad[0][j], quad[1][j], 0x31);
        _mm256_storeu_pd((void *)columns[j], low);
        _mm256_storeu_pd((void *)columns[4 + j], high);
    }
}

#endif
