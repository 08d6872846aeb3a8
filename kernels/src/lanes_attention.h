/* Attention in GCC vector extensions: the queries of one kv head share each converted K and V. */
#ifndef POLYNEURON_LANES_ATTENTION_H
#define POLYNEURON_LANES_ATTENTION_H

#include "lanes_kv.h"

#define QUERY_GROUP (VF == 16 ? 4 : 2)    /* accumulators of a group fit the registers */

static void kv_write_lanes(void *kv_block, size_t slot, const float *k, const float *v,
                           size_t head_dim)
{
    uint16_t *k_cols = (uint16_t *)kv_block + slot;
    uint16_t *v_row = (uint16_t *)kv_block + head_dim * (KV_BLOCK_TOKENS + slot);
    size_t d = 0;
    for (; d + VF <= head_dim; d += VF) {
        uint16_t halves[VF];
        store_f16(v_row + d, load(v + d));
        store_f16(halves, load(k + d));
        for (int j = 0; j < VF; j++)
            k_cols[(d + j) * KV_BLOCK_TOKENS] = halves[j];
    }
    for (; d < head_dim; d++) {
        k_cols[d * KV_BLOCK_TOKENS] = f16_of_f32(k[d]);
        v_row[d] = f16_of_f32(v[d]);
    }
}

/* q (count, head_dim), keys (head_dim, 32) -> scores (count, 32), scores apart by stride */
ALWAYS_INLINE void score_block(const int count, const int type, float *scores, size_t stride,
                               const float *q, size_t head_dim, struct kv_part keys, float scale)
{
    vf acc[QUERY_GROUP][KEY_PARTS] = {0};
    for (size_t b = 0; b < head_dim; b += BLOCK_COLS) {
        const size_t end = b + BLOCK_COLS < head_dim ? b + BLOCK_COLS : head_dim;
        vf scales[KEY_PARTS];
        for (int j = 0; j < KEY_PARTS; j++)
            scales[j] = key_scales(type, keys, b, j);
        for (size_t d = b; d < end; d++) {
            vf key[KEY_PARTS];
            for (int j = 0; j < KEY_PARTS; j++)
                key[j] = load_key(type, keys, d, j, scales[j]);
            for (int g = 0; g < count; g++)
                for (int j = 0; j < KEY_PARTS; j++)
                    acc[g][j] = acc[g][j] + times(key[j], q + (size_t)g * head_dim + d);
        }
    }
    for (int g = 0; g < count; g++)
        for (int j = 0; j < KEY_PARTS; j++)
            store(scores + g * stride + j * VF, acc[g][j] * scale);
}

/* weights (count, num_positions), columns [d, d + width * VF) of values: those of positions
 * [first, num_positions) are added to acc */
ALWAYS_INLINE void add_values(const int count, const int width, const int type,
                              vf acc[QUERY_GROUP][4], const float *weights, size_t stride,
                              struct kv_part values, size_t d, size_t head_dim, size_t first,
                              size_t num_positions)
{
    for (size_t p = first; p < num_positions; p++)
        for (int j = 0; j < width; j++) {
            vf value = load_value(type, values, p, d + (size_t)j * VF, head_dim);
            for (int g = 0; g < count; g++)
                acc[g][j] = acc[g][j] + times(value, weights + (size_t)g * stride + p);
        }
}

struct attention_call {
    const char *kv;
    const int32_t *block_table;
    size_t block_stride, head_dim, first, num_positions, stride;
    float scale, cap;
};

ALWAYS_INLINE const void *block_of(const struct attention_call *call, size_t position)
{
    size_t id = (size_t)call->block_table[position / KV_BLOCK_TOKENS];
    return call->kv + id * call->block_stride;
}

ALWAYS_INLINE size_t positions_in_block(const struct attention_call *call, size_t position)
{
    size_t left = call->num_positions - position;
    return left < KV_BLOCK_TOKENS ? left : KV_BLOCK_TOKENS;
}

/* Columns [d, d + width * VF) of out (count, head_dim). */
ALWAYS_INLINE void value_columns(const int count, const int width, const int type, float *out,
                                 size_t d, const float *weights, const float *sums,
                                 const struct attention_call *call)
{
    vf acc[QUERY_GROUP][4] = {0};
    for (size_t p = 0; p < call->num_positions; p += KV_BLOCK_TOKENS) {
        const struct kv_part values = values_of(type, block_of(call, p), call->head_dim);
        add_values(count, width, type, acc, weights + p, call->stride, values, d, call->head_dim,
                   p ? 0 : call->first, positions_in_block(call, p));
    }
    for (int g = 0; g < count; g++)
        for (int j = 0; j < width; j++)
            store(out + g * call->head_dim + d + j * VF, acc[g][j] / sums[g]);
}

/* Of f16 only: 32 divides the others' head_dim. */
static void value_column_tail(int count, float *out, size_t d, const float *weights,
                              const float *sums, const struct attention_call *call)
{
    for (int g = 0; g < count; g++) {
        float acc = 0.0f;
        for (size_t p = call->first; p < call->num_positions; p++)
            acc = acc + weights[g * call->stride + p]
                * kv_value_at(STORAGE_F16, block_of(call, p), p % KV_BLOCK_TOKENS, d,
                              call->head_dim);
        out[g * call->head_dim + d] = acc / sums[g];
    }
}

/* Soft-capping, and the window's beginning, on one query's scores. */
static void limit_scores(float *scores, size_t first, size_t num_positions, float cap)
{
    if (cap > 0.0f)
        softcap_lanes(scores + first, num_positions - first, cap);
    for (size_t p = 0; p < first; p++)
        scores[p] = -INFINITY;
}

ALWAYS_INLINE void attention_group(const int count, const int type, float *out, const float *q,
                                   float *scratch, const struct attention_call *call)
{
    const size_t head_dim = call->head_dim;
    for (size_t p = 0; p < call->num_positions; p += KV_BLOCK_TOKENS)
        score_block(count, type, scratch + p, call->stride, q, head_dim,
                    keys_of(type, block_of(call, p), head_dim), call->scale);
    for (int g = 0; g < count; g++)
        limit_scores(scratch + g * call->stride, call->first, call->num_positions, call->cap);
    float sums[QUERY_GROUP];
    for (int g = 0; g < count; g++)
        sums[g] = exp_and_sum_lanes(scratch + g * call->stride, call->num_positions);
    size_t d = 0;
    for (; d + 4 * VF <= head_dim; d += 4 * VF)
        value_columns(count, 4, type, out, d, scratch, sums, call);
    for (; d + VF <= head_dim; d += VF)
        value_columns(count, 1, type, out, d, scratch, sums, call);
    for (; d < head_dim; d++)
        value_column_tail(count, out, d, scratch, sums, call);
}

ALWAYS_INLINE void attention_groups(const int type, float *out, const float *q, size_t num_queries,
                                    float *scratch, const struct attention_call *call)
{
    for (size_t left = num_queries; left > 0;) {
        const size_t count = left < QUERY_GROUP ? left : QUERY_GROUP;
        switch (count) {
        case 4: attention_group(QUERY_GROUP, type, out, q, scratch, call); break;
        case 3: attention_group(QUERY_GROUP < 3 ? 1 : 3, type, out, q, scratch, call); break;
        case 2: attention_group(2, type, out, q, scratch, call); break;
        default: attention_group(1, type, out, q, scratch, call);
        }
        left -= count;
        q += count * call->head_dim;
        out += count * call->head_dim;
        scratch += count * call->stride;
    }
}

static void attention_heads_lanes(int type, float *out, const float *q, size_t num_queries,
                                  size_t head_dim, const void *kv, const int32_t *block_table,
                                  size_t block_stride, size_t first, size_t num_positions,
                                  float scale, float cap, float *scratch)
{
    const size_t rounded = (num_positions + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    const struct attention_call call = {
        .kv = kv, .block_table = block_table, .block_stride = block_stride,
        .head_dim = head_dim, .first = first, .num_positions = num_positions,
        .stride = rounded * KV_BLOCK_TOKENS, .scale = scale, .cap = cap,
    };
    switch (type) {
    case STORAGE_Q8: attention_groups(STORAGE_Q8, out, q, num_queries, scratch, &call); break;
    case STORAGE_Q4: attention_groups(STORAGE_Q4, out, q, num_queries, scratch, &call); break;
    default: attention_groups(STORAGE_F16, out, q, num_queries, scratch, &call);
    }
}

#endif
