/* Terms of axpy_rows, a register of weights at a time, in GCC vector extensions. Included after
 * load_i8 and load_u8: VF signed or unsigned bytes as int32. */
#ifndef POLYNEURON_LANES_TERMS_H
#define POLYNEURON_LANES_TERMS_H

#include "row_groups.h"

/* sum (32) += 32 signed bytes * scale * coef */
ALWAYS_INLINE void add_bytes(vf *sum, const uint8_t *quants, float scale, float coef)
{
    for (int k = 0; k < BLOCK_COLS / VF; k++) {
        vf value = __builtin_convertvector(load_i8(quants + k * VF), vf) * scale;
        sum[k] = sum[k] + value * coef;
    }
}

ALWAYS_INLINE vf nibble_terms(const int type, vi quants, float scale, float min, float coef)
{
    if (type == STORAGE_Q4)
        return __builtin_convertvector(quants - 8, vf) * scale * coef;
    return (__builtin_convertvector(quants, vf) * scale + min) * coef;
}

/* sum (32) += (32 nibbles, less 8 or plus min) * coef */
ALWAYS_INLINE void add_nibbles(const int type, vf *sum, const uint8_t *quants, float scale,
                               float min, float coef)
{
    const int half = 16 / VF;
    for (int k = 0; k < half; k++) {
        vi packed = load_u8(quants + k * VF);
        sum[k] = sum[k] + nibble_terms(type, packed & 15, scale, min, coef);
        sum[half + k] = sum[half + k] + nibble_terms(type, packed >> 4, scale, min, coef);
    }
}

#endif
