"""Reads of missed neurons: every one lands right, whoever reads, and failures are told."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from polyneuron.clock import MonotonicClock
from polyneuron.io.block_device import MAX_ATTEMPTS, Backend, BlockDevice
from polyneuron.io.device_wrappers import (
    CountingDevice,
    Fault,
    FaultDevice,
    FaultKind,
    LatencyDevice,
)
from polyneuron.io.file_device import DeviceOptions, FileDevice
from polyneuron.io.neuron_reader import NeuronReader, open_neuron_device
from polyneuron.kernels.arena import NeuronRead
from polyneuron.kernels.neuron_cache import NeuronState
from tests.support.neuron_ring import (
    NO_LAYER_OFFSET,
    WAIT_NS,
    NeuronRing,
    RingShape,
    RunningReader,
    check_landed,
    fresh_ring,
    run_steps,
    write_bundles,
)

SHAPE = RingShape()
OPTIONS = DeviceOptions(8, 16)

Wrap = Callable[[FileDevice], BlockDevice]


def late(device: FileDevice) -> BlockDevice:
    """Reads end in any order, up to 3 ms late."""
    chance = random.Random(5)
    return LatencyDevice(device, MonotonicClock(), lambda _: chance.choice((0, 300_000, 3_000_000)))


WRAPS: dict[str, Wrap] = {"c": lambda device: device, "counting": CountingDevice, "late": late}


@pytest.fixture(params=sorted(WRAPS))
def wrap(request: pytest.FixtureRequest) -> Wrap:
    return WRAPS[request.param]


@pytest.fixture(scope="module")
def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("neurons") / "bundles.bin"
    write_bundles(path, SHAPE)
    return path


@pytest.fixture
def ring() -> NeuronRing:
    return fresh_ring(SHAPE)


@contextmanager
def reading(
    ring: NeuronRing, path: Path, wrap: Wrap, options: DeviceOptions = OPTIONS
) -> Iterator[RunningReader]:
    """A reader at work, stopped at the end."""
    with open_neuron_device(path, ring.arena, ring.ring, options) as device:
        reader = RunningReader(NeuronReader(wrap(device), ring.arena, ring.ring), ring)
        try:
            yield reader
        finally:
            reader.stop()


class TestReader:
    @pytest.mark.parametrize("seed", range(3))
    def test_every_neuron_lands(
        self, ring: NeuronRing, path: Path, content: bytes, wrap: Wrap, seed: int
    ) -> None:
        with reading(ring, path, wrap) as reader:
            run_steps(ring, content, seed, 30)
        assert reader.result == 0
        assert ring.reads.error == 0
        assert ring.reads.pushed == ring.reads.taken == ring.reads.ended == ring.reads.reads
        assert ring.reads.bytes_read == ring.reads.reads * SHAPE.read_bytes
        assert ring.reads.latency_ns > 0

    @pytest.mark.parametrize("backend", [Backend.AUTO, Backend.POOL])
    @pytest.mark.parametrize("is_buffered", [False, True])
    @pytest.mark.parametrize("queue_depth", [1, 32])
    def test_any_way_to_read(
        self, ring: NeuronRing, path: Path, content: bytes, backend: Backend, is_buffered: bool,
        queue_depth: int,
    ) -> None:  # fmt: skip
        options = DeviceOptions(queue_depth, 64, backend, is_buffered)
        with reading(ring, path, WRAPS["c"], options):
            run_steps(ring, content, 7, 10)

    def test_orders_wait_for_no_batch(self, ring: NeuronRing, path: Path, content: bytes) -> None:
        """Executors order while reads are under way; nobody waits for the other's neurons."""
        with reading(ring, path, late):
            first, second = list(range(12)), list(range(50, 62))
            slots = ring.use(1, first) + ring.use(1, second)
            check_landed(ring, content, first + second, slots)

    def test_loops_in_c_and_python_are_equal(self, path: Path) -> None:
        chance = random.Random(3)
        neurons = chance.sample(range(SHAPE.num_neurons), SHAPE.num_slots)
        found = []
        for wrap in (WRAPS["c"], CountingDevice):
            ring = fresh_ring(SHAPE)
            slots = ring.use(1, neurons)
            with reading(ring, path, wrap):
                assert [ring.wait(neuron) for neuron in neurons] == [1] * len(neurons)
            counters = (ring.reads.reads, ring.reads.bytes_read, ring.reads.ended)
            found.append((slots, [ring.rows(slot) for slot in slots], counters))
        assert found[0] == found[1]

    def test_reads_go_out_as_ordered(self, ring: NeuronRing, path: Path) -> None:
        neurons = [7, 90, 41, 3, 119]
        for epoch, neuron in enumerate(neurons):
            ring.use(epoch, [neuron])
        with closing(FileDevice(path, OPTIONS)) as device:
            counting = CountingDevice(device)
            reader = RunningReader(NeuronReader(counting, ring.arena, ring.ring), ring)
            assert [ring.wait(neuron) for neuron in neurons] == [1] * 5
            reader.stop()
        assert counting.counts.offsets == [SHAPE.place(neuron).start for neuron in neurons]
        assert counting.counts.max_outstanding <= OPTIONS.queue_depth

    def test_stop_ends_reads_under_way(self, ring: NeuronRing, path: Path, wrap: Wrap) -> None:
        with open_neuron_device(path, ring.arena, ring.ring, OPTIONS) as device:
            ring.use(1, range(SHAPE.num_slots))
            reader = RunningReader(NeuronReader(wrap(device), ring.arena, ring.ring), ring)
            ring.wait(0)
            assert reader.stop() == 0
            assert device.info().num_outstanding == 0
        states = [ring.state(neuron) for neuron in range(SHAPE.num_slots)]
        assert ring.reads.taken == ring.reads.ended == states.count(NeuronState.RESIDENT)
        assert states.count(NeuronState.LOADING) == SHAPE.num_slots - ring.reads.taken

    def test_stopped_ring_gives_nothing(self, ring: NeuronRing, path: Path) -> None:
        ring.use(1, [1, 2])
        ring.stop()
        with closing(FileDevice(path, OPTIONS)) as device:
            assert NeuronReader(device, ring.arena, ring.ring).run() == 0
            assert NeuronReader(CountingDevice(device), ring.arena, ring.ring).run() == 0
        assert (ring.reads.taken, ring.reads.reads) == (0, 0)


class TestFailures:
    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    @pytest.mark.parametrize("nth", [1, 2, 17])
    def test_passing_fault_is_read_again(
        self, ring: NeuronRing, path: Path, content: bytes, kind: FaultKind, nth: int
    ) -> None:
        neurons = list(range(20))
        slots = ring.use(1, neurons)
        with reading(ring, path, lambda device: FaultDevice(device, Fault(kind, nth))):
            check_landed(ring, content, neurons, slots)
        assert (ring.reads.error, ring.reads.reads) == (0, 21)

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    def test_lasting_fault_is_told(
        self, ring: NeuronRing, path: Path, content: bytes, kind: FaultKind
    ) -> None:
        status = errno.EIO if kind is FaultKind.EIO else errno.ENODATA
        with closing(FileDevice(path, OPTIONS)) as device:
            broken = FaultDevice(device, Fault(kind, 1, is_persistent=True))
            ring.use(1, [70])
            assert NeuronReader(broken, ring.arena, ring.ring).run() == status
            assert broken.num_injected == MAX_ATTEMPTS
            assert ring.wait(70) == -1
            assert (ring.state(70), ring.reads.error) == (NeuronState.ABSENT, status)
            assert ring.reads.taken == ring.reads.ended == 1
        with reading(ring, path, WRAPS["c"]):
            check_landed(ring, content, [70, 71], ring.use(2, [70, 71]))

    def test_cut_file_fails_what_is_gone(self, tmp_path: Path) -> None:
        """The loop in C: neurons behind the new end fail, those before it land, and go on to."""
        path, ring = tmp_path / "cut.bin", fresh_ring(SHAPE)
        content = write_bundles(path, SHAPE)
        with open_neuron_device(path, ring.arena, ring.ring, OPTIONS) as device:
            os.truncate(path, SHAPE.place(0).start)  # layer 0 lies last
            gone, there = 5, [40, 41, 80, 119]
            slots = ring.use(1, [gone, *there])
            reader = RunningReader(NeuronReader(device, ring.arena, ring.ring), ring)
            assert ring.wait(gone) == -1
            assert ring.reads.error == errno.ENODATA
            assert reader.join() == errno.ENODATA
        # Its thread was the device's owner: a new one opens the file anew.
        with reading(ring, path, WRAPS["c"]) as reader:
            check_landed(ring, content, there, slots[1:])
            check_landed(ring, content, [42], ring.use(2, [42]))
        assert reader.result == 0
        assert ring.reads.reads == len(there) + 1 + MAX_ATTEMPTS

    @pytest.mark.parametrize("wrap", [WRAPS["c"], CountingDevice], ids=["c", "python"])
    def test_place_outside_the_file_fails(self, ring: NeuronRing, path: Path, wrap: Wrap) -> None:
        with closing(FileDevice(path, OPTIONS)) as device:
            reader = NeuronReader(wrap(device), ring.arena, ring.ring)
            ring.use(1, [0])
            ring.move_file(NO_LAYER_OFFSET)
            assert reader.run() == errno.EINVAL
            assert ring.state(0) == NeuronState.ABSENT
            ring.use(2, [50])
            ring.stop()
            assert reader.run() == 0
        assert ring.state(50) == NeuronState.LOADING  # stopped before it was taken

    @pytest.mark.parametrize("wrap", [WRAPS["c"], CountingDevice], ids=["c", "python"])
    def test_run_goes_on_after_failure(
        self, ring: NeuronRing, path: Path, content: bytes, wrap: Wrap
    ) -> None:
        ring.move_file(NO_LAYER_OFFSET)
        with closing(FileDevice(path, DeviceOptions(1, 1))) as device:
            results: list[int] = []

            def serve() -> None:
                reader = NeuronReader(wrap(device), ring.arena, ring.ring)
                while not results or results[-1]:
                    results.append(reader.run())

            neurons = [50, 0, 51, 1, 52]
            slots = [ring.use(epoch, [neuron])[0] for epoch, neuron in enumerate(neurons)]
            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            assert [ring.wait(neuron) for neuron in neurons] == [1, -1, 1, -1, 1]
            ring.stop()
            thread.join(30)
        assert results == [errno.EINVAL, errno.EINVAL, 0]
        check_landed(ring, content, neurons[::2], slots[::2])


class TestRing:
    def test_orders_come_in_order(self, ring: NeuronRing) -> None:
        neurons = [4, 31, 90, 2]
        slots = ring.use(1, neurons[:3]) + ring.use(2, neurons[3:])
        expected = [NeuronRead(n, s) for n, s in zip(neurons, slots, strict=True)]
        assert ring.pop(3) == expected[:3]
        assert ring.pop(3) == expected[3:]
        assert ring.pop(3) == []

    @pytest.mark.parametrize("start", [0, (1 << 32) - 10])
    def test_counts_wrap_around(self, start: int) -> None:
        """Places and counters go round; a ring of as many places as slots is never full."""
        ring = fresh_ring(RingShape(num_slots=8, capacity=8))
        for name in ("pushed", "taken", "ended"):
            setattr(ring.reads, name, start)
        for epoch in range(1, 10):
            neurons = [(epoch * 8 + index) % ring.shape.num_neurons for index in range(5)]
            slots = ring.use(epoch, neurons)
            orders = ring.pop(2) + ring.pop()
            assert orders == [NeuronRead(n, s) for n, s in zip(neurons, slots, strict=True)]
            for order in orders:
                ring.end(order.neuron)
            assert [ring.state(neuron) for neuron in neurons] == [NeuronState.RESIDENT] * 5
        assert ring.reads.pushed == ring.reads.ended == (start + 45) % (1 << 32)

    def test_sleeper_is_woken_by_an_order(self, ring: NeuronRing) -> None:
        found: list[NeuronRead] = []
        thread = threading.Thread(target=lambda: found.extend(ring.pop(4, 60 * 10**9)))
        thread.start()
        ring.use(1, [9])
        thread.join(30)
        assert [order.neuron for order in found] == [9]

    def test_sleeper_is_woken_by_the_stop(self, ring: NeuronRing) -> None:
        found: list[list[NeuronRead]] = []
        thread = threading.Thread(target=lambda: found.append(ring.pop(4, 60 * 10**9)))
        thread.start()
        ring.stop()
        thread.join(30)
        assert found == [[]]

    def test_many_executors_order_at_once(
        self, ring: NeuronRing, path: Path, content: bytes
    ) -> None:
        """Threads use neurons of their own, step by step, while one reader serves them all."""
        num_threads, num_steps = 4, 40
        barrier = threading.Barrier(num_threads, timeout=30)
        num_right = [0] * num_threads

        def execute(index: int) -> None:
            own = range(index, SHAPE.num_neurons, num_threads)
            for epoch in range(1, num_steps + 1):
                neurons = random.Random(epoch * num_threads + index).sample(own, 5)
                check_landed(ring, content, neurons, ring.use(epoch, neurons))
                num_right[index] += len(neurons)
                barrier.wait()

        with reading(ring, path, WRAPS["c"]):
            threads = [threading.Thread(target=execute, args=(i,)) for i in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert num_right == [5 * num_steps] * num_threads

    def test_new_reader_resumes(self, ring: NeuronRing, path: Path, content: bytes) -> None:
        """Orders that a lost reader had taken are performed, and those it had not, once each."""
        neurons = [3, 50, 100, 110]
        slots = ring.use(1, neurons)
        assert len(ring.pop(2)) == 2
        ring.end(neurons[0])
        with reading(ring, path, WRAPS["c"]):
            check_landed(ring, content, neurons[1:], slots[1:])
        assert ring.reads.pushed == ring.reads.taken == ring.reads.ended == 5
        assert ring.reads.reads == 3

    def test_healthy_ring_needs_no_resuming(self, ring: NeuronRing) -> None:
        ring.use(1, [9, 4])
        with ring.cache.locked(WAIT_NS):
            assert ring.arena.resume_neuron_reads(ring.ring) == 0
        assert [order.neuron for order in ring.pop()] == [4, 9]

    def test_reader_leaves_a_lock_that_is_never_free(self, ring: NeuronRing, path: Path) -> None:
        with closing(FileDevice(path)) as device, ring.cache.locked(WAIT_NS):
            assert RunningReader(NeuronReader(device, ring.arena, ring.ring), ring).stop() == 0
