/* Futex words in shared memory: waits that are always bounded. */
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "board.h"

#define NS_PER_S 1000000000ll

uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

/* 0 when woken or the word has changed, -1 when the time is over. */
int futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns) {
    struct timespec timeout = {timeout_ns / NS_PER_S, timeout_ns % NS_PER_S};
    long rc = syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0);
    return rc == -1 && errno == ETIMEDOUT ? -1 : 0;
}

void futex_wake_all(uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint32_t word_wait(void *word, uint32_t expected, int64_t timeout_ns) {
    uint32_t value = __atomic_load_n((uint32_t *)word, __ATOMIC_ACQUIRE);
    uint64_t end = monotonic_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
    while (value == expected) {
        int64_t left = (int64_t)(end - monotonic_ns());
        if (left <= 0)
            break;
        futex_wait(word, expected, left);
        value = __atomic_load_n((uint32_t *)word, __ATOMIC_ACQUIRE);
    }
    return value;
}

/* As <linux/sched/types.h> has it, whose other names clash with those of <sched.h>. */
struct sched_attr_of_normal {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
};

int32_t prefer_short_slices(uint64_t slice_ns) {
    struct sched_attr_of_normal attr = {.size = sizeof attr, .runtime_ns = slice_ns};
    errno = 0;
    attr.nice = getpriority(PRIO_PROCESS, 0);
    if (errno)
        return errno;
    return syscall(SYS_sched_setattr, 0, &attr, 0) ? errno : 0;
}

void word_store_wake(void *word, uint32_t value) {
    __atomic_store_n((uint32_t *)word, value, __ATOMIC_SEQ_CST);
    futex_wake_all(word);
}
