/* The neuron cache's lists of slots: circular, doubly linked by indices, a head a list.
 *
 * In a header, since whoever looks for a victim does little else than this. */
#ifndef POLYNEURON_NEURON_CACHE_LISTS_H
#define POLYNEURON_NEURON_CACHE_LISTS_H

#include "neuron_cache.h"

static inline uint32_t head_of(const struct neuron_cache *cache, enum slot_list list) {
    return cache->max_slots + (uint32_t)list;
}

static inline void lists_format(struct neuron_cache *cache) {
    for (uint32_t i = 0; i < cache->max_slots + NUM_LISTS; i++)
        links_of(cache)[i] = (struct slot_link){i, i};
}

static inline void list_append(struct neuron_cache *cache, enum slot_list list, uint32_t slot) {
    struct slot_link *links = links_of(cache);
    uint32_t head = head_of(cache, list), last = links[head].prev;
    links[slot] = (struct slot_link){last, head};
    links[last].next = slot;
    links[head].prev = slot;
}

static inline void list_unlink(struct neuron_cache *cache, uint32_t slot) {
    struct slot_link *links = links_of(cache);
    links[links[slot].prev].next = links[slot].next;
    links[links[slot].next].prev = links[slot].prev;
    links[slot] = (struct slot_link){slot, slot};
}

/* The slot after a slot of a list, NO_SLOT behind its last. */
static inline uint32_t list_next(struct neuron_cache *cache, uint32_t slot) {
    uint32_t next = links_of(cache)[slot].next;
    return next < cache->max_slots ? next : NO_SLOT;
}

/* The oldest slot of a list, NO_SLOT when it is empty. */
static inline uint32_t list_front(struct neuron_cache *cache, enum slot_list list) {
    return list_next(cache, head_of(cache, list));
}

/* All of `from` goes behind the last of `list`. */
static inline void list_splice(struct neuron_cache *cache, enum slot_list list,
                               enum slot_list from) {
    struct slot_link *links = links_of(cache);
    uint32_t head = head_of(cache, list), other = head_of(cache, from);
    if (links[other].next == other)
        return;
    uint32_t first = links[other].next, last = links[other].prev;
    links[first].prev = links[head].prev;
    links[links[head].prev].next = first;
    links[last].next = head;
    links[head].prev = last;
    links[other] = (struct slot_link){other, other};
}

/* Who takes slots of a list in their order looks at memory that lies anywhere: have it on its way,
 * the next slot's entry, whose number has come by now, and the place of the slot after that. Always
 * inline: gcc drops calls of a function that does nothing but prefetch. */
__attribute__((always_inline)) static inline void list_fetch_ahead(struct neuron_cache *cache,
                                                                   uint32_t slot) {
    uint32_t next = list_next(cache, slot);
    if (next == NO_SLOT)
        return;
    __builtin_prefetch(entry_in(cache, next), 1);
    uint32_t after = links_of(cache)[next].next;
    __builtin_prefetch(&links_of(cache)[after], 1);
    if (after < cache->max_slots)
        __builtin_prefetch(&owners_of(cache)[after], 1);
}

#endif
