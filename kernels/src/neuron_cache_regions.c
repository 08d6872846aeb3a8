/* The regions of the neuron cache: whole clusters in the hot one, and both resized while a step
 * runs.
 *
 * The hot region is cut into runs of cluster_neurons slots, and a run holds one cluster. What must
 * leave a region goes at once, unless it is in use in this epoch or loading: then it keeps its slot
 * and waits in LIST_GOING for the end of the epoch. */
#include "neuron_cache_lists.h"

static int is_cold(const struct neuron_cache *cache, uint32_t slot) {
    return slot >= cache->hot_slots && slot < cache->num_slots;
}

static uint32_t owner_of(struct neuron_cache *cache, uint32_t slot) {
    return owners_of(cache)[slot];
}

void release_slot(struct neuron_cache *cache, uint32_t slot) {
    owners_of(cache)[slot] = NO_NEURON;
    if (is_cold(cache, slot)) {
        list_append(cache, LIST_FREE, slot);
        cache->num_free++;
    }
}

static void leave_going(struct neuron_cache *cache, uint32_t slot) {
    list_unlink(cache, slot);
    cache->num_going--;
}

void leave_region(struct neuron_cache *cache, uint32_t slot, uint32_t hot) {
    struct neuron_entry *entry = entry_in(cache, slot);
    if (entry->flags & ENTRY_GOING)
        leave_going(cache, slot);
    else if (!hot)
        leave_part(cache, slot);
    entry->flags = 0;
    count_held(hot ? &cache->counters.num_pinned : &cache->counters.num_resident, -1);
    release_slot(cache, slot);
}

void evict(struct neuron_cache *cache, uint32_t slot) {
    struct neuron_entry *entry = entry_in(cache, slot);
    uint32_t word = load_word(entry);
    assert(state_in(word) != NEURON_LOADING);
    int moved = move_neuron(entry, state_in(word), NEURON_ABSENT, NO_SLOT);
    assert(moved);
    leave_region(cache, slot, word & WORD_HOT);
    count(&cache->counters.evictions, 1);
}

void drop_going(struct neuron_cache *cache) {
    uint32_t next;
    for (uint32_t slot = list_front(cache, LIST_GOING); slot != NO_SLOT; slot = next) {
        next = list_next(cache, slot);
        if (owner_of(cache, slot) == SLOT_VACATED) {
            leave_going(cache, slot);
            release_slot(cache, slot);
        } else if (state_in(load_word(entry_in(cache, slot))) != NEURON_LOADING) {
            evict(cache, slot);
        }
    }
}

void neuron_cache_forget(void *base, uint32_t epoch) {
    struct neuron_cache *cache = base;
    begin_epoch(cache, epoch);
    for (uint32_t slot = cache->hot_slots; slot < cache->num_slots; slot++) {
        uint32_t owner = owner_of(cache, slot);
        if (owner == NO_NEURON || owner == SLOT_VACATED)
            continue;
        if (state_in(load_word(entry_in(cache, slot))) != NEURON_LOADING)
            evict(cache, slot);
    }
}

static void join_going(struct neuron_cache *cache, uint32_t slot) {
    list_append(cache, LIST_GOING, slot);
    cache->num_going++;
}

/* A neuron must leave its slot: now, or when the epoch is over. */
static void expel(struct neuron_cache *cache, uint32_t slot) {
    struct neuron_entry *entry = entry_in(cache, slot);
    uint32_t word = load_word(entry);
    if (!is_used_now(cache, entry) && state_in(word) != NEURON_LOADING) {
        evict(cache, slot);
        return;
    }
    if (!(word & WORD_HOT))
        leave_part(cache, slot);
    entry->flags = ENTRY_GOING;
    join_going(cache, slot);
    /* A loading one stays so: who landed it would not know. */
    uint32_t place = word & (NO_SLOT | WORD_HOT);
    if (state_in(word) != NEURON_LOADING) {
        int moved = move_neuron(entry, state_in(word), NEURON_EVICTING, place);
        assert(moved);
    }
}

/* The slot that a neuron's bytes are copied from: executors may still read it in this epoch. */
static void vacate(struct neuron_cache *cache, uint32_t slot, int is_in_use) {
    if (!is_in_use) {
        release_slot(cache, slot);
        return;
    }
    owners_of(cache)[slot] = SLOT_VACATED;
    join_going(cache, slot);
}

/* ---- runs of the hot region */

struct run {
    uint32_t activity; /* its neurons' use counts */
    int is_empty;      /* no slot has an owner or is still read */
    int is_held;       /* by a cluster that stays */
    int is_loading;    /* of that cluster: some neuron; */
    int is_in_use;     /* the same, in this epoch */
};

static uint32_t num_runs(const struct neuron_cache *cache, uint32_t num_slots) {
    return num_slots / cache->cluster_neurons;
}

static int stays_hot(const struct neuron_entry *entry) {
    return load_word(entry) & WORD_HOT && !(entry->flags & ENTRY_GOING);
}

static struct run look_at_run(struct neuron_cache *cache, uint32_t index) {
    struct run run = {0, 1, 0, 0, 0};
    uint32_t first = index * cache->cluster_neurons;
    for (uint32_t slot = first; slot < first + cache->cluster_neurons; slot++) {
        uint32_t owner = owner_of(cache, slot);
        if (owner == NO_NEURON)
            continue;
        run.is_empty = 0;
        if (owner == SLOT_VACATED || !stays_hot(entry_in(cache, slot)))
            continue;
        const struct neuron_entry *entry = entry_in(cache, slot);
        run.is_held = 1;
        run.is_loading |= state_in(load_word(entry)) == NEURON_LOADING;
        run.is_in_use |= is_used_now(cache, entry);
        run.activity += uses_of(cache, owner, entry);
    }
    return run;
}

static void expel_run(struct neuron_cache *cache, uint32_t index) {
    uint32_t first = index * cache->cluster_neurons;
    for (uint32_t slot = first; slot < first + cache->cluster_neurons; slot++) {
        uint32_t owner = owner_of(cache, slot);
        if (owner < SLOT_VACATED && stays_hot(entry_in(cache, slot)))
            expel(cache, slot);
    }
}

static void order_move(struct slot_move *moves, uint32_t *num_moves, uint32_t from, uint32_t to) {
    struct slot_move *last = *num_moves ? &moves[*num_moves - 1] : NULL;
    if (last && last->from_slot + last->num_slots == from && last->to_slot + last->num_slots == to)
        last->num_slots++;
    else
        moves[(*num_moves)++] = (struct slot_move){from, to, 1};
}

static void settle_hot(struct neuron_cache *cache, uint32_t neuron, uint32_t slot,
                       enum neuron_state from, enum neuron_state to) {
    assert(owner_of(cache, slot) == NO_NEURON);
    owners_of(cache)[slot] = neuron;
    int moved = move_neuron(&entries_of(cache)[neuron], from, to, slot | WORD_HOT);
    assert(moved);
}

void neuron_cache_pin(void *base, uint32_t first_neuron, uint32_t n, uint32_t first_slot) {
    struct neuron_cache *cache = base;
    uint32_t whole = num_runs(cache, cache->hot_slots) * cache->cluster_neurons;
    assert(first_neuron <= cache->num_neurons && n <= cache->num_neurons - first_neuron);
    assert(first_neuron % cache->cluster_neurons == 0 && first_slot % cache->cluster_neurons == 0);
    assert(first_slot <= whole && n <= whole - first_slot);
    for (uint32_t i = 0; i < n; i++) {
        settle_hot(cache, first_neuron + i, first_slot + i, NEURON_ABSENT, NEURON_PINNED);
    }
    count_held(&cache->counters.num_pinned, (int)n);
}

/* ---- a cluster becomes hot */

/* A run for a new cluster: an empty one, else the least active's if nobody needs it now. NO_SLOT
 * when there is none. */
static uint32_t find_run(struct neuron_cache *cache) {
    uint32_t best = NO_SLOT, least = UINT32_MAX;
    for (uint32_t index = 0; index < num_runs(cache, cache->hot_slots); index++) {
        struct run run = look_at_run(cache, index);
        if (run.is_empty)
            return index;
        if (run.is_held && !run.is_loading && !run.is_in_use && run.activity <= least) {
            best = index;
            least = run.activity;
        }
    }
    if (best != NO_SLOT)
        expel_run(cache, best);
    return best;
}

/* The run that has some of these neurons already, NO_SLOT if none has; *is_busy when a neuron can
 * neither stay where it is nor be copied now. */
static uint32_t run_of_cluster(struct neuron_cache *cache, uint32_t first, uint32_t n,
                               int *is_busy) {
    uint32_t found = NO_SLOT;
    for (uint32_t i = 0; i < n; i++) {
        const struct neuron_entry *entry = &entries_of(cache)[first + i];
        uint32_t word = load_word(entry);
        if (stays_hot(entry))
            found = slot_in(word) / cache->cluster_neurons;
        else if (entry->flags & ENTRY_GOING || state_in(word) == NEURON_LOADING)
            *is_busy = 1;
    }
    if (found != NO_SLOT && found >= num_runs(cache, cache->hot_slots))
        *is_busy = 1;
    return found;
}

int neuron_cache_admit_hot(void *base, uint32_t epoch, uint32_t cluster,
                           struct neuron_miss *misses, struct slot_move *moves,
                           uint32_t *num_moves) {
    struct neuron_cache *cache = base;
    assert(cluster < (cache->num_neurons + cache->cluster_neurons - 1) / cache->cluster_neurons);
    uint32_t first = cluster * cache->cluster_neurons, left = cache->num_neurons - first;
    uint32_t n = left < cache->cluster_neurons ? left : cache->cluster_neurons;
    int is_busy = 0, num_misses = 0;
    *num_moves = 0;
    begin_epoch(cache, epoch);
    uint32_t run = run_of_cluster(cache, first, n, &is_busy);
    if (is_busy || (run == NO_SLOT && (run = find_run(cache)) == NO_SLOT))
        return -1;
    for (uint32_t i = 0; i < n; i++) {
        struct neuron_entry *entry = &entries_of(cache)[first + i];
        uint32_t word = load_word(entry), slot = run * cache->cluster_neurons + i;
        if (state_in(word) == NEURON_ABSENT) {
            settle_hot(cache, first + i, slot, NEURON_ABSENT, NEURON_LOADING);
            misses[num_misses++] = (struct neuron_miss){first + i, slot};
            count(&cache->counters.misses, 1);
            count_held(&cache->counters.num_pinned, 1);
        } else if (state_in(word) == NEURON_RESIDENT) {
            leave_part(cache, slot_in(word));
            settle_hot(cache, first + i, slot, NEURON_RESIDENT, NEURON_PINNED);
            vacate(cache, slot_in(word), is_used_now(cache, entry));
            order_move(moves, num_moves, slot_in(word), slot);
            count_held(&cache->counters.num_resident, -1);
            count_held(&cache->counters.num_pinned, 1);
        }
    }
    return num_misses;
}

/* ---- other sizes */

/* A slot of the cold region that is none any more, or has become one. */
static void leave_cold(struct neuron_cache *cache, uint32_t slot) {
    uint32_t owner = owner_of(cache, slot);
    if (owner == NO_NEURON) {
        list_unlink(cache, slot);
        cache->num_free--;
    } else if (owner != SLOT_VACATED && !(load_word(entry_in(cache, slot)) & WORD_HOT)) {
        expel(cache, slot);
    }
}

static void join_cold(struct neuron_cache *cache, uint32_t slot) {
    uint32_t owner = owner_of(cache, slot);
    if (owner == NO_NEURON) {
        release_slot(cache, slot);
    } else if (owner != SLOT_VACATED && !(load_word(entry_in(cache, slot)) & WORD_HOT)) {
        leave_going(cache, slot); /* what waited to go may stay */
        move_neuron(entry_in(cache, slot), NEURON_EVICTING, NEURON_RESIDENT, slot);
        enter_window(cache, slot);
    }
}

static uint32_t count_held_runs(struct neuron_cache *cache, uint32_t max_activity) {
    uint32_t num_held = 0;
    for (uint32_t index = 0; index < num_runs(cache, cache->max_slots); index++) {
        struct run run = look_at_run(cache, index);
        num_held += run.is_held && run.activity <= max_activity;
    }
    return num_held;
}

/* Drop clusters until so many are left: the least active, among equals those in the last runs. */
static void drop_clusters(struct neuron_cache *cache, uint32_t num_left) {
    uint32_t num_held = count_held_runs(cache, UINT32_MAX);
    if (num_held <= num_left)
        return;
    uint32_t num_dropped = num_held - num_left;
    uint32_t low = 0, high = MAX_USES * cache->cluster_neurons;
    while (low < high) { /* the least activity that enough clusters do not exceed */
        uint32_t middle = low + (high - low) / 2;
        if (count_held_runs(cache, middle) >= num_dropped)
            high = middle;
        else
            low = middle + 1;
    }
    uint32_t equals = num_dropped - (low ? count_held_runs(cache, low - 1) : 0);
    for (uint32_t index = num_runs(cache, cache->max_slots); index-- > 0;) {
        struct run run = look_at_run(cache, index);
        if (run.is_held && (run.activity < low || (run.activity == low && equals > 0))) {
            equals -= run.activity == low;
            expel_run(cache, index);
        }
    }
}

static void move_run(struct neuron_cache *cache, uint32_t from, uint32_t to, int is_in_use,
                     struct slot_move *moves, uint32_t *num_moves) {
    for (uint32_t i = 0; i < cache->cluster_neurons; i++) {
        uint32_t from_slot = from * cache->cluster_neurons + i;
        uint32_t to_slot = to * cache->cluster_neurons + i;
        uint32_t owner = owner_of(cache, from_slot);
        if (owner == NO_NEURON)
            continue;
        settle_hot(cache, owner, to_slot, NEURON_PINNED, NEURON_PINNED);
        vacate(cache, from_slot, is_in_use);
        order_move(moves, num_moves, from_slot, to_slot);
    }
}

/* Clusters in runs that the hot region has lost move to empty ones, if they can now. */
static uint32_t move_clusters(struct neuron_cache *cache, struct slot_move *moves) {
    uint32_t num_moves = 0, to = 0, last = num_runs(cache, cache->hot_slots);
    cache->num_misplaced = 0;
    for (uint32_t index = last; index < num_runs(cache, cache->max_slots); index++) {
        struct run run = look_at_run(cache, index);
        if (!run.is_held)
            continue;
        while (to < last && !look_at_run(cache, to).is_empty)
            to++;
        if (run.is_loading || to == last)
            cache->num_misplaced += cache->cluster_neurons;
        else
            move_run(cache, index, to, run.is_in_use, moves, &num_moves);
    }
    return num_moves;
}

uint32_t neuron_cache_resize(void *base, uint32_t epoch, uint32_t hot_slots, uint32_t num_slots,
                             struct slot_move *moves) {
    struct neuron_cache *cache = base;
    assert(hot_slots <= num_slots && num_slots <= cache->max_slots);
    begin_epoch(cache, epoch);
    uint32_t old_hot = cache->hot_slots, old_num = cache->num_slots;
    __atomic_store_n(&cache->hot_slots, hot_slots, __ATOMIC_RELAXED);
    __atomic_store_n(&cache->num_slots, num_slots, __ATOMIC_RELAXED);
    for (uint32_t slot = 0; slot < cache->max_slots; slot++) {
        int was_cold = slot >= old_hot && slot < old_num;
        if (was_cold && !is_cold(cache, slot))
            leave_cold(cache, slot);
        else if (!was_cold && is_cold(cache, slot))
            join_cold(cache, slot);
    }
    drop_clusters(cache, num_runs(cache, hot_slots));
    return move_clusters(cache, moves);
}

uint32_t neuron_cache_pending(const void *base) {
    const struct neuron_cache *cache = base;
    return __atomic_load_n(&cache->num_going, __ATOMIC_RELAXED) +
           __atomic_load_n(&cache->num_misplaced, __ATOMIC_RELAXED);
}
