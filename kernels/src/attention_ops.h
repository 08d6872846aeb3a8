/* attention_ops.c, as program.c calls it. */
#ifndef POLYNEURON_ATTENTION_OPS_H
#define POLYNEURON_ATTENTION_OPS_H

#include "board.h"

static inline const int32_t *int_array(void *base, uint64_t offset) { return at(base, offset); }

uint32_t attention_units(const struct step_op *op, const struct step_params *step);
void run_rope_kv(void *base, const struct step_op *op, const struct step_params *step,
                 struct executor_record *executor, uint32_t first, uint32_t last);
void run_attention(void *base, const struct step_op *op, const struct step_params *step,
                   const struct executor_record *executor, uint32_t first, uint32_t last);

#endif
