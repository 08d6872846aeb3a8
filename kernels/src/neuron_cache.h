/* Inside the neuron cache: one block of memory without pointers, so that every process may map it
 * where it likes.
 *
 *   struct neuron_cache    lock, sizes, counters
 *   neuron_entry [num_neurons]
 *   uint32_t owner [max_slots]          the neuron in the slot, NO_NEURON
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

#define NO_NEURON UINT32_MAX
#define CACHE_BLOCK_ALIGNMENT 64u

/* neuron_entry.word: slot, state, and */
#define WORD_HOT (1u << 30)    /* the slot is or was the hot region's */
#define WORD_WAITED (1u << 31) /* somebody sleeps on the word */
#define WORD_STATE_SHIFT 24
#define WORD_STATE_MASK 7u

enum entry_flag {
    ENTRY_REFERENCED = 1, /* used since the hand of the main part passed it */
    ENTRY_WINDOW = 2,     /* in the window; else, with a cold slot, in the main part */
    ENTRY_GOING = 4       /* its slot has left its region */
};

struct neuron_entry {
    uint32_t word;
    uint16_t stamp; /* the tick of the last use; 0: none */
    uint8_t uses;   /* aged use count, see count_of() */
    uint8_t flags;
};
_Static_assert(sizeof(struct neuron_entry) == 8, "eight neurons a cache line");

struct slot_link {
    uint32_t prev, next;
};

/* Lists of slots, oldest first. In-use slots are parked in the second list of their part when they
 * are met, and come back when the epoch is over: so each is looked at once an epoch. */
enum slot_list {
    LIST_FREE,
    LIST_WINDOW,
    LIST_WINDOW_PARKED,
    LIST_MAIN,
    LIST_MAIN_PARKED,
    LIST_GOING, /* leave their region when the epoch is over */
    NUM_LISTS
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
    uint32_t aged;          /* neurons [0, aged) have been halved in this round */
    uint32_t reserved;
    uint64_t ageing_credit; /* what the sweep owes, see age() */
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

static inline uint32_t load_word(const struct neuron_entry *entry) {
    return __atomic_load_n(&entry->word, __ATOMIC_ACQUIRE);
}

static inline uint32_t slot_in(uint32_t word) { return word & NO_SLOT; }

static inline enum neuron_state state_in(uint32_t word) {
    return (enum neuron_state)(word >> WORD_STATE_SHIFT & WORD_STATE_MASK);
}

static inline int is_cold(const struct neuron_cache *cache, uint32_t slot) {
    return slot >= cache->hot_slots && slot < cache->num_slots;
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

/* neuron_cache.c */
/* Put a neuron that is in state `from` into state `to` with this slot (and WORD_HOT, if hot) and
 * wake who sleeps on it: 1, or 0 when it is not in `from`. */
int move_neuron(struct neuron_entry *entry, enum neuron_state from, enum neuron_state to,
                uint32_t place);
/* A slot without an owner joins the free ones of its region. */
void release_slot(struct neuron_cache *cache, uint32_t slot);
/* Every neuron in use becomes one that is not, if `epoch` is a new one. */
void begin_epoch(struct neuron_cache *cache, uint32_t epoch);

/* neuron_cache_policy.c */
void list_init(struct neuron_cache *cache);
void list_append(struct neuron_cache *cache, enum slot_list list, uint32_t slot);
void list_unlink(struct neuron_cache *cache, uint32_t slot);
/* The oldest slot of a list, NO_SLOT when it is empty. */
uint32_t list_front(struct neuron_cache *cache, enum slot_list list);
/* Parked slots are as good as others again. */
void unpark(struct neuron_cache *cache);
/* One more use of a neuron. */
void count_use(struct neuron_cache *cache, uint32_t neuron);
/* Halve old use counts, a few entries for so many uses. */
void age(struct neuron_cache *cache, uint32_t num_uses);
/* Evict until n slots are free: 0, or -1 when too many are in use. */
int make_room(struct neuron_cache *cache, uint32_t n);
/* Take a free slot for an absent neuron, which enters the window. */
uint32_t enter_window(struct neuron_cache *cache, uint32_t neuron);
/* The neuron with this cold slot leaves its part of the region. */
void leave_part(struct neuron_cache *cache, struct neuron_entry *entry, uint32_t slot);

#endif
