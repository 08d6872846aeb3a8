/* Reads of missed neurons: executors order them, one reader performs them. Declarations only:
 * neuron_reads.h includes this file and cffi's cdef() reads it.
 *
 * A ring in shared memory. Who admits a neuron (neuron_cache_use) pushes the miss while it still
 * holds the cache's lock, so there is one producer at a time; the I/O actor is the only consumer. A
 * slot has at most one read under way, so a ring of at least as many places as there are slots is
 * never full. */

/* Where a neuron's rows lie in the file and which of its bytes a read brings. */
struct neuron_file {
    uint32_t neurons_per_layer;
    uint32_t num_layers;
    uint64_t layer_offsets;   /* arena offset of uint64 [num_layers]: file offset of bundle 0 */
    uint64_t bundle_bytes;
    uint64_t read_begin;      /* from the bundle's start; a multiple of the device's alignment */
    uint64_t read_bytes;
    uint64_t slots;           /* arena offset of slot 0 */
    uint64_t slot_bytes;      /* at least read_bytes */
};

struct neuron_reads {
    uint32_t pushed;          /* orders, counted from the format on */
    uint32_t sleeping;        /* a futex word, 1 while the reader sleeps */
    uint32_t pad0[14];
    uint32_t taken;           /* of them, those the reader has taken */
    uint32_t ended;           /* and those that have landed or failed */
    uint32_t error;           /* errno of the latest read that failed for good, 0 */
    uint32_t stop;            /* the reader leaves */
    uint32_t capacity;        /* a power of two */
    uint32_t reserved;
    uint64_t cache;           /* arena offset of the neuron cache */
    uint64_t reads;           /* counters, written by the reader */
    uint64_t bytes_read;
    uint64_t latency_ns;      /* summed over reads */
    uint64_t trace;           /* arena offset of its struct trace_ring, 0: none */
    struct neuron_file file;
    uint64_t pad2;
};

size_t neuron_reads_bytes(uint32_t capacity);
/* Format the ring at `offset`; the file's description and `cache` are filled in by the caller. */
void neuron_reads_format(void *base, uint64_t offset, uint32_t capacity);
struct neuron_reads *neuron_reads_at(void *base, uint64_t offset);
/* Cache's lock held. Order reads and wake the reader, if it sleeps. */
void neuron_reads_push(void *base, uint64_t offset, const struct neuron_miss *misses, uint32_t n);
/* Cache's lock held, no reader at work. A new reader begins in the place of one that is gone: what
 * that one took and did not end is ordered anew. Returns the number of such orders. */
uint32_t neuron_reads_resume(void *base, uint64_t offset);
/* The reader's side, for readers that perform reads themselves. Take up to max orders, waiting at
 * most timeout_ns for the first; returns their number, 0 once the ring has been stopped. */
uint32_t neuron_reads_pop(void *base, uint64_t offset, struct neuron_miss *misses, uint32_t max,
                          int64_t timeout_ns);
/* One order ended: status 0, or an errno: then the neuron is absent again and `error` is set, in
 * time for whoever is woken. */
void neuron_reads_end(void *base, uint64_t offset, uint32_t neuron, uint32_t status);
/* Let the reader leave. */
void neuron_reads_stop(void *base, uint64_t offset);

/* Perform orders by `engine`, on its owner's thread, in the order they come and as many at once as
 * its queue_depth, until the ring stops (1), slice_ns are over with nothing under way (0), or a
 * read failed for good after retries (-errno). The reads under way have ended in each case, but
 * for -ETIMEDOUT: the device hangs. Orders not taken stay: call again to go on with them. */
int neuron_reader_run(void *base, uint64_t offset, struct io_engine *engine, int64_t slice_ns);
