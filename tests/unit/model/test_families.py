"""Every family's logits: the numpy forward pass against `transformers`, stored and live."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyneuron.io.gguf_file import read_header
from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.architecture import describe
from polyneuron.model.block import Residual
from polyneuron.model.spec import ModelSpec, RopeScaling
from tests.support.families import FAMILY_CASES, gguf_path, golden_path
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import TinyModel, write_tiny_gguf

TOLERANCE = 1e-4


def deviation(model: ReferenceModel, case: str) -> float:
    """Largest difference from the stored logits."""
    with np.load(golden_path(case)) as golden:
        return float(np.abs(model.logits(golden["token_ids"]) - golden["logits"]).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_equal_the_golden(case: str, dtype: type) -> None:
    assert deviation(ReferenceModel(gguf_path(case), dtype), case) < TOLERANCE


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_stored_file_is_what_the_builder_describes(case: str) -> None:
    assert describe(read_header(gguf_path(case))) == FAMILY_CASES[case].spec()


def _other_rope(spec: ModelSpec) -> ModelSpec:
    layout = RopeLayout(1 - spec.rope.layout)
    return replace(spec, rope=replace(spec.rope, layout=layout))


def _no_scaling(spec: ModelSpec) -> ModelSpec:
    return replace(spec, rope=replace(spec.rope, scaling=RopeScaling.NONE))


def _whole_context(spec: ModelSpec) -> ModelSpec:
    """Positions up to which short divisors count are the others' number."""
    assert spec.rope.long is not None
    other = 288 - spec.rope.long.original_context
    long = replace(spec.rope.long, original_context=other)
    return replace(spec, rope=replace(spec.rope, long=long))


def _no_magnitude(spec: ModelSpec) -> ModelSpec:
    assert spec.rope.long is not None
    long = replace(spec.rope.long, magnitude=1.0)
    return replace(spec, rope=replace(spec.rope, long=long))


def _silu(spec: ModelSpec) -> ModelSpec:
    return replace(spec, feed_forward=FeedForwardKind.SILU)


def _normalised(spec: ModelSpec, is_normalised: bool = True) -> ModelSpec:
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, is_normalised=is_normalised))


def _shares(spec: ModelSpec) -> ModelSpec:
    return _normalised(spec, False)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama_tied", _other_rope),
        ("qwen2", _other_rope),
        ("llama3_scaling", _no_scaling),
        ("llama_linear_scaling", _no_scaling),
        ("qwen2_yarn", _no_scaling),
        ("bamboo", _silu),
        ("llama_reglu", _silu),
        ("mixtral", _shares),
        ("qwen2moe", _normalised),
        ("turbosparsemixtral", _silu),
        ("gemma", _silu),
        ("gemma3_scaling", _no_scaling),
        ("phi3_long", _whole_context),
        ("phi3_short", _whole_context),
        ("phi3_long", _no_magnitude),
    ],
)
def test_goldens_tell_variants_apart(case: str, change: object) -> None:
    """A wrong description must not pass: the goldens are sensitive to what they are about."""
    assert callable(change)
    model = ReferenceModel(gguf_path(case))
    model.spec = change(model.spec)
    assert deviation(model, case) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("gemma", "embedding_scale", 0.0),
        ("gemma2", "window", 0),
        ("gemma2", "window", 13),
        ("gemma2", "window_period", 3),
        ("gemma2", "attention_cap", 0.0),
        ("gemma2", "logit_cap", 0.0),
        ("gemma2", "attention_scale", 0.25),
        ("gemma3", "local_rope_base", 0.0),
        ("gemma3", "window_period", 0),
        ("mistral_window", "window", 10),
        ("phi3", "window", 0),
        ("falcon_two_norms", "residual", Residual.SEQUENTIAL),
        ("opt", "position_offset", 1),
    ],
)
def test_goldens_tell_departures_apart(case: str, field: str, value: object) -> None:
    """As above, of what a family does otherwise than Llama."""
    model = ReferenceModel(gguf_path(case))
    changes: dict[str, Any] = {field: value}
    model.spec = replace(model.spec, block=replace(model.spec.block, **changes))
    assert deviation(model, case) > 100 * TOLERANCE


@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_equal_transformers_live(case: str, tmp_path: Path) -> None:
    """Fresh weights, so that nothing stored is trusted."""
    torch = pytest.importorskip("torch", reason="extra `reference` is not installed")
    pytest.importorskip("transformers", reason="extra `reference` is not installed")
    from tests.support.transformers_reference import transformers_logits

    model: TinyModel = replace(FAMILY_CASES[case], seed=1000)
    reference = ReferenceModel(write_tiny_gguf(tmp_path / "live.gguf", model))
    token_ids = np.random.default_rng(3).integers(0, reference.spec.vocab_size, 50)
    expected = transformers_logits(reference.spec, reference.weights, token_ids, torch.float64)
    assert np.abs(reference.logits(token_ids) - expected).max() < TOLERANCE
