/* tanh and GELU in GCC vector extensions, in the order of gelu.h; included by lanes.h. */
#ifndef POLYNEURON_LANES_GELU_H
#define POLYNEURON_LANES_GELU_H

#include "gelu.h"

ALWAYS_INLINE vf tanh_vf(vf x)
{
    vf size = pick(x < 0.0f, -x, x);
    vf square = x * x;
    vf p = splat(TANH_C4);
    p = p * square + TANH_C3;
    p = p * square + TANH_C2;
    p = p * square + TANH_C1;
    p = p * square + TANH_C0;
    vf small = x + x * square * p;
    vf large = 1.0f - 2.0f / (exp_vf(size + size) + 1.0f);
    return pick(size < TANH_SMALL, small, pick(x < 0.0f, -large, large));
}

ALWAYS_INLINE vf gelu_tanh_vf(vf x)
{
    vf y = GELU_TWICE_ROOT * (x + GELU_CUBE * (x * x * x));
    return x / (1.0f + exp_vf(-y));
}

ALWAYS_INLINE vf gelu_vf(vf x)
{
    vf size = pick(x < 0.0f, -x, x);
    vf t = 1.0f / (1.0f + TAIL_P * size);
    vf p = splat(TAIL_C7);
    p = p * t + TAIL_C6;
    p = p * t + TAIL_C5;
    p = p * t + TAIL_C4;
    p = p * t + TAIL_C3;
    p = p * t + TAIL_C2;
    p = p * t + TAIL_C1;
    p = p * t + TAIL_C0;
    vf tail = exp_vf(-0.5f * (x * x)) * (p * t);
    return x * pick(x < 0.0f, tail, 1.0f - tail);
}

/* x = cap * tanh(x / cap) in place */
static void softcap_lanes(float *x, size_t n, float cap)
{
    size_t i = 0;
    for (; i + VF <= n; i += VF)
        store(x + i, cap * tanh_vf(load(x + i) / cap));
    float tail[VF] = {0};
    memcpy(tail, x + i, (n - i) * sizeof(float));
    store(tail, cap * tanh_vf(load(tail) / cap));
    memcpy(x + i, tail, (n - i) * sizeof(float));
}

#endif
