/* Back end where io_uring is forbidden: threads that sit in preadv. */
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "io_engine.h"

#define NS_PER_S 1000000000ll
#define MAX_THREADS 64u
#define STACK_BYTES 65536u

struct result {
    uint32_t piece;
    int32_t value;
};

struct pool {
    pthread_mutex_t lock;
    pthread_cond_t has_work, has_results;
    uint32_t num_threads, num_idle;
    uint32_t work_head, num_work, num_pending, num_results, num_wanted;
    bool is_stopping;
    uint32_t *work;          /* piece indices, a ring of queue_depth */
    uint32_t *pending;       /* the owner's, until it flushes: no lock, no wake-up for each */
    struct result *results;  /* queue_depth */
    struct result *taken;    /* the owner's copy */
    pthread_t threads[MAX_THREADS];
};

static int32_t read_piece(const struct io_engine *engine, const struct piece *piece) {
    struct iovec vector = {piece->target, piece->num_bytes};
    ssize_t result = preadv(engine->file.fds[piece->fd_index], &vector, 1, (off_t)piece->offset);
    return result < 0 ? -errno : (int32_t)result;
}

static void *pool_thread(void *argument) {
    struct io_engine *engine = argument;
    struct pool *pool = engine->backend_state;
    uint32_t depth = engine->info.queue_depth;
    bool is_wanted = false;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        if (is_wanted && pool->num_work == 0)
            pthread_cond_signal(&pool->has_results);
        pool->num_idle++;
        while (pool->num_work == 0 && !pool->is_stopping)
            pthread_cond_wait(&pool->has_work, &pool->lock);
        pool->num_idle--;
        if (pool->num_work == 0)
            break;
        uint32_t index = pool->work[pool->work_head];
        pool->work_head = (pool->work_head + 1) % depth;
        pool->num_work--;
        pthread_mutex_unlock(&pool->lock);
        if (is_wanted) /* without the lock, which the woken one takes at once */
            pthread_cond_signal(&pool->has_results);
        int32_t value = read_piece(engine, &engine->pieces[index]);
        pthread_mutex_lock(&pool->lock);
        pool->results[pool->num_results++] = (struct result){index, value};
        is_wanted = pool->num_results == pool->num_wanted;
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void pool_stop(struct io_engine *engine) {
    struct pool *pool = engine->backend_state;
    pthread_mutex_lock(&pool->lock);
    pool->is_stopping = true;
    pthread_cond_broadcast(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->has_work);
    pthread_cond_destroy(&pool->has_results);
    pthread_mutex_destroy(&pool->lock);
    free(pool->work);
    free(pool->pending);
    free(pool->results);
    free(pool->taken);
    free(pool);
    engine->backend_state = NULL;
}

/* Threads take no signals: those are for the program's own. */
static void start_threads(struct io_engine *engine, struct pool *pool) {
    uint32_t depth = engine->info.queue_depth, wanted = depth < MAX_THREADS ? depth : MAX_THREADS;
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES + (size_t)PTHREAD_STACK_MIN);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->num_threads < wanted &&
           pthread_create(&pool->threads[pool->num_threads], &attributes, pool_thread, engine) == 0)
        pool->num_threads++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

static int32_t pool_start(struct io_engine *engine) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->has_work, NULL);
    pthread_cond_init(&pool->has_results, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->backend_state = pool;
    pool->work = calloc(engine->info.queue_depth, sizeof *pool->work);
    pool->pending = calloc(engine->info.queue_depth, sizeof *pool->pending);
    pool->results = calloc(engine->info.queue_depth, sizeof *pool->results);
    pool->taken = calloc(engine->info.queue_depth, sizeof *pool->taken);
    if (pool->work && pool->pending && pool->results && pool->taken)
        start_threads(engine, pool);
    if (pool->num_threads == 0) {
        pool_stop(engine);
        return -ENOMEM;
    }
    return 0;
}

static void pool_issue(struct io_engine *engine, uint32_t index) {
    struct pool *pool = engine->backend_state;
    pool->pending[pool->num_pending++] = index;
}

static int32_t pool_flush(struct io_engine *engine) {
    struct pool *pool = engine->backend_state;
    if (pool->num_pending == 0)
        return 0;
    pthread_mutex_lock(&pool->lock);
    uint32_t num_awake = pool->num_idle < pool->num_pending ? pool->num_idle : pool->num_pending;
    for (uint32_t i = 0; i < pool->num_pending; i++, pool->num_work++)
        pool->work[(pool->work_head + pool->num_work) % engine->info.queue_depth] =
            pool->pending[i];
    pthread_mutex_unlock(&pool->lock);
    pool->num_pending = 0;
    for (uint32_t i = 0; i < num_awake; i++)
        pthread_cond_signal(&pool->has_work);
    return 0;
}

static struct timespec time_after(int64_t timeout_ns) {
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += timeout_ns / NS_PER_S;
    end.tv_nsec += timeout_ns % NS_PER_S;
    if (end.tv_nsec >= NS_PER_S) {
        end.tv_sec++;
        end.tv_nsec -= NS_PER_S;
    }
    return end;
}

static int32_t pool_wait(struct io_engine *engine, uint32_t num_results, int64_t timeout_ns) {
    struct pool *pool = engine->backend_state;
    struct timespec end = time_after(timeout_ns > 0 ? timeout_ns : 0);
    pool_flush(engine);
    pthread_mutex_lock(&pool->lock);
    pool->num_wanted = num_results;
    while (pool->num_results < num_results &&
           pthread_cond_timedwait(&pool->has_results, &pool->lock, &end) == 0) {
    }
    pool->num_wanted = 0;
    uint32_t count = pool->num_results;
    struct result *results = pool->results;
    pool->results = pool->taken;
    pool->taken = results;
    pool->num_results = 0;
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < count; i++)
        io_piece_done(engine, results[i].piece, results[i].value);
    return 0;
}

static int32_t pool_register_memory(struct io_engine *engine, void *base, uint64_t num_bytes) {
    (void)engine, (void)base, (void)num_bytes;
    return -EOPNOTSUPP;
}

const struct io_backend_calls io_pool_calls = {
    .backend = IO_POOL,
    .start = pool_start,
    .issue = pool_issue,
    .flush = pool_flush,
    .wait = pool_wait,
    .register_memory = pool_register_memory,
    .stop = pool_stop,
};
