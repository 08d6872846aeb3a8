"""One answer in the making: its request at the coordinator, and its tokens as they become text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyneuron.actors.messages import RequestOutcome, SubmitRequest
from polyneuron.actors.sequence_run import Mailbox
from polyneuron.errors import EngineError
from polyneuron.model.stream import StopMatcher, StreamDecoder
from polyneuron.recording import tell_npu

if TYPE_CHECKING:
    from polyneuron.engine import Engine

WAIT_SLICE_NS = 500_000_000


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
            self._engine.cancel([self.request.request_id])

    def take_outcome(self) -> RequestOutcome:
        """The outcome of the ended request; raises EngineError with what made it fail."""
        self.is_open = False
        tell_npu(self._engine)
        return self._engine.take_outcome(self.request)

    def abandon(self) -> None:
        """End the request and forget it; nobody wants its outcome or its errors."""
        if self.is_open:
            with contextlib.suppress(EngineError):
                self.cancel()
            with contextlib.suppress(EngineError):
                self.take_outcome()


class Candidate:
    """One answer: take its text as it comes; after the last of it there is an outcome."""

    def __init__(self, engine: Engine, request: OpenRequest, stops: StopMatcher) -> None:
        self.open, self.stops = request, stops
        self._end_ids = request.request.end_ids
        self._decoder = StreamDecoder(engine.tokenizer)
        self._pieces: list[str] = []
        self.tokens: list[int] = []
        """Up to the end, or to the one that completed a stop string."""
        self._outcome: RequestOutcome | None = None

    def take(self) -> Iterator[str]:
        """Text of what has come since the last time, not waiting for more; ends at a stop string.

        Raises EngineError with what made the request fail.
        """
        finished = self.open.mailbox.finished
        for token_id in self.open.mailbox.tokens_from(len(self.tokens)):
            piece = self._take(token_id)
            if piece:
                yield piece
            if self.stops.matched is not None:
                self.open.cancel()
                finished = True
                break
        if finished:
            yield from self._finish()

    def _take(self, token_id: int) -> str:
        self.tokens.append(token_id)
        if token_id in self._end_ids:
            return ""
        piece = self.stops.push(self._decoder.push(token_id))
        self._pieces.append(piece)
        return piece

    def _finish(self) -> Iterator[str]:
        stopped = self.stops.matched is not None
        rest = "" if stopped else self.stops.push(self._decoder.flush()) + self.stops.flush()
        if rest:
            self._pieces.append(rest)
            yield rest
        self._outcome = self.open.take_outcome()

    def wait(self) -> None:
        """Wait for what is worth a look: with stop strings the next token, else the end."""
        if self.stops.has_stops:
            self.open.wait_more(len(self.tokens))
        else:
            self.open.wait_finished()

    @property
    def has_ended(self) -> bool:
        """Whether all of its text has been taken; not of one that was abandoned."""
        return self._outcome is not None

    @property
    def text(self) -> str:
        """What has become text so far."""
        return "".join(self._pieces)

    @property
    def outcome(self) -> RequestOutcome:
        """How it ended; there once all of its text has been taken."""
        assert self._outcome is not None
        return self._outcome

    @property
    def finish_reason(self) -> str:
        """stop, length or cancelled."""
        return "stop" if self.stops.matched is not None else self.outcome.finish_reason

    @property
    def mean_logprob(self) -> float | None:
        """Mean log-probability of its tokens, where that was asked for; None without tokens."""
        scores = self.outcome.scores[: len(self.tokens)]  # a stop string is seen a little late
        return sum(scores) / len(scores) if scores else None
