/* Weights of a tile block as signed bytes in NEON registers: 4 columns of 4 rows each. Column group
 * g (0..7) is columns 4g..4g+3. 4-bit weights stay 0..15; a set sign becomes the weight 2, so that
 * twice the sum over set bits, less the sum of all activations, is the sum of + and -. Included
 * after MAX_TILE_TOKENS, how many tokens' sums fit the registers: 2 or 4. */
#ifndef POLYNEURON_NEON_TILES_H
#define POLYNEURON_NEON_TILES_H

#include "neon_lanes.h"

#define COLUMN_GROUPS 8
#define RUN_REGISTERS 2                     /* 8 rows, a quarter of a tile */
#define GROUP_BYTES (4 * TILE_ROWS)

ALWAYS_INLINE int8x16_t nibbles(uint8x16_t packed, int is_high)
{
    return vreinterpretq_s8_u8(is_high ? vshrq_n_u8(packed, 4)
                                       : vandq_u8(packed, vdupq_n_u8(15)));
}

/* Words of 4 rows' signs -> weights 0 and 2 of column group g */
ALWAYS_INLINE int8x16_t twos(const uint8_t *signs, int g)
{
    const uint32x4_t words = vreinterpretq_u32_u8(vld1q_u8(signs));
    const uint32x4_t at_bit_1 = g == 0 ? vaddq_u32(words, words)
                                       : vshlq_u32(words, vdupq_n_s32(1 - g));
    return vreinterpretq_s8_u32(vandq_u32(at_bit_1, vdupq_n_u32(0x02020202)));
}

/* Column group g of rows 4k..4k+3; quants (or signs) begin with row 0 */
ALWAYS_INLINE int8x16_t group_weights(const int type, const uint8_t *quants, int g, int k)
{
    if (type == STORAGE_Q1)
        return twos(quants + 16 * k, g);
    if (type == STORAGE_Q8)
        return vreinterpretq_s8_u8(vld1q_u8(quants + GROUP_BYTES * g + 16 * k));
    return nibbles(vld1q_u8(quants + GROUP_BYTES * (g % 4) + 16 * k), g >= 4);
}

#endif
