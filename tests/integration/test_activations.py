"""`inspect --activations` on a real cluster, from a GGUF that it converts first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyneuron.cli.inspect_activations import text_tokens
from polyneuron.planning.source import open_source
from tests.support.local_engine import LocalEngine
from tests.support.tiny_ncf import write_source

pytestmark = pytest.mark.ray

TIMEOUT_S = 120
NUM_TOKENS = 20


def test_counts_are_those_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gguf = write_source(tmp_path)
    command = [sys.executable, "-m", "polyneuron", "inspect", str(gguf), "--activations"]
    done = subprocess.run(
        [*command, "-n", str(NUM_TOKENS), "--json"],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mode: exact" in done.stderr
    found = json.loads(done.stdout)
    (converted,) = (tmp_path / "polyneuron").glob("*.ncf")
    with LocalEngine(converted, max_tokens=1) as engine:
        tokens = text_tokens(open_source(gguf), None, NUM_TOKENS)
        engine.score(tokens, NUM_TOKENS - 1)
        expected = engine.activity()
    assert found["tokens"] == NUM_TOKENS
    assert [(row["gated_share"], row["active_share"]) for row in found["layers"]] == [
        (layer.gated_share, layer.active_share) for layer in expected
    ]
