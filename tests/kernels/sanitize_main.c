/* Runs every kernel on every supported ISA and compares the bytes with the scalar table's. Built
 * with the address and undefined sanitizers: exit 0 means no report and no difference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernel_runs.h"
#include "kernels.h"

#define MAX_RESULTS 4096

static int is_first = 1, num_results, num_different;
static void *expected[MAX_RESULTS];

/* The first run (scalar) keeps the result, later runs compare with it. */
void take_result(const char *kernel, void *result, size_t num_bytes)
{
    must(num_results < MAX_RESULTS, "room for the results");
    if (is_first) {
        expected[num_results++] = result;
        return;
    }
    if (memcmp(expected[num_results], result, num_bytes) != 0) {
        printf("%s on %s differs from scalar, result %d\n", kernel, kernels_active(), num_results);
        num_different++;
    }
    num_results++;
    free(result);
}

int main(void)
{
    if (kernels_select("scalar") != 0)
        return 2;
    run_all_kernels();
    const int total = num_results;
    is_first = 0;
    const char *isa;
    for (int i = 0; (isa = kernels_built(i)) != NULL; i++)
        if (strcmp(isa, "scalar") != 0 && kernels_supported(isa)) {
            if (kernels_select(isa) != 0)
                return 2;
            num_results = 0;
            run_all_kernels();
            must(num_results == total, "as many results as scalar gave");
            printf("%s: %d results compared\n", isa, num_results);
        }
    for (int i = 0; i < total; i++)
        free(expected[i]);
    return num_different ? 1 : 0;
}
