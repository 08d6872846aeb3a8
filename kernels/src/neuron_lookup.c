/* Clusters of ops for a few tokens, and their rows in the neuron cache. */
#include <assert.h>

#include "neuron_cache.h"
#include "neuron_clusters.h"
#include "neuron_reads.h"

#define ROOM_SLICE_NS 1000000ll
#define ROOM_TIMEOUT_NS 60000000000ull /* longer than a reader waits for a device that hangs */

uint32_t cluster_of_unit(void *base, const struct step_op *op, uint32_t unit) {
    return op->routes ? expert_cluster(base, op, unit)
                      : op->first_neuron / op->cluster_neurons + unit;
}

int cluster_of(void *base, const struct step_op *op, uint32_t unit, struct cluster *c) {
    uint32_t clusters = num_clusters(op);
    c->index = cluster_of_unit(base, op, unit);
    if (c->index == NO_CLUSTER)
        return 0;
    c->first = c->index * op->cluster_neurons;
    uint32_t end = op->first_neuron + op->rows;
    c->num = end - c->first < op->cluster_neurons ? end - c->first : op->cluster_neurons;
    c->work = (struct cluster_work *)at(base, op->clusters) + c->index;
    uint32_t *lists = at(base, op->clusters + clusters * sizeof(struct cluster_work));
    c->active = lists + c->first;
    c->place = lists + (size_t)clusters * op->cluster_neurons + c->first;
    return 1;
}

/* What the cache knows a layer's neuron by: its own number, or its cluster's. */
static uint32_t kept_as(const struct step_op *op, uint32_t neuron) {
    uint32_t number = op->layer * op->layer_neurons + neuron;
    return op->flags & OPF_WHOLE_CLUSTERS ? number / op->cluster_neurons : number;
}

/* The slot of a whole cluster, in place[0], -> places of its neurons; who waits for the first one
 * waits for all. */
static void spread_places(const struct step_op *op, const struct cluster *c) {
    uint32_t late = c->place[0] & SLOT_LATE;
    uint32_t first = (c->place[0] & ~(uint32_t)SLOT_LATE) * op->cluster_neurons;
    for (uint32_t i = 0; i < c->work->num_active; i++)
        c->place[i] = (first + i) | (i == 0 ? late : 0);
}

/* Cache's lock held. Find rows and order what is missing; 0 when there are no slots for that. */
static int use_rows(void *base, const struct step_op *op, const struct step_params *step,
                    const struct cluster *c) {
    void *cache = at(base, op->cache);
    int is_whole = (op->flags & OPF_WHOLE_CLUSTERS) != 0;
    uint32_t kept[MAX_CLUSTER_NEURONS] = {0}, n = is_whole ? 1 : c->work->num_active;
    struct neuron_miss misses[MAX_CLUSTER_NEURONS];
    for (uint32_t i = 0; i < n; i++)
        kept[i] = kept_as(op, c->active[i]);
    int num_misses = neuron_cache_use(cache, step->epoch + op->layer, kept, n, c->place, misses);
    if (num_misses > 0)
        neuron_reads_push(base, op->reads, misses, (uint32_t)num_misses);
    if (num_misses >= 0 && is_whole)
        spread_places(op, c);
    return num_misses >= 0;
}

/* What an aborted step ordered keeps its slots until it has landed. */
static void wait_for_room(struct executor_record *executor, uint64_t end_ns) {
    uint32_t never = 0;
    assert(monotonic_ns() < end_ns && "the cold region holds all that a layer's step uses");
    __atomic_fetch_add(&executor->heartbeat, 1, __ATOMIC_RELAXED);
    futex_wait(&never, 0, ROOM_SLICE_NS);
}

void find_rows(void *base, const struct step_op *op, const struct step_params *step,
               struct executor_record *executor, const struct cluster *c) {
    uint64_t end_ns = monotonic_ns() + ROOM_TIMEOUT_NS;
    struct layer_activity *activity = at(base, op->activity);
    int found = !op->cache;
    if (found)
        count_activity(&activity->pinned, c->work->num_active);
    for (uint32_t i = 0; found && i < c->work->num_active; i++)
        c->place[i] = c->active[i] - op->first_neuron;
    while (!found && !aborted(base)) {
        if (neuron_cache_lock(at(base, op->cache), LOCK_SLICE_NS) != 0)
            continue;
        found = use_rows(base, op, step, c);
        neuron_cache_unlock(at(base, op->cache));
        if (!found)
            wait_for_room(executor, end_ns);
    }
    if (!found)
        c->work->num_active = 0;
    for (uint32_t i = 0; i < c->work->num_active; i++)
        c->work->num_late += (c->place[i] & SLOT_LATE) != 0;
}

int has_landed(void *base, const struct step_op *op, const struct cluster *c) {
    for (uint32_t i = 0; i < c->work->num_active; i++) {
        if (c->place[i] & SLOT_LATE &&
            !neuron_cache_has(at(base, op->cache), kept_as(op, c->active[i])))
            return 0;
    }
    return 1;
}

uint32_t late_neuron(void *base, const struct step_op *op, uint32_t unit, uint32_t *left) {
    struct cluster c;
    if (!cluster_of(base, op, unit, &c))
        return UINT32_MAX;
    uint32_t i = c.work->num_late == 0 ? 0 : c.work->num_active;
    for (i = i < *left ? i : *left; i > 0; i--)
        if (c.place[i - 1] & SLOT_LATE) {
            *left = i - 1;
            return kept_as(op, c.active[i - 1]);
        }
    return UINT32_MAX;
}
