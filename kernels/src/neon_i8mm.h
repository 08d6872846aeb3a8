/* Integer products of four tokens by the matrix instruction: 8 columns of 2 rows times 8 columns of
 * 2 tokens, twice the products of a dot-product instruction. For fewer tokens the words that must
 * be zipped first cost more instructions than that saves. */
#ifndef POLYNEURON_NEON_I8MM_H
#define POLYNEURON_NEON_I8MM_H

#include "neon_dotprod.h"

#define COLUMN_EIGHTS 4                     /* columns 8j..8j+7 of a block */
#define TOKEN_PAIRS (MAX_TILE_TOKENS / 2)

/* Words of a and b in turn, of their first or second half: 2 rows of 4 columns -> of 8 columns */
ALWAYS_INLINE int8x16_t zip_words(int8x16_t a, int8x16_t b, int half)
{
    const int32x4_t first = vreinterpretq_s32_s8(a), second = vreinterpretq_s32_s8(b);
    return vreinterpretq_s8_s32(half ? vzip2q_s32(first, second) : vzip1q_s32(first, second));
}

ALWAYS_INLINE int8x16_t load_group(const uint8_t *quants, int g, int k)
{
    return vreinterpretq_s8_u8(vld1q_u8(quants + GROUP_BYTES * g + 16 * k));
}

/* Columns 8j..8j+7 of rows 4k + 2 * half and the next. Nibbles are taken apart last: the low and
 * the high ones share their zips. */
ALWAYS_INLINE int8x16_t two_rows(const int type, const uint8_t *quants, int j, int k, int half)
{
    if (type == STORAGE_Q8 || type == STORAGE_Q1)
        return zip_words(group_weights(type, quants, 2 * j, k),
                         group_weights(type, quants, 2 * j + 1, k), half);
    const int g = 2 * (j % 2);
    const int8x16_t packed = zip_words(load_group(quants, g, k), load_group(quants, g + 1, k),
                                       half);
    return nibbles(vreinterpretq_u8_s8(packed), j >= 2);
}

ALWAYS_INLINE int8x16_t two_tokens(const struct act_block *x, size_t num_blocks, int j)
{
    return vcombine_s8(vld1_s8(x->quants + 8 * j), vld1_s8(x[num_blocks].quants + 8 * j));
}

/* 8 rows of a tile block, x (tokens, num_blocks) at this block -> isum (tokens, 2 x 4 rows) */
ALWAYS_INLINE void block_isum(const int type, const int tokens,
                              int32x4_t isum[MAX_TILE_TOKENS][RUN_REGISTERS],
                              const uint8_t *quants, const struct act_block *x, size_t num_blocks)
{
    if (tokens < MAX_TILE_TOKENS) {
        block_isum_dotprod(type, tokens, isum, quants, x, num_blocks);
        return;
    }
    int32x4_t sums[TOKEN_PAIRS][RUN_REGISTERS][2];  /* row 0 and 1 of both tokens, row 2 and 3 */
    memset(sums, 0, sizeof sums);
#pragma GCC unroll 4
    for (int j = 0; j < COLUMN_EIGHTS; j++)
        for (int p = 0; p < tokens / 2; p++) {
            const int8x16_t acts = two_tokens(x + 2 * p * num_blocks, num_blocks, j);
            for (int k = 0; k < RUN_REGISTERS; k++)
                for (int half = 0; half < 2; half++)
                    sums[p][k][half] = vmmlaq_s32(sums[p][k][half],
                                                  two_rows(type, quants, j, k, half), acts);
        }
    for (int p = 0; p < tokens / 2; p++)
        for (int k = 0; k < RUN_REGISTERS; k++) {
            isum[2 * p][k] = vuzp1q_s32(sums[p][k][0], sums[p][k][1]);
            isum[2 * p + 1][k] = vuzp2q_s32(sums[p][k][0], sums[p][k][1]);
        }
}

#endif
