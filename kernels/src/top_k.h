/* The k best of a stream of candidates: a heap whose root ranks lowest, sorted in place at the end.
 * Equal values rank by their index, and a NaN as -infinity. */
#ifndef POLYNEURON_TOP_K_H
#define POLYNEURON_TOP_K_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* 1 when candidate a ranks below b: smaller, or equal with the higher index. */
static inline int ranks_below(float value_a, uint32_t id_a, float value_b, uint32_t id_b)
{
    return value_a < value_b || (value_a == value_b && id_a > id_b);
}

/* Moves the root of the heap of `count` down; the lowest-ranking candidate is kept at the root. */
static inline void sift_down(uint32_t *ids, float *values, size_t count)
{
    const uint32_t id = ids[0];
    const float value = values[0];
    size_t at = 0;
    for (size_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count
            && ranks_below(values[child + 1], ids[child + 1], values[child], ids[child]))
            child++;
        if (!ranks_below(values[child], ids[child], value, id))
            break;
        ids[at] = ids[child];
        values[at] = values[child];
        at = child;
    }
    ids[at] = id;
    values[at] = value;
}

static inline void sift_up(uint32_t *ids, float *values, size_t at)
{
    const uint32_t id = ids[at];
    const float value = values[at];
    for (; at > 0 && ranks_below(value, id, values[(at - 1) / 2], ids[(at - 1) / 2]);
         at = (at - 1) / 2) {
        ids[at] = ids[(at - 1) / 2];
        values[at] = values[(at - 1) / 2];
    }
    ids[at] = id;
    values[at] = value;
}

/* The first k candidates fill the heap. */
static inline void fill_heap(uint32_t *ids, float *values, const float *x, size_t k)
{
    for (size_t i = 0; i < k; i++) {
        ids[i] = (uint32_t)i;
        values[i] = x[i] == x[i] ? x[i] : -INFINITY;
        sift_up(ids, values, i);
    }
}

/* Candidate i takes the root's place if it ranks above it; a NaN does not. */
static inline void offer(uint32_t *ids, float *values, size_t k, const float *x, size_t i)
{
    if (x[i] > values[0]) {
        ids[0] = (uint32_t)i;
        values[0] = x[i];
        sift_down(ids, values, k);
    }
}

/* Heap sort: descending */
static inline void sort_heap(uint32_t *ids, float *values, size_t k)
{
    for (size_t count = k; count-- > 1;) {
        const uint32_t id = ids[0];
        const float value = values[0];
        ids[0] = ids[count];
        values[0] = values[count];
        ids[count] = id;
        values[count] = value;
        sift_down(ids, values, count);
    }
}

#endif
