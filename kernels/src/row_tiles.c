/* Neuron-major rows -> tiles. A tile holds the words of its 32 rows transposed: four bytes of
 * quants, the halves of scales and mins, or whole values stay together, so packing moves words and
 * changes no bit. Written for whole layers at memory speed: squares of words are transposed in
 * registers, and a line of each row is used up before the next one is touched, since rows that lie
 * a power of two apart share few places in the nearest cache. */
#include <assert.h>
#include <string.h>

#include "blocks.h"

#define VECTOR_BYTES 16
#define LINE_BYTES 64

typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));

/* The rows of one tile, or what is left of them; their part of interest begins at `first`. */
struct row_source { const uint8_t *first; size_t stride_bytes, num_rows; };

/* Words come in runs of 2^run_log2, one run a block; those of a run lie 32 words apart. */
struct tile_target { uint8_t *at; unsigned run_log2; size_t block_bytes; };

static inline uint8_t *tile_word(const struct tile_target *to, size_t word_bytes, size_t word)
{
    const size_t block = word >> to->run_log2, in_run = word & ((1u << to->run_log2) - 1);
    return to->at + block * to->block_bytes + in_run * TILE_ROWS * word_bytes;
}

/* Bytes `offset`.. of a row; zeros where the tile has no such row. */
static inline halves load_row(const struct row_source *from, size_t row, size_t offset)
{
    halves value = {0};
    if (row < from->num_rows)
        memcpy(&value, from->first + row * from->stride_bytes + offset, sizeof value);
    return value;
}

/* Shuffles n vectors of n lanes: after log2(n) rounds they are transposed. */
static inline void shuffle_halves(halves v[8])
{
    const halves low = {0, 8, 1, 9, 2, 10, 3, 11}, high = {4, 12, 5, 13, 6, 14, 7, 15};
    halves out[8];
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __builtin_shuffle(v[i], v[i + 4], low);
        out[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], high);
    }
    memcpy(v, out, sizeof out);
}

static inline void shuffle_words(words v[4])
{
    const words low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
    words out[4];
    for (int i = 0; i < 2; i++) {
        out[2 * i] = __builtin_shuffle(v[i], v[i + 2], low);
        out[2 * i + 1] = __builtin_shuffle(v[i], v[i + 2], high);
    }
    memcpy(v, out, sizeof out);
}

/* 8 rows from `row` on, halves `half`..`half` + 7 */
static inline void transpose_halves(const struct tile_target *to, const struct row_source *from,
                                    size_t row, size_t half)
{
    halves v[8];
    for (size_t i = 0; i < 8; i++)
        v[i] = load_row(from, row + i, 2 * half);
    for (int round = 0; round < 3; round++)
        shuffle_halves(v);
    for (size_t i = 0; i < 8; i++)
        memcpy(tile_word(to, 2, half + i) + 2 * row, &v[i], sizeof v[i]);
}

/* 4 rows from `row` on, words `word`..`word` + 3 */
static inline void transpose_words(const struct tile_target *to, const struct row_source *from,
                                   size_t row, size_t word)
{
    words v[4];
    for (size_t i = 0; i < 4; i++)
        v[i] = (words)load_row(from, row + i, 4 * word);
    for (int round = 0; round < 2; round++)
        shuffle_words(v);
    for (size_t i = 0; i < 4; i++)
        memcpy(tile_word(to, 4, word + i) + 4 * row, &v[i], sizeof v[i]);
}

/* Words `word`.. to the end, one by one; the rows that are missing stay zero. */
static void move_words(const struct tile_target *to, const struct row_source *from,
                       size_t word_bytes, size_t word, size_t num_words)
{
    for (; word < num_words; word++) {
        uint8_t *at = tile_word(to, word_bytes, word);
        memset(at, 0, TILE_ROWS * word_bytes);
        for (size_t r = 0; r < from->num_rows; r++)
            memcpy(at + r * word_bytes, from->first + r * from->stride_bytes + word * word_bytes,
                   word_bytes);
    }
}

static void tile_halves(struct tile_target to, struct row_source from, size_t num_halves)
{
    const size_t line = LINE_BYTES / 2;
    size_t half = 0;
    for (; half + line <= num_halves; half += line)
        for (size_t row = 0; row < TILE_ROWS; row += 8)
            for (size_t i = 0; i < line; i += 8)
                transpose_halves(&to, &from, row, half + i);
    for (; half + 8 <= num_halves; half += 8)
        for (size_t row = 0; row < TILE_ROWS; row += 8)
            transpose_halves(&to, &from, row, half);
    move_words(&to, &from, 2, half, num_halves);
}

static void tile_words(struct tile_target to, struct row_source from, size_t num_words)
{
    const size_t line = LINE_BYTES / 4;
    size_t word = 0;
    for (; word + line <= num_words; word += line)
        for (size_t row = 0; row < TILE_ROWS; row += 4)
            for (size_t i = 0; i < line; i += 4)
                transpose_words(&to, &from, row, word + i);
    for (; word + 4 <= num_words; word += 4)
        for (size_t row = 0; row < TILE_ROWS; row += 4)
            transpose_words(&to, &from, row, word);
    move_words(&to, &from, 4, word, num_words);
}

/* Quants in words of four, then the rows' scales and mins into each block's head. */
static void tile_quantised(int type, uint8_t *tile, struct row_source rows, size_t cols)
{
    const size_t num_blocks = cols / BLOCK_COLS, block_bytes = tile_bytes(type, BLOCK_COLS);
    const unsigned run_log2 = type == STORAGE_Q8 ? 3 : 2;
    const size_t num_words = num_blocks << run_log2;
    const size_t num_halves = type == STORAGE_Q4M ? 2 : 1, half_bytes = 2 * TILE_ROWS;
    tile_words((struct tile_target){tile + num_halves * half_bytes, run_log2, block_bytes}, rows,
               num_words);
    rows.first += 4 * num_words;
    for (size_t part = 0; part < num_halves; part++, rows.first += 2 * num_blocks)
        tile_halves((struct tile_target){tile + part * half_bytes, 0, block_bytes}, rows,
                    num_blocks);
}

int pack_tiles_from_rows(int storage_type, void *tiles, const void *rows, size_t row_stride_bytes,
                         size_t num_rows, size_t cols)
{
    if (storage_type < STORAGE_F32 || storage_type > STORAGE_Q4M)
        return -1;
    const int is_float = storage_type == STORAGE_F32 || storage_type == STORAGE_F16;
    assert(is_float || cols % BLOCK_COLS == 0);
    uint8_t *tile = tiles;
    for (size_t row = 0; row < num_rows; row += TILE_ROWS) {
        const struct row_source from = {
            (const uint8_t *)rows + row * row_stride_bytes, row_stride_bytes,
            num_rows - row < TILE_ROWS ? num_rows - row : TILE_ROWS,
        };
        if (storage_type == STORAGE_F16)
            tile_halves((struct tile_target){tile, 0, sizeof(struct f16_tile_column)}, from, cols);
        else if (storage_type == STORAGE_F32)
            tile_words((struct tile_target){tile, 0, sizeof(struct f32_tile_column)}, from, cols);
        else
            tile_quantised(storage_type, tile, from, cols);
        tile += tile_bytes(storage_type, cols);
    }
    return 0;
}
