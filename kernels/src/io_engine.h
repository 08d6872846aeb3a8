/* Inside the I/O engine: requests are cut into pieces, a back end reads pieces.
 *
 * io_engine.c owns requests and pieces and decides what a result means; a back end only brings
 * pieces to the kernel and results back to io_piece_done, all on the owner's thread. */
#ifndef POLYNEURON_IO_ENGINE_H
#define POLYNEURON_IO_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "io_engine_api.h"

#define PIECE_BYTES (1u << 20) /* larger requests are split, so that they use the queue's depth */
#define MAX_QUEUE_DEPTH 1024u
#define MAX_REQUESTS (1u << 20)
#define MAX_RETRIES 100u       /* of one piece without progress: EINTR, EAGAIN */
#define NO_INDEX UINT32_MAX

enum { FD_DIRECT = 0, FD_BUFFERED = 1, NUM_FDS = 2 };

struct io_file {
    int fds[NUM_FDS];          /* FD_DIRECT is -1 when the file system refuses it */
    uint64_t num_bytes;
    uint32_t offset_alignment;
    uint32_t memory_alignment;
};

struct index_list {
    uint32_t head, tail;
};

struct request_slot {
    struct read_request request;
    uint64_t expected;         /* bytes of the request that the file has */
    uint64_t issued;           /* of them, given to pieces */
    uint64_t failed_at;        /* the first byte known to be missing */
    uint64_t start_ns;
    uint64_t latency_ns;
    uint32_t num_pieces;       /* in flight */
    uint32_t next;             /* in the one list it is in */
    int32_t status;
    bool is_waiting;           /* in engine.waiting: not yet issued in full */
};

struct piece {
    uint64_t offset;
    char *target;
    uint32_t num_bytes;        /* to ask for */
    uint32_t needed;           /* of them, what lies before the file's end */
    uint32_t request;
    uint32_t fd_index;
    uint32_t num_retries;
};

struct io_backend_calls {
    uint32_t backend;
    int32_t (*start)(struct io_engine *engine);
    /* Queue a piece; there is always room for queue_depth of them. */
    void (*issue)(struct io_engine *engine, uint32_t piece);
    /* Hand queued pieces to the kernel; their results come at a later wait. */
    int32_t (*flush)(struct io_engine *engine);
    /* The same, then pass results to io_piece_done; waits for num_results, at most timeout_ns. */
    int32_t (*wait)(struct io_engine *engine, uint32_t num_results, int64_t timeout_ns);
    int32_t (*register_memory)(struct io_engine *engine, void *base, uint64_t num_bytes);
    void (*stop)(struct io_engine *engine); /* nothing is in flight */
};

extern const struct io_backend_calls io_uring_calls, io_pool_calls;

struct io_engine {
    struct io_file file;
    const struct io_backend_calls *calls;
    void *backend_state;
    const void *owner;         /* an address that only the owner's thread has */
    struct request_slot *requests;
    struct piece *pieces;
    uint32_t *free_pieces;     /* a stack */
    uint32_t num_free_pieces;
    uint32_t num_completed;
    uint32_t num_free_requests;
    struct index_list free, waiting, completed;
    struct io_info info;
};

/* io_file.c */
int32_t io_file_open(struct io_file *file, const char *path, bool is_buffered);
void io_file_close(struct io_file *file);

/* io_engine.c: a piece's read returned `result`, bytes or -errno. */
void io_piece_done(struct io_engine *engine, uint32_t piece, int32_t result);

#endif
