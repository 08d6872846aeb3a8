/* Keys and values of a KV block as registers of floats, by the type they are stored as. Included
 * after load_f16, load_half, load_i8 and load_u8. A type is a constant wherever it is passed on. */
#ifndef POLYNEURON_LANES_KV_H
#define POLYNEURON_LANES_KV_H

#include "kv_quants.h"
#include "lanes.h"

#define KEY_PARTS (KV_BLOCK_TOKENS / VF)
#define KV_FLOATS STORAGE_F32   /* what load_keys and load_values make of a block; f16's order */

/* The keys, or the values, of a KV block; scales of q8 and q4. */
struct kv_part { const void *quants; const uint16_t *scales; };

ALWAYS_INLINE int is_kv_quants(const int type) { return type == STORAGE_Q8 || type == STORAGE_Q4; }

ALWAYS_INLINE struct kv_part keys_of(const int type, const void *kv_block, size_t head_dim)
{
    if (!is_kv_quants(type))
        return (struct kv_part){kv_block, NULL};
    const char *scales = (const char *)kv_block + kv_places(type, head_dim).k_scales;
    return (struct kv_part){kv_block, (const uint16_t *)scales};
}

ALWAYS_INLINE struct kv_part values_of(const int type, const void *kv_block, size_t head_dim)
{
    const char *base = kv_block;
    if (!is_kv_quants(type))
        return (struct kv_part){base + head_dim * KV_BLOCK_TOKENS * sizeof(uint16_t), NULL};
    const struct kv_places at = kv_places(type, head_dim);
    return (struct kv_part){base + at.v_quants, (const uint16_t *)(base + at.v_scales)};
}

/* Of q4 the register's quants in the nibble that value d of a block has. */
ALWAYS_INLINE vf floats_of_quants(const int type, const uint8_t *quants, size_t d)
{
    if (type == STORAGE_Q8)
        return __builtin_convertvector(load_i8(quants), vf);
    const vi bytes = load_u8(quants);
    return __builtin_convertvector((d % BLOCK_COLS < 16 ? bytes & 15 : bytes >> 4) - 8, vf);
}

/* Scales of the 32 values from d on, of tokens [VF * j, VF * j + VF) of the block. */
ALWAYS_INLINE vf key_scales(const int type, struct kv_part keys, size_t d, int j)
{
    return is_kv_quants(type) ? load_f16(keys.scales + d + (size_t)j * VF) : (vf){0};
}

/* Value d of the keys of those tokens. */
ALWAYS_INLINE vf load_key(const int type, struct kv_part keys, size_t d, int j, vf scales)
{
    const size_t at = d * KV_BLOCK_TOKENS + (size_t)j * VF;
    if (type == KV_FLOATS)
        return load((const float *)keys.quants + at);
    if (type == STORAGE_F16)
        return load_f16((const uint16_t *)keys.quants + at);
    const size_t row = type == STORAGE_Q8 ? d : d / BLOCK_COLS * 16 + d % 16;
    const uint8_t *quants = (const uint8_t *)keys.quants + row * KV_BLOCK_TOKENS + (size_t)j * VF;
    return floats_of_quants(type, quants, d) * scales;
}

/* Values [d, d + VF) of the token's value row. */
ALWAYS_INLINE vf load_value(const int type, struct kv_part values, size_t slot, size_t d,
                            size_t head_dim)
{
    const size_t at = slot * head_dim + d;
    if (type == KV_FLOATS)
        return load((const float *)values.quants + at);
    if (type == STORAGE_F16)
        return load_f16((const uint16_t *)values.quants + at);
    const size_t row = type == STORAGE_Q8 ? at : at / BLOCK_COLS * 16 + d % 16;
    const float scale = load_half(values.scales + at / BLOCK_COLS);
    return floats_of_quants(type, (const uint8_t *)values.quants + row, d) * scale;
}

/* A block's keys as floats (head_dim, 32) */
ALWAYS_INLINE void load_keys(const int type, float *keys, const void *kv_block, size_t head_dim)
{
    const struct kv_part from = keys_of(type, kv_block, head_dim);
    for (size_t b = 0; b < head_dim; b += BLOCK_COLS)
        for (int j = 0; j < KEY_PARTS; j++) {
            const vf scales = key_scales(type, from, b, j);
            const size_t end = b + BLOCK_COLS < head_dim ? b + BLOCK_COLS : head_dim;
            for (size_t d = b; d < end; d++)
                store(keys + d * KV_BLOCK_TOKENS + (size_t)j * VF,
                      load_key(type, from, d, j, scales));
        }
}

/* A block's first num_positions values as floats (32, head_dim); more of them may be read */
ALWAYS_INLINE void load_values(const int type, float *values, const void *kv_block,
                               size_t head_dim, size_t num_positions)
{
    const struct kv_part from = values_of(type, kv_block, head_dim);
    const size_t end = num_positions * head_dim;
    /* Ends inside the block: its size is a multiple of VF. A register of f16 may be of two rows,
     * which lie one behind the other; one of quants is not, since 32 divides head_dim. */
    for (size_t i = 0; i < end; i += VF)
        store(values + i, load_value(type, from, is_kv_quants(type) ? i / head_dim : 0,
                                     is_kv_quants(type) ? i % head_dim : i, head_dim));
}

#endif
