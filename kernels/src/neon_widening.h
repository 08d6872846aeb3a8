/* Integer products for every 64-bit ARM CPU: bytes are multiplied into int16. 4-bit weights and
 * signs of a whole block fit there (8 * 15 * 127 < 2^15), 8-bit ones two at a time
 * (2 * 128 * 127 < 2^15). */
#ifndef POLYNEURON_NEON_WIDENING_H
#define POLYNEURON_NEON_WIDENING_H

#define MAX_TILE_TOKENS 2                   /* with 4, a seventh of the loop were spills */
#include "neon_tiles.h"
#include "rows.h"

/* 4 columns of 4 rows: products of rows 0, 1 and of rows 2, 3, summed in int16 and in int32 */
struct row_products { int16x8_t low, high; };
struct row_sums { int32x4_t low, high; };

ALWAYS_INLINE void add_products(struct row_products *products, int8x16_t weights, int8x16_t acts)
{
    products->low = vmlal_s8(products->low, vget_low_s8(weights), vget_low_s8(acts));
    products->high = vmlal_high_s8(products->high, weights, acts);
}

ALWAYS_INLINE int8x16_t broadcast_4(const int8_t *quants)
{
    int32_t word;
    memcpy(&word, quants, sizeof word);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}

/* 8 rows of a tile block, x (tokens, num_blocks) at this block -> isum (tokens, 2 x 4 rows) */
ALWAYS_INLINE void block_isum(const int type, const int tokens,
                              int32x4_t isum[MAX_TILE_TOKENS][RUN_REGISTERS],
                              const uint8_t *quants, const struct act_block *x, size_t num_blocks)
{
    const int groups_at_once = type == STORAGE_Q8 ? 2 : COLUMN_GROUPS;
    struct row_sums sums[MAX_TILE_TOKENS][RUN_REGISTERS] = {0};
    for (int first = 0; first < COLUMN_GROUPS; first += groups_at_once) {
        struct row_products products[MAX_TILE_TOKENS][RUN_REGISTERS] = {0};
#pragma GCC unroll 8
        for (int g = first; g < first + groups_at_once; g++)
            for (int t = 0; t < tokens; t++) {
                const int8x16_t acts = broadcast_4(x[t * num_blocks].quants + 4 * g);
                for (int k = 0; k < RUN_REGISTERS; k++)
                    add_products(&products[t][k], group_weights(type, quants, g, k), acts);
            }
        for (int t = 0; t < tokens; t++)
            for (int k = 0; k < RUN_REGISTERS; k++) {
                sums[t][k].low = vpadalq_s16(sums[t][k].low, products[t][k].low);
                sums[t][k].high = vpadalq_s16(sums[t][k].high, products[t][k].high);
            }
    }
    for (int t = 0; t < tokens; t++)
        for (int k = 0; k < RUN_REGISTERS; k++)
            isum[t][k] = vpaddq_s32(sums[t][k].low, sums[t][k].high);
}

/* 16 weights x 16 activations, added to 4 partial sums */
ALWAYS_INLINE int32x4_t dot_16(int32x4_t sums, int8x16_t weights, int8x16_t acts)
{
    int16x8_t products = vmull_s8(vget_low_s8(weights), vget_low_s8(acts));
    return vpadalq_s16(sums, vmlal_high_s8(products, weights, acts));
}

#endif
