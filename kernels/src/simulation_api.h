/* One step of a simulated engine: which neurons tokens need, what the neuron cache has of them, and
 * when each cluster's stages begin and end (docs/SIMULATOR.md). Declarations only: simulation.h
 * includes this file and cffi's cdef() reads it.
 *
 * All times are whole picoseconds or nanoseconds and all chances whole shares of 2^32 or 2^16: no
 * float decides anything, so a seed gives the same bytes everywhere. A *unit* is one layer, or one
 * expert of one layer; units count through the layers. */

/* One rank of the alias table that neurons are drawn from: 8 bytes, a draw meets one line. */
struct joining {
    uint32_t share;                /* of 2^32: below this the rank's own neuron is drawn, */
    uint16_t neuron, other;        /* else another rank's */
};

/* How a layer's neurons behave; the same law for all of its units. */
struct neuron_law {
    uint32_t num_neurons;          /* of a unit, a multiple of 64, at most 65536 */
    uint32_t num_levels;           /* of novelty, 1 to 32 */
    const uint32_t *place;         /* (num_neurons) the neuron at each rank of hotness */
    const struct joining *joining; /* (num_neurons) by rank */
    const uint32_t *leave;         /* (num_levels, num_neurons) by neuron: P(active -> not) */
    const uint32_t *num_draws;     /* (num_levels) ranks drawn to become active, times 256 */
    uint32_t gate_share;           /* P(gate is not zero | named), of 2^16 */
};

struct expert_law {
    uint32_t num_experts;          /* a layer; 1 without experts */
    uint32_t num_used;             /* a token */
    uint32_t stay;                 /* P(an expert is used by the next token too), of 2^32 */
    const uint32_t *alias_share;   /* (num_experts) alias table of their popularity */
    const uint32_t *alias_expert;
};

enum cache_kind {
    CACHE_ALL = 0,     /* everything is in memory */
    CACHE_NONE = 1,    /* nothing is kept */
    CACHE_NEURON = 2,  /* the engine's neuron cache */
    CACHE_WINDOW = 3   /* the neurons of the last tokens, as LLM in a flash */
};

enum simulation_flag {
    FLAG_BARRIER = 1,    /* a stage of all clusters ends before the next one begins */
    FLAG_TWO_PHASE = 2,  /* gate first, up and down only where the gate is not zero */
    FLAG_LOOKAHEAD = 4   /* predict and order reads before attention is computed */
};

struct cluster_costs {             /* ps unless it says ns */
    int64_t predict;               /* each neuron of a unit that is predicted */
    int64_t gate_row, up_down_row; /* each neuron some token needs */
    int64_t gate_token, up_down_token; /* and each of the tokens that need it */
    int64_t neuron, miss;          /* looked up / admitted, by who computes it */
    int64_t first_read, second_read; /* the command queue's time for a neuron read alone */
    int64_t run_read, run_neuron;  /* for a run of neighbours, and for each neuron it spans */
    int64_t latency_ns;            /* from a read's turn to its completion, beyond that */
    int64_t tail_ns;               /* how much later a slow read is */
    uint32_t tail_share;           /* P(a read is slow), of 2^32 */
    int64_t barrier_ns;            /* of a stage that all cores meet after */
    int64_t attention_ns;          /* of a layer */
    int64_t npu_ns;                /* hot neurons of a layer, alone on the memory */
    int64_t hot_ns;                /* the same where the cores compute them, all together */
    int64_t joint;                 /* how much slower CPU and NPU are together, of 2^16 */
};

struct step_totals {
    uint64_t needed, hits, misses; /* of the cold neurons that are looked up */
    uint64_t hot;                  /* hot neurons that some token needs */
    uint64_t active;               /* (token, cold neuron) pairs */
    uint64_t reads, bytes;
    int64_t layers_ns, compute_ns, exposed_ns, npu_ns, wait_ns;
    int64_t stall_ns;              /* cores without work while reads are under way */
    int64_t io_free_ns;            /* when the command queue is empty, after the step's begin */
};

enum record_stage {
    STAGE_PRED = 0, STAGE_GIO = 1, STAGE_GC = 2, STAGE_UDIO = 3, STAGE_UDC = 4, STAGE_NPU = 5,
    STAGE_ATTENTION = 6, STAGE_HOT = 7, NUM_STAGES = 8
};

struct step_record {
    int64_t t_ns, ns;              /* since the step began */
    int32_t layer, cluster, stage, core; /* core: -1 the reader, else the compute core */
    uint32_t neurons, misses, bytes, pad;
};

struct simulation {
    struct neuron_law law;
    const struct neuron_law *layer_laws; /* (num_layers) of the same sizes; NULL: all are as law */
    struct expert_law experts;
    struct cluster_costs costs;
    uint32_t num_layers, cluster_neurons;
    uint32_t hot_neurons;          /* a unit's first ones, which are not predicted */
    uint32_t pinned_neurons;       /* those that stay without the cache: the hot ones at least */
    uint32_t num_cores, queue_depth, cache_kind, flags;
    uint32_t first_bytes, second_bytes; /* of the reads of a neuron alone */
    uint32_t bundle_bytes;         /* from one neuron to the next in the file */
    uint32_t merge_gap;            /* missing neurons this far apart are one read; 0: none are */
    void *cache;                   /* neuron cache, or recent_neurons */
    uint64_t *bits;                /* (sequences, units, num_neurons / 64) active neurons */
    const uint64_t *recorded;      /* (layers, num_recorded, num_neurons / 64) what tokens of a text
                                      needed, played in the place of the law's; NULL: the law */
    uint32_t num_recorded;         /* tokens */
    uint32_t *next_recorded;       /* (sequences) the one that each comes to in its next step */
    uint32_t task_neurons;         /* of a recording, looked up together; 0: a layer's all */
    uint64_t *random;              /* (sequences + 1) generators' states; the last one's: latency */
    uint8_t *chosen;               /* (sequences, layers, num_used) experts of the last token */
    uint32_t epoch;                /* of the cache; each layer is one */
    struct step_record *records;   /* NULL: none */
    uint32_t max_records, num_records;
    uint32_t *scratch;             /* simulation_scratch_words() words */
};

/* Words of scratch that a step of units with so many neurons needs. */
size_t simulation_scratch_words(uint32_t num_neurons, uint32_t num_experts);
/* Every neuron of a sequence is active with its rate; of a recording nothing is drawn. */
void simulation_begin(struct simulation *simulation, uint32_t sequence);
/* One decode step of n sequences; levels[i]: how much of what sequence i needs is new. 0, or -1
 * when there is no room for the records. */
int simulation_step(struct simulation *simulation, const uint32_t *sequences,
                    const uint32_t *levels, uint32_t n, struct step_totals *totals);
/* The neuron cache takes the n first neurons of every unit, as far as it has slots. */
void simulation_warm(struct simulation *simulation, uint32_t n);

/* Neurons of the last layers computed, the oldest layer's first to go: as long a window as there
 * are slots for.
 * Memory that begins at a multiple of 8. */
size_t recent_bytes(uint32_t num_neurons);
void recent_format(void *recent, uint32_t num_neurons, uint32_t num_slots);
/* Between steps. */
void recent_resize(void *recent, uint32_t num_slots);
