/* matmul_tiles for AVX-512 with VNNI. A register holds 4 columns of 16 rows (one half of a tile);
 * vpdpbusd multiplies unsigned weights with signed activations, so q4 stays 0..15 and q8 becomes
 * q + 128, and the offset is taken off exactly by -8 * sum or -128 * sum. */
#ifndef POLYNEURON_AVX512_MATMUL_H
#define POLYNEURON_AVX512_MATMUL_H

#include "lanes.h"
#include "x86_tiles.h"

#define HALF_ROWS 16

ALWAYS_INLINE __m512i broadcast_4(const int8_t *quants)
{
    int32_t word;
    memcpy(&word, quants, sizeof word);
    return _mm512_set1_epi32(word);
}

/* What the unsigned form of the weights adds too much: 8 * sum, 128 * sum, sum or nothing. */
ALWAYS_INLINE __m512i minus_offset(const int type, const struct act_block *x)
{
    const __m512i zero = _mm512_setzero_si512(), sum = _mm512_set1_epi32(x->sum);
    if (type == STORAGE_Q4M)
        return zero;
    const unsigned log2_offset = type == STORAGE_Q1 ? 0 : type == STORAGE_Q4 ? 3 : 7;
    return _mm512_sub_epi32(zero, _mm512_slli_epi32(sum, log2_offset));
}

/* isum (tokens, 2 halves) += columns 4g..4g+3 (and, for 4-bit weights, 16+4g..16+4g+3) */
ALWAYS_INLINE void add_columns(const int type, const int tokens, __m512i isum[4][2],
                               const uint8_t *quants, int g, const struct act_block *x,
                               size_t num_blocks)
{
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i low[2], high[2];
    for (int h = 0; h < 2; h++) {
        __m512i packed = _mm512_loadu_si512(quants + 128 * g + 64 * h);
        low[h] = type == STORAGE_Q8 ? _mm512_xor_si512(packed, _mm512_set1_epi8((char)0x80))
                                    : _mm512_and_si512(packed, nibble);
        high[h] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
    }
    for (int t = 0; t < tokens; t++) {
        const int8_t *acts = x[t * num_blocks].quants + 4 * g;
        for (int h = 0; h < 2; h++) {
            isum[t][h] = _mm512_dpbusd_epi32(isum[t][h], low[h], broadcast_4(acts));
            if (type != STORAGE_Q8)
                isum[t][h] = _mm512_dpbusd_epi32(isum[t][h], high[h], broadcast_4(acts + 16));
        }
    }
}

/* isum (tokens, 2 halves) += the block's 32 columns. A set bit becomes the weight 2: twice the sum
 * over set bits, less the sum of all activations, is the sum of + and -. */
ALWAYS_INLINE void add_signs(const int tokens, __m512i isum[4][2], const uint8_t *signs,
                             const struct act_block *x, size_t num_blocks)
{
    vu words[2];
    memcpy(words, signs, sizeof words);
    for (int k = 0; k < 8; k++)
        for (int t = 0; t < tokens; t++) {
            const __m512i acts = broadcast_4(x[t * num_blocks].quants + 4 * k);
            for (int h = 0; h < 2; h++) {
                vu twos = (k == 0 ? words[h] + words[h] : words[h] >> (k - 1)) & 0x02020202u;
                isum[t][h] = _mm512_dpbusd_epi32(isum[t][h], (__m512i)twos, acts);
            }
        }
}

/* acc (tokens, 2 halves) += the block's terms */
ALWAYS_INLINE void add_terms(const int type, const int tokens, vf acc[4][2], __m512i isum[4][2],
                             const uint16_t *header, const struct act_block *x, size_t num_blocks)
{
    for (int h = 0; h < 2; h++) {
        const vf scale = load_f16(header + HALF_ROWS * h);
        for (int t = 0; t < tokens; t++) {
            const struct act_block *acts = x + t * num_blocks;
            vf scaled = (vf)_mm512_cvtepi32_ps(isum[t][h]) * scale;
            if (type == STORAGE_Q4M)
                scaled = scaled + load_f16(header + TILE_ROWS + HALF_ROWS * h)
                    * (vf)_mm512_cvtepi32_ps(_mm512_set1_epi32(acts->sum));
            acc[t][h] = acc[t][h] + scaled * acts->scale;
        }
    }
}

/* One tile, x (tokens, num_blocks) -> out (tokens, 32). Both halves share the activations, the
 * tokens share the unpacked weights, and all sums stay in registers. */
ALWAYS_INLINE void tile_quant(const int type, const int tokens, float *out, size_t out_stride,
                              const uint8_t *tile, size_t num_blocks, const struct act_block *x)
{
    vf acc[4][2];
    for (int t = 0; t < tokens; t++)
        acc[t][0] = acc[t][1] = (vf){0};
    for (size_t b = 0; b < num_blocks; b++, x++, tile += block_bytes(type)) {
        if (tokens == 1)
            prefetch_stream(type, tile);
        __m512i isum[4][2];
        for (int t = 0; t < tokens; t++)
            isum[t][0] = isum[t][1] = minus_offset(type, x + t * num_blocks);
        if (type == STORAGE_Q1)
            add_signs(tokens, isum, tile + header_bytes(type), x, num_blocks);
        for (int g = 0; g < (type == STORAGE_Q8 ? 8 : type == STORAGE_Q1 ? 0 : 4); g++)
            add_columns(type, tokens, isum, tile + header_bytes(type), g, x, num_blocks);
        add_terms(type, tokens, acc, isum, (const void *)tile, x, num_blocks);
    }
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < 2; h++)
            store(out + t * out_stride + HALF_ROWS * h, acc[t][h]);
}

/* w (num_tiles), x (num_tokens, num_blocks) of one panel -> out */
ALWAYS_INLINE void panel_quant(const int type, float *out, size_t out_stride, const uint8_t *w,
                               size_t num_tiles, size_t num_blocks, const struct act_block *x,
                               size_t num_tokens)
{
    for (size_t i = 0; i < num_tiles; i++, w += num_blocks * block_bytes(type), out += TILE_ROWS) {
        size_t t = 0;
        for (; t + 4 <= num_tokens; t += 4)
            tile_quant(type, 4, out + t * out_stride, out_stride, w, num_blocks,
                       x + t * num_blocks);
        if (t + 2 <= num_tokens) {
            tile_quant(type, 2, out + t * out_stride, out_stride, w, num_blocks,
                       x + t * num_blocks);
            t += 2;
        }
        if (t < num_tokens)
            tile_quant(type, 1, out + t * out_stride, out_stride, w, num_blocks,
                       x + t * num_blocks);
    }
}

#define FLOAT_TILE_TOKENS 4
#include "tile_panels.h"

/* Tokens whose activations stay in half of the L2 cache while all tiles pass by. */
static size_t panel_tokens(size_t token_bytes)
{
    size_t tokens = (512u << 10) / token_bytes / 8 * 8;
    return tokens < 8 ? 8 : tokens;
}

static void matmul_tiles_avx512(int type, float *out, size_t out_stride, const void *w,
                                size_t num_tiles, size_t cols, const void *x, size_t num_tokens)
{
    const int is_float = type == STORAGE_F16 || type == STORAGE_F32;
    const size_t token_bytes = is_float ? cols * sizeof(float)
                                        : cols / BLOCK_COLS * sizeof(struct act_block);
    const size_t step = panel_tokens(token_bytes);
    for (size_t t = 0; t < num_tokens; t += step) {
        const size_t count = num_tokens - t < step ? num_tokens - t : step;
        const void *acts = (const char *)x + t * token_bytes;
        float *to = out + t * out_stride;
        matmul_panel(type, to, out_stride, w, num_tiles, cols, acts, count);
    }
}

#endif
