/* Scalar building blocks whose bits are part of the contract: f16 conversion, rounding, exp. */
#ifndef POLYNEURON_NUMERIC_H
#define POLYNEURON_NUMERIC_H

#include <stdint.h>
#include <string.h>

/* Adding and taking off 1.5 * 2^23 rounds to the nearest even integer for |x| < 2^22. */
#define ROUND_MAGIC 12582912.0f
#define ROUND_MAGIC_BITS 0x4B400000u

/* A block whose largest magnitude is below 2^-120 is stored as zeros: 127 / amax would overflow. */
#define ACT_AMAX_MIN_BITS 0x03800000u

#define EXP_MIN (-87.0f)
#define EXP_MAX 89.0f          /* exp(89) is above FLT_MAX, so larger inputs all give infinity */
#define EXP_LOG2E 1.44269504088896341f
#define EXP_LN2_HI 0.693359375f            /* 9 significant bits: n * hi is exact */
#define EXP_LN2_LO (-2.12194440e-4f)
#define EXP_C0 1.9875691500e-4f
#define EXP_C1 1.3981999507e-3f
#define EXP_C2 8.3334519073e-3f
#define EXP_C3 4.1665795894e-2f
#define EXP_C4 1.6666665459e-1f
#define EXP_C5 5.0000001201e-1f

static inline uint32_t bits_of_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float f32_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float f32_of_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1Fu;
    uint32_t mantissa = half & 0x3FFu;
    if (exponent == 0) {            /* zero or subnormal: mantissa * 2^-24, exact */
        float magnitude = (float)mantissa * 5.9604644775390625e-8f;
        return f32_of_bits(bits_of_f32(magnitude) | sign);
    }
    if (exponent == 31) {           /* infinity, or a NaN made quiet as the hardware does */
        uint32_t quiet = mantissa ? 0x400000u : 0;
        return f32_of_bits(sign | 0x7F800000u | quiet | (mantissa << 13));
    }
    return f32_of_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

/* Nearest even, with subnormals; too large gives infinity. */
static inline uint16_t f16_of_f32(float value)
{
    uint32_t bits = bits_of_f32(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u)
        return (uint16_t)(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u)   /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {  /* below 2^-14: adding 0.5 leaves the rounded mantissa */
        uint32_t rounded = bits_of_f32(f32_of_bits(magnitude) + 0.5f) - 0x3F000000u;
        return (uint16_t)(sign | rounded);
    }
    uint32_t odd = (magnitude >> 13) & 1u;
    return (uint16_t)(sign | ((magnitude + 0xFFFu + odd - 0x38000000u) >> 13));
}

static inline float exp_one(float x)
{
    if (x < EXP_MIN)
        return 0.0f;
    float clamped = x > EXP_MAX ? EXP_MAX : x;
    float shifted = clamped * EXP_LOG2E + ROUND_MAGIC;
    float n = shifted - ROUND_MAGIC;
    float r = clamped - n * EXP_LN2_HI;
    r = r - n * EXP_LN2_LO;
    float p = EXP_C0;
    p = p * r + EXP_C1;
    p = p * r + EXP_C2;
    p = p * r + EXP_C3;
    p = p * r + EXP_C4;
    p = p * r + EXP_C5;
    p = p * (r * r) + r;
    p = p + 1.0f;
    /* 2^n in two factors: 2^128 alone is not a float */
    int32_t exponent = (int32_t)(bits_of_f32(shifted) - ROUND_MAGIC_BITS);
    int32_t half = exponent >> 1;
    uint32_t first = ((uint32_t)half + 127u) << 23;
    uint32_t second = ((uint32_t)exponent - (uint32_t)half + 127u) << 23;
    return p * f32_of_bits(first) * f32_of_bits(second);
}

/* A negative value becomes 0; a NaN stays, so that a fault upstream is not hidden. */
static inline float relu_one(float x) { return x < 0.0f ? 0.0f : x; }

/* The one tree of 16 lanes: lane i + lane i+8, then +4, +2, +1. */
static inline float tree_sum_16(float lane[16])
{
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++)
            lane[i] = lane[i] + lane[i + step];
    return lane[0];
}

#endif
