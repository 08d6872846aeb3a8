/* The pipeline of one layer: PRED, GIO, GC, UDIO, UDC of each cluster (PAPER §1.8), on cores that
 * take whatever is ready and one queue of reads.
 *
 * Events are taken in the order of their time and, among equals, of the cluster: a core that is
 * free first goes on first, and a read is ordered when the stage before it ends. */
#include "simulation.h"

#define PS_PER_NS 1000

struct event {
    int64_t at;
    uint32_t cluster;
};

/* A heap of events, the earliest on top. */
struct queue {
    uint32_t n;
    struct event events[MAX_CLUSTERS];
};

struct run {
    struct simulation *simulation;
    const struct layer_plan *plan;
    struct step_totals *totals;
    int64_t *io_free;
    int64_t begin, core_free[MAX_CORES];
    int64_t slow;    /* of 2^16: how much slower cores are beside the NPU */
    int64_t idle;    /* of cores that wait for reads */
    uint32_t carry;  /* of 2^16: gates that are not zero */
    uint32_t next_predicted;
    struct queue ordered; /* reads, at the end of the stage before them */
    struct queue ready;   /* clusters, when their next stage may begin */
    uint8_t stage[MAX_CLUSTERS]; /* the next one */
    uint32_t open[MAX_CLUSTERS]; /* misses whose gate is not zero */
};

static int is_before(struct event a, struct event b) {
    return a.at != b.at ? a.at < b.at : a.cluster < b.cluster;
}

static void push(struct queue *queue, int64_t at, uint32_t cluster) {
    assert(queue->n < MAX_CLUSTERS);
    struct event event = {at, cluster};
    uint32_t i = queue->n++;
    for (; i > 0 && is_before(event, queue->events[(i - 1) / 2]); i = (i - 1) / 2)
        queue->events[i] = queue->events[(i - 1) / 2];
    queue->events[i] = event;
}

static struct event pop(struct queue *queue) {
    struct event top = queue->events[0], last = queue->events[--queue->n];
    uint32_t i = 0, child;
    for (; (child = 2 * i + 1) < queue->n; i = child) {
        child += child + 1 < queue->n &&
                 is_before(queue->events[child + 1], queue->events[child]);
        if (!is_before(queue->events[child], last))
            break;
        queue->events[i] = queue->events[child];
    }
    queue->events[i] = last;
    return top;
}

static void record(struct run *run, int stage, uint32_t cluster, int core, int64_t from,
                   int64_t to, uint32_t bytes) {
    struct simulation *simulation = run->simulation;
    if (simulation->records == NULL || simulation->num_records++ >= simulation->max_records)
        return;
    const struct layer_cluster *one = &run->plan->clusters[cluster];
    int is_of_cluster = stage <= STAGE_UDC;
    simulation->records[simulation->num_records - 1] = (struct step_record){
        from / PS_PER_NS, (to - from) / PS_PER_NS, (int32_t)run->plan->layer,
        is_of_cluster ? (int32_t)one->id : -1, stage, core, is_of_cluster ? one->needed : 0,
        is_of_cluster ? one->misses : 0, bytes, 0};
}

/* A cluster's reads of one stage, ordered at `at`: when the last one has completed. `singles` are
 * neurons read alone; runs of neighbours are read whole, in the first stage. */
static int64_t read_rows(struct run *run, int stage, uint32_t cluster, int64_t at,
                         uint32_t singles) {
    const struct simulation *simulation = run->simulation;
    const struct cluster_costs *costs = &simulation->costs;
    const struct layer_cluster *one = &run->plan->clusters[cluster];
    int is_first = stage == STAGE_GIO;
    uint32_t n = singles, bytes = singles * (is_first ? simulation->first_bytes
                                                      : simulation->second_bytes);
    int64_t begin = at > *run->io_free ? at : *run->io_free;
    *run->io_free = begin + singles * (is_first ? costs->first_read : costs->second_read);
    if (is_first) {
        n += one->runs;
        bytes += one->run_neurons * simulation->bundle_bytes;
        *run->io_free += one->runs * costs->run_read + one->run_neurons * costs->run_neuron;
    }
    int64_t end = *run->io_free + costs->latency_ns * PS_PER_NS;
    uint64_t slow = (uint64_t)n * costs->tail_share;
    if (costs->tail_share && (next_random(&simulation->random[0]) & UINT32_MAX) < slow)
        end += costs->tail_ns * PS_PER_NS;
    run->totals->reads += n;
    run->totals->bytes += bytes;
    record(run, stage, cluster, -1, at, end, bytes);
    return end;
}

static int64_t stage_cost(const struct run *run, uint32_t cluster, int stage) {
    const struct cluster_costs *costs = &run->simulation->costs;
    const struct layer_cluster *one = &run->plan->clusters[cluster];
    int64_t ps;
    if (stage == STAGE_PRED)
        ps = costs->predict * run->plan->predicted;
    else if (stage == STAGE_GC)
        ps = costs->gate_row * one->needed + costs->gate_token * one->tokens +
             costs->neuron * one->needed + costs->miss * one->misses;
    else
        ps = costs->up_down_row * one->needed + costs->up_down_token * one->tokens;
    return ps * run->slow >> 16;
}

static uint32_t open_gates(struct run *run, uint32_t misses) {
    uint64_t open = (uint64_t)misses * run->simulation->law.gate_share + run->carry;
    run->carry = open & 0xFFFF;
    return (uint32_t)(open >> 16);
}

static int first_free(const struct run *run) {
    int best = 0;
    for (uint32_t i = 1; i < run->simulation->num_cores; i++)
        if (run->core_free[i] < run->core_free[best])
            best = (int)i;
    return best;
}

static int64_t compute(struct run *run, int core, uint32_t cluster, int stage, int64_t at) {
    int64_t end = at + stage_cost(run, cluster, stage);
    record(run, stage, cluster, core, at, end, 0);
    run->totals->compute_ns += (end - at) / PS_PER_NS;
    run->core_free[core] = end;
    return end;
}

/* ---- without a barrier */

/* Reads whose turn has come by `now` are ordered; the clusters are ready when they have landed. */
static void order_reads(struct run *run, int64_t now) {
    while (run->ordered.n && run->ordered.events[0].at <= now) {
        struct event event = pop(&run->ordered);
        uint32_t i = event.cluster;
        int is_gate = run->stage[i] == STAGE_GC;
        int64_t ready = read_rows(run, is_gate ? STAGE_GIO : STAGE_UDIO, i, event.at,
                                  is_gate ? run->plan->clusters[i].singles : run->open[i]);
        push(&run->ready, ready, i);
    }
}

/* The stage of a cluster that has ended at `at` lets the next one begin, or its reads. */
static void advance(struct run *run, uint32_t i, int64_t at) {
    int is_two_phase = (run->simulation->flags & FLAG_TWO_PHASE) != 0;
    uint32_t reads = run->plan->clusters[i].misses;
    if (run->stage[i] == STAGE_PRED) {
        run->stage[i] = STAGE_GC;
    } else {
        run->stage[i] = STAGE_UDC;
        reads = run->plan->clusters[i].singles;
        reads = run->open[i] = is_two_phase ? open_gates(run, reads) : 0;
    }
    push(reads ? &run->ordered : &run->ready, at, i);
}

static void predict_all(struct run *run) {
    for (uint32_t i = 0; i < run->plan->num_clusters; i++) {
        int core = first_free(run);
        advance(run, i, compute(run, core, i, STAGE_PRED, run->core_free[core]));
    }
}

static int64_t last_core(const struct run *run) {
    int64_t last = run->begin;
    for (uint32_t i = 0; i < run->simulation->num_cores; i++)
        if (run->core_free[i] > last)
            last = run->core_free[i];
    return last;
}

/* All cores compute together for so long, after who is last. */
static void compute_together(struct run *run, int stage, int64_t ns) {
    int64_t begin = last_core(run), end = begin + ns * PS_PER_NS;
    record(run, stage, 0, 0, begin, end, 0);
    for (uint32_t i = 0; i < run->simulation->num_cores; i++)
        run->core_free[i] = end;
}

static void attend(struct run *run) {
    compute_together(run, STAGE_ATTENTION, run->simulation->costs.attention_ns);
}

/* Hot neurons that the cores compute, before they look for rows that have landed. */
static void compute_hot(struct run *run) {
    if (run->simulation->costs.hot_ns)
        compute_together(run, STAGE_HOT, run->simulation->costs.hot_ns);
}

static void run_pipeline(struct run *run) {
    while (run->ready.n || run->ordered.n) {
        int core = first_free(run);
        int64_t now = run->core_free[core];
        order_reads(run, now);
        while (run->ordered.n &&
               (!run->ready.n || run->ordered.events[0].at < run->ready.events[0].at))
            order_reads(run, run->ordered.events[0].at);
        struct event next = pop(&run->ready);
        int64_t begin = next.at > now ? next.at : now;
        run->idle += begin - now;
        int stage = run->stage[next.cluster];
        int64_t end = compute(run, core, next.cluster, stage, begin);
        if (stage == STAGE_GC)
            advance(run, next.cluster, end);
    }
}

/* ---- with barriers */

/* One stage of all clusters, then everybody meets. */
static void compute_stage(struct run *run, int stage) {
    for (uint32_t i = 0; i < run->plan->num_clusters; i++) {
        int core = first_free(run);
        compute(run, core, i, stage, run->core_free[core]);
    }
    int64_t end = last_core(run) + run->simulation->costs.barrier_ns * PS_PER_NS;
    for (uint32_t i = 0; i < run->simulation->num_cores; i++)
        run->core_free[i] = end;
}

/* Every cluster's reads of one stage, ordered now: when the last has landed. */
static int64_t order_stage(struct run *run, int stage) {
    int64_t at = run->core_free[0], end = at;
    for (uint32_t i = 0; i < run->plan->num_clusters; i++) {
        const struct layer_cluster *one = &run->plan->clusters[i];
        uint32_t n = stage == STAGE_UDIO ? open_gates(run, one->singles) : one->singles;
        int is_read = n || (stage == STAGE_GIO && one->runs);
        int64_t landed = is_read ? read_rows(run, stage, i, at, n) : at;
        end = landed > end ? landed : end;
    }
    return end;
}

/* Nobody computes before that. */
static void wait_until(struct run *run, int64_t end) {
    for (uint32_t i = 0; i < run->simulation->num_cores; i++) {
        if (run->core_free[i] >= end)
            continue;
        run->idle += end - run->core_free[i];
        run->core_free[i] = end;
    }
}

static void run_barriers(struct run *run) {
    compute_stage(run, STAGE_PRED);
    int64_t landed = order_stage(run, STAGE_GIO);
    if (run->simulation->flags & FLAG_LOOKAHEAD)
        attend(run);
    compute_hot(run);
    wait_until(run, landed);
    compute_stage(run, STAGE_GC);
    if (run->simulation->flags & FLAG_TWO_PHASE)
        wait_until(run, order_stage(run, STAGE_UDIO));
    compute_stage(run, STAGE_UDC);
}

/* ---- the layer */

/* What cores compute, shared evenly, in ps; without the NPU beside them. */
static int64_t even_share(struct run *run) {
    int64_t sum = 0;
    for (uint32_t i = 0; i < run->plan->num_clusters; i++)
        sum += stage_cost(run, i, STAGE_PRED) + stage_cost(run, i, STAGE_GC) +
               stage_cost(run, i, STAGE_UDC);
    return sum / run->simulation->num_cores;
}

/* CPU and NPU share the memory: while both are at work, both are slower. Returns how long the NPU
 * takes, in ps. */
static int64_t share_memory(struct run *run, int64_t cpu) {
    int64_t npu = run->plan->npu_ns * PS_PER_NS, joint = run->simulation->costs.joint;
    if (npu == 0 || cpu == 0)
        return npu;
    if (cpu <= npu) {
        run->slow = joint;
        return npu + (cpu * (joint - 65536) >> 16);
    }
    /* The NPU ends first: so much of the cores' work is done beside it. */
    run->slow = 65536 + npu * (joint - 65536) / cpu;
    return npu * joint >> 16;
}

int64_t run_layer(struct simulation *simulation, const struct layer_plan *plan, int64_t begin_ps,
                  int64_t *io_free_ps, struct step_totals *totals) {
    assert(simulation->num_cores > 0 && simulation->num_cores <= MAX_CORES);
    struct run run;
    run.simulation = simulation, run.plan = plan, run.totals = totals, run.io_free = io_free_ps;
    run.begin = begin_ps, run.slow = 65536, run.idle = 0, run.carry = 0x8000;
    run.ordered.n = run.ready.n = 0;
    for (uint32_t i = 0; i < simulation->num_cores; i++)
        run.core_free[i] = begin_ps;
    for (uint32_t i = 0; i < plan->num_clusters; i++)
        run.stage[i] = STAGE_PRED;
    int64_t npu = share_memory(&run, even_share(&run));
    int64_t ideal = even_share(&run), attention = simulation->costs.attention_ns * PS_PER_NS;
    if (!(simulation->flags & FLAG_LOOKAHEAD))
        attend(&run);
    if (simulation->flags & FLAG_BARRIER) {
        run_barriers(&run);
    } else {
        predict_all(&run);
        if (simulation->flags & FLAG_LOOKAHEAD)
            attend(&run);
        compute_hot(&run);
        run_pipeline(&run);
    }
    int64_t end = last_core(&run), npu_end = begin_ps + attention + npu;
    if (npu)
        record(&run, STAGE_NPU, 0, 0, begin_ps + attention, npu_end, 0);
    end = npu_end > end ? npu_end : end;
    int64_t hot = simulation->costs.hot_ns * PS_PER_NS;
    int64_t least = begin_ps + attention + hot + (ideal > npu ? ideal : npu);
    if (plan->misses && end > least)
        totals->exposed_ns += (end - least) / PS_PER_NS;
    for (uint32_t i = 0; i < simulation->num_cores; i++)
        totals->wait_ns += (end - run.core_free[i]) / PS_PER_NS;
    totals->stall_ns += run.idle / PS_PER_NS;
    totals->npu_ns += npu / PS_PER_NS;
    return end;
}
