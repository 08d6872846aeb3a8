/* Which neurons a token needs. Every neuron is a chain of two states whose share of time in the
 * active one is its rate p, whatever the novelty v of each token: first an active neuron leaves
 * with (1 - p) / p * ((1 - p)^-v - 1), then any neuron joins with 1 - (1 - p)^v. The first asks the
 * active neurons alone, the second draws ranks; at v = 1 all are drawn anew. */
#include <string.h>

#include "simulation.h"

#define DRAWS_AT_ONCE 64u /* before any is marked: a mark would hold up the draws behind it */

/* Each random number decides about two neurons, whichever words they are in. */
struct halves {
    uint64_t state, spare;
    int has_spare;
};

/* Whether the neuron at the lowest bit of `left` leaves, as a mask of 64 bits. */
static inline uint64_t leaves(const uint32_t *leave, uint64_t left, uint64_t random) {
    return 0 - (uint64_t)((uint32_t)random < leave[__builtin_ctzll(left)]);
}

/* Those of a word's active neurons that leave. */
static inline uint64_t leaving(const uint32_t *leave, uint64_t left, struct halves *halves) {
    uint64_t gone = 0;
    if (halves->has_spare && left) {
        gone = left & -left & leaves(leave, left, halves->spare);
        left &= left - 1;
        halves->has_spare = 0;
    }
    while (left) {
        uint64_t r = next_random(&halves->state);
        gone |= left & -left & leaves(leave, left, r);
        left &= left - 1;
        if (left == 0) {
            halves->spare = r >> 32, halves->has_spare = 1;
            break;
        }
        gone |= left & -left & leaves(leave, left, r >> 32);
        left &= left - 1;
    }
    return gone;
}

static void leave_some(const uint32_t *leave, uint64_t *bits, uint32_t num_words,
                       uint64_t *random) {
    struct halves halves = {*random, 0, 0};
    for (uint32_t w = 0; w < num_words; w++)
        bits[w] &= ~leaving(leave + (size_t)w * 64, bits[w], &halves);
    *random = halves.state;
}

/* Neurons in proportion to their rates' logarithms, each drawn one active. */
static void join_some(const struct neuron_law *law, uint64_t *bits, uint64_t *random,
                      uint32_t level) {
    uint64_t state = *random;
    uint32_t draws = law->num_draws[level], chosen[DRAWS_AT_ONCE];
    draws = draws / 256 + ((next_random(&state) & 255) < draws % 256);
    while (draws) {
        uint32_t n = draws < DRAWS_AT_ONCE ? draws : DRAWS_AT_ONCE;
        for (uint32_t i = 0; i < n; i++) {
            uint64_t r = next_random(&state);
            struct joining drawn = law->joining[below((uint32_t)(r >> 32), law->num_neurons)];
            /* Without a branch: which of the two it is cannot be predicted. */
            uint32_t differs = 0 - (uint32_t)((uint32_t)r >= drawn.share);
            chosen[i] = drawn.neuron ^ ((drawn.neuron ^ drawn.other) & differs);
        }
        for (uint32_t i = 0; i < n; i++)
            bits[chosen[i] / 64] |= 1ull << chosen[i] % 64;
        draws -= n;
    }
    *random = state;
}

void activity_next(const struct neuron_law *law, uint64_t *bits, uint64_t *random, uint32_t level) {
    assert(level < law->num_levels);
    leave_some(law->leave + (size_t)level * law->num_neurons, bits, law->num_neurons / 64, random);
    join_some(law, bits, random, level);
}

void activity_recorded(const struct simulation *simulation, uint32_t sequence, uint32_t layer,
                       uint64_t *bits) {
    size_t words = simulation->law.num_neurons / 64;
    uint32_t token = simulation->next_recorded[sequence];
    assert(simulation->experts.num_experts == 1 && token < simulation->num_recorded);
    const uint64_t *found =
        simulation->recorded + ((size_t)layer * simulation->num_recorded + token) * words;
    memcpy(bits, found, words * sizeof *bits);
}

void recording_step(struct simulation *simulation, uint32_t sequence) {
    uint32_t next = simulation->next_recorded[sequence] + 1;
    simulation->next_recorded[sequence] = next < simulation->num_recorded ? next : 0;
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
