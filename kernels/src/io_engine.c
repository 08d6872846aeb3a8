/* Requests, pieces and what a result means; the same for every back end. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "io_engine.h"

static _Thread_local char thread_mark;

static bool is_owner(const struct io_engine *engine) {
    return engine->owner == NULL || engine->owner == &thread_mark;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void list_push(struct io_engine *engine, struct index_list *list, uint32_t index) {
    engine->requests[index].next = NO_INDEX;
    if (list->head == NO_INDEX)
        list->head = index;
    else
        engine->requests[list->tail].next = index;
    list->tail = index;
}

static uint32_t list_pop(struct io_engine *engine, struct index_list *list) {
    uint32_t index = list->head;
    list->head = engine->requests[index].next;
    return index;
}

static uint32_t num_in_flight(const struct io_engine *engine) {
    return engine->info.queue_depth - engine->num_free_pieces;
}

static uint32_t num_outstanding(const struct io_engine *engine) {
    return engine->info.max_requests - engine->num_free_requests;
}

/* All of the request's pieces have ended: say so. */
static void finish(struct io_engine *engine, uint32_t index) {
    struct request_slot *slot = &engine->requests[index];
    slot->latency_ns = monotonic_ns() - slot->start_ns;
    list_push(engine, &engine->completed, index);
    engine->num_completed++;
    engine->info.num_requests++;
    const struct read_request *request = &slot->request;
    if (request->done_word)
        word_store_wake(request->done_word,
                        slot->status ? request->failed_value : request->done_value);
}

static void fail(struct request_slot *slot, uint64_t offset, int32_t status) {
    uint64_t at = offset - slot->request.offset;
    if (slot->status == 0 || at < slot->failed_at)
        slot->failed_at = at;
    if (slot->status == 0)
        slot->status = status;
}

static void cancel(struct request_slot *slot) {
    if (slot->issued < slot->expected)
        fail(slot, slot->request.offset + slot->issued, -ECANCELED);
}

static void issue(struct io_engine *engine, uint32_t index) {
    engine->info.num_reads++;
    engine->calls->issue(engine, index);
}

static void next_piece(struct io_engine *engine, uint32_t request) {
    struct request_slot *slot = &engine->requests[request];
    uint32_t index = engine->free_pieces[--engine->num_free_pieces];
    uint64_t needed = slot->expected - slot->issued, asked = slot->request.num_bytes - slot->issued;
    engine->pieces[index] = (struct piece){
        .offset = slot->request.offset + slot->issued,
        .target = (char *)slot->request.target + slot->issued,
        .num_bytes = asked < PIECE_BYTES ? (uint32_t)asked : PIECE_BYTES,
        .needed = needed < PIECE_BYTES ? (uint32_t)needed : PIECE_BYTES,
        .request = request,
        .fd_index = engine->info.is_direct ? FD_DIRECT : FD_BUFFERED,
    };
    slot->issued += engine->pieces[index].needed;
    slot->num_pieces++;
    issue(engine, index);
}

/* Issue pieces of waiting requests, first come first served, while the queue has room. */
static void issue_waiting(struct io_engine *engine) {
    while (engine->waiting.head != NO_INDEX) {
        struct request_slot *slot = &engine->requests[engine->waiting.head];
        if (slot->status == 0 && slot->issued < slot->expected) {
            if (engine->num_free_pieces == 0)
                return;
            next_piece(engine, engine->waiting.head);
        } else {
            uint32_t index = list_pop(engine, &engine->waiting);
            slot->is_waiting = false;
            if (slot->num_pieces == 0)
                finish(engine, index);
        }
    }
}

/* Give the page cache's copy back; only whole pages go. */
static void drop_pages(const struct io_engine *engine, uint64_t offset, uint64_t num_bytes) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), start = offset / page * page;
    posix_fadvise(engine->file.fds[FD_BUFFERED], (off_t)start,
                  (off_t)((offset + num_bytes - start + page - 1) / page * page),
                  POSIX_FADV_DONTNEED);
}

/* Whether the piece is to be read on, at the place where it stopped. */
static bool goes_on(struct io_engine *engine, struct piece *piece, int32_t result) {
    if (result == -EINTR || result == -EAGAIN)
        return piece->num_retries++ < MAX_RETRIES;
    bool is_direct = piece->fd_index == FD_DIRECT;
    if (is_direct && (result == -EINVAL || result == -EOPNOTSUPP)) {
        /* A file system that refuses direct reads only now and then. */
        piece->fd_index = FD_BUFFERED;
        engine->info.is_direct = 0;
        return true;
    }
    if (result <= 0 || (uint32_t)result >= piece->needed)
        return false;
    /* A short direct read may end inside a sector: the next one starts at its beginning, and when
     * that is no progress, the page cache takes over. */
    uint32_t landed = (uint32_t)result;
    if (is_direct)
        landed -= landed % engine->file.offset_alignment;
    if (landed == 0)
        piece->fd_index = FD_BUFFERED;
    piece->num_retries = 0;
    piece->offset += landed;
    piece->target += landed;
    piece->num_bytes -= landed;
    piece->needed -= landed;
    engine->info.bytes_read += landed;
    return true;
}

void io_piece_done(struct io_engine *engine, uint32_t index, int32_t result) {
    struct piece *piece = &engine->pieces[index];
    struct request_slot *slot = &engine->requests[piece->request];
    if (piece->fd_index == FD_BUFFERED && result > 0)
        drop_pages(engine, piece->offset, (uint32_t)result);
    /* Also when another piece has failed: the caller is told where the first gap is. */
    if (goes_on(engine, piece, result)) {
        engine->info.num_continued++;
        issue(engine, index);
        return;
    }
    if (result <= 0)
        fail(slot, piece->offset, result ? result : -ENODATA);
    else
        engine->info.bytes_read += piece->needed;
    uint32_t request = piece->request;
    engine->free_pieces[engine->num_free_pieces++] = index;
    if (--slot->num_pieces == 0 && !slot->is_waiting)
        finish(engine, request);
}

static bool is_valid(const struct io_engine *engine, const struct read_request *request) {
    uint64_t alignment = engine->info.offset_alignment;
    return request->num_bytes > 0 && request->offset < engine->info.file_bytes &&
           request->num_bytes <= UINT64_MAX - request->offset && request->target != NULL &&
           request->offset % alignment == 0 && request->num_bytes % alignment == 0 &&
           (uintptr_t)request->target % engine->info.memory_alignment == 0 &&
           (uintptr_t)request->done_word % sizeof(uint32_t) == 0;
}

static void take(struct io_engine *engine, const struct read_request *request, uint64_t now_ns) {
    uint32_t index = list_pop(engine, &engine->free);
    uint64_t left = engine->info.file_bytes - request->offset;
    engine->num_free_requests--;
    engine->requests[index] = (struct request_slot){
        .request = *request,
        .expected = request->num_bytes < left ? request->num_bytes : left,
        .start_ns = now_ns,
        .is_waiting = true,
    };
    list_push(engine, &engine->waiting, index);
}

int32_t io_submit(struct io_engine *engine, const struct read_request *requests, uint32_t n) {
    if (!is_owner(engine))
        return -EPERM;
    for (uint32_t i = 0; i < n; i++)
        if (!is_valid(engine, &requests[i]))
            return -EINVAL;
    engine->owner = &thread_mark;
    uint64_t now_ns = monotonic_ns();
    uint32_t taken = least(n, engine->num_free_requests);
    for (uint32_t i = 0; i < taken; i++)
        take(engine, &requests[i], now_ns);
    issue_waiting(engine);
    engine->calls->flush(engine); /* a failure shows again, and is told, in io_reap */
    return (int32_t)taken;
}

static uint32_t give(struct io_engine *engine, struct read_completion *completions, uint32_t max) {
    uint32_t count = 0;
    for (; count < max && engine->num_completed > 0; count++) {
        uint32_t index = list_pop(engine, &engine->completed);
        const struct request_slot *slot = &engine->requests[index];
        completions[count] = (struct read_completion){
            .tag = slot->request.tag,
            .num_bytes = slot->status ? slot->failed_at : slot->expected,
            .latency_ns = slot->latency_ns,
            .status = slot->status,
        };
        engine->num_completed--;
        list_push(engine, &engine->free, index);
        engine->num_free_requests++;
    }
    return count;
}

/* Read on until `wanted` requests have ended or the time is over. */
static int32_t advance(struct io_engine *engine, uint32_t wanted, int64_t timeout_ns) {
    uint64_t end_ns = timeout_ns > 0 ? monotonic_ns() + (uint64_t)timeout_ns : 0;
    int64_t left_ns = timeout_ns;
    do {
        uint32_t missing = wanted > engine->num_completed ? wanted - engine->num_completed : 0;
        /* A queue with more to come is filled up at each result; else sleep as long as possible. */
        uint32_t results = engine->waiting.head == NO_INDEX ? missing : least(missing, 1);
        results = left_ns > 0 ? least(results, num_in_flight(engine)) : 0;
        int32_t status = engine->calls->wait(engine, results, left_ns);
        issue_waiting(engine);
        if (status == 0)
            status = engine->calls->flush(engine);
        if (status != 0)
            return status;
        if (end_ns && engine->num_completed < wanted)
            left_ns = (int64_t)(end_ns - monotonic_ns());
    } while (engine->num_completed < wanted && left_ns > 0);
    return 0;
}

int32_t io_reap(struct io_engine *engine, struct read_completion *completions, uint32_t max,
                uint32_t min_wait, int64_t timeout_ns) {
    if (!is_owner(engine))
        return -EPERM;
    uint32_t wanted = least(least(min_wait, max), num_outstanding(engine));
    if (num_in_flight(engine) > 0 && engine->num_completed < max) {
        int32_t status = advance(engine, wanted, timeout_ns);
        if (status != 0)
            return status;
    }
    return (int32_t)give(engine, completions, max);
}

int32_t io_register_memory(struct io_engine *engine, void *base, uint64_t num_bytes) {
    if (engine->owner != NULL)
        return -EBUSY;
    int32_t status = engine->calls->register_memory(engine, base, num_bytes);
    if (status == 0)
        engine->info.registered_bytes += num_bytes;
    return status;
}

void io_get_info(const struct io_engine *engine, struct io_info *info) {
    *info = engine->info;
    info->num_in_flight = num_in_flight(engine);
    info->num_outstanding = num_outstanding(engine);
}

static void release(struct io_engine *engine) {
    io_file_close(&engine->file);
    free(engine->requests);
    free(engine->pieces);
    free(engine->free_pieces);
    free(engine);
}

static int32_t start_backend(struct io_engine *engine, uint32_t wanted) {
    int32_t status = 0;
    if (wanted != IO_POOL) {
        engine->calls = &io_uring_calls;
        status = io_uring_calls.start(engine);
        engine->info.uring_status = status;
    }
    if (wanted == IO_POOL || (wanted == IO_AUTO && status != 0)) {
        engine->calls = &io_pool_calls;
        status = io_pool_calls.start(engine);
    }
    engine->info.backend = engine->calls->backend;
    return status;
}

static int32_t fill_tables(struct io_engine *engine, const struct io_options *options) {
    uint32_t depth = options->queue_depth, num_requests = options->max_requests;
    engine->requests = calloc(num_requests, sizeof *engine->requests);
    engine->pieces = calloc(depth, sizeof *engine->pieces);
    engine->free_pieces = calloc(depth, sizeof *engine->free_pieces);
    if (!engine->requests || !engine->pieces || !engine->free_pieces)
        return -ENOMEM;
    engine->free.head = engine->waiting.head = engine->completed.head = NO_INDEX;
    for (uint32_t i = 0; i < num_requests; i++)
        list_push(engine, &engine->free, i);
    for (uint32_t i = 0; i < depth; i++)
        engine->free_pieces[i] = depth - 1 - i;
    engine->num_free_requests = num_requests;
    engine->num_free_pieces = depth;
    return 0;
}

int32_t io_open(const char *path, const struct io_options *options, struct io_engine **engine) {
    *engine = NULL;
    if (options->queue_depth == 0 || options->queue_depth > MAX_QUEUE_DEPTH ||
        options->max_requests < options->queue_depth || options->max_requests > MAX_REQUESTS ||
        options->backend > IO_POOL || options->flags > IO_BUFFERED)
        return -EINVAL;
    struct io_engine *opened = calloc(1, sizeof *opened);
    if (!opened)
        return -ENOMEM;
    int32_t status = io_file_open(&opened->file, path, options->flags & IO_BUFFERED);
    opened->info.file_bytes = opened->file.num_bytes;
    opened->info.is_direct = opened->file.fds[FD_DIRECT] >= 0;
    opened->info.offset_alignment = opened->file.offset_alignment;
    opened->info.memory_alignment = opened->file.memory_alignment;
    opened->info.queue_depth = options->queue_depth;
    opened->info.max_requests = options->max_requests;
    if (status == 0)
        status = fill_tables(opened, options);
    if (status == 0)
        status = start_backend(opened, options->backend);
    if (status != 0) {
        release(opened);
        return status;
    }
    *engine = opened;
    return 0;
}

int32_t io_close(struct io_engine *engine, int64_t timeout_ns) {
    if (num_in_flight(engine) > 0 && !is_owner(engine))
        return -EPERM;
    for (uint32_t i = engine->waiting.head; i != NO_INDEX; i = engine->requests[i].next)
        cancel(&engine->requests[i]);
    issue_waiting(engine);
    /* Every request that has not ended now has a read in flight. */
    if (num_in_flight(engine) > 0) {
        int32_t status = advance(engine, num_outstanding(engine), timeout_ns);
        if (status != 0)
            return status;
    }
    if (num_in_flight(engine) > 0)
        return -ETIMEDOUT;
    engine->calls->stop(engine);
    release(engine);
    return 0;
}
