/* Scalar access to neuron-major rows: all quants, then all scales, then (q4m) all mins. Rows may
 * lie at any address, so values are read with memcpy. */
#ifndef POLYNEURON_ROWS_H
#define POLYNEURON_ROWS_H

#include "blocks.h"
#include "numeric.h"

static inline const uint8_t *row_at(const void *rows, size_t row_stride_bytes,
                                    const uint32_t *row_ids, size_t i)
{
    return (const uint8_t *)rows + (row_ids ? row_ids[i] : i) * row_stride_bytes;
}

static inline int row_is_quantised(int type)
{
    return type == STORAGE_Q4 || type == STORAGE_Q4M || type == STORAGE_Q8;
}

static inline size_t row_quant_bytes(int type) { return type == STORAGE_Q8 ? 32 : 16; }

static inline float f16_at(const uint8_t *base, size_t index)
{
    uint16_t half;
    memcpy(&half, base + 2 * index, sizeof half);
    return f32_of_f16(half);
}

static inline float f32_at(const uint8_t *base, size_t index)
{
    float value;
    memcpy(&value, base + 4 * index, sizeof value);
    return value;
}

/* Where the scales begin (part 0) or the mins (part 1). */
static inline const uint8_t *row_halves(int type, const uint8_t *row, size_t cols, size_t part)
{
    const size_t num_blocks = cols / BLOCK_COLS;
    return row + num_blocks * (row_quant_bytes(type) + 2 * part);
}

static inline float row_value(int type, const uint8_t *row, size_t cols, size_t c)
{
    const size_t b = c / BLOCK_COLS, k = c % BLOCK_COLS;
    if (type == STORAGE_F32)
        return f32_at(row, c);
    if (type == STORAGE_F16)
        return f16_at(row, c);
    float scale = f16_at(row_halves(type, row, cols, 0), b);
    if (type == STORAGE_Q8)
        return (float)(int8_t)row[c] * scale;
    int quant = (row[16 * b + k % 16] >> (k < 16 ? 0 : 4)) & 15;
    if (type == STORAGE_Q4)
        return (float)(quant - 8) * scale;
    return (float)quant * scale + f16_at(row_halves(type, row, cols, 1), b);
}

static inline int32_t row_block_isum(int type, const uint8_t *quants, const int8_t *x)
{
    int32_t isum = 0;
    if (type == STORAGE_Q8) {
        /* read as int8_t: from a cast of uint8_t gcc 12 makes a dot product of unsigned bytes */
        const int8_t *signed_quants = (const int8_t *)quants;
        for (int k = 0; k < 32; k++)
            isum += signed_quants[k] * x[k];
    } else {
        for (int k = 0; k < 16; k++)
            isum += (quants[k] & 15) * x[k] + (quants[k] >> 4) * x[k + 16];
    }
    return isum;
}

static inline float dot_row_blocks(int type, const uint8_t *row, size_t cols,
                                   const struct act_block *x)
{
    float acc = 0.0f;
    const uint8_t *scales = row_halves(type, row, cols, 0);
    const uint8_t *mins = row_halves(type, row, cols, 1);
    for (size_t b = 0; b < cols / BLOCK_COLS; b++) {
        int32_t isum = row_block_isum(type, row + b * row_quant_bytes(type), x[b].quants);
        if (type == STORAGE_Q4)
            isum -= 8 * x[b].sum;
        float scaled = (float)isum * f16_at(scales, b);
        if (type == STORAGE_Q4M)
            scaled = scaled + f16_at(mins, b) * (float)x[b].sum;
        acc += scaled * x[b].scale;
    }
    return acc;
}

static inline float dot_row_floats(int type, const uint8_t *row, size_t cols, const float *x)
{
    float acc = 0.0f;
    for (size_t c = 0; c < cols; c++)
        acc += (type == STORAGE_F16 ? f16_at(row, c) : f32_at(row, c)) * x[c];
    return acc;
}

#endif
