/* Feed forward over neuron-major rows: the ops that know what a neuron is.
 *
 * One summation order for all of them, whatever the number of tokens, the executors and the place
 * of the rows: a neuron's down row is added to its cluster's partial sum in the order of neurons,
 * partial sums are added in the order of clusters, and their total is added to the residual stream.
 * A sum begins at +0, so leaving out neurons whose coefficient is zero changes no bit: exact mode
 * gives what dense mode gives, and late rows give what early ones give. */
#include <assert.h>
#include <string.h>

#include "blocks.h"
#include "board.h"
#include "neuron_cache.h"
#include "neuron_reads.h"

#define GROUP_TOKENS 128   /* tokens that share one pass over a tile: bounds the stack buffers */
#define MERGE_COLS 512
#define LOCK_SLICE_NS 100000000ll      /* after which the abort word is looked at again */
#define ROOM_SLICE_NS 1000000ll
#define ROOM_TIMEOUT_NS 60000000000ull /* longer than a reader waits for a device that hangs */

static uint32_t ceil_div(uint32_t value, uint32_t step) { return (value + step - 1) / step; }

static uint32_t num_clusters(const struct step_op *op) {
    return ceil_div(op->layer_neurons, op->cluster_neurons);
}

uint32_t neuron_op_units(const struct step_op *op, const struct step_params *step) {
    switch (op->kind) {
    case OP_MERGE:
        return step->num_tokens * ceil_div(op->cols, MERGE_COLS);
    case OP_ROWS_UP:
        return ceil_div(op->rows, TILE_ROWS);
    default:
        return ceil_div(op->rows, op->cluster_neurons);
    }
}

/* One cluster of a decode op. */
struct cluster {
    struct cluster_work *work;
    uint32_t index;          /* in its layer */
    uint32_t first;          /* its first neuron, in its layer */
    uint32_t num;
    uint32_t *active;        /* neurons in their layer, ascending; room for all */
    uint32_t *place;         /* where the rows of each are; SLOT_LATE while they are not */
};

static struct cluster cluster_of(void *base, const struct step_op *op, uint32_t unit) {
    struct cluster c;
    uint32_t clusters = num_clusters(op);
    c.index = op->first_neuron / op->cluster_neurons + unit;
    c.first = c.index * op->cluster_neurons;
    uint32_t end = op->first_neuron + op->rows;
    c.num = end - c.first < op->cluster_neurons ? end - c.first : op->cluster_neurons;
    c.work = (struct cluster_work *)at(base, op->clusters) + c.index;
    uint32_t *lists = at(base, op->clusters + clusters * sizeof(struct cluster_work));
    c.active = lists + c.first;
    c.place = lists + (size_t)clusters * op->cluster_neurons + c.first;
    return c;
}

static int has_gate(const struct step_op *op) { return op->activation != FEED_FORWARD_RELU; }

static const char *input_row(void *base, const struct step_op *op, uint32_t token) {
    return at(base, op->in + token * op->in_stride);
}

static float *hidden_row(void *base, const struct step_op *op, uint32_t token) {
    return at(base, op->out + token * op->out_stride);
}

static float *partial_of(void *base, const struct step_op *op, const struct step_params *step,
                         uint32_t cluster, uint32_t token) {
    size_t row = (size_t)cluster * step->num_tokens + token;
    return (float *)at(base, op->partials) + row * op->cols;
}

/* Keep what is not zero; all of it in dense mode. Returns how many are kept. */
static uint32_t keep_nonzero(const struct step_op *op, float *coef, uint32_t *place, uint32_t n) {
    if (op->flags & OPF_ALL_NEURONS)
        return n;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        coef[kept] = coef[i];
        place[kept] = place[i];
        kept += !(coef[i] == 0.0f); /* a NaN is kept and shows */
    }
    return kept;
}

/* Down rows at `place` times their coefficients, in order -> partial (cols). Leaves in both lists
 * what was added, and returns how many that are. */
static uint32_t sum_down(void *base, const struct step_op *op, float *partial, float *coef,
                         uint32_t *place, uint32_t n) {
    uint32_t kept = keep_nonzero(op, coef, place, n);
    memset(partial, 0, op->cols * sizeof *partial);
    axpy_rows((int)op->down_type, partial, at(base, op->up_weight + op->down_row), op->row_stride,
              place, coef, kept, op->cols);
    return kept;
}

/* ---- decode: clusters ---- */

/* The values that decide (gate, or up where there is none) of a cluster -> hidden rows. */
static void decide(void *base, const struct step_op *op, const struct step_params *step,
                   const struct cluster *c) {
    if (op->flags & OPF_GATE_TILES) {
        size_t bytes = tile_bytes((int)op->weight_type, op->cols);
        matmul_group(op, (int)op->weight_type, hidden_row(base, op, 0) + c->first,
                     op->out_stride / sizeof(float),
                     at(base, op->weight + c->first / TILE_ROWS * bytes),
                     ceil_div(c->num, TILE_ROWS), input_row(base, op, 0), step->num_tokens);
    } else {
        uint64_t rows = op->up_weight + (uint64_t)(c->first - op->first_neuron) * op->row_stride;
        for (uint32_t t = 0; t < step->num_tokens; t++)
            dot_rows((int)op->weight_type, hidden_row(base, op, t) + c->first,
                     at(base, rows + op->gate_row), op->row_stride, NULL, c->num, op->cols,
                     input_row(base, op, t));
    }
    for (uint32_t t = 0; op->bias && t < step->num_tokens; t++)
        add_f32(hidden_row(base, op, t) + c->first, (const float *)at(base, op->bias) + c->first,
                c->num);
}

/* List the neurons that some token activates; every one of them in dense mode. */
static void choose_active(void *base, const struct step_op *op, const struct step_params *step,
                          const struct cluster *c) {
    uint32_t num_active = 0, gated = 0;
    for (uint32_t i = 0; i < c->num; i++) {
        uint32_t on = 0; /* for how many of the tokens */
        for (uint32_t t = 0; t < step->num_tokens; t++)
            on += hidden_row(base, op, t)[c->first + i] > 0.0f;
        gated += on;
        c->active[num_active] = c->first + i;
        num_active += on != 0 || (op->flags & OPF_ALL_NEURONS);
    }
    c->work->num_active = num_active;
    c->work->num_late = 0;
    struct layer_activity *activity = at(base, op->activity);
    __atomic_fetch_add(&activity->gated, gated, __ATOMIC_RELAXED);
    if (c->index == 0)
        __atomic_fetch_add(&activity->tokens, step->num_tokens, __ATOMIC_RELAXED);
}

/* Cache's lock held. Find rows and order what is missing; 0 when there are no slots for that. */
static int use_rows(void *base, const struct step_op *op, const struct step_params *step,
                    const struct cluster *c) {
    void *cache = at(base, op->cache);
    uint32_t neurons[MAX_CLUSTER_NEURONS], n = c->work->num_active;
    struct neuron_miss misses[MAX_CLUSTER_NEURONS];
    for (uint32_t i = 0; i < n; i++)
        neurons[i] = op->layer * op->layer_neurons + c->active[i];
    int num_misses = neuron_cache_use(cache, step->epoch + op->layer, neurons, n, c->place, misses);
    if (num_misses > 0)
        neuron_reads_push(base, op->reads, misses, (uint32_t)num_misses);
    return num_misses >= 0;
}

/* What an aborted step ordered keeps its slots until it has landed. */
static void wait_for_room(struct executor_record *executor, uint64_t end_ns) {
    uint32_t never = 0;
    assert(monotonic_ns() < end_ns && "the cold region holds every neuron of a layer");
    __atomic_fetch_add(&executor->heartbeat, 1, __ATOMIC_RELAXED);
    futex_wait(&never, 0, ROOM_SLICE_NS);
}

/* Find the rows of the active neurons; none of a step that is aborted before that. A holder of the
 * lock that was lost keeps it: then the heartbeat stands. */
static void find_rows(void *base, const struct step_op *op, const struct step_params *step,
                      struct executor_record *executor, const struct cluster *c) {
    uint64_t end_ns = monotonic_ns() + ROOM_TIMEOUT_NS;
    int found = !op->cache;
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

/* Coefficients of the active neurons for one token: act(gate, up). */
static void coefficients(void *base, const struct step_op *op, const struct cluster *c,
                         uint32_t token, float *coef) {
    float deciding[MAX_CLUSTER_NEURONS], up[MAX_CLUSTER_NEURONS];
    uint32_t n = c->work->num_active;
    const float *hidden = hidden_row(base, op, token);
    for (uint32_t i = 0; i < n; i++)
        deciding[i] = hidden[c->active[i]];
    if (!has_gate(op)) {
        feed_forward_act((int)op->activation, coef, NULL, deciding, n);
        return;
    }
    dot_rows((int)op->up_type, up, at(base, op->up_weight + op->up_row), op->row_stride, c->place,
             n, op->cols, input_row(base, op, token));
    const float *bias = op->up_bias ? at(base, op->up_bias) : NULL;
    for (uint32_t i = 0; bias && i < n; i++)
        up[i] += bias[c->active[i]];
    feed_forward_act((int)op->activation, coef, deciding, up, n);
}

/* Up and down of the active neurons, whose rows are all here -> the cluster's partial sums. */
static void compute_active(void *base, const struct step_op *op, const struct step_params *step,
                           const struct cluster *c) {
    float coef[MAX_CLUSTER_NEURONS];
    uint32_t place[MAX_CLUSTER_NEURONS], n = c->work->num_active;
    uint64_t active = 0;
    for (uint32_t i = 0; i < n; i++)
        c->place[i] &= ~(uint32_t)SLOT_LATE;
    for (uint32_t t = 0; n && t < step->num_tokens; t++) {
        coefficients(base, op, c, t, coef);
        memcpy(place, c->place, n * sizeof *place);
        active += sum_down(base, op, partial_of(base, op, step, c->index, t), coef, place, n);
    }
    struct layer_activity *activity = at(base, op->activity);
    __atomic_fetch_add(&activity->active, active, __ATOMIC_RELAXED);
}

static void run_clusters(void *base, const struct step_op *op, const struct step_params *step,
                         struct executor_record *executor, uint32_t first, uint32_t last) {
    for (uint32_t unit = first; unit < last; unit++) {
        struct cluster c = cluster_of(base, op, unit);
        decide(base, op, step, &c);
        choose_active(base, op, step, &c);
        find_rows(base, op, step, executor, &c);
        if (c.work->num_late == 0)
            compute_active(base, op, step, &c);
    }
}

uint32_t late_neuron(void *base, const struct step_op *op, uint32_t unit, uint32_t *next) {
    struct cluster c = cluster_of(base, op, unit);
    if (c.work->num_late == 0)
        return UINT32_MAX;
    for (; *next < c.work->num_active; ++*next)
        if (c.place[*next] & SLOT_LATE)
            return op->layer * op->layer_neurons + c.active[(*next)++];
    return UINT32_MAX;
}

static void run_late_clusters(void *base, const struct step_op *op, const struct step_params *step,
                              uint32_t first, uint32_t last) {
    for (uint32_t unit = first; unit < last; unit++) {
        struct cluster c = cluster_of(base, op, unit);
        if (c.work->num_late != 0)
            compute_active(base, op, step, &c);
    }
}

static void run_merge(void *base, const struct step_op *op, const struct step_params *step,
                      uint32_t first, uint32_t last) {
    const struct cluster_work *work = at(base, op->clusters);
    uint32_t slices = ceil_div(op->cols, MERGE_COLS), clusters = num_clusters(op);
    for (uint32_t u = first; u < last; u++) {
        float total[MERGE_COLS] = {0};
        uint32_t token = u / slices, column = u % slices * MERGE_COLS;
        uint32_t n = op->cols - column < MERGE_COLS ? op->cols - column : MERGE_COLS;
        for (uint32_t k = 0; k < clusters; k++)
            if (work[k].num_active)
                add_f32(total, partial_of(base, op, step, k, token) + column, n);
        if (op->bias)
            add_f32(total, (const float *)at(base, op->bias) + column, n);
        add_f32((float *)at(base, op->out + token * op->out_stride) + column, total, n);
    }
}

/* ---- prefill: runs of rows ---- */

/* Rows [row, row + num) of the run as a tile in scratch. */
static const void *tile_of_rows(void *base, const struct step_op *op, uint32_t type,
                                uint32_t row_offset, uint32_t row, uint32_t num, void *tile) {
    const char *rows = at(base, op->up_weight + (uint64_t)row * op->row_stride + row_offset);
    int packed = pack_tiles_from_rows((int)type, tile, rows, op->row_stride, num, op->cols);
    assert(packed == 0);
    (void)packed;
    return tile;
}

static const void *deciding_tile(void *base, const struct step_op *op, uint32_t row, uint32_t num,
                                 void *tile) {
    if (!(op->flags & OPF_GATE_TILES))
        return tile_of_rows(base, op, op->weight_type, op->gate_row, row, num, tile);
    size_t bytes = tile_bytes((int)op->weight_type, op->cols);
    return at(base, op->weight + (op->first_neuron + row) / TILE_ROWS * bytes);
}

/* A deciding and an up tile over a group of tokens -> activations. */
static void activate_group(void *base, const struct step_op *op, const void *gate_tile,
                           const void *up_tile, uint32_t neuron, uint32_t token, uint32_t tokens) {
    float gate[GROUP_TOKENS * TILE_ROWS], up[GROUP_TOKENS * TILE_ROWS];
    uint32_t real = op->first_neuron + op->rows - neuron;
    uint32_t n = real < TILE_ROWS ? real : TILE_ROWS;
    const char *x = input_row(base, op, token);
    matmul_group(op, (int)op->weight_type, gate, TILE_ROWS, gate_tile, 1, x, tokens);
    if (up_tile)
        matmul_group(op, (int)op->up_type, up, TILE_ROWS, up_tile, 1, x, tokens);
    for (uint32_t t = 0; t < tokens; t++) {
        float *g = gate + t * TILE_ROWS, *u = up + t * TILE_ROWS;
        if (op->bias)
            add_f32(g, (const float *)at(base, op->bias) + neuron, n);
        if (up_tile && op->up_bias)
            add_f32(u, (const float *)at(base, op->up_bias) + neuron, n);
        feed_forward_act((int)op->activation, hidden_row(base, op, token + t) + neuron,
                         up_tile ? g : NULL, up_tile ? u : g, n);
    }
}

static void run_rows_up(void *base, const struct step_op *op, const struct step_params *step,
                        const struct executor_record *executor, uint32_t first, uint32_t last) {
    size_t gate_bytes = tile_bytes((int)op->weight_type, op->cols);
    char *scratch = at(base, executor->scratch);
    for (uint32_t unit = first; unit < last; unit++) {
        uint32_t row = unit * TILE_ROWS;
        uint32_t num = op->rows - row < TILE_ROWS ? op->rows - row : TILE_ROWS;
        const void *gate = deciding_tile(base, op, row, num, scratch), *up = NULL;
        if (has_gate(op))
            up = tile_of_rows(base, op, op->up_type, op->up_row, row, num, scratch + gate_bytes);
        for (uint32_t token = 0; token < step->num_tokens; token += GROUP_TOKENS) {
            uint32_t rest = step->num_tokens - token;
            activate_group(base, op, gate, up, op->first_neuron + row, token,
                           rest < GROUP_TOKENS ? rest : GROUP_TOKENS);
        }
    }
}

/* One cluster's neurons for one token -> partial (cols). */
static void sum_cluster(void *base, const struct step_op *op, uint32_t first, uint32_t num,
                        const float *hidden, float *partial) {
    float coef[MAX_CLUSTER_NEURONS];
    uint32_t place[MAX_CLUSTER_NEURONS];
    memcpy(coef, hidden + first, num * sizeof *coef);
    for (uint32_t i = 0; i < num; i++)
        place[i] = first + i - op->first_neuron;
    sum_down(base, op, partial, coef, place, num);
}

static void run_rows_down(void *base, const struct step_op *op,
                          const struct executor_record *executor, uint32_t first, uint32_t last) {
    float *partial = at(base, executor->scratch);
    uint32_t end = op->first_neuron + op->rows;
    for (uint32_t t = first; t < last; t++) {
        float *total = (float *)at(base, op->partials) + (size_t)t * op->cols;
        if (op->flags & OPF_FIRST_ROWS)
            memset(total, 0, op->cols * sizeof *total);
        for (uint32_t at_neuron = op->first_neuron; at_neuron < end;) {
            uint32_t num = end - at_neuron < op->cluster_neurons ? end - at_neuron
                                                                 : op->cluster_neurons;
            sum_cluster(base, op, at_neuron, num, at(base, op->in + t * op->in_stride), partial);
            add_f32(total, partial, op->cols);
            at_neuron += num;
        }
        if (!(op->flags & OPF_LAST_ROWS))
            continue;
        if (op->bias)
            add_f32(total, at(base, op->bias), op->cols);
        add_f32(at(base, op->out + t * op->out_stride), total, op->cols);
    }
}

void neuron_op_run(void *base, const struct step_op *op, const struct step_params *step,
                   struct executor_record *executor, uint32_t first, uint32_t last) {
    switch (op->kind) {
    case OP_CLUSTERS:
        run_clusters(base, op, step, executor, first, last);
        break;
    case OP_LATE_CLUSTERS:
        run_late_clusters(base, op, step, first, last);
        break;
    case OP_MERGE:
        run_merge(base, op, step, first, last);
        break;
    case OP_ROWS_UP:
        run_rows_up(base, op, step, executor, first, last);
        break;
    default:
        run_rows_down(base, op, executor, first, last);
    }
}
