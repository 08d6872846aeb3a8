/* Random simulated steps in heap blocks of exactly the promised size. Built with sanitizers: exit 0
 * means no report and no broken rule. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "neuron_cache_api.h"
#include "simulation.h"

#define LEVELS 3u

static uint64_t state = 1;

static uint32_t pick(uint32_t n) { return below((uint32_t)next_random(&state), n); }

static void expect(int holds, const char *rule)
{
    if (!holds) {
        printf("broken: %s\n", rule);
        exit(1);
    }
}

static void *block(size_t bytes)
{
    void *memory = calloc(1, bytes);
    expect(memory != NULL, "memory");
    return memory;
}

static uint32_t *words(size_t n, uint32_t below_this)
{
    uint32_t *made = block(n * sizeof *made);
    for (size_t i = 0; i < n; i++)
        made[i] = below_this ? pick(below_this) : (uint32_t)next_random(&state);
    return made;
}

static uint32_t *shuffled(uint32_t n)
{
    uint32_t *made = block(n * sizeof *made);
    for (uint32_t i = 0; i < n; i++)
        made[i] = i;
    for (uint32_t i = n - 1; i > 0; i--) {
        uint32_t j = pick(i + 1), kept = made[i];
        made[i] = made[j], made[j] = kept;
    }
    return made;
}

static struct joining *joining(const struct neuron_law *law)
{
    struct joining *made = block(law->num_neurons * sizeof *made);
    for (uint32_t i = 0; i < law->num_neurons; i++)
        made[i] = (struct joining){(uint32_t)next_random(&state), (uint16_t)law->place[i],
                                   (uint16_t)pick(law->num_neurons)};
    return made;
}

static void set_law(struct simulation *simulation)
{
    struct neuron_law *law = &simulation->law;
    struct expert_law *experts = &simulation->experts;
    law->num_neurons = 64 * (1 + pick(6));
    law->num_levels = LEVELS;
    law->place = shuffled(law->num_neurons);
    law->joining = joining(law);
    law->leave = words(LEVELS * law->num_neurons, 0);
    law->num_draws = words(LEVELS, law->num_neurons * 256);
    law->gate_share = pick(65537);
    experts->num_experts = pick(2) ? 1 : 2 + pick(4);
    experts->num_used = 1 + pick(experts->num_experts);
    experts->stay = (uint32_t)next_random(&state);
    experts->alias_share = words(experts->num_experts, 0);
    experts->alias_expert = words(experts->num_experts, experts->num_experts);
}

/* Each layer has a law of its own, or all have one. */
static void set_layer_laws(struct simulation *simulation)
{
    const struct neuron_law *law = &simulation->law;
    if (pick(2))
        return;
    struct neuron_law *own = block(simulation->num_layers * sizeof *own);
    for (uint32_t layer = 0; layer < simulation->num_layers; layer++) {
        own[layer] = *law;
        own[layer].place = shuffled(law->num_neurons);
        own[layer].joining = joining(&own[layer]);
        own[layer].leave = words(LEVELS * law->num_neurons, 0);
    }
    simulation->layer_laws = own;
}

static void set_costs(struct cluster_costs *costs)
{
    *costs = (struct cluster_costs){
        pick(100), pick(9000), pick(9000), pick(900), pick(900), pick(900), pick(9000),
        pick(9000000), pick(9000000), pick(9000000), pick(900000), pick(90000), pick(900000),
        (uint32_t)next_random(&state), pick(9000), pick(90000), pick(90000), pick(2) * pick(90000),
        65536 + pick(65536)};
}

static void *new_cache(struct simulation *simulation, uint32_t neurons, uint32_t slots)
{
    if (simulation->cache_kind == CACHE_NEURON) {
        void *cache = aligned_alloc(64, (neuron_cache_bytes(neurons, slots) + 63) / 64 * 64);
        expect(cache != NULL, "memory for a cache");
        neuron_cache_format(cache, neurons, slots, 0, slots, 1);
        return cache;
    }
    void *recent = block(recent_bytes(neurons));
    recent_format(recent, neurons, slots);
    return recent;
}

/* A recording of exactly its size, of a model without experts; sequences are anywhere in it. */
static void record(struct simulation *simulation, uint32_t num_sequences)
{
    uint32_t tokens = 1 + pick(7);
    size_t num = (size_t)simulation->num_layers * tokens * simulation->law.num_neurons / 64;
    uint64_t *bits = block(num * sizeof *bits);
    for (size_t i = 0; i < num; i++)
        bits[i] = next_random(&state) & next_random(&state);
    simulation->recorded = bits;
    simulation->num_recorded = tokens;
    simulation->next_recorded = words(num_sequences, tokens);
    simulation->task_neurons = pick(2) * (1 + pick(simulation->law.num_neurons));
}

/* Which bits a sequence's last token needed in a layer, and which the recording has for it. */
static void expect_recorded(const struct simulation *simulation, uint32_t sequence)
{
    uint32_t num = simulation->law.num_neurons / 64, at = simulation->next_recorded[sequence];
    uint32_t token = (at ? at : simulation->num_recorded) - 1;
    expect(at < simulation->num_recorded, "a token of the recording");
    for (uint32_t layer = 0; layer < simulation->num_layers; layer++) {
        size_t unit = (size_t)sequence * simulation->num_layers + layer;
        size_t row = (size_t)layer * simulation->num_recorded + token;
        expect(memcmp(simulation->bits + unit * num, simulation->recorded + row * num,
                      num * sizeof(uint64_t)) == 0, "the recorded neurons");
    }
}

static void run_steps(struct simulation *simulation, uint32_t num_sequences)
{
    struct step_totals totals;
    for (uint32_t step = 0; step < 20; step++) {
        uint32_t sequences[4], levels[4], n = 1 + pick(num_sequences);
        for (uint32_t i = 0; i < n; i++)
            sequences[i] = i, levels[i] = pick(LEVELS);
        expect(simulation_step(simulation, sequences, levels, n, &totals) == 0, "a step");
        expect(totals.hits + totals.misses == totals.needed, "hits and misses are all");
        expect(totals.layers_ns >= 0 && totals.exposed_ns <= totals.layers_ns, "times");
        expect(simulation->num_records <= simulation->max_records, "records");
        for (uint32_t i = 0; simulation->recorded && i < n; i++)
            expect_recorded(simulation, i);
    }
}

static void one_life(void)
{
    struct simulation simulation = {0};
    set_law(&simulation);
    set_costs(&simulation.costs);
    uint32_t num = simulation.law.num_neurons, sequences = 1 + pick(4);
    simulation.num_layers = 1 + pick(3);
    set_layer_laws(&simulation);
    simulation.cluster_neurons = 64;
    simulation.hot_neurons = 64 * pick(num / 64 + 1);
    simulation.pinned_neurons = simulation.hot_neurons;
    simulation.pinned_neurons += 64 * pick((num - simulation.hot_neurons) / 64 + 1);
    simulation.num_cores = 1 + pick(6);
    simulation.cache_kind = pick(4);
    simulation.flags = pick(8);
    simulation.bundle_bytes = 4096;
    simulation.merge_gap = pick(5);
    uint32_t units = simulation.num_layers * simulation.experts.num_experts;
    simulation.bits = block((size_t)sequences * units * num / 8);
    simulation.random = block((sequences + 1) * sizeof(uint64_t));
    simulation.chosen = block((size_t)sequences * simulation.num_layers *
                              simulation.experts.num_used);
    size_t scratch = simulation_scratch_words(num, simulation.experts.num_experts);
    simulation.scratch = block(scratch * sizeof(uint32_t));
    simulation.max_records = 4096;
    simulation.records = block(simulation.max_records * sizeof *simulation.records);
    simulation.cache = new_cache(&simulation, units * num, 1 + pick(units * num));
    if (simulation.experts.num_experts == 1)
        record(&simulation, sequences);
    for (uint32_t i = 0; i < sequences; i++)
        simulation_begin(&simulation, i);
    simulation_warm(&simulation, pick(num + 1));
    run_steps(&simulation, sequences);
}

int main(void)
{
    for (int life = 0; life < 300; life++)
        one_life();
    puts("no rule broken");
    return 0;
}
