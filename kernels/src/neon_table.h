/* The kernels of a NEON table, after its integer products (block_isum, dot_16). */
#ifndef POLYNEURON_NEON_TABLE_H
#define POLYNEURON_NEON_TABLE_H

#include "neon_matmul.h"
#include "neon_rows.h"
#include "lanes_dot.h"
#include "lanes_rows.h"
#include "lanes_lookup.h"
#include "lanes_attention_block.h"

#define NEON_KERNELS                                  \
    .quantize_acts = quantize_acts_neon,              \
    .matmul_tiles = matmul_panel,                     \
    .gather_row = gather_row_lanes,                   \
    .dot_rows = dot_rows_lanes,                       \
    .axpy_rows = axpy_rows_lanes,                     \
    .rmsnorm_f32 = rmsnorm_lanes,                     \
    .layernorm_f32 = layernorm_lanes,                 \
    .softcap_f32 = softcap_lanes,                     \
    .add_f32 = add_lanes,                             \
    .feed_forward_act = feed_forward_act_lanes,       \
    .rope_head = rope_head_lanes,                     \
    .exp_f32 = exp_lanes,                             \
    .softmax_f32 = softmax_lanes,                     \
    .argmax_f32 = argmax_lanes,                       \
    .top_k_f32 = top_k_lanes,                         \
    .kv_write = kv_write_lanes,                       \
    .attention_heads = attention_heads_lanes,         \
    .attention_block = attention_block_lanes

#endif
