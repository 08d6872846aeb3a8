"""What a scenario asks of an engine: requests, each at a time or at a count of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyneuron.scenarios.script_table import ScriptTable

MAX_TOKENS = 1 << 20
MAX_CLIENTS = 1024
REQUEST_KEYS = (
    "at_ms", "at_token", "prompt_tokens", "output_tokens", "best_of", "ends_every", "count",
    "every_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Moment:
    """When something happens: one of the two is set."""

    at_ns: int | None = None
    """Since the start of the run."""
    at_token: int | None = None
    """As soon as all requests together have generated so many tokens."""

    @classmethod
    def from_table(cls, table: ScriptTable) -> Moment:
        """`at_ms` or `at_token`; neither is the start."""
        if table.has("at_ms") and table.has("at_token"):
            table.refuse("at_token", "at_ms is given too; leave one out")
        if table.has("at_token"):
            return cls(at_token=table.whole("at_token", None, 0, MAX_TOKENS))
        return cls(at_ns=table.ns("at_ms", 0))


@dataclass(frozen=True, slots=True)
class Request:
    """One client's request."""

    moment: Moment
    prompt_tokens: int
    output_tokens: int
    """Tokens it generates, whatever the model would say."""
    best_of: int = 1
    ends_every: int = 0
    """Best of N: the last candidate ends after so many tokens, the one before it after twice as
    many, and so on; the first runs to the end. 0: all do."""

    def candidate_tokens(self) -> tuple[int, ...]:
        """How many tokens each candidate generates; one number when it is no best-of."""
        if not self.ends_every:
            return (self.output_tokens,) * self.best_of
        ends = [self.ends_every * (self.best_of - i) for i in range(1, self.best_of)]
        return (self.output_tokens, *(min(end, self.output_tokens) for end in ends))

    @classmethod
    def from_table(cls, table: ScriptTable) -> list[Request]:
        """A `[[requests]]` table: one request for each of its clients."""
        table.only(REQUEST_KEYS)
        first = cls(
            Moment.from_table(table),
            table.whole("prompt_tokens", None, 1, MAX_TOKENS),
            table.whole("output_tokens", None, 1, MAX_TOKENS),
            table.whole("best_of", 1, 1, MAX_CLIENTS),
            table.whole("ends_every", 0, 0, MAX_TOKENS),
        )
        if first.ends_every and first.best_of == 1:
            table.refuse("ends_every", "only candidates end early: give best_of too")
        count, every_ns = table.whole("count", 1, 1, MAX_CLIENTS), table.ns("every_ms", 0)
        if every_ns and first.moment.at_ns is None:
            table.refuse("every_ms", "at_token has no time to count from: give at_ms")
        return [first.later(every_ns * index) for index in range(count)]

    def later(self, ns: int) -> Request:
        """The same request, so much later; one that waits for a token keeps its moment."""
        if self.moment.at_ns is None:
            return self
        return replace(self, moment=Moment(at_ns=self.moment.at_ns + ns))
