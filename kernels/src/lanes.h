/* Float kernels in GCC vector extensions: included by each ISA file after its target pragma, which
 * defines VF (floats a register), load_f16, store_f16, load_half, times. Additions have the order
 * of scalar_float.h, so the results are equal bit for bit whatever VF is. */
#ifndef POLYNEURON_LANES_H
#define POLYNEURON_LANES_H

#include <math.h>

#include "blocks.h"
#include "numeric.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define PARTS (16 / VF)       /* registers that hold the 16 lanes of a sum */

typedef float vf __attribute__((vector_size(4 * VF)));
typedef int32_t vi __attribute__((vector_size(4 * VF)));
typedef uint32_t vu __attribute__((vector_size(4 * VF)));

ALWAYS_INLINE vf load_f16(const uint16_t *from);
ALWAYS_INLINE void store_f16(uint16_t *to, vf value);
/* value * *factor */
ALWAYS_INLINE vf times(vf value, const float *factor);

ALWAYS_INLINE vf load(const float *from)
{
    vf value;
    memcpy(&value, from, sizeof value);
    return value;
}

ALWAYS_INLINE void store(float *to, vf value) { memcpy(to, &value, sizeof value); }

ALWAYS_INLINE vf splat(float value) { return value - (vf){0}; }

ALWAYS_INLINE vf pick(vi mask, vf yes, vf no)
{
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}

ALWAYS_INLINE vf exp_vf(vf x)
{
    vf clamped = pick(x > EXP_MAX, splat(EXP_MAX), x);
    vf shifted = clamped * EXP_LOG2E + ROUND_MAGIC;
    vf n = shifted - ROUND_MAGIC;
    vf r = clamped - n * EXP_LN2_HI;
    r = r - n * EXP_LN2_LO;
    vf p = splat(EXP_C0);
    p = p * r + EXP_C1;
    p = p * r + EXP_C2;
    p = p * r + EXP_C3;
    p = p * r + EXP_C4;
    p = p * r + EXP_C5;
    p = p * (r * r) + r;
    p = p + 1.0f;
    vi exponent = (vi)((vu)shifted - ROUND_MAGIC_BITS);
    vi half = exponent >> 1;
    vu first = ((vu)half + 127u) << 23;
    vu second = ((vu)exponent - (vu)half + 127u) << 23;
    return pick(x < EXP_MIN, (vf){0}, p * (vf)first * (vf)second);
}

#include "lanes_gelu.h"

ALWAYS_INLINE vf relu_vf(vf x) { return pick(x < 0.0f, (vf){0}, x); }

ALWAYS_INLINE float sum_parts(const vf part[PARTS])
{
    float lane[16];
    for (int j = 0; j < PARTS; j++)
        store(lane + j * VF, part[j]);
    return tree_sum_16(lane);
}

/* The sum of x (is_square: of its squares). */
ALWAYS_INLINE float sum_lanes(const int is_square, const float *x, size_t n)
{
    vf part[PARTS] = {0};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < PARTS; j++) {
            vf value = load(x + i + j * VF);
            part[j] = part[j] + (is_square ? value * value : value);
        }
    float tail[16] = {0};           /* a lane without an element adds 0 */
    memcpy(tail, x + i, (n - i) * sizeof *tail);
    for (int j = 0; j < PARTS; j++) {
        vf value = load(tail + j * VF);
        part[j] = part[j] + (is_square ? value * value : value);
    }
    return sum_parts(part);
}

static void rmsnorm_lanes(float *out, const float *x, const float *w, size_t n, float eps)
{
    float mean = sum_lanes(1, x, n) / (float)n;
    float inverse = 1.0f / sqrtf(mean + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * inverse * w[i];
}

static void layernorm_lanes(float *out, const float *x, const float *w, const float *b, size_t n,
                            float eps)
{
    float mean = sum_lanes(0, x, n) / (float)n;
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] - mean;
    float variance = sum_lanes(1, out, n) / (float)n;
    float inverse = 1.0f / sqrtf(variance + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = out[i] * inverse * w[i] + b[i];
}

static void add_lanes(float *out, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] += x[i];
}

ALWAYS_INLINE vf feed_forward_vf(int kind, vf gate, vf up)
{
    switch (kind) {
    case FEED_FORWARD_SILU: return gate / (1.0f + exp_vf(-gate)) * up;
    case FEED_FORWARD_REGLU: return relu_vf(gate) * up;
    case FEED_FORWARD_DRELU: return relu_vf(gate) * relu_vf(up);
    case FEED_FORWARD_GEGLU: return gelu_tanh_vf(gate) * up;
    case FEED_FORWARD_GELU: return gelu_vf(up);
    default: return relu_vf(up);
    }
}

static void feed_forward_act_lanes(int kind, float *out, const float *gate, const float *up,
                                   size_t n)
{
    const int has_gate = kind != FEED_FORWARD_RELU && kind != FEED_FORWARD_GELU;
    size_t i = 0;
    for (; i + VF <= n; i += VF)
        store(out + i, feed_forward_vf(kind, has_gate ? load(gate + i) : (vf){0}, load(up + i)));
    float tail[2][VF] = {0};
    if (has_gate)
        memcpy(tail[0], gate + i, (n - i) * sizeof(float));
    memcpy(tail[1], up + i, (n - i) * sizeof(float));
    store(tail[0], feed_forward_vf(kind, load(tail[0]), load(tail[1])));
    memcpy(out + i, tail[0], (n - i) * sizeof(float));
}

static void rope_head_lanes(int layout, float *x, const float *cos_row, const float *sin_row,
                            size_t rotary_dim)
{
    const size_t half = rotary_dim / 2;
    if (layout == ROPE_INTERLEAVED) {
        for (size_t i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos_row[i] - b * sin_row[i];
            x[2 * i + 1] = a * sin_row[i] + b * cos_row[i];
        }
        return;
    }
    float *restrict first = x, *restrict second = x + half;
    for (size_t i = 0; i < half; i++) {
        float a = first[i], b = second[i];
        first[i] = a * cos_row[i] - b * sin_row[i];
        second[i] = a * sin_row[i] + b * cos_row[i];
    }
}

static void exp_lanes(float *out, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + VF <= n; i += VF)
        store(out + i, exp_vf(load(x + i)));
    float tail[VF] = {0};
    memcpy(tail, x + i, (n - i) * sizeof(float));
    store(tail, exp_vf(load(tail)));
    memcpy(out + i, tail, (n - i) * sizeof(float));
}

static float largest_lanes(const float *x, size_t n)
{
    vf part[PARTS];
    for (int j = 0; j < PARTS; j++)
        part[j] = splat(-INFINITY);
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < PARTS; j++) {
            vf value = load(x + i + j * VF);
            part[j] = pick(value > part[j], value, part[j]);
        }
    float lane[16];
    for (int j = 0; j < PARTS; j++)
        store(lane + j * VF, part[j]);
    for (; i < n; i++)
        lane[i % 16] = x[i] > lane[i % 16] ? x[i] : lane[i % 16];
    float largest = -INFINITY;
    for (int j = 0; j < 16; j++)
        largest = lane[j] > largest ? lane[j] : largest;
    return largest;
}

/* x becomes exp(x - max x); returns the sum over 16 lanes. */
static float exp_and_sum_lanes(float *x, size_t n)
{
    const float largest = largest_lanes(x, n);
    vf part[PARTS] = {0};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < PARTS; j++) {
            vf value = exp_vf(load(x + i + j * VF) - largest);
            store(x + i + j * VF, value);
            part[j] = part[j] + value;
        }
    float tail[16];
    for (int j = 0; j < 16; j++)    /* exp(-inf) adds 0 */
        tail[j] = (size_t)j < n - i ? x[i + j] - largest : -INFINITY;
    for (int j = 0; j < PARTS; j++) {
        vf value = exp_vf(load(tail + j * VF));
        store(tail + j * VF, value);
        part[j] = part[j] + value;
    }
    memcpy(x + i, tail, (n - i) * sizeof(float));
    return sum_parts(part);
}

static void softmax_lanes(float *x, size_t n)
{
    const float sum = exp_and_sum_lanes(x, n);
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] / sum;
}

static size_t argmax_lanes(const float *x, size_t n)
{
    const float largest = largest_lanes(x, n);
    if (largest == -INFINITY)       /* nothing above it, or only NaN */
        return 0;
    size_t i = 0;
    for (; i + 256 <= n; i += 256) {
        int32_t found = 0;
        for (int j = 0; j < 256; j++)
            found |= x[i + j] == largest;
        if (found)
            break;
    }
    while (x[i] != largest)
        i++;
    return i;
}

#endif
