"""What must hold of a scenario's figures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polyneuron.scenarios.script_table import ScriptTable, near_match

FIGURES = (
    "decode_tok_s", "prefill_tok_s", "ttft_ms", "token_ms_mean", "token_ms_p50", "token_ms_p90",
    "token_ms_p99", "hit_rate", "miss_rate", "miss_rate_p99", "io_share", "bytes_per_token",
    "reads_per_token", "peak_memory_bytes", "tokens", "requests_finished", "requests_failed",
    "restarts", "tokens_equal", "recording_rounds",
)  # fmt: skip
"""Every figure a player may report; what it could not measure it leaves out."""
BOUNDS = ("min", "max", "equals", "near")
EXPECT_KEYS = ("figure", "over", *BOUNDS, "within", "name", "source", "player")
AT = "@"
"""Between a figure and the sweep point it is of: decode_tok_s@7GiB."""


class Player(StrEnum):
    """What can play a scenario."""

    SIMULATE = "simulate"
    """In model time, by cost models."""
    REPLAY = "replay"
    """On the real actors, in wall time."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Bounds of one figure, or of its ratio to another."""

    figure: str
    """Of a sweep: every point's, unless it names one after an @."""
    over: str | None = None
    """The bounds are of figure / over."""
    min: float | None = None
    max: float | None = None
    equals: float | None = None
    near: float | None = None
    within: float = 0.0
    """`near`: how far off it may be, as a share of it."""
    name: str = ""
    source: str = ""
    player: Player | None = None
    """None: both."""

    @classmethod
    def from_table(cls, table: ScriptTable) -> Expectation:
        """An `[[expect]]` table."""
        table.only(EXPECT_KEYS)
        _check_figure(table, "figure")
        if table.has("over"):
            _check_figure(table, "over")
        given = {key: table.number(key, None, -1e300) for key in BOUNDS if table.has(key)}
        if not given:
            table.refuse("figure", f"nothing is expected of it; give one of {', '.join(BOUNDS)}")
        if ("near" in given) != table.has("within"):
            table.refuse("within", "near and within go together: near = 9.96, within = 0.15")
        if given.get("min", -1e300) > given.get("max", 1e300):
            table.refuse("min", "is above max: nothing could meet both")
        figure = table.text("figure")
        return cls(
            figure=figure,
            over=table.text("over") if table.has("over") else None,
            min=given.get("min"),
            max=given.get("max"),
            equals=given.get("equals"),
            near=given.get("near"),
            within=table.number("within", 0.0, 0.0, 10.0),
            name=table.text("name", figure),
            source=table.text("source", ""),
            player=table.choice("player", Player) if table.has("player") else None,
        )


def _check_figure(table: ScriptTable, key: str) -> None:
    figure = table.text(key).partition(AT)[0]
    if figure not in FIGURES:
        table.refuse(key, f"is {figure!r}; {near_match(figure, FIGURES)}")
