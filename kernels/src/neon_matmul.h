/* matmul_tiles for NEON, 8 rows at a time over block_isum, whose instructions differ by table. */
#ifndef POLYNEURON_NEON_MATMUL_H
#define POLYNEURON_NEON_MATMUL_H

#include "neon_tiles.h"
#include "tile_block.h"

#define RUN_ROWS (4 * RUN_REGISTERS)
#define TILE_RUNS (TILE_ROWS / RUN_ROWS)

/* acc (tokens, 8 rows from `row` on) += the block's terms; x (tokens, num_blocks) */
ALWAYS_INLINE void add_block(const int type, const int tokens,
                             vf acc[MAX_TILE_TOKENS][RUN_REGISTERS], const uint8_t *block,
                             size_t row, const struct act_block *x, size_t num_blocks)
{
    const uint16_t *header = (const uint16_t *)(const void *)block + row;
    int32x4_t isum[MAX_TILE_TOKENS][RUN_REGISTERS];
    block_isum(type, tokens, isum, block + header_bytes(type) + 4 * row, x, num_blocks);
    for (int k = 0; k < RUN_REGISTERS; k++) {
        const vf scale = load_f16(header + VF * k);
        for (int t = 0; t < tokens; t++) {
            const struct act_block *acts = x + t * num_blocks;
            vi exact = (vi)isum[t][k];
            if (type == STORAGE_Q4)
                exact = exact - 8 * acts->sum;
            if (type == STORAGE_Q1)
                exact = exact - acts->sum;
            vf scaled = __builtin_convertvector(exact, vf) * scale;
            if (type == STORAGE_Q4M)
                scaled = scaled + load_f16(header + TILE_ROWS + VF * k) * (float)acts->sum;
            acc[t][k] = acc[t][k] + scaled * acts->scale;
        }
    }
}

/* `runs` runs of 8 rows of a tile from row `row` on, x (tokens, num_blocks) -> out */
ALWAYS_INLINE void tile_quant(const int type, const int tokens, const int runs, size_t row,
                              float *out, size_t out_stride, const uint8_t *tile,
                              size_t num_blocks, const struct act_block *x)
{
    vf acc[TILE_RUNS][MAX_TILE_TOKENS][RUN_REGISTERS] = {0};
    for (size_t b = 0; b < num_blocks; b++, x++, tile += block_bytes(type))
        for (int r = 0; r < runs; r++)
            add_block(type, tokens, acc[r], tile, row + RUN_ROWS * (size_t)r, x, num_blocks);
    for (int r = 0; r < runs; r++)
        for (int t = 0; t < tokens; t++)
            for (int k = 0; k < RUN_REGISTERS; k++)
                store(out + t * out_stride + row + RUN_ROWS * r + VF * k, acc[r][t][k]);
}

/* One tile, x (tokens, num_blocks) -> out: run after run, so that all sums stay in registers */
ALWAYS_INLINE void tile_tokens(const int type, const int tokens, float *out, size_t out_stride,
                               const uint8_t *tile, size_t num_blocks, const struct act_block *x)
{
    for (size_t row = 0; row < TILE_ROWS; row += RUN_ROWS)
        tile_quant(type, tokens, 1, row, out, out_stride, tile, num_blocks, x);
}

ALWAYS_INLINE void panel_quant(const int type, float *out, size_t out_stride, const uint8_t *w,
                               size_t num_tiles, size_t num_blocks, const struct act_block *x,
                               size_t num_tokens)
{
    for (size_t i = 0; i < num_tiles; i++, w += num_blocks * block_bytes(type), out += TILE_ROWS) {
        size_t t = 0;
        for (; t + MAX_TILE_TOKENS <= num_tokens; t += MAX_TILE_TOKENS)
            tile_tokens(type, MAX_TILE_TOKENS, out + t * out_stride, out_stride, w, num_blocks,
                        x + t * num_blocks);
        if (MAX_TILE_TOKENS > 2 && t + 2 <= num_tokens) {
            tile_tokens(type, 2, out + t * out_stride, out_stride, w, num_blocks,
                        x + t * num_blocks);
            t += 2;
        }
        if (t < num_tokens)         /* one linear pass over the tile */
            tile_quant(type, 1, TILE_RUNS, 0, out + t * out_stride, out_stride, w, num_blocks,
                       x + t * num_blocks);
    }
}

#define FLOAT_TILE_TOKENS 2
#include "tile_panels.h"

#endif
