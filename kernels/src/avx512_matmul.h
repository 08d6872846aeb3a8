/* matmul_tiles for AVX-512 with VNNI. A register holds 4 columns of 16 rows (one half of a tile);
 * vpdpbusd multiplies unsigned weights with signed activations, so q4 stays 0..15 and q8 becomes
 * q + 128, and the offset is taken off exactly by -8 * sum or -128 * sum. */
#ifndef POLYNEURON_AVX512_MATMUL_H
#define POLYNEURON_AVX512_MATMUL_H

#include "lanes.h"

#define HALF_ROWS 16
#define PREFETCH_BYTES 4096   /* the stream crosses 4 KiB pages, where hardware prefetch stops */

/* Bytes of scales (and mins) before the quants of a tile block. */
ALWAYS_INLINE size_t header_bytes(const int type) { return type == STORAGE_Q4M ? 128 : 64; }

ALWAYS_INLINE size_t block_bytes(const int type)
{
    return type == STORAGE_Q4 ? sizeof(struct q4_tile_block)
        : type == STORAGE_Q4M ? sizeof(struct q4m_tile_block) : sizeof(struct q8_tile_block);
}

/* One half of a tile block as eight registers of unsigned bytes, columns 4g..4g+3 in w[g]. */
ALWAYS_INLINE void unpack_half(const int type, __m512i w[8], const uint8_t *quants)
{
    const __m512i nibble = _mm512_set1_epi8(15);
    if (type == STORAGE_Q8) {
        for (int g = 0; g < 8; g++)
            w[g] = _mm512_xor_si512(_mm512_loadu_si512(quants + 128 * g),
                                    _mm512_set1_epi8((char)0x80));
        return;
    }
    for (int g = 0; g < 4; g++) {
        __m512i packed = _mm512_loadu_si512(quants + 128 * g);
        w[g] = _mm512_and_si512(packed, nibble);
        w[g + 4] = _mm512_and_si512(_mm512_srli_epi16(packed, 4), nibble);
    }
}

ALWAYS_INLINE __m512i broadcast_4(const int8_t *quants)
{
    int32_t word;
    memcpy(&word, quants, sizeof word);
    return _mm512_set1_epi32(word);
}

/* acc (16 rows) + one block of one token */
ALWAYS_INLINE __m512 add_block(const int type, __m512 acc, const __m512i w[8], __m512 scale,
                               __m512 min, const struct act_block *x)
{
    const __m512i sum = _mm512_set1_epi32(x->sum);
    __m512i isum = _mm512_setzero_si512();
    if (type != STORAGE_Q4M)
        isum = _mm512_sub_epi32(isum, _mm512_slli_epi32(sum, type == STORAGE_Q4 ? 3 : 7));
    for (int g = 0; g < 8; g++)
        isum = _mm512_dpbusd_epi32(isum, w[g], broadcast_4(x->quants + 4 * g));
    __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(isum), scale);
    if (type == STORAGE_Q4M)
        scaled = _mm512_add_ps(scaled, _mm512_mul_ps(min, _mm512_cvtepi32_ps(sum)));
    return _mm512_add_ps(acc, _mm512_mul_ps(scaled, _mm512_set1_ps(x->scale)));
}

/* `halves` halves of a tile from row 16 * first_half on, x (tokens, num_blocks) -> out */
ALWAYS_INLINE void tile_quant(const int type, const int tokens, const int halves, int first_half,
                              float *out, size_t out_stride, const uint8_t *tile,
                              size_t num_blocks, const struct act_block *x)
{
    __m512 acc[8][2];
    for (int t = 0; t < tokens; t++)
        acc[t][0] = acc[t][1] = _mm512_setzero_ps();
    for (size_t b = 0; b < num_blocks; b++, tile += block_bytes(type)) {
        if (tokens == 1)
            for (size_t line = 0; line < block_bytes(type); line += 64)
                _mm_prefetch((const char *)tile + PREFETCH_BYTES + line, _MM_HINT_T0);
        for (int h = 0; h < halves; h++) {
            const size_t row = HALF_ROWS * (size_t)(first_half + h);
            const uint16_t *header = (const uint16_t *)tile + row;
            __m512i w[8];
            unpack_half(type, w, tile + header_bytes(type) + 4 * row);
            __m512 scale = load_f16(header);
            __m512 min = scale;
            if (type == STORAGE_Q4M)
                min = load_f16(header + TILE_ROWS);
            for (int t = 0; t < tokens; t++)
                acc[t][h] = add_block(type, acc[t][h], w, scale, min, x + t * num_blocks + b);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < halves; h++)
            _mm512_storeu_ps(out + t * out_stride + HALF_ROWS * (first_half + h), acc[t][h]);
}

ALWAYS_INLINE void tile_quant_tokens(const int type, const int tokens, float *out,
                                     size_t out_stride, const uint8_t *tile, size_t num_blocks,
                                     const struct act_block *x)
{
    if (tokens <= 2) {              /* a few tokens: one linear pass over the tile */
        tile_quant(type, tokens, 2, 0, out, out_stride, tile, num_blocks, x);
    } else {                        /* many: the registers hold one half for all tokens */
        tile_quant(type, tokens, 1, 0, out, out_stride, tile, num_blocks, x);
        tile_quant(type, tokens, 1, 1, out, out_stride, tile, num_blocks, x);
    }
}

/* w (num_tiles), x (num_tokens, num_blocks) of one panel -> out */
ALWAYS_INLINE void panel_quant(const int type, float *out, size_t out_stride, const uint8_t *w,
                               size_t num_tiles, size_t num_blocks, const struct act_block *x,
                               size_t num_tokens)
{
    for (size_t i = 0; i < num_tiles; i++, w += num_blocks * block_bytes(type), out += TILE_ROWS) {
        size_t t = 0;
        for (; t + 8 <= num_tokens; t += 8)
            tile_quant_tokens(type, 8, out + t * out_stride, out_stride, w, num_blocks,
                              x + t * num_blocks);
        if (t + 4 <= num_tokens) {
            tile_quant_tokens(type, 4, out + t * out_stride, out_stride, w, num_blocks,
                              x + t * num_blocks);
            t += 4;
        }
        if (t + 2 <= num_tokens) {
            tile_quant_tokens(type, 2, out + t * out_stride, out_stride, w, num_blocks,
                              x + t * num_blocks);
            t += 2;
        }
        if (t < num_tokens)
            tile_quant_tokens(type, 1, out + t * out_stride, out_stride, w, num_blocks,
                              x + t * num_blocks);
    }
}

ALWAYS_INLINE void tile_float(const int type, const int tokens, float *out, size_t out_stride,
                              const void *tile, size_t cols, const float *x)
{
    vf acc[4][2];
    for (int t = 0; t < tokens; t++)
        acc[t][0] = acc[t][1] = _mm512_setzero_ps();
    for (size_t c = 0; c < cols; c++)
        for (int h = 0; h < 2; h++) {
            const size_t at = c * TILE_ROWS + HALF_ROWS * (size_t)h;
            vf weight = type == STORAGE_F16 ? load_f16((const uint16_t *)tile + at)
                                            : load((const float *)tile + at);
            for (int t = 0; t < tokens; t++)
                acc[t][h] = acc[t][h] + weight * x[t * cols + c];
        }
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < 2; h++)
            store(out + t * out_stride + HALF_ROWS * h, acc[t][h]);
}

ALWAYS_INLINE void panel_float(const int type, float *out, size_t out_stride, const uint8_t *w,
                               size_t num_tiles, size_t cols, const float *x, size_t num_tokens)
{
    const size_t bytes = tile_bytes(type, cols);
    for (size_t i = 0; i < num_tiles; i++, w += bytes, out += TILE_ROWS) {
        size_t t = 0;
        for (; t + 4 <= num_tokens; t += 4)
            tile_float(type, 4, out + t * out_stride, out_stride, w, cols, x + t * cols);
        for (; t < num_tokens; t++)
            tile_float(type, 1, out + t * out_stride, out_stride, w, cols, x + t * cols);
    }
}

/* Tokens whose activations stay in half of the L2 cache while all tiles pass by. */
static size_t panel_tokens(size_t token_bytes)
{
    size_t tokens = (512u << 10) / token_bytes / 8 * 8;
    return tokens < 8 ? 8 : tokens;
}

static void matmul_tiles_avx512(int type, float *out, size_t out_stride, const void *w,
                                size_t num_tiles, size_t cols, const void *x, size_t num_tokens)
{
    const size_t num_blocks = cols / BLOCK_COLS;
    const int is_float = type == STORAGE_F16 || type == STORAGE_F32;
    const size_t token_bytes = is_float ? cols * sizeof(float)
                                        : num_blocks * sizeof(struct act_block);
    const size_t step = panel_tokens(token_bytes);
    for (size_t t = 0; t < num_tokens; t += step) {
        const size_t count = num_tokens - t < step ? num_tokens - t : step;
        const void *acts = (const char *)x + t * token_bytes;
        float *to = out + t * out_stride;
        switch (type) {
        case STORAGE_Q4:
            panel_quant(STORAGE_Q4, to, out_stride, w, num_tiles, num_blocks, acts, count);
            break;
        case STORAGE_Q4M:
            panel_quant(STORAGE_Q4M, to, out_stride, w, num_tiles, num_blocks, acts, count);
            break;
        case STORAGE_Q8:
            panel_quant(STORAGE_Q8, to, out_stride, w, num_tiles, num_blocks, acts, count);
            break;
        case STORAGE_F16:
            panel_float(STORAGE_F16, to, out_stride, w, num_tiles, cols, acts, count);
            break;
        case STORAGE_F32:
            panel_float(STORAGE_F32, to, out_stride, w, num_tiles, cols, acts, count);
            break;
        }
    }
}

#endif
