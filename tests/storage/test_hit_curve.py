"""The engine's hits at every size of the cache are those of the cache library on a trace."""

from pathlib import Path

import numpy as np
import pytest

from polyneuron.config import FeedForwardMode
from polyneuron.io.ncf_format import Layout
from polyneuron.model.convert import convert
from tests.support.engine_traces import gated_masks, model_cache, needed_trace, warm_trace
from tests.support.local_engine import LocalEngine
from tests.support.neuron_traces import run_trace
from tests.support.predictors import write_oracle
from tests.support.sparse_models import drelu_model
from tests.support.tiny_gguf import write_tiny_gguf

TOKENS = np.random.default_rng(3).integers(0, 90, 60).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curve")
    tiny = drelu_model(6)
    convert(write_tiny_gguf(folder / "tiny.gguf", tiny), folder / "tiny.ncf", layout=Layout.BUNDLES)
    write_oracle(folder / "tiny.ncf")
    return folder / "tiny.ncf"


@pytest.fixture(scope="module")
def masks(model: Path) -> np.ndarray:
    return gated_masks(model, TOKENS)


@pytest.mark.parametrize("mode", [FeedForwardMode.EXACT, FeedForwardMode.PREDICTED])
@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.8, 0.95])
def test_hits_follow_the_model(
    model: Path, masks: np.ndarray, mode: FeedForwardMode, share: float
) -> None:
    settings = {
        "num_workers": 1, "num_npu_threads": 0, "max_tokens": 1, "mode": mode,
        "ffn_resident": share, "hot_clusters": (1,),
    }  # fmt: skip
    with LocalEngine(model, **settings) as engine:
        bundles = engine.layout.bundles
        assert bundles is not None
        if not bundles.cold_slots or any(layer.rows_are.passes_through for layer in bundles.layers):
            pytest.skip("this share keeps whole layers only")
        before = engine.cache().counters()
        engine.score(TOKENS, len(TOKENS) - 1)
        after = engine.cache().counters()
    cache = model_cache(bundles)
    run_trace(cache, warm_trace(bundles))
    warmed = cache.counters()
    run_trace(cache, needed_trace(bundles, masks))
    expected = cache.counters()
    assert after.hits - before.hits == expected.hits - warmed.hits
    assert after.misses - before.misses == expected.misses - warmed.misses
    assert after.late == before.late  # a token's rows have all landed before the next one's
