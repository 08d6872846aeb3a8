/* Rings of trace records (trace_api.h): what producers do. */
#include <assert.h>

#include "trace.h"

_Static_assert(sizeof(struct trace_record) == CACHE_LINE, "layout shared with Python");
_Static_assert(sizeof(struct trace_ring) == CACHE_LINE, "records begin at a line");

size_t trace_ring_bytes(uint32_t capacity) {
    return sizeof(struct trace_ring) + capacity * sizeof(struct trace_record);
}

struct trace_ring *trace_ring_at(void *base, uint64_t ring) { return at(base, ring); }

static struct trace_record *slot(struct trace_ring *ring, uint64_t number) {
    return (struct trace_record *)(ring + 1) + (number & (ring->capacity - 1));
}

void trace_format(void *base, uint64_t offset, uint32_t capacity) {
    struct trace_ring *ring = at(base, offset);
    assert(capacity > 1 && (capacity & (capacity - 1)) == 0);
    *ring = (struct trace_ring){.capacity = capacity};
}

/* What is written next may not be seen before the count is: it may overwrite what that count tells
 * the consumer not to trust. Processors of Arm's kind would reorder them. */
static void write_after_count(void) {
#ifndef __SANITIZE_THREAD__ /* which knows no fences */
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

void trace_put(void *base, uint64_t offset, const struct trace_record *record) {
    struct trace_ring *ring = at(base, offset);
    uint64_t head = ring->head;
    write_after_count();
    *slot(ring, head) = *record;
    __atomic_store_n(&ring->head, head + 1, __ATOMIC_RELEASE);
}

void trace_put_read(void *base, uint64_t offset, uint64_t latency_ns, uint32_t layer,
                    uint64_t neuron, uint32_t num_bytes, uint32_t status) {
    struct trace_ring *ring = at(base, offset);
    uint32_t step_seq = __atomic_load_n(&ring->step_seq, __ATOMIC_RELAXED);
    if (step_seq == 0)
        return;
    uint64_t now_ns = monotonic_ns();
    trace_put(base, offset, &(struct trace_record){
        .start_ns = now_ns - latency_ns, .end_ns = now_ns, .value = neuron, .step_seq = step_seq,
        .what = TRACE_READ, .kind = status, .layer = layer, .count = num_bytes});
}

void trace_cluster(void *base, struct executor_record *executor, uint32_t layer, uint32_t cluster,
                   enum trace_stage stage, uint64_t start_ns, uint64_t end_ns, uint32_t neurons,
                   uint32_t misses) {
    if (executor->trace == 0)
        return;
    trace_put(base, executor->trace, &(struct trace_record){
        .start_ns = start_ns, .end_ns = end_ns, .value = misses, .step_seq = executor->busy_seq,
        .what = TRACE_CLUSTER, .kind = stage, .layer = layer, .index = cluster, .count = neurons,
        .executor = (uint32_t)(executor - board_at(base)->executors)});
}
