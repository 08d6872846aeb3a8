/* axpy over neuron-major rows in GCC vector extensions; the ISA file gives load_i8 as well. */
#ifndef POLYNEURON_LANES_ROWS_H
#define POLYNEURON_LANES_ROWS_H

#include "lanes.h"
#include "rows.h"

/* VF signed bytes as int32 */
ALWAYS_INLINE vi load_i8(const uint8_t *from);

/* out (VF) += (quants * scale + min) * coef */
ALWAYS_INLINE void axpy_vf(float *out, vi quants, float scale, const float *min, float coef)
{
    vf value = __builtin_convertvector(quants, vf) * scale;
    if (min)
        value = value + *min;
    store(out, load(out) + value * coef);
}

ALWAYS_INLINE void axpy_row_quant(const int type, float *out, const uint8_t *row, float coef,
                                  size_t cols)
{
    const uint8_t *scales = row_halves(type, row, cols, 0);
    const uint8_t *mins = row_halves(type, row, cols, 1);
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, out += BLOCK_COLS) {
        const uint8_t *quants = row + b * row_quant_bytes(type);
        const float scale = f16_at(scales, b);
        const float min = type == STORAGE_Q4M ? f16_at(mins, b) : 0.0f;
        if (type == STORAGE_Q8) {
            for (int k = 0; k < BLOCK_COLS; k += VF)
                axpy_vf(out + k, load_i8(quants + k), scale, NULL, coef);
            continue;
        }
        const int32_t offset = type == STORAGE_Q4 ? 8 : 0;
        for (int k = 0; k < 16; k += VF) {
            vi packed = load_i8(quants + k);
            vi low = (packed & 15) - offset, high = ((packed >> 4) & 15) - offset;
            axpy_vf(out + k, low, scale, type == STORAGE_Q4M ? &min : NULL, coef);
            axpy_vf(out + 16 + k, high, scale, type == STORAGE_Q4M ? &min : NULL, coef);
        }
    }
}

ALWAYS_INLINE void axpy_row_float(const int type, float *out, const uint8_t *row, float coef,
                                  size_t cols)
{
    size_t c = 0;
    for (; c + VF <= cols; c += VF) {
        vf value = type == STORAGE_F16 ? load_f16((const uint16_t *)(const void *)row + c)
                                       : load((const float *)(const void *)row + c);
        store(out + c, load(out + c) + value * coef);
    }
    for (; c < cols; c++)
        out[c] += row_value(type, row, cols, c) * coef;
}

static void axpy_rows_lanes(int type, float *out, const void *rows, size_t row_stride_bytes,
                            const uint32_t *row_ids, const float *coef, size_t num_rows,
                            size_t cols)
{
    for (size_t i = 0; i < num_rows; i++) {
        const uint8_t *row = row_at(rows, row_stride_bytes, row_ids, i);
        switch (type) {
        case STORAGE_Q4: axpy_row_quant(STORAGE_Q4, out, row, coef[i], cols); break;
        case STORAGE_Q4M: axpy_row_quant(STORAGE_Q4M, out, row, coef[i], cols); break;
        case STORAGE_Q8: axpy_row_quant(STORAGE_Q8, out, row, coef[i], cols); break;
        case STORAGE_F16: axpy_row_float(STORAGE_F16, out, row, coef[i], cols); break;
        case STORAGE_F32: axpy_row_float(STORAGE_F32, out, row, coef[i], cols); break;
        }
    }
}

#endif
