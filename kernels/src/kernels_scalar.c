/* The scalar table: the specification that every other table equals bit for bit. */
#include "kernels_isa.h"
#include "scalar_float.h"
#include "scalar_quant.h"
#include "top_k.h"

static int supported_scalar(void) { return 1; }

static void top_k_scalar(uint32_t *out_ids, float *out_values, const float *x, size_t n, size_t k)
{
    fill_heap(out_ids, out_values, x, k);
    for (size_t i = k; i < n && k > 0; i++)
        offer(out_ids, out_values, k, x, i);
    sort_heap(out_ids, out_values, k);
}

const struct kernel_table kernels_scalar = {
    .isa = "scalar",
    .supported = supported_scalar,
    .quantize_acts = quantize_acts_scalar,
    .matmul_tiles = matmul_tiles_scalar,
    .gather_row = gather_row_scalar,
    .dot_rows = dot_rows_scalar,
    .axpy_rows = axpy_rows_scalar,
    .rmsnorm_f32 = rmsnorm_scalar,
    .layernorm_f32 = layernorm_scalar,
    .softcap_f32 = softcap_scalar,
    .add_f32 = add_scalar,
    .feed_forward_act = feed_forward_act_scalar,
    .rope_head = rope_head_scalar,
    .exp_f32 = exp_scalar,
    .softmax_f32 = softmax_scalar,
    .argmax_f32 = argmax_scalar,
    .top_k_f32 = top_k_scalar,
    .kv_write = kv_write_scalar,
    .attention_heads = attention_heads_scalar,
    .attention_block = attention_block_scalar,
};
