/* The ring of orders (neuron_reads_api.h tells who may call what) and the loop that performs them.
 *
 * Ring: `pushed` is stored by who holds the cache's lock, `taken` and `ended` by the reader. Before
 * it sleeps, the reader sets `sleeping` and looks once more; who pushes stores `pushed` and looks
 * at `sleeping` after that. One of the two sees the other, so no order is slept over, and pushing
 * costs no system call while the reader is awake. */
#include <assert.h>
#include <errno.h>

#include "board.h"
#include "neuron_reads.h"
#include "trace.h"

#define BATCH 256u
#define MAX_ATTEMPTS 3u            /* reads of one neuron before it is given up */
#define WAIT_SLICE_NS 200000000ll  /* after which the stop word is looked at again */
#define STALL_NS 30000000000ull    /* a device that gives nothing for so long hangs */
#define SLOT_BITS 24
_Static_assert(NO_SLOT < 1u << SLOT_BITS, "a tag holds slot, attempt and neuron");
_Static_assert(sizeof(struct neuron_reads) % CACHE_LINE == 0, "the ring begins at a line");

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

static struct neuron_miss *place(struct neuron_reads *reads, uint32_t order) {
    return (struct neuron_miss *)(reads + 1) + (order & (reads->capacity - 1));
}

static int is_stopped(const struct neuron_reads *reads) {
    return __atomic_load_n(&reads->stop, __ATOMIC_SEQ_CST) != 0;
}

size_t neuron_reads_bytes(uint32_t capacity) {
    return sizeof(struct neuron_reads) + capacity * sizeof(struct neuron_miss);
}

struct neuron_reads *neuron_reads_at(void *base, uint64_t offset) { return at(base, offset); }

void neuron_reads_format(void *base, uint64_t offset, uint32_t capacity) {
    struct neuron_reads *reads = at(base, offset);
    assert(capacity > 0 && (capacity & (capacity - 1)) == 0);
    *reads = (struct neuron_reads){.capacity = capacity};
}

static void wake_reader(struct neuron_reads *reads) {
    if (__atomic_load_n(&reads->sleeping, __ATOMIC_SEQ_CST) &&
        __atomic_exchange_n(&reads->sleeping, 0, __ATOMIC_SEQ_CST))
        futex_wake_all(&reads->sleeping);
}

void neuron_reads_push(void *base, uint64_t offset, const struct neuron_miss *misses, uint32_t n) {
    struct neuron_reads *reads = at(base, offset);
    uint32_t pushed = reads->pushed;
    assert(pushed - __atomic_load_n(&reads->taken, __ATOMIC_ACQUIRE) + n <= reads->capacity);
    for (uint32_t i = 0; i < n; i++)
        *place(reads, pushed + i) = misses[i];
    __atomic_store_n(&reads->pushed, pushed + n, __ATOMIC_SEQ_CST);
    wake_reader(reads);
}

static int is_waiting(struct neuron_reads *reads, uint32_t neuron) {
    for (uint32_t order = reads->taken; order != reads->pushed; order++)
        if (place(reads, order)->neuron == neuron)
            return 1;
    return 0;
}

uint32_t neuron_reads_resume(void *base, uint64_t offset) {
    struct neuron_reads *reads = at(base, offset);
    const void *cache = at(base, reads->cache);
    uint32_t num_neurons = reads->file.neurons_per_layer * reads->file.num_layers, count = 0;
    for (uint32_t neuron = 0; neuron < num_neurons; neuron++) {
        if (neuron_cache_state(cache, neuron) != NEURON_LOADING || is_waiting(reads, neuron))
            continue;
        struct neuron_miss miss = {neuron, neuron_cache_slot(cache, neuron)};
        neuron_reads_push(base, offset, &miss, 1);
        count++;
    }
    reads->ended = reads->taken;
    return count;
}

void neuron_reads_stop(void *base, uint64_t offset) {
    struct neuron_reads *reads = at(base, offset);
    __atomic_store_n(&reads->stop, 1, __ATOMIC_SEQ_CST);
    wake_reader(reads);
}

static void sleep_until_pushed(struct neuron_reads *reads, int64_t timeout_ns) {
    __atomic_store_n(&reads->sleeping, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&reads->pushed, __ATOMIC_SEQ_CST) == reads->taken && !is_stopped(reads))
        futex_wait(&reads->sleeping, 1, timeout_ns);
    __atomic_store_n(&reads->sleeping, 0, __ATOMIC_RELAXED);
}

/* Orders that wait to be taken; 0 when the time is over or the ring stops. */
static uint32_t wait_for_orders(struct neuron_reads *reads, int64_t timeout_ns) {
    uint64_t end_ns = 0;
    while (!is_stopped(reads)) {
        uint32_t waiting = __atomic_load_n(&reads->pushed, __ATOMIC_ACQUIRE) - reads->taken;
        if (waiting > 0 || timeout_ns <= 0)
            return waiting;
        uint64_t now_ns = monotonic_ns();
        end_ns = end_ns ? end_ns : now_ns + (uint64_t)timeout_ns;
        if (now_ns >= end_ns)
            return 0;
        sleep_until_pushed(reads, (int64_t)(end_ns - now_ns));
    }
    return 0;
}

uint32_t neuron_reads_pop(void *base, uint64_t offset, struct neuron_miss *misses, uint32_t max,
                          int64_t timeout_ns) {
    struct neuron_reads *reads = at(base, offset);
    uint32_t n = max > 0 ? least(max, wait_for_orders(reads, timeout_ns)) : 0;
    for (uint32_t i = 0; i < n; i++)
        misses[i] = *place(reads, reads->taken + i);
    __atomic_store_n(&reads->taken, reads->taken + n, __ATOMIC_RELEASE);
    return n;
}

void neuron_reads_end(void *base, uint64_t offset, uint32_t neuron, uint32_t status) {
    struct neuron_reads *reads = at(base, offset);
    void *cache = at(base, reads->cache);
    if (status == 0) {
        neuron_cache_landed(cache, neuron);
    } else {
        __atomic_store_n(&reads->error, status, __ATOMIC_SEQ_CST);
        /* A holder that was lost keeps the lock until the cache is formatted. */
        while (neuron_cache_lock(cache, WAIT_SLICE_NS) != 0)
            if (is_stopped(reads))
                return;
        neuron_cache_failed(cache, neuron);
        neuron_cache_unlock(cache);
    }
    __atomic_store_n(&reads->ended, reads->ended + 1, __ATOMIC_RELEASE);
}

struct reader {
    void *base;
    uint64_t offset;
    struct neuron_reads *reads;
    struct io_engine *engine;
    uint32_t queue_depth;
    uint32_t num_under_way;
    uint32_t error;            /* of a neuron given up: no further order is taken */
    uint64_t progress_ns;      /* when a read ended, or the first one was submitted */
};

static struct read_request request_of(const struct reader *reader, struct neuron_miss order,
                                      uint32_t attempt) {
    const struct neuron_file *file = &reader->reads->file;
    const uint64_t *layers = at(reader->base, file->layer_offsets);
    uint32_t layer = order.neuron / file->neurons_per_layer;
    uint64_t bundle = (order.neuron % file->neurons_per_layer) * file->bundle_bytes;
    assert(layer < file->num_layers && order.slot < NO_SLOT);
    return (struct read_request){
        .offset = layers[layer] + bundle + file->read_begin,
        .num_bytes = file->read_bytes,
        .target = at(reader->base, file->slots + order.slot * file->slot_bytes),
        .tag = (uint64_t)order.neuron << 32 | attempt << SLOT_BITS | order.slot,
    };
}

static void end_order(struct reader *reader, uint64_t tag, uint32_t status) {
    neuron_reads_end(reader->base, reader->offset, (uint32_t)(tag >> 32), status);
    if (status != 0)
        reader->error = status;
}

/* Requests the engine does not take, by a wrong place in the file, end as failed. */
static void submit(struct reader *reader, const struct read_request *requests, uint32_t n) {
    if (reader->num_under_way == 0)
        reader->progress_ns = monotonic_ns();
    int32_t result = io_submit(reader->engine, requests, n);
    uint32_t taken = result < 0 ? 0 : (uint32_t)result;
    reader->num_under_way += taken;
    for (uint32_t i = taken; i < n; i++)
        end_order(reader, requests[i].tag, result < 0 ? (uint32_t)-result : EBUSY);
}

static void take_orders(struct reader *reader, int64_t timeout_ns) {
    struct neuron_miss orders[BATCH];
    struct read_request requests[BATCH];
    uint32_t room = least(BATCH, reader->queue_depth - reader->num_under_way);
    uint32_t n = neuron_reads_pop(reader->base, reader->offset, orders, room, timeout_ns);
    for (uint32_t i = 0; i < n; i++)
        requests[i] = request_of(reader, orders[i], 0);
    if (n > 0)
        submit(reader, requests, n);
}

static void take_end(struct reader *reader, const struct read_completion *end) {
    struct neuron_reads *reads = reader->reads;
    uint32_t status = (uint32_t)-end->status;
    if (status == 0 && end->num_bytes < reads->file.read_bytes)
        status = ENODATA;
    reader->num_under_way--;
    count(&reads->reads, 1);
    count(&reads->bytes_read, end->num_bytes);
    count(&reads->latency_ns, end->latency_ns);
    uint32_t neuron = (uint32_t)(end->tag >> 32), per_layer = reads->file.neurons_per_layer;
    if (reads->trace)
        trace_put_read(reader->base, reads->trace, end->latency_ns, neuron / per_layer,
                       neuron % per_layer, (uint32_t)end->num_bytes, status);
    struct neuron_miss order = {neuron, (uint32_t)end->tag & NO_SLOT};
    uint32_t attempt = (uint8_t)(end->tag >> SLOT_BITS) + 1u;
    if (status != 0 && attempt < MAX_ATTEMPTS) {
        struct read_request again = request_of(reader, order, attempt);
        submit(reader, &again, 1);
    } else {
        end_order(reader, end->tag, status);
    }
}

/* Wait until a read ends, at most a slice; -errno when none will. */
static int32_t take_ended(struct reader *reader) {
    struct read_completion ends[BATCH];
    int32_t num_ended = io_reap(reader->engine, ends, BATCH, 1, WAIT_SLICE_NS);
    if (num_ended < 0)
        return num_ended;
    for (int32_t i = 0; i < num_ended; i++)
        take_end(reader, &ends[i]);
    uint64_t now_ns = monotonic_ns();
    if (num_ended > 0)
        reader->progress_ns = now_ns;
    return now_ns - reader->progress_ns > STALL_NS ? -ETIMEDOUT : 0;
}

int neuron_reader_run(void *base, uint64_t offset, struct io_engine *engine, int64_t slice_ns) {
    struct io_info info;
    io_get_info(engine, &info);
    struct reader reader = {
        .base = base,
        .offset = offset,
        .reads = at(base, offset),
        .engine = engine,
        .queue_depth = info.queue_depth,
    };
    uint64_t end_ns = monotonic_ns() + (uint64_t)slice_ns;
    for (;;) {
        int64_t left_ns = reader.num_under_way ? 0 : (int64_t)(end_ns - monotonic_ns());
        if (reader.error == 0)
            take_orders(&reader, left_ns);
        if (reader.num_under_way > 0) {
            int32_t status = take_ended(&reader);
            if (status != 0) {
                __atomic_store_n(&reader.reads->error, (uint32_t)-status, __ATOMIC_SEQ_CST);
                return status;
            }
        } else if (reader.error != 0) {
            return -(int)reader.error;
        } else if (is_stopped(reader.reads)) {
            return 1;
        } else if (left_ns <= 0) {
            return 0;
        }
    }
}
