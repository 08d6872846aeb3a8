/* What executors and readers did and when, for timelines. Declarations only: trace.h includes this
 * file and cffi's cdef() reads it.
 *
 * A ring has one producer, and one consumer that looks in between steps. Nobody waits: a producer
 * overwrites what is oldest, and the consumer is told how many records that cost. */

enum trace_what { TRACE_OP = 0, TRACE_CLUSTER = 1, TRACE_READ = 2 };

/* Of a neuron cluster (PAPER §1.8). */
enum trace_stage {
    TRACE_PRED = 0, /* scores, thresholds, lookup, orders of what is missing */
    TRACE_GC = 1,   /* gates; in exact mode also lookup and orders */
    TRACE_UDC = 2,  /* up and down */
    TRACE_WAIT = 3  /* for rows that have not landed */
};

/* One trace record, 64 bytes. */
struct trace_record {
    uint64_t start_ns;        /* CLOCK_MONOTONIC */
    uint64_t end_ns;
    uint64_t wait_ns;         /* op: from this executor's last one, or the step's begin, to start */
    uint64_t value;           /* op: time waiting for flash, in both; cluster: neurons
                                 whose rows were missing; read: the neuron in its layer, or
                                 UINT64_MAX: a run of the layer */
    uint32_t step_seq;        /* read: the step that ran when it ended */
    uint32_t what;            /* enum trace_what */
    uint32_t kind;            /* op: its kind; cluster: enum trace_stage; read: 0 or an errno */
    uint32_t layer;
    uint32_t index;           /* op: in its program; cluster: in its layer; read: 0 */
    uint32_t count;           /* op: units; cluster: neurons; read: bytes */
    uint32_t executor;        /* read: 0 */
    uint32_t reserved;
};

struct trace_ring { /* 64 bytes, then records */
    uint64_t head;            /* records written since the format */
    uint32_t capacity;        /* a power of two */
    uint32_t step_seq;        /* of a reader's ring: the step whose reads are wanted, 0: none */
    uint64_t reserved[6];
};

/* Bytes of a ring of `capacity` records. */
size_t trace_ring_bytes(uint32_t capacity);
void trace_format(void *base, uint64_t ring, uint32_t capacity);
struct trace_ring *trace_ring_at(void *base, uint64_t ring);
/* The producer: write a record. */
void trace_put(void *base, uint64_t ring, const struct trace_record *record);
/* The producer of a reader's ring: write that a read of `layer` ended now after latency_ns, if the
 * running step wants to know. */
void trace_put_read(void *base, uint64_t ring, uint64_t latency_ns, uint32_t layer,
                    uint64_t neuron, uint32_t num_bytes, uint32_t status);
/* The consumer: copy records from number *tail on, at most max, and move *tail behind them. Those
 * that were overwritten, or may be while they are copied, are left out and added to *lost. Returns
 * the number copied; fewer than max: nothing more is there. */
uint32_t trace_drain(void *base, uint64_t ring, uint64_t *tail, struct trace_record *records,
                     uint32_t max, uint64_t *lost);
