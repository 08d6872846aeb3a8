/* Who stays in the cold region.
 *
 * A new neuron enters the window, since it must be loaded to be computed. When a slot is needed,
 * the window's oldest meets the least used neuron of the main part: it takes that one's place only
 * if it has been used clearly more often, else it is evicted itself. Use counts outlive residence.
 * So a scan, in which all counts are alike, passes through the window and leaves the main part
 * alone, while a hot set that has moved wins its place by its counts. The window is small, and
 * grows where neurons come in bursts: where its slots earn more hits than those of the main part,
 * or where many misses are of neurons that were used a moment ago.
 *
 * The main part is kept by use count, lazily: a slot lies in the list of the count it had when it
 * was last met, and is carried up when a victim is looked for. Every step of that is paid for by a
 * use. */
#include "neuron_cache_lists.h"

/* Chosen on the activations of a real model and on power laws whose bursts last up to five tokens,
 * with epochs of a layer and of a token. */
#define MIN_WINDOW_SHARE 64u /* the window is given at least one in so many cold slots, */
#define MAX_WINDOW_SHARE 2u  /* at most one in so many, */
#define WINDOW_STEP 64u      /* and more or less by one in so many a period */
#define PERIODS 4u           /* there are so many periods in as many uses as there are cold slots */
#define EARLY_MISSES 6u      /* one early miss in so many makes the window grow */
#define USES_MARGIN 2u       /* see beats() */
#define AGEING_USES 20u      /* counts are halved every so many uses a cold slot */
#define MAX_CARRIED 64u      /* slots carried up in search of one victim */

static uint32_t num_cold(const struct neuron_cache *cache) {
    return cache->num_slots - cache->hot_slots;
}

/* ---- use counts */

static uint32_t uses_in(struct neuron_cache *cache, uint32_t slot) {
    return uses_of(cache, owners_of(cache)[slot], entry_in(cache, slot));
}

static enum slot_list list_of_count(uint32_t uses) { return (enum slot_list)(LIST_MAIN + uses); }

static void begin_ageing_round(struct neuron_cache *cache) {
    cache->aged = 0;
    cache->least_uses /= 2;
    list_splice(cache, list_of_count(0), list_of_count(1));
    for (uint32_t uses = 2; uses <= MAX_USES; uses++)
        list_splice(cache, list_of_count(uses / 2), list_of_count(uses));
}

void age(struct neuron_cache *cache, uint32_t num_uses) {
    uint64_t round_uses = AGEING_USES * (uint64_t)(num_cold(cache) ? num_cold(cache) : 1);
    cache->period.uses += num_uses;
    cache->ageing_credit += (uint64_t)num_uses * cache->num_neurons;
    uint64_t steps = cache->ageing_credit / round_uses;
    cache->ageing_credit %= round_uses;
    for (; steps > 0; steps--) {
        if (cache->aged == cache->num_neurons)
            begin_ageing_round(cache);
        entries_of(cache)[cache->aged++].uses /= 2;
    }
}

/* ---- the two parts */

void enter_window(struct neuron_cache *cache, uint32_t slot) {
    struct neuron_entry *entry = entry_in(cache, slot);
    entry->flags = ENTRY_WINDOW;
    cache->num_window++;
    cache->num_in_use += is_used_now(cache, entry);
    list_append(cache, is_used_now(cache, entry) ? LIST_WINDOW_PARKED : LIST_WINDOW, slot);
}

void leave_part(struct neuron_cache *cache, uint32_t slot) {
    struct neuron_entry *entry = entry_in(cache, slot);
    list_unlink(cache, slot);
    if (entry->flags & ENTRY_WINDOW)
        cache->num_window--;
    else
        cache->num_main--;
    cache->num_in_use -= is_used_now(cache, entry);
    entry->flags = 0;
}

static void enter_list_of_count(struct neuron_cache *cache, uint32_t slot) {
    uint32_t uses = uses_in(cache, slot);
    list_unlink(cache, slot);
    list_append(cache, list_of_count(uses), slot);
    if (uses < cache->least_uses)
        cache->least_uses = uses;
}

static void promote(struct neuron_cache *cache, uint32_t slot) {
    enter_list_of_count(cache, slot);
    entry_in(cache, slot)->flags &= (uint8_t)~ENTRY_WINDOW;
    cache->num_window--;
    cache->num_main++;
}

void unpark(struct neuron_cache *cache) {
    list_splice(cache, LIST_WINDOW, LIST_WINDOW_PARKED);
    uint32_t slot;
    while ((slot = list_front(cache, LIST_MAIN_PARKED)) != NO_SLOT)
        enter_list_of_count(cache, slot);
}

/* The oldest slot of a list that may be evicted; those before it are parked. */
static uint32_t front_unused(struct neuron_cache *cache, enum slot_list list,
                             enum slot_list parked) {
    uint32_t slot;
    while ((slot = list_front(cache, list)) != NO_SLOT) {
        const struct neuron_entry *entry = entry_in(cache, slot);
        list_fetch_ahead(cache, slot);
        if (!is_used_now(cache, entry) && state_in(load_word(entry)) != NEURON_LOADING)
            break;
        list_unlink(cache, slot);
        list_append(cache, parked, slot);
    }
    return slot;
}

static uint32_t window_front(struct neuron_cache *cache) {
    return front_unused(cache, LIST_WINDOW, LIST_WINDOW_PARKED);
}

/* Whether the window should be larger: its slots earn more hits than those of the main part, or too
 * many neurons are missed that a cache of recent ones would have. */
static int should_grow(const struct neuron_cache *cache) {
    const struct cache_period *period = &cache->period;
    return (uint64_t)period->window_hits * cache->num_main >
               (uint64_t)period->main_hits * cache->num_window ||
           (uint64_t)period->early_misses * EARLY_MISSES > period->misses;
}

static uint32_t clamp(uint32_t value, uint32_t least, uint32_t most) {
    return value < least ? least : value > most ? most : value;
}

void window_format(struct neuron_cache *cache) {
    cache->window_share = num_cold(cache) / MIN_WINDOW_SHARE + 1;
}

void adapt_window(struct neuron_cache *cache) {
    struct cache_period *period = &cache->period;
    period->epochs++;
    if (period->most_misses < cache->epoch_misses)
        period->most_misses = cache->epoch_misses;
    cache->epoch_misses = 0;
    uint32_t cold = num_cold(cache), step = cold / WINDOW_STEP + 1;
    if (period->uses < cold / PERIODS)
        return;
    if (period->misses > 0) {
        if (should_grow(cache))
            cache->window_share += step;
        else
            cache->window_share -= cache->window_share < step ? cache->window_share : step;
        cache->most_misses -= cache->most_misses / 4;
        if (cache->most_misses < period->most_misses)
            cache->most_misses = period->most_misses;
    }
    cache->window_share = clamp(cache->window_share, cold / MIN_WINDOW_SHARE + 1,
                                cold / MAX_WINDOW_SHARE + 1);
    /* A miss is early if an LRU of three quarters of the slots would have hit: never in a scan of
     * more neurons than slots. */
    uint64_t early_uses = (uint64_t)cold * 3 / 4;
    uint64_t early = period->uses ? early_uses * period->epochs / period->uses : 0;
    *period = (struct cache_period){.early_epochs = (uint32_t)early};
}

/* ---- victims */

/* The least used slot of the main part; of the first MAX_CARRIED that were used since they were
 * last met, if there are so many. */
static uint32_t main_victim(struct neuron_cache *cache) {
    uint32_t best = NO_SLOT, uses = cache->least_uses, carried = 0;
    while (uses <= MAX_USES && carried < MAX_CARRIED) {
        uint32_t slot = front_unused(cache, list_of_count(uses), LIST_MAIN_PARKED);
        if (slot == NO_SLOT) {
            cache->least_uses += uses == cache->least_uses;
            uses++;
            continue;
        }
        if (uses_in(cache, slot) == uses)
            return slot;
        enter_list_of_count(cache, slot);
        carried++;
        if (best == NO_SLOT || uses_in(cache, slot) < uses_in(cache, best))
            best = slot;
    }
    return best;
}

/* In a scan, counts differ by one for the neurons that the scan has already passed, and by one more
 * after halving. */
static int beats(struct neuron_cache *cache, uint32_t newcomer, uint32_t victim) {
    return uses_in(cache, newcomer) > uses_in(cache, victim) + USES_MARGIN;
}

/* Slots that the window has, with the free ones: they are on their way into it. */
static uint32_t window_slots(const struct neuron_cache *cache) {
    return cache->num_window + cache->num_free;
}

static int is_window_full(const struct neuron_cache *cache) {
    return window_slots(cache) >= cache->window_share;
}

/* The window has more than its share, and more than the misses of an epoch fill: it may give a slot
 * back if its oldest is as good as the main part's victim, or if there is no main part. */
static int should_return(struct neuron_cache *cache, uint32_t newcomer, uint32_t victim) {
    if (window_slots(cache) <= cache->window_share || window_slots(cache) <= cache->most_misses)
        return 0;
    if (victim == NO_SLOT)
        return cache->num_main == 0;
    return uses_in(cache, newcomer) >= uses_in(cache, victim);
}

/* Free one slot: 1, or 0 when all that could go is in use. */
static int evict_one(struct neuron_cache *cache) {
    for (;;) {
        uint32_t newcomer = window_front(cache), victim = main_victim(cache);
        if (newcomer == NO_SLOT && victim == NO_SLOT)
            return 0;
        if (newcomer == NO_SLOT || (victim != NO_SLOT && !is_window_full(cache))) {
            evict(cache, victim);
            return 1;
        }
        if (should_return(cache, newcomer, victim)) {
            promote(cache, newcomer);
            continue;
        }
        if (victim == NO_SLOT || !beats(cache, newcomer, victim)) {
            evict(cache, newcomer);
            return 1;
        }
        promote(cache, newcomer);
        if (is_window_full(cache))
            continue;
        evict(cache, victim);
        return 1;
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
    while (cache->num_free > 0 && cache->num_window > cache->window_share) {
        uint32_t slot = window_front(cache);
        if (slot == NO_SLOT)
            return;
        promote(cache, slot);
    }
}

uint32_t take_free_slot(struct neuron_cache *cache, uint32_t neuron) {
    uint32_t slot = list_front(cache, LIST_FREE);
    assert(slot != NO_SLOT);
    list_unlink(cache, slot);
    cache->num_free--;
    owners_of(cache)[slot] = neuron;
    enter_window(cache, slot);
    settle(cache);
    return slot;
}
