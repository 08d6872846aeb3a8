/* A closed loop of reads over the engine: what a device gives at a size and a depth. */
#include <errno.h>
#include <time.h>

#include "engine.h"
#include "io_engine.h"

#define MAX_DEPTH 256u
#define SLICE_NS 1000000000ll
#define GRACE_NS 30000000000ull /* for what is in flight when the time is over */

static uint64_t thread_cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* The next reads, into the slots of those that have ended (or the first slots). */
static uint32_t fill(struct read_request *requests, const struct read_completion *ended,
                     uint32_t count, const uint64_t *offsets, uint64_t read_bytes, char *target) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t slot = ended ? ended[i].tag : i;
        requests[i] = (struct read_request){
            .offset = offsets[i],
            .num_bytes = read_bytes,
            .target = target + slot * read_bytes,
            .tag = slot,
        };
    }
    return count;
}

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

int32_t io_probe(struct io_engine *engine, const uint64_t *offsets, uint32_t n, uint64_t read_bytes,
                 uint32_t depth, void *target, int64_t max_ns, uint64_t *latencies_ns,
                 struct io_probe_result *result) {
    struct read_completion ended[MAX_DEPTH];
    struct read_request requests[MAX_DEPTH];
    uint64_t start_ns = monotonic_ns(), start_cpu_ns = thread_cpu_ns();
    uint64_t end_ns = start_ns + (uint64_t)max_ns, lost_ns = end_ns + GRACE_NS;
    *result = (struct io_probe_result){0};
    if (depth == 0 || depth > MAX_DEPTH)
        return -EINVAL;
    uint32_t next = fill(requests, NULL, least(depth, n), offsets, read_bytes, target);
    int32_t status = io_submit(engine, requests, next);
    if (status != (int32_t)next)
        return status < 0 ? status : -EBUSY;
    status = 0;
    while (result->num_reads < next) {
        int32_t count = io_reap(engine, ended, MAX_DEPTH, 1, SLICE_NS);
        uint64_t now_ns = monotonic_ns();
        if (count < 0 || now_ns > lost_ns)
            return count < 0 ? count : -ETIMEDOUT;
        for (int32_t i = 0; i < count; i++) {
            latencies_ns[result->num_reads++] = ended[i].latency_ns;
            result->num_bytes += ended[i].num_bytes;
            status = status ? status : ended[i].status;
        }
        if (count == 0 || status != 0 || now_ns >= end_ns)
            continue;
        uint32_t more = least((uint32_t)count, n - next);
        fill(requests, ended, more, offsets + next, read_bytes, target);
        int32_t taken = io_submit(engine, requests, more);
        status = taken < 0 ? taken : 0;
        next += taken > 0 ? (uint32_t)taken : 0;
    }
    result->elapsed_ns = monotonic_ns() - start_ns;
    result->cpu_ns = thread_cpu_ns() - start_cpu_ns;
    return status;
}
