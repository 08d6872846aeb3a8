/* The neuron cache: states, lock, use (neuron_cache.h shows the memory). */
#include "neuron_cache_lists.h"

#include <string.h>

#include "board.h"

#define WAIT_SLICE_NS 100000000ll /* a waiter looks again this often, woken or not */
#define LOCK_SPINS 200u
#define FETCH_AHEAD 16u /* neurons: as long as memory takes to answer */

#define TO(state) (1u << NEURON_##state)

/* What may become of a neuron in each state. */
static const uint32_t allowed[] = {
    [NEURON_ABSENT] = TO(LOADING)      /* admitted */
                      | TO(PINNED),    /* read at start-up */
    [NEURON_LOADING] = TO(RESIDENT)    /* landed in the cold region */
                       | TO(PINNED)    /* landed in the hot region */
                       | TO(ABSENT),   /* its read failed */
    [NEURON_RESIDENT] = TO(ABSENT)     /* evicted */
                        | TO(EVICTING) /* its slot leaves the region and is in use */
                        | TO(PINNED),  /* its cluster became hot */
    [NEURON_PINNED] = TO(ABSENT)       /* its cluster was dropped */
                      | TO(EVICTING)   /* the same, and is in use */
                      | TO(PINNED),    /* its cluster moved */
    [NEURON_EVICTING] = TO(ABSENT)     /* the epoch is over */
                        | TO(RESIDENT) /* its slot came back before that */
                        | TO(PINNED),  /* its cluster became hot before that */
};

uint32_t neuron_cache_allowed(uint32_t state) {
    assert(state <= NEURON_EVICTING);
    return allowed[state];
}

int move_neuron(struct neuron_entry *entry, enum neuron_state from, enum neuron_state to,
                uint32_t place) {
    assert(allowed[from] & 1u << to);
    uint32_t word = load_word(entry);
    do {
        if (state_in(word) != from)
            return 0;
    } while (!__atomic_compare_exchange_n(&entry->word, &word,
                                          place | (uint32_t)to << WORD_STATE_SHIFT, 0,
                                          __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
    if (word & WORD_WAITED)
        futex_wake_all(&entry->word);
    return 1;
}

size_t neuron_cache_bytes(uint32_t num_neurons, uint32_t max_slots) {
    return sizeof(struct neuron_cache) + num_neurons * sizeof(struct neuron_entry) +
           max_slots * sizeof(uint32_t) +
           ((size_t)max_slots + NUM_LISTS) * sizeof(struct slot_link);
}

void neuron_cache_format(void *base, uint32_t num_neurons, uint32_t max_slots, uint32_t hot_slots,
                         uint32_t num_slots, uint32_t cluster_neurons) {
    assert(((uintptr_t)base & (CACHE_BLOCK_ALIGNMENT - 1)) == 0);
    assert(num_neurons < SLOT_VACATED && max_slots <= NO_SLOT - NUM_LISTS);
    assert(hot_slots <= num_slots && num_slots <= max_slots && cluster_neurons > 0);
    struct neuron_cache *cache = base;
    memset(cache, 0, sizeof *cache);
    cache->num_neurons = num_neurons;
    cache->max_slots = max_slots;
    cache->hot_slots = hot_slots;
    cache->num_slots = num_slots;
    cache->cluster_neurons = cluster_neurons;
    for (uint32_t i = 0; i < num_neurons; i++)
        entries_of(cache)[i] = (struct neuron_entry){NO_SLOT, 0, 0, 0};
    lists_format(cache);
    window_format(cache);
    for (uint32_t slot = 0; slot < max_slots; slot++)
        release_slot(cache, slot);
    word_store_wake(&cache->lock, 0);
}

/* ---- the lock */

int neuron_cache_lock(void *base, int64_t timeout_ns) {
    uint32_t *lock = &((struct neuron_cache *)base)->lock;
    for (uint32_t spin = 0; spin < LOCK_SPINS; spin++) {
        uint32_t free = 0;
        if (__atomic_compare_exchange_n(lock, &free, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return 0;
        spin_pause();
    }
    uint64_t end = monotonic_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
    while (__atomic_exchange_n(lock, 2, __ATOMIC_ACQUIRE) != 0) {
        int64_t left = (int64_t)(end - monotonic_ns());
        if (left <= 0)
            return -1;
        futex_wait(lock, 2, left < WAIT_SLICE_NS ? left : WAIT_SLICE_NS);
    }
    return 0;
}

void neuron_cache_unlock(void *base) {
    uint32_t *lock = &((struct neuron_cache *)base)->lock;
    if (__atomic_exchange_n(lock, 0, __ATOMIC_RELEASE) == 2)
        futex_wake_all(lock);
}

/* ---- epochs and use */

void begin_epoch(struct neuron_cache *cache, uint32_t epoch) {
    if (cache->tick != 0 && epoch == cache->epoch)
        return;
    cache->epoch = epoch;
    if (++cache->tick > UINT16_MAX) { /* no old stamp may look like a new one */
        cache->tick = 1;
        for (uint32_t i = 0; i < cache->num_neurons; i++)
            entries_of(cache)[i].stamp = 0;
    }
    cache->num_in_use = 0;
    drop_going(cache);
    unpark(cache);
    adapt_window(cache);
}

/* Of a neuron that has a slot. */
static void touch(struct neuron_cache *cache, uint32_t neuron) {
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    count_use(cache, neuron);
    if (is_used_now(cache, entry))
        return;
    entry->stamp = (uint16_t)cache->tick;
    if (load_word(entry) & WORD_HOT || entry->flags & ENTRY_GOING)
        return;
    cache->num_in_use++;
    /* Without a branch: which part it is in cannot be predicted. */
    uint32_t is_in_window = (entry->flags & ENTRY_WINDOW) != 0;
    cache->period.window_hits += is_in_window;
    cache->period.main_hits += 1 - is_in_window;
}

/* An absent neuron's slot, which it holds from now on. */
static uint32_t admit(struct neuron_cache *cache, uint32_t neuron) {
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    cache->epoch_misses++;
    cache->period.misses++;
    if (entry->stamp != 0 && cache->tick - entry->stamp <= cache->period.early_epochs)
        cache->period.early_misses++;
    entry->stamp = (uint16_t)cache->tick;
    count_use(cache, neuron);
    uint32_t slot = take_free_slot(cache, neuron);
    int moved = move_neuron(entry, NEURON_ABSENT, NEURON_LOADING, slot);
    assert(moved);
    count_held(&cache->counters.num_resident, 1);
    return slot;
}

int neuron_cache_use(void *base, uint32_t epoch, const uint32_t *neurons, uint32_t n,
                     uint32_t *slots, struct neuron_miss *misses) {
    struct neuron_cache *cache = base;
    struct neuron_entry *entries = entries_of(cache);
    uint32_t num_misses = 0, num_late = 0, num_hot = 0, num_hot_hits = 0;
    begin_epoch(cache, epoch);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t neuron = neurons[i];
        assert(neuron < cache->num_neurons && (i == 0 || neuron > neurons[i - 1]));
        __builtin_prefetch(&entries[neurons[i + FETCH_AHEAD < n ? i + FETCH_AHEAD : i]], 1);
        uint32_t word = load_word(&entries[neuron]);
        slots[i] = slot_in(word);
        if (state_in(word) == NEURON_ABSENT) {
            misses[num_misses++] = (struct neuron_miss){neuron, i};
            continue;
        }
        touch(cache, neuron);
        num_hot += (word & WORD_HOT) != 0;
        if (state_in(word) == NEURON_LOADING) {
            slots[i] |= SLOT_LATE;
            num_late++;
        } else {
            num_hot_hits += (word & WORD_HOT) != 0;
        }
    }
    if (make_room(cache, num_misses) != 0)
        return -1;
    for (uint32_t i = 0; i < num_misses; i++) {
        struct neuron_miss *miss = &misses[i];
        uint32_t place = miss->slot; /* where in `slots` it belongs */
        miss->slot = admit(cache, miss->neuron);
        slots[place] = miss->slot | SLOT_LATE;
    }
    age(cache, n - num_hot);
    count(&cache->counters.hits, n - num_misses - num_late);
    count(&cache->counters.hot_hits, num_hot_hits);
    count(&cache->counters.misses, num_misses);
    count(&cache->counters.late, num_late);
    return (int)num_misses;
}

/* ---- loads */

void neuron_cache_landed(void *base, uint32_t neuron) {
    struct neuron_cache *cache = base;
    assert(neuron < cache->num_neurons);
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    uint32_t place = load_word(entry) & (NO_SLOT | WORD_HOT); /* loading neurons stay in place */
    move_neuron(entry, NEURON_LOADING, place & WORD_HOT ? NEURON_PINNED : NEURON_RESIDENT, place);
}

void neuron_cache_failed(void *base, uint32_t neuron) {
    struct neuron_cache *cache = base;
    assert(neuron < cache->num_neurons);
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    uint32_t word = load_word(entry);
    if (!move_neuron(entry, NEURON_LOADING, NEURON_ABSENT, NO_SLOT))
        return;
    leave_region(cache, slot_in(word), word & WORD_HOT);
    count(&cache->counters.failures, 1);
}

int neuron_cache_wait(void *base, uint32_t neuron, int64_t timeout_ns) {
    struct neuron_cache *cache = base;
    assert(neuron < cache->num_neurons);
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    uint64_t end = monotonic_ns() + (uint64_t)(timeout_ns > 0 ? timeout_ns : 0);
    for (;;) {
        uint32_t word = load_word(entry);
        if (state_in(word) != NEURON_LOADING)
            return state_in(word) == NEURON_ABSENT ? -1 : 1;
        int64_t left = (int64_t)(end - monotonic_ns());
        if (left <= 0)
            return 0;
        if (word & WORD_WAITED ||
            __atomic_compare_exchange_n(&entry->word, &word, word | WORD_WAITED, 0,
                                        __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            futex_wait(&entry->word, word | WORD_WAITED,
                       left < WAIT_SLICE_NS ? left : WAIT_SLICE_NS);
    }
}

uint32_t neuron_cache_epoch(const void *base) { return ((const struct neuron_cache *)base)->epoch; }

/* ---- looks without the lock */

static uint32_t word_of(const void *base, uint32_t neuron) {
    const struct neuron_cache *cache = base;
    assert(neuron < cache->num_neurons);
    return load_word((const struct neuron_entry *)(cache + 1) + neuron);
}

uint32_t neuron_cache_state(const void *base, uint32_t neuron) {
    return state_in(word_of(base, neuron));
}

int neuron_cache_has(const void *base, uint32_t neuron) {
    uint32_t state = neuron_cache_state(base, neuron);
    return state != NEURON_ABSENT && state != NEURON_LOADING;
}

uint32_t neuron_cache_slot(const void *base, uint32_t neuron) {
    return slot_in(word_of(base, neuron));
}

void neuron_cache_get_counters(const void *base, struct neuron_cache_counters *counters) {
    const struct neuron_cache_counters *now = &((const struct neuron_cache *)base)->counters;
    counters->hits = __atomic_load_n(&now->hits, __ATOMIC_RELAXED);
    counters->hot_hits = __atomic_load_n(&now->hot_hits, __ATOMIC_RELAXED);
    counters->misses = __atomic_load_n(&now->misses, __ATOMIC_RELAXED);
    counters->late = __atomic_load_n(&now->late, __ATOMIC_RELAXED);
    counters->evictions = __atomic_load_n(&now->evictions, __ATOMIC_RELAXED);
    counters->failures = __atomic_load_n(&now->failures, __ATOMIC_RELAXED);
    counters->num_resident = __atomic_load_n(&now->num_resident, __ATOMIC_RELAXED);
    counters->num_pinned = __atomic_load_n(&now->num_pinned, __ATOMIC_RELAXED);
}

void neuron_cache_get_sizes(const void *base, struct neuron_cache_sizes *sizes) {
    const struct neuron_cache *cache = base;
    sizes->num_neurons = cache->num_neurons;
    sizes->max_slots = cache->max_slots;
    sizes->hot_slots = __atomic_load_n(&cache->hot_slots, __ATOMIC_RELAXED);
    sizes->num_slots = __atomic_load_n(&cache->num_slots, __ATOMIC_RELAXED);
    sizes->cluster_neurons = cache->cluster_neurons;
}
