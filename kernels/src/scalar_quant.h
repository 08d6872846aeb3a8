/* Scalar kernels over stored weights: the specification of matmul, rows, gather, quantisation. */
#ifndef POLYNEURON_SCALAR_QUANT_H
#define POLYNEURON_SCALAR_QUANT_H

#include "blocks.h"
#include "numeric.h"
#include "rows.h"

static void quantize_acts_scalar(struct act_block *out, const float *x, size_t cols)
{
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, x += BLOCK_COLS, out++) {
        uint32_t amax_bits = 0;     /* magnitudes compare as integers; a NaN is the largest */
        for (int i = 0; i < BLOCK_COLS; i++) {
            uint32_t bits = bits_of_f32(x[i]) & 0x7FFFFFFFu;
            amax_bits = bits > amax_bits ? bits : amax_bits;
        }
        memset(out, 0, sizeof *out);
        if (amax_bits < ACT_AMAX_MIN_BITS)
            continue;
        float amax = f32_of_bits(amax_bits);
        float inverse = 127.0f / amax;
        out->scale = amax / 127.0f;
        for (int i = 0; i < BLOCK_COLS; i++) {
            float scaled = x[i] * inverse;
            if (scaled != scaled)   /* NaN or infinite inputs show in the scale */
                scaled = 0.0f;
            int32_t quant = (int32_t)(scaled + ROUND_MAGIC - ROUND_MAGIC);
            out->quants[i] = (int8_t)quant;
            out->sum += quant;
        }
    }
}

/* quants of one tile block, x (32) int8 -> isum (32 rows), q4 and q4m without their offset */
static void tile_isum_q4_scalar(int32_t isum[TILE_ROWS], const uint8_t *quants, const int8_t *x)
{
    memset(isum, 0, TILE_ROWS * sizeof *isum);
    for (int g = 0; g < 4; g++, quants += 4 * TILE_ROWS)
        for (int i = 0; i < 4 * TILE_ROWS; i++) {
            int column = 4 * g + i % 4;
            isum[i / 4] += (quants[i] & 15) * x[column] + (quants[i] >> 4) * x[column + 16];
        }
}

static void tile_isum_q8_scalar(int32_t isum[TILE_ROWS], const int8_t *quants, const int8_t *x)
{
    memset(isum, 0, TILE_ROWS * sizeof *isum);
    for (int g = 0; g < 8; g++, quants += 4 * TILE_ROWS)
        for (int i = 0; i < 4 * TILE_ROWS; i++)
            isum[i / 4] += quants[i] * x[4 * g + i % 4];
}

static void tile_q4_scalar(float acc[TILE_ROWS], const void *tile, size_t cols,
                           const struct act_block *x)
{
    const struct q4_tile_block *block = tile;
    int32_t isum[TILE_ROWS];
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, block++, x++) {
        tile_isum_q4_scalar(isum, block->quants, x->quants);
        for (int r = 0; r < TILE_ROWS; r++)
            acc[r] += (float)(isum[r] - 8 * x->sum) * f32_of_f16(block->scale[r]) * x->scale;
    }
}

static void tile_q4m_scalar(float acc[TILE_ROWS], const void *tile, size_t cols,
                            const struct act_block *x)
{
    const struct q4m_tile_block *block = tile;
    int32_t isum[TILE_ROWS];
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, block++, x++) {
        tile_isum_q4_scalar(isum, block->quants, x->quants);
        for (int r = 0; r < TILE_ROWS; r++) {
            float scaled = (float)isum[r] * f32_of_f16(block->scale[r]);
            acc[r] += (scaled + f32_of_f16(block->min[r]) * (float)x->sum) * x->scale;
        }
    }
}

static void tile_q8_scalar(float acc[TILE_ROWS], const void *tile, size_t cols,
                           const struct act_block *x)
{
    const struct q8_tile_block *block = tile;
    int32_t isum[TILE_ROWS];
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, block++, x++) {
        tile_isum_q8_scalar(isum, block->quants, x->quants);
        for (int r = 0; r < TILE_ROWS; r++)
            acc[r] += (float)isum[r] * f32_of_f16(block->scale[r]) * x->scale;
    }
}

static int sign_of_weight(const uint8_t *row_signs, size_t column)
{
    return (row_signs[column % 4] >> (column / 4)) & 1 ? 1 : -1;
}

static void tile_q1_scalar(float acc[TILE_ROWS], const void *tile, size_t cols,
                           const struct act_block *x)
{
    const struct q1_tile_block *block = tile;
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, block++, x++)
        for (int r = 0; r < TILE_ROWS; r++) {
            int32_t isum = 0;
            for (int c = 0; c < BLOCK_COLS; c++)
                isum += sign_of_weight(block->signs + 4 * r, c) * x->quants[c];
            acc[r] += (float)isum * f32_of_f16(block->scale[r]) * x->scale;
        }
}

static void tile_f16_scalar(float acc[TILE_ROWS], const void *tile, size_t cols, const float *x)
{
    const struct f16_tile_column *column = tile;
    for (size_t c = 0; c < cols; c++)
        for (int r = 0; r < TILE_ROWS; r++)
            acc[r] += f32_of_f16(column[c].value[r]) * x[c];
}

static void tile_f32_scalar(float acc[TILE_ROWS], const void *tile, size_t cols, const float *x)
{
    const struct f32_tile_column *column = tile;
    for (size_t c = 0; c < cols; c++)
        for (int r = 0; r < TILE_ROWS; r++)
            acc[r] += column[c].value[r] * x[c];
}

/* w (num_tiles tiles), x (num_tokens, cols) -> out (num_tokens, 32 * num_tiles) */
static void matmul_tiles_scalar(int type, float *out, size_t out_stride, const void *w,
                                size_t num_tiles, size_t cols, const void *x, size_t num_tokens)
{
    const size_t bytes = tile_bytes(type, cols);
    for (size_t tile = 0; tile < num_tiles; tile++)
        for (size_t t = 0; t < num_tokens; t++) {
            const char *tile_w = (const char *)w + tile * bytes;
            const struct act_block *quants = (const struct act_block *)x + t * (cols / BLOCK_COLS);
            const float *floats = (const float *)x + t * cols;
            float acc[TILE_ROWS] = {0};
            switch (type) {
            case STORAGE_Q4: tile_q4_scalar(acc, tile_w, cols, quants); break;
            case STORAGE_Q4M: tile_q4m_scalar(acc, tile_w, cols, quants); break;
            case STORAGE_Q8: tile_q8_scalar(acc, tile_w, cols, quants); break;
            case STORAGE_Q1: tile_q1_scalar(acc, tile_w, cols, quants); break;
            case STORAGE_F16: tile_f16_scalar(acc, tile_w, cols, floats); break;
            case STORAGE_F32: tile_f32_scalar(acc, tile_w, cols, floats); break;
            }
            memcpy(out + t * out_stride + TILE_ROWS * tile, acc, sizeof acc);
        }
}

/* One row of a tiled matrix -> out (cols) */
static void gather_row_scalar(int type, float *out, const void *w, size_t cols, size_t row)
{
    const char *tile = (const char *)w + row / TILE_ROWS * tile_bytes(type, cols);
    const size_t r = row % TILE_ROWS;
    for (size_t c = 0; c < cols; c++) {
        const size_t b = c / BLOCK_COLS, k = c % BLOCK_COLS;
        const size_t low = k % 16 / 4 * (4 * TILE_ROWS) + 4 * r + k % 4;
        const int shift = k < 16 ? 0 : 4;
        if (type == STORAGE_Q4) {
            const struct q4_tile_block *block = (const struct q4_tile_block *)tile + b;
            int quant = ((block->quants[low] >> shift) & 15) - 8;
            out[c] = (float)quant * f32_of_f16(block->scale[r]);
        } else if (type == STORAGE_Q4M) {
            const struct q4m_tile_block *block = (const struct q4m_tile_block *)tile + b;
            int quant = (block->quants[low] >> shift) & 15;
            out[c] = (float)quant * f32_of_f16(block->scale[r]) + f32_of_f16(block->min[r]);
        } else if (type == STORAGE_Q8) {
            const struct q8_tile_block *block = (const struct q8_tile_block *)tile + b;
            int quant = block->quants[k / 4 * (4 * TILE_ROWS) + 4 * r + k % 4];
            out[c] = (float)quant * f32_of_f16(block->scale[r]);
        } else if (type == STORAGE_Q1) {
            const struct q1_tile_block *block = (const struct q1_tile_block *)tile + b;
            out[c] = (float)sign_of_weight(block->signs + 4 * r, k) * f32_of_f16(block->scale[r]);
        } else if (type == STORAGE_F16) {
            out[c] = f32_of_f16(((const struct f16_tile_column *)tile)[c].value[r]);
        } else {
            out[c] = ((const struct f32_tile_column *)tile)[c].value[r];
        }
    }
}

static void dot_rows_scalar(int type, float *out, const void *rows, size_t row_stride_bytes,
                            const uint32_t *row_ids, size_t num_rows, size_t cols, const void *x)
{
    for (size_t i = 0; i < num_rows; i++) {
        const uint8_t *row = row_at(rows, row_stride_bytes, row_ids, i);
        out[i] = row_is_quantised(type) ? dot_row_blocks(type, row, cols, x)
                                        : dot_row_floats(type, row, cols, x);
    }
}

static void axpy_rows_scalar(int type, float *out, const void *rows, size_t row_stride_bytes,
                             const uint32_t *row_ids, const float *coef, size_t num_rows,
                             size_t cols)
{
    for (size_t i = 0; i < num_rows; i++) {
        const uint8_t *row = row_at(rows, row_stride_bytes, row_ids, i);
        for (size_t c = 0; c < cols; c++)
            out[c] += row_value(type, row, cols, c) * coef[i];
    }
}

#endif
