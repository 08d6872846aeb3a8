/* Every kernel on seeded data: one sequence of calls for all programs that compare or sum up what
 * the tables of kernels give. */
#ifndef POLYNEURON_KERNEL_RUNS_H
#define POLYNEURON_KERNEL_RUNS_H

#include <stddef.h>

/* What a program does with a result; takes the memory. */
void take_result(const char *kernel, void *result, size_t num_bytes);

/* kernel_runs.c: all calls on the active table; the same data each time. */
void run_all_kernels(void);
/* kernel_extremes.c, part of it: values at the ends of their ranges. */
void run_extremes(void);

/* Memory of exactly this size, never NULL. */
void *heap(size_t num_bytes);
/* Ends the program with a line when `holds` is 0. */
void must(int holds, const char *promise);

#endif
