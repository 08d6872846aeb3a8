/* What the x86 matmuls share: prefetching. */
#ifndef POLYNEURON_X86_TILES_H
#define POLYNEURON_X86_TILES_H

#include "tile_block.h"

/* A single token's pass is one linear stream from memory, and hardware prefetch stops at each 4 KiB
 * page. Measured on Zen 4: the 4-bit streams gain most from one touch a block well into a coming
 * page, the signs from one nearer by (15 GB/s; 13 at 8192), the 8-bit stream from asking for every
 * line. */
ALWAYS_INLINE void prefetch_stream(const int type, const uint8_t *block)
{
    if (type == STORAGE_Q8)
        for (size_t line = 0; line < sizeof(struct q8_tile_block); line += 64)
            _mm_prefetch((const char *)block + 4096 + line, _MM_HINT_T1);
    else
        _mm_prefetch((const char *)block + (type == STORAGE_Q1 ? 4096 : 8192), _MM_HINT_T1);
}

#endif
