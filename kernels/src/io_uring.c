/* Back end over io_uring, by the kernel's own interface. */
#include <errno.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "io_engine.h"

/* Newer than some systems' headers; the kernel is asked at run time. */
#ifndef IORING_ENTER_EXT_ARG
#define IORING_ENTER_EXT_ARG (1u << 3)
#define IORING_FEAT_EXT_ARG (1u << 8)
#endif
#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1u << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1u << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1u << 13)
#endif

#define NS_PER_S 1000000000ll
#define BUFFER_BYTES (1ull << 30) /* the kernel's limit for one registered buffer */
#define MAX_BUFFERS 1024u
#define ONE_OWNER (IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_R_DISABLED)
#define NEEDED_FEATURES (IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG)

struct wait_argument { /* struct io_uring_getevents_arg */
    uint64_t sigmask;
    uint32_t sigmask_bytes;
    uint32_t reserved;
    uint64_t timeout; /* address of a struct __kernel_timespec */
};
_Static_assert(sizeof(struct wait_argument) == 24, "the kernel's layout");

struct uring {
    int fd;
    bool is_disabled;          /* until the first flush: who makes it is the ring's owner */
    bool has_files;
    uint32_t num_pending;      /* queued, not yet taken by the kernel */
    uint32_t tail, mask, cq_mask;
    uint32_t *sq_tail, *cq_head, *cq_tail, *sq_array;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    void *ring;
    size_t ring_bytes, sqes_bytes;
    uintptr_t buffer_base, buffer_end; /* registered, cut into buffers of BUFFER_BYTES */
};

static int32_t checked(long result) { return result < 0 ? -errno : (int32_t)result; }

static int32_t ring_register(const struct uring *ring, unsigned op, const void *arg, unsigned n) {
    return checked(syscall(SYS_io_uring_register, ring->fd, op, arg, n));
}

/* The best set of flags this kernel knows. */
static int32_t ring_setup(struct uring *ring, uint32_t depth, struct io_uring_params *params) {
    static const uint32_t choices[] = {
        ONE_OWNER | IORING_SETUP_DEFER_TASKRUN, /* Linux 6.1 */
        ONE_OWNER | IORING_SETUP_COOP_TASKRUN,  /* 6.0 */
        IORING_SETUP_COOP_TASKRUN,              /* 5.19 */
        0,
    };
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++) {
        memset(params, 0, sizeof *params);
        params->flags = choices[i];
        ring->fd = checked(syscall(SYS_io_uring_setup, depth, params));
        if (ring->fd != -EINVAL)
            break;
    }
    ring->is_disabled = params->flags & IORING_SETUP_R_DISABLED;
    return ring->fd < 0 ? ring->fd : 0;
}

static int32_t ring_map(struct uring *ring, const struct io_uring_params *params) {
    size_t sq_bytes = params->sq_off.array + params->sq_entries * sizeof(uint32_t);
    size_t cq_bytes = params->cq_off.cqes + params->cq_entries * sizeof(struct io_uring_cqe);
    const int access = PROT_READ | PROT_WRITE, how = MAP_SHARED | MAP_POPULATE;
    ring->ring_bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
    ring->ring = mmap(NULL, ring->ring_bytes, access, how, ring->fd, IORING_OFF_SQ_RING);
    if (ring->ring == MAP_FAILED) {
        ring->ring = NULL;
        return -errno;
    }
    ring->sqes_bytes = params->sq_entries * sizeof(struct io_uring_sqe);
    ring->sqes = mmap(NULL, ring->sqes_bytes, access, how, ring->fd, IORING_OFF_SQES);
    if (ring->sqes == MAP_FAILED) {
        ring->sqes = NULL;
        return -errno;
    }
    char *base = ring->ring;
    ring->sq_tail = (uint32_t *)(base + params->sq_off.tail);
    ring->sq_array = (uint32_t *)(base + params->sq_off.array);
    ring->mask = *(uint32_t *)(base + params->sq_off.ring_mask);
    ring->cq_head = (uint32_t *)(base + params->cq_off.head);
    ring->cq_tail = (uint32_t *)(base + params->cq_off.tail);
    ring->cq_mask = *(uint32_t *)(base + params->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(base + params->cq_off.cqes);
    return 0;
}

/* Whether the kernel knows both kinds of read. */
static int32_t ring_probe(const struct uring *ring) {
    enum { NUM_OPS = IORING_OP_READ + 1 };
    union {
        struct io_uring_probe head;
        char bytes[sizeof(struct io_uring_probe) + NUM_OPS * sizeof(struct io_uring_probe_op)];
    } probe;
    memset(&probe, 0, sizeof probe);
    int32_t status = ring_register(ring, IORING_REGISTER_PROBE, &probe, NUM_OPS);
    if (status < 0)
        return status;
    const struct io_uring_probe_op *ops = probe.head.ops;
    bool can_read = (ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED) &&
                    (ops[IORING_OP_READ_FIXED].flags & IO_URING_OP_SUPPORTED);
    return can_read ? 0 : -EOPNOTSUPP;
}

static void uring_stop(struct io_engine *engine) {
    struct uring *ring = engine->backend_state;
    if (ring->sqes)
        munmap(ring->sqes, ring->sqes_bytes);
    if (ring->ring)
        munmap(ring->ring, ring->ring_bytes);
    if (ring->fd >= 0)
        close(ring->fd);
    free(ring);
    engine->backend_state = NULL;
}

static int32_t uring_start(struct io_engine *engine) {
    struct uring *ring = calloc(1, sizeof *ring);
    if (!ring)
        return -ENOMEM;
    engine->backend_state = ring;
    struct io_uring_params params;
    int32_t status = ring_setup(ring, engine->info.queue_depth, &params);
    if (status == 0 && (params.features & NEEDED_FEATURES) != NEEDED_FEATURES)
        status = -EOPNOTSUPP;
    if (status == 0)
        status = ring_map(ring, &params);
    if (status == 0)
        status = ring_probe(ring);
    if (status != 0) {
        uring_stop(engine);
        return status;
    }
    ring->has_files = ring_register(ring, IORING_REGISTER_FILES, engine->file.fds, NUM_FDS) == 0;
    engine->info.has_registered_file = ring->has_files;
    engine->info.setup_flags = params.flags;
    return 0;
}

/* Contiguous memory only: one range, cut where the kernel's limit is. */
static int32_t uring_register_memory(struct io_engine *engine, void *base, uint64_t num_bytes) {
    struct uring *ring = engine->backend_state;
    uint64_t count = (num_bytes + BUFFER_BYTES - 1) / BUFFER_BYTES;
    if (ring->buffer_base)
        return -EBUSY;
    if (count == 0 || count > MAX_BUFFERS)
        return -EINVAL;
    struct iovec *buffers = calloc(count, sizeof *buffers);
    if (!buffers)
        return -ENOMEM;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t left = num_bytes - i * BUFFER_BYTES;
        buffers[i].iov_base = (char *)base + i * BUFFER_BYTES;
        buffers[i].iov_len = left < BUFFER_BYTES ? left : BUFFER_BYTES;
    }
    int32_t status = ring_register(ring, IORING_REGISTER_BUFFERS, buffers, (unsigned)count);
    free(buffers);
    if (status < 0)
        return status;
    ring->buffer_base = (uintptr_t)base;
    ring->buffer_end = (uintptr_t)base + num_bytes;
    return 0;
}

static void choose_buffer(const struct uring *ring, struct io_uring_sqe *sqe) {
    uintptr_t start = sqe->addr, end = sqe->addr + sqe->len;
    if (start < ring->buffer_base || end > ring->buffer_end)
        return;
    uint64_t first = (start - ring->buffer_base) / BUFFER_BYTES;
    if (first != (end - 1 - ring->buffer_base) / BUFFER_BYTES)
        return;
    sqe->opcode = IORING_OP_READ_FIXED;
    sqe->buf_index = (uint16_t)first;
}

static void uring_issue(struct io_engine *engine, uint32_t index) {
    struct uring *ring = engine->backend_state;
    const struct piece *piece = &engine->pieces[index];
    struct io_uring_sqe *sqe = &ring->sqes[ring->tail & ring->mask];
    memset(sqe, 0, sizeof *sqe);
    sqe->opcode = IORING_OP_READ;
    sqe->fd = ring->has_files ? (int)piece->fd_index : engine->file.fds[piece->fd_index];
    sqe->flags = ring->has_files ? IOSQE_FIXED_FILE : 0;
    sqe->off = piece->offset;
    sqe->addr = (uintptr_t)piece->target;
    sqe->len = piece->num_bytes;
    sqe->user_data = index;
    choose_buffer(ring, sqe);
    ring->sq_array[ring->tail & ring->mask] = ring->tail & ring->mask;
    ring->tail++;
    ring->num_pending++;
}

/* Hand over what is queued, and wait for results when flags say so. */
static int32_t ring_enter(struct uring *ring, uint32_t num_results, uint32_t flags,
                          const struct wait_argument *argument) {
    if (ring->is_disabled) {
        int32_t status = ring_register(ring, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
        if (status < 0)
            return status;
        ring->is_disabled = false;
    }
    __atomic_store_n(ring->sq_tail, ring->tail, __ATOMIC_RELEASE);
    int32_t taken = checked(syscall(SYS_io_uring_enter, ring->fd, ring->num_pending, num_results,
                                    flags, argument, argument ? sizeof *argument : 0));
    if (taken >= 0) {
        ring->num_pending -= (uint32_t)taken;
        return 0;
    }
    /* Over in time, a signal, or no memory this instant: the caller's loop comes again. */
    bool is_passing = taken == -ETIME || taken == -EINTR || taken == -EAGAIN || taken == -EBUSY;
    return is_passing ? 0 : taken;
}

static int32_t uring_flush(struct io_engine *engine) {
    struct uring *ring = engine->backend_state;
    return ring->num_pending ? ring_enter(ring, 0, 0, NULL) : 0;
}

static void take_results(struct io_engine *engine, struct uring *ring) {
    uint32_t head = *ring->cq_head;
    uint32_t tail = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE);
    while (head != tail) {
        const struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
        uint32_t piece = (uint32_t)cqe->user_data;
        int32_t result = cqe->res;
        __atomic_store_n(ring->cq_head, ++head, __ATOMIC_RELEASE);
        io_piece_done(engine, piece, result);
    }
}

static int32_t uring_wait(struct io_engine *engine, uint32_t num_results, int64_t timeout_ns) {
    struct uring *ring = engine->backend_state;
    struct __kernel_timespec timeout = {0, 0};
    if (timeout_ns > 0) {
        timeout.tv_sec = timeout_ns / NS_PER_S;
        timeout.tv_nsec = timeout_ns % NS_PER_S;
    }
    struct wait_argument argument = {0, _NSIG / 8, 0, (uintptr_t)&timeout};
    uint32_t flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    uint32_t ready = __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE) - *ring->cq_head;
    int32_t status = 0;
    if (ready == 0 || ready < num_results || ring->num_pending)
        status = ring_enter(ring, num_results, flags, &argument);
    take_results(engine, ring);
    return status;
}

const struct io_backend_calls io_uring_calls = {
    .backend = IO_URING,
    .start = uring_start,
    .issue = uring_issue,
    .flush = uring_flush,
    .wait = uring_wait,
    .register_memory = uring_register_memory,
    .stop = uring_stop,
};
