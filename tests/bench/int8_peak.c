/* The most int8 products a core can do: independent chains of dot products in registers, nothing
 * read. Prints multiplies and adds a second of all threads together, and the instruction.
 *
 * int8_peak THREADS MILLISECONDS */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { CHAINS = 12, ROUNDS = 4096, MAX_THREADS = 256 };

#if defined(__x86_64__)
#include <immintrin.h>
#define NAME "vpdpbusd"
enum { OPS = 128 }; /* 64 multiplies and as many adds */

__attribute__((target("avx512f,avx512vnni"))) static int64_t run(void) {
    __m512i sums[CHAINS], x = _mm512_set1_epi8(1), w = _mm512_set1_epi8(2);
    for (int i = 0; i < CHAINS; i++)
        sums[i] = _mm512_set1_epi32(i);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < CHAINS; i++)
            sums[i] = _mm512_dpbusd_epi32(sums[i], x, w);
        __asm__ volatile("" : "+v"(x), "+v"(w)); /* every round anew */
    }
    int64_t total = 0;
    for (int i = 0; i < CHAINS; i++)
        total += _mm512_reduce_add_epi32(sums[i]);
    return total;
}

static int is_supported(void) { return __builtin_cpu_supports("avx512vnni"); }
#else
#define NAME "none known here"
enum { OPS = 0 };
static int64_t run(void) { return 0; }
static int is_supported(void) { return 0; }
#endif

static uint64_t limit_ns;
static volatile int64_t kept;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *work(void *rate) {
    uint64_t calls = 0, start_ns = now_ns(), spent_ns;
    do {
        kept = run();
        calls++;
    } while ((spent_ns = now_ns() - start_ns) < limit_ns);
    *(double *)rate = (double)calls * ROUNDS * CHAINS * OPS * 1e9 / (double)spent_ns;
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[MAX_THREADS];
    double rates[MAX_THREADS], sum = 0;
    int num_threads = argc > 2 ? atoi(argv[1]) : 0;
    if (num_threads < 1 || num_threads > MAX_THREADS) {
        fprintf(stderr, "int8_peak THREADS MILLISECONDS\n");
        return 2;
    }
    if (!is_supported()) {
        printf("0 " NAME "\n");
        return 0;
    }
    limit_ns = strtoull(argv[2], NULL, 10) * 1000000u;
    for (int i = 0; i < num_threads; i++)
        if (pthread_create(&threads[i], NULL, work, &rates[i]) != 0)
            return 1;
    for (int i = 0; i < num_threads; i++) {
        pthread_join(threads[i], NULL);
        sum += rates[i];
    }
    printf("%.0f " NAME "\n", sum);
    return 0;
}
