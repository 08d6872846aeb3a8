/* matmul_tiles for AVX2. A register holds 4 columns of 8 rows, a quarter of a tile. vpmaddubsw adds
 * two products into int16: 4-bit weights of a whole block fit (8 * 2 * 15 * 127 < 2^15), and 8-bit
 * ones fit one at a time as |w| * (x with the sign of w) (2 * 128 * 127 < 2^15), -128 included. */
#ifndef POLYNEURON_AVX2_MATMUL_H
#define POLYNEURON_AVX2_MATMUL_H

#include "lanes.h"
#include "x86_tiles.h"

#define QUARTER_ROWS 8

ALWAYS_INLINE __m256i broadcast_4(const int8_t *quants)
{
    int32_t word;
    memcpy(&word, quants, sizeof word);
    return _mm256_set1_epi32(word);
}

/* quants of 8 rows, x (tokens, num_blocks) at this block -> isum (tokens), offsets not taken off */
ALWAYS_INLINE void isum_4_bit(const int tokens, __m256i isum[4], const uint8_t *quants,
                              const struct act_block *x, size_t num_blocks)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i pairs[4];
    for (int t = 0; t < tokens; t++)
        pairs[t] = _mm256_setzero_si256();
    for (int g = 0; g < 4; g++) {
        __m256i packed = _mm256_loadu_si256((const void *)(quants + 128 * g));
        __m256i low = _mm256_and_si256(packed, nibble);
        __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
        for (int t = 0; t < tokens; t++) {
            const int8_t *acts = x[t * num_blocks].quants + 4 * g;
            pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16(low, broadcast_4(acts)));
            pairs[t] = _mm256_add_epi16(pairs[t],
                                        _mm256_maddubs_epi16(high, broadcast_4(acts + 16)));
        }
    }
    for (int t = 0; t < tokens; t++)
        isum[t] = _mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1));
}

ALWAYS_INLINE void isum_8_bit(const int tokens, __m256i isum[4], const uint8_t *quants,
                              const struct act_block *x, size_t num_blocks)
{
    for (int t = 0; t < tokens; t++)
        isum[t] = _mm256_setzero_si256();
    for (int g = 0; g < 8; g++) {
        __m256i weights = _mm256_loadu_si256((const void *)(quants + 128 * g));
        __m256i magnitudes = _mm256_abs_epi8(weights);
        for (int t = 0; t < tokens; t++) {
            __m256i acts = broadcast_4(x[t * num_blocks].quants + 4 * g);
            __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(acts, weights));
            isum[t] = _mm256_add_epi32(isum[t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
}

/* Signs of 8 rows. A set bit becomes the weight 2: twice the sum over set bits, less the sum of all
 * activations, is the sum of + and -. 8 * 2 * 2 * 127 fits into int16. */
ALWAYS_INLINE void isum_1_bit(const int tokens, __m256i isum[4], const uint8_t *signs,
                              const struct act_block *x, size_t num_blocks)
{
    const vu words = (vu)_mm256_loadu_si256((const void *)signs);
    __m256i pairs[4];
    for (int t = 0; t < tokens; t++)
        pairs[t] = _mm256_setzero_si256();
    for (int k = 0; k < 8; k++) {
        const vu twos = (k == 0 ? words + words : words >> (k - 1)) & 0x02020202u;
        for (int t = 0; t < tokens; t++) {
            __m256i acts = broadcast_4(x[t * num_blocks].quants + 4 * k);
            pairs[t] = _mm256_add_epi16(pairs[t], _mm256_maddubs_epi16((__m256i)twos, acts));
        }
    }
    for (int t = 0; t < tokens; t++)
        isum[t] = _mm256_madd_epi16(pairs[t], _mm256_set1_epi16(1));
}

/* `quarters` quarters of a tile from `quarter` on, x (tokens, num_blocks) -> out */
ALWAYS_INLINE void tile_quant(const int type, const int tokens, const int quarters, int quarter,
                              float *out, size_t out_stride, const uint8_t *tile,
                              size_t num_blocks, const struct act_block *x)
{
    vf acc[4][4] = {0};
    for (size_t b = 0; b < num_blocks; b++, x++, tile += block_bytes(type)) {
        if (tokens == 1)
            prefetch_stream(type, tile);
        for (int k = 0; k < quarters; k++) {
            const size_t row = QUARTER_ROWS * (size_t)(quarter + k);
            const uint16_t *header = (const uint16_t *)tile + row;
            const uint8_t *quants = tile + header_bytes(type) + 4 * row;
            __m256i isum[4];
            if (type == STORAGE_Q8)
                isum_8_bit(tokens, isum, quants, x, num_blocks);
            else if (type == STORAGE_Q1)
                isum_1_bit(tokens, isum, quants, x, num_blocks);
            else
                isum_4_bit(tokens, isum, quants, x, num_blocks);
            const vf scale = load_f16(header);
            for (int t = 0; t < tokens; t++) {
                const struct act_block *acts = x + t * num_blocks;
                if (type == STORAGE_Q4)
                    isum[t] = _mm256_sub_epi32(isum[t], _mm256_set1_epi32(8 * acts->sum));
                if (type == STORAGE_Q1)
                    isum[t] = _mm256_sub_epi32(isum[t], _mm256_set1_epi32(acts->sum));
                vf scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(isum[t]), scale);
                if (type == STORAGE_Q4M)
                    scaled = scaled + load_f16(header + TILE_ROWS) * (float)acts->sum;
                acc[t][k] = acc[t][k] + scaled * acts->scale;
            }
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < quarters; k++)
            store(out + t * out_stride + QUARTER_ROWS * (quarter + k), acc[t][k]);
}

ALWAYS_INLINE void panel_quant(const int type, float *out, size_t out_stride, const uint8_t *w,
                               size_t num_tiles, size_t num_blocks, const struct act_block *x,
                               size_t num_tokens)
{
    for (size_t i = 0; i < num_tiles; i++, w += num_blocks * block_bytes(type), out += TILE_ROWS) {
        size_t t = 0;
        for (; t + 4 <= num_tokens; t += 4)
            for (int quarter = 0; quarter < 4; quarter++)
                tile_quant(type, 4, 1, quarter, out + t * out_stride, out_stride, w, num_blocks,
                           x + t * num_blocks);
        for (; t < num_tokens; t++)  /* one linear pass over the tile */
            tile_quant(type, 1, 4, 0, out + t * out_stride, out_stride, w, num_blocks,
                       x + t * num_blocks);
    }
}

#define FLOAT_TILE_TOKENS 2
#include "tile_panels.h"

#endif
