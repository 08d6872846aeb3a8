/* Trace records: what is traced costs a few reads of the clock, what is not costs a test. */
#ifndef POLYNEURON_TRACE_H
#define POLYNEURON_TRACE_H

#include "board.h"

#include "trace_api.h"

/* Whether a step wants records. */
static inline int is_traced(const struct step_params *step) {
    return (step->flags & STEP_TRACE) != 0;
}

/* The time, where a step wants records, else 0. */
static inline uint64_t traced_ns(const struct step_params *step) {
    return is_traced(step) ? monotonic_ns() : 0;
}

/* Write down a stage of a cluster of the op that the executor is in. */
void trace_cluster(void *base, struct executor_record *executor, uint32_t layer, uint32_t cluster,
                   enum trace_stage stage, uint64_t start_ns, uint64_t end_ns, uint32_t neurons,
                   uint32_t misses);

#endif
