/* What the ops over neuron-major rows share: neuron_clusters.c (few tokens), neuron_runs.c (many).
 *
 * One summation order for all of them, whatever the number of tokens, the executors and the place
 * of the rows: a neuron's down row is added to its cluster's partial sum in the order of neurons,
 * partial sums are added in the order of clusters, and their total is added to the residual stream.
 * A sum begins at +0, so leaving out neurons whose coefficient is zero changes no bit: exact mode
 * gives what dense mode gives, and late rows give what early ones give. */
#ifndef POLYNEURON_NEURON_OPS_H
#define POLYNEURON_NEURON_OPS_H

#include "board.h"

#define LOCK_SLICE_NS 100000000ll /* after which the abort word is looked at again */

static inline uint32_t ceil_div(uint32_t value, uint32_t step) { return (value + step - 1) / step; }

static inline uint32_t num_clusters(const struct step_op *op) {
    return ceil_div(op->layer_neurons, op->cluster_neurons);
}

static inline int has_gate(const struct step_op *op) {
    return op->activation != FEED_FORWARD_RELU;
}

static inline const char *input_row(void *base, const struct step_op *op, uint32_t token) {
    return at(base, op->in + token * op->in_stride);
}

static inline float *hidden_row(void *base, const struct step_op *op, uint32_t token) {
    return at(base, op->out + token * op->out_stride);
}

static inline float *partial_of(void *base, const struct step_op *op,
                                const struct step_params *step, uint32_t cluster,
                                uint32_t token) {
    size_t row = (size_t)cluster * step->num_tokens + token;
    return (float *)at(base, op->partials) + row * op->cols;
}

/* Down rows at `place` times their coefficients, in order -> partial (cols). Leaves in both lists
 * what was added, and returns how many that are. */
uint32_t sum_down(void *base, const struct step_op *op, float *partial, float *coef,
                  uint32_t *place, uint32_t n);

/* neuron_clusters.c */
void run_clusters(void *base, const struct step_op *op, const struct step_params *step,
                  struct executor_record *executor, uint32_t first, uint32_t last);
void run_late_clusters(void *base, const struct step_op *op, const struct step_params *step,
                       struct executor_record *executor, uint32_t first, uint32_t last);
void run_predict(void *base, const struct step_op *op, const struct step_params *step,
                 struct executor_record *executor, uint32_t first, uint32_t last);

/* neuron_runs.c */
void run_rows_up(void *base, const struct step_op *op, const struct step_params *step,
                 const struct executor_record *executor, uint32_t first, uint32_t last);
void run_rows_down(void *base, const struct step_op *op, const struct executor_record *executor,
                   uint32_t first, uint32_t last);

#endif
