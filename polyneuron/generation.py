"""A running request as its caller sees it: text as it comes, then the completion."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from polyneuron.candidate import Candidate
from polyneuron.completion import BestOf, CandidateReport, Completion, io_of, timings_of
from polyneuron.errors import EngineError
from polyneuron.model.stream import StopMatcher

if TYPE_CHECKING:
    from polyneuron.engine import Engine

Result = TypeVar("Result")


class Generation:
    """A running request: iterate over its text as it comes, then read `completion`.

    Of several candidates nothing comes before all have ended; then comes the best one's text. It
    ends with its last token, with `close`, or when nobody holds it any more.
    """

    def __init__(self, engine: Engine, candidates: Sequence[Candidate]) -> None:
        self._engine, self._candidates = engine, tuple(candidates)
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; cancels the request when left early."""
        if not self._open:
            return
        try:
            if len(self._candidates) == 1:
                yield from self._stream(self._candidates[0])
            else:
                yield from self._choose()
        finally:
            self.close()

    def _stream(self, candidate: Candidate) -> Iterator[str]:
        while candidate.open.is_open:
            self._engine.check_open()
            yield from candidate.take()
            if candidate.open.is_open:
                candidate.open.wait_more(len(candidate.tokens))
        if candidate.has_ended:
            self._completion = self._completed(candidate, None)

    def _choose(self) -> Iterator[str]:
        while candidates := self._open:
            self._engine.check_open()
            for candidate in candidates:
                for _ in candidate.take():
                    pass
            # All of them get a token in a step: who waits for one has waited for all.
            if running := self._open:
                running[0].wait()
        if not all(candidate.has_ended for candidate in self._candidates):
            return
        best_of = BestOf.among(
            CandidateReport(c.mean_logprob, len(c.tokens), c.finish_reason)
            for c in self._candidates
        )
        best = self._candidates[best_of.chosen]
        self._completion = self._completed(best, best_of)
        if best.text:
            yield best.text

    @property
    def _open(self) -> list[Candidate]:
        return [candidate for candidate in self._candidates if candidate.open.is_open]

    def _completed(self, candidate: Candidate, best: BestOf | None) -> Completion:
        outcome = candidate.outcome
        # They decode in the same steps, so who ran longest has seen every size of the batch.
        longest = max((c.outcome for c in self._candidates), key=lambda o: len(o.token_ns))
        return Completion(
            text=candidate.text,
            prompt_tokens=list(candidate.open.request.prompt),
            tokens=candidate.tokens,
            finish_reason=candidate.finish_reason,
            logits_sha256=outcome.logits_sha256,
            top_logprobs=outcome.top_logprobs,
            timings=timings_of(outcome, self._engine.load_ms, len(candidate.tokens)),
            io=io_of(outcome, self._engine.config.num_workers),
            best_of=best,
            batch_sizes=longest.batch_sizes,
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last token has been computed; its text may still be ahead."""
        return all(candidate.open.mailbox.finished for candidate in self._open)

    def cancel(self) -> None:
        """Ask for the end; the iteration ends soon after."""
        if running := self._open:
            self._engine.cancel([c.open.request.request_id for c in running])

    def close(self) -> None:
        """End the request if it still runs, and forget it; safe to call again."""
        if len(running := self._open) > 1:  # at once: else each would go on with the prompt
            with contextlib.suppress(EngineError):
                self.cancel()
        for candidate in running:
            candidate.open.abandon()

    def __del__(self) -> None:
        # Not built fully, or the interpreter is going down: then nothing is left to end.
        with contextlib.suppress(Exception):
            self.close()

    @property
    def completion(self) -> Completion:
        """The result; raises EngineError unless the request ran to its end."""
        if self._completion is None:
            state = "still runs" if self._open else "was left before its end"
            raise EngineError(f"the request {state}: iterate over all of its text first")
        return self._completion

    def wait(self) -> Completion:
        """Run to the end without looking at each token."""
        for candidate in self._open:
            if not candidate.stops.has_stops:
                candidate.open.wait_finished()
        for _ in self:
            pass
        return self.completion

    async def await_completion(self) -> Completion:
        """`wait` for asyncio: a cancelled task cancels the request."""
        return await self._in_thread(self.wait)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of text for asyncio; leaving early or a cancelled task cancels the request."""
        pieces = iter(self)
        try:
            while (piece := await self._in_thread(lambda: next(pieces, None))) is not None:
                yield piece
        finally:
            await asyncio.to_thread(self.close)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run work in a thread, and do not leave it behind when this task is cancelled."""
        task = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.cancel)  # ends what the thread waits for
            await asyncio.wait([task])
            raise


def make_stops(stop: str | Sequence[str]) -> StopMatcher:
    """A matcher of one stop string or several."""
    return StopMatcher((stop,) if isinstance(stop, str) else stop)
