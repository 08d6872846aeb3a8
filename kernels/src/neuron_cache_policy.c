/* Who stays in the cold region.
 *
 * A new neuron enters the window, since it must be loaded to be computed. When the window's oldest
 * has to go it meets the next victim of the main part's CLOCK hand: it takes the victim's place
 * only if it has been used clearly more often, else it is evicted itself. Use counts outlive
 * residence. So a scan, in which all counts are alike, passes through the window and leaves the
 * main part alone, while a hot set that has moved wins its place by its counts. */
#include "neuron_cache.h"

#define WINDOW_SHARE 64u     /* the window is one in so many cold slots */
#define MAX_HAND_STEPS 8u    /* of the CLOCK hand for one victim */
#define USES_MARGIN 1u       /* a newcomer must exceed a victim's count by more than this */
#define MAX_USES 127u
#define AGEING_USES 10u      /* counts are halved every so many uses a cold slot */
#define SETTLED_PER_ENTRY 2u /* slots that go from window to main part when one is filled */

/* ---- lists */

void list_init(struct neuron_cache *cache) {
    for (uint32_t i = 0; i < cache->max_slots + NUM_LISTS; i++)
        links_of(cache)[i] = (struct slot_link){i, i};
}

static uint32_t head_of(const struct neuron_cache *cache, enum slot_list list) {
    return cache->max_slots + (uint32_t)list;
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

uint32_t list_front(struct neuron_cache *cache, enum slot_list list) {
    uint32_t slot = links_of(cache)[head_of(cache, list)].next;
    return slot < cache->max_slots ? slot : NO_SLOT;
}

static void list_to_back(struct neuron_cache *cache, enum slot_list list, uint32_t slot) {
    list_unlink(cache, slot);
    list_append(cache, list, slot);
}

/* All of `from` goes behind the last of `list`. */
static void list_splice(struct neuron_cache *cache, enum slot_list list, enum slot_list from) {
    struct slot_link *links = links_of(cache);
    uint32_t head = head_of(cache, list), other = head_of(cache, from);
    if (links[other].next == other)
        return;
    uint32_t last = links[head].prev;
    links[last].next = links[other].next;
    links[links[other].next].prev = last;
    links[links[other].prev].next = head;
    links[head].prev = links[other].prev;
    links[other] = (struct slot_link){other, other};
}

void unpark(struct neuron_cache *cache) {
    list_splice(cache, LIST_WINDOW, LIST_WINDOW_PARKED);
    list_splice(cache, LIST_MAIN, LIST_MAIN_PARKED);
}

/* ---- use counts */

/* Counts of neurons that the sweep has not reached are in halves: the round that begins halves all
 * counts at once, and the sweep only writes it down. */
static uint32_t count_of(const struct neuron_cache *cache, uint32_t neuron,
                         const struct neuron_entry *entry) {
    return neuron < cache->aged ? entry->uses : entry->uses / 2u;
}

void count_use(struct neuron_cache *cache, uint32_t neuron) {
    struct neuron_entry *entry = &entries_of(cache)[neuron];
    if (count_of(cache, neuron, entry) < MAX_USES)
        entry->uses = (uint8_t)(entry->uses + (neuron < cache->aged ? 1 : 2));
}

void age(struct neuron_cache *cache, uint32_t num_uses) {
    uint64_t cold_slots = cache->num_slots - cache->hot_slots;
    uint64_t round_uses = AGEING_USES * (cold_slots ? cold_slots : 1);
    cache->ageing_credit += (uint64_t)num_uses * cache->num_neurons;
    uint64_t steps = cache->ageing_credit / round_uses;
    cache->ageing_credit %= round_uses;
    for (; steps > 0; steps--) {
        if (cache->aged == cache->num_neurons)
            cache->aged = 0;
        entries_of(cache)[cache->aged++].uses /= 2;
    }
}

/* ---- victims */

static struct neuron_entry *entry_in(struct neuron_cache *cache, uint32_t slot) {
    return &entries_of(cache)[owners_of(cache)[slot]];
}

static uint32_t uses_in(struct neuron_cache *cache, uint32_t slot) {
    return count_of(cache, owners_of(cache)[slot], entry_in(cache, slot));
}

/* The oldest slot of a list that may be evicted; those before it are parked. */
static uint32_t front_unused(struct neuron_cache *cache, enum slot_list list,
                             enum slot_list parked) {
    uint32_t slot;
    while ((slot = list_front(cache, list)) != NO_SLOT) {
        const struct neuron_entry *entry = entry_in(cache, slot);
        if (!is_used_now(cache, entry) && state_in(load_word(entry)) != NEURON_LOADING)
            break;
        list_unlink(cache, slot);
        list_append(cache, parked, slot);
    }
    return slot;
}

/* The main part's victim: the first that was not used since the hand passed it, or the least used
 * of those looked at. */
static uint32_t main_victim(struct neuron_cache *cache) {
    uint32_t best = NO_SLOT;
    for (uint32_t step = 0; step < MAX_HAND_STEPS; step++) {
        uint32_t slot = front_unused(cache, LIST_MAIN, LIST_MAIN_PARKED);
        if (slot == NO_SLOT)
            break;
        struct neuron_entry *entry = entry_in(cache, slot);
        if (!(entry->flags & ENTRY_REFERENCED))
            return slot;
        entry->flags &= (uint8_t)~ENTRY_REFERENCED;
        list_to_back(cache, LIST_MAIN, slot);
        if (best == NO_SLOT || uses_in(cache, slot) < uses_in(cache, best))
            best = slot;
    }
    return best;
}

void leave_part(struct neuron_cache *cache, struct neuron_entry *entry, uint32_t slot) {
    list_unlink(cache, slot);
    if (entry->flags & ENTRY_WINDOW)
        cache->num_window--;
    else
        cache->num_main--;
    if (is_used_now(cache, entry))
        cache->num_in_use--;
    entry->flags = 0;
}

static void evict(struct neuron_cache *cache, uint32_t slot) {
    struct neuron_entry *entry = entry_in(cache, slot);
    leave_part(cache, entry, slot);
    int moved = move_neuron(entry, NEURON_RESIDENT, NEURON_ABSENT, NO_SLOT);
    assert(moved);
    release_slot(cache, slot);
    count(&cache->counters.evictions, 1);
    count_held(&cache->counters.num_resident, -1);
}

static void promote(struct neuron_cache *cache, uint32_t slot) {
    list_unlink(cache, slot);
    list_append(cache, LIST_MAIN, slot);
    entry_in(cache, slot)->flags &= (uint8_t)~ENTRY_WINDOW;
    cache->num_window--;
    cache->num_main++;
}

static uint32_t window_quota(const struct neuron_cache *cache) {
    return (cache->num_slots - cache->hot_slots + WINDOW_SHARE - 1) / WINDOW_SHARE;
}

/* Free one slot: 1, or 0 when all that could go is in use. */
static int evict_one(struct neuron_cache *cache) {
    for (;;) {
        uint32_t newcomer = front_unused(cache, LIST_WINDOW, LIST_WINDOW_PARKED);
        uint32_t victim = main_victim(cache);
        if (newcomer == NO_SLOT && victim == NO_SLOT)
            return 0;
        if (victim != NO_SLOT &&
            (newcomer == NO_SLOT || cache->num_window < window_quota(cache))) {
            evict(cache, victim);
            return 1;
        }
        if (victim == NO_SLOT ||
            uses_in(cache, newcomer) <= uses_in(cache, victim) + USES_MARGIN) {
            if (victim != NO_SLOT)
                list_to_back(cache, LIST_MAIN, victim);
            evict(cache, newcomer);
            return 1;
        }
        promote(cache, newcomer);
        if (cache->num_window < window_quota(cache)) {
            evict(cache, victim);
            return 1;
        } /* else the window had outgrown its share, and the main part gets a slot back */
    }
}

int make_room(struct neuron_cache *cache, uint32_t n) {
    uint32_t in_parts = cache->num_window + cache->num_main;
    if (n > cache->num_free + in_parts - cache->num_in_use)
        return -1; /* known before anything is evicted in vain */
    for (int is_last_look = 0; cache->num_free < n;) {
        if (evict_one(cache))
            continue;
        if (is_last_look)
            return -1;
        is_last_look = 1; /* a read of an earlier epoch may have landed since it was parked */
        unpark(cache);
    }
    return 0;
}

/* While slots are free nobody has to compete: the window's oldest go over to the main part. */
static void settle(struct neuron_cache *cache) {
    for (uint32_t i = 0; i < SETTLED_PER_ENTRY; i++) {
        if (cache->num_free == 0 || cache->num_window <= window_quota(cache))
            return;
        uint32_t slot = front_unused(cache, LIST_WINDOW, LIST_WINDOW_PARKED);
        if (slot == NO_SLOT)
            return;
        promote(cache, slot);
    }
}

uint32_t enter_window(struct neuron_cache *cache, uint32_t neuron) {
    uint32_t slot = list_front(cache, LIST_FREE);
    assert(slot != NO_SLOT);
    list_unlink(cache, slot);
    cache->num_free--;
    owners_of(cache)[slot] = neuron;
    entries_of(cache)[neuron].flags = ENTRY_WINDOW;
    list_append(cache, LIST_WINDOW_PARKED, slot);
    cache->num_window++;
    settle(cache);
    return slot;
}
