/* The step board and the executors' loop (board.h tells how a step is shared). */
#include <assert.h>

#include "backend.h"
#include "board.h"
#include "neuron_cache.h"
#include "trace.h"

#define WAIT_SLICE_NS 100000000ll /* every waiter re-reads abort, stop and its place this often */

/* ---- the coordinator's side ---- */

uint32_t step_open(void *base) {
    struct step_board *board = board_at(base);
    uint32_t seq = board->step_seq + 1;
    if (seq == 0) /* 0 means idle in busy_seq */
        seq = 1;
    __atomic_store_n(&board->step_seq, seq, __ATOMIC_SEQ_CST);
    return seq;
}

void step_ring(void *base, uint32_t step_seq) {
    struct step_board *board = board_at(base);
    const struct step_params *params = &board->params;
    assert(params->program_ops <= board->max_ops);
    const struct step_op *ops = at(base, params->program);
    int used[2] = {0, 0};
    for (uint32_t i = 0; i < params->program_ops; i++)
        used[ops[i].unit] = 1;
    __atomic_store_n(&board->decided, progress_word(step_seq, 0), __ATOMIC_SEQ_CST);
    __atomic_store_n(&board->progress, progress_word(step_seq, 0), __ATOMIC_SEQ_CST);
    for (int unit = 0; unit < 2; unit++)
        if (used[unit])
            word_store_wake(&board->doorbell[unit], step_seq);
}

/* Sleep until progress leaves `word` or a slice is over. */
static void sleep_on_progress(struct step_board *board, uint32_t word, int64_t slice_ns) {
    __atomic_fetch_add(&board->sleepers, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&board->progress, __ATOMIC_SEQ_CST) == word)
        futex_wait(&board->progress, word, slice_ns);
    __atomic_fetch_sub(&board->sleepers, 1, __ATOMIC_SEQ_CST);
}

int step_wait(void *base, uint32_t step_seq, int64_t timeout_ns) {
    struct step_board *board = board_at(base);
    uint64_t end = monotonic_ns() + (uint64_t)timeout_ns;
    for (;;) {
        uint32_t finished = __atomic_load_n(&board->finished, __ATOMIC_ACQUIRE);
        if (finished == step_seq)
            return STEP_DONE;
        if (aborted(base))
            return STEP_ABORTED;
        int64_t left = (int64_t)(end - monotonic_ns());
        if (left <= 0)
            return STEP_TIMEOUT;
        futex_wait(&board->finished, finished, left < WAIT_SLICE_NS ? left : WAIT_SLICE_NS);
    }
}

/* ---- the executors' side ---- */

uint32_t executor_attach(void *base, uint32_t executor, uint32_t unit, int32_t pid) {
    struct executor_record *record = executor_at(base, executor);
    record->unit = unit;
    record->pid = pid;
    record->kernel_ns = record->wait_ns = record->steps = 0;
    record->seen_seq = __atomic_load_n(&board_at(base)->doorbell[unit], __ATOMIC_ACQUIRE);
    __atomic_store_n(&record->busy_seq, 0, __ATOMIC_SEQ_CST);
    return __atomic_add_fetch(&record->generation, 1, __ATOMIC_SEQ_CST);
}

struct walker { /* one executor inside one step */
    void *base;
    struct step_board *board;
    struct executor_record *record;
    uint32_t executor;
    uint32_t generation;
    uint32_t seq;
    struct step_params step;
    uint64_t before_ns;      /* of the running op, with STEP_TIMED: when it was come to, */
    uint64_t layer_stall_ns; /* waited for its layer before it began, */
    uint64_t row_stall_ns;   /* and for rows inside it */
    uint64_t idle_since_ns;  /* the step's begin, or the end of the last op with a unit of ours */
    uint64_t idle_stall_ns;  /* waited for layers since then */
    const struct backend_calls *backend; /* NULL: all is computed here */
};

static int must_leave(const struct walker *w) {
    return aborted(w->base) ||
           __atomic_load_n(&w->record->generation, __ATOMIC_ACQUIRE) != w->generation;
}

/* Claim the next units of an op: the first of them, or num_units when none is left. -1 in *stale
 * when a newer step owns the word. */
static uint32_t claim(struct walker *w, struct op_state *state, uint32_t num_units, uint32_t chunk,
                      int *stale) {
    uint64_t word = __atomic_load_n(&state->claimed, __ATOMIC_ACQUIRE);
    for (;;) {
        uint32_t owner = (uint32_t)(word >> 32);
        uint32_t taken = owner == w->seq ? (uint32_t)word : 0;
        if (owner != w->seq && (int32_t)(owner - w->seq) > 0) {
            *stale = -1;
            return num_units;
        }
        if (taken >= num_units)
            return num_units;
        uint32_t next = num_units - taken > chunk ? taken + chunk : num_units;
        if (__atomic_compare_exchange_n(&state->claimed, &word, (uint64_t)w->seq << 32 | next, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return taken;
    }
}

static void count_done(struct walker *w, struct op_state *state, uint32_t num_units) {
    uint64_t word = __atomic_load_n(&state->done, __ATOMIC_ACQUIRE);
    uint64_t next;
    do {
        uint32_t done = (uint32_t)(word >> 32) == w->seq ? (uint32_t)word : 0;
        next = (uint64_t)w->seq << 32 | (done + num_units);
    } while (!__atomic_compare_exchange_n(&state->done, &word, next, 0, __ATOMIC_SEQ_CST,
                                          __ATOMIC_ACQUIRE));
}

/* Move progress over every op that is complete; wake sleepers when it moved. */
static void advance(struct walker *w, const struct step_op *ops) {
    struct step_board *board = w->board;
    int moved = 0;
    for (;;) {
        uint32_t word = __atomic_load_n(&board->progress, __ATOMIC_SEQ_CST);
        uint32_t index = progress_ops(word, w->seq);
        if (word != progress_word(w->seq, index) || index >= w->step.program_ops)
            break;
        uint32_t num_units = op_num_units(&ops[index], &w->step);
        uint64_t want = (uint64_t)w->seq << 32 | num_units;
        if (num_units && __atomic_load_n(&board->ops[index].done, __ATOMIC_SEQ_CST) != want)
            break;
        if (__atomic_compare_exchange_n(&board->progress, &word, progress_word(w->seq, index + 1),
                                        0, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE)) {
            moved = 1;
            if (ops[index].flags & OPF_STREAM_LAST)
                layer_stream_release(at(w->base, w->step.stream), &ops[index],
                                     w->step.stream_base);
            if (index + 1 == w->step.program_ops)
                word_store_wake(&board->finished, w->seq);
        }
    }
    if (moved && __atomic_load_n(&board->sleepers, __ATOMIC_SEQ_CST) != 0)
        futex_wake_all(&board->progress);
}

/* Wait until ops [0, after) are complete: 0, or -1 when the step is over for this executor. */
static int wait_for_ops(struct walker *w, uint32_t after) {
    struct step_board *board = w->board;
    for (uint32_t polls = 0;; polls++) {
        uint32_t word = __atomic_load_n(&board->progress, __ATOMIC_ACQUIRE);
        if ((word >> PROGRESS_OP_BITS) != (w->seq & ((1u << (32 - PROGRESS_OP_BITS)) - 1)))
            return -1;
        if (progress_ops(word, w->seq) >= after)
            return 0;
        if (polls < w->step.spin_limit) {
            spin_pause();
            continue;
        }
        if (must_leave(w))
            return -1;
        __atomic_fetch_add(&w->record->heartbeat, 1, __ATOMIC_RELAXED);
        sleep_on_progress(board, word, WAIT_SLICE_NS);
    }
}

/* Whether others have ended the step: who wakes late must not wait for loads that are gone. */
static int is_over(const struct walker *w) {
    return __atomic_load_n(&w->board->finished, __ATOMIC_ACQUIRE) == w->seq ||
           __atomic_load_n(&w->board->step_seq, __ATOMIC_ACQUIRE) != w->seq;
}

/* Wait until a streamed op's layer is in its buffer: 0, or -1 when the step is over. */
static int wait_for_layer(struct walker *w, const struct step_op *op) {
    struct layer_stream *stream = at(w->base, w->step.stream);
    if (layer_has_landed(stream, op, w->step.stream_base))
        return 0;
    uint64_t start_ns = monotonic_ns();
    for (;;) {
        uint32_t landed = __atomic_load_n(&stream->landed, __ATOMIC_ACQUIRE);
        if (layer_has_landed(stream, op, w->step.stream_base))
            break;
        if (must_leave(w) || is_over(w) || __atomic_load_n(&stream->error, __ATOMIC_ACQUIRE) != 0)
            return -1;
        __atomic_fetch_add(&w->record->heartbeat, 1, __ATOMIC_RELAXED);
        futex_wait(&stream->landed, landed, WAIT_SLICE_NS);
    }
    w->layer_stall_ns = monotonic_ns() - start_ns;
    __atomic_fetch_add(&stream->stall_ns, w->layer_stall_ns, __ATOMIC_RELAXED);
    return 0;
}

/* Wait until the back end's executor has taken the op or left it to all: 0, or -1 when the step is
 * over for this executor. */
static int wait_for_decision(struct walker *w, uint32_t index) {
    uint32_t decided;
    while ((decided = backend_undecided(w->base, w->board, w->seq, index)) != BACKEND_DECIDED) {
        if (must_leave(w) || is_over(w))
            return -1;
        __atomic_fetch_add(&w->record->heartbeat, 1, __ATOMIC_RELAXED);
        futex_wait(&w->board->decided, decided, WAIT_SLICE_NS);
    }
    return 0;
}

static int waits_for_rows(const struct step_op *op) {
    return op->kind == OP_LATE_CLUSTERS || op->kind == OP_AWAIT_ROWS;
}

/* Wait until all rows of a late cluster have landed: 0, or -1 when one of them failed or the step
 * is over. Counts those that had not. */
static int wait_for_cluster(struct walker *w, const struct step_op *op, uint32_t unit,
                            uint32_t *num_late) {
    uint32_t left = UINT32_MAX, neuron;
    while ((neuron = late_neuron(w->base, op, unit, &left)) != UINT32_MAX) {
        int landed;
        while ((landed = neuron_cache_wait(at(w->base, op->cache), neuron, WAIT_SLICE_NS)) == 0) {
            __atomic_fetch_add(&w->record->heartbeat, 1, __ATOMIC_RELAXED);
            if (must_leave(w))
                return -1;
        }
        if (landed < 0)
            return -1;
        *num_late += 1;
    }
    return 0;
}

/* The same for late clusters [first, last). */
static int wait_for_rows(struct walker *w, const struct step_op *op, uint32_t first,
                         uint32_t last) {
    for (uint32_t unit = first; unit < last; unit++) {
        uint64_t start_ns = monotonic_ns();
        uint32_t num_late = 0, cluster = cluster_of_unit(w->base, op, unit);
        if (wait_for_cluster(w, op, unit, &num_late) != 0)
            return -1;
        if (num_late == 0)
            continue;
        uint64_t end_ns = monotonic_ns();
        struct layer_activity *activity = at(w->base, op->activity);
        __atomic_fetch_add(&activity->stall_ns, end_ns - start_ns, __ATOMIC_RELAXED);
        w->row_stall_ns += end_ns - start_ns;
        if (is_traced(&w->step))
            trace_cluster(w->base, w->record, op->layer, cluster, TRACE_WAIT, start_ns, end_ns,
                          num_late, num_late);
    }
    return 0;
}

/* Small ops by single units; big ones in about eight claims an executor. Clusters whose rows are
 * waited for one by one: another one's rows may have landed. */
static uint32_t claim_chunk(const struct walker *w, const struct step_op *op, uint32_t num_units) {
    if (waits_for_rows(op))
        return 1;
    uint32_t parties = w->step.num_parties[op->unit];
    uint32_t chunk = num_units / (8 * (parties ? parties : 1));
    return chunk ? chunk : 1;
}

/* An op is over for this executor: count its times, and write them down where it did something. */
static void count_times(struct walker *w, uint32_t index, const struct step_op *op,
                        uint64_t start_ns, uint32_t num_units) {
    uint64_t end_ns = monotonic_ns();
    w->record->kernel_ns += end_ns - start_ns - w->row_stall_ns;
    w->record->wait_ns += start_ns - w->before_ns - w->layer_stall_ns;
    w->idle_stall_ns += w->layer_stall_ns;
    if (num_units == 0)
        return;
    if (is_traced(&w->step) && w->record->trace != 0)
        trace_put(w->base, w->record->trace, &(struct trace_record){
            .start_ns = start_ns, .end_ns = end_ns, .wait_ns = start_ns - w->idle_since_ns,
            .value = w->idle_stall_ns + w->row_stall_ns, .step_seq = w->seq, .what = TRACE_OP,
            .kind = op->kind, .layer = op->layer, .index = index, .count = num_units,
            .executor = w->executor});
    w->idle_since_ns = end_ns;
    w->idle_stall_ns = 0;
}

/* Take part in one op: 0, or -1 when the step is over for this executor. */
static int walk_op(struct walker *w, const struct step_op *ops, uint32_t index) {
    struct step_op local = ops[index];
    const struct step_op *op = &local;
    int is_timed = (w->step.flags & STEP_TIMED) != 0;
    w->before_ns = is_timed ? monotonic_ns() : 0;
    w->layer_stall_ns = w->row_stall_ns = 0;
    if (wait_for_ops(w, op->after) != 0)
        return -1;
    if (op->stream_index) {
        if (wait_for_layer(w, op) != 0)
            return -1;
        relocate_op(&local, at(w->base, w->step.stream), w->step.stream_base);
    }
    int is_backends = backend_may_take(w->base, op);
    if (is_backends && w->backend == NULL && wait_for_decision(w, index) != 0)
        return -1;
    uint64_t start_ns = is_timed ? monotonic_ns() : 0;
    struct op_state *state = &w->board->ops[index];
    uint32_t num_units = op_num_units(op, &w->step);
    int is_taken = is_backends && w->backend && backend_takes(w->backend, op, &w->step);
    uint32_t chunk = is_taken ? num_units : claim_chunk(w, op, num_units);
    uint32_t mine = 0;
    int stale = 0;
    for (;;) {
        uint32_t first = claim(w, state, num_units, chunk, &stale);
        if (is_backends && w->backend && stale == 0)
            backend_decided(w->board, w->seq, index);
        if (first >= num_units)
            break;
        uint32_t last = num_units - first > chunk ? first + chunk : num_units;
        if ((w->step.flags & STEP_DRY) == 0) {
            if (waits_for_rows(op) && wait_for_rows(w, op, first, last) != 0)
                return -1;
            if (!is_taken || first != 0 ||
                backend_run(w->backend, w->record, op, &w->step, index) != 0)
                op_run(w->base, op, &w->step, w->record, first, last);
        }
        count_done(w, state, last - first);
        __atomic_fetch_add(&w->record->heartbeat, 1, __ATOMIC_RELAXED);
        mine += last - first;
        if (must_leave(w))
            return -1;
    }
    if (is_timed) /* first: once all ops are complete the coordinator looks at the counts */
        count_times(w, index, op, start_ns, mine);
    if (mine)
        advance(w, ops);
    return stale;
}

static void walk_step(struct walker *w) {
    const struct step_op *ops = at(w->base, w->step.program);
    w->idle_since_ns = (w->step.flags & STEP_TIMED) != 0 ? monotonic_ns() : 0;
    w->idle_stall_ns = 0;
    for (uint32_t index = 0; index < w->step.program_ops; index++)
        if (ops[index].unit == w->record->unit && walk_op(w, ops, index) != 0)
            return;
    w->record->steps++;
}

/* A modelled stall of the unit: nothing is done meanwhile, but who leaves the step leaves this. */
static void stall(struct walker *w) {
    uint64_t left = __atomic_exchange_n(&w->record->stall_ns, 0, __ATOMIC_ACQ_REL);
    uint64_t end = monotonic_ns() + left;
    uint32_t never = 0;
    while (left > 0 && !must_leave(w)) {
        futex_wait(&never, 0, left < WAIT_SLICE_NS ? (int64_t)left : WAIT_SLICE_NS);
        uint64_t now = monotonic_ns();
        left = now < end ? end - now : 0;
    }
}

int executor_serve(void *base, uint32_t executor, uint32_t generation, int64_t slice_ns,
                   const struct backend_calls *backend) {
    struct arena_header *header = base;
    struct walker w = {.base = base, .board = board_at(base), .record = executor_at(base, executor),
                       .executor = executor, .generation = generation, .backend = backend};
    uint32_t *doorbell = &w.board->doorbell[w.record->unit];
    uint64_t end = monotonic_ns() + (uint64_t)slice_ns;
    for (;;) {
        if (__atomic_load_n(&header->stop, __ATOMIC_ACQUIRE) != 0)
            return SERVE_STOPPED;
        if (__atomic_load_n(&w.record->generation, __ATOMIC_ACQUIRE) != generation)
            return SERVE_STALE;
        uint32_t rung = __atomic_load_n(doorbell, __ATOMIC_ACQUIRE);
        if (rung == w.record->seen_seq) {
            int64_t left = (int64_t)(end - monotonic_ns());
            if (left <= 0)
                return SERVE_SLICE;
            futex_wait(doorbell, rung, left);
            continue;
        }
        w.record->seen_seq = rung;
        w.seq = rung;
        __atomic_store_n(&w.record->busy_seq, rung, __ATOMIC_SEQ_CST);
        w.step = w.board->params;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        stall(&w);
        if (__atomic_load_n(&w.board->step_seq, __ATOMIC_ACQUIRE) == rung && !aborted(base))
            walk_step(&w);
        __atomic_store_n(&w.record->busy_seq, 0, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&w.record->heartbeat, 1, __ATOMIC_RELAXED);
    }
}
