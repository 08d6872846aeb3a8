"""Which way a file of bundles is opened, and a reader in a process of its own."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ConfigError
from polyneuron.io.block_device import Backend
from polyneuron.io.file_device import FileDevice
from polyneuron.io.neuron_reader import NeuronReader, can_read_directly, open_neuron_device
from tests.support.neuron_ring import (
    NeuronRing,
    RingShape,
    RunningReader,
    fresh_ring,
    run_steps,
    write_bundles,
)

SHAPE = RingShape()
READER = """
import mmap, sys
from pathlib import Path
import numpy as np
from polyneuron.io.neuron_reader import NeuronReader, open_neuron_device
from polyneuron.kernels.arena import Arena
arena = Arena.over(np.frombuffer(mmap.mmap(int(sys.argv[1]), 0), np.uint8))
with open_neuron_device(Path(sys.argv[2]), arena, int(sys.argv[3])) as device:
    sys.exit(NeuronReader(device, arena, int(sys.argv[3])).run())
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("neurons") / "bundles.bin"
    write_bundles(path, SHAPE)
    return path


@pytest.fixture(scope="module")
def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.fixture
def ring() -> NeuronRing:
    return fresh_ring(SHAPE)


class TestDevice:
    def test_direct_where_sectors_fit(self, ring: NeuronRing, path: Path) -> None:
        with closing(FileDevice(path)) as device:
            expected = device.info().is_direct and device.info().offset_alignment <= 512
        with open_neuron_device(path, ring.arena, ring.ring) as device:
            assert device.info().is_direct == expected

    @pytest.mark.parametrize(
        ("alignments", "fits"), [((512, 512), True), ((4096, 512), False), ((512, 4096), False)]
    )
    def test_alignment_is_asked_of_every_place(
        self, path: Path, alignments: tuple[int, int], fits: bool
    ) -> None:
        ring = fresh_ring(RingShape(bundle_bytes=8704, read_begin=0, read_bytes=1024))
        offset, memory = alignments
        with closing(FileDevice(path)) as device:
            info = replace(device.info(), offset_alignment=offset, memory_alignment=memory)
        assert can_read_directly(info, ring.arena, ring.ring) == fits

    def test_larger_sectors_are_read_through_the_page_cache(
        self, ring: NeuronRing, path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = "polyneuron.io.neuron_reader.can_read_directly"
        monkeypatch.setattr(module, lambda info, *place: not info.is_direct)
        with open_neuron_device(path, ring.arena, ring.ring) as device:
            assert not device.info().is_direct
            reader = RunningReader(NeuronReader(device, ring.arena, ring.ring), ring)
            run_steps(ring, content, 1, 5)
            reader.stop()

    def test_slots_are_kept_mapped(self, ring: NeuronRing, path: Path, content: bytes) -> None:
        slots = ring.shape.num_slots
        with open_neuron_device(path, ring.arena, ring.ring, registered_slots=slots) as device:
            info = device.info()
            kept = slots * ring.shape.read_bytes
            assert info.registered_bytes == (kept if info.backend is Backend.URING else 0)
            reader = RunningReader(NeuronReader(device, ring.arena, ring.ring), ring)
            run_steps(ring, content, 2, 10)
            reader.stop()

    def test_bundles_off_sectors_are_refused(self, path: Path) -> None:
        ring = fresh_ring(RingShape(bundle_bytes=1500))
        with (
            pytest.raises(
                ConfigError, match=r"bundles\.bin: bundles do not lie at multiples of 512"
            ),
            open_neuron_device(path, ring.arena, ring.ring),
        ):
            pass

    def test_reader_in_another_process(self, path: Path, content: bytes) -> None:
        """The ring, the cache and the slots are all there is between them."""
        shape = NeuronRing(SHAPE)
        descriptor = os.memfd_create("ring")
        os.ftruncate(descriptor, shape.num_bytes)
        with mmap.mmap(descriptor, 0) as shared:
            memory = np.frombuffer(shared, np.uint8)
            ring = NeuronRing(SHAPE, memory)
            ring.format()
            command = [sys.executable, "-c", READER, str(descriptor), str(path), str(ring.ring)]
            with subprocess.Popen(command, pass_fds=[descriptor]) as reader:
                run_steps(ring, content, 4, 20)
                ring.stop()
                assert reader.wait(30) == 0
            assert ring.reads.ended == ring.reads.pushed > 0
            del ring, memory
        os.close(descriptor)
