"""The files of random weights that engines are timed on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.io.gguf_file import check_supported, read_header
from polyneuron.model.architecture import describe
from polyneuron.model.spec import tensor_shapes
from polyneuron.model.tokenizer import Tokenizer
from tests.bench import random_model
from tests.bench.random_model import LLAMA_2_7B, SMALL, tensor_bytes, write_random_model
from tests.support.local_engine import LocalEngine
from tests.support.reference_model import ReferenceModel


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "sub" / "small.gguf"
    write_random_model(path, SMALL)
    return path


def test_file_has_the_shape_and_nothing_beside_it(small_file: Path) -> None:
    header = read_header(small_file)
    check_supported(header)
    found = describe(header)
    assert replace(found, norm_eps=SMALL.norm_eps) == SMALL
    assert found.norm_eps == pytest.approx(SMALL.norm_eps)
    assert [path.name for path in small_file.parent.iterdir()] == [small_file.name]


def test_weights_spread_as_a_real_models(small_file: Path) -> None:
    weights = ReferenceModel(small_file).weights
    values = np.concatenate([w.ravel() for name, w in weights.items() if "norm" not in name])
    assert np.std(values) == pytest.approx(random_model.WEIGHT_STD, rel=0.05)
    assert abs(np.mean(values)) < 0.1 * random_model.WEIGHT_STD


def test_engine_computes_what_the_file_says(small_file: Path) -> None:
    prompt = list(range(3, 43))
    with LocalEngine(small_file) as engine:
        result = engine.generate(prompt, 1)
    expected = ReferenceModel(small_file).logits(np.array(prompt))[-1]
    assert np.isfinite(result.logits[0]).all()
    error = np.abs(result.logits[0] - expected).max()
    assert error < 0.05 * np.abs(expected).max()  # activations have 8 bits


def test_tokenizer_reads_any_text(small_file: Path) -> None:
    tokenizer = Tokenizer.from_metadata(read_header(small_file).metadata)
    assert tokenizer.decode(tokenizer.encode("a text, é", add_bos=False)).strip() == "a text, é"


def test_seven_billion_weights_take_four_and_a_half_bits() -> None:
    shapes = tensor_shapes(LLAMA_2_7B)
    num_weights = sum(int(np.prod(shape)) for shape in shapes.values())
    num_bytes = sum(map(tensor_bytes, shapes.values()))
    assert num_weights == 6_738_415_616  # Llama 2's own count
    assert num_bytes * 8 / num_weights == pytest.approx(4.5, rel=1e-3)


def test_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_model, "SPARE_BYTES", 1 << 60)
    with pytest.raises(SystemExit, match="MiB free"):
        write_random_model(tmp_path / "small.gguf", SMALL)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_writing_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(random_model, "random_blocks", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_random_model(tmp_path / "small.gguf", SMALL)
    assert list(tmp_path.iterdir()) == []
