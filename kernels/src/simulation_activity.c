/* Which neurons a token needs. Every neuron is a chain of two states whose share of time in the
 * active one is its rate p, whatever the novelty v of each token: first an active neuron leaves
 * with (1 - p) / p * ((1 - p)^-v - 1), then any neuron joins with 1 - (1 - p)^v. The first asks the
 * active neurons alone, the second draws ranks; at v = 1 all are drawn anew. */
#include <string.h>

#include "simulation.h"

static void leave_some(const uint32_t *leave, uint64_t *bits, uint32_t num_words,
                       uint64_t *random) {
    uint64_t spare = 0;
    int has_spare = 0;
    for (uint32_t w = 0; w < num_words; w++) {
        uint64_t left = bits[w], gone = 0;
        while (left) {
            uint32_t bit = (uint32_t)__builtin_ctzll(left);
            left &= left - 1;
            spare = has_spare ? spare >> 32 : next_random(random);
            has_spare = !has_spare;
            gone |= (uint64_t)((uint32_t)spare < leave[w * 64 + bit]) << bit;
        }
        bits[w] &= ~gone;
    }
}

void activity_next(const struct neuron_law *law, uint64_t *bits, uint64_t *random, uint32_t level) {
    assert(level < law->num_levels);
    leave_some(law->leave + (size_t)level * law->num_neurons, bits, law->num_neurons / 64, random);
    uint32_t draws = law->num_draws[level];
    draws = draws / 256 + ((next_random(random) & 255) < draws % 256);
    for (uint32_t i = 0; i < draws; i++) {
        uint64_t r = next_random(random);
        uint32_t rank = below((uint32_t)(r >> 32), law->num_neurons);
        if ((uint32_t)r >= law->alias_share[rank])
            rank = law->alias_rank[rank];
        uint32_t neuron = law->place[rank];
        bits[neuron / 64] |= 1ull << neuron % 64;
    }
}

static int is_in(const uint8_t *chosen, uint32_t n, uint32_t expert) {
    for (uint32_t i = 0; i < n; i++)
        if (chosen[i] == expert)
            return 1;
    return 0;
}

void experts_next(const struct expert_law *law, uint32_t layer, uint8_t *chosen, uint64_t *random) {
    uint8_t next[256];
    uint32_t n = 0, num = law->num_experts;
    if (num == 1) {
        chosen[0] = 0;
        return;
    }
    for (uint32_t i = 0; i < law->num_used; i++)
        if ((uint32_t)next_random(random) < law->stay)
            next[n++] = chosen[i];
    while (n < law->num_used) {
        uint64_t r = next_random(random);
        uint32_t drawn = below((uint32_t)(r >> 32), num);
        if ((uint32_t)r >= law->alias_share[drawn])
            drawn = law->alias_expert[drawn];
        uint32_t expert = (drawn + layer) % num; /* another one is popular in each layer */
        if (!is_in(next, n, expert))
            next[n++] = (uint8_t)expert;
    }
    memcpy(chosen, next, n);
}
