"""A dReLU model with real activations against a float32 forward pass of the same file.

The file is 144 MB and no package has it: `tests/support/models.py` tells where it may lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.golden import DATA, log_probabilities
from tests.support.models import DRELU, NO_DRELU
from tests.support.recording_engine import RecordingEngine

NOISE_BOUND = 0.10
"""Root of the mean square over all records: what activations in 8 bits cost here."""
NOISES = 4.0

pytestmark = pytest.mark.skipif(not DRELU.exists(), reason=NO_DRELU)


@pytest.fixture(params=["gguf", "bundles"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The model's own file, which is run as tiles, and one in bundles."""
    if request.param == "gguf":
        yield DRELU
        return
    path = tmp_path / "model.ncf"
    convert(DRELU, path, layout=Layout.BUNDLES)
    yield path
    path.unlink()


def test_drelu_is_near_its_float32_golden(model: Path) -> None:
    gaps = []
    with RecordingEngine(model, num_ctx=1024, max_logit_rows=64) as engine:
        for case in json.loads((DATA / "smollm2_drelu_greedy.json").read_text())["cases"]:
            prompt, tokens = case["prompt_tokens"], case["tokens"]
            records = np.array(case["top_logprobs"])
            logits = engine.logits_from(prompt + tokens, len(prompt) - 1)[: len(tokens)]
            ids = records[..., 0].astype(np.int64)
            rows = np.take_along_axis(log_probabilities(logits), ids, axis=1)
            gaps.append((rows - records[..., 1]).ravel())
            clear = records[:, 0, 1] - records[:, 1, 1] > NOISES * NOISE_BOUND
            assert (logits.argmax(axis=1) == tokens)[clear].all()
    noise = float(np.sqrt(np.mean(np.concatenate(gaps) ** 2)))
    print(f"to float32, rms: {noise:.4f}")
    assert noise < NOISE_BOUND
