"""How a scenario makes the flash behave: slow, stalling now and then, or failing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from polyneuron.clock import Clock
from polyneuron.io.block_device import BlockDevice, ReadRequest
from polyneuron.io.device_wrappers import Fault, FaultDevice, SlowDevice


@dataclass(frozen=True, slots=True)
class DeviceFaults:
    """What is wrong with a device; nothing by default."""

    slow_factor: float = 1.0
    """Every read takes so many times as long."""
    stall_ns: int = 0
    stall_every: int = 1
    """One read in so many takes at least `stall_ns`."""
    fault: Fault | None = None
    """Reads that fail; counted from each start of a reader."""

    def wrap(self, device: BlockDevice, clock: Clock) -> BlockDevice:
        """The device with all that is wrong with it; itself when nothing is."""
        if self.fault is not None:
            device = FaultDevice(device, self.fault)
        if self.slow_factor > 1.0 or self.stall_ns:
            device = SlowDevice(device, clock, self.slow_factor, self._latency())
        return device

    def lasting(self) -> DeviceFaults:
        """What is still wrong for a reader that begins after this one ended."""
        is_lasting = self.fault is not None and self.fault.is_persistent
        return self if is_lasting else replace(self, fault=None)

    def _latency(self) -> Callable[[ReadRequest], int]:
        numbers = count(1)
        return lambda _: 0 if next(numbers) % self.stall_every else self.stall_ns
