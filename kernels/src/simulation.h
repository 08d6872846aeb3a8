/* Inside the simulated step: activity, what is kept, and the pipeline of one layer. */
#ifndef POLYNEURON_SIMULATION_H
#define POLYNEURON_SIMULATION_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "simulation_api.h"

#define MAX_CLUSTERS 2048u /* of a layer, over all experts its tokens use */
#define MAX_CORES 64u

/* SplitMix64 (Steele, Lea, Flood 2014). */
static inline uint64_t next_random(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* A whole number below n, from 32 random bits. */
static inline uint32_t below(uint32_t random, uint32_t n) {
    return (uint32_t)((uint64_t)random * n >> 32);
}

/* One cluster's part of a layer. */
struct layer_cluster {
    uint32_t id;      /* within its layer, experts one behind the other */
    uint32_t needed;  /* neurons some token needs */
    uint32_t tokens;  /* (token, neuron) pairs */
    uint32_t misses;
    uint32_t singles; /* of them, read alone */
    uint32_t runs, run_neurons; /* reads of several neighbours, and what they span */
};

struct layer_plan {
    uint32_t layer, num_clusters, misses;
    uint32_t predicted; /* neurons of a cluster that are predicted, for each of the tokens */
    int64_t npu_ns;
    struct layer_cluster clusters[MAX_CLUSTERS];
};

/* simulation_activity.c */
/* One more token of a unit's neurons. */
void activity_next(const struct neuron_law *law, uint64_t *bits, uint64_t *random, uint32_t level);
/* A layer's neurons as the recording has them for the token that the sequence has come to. */
void activity_recorded(const struct simulation *simulation, uint32_t sequence, uint32_t layer,
                       uint64_t *bits);
/* The sequence goes on to the next recorded token, behind the last one to the first. */
void recording_step(struct simulation *simulation, uint32_t sequence);
/* The experts that a token uses, from those of the token before it. A neuron
 * of an expert that is not used stays as it was. */
void experts_next(const struct expert_law *law, uint32_t layer, uint8_t *chosen, uint64_t *random);

/* simulation_recent.c */
/* The neurons (ascending) are used by the token `now`: their number that was not held; each of
 * those is marked in missed (n). */
uint32_t recent_use(void *recent, uint32_t now, const uint32_t *neurons, uint32_t n,
                    uint8_t *missed);

/* simulation_pipeline.c */
/* Run a layer that begins at begin_ps: when it is done, in ps. */
int64_t run_layer(struct simulation *simulation, const struct layer_plan *plan, int64_t begin_ps,
                  int64_t *io_free_ps, struct step_totals *totals);

#endif
