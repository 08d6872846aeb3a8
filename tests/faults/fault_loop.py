"""Every fault at every read: nobody chooses where to inject.

Fault 1, then 2, then 3 … until a run in which none was reached; each kind once transient and once
persistent. What a run must come to is for the body to check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from polyneuron.io.block_device import BlockDevice
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind

MAX_READS = 2000
"""A body that reads more often is too long for this loop."""


@dataclass(slots=True)
class Injector:
    """Gives the body of the loop its faulty device."""

    fault: Fault
    _devices: list[FaultDevice] = field(default_factory=list)

    def wrap(self, device: BlockDevice) -> FaultDevice:
        """The device with the fault in it; once a run."""
        assert not self._devices
        self._devices.append(FaultDevice(device, self.fault))
        return self._devices[0]

    @property
    def was_reached(self) -> bool:
        """Whether the run came as far as the fault."""
        return self._devices[0].num_injected > 0


def for_every_fault(
    body: Callable[[Injector], None],
    kinds: Sequence[FaultKind] = tuple(FaultKind),
    modes: Sequence[str] = ("transient", "persistent"),
) -> int:
    """Run the body until no fault is left; returns how many were injected."""
    num_faults = 0
    for kind in kinds:
        for mode in modes:
            for nth in range(1, MAX_READS + 1):
                injector = Injector(Fault(kind, nth, mode == "persistent"))
                body(injector)
                if not injector.was_reached:
                    break
                num_faults += 1
            else:
                raise AssertionError(f"{kind}, {mode}: more than {MAX_READS} reads")
    return num_faults
