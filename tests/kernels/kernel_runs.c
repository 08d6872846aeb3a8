/* Runs every kernel on seeded data over odd sizes, in heap buffers of exactly the promised size,
 * and hands each result over (kernel_runs.h). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "kernel_runs.h"

static uint32_t seed;

static uint32_t next_random(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

static float next_float(void) { return (float)(int32_t)(next_random() % 4001) / 1000.0f - 2.0f; }

void *heap(size_t num_bytes)
{
    void *memory = malloc(num_bytes ? num_bytes : 1);
    if (!memory)
        abort();
    return memory;
}

static float *floats(size_t n)
{
    float *x = heap(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = next_float();
    return x;
}

void must(int holds, const char *promise)
{
    if (!holds) {
        printf("broken on %s: %s\n", kernels_active(), promise);
        exit(1);
    }
}

/* Random bytes as stored weights: quants of any value, scales and mins small finite halves. */
static uint8_t *random_weights(size_t num_bytes)
{
    uint8_t *bytes = heap(num_bytes);
    for (size_t i = 0; i < num_bytes; i++)
        bytes[i] = (uint8_t)next_random();
    return bytes;
}

static void tame_halves(uint8_t *at, size_t count)
{
    for (size_t i = 0; i < count; i++)
        at[2 * i + 1] = (uint8_t)((at[2 * i + 1] & 0x87) | 0x28);
}

static uint8_t *random_tiles(int type, size_t num_tiles, size_t cols)
{
    const size_t bytes = num_tiles * tile_bytes(type, cols);
    uint8_t *tiles = random_weights(bytes);
    if (type == STORAGE_F32)
        for (size_t i = 0; i < bytes / 4; i++)
            ((float *)tiles)[i] = next_float();
    else if (type == STORAGE_F16)
        tame_halves(tiles, bytes / 2);
    else
        for (size_t b = 0; b < num_tiles * (cols / 32); b++)
            tame_halves(tiles + b * tile_bytes(type, 32), type == STORAGE_Q4M ? 64 : 32);
    return tiles;
}

static uint8_t *random_stored_rows(int type, size_t num_rows, size_t cols)
{
    const size_t bytes = row_bytes(type, cols);
    const size_t quant_bytes = type == STORAGE_Q8 ? cols : type == STORAGE_F16 ? 0 : cols / 2;
    uint8_t *rows = random_weights(num_rows * bytes);
    for (size_t r = 0; r < num_rows; r++)
        if (type == STORAGE_F32)
            for (size_t c = 0; c < cols; c++)
                ((float *)(rows + r * bytes))[c] = next_float();
        else
            tame_halves(rows + r * bytes + quant_bytes, (bytes - quant_bytes) / 2);
    return rows;
}

static void run_rows(int type, size_t cols, const void *input)
{
    const uint32_t ids[] = {4, 0, 18, 7, 7, 1, 2, 3, 18, 9, 11};
    const size_t num_ids = sizeof ids / sizeof ids[0];
    uint8_t *rows = random_stored_rows(type, 19, cols);
    float *dots = heap(num_ids * sizeof *dots);
    dot_rows(type, dots, rows, row_bytes(type, cols), ids, num_ids, cols, input);
    take_result("dot_rows", dots, num_ids * sizeof *dots);
    float *coef = floats(num_ids), *sum = floats(cols);
    axpy_rows(type, sum, rows, row_bytes(type, cols), ids, coef, num_ids, cols);
    take_result("axpy_rows", sum, cols * sizeof *sum);
    free(coef);
    free(rows);
}

static void run_weights(int type, size_t cols, size_t num_tokens, size_t num_tiles)
{
    const int is_float = type == STORAGE_F32 || type == STORAGE_F16;
    float *x = floats(num_tokens * cols);
    struct act_block *acts = NULL;
    if (!is_float) {
        acts = heap(num_tokens * (cols / 32) * sizeof *acts);
        quantize_acts(acts, x, num_tokens * cols);
    }
    const void *input = is_float ? (const void *)x : (const void *)acts;
    uint8_t *tiles = random_tiles(type, num_tiles, cols);
    float *out = heap(num_tokens * 32 * num_tiles * sizeof *out);
    matmul_tiles(type, out, 32 * num_tiles, tiles, num_tiles, cols, input, num_tokens);
    take_result("matmul_tiles", out, num_tokens * 32 * num_tiles * sizeof *out);
    float *row = heap(cols * sizeof *row);
    gather_row(type, row, tiles, cols, 32 * num_tiles - 5);
    take_result("gather_row", row, cols * sizeof *row);
    if (type != STORAGE_Q1)
        run_rows(type, cols, input);
    if (acts)
        take_result("quantize_acts", acts, num_tokens * (cols / 32) * sizeof *acts);
    free(tiles);
    free(x);
}

static void run_floats(size_t n)
{
    float *x = floats(n), *w = floats(n);
    float *out = heap(n * sizeof *out);
    rmsnorm_f32(out, x, w, n, 1e-5f);
    take_result("rmsnorm_f32", out, n * sizeof *out);
    out = heap(n * sizeof *out);
    layernorm_f32(out, x, w, x, n, 1e-5f);
    take_result("layernorm_f32", out, n * sizeof *out);
    out = floats(n);
    softcap_f32(out, n, 0.7f);
    take_result("softcap_f32", out, n * sizeof *out);
    for (int kind = FEED_FORWARD_SILU; kind <= FEED_FORWARD_GELU; kind++) {
        const int has_gate = kind != FEED_FORWARD_RELU && kind != FEED_FORWARD_GELU;
        out = heap(n * sizeof *out);
        feed_forward_act(kind, out, has_gate ? x : NULL, w, n);
        take_result("feed_forward_act", out, n * sizeof *out);
    }
    for (int layout = ROPE_INTERLEAVED; layout <= ROPE_HALVES; layout++) {
        out = floats(n);
        rope_head(layout, out, x, w, n / 2 * 2);
        take_result("rope_head", out, n * sizeof *out);
    }
    out = heap(n * sizeof *out);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * 60.0f;
    exp_f32(out, out, n);
    take_result("exp_f32", out, n * sizeof *out);
    out = floats(n);
    softmax_f32(out, n);
    take_result("softmax_f32", out, n * sizeof *out);
    size_t *index = heap(sizeof *index);
    *index = argmax_f32(x, n);
    take_result("argmax_f32", index, sizeof *index);
    const size_t k = (n + 2) / 3;
    uint32_t *ids = heap(k * sizeof *ids);
    float *values = heap(k * sizeof *values);
    top_k_f32(ids, values, x, n, k);
    take_result("top_k_f32", ids, k * sizeof *ids);
    take_result("top_k_f32", values, k * sizeof *values);
    add_f32(x, w, n);
    take_result("add_f32", x, n * sizeof *x);
    free(w);
}

/* The last tokens, up to eleven of them, at once and one by one: the same bits. */
static void run_attention_block(int type, size_t head_dim, size_t num_queries,
                                size_t num_positions, size_t window, float cap,
                                const uint8_t *kv, const int32_t *table)
{
    const size_t num_tokens = num_positions < 11 ? num_positions : 11;
    const size_t first = num_positions + 1 - num_tokens, token_floats = num_queries * head_dim;
    const size_t stride = kv_block_bytes(type, head_dim), rows = num_tokens * num_queries;
    float *q = floats(num_tokens * token_floats);
    float *out = heap(num_tokens * token_floats * sizeof *out);
    float *alone = heap(token_floats * sizeof *alone);
    float *scratch = heap(attention_block_scratch(rows, head_dim, num_positions) * sizeof *scratch);
    attention_block(type, out, token_floats, q, token_floats, num_tokens, num_queries, head_dim,
                    kv, table, stride, first, window, 0.125f, cap, scratch);
    for (size_t t = 0; t < num_tokens; t++) {
        const size_t seen = first + t, hidden = window && seen > window ? seen - window : 0;
        attention_heads(type, alone, q + t * token_floats, num_queries, head_dim, kv,
                        table + hidden / 32, stride, hidden % 32, seen - hidden / 32 * 32, 0.125f,
                        cap, scratch);
        must(memcmp(alone, out + t * token_floats, token_floats * sizeof *out) == 0,
             "tokens together as one by one");
    }
    take_result("attention_block", out, num_tokens * token_floats * sizeof *out);
    free(scratch);
    free(alone);
    free(q);
}

static void run_attention(int type, size_t head_dim, size_t num_queries, size_t num_positions)
{
    const size_t num_blocks = (num_positions + 31) / 32;
    const size_t stride = kv_block_bytes(type, head_dim);
    uint8_t *kv = heap(num_blocks * stride);
    memset(kv, 0, num_blocks * stride);
    int32_t *table = heap(num_blocks * sizeof *table);
    for (size_t b = 0; b < num_blocks; b++)
        table[b] = (int32_t)(num_blocks - 1 - b);
    for (size_t p = 0; p < num_positions; p++) {
        float *k = floats(head_dim), *v = floats(head_dim);
        kv_write(type, kv + (size_t)table[p / 32] * stride, p % 32, k, v, head_dim);
        free(k);
        free(v);
    }
    float *q = floats(num_queries * head_dim);
    float *out = heap(num_queries * head_dim * sizeof *out);
    float *scratch = heap(num_queries * num_blocks * 32 * sizeof *scratch);
    attention_heads(type, out, q, num_queries, head_dim, kv, table, stride, 0, num_positions,
                    0.125f, 0.0f, scratch);
    take_result("attention_heads", out, num_queries * head_dim * sizeof *out);
    out = heap(num_queries * head_dim * sizeof *out);
    attention_heads(type, out, q, num_queries, head_dim, kv, table, stride,
                    num_positions < 30 ? num_positions - 1 : 29, num_positions, 0.125f, 0.5f,
                    scratch);
    take_result("attention_heads", out, num_queries * head_dim * sizeof *out);
    run_attention_block(type, head_dim, num_queries, num_positions, 0, 0.0f, kv, table);
    run_attention_block(type, head_dim, num_queries, num_positions, 5, 0.5f, kv, table);
    take_result("kv_write", kv, num_blocks * stride);
    free(scratch);
    free(q);
    free(table);
}

/* Packing is one code for all ISAs: run it in exact buffers, with a last tile that is not full. */
static void run_packing(void)
{
    static const int pairs[][3] = {      /* storage type, ggml type, bytes a 32 values */
        {STORAGE_Q4, 2, 18}, {STORAGE_Q4M, 3, 20}, {STORAGE_Q8, 6, 22},
        {STORAGE_Q8, 8, 34}, {STORAGE_F16, 1, 64}, {STORAGE_F32, 0, 128},
    };
    const size_t num_rows = 45, cols = 96;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        const int type = pairs[i][0];
        uint8_t *src = random_weights(num_rows * cols / 32 * (size_t)pairs[i][2]);
        uint8_t *tiles = heap(2 * tile_bytes(type, cols));
        uint8_t *rows = heap(num_rows * row_bytes(type, cols));
        must(pack_tiles(type, tiles, pairs[i][1], src, num_rows, cols) == 0
             && pack_rows(type, rows, pairs[i][1], src, num_rows, cols) == 0, "a packing");
        take_result("pack_tiles", tiles, 2 * tile_bytes(type, cols));
        take_result("pack_rows", rows, num_rows * row_bytes(type, cols));
        free(src);
    }
    static const int types[] = {STORAGE_Q8, STORAGE_Q4, STORAGE_F16, STORAGE_F32, STORAGE_Q1};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        float *src = floats(num_rows * cols);
        uint8_t *tiles = heap(2 * tile_bytes(types[i], cols));
        must(pack_tiles_from_f32(types[i], tiles, src, num_rows, cols) == 0, "a packing of f32");
        take_result("pack_tiles_from_f32", tiles, 2 * tile_bytes(types[i], cols));
        const size_t rows_bytes = types[i] == STORAGE_Q1 ? 0
            : num_rows * row_bytes(types[i], cols);
        uint8_t *rows = heap(rows_bytes);
        const int has_rows = pack_rows_from_f32(types[i], rows, src, num_rows, cols) == 0;
        must(has_rows == (types[i] != STORAGE_Q1), "rows of every type but q1");
        take_result("pack_rows_from_f32", rows, rows_bytes);
        free(src);
    }
}

/* Rows that end with the buffer and begin off every boundary, a last tile that is not full. */
static void run_tiles_from_rows(int type, size_t num_rows, size_t cols)
{
    const size_t bytes = row_bytes(type, cols), stride = bytes + 6;
    const size_t tiles_bytes = (num_rows + 31) / 32 * tile_bytes(type, cols);
    uint8_t *rows = random_weights(2 + (num_rows - 1) * stride + bytes);
    uint8_t *tiles = heap(tiles_bytes);
    must(pack_tiles_from_rows(type, tiles, rows + 2, stride, num_rows, cols) == 0,
         "tiles of rows");
    take_result("pack_tiles_from_rows", tiles, tiles_bytes);
    free(rows);
}

/* Rows that end with the buffer and begin at odd addresses. */
static void run_random_rows(size_t num_rows, size_t row_words)
{
    static const uint32_t row_ids[] = {4294967295u, 0, 7, 7, 1};
    const size_t stride = 8 * row_words + 3, bytes = 1 + (num_rows - 1) * stride + 8 * row_words;
    uint8_t *rows = heap(bytes);
    memset(rows, 0, bytes);
    random_rows(rows + 1, stride, row_ids, num_rows, row_words, 18446744073709551615u);
    take_result("random_rows", rows, bytes);
}

/* By the CPU's instruction and by tables, over lengths that begin and end off every boundary. */
static void run_checksum(size_t num_bytes)
{
    uint8_t *bytes = random_weights(num_bytes + 3);
    uint32_t *sums = heap(2 * sizeof *sums);
    sums[0] = crc32c(1, bytes + 3, num_bytes);
    sums[1] = crc32c_portable(1, bytes + 3, num_bytes);
    must(sums[0] == sums[1], "one checksum by instruction and by tables");
    take_result("crc32c", sums, 2 * sizeof *sums);
    free(bytes);
}

/* More columns than one pass of dot_rows has room for, on every ISA. */
static void run_long_rows(int type)
{
    enum { COLS = 257 * 32 };
    float *x = floats(COLS);
    struct act_block *acts = heap(COLS / 32 * sizeof *acts);
    quantize_acts(acts, x, COLS);
    const int is_float = type == STORAGE_F32 || type == STORAGE_F16;
    run_rows(type, COLS, is_float ? (const void *)x : (const void *)acts);
    free(acts);
    free(x);
}

void run_all_kernels(void)
{
    static const size_t quant_cols[] = {32, 64, 96, 512, 544, 1056};
    static const size_t float_cols[] = {1, 7, 31, 33, 100};
    static const size_t tokens[] = {1, 2, 3, 5, 8, 13};
    static const size_t lengths[] = {1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 255, 257, 576};
    static const size_t head_dims[] = {1, 16, 24, 63, 64, 80, 128};
    static const size_t positions[] = {1, 15, 31, 32, 33, 70};
    static const size_t checksum_bytes[] = {0, 1, 7, 8, 9, 63, 6143, 6144, 6145, 20000};
    seed = 1;
    for (int type = STORAGE_F32; type <= STORAGE_Q1; type++)
        for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++)
            run_weights(type,
                        type == STORAGE_F32 || type == STORAGE_F16 ? float_cols[i % 5]
                                                                   : quant_cols[i],
                        tokens[i], 1 + i % 3);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        run_floats(lengths[i]);
    for (size_t i = 0; i < sizeof head_dims / sizeof head_dims[0]; i++)
        for (size_t j = 0; j < sizeof positions / sizeof positions[0]; j++)
            run_attention(STORAGE_F16, head_dims[i], 1 + (i + j) % 9, positions[j]);
    for (size_t i = 32; i <= 160; i += 32)
        for (size_t j = 0; j < sizeof positions / sizeof positions[0]; j++) {
            run_attention(STORAGE_Q8, i, 1 + (i + j) % 9, positions[j]);
            run_attention(STORAGE_Q4, i, 1 + (i + j) % 9, positions[j]);
        }
    run_packing();
    for (size_t i = 1; i <= 5; i++)
        run_random_rows(i, 4 * i - 3);
    for (int type = STORAGE_F32; type <= STORAGE_Q4M; type++)
        for (size_t i = 0; i < sizeof quant_cols / sizeof quant_cols[0]; i++)
            run_tiles_from_rows(type, 1 + 19 * i,
                                type == STORAGE_F32 || type == STORAGE_F16 ? float_cols[i % 5]
                                                                           : quant_cols[i]);
    for (int type = STORAGE_F32; type <= STORAGE_Q4M; type++)
        run_long_rows(type);
    for (size_t i = 0; i < sizeof checksum_bytes / sizeof checksum_bytes[0]; i++)
        run_checksum(checksum_bytes[i]);
    run_extremes();
}
