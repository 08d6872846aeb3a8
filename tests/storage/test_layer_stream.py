"""Layers that pass through stage buffers: the same bits as resident ones, whatever the timing."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import numpy as np
import pytest

from polyneuron.clock import MonotonicClock
from polyneuron.errors import ChecksumError, DeviceError
from polyneuron.io.block_device import BlockDevice
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind, LatencyDevice
from polyneuron.io.file_device import open_device
from polyneuron.io.layer_reader import LayerReader
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.section_reader import SectionRead, read_sections
from polyneuron.model.convert import convert
from tests.support.families import FAMILY_CASES, gguf_path
from tests.support.local_engine import LocalEngine

PROMPT = [3, 14, 15, 92, 65, 35, 89]
NUM_TOKENS = 6
CASES = ("llama_tied", "qwen2", "bamboo", "llama_relu_no_gate", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A converted file of each case."""
    folder = tmp_path_factory.mktemp("ncf")
    paths = {case: folder / f"{case}.ncf" for case in CASES}
    for case, path in paths.items():
        convert(Path(gguf_path(case)), path, layout=Layout.TILES)
    return paths


def logits_of(path: Path, **settings: object) -> list[bytes]:
    """Logits of every generated token, as bytes."""
    with LocalEngine(path, **settings) as engine:
        first = engine.generate(PROMPT, NUM_TOKENS)
        second = engine.generate(PROMPT[::-1], 2)
        return [row.tobytes() for row in (*first.logits, *second.logits)]


class TestStreamedEqualsResident:
    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("share", [0.0, 0.5, 0.75])
    def test_any_residency(self, files: dict[str, Path], case: str, share: float) -> None:
        assert logits_of(files[case], ffn_resident=share) == logits_of(Path(gguf_path(case)))

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    def test_any_worker_count(self, files: dict[str, Path], num_workers: int) -> None:
        path = files["llama_tied"]
        streamed = logits_of(path, ffn_resident=0.0, num_workers=num_workers, num_npu_threads=0)
        assert streamed == logits_of(path)

    @pytest.mark.parametrize("max_tokens", [1, 3])
    def test_prompt_in_chunks(self, files: dict[str, Path], max_tokens: int) -> None:
        path = files["llama_tied"]
        assert logits_of(path, ffn_resident=0.0, max_tokens=max_tokens) == logits_of(path)

    def test_late_and_unordered_reads(self, files: dict[str, Path]) -> None:
        chance = random.Random(5)

        def late(device: BlockDevice) -> BlockDevice:
            choices = (0, 2_000_000, 10_000_000)
            return LatencyDevice(device, MonotonicClock(), lambda _: chance.choice(choices))

        path = files["bamboo"]
        assert logits_of(path, ffn_resident=0.25, wrap=late) == logits_of(path)


class TestReads:
    def test_sections_land_as_they_are_stored(self, files: dict[str, Path]) -> None:
        path = files["llama_tied"]
        with LocalEngine(path) as engine:
            stored = path.read_bytes()
            for place in engine.layout.resident:
                section = place.section
                landed = bytes(engine.arena.bytes_at(place.offset, section.num_bytes))
                assert landed == stored[section.offset : section.offset + section.num_bytes]

    def test_damaged_section_is_refused(self, files: dict[str, Path], tmp_path: Path) -> None:
        damaged = bytearray(files["llama_tied"].read_bytes())
        section = read_ncf(files["llama_tied"]).sections[1]
        damaged[section.offset + 100] ^= 1
        path = tmp_path / "damaged.ncf"
        path.write_bytes(damaged)
        with pytest.raises(ChecksumError, match="damaged"):
            LocalEngine(path)

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    @pytest.mark.parametrize("nth", [1, 2, 5])
    def test_failing_reads_are_tried_again(
        self, files: dict[str, Path], kind: FaultKind, nth: int
    ) -> None:
        path = files["qwen2"]
        streamed = logits_of(
            path, ffn_resident=0.0, wrap=lambda device: FaultDevice(device, Fault(kind, nth))
        )
        assert streamed == logits_of(path)

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ, FaultKind.TORN])
    def test_lasting_fault_of_a_resident_section_is_named(
        self, files: dict[str, Path], kind: FaultKind
    ) -> None:
        path = files["qwen2"]
        with LocalEngine(path) as engine, open_device(path) as device:
            place = engine.layout.resident[1]
            broken = FaultDevice(device, Fault(kind, 1, is_persistent=True))
            reads = [SectionRead(place.section, place.offset)]
            with pytest.raises((DeviceError, ChecksumError), match=path.name):
                read_sections(broken, reads, engine.arena, lambda _: None)

    def test_lasting_fault_of_a_streamed_layer_is_told(self, files: dict[str, Path]) -> None:
        path = files["qwen2"]
        with LocalEngine(path, ffn_resident=0.0) as engine, open_device(path) as device:
            offset = engine.layout.at("boards.stream")
            sections = [place.section for place in engine.layout.streamed]
            broken = FaultDevice(device, Fault(FaultKind.EIO, 1, is_persistent=True))
            state = engine.arena.layer_stream(offset)
            reader = LayerReader(broken, engine.arena, offset, [sections])
            state.consumed = state.landed  # a buffer is free
            reader.run()
            assert state.error == errno.EIO

    def test_families_have_layers_to_stream(self) -> None:
        assert all(FAMILY_CASES[case].spec().num_layers >= 2 for case in CASES)
        assert np.unique(PROMPT).size == len(PROMPT)
