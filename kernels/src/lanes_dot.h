/* dot_rows for registers of VF floats: 8 rows side by side, so that the cache misses of all are
 * under way together, and what the next 8 rows need is asked for while these are read. A row gives
 * VF terms at a time (one a block, or one a column of floats); the terms of 8 rows are transposed
 * and added in the order of the contract. Included after the ISA's own part:
 *   struct act_chunk, arrange_acts       activations of VF blocks as chunk_terms wants them
 *   chunk_terms                          the terms of VF blocks of a row
 *   transpose_terms                      terms (8 rows, VF) -> columns (VF, 8 rows) */
#ifndef POLYNEURON_LANES_DOT_H
#define POLYNEURON_LANES_DOT_H

#include "row_groups.h"

/* Chunks whose activations are arranged once for all rows; with AVX-512 8192 columns, 10 KiB. */
#define PANEL_CHUNKS 16

typedef float group_sums __attribute__((vector_size(4 * ROW_GROUP)));

/* The part of a call that one pass over the rows computes: terms first..end-1 of each row, in
 * chunks of VF; the last chunk begins earlier where they do not fill it. */
struct dot_pass { const struct act_chunk *acts; const float *x; size_t first, end; };

ALWAYS_INLINE void dot_group(const int type, const int count, float *out,
                             const struct row_group *group, size_t cols,
                             const struct dot_pass *pass)
{
    group_sums sums = {0};
    if (pass->first > 0)
        memcpy(&sums, out, (size_t)count * sizeof *out);
    for (size_t at = pass->first; at < pass->end; at += VF) {
        const size_t begin = at + VF <= pass->end ? at : pass->end - VF;
        vf terms[ROW_GROUP] = {0};
        float columns[VF][ROW_GROUP];
        for (int r = 0; r < count; r++) {
            prefetch_ahead(type, group, r, cols, begin, VF);
            if (row_is_quantised(type))
                terms[r] = chunk_terms(type, group->row[r], cols, begin,
                                       pass->acts + (at - pass->first) / VF);
            else
                terms[r] = row_floats(type, group->row[r], begin) * load(pass->x + begin);
        }
        transpose_terms(columns, terms);
        for (size_t k = at - begin; k < VF; k++) {
            group_sums column;
            memcpy(&column, columns[k], sizeof column);
            sums = sums + column;
        }
    }
    memcpy(out, &sums, (size_t)count * sizeof *out);
}

ALWAYS_INLINE void dot_all_groups(const int type, float *out, const struct row_set *set,
                                  size_t cols, const struct dot_pass *pass)
{
    struct row_group group;
    size_t i = 0;
    for (; i + ROW_GROUP <= set->num_rows; i += ROW_GROUP) {
        gather_group(&group, set, i, ROW_GROUP);
        dot_group(type, ROW_GROUP, out + i, &group, cols, pass);
    }
    const int rest = (int)(set->num_rows - i);
    if (rest > 0) {
        gather_group(&group, set, i, rest);
        dot_group(type, rest, out + i, &group, cols, pass);
    }
}

ALWAYS_INLINE void dot_rows_of(const int type, float *out, const struct row_set *set, size_t cols,
                               const void *x)
{
    if (!row_is_quantised(type)) {
        const struct dot_pass pass = {NULL, x, 0, cols};
        dot_all_groups(type, out, set, cols, &pass);
        return;
    }
    const struct act_block *blocks = x;
    const size_t num_blocks = cols / BLOCK_COLS;
    for (size_t first = 0; first < num_blocks; first += PANEL_CHUNKS * VF) {
        struct act_chunk acts[PANEL_CHUNKS];
        const size_t left = num_blocks - first;
        const struct dot_pass pass = {
            acts, NULL, first, first + (left < PANEL_CHUNKS * VF ? left : PANEL_CHUNKS * VF),
        };
        for (size_t at = first; at < pass.end; at += VF)
            arrange_acts(type, &acts[(at - first) / VF],
                         blocks + (at + VF <= pass.end ? at : pass.end - VF));
        dot_all_groups(type, out, set, cols, &pass);
    }
}

/* Rows of fewer than VF terms */
static void dot_short_rows(int type, float *out, const struct row_set *set, size_t cols,
                           const void *x)
{
    for (size_t i = 0; i < set->num_rows; i++) {
        const uint8_t *row = row_at(set->rows, set->stride_bytes, set->ids, i);
        out[i] = row_is_quantised(type) ? dot_row_blocks(type, row, cols, x)
                                        : dot_row_floats(type, row, cols, x);
    }
}

static void dot_rows_lanes(int type, float *out, const void *rows, size_t row_stride_bytes,
                           const uint32_t *row_ids, size_t num_rows, size_t cols, const void *x)
{
    const struct row_set set = {
        rows, row_stride_bytes, row_ids, num_rows, row_bytes(type, cols),
    };
    if (cols < VF * (row_is_quantised(type) ? BLOCK_COLS : 1)) {
        dot_short_rows(type, out, &set, cols, x);
        return;
    }
    switch (type) {
    case STORAGE_Q4: dot_rows_of(STORAGE_Q4, out, &set, cols, x); break;
    case STORAGE_Q4M: dot_rows_of(STORAGE_Q4M, out, &set, cols, x); break;
    case STORAGE_Q8: dot_rows_of(STORAGE_Q8, out, &set, cols, x); break;
    case STORAGE_F16: dot_rows_of(STORAGE_F16, out, &set, cols, x); break;
    case STORAGE_F32: dot_rows_of(STORAGE_F32, out, &set, cols, x); break;
    }
}

#endif
