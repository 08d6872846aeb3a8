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

void spread_values(float *x, size_t n, float scale)
{
    const size_t size = kv_spread_size(n);
    for (size_t half = 1; half < size; half *= 2)
        for (size_t first = 0; first < n; first += 2 * half)
            for (size_t i = first; i < first + half; i++) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] * scale;
}

void kv_read(int type, float *k, float *v, const void *kv_block, size_t slot, size_t head_dim)
{
    for (size_t d = 0; d < head_dim; d++) {
        k[d] = kv_key_at(type, kv_block, slot, d, head_dim);
        v[d] = kv_value_at(type, kv_block, slot, d, head_dim);
    }
}

static void add_error(double sums[2], float stored, float value)
{
    const double error = (double)stored - value;
    sums[0] += error * error;
    sums[1] += (double)value * value;
}

void kv_add_error(int type, double sums[2], const void *kv_block, size_t slot, const float *k,
                  const float *v, size_t head_dim)
{
    for (size_t d = 0; d < head_dim; d++) {
        add_error(sums, kv_key_at(type, kv_block, slot, d, head_dim), k[d]);
        add_error(sums, kv_value_at(type, kv_block, slot, d, head_dim), v[d]);
    }
}
