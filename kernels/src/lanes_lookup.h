/* Lookups in GCC vector extensions: a row of a tiled matrix, the largest of many logits. Included
 * after add_bytes and add_nibbles, the terms of axpy. */
#ifndef POLYNEURON_LANES_LOOKUP_H
#define POLYNEURON_LANES_LOOKUP_H

#include "lanes_rows.h"
#include "top_k.h"

#define OFFERED_TOGETHER 64

/* Row r of a tile block of quants -> out (32). Adding to -0 and multiplying by 1 change no bit, so
 * the terms of axpy are the weights themselves. */
ALWAYS_INLINE void gather_quants(const int type, float *out, const uint8_t *block, size_t r)
{
    const uint16_t *header = (const uint16_t *)(const void *)block;
    const uint8_t *words = block + (type == STORAGE_Q4M ? 4 : 2) * TILE_ROWS + 4 * r;
    const float scale = f32_of_f16(header[r]);
    uint8_t quants[BLOCK_COLS];
    for (size_t g = 0; g < row_quant_bytes(type) / 4; g++)
        memcpy(quants + 4 * g, words + 4 * TILE_ROWS * g, 4);
    vf value[BLOCK_PARTS];
    for (int k = 0; k < BLOCK_PARTS; k++)
        value[k] = splat(-0.0f);
    if (type == STORAGE_Q8)
        add_bytes(value, quants, scale, 1.0f);
    else
        add_nibbles(type, value, quants, scale,
                    type == STORAGE_Q4M ? f32_of_f16(header[TILE_ROWS + r]) : 0.0f, 1.0f);
    for (int k = 0; k < BLOCK_PARTS; k++)
        store(out + k * VF, value[k]);
}

/* Row r of a block of signs -> out (32): column c is bit c / 4 of byte c % 4 of the row's word. */
ALWAYS_INLINE void gather_signs(float *out, const struct q1_tile_block *block, size_t r)
{
    uint32_t word;
    memcpy(&word, block->signs + 4 * r, sizeof word);
    const float scale = f32_of_f16(block->scale[r]);
    for (uint32_t c = 0; c < BLOCK_COLS; c++)
        out[c] = word >> (8 * (c % 4) + c / 4) & 1 ? scale : -scale;
}

ALWAYS_INLINE void gather_quant_row(const int type, float *out, const uint8_t *tile, size_t cols,
                                    size_t r)
{
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, tile += tile_bytes(type, BLOCK_COLS))
        gather_quants(type, out + b * BLOCK_COLS, tile, r);
}

static void gather_halves(float *out, const struct f16_tile_column *tile, size_t cols, size_t r)
{
    size_t c = 0;
    for (; c + VF <= cols; c += VF) {
        uint16_t halves[VF];
        for (int j = 0; j < VF; j++)
            halves[j] = tile[c + j].value[r];
        store(out + c, load_f16(halves));
    }
    for (; c < cols; c++)
        out[c] = f32_of_f16(tile[c].value[r]);
}

static void gather_row_lanes(int type, float *out, const void *w, size_t cols, size_t row)
{
    const void *tile = (const char *)w + row / TILE_ROWS * tile_bytes(type, cols);
    const size_t r = row % TILE_ROWS;
    switch (type) {
    case STORAGE_Q4: gather_quant_row(STORAGE_Q4, out, tile, cols, r); break;
    case STORAGE_Q4M: gather_quant_row(STORAGE_Q4M, out, tile, cols, r); break;
    case STORAGE_Q8: gather_quant_row(STORAGE_Q8, out, tile, cols, r); break;
    case STORAGE_Q1:
        for (size_t b = 0; b < cols / BLOCK_COLS; b++)
            gather_signs(out + b * BLOCK_COLS, (const struct q1_tile_block *)tile + b, r);
        break;
    case STORAGE_F16: gather_halves(out, tile, cols, r); break;
    case STORAGE_F32:
        for (size_t c = 0; c < cols; c++)
            out[c] = ((const struct f32_tile_column *)tile)[c].value[r];
        break;
    }
}

/* Most candidates rank below all k: they are passed over many at a time. */
static void top_k_lanes(uint32_t *out_ids, float *out_values, const float *x, size_t n, size_t k)
{
    if (k == 0)
        return;
    fill_heap(out_ids, out_values, x, k);
    size_t i = k;
    for (; i + OFFERED_TOGETHER <= n; i += OFFERED_TOGETHER) {
        const float lowest = out_values[0];
        int32_t found = 0;
        for (int j = 0; j < OFFERED_TOGETHER; j++)
            found |= x[i + j] > lowest;
        for (size_t j = 0; found && j < OFFERED_TOGETHER; j++)
            offer(out_ids, out_values, k, x, i + j);
    }
    for (; i < n; i++)
        offer(out_ids, out_values, k, x, i);
    sort_heap(out_ids, out_values, k);
}

#endif
