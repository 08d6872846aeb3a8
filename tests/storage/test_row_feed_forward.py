"""Feed forward over bundles: exact equals dense, and streamed equals resident, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode, Phase
from polyneuron.errors import ChecksumError, ConfigError
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.kernels.quant import StorageType
from polyneuron.model.block import Residual
from polyneuron.model.convert import convert
from polyneuron.planning.bundles import RowsAre
from polyneuron.planning.source import open_source
from tests.support.families import NUM_TOKENS as NUM_GOLDEN
from tests.support.families import gguf_path, golden_path
from tests.support.local_engine import LocalEngine
from tests.support.one_result import (
    NUM_TOKENS,
    PROMPT,
    assert_together_as_alone,
    logits_of,
    logits_on,
    run,
)
from tests.support.sparse_models import drelu_model, late_reads, sparse_models
from tests.support.tiny_gguf import write_tiny_gguf

DRELU = drelu_model(5)
MODELS = sparse_models(5) | {
    "relu": replace(DRELU, family="llama", activation="relu", has_gate=False),
    "drelu_q4_down": DRELU,
    "falcon": replace(DRELU, family="falcon", num_kv_heads=1, activation="relu", has_gate=False),
    "falcon_two_norms": replace(
        DRELU, family="falcon", activation="relu", has_gate=False, residual=Residual.PARALLEL_NORMS
    ),
    "opt": replace(DRELU, family="opt", num_kv_heads=4, output_bias=True),
}
DOWN = {"drelu_q4_down": StorageType.Q4}
SHARES = (0.0, 0.1, 0.4, 0.8, 1.0)
FLOAT_BOUND = 1.5e-3  # of the largest logit: what the KV cache's float16 rounds, and float32 sums
DENSE, EXACT = FeedForwardMode.DENSE, FeedForwardMode.EXACT


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file in bundles of each model."""
    folder = tmp_path_factory.mktemp("bundles")
    paths = {name: folder / f"{name}.ncf" for name in MODELS}
    for name, path in paths.items():
        source = write_tiny_gguf(folder / f"{name}.gguf", MODELS[name])
        convert(source, path, layout=Layout.BUNDLES, down=DOWN.get(name))
    return paths


@pytest.fixture(scope="module")
def resident(files: dict[str, Path]) -> dict[str, list[bytes]]:
    """What each model gives when everything is in memory and every neuron is computed."""
    return {name: logits_of(path, mode=DENSE) for name, path in files.items()}


class TestOneResult:
    @pytest.mark.parametrize("name", MODELS)
    @pytest.mark.parametrize("mode", [DENSE, EXACT])
    @pytest.mark.parametrize("share", SHARES)
    def test_modes_and_residencies(
        self,
        files: dict[str, Path],
        resident: dict[str, list[bytes]],
        name: str,
        mode: FeedForwardMode,
        share: float,
    ) -> None:
        assert logits_of(files[name], mode=mode, ffn_resident=share) == resident[name]

    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    @pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
    def test_any_worker_count(
        self,
        files: dict[str, Path],
        resident: dict[str, list[bytes]],
        num_workers: int,
        share: float,
    ) -> None:
        got = logits_of(
            files["drelu"], ffn_resident=share, num_workers=num_workers, num_npu_threads=0
        )
        assert got == resident["drelu"]

    @pytest.mark.parametrize("max_tokens", [1, 2, 4])
    def test_prompt_in_chunks(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], max_tokens: int
    ) -> None:
        got = logits_of(files["drelu"], ffn_resident=0.4, max_tokens=max_tokens)
        assert got == resident["drelu"]

    @pytest.mark.parametrize("isa_name", ["scalar", "avx2"])
    def test_any_isa(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], isa_name: str
    ) -> None:
        got = logits_on(isa_name, files["drelu"], ffn_resident=0.4)
        assert got == resident["drelu"]

    @pytest.mark.parametrize("share", [0.1, 0.5])
    def test_late_and_unordered_reads(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], share: float
    ) -> None:
        assert logits_of(files["drelu"], ffn_resident=share, wrap=late_reads()) == resident["drelu"]

    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    def test_failing_reads_are_tried_again(
        self, files: dict[str, Path], resident: dict[str, list[bytes]], kind: FaultKind
    ) -> None:
        got = logits_of(
            files["drelu"],
            ffn_resident=0.5,
            wrap=lambda device: FaultDevice(device, Fault(kind, 3)),
        )
        assert got == resident["drelu"]

    def test_sequences_together_and_alone(self, files: dict[str, Path]) -> None:
        prompts = [PROMPT, PROMPT[::-1], PROMPT[2:6]]
        with LocalEngine(files["drelu"], ffn_resident=0.5, max_sequences=3) as engine:
            assert_together_as_alone(engine, prompts)

    @pytest.mark.parametrize("case", ["bamboo", "llama_reglu", "llama_relu_no_gate"])
    @pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
    def test_logits_equal_transformers(self, tmp_path: Path, case: str, share: float) -> None:
        """Prompts ended at several places, against goldens by another program."""
        path = tmp_path / f"{case}.ncf"
        convert(Path(gguf_path(case)), path, layout=Layout.BUNDLES)
        golden = np.load(golden_path(case))
        tokens, logits = golden["token_ids"].tolist(), golden["logits"]
        with LocalEngine(path, ffn_resident=share) as engine:
            for length in (1, 2, 31, NUM_GOLDEN):
                got = engine.generate(tokens[:length], 1).logits[0]
                bound = FLOAT_BOUND * np.abs(logits).max()
                np.testing.assert_allclose(got, logits[length - 1], atol=bound)


class TestWhatIsRead:
    def test_only_missing_neurons_in_decode(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["drelu"], ffn_resident=0.8) as engine:
            layers = engine.layout.bundles.layers if engine.layout.bundles else ()
            assert {layer.rows_are for layer in layers} == {RowsAre.CACHED}
            assert not engine.layout.loads(Phase.DECODE)
            run(engine)
            reads = engine.arena.neuron_reads(engine.layout.at("boards.reads"))
            counters = engine.cache().counters()
        assert reads.reads > 0
        assert counters.hits > 0
        assert counters.misses >= reads.reads

    def test_low_residency_streams_some_layers(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["drelu"], ffn_resident=0.25) as engine:
            bundles = engine.layout.bundles
            assert bundles is not None
            kinds = {layer.rows_are for layer in bundles.layers}
        assert kinds == {RowsAre.CACHED, RowsAre.STREAMED}

    def test_everything_in_memory_reads_nothing(self, files: dict[str, Path]) -> None:
        with LocalEngine(files["drelu"]) as engine:
            assert not engine.layout.is_streaming
            assert engine.layout.bundles is not None
            assert engine.budget.resident_ffn_fraction == 1.0

    def test_activity_is_counted(self, files: dict[str, Path]) -> None:
        counts = []
        for share in (1.0, 0.5):
            with LocalEngine(files["drelu"], ffn_resident=share) as engine:
                run(engine)
                counts.append(engine.activity())
        assert counts[0] == counts[1]
        for layer in counts[0]:
            assert layer.tokens == NUM_TOKENS + 3 - 2  # the first of each comes from its prompt
            assert 0 < layer.active_share < layer.gated_share < 1

    def test_batches_change_no_count(self, files: dict[str, Path]) -> None:
        counts = []
        for num_sequences in (1, 2):
            with LocalEngine(files["drelu"], max_sequences=num_sequences) as engine:
                engine.run_all([engine.request(p, NUM_TOKENS) for p in (PROMPT, PROMPT[::-1])])
                counts.append(engine.activity())
        assert counts[0] == counts[1]

    def test_prompts_token_by_token_are_counted(self, files: dict[str, Path]) -> None:
        """Generated tokens given as a prompt count as they did when they were generated."""
        counts, prompt = [], PROMPT
        for num_tokens in (NUM_TOKENS, 1):
            with LocalEngine(files["drelu"], max_tokens=1, ffn_resident=0.5) as engine:
                prompt = prompt + engine.generate(prompt, num_tokens).tokens[:-1]
                counts.append(engine.activity())
        assert counts[0] == counts[1]
        assert counts[0][0].tokens == len(PROMPT) + NUM_TOKENS - 1

    def test_damaged_layer_is_refused(self, files: dict[str, Path], tmp_path: Path) -> None:
        stored = bytearray(files["drelu"].read_bytes())
        section = read_ncf(files["drelu"]).sections[2]
        stored[section.offset + section.num_bytes - 1] ^= 1
        path = tmp_path / "damaged.ncf"
        path.write_bytes(stored)
        with pytest.raises(ChecksumError, match=r"layer\.1.*damaged"):
            LocalEngine(path)


class TestModes:
    def test_exact_of_tiles_is_refused_with_the_cure(
        self, files: dict[str, Path], tmp_path: Path
    ) -> None:
        tiles = tmp_path / "tiles.ncf"
        convert(files["drelu"].with_suffix(".gguf"), tiles, layout=Layout.TILES)
        with pytest.raises(ConfigError, match="--layout bundles"):
            open_source(tiles).resolve_mode(EXACT)
        assert open_source(tiles).resolve_mode(FeedForwardMode.AUTO) is DENSE

    def test_exact_of_a_smooth_activation_is_refused(self, tmp_path: Path) -> None:
        silu = write_tiny_gguf(tmp_path / "silu.gguf", replace(DRELU, family="llama"))
        with pytest.raises(ConfigError, match="never exactly zero"):
            open_source(silu).resolve_mode(EXACT)

    def test_bundles_are_exact_unless_told_otherwise(self, files: dict[str, Path]) -> None:
        source = open_source(files["drelu"])
        assert source.resolve_mode(FeedForwardMode.AUTO) is EXACT
        assert source.resolve_mode(DENSE) is DENSE
