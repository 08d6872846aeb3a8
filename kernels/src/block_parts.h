/* 32 values of one row as quants and a scale: how floats are rounded to q4 and q8. One code for all
 * instruction sets: weights are packed once, and keys and values are a few hundred a token. */
#ifndef POLYNEURON_BLOCK_PARTS_H
#define POLYNEURON_BLOCK_PARTS_H

#include <float.h>
#include <math.h>

#include "blocks.h"
#include "numeric.h"

/* 32 weights of one row: quants as stored (4 bytes of signs, 16 of nibbles in GGUF order, or 32
 * int8). */
struct block_parts { uint8_t quants[32]; uint16_t scale; uint16_t min; };

/* ggml's Q4_0: the value of largest magnitude, the first of equals, becomes quant 0; quants are
 * rounded with the scale as it was before f16. A block whose scale has no finite inverse, far below
 * f16's range, holds zeros, and a scale above that range becomes the largest f16. */
static inline void parts_of_f32_q4(struct block_parts *parts, const float *src)
{
    float largest = 0.0f, scaled[BLOCK_COLS];
    for (int k = 0; k < BLOCK_COLS; k++)
        largest = fabsf(src[k]) > fabsf(largest) ? src[k] : largest;
    const float wanted = largest / -8.0f;
    const float scale = wanted > 65504.0f ? 65504.0f : wanted < -65504.0f ? -65504.0f : wanted;
    const float inverse = fabsf(scale) > 1.0f / FLT_MAX ? 1.0f / scale : 0.0f;
    parts->scale = f16_of_f32(scale);
    for (int k = 0; k < BLOCK_COLS; k++) {
        scaled[k] = src[k] * inverse + 8.5f;
        scaled[k] = scaled[k] < 15.0f ? scaled[k] : 15.0f;
        scaled[k] = scaled[k] > 0.0f ? scaled[k] : 0.0f;
    }
    for (int k = 0; k < 16; k++)
        parts->quants[k] = (uint8_t)((uint8_t)scaled[k] | (uint8_t)scaled[k + 16] << 4);
}

/* Symmetric q8; the scale is rounded to f16 first, so quants fit the scale that is stored. */
static inline void parts_of_f32_q8(struct block_parts *parts, const float *src)
{
    float amax = 0.0f;
    for (int k = 0; k < BLOCK_COLS; k++)
        amax = fabsf(src[k]) > amax ? fabsf(src[k]) : amax;
    float wanted = amax / 127.0f;
    parts->scale = f16_of_f32(wanted < 65504.0f ? wanted : 65504.0f);
    float scale = f32_of_f16(parts->scale);
    for (int k = 0; k < BLOCK_COLS; k++) {
        float scaled = scale > 0.0f ? src[k] / scale : 0.0f;
        scaled = scaled > 127.0f ? 127.0f : scaled;
        scaled = scaled >= -127.0f ? scaled : scaled < -127.0f ? -127.0f : 0.0f;
        parts->quants[k] = (uint8_t)(int8_t)(scaled + ROUND_MAGIC - ROUND_MAGIC);
    }
}

#endif
