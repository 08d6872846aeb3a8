/* What the NEON tables share and has no integer product in it: registers of 4 floats, conversions,
 * quantisation. Included by each of them after its target pragma. */
#ifndef POLYNEURON_NEON_LANES_H
#define POLYNEURON_NEON_LANES_H

#include <arm_neon.h>

#include "kernels_isa.h"

#define VF 4
#include "lanes.h"

ALWAYS_INLINE vf times(vf value, const float *factor) { return value * *factor; }

ALWAYS_INLINE vf load_f16(const uint16_t *from)
{
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

ALWAYS_INLINE void store_f16(uint16_t *to, vf value)
{
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value)));
}

ALWAYS_INLINE float load_half(const uint16_t *from)
{
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_dup_u16(from))), 0);
}

ALWAYS_INLINE vi load_i8(const uint8_t *from)
{
    const int8_t *bytes = (const int8_t *)from;
    return (vi){bytes[0], bytes[1], bytes[2], bytes[3]};
}

ALWAYS_INLINE vi load_u8(const uint8_t *from) { return (vi){from[0], from[1], from[2], from[3]}; }

/* 4 scaled activations as int32, to nearest even; the conversion makes 0 of a NaN */
ALWAYS_INLINE int32x4_t quantize_4(const float *x, float inverse)
{
    return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), inverse));
}

ALWAYS_INLINE uint32_t max_bits(const float *x)
{
    uint32x4_t most = vdupq_n_u32(0);
    for (int k = 0; k < BLOCK_COLS; k += 4) {
        uint32x4_t bits = vreinterpretq_u32_f32(vld1q_f32(x + k));
        most = vmaxq_u32(most, vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF)));
    }
    return vmaxvq_u32(most);
}

static void quantize_acts_neon(struct act_block *out, const float *x, size_t cols)
{
    for (size_t b = 0; b < cols / BLOCK_COLS; b++, x += BLOCK_COLS, out++) {
        const uint32_t amax_bits = max_bits(x);
        if (amax_bits < ACT_AMAX_MIN_BITS) {
            memset(out, 0, sizeof *out);
            continue;
        }
        const float amax = f32_of_bits(amax_bits), inverse = 127.0f / amax;
        int32x4_t sum = vdupq_n_s32(0);
        for (int k = 0; k < BLOCK_COLS; k += 8) {
            int32x4_t low = quantize_4(x + k, inverse), high = quantize_4(x + k + 4, inverse);
            sum = vaddq_s32(sum, vaddq_s32(low, high));
            vst1_s8(out->quants + k, vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high))));
        }
        out->scale = amax / 127.0f;
        out->sum = vaddvq_s32(sum);
    }
}

#endif
