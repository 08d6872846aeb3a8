/* Neuron-major rows for AVX2: 8 blocks of a row at a time; their 8 terms are exact products, added
 * one by one in block order. */
#ifndef POLYNEURON_AVX2_ROWS_H
#define POLYNEURON_AVX2_ROWS_H

#include "lanes.h"
#include "rows.h"

#define CHUNK_BLOCKS 8

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

/* The terms of blocks first..first+7 of a row */
ALWAYS_INLINE vf chunk_terms(const int type, const uint8_t *row, size_t cols, size_t first,
                             const struct act_block *x)
{
    const __m256i step = _mm256_setr_epi32(0, 40, 80, 120, 160, 200, 240, 280);
    _Static_assert(sizeof(struct act_block) == 40, "the steps above");
    const __m256i sums = _mm256_i32gather_epi32(&x->sum, step, 1);
    const uint8_t *quants = row + first * row_quant_bytes(type);
    __m256i dots[8];
    for (int j = 0; j < 8; j++)
        dots[j] = block_dot(type, quants + j * row_quant_bytes(type), x[j].quants);
    __m256i isum = sum_words(dots);
    if (type == STORAGE_Q4)
        isum = _mm256_sub_epi32(isum, _mm256_slli_epi32(sums, 3));
    const uint8_t *scales = row_halves(type, row, cols, 0) + 2 * first;
    const uint8_t *mins = row_halves(type, row, cols, 1) + 2 * first;
    vf scaled = (vf)_mm256_cvtepi32_ps(isum) * load_f16((const void *)scales);
    if (type == STORAGE_Q4M)
        scaled = scaled + load_f16((const void *)mins) * (vf)_mm256_cvtepi32_ps(sums);
    return scaled * (vf)_mm256_i32gather_ps(&x->scale, step, 1);
}

ALWAYS_INLINE float dot_row_quant(const int type, const uint8_t *row, size_t cols,
                                  const struct act_block *x)
{
    float acc = 0.0f;
    size_t b = 0;
    for (; b + CHUNK_BLOCKS <= cols / BLOCK_COLS; b += CHUNK_BLOCKS) {
        float terms[CHUNK_BLOCKS];
        store(terms, chunk_terms(type, row, cols, b, x + b));
        for (int k = 0; k < CHUNK_BLOCKS; k++)
            acc += terms[k];
    }
    return dot_row_blocks(type, row, cols, x, b, acc);
}

static void dot_rows_avx2(int type, float *out, const void *rows, size_t row_stride_bytes,
                          const uint32_t *row_ids, size_t num_rows, size_t cols, const void *x)
{
    for (size_t i = 0; i < num_rows; i++) {
        const uint8_t *row = row_at(rows, row_stride_bytes, row_ids, i);
        switch (type) {
        case STORAGE_Q4: out[i] = dot_row_quant(STORAGE_Q4, row, cols, x); break;
        case STORAGE_Q4M: out[i] = dot_row_quant(STORAGE_Q4M, row, cols, x); break;
        case STORAGE_Q8: out[i] = dot_row_quant(STORAGE_Q8, row, cols, x); break;
        default: out[i] = dot_row_floats(type, row, cols, x);
        }
    }
}

#endif
