/* Layers that pass through a ring of buffers (engine_api.h tells how loads are numbered). */
#include <assert.h>

#include "board.h"

struct layer_stream *layer_stream_at(void *base, uint64_t offset) { return at(base, offset); }

void layer_stream_land(void *base, uint64_t offset) {
    struct layer_stream *stream = at(base, offset);
    word_store_wake(&stream->landed, stream->landed + 1);
}

int layer_stream_wait_free(void *base, uint64_t offset, uint32_t load, int64_t timeout_ns) {
    struct layer_stream *stream = at(base, offset);
    uint64_t end = monotonic_ns() + (uint64_t)timeout_ns;
    for (;;) {
        uint32_t consumed = __atomic_load_n(&stream->consumed, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(&stream->stop, __ATOMIC_ACQUIRE) ||
            __atomic_load_n(&stream->schedule, __ATOMIC_ACQUIRE) != stream->serving)
            return 0;
        if ((int32_t)(load - consumed) < (int32_t)stream->num_buffers)
            return 1;
        int64_t left = (int64_t)(end - monotonic_ns());
        if (left <= 0)
            return 0;
        futex_wait(&stream->consumed, consumed, left);
    }
}

uint32_t layer_stream_end_pass(void *base, uint64_t offset) {
    struct layer_stream *stream = at(base, offset);
    uint32_t rest = stream->consumed % stream->num_loads;
    if (rest)
        word_store_wake(&stream->consumed, stream->consumed + stream->num_loads - rest);
    return stream->consumed;
}

void layer_stream_switch(void *base, uint64_t offset, uint32_t schedule, uint32_t num_loads) {
    struct layer_stream *stream = at(base, offset);
    stream->num_loads = num_loads;
    __atomic_store_n(&stream->schedule, schedule, __ATOMIC_SEQ_CST);
    futex_wake_all(&stream->consumed);
}

uint32_t layer_stream_routed(void *base, uint64_t offset) {
    struct layer_stream *stream = at(base, offset);
    return __atomic_load_n(&stream->routed, __ATOMIC_ACQUIRE);
}

int layer_stream_wait_serving(void *base, uint64_t offset, int64_t timeout_ns) {
    struct layer_stream *stream = at(base, offset);
    uint32_t serving = __atomic_load_n(&stream->serving, __ATOMIC_ACQUIRE);
    if (serving != stream->schedule)
        futex_wait(&stream->serving, serving, timeout_ns);
    return __atomic_load_n(&stream->serving, __ATOMIC_ACQUIRE) == stream->schedule;
}

void layer_stream_begin(void *base, uint64_t offset) {
    struct layer_stream *stream = at(base, offset);
    stream->landed = stream->consumed = stream->routed = 0;
    word_store_wake(&stream->serving, __atomic_load_n(&stream->schedule, __ATOMIC_ACQUIRE));
}

void layer_stream_stop(void *base, uint64_t offset) {
    struct layer_stream *stream = at(base, offset);
    __atomic_store_n(&stream->stop, 1, __ATOMIC_SEQ_CST);
    futex_wake_all(&stream->consumed);
}

void layer_stream_fail(void *base, uint64_t offset, uint32_t error) {
    struct layer_stream *stream = at(base, offset);
    __atomic_store_n(&stream->error, error, __ATOMIC_SEQ_CST);
    futex_wake_all(&stream->landed);
}

int layer_has_landed(const struct layer_stream *stream, const struct step_op *op,
                     uint32_t stream_base) {
    uint32_t landed = __atomic_load_n(&stream->landed, __ATOMIC_ACQUIRE);
    return (int32_t)(landed - (stream_base + op->stream_index)) >= 0;
}

void relocate_op(struct step_op *op, const struct layer_stream *stream, uint32_t stream_base) {
    uint32_t load = stream_base + op->stream_index - 1;
    uint64_t shift = load % stream->num_buffers * stream->buffer_bytes;
    assert(op->weight != 0 || op->up_weight != 0);
    if (op->weight && !(op->flags & OPF_GATE_TILES))
        op->weight += shift;
    if (op->up_weight)
        op->up_weight += shift;
}

void layer_stream_release(struct layer_stream *stream, const struct step_op *op,
                          uint32_t stream_base) {
    /* Never backwards: who completed an earlier layer may come here after who completed a later. */
    uint32_t free = stream_base + op->stream_index;
    uint32_t seen = __atomic_load_n(&stream->consumed, __ATOMIC_ACQUIRE);
    while ((int32_t)(free - seen) > 0)
        if (__atomic_compare_exchange_n(&stream->consumed, &seen, free, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_ACQUIRE))
            break;
    futex_wake_all(&stream->consumed);
}
