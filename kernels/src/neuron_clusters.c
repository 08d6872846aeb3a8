/* Feed forward over neuron-major rows for a few tokens: clusters as tasks (PAPER §1.8). */
#include <string.h>

#include "blocks.h"
#include "neuron_cache.h"
#include "neuron_clusters.h"
#include "trace.h"

/* A cluster's tiles of `weight` times some input rows -> out. */
static void multiply_tiles(void *base, const struct step_op *op, const struct cluster *c,
                           uint64_t weight, float *out, uint32_t token, uint32_t num_tokens) {
    size_t bytes = tile_bytes((int)op->weight_type, op->cols);
    matmul_group(op, (int)op->weight_type, out, op->out_stride / sizeof(float),
                 at(base, weight + c->first / TILE_ROWS * bytes), ceil_div(c->num, TILE_ROWS),
                 input_row(base, op, token), num_tokens);
}

/* The values that decide (gate, or up where there is none) of a cluster -> hidden rows. */
static void decide(void *base, const struct step_op *op, const struct step_params *step,
                   const struct cluster *c) {
    if (op->flags & OPF_GATE_TILES) {
        multiply_tiles(base, op, c, op->weight, hidden_row(base, op, 0) + c->first, 0,
                       step->num_tokens);
    } else {
        uint64_t rows = op->up_weight + (uint64_t)(c->first - op->first_neuron) * op->row_stride;
        for (uint32_t t = 0; t < step->num_tokens; t++)
            dot_rows((int)op->weight_type, hidden_row(base, op, t) + c->first,
                     at(base, rows + op->gate_row), op->row_stride, NULL, c->num, op->cols,
                     input_row(base, op, t));
    }
    for (uint32_t t = 0; op->bias && t < step->num_tokens; t++)
        add_f32(hidden_row(base, op, t) + c->first, (const float *)at(base, op->bias) + c->first,
                c->num);
}

/* List the neurons whose hidden value is on for some token; all in dense mode. Returns for
 * how many tokens they are, summed. */
static uint32_t choose(void *base, const struct step_op *op, const struct step_params *step,
                       const struct cluster *c) {
    uint32_t num_active = 0, sum = 0, on[MAX_CLUSTER_NEURONS] = {0}; /* for how many tokens */
    for (uint32_t t = 0; t < step->num_tokens; t++) {
        float room[MAX_CLUSTER_NEURONS];
        const float *value = decisions(op, hidden_row(base, op, t) + c->first, c->num, room);
        for (uint32_t i = 0; i < c->num; i++)
            on[i] += is_on(value[i]);
    }
    for (uint32_t i = 0; i < c->num; i++) {
        sum += on[i];
        c->active[num_active] = c->first + i;
        num_active += on[i] != 0 || (op->flags & OPF_ALL_NEURONS);
    }
    c->work->num_active = num_active;
    c->work->num_late = 0;
    struct layer_activity *activity = at(base, op->activity);
    if (c->index == 0 && !op->routes)
        count_activity(&activity->tokens, step->num_tokens);
    return sum;
}

static void add_bias_of(void *base, uint64_t bias, const uint32_t *neuron, float *values,
                        uint32_t n) {
    for (uint32_t i = 0; bias && i < n; i++)
        values[i] += ((const float *)at(base, bias))[neuron[i]];
}

/* Coefficients of the active neurons for one token: act(gate, up). */
static void coefficients(void *base, const struct step_op *op, const struct cluster *c,
                         uint32_t token, float *coef) {
    float deciding[MAX_CLUSTER_NEURONS], up[MAX_CLUSTER_NEURONS];
    uint32_t n = c->work->num_active;
    const float *hidden = hidden_row(base, op, token);
    for (uint32_t i = 0; i < n; i++)
        deciding[i] = hidden[c->active[i]];
    if (has_gate(op)) {
        dot_rows((int)op->up_type, up, at(base, op->up_weight + op->up_row), op->row_stride,
                 c->place, n, op->cols, input_row(base, op, token));
        add_bias_of(base, op->up_bias, c->active, up, n);
    }
    activate(op, coef, deciding, up, n);
}

/* What the stages of a cluster took, token by token, in a step that wants records. */
struct stage_times {
    uint64_t last_ns; /* when a stage ended last; 0: no records are wanted */
    uint64_t gc_ns;
    uint64_t udc_ns;
    uint32_t num_open; /* neurons whose gate was above zero */
};

static void end_stage(struct stage_times *times, uint64_t *stage_ns) {
    if (times->last_ns == 0)
        return;
    uint64_t now_ns = monotonic_ns();
    *stage_ns += now_ns - times->last_ns;
    times->last_ns = now_ns;
}

/* Up and down of the active neurons -> the cluster's partial sums. */
static void compute_active(void *base, const struct step_op *op, const struct step_params *step,
                           const struct cluster *c) {
    float coef[MAX_CLUSTER_NEURONS];
    uint32_t place[MAX_CLUSTER_NEURONS], n = c->work->num_active;
    uint64_t active = 0;
    for (uint32_t t = 0; n && t < step->num_tokens; t++) {
        coefficients(base, op, c, t, coef);
        memcpy(place, c->place, n * sizeof *place);
        active += sum_down(base, op, partial_of(base, op, step, c->index, t), coef, place, n);
    }
    struct layer_activity *activity = at(base, op->activity);
    count_activity(&activity->active, active);
}

/* The weight of a cluster's expert for a token, 1 without experts; 0 is returned when the token
 * has not chosen it. */
static int weigh(void *base, const struct step_op *op, const struct cluster *c, uint32_t token,
                 float *weight) {
    *weight = 1.0f;
    if (!op->routes)
        return 1;
    const struct routes *routes = routes_of(base, op);
    uint32_t entry = entry_of(routes, token, c->first / op->expert_neurons);
    if (entry != NO_ENTRY)
        *weight = weight_of_entries(routes)[entry];
    return entry != NO_ENTRY;
}

/* Of a cluster's listed neurons, those of one token, by its scores, or all where whole experts are
 * listed: their ids and places. */
static uint32_t neurons_for(void *base, const struct step_op *op, const struct cluster *c,
                            uint32_t token, uint32_t *neuron, uint32_t *place) {
    const float *score = hidden_row(base, op, token);
    uint32_t n = c->work->num_active;
    if (op->flags & OPF_WHOLE_CLUSTERS) {
        memcpy(neuron, c->active, n * sizeof *neuron);
        memcpy(place, c->place, n * sizeof *place);
        return n;
    }
    n = 0;
    for (uint32_t i = 0; i < c->work->num_active; i++) {
        neuron[n] = c->active[i];
        place[n] = c->place[i];
        n += is_on(score[c->active[i]]);
    }
    return n;
}

/* Keep the neurons whose gate is on. */
static uint32_t keep_gated(float *gate, uint32_t *neuron, uint32_t *place, uint32_t n) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        gate[kept] = gate[i];
        neuron[kept] = neuron[i];
        place[kept] = place[i];
        kept += is_on(gate[i]);
    }
    return kept;
}

static uint32_t count_open(const float *gate, uint32_t n) {
    uint32_t open = 0;
    for (uint32_t i = 0; i < n; i++)
        open += is_on(gate[i]);
    return open;
}

/* Gates of one token's predicted neurons, then up and down where the gate is open -> its partial
 * sum. What exact mode computes, but for neurons that the predictor missed. */
static void compute_token(void *base, const struct step_op *op, const struct step_params *step,
                          const struct cluster *c, uint32_t token, struct stage_times *times) {
    float gate[MAX_CLUSTER_NEURONS], up[MAX_CLUSTER_NEURONS], coef[MAX_CLUSTER_NEURONS];
    uint32_t neuron[MAX_CLUSTER_NEURONS], place[MAX_CLUSTER_NEURONS];
    struct layer_activity *activity = at(base, op->activity);
    const char *rows = at(base, op->up_weight), *x = input_row(base, op, token);
    float weight;
    uint32_t n = 0;
    if (weigh(base, op, c, token, &weight))
        n = neurons_for(base, op, c, token, neuron, place);
    if (n == 0) {
        memset(partial_of(base, op, step, c->index, token), 0, op->cols * sizeof(float));
        return;
    }
    dot_rows((int)op->weight_type, gate, rows + op->gate_row, op->row_stride, place, n, op->cols,
             x);
    add_bias_of(base, op->bias, neuron, gate, n);
    uint32_t open = op->flags & OPF_ALL_NEURONS ? count_open(gate, n)
                                                : keep_gated(gate, neuron, place, n);
    n = op->flags & OPF_ALL_NEURONS ? n : open;
    count_activity(&activity->gated, open);
    times->num_open += open;
    end_stage(times, &times->gc_ns);
    if (has_gate(op)) {
        dot_rows((int)op->up_type, up, rows + op->up_row, op->row_stride, place, n, op->cols, x);
        add_bias_of(base, op->up_bias, neuron, up, n);
    }
    activate(op, coef, gate, up, n);
    for (uint32_t i = 0; op->routes && i < n; i++)
        coef[i] *= weight;
    n = sum_down(base, op, partial_of(base, op, step, c->index, token), coef, place, n);
    count_activity(&activity->active, n);
    end_stage(times, &times->udc_ns);
}

/* Write down what compute() did. Of several tokens the stages took turns; shown are their sums. */
static void trace_computed(void *base, const struct step_op *op, struct executor_record *executor,
                           const struct cluster *c, uint64_t start_ns,
                           const struct stage_times *times) {
    uint32_t n = c->work->num_active, num_open = n;
    uint64_t gates_ns = start_ns + times->gc_ns;
    if (op->flags & OPF_PREDICTED) {
        num_open = times->num_open;
        trace_cluster(base, executor, op->layer, c->index, TRACE_GC, start_ns, gates_ns, n, 0);
    }
    trace_cluster(base, executor, op->layer, c->index, TRACE_UDC, gates_ns,
                  gates_ns + times->udc_ns, num_open, 0);
}

/* All that is left of a cluster whose rows are all here. */
static void compute(void *base, const struct step_op *op, const struct step_params *step,
                    struct executor_record *executor, const struct cluster *c) {
    uint32_t n = c->work->num_active;
    uint64_t start_ns = traced_ns(step);
    struct stage_times times = {.last_ns = start_ns};
    for (uint32_t i = 0; i < n; i++)
        c->place[i] &= ~(uint32_t)SLOT_LATE;
    if (!(op->flags & OPF_PREDICTED)) {
        compute_active(base, op, step, c);
        end_stage(&times, &times.udc_ns);
    } else {
        for (uint32_t t = 0; n && t < step->num_tokens; t++)
            compute_token(base, op, step, c, t, &times);
    }
    if (start_ns && n)
        trace_computed(base, op, executor, c, start_ns, &times);
}

/* Scores of a cluster's neurons for some tokens, less their thresholds -> hidden rows. */
static void score_tokens(void *base, const struct step_op *op, const struct cluster *c,
                         uint32_t first, uint32_t num_tokens) {
    float more[MAX_CLUSTER_NEURONS];
    const float *threshold = (const float *)at(base, op->bias) + c->first;
    multiply_tiles(base, op, c, op->weight, hidden_row(base, op, first) + c->first, first,
                   num_tokens);
    for (uint32_t t = first; t < first + num_tokens; t++) {
        float *score = hidden_row(base, op, t) + c->first;
        if (op->up_weight) {
            multiply_tiles(base, op, c, op->up_weight, more, t, 1);
            add_f32(score, more, c->num);
        }
        for (uint32_t i = 0; i < c->num; i++)
            score[i] -= threshold[i];
    }
}

/* The same for all tokens; those that have not chosen a cluster's expert name none of it. */
static void score_neurons(void *base, const struct step_op *op, const struct step_params *step,
                          const struct cluster *c) {
    if (!op->routes) {
        score_tokens(base, op, c, 0, step->num_tokens);
        return;
    }
    const struct routes *routes = routes_of(base, op);
    for (uint32_t t = 0; t < step->num_tokens; t++) {
        if (entry_of(routes, t, c->first / op->expert_neurons) != NO_ENTRY)
            score_tokens(base, op, c, t, 1);
        else
            memset(hidden_row(base, op, t) + c->first, 0, c->num * sizeof(float));
    }
}

/* Find the rows of a cluster's neurons once it is known which a step needs: begun at start_ns. */
static void find_named(void *base, const struct step_op *op, const struct step_params *step,
                       struct executor_record *executor, const struct cluster *c,
                       uint64_t start_ns) {
    find_rows(base, op, step, executor, c);
    if (start_ns)
        trace_cluster(base, executor, op->layer, c->index, TRACE_PRED, start_ns, monotonic_ns(),
                      c->work->num_active, c->work->num_late);
}

void run_predict(void *base, const struct step_op *op, const struct step_params *step,
                 struct executor_record *executor, uint32_t first, uint32_t last) {
    struct layer_activity *activity = at(base, op->activity);
    if (op->routes && first == 0)
        count_activity(&activity->tokens, step->num_tokens);
    for (uint32_t unit = first; unit < last; unit++) {
        struct cluster c;
        if (!cluster_of(base, op, unit, &c))
            continue;
        uint64_t start_ns = traced_ns(step);
        score_neurons(base, op, step, &c);
        count_activity(&activity->predicted, choose(base, op, step, &c));
        find_named(base, op, step, executor, &c, start_ns);
    }
}

void run_experts(void *base, const struct step_op *op, const struct step_params *step,
                 struct executor_record *executor, uint32_t first, uint32_t last) {
    struct layer_activity *activity = at(base, op->activity);
    if (first == 0)
        count_activity(&activity->tokens, step->num_tokens);
    for (uint32_t unit = first; unit < last; unit++) {
        struct cluster c;
        if (!cluster_of(base, op, unit, &c))
            continue;
        uint64_t start_ns = traced_ns(step);
        const uint32_t *start = starts_of(routes_of(base, op)) + c.first / op->expert_neurons;
        for (uint32_t i = 0; i < c.num; i++)
            c.active[i] = c.first + i;
        c.work->num_active = c.num;
        c.work->num_late = 0;
        count_activity(&activity->predicted, (uint64_t)(start[1] - start[0]) * c.num);
        find_named(base, op, step, executor, &c, start_ns);
    }
}

void run_clusters(void *base, const struct step_op *op, const struct step_params *step,
                  struct executor_record *executor, uint32_t first, uint32_t last) {
    struct layer_activity *activity = at(base, op->activity);
    for (uint32_t unit = first; unit < last; unit++) {
        struct cluster c;
        if (!cluster_of(base, op, unit, &c))
            continue;
        if (op->flags & OPF_PREDICTED) {
            if (has_landed(base, op, &c))
                c.work->num_late = 0;
        } else {
            uint64_t start_ns = traced_ns(step);
            decide(base, op, step, &c);
            count_activity(&activity->gated, choose(base, op, step, &c));
            find_rows(base, op, step, executor, &c);
            if (start_ns)
                trace_cluster(base, executor, op->layer, c.index, TRACE_GC, start_ns,
                              monotonic_ns(), c.num, c.work->num_late);
        }
        if (c.work->num_late == 0)
            compute(base, op, step, executor, &c);
    }
}

void run_late_clusters(void *base, const struct step_op *op, const struct step_params *step,
                       struct executor_record *executor, uint32_t first, uint32_t last) {
    for (uint32_t unit = first; unit < last; unit++) {
        struct cluster c;
        if (cluster_of(base, op, unit, &c) && c.work->num_late != 0)
            compute(base, op, step, executor, &c);
    }
}
