"""A change between two steps: made once, by the loop, and its failure is of who asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from polyneuron.actors.pending_change import PendingChange
from polyneuron.errors import EngineError

JOIN_S = 10.0


@pytest.fixture
def changed() -> threading.Condition:
    return threading.Condition()


@pytest.fixture
def pending(changed: threading.Condition) -> PendingChange:
    return PendingChange(changed)


@contextmanager
def loop(pending: PendingChange, changed: threading.Condition) -> Iterator[None]:
    """What the coordinator does when nothing is to be computed; ends when told."""
    is_over = False

    def run() -> None:
        while True:
            pending.make()
            with changed:
                if is_over:
                    pending.give_up()
                    return
                if not pending.is_wanted:
                    changed.wait(JOIN_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        with changed:
            is_over = True
            changed.notify_all()
        thread.join(JOIN_S)
        assert not thread.is_alive()


def refuse() -> None:
    raise ValueError("no room")


class TestPendingChange:
    def test_loop_makes_each_once(
        self, pending: PendingChange, changed: threading.Condition
    ) -> None:
        made: list[tuple[int, threading.Thread]] = []

        def change(number: int) -> Callable[[], None]:
            return lambda: made.append((number, threading.current_thread()))

        with loop(pending, changed):
            for number in range(3):
                pending.ask(change(number), "all stays")
        assert [number for number, _ in made] == [0, 1, 2]
        assert all(thread is not threading.current_thread() for _, thread in made)
        assert not pending.is_wanted

    def test_failure_is_the_askers(
        self, pending: PendingChange, changed: threading.Condition
    ) -> None:
        with loop(pending, changed):
            with pytest.raises(EngineError, match="the size stays: no room"):
                pending.ask(refuse, "the size stays")
            pending.ask(lambda: None, "the size stays")  # the loop goes on, without the error

    def test_nothing_wanted_makes_nothing(self, pending: PendingChange) -> None:
        pending.make()
        assert not pending.is_wanted

    def test_ended_loop_lets_go(self, pending: PendingChange, changed: threading.Condition) -> None:
        asking = threading.Thread(target=pending.ask, args=(refuse, "all stays"))
        asking.start()
        with changed:
            changed.wait_for(lambda: pending.is_wanted, JOIN_S)
            pending.give_up()
        asking.join(JOIN_S)
        assert not asking.is_alive()
