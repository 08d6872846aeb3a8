/* The scalar table: the specification that every other table equals bit for bit. */
#include "kernels_isa.h"
#include "scalar_float.h"
#include "scalar_quant.h"

static int supported_scalar(void) { return 1; }

/* 1 when candidate a ranks below b: smaller, or equal with the higher index. */
static int ranks_below(float value_a, uint32_t id_a, float value_b, uint32_t id_b)
{
    return value_a < value_b || (value_a == value_b && id_a > id_b);
}

/* Moves the root of the heap of `count` down; the lowest-ranking candidate is kept at the root. */
static void sift_down(uint32_t *ids, float *values, size_t count)
{
    const uint32_t id = ids[0];
    const float value = values[0];
    size_t at = 0;
    for (size_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count
            && ranks_below(values[child + 1], ids[child + 1], values[child], ids[child]))
            child++;
        if (!ranks_below(values[child], ids[child], value, id))
            break;
        ids[at] = ids[child];
        values[at] = values[child];
        at = child;
    }
    ids[at] = id;
    values[at] = value;
}

static void sift_up(uint32_t *ids, float *values, size_t at)
{
    const uint32_t id = ids[at];
    const float value = values[at];
    for (; at > 0 && ranks_below(value, id, values[(at - 1) / 2], ids[(at - 1) / 2]);
         at = (at - 1) / 2) {
        ids[at] = ids[(at - 1) / 2];
        values[at] = values[(at - 1) / 2];
    }
    ids[at] = id;
    values[at] = value;
}

/* A heap of k, then a heap sort in place; a NaN ranks as -infinity. */
static void top_k_scalar(uint32_t *out_ids, float *out_values, const float *x, size_t n, size_t k)
{
    for (size_t i = 0; i < n && k > 0; i++) {
        float value = x[i] == x[i] ? x[i] : -INFINITY;
        if (i < k) {
            out_ids[i] = (uint32_t)i;
            out_values[i] = value;
            sift_up(out_ids, out_values, i);
        } else if (value > out_values[0]) {
            out_ids[0] = (uint32_t)i;
            out_values[0] = value;
            sift_down(out_ids, out_values, k);
        }
    }
    for (size_t count = k; count-- > 1;) {
        uint32_t id = out_ids[0];
        float value = out_values[0];
        out_ids[0] = out_ids[count];
        out_values[0] = out_values[count];
        out_ids[count] = id;
        out_values[count] = value;
        sift_down(out_ids, out_values, count);
    }
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
    .add_f32 = add_scalar,
    .feed_forward_act = feed_forward_act_scalar,
    .rope_head = rope_head_scalar,
    .exp_f32 = exp_scalar,
    .softmax_f32 = softmax_scalar,
    .argmax_f32 = argmax_scalar,
    .top_k_f32 = top_k_scalar,
    .kv_write = kv_write_scalar,
    .attention_heads = attention_heads_scalar,
};
