/* Ops that a back end computes in the place of an executor's kernels.
 *
 * One executor of the NPU may have a back end. Of every op that could be the back end's it decides:
 * it claims all units, or leaves them to all executors of its unit. They wait for the decision, a
 * word like `progress`, and then claim as ever, so that nothing depends on who came first. A back
 * end that fails has written nothing that counts: the same units are computed by the kernels. */
#ifndef POLYNEURON_BACKEND_H
#define POLYNEURON_BACKEND_H

#include "board.h"

#define BACKEND_DECIDED UINT32_MAX

/* Whether a back end is asked about the op. */
int backend_may_take(void *base, const struct step_op *op);
/* What it answers. */
int backend_takes(const struct backend_calls *backend, const struct step_op *op,
                  const struct step_params *step);
/* Have it compute a whole op: 0, or nonzero when that is still to be done. */
int backend_run(const struct backend_calls *backend, struct executor_record *record,
                const struct step_op *op, const struct step_params *step, uint32_t index);
/* Its executor has claimed what it wants of the op. */
void backend_decided(struct step_board *board, uint32_t step_seq, uint32_t index);
/* BACKEND_DECIDED, or the word to wait on while it is what it is. */
uint32_t backend_undecided(void *base, struct step_board *board, uint32_t step_seq,
                           uint32_t index);

#endif
