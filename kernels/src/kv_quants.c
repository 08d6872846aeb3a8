/* The KV cache's storage types: sizes, writing as quants, reading back (kv_quants.h). */
#include "kv_quants.h"

#include <assert.h>
#include <string.h>

#include "block_parts.h"

#define F16_NAN 0x7E00u

size_t kv_block_bytes(int type, size_t head_dim)
{
    if (type == STORAGE_F16)
        return 2 * head_dim * KV_BLOCK_TOKENS * sizeof(uint16_t);
    assert((type == STORAGE_Q8 || type == STORAGE_Q4) && head_dim % BLOCK_COLS == 0);
    return kv_places(type, head_dim).num_bytes;
}

static void parts_of_values(int type, struct block_parts *parts, const float *x)
{
    if (type == STORAGE_Q8)
        parts_of_f32_q8(parts, x);
    else
        parts_of_f32_q4(parts, x);
    for (int i = 0; i < BLOCK_COLS; i++)
        if (!isfinite(x[i]))
            parts->scale = F16_NAN;
}

void kv_write_quants(int type, void *kv_block, size_t slot, const float *k, const float *v,
                     size_t head_dim)
{
    const struct kv_places at = kv_places(type, head_dim);
    const size_t blocks = head_dim / BLOCK_COLS, bytes = kv_quant_bytes(type);
    uint8_t *base = kv_block;
    uint16_t *k_scales = (uint16_t *)(base + at.k_scales) + slot;
    uint16_t *v_scales = (uint16_t *)(base + at.v_scales) + slot * blocks;
    for (size_t b = 0; b < blocks; b++) {
        struct block_parts parts;
        parts_of_values(type, &parts, k + b * BLOCK_COLS);
        k_scales[b * KV_BLOCK_TOKENS] = parts.scale;
        for (size_t i = 0; i < bytes; i++)
            base[(b * bytes + i) * KV_BLOCK_TOKENS + slot] = parts.quants[i];
        parts_of_values(type, &parts, v + b * BLOCK_COLS);
        v_scales[b] = parts.scale;
        memcpy(base + at.v_quants + slot * at.rows + b * bytes, parts.quants, bytes);
    }
}

/* Value i of 32 in quants that lie `stride` bytes apart. */
static float value_of(int type, const uint8_t *quants, size_t stride, size_t i, uint16_t scale)
{
    if (type == STORAGE_Q8)
        return (float)(int8_t)quants[i * stride] * f32_of_f16(scale);
    const int byte = quants[i % 16 * stride];
    return (float)((i < 16 ? byte & 15 : byte >> 4) - 8) * f32_of_f16(scale);
}

void kv_read(int type, float *k, float *v, const void *kv_block, size_t slot, size_t head_dim)
{
    const uint8_t *base = kv_block;
    if (type == STORAGE_F16) {
        const uint16_t *k_cols = kv_block, *v_row = k_cols + head_dim * (KV_BLOCK_TOKENS + slot);
        for (size_t d = 0; d < head_dim; d++) {
            k[d] = f32_of_f16(k_cols[d * KV_BLOCK_TOKENS + slot]);
            v[d] = f32_of_f16(v_row[d]);
        }
        return;
    }
    const struct kv_places at = kv_places(type, head_dim);
    const size_t blocks = head_dim / BLOCK_COLS, bytes = kv_quant_bytes(type);
    const uint16_t *k_scales = (const uint16_t *)(base + at.k_scales) + slot;
    const uint16_t *v_scales = (const uint16_t *)(base + at.v_scales) + slot * blocks;
    const uint8_t *v_quants = base + at.v_quants + slot * at.rows;
    for (size_t d = 0; d < head_dim; d++) {
        const size_t b = d / BLOCK_COLS, i = d % BLOCK_COLS;
        const uint8_t *k_quants = base + b * bytes * KV_BLOCK_TOKENS + slot;
        k[d] = value_of(type, k_quants, KV_BLOCK_TOKENS, i, k_scales[b * KV_BLOCK_TOKENS]);
        v[d] = value_of(type, v_quants + b * bytes, 1, i, v_scales[b]);
    }
}
