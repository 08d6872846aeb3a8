/* Steps of a made-up model of three layers on the step board, shared by as many executor threads as
 * the argument says; prints the kernels' name and one hash over the residual stream after every
 * step. Who computes what changes no bit, nor does the CPU. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "kernels.h"

enum {
    LAYERS = 3, TOKENS = 4, STEPS = 40, COLS = 64, NEURONS = 160,
    HEADS = 4, KV_HEADS = 2, HEAD_DIM = 16, HEADS_PER_UNIT = 2,
    QKV_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM, ACT_BYTES = 40, KV_BLOCKS = STEPS * TOKENS / 32,
    POSITIONS = STEPS * TOKENS, ARENA_BYTES = 1 << 20, MAX_OPS = 64, SCRATCH_BYTES = 6144,
    MAX_THREADS = 8
};
#define SLICE_NS 1000000000ll
#define STEP_NS 60000000000ll

static void *base;
static uint64_t room = ARENA_HEADER_BYTES;      /* where the next region begins */
static uint32_t seed = 1;
static uint32_t generations[MAX_THREADS];

static void must(int holds, const char *promise)
{
    if (!holds) {
        printf("broken: %s\n", promise);
        exit(1);
    }
}

static uint64_t region(size_t num_bytes)
{
    const uint64_t offset = room;
    room += (num_bytes + 63) / 64 * 64;
    must(room <= ARENA_BYTES, "room in the arena");
    return offset;
}

static uint64_t random_floats(size_t n, float scale, float middle)
{
    const uint64_t offset = region(n * sizeof(float));
    float *x = at(base, offset);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = ((float)(int32_t)(seed >> 8 & 0xFFFF) / 32768.0f - 1.0f) * scale + middle;
    }
    return offset;
}

static uint64_t random_tiles(int type, size_t rows, size_t cols)
{
    const uint64_t after = room, source = random_floats(rows * cols, 0.2f, 0.0f);
    float *copy = malloc(rows * cols * sizeof *copy);
    must(copy != NULL, "memory");
    memcpy(copy, at(base, source), rows * cols * sizeof *copy);
    room = after;                               /* the floats make room for the tiles */
    const uint64_t tiles = region(rows / 32 * tile_bytes(type, cols));
    must(pack_tiles_from_f32(type, at(base, tiles), copy, rows, cols) == 0, "tiles");
    free(copy);
    return tiles;
}

struct buffers { uint64_t stream, acts, qkv, mixed, mixed_acts, hidden_acts, rope, program; };

static struct step_op *next_op(struct step_op **end, uint32_t kind, uint32_t unit, uint32_t after)
{
    struct step_op *op = (*end)++;
    *op = (struct step_op){.kind = kind, .unit = unit, .after = after, .cols = COLS, .eps = 1e-5f};
    return op;
}

static struct step_op *add_norm(struct step_op **end, const struct buffers *buffers, uint32_t after)
{
    struct step_op *op = next_op(end, OP_NORM, UNIT_CPU, after);
    op->flags = OPF_WRITE_ACTS;
    op->in = buffers->stream;
    op->in_stride = COLS * sizeof(float);
    op->weight = random_floats(COLS, 0.1f, 1.0f);
    op->out_acts = buffers->acts;
    op->out_acts_stride = COLS / 32 * ACT_BYTES;
    return op;
}

/* One product from acts of `cols` columns to `rows` floats at `out` */
static void add_matmul(struct step_op **end, uint32_t unit, uint32_t after, int type, uint64_t in,
                       uint32_t cols, uint64_t out, uint32_t out_floats, uint32_t rows)
{
    struct step_op *op = next_op(end, OP_MATMUL, unit, after);
    op->weight_type = (uint32_t)type;
    op->weight = random_tiles(type, rows, cols);
    op->cols = cols;
    op->rows = rows;
    op->in = in;
    op->in_stride = cols / 32 * ACT_BYTES;
    op->out = out;
    op->out_stride = out_floats * sizeof(float);
    op->flags = out_floats == COLS ? OPF_RESIDUAL : 0;
}

static void set_heads(struct step_op *op, const struct buffers *buffers, uint64_t kv)
{
    op->num_heads = HEADS;
    op->num_kv_heads = KV_HEADS;
    op->head_dim = op->rotary_dim = HEAD_DIM;
    op->heads_per_unit = HEADS_PER_UNIT;
    op->rope = buffers->rope;
    op->kv = kv;
    op->weight_type = STORAGE_F16; /* of keys and values */
    op->scale = 0.25f;
    op->in = buffers->qkv;
    op->in_stride = QKV_ROWS * sizeof(float);
}

static void add_attention(struct step_op **end, const struct buffers *buffers, uint32_t first)
{
    const uint64_t k = buffers->qkv + HEADS * HEAD_DIM * sizeof(float);
    const uint64_t v = k + KV_HEADS * HEAD_DIM * sizeof(float);
    const uint64_t kv = region(KV_BLOCKS * KV_HEADS * kv_block_bytes(STORAGE_F16, HEAD_DIM));
    add_matmul(end, UNIT_NPU, first + 1, STORAGE_Q4, buffers->acts, COLS, buffers->qkv, QKV_ROWS,
               COLS);
    add_matmul(end, UNIT_CPU, first + 1, STORAGE_Q8, buffers->acts, COLS, k, QKV_ROWS, 32);
    add_matmul(end, UNIT_CPU, first + 1, STORAGE_Q1, buffers->acts, COLS, v, QKV_ROWS, 32);
    struct step_op *op = next_op(end, OP_ROPE_KV, UNIT_CPU, first + 4);
    set_heads(op, buffers, kv);
    op->out = k;
    op->out_acts = v;
    op = next_op(end, OP_ATTENTION, UNIT_CPU, first + 5);
    set_heads(op, buffers, kv);
    op->cols = 3; /* together while their scores fit the scratch, later one by one */
    op->flags = OPF_WRITE_ACTS;
    op->out = buffers->mixed;
    op->out_stride = COLS * sizeof(float);
    op->out_acts = buffers->mixed_acts;
    op->out_acts_stride = COLS / 32 * ACT_BYTES;
    add_matmul(end, UNIT_NPU, first + 6, STORAGE_Q4, buffers->mixed_acts, COLS, buffers->stream,
               COLS, COLS);
}

static void add_layer(struct step_op **end, const struct buffers *buffers)
{
    const uint32_t first = (uint32_t)(*end - (struct step_op *)at(base, buffers->program));
    add_norm(end, buffers, first);
    add_attention(end, buffers, first);
    add_norm(end, buffers, first + 7);
    struct step_op *op = next_op(end, OP_FEED_FORWARD, UNIT_CPU, first + 8);
    op->activation = FEED_FORWARD_SILU;
    op->flags = OPF_WRITE_ACTS;
    op->weight_type = STORAGE_Q4;
    op->up_type = STORAGE_Q8;
    op->weight = random_tiles(STORAGE_Q4, NEURONS, COLS);
    op->up_weight = random_tiles(STORAGE_Q8, NEURONS, COLS);
    op->rows = NEURONS;
    op->in = buffers->acts;
    op->in_stride = COLS / 32 * ACT_BYTES;
    op->out_acts = buffers->hidden_acts;
    op->out_acts_stride = NEURONS / 32 * ACT_BYTES;
    add_matmul(end, UNIT_NPU, first + 9, STORAGE_Q8, buffers->hidden_acts, NEURONS,
               buffers->stream, COLS, COLS);
}

static struct buffers lay_out(uint32_t *num_ops)
{
    struct buffers buffers = {0};
    buffers.program = region(MAX_OPS * sizeof(struct step_op));
    buffers.stream = region(TOKENS * COLS * sizeof(float));
    buffers.acts = region(TOKENS * COLS / 32 * ACT_BYTES);
    buffers.qkv = region(TOKENS * QKV_ROWS * sizeof(float));
    buffers.mixed = region(TOKENS * COLS * sizeof(float));
    buffers.mixed_acts = region(TOKENS * COLS / 32 * ACT_BYTES);
    buffers.hidden_acts = region(TOKENS * NEURONS / 32 * ACT_BYTES);
    buffers.rope = random_floats(POSITIONS * HEAD_DIM, 1.0f, 0.0f);
    struct step_op *begin = at(base, buffers.program), *end = begin;
    for (int layer = 0; layer < LAYERS; layer++)
        add_layer(&end, &buffers);
    *num_ops = (uint32_t)(end - begin);
    must(*num_ops <= MAX_OPS, "room for the ops");
    return buffers;
}

/* A back end that takes every second op and then fails: the kernels compute all of it. */
static int32_t takes(void *handle, const struct step_op *op, uint32_t num_rows)
{
    uint32_t *asked = handle;
    must(op->unit == UNIT_NPU && num_rows == TOKENS, "an op that a back end may take");
    return (int32_t)(++*asked % 2);
}

static int32_t fails(void *handle, const struct step_op *op, uint32_t num_rows)
{
    must(handle != NULL && op != NULL && num_rows == TOKENS, "an op that was taken");
    return -1;
}

static void *serve(void *argument)
{
    uint32_t asked = 0;
    const struct backend_calls backend = {&asked, takes, fails};
    const uint32_t executor = (uint32_t)(uintptr_t)argument;
    int status = SERVE_SLICE;
    while (status == SERVE_SLICE)
        status = executor_serve(base, executor, generations[executor], SLICE_NS,
                                executor == 1 ? &backend : NULL);
    must(executor != 1 || asked > 0, "a back end that is asked");
    must(status == SERVE_STOPPED, "an executor that leaves when it is told to");
    return NULL;
}

/* Parameters that are alike for all steps; token t of step s has position s * TOKENS + t. */
static void set_params(struct step_params *params, const struct buffers *buffers, uint32_t num_ops)
{
    params->program = buffers->program;
    params->program_ops = num_ops;
    params->num_tokens = params->max_tokens = TOKENS;
    params->positions = region(TOKENS * sizeof(int32_t));
    params->block_tables = region(TOKENS * sizeof(int32_t));
    params->tables = region(KV_BLOCKS * sizeof(int32_t));
    params->table_stride = KV_BLOCKS;
    memset(at(base, params->block_tables), 0, TOKENS * sizeof(int32_t));
    for (int32_t block = 0; block < KV_BLOCKS; block++)
        ((int32_t *)at(base, params->tables))[block] = KV_BLOCKS - 1 - block;
}

/* FNV-1a (Fowler, Noll, Vo), 64 bits */
static uint64_t run_steps(const struct buffers *buffers)
{
    uint64_t hash = 14695981039346656037ull;
    struct step_params *params = step_params_at(base);
    for (int32_t step = 0; step < STEPS; step++) {
        const uint32_t seq = step_open(base);
        params->spin_limit = step % 2 ? 200 : 0;
        for (int32_t t = 0; t < TOKENS; t++)
            ((int32_t *)at(base, params->positions))[t] = step * TOKENS + t;
        const uint64_t after = room, fresh = random_floats(TOKENS * COLS, 1.0f, 0.0f);
        memcpy(at(base, buffers->stream), at(base, fresh), TOKENS * COLS * sizeof(float));
        room = after;
        step_ring(base, seq);
        must(step_wait(base, seq, STEP_NS) == STEP_DONE, "a step that ends");
        const uint8_t *bytes = at(base, buffers->stream);
        must(isfinite(*(const float *)at(base, buffers->stream)), "finite numbers");
        for (size_t i = 0; i < TOKENS * COLS * sizeof(float); i++)
            hash = (hash ^ bytes[i]) * 1099511628211ull;
    }
    return hash;
}

int main(int num_arguments, char **arguments)
{
    const uint32_t num_threads = num_arguments > 1 ? (uint32_t)atoi(arguments[1]) : 2;
    must(num_threads >= 2 && num_threads <= MAX_THREADS, "2 to 8 executors");
    base = aligned_alloc(4096, ARENA_BYTES);
    must(base != NULL, "memory for an arena");
    memset(base, 0, ARENA_BYTES);
    arena_format(base, ARENA_BYTES, region(board_bytes(MAX_OPS)), MAX_OPS, num_threads);
    uint32_t num_ops;
    const struct buffers buffers = lay_out(&num_ops);
    set_params(step_params_at(base), &buffers, num_ops);
    backend_set(base, 1);
    pthread_t threads[MAX_THREADS];
    for (uint32_t i = 0; i < num_threads; i++) {
        executor_at(base, i)->scratch = region(SCRATCH_BYTES);
        executor_at(base, i)->scratch_bytes = SCRATCH_BYTES;
        step_params_at(base)->num_parties[i % 2]++;
        generations[i] = executor_attach(base, i, i % 2, 1);
        must(pthread_create(&threads[i], NULL, serve, (void *)(uintptr_t)i) == 0, "a thread");
    }
    const uint64_t hash = run_steps(&buffers);
    arena_stop(base);
    for (uint32_t i = 0; i < num_threads; i++)
        pthread_join(threads[i], NULL);
    printf("%s %016" PRIx64 "\n", kernels_active(), hash);
    free(base);
    return 0;
}
