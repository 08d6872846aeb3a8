/* Opens a file for direct reads, or through the page cache where those do not work.
 *
 * Only a real read tells: file systems accept O_DIRECT and then fail each read, want larger blocks
 * than they say, or return other bytes than the page cache does. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io_engine.h"

#define PROBE_BYTES 65536u
#define BUFFERED_ALIGNMENT 512u /* the page cache needs none: callers stay honest */

#ifdef STATX_DIOALIGN
static bool stated_alignment(struct io_file *file) {
    struct statx stat;
    if (statx(file->fds[FD_BUFFERED], "", AT_EMPTY_PATH, STATX_DIOALIGN, &stat) != 0 ||
        !(stat.stx_mask & STATX_DIOALIGN))
        return false;
    file->offset_alignment = stat.stx_dio_offset_align;
    file->memory_alignment = stat.stx_dio_mem_align;
    return true;
}
#else
static bool stated_alignment(struct io_file *file) {
    (void)file;
    return false;
}
#endif

static int64_t read_at(int fd, void *target, size_t num_bytes, uint64_t offset) {
    ssize_t result;
    do
        result = pread(fd, target, num_bytes, (off_t)offset);
    while (result < 0 && errno == EINTR);
    return result;
}

/* Whether both ways to read give the same bytes at offset. */
static bool reads_agree(const struct io_file *file, char *direct, char *buffered, uint64_t offset) {
    uint64_t left = file->num_bytes - offset;
    int64_t wanted = left < file->offset_alignment ? (int64_t)left : file->offset_alignment;
    return read_at(file->fds[FD_DIRECT], direct, file->offset_alignment, offset) == wanted &&
           read_at(file->fds[FD_BUFFERED], buffered, (size_t)wanted, offset) == wanted &&
           memcmp(direct, buffered, (size_t)wanted) == 0;
}

/* Try the first and the last sector. */
static bool direct_works(const struct io_file *file) {
    uint64_t alignment = file->offset_alignment;
    if (alignment == 0 || alignment > PROBE_BYTES || file->memory_alignment > PROBE_BYTES)
        return false;
    void *memory = NULL;
    if (posix_memalign(&memory, PROBE_BYTES, 2 * PROBE_BYTES) != 0)
        return false;
    char *direct = memory, *buffered = direct + PROBE_BYTES;
    bool works = reads_agree(file, direct, buffered, 0) &&
                 reads_agree(file, direct, buffered, (file->num_bytes - 1) / alignment * alignment);
    free(memory);
    return works;
}

static bool find_alignment(struct io_file *file) {
    if (stated_alignment(file))
        return direct_works(file);
    for (uint32_t alignment = 512; alignment <= 4096; alignment *= 8) {
        file->offset_alignment = file->memory_alignment = alignment;
        if (direct_works(file))
            return true;
    }
    return false;
}

static bool is_same_file(int fd, const struct stat *stat) {
    struct stat other;
    return fstat(fd, &other) == 0 && other.st_dev == stat->st_dev && other.st_ino == stat->st_ino;
}

int32_t io_file_open(struct io_file *file, const char *path, bool is_buffered) {
    struct stat stat;
    file->fds[FD_DIRECT] = -1;
    file->fds[FD_BUFFERED] = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->fds[FD_BUFFERED] < 0)
        return -errno;
    if (fstat(file->fds[FD_BUFFERED], &stat) != 0 || !S_ISREG(stat.st_mode)) {
        io_file_close(file);
        return S_ISDIR(stat.st_mode) ? -EISDIR : -ESPIPE;
    }
    file->num_bytes = (uint64_t)stat.st_size;
    if (!is_buffered && file->num_bytes > 0)
        file->fds[FD_DIRECT] = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (file->fds[FD_DIRECT] >= 0 &&
        !(is_same_file(file->fds[FD_DIRECT], &stat) && find_alignment(file))) {
        close(file->fds[FD_DIRECT]);
        file->fds[FD_DIRECT] = -1;
    }
    if (file->fds[FD_DIRECT] < 0)
        file->offset_alignment = file->memory_alignment = BUFFERED_ALIGNMENT;
    /* No reading ahead: the caller knows what comes next. And no page left by the probe. */
    posix_fadvise(file->fds[FD_BUFFERED], 0, 0, POSIX_FADV_RANDOM);
    posix_fadvise(file->fds[FD_BUFFERED], 0, 0, POSIX_FADV_DONTNEED);
    return 0;
}

void io_file_close(struct io_file *file) {
    for (int i = 0; i < NUM_FDS; i++) {
        if (file->fds[i] >= 0)
            close(file->fds[i]);
        file->fds[i] = -1;
    }
}
