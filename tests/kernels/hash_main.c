/* Runs every kernel on one table, the one that POLYNEURON_FORCE_ISA names or the best, and prints
 * its name, how many results there were and one hash over the bytes of all: equal on every ISA.
 * With an argument: a line for every kernel first, to find what differs. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_runs.h"
#include "kernels.h"

#define MAX_KERNELS 32
#define FNV_OFFSET 14695981039346656037ull
#define FNV_PRIME 1099511628211ull

struct kernel_hash { const char *kernel; uint64_t hash; unsigned num_results; };

static struct kernel_hash kernels[MAX_KERNELS];
static int num_kernels;

static struct kernel_hash *hash_of(const char *kernel)
{
    for (int i = 0; i < num_kernels; i++)
        if (strcmp(kernels[i].kernel, kernel) == 0)
            return &kernels[i];
    must(num_kernels < MAX_KERNELS, "room for every kernel");
    kernels[num_kernels] = (struct kernel_hash){kernel, FNV_OFFSET, 0};
    return &kernels[num_kernels++];
}

/* FNV-1a (Fowler, Noll, Vo), 64 bits */
static void add_bytes(uint64_t *hash, const void *bytes, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes; i++)
        *hash = (*hash ^ ((const uint8_t *)bytes)[i]) * FNV_PRIME;
}

void take_result(const char *kernel, void *result, size_t num_bytes)
{
    struct kernel_hash *sum = hash_of(kernel);
    add_bytes(&sum->hash, result, num_bytes);
    sum->num_results++;
    free(result);
}

int main(int num_arguments, char **arguments)
{
    (void)arguments;
    if (kernels_select(NULL) != 0) {
        printf("not available here\n");
        return 2;
    }
    run_all_kernels();
    uint64_t total = FNV_OFFSET;
    unsigned num_results = 0;
    for (int i = 0; i < num_kernels; i++) {
        if (num_arguments > 1)
            printf("%s %016" PRIx64 "\n", kernels[i].kernel, kernels[i].hash);
        add_bytes(&total, &kernels[i].hash, sizeof kernels[i].hash);
        num_results += kernels[i].num_results;
    }
    printf("%s %u %016" PRIx64 "\n", kernels_active(), num_results, total);
    return 0;
}
