/* Tiles of floats, and tiles of any type by a panel of tokens: what is the same for every
 * instruction set. Included after panel_quant and FLOAT_TILE_TOKENS, the number of tokens whose
 * sums of a tile fit the registers. */
#ifndef POLYNEURON_TILE_PANELS_H
#define POLYNEURON_TILE_PANELS_H

#include "lanes.h"

#define TILE_REGISTERS (TILE_ROWS / VF)

/* One tile, x (tokens, cols) -> out */
ALWAYS_INLINE void tile_float(const int type, const int tokens, float *out, size_t out_stride,
                              const void *tile, size_t cols, const float *x)
{
    vf acc[FLOAT_TILE_TOKENS][TILE_REGISTERS] = {0};
    for (size_t c = 0; c < cols; c++)
        for (int k = 0; k < TILE_REGISTERS; k++) {
            const size_t at = c * TILE_ROWS + VF * (size_t)k;
            vf weight = type == STORAGE_F16 ? load_f16((const uint16_t *)tile + at)
                                            : load((const float *)tile + at);
            for (int t = 0; t < tokens; t++)
                acc[t][k] = acc[t][k] + times(weight, x + (size_t)t * cols + c);
        }
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < TILE_REGISTERS; k++)
            store(out + t * out_stride + VF * k, acc[t][k]);
}

ALWAYS_INLINE void panel_float(const int type, float *out, size_t out_stride, const uint8_t *w,
                               size_t num_tiles, size_t cols, const float *x, size_t num_tokens)
{
    const size_t bytes = tile_bytes(type, cols);
    for (size_t i = 0; i < num_tiles; i++, w += bytes, out += TILE_ROWS) {
        size_t t = 0;
        for (; t + FLOAT_TILE_TOKENS <= num_tokens; t += FLOAT_TILE_TOKENS)
            tile_float(type, FLOAT_TILE_TOKENS, out + t * out_stride, out_stride, w, cols,
                       x + t * cols);
        for (; t < num_tokens; t++)
            tile_float(type, 1, out + t * out_stride, out_stride, w, cols, x + t * cols);
    }
}

/* Tiles one after another by num_tokens rows of x: int8 activations, or floats */
static void matmul_panel(int type, float *out, size_t out_stride, const void *w, size_t num_tiles,
                         size_t cols, const void *x, size_t num_tokens)
{
    const size_t num_blocks = cols / BLOCK_COLS;
    switch (type) {
    case STORAGE_Q4:
        panel_quant(STORAGE_Q4, out, out_stride, w, num_tiles, num_blocks, x, num_tokens);
        break;
    case STORAGE_Q4M:
        panel_quant(STORAGE_Q4M, out, out_stride, w, num_tiles, num_blocks, x, num_tokens);
        break;
    case STORAGE_Q8:
        panel_quant(STORAGE_Q8, out, out_stride, w, num_tiles, num_blocks, x, num_tokens);
        break;
    case STORAGE_Q1:
        panel_quant(STORAGE_Q1, out, out_stride, w, num_tiles, num_blocks, x, num_tokens);
        break;
    case STORAGE_F16:
        panel_float(STORAGE_F16, out, out_stride, w, num_tiles, cols, x, num_tokens);
        break;
    case STORAGE_F32:
        panel_float(STORAGE_F32, out, out_stride, w, num_tiles, cols, x, num_tokens);
        break;
    }
}

#endif
