/* Inside the neuron cache: one block of memory without pointers, so that every process may map it
 * where it likes.
 *
 *   struct neuron_cache    lock, sizes, counters
 *   neuron_entry [num_neurons]
 *   uint32_t owner [max_slots]          the neuron in the slot, NO_NEURON or SLOT_VACATED
 *   slot_link [max_slots + NUM_LISTS]   every slot is in one list or, linked to itself, in none
 *
 * A neuron's entry is 8 bytes, so that a hit touches one cache line. Its word is what others may
 * change or sleep on without the lock; all else belongs to who holds the lock. */
#ifndef POLYNEURON_NEURON_CACHE_H
#define POLYNEURON_NEURON_CACHE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "neuron_cache_api.h"

#define NO_NEURON UINT32_MAX            /* owner of a slot: none, */
#define SLOT_VACATED (UINT32_MAX - 1)   /* none, but executors may still read it in this epoch */
#define CACHE_BLOCK_ALIGNMENT 64u

/* neuron_entry.word: slot, state, and */
#define WORD_HOT (1u << 30)    /* the slot is or was the hot region's */
#define WORD_WAITED (1u << 31) /* somebody sleeps on the word */
#define WORD_STATE_SHIFT 24
#define WORD_STATE_MASK 7u

enum entry_flag {
    ENTRY_WINDOW = 1, /* in the window; else, with a cold slot, in the main part */
    ENTRY_GOING = 2   /* its slot has left its region: in LIST_GOING */
};

struct neuron_entry {
    uint32_t word;
    uint16_t stamp; /* the tick of the last use; 0: none */
    uint8_t uses;   /* aged use count, see uses_of() */
    uint8_t flags;
};
_Static_assert(sizeof(struct neuron_entry) == 8, "eight neurons a cache line");

struct slot_link {
    uint32_t prev, next;
};

#define MAX_USES 127u

/* Lists of slots, oldest first. Slots in use are parked in the second list of their part when they
 * are met, and come back when the epoch is over: so each is looked at once an epoch. */
enum slot_list {
    LIST_FREE,
    LIST_WINDOW,
    LIST_WINDOW_PARKED,
    LIST_MAIN_PARKED,
    LIST_GOING, /* left their region while in use or loading; vacated ones without an owner */
    LIST_MAIN,  /* the main part by use count: LIST_MAIN + count */
    NUM_LISTS = LIST_MAIN + (int)MAX_USES + 1
};

struct cache_period { /* since the window's share was last looked at */
    uint32_t uses;         /* of cold and absent neurons */
    uint32_t epochs;
    uint32_t window_hits; /* neurons of the window used, once an epoch */
    uint32_t main_hits;
    uint32_t misses;
    uint32_t early_misses; /* of them, used no more than early_epochs ago */
    uint32_t early_epochs;
    uint32_t most_misses;  /* in one epoch */
};

struct neuron_cache {
    uint32_t lock; /* 0 free, 1 held, 2 held and waited for */
    uint32_t pad[15];
    uint32_t num_neurons;
    uint32_t max_slots;
    uint32_t hot_slots;
    uint32_t num_slots;
    uint32_t cluster_neurons;
    uint32_t epoch;
    uint32_t tick;          /* counts epochs, 1 to 65535; 0 before the first */
    uint32_t num_free;
    uint32_t num_window;    /* slots of the window, parked ones too */
    uint32_t num_main;
    uint32_t num_in_use;    /* of both, used in this epoch */
    uint32_t num_going;     /* slots in LIST_GOING */
    uint32_t least_uses;    /* the main part's lists of smaller counts are empty */
    uint32_t num_misplaced; /* slots of hot clusters that could not move yet */
    uint32_t window_share;  /* slots the window is given, see adapt_window() */
    uint32_t epoch_misses;
    uint32_t most_misses;   /* in one epoch, a maximum that decays */
    uint32_t aged;          /* neurons [0, aged) have been halved in this round */
    uint64_t ageing_credit; /* what the sweep owes, see age() */
    struct cache_period period;
    struct neuron_cache_counters counters;
};

static inline struct neuron_entry *entries_of(struct neuron_cache *cache) {
    return (struct neuron_entry *)(cache + 1);
}

static inline uint32_t *owners_of(struct neuron_cache *cache) {
    return (uint32_t *)(entries_of(cache) + cache->num_neurons);
}

static inline struct slot_link *links_of(struct neuron_cache *cache) {
    return (struct slot_link *)(owners_of(cache) + cache->max_slots);
}

/* The entry of the neuron in a slot that has one. */
static inline struct neuron_entry *entry_in(struct neuron_cache *cache, uint32_t slot) {
    return &entries_of(cache)[owners_of(cache)[slot]];
}

static inline uint32_t load_word(const struct neuron_entry *entry) {
    return __atomic_load_n(&entry->word, __ATOMIC_ACQUIRE);
}

static inline uint32_t slot_in(uint32_t word) { return word & NO_SLOT; }

static inline enum neuron_state state_in(uint32_t word) {
    return (enum neuron_state)(word >> WORD_STATE_SHIFT & WORD_STATE_MASK);
}

static inline int is_used_now(const struct neuron_cache *cache, const struct neuron_entry *entry) {
    return entry->stamp == cache->tick;
}

static inline void count(uint64_t *counter, uint64_t by) {
    __atomic_store_n(counter, *counter + by, __ATOMIC_RELAXED);
}

static inline void count_held(uint32_t *counter, int by) {
    __atomic_store_n(counter, *counter + (uint32_t)by, __ATOMIC_RELAXED);
}

/* Counts of neurons that the sweep has not reached are in halves: the round that begins halves all
 * counts at once, and the sweep only writes it down. */
static inline uint32_t uses_of(const struct neuron_cache *cache, uint32_t neuron,
                               const struct neuron_entry *entry) {
    return neuron < cache->aged ? entry->uses : entry->uses / 2u;
}

/* One more use of a neuron. */
static inline void count_use(struct neuron_cache *cache, uint32_t neuron) {
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    if (uses_of(cache, neuron, entry) < MAX_USES)
        entry->uses = (uint8_t)(entry->uses + (neuron < cache->aged ? 1 : 2));
}

/* neuron_cache.c */
/* Put a neuron that is in state `from` into state `to` with this slot (and WORD_HOT, if hot) and
 * wake who sleeps on it: 1, or 0 when it is not in `from`. */
int move_neuron(struct neuron_entry *entry, enum neuron_state from, enum neuron_state to,
                uint32_t place);
/* Every neuron in use becomes one that is not, if `epoch` is a new one. */
void begin_epoch(struct neuron_cache *cache, uint32_t epoch);

/* neuron_cache_policy.c */
/* Parked slots are as good as others again. */
void unpark(struct neuron_cache *cache);
void window_format(struct neuron_cache *cache);
/* The window's share follows what the epochs that ended have shown. */
void adapt_window(struct neuron_cache *cache);
/* So many uses of the cold region: halve old use counts, a few entries at a time. */
void age(struct neuron_cache *cache, uint32_t num_uses);
/* Evict until n slots are free: 0, or -1 when too many are in use. */
int make_room(struct neuron_cache *cache, uint32_t n);
/* Take a free slot for a neuron that has none; it enters the window. */
uint32_t take_free_slot(struct neuron_cache *cache, uint32_t neuron);
/* The neuron in this cold slot enters the window, or leaves its part of the region. */
void enter_window(struct neuron_cache *cache, uint32_t slot);
void leave_part(struct neuron_cache *cache, uint32_t slot);

/* neuron_cache_regions.c */
/* A slot without an owner joins the free ones, if it is the cold region's. */
void release_slot(struct neuron_cache *cache, uint32_t slot);
/* The slot of a neuron that has become absent is free, wherever it was. */
void leave_region(struct neuron_cache *cache, uint32_t slot, uint32_t hot);
/* A neuron that is not loading goes, and its slot is free. */
void evict(struct neuron_cache *cache, uint32_t slot);
/* What waited for the epoch's end in LIST_GOING leaves. */
void drop_going(struct neuron_cache *cache);

#endif
