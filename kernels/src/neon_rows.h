/* Neuron-major rows for NEON: dot products of 4 blocks of a row at a time over dot_16, whose
 * instructions differ by table, and the terms of axpy. */
#ifndef POLYNEURON_NEON_ROWS_H
#define POLYNEURON_NEON_ROWS_H

#include "neon_tiles.h"
#include "row_groups.h"

/* One block of a row, x int8 -> 4 partial sums */
ALWAYS_INLINE int32x4_t block_dot(const int type, const uint8_t *quants, const int8_t *x)
{
    const uint8x16_t packed = vld1q_u8(quants);
    const int is_8_bit = type == STORAGE_Q8;
    const int8x16_t low = is_8_bit ? vreinterpretq_s8_u8(packed) : nibbles(packed, 0);
    const int8x16_t high = is_8_bit ? vreinterpretq_s8_u8(vld1q_u8(quants + 16))
                                    : nibbles(packed, 1);
    const int32x4_t sums = dot_16(vdupq_n_s32(0), low, vld1q_s8(x));
    return dot_16(sums, high, vld1q_s8(x + 16));
}

/* Activations of 4 blocks, their sums and scales in registers */
struct act_chunk { const struct act_block *blocks; vi sum; vf scale; };

ALWAYS_INLINE void arrange_acts(const int type, struct act_chunk *chunk, const struct act_block *x)
{
    (void)type;
    chunk->blocks = x;
    chunk->sum = (vi){x[0].sum, x[1].sum, x[2].sum, x[3].sum};
    chunk->scale = (vf){x[0].scale, x[1].scale, x[2].scale, x[3].scale};
}

/* The terms of blocks first..first + 3 of a row */
ALWAYS_INLINE vf chunk_terms(const int type, const uint8_t *row, size_t cols, size_t first,
                             const struct act_chunk *acts)
{
    const uint8_t *quants = row + first * row_quant_bytes(type);
    int32x4_t dots[4];
    for (int j = 0; j < 4; j++)
        dots[j] = block_dot(type, quants + j * row_quant_bytes(type), acts->blocks[j].quants);
    vi isum = (vi)vpaddq_s32(vpaddq_s32(dots[0], dots[1]), vpaddq_s32(dots[2], dots[3]));
    if (type == STORAGE_Q4)
        isum = isum - 8 * acts->sum;
    const uint8_t *scales = row_halves(type, row, cols, 0) + 2 * first;
    const uint8_t *mins = row_halves(type, row, cols, 1) + 2 * first;
    vf scaled = __builtin_convertvector(isum, vf) * load_f16((const void *)scales);
    if (type == STORAGE_Q4M)
        scaled = scaled + load_f16((const void *)mins) * __builtin_convertvector(acts->sum, vf);
    return scaled * acts->scale;
}

ALWAYS_INLINE void transpose_terms(float columns[VF][ROW_GROUP], const vf terms[ROW_GROUP])
{
    for (int h = 0; h < 2; h++) {
        const vf *row = terms + 4 * h;
        vf low01 = __builtin_shuffle(row[0], row[1], (vi){0, 4, 1, 5});
        vf low23 = __builtin_shuffle(row[2], row[3], (vi){0, 4, 1, 5});
        vf high01 = __builtin_shuffle(row[0], row[1], (vi){2, 6, 3, 7});
        vf high23 = __builtin_shuffle(row[2], row[3], (vi){2, 6, 3, 7});
        store(columns[0] + 4 * h, __builtin_shuffle(low01, low23, (vi){0, 1, 4, 5}));
        store(columns[1] + 4 * h, __builtin_shuffle(low01, low23, (vi){2, 3, 6, 7}));
        store(columns[2] + 4 * h, __builtin_shuffle(high01, high23, (vi){0, 1, 4, 5}));
        store(columns[3] + 4 * h, __builtin_shuffle(high01, high23, (vi){2, 3, 6, 7}));
    }
}

/* 16 signed bytes -> 4 registers of floats */
ALWAYS_INLINE void widen_16(vf out[4], int8x16_t bytes)
{
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    out[0] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    out[1] = (vf)vcvtq_f32_s32(vmovl_high_s16(low));
    out[2] = (vf)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    out[3] = (vf)vcvtq_f32_s32(vmovl_high_s16(high));
}

/* sum (32) += 32 signed bytes * scale * coef */
ALWAYS_INLINE void add_bytes(vf *sum, const uint8_t *quants, float scale, float coef)
{
    for (int half = 0; half < 2; half++) {
        vf value[4];
        widen_16(value, vreinterpretq_s8_u8(vld1q_u8(quants + 16 * half)));
        for (int k = 0; k < 4; k++)
            sum[4 * half + k] = sum[4 * half + k] + value[k] * scale * coef;
    }
}

/* sum (32) += (32 nibbles, less 8 or plus min) * coef */
ALWAYS_INLINE void add_nibbles(const int type, vf *sum, const uint8_t *quants, float scale,
                               float min, float coef)
{
    const uint8x16_t packed = vld1q_u8(quants);
    for (int half = 0; half < 2; half++) {
        int8x16_t bytes = nibbles(packed, half);
        if (type == STORAGE_Q4)
            bytes = vsubq_s8(bytes, vdupq_n_s8(8));
        vf value[4];
        widen_16(value, bytes);
        for (int k = 0; k < 4; k++) {
            vf scaled = value[k] * scale;
            if (type == STORAGE_Q4M)
                scaled = scaled + min;
            sum[4 * half + k] = sum[4 * half + k] + scaled * coef;
        }
    }
}

#endif
