/* The neuron cache's lists of slots: circular, doubly linked by indices, a head a list. */
#include "neuron_cache.h"

static uint32_t head_of(const struct neuron_cache *cache, enum slot_list list) {
    return cache->max_slots + (uint32_t)list;
}

void lists_format(struct neuron_cache *cache) {
    for (uint32_t i = 0; i < cache->max_slots + NUM_LISTS; i++)
        links_of(cache)[i] = (struct slot_link){i, i};
}

void list_append(struct neuron_cache *cache, enum slot_list list, uint32_t slot) {
    struct slot_link *links = links_of(cache);
    uint32_t head = head_of(cache, list), last = links[head].prev;
    links[slot] = (struct slot_link){last, head};
    links[last].next = slot;
    links[head].prev = slot;
}

void list_unlink(struct neuron_cache *cache, uint32_t slot) {
    struct slot_link *links = links_of(cache);
    links[links[slot].prev].next = links[slot].next;
    links[links[slot].next].prev = links[slot].prev;
    links[slot] = (struct slot_link){slot, slot};
}

int is_listed(struct neuron_cache *cache, uint32_t slot) {
    return links_of(cache)[slot].next != slot;
}

uint32_t list_next(struct neuron_cache *cache, uint32_t slot) {
    uint32_t next = links_of(cache)[slot].next;
    return next < cache->max_slots ? next : NO_SLOT;
}

uint32_t list_front(struct neuron_cache *cache, enum slot_list list) {
    return list_next(cache, head_of(cache, list));
}

void list_splice(struct neuron_cache *cache, enum slot_list list, enum slot_list from) {
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
