/* Random lives of neuron caches in heap blocks of exactly the promised size, alone and among
 * threads. Built with sanitizers: exit 0 means no report and no broken rule. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "neuron_cache.h"

#define MAX_NEURONS 60u
#define WAIT_NS 60000000000ll

static uint32_t next_random(uint32_t *seed, uint32_t below)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (*seed >> 8) % below;
}

static void expect(int holds, const char *rule)
{
    if (!holds) {
        printf("broken: %s\n", rule);
        exit(1);
    }
}

static void *new_cache(uint32_t num_neurons, uint32_t max_slots)
{
    const size_t bytes = (neuron_cache_bytes(num_neurons, max_slots) + 63) / 64 * 64;
    void *cache = aligned_alloc(64, bytes);
    expect(cache != NULL, "memory for a cache");
    return cache;
}

/* Every slot has one neuron at most, and the counters count them. */
static void check(void *cache, uint32_t num_neurons, uint32_t max_slots)
{
    uint8_t *taken = calloc(max_slots + 1, 1);
    uint32_t held = 0;
    for (uint32_t neuron = 0; neuron < num_neurons; neuron++) {
        const uint32_t slot = neuron_cache_slot(cache, neuron);
        const int is_absent = neuron_cache_state(cache, neuron) == NEURON_ABSENT;
        expect(is_absent == (slot == NO_SLOT), "a slot for every neuron that is not absent");
        if (is_absent)
            continue;
        expect(slot < max_slots && !taken[slot], "one neuron a slot");
        taken[slot] = 1;
        held++;
    }
    struct neuron_cache_counters counters;
    neuron_cache_get_counters(cache, &counters);
    expect(counters.num_resident + counters.num_pinned == held, "counters of what is held");
    free(taken);
}

static uint32_t choose(uint32_t *seed, uint32_t num_neurons, uint32_t *neurons)
{
    const uint32_t rate = 1 + next_random(seed, 8);
    uint32_t n = 0;
    for (uint32_t neuron = 0; neuron < num_neurons; neuron++)
        if (next_random(seed, rate) == 0)
            neurons[n++] = neuron;
    return n;
}

static void one_call(void *cache, const struct neuron_cache_sizes *sizes, uint32_t epoch,
                     uint32_t *seed)
{
    uint32_t neurons[MAX_NEURONS], slots[MAX_NEURONS], num_moves;
    struct neuron_miss misses[MAX_NEURONS];
    struct slot_move moves[MAX_NEURONS];
    const uint32_t neuron = next_random(seed, sizes->num_neurons);
    const uint32_t num_slots = next_random(seed, sizes->max_slots + 1);
    switch (next_random(seed, 8)) {
    case 0:
        neuron_cache_resize(cache, epoch, next_random(seed, num_slots + 1), num_slots, moves);
        break;
    case 1:
        neuron_cache_admit_hot(cache, epoch, neuron / sizes->cluster_neurons, misses, moves,
                               &num_moves);
        break;
    case 2:
        neuron_cache_failed(cache, neuron);
        break;
    case 3:
    case 4:
        for (uint32_t i = 0; i < sizes->num_neurons; i++)
            if (next_random(seed, 2))
                neuron_cache_landed(cache, i);
        break;
    default:
        neuron_cache_use(cache, epoch, neurons, choose(seed, sizes->num_neurons, neurons), slots,
                         misses);
    }
}

static void live_alone(uint32_t seed)
{
    struct neuron_cache_sizes sizes = {.num_neurons = 1 + next_random(&seed, MAX_NEURONS),
                                       .max_slots = next_random(&seed, MAX_NEURONS),
                                       .cluster_neurons = 1 + next_random(&seed, 6)};
    sizes.num_slots = next_random(&seed, sizes.max_slots + 1);
    sizes.hot_slots = next_random(&seed, sizes.num_slots + 1);
    void *cache = new_cache(sizes.num_neurons, sizes.max_slots);
    neuron_cache_format(cache, sizes.num_neurons, sizes.max_slots, sizes.hot_slots,
                        sizes.num_slots, sizes.cluster_neurons);
    for (uint32_t call = 0, epoch = 1; call < 300; call++) {
        epoch += next_random(&seed, 3) == 0;
        one_call(cache, &sizes, epoch, &seed);
        check(cache, sizes.num_neurons, sizes.max_slots);
    }
    free(cache);
}

/* ---- executors and a reader */

struct party {
    void *cache;
    uint32_t seed;
    int *stop;
};

static void *execute(void *argument)
{
    struct party *party = argument;
    uint32_t neurons[MAX_NEURONS], slots[MAX_NEURONS];
    struct neuron_miss misses[MAX_NEURONS];
    for (uint32_t step = 0; step < 2000; step++) {
        const uint32_t n = choose(&party->seed, MAX_NEURONS, neurons);
        expect(neuron_cache_lock(party->cache, WAIT_NS) == 0, "the lock in time");
        const int num_misses = neuron_cache_use(party->cache, step / 4, neurons, n, slots, misses);
        neuron_cache_unlock(party->cache);
        if (num_misses < 0)
            continue;
        for (uint32_t i = 0; i < n; i++)
            if (slots[i] & SLOT_LATE)
                expect(neuron_cache_wait(party->cache, neurons[i], WAIT_NS) != 0,
                       "an end of every read");
    }
    return NULL;
}

static void *end_reads(void *argument)
{
    struct party *party = argument;
    while (!__atomic_load_n(party->stop, __ATOMIC_ACQUIRE))
        for (uint32_t neuron = 0; neuron < MAX_NEURONS; neuron++) {
            if (neuron_cache_state(party->cache, neuron) != NEURON_LOADING)
                continue;
            if (next_random(&party->seed, 5)) {
                neuron_cache_landed(party->cache, neuron);
                continue;
            }
            expect(neuron_cache_lock(party->cache, WAIT_NS) == 0, "the lock in time");
            neuron_cache_failed(party->cache, neuron);
            neuron_cache_unlock(party->cache);
        }
    return NULL;
}

static void live_among_threads(void)
{
    enum { NUM_EXECUTORS = 3 };
    void *cache = new_cache(MAX_NEURONS, 40);
    neuron_cache_format(cache, MAX_NEURONS, 40, 0, 40, 1);
    int stop = 0;
    struct party parties[NUM_EXECUTORS + 1];
    pthread_t threads[NUM_EXECUTORS + 1];
    for (uint32_t i = 0; i <= NUM_EXECUTORS; i++) {
        parties[i] = (struct party){cache, i + 1, &stop};
        expect(pthread_create(&threads[i], NULL, i ? execute : end_reads, &parties[i]) == 0,
               "a thread");
    }
    for (uint32_t i = NUM_EXECUTORS + 1; i-- > 0;) {
        if (i == 0)
            __atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
        pthread_join(threads[i], NULL);
    }
    check(cache, MAX_NEURONS, 40);
    free(cache);
}

int main(void)
{
    for (uint32_t seed = 1; seed <= 200; seed++)
        live_alone(seed);
    live_among_threads();
    printf("no rule broken\n");
    return 0;
}
