"""A read goes wrong while weights are read: the right bytes or one clear error, never others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyneuron.actors.arena import LocalArena
from polyneuron.config import EngineConfig
from polyneuron.errors import DeviceError
from polyneuron.io import weight_reader
from polyneuron.io.block_device import BlockDevice
from polyneuron.io.device_wrappers import FaultKind
from polyneuron.io.file_device import open_device
from polyneuron.io.weight_reader import WeightRead, read_weights
from polyneuron.planning.layout import ArenaLayout, plan_layout
from polyneuron.planning.source import open_source
from tests.faults.fault_loop import Injector, for_every_fault
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

TOLD = (FaultKind.EIO, FaultKind.SHORT_READ)
"""Faults a device tells of; a torn read is for checksums to find, and a GGUF has none."""
SMALL = EngineConfig(num_ctx=32, num_workers=1, num_npu_threads=1, max_sequences=1)


class Model:
    """A small model and the arena its weights belong in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = open_source(path)
        self.layout: ArenaLayout = plan_layout(self.source.manifest, self.source.spec, SMALL)

    @contextmanager
    def empty_arena(self) -> Iterator[LocalArena]:
        local = LocalArena(self.layout)
        try:
            yield local
        finally:
            local.close()

    def read(self, device: BlockDevice, local: LocalArena) -> dict[str, bytes]:
        read_weights(device, self.reads(), local.arena, lambda _: None)
        return {
            read.tensor.name: bytes(local.arena.bytes_at(read.offset, read.num_bytes))
            for read in self.reads()
        }

    def reads(self) -> list[WeightRead]:
        return [r for r in self.source.reads(self.layout) if isinstance(r, WeightRead)]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(weight_reader, "READ_BYTES", 4096)  # several reads a matrix
    return Model(write_tiny_gguf(tmp_path / "tiny.gguf", TinyModel(num_layers=1)))


def test_told_faults_are_cured_or_named(model: Model) -> None:
    """Transient: cured by another read. Persistent: an error that names the file."""
    with open_device(model.path) as device, model.empty_arena() as local:
        expected = model.read(device, local)

    def body(injector: Injector) -> None:
        with open_device(model.path) as device, model.empty_arena() as local:
            faulty = injector.wrap(device)
            if injector.fault.is_persistent:
                try:
                    found = model.read(faulty, local)
                except DeviceError as error:
                    assert str(error).startswith(f"{model.path}: ")
                    assert injector.was_reached
                    found = expected
            else:
                found = model.read(faulty, local)
            assert found == expected
            assert device.info().num_outstanding == 0

    num_chunks = sum(
        -(-read.tensor.num_rows * read.tensor.row_bytes // 4096) for read in model.reads()
    )
    assert for_every_fault(body, TOLD) > num_chunks
