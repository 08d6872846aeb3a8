"""Layers that pass through stage buffers: the same bits as resident ones, whatever the timing."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ChecksumError, DeviceError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.section_reader import SectionRead, SectionReader, read_sections
from polyneuron.model.convert import convert
from tests.support.families import FAMILY_CASES, gguf_path
from tests.support.local_engine import LocalEngine

PROMPT = [3, 14, 15, 92, 65, 35, 89]
NUM_TOKENS = 6
CASES = ("llama_tied", "qwen2", "bamboo", "llama_relu_no_gate")


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

    def test_late_and_unordered_reads(
        self, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wait, chance = threading.Event(), random.Random(5)
        fill = SectionReader._fill

        def late(self: SectionReader, view: memoryview, position: int) -> None:
            wait.wait(chance.choice((0.0, 0.002, 0.01)))
            fill(self, view, position)

        expected = logits_of(files["bamboo"])
        monkeypatch.setattr(SectionReader, "_fill", late)
        assert logits_of(files["bamboo"], ffn_resident=0.25) == expected


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

    def test_short_reads_are_continued(
        self, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = os.preadv

        def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            half = max(4096, len(buffers[0]) // 2 // 4096 * 4096)
            return whole(fd, [buffers[0][:half]], offset)

        expected = logits_of(files["qwen2"])
        monkeypatch.setattr(os, "preadv", short)
        assert logits_of(files["qwen2"], ffn_resident=0.0) == expected

    @pytest.mark.parametrize("num_failures", [1, 2])
    def test_failing_reads_are_tried_again(
        self, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, num_failures: int
    ) -> None:
        failures = iter(range(num_failures))
        fill = SectionReader._fill

        def flaky(self: SectionReader, view: memoryview, position: int) -> None:
            if next(failures, None) is not None:
                raise OSError(5, "Input/output error")
            fill(self, view, position)

        expected = logits_of(files["qwen2"])
        monkeypatch.setattr(SectionReader, "_fill", flaky)
        assert logits_of(files["qwen2"], ffn_resident=0.0) == expected

    def test_lasting_failure_names_file_and_place(
        self, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(self: SectionReader, view: memoryview, position: int) -> None:
            raise OSError(5, "Input/output error")

        path = files["qwen2"]
        with LocalEngine(path) as engine:
            section = engine.layout.resident[1].section
            monkeypatch.setattr(SectionReader, "_fill", broken)
            reads = [SectionRead(section, engine.layout.resident[1].offset)]
            with pytest.raises(DeviceError, match=f"{path.name}.*{section.offset}"):
                read_sections(path, reads, engine.arena, lambda _: None)

    def test_families_have_layers_to_stream(self) -> None:
        assert all(FAMILY_CASES[case].spec().num_layers >= 2 for case in CASES)
        assert np.unique(PROMPT).size == len(PROMPT)
