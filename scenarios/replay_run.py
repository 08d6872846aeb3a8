"""Runs a scenario's requests on an open engine, and its events as their moments come."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from polyneuron.actors.messages import RequestOutcome
from polyneuron.clock import Clock, MonotonicClock
from polyneuron.errors import EngineError
from polyneuron.model.sampling import SamplingParams
from polyneuron.scenarios.disturbance import Disturbance
from polyneuron.scenarios.injection import Injector
from polyneuron.scenarios.replay_model import random_prompt
from polyneuron.scenarios.script import Script
from polyneuron.scenarios.workload import Moment, Request

if TYPE_CHECKING:
    from polyneuron.candidate import OpenRequest
    from polyneuron.engine import Engine

POLL_NS = 1_000_000
"""How often moments and ends are looked for; a token of a small model takes about as long."""


@dataclass(slots=True)
class Answer:
    """One candidate: what it generated, and how it ended."""

    request: int
    open: OpenRequest
    begun_ns: int
    tokens: list[int] = field(default_factory=list)
    ended_ns: int = 0
    outcome: RequestOutcome | None = None
    error: str | None = None

    def look(self, now_ns: int) -> bool:
        """Take what has come; whether it has ended."""
        if self.ended_ns:
            return True
        has_ended = self.open.mailbox.finished
        self.tokens += self.open.mailbox.tokens_from(len(self.tokens))
        if has_ended:
            self.ended_ns = now_ns
            try:
                self.outcome = self.open.take_outcome()
            except EngineError as error:
                self.error = str(error)
        return has_ended


@dataclass(slots=True)
class ReplayRun:
    """One run of a script; `disturbed` False leaves its events out."""

    engine: Engine
    script: Script
    disturbed: bool = True
    clock: Clock = field(default_factory=MonotonicClock)
    answers: list[Answer] = field(default_factory=list)
    restarts: int = 0
    peak_bytes: int = 0
    _start_ns: int = 0

    def run(self) -> None:
        """Play everything to its end; whatever still runs when this raises is cancelled."""
        self._start_ns = self.clock.now_ns()
        injector = Injector(self.engine)
        events = list(self.script.events) if self.disturbed else []
        lasting: list[tuple[Moment, Disturbance]] = []
        waiting = list(enumerate(self.script.requests))
        try:
            while waiting or not self._all_ended():
                self.engine.check_alive()
                self._end_due(injector, lasting)
                for event in [event for event in events if self._is_due(event.moment)]:
                    events.remove(event)
                    injector.begin(event)
                    lasting += self._ends_of(event)
                for index, request in self._arrivals(waiting):
                    waiting.remove((index, request))
                    self._submit(index, request)
                self.clock.wait_ns(POLL_NS)
            self.restarts = injector.restarts
            self.peak_bytes = self.engine.memory().total_bytes
        finally:
            self._abandon()

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far by all."""
        return sum(len(answer.tokens) for answer in self.answers)

    def _all_ended(self) -> bool:
        now_ns = self.clock.now_ns()
        ended = [answer.look(now_ns) for answer in self.answers]  # all are looked at
        return all(ended)

    def _is_due(self, moment: Moment) -> bool:
        if moment.at_token is not None:
            return self.num_tokens >= moment.at_token
        return self.clock.now_ns() - self._start_ns >= (moment.at_ns or 0)

    def _arrivals(self, waiting: Sequence[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Requests whose moment has come; the next one in any case when no token would come."""
        due = [(index, request) for index, request in waiting if self._is_due(request.moment)]
        stuck = [(i, request) for i, request in waiting if request.moment.at_token is not None]
        if not due and len(stuck) == len(waiting) and self._all_ended():
            return stuck[:1]
        return due

    def _ends_of(self, event: Disturbance) -> list[tuple[Moment, Disturbance]]:
        if event.for_ns is not None:
            end_ns = self.clock.now_ns() - self._start_ns + event.for_ns
            return [(Moment(at_ns=end_ns), event)]
        if event.for_tokens is not None:
            return [(Moment(at_token=self.num_tokens + event.for_tokens), event)]
        return []

    def _end_due(self, injector: Injector, lasting: list[tuple[Moment, Disturbance]]) -> None:
        for end in [end for end in lasting if self._is_due(end[0])]:
            lasting.remove(end)
            injector.end(end[1])

    def _submit(self, index: int, request: Request) -> None:
        seed, engine = self.script.seed, self.engine
        prompt = random_prompt(seed, index, request.prompt_tokens, engine.spec.vocab_size)
        is_drawn = request.best_of > 1
        params = SamplingParams(temperature=1.0 if is_drawn else 0.0, seed=seed)
        fields: dict[str, Any] = {
            "prompt": engine.encode_prompt(prompt),
            "hash_logits": engine.config.deterministic,
            "score_answer": is_drawn,
        }
        candidates = [
            {**fields, "max_tokens": max_tokens, "sampling": asdict(drawn)}
            for max_tokens, drawn in zip(
                request.candidate_tokens(), params.for_candidates(request.best_of), strict=True
            )
        ]
        begun_ns = self.clock.now_ns()
        for opened in engine.submit(*candidates):
            self.answers.append(Answer(index, opened, begun_ns))

    def _abandon(self) -> None:
        for answer in self.answers:
            with suppress(EngineError):
                answer.open.abandon()
