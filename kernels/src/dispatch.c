/* Chooses one table of kernels a process, and the public functions that go through it. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "kernels_isa.h"
#include "kv_quants.h"

/* Best first. */
static const struct kernel_table *const available[] = {
#if defined(__x86_64__)
    &kernels_avx512,
    &kernels_avx2,
#elif defined(__aarch64__)
    &kernels_neon_i8mm,
    &kernels_neon_dotprod,
    &kernels_neon,
#endif
    &kernels_scalar,
};
#define NUM_AVAILABLE ((int)(sizeof available / sizeof available[0]))

static struct kernel_table active;

#define FILL(slot) (active.slot = active.slot ? active.slot : kernels_scalar.slot)

static void activate(const struct kernel_table *table)
{
    active = *table;
    FILL(quantize_acts);
    FILL(matmul_tiles);
    FILL(gather_row);
    FILL(dot_rows);
    FILL(axpy_rows);
    FILL(rmsnorm_f32);
    FILL(layernorm_f32);
    FILL(softcap_f32);
    FILL(add_f32);
    FILL(feed_forward_act);
    FILL(rope_head);
    FILL(exp_f32);
    FILL(softmax_f32);
    FILL(argmax_f32);
    FILL(top_k_f32);
    FILL(kv_write);
    FILL(attention_heads);
    FILL(attention_block);
}

static const struct kernel_table *find(const char *isa)
{
    for (int i = 0; i < NUM_AVAILABLE; i++)
        if (strcmp(available[i]->isa, isa) == 0)
            return available[i];
    return NULL;
}

int kernels_select(const char *isa)
{
    const char *forced = getenv("POLYNEURON_FORCE_ISA");
    if (!isa && forced && *forced)
        isa = forced;
    for (int i = 0; !isa; i++)      /* ends: the scalar table is last and always supported */
        if (available[i]->supported())
            isa = available[i]->isa;
    const struct kernel_table *table = find(isa);
    if (!table || !table->supported())
        return -1;
    activate(table);
    return 0;
}

/* The Python face selects first and raises; a C caller that did not gets one line and an abort. */
static const struct kernel_table *active_table(void)
{
    if (!active.isa && kernels_select(NULL) != 0) {
        fprintf(stderr, "POLYNEURON_FORCE_ISA=%s: not an instruction set of this CPU and build\n",
                getenv("POLYNEURON_FORCE_ISA"));
        abort();
    }
    return &active;
}

const char *kernels_active(void) { return active_table()->isa; }

const char *kernels_built(int index)
{
    return index >= 0 && index < NUM_AVAILABLE ? available[index]->isa : NULL;
}

int kernels_supported(const char *isa)
{
    const struct kernel_table *table = find(isa);
    return table && table->supported();
}

static void assert_cols(int type, size_t cols)
{
    assert(type >= STORAGE_F32 && type <= STORAGE_Q1);
    assert(type == STORAGE_F32 || type == STORAGE_F16 || cols % BLOCK_COLS == 0);
}

void quantize_acts(struct act_block *out, const float *x, size_t cols)
{
    assert(cols % BLOCK_COLS == 0);
    active_table()->quantize_acts(out, x, cols);
}

void matmul_tiles(int type, float *out, size_t out_stride, const void *w, size_t num_tiles,
                  size_t cols, const void *x, size_t num_tokens)
{
    assert_cols(type, cols);
    assert(num_tokens <= 1 || out_stride >= num_tiles * TILE_ROWS);
    active_table()->matmul_tiles(type, out, out_stride, w, num_tiles, cols, x, num_tokens);
}

void gather_row(int type, float *out, const void *w, size_t cols, size_t row)
{
    assert_cols(type, cols);
    active_table()->gather_row(type, out, w, cols, row);
}

void dot_rows(int type, float *out, const void *rows, size_t row_stride_bytes,
              const uint32_t *row_ids, size_t num_rows, size_t cols, const void *x)
{
    assert_cols(type, cols);
    assert(type != STORAGE_Q1);
    active_table()->dot_rows(type, out, rows, row_stride_bytes, row_ids, num_rows, cols, x);
}

void axpy_rows(int type, float *out, const void *rows, size_t row_stride_bytes,
               const uint32_t *row_ids, const float *coef, size_t num_rows, size_t cols)
{
    assert_cols(type, cols);
    assert(type != STORAGE_Q1);
    active_table()->axpy_rows(type, out, rows, row_stride_bytes, row_ids, coef, num_rows, cols);
}

void rmsnorm_f32(float *out, const float *x, const float *w, size_t n, float eps)
{
    active_table()->rmsnorm_f32(out, x, w, n, eps);
}

void layernorm_f32(float *out, const float *x, const float *w, const float *b, size_t n, float eps)
{
    active_table()->layernorm_f32(out, x, w, b, n, eps);
}

void softcap_f32(float *x, size_t n, float cap)
{
    assert(cap > 0.0f);
    active_table()->softcap_f32(x, n, cap);
}

void add_f32(float *out, const float *x, size_t n) { active_table()->add_f32(out, x, n); }

void feed_forward_act(int kind, float *out, const float *gate, const float *up, size_t n)
{
    assert(kind >= FEED_FORWARD_SILU && kind <= FEED_FORWARD_GELU);
    active_table()->feed_forward_act(kind, out, gate, up, n);
}

void rope_head(int layout, float *x, const float *cos_row, const float *sin_row, size_t rotary_dim)
{
    assert(rotary_dim % 2 == 0);
    active_table()->rope_head(layout, x, cos_row, sin_row, rotary_dim);
}

void exp_f32(float *out, const float *x, size_t n) { active_table()->exp_f32(out, x, n); }

void softmax_f32(float *x, size_t n) { active_table()->softmax_f32(x, n); }

size_t argmax_f32(const float *x, size_t n)
{
    assert(n > 0);
    return active_table()->argmax_f32(x, n);
}

void top_k_f32(uint32_t *out_ids, float *out_values, const float *x, size_t n, size_t k)
{
    assert(k <= n && n <= UINT32_MAX);
    active_table()->top_k_f32(out_ids, out_values, x, n, k);
}

void kv_write(int type, void *kv_block, size_t slot, const float *k, const float *v,
              size_t head_dim)
{
    assert(slot < KV_BLOCK_TOKENS);
    if (type == STORAGE_F16)
        active_table()->kv_write(kv_block, slot, k, v, head_dim);
    else
        kv_write_quants(type, kv_block, slot, k, v, head_dim);
}

void attention_heads(int type, float *out, const float *q, size_t num_queries, size_t head_dim,
                     const void *kv, const int32_t *block_table, size_t block_stride, size_t first,
                     size_t num_positions, float scale, float cap, float *scratch)
{
    assert(first < KV_BLOCK_TOKENS && first < num_positions);
    assert(kv_block_bytes(type, head_dim) <= block_stride);
    active_table()->attention_heads(type, out, q, num_queries, head_dim, kv, block_table,
                                    block_stride, first, num_positions, scale, cap, scratch);
}

size_t attention_block_scratch(size_t num_rows, size_t head_dim, size_t num_positions)
{
    const size_t rows = (num_rows + 3) & ~(size_t)3;    /* whole groups of queries */
    const size_t blocks = (num_positions + KV_BLOCK_TOKENS - 1) / KV_BLOCK_TOKENS;
    return KV_BLOCK_TOKENS * head_dim + rows * (1 + head_dim + KV_BLOCK_TOKENS * blocks);
}

void attention_block(int type, float *out, size_t out_stride, const float *q, size_t q_stride,
                     size_t num_tokens, size_t num_queries, size_t head_dim, const void *kv,
                     const int32_t *block_table, size_t block_stride, size_t num_positions,
                     size_t window, float scale, float cap, float *scratch)
{
    assert(num_tokens > 0 && num_queries > 0 && num_positions > 0);
    assert(kv_block_bytes(type, head_dim) <= block_stride);
    active_table()->attention_block(type, out, out_stride, q, q_stride, num_tokens, num_queries,
                                    head_dim, kv, block_table, block_stride, num_positions, window,
                                    scale, cap, scratch);
}
