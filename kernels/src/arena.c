/* The arena's header, and where board and executors lie in it. */
#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "board.h"

size_t board_bytes(uint32_t max_ops) {
    return sizeof(struct step_board) + max_ops * sizeof(struct op_state);
}

void arena_format(void *base, uint64_t arena_bytes, uint64_t board, uint32_t max_ops,
                  uint32_t num_executors) {
    assert(((uintptr_t)base & 4095) == 0);
    assert(board >= ARENA_HEADER_BYTES && board + board_bytes(max_ops) <= arena_bytes);
    assert(num_executors <= MAX_EXECUTORS && max_ops < (1u << PROGRESS_OP_BITS));
    struct arena_header *header = base;
    memset(header, 0, ARENA_HEADER_BYTES);
    memset(at(base, board), 0, board_bytes(max_ops));
    header->layout_version = ARENA_LAYOUT_VERSION;
    header->arena_bytes = arena_bytes;
    header->board = board;
    header->num_executors = num_executors;
    board_at(base)->max_ops = max_ops;
    __atomic_store_n(&header->magic, ARENA_MAGIC, __ATOMIC_RELEASE);
}

int arena_valid(const void *base) {
    const struct arena_header *header = base;
    return __atomic_load_n(&header->magic, __ATOMIC_ACQUIRE) == ARENA_MAGIC &&
           header->layout_version == ARENA_LAYOUT_VERSION;
}

struct arena_header *arena_header_at(void *base) { return base; }

int arena_release(void *base, uint64_t offset, uint64_t num_bytes) {
    return madvise(at(base, offset), num_bytes, MADV_REMOVE) == 0 ? 0 : errno;
}

struct step_params *step_params_at(void *base) { return &board_at(base)->params; }

struct executor_record *executor_at(void *base, uint32_t executor) {
    assert(executor < MAX_EXECUTORS);
    return &board_at(base)->executors[executor];
}

static void wake_everybody(void *base) {
    struct step_board *board = board_at(base);
    futex_wake_all(&board->progress);
    futex_wake_all(&board->finished);
    futex_wake_all(&board->doorbell[UNIT_CPU]);
    futex_wake_all(&board->doorbell[UNIT_NPU]);
}

void step_abort(void *base) {
    struct arena_header *header = base;
    __atomic_store_n(&header->abort, 1, __ATOMIC_SEQ_CST);
    wake_everybody(base);
}

void step_clear_abort(void *base) {
    struct arena_header *header = base;
    __atomic_store_n(&header->abort, 0, __ATOMIC_SEQ_CST);
}

void arena_stop(void *base) {
    struct arena_header *header = base;
    __atomic_store_n(&header->stop, 1, __ATOMIC_SEQ_CST);
    wake_everybody(base);
}
