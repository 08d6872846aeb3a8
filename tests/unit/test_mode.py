"""The mode: how it is asked for, and the line that tells it before the first token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.config import EngineConfig, FeedForwardMode
from polyneuron.core_use import CoreUse
from polyneuron.errors import ConfigError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.weight_reader import ReadReport
from polyneuron.mode import Mode
from polyneuron.planning.budget import fit
from polyneuron.planning.source import open_source
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

DEEP = TinyModel(family="bamboo", num_layers=24, d_ff=512, tensor_type="Q4_0")


def make_mode(folder: Path, ffn_resident: float) -> Mode:
    source = open_source(write_tiny_gguf(folder / "deep.gguf", DEEP), Layout.BUNDLES)
    config = EngineConfig(num_ctx=64, num_workers=2, num_npu_threads=0, max_tokens=8)
    config = replace(config, ffn_resident=ffn_resident)
    report = ReadReport(num_bytes=0, is_direct=True, lossy={})
    use = CoreUse(((4,), (5,)), (), (6,), "on cores 4-5, reader on core 6")
    return Mode(source, config, fit(source, config, 1 << 30, 0), report, "avx2", use)


class TestAskedFor:
    @pytest.mark.parametrize("mode", FeedForwardMode)
    def test_its_name_will_do(self, mode: FeedForwardMode) -> None:
        assert EngineConfig(mode=str(mode)).mode is mode  # type: ignore[arg-type]

    def test_other_names_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="mode is 'fast': must be one of auto, dense, exact"):
            EngineConfig(mode="fast")  # type: ignore[arg-type]


class TestLine:
    def test_neuron_cache_is_told(self, tmp_path: Path) -> None:
        mode = make_mode(tmp_path, 0.6)
        line = mode.line()
        assert line.startswith("mode: exact · gates of 24 of 24 layers in memory · neuron cache ")
        assert "· flash what a token misses ·" in line
        assert " · cpu 2 workers (on cores 4-5, reader on core 6), avx2 · " in line
        assert mode.as_dict()["cores"] == {"workers": [[4], [5]], "prefill": [], "reader": [6]}
        assert "warning" not in line
        assert mode.as_dict()["warnings"] == []

    def test_small_neuron_cache_is_warned_of(self, tmp_path: Path) -> None:
        mode = make_mode(tmp_path, 0.14)
        assert "of their neurons) · warning: less than one token uses ·" in mode.line()
        (warning,) = mode.as_dict()["warnings"]
        assert f"{mode.budget.cached_share:.1%} of its layers' neurons" in warning


class TestNpu:
    @pytest.mark.parametrize(
        ("npu", "threads", "told"),
        [
            ("native", 2, "npu=native(2t, modelled, prefill)"),
            ("native:graphs=4", 1, "npu=native:graphs=4(1t, modelled, prefill)"),
            ("openvino", 2, "npu=openvino:CPU(2t, f32, prefill)"),
            ("openvino:NPU", 1, "npu=openvino:NPU(1t, f16, prefill)"),
            ("none", 0, "npu=none"),
        ],
    )
    def test_line(self, tmp_path: Path, npu: str, threads: int, told: str) -> None:
        mode = make_mode(tmp_path, 0.6)
        mode = replace(mode, config=replace(mode.config, npu=npu, num_npu_threads=threads))
        assert f" · {told} · " in mode.line()
        found = mode.as_dict()["npu"]
        assert found["backend"] == npu.partition(":")[0]
        assert found["modelled"] == npu.startswith("native")
        assert found["threads"] == threads
