/* The step board: how executors of several processes share one step.
 *
 * A step has a number (step_seq). The coordinator opens it (seq changes), writes the parameters and
 * rings; an executor that wakes late re-checks step_seq after copying the parameters and skips a
 * step that has gone (a seqlock). Units of an op are claimed by compare-and-swap on a word that
 * carries the step's number, so a late executor can never take a unit of another step, and nothing
 * needs to be cleared between steps. An op is complete when all its units are done; `progress` is
 * the number of complete ops from the start, the one word everybody waits on. */
#ifndef POLYNEURON_BOARD_H
#define POLYNEURON_BOARD_H

#include "engine.h"

#define ARENA_MAGIC 0x4e4f5255454e5950ull /* "PYNEURON" */
#define ARENA_LAYOUT_VERSION 1u
#define ARENA_HEADER_BYTES 4096u
#define MAX_EXECUTORS 64u
#define CACHE_LINE 64
#define PROGRESS_OP_BITS 20 /* progress = low bits of step_seq, then ops complete */

struct op_state { /* each word: step_seq << 32 | count */
    uint64_t claimed;
    uint64_t done;
    uint64_t pad[6];
};
_Static_assert(sizeof(struct op_state) == CACHE_LINE, "ops must not share a cache line");
_Static_assert(sizeof(struct step_op) == 256, "layout shared with Python");
_Static_assert(sizeof(struct layer_stream) == 3 * CACHE_LINE, "counters on lines of their own");
_Static_assert(sizeof(struct cluster_work) == CACHE_LINE, "clusters on lines of their own");
_Static_assert(sizeof(struct layer_activity) == CACHE_LINE, "layout shared with Python");
_Static_assert(sizeof(struct executor_record) == 128, "layout shared with Python");
_Static_assert(sizeof(struct arena_header) <= ARENA_HEADER_BYTES, "header fits its page");

struct step_board {
    uint32_t step_seq;
    uint32_t max_ops;
    uint32_t pad0[14];
    uint32_t doorbell[2]; /* by unit: the last step rung for it */
    uint32_t pad1[14];
    uint32_t progress;
    uint32_t pad2[15];
    uint32_t sleepers; /* executors waiting on progress that may be in the kernel */
    uint32_t pad3[15];
    uint32_t finished; /* the last step whose ops are all complete; the coordinator waits on it */
    uint32_t pad4[15];
    uint32_t decided; /* as progress: ops the back end's executor has decided about, to the last */
    uint32_t pad6[15];
    struct step_params params;
    uint64_t pad5[8];
    struct executor_record executors[MAX_EXECUTORS];
    struct op_state ops[];
};

static inline void *at(void *base, uint64_t offset) { return (char *)base + offset; }

static inline struct step_board *board_at(void *base) {
    return at(base, ((struct arena_header *)base)->board);
}

/* Whether everybody leaves the running step. */
static inline int aborted(const struct arena_header *header) {
    return __atomic_load_n(&header->abort, __ATOMIC_ACQUIRE) != 0 ||
           __atomic_load_n(&header->stop, __ATOMIC_ACQUIRE) != 0;
}

static inline uint32_t progress_word(uint32_t step_seq, uint32_t num_ops) {
    return (step_seq << PROGRESS_OP_BITS) | num_ops;
}

static inline uint32_t progress_ops(uint32_t word, uint32_t step_seq) {
    uint32_t mask = (1u << PROGRESS_OP_BITS) - 1;
    return (word & ~mask) == (step_seq << PROGRESS_OP_BITS) ? (word & mask) : 0;
}

/* wait.c */
int futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns);
void futex_wake_all(uint32_t *word);
static inline void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* layer_stream.c */
/* Whether the streamed layer of this op has landed. */
int layer_has_landed(const struct layer_stream *stream, const struct step_op *op,
                     uint32_t stream_base);
/* Point a streamed op's weights at the buffer its layer is in. */
void relocate_op(struct step_op *op, const struct layer_stream *stream, uint32_t stream_base);
/* Free the buffer of the layer whose last op is complete. */
void layer_stream_release(struct layer_stream *stream, const struct step_op *op,
                          uint32_t stream_base);

/* neuron_ops.c: feed forward over neuron-major rows */
uint32_t neuron_op_units(const struct step_op *op, const struct step_params *step);
void neuron_op_run(void *base, const struct step_op *op, const struct step_params *step,
                   struct executor_record *executor, uint32_t first, uint32_t last);
/* The cluster, in its layer, of a unit of an op for a few tokens. */
uint32_t cluster_of_unit(void *base, const struct step_op *op, uint32_t unit);
/* Neurons of unit `unit` of an OP_LATE_CLUSTERS that were not here, by their numbers in the cache:
 * the last one of the first *left in its list; UINT32_MAX when there is none. From the last on,
 * since reads land in about the order in which they were wanted: who waits for the last one of a
 * cluster sleeps once and finds the others landed. */
uint32_t late_neuron(void *base, const struct step_op *op, uint32_t unit, uint32_t *left);

/* program.c: tiles of (32, op->cols) x `tokens` input rows of the op from x on, as matmul_tiles.
 * Rows of x may be padded; the kernel wants (tokens, cols) without holes. */
void matmul_group(const struct step_op *op, int type, float *out, size_t out_stride,
                  const void *weight, size_t tiles, const char *x, size_t tokens);
/* program.c: the units of one op, and the work of units [first, last) by one executor */
uint32_t op_num_units(const struct step_op *op, const struct step_params *step);
void op_run(void *base, const struct step_op *op, const struct step_params *step,
            struct executor_record *executor, uint32_t first, uint32_t last);

#endif
