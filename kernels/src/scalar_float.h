/* Scalar kernels over floats: the specification of norms, activations, softmax, attention. */
#ifndef POLYNEURON_SCALAR_FLOAT_H
#define POLYNEURON_SCALAR_FLOAT_H

#include <math.h>

#include "gelu.h"
#include "kv_quants.h"

static void rmsnorm_scalar(float *out, const float *x, const float *w, size_t n, float eps)
{
    float lane[16] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % 16] += x[i] * x[i];
    float mean = tree_sum_16(lane) / (float)n;
    float inverse = 1.0f / sqrtf(mean + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * inverse * w[i];
}

static void layernorm_scalar(float *out, const float *x, const float *w, const float *b, size_t n,
                             float eps)
{
    float lane[16] = {0}, square[16] = {0};
    for (size_t i = 0; i < n; i++)
        lane[i % 16] += x[i];
    float mean = tree_sum_16(lane) / (float)n;
    for (size_t i = 0; i < n; i++) {
        out[i] = x[i] - mean;
        square[i % 16] += out[i] * out[i];
    }
    float inverse = 1.0f / sqrtf(tree_sum_16(square) / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = out[i] * inverse * w[i] + b[i];
}

static void softcap_scalar(float *x, size_t n, float cap)
{
    for (size_t i = 0; i < n; i++)
        x[i] = cap * tanh_one(x[i] / cap);
}

static void add_scalar(float *out, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] += x[i];
}

static void feed_forward_act_scalar(int kind, float *out, const float *gate, const float *up,
                                    size_t n)
{
    for (size_t i = 0; i < n; i++)
        switch (kind) {
        case FEED_FORWARD_SILU: out[i] = gate[i] / (1.0f + exp_one(-gate[i])) * up[i]; break;
        case FEED_FORWARD_REGLU: out[i] = relu_one(gate[i]) * up[i]; break;
        case FEED_FORWARD_DRELU: out[i] = relu_one(gate[i]) * relu_one(up[i]); break;
        case FEED_FORWARD_RELU: out[i] = relu_one(up[i]); break;
        case FEED_FORWARD_GEGLU: out[i] = gelu_tanh_one(gate[i]) * up[i]; break;
        case FEED_FORWARD_GELU: out[i] = gelu_one(up[i]); break;
        }
}

static void rope_head_scalar(int layout, float *x, const float *cos_row, const float *sin_row,
                             size_t rotary_dim)
{
    const size_t half = rotary_dim / 2;
    for (size_t i = 0; i < half; i++) {
        float *first = layout == ROPE_INTERLEAVED ? x + 2 * i : x + i;
        float *second = layout == ROPE_INTERLEAVED ? x + 2 * i + 1 : x + i + half;
        float a = *first, b = *second;
        *first = a * cos_row[i] - b * sin_row[i];
        *second = a * sin_row[i] + b * cos_row[i];
    }
}

static void exp_scalar(float *out, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = exp_one(x[i]);
}

/* x becomes exp(x - max x); returns the sum over 16 lanes. */
static float exp_and_sum_scalar(float *x, size_t n)
{
    float largest = -INFINITY;
    for (size_t i = 0; i < n; i++)
        largest = x[i] > largest ? x[i] : largest;
    float lane[16] = {0};
    for (size_t i = 0; i < n; i++) {
        x[i] = exp_one(x[i] - largest);
        lane[i % 16] += x[i];
    }
    return tree_sum_16(lane);
}

static void softmax_scalar(float *x, size_t n)
{
    float sum = exp_and_sum_scalar(x, n);
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] / sum;
}

static size_t argmax_scalar(const float *x, size_t n)
{
    size_t best = 0;
    float largest = -INFINITY;
    for (size_t i = 0; i < n; i++)
        if (x[i] > largest) {
            largest = x[i];
            best = i;
        }
    return best;
}

static void kv_write_scalar(void *kv_block, size_t slot, const float *k, const float *v,
                            size_t head_dim)
{
    uint16_t *k_cols = kv_block;
    uint16_t *v_rows = k_cols + head_dim * KV_BLOCK_TOKENS;
    for (size_t d = 0; d < head_dim; d++) {
        k_cols[d * KV_BLOCK_TOKENS + slot] = f16_of_f32(k[d]);
        v_rows[slot * head_dim + d] = f16_of_f32(v[d]);
    }
}

/* q (num_queries, head_dim), kv (blocks) -> out (num_queries, head_dim) */
static void attention_heads_scalar(int type, float *out, const float *q, size_t num_queries,
                                   size_t head_dim, const void *kv, const int32_t *block_table,
                                   size_t block_stride, size_t first, size_t num_positions,
                                   float scale, float cap, float *scratch)
{
    for (size_t h = 0; h < num_queries; h++, q += head_dim, out += head_dim) {
        for (size_t p = 0; p < num_positions; p++) {
            const char *block = (const char *)kv
                + (size_t)block_table[p / KV_BLOCK_TOKENS] * block_stride;
            float score = 0.0f;
            for (size_t d = 0; d < head_dim; d++)
                score += q[d] * kv_key_at(type, block, p % KV_BLOCK_TOKENS, d, head_dim);
            scratch[p] = score * scale;
        }
        if (cap > 0.0f)
            softcap_scalar(scratch, num_positions, cap);
        for (size_t p = 0; p < first; p++)
            scratch[p] = -INFINITY;
        float sum = exp_and_sum_scalar(scratch, num_positions);
        for (size_t d = 0; d < head_dim; d++)
            out[d] = 0.0f;
        for (size_t p = first; p < num_positions; p++) {
            const char *block = (const char *)kv
                + (size_t)block_table[p / KV_BLOCK_TOKENS] * block_stride;
            for (size_t d = 0; d < head_dim; d++)
                out[d] += scratch[p]
                    * kv_value_at(type, block, p % KV_BLOCK_TOKENS, d, head_dim);
        }
        for (size_t d = 0; d < head_dim; d++)
            out[d] = out[d] / sum;
    }
}

/* Token by token: what blocks of tokens are equal to. */
static void attention_block_scalar(int type, float *out, size_t out_stride, const float *q,
                                   size_t q_stride, size_t num_tokens, size_t num_queries,
                                   size_t head_dim, const void *kv, const int32_t *block_table,
                                   size_t block_stride, size_t num_positions, size_t window,
                                   float scale, float cap, float *scratch)
{
    for (size_t t = 0; t < num_tokens; t++, num_positions++) {
        const size_t hidden = window && num_positions > window ? num_positions - window : 0;
        const size_t blocks = hidden / KV_BLOCK_TOKENS;
        attention_heads_scalar(type, out + t * out_stride, q + t * q_stride, num_queries, head_dim,
                               kv, block_table + blocks, block_stride, hidden % KV_BLOCK_TOKENS,
                               num_positions - blocks * KV_BLOCK_TOKENS, scale, cap, scratch);
    }
}

#endif
