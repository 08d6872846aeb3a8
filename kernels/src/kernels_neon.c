/* The table for 64-bit ARM, where every CPU has NEON: the float kernels in registers of 4 floats.
 * The integer products come from the scalar table. */
#if defined(__aarch64__)
#include "kernels_isa.h"

#define VF 4
#include "lanes.h"

/* _Float16 converts as the contract asks: exactly, and to nearest even with subnormals. */
ALWAYS_INLINE vf load_f16(const uint16_t *from)
{
    _Float16 half[VF];
    memcpy(half, from, sizeof half);
    return (vf){half[0], half[1], half[2], half[3]};
}

ALWAYS_INLINE void store_f16(uint16_t *to, vf value)
{
    const _Float16 half[VF] = {
        (_Float16)value[0], (_Float16)value[1], (_Float16)value[2], (_Float16)value[3],
    };
    memcpy(to, half, sizeof half);
}

ALWAYS_INLINE vi load_i8(const uint8_t *from)
{
    return (vi){(int8_t)from[0], (int8_t)from[1], (int8_t)from[2], (int8_t)from[3]};
}

ALWAYS_INLINE vi load_u8(const uint8_t *from) { return (vi){from[0], from[1], from[2], from[3]}; }

#include "lanes_terms.h"
#include "lanes_rows.h"
#include "lanes_attention.h"

static int supported_neon(void) { return 1; }

const struct kernel_table kernels_neon = {
    .isa = "neon",
    .supported = supported_neon,
    .axpy_rows = axpy_rows_lanes,
    .rmsnorm_f32 = rmsnorm_lanes,
    .add_f32 = add_lanes,
    .feed_forward_act = feed_forward_act_lanes,
    .rope_head = rope_head_lanes,
    .exp_f32 = exp_lanes,
    .softmax_f32 = softmax_lanes,
    .argmax_f32 = argmax_lanes,
    .kv_write = kv_write_lanes,
    .attention_heads = attention_heads_lanes,
};
#endif
