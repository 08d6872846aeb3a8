/* One step of the simulated engine, layer by layer. */
#include "simulation.h"

#include <string.h>

#include "neuron_cache_api.h"

struct unit_use { /* the sequences that use an expert in this layer */
    uint32_t n;
    uint32_t sequences[64];
};

static uint32_t num_units(const struct simulation *simulation) {
    return simulation->num_layers * simulation->experts.num_experts;
}

static uint64_t *bits_of(const struct simulation *simulation, uint32_t sequence, uint32_t unit) {
    size_t words = simulation->law.num_neurons / 64;
    return simulation->bits + ((size_t)sequence * num_units(simulation) + unit) * words;
}

static const struct neuron_law *law_of(const struct simulation *simulation, uint32_t layer) {
    return simulation->layer_laws ? &simulation->layer_laws[layer] : &simulation->law;
}

size_t simulation_scratch_words(uint32_t num_neurons, uint32_t num_experts) {
    /* neurons, slots, misses (two words), a byte each for "missed", units, a layer's plan */
    return 5 * (size_t)num_neurons + num_neurons / 32 +
           num_experts * sizeof(struct unit_use) / 4 + sizeof(struct layer_plan) / 4 + 64;
}

void simulation_begin(struct simulation *simulation, uint32_t sequence) {
    uint64_t *random = &simulation->random[1 + sequence];
    const struct expert_law *experts = &simulation->experts;
    for (uint32_t unit = 0; unit < num_units(simulation); unit++) {
        uint64_t *bits = bits_of(simulation, sequence, unit);
        memset(bits, 0, simulation->law.num_neurons / 8);
        if (simulation->recorded == NULL)
            activity_next(law_of(simulation, unit / experts->num_experts), bits, random,
                          simulation->law.num_levels - 1);
    }
    uint8_t *chosen = simulation->chosen +
                      (size_t)sequence * simulation->num_layers * experts->num_used;
    for (uint32_t i = 0; i < simulation->num_layers * experts->num_used; i++)
        chosen[i] = (uint8_t)(i % experts->num_used);
}

/* ---- a unit */

static uint32_t list_bits(const uint64_t *bits, uint32_t from, uint32_t to, uint32_t first,
                          uint32_t *out) {
    uint32_t n = 0;
    for (uint32_t w = from / 64; w < to / 64; w++)
        for (uint64_t left = bits[w]; left; left &= left - 1)
            out[n++] = first + w * 64 + (uint32_t)__builtin_ctzll(left);
    return n;
}

/* Inline: without an instruction of its own, counting is a call. */
static inline uint32_t num_ones(uint64_t word) {
    word -= word >> 1 & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + (word >> 2 & 0x3333333333333333u);
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0Fu;
    return (uint32_t)(word * 0x0101010101010101u >> 56);
}

static uint32_t count_bits(const uint64_t *bits, uint32_t from, uint32_t to) {
    uint32_t n = 0;
    for (uint32_t w = from / 64; w < to / 64; w++)
        n += num_ones(bits[w]);
    return n;
}

struct layer_run {
    struct simulation *simulation;
    struct step_totals *totals;
    struct layer_plan *plan;
    struct unit_use *uses; /* (experts) */
    uint32_t *neurons;     /* (num_neurons) global numbers */
    uint32_t *slots;
    struct neuron_miss *missing;
    uint8_t *missed;
};

/* One read: of `count` missing neurons that span so many. */
static void add_read(struct layer_cluster *one, uint32_t count, uint32_t span) {
    one->misses += count;
    if (count == 1) {
        one->singles++;
    } else {
        one->runs++;
        one->run_neurons += span;
    }
}

/* What n missing neurons (ascending) of a unit cost: neighbours are one read, within a cluster. */
static void add_misses(struct layer_run *run, uint32_t first_cluster, uint32_t first_neuron,
                       const uint32_t *neurons, uint32_t n) {
    const struct simulation *simulation = run->simulation;
    uint32_t begin = 0, gap = simulation->merge_gap;
    run->plan->misses += n;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = neurons[i] - first_neuron - simulation->hot_neurons;
        uint32_t next = i + 1 < n ? neurons[i + 1] : UINT32_MAX;
        int is_last = next - neurons[i] > gap || (at + next - neurons[i]) /
                      simulation->cluster_neurons != at / simulation->cluster_neurons;
        if (!is_last)
            continue;
        add_read(&run->plan->clusters[first_cluster + at / simulation->cluster_neurons],
                 i + 1 - begin, neurons[i] - neurons[begin] + 1);
        begin = i + 1;
    }
}

/* n neurons (ascending) of a unit are used: those that are not kept join their clusters' reads. */
static void look_up(struct layer_run *run, uint32_t cluster, uint32_t first,
                    const uint32_t *neurons, uint32_t n) {
    struct simulation *simulation = run->simulation;
    if (simulation->cache_kind == CACHE_NONE) {
        add_misses(run, cluster, first, neurons, n);
    } else if (simulation->cache_kind == CACHE_WINDOW) {
        uint32_t missed = 0;
        recent_use(simulation->cache, simulation->epoch, neurons, n, run->missed);
        for (uint32_t i = 0; i < n; i++)
            if (run->missed[i])
                run->slots[missed++] = neurons[i];
        add_misses(run, cluster, first, run->slots, missed);
    } else if (simulation->cache_kind == CACHE_NEURON && n > 0) {
        int misses = neuron_cache_use(simulation->cache, simulation->epoch, neurons, n, run->slots,
                                      run->missing);
        if (misses < 0) { /* fewer slots than the layer needs: nothing is kept */
            add_misses(run, cluster, first, neurons, n);
            return;
        }
        for (int i = 0; i < misses; i++) {
            run->slots[i] = run->missing[i].neuron;
            neuron_cache_landed(simulation->cache, run->missing[i].neuron);
        }
        add_misses(run, cluster, first, run->slots, (uint32_t)misses);
    }
}

/* The unit's n neurons in the engine's order: of a recording task by task, where a later task's
 * neurons may go to make room for an earlier one's. */
static void look_up_all(struct layer_run *run, uint32_t cluster, uint32_t first, uint32_t n) {
    uint32_t size = run->simulation->recorded ? run->simulation->task_neurons : 0;
    uint32_t begin = 0;
    for (uint32_t i = 1; size && i < n; i++) {
        const uint32_t *at = run->neurons + i;
        if ((at[0] - first) / size == (at[-1] - first) / size)
            continue;
        look_up(run, cluster, first, run->neurons + begin, i - begin);
        begin = i;
    }
    look_up(run, cluster, first, run->neurons + begin, n - begin);
}

/* One expert (or the layer itself): its clusters join the plan. */
static int plan_unit(struct layer_run *run, uint32_t expert) {
    struct simulation *simulation = run->simulation;
    const struct unit_use *use = &run->uses[expert];
    struct layer_plan *plan = run->plan;
    uint32_t num = simulation->law.num_neurons, size = simulation->cluster_neurons;
    uint32_t hot = simulation->hot_neurons, first_cluster = plan->num_clusters;
    uint32_t unit = plan->layer * simulation->experts.num_experts + expert, first = unit * num;
    uint64_t joined[1024], *bits = bits_of(simulation, use->sequences[0], unit);
    if (first_cluster + (num - hot + size - 1) / size > MAX_CLUSTERS)
        return -1;
    if (use->n > 1) {
        memcpy(joined, bits, num / 8);
        for (uint32_t i = 1; i < use->n; i++) {
            const uint64_t *other = bits_of(simulation, use->sequences[i], unit);
            for (uint32_t w = 0; w < num / 64; w++)
                joined[w] |= other[w];
        }
        bits = joined;
    }
    for (uint32_t at = hot; at < num; at += size) {
        uint32_t to = at + size < num ? at + size : num;
        struct layer_cluster *one = &plan->clusters[plan->num_clusters++];
        *one = (struct layer_cluster){(first % (num * simulation->experts.num_experts) + at) / size,
                                      count_bits(bits, at, to), 0, 0, 0, 0, 0};
        one->tokens = use->n == 1 ? one->needed : 0;
        for (uint32_t i = 0; use->n > 1 && i < use->n; i++)
            one->tokens += count_bits(bits_of(simulation, use->sequences[i], unit), at, to);
        run->totals->active += one->tokens;
    }
    uint32_t n = list_bits(bits, simulation->pinned_neurons, num, first, run->neurons);
    run->totals->needed += n + count_bits(bits, hot, simulation->pinned_neurons);
    run->totals->hot += count_bits(bits, 0, hot);
    look_up_all(run, first_cluster, first, n);
    plan->predicted = size * use->n > plan->predicted ? size * use->n : plan->predicted;
    plan->npu_ns += hot ? simulation->costs.npu_ns : 0;
    return 0;
}

/* ---- a layer */

static void choose_experts(struct layer_run *run, uint32_t layer, const uint32_t *sequences,
                           const uint32_t *levels, uint32_t n) {
    struct simulation *simulation = run->simulation;
    const struct expert_law *experts = &simulation->experts;
    memset(run->uses, 0, experts->num_experts * sizeof *run->uses);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t sequence = sequences[i];
        uint64_t *random = &simulation->random[1 + sequence];
        uint8_t *chosen = simulation->chosen + experts->num_used *
                          ((size_t)sequence * simulation->num_layers + layer);
        experts_next(experts, layer, chosen, random);
        for (uint32_t k = 0; k < experts->num_used; k++) {
            struct unit_use *use = &run->uses[chosen[k]];
            use->sequences[use->n++] = sequence;
            uint32_t unit = layer * experts->num_experts + chosen[k];
            uint64_t *bits = bits_of(simulation, sequence, unit);
            if (simulation->recorded)
                activity_recorded(simulation, sequence, layer, bits);
            else
                activity_next(law_of(simulation, layer), bits, random, levels[i]);
        }
    }
}

static struct layer_run open_run(struct simulation *simulation, struct step_totals *totals) {
    uint32_t num = simulation->law.num_neurons, *words = simulation->scratch;
    struct layer_run run = {.simulation = simulation, .totals = totals};
    run.plan = (struct layer_plan *)words, words += sizeof *run.plan / 4;
    run.uses = (struct unit_use *)words;
    words += simulation->experts.num_experts * sizeof *run.uses / 4;
    run.missing = (struct neuron_miss *)words, words += 2 * num;
    run.neurons = words, words += num;
    run.slots = words, words += num;
    run.missed = (uint8_t *)words;
    return run;
}

int simulation_step(struct simulation *simulation, const uint32_t *sequences,
                    const uint32_t *levels, uint32_t n, struct step_totals *totals) {
    assert(n > 0 && n <= 64 && simulation->law.num_neurons <= 65536);
    memset(totals, 0, sizeof *totals);
    simulation->num_records = 0;
    struct layer_run run = open_run(simulation, totals);
    int64_t now = 0, io_free = 0;
    for (uint32_t layer = 0; layer < simulation->num_layers; layer++) {
        choose_experts(&run, layer, sequences, levels, n);
        simulation->epoch++;
        struct layer_plan *plan = run.plan;
        plan->layer = layer, plan->num_clusters = plan->misses = plan->predicted = 0;
        plan->npu_ns = 0;
        for (uint32_t expert = 0; expert < simulation->experts.num_experts; expert++)
            if (run.uses[expert].n && plan_unit(&run, expert) < 0)
                return -1;
        totals->misses += plan->misses;
        now = run_layer(simulation, plan, now, &io_free, totals);
    }
    for (uint32_t i = 0; simulation->recorded && i < n; i++)
        recording_step(simulation, sequences[i]);
    totals->hits = totals->needed - totals->misses;
    totals->layers_ns = now / 1000;
    totals->io_free_ns = io_free / 1000;
    return simulation->records && simulation->num_records > simulation->max_records ? -1 : 0;
}

/* The neurons of the first n ranks, ascending. */
static uint32_t list_hottest(struct layer_run *run, uint32_t unit, uint32_t n) {
    const struct simulation *simulation = run->simulation;
    const struct neuron_law *law = law_of(simulation, unit / simulation->experts.num_experts);
    uint64_t bits[1024];
    memset(bits, 0, sizeof bits);
    for (uint32_t rank = 0; rank < n; rank++)
        bits[law->place[rank] / 64] |= 1ull << law->place[rank] % 64;
    return list_bits(bits, simulation->pinned_neurons, law->num_neurons, unit * law->num_neurons,
                     run->neurons);
}

void simulation_warm(struct simulation *simulation, uint32_t n) {
    uint32_t num = simulation->law.num_neurons, ranks = n < num ? n : num;
    struct step_totals totals;
    struct layer_run run = open_run(simulation, &totals);
    if (simulation->cache_kind < CACHE_NEURON)
        return;
    for (uint32_t unit = 0; unit < num_units(simulation); unit++) {
        uint32_t count = list_hottest(&run, unit, ranks);
        simulation->epoch += !simulation->recorded || unit == 0; /* the engine's is one epoch */
        if (simulation->cache_kind == CACHE_WINDOW) {
            recent_use(simulation->cache, simulation->epoch, run.neurons, count, run.missed);
            continue;
        }
        int misses = neuron_cache_use(simulation->cache, simulation->epoch, run.neurons, count,
                                      run.slots, run.missing);
        for (int i = 0; i < misses; i++)
            neuron_cache_landed(simulation->cache, run.missing[i].neuron);
    }
}
