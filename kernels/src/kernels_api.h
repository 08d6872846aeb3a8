/* Public C functions of the kernels. Declarations only, no preprocessor line: kernels.h includes
 * this file and cffi's cdef() reads it.
 *
 * A matrix (rows, cols) is stored as *tiles* of 32 rows (blocks.h); rows are padded with zeros to a
 * multiple of 32. q1, q4, q4m and q8 need cols to be a multiple of 32 and take int8 activations
 * (struct act_block); f16 and f32 take float activations and any cols. q1 is a sign and a scale:
 * a weight is +scale or -scale. It is stored in tiles only, for predictors.
 *
 * Summation order is part of the contract and equal on every ISA: int32 exact inside a block of 32
 * columns, then one float addition a block, blocks in ascending order, no fused multiply-add. */

enum storage_type {
    STORAGE_F32 = 0,
    STORAGE_F16 = 1,
    STORAGE_Q8 = 2,
    STORAGE_Q4 = 3,
    STORAGE_Q4M = 4,
    STORAGE_Q1 = 5
};

enum feed_forward_kind {
    FEED_FORWARD_SILU = 0,       /* silu(gate) * up */
    FEED_FORWARD_REGLU = 1,      /* relu(gate) * up */
    FEED_FORWARD_DRELU = 2,      /* relu(gate) * relu(up) */
    FEED_FORWARD_RELU = 3,       /* relu(up), no gate */
    FEED_FORWARD_GEGLU = 4,      /* gelu(gate) * up, gelu by its tanh formula */
    FEED_FORWARD_GELU = 5        /* gelu(up) by the normal distribution, no gate */
};

enum rope_layout {
    ROPE_INTERLEAVED = 0,        /* pairs (2i, 2i+1) */
    ROPE_HALVES = 1              /* pairs (i, i+n/2) */
};

/* 32 activations quantised together; scale = amax / 127, sum = sum of quants. 40 bytes. */
struct act_block { int8_t quants[32]; float scale; int32_t sum; };

/* Select the table for `isa` ("scalar", "avx2", "avx512", "neon", "neon_dotprod", "neon_i8mm");
 * NULL: the one that the environment names in POLYNEURON_FORCE_ISA, else the best. 0, or -1 (and
 * nothing changes) when that ISA is unknown or not available here. Called once per process, while
 * no kernel runs. */
int kernels_select(const char *isa);
/* Name of the active ISA (never NULL; selects the best one on first use). */
const char *kernels_active(void);
/* Name of the i-th table built into this binary, best first; NULL past the end. */
const char *kernels_built(int index);
/* 1 when this CPU can run the named table. */
int kernels_supported(const char *isa);

/* Bytes of a matrix in tiles / of one row in the neuron-major row layout, which q1 has not. */
size_t tile_bytes(int type, size_t cols);                  /* one tile: 32 rows */
size_t row_bytes(int type, size_t cols);

/* x (cols) f32 -> out (cols/32), q = x * (127 / amax) to nearest even. A block whose amax is below
 * 2^-120 (where 127 / amax could overflow) becomes zeros; NaN or infinite input gives zero quants
 * and a NaN or infinite scale, so a fault upstream is not hidden. */
void quantize_acts(struct act_block *out, const float *x, size_t cols);

/* w (num_tiles tiles of (32, cols)), x (num_tokens, cols) -> out[t * out_stride + 32 * tile + r].
 * x is act_block (num_tokens, cols/32) for q1/q4/q4m/q8 and float for f16/f32. Overwrites out. */
void matmul_tiles(int type, float *out, size_t out_stride, const void *w, size_t num_tiles,
                  size_t cols, const void *x, size_t num_tokens);

/* One row of a tiled matrix -> out (cols) f32: the embedding lookup. */
void gather_row(int type, float *out, const void *w, size_t cols, size_t row);

/* Neuron-major rows: the quants of all blocks, then all scales, then (q4m) all mins; q4 nibbles in
 * GGUF order (low nibble k, high nibble k+16 of each block). row_ids may be NULL: 0..num_rows-1.
 * dot: out[i] = row(ids[i]) . x, bit-equal to matmul_tiles on the same weights.
 * axpy: out[c] += coef[i] * row(ids[i])[c], i ascending; each term is
 * ((float)q * scale (+ min)) * coef.
 * Rows may begin at any multiple of 2 bytes. */
void dot_rows(int type, float *out, const void *rows, size_t row_stride_bytes,
              const uint32_t *row_ids, size_t num_rows, size_t cols, const void *x);
void axpy_rows(int type, float *out, const void *rows, size_t row_stride_bytes,
               const uint32_t *row_ids, const float *coef, size_t num_rows, size_t cols);

/* out = x * (1 / sqrt(mean(x^2) + eps)) * w. Here and below a sum "in 16 lanes" gives element i to
 * lane i mod 16, ascending, and then adds lane i + lane i+8, then +4, +2, +1. So the squares. */
void rmsnorm_f32(float *out, const float *x, const float *w, size_t n, float eps);
/* out = (x - mean) * (1 / sqrt(mean((x - mean)^2) + eps)) * w + b; out may be x. */
void layernorm_f32(float *out, const float *x, const float *w, const float *b, size_t n, float eps);
/* x = cap * tanh(x / cap) in place, cap above 0; tanh within 2e-7, relative, on every ISA alike. */
void softcap_f32(float *x, size_t n, float cap);
/* out[i] += x[i] */
void add_f32(float *out, const float *x, size_t n);
/* out[i] = act(gate[i]) * up[i] by enum feed_forward_kind; RELU and GELU read no gate. Either gelu
 * is within 3e-7 of |x|, or of its own value's 2e-5 where that is less. */
void feed_forward_act(int kind, float *out, const float *gate, const float *up, size_t n);
/* Rotate the first rotary_dim of head_dim in place; cos, sin (rotary_dim/2). */
void rope_head(int layout, float *x, const float *cos_row, const float *sin_row, size_t rotary_dim);
/* exp of each element, the same polynomial on every ISA, within 2 ulp; below -87 gives 0. */
void exp_f32(float *out, const float *x, size_t n);
/* In place, numerically safe; sums in 16 lanes (i mod 16), lanes in a fixed tree. */
void softmax_f32(float *x, size_t n);
/* Index of the largest value, the lowest index among equals; a NaN ranks as -infinity. */
size_t argmax_f32(const float *x, size_t n);
/* The k largest (k <= n), descending, the lowest index first among equals. */
void top_k_f32(uint32_t *out_ids, float *out_values, const float *x, size_t n, size_t k);

/* A KV block holds 32 tokens of one layer and one kv head. As f16: K transposed (head_dim, 32) and
 * V (32, head_dim); as q8 or q4, for which head_dim is a multiple of 32, it lies as kv_quants.h
 * tells. kv_write stores k, v (head_dim) f32 as token `slot` (0..31): f16 rounded to nearest even,
 * q8 and q4 as pack_rows_from_f32 does. kv_read gives what attention reads of that token. */
size_t kv_block_bytes(int type, size_t head_dim);
void kv_write(int type, void *kv_block, size_t slot, const float *k, const float *v,
              size_t head_dim);
/* x (n) = H x * scale in place, H the Hadamard matrix of the largest power of two that divides n,
 * on each run of so many values: pairs (a, b) at distance 1, 2, 4, … become (a + b, a - b). Of keys
 * it spreads a few large values over all, which quants then keep better; H is its own inverse but
 * for a factor, so products of rotated queries and keys are those of the plain ones. */
void spread_values(float *x, size_t n, float scale);
void kv_read(int type, float *k, float *v, const void *kv_block, size_t slot, size_t head_dim);
/* Attention of num_queries heads that share one kv head over positions first..num_positions-1,
 * first < 32: where a window begins within the first block of the table; `type`: of the blocks.
 * q, out (num_queries, head_dim) f32; position p lives in block block_table[p / 32] at
 * kv + block_table[p / 32] * block_stride. Scores (q . k) * scale sum over head_dim ascending,
 * softcap_f32 where cap is above 0, softmax as softmax_f32 over num_positions scores, those before
 * first being -infinity, values sum over positions ascending, divided by the sum at the end.
 * scratch: num_queries * round_up(num_positions, 32) floats. */
void attention_heads(int type, float *out, const float *q, size_t num_queries, size_t head_dim,
                     const void *kv, const int32_t *block_table, size_t block_stride, size_t first,
                     size_t num_positions, float scale, float cap, float *scratch);
/* The same bits for num_tokens consecutive tokens at once: token t, its num_queries heads at
 * q + t * q_stride and out + t * out_stride (in floats), sees the last `window` (0: all) of
 * num_positions + t positions. Each block of keys and values is converted once for all of them.
 * scratch: as many floats as attention_block_scratch says, of num_tokens * num_queries rows and the
 * last token's positions. */
void attention_block(int type, float *out, size_t out_stride, const float *q, size_t q_stride,
                     size_t num_tokens, size_t num_queries, size_t head_dim, const void *kv,
                     const int32_t *block_table, size_t block_stride, size_t num_positions,
                     size_t window, float scale, float cap, float *scratch);
size_t attention_block_scratch(size_t num_rows, size_t head_dim, size_t num_positions);

/* Packing. src: ggml blocks of `ggml_type` (0 F32, 1 F16, 2 Q4_0, 3 Q4_1, 6 Q5_0, 8 Q8_0),
 * row-major (num_rows, cols); missing rows of the last tile become zeros. 0, or -1 when this pair
 * has no lossless packing. Q4_0 -> q4, Q4_1 -> q4m, Q8_0 and Q5_0 -> q8, F16 -> f16, F32 -> f32. */
int pack_tiles(int storage_type, void *tiles, int ggml_type, const void *src, size_t num_rows,
               size_t cols);
/* src (num_rows, cols) f32 -> q8 / f16 / f32 tiles (rounded to nearest even), q4 tiles (rounded
 * by the rule of ggml's Q4_0), or q1 tiles as pack_tiles_q1 makes them. 0, or -1 for q4m. */
int pack_tiles_from_f32(int storage_type, void *tiles, const float *src, size_t num_rows,
                        size_t cols);
/* The same two for neuron-major rows; -1 also for q1. */
int pack_rows(int storage_type, void *rows, int ggml_type, const void *src, size_t num_rows,
              size_t cols);
int pack_rows_from_f32(int storage_type, void *rows, const float *src, size_t num_rows,
                       size_t cols);
/* Neuron-major rows as dot_rows takes them -> tiles, every bit kept; missing rows of the last tile
 * become zeros. 0, or -1 when the storage type is unknown or has no rows. */
int pack_tiles_from_rows(int storage_type, void *tiles, const void *rows, size_t row_stride_bytes,
                         size_t num_rows, size_t cols);
/* q4m parts given apart: quants (num_rows, cols) u8 0..15; scale and min (num_rows, cols/32) f16
 * bits. */
int pack_tiles_q4m_parts(void *tiles, const uint8_t *quants, const uint16_t *scale,
                         const uint16_t *min, size_t num_rows, size_t cols);
/* src (num_rows, cols) f32 -> q1 tiles: w >= 0 is +scale, any other w -scale. scale (num_rows,
 * cols/32) f16 bits; NULL: the mean of |w| of each block, its 32 values added in order, rounded to
 * nearest even and held within the range of f16. */
void pack_tiles_q1(void *tiles, const float *src, const uint16_t *scale, size_t num_rows,
                   size_t cols);

/* CRC-32C of num_bytes bytes, going on from `crc` (0 at the start), by the CPU's own instruction
 * where it has one / always by tables. */
uint32_t crc32c(uint32_t crc, const void *bytes, size_t num_bytes);
uint32_t crc32c_portable(uint32_t crc, const void *bytes, size_t num_bytes);

/* Random rows of row_words 64-bit words, row_stride_bytes apart, at any address. Row `id` of the
 * stream named `key` is words id * row_words and following of SplitMix64 (Steele, Lea, Flood 2014)
 * with the word's number as its counter. */
void random_rows(void *out, size_t row_stride_bytes, const uint32_t *row_ids, size_t num_rows,
                 size_t row_words, uint64_t key);
