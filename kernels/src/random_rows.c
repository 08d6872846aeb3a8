/* Random rows by number: any row of a stream can be made without those before it. */
#include <string.h>

#include "kernels.h"

#define GOLDEN_GAMMA 0x9E3779B97F4A7C15u

void random_rows(void *out, size_t row_stride_bytes, const uint32_t *row_ids, size_t num_rows,
                 size_t row_words, uint64_t key)
{
    for (size_t r = 0; r < num_rows; r++) {
        uint8_t *row = (uint8_t *)out + r * row_stride_bytes;
        const uint64_t first = (uint64_t)row_ids[r] * row_words;
        for (size_t i = 0; i < row_words; i++) {
            uint64_t z = key + (first + i) * GOLDEN_GAMMA;
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
            z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
            z ^= z >> 31;
            memcpy(row + 8 * i, &z, sizeof z);
        }
    }
}
