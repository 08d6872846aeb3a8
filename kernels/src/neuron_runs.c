/* Feed forward over neuron-major rows for many tokens: runs of rows as tiles, then their down rows
 * token by token, in the order of neuron_ops.h. */
#include <assert.h>
#include <string.h>

#include "blocks.h"
#include "neuron_ops.h"

#define GROUP_TOKENS 128 /* tokens that share one pass over a tile: bounds the stack buffers */

/* Rows [row, row + num) of the run as a tile in scratch. */
static const void *tile_of_rows(void *base, const struct step_op *op, uint32_t type,
                                uint32_t row_offset, uint32_t row, uint32_t num, void *tile) {
    const char *rows = at(base, op->up_weight + (uint64_t)row * op->row_stride + row_offset);
    int packed = pack_tiles_from_rows((int)type, tile, rows, op->row_stride, num, op->cols);
    assert(packed == 0);
    (void)packed;
    return tile;
}

static const void *deciding_tile(void *base, const struct step_op *op, uint32_t row, uint32_t num,
                                 void *tile) {
    if (!(op->flags & OPF_GATE_TILES))
        return tile_of_rows(base, op, op->weight_type, op->gate_row, row, num, tile);
    size_t bytes = tile_bytes((int)op->weight_type, op->cols);
    return at(base, op->weight + (op->first_neuron + row) / TILE_ROWS * bytes);
}

/* Where the activation of a neuron stands in a row of hidden values: a row is a token's, of all
 * neurons, or an entry's, of its expert's. */
static uint32_t hidden_column(const struct step_op *op, uint32_t neuron) {
    return op->routes ? neuron % op->expert_neurons : neuron;
}

/* A deciding and an up tile over a group of tokens, or of entries -> activations. */
static void activate_group(void *base, const struct step_op *op, const void *gate_tile,
                           const void *up_tile, uint32_t neuron, uint32_t token, uint32_t tokens) {
    float gate[GROUP_TOKENS * TILE_ROWS], up[GROUP_TOKENS * TILE_ROWS];
    uint32_t real = op->first_neuron + op->rows - neuron;
    uint32_t n = real < TILE_ROWS ? real : TILE_ROWS;
    const float *weight = op->routes ? weight_of_entries(routes_of(base, op)) + token : NULL;
    const char *x = input_row(base, op, token);
    matmul_group(op, (int)op->weight_type, gate, TILE_ROWS, gate_tile, 1, x, tokens);
    if (up_tile)
        matmul_group(op, (int)op->up_type, up, TILE_ROWS, up_tile, 1, x, tokens);
    for (uint32_t t = 0; t < tokens; t++) {
        float *g = gate + t * TILE_ROWS, *u = up + t * TILE_ROWS;
        if (op->bias)
            add_f32(g, (const float *)at(base, op->bias) + neuron, n);
        if (up_tile && op->up_bias)
            add_f32(u, (const float *)at(base, op->up_bias) + neuron, n);
        float *hidden = hidden_row(base, op, token + t) + hidden_column(op, neuron);
        activate(op, hidden, g, u, n);
        for (uint32_t i = 0; weight && i < n; i++)
            hidden[i] *= weight[t];
    }
}

/* The input rows that meet a tile of neurons: those of all tokens, or of its expert's entries. */
static void rows_of_tile(void *base, const struct step_op *op, const struct step_params *step,
                         uint32_t neuron, uint32_t *first, uint32_t *last) {
    *first = 0;
    *last = step->num_tokens;
    if (!op->routes)
        return;
    const uint32_t *start = starts_of(routes_of(base, op)) + neuron / op->expert_neurons;
    *first = start[0];
    *last = start[1];
}

void run_rows_up(void *base, const struct step_op *op, const struct step_params *step,
                 const struct executor_record *executor, uint32_t first, uint32_t last) {
    size_t gate_bytes = tile_bytes((int)op->weight_type, op->cols);
    char *scratch = at(base, executor->scratch);
    for (uint32_t unit = first; unit < last; unit++) {
        uint32_t row = unit * TILE_ROWS, begin, end;
        rows_of_tile(base, op, step, op->first_neuron + row, &begin, &end);
        if (begin == end)
            continue;
        uint32_t num = op->rows - row < TILE_ROWS ? op->rows - row : TILE_ROWS;
        const void *gate = deciding_tile(base, op, row, num, scratch), *up = NULL;
        if (has_gate(op))
            up = tile_of_rows(base, op, op->up_type, op->up_row, row, num, scratch + gate_bytes);
        for (uint32_t token = begin; token < end; token += GROUP_TOKENS) {
            uint32_t rest = end - token;
            activate_group(base, op, gate, up, op->first_neuron + row, token,
                           rest < GROUP_TOKENS ? rest : GROUP_TOKENS);
        }
    }
}

/* One cluster's neurons for one row of hidden values -> partial (cols). */
static void sum_cluster(void *base, const struct step_op *op, uint32_t first, uint32_t num,
                        const float *hidden, float *partial) {
    float coef[MAX_CLUSTER_NEURONS];
    uint32_t place[MAX_CLUSTER_NEURONS];
    memcpy(coef, hidden + hidden_column(op, first), num * sizeof *coef);
    for (uint32_t i = 0; i < num; i++)
        place[i] = first + i - op->first_neuron;
    sum_down(base, op, partial, coef, place, num);
}

/* Clusters of neurons [first, end) for one row of hidden values, in order -> total (cols). */
static void add_clusters(void *base, const struct step_op *op, uint32_t first, uint32_t end,
                         uint32_t row, float *partial, float *total) {
    while (first < end) {
        uint32_t num = end - first < op->cluster_neurons ? end - first : op->cluster_neurons;
        sum_cluster(base, op, first, num, at(base, op->in + row * op->in_stride), partial);
        add_f32(total, partial, op->cols);
        first += num;
    }
}

/* The same for a token's experts, as far as they are in the run. */
static void add_experts(void *base, const struct step_op *op, uint32_t token, float *partial,
                        float *total) {
    const struct routes *routes = routes_of(base, op);
    uint32_t run_end = op->first_neuron + op->rows;
    for (uint32_t i = 0; i < routes->num_used; i++) {
        uint32_t entry = entries_of_token(routes, token)[i];
        uint32_t first = expert_of_entries(routes)[entry] * op->expert_neurons;
        uint32_t end = first + op->expert_neurons;
        first = first < op->first_neuron ? op->first_neuron : first;
        add_clusters(base, op, first, end < run_end ? end : run_end, entry, partial, total);
    }
}

void run_rows_down(void *base, const struct step_op *op, const struct executor_record *executor,
                   uint32_t first, uint32_t last) {
    float *partial = at(base, executor->scratch);
    for (uint32_t t = first; t < last; t++) {
        float *total = (float *)at(base, op->partials) + (size_t)t * op->cols;
        if (op->flags & OPF_FIRST_ROWS)
            memset(total, 0, op->cols * sizeof *total);
        if (op->routes)
            add_experts(base, op, t, partial, total);
        else
            add_clusters(base, op, op->first_neuron, op->first_neuron + op->rows, t, partial,
                         total);
        if (!(op->flags & OPF_LAST_ROWS))
            continue;
        if (op->bias)
            add_f32(total, at(base, op->bias), op->cols);
        add_f32(at(base, op->out + t * op->out_stride), total, op->cols);
    }
}
