/* The consumer of a ring of trace records (trace_api.h). A record is written before the count that
 * announces it; the consumer looks at the count again after copying, as with a seqlock. A file of
 * its own, since thread sanitizers know no fences. */
#include <string.h>

#include "trace.h"

static struct trace_record *slot(struct trace_ring *ring, uint64_t number) {
    return (struct trace_record *)(ring + 1) + (number & (ring->capacity - 1));
}

/* The first record that is safe: the one before it may be being overwritten at this moment. */
static uint64_t first_safe(struct trace_ring *ring) {
    uint64_t head = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);
    return head >= ring->capacity ? head - ring->capacity + 1 : 0;
}

uint32_t trace_drain(void *base, uint64_t offset, uint64_t *tail, struct trace_record *records,
                     uint32_t max, uint64_t *lost) {
    struct trace_ring *ring = at(base, offset);
    uint64_t first = first_safe(ring) > *tail ? first_safe(ring) : *tail;
    uint64_t left = __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE) - first;
    uint32_t num = left < max ? (uint32_t)left : max;
    for (uint32_t i = 0; i < num; i++)
        records[i] = *slot(ring, first + i);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    uint64_t safe = first_safe(ring);
    uint32_t torn = safe <= first ? 0 : safe - first < num ? (uint32_t)(safe - first) : num;
    memmove(records, records + torn, (num - torn) * sizeof *records);
    *lost += first + torn - *tail;
    *tail = first + num;
    return num - torn;
}
