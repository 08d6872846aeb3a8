"""A reader asks for its turn without changing what else is known of its thread."""

import os
import threading

from polyneuron.kernels.arena import prefer_short_slices


def test_a_thread_stays_as_nice_as_it_was() -> None:
    found: list[tuple[int, int]] = []

    def reader() -> None:
        os.setpriority(os.PRIO_PROCESS, 0, 3)
        prefer_short_slices(100_000)
        found.append((os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)))

    thread = threading.Thread(target=reader)
    thread.start()
    thread.join()
    assert found == [(3, os.SCHED_OTHER)]
