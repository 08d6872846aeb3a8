/* Sizes of stored matrices, and packing of ggml blocks or floats into tiles and neuron-major rows.
 * Run once a weight, so there is one version for all ISAs. */
#include <assert.h>
#include <math.h>
#include <string.h>

#include "block_parts.h"
#include "blocks.h"
#include "numeric.h"

enum ggml_type {
    GGML_F32 = 0,
    GGML_F16 = 1,
    GGML_Q4_0 = 2,
    GGML_Q4_1 = 3,
    GGML_Q5_0 = 6,
    GGML_Q8_0 = 8
};

static size_t quant_bytes(int type)
{
    return type == STORAGE_Q8 ? 32 : type == STORAGE_Q1 ? 4 : 16;
}

static int is_quantised(int type)
{
    return type == STORAGE_Q4 || type == STORAGE_Q4M || type == STORAGE_Q8 || type == STORAGE_Q1;
}

size_t tile_bytes(int type, size_t cols)
{
    switch (type) {
    case STORAGE_Q4: return cols / BLOCK_COLS * sizeof(struct q4_tile_block);
    case STORAGE_Q4M: return cols / BLOCK_COLS * sizeof(struct q4m_tile_block);
    case STORAGE_Q8: return cols / BLOCK_COLS * sizeof(struct q8_tile_block);
    case STORAGE_Q1: return cols / BLOCK_COLS * sizeof(struct q1_tile_block);
    case STORAGE_F16: return cols * sizeof(struct f16_tile_column);
    case STORAGE_F32: return cols * sizeof(struct f32_tile_column);
    }
    assert(!"storage type");
    return 0;
}

size_t row_bytes(int type, size_t cols)
{
    assert(type != STORAGE_Q1);
    return tile_bytes(type, cols) / TILE_ROWS;
}

static size_t padded_tiles(size_t num_rows) { return (num_rows + TILE_ROWS - 1) / TILE_ROWS; }

/* Puts block b of row `row` into its words of the tile. */
static void place_in_tile(int type, void *tiles, size_t cols, size_t row, size_t b,
                          const struct block_parts *parts)
{
    uint8_t *tile = (uint8_t *)tiles + row / TILE_ROWS * tile_bytes(type, cols);
    uint8_t *block = tile + b * tile_bytes(type, BLOCK_COLS);
    const size_t r = row % TILE_ROWS;
    const size_t header = type == STORAGE_Q4M ? 4 * TILE_ROWS : 2 * TILE_ROWS;
    memcpy(block + 2 * r, &parts->scale, 2);
    if (type == STORAGE_Q4M)
        memcpy(block + 2 * TILE_ROWS + 2 * r, &parts->min, 2);
    for (size_t g = 0; g < quant_bytes(type) / 4; g++)
        memcpy(block + header + g * 4 * TILE_ROWS + 4 * r, parts->quants + 4 * g, 4);
}

static void place_in_row(int type, void *rows, size_t cols, size_t row, size_t b,
                         const struct block_parts *parts)
{
    const size_t num_blocks = cols / BLOCK_COLS, bytes = quant_bytes(type);
    uint8_t *at = (uint8_t *)rows + row * row_bytes(type, cols);
    memcpy(at + b * bytes, parts->quants, bytes);
    memcpy(at + num_blocks * bytes + 2 * b, &parts->scale, 2);
    if (type == STORAGE_Q4M)
        memcpy(at + num_blocks * (bytes + 2) + 2 * b, &parts->min, 2);
}

typedef void place_fn(int, void *, size_t, size_t, size_t, const struct block_parts *);

static size_t ggml_block_bytes(int ggml_type)
{
    switch (ggml_type) {
    case GGML_Q4_0: return 18;
    case GGML_Q4_1: return 20;
    case GGML_Q5_0: return 22;
    case GGML_Q8_0: return 34;
    case GGML_F16: return 2 * BLOCK_COLS;
    case GGML_F32: return 4 * BLOCK_COLS;
    }
    return 0;
}

static int is_lossless(int type, int ggml_type)
{
    switch (type) {
    case STORAGE_Q4: return ggml_type == GGML_Q4_0;
    case STORAGE_Q4M: return ggml_type == GGML_Q4_1;
    case STORAGE_Q8: return ggml_type == GGML_Q8_0 || ggml_type == GGML_Q5_0;
    case STORAGE_F16: return ggml_type == GGML_F16;
    case STORAGE_F32: return ggml_type == GGML_F32;
    }
    return 0;
}

static void parts_of_ggml(struct block_parts *parts, int ggml_type, const uint8_t *src)
{
    memcpy(&parts->scale, src, 2);
    if (ggml_type == GGML_Q4_0) {
        memcpy(parts->quants, src + 2, 16);
    } else if (ggml_type == GGML_Q4_1) {
        memcpy(&parts->min, src + 2, 2);
        memcpy(parts->quants, src + 4, 16);
    } else if (ggml_type == GGML_Q8_0) {
        memcpy(parts->quants, src + 2, 32);
    } else {                        /* Q5_0: the fifth bits lie in one 32-bit word */
        uint32_t high;
        memcpy(&high, src + 2, 4);
        for (int k = 0; k < 32; k++) {
            int low = k < 16 ? src[6 + k] & 15 : src[6 + k - 16] >> 4;
            int quant = (low | (int)((high >> k) & 1u) << 4) - 16;
            parts->quants[k] = (uint8_t)quant;
        }
    }
}

static void signs_of_f32(struct block_parts *parts, const float *src)
{
    memset(parts->quants, 0, 4);
    for (int k = 0; k < BLOCK_COLS; k++)
        parts->quants[k % 4] |= (uint8_t)((src[k] >= 0.0f) << (k / 4));
}

/* Mean magnitude of 32 values as f16, in its range; a NaN shows. */
static uint16_t mean_scale(const float *src)
{
    float sum = 0.0f;
    for (int k = 0; k < BLOCK_COLS; k++)
        sum += fabsf(src[k]);
    const float mean = sum / BLOCK_COLS;
    return f16_of_f32(mean > 65504.0f ? 65504.0f : mean);
}

/* Element-wise types: value_bytes a value, tiles column by column. */
static void pack_values(void *dst, size_t value_bytes, const void *src, size_t num_rows,
                        size_t cols, int in_tiles)
{
    if (!in_tiles) {
        memcpy(dst, src, num_rows * cols * value_bytes);
        return;
    }
    for (size_t row = 0; row < num_rows; row++)
        for (size_t c = 0; c < cols; c++) {
            size_t at = (row / TILE_ROWS * cols + c) * TILE_ROWS + row % TILE_ROWS;
            memcpy((uint8_t *)dst + at * value_bytes,
                   (const uint8_t *)src + (row * cols + c) * value_bytes, value_bytes);
        }
}

/* One tile, tile block by tile block, so that what is written stays in the nearest cache. Rows
 * behind the last one are left alone. */
static void pack_ggml_tile(int type, uint8_t *tile, int ggml_type, const uint8_t *src, size_t row,
                           size_t num_rows, size_t cols)
{
    const size_t num_blocks = cols / BLOCK_COLS, block_bytes = ggml_block_bytes(ggml_type);
    const size_t count = num_rows - row < TILE_ROWS ? num_rows - row : TILE_ROWS;
    const size_t words = quant_bytes(type) / 4, header = type == STORAGE_Q4M ? 128 : 64;
    struct block_parts parts[TILE_ROWS];
    for (size_t b = 0; b < num_blocks; b++) {
        uint8_t *block = tile + b * tile_bytes(type, BLOCK_COLS);
        for (size_t r = 0; r < count; r++) {
            const uint8_t *from = src + ((row + r) * num_blocks + b) * block_bytes;
            parts_of_ggml(&parts[r], ggml_type, from);
            memcpy(block + 2 * r, &parts[r].scale, 2);
            if (type == STORAGE_Q4M)
                memcpy(block + 2 * TILE_ROWS + 2 * r, &parts[r].min, 2);
        }
        for (size_t g = 0; g < words; g++)
            for (size_t r = 0; r < count; r++)
                memcpy(block + header + (g * TILE_ROWS + r) * 4, parts[r].quants + 4 * g, 4);
    }
}

static int pack_ggml(int type, void *dst, int ggml_type, const void *src, size_t num_rows,
                     size_t cols, place_fn *place)
{
    if (!is_lossless(type, ggml_type))
        return -1;
    if (!is_quantised(type)) {
        pack_values(dst, type == STORAGE_F16 ? 2 : 4, src, num_rows, cols, place == place_in_tile);
        return 0;
    }
    if (place == place_in_tile) {
        for (size_t row = 0; row < num_rows; row += TILE_ROWS)
            pack_ggml_tile(type, (uint8_t *)dst + row / TILE_ROWS * tile_bytes(type, cols),
                           ggml_type, (const uint8_t *)src, row, num_rows, cols);
        return 0;
    }
    const uint8_t *block = src;
    struct block_parts parts = {0};
    for (size_t row = 0; row < num_rows; row++)
        for (size_t b = 0; b < cols / BLOCK_COLS; b++, block += ggml_block_bytes(ggml_type)) {
            parts_of_ggml(&parts, ggml_type, block);
            place(type, dst, cols, row, b, &parts);
        }
    return 0;
}

static int pack_f32(int type, void *dst, const float *src, size_t num_rows, size_t cols,
                    place_fn *place)
{
    const int in_tiles = place == place_in_tile;
    if (type == STORAGE_F32) {
        pack_values(dst, 4, src, num_rows, cols, in_tiles);
    } else if (type == STORAGE_F16) {
        for (size_t i = 0; i < num_rows * cols; i++) {
            size_t row = i / cols, c = i % cols;
            size_t at = in_tiles ? (row / TILE_ROWS * cols + c) * TILE_ROWS + row % TILE_ROWS : i;
            uint16_t half = f16_of_f32(src[i]);
            memcpy((uint8_t *)dst + 2 * at, &half, 2);
        }
    } else if (type == STORAGE_Q8 || type == STORAGE_Q4) {
        struct block_parts parts = {0};
        for (size_t row = 0; row < num_rows; row++)
            for (size_t b = 0; b < cols / BLOCK_COLS; b++, src += BLOCK_COLS) {
                if (type == STORAGE_Q8)
                    parts_of_f32_q8(&parts, src);
                else
                    parts_of_f32_q4(&parts, src);
                place(type, dst, cols, row, b, &parts);
            }
    } else if (type == STORAGE_Q1 && in_tiles) {
        pack_tiles_q1(dst, src, NULL, num_rows, cols);
    } else {
        return -1;
    }
    return 0;
}

static void clear_last_tile(int type, void *tiles, size_t num_rows, size_t cols)
{
    if (num_rows % TILE_ROWS)
        memset((uint8_t *)tiles + (padded_tiles(num_rows) - 1) * tile_bytes(type, cols), 0,
               tile_bytes(type, cols));
}

int pack_tiles(int storage_type, void *tiles, int ggml_type, const void *src, size_t num_rows,
               size_t cols)
{
    assert(!is_quantised(storage_type) || cols % BLOCK_COLS == 0);
    clear_last_tile(storage_type, tiles, num_rows, cols);
    return pack_ggml(storage_type, tiles, ggml_type, src, num_rows, cols, place_in_tile);
}

int pack_tiles_from_f32(int storage_type, void *tiles, const float *src, size_t num_rows,
                        size_t cols)
{
    assert(!is_quantised(storage_type) || cols % BLOCK_COLS == 0);
    clear_last_tile(storage_type, tiles, num_rows, cols);
    return pack_f32(storage_type, tiles, src, num_rows, cols, place_in_tile);
}

int pack_rows(int storage_type, void *rows, int ggml_type, const void *src, size_t num_rows,
              size_t cols)
{
    assert(!is_quantised(storage_type) || cols % BLOCK_COLS == 0);
    return pack_ggml(storage_type, rows, ggml_type, src, num_rows, cols, place_in_row);
}

int pack_rows_from_f32(int storage_type, void *rows, const float *src, size_t num_rows, size_t cols)
{
    assert(!is_quantised(storage_type) || cols % BLOCK_COLS == 0);
    return pack_f32(storage_type, rows, src, num_rows, cols, place_in_row);
}

int pack_tiles_q4m_parts(void *tiles, const uint8_t *quants, const uint16_t *scale,
                         const uint16_t *min, size_t num_rows, size_t cols)
{
    assert(cols % BLOCK_COLS == 0);
    clear_last_tile(STORAGE_Q4M, tiles, num_rows, cols);
    const size_t num_blocks = cols / BLOCK_COLS;
    struct block_parts parts = {0};
    for (size_t i = 0; i < num_rows * num_blocks; i++) {
        const uint8_t *src = quants + i * BLOCK_COLS;
        for (int k = 0; k < 16; k++)
            parts.quants[k] = (uint8_t)((src[k] & 15) | (src[k + 16] << 4));
        parts.scale = scale[i];
        parts.min = min[i];
        place_in_tile(STORAGE_Q4M, tiles, cols, i / num_blocks, i % num_blocks, &parts);
    }
    return 0;
}

void pack_tiles_q1(void *tiles, const float *src, const uint16_t *scale, size_t num_rows,
                   size_t cols)
{
    assert(cols % BLOCK_COLS == 0);
    clear_last_tile(STORAGE_Q1, tiles, num_rows, cols);
    const size_t num_blocks = cols / BLOCK_COLS;
    struct block_parts parts = {0};
    for (size_t i = 0; i < num_rows * num_blocks; i++, src += BLOCK_COLS) {
        signs_of_f32(&parts, src);
        parts.scale = scale ? scale[i] : mean_scale(src);
        place_in_tile(STORAGE_Q1, tiles, cols, i / num_blocks, i % num_blocks, &parts);
    }
}
