/* Attention of consecutive tokens of one sequence: each block of keys and values becomes floats
 * once for all of them. A token sees one position more than the one before it, and one less at the
 * beginning of a window; each of its sums runs over its own positions in ascending order, as in
 * attention_heads: the same bits. */
#ifndef POLYNEURON_LANES_ATTENTION_BLOCK_H
#define POLYNEURON_LANES_ATTENTION_BLOCK_H

#include "lanes_attention.h"

static void load_keys_of(int type, float *keys, const void *kv_block, size_t head_dim)
{
    switch (type) {
    case STORAGE_Q8: load_keys(STORAGE_Q8, keys, kv_block, head_dim); break;
    case STORAGE_Q4: load_keys(STORAGE_Q4, keys, kv_block, head_dim); break;
    default: load_keys(STORAGE_F16, keys, kv_block, head_dim);
    }
}

static void load_values_of(int type, float *values, const void *kv_block, size_t head_dim,
                           size_t num_positions)
{
    switch (type) {
    case STORAGE_Q8: load_values(STORAGE_Q8, values, kv_block, head_dim, num_positions); break;
    case STORAGE_Q4: load_values(STORAGE_Q4, values, kv_block, head_dim, num_positions); break;
    default: load_values(STORAGE_F16, values, kv_block, head_dim, num_positions);
    }
}

/* Query rows: the heads of each token, token after token, up to a multiple of QUERY_GROUP. */
struct query_rows {
    int type;               /* that keys and values are stored as */
    size_t count, padded, heads, first_positions, window;
    float *kv;              /* (head_dim, 32) or (32, head_dim): the block at hand */
    float *sums;            /* (padded) of powers */
    float *rows;            /* (padded, head_dim): queries, then sums of values */
    float *scores;          /* (padded, call.stride) */
    struct attention_call call;
};

/* Positions that a row sees; a padding row as many as the last one. */
ALWAYS_INLINE size_t positions_of(const struct query_rows *rows, size_t row)
{
    return rows->first_positions + (row < rows->count ? row : rows->count - 1) / rows->heads;
}

/* The first of them: where a window begins. */
ALWAYS_INLINE size_t window_of(const struct query_rows *rows, size_t row)
{
    const size_t seen = positions_of(rows, row);
    return rows->window && seen > rows->window ? seen - rows->window : 0;
}

/* Of the positions of the block that begins at `position`, how many lie before `end`. */
ALWAYS_INLINE size_t within(size_t position, size_t end)
{
    return end <= position ? 0 : end - position < KV_BLOCK_TOKENS ? end - position
                                                                  : KV_BLOCK_TOKENS;
}

/* The first group with a row that sees `position`. */
ALWAYS_INLINE size_t first_group(const struct query_rows *rows, size_t position)
{
    if (position < rows->first_positions)
        return 0;
    const size_t row = (position + 1 - rows->first_positions) * rows->heads;
    return row / QUERY_GROUP * QUERY_GROUP;
}

/* The end of the groups with a row whose window has begun by the end of the block. */
ALWAYS_INLINE size_t last_group(const struct query_rows *rows, size_t position)
{
    size_t end = rows->padded;
    while (end > 0 && window_of(rows, end - QUERY_GROUP) >= position + KV_BLOCK_TOKENS)
        end -= QUERY_GROUP;
    return end;
}

static void score_rows(const struct query_rows *rows)
{
    const size_t head_dim = rows->call.head_dim, stride = rows->call.stride;
    for (size_t p = 0; p < rows->call.num_positions; p += KV_BLOCK_TOKENS) {
        load_keys_of(rows->type, rows->kv, block_of(&rows->call, p), head_dim);
        for (size_t r = first_group(rows, p), end = last_group(rows, p); r < end; r += QUERY_GROUP)
            score_block(QUERY_GROUP, KV_FLOATS, rows->scores + r * stride + p, stride,
                        rows->rows + r * head_dim, head_dim, (struct kv_part){rows->kv, NULL},
                        rows->call.scale);
    }
}

/* Columns [d, d + width * VF) of `count` rows from `row` on += positions [from, end) of the block
 * that begins at `position` */
ALWAYS_INLINE void add_columns_of(const int count, const int width, const struct query_rows *rows,
                                  size_t row, size_t position, size_t from, size_t end, size_t d)
{
    const size_t head_dim = rows->call.head_dim, stride = rows->call.stride;
    float *sums = rows->rows + row * head_dim + d;
    vf acc[QUERY_GROUP][4];
    for (int g = 0; g < count; g++)
        for (int j = 0; j < width; j++)
            acc[g][j] = load(sums + (size_t)g * head_dim + j * VF);
    add_values(count, width, KV_FLOATS, acc, rows->scores + row * stride + position, stride,
               (struct kv_part){rows->kv, NULL}, d, head_dim, from, end);
    for (int g = 0; g < count; g++)
        for (int j = 0; j < width; j++)
            store(sums + (size_t)g * head_dim + j * VF, acc[g][j]);
}

ALWAYS_INLINE void add_positions(const int count, const struct query_rows *rows, size_t row,
                                 size_t position, size_t from, size_t end)
{
    const size_t head_dim = rows->call.head_dim;
    size_t d = 0;
    for (; d + 4 * VF <= head_dim; d += 4 * VF)
        add_columns_of(count, 4, rows, row, position, from, end, d);
    for (; d + VF <= head_dim; d += VF)
        add_columns_of(count, 1, rows, row, position, from, end, d);
    for (; d < head_dim; d++)
        for (int g = 0; g < count; g++) {
            float *sum = rows->rows + (row + (size_t)g) * head_dim + d;
            const float *weights = rows->scores + (row + (size_t)g) * rows->call.stride + position;
            for (size_t p = from; p < end; p++)
                *sum = *sum + weights[p] * rows->kv[p * head_dim + d];
        }
}

/* One block of values for a group of rows. What all of them see is added together, what only some
 * see row by row: a weight of zero would not do, since a value may be infinite. */
static void add_values_of_group(const struct query_rows *rows, size_t row, size_t position)
{
    const size_t last = row + QUERY_GROUP - 1;
    const size_t end = within(position, positions_of(rows, row));
    size_t from = within(position, window_of(rows, last));
    from = from < end ? from : end;
    for (size_t i = row; i <= last && i < rows->count; i++) {
        const size_t own = within(position, window_of(rows, i));
        if (own < from)
            add_positions(1, rows, i, position, own, from);
    }
    if (from < end)
        add_positions(QUERY_GROUP, rows, row, position, from, end);
    for (size_t i = row; i <= last && i < rows->count; i++) {
        const size_t own = within(position, window_of(rows, i));
        const size_t seen = within(position, positions_of(rows, i));
        if (seen > end)
            add_positions(1, rows, i, position, own > end ? own : end, seen);
    }
}

static void add_value_rows(const struct query_rows *rows)
{
    memset(rows->rows, 0, rows->padded * rows->call.head_dim * sizeof *rows->rows);
    for (size_t p = 0; p < rows->call.num_positions; p += KV_BLOCK_TOKENS) {
        load_values_of(rows->type, rows->kv, block_of(&rows->call, p), rows->call.head_dim,
                       positions_in_block(&rows->call, p));
        for (size_t r = first_group(rows, p), end = last_group(rows, p); r < end; r += QUERY_GROUP)
            add_values_of_group(rows, r, p);
    }
}

/* Scores -> powers, and their sums. */
static void weigh_rows(const struct query_rows *rows)
{
    for (size_t r = 0; r < rows->count; r++) {
        float *scores = rows->scores + r * rows->call.stride;
        limit_scores(scores, window_of(rows, r), positions_of(rows, r), rows->call.cap);
        rows->sums[r] = exp_and_sum_lanes(scores, positions_of(rows, r));
    }
}

static void attention_block_lanes(int type, float *out, size_t out_stride, const float *q,
                                  size_t q_stride, size_t num_tokens, size_t num_queries,
                                  size_t head_dim, const void *kv, const int32_t *block_table,
                                  size_t block_stride, size_t num_positions, size_t window,
                                  float scale, float cap, float *scratch)
{
    const size_t last = num_positions + num_tokens - 1, token_floats = num_queries * head_dim;
    struct query_rows rows = {
        .count = num_tokens * num_queries, .heads = num_queries, .first_positions = num_positions,
        .window = window, .type = type,
        .call = {.kv = kv, .block_table = block_table, .block_stride = block_stride,
                 .head_dim = head_dim, .num_positions = last, .scale = scale, .cap = cap,
                 .stride = (last + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS * KV_BLOCK_TOKENS},
    };
    rows.padded = (rows.count + QUERY_GROUP - 1) / QUERY_GROUP * QUERY_GROUP;
    rows.kv = scratch;
    rows.sums = rows.kv + KV_BLOCK_TOKENS * head_dim;
    rows.rows = rows.sums + rows.padded;
    rows.scores = rows.rows + rows.padded * head_dim;
    for (size_t t = 0; t < num_tokens; t++)
        memcpy(rows.rows + t * token_floats, q + t * q_stride, token_floats * sizeof *q);
    memset(rows.rows + rows.count * head_dim, 0,
           (rows.padded - rows.count) * head_dim * sizeof *q);
    score_rows(&rows);
    weigh_rows(&rows);
    add_value_rows(&rows);
    for (size_t r = 0; r < rows.count; r++) {
        float *to = out + r / num_queries * out_stride + r % num_queries * head_dim;
        for (size_t d = 0; d < head_dim; d++)
            to[d] = rows.rows[r * head_dim + d] / rows.sums[r];
    }
}

#endif
