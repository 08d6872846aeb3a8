/* Feed forward over neuron-major rows: which op does what, and what all of them end in. */
#include <math.h>
#include <string.h>

#include "blocks.h"
#include "neuron_cache.h"
#include "neuron_ops.h"

#define MERGE_COLS 512

uint32_t neuron_op_units(const struct step_op *op, const struct step_params *step) {
    switch (op->kind) {
    case OP_ROUTE:
        return 1;
    case OP_GATHER:
        return step->num_tokens * op->num_heads;
    case OP_MERGE:
        return step->num_tokens * ceil_div(op->cols, MERGE_COLS);
    case OP_ROWS_UP:
        return ceil_div(op->rows, TILE_ROWS);
    default:
        return op->routes ? expert_units(op, step) : ceil_div(op->rows, op->cluster_neurons);
    }
}

/* act(deciding, up); without a gate act(deciding). */
static void plain_act(const struct step_op *op, float *out, const float *deciding, const float *up,
                      uint32_t n) {
    if (has_gate(op))
        feed_forward_act((int)op->activation, out, deciding, up, n);
    else
        feed_forward_act((int)op->activation, out, NULL, deciding, n);
}

const float *decisions(const struct step_op *op, const float *deciding, uint32_t n, float *room) {
    float ones[MAX_CLUSTER_NEURONS];
    if (op->eps == 0.0f)
        return deciding;
    for (uint32_t i = 0; i < n; i++)
        ones[i] = 1.0f;
    plain_act(op, room, deciding, ones, n);
    for (uint32_t i = 0; i < n; i++)
        room[i] = fabsf(room[i]) - op->eps;
    return room;
}

void activate(const struct step_op *op, float *out, const float *deciding, const float *up,
              uint32_t n) {
    float room[MAX_CLUSTER_NEURONS];
    const float *beyond = decisions(op, deciding, n, room);
    plain_act(op, out, deciding, up, n);
    for (uint32_t i = 0; op->eps != 0.0f && i < n; i++)
        out[i] = is_on(beyond[i]) ? out[i] : 0.0f;
}

/* Keep what is not zero; all of it in dense mode. Returns how many are kept. */
static uint32_t keep_nonzero(const struct step_op *op, float *coef, uint32_t *place, uint32_t n) {
    if (op->flags & OPF_ALL_NEURONS)
        return n;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        coef[kept] = coef[i];
        place[kept] = place[i];
        kept += !(coef[i] == 0.0f); /* a NaN is kept and shows */
    }
    return kept;
}

/* Down rows at `place` times their coefficients, in order -> partial (cols). Leaves in both lists
 * what was added, and returns how many that are. */
uint32_t sum_down(void *base, const struct step_op *op, float *partial, float *coef,
                  uint32_t *place, uint32_t n) {
    uint32_t kept = keep_nonzero(op, coef, place, n);
    memset(partial, 0, op->cols * sizeof *partial);
    axpy_rows((int)op->down_type, partial, at(base, op->up_weight + op->down_row), op->row_stride,
              place, coef, kept, op->cols);
    return kept;
}

/* Add the partial sums of all clusters to total, in their order. */
static void add_partials(void *base, const struct step_op *op, const struct step_params *step,
                         uint32_t token, uint32_t column, uint32_t n, float *total) {
    const struct cluster_work *work = at(base, op->clusters);
    uint32_t num = op->routes ? expert_units(op, step) : num_clusters(op);
    for (uint32_t i = 0; i < num; i++) {
        uint32_t k = op->routes ? expert_cluster(base, op, i) : i;
        if (k != NO_CLUSTER && work[k].num_active)
            add_f32(total, partial_of(base, op, step, k, token) + column, n);
    }
}

static void run_merge(void *base, const struct step_op *op, const struct step_params *step,
                      uint32_t first, uint32_t last) {
    uint32_t slices = ceil_div(op->cols, MERGE_COLS);
    for (uint32_t u = first; u < last; u++) {
        float total[MERGE_COLS] = {0};
        uint32_t token = u / slices, column = u % slices * MERGE_COLS;
        uint32_t n = op->cols - column < MERGE_COLS ? op->cols - column : MERGE_COLS;
        add_partials(base, op, step, token, column, n, total);
        if (op->bias)
            add_f32(total, (const float *)at(base, op->bias) + column, n);
        add_f32((float *)at(base, op->out + token * op->out_stride) + column, total, n);
    }
}

/* The next layer finds nothing of this one's in the cache. */
static void forget_rows(void *base, const struct step_op *op, const struct step_params *step) {
    void *cache = at(base, op->cache);
    while (!aborted(base))
        if (neuron_cache_lock(cache, LOCK_SLICE_NS) == 0) {
            neuron_cache_forget(cache, step->epoch + op->layer + 1);
            neuron_cache_unlock(cache);
            return;
        }
}

void neuron_op_run(void *base, const struct step_op *op, const struct step_params *step,
                   struct executor_record *executor, uint32_t first, uint32_t last) {
    switch (op->kind) {
    case OP_CLUSTERS:
        run_clusters(base, op, step, executor, first, last);
        break;
    case OP_LATE_CLUSTERS:
        run_late_clusters(base, op, step, executor, first, last);
        break;
    case OP_MERGE:
        run_merge(base, op, step, first, last);
        if (op->flags & OPF_FORGET && first == 0)
            forget_rows(base, op, step);
        break;
    case OP_ROWS_UP:
        run_rows_up(base, op, step, executor, first, last);
        break;
    case OP_ROWS_DOWN:
        run_rows_down(base, op, executor, first, last);
        break;
    case OP_PREDICT:
        run_predict(base, op, step, executor, first, last);
        break;
    case OP_ROUTE:
        run_route(base, op, step);
        break;
    case OP_EXPERTS:
        run_experts(base, op, step, executor, first, last);
        break;
    case OP_GATHER:
        run_gather(base, op, first, last);
        break;
    default: /* OP_AWAIT_ROWS: the wait was all of it */
        break;
    }
}
