/* Reads of one file straight into memory, many in flight. Declarations only: io_engine.h includes
 * this file and cffi's cdef() reads it.
 *
 * An engine has one owner: the thread that submits first. Progress is made inside io_submit and
 * io_reap, so an owner that has reads in flight keeps calling io_reap. Every wait is bounded, and
 * errors are negative errno values. */

enum io_backend { IO_AUTO = 0, IO_URING = 1, IO_POOL = 2 };

enum io_open_flag { IO_BUFFERED = 1 /* through the page cache, pages given back at once */ };

struct io_options {
    uint32_t queue_depth;     /* reads in flight in the kernel */
    uint32_t max_requests;    /* requests taken and not reaped, at least queue_depth */
    uint32_t backend;         /* enum io_backend; IO_AUTO: io_uring where the kernel allows it */
    uint32_t flags;           /* enum io_open_flag */
};

/* Bytes [offset, offset + num_bytes) of the file, cut at its end, to target. Offset and length are
 * multiples of io_info.offset_alignment, target of memory_alignment; target has room for num_bytes,
 * and what lies behind the file's end is undefined. */
struct read_request {
    uint64_t offset;
    uint64_t num_bytes;
    void *target;
    uint64_t tag;
    uint32_t *done_word;      /* NULL, or a futex word stored and woken when the request ends */
    uint32_t done_value;      /* stored when every byte has landed */
    uint32_t failed_value;    /* stored when not */
};

struct read_completion {
    uint64_t tag;
    uint64_t num_bytes;       /* landed without a gap from the request's start */
    uint64_t latency_ns;      /* from io_submit to the last byte */
    int32_t status;           /* 0: all bytes up to the file's end as it was when opened; -ENODATA:
                                 the file has become shorter; -ECANCELED: closed before */
    uint32_t reserved;
};

struct io_info {
    uint64_t file_bytes;
    uint64_t registered_bytes;  /* of memory the kernel keeps mapped for reads */
    uint64_t num_requests;      /* completed, failed ones included */
    uint64_t num_reads;         /* handed to the kernel */
    uint64_t num_continued;     /* of them, those that went on after a short or interrupted read */
    uint64_t bytes_read;
    uint32_t backend;           /* enum io_backend in use */
    int32_t uring_status;       /* why io_uring is not in use, 0 when it is or was not asked for */
    uint32_t is_direct;         /* 0: through the page cache */
    uint32_t offset_alignment;
    uint32_t memory_alignment;
    uint32_t queue_depth;
    uint32_t max_requests;
    uint32_t has_registered_file;
    uint32_t setup_flags;       /* of io_uring_setup */
    uint32_t num_in_flight;     /* reads */
    uint32_t num_outstanding;   /* requests taken and not reaped */
    uint32_t reserved;
};

struct io_engine;

/* Open a regular file: 0, or -errno and *engine is NULL. */
int32_t io_open(const char *path, const struct io_options *options, struct io_engine **engine);
/* Let the kernel keep [base, base + num_bytes) mapped, so that reads into it cost less. Before the
 * first io_submit. 0, or -errno when RLIMIT_MEMLOCK or the back end does not allow it; reads then
 * work as without. */
int32_t io_register_memory(struct io_engine *engine, void *base, uint64_t num_bytes);
/* Take requests in order; returns how many, fewer than n when full. -EINVAL: one of them is empty,
 * unaligned or starts behind the file's end, none was taken. -EPERM: not the owner. */
int32_t io_submit(struct io_engine *engine, const struct read_request *requests, uint32_t n);
/* Up to max completions, in the order of their end. Waits until min_wait of them are there (or as
 * many as are outstanding), at most timeout_ns. Returns their number. */
int32_t io_reap(struct io_engine *engine, struct read_completion *completions, uint32_t max,
                uint32_t min_wait, int64_t timeout_ns);
void io_get_info(const struct io_engine *engine, struct io_info *info);
/* Cancel what is not yet in flight, wait for the rest and free the engine. -ETIMEDOUT: reads are
 * still in flight, memory may still be written; the engine stays, call again. */
int32_t io_close(struct io_engine *engine, int64_t timeout_ns);

/* What a run of io_probe came to. */
struct io_probe_result {
    uint64_t num_reads;
    uint64_t num_bytes;
    uint64_t elapsed_ns;
    uint64_t cpu_ns;          /* of the calling thread, in user and kernel mode */
};

/* Read read_bytes at each of the n offsets, depth in flight, each to its own read_bytes of target
 * (depth of them), until all are read or max_ns are over. latencies_ns has n places. 0 or the
 * first failure. */
int32_t io_probe(struct io_engine *engine, const uint64_t *offsets, uint32_t n, uint64_t read_bytes,
                 uint32_t depth, void *target, int64_t max_ns, uint64_t *latencies_ns,
                 struct io_probe_result *result);
