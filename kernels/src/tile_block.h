/* The parts of a tile block of quants, for every matmul in vectors. */
#ifndef POLYNEURON_TILE_BLOCK_H
#define POLYNEURON_TILE_BLOCK_H

#include "lanes.h"

/* Bytes of scales (and mins) before the quants of a tile block. */
ALWAYS_INLINE size_t header_bytes(const int type) { return type == STORAGE_Q4M ? 128 : 64; }

ALWAYS_INLINE size_t block_bytes(const int type)
{
    return type == STORAGE_Q1 ? sizeof(struct q1_tile_block)
        : type == STORAGE_Q4 ? sizeof(struct q4_tile_block)
        : type == STORAGE_Q4M ? sizeof(struct q4m_tile_block) : sizeof(struct q8_tile_block);
}

#endif
