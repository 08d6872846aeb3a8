"""What a scenario does to an engine while it runs: pressure, faults and losses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from polyneuron.scenarios.expectation import Player
from polyneuron.scenarios.script_table import NS_PER_MS, ScriptTable
from polyneuron.scenarios.workload import MAX_TOKENS, Moment


class Deed(StrEnum):
    """What an event does."""

    SHRINK_MEMORY = "shrink_memory"
    GROW_MEMORY = "grow_memory"
    SLOW_FLASH = "slow_flash"
    STALL_FLASH = "stall_flash"
    FAIL_READ = "fail_read"
    STALL_NPU = "stall_npu"
    LOSE_NPU = "lose_npu"
    LOSE_WORKER = "lose_worker"
    LOSE_READER = "lose_reader"
    SHIFT_HOT_SET = "shift_hot_set"
    THROTTLE = "throttle"


class ReadFault(StrEnum):
    """How a read goes wrong."""

    EIO = "eio"
    SHORT = "short"


KEYS: dict[Deed, tuple[str, ...]] = {
    Deed.SHRINK_MEMORY: ("memory", "ffn_resident"),
    Deed.GROW_MEMORY: ("memory", "ffn_resident"),
    Deed.SLOW_FLASH: ("factor", "for_ms", "for_tokens"),
    Deed.STALL_FLASH: ("ms", "every", "for_ms", "for_tokens"),
    Deed.FAIL_READ: ("kind", "count", "persistent"),
    Deed.STALL_NPU: ("ms",),
    Deed.LOSE_NPU: (),
    Deed.LOSE_WORKER: ("worker",),
    Deed.LOSE_READER: (),
    Deed.SHIFT_HOT_SET: ("share",),
    Deed.THROTTLE: ("cpu", "for_ms", "for_tokens"),
}
"""Which keys each deed takes, beside `do`, `at_ms`, `at_token` and `player`."""

LOSSES = (Deed.LOSE_NPU, Deed.LOSE_WORKER, Deed.LOSE_READER)
SIMULATED_ONLY = (Deed.SHIFT_HOT_SET, Deed.THROTTLE)
"""What no switch of a real machine does: a change of topic, a hot processor."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One event; a field that its deed does not use has its neutral value."""

    moment: Moment
    deed: Deed
    memory_bytes: int = 0
    """Memory: the new budget; 0: `ffn_resident` is given."""
    ffn_resident: float | None = None
    factor: float = 1.0
    """Slow flash: reads take so many times as long."""
    for_ns: int | None = None
    """How long it lasts; None with `for_tokens` None: to the end."""
    for_tokens: int | None = None
    stall_ns: int = 0
    """Stalls: how long each lasts."""
    every: int = 1
    """Stalling flash: one read in so many stalls."""
    kind: ReadFault = ReadFault.EIO
    count: int = 1
    """Failing reads: how many, from the next one on."""
    persistent: bool = False
    """Failing reads: all from the next one on."""
    worker: int = 0
    share: float = 0.0
    """Hot-set shift: share of each layer's neurons that trade places in hotness."""
    cpu: float = 1.0
    """Throttle: cores run at this share of their speed."""
    player: Player | None = None
    """None: of both players."""

    @property
    def is_loss(self) -> bool:
        """Whether a process is lost."""
        return self.deed in LOSSES

    @classmethod
    def from_table(cls, table: ScriptTable) -> Disturbance:
        """An `[[events]]` table."""
        deed = table.choice("do", Deed)
        table.only(("do", "at_ms", "at_token", "player", *KEYS[deed]))
        if not (table.has("at_ms") or table.has("at_token")):
            table.refuse("at_token", "missing; give at_token or at_ms: when it happens")
        event = cls(
            moment=Moment.from_table(table),
            deed=deed,
            memory_bytes=table.size("memory"),
            ffn_resident=table.number("ffn_resident", 0, 0, 1)
            if table.has("ffn_resident")
            else None,
            factor=_needed(table, deed, Deed.SLOW_FLASH, "factor", 1.0, 1.0),
            for_ns=table.ns("for_ms", None) if table.has("for_ms") else None,
            for_tokens=table.whole("for_tokens", 1, 1, MAX_TOKENS)
            if table.has("for_tokens")
            else None,
            stall_ns=round(_stall_ms(table, deed) * NS_PER_MS),
            every=table.whole("every", 1, 1, 1 << 30),
            kind=table.choice("kind", ReadFault, ReadFault.EIO),
            count=table.whole("count", 1, 1, 1 << 30),
            persistent=table.flag("persistent", default=False),
            worker=table.whole("worker", 0, 0, 1023),
            share=_needed(table, deed, Deed.SHIFT_HOT_SET, "share", 0.0, 0.0, 1.0),
            cpu=_needed(table, deed, Deed.THROTTLE, "cpu", 1.0, 0.01, 1.0),
            player=table.choice("player", Player) if table.has("player") else None,
        )
        event.check(table)
        return event

    def check(self, table: ScriptTable) -> None:
        """Refuse keys that contradict each other."""
        is_memory = self.deed in (Deed.SHRINK_MEMORY, Deed.GROW_MEMORY)
        if is_memory and bool(self.memory_bytes) == (self.ffn_resident is not None):
            table.refuse("memory", "give either memory or ffn_resident")
        if self.for_ns is not None and self.for_tokens is not None:
            table.refuse("for_tokens", "for_ms is given too; leave one out")
        if self.persistent and table.has("count"):
            table.refuse("count", "persistent = true means all reads; leave one out")


def _needed(
    table: ScriptTable, deed: Deed, owner: Deed, key: str, neutral: float, low: float,
    high: float | None = None,
) -> float:  # fmt: skip
    """A number that one deed must have, and no other has."""
    return table.number(key, None, low, high) if deed is owner else neutral


def _stall_ms(table: ScriptTable, deed: Deed) -> float:
    stalls = deed in (Deed.STALL_FLASH, Deed.STALL_NPU)
    return table.number("ms", None) if stalls else 0.0
