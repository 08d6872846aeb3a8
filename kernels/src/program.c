/* The step program's operations: how an op is cut into units, and the work of some of them. An op's
 * units are independent and each writes its own bytes, so who runs them changes no result. */
#include <assert.h>
#include <string.h>

#include "attention_ops.h"
#include "blocks.h"
#include "board.h"
#include "neuron_ops.h"

#define GROUP_MAX_TOKENS 128           /* bounds the stack buffers below */
#define GROUP_ACT_BYTES (384u * 1024u) /* activations of a group stay in the second-level cache */

/* Tokens that share one pass over a tile. */
static uint32_t group_tokens(const struct step_op *op) {
    uint64_t fit = GROUP_ACT_BYTES / (op->in_stride ? op->in_stride : 1);
    if (fit >= GROUP_MAX_TOKENS)
        return GROUP_MAX_TOKENS;
    return fit < 8 ? 8 : (uint32_t)(fit & ~(uint64_t)7);
}

static uint32_t num_rows(const struct step_op *op, const struct step_params *step) {
    return op->flags & OPF_LOGIT_ROWS ? step->num_logit_rows : step->num_tokens;
}

static uint32_t num_tiles(const struct step_op *op)
{
    return (op->rows + TILE_ROWS - 1) / TILE_ROWS;
}

uint32_t op_num_units(const struct step_op *op, const struct step_params *step) {
    uint32_t rows = num_rows(op, step);
    uint32_t group = group_tokens(op);
    switch (op->kind) {
    case OP_MATMUL:
    case OP_FEED_FORWARD:
        return num_tiles(op) * ((rows + group - 1) / group);
    case OP_ROPE_KV:
        return rows * (op->num_heads + op->num_kv_heads);
    case OP_ATTENTION:
        return attention_units(op, step);
    case OP_CLUSTERS:
    case OP_LATE_CLUSTERS:
    case OP_MERGE:
    case OP_ROWS_UP:
    case OP_PREDICT:
    case OP_AWAIT_ROWS:
    case OP_ROUTE:
    case OP_EXPERTS:
    case OP_GATHER:
        return neuron_op_units(op, step);
    default:
        return rows;
    }
}

static int takes_acts(uint32_t weight_type) {
    return weight_type != STORAGE_F32 && weight_type != STORAGE_F16;
}

void matmul_group(const struct step_op *op, int type, float *out, size_t out_stride,
                  const void *weight, size_t tiles, const char *x, size_t tokens) {
    int dense = takes_acts((uint32_t)type) || op->in_stride == op->cols * sizeof(float);
    size_t packed = op->cols / BLOCK_COLS * sizeof(struct act_block);
    assert(!takes_acts((uint32_t)type) || tokens == 1 || op->in_stride == packed);
    (void)packed;
    if (dense) {
        matmul_tiles(type, out, out_stride, weight, tiles, op->cols, x, tokens);
        return;
    }
    for (size_t t = 0; t < tokens; t++)
        matmul_tiles(type, out + t * out_stride, out_stride, weight, tiles, op->cols,
                     x + t * op->in_stride, 1);
}

/* Rows times the factors of their tokens, where an op has them. */
static void scale_rows(void *base, const struct step_op *op, float *rows, size_t n, uint32_t token,
                       uint32_t num_tokens) {
    const float *factors = (const float *)at(base, op->up_bias) + token;
    for (uint32_t t = 0; op->up_bias && t < num_tokens; t++)
        for (size_t i = 0; i < n; i++)
            rows[t * n + i] *= factors[t];
}

static void add_bias(float *out, size_t out_stride, const float *bias, size_t n, size_t tokens) {
    for (size_t t = 0; t < tokens; t++)
        add_f32(out + t * out_stride, bias, n);
}

struct tile_span { /* units [first, last) of one token group */
    uint32_t tile;
    uint32_t num_tiles;
    uint32_t token;
    uint32_t num_tokens;
};

/* The longest run of tiles from unit `first` in one group, at most max_tiles of them. */
static struct tile_span next_span(const struct step_op *op, const struct step_params *step,
                                  uint32_t first, uint32_t last) {
    uint32_t tiles = num_tiles(op), group = group_tokens(op), rows = num_rows(op, step);
    struct tile_span span = {first % tiles, 0, first / tiles * group, 0};
    span.num_tokens = rows - span.token < group ? rows - span.token : group;
    uint32_t room = GROUP_MAX_TOKENS / span.num_tokens;
    span.num_tiles = tiles - span.tile;
    if (span.num_tiles > last - first)
        span.num_tiles = last - first;
    if (span.num_tiles > room)
        span.num_tiles = room;
    return span;
}

static void run_matmul(void *base, const struct step_op *op, const struct step_params *step,
                       uint32_t first, uint32_t last) {
    float sums[GROUP_MAX_TOKENS * TILE_ROWS];
    size_t bytes = tile_bytes((int)op->weight_type, op->cols);
    while (first < last) {
        struct tile_span span = next_span(op, step, first, last);
        const char *x = at(base, op->in + span.token * op->in_stride);
        const char *weight = at(base, op->weight + span.tile * bytes);
        size_t n = (size_t)span.num_tiles * TILE_ROWS, row = (size_t)span.tile * TILE_ROWS;
        size_t out_stride = op->out_stride / sizeof(float);
        float *out = (float *)at(base, op->out + span.token * op->out_stride) + row;
        const float *bias = op->bias ? (const float *)at(base, op->bias) + row : NULL;
        int residual = (op->flags & OPF_RESIDUAL) != 0;
        float *into = residual ? sums : out;
        size_t into_stride = residual ? n : out_stride;
        matmul_group(op, (int)op->weight_type, into, into_stride, weight, span.num_tiles, x,
                     span.num_tokens);
        if (bias)
            add_bias(into, into_stride, bias, n, span.num_tokens);
        for (uint32_t t = 0; op->eps > 0.0f && t < span.num_tokens; t++)
            softcap_f32(into + t * into_stride, n, op->eps);
        if (residual)
            scale_rows(base, op, sums, n, span.token, span.num_tokens);
        for (uint32_t t = 0; residual && t < span.num_tokens; t++)
            add_f32(out + t * out_stride, sums + t * n, n);
        first += span.num_tiles;
    }
}

static void finish_neurons(void *base, const struct step_op *op, const float *gate, const float *up,
                           uint32_t tile, uint32_t token) {
    float active[TILE_ROWS];
    feed_forward_act((int)op->activation, active, gate, up, TILE_ROWS);
    if (op->flags & OPF_WRITE_ACTS) {
        struct act_block *acts = at(base, op->out_acts + token * op->out_acts_stride);
        quantize_acts(&acts[tile], active, TILE_ROWS);
    }
    if (op->flags & OPF_WRITE_F32) {
        float *out = at(base, op->out + token * op->out_stride);
        memcpy(out + (size_t)tile * TILE_ROWS, active, sizeof active);
    }
}

static void run_feed_forward(void *base, const struct step_op *op, const struct step_params *step,
                             uint32_t first, uint32_t last) {
    float gate[GROUP_MAX_TOKENS * TILE_ROWS], up[GROUP_MAX_TOKENS * TILE_ROWS];
    size_t gate_bytes = tile_bytes((int)op->weight_type, op->cols);
    size_t up_bytes = tile_bytes((int)op->up_type, op->cols);
    while (first < last) {
        struct tile_span span = next_span(op, step, first, last);
        size_t n = (size_t)span.num_tiles * TILE_ROWS, row = (size_t)span.tile * TILE_ROWS;
        const char *x = at(base, op->in + span.token * op->in_stride);
        matmul_group(op, (int)op->up_type, up, n, at(base, op->up_weight + span.tile * up_bytes),
                     span.num_tiles, x, span.num_tokens);
        if (op->up_bias)
            add_bias(up, n, (const float *)at(base, op->up_bias) + row, n, span.num_tokens);
        if (op->weight)
            matmul_group(op, (int)op->weight_type, gate, n,
                         at(base, op->weight + span.tile * gate_bytes), span.num_tiles, x,
                         span.num_tokens);
        if (op->weight && op->bias)
            add_bias(gate, n, (const float *)at(base, op->bias) + row, n, span.num_tokens);
        for (uint32_t t = 0; t < span.num_tokens; t++)
            for (uint32_t i = 0; i < span.num_tiles; i++)
                finish_neurons(base, op, gate + t * n + i * TILE_ROWS, up + t * n + i * TILE_ROWS,
                               span.tile + i, span.token + t);
        first += span.num_tiles;
    }
}

/* up_weight: learned positions, whose row op->rows belongs to position 0. */
static void run_embed(void *base, const struct step_op *op, const struct step_params *step,
                      const struct executor_record *executor, uint32_t first, uint32_t last) {
    const int32_t *ids = int_array(base, step->token_ids);
    const int32_t *positions = int_array(base, step->positions);
    for (uint32_t t = first; t < last; t++) {
        float *out = at(base, op->out + t * op->out_stride), *learned = at(base, executor->scratch);
        gather_row((int)op->weight_type, out, at(base, op->weight), op->cols, (size_t)ids[t]);
        for (uint32_t i = 0; op->scale > 0.0f && i < op->cols; i++)
            out[i] *= op->scale;
        if (!op->up_weight)
            continue;
        gather_row((int)op->up_type, learned, at(base, op->up_weight), op->cols,
                   (size_t)positions[t] + op->rows);
        add_f32(out, learned, op->cols);
    }
}

static void run_norm(void *base, const struct step_op *op, const struct step_params *step,
                     const struct executor_record *executor, uint32_t first, uint32_t last) {
    const int32_t *rows = int_array(base, step->logit_rows);
    for (uint32_t u = first; u < last; u++) {
        uint64_t source = op->flags & OPF_LOGIT_ROWS ? (uint64_t)rows[u] : u;
        float *normed = op->flags & OPF_WRITE_F32 ? at(base, op->out + u * op->out_stride)
                                                  : at(base, executor->scratch);
        const float *x = at(base, op->in + source * op->in_stride), *weight = at(base, op->weight);
        if (op->flags & OPF_LAYER_NORM)
            layernorm_f32(normed, x, weight, at(base, op->bias), op->cols, op->eps);
        else
            rmsnorm_f32(normed, x, weight, op->cols, op->eps);
        if (op->flags & OPF_RESIDUAL)
            add_f32(at(base, op->out + u * op->out_stride), normed, op->cols);
        if (op->flags & OPF_WRITE_ACTS)
            quantize_acts(at(base, op->out_acts + u * op->out_acts_stride), normed, op->cols);
    }
}

static void run_quantize(void *base, const struct step_op *op, uint32_t first, uint32_t last) {
    for (uint32_t t = first; t < last; t++) {
        float *x = at(base, op->in + t * op->in_stride);
        for (uint32_t i = 0; op->flags & OPF_RELU && i < op->cols; i++)
            x[i] = x[i] < 0.0f ? 0.0f : x[i]; /* a NaN stays */
        quantize_acts(at(base, op->out_acts + t * op->out_acts_stride), x, op->cols);
    }
}

void op_run(void *base, const struct step_op *op, const struct step_params *step,
            struct executor_record *executor, uint32_t first, uint32_t last) {
    switch (op->kind) {
    case OP_EMBED:
        run_embed(base, op, step, executor, first, last);
        break;
    case OP_NORM:
        run_norm(base, op, step, executor, first, last);
        break;
    case OP_MATMUL:
        run_matmul(base, op, step, first, last);
        break;
    case OP_ROPE_KV:
        run_rope_kv(base, op, step, executor, first, last);
        break;
    case OP_ATTENTION:
        run_attention(base, op, step, executor, first, last);
        break;
    case OP_QUANTIZE:
        run_quantize(base, op, first, last);
        break;
    case OP_SIGMOID:
        run_sigmoid(base, op, first, last);
        break;
    case OP_FEED_FORWARD:
        run_feed_forward(base, op, step, first, last);
        break;
    case OP_CLUSTERS:
    case OP_LATE_CLUSTERS:
    case OP_MERGE:
    case OP_ROWS_UP:
    case OP_ROWS_DOWN:
    case OP_PREDICT:
    case OP_AWAIT_ROWS:
    case OP_ROUTE:
    case OP_EXPERTS:
    case OP_GATHER:
        neuron_op_run(base, op, step, executor, first, last);
        break;
    default:
        assert(!"unknown op");
    }
}
