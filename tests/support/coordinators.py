"""The coordinator's state driven by hand: small ones, requests, and steps that give one token."""

from collections.abc import Iterable

from polyneuron.actors.coordinator import CoordinatorState, Sequence, StepPlan
from polyneuron.actors.messages import SubmitRequest
from polyneuron.config import EngineConfig

END_ID = 2


def make_coordinator(
    *,
    num_kv_blocks: int = 16,
    max_tokens: int = 8,
    max_sequences: int = 4,
    max_logit_rows: int = 8,
) -> CoordinatorState:
    config = EngineConfig(
        max_tokens=max_tokens, max_sequences=max_sequences, max_logit_rows=max_logit_rows
    )
    return CoordinatorState(config, num_kv_blocks)


def make_request(
    request_id: int = 1,
    *,
    prompt: Iterable[int] = range(10, 15),
    max_tokens: int = 4,
    score_from: int = -1,
) -> SubmitRequest:
    return SubmitRequest(
        request_id=request_id,
        mailbox=request_id,
        prompt=list(prompt),
        max_tokens=max_tokens,
        end_ids=[END_ID],
        score_from=score_from,
    )


def rows_of(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(request, token, position, wants logits) of each row."""
    assert plan is not None
    return [
        (row.sequence.request.request_id, row.token_id, row.position, row.wants_logits)
        for row in plan.rows
    ]


def run_step(state: CoordinatorState, token_id: int = 7) -> StepPlan | None:
    """Compute the next step; every row that wants logits gives `token_id`."""
    state.admit()
    plan = state.schedule()
    if plan is not None:
        joined = state.computed(plan)
        for index in plan.logit_rows:
            for sequence in (plan.rows[index].sequence, *joined):
                state.append(sequence, token_id)
    return plan


def submit_candidates(
    state: CoordinatorState, limits: Iterable[int], *, prompt: Iterable[int] = range(10, 15)
) -> list[Sequence]:
    """Candidates of one prompt with these limits, numbered from 1."""
    tokens = list(prompt)
    return state.submit_candidates(
        [make_request(i, prompt=tokens, max_tokens=n) for i, n in enumerate(limits, 1)]
    )
