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

/* ---- mixtures of experts */

static inline const struct routes *routes_of(void *base, const struct step_op *op) {
    return at(base, op->routes);
}

static inline const uint32_t *starts_of(const struct routes *routes) {
    return (const uint32_t *)(routes + 1);
}

static inline const uint32_t *chosen_of(const struct routes *routes) {
    return starts_of(routes) + routes->num_experts + 1;
}

static inline const uint32_t *expert_of_entries(const struct routes *routes) {
    return chosen_of(routes) + routes->num_experts;
}

static inline const uint32_t *token_of_entries(const struct routes *routes) {
    return expert_of_entries(routes) + routes->max_entries;
}

static inline const float *weight_of_entries(const struct routes *routes) {
    return (const float *)(token_of_entries(routes) + routes->max_entries);
}

static inline const uint32_t *entries_of_token(const struct routes *routes, uint32_t token) {
    const uint32_t *all = (const uint32_t *)(weight_of_entries(routes) + routes->max_entries);
    return all + (size_t)token * routes->num_used;
}

#define NO_ENTRY UINT32_MAX

/* The entry of a token with an expert, NO_ENTRY when the token has not chosen it. */
static inline uint32_t entry_of(const struct routes *routes, uint32_t token, uint32_t expert) {
    const uint32_t *entries = entries_of_token(routes, token);
    for (uint32_t i = 0; i < routes->num_used; i++)
        if (expert_of_entries(routes)[entries[i]] == expert)
            return entries[i];
    return NO_ENTRY;
}

/* Whether neurons count is told by their deciding values, gate or, without a gate, up: those above
 * zero do, or, where the op has a bound, those whose activation is beyond it. A value that is no
 * number counts too, as in dense mode, so that a fault upstream shows and a broken score drops
 * nothing. */
static inline uint32_t is_on(float value) {
    return !(value <= 0.0f);
}

/* Of n <= MAX_CLUSTER_NEURONS deciding values what is_on() is asked of: they themselves, or, in
 * `room`, how far their activations are beyond the op's bound. */
const float *decisions(const struct step_op *op, const float *deciding, uint32_t n, float *room);

/* act(deciding, up), where the op has a bound with zeros for neurons that do not count. */
void activate(const struct step_op *op, float *out, const float *deciding, const float *up,
              uint32_t n);

/* Down rows at `place` times their coefficients, in order -> partial (cols). Leaves in both lists
 * what was added, and returns how many that are. */
uint32_t sum_down(void *base, const struct step_op *op, float *partial, float *coef,
                  uint32_t *place, uint32_t n);

/* neuron_experts.c */
/* Units of an op over the clusters of chosen experts: as many as there may be, whatever was chosen,
 * since who comes late to an op must count them alike. */
uint32_t expert_units(const struct step_op *op, const struct step_params *step);
/* The cluster of such a unit, NO_CLUSTER when fewer were chosen. */
#define NO_CLUSTER UINT32_MAX
uint32_t expert_cluster(void *base, const struct step_op *op, uint32_t unit);
void run_route(void *base, const struct step_op *op, const struct step_params *step);
void run_gather(void *base, const struct step_op *op, uint32_t first, uint32_t last);
void run_sigmoid(void *base, const struct step_op *op, uint32_t first, uint32_t last);

/* neuron_clusters.c */
void run_experts(void *base, const struct step_op *op, const struct step_params *step,
                 struct executor_record *executor, uint32_t first, uint32_t last);
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
