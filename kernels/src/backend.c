/* How a back end takes part in steps (backend.h). */
#include "backend.h"

void backend_set(void *base, int has_backend) {
    struct arena_header *header = base;
    __atomic_store_n(&header->has_backend, has_backend != 0, __ATOMIC_SEQ_CST);
    futex_wake_all(&board_at(base)->decided);
}

int backend_may_take(void *base, const struct step_op *op) {
    const struct arena_header *header = base;
    int has_factors = op->kind == OP_MATMUL && op->up_bias != 0; /* graphs have none */
    return op->unit == UNIT_NPU && (op->kind == OP_MATMUL || op->kind == OP_FEED_FORWARD) &&
           !has_factors && (op->flags & OPF_LOGIT_ROWS) == 0 &&
           __atomic_load_n(&header->has_backend, __ATOMIC_ACQUIRE) != 0;
}

int backend_takes(const struct backend_calls *backend, const struct step_op *op,
                  const struct step_params *step) {
    if (step->flags & STEP_DRY)
        return 0;
    return backend->takes(backend->handle, op, step->num_tokens) == 1;
}

int backend_run(const struct backend_calls *backend, struct executor_record *record,
                const struct step_op *op, const struct step_params *step, uint32_t index) {
    __atomic_store_n(&record->in_backend, index + 1, __ATOMIC_RELEASE);
    int32_t failed = backend->run(backend->handle, op, step->num_tokens);
    __atomic_store_n(&record->in_backend, 0, __ATOMIC_RELEASE);
    return failed;
}

void backend_decided(struct step_board *board, uint32_t step_seq, uint32_t index) {
    uint32_t word = progress_word(step_seq, index + 1);
    if (__atomic_load_n(&board->decided, __ATOMIC_RELAXED) != word)
        word_store_wake(&board->decided, word);
}

uint32_t backend_undecided(void *base, struct step_board *board, uint32_t step_seq,
                           uint32_t index) {
    const struct arena_header *header = base;
    uint32_t word = __atomic_load_n(&board->decided, __ATOMIC_ACQUIRE);
    if (progress_ops(word, step_seq) > index ||
        __atomic_load_n(&header->has_backend, __ATOMIC_ACQUIRE) == 0)
        return BACKEND_DECIDED;
    return word;
}
