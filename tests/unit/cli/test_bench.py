"""`bench`: what it refuses before anything is started."""

import importlib.util
from pathlib import Path

import pytest

from polyneuron.cli.bench import OutputFormat, bench
from polyneuron.config import Phase
from polyneuron.errors import ConfigError, EngineError
from polyneuron.measure import llama_cpp_peer
from polyneuron.measure.llama_cpp_peer import LlamaCpp
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
            assert peer.pss_bytes() > 0
        assert peer.exit_code == 0

    def test_unreadable_model_is_an_error_in_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "bad.gguf").write_bytes(b"not a model")
        with LlamaCpp() as peer, pytest.raises(EngineError, match=r"cannot open .*bad\.gguf"):
            peer.open(tmp_path / "bad.gguf", 1, 32)
