"""A budget that holds: streamed output on actors, inside a memory cgroup of that size."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.errors import ConfigError, EngineError
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.measure.memory_cgroup import MemoryCgroup, memory_cgroup
from polyneuron.model.convert import convert
from polyneuron.model.locate import locate_model
from tests.support.engines import GREEDY, MODEL, PROMPT, held_bytes, open_engine, write_model
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.ray

MIB = 1 << 20
BUDGET = 660 * MIB
TIMEOUT_S = 100


def tokens_and_logits(path: Path, **settings: object) -> tuple[list[int], str | None]:
    with open_engine(path, **settings) as engine:
        answer = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY, ignore_eos=True)
        return answer.tokens, answer.logits_sha256


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("budget"))


@pytest.fixture(scope="module")
def ncf(gguf: Path) -> Path:
    path = gguf.with_suffix(".ncf")
    convert(gguf, path, layout=Layout.TILES)
    return path


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = replace(MODEL, family="bamboo", d_ff=608, tensor_type="Q4_0", tied_head=False)
    folder = tmp_path_factory.mktemp("bundles")
    gguf = write_tiny_gguf(folder / "sparse.gguf", model)
    convert(gguf, folder / "sparse.ncf", layout=Layout.BUNDLES)
    return folder / "sparse.ncf"


class TestStreaming:
    def test_streamed_equals_resident_on_actors(self, gguf: Path, ncf: Path) -> None:
        resident = tokens_and_logits(gguf)
        assert tokens_and_logits(ncf, ffn_resident=0.0) == resident
        assert tokens_and_logits(ncf, ffn_resident=0.5, num_workers=1) == resident

    def test_exact_equals_dense_on_actors(self, bundles: Path) -> None:
        resident = tokens_and_logits(bundles, mode=FeedForwardMode.DENSE)
        assert tokens_and_logits(bundles, mode=FeedForwardMode.EXACT) == resident
        for share in (0.1, 0.4, 0.8):
            assert tokens_and_logits(bundles, ffn_resident=share) == resident
        assert tokens_and_logits(bundles, ffn_resident=0.4, num_workers=1) == resident

    @pytest.mark.parametrize(
        ("who", "fault"),
        [("worker", signal.SIGKILL), ("I/O actor", signal.SIGKILL), ("I/O actor", signal.SIGSTOP)],
    )
    def test_lost_process_changes_no_token(
        self, bundles: Path, who: str, fault: signal.Signals
    ) -> None:
        with open_engine(bundles, ffn_resident=0.5) as engine:
            first = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            is_worker = who == "worker"
            pid = engine.executors()[0].pid if is_worker else engine.actors.pids[who]
            os.kill(pid, fault)
            again = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            assert again.tokens == first.tokens
            assert again.logits_sha256 == first.logits_sha256

    def test_memory_changes_while_a_request_runs(self, bundles: Path) -> None:
        with open_engine(bundles, ffn_resident=0.9) as engine:
            whole = engine.generate(PROMPT, max_tokens=24, sampling=GREEDY, ignore_eos=True)
            slot_bytes = engine.layout.spans["cold"].num_bytes // engine.budget.cold_slots
            least = engine.layout.bundles.rows.num_neurons if engine.layout.bundles else 0
            spare = (engine.budget.cold_slots - least) * slot_bytes
            at_first = engine.budget.limit_bytes
            before = held_bytes(engine, "cold")
            generation = engine.stream(PROMPT, max_tokens=24, sampling=GREEDY, ignore_eos=True)
            for index, _ in enumerate(generation):
                if index == 4:
                    engine.change_memory(at_first - spare)
                    assert before - held_bytes(engine, "cold") > spare // 2
                if index == 12:
                    engine.change_memory(at_first)
            assert generation.completion.logits_sha256 == whole.logits_sha256
            with pytest.raises(ConfigError, match="needs at least"):
                engine.change_memory(at_first - spare - MIB)

    def test_memory_changes_after_the_cache_actor_was_lost(self, bundles: Path) -> None:
        with open_engine(bundles, ffn_resident=0.9) as engine:
            first = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            os.kill(engine.actors.pids["cache actor"], signal.SIGKILL)
            engine.change_memory(engine.budget.limit_bytes - MIB // 8)
            again = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            assert again.logits_sha256 == first.logits_sha256

    def test_missing_file_ends_the_request_and_not_the_engine(
        self, bundles: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "moved.ncf"
        shutil.copy(bundles, path)
        with open_engine(path, ffn_resident=0.5) as engine:
            first = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            path.rename(tmp_path / "elsewhere.ncf")
            os.kill(engine.actors.pids["I/O actor"], signal.SIGKILL)
            with pytest.raises(EngineError, match=r"moved\.ncf"):
                engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            (tmp_path / "elsewhere.ncf").rename(path)
            again = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            assert again.logits_sha256 == first.logits_sha256

    def test_failing_file_ends_the_request_and_not_the_engine(
        self, bundles: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "shrinks.ncf"
        shutil.copy(bundles, path)
        with open_engine(path, ffn_resident=0.5) as engine:
            first = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            whole = path.read_bytes()
            os.truncate(path, read_ncf(path).sections[1].offset)
            with pytest.raises(EngineError, match=r"shrinks\.ncf: the file has become shorter"):
                engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            path.write_bytes(whole)
            again = engine.generate(PROMPT, max_tokens=8, sampling=GREEDY)
            assert again.logits_sha256 == first.logits_sha256

    def test_gguf_is_converted_once_where_it_must_stream(
        self, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        streamed = tokens_and_logits(gguf, ffn_resident=0.0)
        entries = list(tmp_path.rglob("*.ncf"))
        assert len(entries) == 1
        written = entries[0].stat().st_mtime_ns
        assert tokens_and_logits(gguf, ffn_resident=0.0) == streamed
        assert entries[0].stat().st_mtime_ns == written

    def test_lost_reader_is_replaced(self, ncf: Path) -> None:
        with open_engine(ncf, ffn_resident=0.0) as engine:
            options = {"max_tokens": 200, "sampling": GREEDY, "ignore_eos": True}
            expected = engine.generate(PROMPT, **options)
            generation = engine.stream(PROMPT, **options)
            pieces = iter(generation)
            next(pieces)
            os.kill(engine.actors.pids["I/O actor"], signal.SIGKILL)
            for _ in pieces:
                pass
            assert generation.completion.tokens == expected.tokens
            assert generation.completion.logits_sha256 == expected.logits_sha256


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    """A cgroup of BUDGET bytes; its removal fails while a process is left in it."""
    with ExitStack() as stack:
        try:
            inside = stack.enter_context(memory_cgroup(BUDGET, "test"))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
        yield inside


def test_smollm2_streams_inside_a_cgroup_of_its_budget(
    cgroup: MemoryCgroup, tmp_path: Path
) -> None:
    try:
        source = locate_model("smollm2")
    except ConfigError as error:  # the weights are an extra
        pytest.skip(str(error))
    path = tmp_path / "smollm2.ncf"
    convert(source, path, layout=Layout.TILES)
    words = ["run", "-m", str(path), "-p", "The capital of France is", "-n", "8", "--temp", "0"]
    words += ["-c", "256", "--memory", str(BUDGET), "--ffn-resident", "0.5", "--json", "-t", "2"]
    command = cgroup.inside([sys.executable, "-m", "polyneuron", *words])
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert cgroup.oom_kills() == 0
    result = json.loads(done.stdout)
    assert result["text"].startswith(" Paris")
    assert 0 < result["memory"]["resident_ffn_fraction"] < 1
    assert result["memory"]["peak_bytes"] <= BUDGET
    assert result["io"]["bytes_per_token"] > MIB
