/* axpy_rows for registers of VF floats: 8 rows side by side over one block of columns after the
 * other. A block of out stays in registers while the terms of the 8 rows are added to it in their
 * order, and what the next 8 rows need is asked for meanwhile. Included after the ISA's own part:
 *   add_bytes, add_nibbles               one block of a row times its coefficient, added to out */
#ifndef POLYNEURON_LANES_ROWS_H
#define POLYNEURON_LANES_ROWS_H

#include "row_groups.h"

#define BLOCK_PARTS (BLOCK_COLS / VF)
/* Blocks whose scales are converted together; each asks for half of what a coming row has there. */
#define AXPY_BLOCKS (2 * ROW_GROUP)

/* Scales and mins of AXPY_BLOCKS blocks of each row */
struct group_halves { float scale[ROW_GROUP][AXPY_BLOCKS], min[ROW_GROUP][AXPY_BLOCKS]; };

ALWAYS_INLINE void convert_halves(float *out, const uint8_t *halves, size_t count)
{
    size_t i = 0;
    for (; i + VF <= count; i += VF)
        store(out + i, load_f16((const uint16_t *)(const void *)halves + i));
    for (; i < count; i++)
        out[i] = f16_at(halves, i);
}

/* out (32) += the terms of block `block` of each row; it is block b of those in `halves` */
ALWAYS_INLINE void axpy_block(const int type, const int count, float *out,
                              const struct row_group *group, const float *coef,
                              const struct group_halves *halves, size_t block, size_t b)
{
    vf sum[BLOCK_PARTS];
    for (int k = 0; k < BLOCK_PARTS; k++)
        sum[k] = load(out + k * VF);
    for (int r = 0; r < count; r++) {
        const uint8_t *quants = group->row[r] + block * row_quant_bytes(type);
        const float scale = halves->scale[r][b];
        if (type == STORAGE_Q8)
            add_bytes(sum, quants, scale, coef[r]);
        else
            add_nibbles(type, sum, quants, scale, halves->min[r][b], coef[r]);
    }
    for (int k = 0; k < BLOCK_PARTS; k++)
        store(out + k * VF, sum[k]);
}

ALWAYS_INLINE void axpy_group_quant(const int type, const int count, float *out,
                                    const struct row_group *group, const float *coef, size_t cols)
{
    const size_t num_blocks = cols / BLOCK_COLS, half = AXPY_BLOCKS / 2;
    for (size_t first = 0; first < num_blocks; first += AXPY_BLOCKS) {
        const size_t left = num_blocks - first, n = left < AXPY_BLOCKS ? left : AXPY_BLOCKS;
        struct group_halves halves;
        for (int r = 0; r < count; r++) {
            const uint8_t *row = group->row[r];
            convert_halves(halves.scale[r], row_halves(type, row, cols, 0) + 2 * first, n);
            if (type == STORAGE_Q4M)
                convert_halves(halves.min[r], row_halves(type, row, cols, 1) + 2 * first, n);
        }
        for (size_t b = 0; b < n; b++) {
            prefetch_ahead(type, group, (int)b / 2, cols, first + b % 2 * half, half);
            axpy_block(type, count, out + (first + b) * BLOCK_COLS, group, coef, &halves,
                       first + b, b);
        }
    }
}

ALWAYS_INLINE void axpy_group_float(const int type, const int count, float *out,
                                    const struct row_group *group, const float *coef, size_t cols)
{
    size_t c = 0;
    for (; c + BLOCK_COLS <= cols; c += BLOCK_COLS) {
        vf sum[BLOCK_PARTS];
        for (int k = 0; k < BLOCK_PARTS; k++)
            sum[k] = load(out + c + k * VF);
        for (int r = 0; r < count; r++) {
            prefetch_ahead(type, group, r, cols, c, BLOCK_COLS);
            for (int k = 0; k < BLOCK_PARTS; k++)
                sum[k] = sum[k] + row_floats(type, group->row[r], c + k * VF) * coef[r];
        }
        for (int k = 0; k < BLOCK_PARTS; k++)
            store(out + c + k * VF, sum[k]);
    }
    for (; c < cols; c++)
        for (int r = 0; r < count; r++)
            out[c] += row_value(type, group->row[r], cols, c) * coef[r];
}

ALWAYS_INLINE void axpy_group(const int type, const int count, float *out,
                              const struct row_group *group, const float *coef, size_t cols)
{
    if (row_is_quantised(type))
        axpy_group_quant(type, count, out, group, coef, cols);
    else
        axpy_group_float(type, count, out, group, coef, cols);
}

ALWAYS_INLINE void axpy_rows_of(const int type, float *out, const struct row_set *set,
                                const float *coef, size_t cols)
{
    struct row_group group;
    size_t i = 0;
    for (; i + ROW_GROUP <= set->num_rows; i += ROW_GROUP) {
        gather_group(&group, set, i, ROW_GROUP);
        axpy_group(type, ROW_GROUP, out, &group, coef + i, cols);
    }
    const int rest = (int)(set->num_rows - i);
    if (rest > 0) {
        gather_group(&group, set, i, rest);
        axpy_group(type, rest, out, &group, coef + i, cols);
    }
}

static void axpy_rows_lanes(int type, float *out, const void *rows, size_t row_stride_bytes,
                            const uint32_t *row_ids, const float *coef, size_t num_rows,
                            size_t cols)
{
    const struct row_set set = {
        rows, row_stride_bytes, row_ids, num_rows, row_bytes(type, cols),
    };
    switch (type) {
    case STORAGE_Q4: axpy_rows_of(STORAGE_Q4, out, &set, coef, cols); break;
    case STORAGE_Q4M: axpy_rows_of(STORAGE_Q4M, out, &set, coef, cols); break;
    case STORAGE_Q8: axpy_rows_of(STORAGE_Q8, out, &set, coef, cols); break;
    case STORAGE_F16: axpy_rows_of(STORAGE_F16, out, &set, coef, cols); break;
    case STORAGE_F32: axpy_rows_of(STORAGE_F32, out, &set, coef, cols); break;
    }
}

#endif
