/* Storage of a matrix in tiles. A tile is 32 rows over all columns: cols/32 tile blocks, each a
 * 32 x 32 piece, in column order (q types), or cols columns of 32 values (f16, f32).
 *
 * Within a tile block the quants lie so that one vector register holds 4 consecutive columns of 16
 * rows, the operand of a 4-way int8 dot product: byte [g * 128 + row * 4 + i] is column 4g + i.
 * q4 keeps g = 0..3 in the low nibbles and g = 4..7 (columns 16..31) in the high ones, which is the
 * nibble order of a GGUF Q4_0 block: packing moves 4-byte words and changes no value. */
#ifndef POLYNEURON_BLOCKS_H
#define POLYNEURON_BLOCKS_H

#include <stdint.h>

#include "kernels.h"

#define TILE_ROWS 32
#define BLOCK_COLS 32
#define KV_BLOCK_TOKENS 32

struct q4_tile_block { uint16_t scale[TILE_ROWS]; uint8_t quants[TILE_ROWS * BLOCK_COLS / 2]; };
_Static_assert(sizeof(struct q4_tile_block) == 576, "whole cache lines");

struct q4m_tile_block {
    uint16_t scale[TILE_ROWS];
    uint16_t min[TILE_ROWS];
    uint8_t quants[TILE_ROWS * BLOCK_COLS / 2];
};
_Static_assert(sizeof(struct q4m_tile_block) == 640, "whole cache lines");

struct q8_tile_block { uint16_t scale[TILE_ROWS]; int8_t quants[TILE_ROWS * BLOCK_COLS]; };
_Static_assert(sizeof(struct q8_tile_block) == 1088, "whole cache lines");

/* One word of signs a row: bit k of its byte i is column 4k + i, so that one mask takes the four
 * columns of an int8 dot product out of it. 1 is +scale, 0 is -scale. */
struct q1_tile_block { uint16_t scale[TILE_ROWS]; uint8_t signs[TILE_ROWS * BLOCK_COLS / 8]; };
_Static_assert(sizeof(struct q1_tile_block) == 192, "whole cache lines");

struct f16_tile_column { uint16_t value[TILE_ROWS]; };
_Static_assert(sizeof(struct f16_tile_column) == 64, "one cache line");

struct f32_tile_column { float value[TILE_ROWS]; };
_Static_assert(sizeof(struct f32_tile_column) == 128, "two cache lines");

_Static_assert(sizeof(struct act_block) == 40, "quants, scale, sum without holes");

#endif
