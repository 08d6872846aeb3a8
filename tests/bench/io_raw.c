/* A bare loop of reads, to compare the engine with: io_uring with no more than it needs, or threads
 * in preadv. Prints reads, bytes, elapsed ns, CPU ns (of all threads).
 *
 * io_raw uring|preadv huge|shared FILE RANDOM(0|1) READ_BYTES DEPTH MAX_NS SEED
 *
 * Reads go into huge pages, or into shared memory in the pages it has, as an arena's. */
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define HUGE_PAGE (2u << 20)

static int fd;
static uint64_t num_places, read_bytes, end_ns, next_place, seed;
static int is_random;
static char *memory;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t place_at(uint64_t index) {
    uint64_t x = index + seed;
    if (is_random) {
        x ^= x >> 33;
        x *= 0xff51afd7ed558ccdull;
        x ^= x >> 33;
        x *= 0xc4ceb9fe1a85ec53ull;
        x ^= x >> 33;
    }
    return x % num_places * read_bytes;
}

static uint64_t run_uring(unsigned depth) {
    struct io_uring_params params = {0};
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    int ring = (int)syscall(SYS_io_uring_setup, depth, &params);
    if (ring < 0)
        die("io_uring_setup");
    size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    char *base = mmap(NULL, cq_bytes > sq_bytes ? cq_bytes : sq_bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *sqes = mmap(NULL, params.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_SQES);
    if (base == MAP_FAILED || sqes == MAP_FAILED)
        die("mmap");
    uint32_t *sq_tail = (uint32_t *)(base + params.sq_off.tail);
    uint32_t *array = (uint32_t *)(base + params.sq_off.array);
    uint32_t *cq_head = (uint32_t *)(base + params.cq_off.head);
    uint32_t *cq_tail = (uint32_t *)(base + params.cq_off.tail);
    uint32_t cq_mask = params.cq_entries - 1, sq_mask = params.sq_entries - 1, tail = *sq_tail;
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(base + params.cq_off.cqes);
    uint64_t submitted = 0, done = 0;
    unsigned free_slots[MAX_THREADS], num_free = depth;
    for (unsigned i = 0; i < depth; i++)
        free_slots[i] = i;
    for (bool is_over = false; !is_over || done < submitted;) {
        is_over = now_ns() >= end_ns;
        unsigned more = is_over ? 0 : num_free;
        for (unsigned i = 0; i < more; i++, tail++) {
            unsigned slot = free_slots[--num_free];
            struct io_uring_sqe *sqe = &sqes[tail & sq_mask];
            memset(sqe, 0, sizeof *sqe);
            sqe->opcode = IORING_OP_READ;
            sqe->fd = fd;
            sqe->off = place_at(submitted++);
            sqe->addr = (uintptr_t)(memory + slot * read_bytes);
            sqe->len = (uint32_t)read_bytes;
            sqe->user_data = slot;
            array[tail & sq_mask] = tail & sq_mask;
        }
        __atomic_store_n(sq_tail, tail, __ATOMIC_RELEASE);
        unsigned wanted = done < submitted;
        if (syscall(SYS_io_uring_enter, ring, more, wanted, IORING_ENTER_GETEVENTS, NULL, 0) < 0)
            die("io_uring_enter");
        uint32_t head = *cq_head, end = __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE);
        for (; head != end; head++, done++) {
            const struct io_uring_cqe *cqe = &cqes[head & cq_mask];
            if (cqe->res != (int32_t)read_bytes)
                die("short read");
            free_slots[num_free++] = (unsigned)cqe->user_data;
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
    return done;
}

static void *preadv_thread(void *slot) {
    struct iovec vector = {memory + (uintptr_t)slot * read_bytes, read_bytes};
    uint64_t count = 0;
    do {
        uint64_t place = place_at(__atomic_fetch_add(&next_place, 1, __ATOMIC_RELAXED));
        if (preadv(fd, &vector, 1, (off_t)place) != (ssize_t)read_bytes)
            die("preadv");
        count++;
    } while (now_ns() < end_ns);
    return (void *)(uintptr_t)count;
}

static uint64_t run_preadv(unsigned depth) {
    pthread_t threads[MAX_THREADS];
    uint64_t total = 0;
    for (uintptr_t i = 0; i < depth; i++)
        if (pthread_create(&threads[i], NULL, preadv_thread, (void *)i) != 0)
            die("pthread_create");
    for (unsigned i = 0; i < depth; i++) {
        void *count;
        pthread_join(threads[i], &count);
        total += (uintptr_t)count;
    }
    return total;
}

/* Every page there before time is taken. */
static char *make_memory(bool is_huge, size_t num_bytes) {
    int file = is_huge ? -1 : (int)syscall(SYS_memfd_create, "io_raw", 0);
    if (!is_huge && (file < 0 || ftruncate(file, (off_t)num_bytes) != 0))
        die("memfd_create");
    int flags = is_huge ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    char *start = mmap(NULL, num_bytes + HUGE_PAGE, PROT_READ | PROT_WRITE, flags, file, 0);
    if (start == MAP_FAILED)
        die("mmap");
    if (is_huge) {
        start += HUGE_PAGE - (uintptr_t)start % HUGE_PAGE;
        madvise(start, num_bytes, MADV_HUGEPAGE);
    }
    memset(start, 1, num_bytes);
    return start;
}

static uint64_t cpu_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 9)
        return 2;
    unsigned depth = (unsigned)atoi(argv[6]);
    struct stat stat;
    fd = open(argv[3], O_RDONLY | O_DIRECT);
    if (fd < 0 || fstat(fd, &stat) != 0)
        die(argv[3]);
    is_random = atoi(argv[4]);
    read_bytes = strtoull(argv[5], NULL, 10);
    num_places = (uint64_t)stat.st_size / read_bytes;
    seed = strtoull(argv[8], NULL, 10);
    if (depth == 0 || depth > MAX_THREADS || num_places == 0)
        return 2;
    memory = make_memory(strcmp(argv[2], "huge") == 0, depth * read_bytes);
    uint64_t start_ns = now_ns(), start_cpu_ns = cpu_ns();
    end_ns = start_ns + strtoull(argv[7], NULL, 10);
    uint64_t done = strcmp(argv[1], "uring") == 0 ? run_uring(depth) : run_preadv(depth);
    uint64_t elapsed_ns = now_ns() - start_ns;
    printf("%llu %llu %llu %llu\n", (unsigned long long)done,
           (unsigned long long)(done * read_bytes), (unsigned long long)elapsed_ns,
           (unsigned long long)(cpu_ns() - start_cpu_ns));
    return 0;
}
