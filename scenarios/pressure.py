"""Events of a script as a simulated run meets them: what is in force, and until when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polyneuron.scenarios.disturbance import Deed, Disturbance
from polyneuron.scenarios.step_costs import Conditions
from polyneuron.scenarios.workload import Moment


@dataclass(frozen=True, slots=True)
class Lasting:
    """An event in force."""

    event: Disturbance
    until_ns: int | None
    until_token: int | None

    def is_over(self, now_ns: int, tokens: int) -> bool:
        """Whether its time is over."""
        return (self.until_ns is not None and now_ns >= self.until_ns) or (
            self.until_token is not None and tokens >= self.until_token
        )


class Pressure:
    """Events that wait, and those in force."""

    def __init__(self, events: Sequence[Disturbance]) -> None:
        self._waiting = list(events)
        self._lasting: list[Lasting] = []

    def due(self, now_ns: int, tokens: int) -> list[Disturbance]:
        """Events whose moment has come, once, in the script's order."""
        found = [event for event in self._waiting if is_due(event.moment, now_ns, tokens)]
        self._waiting = [event for event in self._waiting if event not in found]
        for event in found:
            if event.deed in (Deed.SLOW_FLASH, Deed.STALL_FLASH, Deed.THROTTLE):
                until_ns = None if event.for_ns is None else now_ns + event.for_ns
                until_token = None if event.for_tokens is None else tokens + event.for_tokens
                self._lasting.append(Lasting(event, until_ns, until_token))
        return found

    def conditions(self, before: Conditions, now_ns: int, tokens: int) -> Conditions:
        """What is in force now; of several of a kind, the product."""
        self._lasting = [one for one in self._lasting if not one.is_over(now_ns, tokens)]
        now = replace(before, cpu=1.0, flash=1.0, stall_ns=0, stall_every=0)
        for one in self._lasting:
            event = one.event
            if event.deed is Deed.SLOW_FLASH:
                now = replace(now, flash=now.flash * event.factor)
            elif event.deed is Deed.THROTTLE:
                now = replace(now, cpu=now.cpu * event.cpu)
            else:
                now = replace(now, stall_ns=event.stall_ns, stall_every=event.every)
        return now


def is_due(moment: Moment, now_ns: int, tokens: int) -> bool:
    """Whether a moment has come."""
    if moment.at_token is not None:
        return tokens >= moment.at_token
    return now_ns >= (moment.at_ns or 0)
