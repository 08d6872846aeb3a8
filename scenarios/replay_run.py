"""Runs a scenario's requests on an open engine, and its events as their moments come."""

from __future__ import annotations

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
CHECK_NS = 100_000_000
"""How often the engine is asked whether it is alive: that costs a third of a millisecond, which a
machine whose cores all compute would lose to it at every look."""
SETTLE_NS = 20_000_000_000
LOSS_TOKENS = 4
"""A process is lost within so many tokens of the moment, while they are computed."""


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
    _next_check_ns: int = 0
    _events: list[Disturbance] = field(default_factory=list)
    """Those that have not begun."""
    _lasting: list[tuple[Moment, Disturbance]] = field(default_factory=list)
    """When what has begun ends."""
    _waiting: list[tuple[int, Request]] = field(default_factory=list)
    """Requests that have not come, by their numbers."""

    def run(self) -> None:
        """Play everything to its end; whatever still runs when this raises is cancelled."""
        self._start_ns = self.clock.now_ns()
        injector = Injector(self.engine)
        self._events = list(self.script.events) if self.disturbed else []
        self._waiting = list(enumerate(self.script.requests))
        try:
            while self._waiting or not self._all_ended():
                self._check_alive()
                self._play_due(injector)
                self.clock.wait_ns(POLL_NS)
            self._settle(injector)
            self.restarts = injector.restarts
            self.peak_bytes = self.engine.memory().total_bytes
        finally:
            self._abandon()
            injector.hold_at(None)

    def _check_alive(self) -> None:
        """Raise EngineError when the engine has been lost, looked at now and then."""
        now_ns = self.clock.now_ns()
        if now_ns >= self._next_check_ns:
            self._next_check_ns = now_ns + CHECK_NS
            self.engine.check_alive()

    def _settle(self, injector: Injector) -> None:
        """Wait for the successors of lost processes: who held no work is missed a little later."""
        end_ns = self.clock.now_ns() + SETTLE_NS
        while not injector.are_replaced and self.clock.now_ns() < end_ns:
            self.clock.wait_ns(POLL_NS)

    def _play_due(self, injector: Injector) -> None:
        """Whatever is due; the engine takes no step beyond the next moment that counts tokens."""
        for moment, event in [end for end in self._lasting if self._is_due(end[0])]:
            self._lasting.remove((moment, event))
            injector.end(event)
        due = [event for event in self._events if self._is_due(event.moment)]
        for event in due:
            self._events.remove(event)
            if not event.is_loss:
                self._begin(injector, event)
        for index, request in self._arrivals():
            self._waiting.remove((index, request))
            self._submit(index, request)
        losses = [event for event in due if event.is_loss]
        if losses:  # they come while steps run
            injector.hold_at(self.num_tokens + LOSS_TOKENS)
        for event in losses:
            self._begin(injector, event)
        injector.hold_at(self._next_token_moment())

    def _begin(self, injector: Injector, event: Disturbance) -> None:
        injector.begin(event)
        self._lasting += self._ends_of(event)

    def _next_token_moment(self) -> int | None:
        """The next count of tokens at which something is to happen."""
        moments = [
            *(event.moment for event in self._events),
            *(request.moment for _, request in self._waiting),
            *(moment for moment, _ in self._lasting),
        ]
        return min((m.at_token for m in moments if m.at_token is not None), default=None)

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

    def _arrivals(self) -> list[tuple[int, Request]]:
        """Requests whose moment has come; the next one in any case when no token would come."""
        waiting = self._waiting
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
