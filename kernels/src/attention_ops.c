/* Operations over the KV cache: keys and values stored, attention over what a token sees. */
#include "attention_ops.h"

#include <assert.h>

#include "blocks.h"
#include "kv_quants.h"

/* Tokens of a unit of attention. */
static uint32_t unit_tokens(const struct step_op *op) { return op->cols ? op->cols : 1; }

static uint32_t token_blocks(const struct step_op *op, uint32_t num_tokens)
{
    return (num_tokens + unit_tokens(op) - 1) / unit_tokens(op);
}

uint32_t attention_units(const struct step_op *op, const struct step_params *step) {
    return token_blocks(op, step->num_tokens) * (op->num_heads / op->heads_per_unit);
}

static const int32_t *block_table(void *base, const struct step_params *step, uint32_t token) {
    size_t table = (size_t)int_array(base, step->block_tables)[token];
    return int_array(base, step->tables) + table * step->table_stride;
}

/* Rotate one head; a norm of the head comes first where the family has one. */
static void rotate_head(void *base, const struct step_op *op, float *head, uint64_t norm,
                        size_t position) {
    if (norm)
        rmsnorm_f32(head, head, at(base, norm), op->head_dim, op->eps);
    const float *cos_row = (const float *)at(base, op->rope) + position * op->rotary_dim;
    rope_head((int)op->rope_layout, head, cos_row, cos_row + op->rotary_dim / 2, op->rotary_dim);
}

/* Keys and values that become quants are spread first, queries with them, results back after. */
static int is_spread(const struct step_op *op) { return op->weight_type != STORAGE_F16; }

/* One token of one head; of every eighth the executor sums up how far quants are off. */
static void store_kv(const struct step_op *op, void *kv_block, size_t slot, const float *k,
                     const float *v, struct executor_record *executor) {
    int type = (int)op->weight_type;
    kv_write(type, kv_block, slot, k, v, op->head_dim);
    if (type == STORAGE_F16 || slot % 8 != 7)
        return;
    double sums[2] = {executor->kv_error, executor->kv_square};
    kv_add_error(type, sums, kv_block, slot, k, v, op->head_dim);
    executor->kv_error = sums[0];
    executor->kv_square = sums[1];
}

/* in: q rows, out: k rows, out_acts: v rows, all with in_stride; bias, up_bias: q and k norms. */
void run_rope_kv(void *base, const struct step_op *op, const struct step_params *step,
                 struct executor_record *executor, uint32_t first, uint32_t last) {
    const int32_t *positions = int_array(base, step->positions);
    uint32_t heads = op->num_heads + op->num_kv_heads;
    size_t head_bytes = op->head_dim * sizeof(float);
    size_t block_bytes = kv_block_bytes((int)op->weight_type, op->head_dim);
    for (uint32_t u = first; u < last; u++) {
        uint32_t token = u / heads, head = u % heads;
        size_t position = (size_t)positions[token], row = token * op->in_stride;
        if (head < op->num_heads) {
            float *q = at(base, op->in + row + head * head_bytes);
            rotate_head(base, op, q, op->bias, position);
            if (is_spread(op))
                spread_values(q, op->head_dim, 1.0f);
            continue;
        }
        head -= op->num_heads;
        float *k = at(base, op->out + row + head * head_bytes);
        float *v = at(base, op->out_acts + row + head * head_bytes);
        rotate_head(base, op, k, op->up_bias, position);
        if (is_spread(op)) { /* H H = size: what attention gives is spread back without a factor */
            float scale = 1.0f / (float)kv_spread_size(op->head_dim);
            spread_values(k, op->head_dim, scale);
            spread_values(v, op->head_dim, scale);
        }
        size_t block = (size_t)block_table(base, step, token)[position / KV_BLOCK_TOKENS];
        void *kv_block = at(base, op->kv + (block * op->num_kv_heads + head) * block_bytes);
        store_kv(op, kv_block, position % KV_BLOCK_TOKENS, k, v, executor);
    }
}

/* Positions before the window of a token that sees num_positions. */
static size_t hidden_positions(const struct step_op *op, size_t num_positions) {
    return op->rows && num_positions > op->rows ? num_positions - op->rows : 0;
}

/* Tokens from `token` on, below `end`, that follow one another in one sequence and whose scores fit
 * the executor's scratch. */
static uint32_t consecutive(void *base, const struct step_op *op, const struct step_params *step,
                            const struct executor_record *executor, uint32_t token, uint32_t end) {
    const int32_t *positions = int_array(base, step->positions);
    const int32_t *tables = int_array(base, step->block_tables);
    size_t num_positions = (size_t)positions[token] + 1;
    num_positions -= hidden_positions(op, num_positions) & ~(size_t)(KV_BLOCK_TOKENS - 1);
    uint32_t count = 1;
    while (token + count < end && tables[token + count] == tables[token] &&
           positions[token + count] == positions[token] + (int32_t)count)
        count++;
    while (count > 1 && sizeof(float) * attention_block_scratch(
                            (size_t)count * op->heads_per_unit, op->head_dim,
                            num_positions + count - 1) > executor->scratch_bytes)
        count /= 2;
    return count;
}

/* Heads [head, head + heads_per_unit) of consecutive tokens. */
static void attend(void *base, const struct step_op *op, const struct step_params *step,
                   const struct executor_record *executor, uint32_t head, uint32_t token,
                   uint32_t count) {
    size_t num_positions = (size_t)int_array(base, step->positions)[token] + 1;
    size_t hidden = hidden_positions(op, num_positions), column = (size_t)head * op->head_dim;
    const int32_t *table = block_table(base, step, token) + hidden / KV_BLOCK_TOKENS;
    num_positions -= hidden / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS;
    int type = (int)op->weight_type;
    size_t block_bytes = kv_block_bytes(type, op->head_dim);
    size_t stride = op->num_kv_heads * block_bytes, out_stride = op->out_stride / sizeof(float);
    const void *kv = at(base, op->kv + head / (op->num_heads / op->num_kv_heads) * block_bytes);
    const float *q = (const float *)at(base, op->in + token * op->in_stride) + column;
    float *out = (float *)at(base, op->out + token * op->out_stride) + column;
    float *scratch = at(base, executor->scratch);
    if (count == 1) { /* reads keys and values as they are stored */
        size_t padded = (num_positions + KV_BLOCK_TOKENS - 1) & ~(size_t)(KV_BLOCK_TOKENS - 1);
        assert(op->heads_per_unit * padded * sizeof(float) <= executor->scratch_bytes);
        attention_heads(type, out, q, op->heads_per_unit, op->head_dim, kv, table, stride,
                        hidden % KV_BLOCK_TOKENS, num_positions, op->scale, op->eps, scratch);
    } else {
        attention_block(type, out, out_stride, q, op->in_stride / sizeof(float), count,
                        op->heads_per_unit, op->head_dim, kv, table, stride, num_positions,
                        op->rows, op->scale, op->eps, scratch);
    }
    for (uint32_t t = 0; is_spread(op) && t < count; t++)
        for (uint32_t h = 0; h < op->heads_per_unit; h++)
            spread_values(out + t * out_stride + h * op->head_dim, op->head_dim, 1.0f);
    for (uint32_t t = 0; op->flags & OPF_WRITE_ACTS && t < count; t++) {
        struct act_block *acts = at(base, op->out_acts + (token + t) * op->out_acts_stride);
        quantize_acts(acts + column / BLOCK_COLS, out + t * out_stride,
                      (size_t)op->heads_per_unit * op->head_dim);
    }
}

/* The last tokens, which see the most, come first: what is left for the end is short. */
void run_attention(void *base, const struct step_op *op, const struct step_params *step,
                   const struct executor_record *executor, uint32_t first, uint32_t last) {
    uint32_t groups = op->num_heads / op->heads_per_unit, size = unit_tokens(op);
    uint32_t blocks = token_blocks(op, step->num_tokens);
    for (uint32_t u = first; u < last; u++) {
        uint32_t token = (blocks - 1 - u / groups) * size;
        uint32_t end = step->num_tokens - token < size ? step->num_tokens : token + size;
        while (token < end) {
            uint32_t count = consecutive(base, op, step, executor, token, end);
            attend(base, op, step, executor, u % groups * op->heads_per_unit, token, count);
            token += count;
        }
    }
}
