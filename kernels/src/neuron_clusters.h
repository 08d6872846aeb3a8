/* A cluster of an op for a few tokens, and where its rows are: neuron_clusters.c computes what
 * neuron_lookup.c finds. */
#ifndef POLYNEURON_NEURON_CLUSTERS_H
#define POLYNEURON_NEURON_CLUSTERS_H

#include "blocks.h"
#include "neuron_ops.h"

/* One cluster of a decode op. */
struct cluster {
    struct cluster_work *work;
    uint32_t index;          /* in its layer */
    uint32_t first;          /* its first neuron, in its layer */
    uint32_t num;
    uint32_t *active;        /* neurons in their layer, ascending; room for all */
    uint32_t *place;         /* where the rows of each are; SLOT_LATE while they are not */
};

/* The cluster of a unit: 1, or 0 when the unit has none, as no expert was chosen for it. */
int cluster_of(void *base, const struct step_op *op, uint32_t unit, struct cluster *c);

/* Find the rows of the active neurons; none of a step that is aborted before that. A holder of the
 * lock that was lost keeps it: then the heartbeat stands. */
void find_rows(void *base, const struct step_op *op, const struct step_params *step,
               struct executor_record *executor, const struct cluster *c);

/* Whether all rows of a cluster whose reads were ordered earlier have landed by now. */
int has_landed(void *base, const struct step_op *op, const struct cluster *c);

static inline void count_activity(uint64_t *counter, uint64_t num) {
    __atomic_fetch_add(counter, num, __ATOMIC_RELAXED);
}

#endif
