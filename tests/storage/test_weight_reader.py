"""Weights in the arena are the file's: whole tiles, chunk by chunk, nothing beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.actors.arena import LocalArena
from polyneuron.config import EngineConfig
from polyneuron.errors import DeviceError
from polyneuron.io import weight_reader
from polyneuron.io.arena_loader import read_all
from polyneuron.io.pack import pack_rows_into
from polyneuron.io.weight_reader import WeightRead
from polyneuron.planning.layout import ArenaLayout, plan_layout
from polyneuron.planning.source import open_source
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf

MODEL = TinyModel(family="qwen2", tensor_type="Q4_1", embedding_type="F16")
CONFIG = EngineConfig(num_ctx=32, num_workers=1, num_npu_threads=0, max_sequences=1)
FILL = 0xA5


class Reading:
    """A file's weights being read into an arena full of one byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        source = open_source(path)
        self.layout: ArenaLayout = plan_layout(source.manifest, source.spec, CONFIG)
        self.reads = [read for read in source.reads(self.layout) if isinstance(read, WeightRead)]
        self._local = LocalArena(self.layout)
        self.arena = self._local.arena
        self.bytes = self.arena.view(0, (self.layout.num_bytes,), np.uint8)
        self.bytes[:] = FILL
        self.progress: list[int] = []

    def read(self) -> weight_reader.ReadReport:
        return read_all(self.path, [*self.reads], self.arena, self.progress.append)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "m.gguf", MODEL)


@pytest.fixture
def reading(path: Path) -> Reading:
    return Reading(path)


class TestWeightReader:
    def test_vectors_are_the_files(self, reading: Reading) -> None:
        reading.read()
        weights = random_weights(MODEL)
        vectors = [read for read in reading.reads if read.storage is None]
        assert vectors
        for place in vectors:
            found = reading.arena.view(place.offset, (place.num_bytes // 4,), np.float32)
            expected = weights[place.tensor.name]
            np.testing.assert_array_equal(found[: len(expected)], expected)
            assert not found[len(expected) :].any()

    def test_matrices_are_packed_whole(self, reading: Reading) -> None:
        """The same bytes as a tensor packed in one go from the file's own."""
        reading.read()
        content = reading.path.read_bytes()
        for place in reading.reads:
            if place.storage is None:
                continue
            tensor = place.tensor
            raw = memoryview(content)[tensor.offset : tensor.offset + tensor.num_bytes]
            expected = bytearray(place.num_bytes)
            pack_rows_into(tensor, place.storage, raw, memoryview(expected))
            assert bytes(reading.bytes[place.offset : place.offset + place.num_bytes]) == bytes(
                expected
            )

    def test_chunks_change_nothing(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One tile at a time or everything at once."""
        whole, pieces = Reading(path), Reading(path)
        whole.read()
        monkeypatch.setattr(weight_reader, "READ_BYTES", 1)
        pieces.read()
        assert len(pieces.progress) > len(whole.progress)
        np.testing.assert_array_equal(pieces.bytes, whole.bytes)

    def test_nothing_beside_the_weights_is_touched(self, reading: Reading) -> None:
        reading.read()
        untouched = np.ones(len(reading.bytes), dtype=bool)
        for place in reading.reads:
            untouched[place.offset : place.offset + place.num_bytes] = False
        assert (reading.bytes[untouched] == FILL).all()

    def test_progress_grows_to_the_whole(self, reading: Reading) -> None:
        report = reading.read()
        total = sum(read.file_bytes for read in reading.reads)
        assert reading.progress == sorted(reading.progress)
        assert reading.progress[-1] == report.num_bytes == total

    def test_lossless_types_report_no_loss(self, reading: Reading) -> None:
        assert reading.read().lossy == {}

    def test_requantised_tensors_are_named(self, tmp_path: Path) -> None:
        model = replace(MODEL, d_model=256, head_dim=64, d_ff=256, tensor_type="Q6_K")
        reading = Reading(write_tiny_gguf(tmp_path / "m.gguf", model))
        lossy = reading.read().lossy
        tensors = [read.tensor for read in reading.reads]
        matrices = {tensor.name for tensor in tensors if tensor.type_id == 14}
        assert set(lossy) == matrices != set()

    @pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
    def test_cut_file_is_an_error(self, path: Path, share: float) -> None:
        """Cut off after its header was read: never a wrong weight, a line that names the place."""
        reading = Reading(path)
        last = max(read.tensor.offset + read.tensor.num_bytes for read in reading.reads)
        first = min(read.tensor.offset for read in reading.reads)
        cut = first + int((last - first) * share)
        with path.open("r+b") as file:
            file.truncate(cut)
        with pytest.raises(DeviceError, match=rf"m\.gguf: ends at byte {cut}, \d+ bytes"):
            reading.read()
