/* Runs the reader of missed neurons with executors that order at once, and with reads made worse
 * than the engine gave them: failed, short, refused, never ending. Built with sanitizers, and with
 * the linker putting the functions below in front of the engine's: exit 0 means no report, every
 * neuron right, and every failure told. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "neuron_reads.h"

#define NUM_LAYERS 3u
#define LAYER_NEURONS 50u
#define NUM_NEURONS (NUM_LAYERS * LAYER_NEURONS)
#define BUNDLE_BYTES 1536u
#define READ_BEGIN 512u
#define READ_BYTES 1024u
#define LAYER_BYTES 77824u
#define FILE_BYTES (NUM_LAYERS * LAYER_BYTES)
#define NUM_SLOTS 40u
#define CAPACITY 64u
#define NUM_EXECUTORS 3u
#define NUM_STEPS 60u
#define STEP_NEURONS 10u
#define WAIT_NS 20000000000ll
#define SLICE_NS 5000000ll
#define SLOT_OF(tag) ((tag) & 0xFFFFFF)
#define ATTEMPT_OF(tag) ((tag) >> 24 & 0xFF)
#define NEURON_OF(tag) ((uint32_t)((tag) >> 32))
#define CHECK(condition) check(condition, #condition, __LINE__)

enum fault { NONE, PASSING, SHORT, LASTING, BUSY, HANGING, NUM_FAULTS };

static const char *const fault_names[NUM_FAULTS] = {
    "none", "passing", "short", "lasting", "busy", "hanging",
};

enum { LAYERS = 0, RING = 4096, CACHE = 8192, SLOTS = 65536 };

static enum fault fault;
static _Atomic uint64_t skew_ns; /* the clock goes on while nothing ends */
static char *base;
static unsigned char content[FILE_BYTES];
static uint32_t num_failed[NUM_EXECUTORS];
static pthread_barrier_t barrier;

static void check(bool is_true, const char *text, int line) {
    if (is_true)
        return;
    fprintf(stderr, "line %d: %s (fault %s)\n", line, text, fault_names[fault]);
    exit(1);
}

uint64_t __real_monotonic_ns(void);
uint64_t __wrap_monotonic_ns(void);
int32_t __real_io_submit(struct io_engine *engine, const struct read_request *requests, uint32_t n);
int32_t __wrap_io_submit(struct io_engine *engine, const struct read_request *requests, uint32_t n);
int32_t __real_io_reap(struct io_engine *engine, struct read_completion *ends, uint32_t max,
                       uint32_t min_wait, int64_t timeout_ns);
int32_t __wrap_io_reap(struct io_engine *engine, struct read_completion *ends, uint32_t max,
                       uint32_t min_wait, int64_t timeout_ns);

uint64_t __wrap_monotonic_ns(void) { return __real_monotonic_ns() + skew_ns; }

int32_t __wrap_io_submit(struct io_engine *engine, const struct read_request *requests,
                         uint32_t n) {
    return __real_io_submit(engine, requests, fault == BUSY && n > 2 ? n - 1 : n);
}

static bool goes_wrong(uint64_t tag) {
    if (fault == LASTING)
        return NEURON_OF(tag) % 7 == 3;
    return (fault == PASSING || fault == SHORT) && ATTEMPT_OF(tag) < NEURON_OF(tag) % 3;
}

int32_t __wrap_io_reap(struct io_engine *engine, struct read_completion *ends, uint32_t max,
                       uint32_t min_wait, int64_t timeout_ns) {
    if (fault == HANGING) {
        skew_ns += 10000000000u;
        return 0;
    }
    int32_t count = __real_io_reap(engine, ends, max, min_wait, timeout_ns);
    for (int32_t i = 0; i < count; i++) {
        if (!goes_wrong(ends[i].tag))
            continue;
        memset(base + SLOTS + SLOT_OF(ends[i].tag) * READ_BYTES, 0xEE, READ_BYTES);
        ends[i].status = fault == SHORT ? 0 : -EIO;
        ends[i].num_bytes = 0;
    }
    return count;
}

static void format(void) {
    neuron_reads_format(base, RING, CAPACITY);
    neuron_cache_format(base + CACHE, NUM_NEURONS, NUM_SLOTS, 0, NUM_SLOTS, 8);
    struct neuron_reads *reads = neuron_reads_at(base, RING);
    for (uint64_t layer = 0; layer < NUM_LAYERS; layer++)
        ((uint64_t *)(base + LAYERS))[layer] = (NUM_LAYERS - 1 - layer) * LAYER_BYTES;
    reads->cache = CACHE;
    reads->pushed = reads->taken = reads->ended = UINT32_MAX - 20;
    reads->file = (struct neuron_file){
        .neurons_per_layer = LAYER_NEURONS,
        .num_layers = NUM_LAYERS,
        .layer_offsets = LAYERS,
        .bundle_bytes = BUNDLE_BYTES,
        .read_begin = READ_BEGIN,
        .read_bytes = READ_BYTES,
        .slots = SLOTS,
        .slot_bytes = READ_BYTES,
    };
}

static const unsigned char *rows_of(uint32_t neuron) {
    uint64_t layer = NUM_LAYERS - 1 - neuron / LAYER_NEURONS;
    uint64_t bundle = neuron % LAYER_NEURONS * BUNDLE_BYTES;
    return content + layer * LAYER_BYTES + bundle + READ_BEGIN;
}

static void order(uint32_t epoch, const uint32_t *neurons, uint32_t n, uint32_t *slots) {
    struct neuron_miss misses[STEP_NEURONS];
    CHECK(neuron_cache_lock(base + CACHE, WAIT_NS) == 0);
    int count = neuron_cache_use(base + CACHE, epoch, neurons, n, slots, misses);
    CHECK(count >= 0);
    neuron_reads_push(base, RING, misses, (uint32_t)count);
    neuron_cache_unlock(base + CACHE);
}

/* One step: every NUM_EXECUTORS-th neuron belongs to this executor. */
static void step(uint32_t executor, uint32_t epoch, uint32_t *seed) {
    uint32_t neurons[STEP_NEURONS], slots[STEP_NEURONS], n = 0;
    for (uint32_t i = executor; i < NUM_NEURONS && n < STEP_NEURONS; i += NUM_EXECUTORS) {
        *seed = *seed * 1664525u + 1013904223u;
        if (*seed >> 8 & 1)
            neurons[n++] = i;
    }
    order(epoch, neurons, n, slots);
    for (uint32_t i = 0; i < n; i++) {
        int state = neuron_cache_wait(base + CACHE, neurons[i], WAIT_NS);
        CHECK(state != 0);
        if (state < 0) {
            uint32_t error = __atomic_load_n(&neuron_reads_at(base, RING)->error, __ATOMIC_ACQUIRE);
            CHECK(error == (fault == BUSY ? EBUSY : EIO));
            CHECK(fault == BUSY || (fault == LASTING && neurons[i] % 7 == 3));
            num_failed[executor]++;
        } else {
            CHECK(fault != LASTING || neurons[i] % 7 != 3);
            const char *slot = base + SLOTS + (slots[i] & NO_SLOT) * READ_BYTES;
            CHECK(memcmp(slot, rows_of(neurons[i]), READ_BYTES) == 0);
        }
    }
}

static void *execute(void *index) {
    uint32_t executor = (uint32_t)(uintptr_t)index, seed = executor + 1;
    for (uint32_t epoch = 1; epoch <= NUM_STEPS; epoch++) {
        step(executor, epoch, &seed);
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

static void *read_neurons(void *engine) {
    int status;
    do {
        status = neuron_reader_run(base, RING, engine, SLICE_NS);
        CHECK(status >= 0 || (fault == LASTING && status == -EIO) ||
              (fault == BUSY && status == -EBUSY));
    } while (status != 1);
    return NULL;
}

static void run(struct io_engine *engine) {
    pthread_t reader, executors[NUM_EXECUTORS];
    struct neuron_reads *reads = neuron_reads_at(base, RING);
    uint32_t total_failed = 0;
    format();
    memset(num_failed, 0, sizeof num_failed);
    CHECK(pthread_create(&reader, NULL, read_neurons, engine) == 0);
    for (uintptr_t i = 0; i < NUM_EXECUTORS; i++)
        CHECK(pthread_create(&executors[i], NULL, execute, (void *)i) == 0);
    for (uint32_t i = 0; i < NUM_EXECUTORS; i++) {
        pthread_join(executors[i], NULL);
        total_failed += num_failed[i];
    }
    neuron_reads_stop(base, RING);
    pthread_join(reader, NULL);
    CHECK(reads->pushed == reads->taken && reads->taken == reads->ended);
    CHECK((total_failed > 0) == (fault == LASTING || fault == BUSY));
}

static void hang(struct io_engine *engine) {
    uint32_t neuron = 5, slot;
    format();
    order(1, &neuron, 1, &slot);
    CHECK(neuron_reader_run(base, RING, engine, SLICE_NS) == -ETIMEDOUT);
    CHECK(neuron_reads_at(base, RING)->error == ETIMEDOUT);
    CHECK(neuron_cache_state(base + CACHE, neuron) == NEURON_LOADING);
}

/* A new reader in the place of one that took orders and was lost. */
static void resume(struct io_engine *engine) {
    uint32_t neurons[] = {7, 80, 149}, slots[3];
    struct neuron_miss taken[2];
    format();
    order(1, neurons, 3, slots);
    CHECK(neuron_reads_pop(base, RING, taken, 2, 0) == 2);
    CHECK(neuron_cache_lock(base + CACHE, WAIT_NS) == 0);
    CHECK(neuron_reads_resume(base, RING) == 2);
    neuron_cache_unlock(base + CACHE);
    CHECK(neuron_reader_run(base, RING, engine, 0) == 0);
    for (uint32_t i = 0; i < 3; i++) {
        const char *slot = base + SLOTS + (slots[i] & NO_SLOT) * READ_BYTES;
        CHECK(neuron_cache_state(base + CACHE, neurons[i]) == NEURON_RESIDENT);
        CHECK(memcmp(slot, rows_of(neurons[i]), READ_BYTES) == 0);
    }
}

/* 0, or why the back end cannot be had here. */
static int32_t with_engine(const char *path, uint32_t backend, void (*use)(struct io_engine *)) {
    struct io_options options = {6, 6, backend, 0};
    struct io_engine *engine;
    int32_t status = io_open(path, &options, &engine);
    if (status != 0)
        return status;
    use(engine);
    CHECK(io_close(engine, WAIT_NS) == 0);
    return 0;
}

int main(int argc, char **argv) {
    void *memory = NULL;
    CHECK(argc == 2);
    CHECK(posix_memalign(&memory, 4096, SLOTS + NUM_SLOTS * READ_BYTES) == 0);
    CHECK(neuron_reads_bytes(CAPACITY) <= CACHE - RING);
    CHECK(neuron_cache_bytes(NUM_NEURONS, NUM_SLOTS) <= SLOTS - CACHE);
    CHECK(pthread_barrier_init(&barrier, NULL, NUM_EXECUTORS) == 0);
    base = memory;
    for (uint32_t i = 0; i < FILE_BYTES; i++)
        content[i] = (unsigned char)(i * 2654435761u >> 13);
    int fd = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, content, FILE_BYTES) == (ssize_t)FILE_BYTES && close(fd) == 0);
    for (uint32_t backend = IO_URING; backend <= IO_POOL; backend++) {
        const char *name = backend == IO_URING ? "uring" : "pool";
        int32_t status = with_engine(argv[1], backend, resume);
        for (fault = NONE; status == 0 && fault < NUM_FAULTS; fault++)
            status = with_engine(argv[1], backend, fault == HANGING ? hang : run);
        fault = NONE;
        CHECK(status == 0 || backend == IO_URING);
        printf("%s%s%s\n", name, status ? ": " : "", status ? strerror(-status) : "");
    }
    free(memory);
    return 0;
}
