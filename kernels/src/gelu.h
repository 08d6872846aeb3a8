/* The scalar tanh and GELU; their bits are part of the contract. lanes_gelu.h has the vectors. */
#ifndef POLYNEURON_GELU_H
#define POLYNEURON_GELU_H

#include "numeric.h"

/* tanh: below TANH_SMALL an odd polynomial (minimax, 1e-9 relative), above it through exp. Within
 * 2e-7 relative of tanh. */
#define TANH_SMALL 0.55f
#define TANH_C0 (-0.33333318045594607f)
#define TANH_C1 0.13332601680677658f
#define TANH_C2 (-0.05385385732165259f)
#define TANH_C3 0.021077755488767135f
#define TANH_C4 (-0.006282468880775852f)

/* The normal distribution's tail beyond a >= 0: exp(-a^2 / 2) times a polynomial of
 * t = 1 / (1 + 0.31 a), fitted over 0 <= a <= 13.2 to 1.7e-7 relative. */
#define TAIL_P 0.31f
#define TAIL_C0 0.12365814814979573f
#define TAIL_C1 0.12404283622116008f
#define TAIL_C2 0.10787205114475978f
#define TAIL_C3 0.10980108091293085f
#define TAIL_C4 (-0.014358887968782626f)
#define TAIL_C5 0.1545135264459365f
#define TAIL_C6 (-0.14130152665536078f)
#define TAIL_C7 0.03577285220934911f

#define GELU_CUBE 0.044715f
#define GELU_TWICE_ROOT 1.5957691216057308f /* 2 sqrt(2 / pi) */

static inline float tanh_one(float x)
{
    float size = x < 0.0f ? -x : x;
    float square = x * x;
    float p = TANH_C4;
    p = p * square + TANH_C3;
    p = p * square + TANH_C2;
    p = p * square + TANH_C1;
    p = p * square + TANH_C0;
    float small = x + x * square * p;
    float large = 1.0f - 2.0f / (exp_one(size + size) + 1.0f);
    return size < TANH_SMALL ? small : x < 0.0f ? -large : large;
}

/* x / (1 + exp(-2 y)) is 0.5 x (1 + tanh y) without its cancellation. */
static inline float gelu_tanh_one(float x)
{
    float y = GELU_TWICE_ROOT * (x + GELU_CUBE * (x * x * x));
    return x / (1.0f + exp_one(-y));
}

/* x times the normal distribution up to x. */
static inline float gelu_one(float x)
{
    float size = x < 0.0f ? -x : x;
    float t = 1.0f / (1.0f + TAIL_P * size);
    float p = TAIL_C7;
    p = p * t + TAIL_C6;
    p = p * t + TAIL_C5;
    p = p * t + TAIL_C4;
    p = p * t + TAIL_C3;
    p = p * t + TAIL_C2;
    p = p * t + TAIL_C1;
    p = p * t + TAIL_C0;
    float tail = exp_one(-0.5f * (x * x)) * (p * t);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

#endif
