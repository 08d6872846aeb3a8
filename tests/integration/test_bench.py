"""`polyneuron bench` on a small file in bundles, read while it runs, alone and beside llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polyneuron.measure.host import Host
from polyneuron.measure.memory_cgroup import memory_cgroup
from tests.support.leftovers import assert_nothing_left, snapshot
from tests.support.synthetic import small_settings, write_synth

pytestmark = pytest.mark.ray

MIB = 1 << 20
LIMIT = 660 * MIB
TIMEOUT_S = 200
PEER = ("--peer", "llama.cpp", "--peer-model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds synth.ncf, in bundles, and its twin."""
    made = tmp_path_factory.mktemp("synth")
    write_synth(made, small_settings(num_layers=6, d_model=256, d_ff=1024, num_heads=8))
    return made


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def cgroups() -> Path:
    """All memory cgroups of this machine."""
    host = Host()
    return host.root / (host.cgroup_folders("memory") or ["sys/fs/cgroup"])[0]


def bench(folder: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    """The rows, and what was said beside them."""
    command = [
        sys.executable, "-m", "polyneuron", "bench", "-m", str(folder / "synth.ncf"),
        "-p", "8", "-n", "12", "-r", "2", "-t", "2", "--json", *words,
    ]  # fmt: skip
    with snapshot() as before, start(command) as program:
        assert program.stdout is not None and program.stderr is not None
        said = []
        for line in program.stderr:
            said.append(line)
            if re.match(r"(polyneuron|llama\.cpp) \w+ \d", line):
                before.observe()
        out = program.stdout.read()
        assert program.wait(TIMEOUT_S) == 0, said
        assert_nothing_left(before)
        assert not list(cgroups().rglob(f"polyneuron-{program.pid}-*"))
    rows: list[dict[str, Any]] = json.loads(out)
    return rows, "".join(said)


def test_reads_hits_and_stalls_are_measured(folder: Path) -> None:
    limits = ("--memory", str(LIMIT), "--ffn-resident", "0.5", "--mode", "exact")
    (prefill, decode, disk), said = bench(folder, *limits)
    assert "mode: exact · gates of 6 of 6 layers in memory · neuron cache" in said
    assert [prefill["test"], decode["test"]] == ["pp8", "tg12"]
    for row in (prefill, decode):
        assert row["engine"] == "polyneuron"
        assert row["memory_limit_bytes"] == LIMIT
        assert 0 < row["peak_bytes"] <= LIMIT
        assert row["avg_ts"] > 0
    assert prefill["io_bytes_per_token"] > 0
    assert prefill["hit_rate"] is None  # a prompt takes whole layers
    assert decode["io_bytes_per_token"] >= 0
    assert 0 < decode["hit_rate"] <= 1
    assert 0 <= decode["stall_share"] < 1
    assert decode["overhead_ms"] is None
    patterns = [row["pattern"] for row in disk["disk"]["before"]]
    assert patterns == ["sequential", "random"]


def test_in_memory_nothing_is_read(folder: Path) -> None:
    (prefill, decode), said = bench(folder, "--mode", "dense")
    assert "mode: dense · in memory" in said
    for row in (prefill, decode):
        for name in ("io_bytes_per_token", "hit_rate", "stall_share", "memory_limit_bytes"):
            assert row[name] is None
    assert decode["overhead_ms"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="needs the extra peer (llama.cpp)"
)
def test_both_engines_are_held_to_the_limit(folder: Path) -> None:
    limits = ("--memory", str(LIMIT), "--ffn-resident", "0.5")
    rows, said = bench(folder, *limits, *PEER, str(folder / "synth.gguf"))
    *measured, disk, last = rows
    assert [row["engine"] for row in measured] == ["polyneuron", "llama.cpp"] * 2
    assert list(last["ratio"]) == ["pp8", "tg12"]
    assert disk["disk"].keys() == {"before", "after"}
    try:
        with memory_cgroup(LIMIT, "probe"):
            pass
    except OSError:
        assert "no memory cgroup can be made here" in said
        return
    for row in measured:
        assert row["memory_limit_bytes"] == LIMIT
        assert 0 < row["peak_bytes"] <= LIMIT
        assert row["io_bytes_per_token"] is not None
