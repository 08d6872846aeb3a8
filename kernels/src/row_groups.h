/* Neuron-major rows eight at a time, so that the cache misses of eight are under way together, and
 * the asking for those that come next. Rows lie anywhere in a large memory: the first touch of each
 * waits for its page's translation, longer than for its bytes, and the eight waits must overlap. */
#ifndef POLYNEURON_ROW_GROUPS_H
#define POLYNEURON_ROW_GROUPS_H

#include "lanes.h"
#include "rows.h"

#define ROW_GROUP 8
#define LINE_BYTES 64
#define SMALLEST_PAGE 4096

/* The rows of a call; ids may be NULL: 0..num_rows - 1. */
struct row_set {
    const void *rows;
    size_t stride_bytes;
    const uint32_t *ids;
    size_t num_rows, bytes_a_row;
};

/* Up to 8 rows side by side, and the 8 after them (the last row again where there are fewer) if
 * any come. */
struct row_group {
    const uint8_t *row[ROW_GROUP], *coming[ROW_GROUP];
    int num_rows, any_coming, is_first;
};

/* Into the second-level cache: rows a power of two apart would push each other out of the first. */
ALWAYS_INLINE void prefetch(const uint8_t *at) { __builtin_prefetch(at, 0, 2); }

/* One line of each page that the coming rows touch */
ALWAYS_INLINE void prefetch_pages(const struct row_group *group, size_t bytes_a_row)
{
    for (int r = 0; r < ROW_GROUP; r++) {
        for (size_t at = 0; at < bytes_a_row; at += SMALLEST_PAGE)
            prefetch(group->coming[r] + at);
        prefetch(group->coming[r] + bytes_a_row - 1);
    }
}

ALWAYS_INLINE const uint8_t *row_of_set(const struct row_set *set, size_t i)
{
    const size_t last = set->num_rows - 1;
    return row_at(set->rows, set->stride_bytes, set->ids, i < last ? i : last);
}

ALWAYS_INLINE void gather_group(struct row_group *group, const struct row_set *set, size_t first,
                                const int num_rows)
{
    group->num_rows = num_rows;
    group->is_first = first == 0;
    group->any_coming = first + ROW_GROUP < set->num_rows;
    for (int r = 0; r < num_rows; r++)
        group->row[r] = row_of_set(set, first + r);
    if (!group->any_coming)
        return;
    for (int r = 0; r < ROW_GROUP; r++)
        group->coming[r] = row_of_set(set, first + ROW_GROUP + r);
    prefetch_pages(group, set->bytes_a_row);
}

/* Asks for bytes from..from + num_bytes - 1, which are whole lines or the part of one. */
ALWAYS_INLINE void prefetch_bytes(const uint8_t *base, size_t from, const size_t num_bytes)
{
    if (num_bytes < LINE_BYTES && from % LINE_BYTES >= num_bytes)
        return;                     /* the part before this one has asked */
    for (size_t at = 0; at < num_bytes; at += LINE_BYTES)
        prefetch(base + from + at);
}

/* Asks for blocks (or floats) first..first + count - 1 of a row. */
ALWAYS_INLINE void prefetch_part(const int type, const uint8_t *row, size_t cols, size_t first,
                                 const size_t count)
{
    const size_t bytes = type == STORAGE_F32 ? 4 : type == STORAGE_F16 ? 2 : row_quant_bytes(type);
    prefetch_bytes(row, first * bytes, count * bytes);
    if (row_is_quantised(type))
        prefetch_bytes(row_halves(type, row, cols, 0), 2 * first, 2 * count);
    if (type == STORAGE_Q4M)
        prefetch_bytes(row_halves(type, row, cols, 1), 2 * first, 2 * count);
}

/* While a part of the group's rows is read: asks for the same part of coming row r and, in the
 * first group, for which nobody has asked, for the part after the next one of row r. */
ALWAYS_INLINE void prefetch_ahead(const int type, const struct row_group *group, int r,
                                  size_t cols, size_t first, const size_t count)
{
    if (group->any_coming)
        prefetch_part(type, group->coming[r], cols, first, count);
    if (group->is_first && r < group->num_rows)
        prefetch_part(type, group->row[r], cols, first + 2 * count, count);
}

/* VF values of a row of f16 or f32 */
ALWAYS_INLINE vf row_floats(const int type, const uint8_t *row, size_t first)
{
    return type == STORAGE_F16 ? load_f16((const uint16_t *)(const void *)row + first)
                               : load((const float *)(const void *)row + first);
}

#endif
