/* Runs the I/O engine on both back ends with results made worse than the kernel gave them: short,
 * interrupted, refused, failed. Built with sanitizers, and with the linker putting the function
 * below in front of the engine's own io_piece_done: exit 0 means no report and every byte right. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io_engine.h"

#define MIB (1u << 20)
#define FILE_BYTES (4u * MIB + 777)
#define NUM_REQUESTS 18u
#define WAIT_NS 20000000000ll
#define CHECK(condition) check(condition, #condition, __LINE__)

enum fault { NONE, SHORT, SHORT_SECTOR, INTERRUPTED, AGAIN, REFUSED, FAILED, ENDED, NUM_FAULTS };

static const char *const fault_names[NUM_FAULTS] = {
    "none", "short", "short sector", "interrupted", "again", "refused", "failed", "ended",
};

static uint32_t seed = 1;
static enum fault fault;
static uint32_t num_injected;
static bool is_persistent;
static unsigned char content[FILE_BYTES];

static void check(bool is_true, const char *text, int line) {
    if (is_true)
        return;
    fprintf(stderr, "line %d: %s (fault %s)\n", line, text, fault_names[fault]);
    exit(1);
}

static uint32_t next_random(void) {
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

void __real_io_piece_done(struct io_engine *engine, uint32_t index, int32_t result);
void __wrap_io_piece_done(struct io_engine *engine, uint32_t index, int32_t result);

/* What the kernel did not give is wiped out again, so that it must be read once more. */
static int32_t shorten(const struct piece *piece, int32_t result, uint32_t unit) {
    uint32_t units = (uint32_t)result / unit;
    if (units < 2)
        return result;
    uint32_t left = (1 + next_random() % (units - 1)) * unit;
    memset(piece->target + left, 0xEE, piece->num_bytes - left);
    return (int32_t)left;
}

void __wrap_io_piece_done(struct io_engine *engine, uint32_t index, int32_t result) {
    const struct piece *piece = &engine->pieces[index];
    if (fault != NONE && result > 0 && (is_persistent || next_random() % 2)) {
        static const int32_t results[NUM_FAULTS] = {
            [INTERRUPTED] = -EINTR, [AGAIN] = -EAGAIN, [REFUSED] = -EINVAL, [FAILED] = -EIO,
        };
        bool is_direct = piece->fd_index == FD_DIRECT;
        num_injected++;
        if (fault == SHORT)
            result = shorten(piece, result, 1);
        else if (fault == SHORT_SECTOR)
            result = shorten(piece, result, 512);
        else if (fault != REFUSED || is_direct) {
            memset(piece->target, 0xEE, piece->num_bytes);
            result = results[fault];
        }
    }
    __real_io_piece_done(engine, index, result);
}

struct place {
    unsigned char *memory;
    uint64_t offset, num_bytes, expected;
    uint32_t word;
};

static struct read_request make_request(struct place *place, uint32_t tag) {
    place->offset = next_random() % (FILE_BYTES / 4096) * 4096;
    place->num_bytes = (1 + next_random() % (tag % 8 ? 16 : 500)) * 4096;
    place->expected = FILE_BYTES - place->offset;
    if (place->expected > place->num_bytes)
        place->expected = place->num_bytes;
    place->word = 0;
    void *memory = NULL;
    CHECK(posix_memalign(&memory, 4096, place->num_bytes) == 0);
    place->memory = memory;
    return (struct read_request){place->offset, place->num_bytes, memory, tag, &place->word, 1, 2};
}

static void check_end(const struct place *place, const struct read_completion *end) {
    if (end->status == 0) {
        CHECK(end->num_bytes == place->expected && place->word == 1);
        CHECK(memcmp(place->memory, content + place->offset, place->expected) == 0);
        return;
    }
    CHECK(place->word == 2 && end->num_bytes < place->expected);
    CHECK(memcmp(place->memory, content + place->offset, end->num_bytes) == 0);
    CHECK((fault == FAILED && end->status == -EIO) || (fault == ENDED && end->status == -ENODATA) ||
          (fault == AGAIN && is_persistent && end->status == -EAGAIN));
}

/* Random requests, each reaped once, submitted as room comes. */
static uint32_t run(struct io_engine *engine) {
    struct place places[NUM_REQUESTS];
    struct read_request requests[NUM_REQUESTS];
    struct read_completion ends[8];
    uint32_t submitted = 0, reaped = 0, num_failed = 0;
    uint64_t seen = 0;
    for (uint32_t i = 0; i < NUM_REQUESTS; i++)
        requests[i] = make_request(&places[i], i);
    while (reaped < NUM_REQUESTS) {
        int32_t taken = io_submit(engine, requests + submitted, NUM_REQUESTS - submitted);
        CHECK(taken >= 0);
        submitted += (uint32_t)taken;
        int32_t count = io_reap(engine, ends, 8, 1 + next_random() % 8, WAIT_NS);
        CHECK(count > 0);
        for (int32_t i = 0; i < count; i++) {
            CHECK(!(seen & 1ull << ends[i].tag));
            seen |= 1ull << ends[i].tag;
            check_end(&places[ends[i].tag], &ends[i]);
            num_failed += ends[i].status != 0;
        }
        reaped += (uint32_t)count;
    }
    for (uint32_t i = 0; i < NUM_REQUESTS; i++)
        free(places[i].memory);
    return num_failed;
}

static void run_faults(const char *path, struct io_options options) {
    for (fault = NONE; fault < NUM_FAULTS; fault++) {
        for (int persistent = 0; persistent <= (fault > INTERRUPTED); persistent++) {
            struct io_engine *engine;
            struct io_info info;
            is_persistent = persistent;
            num_injected = 0;
            CHECK(io_open(path, &options, &engine) == 0);
            uint32_t num_failed = run(engine);
            io_get_info(engine, &info);
            CHECK(info.num_outstanding == 0 && info.num_requests == NUM_REQUESTS);
            CHECK(fault == NONE || fault == REFUSED || num_injected > 0);
            CHECK((num_failed > 0) ==
                  (fault == FAILED || fault == ENDED || (persistent && fault == AGAIN)));
            CHECK(io_close(engine, WAIT_NS) == 0);
        }
    }
    fault = NONE;
}

/* Everything ends, done or failed, and nothing is written afterwards: the memory is freed. */
static void run_close(const char *path, struct io_options options) {
    struct place places[NUM_REQUESTS];
    struct io_engine *engine;
    CHECK(io_open(path, &options, &engine) == 0);
    for (uint32_t i = 0; i < NUM_REQUESTS; i++) {
        struct read_request request = make_request(&places[i], i);
        int32_t taken = io_submit(engine, &request, 1);
        CHECK(taken == (i < options.max_requests));
    }
    CHECK(io_close(engine, WAIT_NS) == 0);
    for (uint32_t i = 0; i < NUM_REQUESTS; i++) {
        const struct place *place = &places[i];
        CHECK(i < options.max_requests ? place->word == 1 || place->word == 2 : place->word == 0);
        if (place->word == 1)
            CHECK(memcmp(place->memory, content + place->offset, place->expected) == 0);
        free(place->memory);
    }
}

static void run_probe(const char *path, struct io_options options) {
    struct io_engine *engine;
    struct io_probe_result result;
    uint64_t offsets[100], latencies[100];
    void *target = NULL;
    for (int i = 0; i < 100; i++)
        offsets[i] = next_random() % (FILE_BYTES / 4096) * 4096;
    CHECK(posix_memalign(&target, 4096, 5 * 4096) == 0);
    CHECK(io_open(path, &options, &engine) == 0);
    CHECK(io_probe(engine, offsets, 100, 4096, 5, target, WAIT_NS, latencies, &result) == 0);
    CHECK(result.num_reads == 100 && result.num_bytes > 99 * 4096);
    CHECK(io_probe(engine, offsets, 3, 4096, 5, target, WAIT_NS, latencies, &result) == 0);
    CHECK(result.num_reads == 3);
    CHECK(io_probe(engine, offsets, 3, 4096, 0, target, WAIT_NS, latencies, &result) == -EINVAL);
    CHECK(io_close(engine, WAIT_NS) == 0);
    free(target);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    for (uint32_t i = 0; i < FILE_BYTES; i++)
        content[i] = (unsigned char)next_random();
    int fd = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(fd >= 0 && write(fd, content, FILE_BYTES) == (ssize_t)FILE_BYTES && close(fd) == 0);
    for (uint32_t backend = IO_URING; backend <= IO_POOL; backend++) {
        for (uint32_t flags = 0; flags <= IO_BUFFERED; flags++) {
            struct io_options options = {6, 16, backend, flags};
            struct io_engine *engine;
            int32_t status = io_open(argv[1], &options, &engine);
            if (status != 0) {
                CHECK(backend == IO_URING);
                printf("uring: %s\n", strerror(-status));
                continue;
            }
            CHECK(io_close(engine, WAIT_NS) == 0);
            run_faults(argv[1], options);
            run_close(argv[1], options);
            run_probe(argv[1], options);
            printf("%s%s\n", backend == IO_URING ? "uring" : "pool", flags ? " buffered" : "");
        }
    }
    return 0;
}
