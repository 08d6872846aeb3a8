/* Kernels at the ends of their ranges: infinities, NaN, subnormals, every half, and quants that
 * fill the integers they are summed in. The bits of a NaN that arithmetic makes differ between CPUs
 * and are no part of the contract: every NaN is handed over as the same one. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "blocks.h"
#include "kernel_runs.h"

#define NUM_SPECIALS 48
#define NUM_HALVES 65536

static const float magnitudes[NUM_SPECIALS / 2] = {
    0.0f, 1e-45f, 1e-40f, 1.17549421e-38f, 1.17549435e-38f, 7.5231628e-37f, 7.5231638e-37f,
    5.9604645e-8f, 2.9802322e-8f, 6.097555e-5f, 6.1035156e-5f, 0.333333343f, 1.0f, 86.9999924f,
    87.0f, 88.7228394f, 89.0f, 89.0000076f, 2049.0f, 65504.0f, 65519.9961f, 65520.0f,
    3.40282347e38f, INFINITY,
};

static float special(size_t i)
{
    const float magnitude = magnitudes[i / 2];
    return i % 2 ? -magnitude : magnitude;
}

static float *specials(void)
{
    float *x = heap(NUM_SPECIALS * sizeof *x);
    for (size_t i = 0; i < NUM_SPECIALS; i++)
        x[i] = special(i);
    return x;
}

static void take_floats(const char *kernel, float *result, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (isnan(result[i]))
            result[i] = NAN;
    take_result(kernel, result, n * sizeof *result);
}

/* A special value among fractions of it in each block of 32; in the last block a NaN. */
static void run_quantize(void)
{
    enum { NUM_BLOCKS = NUM_SPECIALS + 1 };
    float *x = heap(NUM_BLOCKS * 32 * sizeof *x);
    struct act_block *acts = heap(NUM_BLOCKS * sizeof *acts);
    for (size_t b = 0; b < NUM_BLOCKS; b++)
        for (size_t k = 0; k < 32; k++)
            x[32 * b + k] = k == b % 32 ? (b < NUM_SPECIALS ? special(b) : NAN)
                : special(b % NUM_SPECIALS) * (float)k / 64.0f;
    quantize_acts(acts, x, NUM_BLOCKS * 32);
    for (size_t b = 0; b < NUM_BLOCKS; b++)
        if (isnan(acts[b].scale))
            acts[b].scale = NAN;
    take_result("quantize_acts", acts, NUM_BLOCKS * sizeof *acts);
    free(x);
}

static void run_floats(void)
{
    const size_t n = NUM_SPECIALS;
    float *x = specials(), *w = specials(), *out = specials();
    exp_f32(out, x, n);
    take_floats("exp_f32", out, n);
    for (int kind = FEED_FORWARD_SILU; kind <= FEED_FORWARD_GELU; kind++)
        for (size_t shift = 0; shift < n; shift += 5) {
            out = heap(n * sizeof *out);
            for (size_t i = 0; i < n; i++)
                w[i] = x[(i + shift) % n];
            feed_forward_act(kind, out, w, x, n);
            take_floats("feed_forward_act", out, n);
        }
    out = heap(n * sizeof *out);
    rmsnorm_f32(out, x, w, n - 4, 1e-5f);   /* without the largest values and infinities */
    take_floats("rmsnorm_f32", out, n - 4);
    out = heap(n * sizeof *out);
    layernorm_f32(out, x, w, x, n - 4, 1e-5f);
    take_floats("layernorm_f32", out, n - 4);
    out = specials();
    softcap_f32(out, n, 30.0f);
    take_floats("softcap_f32", out, n);
    out = specials();
    out[n - 2] = -INFINITY;                 /* masked scores: only the positive one is gone */
    softmax_f32(out, n);
    take_floats("softmax_f32", out, n);
    free(w);
    free(x);
}

static void run_rankings(void)
{
    const size_t n = NUM_SPECIALS, k = 9;
    float *x = specials();
    for (size_t i = 3; i < n; i += 4)
        x[i] = NAN;
    for (size_t count = 1; count <= n; count += 7) {
        size_t *index = heap(sizeof *index);
        *index = argmax_f32(x + n - count, count);
        take_result("argmax_f32", index, sizeof *index);
    }
    uint32_t *ids = heap(k * sizeof *ids);
    float *values = heap(k * sizeof *values);
    top_k_f32(ids, values, x, n, k);
    take_result("top_k_f32", ids, k * sizeof *ids);
    take_floats("top_k_f32", values, k);
    free(x);
}

/* Keys and values of q8 and q4: all special values, in blocks that begin anywhere among them. */
static void run_kv_quants(int type)
{
    enum { HEAD_DIM = 32 };
    for (size_t first = 0; first + HEAD_DIM <= NUM_SPECIALS; first += 8) {
        float *x = specials(), *back = heap(2 * HEAD_DIM * sizeof *back);
        uint8_t *kv = heap(kv_block_bytes(type, HEAD_DIM));
        memset(kv, 0, kv_block_bytes(type, HEAD_DIM));
        kv_write(type, kv, first % 32, x + first, x + NUM_SPECIALS - HEAD_DIM - first, HEAD_DIM);
        kv_read(type, back, back + HEAD_DIM, kv, first % 32, HEAD_DIM);
        take_result("kv_write", kv, kv_block_bytes(type, HEAD_DIM));
        take_floats("kv_read", back, 2 * HEAD_DIM);
        free(x);
    }
}

/* f32 -> f16 as keys and values are written, f16 -> f32 of every half as weights are read. */
static void run_halves(void)
{
    float *x = specials();
    uint8_t *kv = heap(kv_block_bytes(STORAGE_F16, NUM_SPECIALS));
    memset(kv, 0, kv_block_bytes(STORAGE_F16, NUM_SPECIALS));
    kv_write(STORAGE_F16, kv, 5, x, x, NUM_SPECIALS);
    take_result("kv_write", kv, kv_block_bytes(STORAGE_F16, NUM_SPECIALS));
    free(x);
    uint16_t *halves = heap(NUM_HALVES * sizeof *halves);
    for (size_t i = 0; i < NUM_HALVES; i++)
        halves[i] = (uint16_t)i;
    const float one = 1.0f;
    float *product = heap(NUM_HALVES * sizeof *product);
    matmul_tiles(STORAGE_F16, product, NUM_HALVES, halves, NUM_HALVES / 32, 1, &one, 1);
    take_floats("matmul_tiles", product, NUM_HALVES);
    float *sum = heap(NUM_HALVES * sizeof *sum);
    for (size_t i = 0; i < NUM_HALVES; i++)
        sum[i] = -0.0f;
    axpy_rows(STORAGE_F16, sum, halves, 0, NULL, &one, 1, NUM_HALVES);
    take_floats("axpy_rows", sum, NUM_HALVES);
    for (size_t row = 0; row < 32; row++) {
        float *gathered = heap(NUM_HALVES / 32 * sizeof *gathered);
        gather_row(STORAGE_F16, gathered, halves, NUM_HALVES / 32, row);
        take_floats("gather_row", gathered, NUM_HALVES / 32);
    }
    free(halves);
}

/* Many candidates of few values: ranks are by index, and some come late. */
static void run_ties(size_t n, size_t k)
{
    float *x = heap(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = i % 5 == 4 ? NAN : special(i * i % NUM_SPECIALS);
    uint32_t *ids = heap(k * sizeof *ids);
    float *values = heap(k * sizeof *values);
    top_k_f32(ids, values, x, n, k);
    take_result("top_k_f32", ids, k * sizeof *ids);
    take_floats("top_k_f32", values, k);
    free(x);
}

/* All quants of weights and activations at an end of their range, scales of one. */
static void run_full_integers(int type, uint8_t quant, float act, size_t num_tokens)
{
    enum { COLS = 160, NUM_BLOCKS = COLS / 32 };
    float *x = heap(num_tokens * COLS * sizeof *x);
    for (size_t i = 0; i < num_tokens * COLS; i++)
        x[i] = act;
    struct act_block *acts = heap(num_tokens * NUM_BLOCKS * sizeof *acts);
    quantize_acts(acts, x, num_tokens * COLS);
    const size_t block_bytes = tile_bytes(type, 32), bytes = tile_bytes(type, COLS);
    const size_t header_halves = type == STORAGE_Q4M ? 64 : 32;
    uint8_t *tile = heap(bytes);
    memset(tile, quant, bytes);
    for (size_t b = 0; b < NUM_BLOCKS; b++)
        for (size_t i = 0; i < header_halves; i++)
            memcpy(tile + b * block_bytes + 2 * i, &(uint16_t){0x3C00}, 2);
    float *out = heap(num_tokens * 32 * sizeof *out);
    matmul_tiles(type, out, 32, tile, 1, COLS, acts, num_tokens);
    take_result("matmul_tiles", out, num_tokens * 32 * sizeof *out);
    if (type != STORAGE_Q1) {
        const size_t num_rows = 9, quant_bytes = type == STORAGE_Q8 ? COLS : COLS / 2;
        const size_t stride = row_bytes(type, COLS);
        uint8_t *rows = heap(num_rows * stride);
        memset(rows, quant, num_rows * stride);
        for (size_t r = 0; r < num_rows; r++)
            for (size_t at = quant_bytes; at < stride; at += 2)
                memcpy(rows + r * stride + at, &(uint16_t){0x3C00}, 2);
        float *dots = heap(num_rows * sizeof *dots);
        dot_rows(type, dots, rows, stride, NULL, num_rows, COLS, acts);
        take_result("dot_rows", dots, num_rows * sizeof *dots);
        free(rows);
    }
    free(tile);
    free(acts);
    free(x);
}

void run_extremes(void)
{
    static const uint8_t quants[] = {0x00, 0x7F, 0x80, 0xFF};
    run_quantize();
    run_floats();
    run_rankings();
    run_halves();
    run_kv_quants(STORAGE_Q8);
    run_kv_quants(STORAGE_Q4);
    for (size_t k = 0; k <= 1000; k = 3 * k + 1)
        run_ties(1000, k);
    for (int type = STORAGE_Q8; type <= STORAGE_Q1; type++)
        for (size_t q = 0; q < sizeof quants; q++)
            for (size_t num_tokens = 1; num_tokens <= 5; num_tokens++)
                run_full_integers(type, quants[q], q % 2 ? -3.0f : 3.0f, num_tokens);
}
