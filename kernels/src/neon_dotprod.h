/* Integer products by the dot-product instruction: 4 columns of 4 rows, added to int32. */
#ifndef POLYNEURON_NEON_DOTPROD_H
#define POLYNEURON_NEON_DOTPROD_H

#define MAX_TILE_TOKENS 4
#include "neon_tiles.h"
#include "rows.h"

/* sums += weights (4 rows, 4 columns) x word `lane` of acts. The instruction's lane is a constant:
 * the switch is gone when the loops around it are unrolled. */
ALWAYS_INLINE int32x4_t dot_lane(int32x4_t sums, int8x16_t weights, int8x16_t acts, int lane)
{
    switch (lane) {
    case 0: return vdotq_laneq_s32(sums, weights, acts, 0);
    case 1: return vdotq_laneq_s32(sums, weights, acts, 1);
    case 2: return vdotq_laneq_s32(sums, weights, acts, 2);
    default: return vdotq_laneq_s32(sums, weights, acts, 3);
    }
}

/* 8 rows of a tile block, x (tokens, num_blocks) at this block -> isum (tokens, 2 x 4 rows) */
ALWAYS_INLINE void block_isum_dotprod(const int type, const int tokens,
                                      int32x4_t isum[MAX_TILE_TOKENS][RUN_REGISTERS],
                                      const uint8_t *quants, const struct act_block *x,
                                      size_t num_blocks)
{
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < RUN_REGISTERS; k++)
            isum[t][k] = vdupq_n_s32(0);
#pragma GCC unroll 8
    for (int g = 0; g < COLUMN_GROUPS; g++)
        for (int t = 0; t < tokens; t++) {
            const int8x16_t acts = vld1q_s8(x[t * num_blocks].quants + g / 4 * 16);
            for (int k = 0; k < RUN_REGISTERS; k++)
                isum[t][k] = dot_lane(isum[t][k], group_weights(type, quants, g, k), acts, g % 4);
        }
}

/* 16 weights x 16 activations, added to 4 partial sums */
ALWAYS_INLINE int32x4_t dot_16(int32x4_t sums, int8x16_t weights, int8x16_t acts)
{
    return vdotq_s32(sums, weights, acts);
}

#endif
