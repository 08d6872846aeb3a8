"""`bench`: what it refuses before anything is started."""

import importlib.util
from contextlib import ExitStack
from pathlib import Path

import pytest

from polyneuron.cli.bench import OutputFormat, bench
from polyneuron.config import FeedForwardMode, Phase
from polyneuron.errors import ConfigError, EngineError
from polyneuron.measure import llama_cpp_peer
from polyneuron.measure.llama_cpp_peer import LlamaCpp
from polyneuron.measure.memory_cgroup import memory_cgroup
from tests.support.synthetic import small_settings, write_synth
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": "0", "gen": "0"}, "nothing to measure"),
        ({"prompt": "512,x"}, "-p 512,x: give numbers"),
        ({"gen": "-4"}, "-n -4: give numbers"),
        ({"gen": ""}, "-n : give numbers"),
        ({"repetitions": 0}, "-r 0: give 1 or more"),
        ({"threads": -1}, "-t -1: give 1 or more"),
        ({"peer": "vllm"}, "--peer vllm: the only one known is llama.cpp"),
    ],
)
def test_bad_flags_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench("no-such-model", **arguments)  # type: ignore[arg-type]


def test_test_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=r"test pp256: the model has a context of 256, 257"):
        bench(str(path), prompt="16,256", gen="32", output=OutputFormat.JSON)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "much"}, "--memory 'much': not a size"),
        ({"memory": "1MB"}, "--memory 1 MiB: this model needs at least"),
        ({"ffn_resident": 2.0}, "--ffn-resident 2.0: give 0 to 1"),
        ({"mode": FeedForwardMode.EXACT}, "--mode exact: silu activations are never exactly"),
        ({"peer_model": Path("a.gguf")}, "--peer-model a.gguf: give --peer llama.cpp too"),
        ({"peer": "llama.cpp", "peer_model": Path("a.gguf")}, "--peer-model a.gguf: no such file"),
    ],
)
def test_flags_beside_a_model_are_named(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ConfigError, match=message):
        bench(str(path), prompt="16", gen="8", **arguments)  # type: ignore[arg-type]


def test_peer_of_a_neuron_cluster_file_needs_its_own(tmp_path: Path) -> None:
    write_synth(tmp_path, twin=False)
    path = tmp_path / "synth.ncf"
    with pytest.raises(ConfigError, match=r"cannot read .*; name a GGUF .* --peer-model"):
        bench(str(path), prompt="16", gen="8", peer="llama.cpp")
    with pytest.raises(ConfigError, match=r"--peer-model .*\.ncf: llama.cpp reads GGUF files only"):
        bench(str(path), prompt="16", gen="8", peer="llama.cpp", peer_model=path)


def test_missing_peer_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(llama_cpp_peer, "MODULE", "llama_cpp_that_nobody_has")
    with pytest.raises(ConfigError, match=r"pip install 'polyneuron\[peer\]'"):
        bench(str(path), prompt="16", gen="8", peer="llama.cpp")


needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs the extra peer (llama.cpp)"
)


@needs_peer
class TestPeer:
    """The peer's process on a tiny model; it needs no cluster."""

    @pytest.mark.parametrize("shape", ["mistral-7b", "bamboo-7b"])
    def test_it_computes_and_leaves(self, shape: str, tmp_path: Path) -> None:
        write_synth(tmp_path, small_settings(shape))
        with LlamaCpp() as peer:
            peer.open(tmp_path / "synth.gguf", 1, 33)
            at_once = peer.run(Phase.PREFILL, list(range(3, 35)))
            one_by_one = peer.run(Phase.DECODE, list(range(3, 35)))
            assert at_once.token_ms is None
            assert one_by_one.token_ms is not None
            assert min(at_once.total_ns, one_by_one.total_ns) > 0
            assert None not in one_by_one.token_ms.values()
            assert peer.peak_bytes() > 0
            assert at_once.io.bytes_per_token is None  # without a limit nobody counts
        assert peer.exit_code == 0

    def test_unreadable_model_is_an_error_in_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "bad.gguf").write_bytes(b"not a model")
        with LlamaCpp() as peer, pytest.raises(EngineError, match=r"cannot open .*bad\.gguf"):
            peer.open(tmp_path / "bad.gguf", 1, 32)

    def test_it_is_measured_inside_a_cgroup(self, tmp_path: Path) -> None:
        write_synth(tmp_path)
        with ExitStack() as stack:
            try:
                cgroup = stack.enter_context(memory_cgroup(1 << 30, "peer"))
            except OSError as error:
                pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
            peer = stack.enter_context(LlamaCpp(cgroup))
            peer.open(tmp_path / "synth.gguf", 1, 33)
            sample = peer.run(Phase.DECODE, list(range(3, 11)))
            assert sample.io.bytes_per_token is not None
            assert (sample.io.hit_rate, sample.io.stall_share) == (None, None)
            assert 0 < peer.peak_bytes() == cgroup.peak_bytes()

    def test_too_little_memory_is_an_error_in_one_line(self, tmp_path: Path) -> None:
        with ExitStack() as stack:
            try:
                cgroup = stack.enter_context(memory_cgroup(4 << 20, "peer"))
            except OSError as error:
                pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
            peer = stack.enter_context(LlamaCpp(cgroup))
            with pytest.raises(EngineError, match=r"for want of memory: 4 MiB are too little"):
                peer.open(tmp_path / "synth.gguf", 1, 33)
