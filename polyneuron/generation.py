"""A running request as its caller sees it: text as it comes, then the completion."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from polyneuron.actors.messages import RequestOutcome, SubmitRequest
from polyneuron.actors.sequence_run import Mailbox
from polyneuron.completion import Completion, io_of, timings_of
from polyneuron.errors import EngineError
from polyneuron.model.stream import StopMatcher, StreamDecoder

if TYPE_CHECKING:
    from polyneuron.engine import Engine

WAIT_SLICE_NS = 500_000_000
Result = TypeVar("Result")


class OpenRequest:
    """A request the coordinator works on; its mailbox is given back exactly once."""

    def __init__(self, engine: Engine, request: SubmitRequest, mailbox: Mailbox) -> None:
        self._engine = engine
        self.request = request
        self.mailbox = mailbox
        self.is_open = True

    def wait_finished(self) -> None:
        """Wait for the last token, as long as the coordinator works."""
        while not self.mailbox.finished:
            self.mailbox.wait_finished(WAIT_SLICE_NS)
            self._engine.check_alive()

    def wait_more(self, num_seen: int) -> None:
        """Wait for another token or the end, at most a slice."""
        self.mailbox.wait_more(num_seen, WAIT_SLICE_NS)
        self._engine.check_alive()

    def cancel(self) -> None:
        """Ask for the end; an ended request is no error."""
        if self.is_open:
            self._engine.cancel(self.request.request_id)

    def take_outcome(self) -> RequestOutcome:
        """The outcome of the ended request; raises EngineError with what made it fail."""
        self.is_open = False
        return self._engine.take_outcome(self.request)

    def abandon(self) -> None:
        """End the request and forget it; nobody wants its outcome or its errors."""
        if self.is_open:
            with contextlib.suppress(EngineError):
                self.cancel()
            with contextlib.suppress(EngineError):
                self.take_outcome()


class Generation:
    """A running request: iterate over its text as it comes, then read `completion`.

    It ends with its last token, with `close`, or when nobody holds it any more.
    """

    def __init__(self, engine: Engine, request: OpenRequest, stops: StopMatcher) -> None:
        self._engine, self._open, self._stops = engine, request, stops
        self._request = request.request
        self._decoder = StreamDecoder(engine.tokenizer)
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._completion: Completion | None = None

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, whole characters only; cancels the request when left early."""
        try:
            while self._open.is_open:
                self._engine.check_open()
                finished = self._open.mailbox.finished
                for token_id in self._open.mailbox.tokens_from(len(self._tokens)):
                    piece = self._take(token_id)
                    if piece:
                        yield piece
                    if self._stops.matched is not None:
                        self._open.cancel()
                        finished = True
                        break
                if finished:
                    yield from self._finish()
                else:
                    self._open.wait_more(len(self._tokens))
        finally:
            self._open.abandon()

    def _take(self, token_id: int) -> str:
        self._tokens.append(token_id)
        if token_id in self._request.end_ids:
            return ""
        piece = self._stops.push(self._decoder.push(token_id))
        self._pieces.append(piece)
        return piece

    def _finish(self) -> Iterator[str]:
        stopped = self._stops.matched is not None
        rest = "" if stopped else self._stops.push(self._decoder.flush()) + self._stops.flush()
        if rest:
            self._pieces.append(rest)
            yield rest
        outcome = self._open.take_outcome()
        self._completion = Completion(
            text="".join(self._pieces),
            prompt_tokens=list(self._request.prompt),
            tokens=self._tokens,
            finish_reason="stop" if stopped else outcome.finish_reason,
            logits_sha256=outcome.logits_sha256,
            top_logprobs=outcome.top_logprobs,
            timings=timings_of(outcome, self._engine.load_ms, len(self._tokens)),
            io=io_of(outcome, self._engine.config.num_workers),
        )

    @property
    def is_finished(self) -> bool:
        """Whether the last token has been computed; its text may still be ahead."""
        return not self._open.is_open or self._open.mailbox.finished

    def cancel(self) -> None:
        """Ask for the end; the iteration ends soon after."""
        self._open.cancel()

    def close(self) -> None:
        """End the request if it still runs, and forget it; safe to call again."""
        self._open.abandon()

    def __del__(self) -> None:
        # Not built fully, or the interpreter is going down: then nothing is left to end.
        with contextlib.suppress(Exception):
            self.close()

    @property
    def completion(self) -> Completion:
        """The result; raises EngineError unless the request ran to its end."""
        if self._completion is None:
            state = "still runs" if self._open.is_open else "was left before its end"
            raise EngineError(f"the request {state}: iterate over all of its text first")
        return self._completion

    def wait(self) -> Completion:
        """Run to the end without looking at each token."""
        if self._open.is_open and not self._stops.has_stops:
            self._open.wait_finished()
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
