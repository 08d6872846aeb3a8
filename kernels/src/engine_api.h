/* The hot path over the arena: waits, the step board and the step program. Declarations only:
 * engine.h includes this file and cffi's cdef() reads it.
 *
 * Offsets are bytes from the arena's base; 0 means "none". Every structure lives in shared memory
 * and is used by several processes at once. */

enum unit { UNIT_CPU = 0, UNIT_NPU = 1 };

enum op_kind {
    OP_EMBED = 1,        /* token ids, times scale, plus learned positions -> residual stream, one
                            unit a token */
    OP_NORM = 2,         /* norm of rows -> acts and/or f32, or added to out, one unit a token */
    OP_MATMUL = 3,       /* tiles (rows, cols) x acts or f32 -> f32, a unit a tile and group */
    OP_ROPE_KV = 4,      /* q/k norm, rotation, KV write, one unit a token and head */
    OP_ATTENTION = 5,    /* a unit `cols` tokens (0: one) and a group of heads */
    OP_QUANTIZE = 6,     /* f32 rows -> acts, one unit a token */
    OP_FEED_FORWARD = 7, /* gate and up tile, activation -> acts or f32, units as OP_MATMUL */
    /* Feed forward over neuron-major rows (neuron_ops.c). For a few tokens: */
    OP_CLUSTERS = 8,      /* gates of a cluster, then up and down of its active neurons, a unit a
                             cluster; a cluster whose rows are not all here is left for */
    OP_LATE_CLUSTERS = 9, /* up and down of the clusters left, once their rows have landed */
    OP_MERGE = 10,        /* partial sums of all clusters -> residual stream */
    /* For many tokens: */
    OP_ROWS_UP = 11,      /* gate, up and activation of a run of neurons -> f32, a unit a tile */
    OP_ROWS_DOWN = 12,    /* down of the same run, cluster by cluster -> total, a unit a token */
    /* Predicted mode, for a few tokens, before OP_CLUSTERS with OPF_PREDICTED: */
    OP_PREDICT = 13,      /* scores of a cluster's neurons; what is predicted is looked up and,
                             where it is missing, ordered; a unit a cluster */
    OP_AWAIT_ROWS = 14,   /* wait for all that was ordered: the barrier that a pipeline without
                             clusters has, a unit a cluster */
    /* Mixtures of experts (neuron_experts.c); ops with `routes` compute chosen experts: */
    OP_ROUTE = 20,        /* router logits of all tokens -> routes, one unit */
    OP_EXPERTS = 21,      /* the clusters of chosen experts are looked up and, where they are
                             missing, ordered; a unit a cluster, as all ops for a few tokens */
    OP_GATHER = 22,       /* input rows of all tokens -> those of entries, one unit an entry */
    OP_SIGMOID = 23       /* sigmoid of a row's product with a vector -> f32, one unit a token */
};

enum op_flag {
    OPF_RESIDUAL = 1,     /* matmul, norm: adds to out instead of writing it */
    OPF_LOGIT_ROWS = 2,   /* rows are the step's logit rows, not its tokens */
    OPF_WRITE_ACTS = 4,   /* norm, attention, feed forward: write int8 activations to out_acts */
    OPF_WRITE_F32 = 8,    /* norm, feed forward: write floats to out */
    OPF_STREAM_LAST = 16, /* the last op that reads its streamed load: frees the buffer */
    OPF_GATE_TILES = 32,  /* rows: the deciding row comes from resident tiles, not from the rows */
    OPF_ALL_NEURONS = 64, /* rows: every neuron is computed, active or not */
    OPF_FIRST_ROWS = 128, /* rows down: the first run of a layer: total begins at zero */
    OPF_LAST_ROWS = 256,  /* rows down: the last one: total goes to the residual stream */
    OPF_PREDICTED = 512,  /* clusters: OP_PREDICT listed the neurons; gates lie in their rows */
    OPF_RELU = 1024,      /* quantise: negative values become zero first */
    OPF_FORGET = 2048,    /* merge: the cache keeps nothing for the next layer */
    OPF_LAYER_NORM = 4096, /* norm: layer norm with `bias`, not rmsnorm */
    OPF_WHOLE_CLUSTERS = 65536 /* rows: chosen experts are computed, and kept, cluster by cluster */
};

/* How OP_ROUTE makes weights of the logits of a token's experts. */
enum route_kind {
    ROUTE_SHARES = 0,         /* softmax over all experts */
    ROUTE_NORMALISED = 1,     /* softmax over the chosen ones */
    ROUTE_SIGMOID = 2         /* sigmoids of the chosen ones, by their sum */
};

enum step_flag {
    STEP_TRACE = 1, /* write trace records, with STEP_TIMED */
    STEP_DRY = 2,   /* claims and waits only, no kernel */
    STEP_TIMED = 4  /* count the executors' times */
};

enum step_status { STEP_DONE = 0, STEP_TIMEOUT = 1, STEP_ABORTED = 2 };

enum serve_status { SERVE_STOPPED = 0, SERVE_STALE = 1, SERVE_SLICE = 2 };

/* One operation of a step program, 256 bytes. Which fields an op reads is told in program.c. */
struct step_op {
    uint32_t kind;
    uint32_t unit;            /* enum unit: who runs it */
    uint32_t after;           /* ops [0, after) must be complete before it starts */
    uint32_t flags;
    uint32_t layer;
    uint32_t weight_type;     /* enum storage_type; of keys and values in ops that have `kv` */
    uint32_t up_type;
    uint32_t activation;      /* enum feed_forward_kind; for OP_ROUTE enum route_kind */
    uint64_t in;
    uint64_t in_stride;       /* bytes a token */
    uint64_t out;
    uint64_t out_stride;      /* bytes a token */
    uint64_t out_acts;
    uint64_t out_acts_stride; /* bytes a token */
    uint64_t weight;
    uint64_t up_weight;       /* for OP_PREDICT tiles whose product is added to scores, or 0 */
    uint64_t bias;            /* f32 (rows); for OP_ROPE_KV the q norm, for OP_PREDICT thresholds */
    uint64_t up_bias;         /* for OP_ROPE_KV the k norm; for OP_MATMUL with OPF_RESIDUAL f32
                                 factors of its rows, (tokens), or 0 */
    uint64_t kv;              /* this layer's KV blocks */
    uint64_t rope;            /* (positions, rotary_dim) f32: cos half, then sin half */
    uint32_t rows;            /* for OP_ATTENTION the window: the newest positions seen, 0: all; for
                                 OP_EMBED the row of up_weight that position 0 has */
    uint32_t cols;            /* for OP_ATTENTION the tokens of a unit */
    uint32_t num_heads;       /* with `routes`: experts of a token */
    uint32_t num_kv_heads;    /* for OP_ROUTE loads of a pass up to this layer's end, or 0 */
    uint32_t head_dim;
    uint32_t rotary_dim;
    uint32_t rope_layout;
    uint32_t heads_per_unit;
    float eps;                /* of a norm; for OP_MATMUL and OP_ATTENTION the cap of soft-capping,
                                 0: none; for rows: activations of deciding values up to it count
                                 as zero */
    float scale;              /* of scores; for OP_EMBED of the embedding, 0: none */
    uint32_t stream_index;    /* 0: weights are resident; j: they are those of the j-th load of a
                                 pass, and the offsets above are those in the first buffer */
    /* Rows only. A neuron's rows lie at up_weight + place * row_stride, where place is its slot
     * (cache is given) or its number in the run; `weight` has tiles of the deciding rows, gate or,
     * without a gate, up, with OPF_GATE_TILES. */
    uint32_t down_type;
    uint32_t row_stride;
    uint32_t gate_row;        /* where the deciding, the up and the down row begin in it */
    uint32_t up_row;
    uint32_t down_row;
    uint32_t first_neuron;    /* of the run, in its layer; `rows` is the run's length */
    uint32_t layer_neurons;
    uint32_t cluster_neurons; /* a multiple of 32, at most MAX_CLUSTER_NEURONS */
    uint32_t expert_neurons;  /* with `routes`: of each expert, whole clusters */
    uint64_t clusters;        /* struct cluster_work [clusters of a layer], then uint32 active
                                 and place of each neuron of the layer, padded to clusters */
    uint64_t partials;        /* f32 (clusters, tokens, cols); rows down: total (tokens, cols) */
    uint64_t cache;           /* neuron cache; 0: every row of the run is here */
    uint64_t reads;           /* the ring misses are ordered by */
    uint64_t activity;        /* struct layer_activity of this layer */
    uint64_t routes;          /* struct routes of the running layer; 0: no mixture of experts */
};

enum { MAX_CLUSTER_NEURONS = 1024, MAX_EXPERTS = 1024 };

/* Which experts the tokens of the running step chose in the running layer. An *entry* is a token
 * with one of its experts; entries are in the order of experts, of one expert in that of tokens.
 * Behind it lie, each `max_entries` long but the first two: uint32 start [num_experts + 1], the
 * first entry of each expert; uint32 chosen [num_experts], those with entries, ascending; of each
 * entry its uint32 expert, its uint32 token and its float weight; and uint32 entries_of (tokens,
 * num_used), those of each token, ascending. */
struct routes {
    uint32_t num_experts;
    uint32_t num_used;        /* experts of a token */
    uint32_t num_chosen;
    uint32_t max_entries;
};

/* Bytes of the routes of so many tokens. */
size_t routes_bytes(uint32_t num_experts, uint32_t num_used, uint32_t max_tokens);

/* What a cluster came to in the running step. */
struct cluster_work {
    uint32_t num_active;      /* neurons computed beyond their gates */
    uint32_t num_late;        /* of them, those whose rows were not here */
    uint32_t reserved[14];
};

/* Counts of one layer since the engine started. The decode program counts: generated tokens, and
 * those of prompts in chunks as short as a decode step. All are sums over tokens, so batches change
 * nothing; a step that is computed again is counted again. */
struct layer_activity {
    uint64_t tokens;
    uint64_t gated;           /* neurons whose deciding value was computed and above zero */
    uint64_t active;          /* neurons whose coefficient was not zero: their down rows were
                                 added; with OPF_ALL_NEURONS every neuron */
    uint64_t stall_ns;        /* executors' time waiting for rows */
    uint64_t predicted;       /* neurons that a predictor named */
    uint64_t pinned;          /* neurons whose rows were needed and always stay; of a batch once */
    uint64_t reserved[2];
};

/* One executor's place in the arena, 128 bytes. */
struct executor_record {
    int32_t pid;
    uint32_t unit;
    uint32_t generation;      /* an executor with another generation leaves */
    uint32_t busy_seq;        /* the step it is in, 0 when idle */
    uint64_t heartbeat;
    uint64_t steps;
    uint64_t kernel_ns;       /* with STEP_TIMED, summed since attach: inside ops, */
    uint64_t wait_ns;         /* and before them for other executors; flash is in neither */
    uint64_t scratch;         /* offset of its private scratch */
    uint64_t scratch_bytes;
    uint64_t trace;           /* offset of its struct trace_ring, 0: none */
    uint64_t notice;          /* offset of a uint32 length and so many bytes: why the back end gave
                                 up; 0: nobody reads it */
    uint32_t seen_seq;        /* the last step rung that it took notice of */
    uint32_t in_backend;      /* 1 + the op that its back end is computing, 0: none */
    uint64_t stall_ns;        /* modelled: it begins its next step so much later, once; anybody may
                                 write it, and its heartbeat stands meanwhile */
    double kv_error;          /* squared, of a part of the keys and values it stored as quants */
    double kv_square;         /* squares of the same values */
    uint64_t reserved[2];
};

struct region { uint64_t offset; uint64_t bytes; };

/* At the arena's base, 4096 bytes reserved. */
struct arena_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t epoch;           /* bumped at each recovery */
    uint32_t abort;           /* nonzero: unwind the running step */
    uint32_t stop;            /* nonzero: executors leave */
    uint64_t arena_bytes;
    uint64_t board;           /* struct step_board */
    uint32_t num_executors;
    uint32_t has_backend;     /* nonzero: an executor with a back end decides about dense ops */
    struct region regions[16];
};

/* What a step is about; written by the coordinator only, guarded by step_seq (board.h). */
struct step_params {
    uint32_t program_ops;     /* number of ops */
    uint32_t num_tokens;
    uint32_t num_logit_rows;
    uint32_t flags;
    uint64_t program;         /* offset of struct step_op[program_ops] */
    uint32_t num_parties[2];  /* executors by unit */
    uint32_t spin_limit;      /* polls before a waiter sleeps */
    uint32_t max_tokens;
    uint64_t token_ids;       /* int32 [max_tokens] */
    uint64_t positions;       /* int32 [max_tokens] */
    uint64_t block_tables;    /* int32 [max_tokens]: index of each token's block table in tables */
    uint64_t tables;          /* int32 [sequences][table_stride] KV block ids */
    uint64_t table_stride;
    uint64_t logit_rows;      /* int32 [max_logit_rows]: token index within the step */
    uint64_t stream;          /* struct layer_stream, 0 when every layer is resident */
    uint32_t stream_base;     /* loads consumed by the steps before this one */
    uint32_t epoch;           /* of the neuron cache: this step's first layer */
};

/* Layers that do not fit, or parts of them, pass through a ring of buffers in the order a forward
 * pass needs them, over and over: load s is number s mod num_loads, to buffer s mod num_buffers.
 * The reader runs ahead as far as buffers are free, across the end of a step too. Prefill and
 * decode may need different lists of loads. */
struct layer_stream {
    uint32_t landed;          /* loads whose bytes are in place; executors wait on it */
    uint32_t pad0[15];
    uint32_t consumed;        /* loads whose buffers are free again; the reader waits on it */
    uint32_t routed;          /* of loads below it, the running layer's, the experts are chosen */
    uint64_t routes;          /* offset of struct routes, with `routed` */
    uint32_t pad1[12];
    uint32_t error;           /* errno of a load that failed for good, 0 */
    uint32_t num_loads;       /* of a pass */
    uint32_t num_buffers;
    uint32_t stop;            /* the reader leaves */
    uint64_t buffers;         /* offset of the first one */
    uint64_t buffer_bytes;
    uint64_t stall_ns;        /* executors' time waiting for loads, summed */
    uint64_t bytes_read;
    uint64_t reads;
    uint32_t schedule;        /* which list of loads is wanted; the coordinator changes it */
    uint32_t serving;         /* the one the reader is at; a futex word */
};

/* A back end as an executor calls it from inside a step; both are told the op, whose offsets are
 * those of this step, and its input rows. */
typedef int32_t (*backend_call)(void *handle, const struct step_op *op, uint32_t num_rows);
struct backend_calls {
    void *handle;             /* passed on */
    backend_call takes;       /* whether it computes this op: 1, or 0: the executors do */
    backend_call run;         /* compute the op it has taken: 0, or the executor does all of it; a
                                 residual is added to once everything else is done */
};

/* Bytes of the step board for programs of up to max_ops ops. */
size_t board_bytes(uint32_t max_ops);
/* Format an arena: header and board. `base` is page aligned. */
void arena_format(void *base, uint64_t arena_bytes, uint64_t board, uint32_t max_ops,
                  uint32_t num_executors);
/* 1 when base holds an arena of this layout. */
int arena_valid(const void *base);
struct arena_header *arena_header_at(void *base);
/* Give pages [offset, offset + num_bytes) back to the system, for every process that maps them;
 * they read as zeros afterwards. 0, or an errno. */
int arena_release(void *base, uint64_t offset, uint64_t num_bytes);
struct step_params *step_params_at(void *base);
struct executor_record *executor_at(void *base, uint32_t executor);

/* Announce that the parameters are about to change; returns the new step's number. Fill
 * step_params_at() between step_open and step_ring. */
uint32_t step_open(void *base);
/* Ring the doorbells of the units the program uses. */
void step_ring(void *base, uint32_t step_seq);
/* Wait for the step's end: enum step_status. */
int step_wait(void *base, uint32_t step_seq, int64_t timeout_ns);
/* Set the abort word and wake every waiter; clear it again. */
void step_abort(void *base);
void step_clear_abort(void *base);
/* Set the stop word and wake every waiter. */
void arena_stop(void *base);

/* Take the executor's place; returns its generation (older ones leave). */
uint32_t executor_attach(void *base, uint32_t executor, uint32_t unit, int32_t pid);
/* Say whether an executor of the NPU has a back end; it says so before its unit serves, and no more
 * once it computes everything here. Wakes who waits for its decisions. */
void backend_set(void *base, int has_backend);
/* Serve steps until the arena stops, the place is taken over (stale), or slice_ns pass with no
 * step rung: enum serve_status. Blocks; the caller releases the GIL. backend: NULL, or of the one
 * executor that has one: it is asked about every dense matrix of its unit that all rows of a step
 * go through, and computes whole ops; the unit's other executors wait for each decision. */
int executor_serve(void *base, uint32_t executor, uint32_t generation, int64_t slice_ns,
                   const struct backend_calls *backend);

struct layer_stream *layer_stream_at(void *base, uint64_t offset);
/* Count a load as landed and wake who waits for it. */
void layer_stream_land(void *base, uint64_t offset);
/* Wait until the load of number `load` has a free buffer; 1, or 0 when the time is over or the
 * stream stops. */
int layer_stream_wait_free(void *base, uint64_t offset, uint32_t load, int64_t timeout_ns);
/* End the pass an aborted step was in: the next step begins with the first streamed layer. No
 * executor may be inside a step. Returns the new stream_base. */
uint32_t layer_stream_end_pass(void *base, uint64_t offset);
/* Between steps: want another list of num_loads loads. The reader drops what it has read ahead and
 * says so; wait for that before the next step. */
void layer_stream_switch(void *base, uint64_t offset, uint32_t schedule, uint32_t num_loads);
/* Wait until the reader has begun the list wanted last: 1, or 0 when the time is over. */
int layer_stream_wait_serving(void *base, uint64_t offset, int64_t timeout_ns);
/* What `routed` says, and of loads below it `routes` tells the experts: none that lies before the
 * one to be read next, since no layer ends before its loads have landed. */
uint32_t layer_stream_routed(void *base, uint64_t offset);
/* The reader, with nothing under way: begin the list that is wanted. */
void layer_stream_begin(void *base, uint64_t offset);
/* Stop the reader, or report a load that failed for good; wakes everybody who waits. */
void layer_stream_stop(void *base, uint64_t offset);
void layer_stream_fail(void *base, uint64_t offset, uint32_t error);

/* A futex word anywhere in shared memory. Wait while *word == expected, at most timeout_ns; returns
 * the value read last. */
uint32_t word_wait(void *word, uint32_t expected, int64_t timeout_ns);
void word_store_wake(void *word, uint32_t value);
uint64_t monotonic_ns(void);
/* Ask that this thread runs soon after it wakes, at the cost of being interrupted sooner: the time
 * slice that the fair scheduler (Linux 6.12 on) plans for it; others ignore it. 0 or an errno. */
int32_t prefer_short_slices(uint64_t slice_ns);
