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

/* Bytes of the quants of 32 values. */
static inline size_t kv_quant_bytes(int type)
{
    return type == STORAGE_Q8 ? BLOCK_COLS : BLOCK_COLS / 2;
}

struct kv_places {
    size_t rows;          /* of bytes: head_dim of q8, half of it of q4 */
    size_t k_scales;      /* offsets in the KV block; K's quants begin it */
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

/* kv_write for the two types. Values that are not finite give a scale that is not, so that a fault
 * upstream shows. */
void kv_write_quants(int type, void *kv_block, size_t slot, const float *k, const float *v,
                     size_t head_dim);

#endif
