"""What a look at one thing of the machine gives: how it stands, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a thing stands."""

    OK = "ok"
    WARNING = "warning"
    """Everything works, slower or with less than the machine could give."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report."""

    name: str
    status: Status
    found: str
    cure: str = ""
    """What to do; where the status is OK, what would make it better still. Empty: nothing."""


def ok(name: str, found: str, cure: str = "") -> Check:
    """Nothing is wrong."""
    return Check(name, Status.OK, found, cure)


def warning(name: str, found: str, cure: str) -> Check:
    """It works, and could do better."""
    return Check(name, Status.WARNING, found, cure)


def problem(name: str, found: str, cure: str) -> Check:
    """It will not work."""
    return Check(name, Status.PROBLEM, found, cure)
