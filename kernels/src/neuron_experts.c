/* Mixtures of experts: which experts a step's tokens chose, and what that means for the ops over
 * neuron-major rows. A layer's neurons are those of its experts, one expert after another, and a
 * cluster belongs to one expert. */
#include <assert.h>
#include <string.h>

#include "blocks.h"
#include "neuron_ops.h"

size_t routes_bytes(uint32_t num_experts, uint32_t num_used, uint32_t max_tokens) {
    size_t entries = (size_t)num_used * max_tokens;
    return sizeof(struct routes) + (2 * (size_t)num_experts + 1 + 4 * entries) * sizeof(uint32_t);
}

static uint32_t clusters_of_expert(const struct step_op *op) {
    return op->expert_neurons / op->cluster_neurons;
}

uint32_t expert_units(const struct step_op *op, const struct step_params *step) {
    uint32_t experts = op->layer_neurons / op->expert_neurons;
    uint32_t most = step->num_tokens * op->num_heads;
    return (most < experts ? most : experts) * clusters_of_expert(op);
}

uint32_t expert_cluster(void *base, const struct step_op *op, uint32_t unit) {
    const struct routes *routes = routes_of(base, op);
    uint32_t each = clusters_of_expert(op), nth = unit / each;
    return nth < routes->num_chosen ? chosen_of(routes)[nth] * each + unit % each : NO_CLUSTER;
}

/* values (n <= MAX_EXPERTS) -> 1 / (1 + e^-values) */
static void sigmoid(float *values, uint32_t n) {
    float power[MAX_EXPERTS];
    for (uint32_t i = 0; i < n; i++)
        values[i] = -values[i];
    exp_f32(power, values, n);
    for (uint32_t i = 0; i < n; i++)
        values[i] = 1.0f / (1.0f + power[i]);
}

/* The same, by their sum. */
static void sigmoid_shares(float *values, uint32_t n) {
    float sum = 0.0f;
    sigmoid(values, n);
    for (uint32_t i = 0; i < n; i++)
        sum += values[i];
    for (uint32_t i = 0; i < n; i++)
        values[i] /= sum;
}

/* The experts of one token, ascending, and their weights. */
static void choose_experts(const struct step_op *op, float *logits, uint32_t *expert,
                           float *weight) {
    uint32_t ids[MAX_EXPERTS], num = op->num_heads;
    float best[MAX_EXPERTS];
    int is_normalised = op->activation != ROUTE_SHARES;
    top_k_f32(ids, best, logits, op->rows, num);
    if (op->activation == ROUTE_SIGMOID)
        sigmoid_shares(best, num);
    else
        softmax_f32(is_normalised ? best : logits, is_normalised ? num : op->rows);
    for (uint32_t i = 0; i < num; i++) {
        uint32_t place = i;
        float share = is_normalised ? best[i] : logits[ids[i]];
        for (; place > 0 && expert[place - 1] > ids[i]; place--) {
            expert[place] = expert[place - 1];
            weight[place] = weight[place - 1];
        }
        expert[place] = ids[i];
        weight[place] = share;
    }
}

/* Entries of each expert counted -> start and chosen. */
static void place_entries(struct routes *routes, const uint32_t *count) {
    uint32_t *start = (uint32_t *)starts_of(routes), *chosen = (uint32_t *)chosen_of(routes);
    uint32_t next = 0, num = 0;
    for (uint32_t e = 0; e < routes->num_experts; e++) {
        start[e] = next;
        next += count[e];
        if (count[e] > 0)
            chosen[num++] = e;
    }
    start[routes->num_experts] = next;
    routes->num_chosen = num;
}

/* Of a streamed layer only chosen experts need to be read from now on. */
static void tell_reader(void *base, const struct step_op *op, const struct step_params *step) {
    if (!op->num_kv_heads)
        return;
    struct layer_stream *stream = at(base, step->stream);
    stream->routes = op->routes;
    __atomic_store_n(&stream->routed, step->stream_base + op->num_kv_heads, __ATOMIC_RELEASE);
}

/* in: logits (tokens, rows), which are overwritten. */
void run_route(void *base, const struct step_op *op, const struct step_params *step) {
    struct routes *routes = at(base, op->routes);
    uint32_t num = op->num_heads, tokens = step->num_tokens;
    uint32_t count[MAX_EXPERTS] = {0}, filled[MAX_EXPERTS];
    assert(op->rows <= MAX_EXPERTS && num <= op->rows);
    *routes = (struct routes){op->rows, num, 0, step->max_tokens * num};
    /* Until the entries have their places, a token's experts stand where its entries will. */
    uint32_t *of_token = (uint32_t *)entries_of_token(routes, 0);
    float chosen_weight[MAX_EXPERTS];
    uint32_t *expert = (uint32_t *)expert_of_entries(routes);
    uint32_t *token = (uint32_t *)token_of_entries(routes);
    float *weight = (float *)weight_of_entries(routes);
    for (uint32_t t = 0; t < tokens; t++) {
        choose_experts(op, at(base, op->in + t * op->in_stride), of_token + t * num,
                       chosen_weight);
        memcpy(at(base, op->in + t * op->in_stride), chosen_weight, num * sizeof(float));
        for (uint32_t i = 0; i < num; i++)
            count[of_token[t * num + i]]++;
    }
    place_entries(routes, count);
    memcpy(filled, starts_of(routes), op->rows * sizeof(uint32_t));
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t i = 0; i < num; i++) {
            uint32_t e = of_token[t * num + i], entry = filled[e]++;
            expert[entry] = e;
            token[entry] = t;
            weight[entry] = ((const float *)at(base, op->in + t * op->in_stride))[i];
            of_token[t * num + i] = entry;
        }
    tell_reader(base, op, step);
}

void run_gather(void *base, const struct step_op *op, uint32_t first, uint32_t last) {
    const uint32_t *token = token_of_entries(routes_of(base, op));
    for (uint32_t entry = first; entry < last; entry++)
        memcpy(at(base, op->out + entry * op->out_stride), input_row(base, op, token[entry]),
               op->in_stride);
}

/* weight: a vector (cols) f32, in: rows f32. */
void run_sigmoid(void *base, const struct step_op *op, uint32_t first, uint32_t last) {
    for (uint32_t t = first; t < last; t++) {
        float *share = at(base, op->out + t * op->out_stride);
        dot_rows(STORAGE_F32, share, at(base, op->weight), 0, NULL, 1, op->cols,
                 input_row(base, op, t));
        sigmoid(share, 1);
    }
}
