/* Keys and values as q8 or q4: blocks of 32 along a head's dimension, each with a scale.
 *
 * K lies transposed, so that one register holds a value of several tokens: its quants (row, 32
 * tokens) and then its scales (head_dim / 32, 32 tokens). A row of q8 is one value of the head; one
 * of q4 is values k and k + 16 of a block, in the low and the high nibble. V follows: quants
 * (32 tokens, rows), scales (32 tokens, head_dim / 32). A byte belongs to one token, so tokens can
 * be written side by side. A value is (float)quant * scale, q4 quants less 8. */
#ifndef POLYNEURON_KV_QUANTS_H
#define POLYNEURON_KV_QUANTS_H

#include "blocks.h"
#include "numeric.h"

/* Values of a head that spread_values() mixes: the largest power of two that divides n. */
static inline size_t kv_spread_size(size_t n) { return n & (~n + 1); }

/* Bytes of the quants of 32 values. */
static inline size_t kv_quant_bytes(int type)
{
    return type == STORAGE_Q8 ? BLOCK_COLS : BLOCK_COLS / 2;
}

/* Where things are in a KV block, in bytes from its start, at which K's quants are. */
struct kv_places {
    size_t rows;          /* bytes of a token's quants: head_dim of q8, half of it of q4 */
    size_t k_scales;
    size_t v_quants;
    size_t v_scales;
    size_t num_bytes;
};

static inline struct kv_places kv_places(int type, size_t head_dim)
{
    const size_t blocks = head_dim / BLOCK_COLS, rows = blocks * kv_quant_bytes(type);
    const size_t scales = blocks * KV_BLOCK_TOKENS * sizeof(uint16_t);
    const size_t half = rows * KV_BLOCK_TOKENS + scales;
    return (struct kv_places){rows, half - scales, half, 2 * half - scales, 2 * half};
}

/* Value i of 32 in quants that lie `stride` bytes apart. */
static inline float kv_value_of(int type, const uint8_t *quants, size_t stride, size_t i,
                                uint16_t scale)
{
    if (type == STORAGE_Q8)
        return (float)(int8_t)quants[i * stride] * f32_of_f16(scale);
    const int byte = quants[i % 16 * stride];
    return (float)((i < 16 ? byte & 15 : byte >> 4) - 8) * f32_of_f16(scale);
}

/* Value d of a token's key / value. */
static inline float kv_key_at(int type, const void *kv_block, size_t slot, size_t d,
                              size_t head_dim)
{
    if (type == STORAGE_F16)
        return f32_of_f16(((const uint16_t *)kv_block)[d * KV_BLOCK_TOKENS + slot]);
    const struct kv_places at = kv_places(type, head_dim);
    const uint8_t *base = kv_block;
    const size_t row = d / BLOCK_COLS * kv_quant_bytes(type) * KV_BLOCK_TOKENS + slot;
    const uint16_t *scales = (const uint16_t *)(base + at.k_scales) + slot;
    return kv_value_of(type, base + row, KV_BLOCK_TOKENS, d % BLOCK_COLS,
                       scales[d / BLOCK_COLS * KV_BLOCK_TOKENS]);
}

static inline float kv_value_at(int type, const void *kv_block, size_t slot, size_t d,
                                size_t head_dim)
{
    if (type == STORAGE_F16)
        return f32_of_f16(((const uint16_t *)kv_block)[(KV_BLOCK_TOKENS + slot) * head_dim + d]);
    const struct kv_places at = kv_places(type, head_dim);
    const uint8_t *quants = (const uint8_t *)kv_block + at.v_quants + slot * at.rows;
    const uint16_t *scales = (const uint16_t *)((const uint8_t *)kv_block + at.v_scales);
    return kv_value_of(type, quants + d / BLOCK_COLS * kv_quant_bytes(type), 1, d % BLOCK_COLS,
                       scales[(slot * head_dim + d) / BLOCK_COLS]);
}

/* kv_write for the two types. Values that are not finite give a scale that is not, so that a fault
 * upstream shows. */
void kv_write_quants(int type, void *kv_block, size_t slot, const float *k, const float *v,
                     size_t head_dim);

/* Adds to sums[0] the squared error of a token's keys and values as they are stored, to sums[1] the
 * squares of what they were. */
void kv_add_error(int type, double sums[2], const void *kv_block, size_t slot, const float *k,
                  const float *v, size_t head_dim);

#endif
