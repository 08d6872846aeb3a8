"""`polyneuron profile`: which neurons a text activates, and predictors that name them."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from polyneuron.cli import options
from polyneuron.cli.convert import note, note_wait
from polyneuron.cli.options import option
from polyneuron.cli.perplexity import read_text
from polyneuron.cli.progress import LoadProgress
from polyneuron.errors import ConfigError
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.model.locate import locate_model

if TYPE_CHECKING:
    from polyneuron.planning.source import ModelSource
    from polyneuron.profiling.predictors import PredictorSettings
    from polyneuron.profiling.profile import Made

DEFAULT_TOKENS = 2048
PREDICTORS = "Predictors"


class PredictorChoice(StrEnum):
    """What `--predictor` takes."""

    AUTO = "auto"
    LOW_RANK = "low-rank"
    MLP = "mlp"
    SIGN = "sign"
    IMPORTED = "imported"
    ORACLE = "oracle"
    NONE = "none"


Predictor = Annotated[
    PredictorChoice, option("--predictor", panel=PREDICTORS, text="what kind to make")
]
Recall = Annotated[
    float | None,
    option("--recall", panel=PREDICTORS, text="share of activation to keep, in each layer"),
]
InputAt = Annotated[
    PredictorInput | None,
    option("--input", panel=PREDICTORS, text="attention: reads can start before attention"),
]
Rank = Annotated[
    int, option("--rank", panel=PREDICTORS, text="of low-rank, mlp; 0: each layer's own")
]
Alpha = Annotated[
    float, option("--alpha", panel=PREDICTORS, text="of sign: over 1 names more; 0: by --recall")
]
Threshold = Annotated[
    bool,
    option("--threshold", text="of SiLU models: find bounds for --mode threshold (lossy)"),
]
MaxCost = Annotated[
    float | None,
    option("--max-cost", text="with --threshold: how much perplexity may rise, as a share"),
]
ImportFrom = Annotated[
    Path | None,
    option("--import", panel=PREDICTORS, text="of imported: a PWRI GGUF, safetensors, a folder"),
]

Reorder = Annotated[
    Path | None, option("--reorder", text="also write the model, hottest neurons first")
]
Record = Annotated[
    Path | None, option("--record", text="also write which neurons each token needs")
]
Force = Annotated[bool, option("--force", text="let --reorder and --record replace a file")]


def profile(
    model: Annotated[
        str,
        option("--model", "-m", text="a .gguf or .ncf file, or a folder; with --device not needed"),
    ] = "",
    device: Annotated[
        bool,
        option("--device", text="measure this machine instead, and the disk of the model or cache"),
    ] = False,
    text: Annotated[
        str | None, option("--text", text="the text to run; -: stdin; the first tokens are taken")
    ] = None,
    tokens: Annotated[int, option("--tokens", text="how many of them")] = DEFAULT_TOKENS,
    random_tokens: Annotated[
        int | None,
        option("--random-tokens", text="instead of a text: for files of random weights"),
    ] = None,
    predictor: Predictor = PredictorChoice.AUTO,
    recall: Recall = None,
    input_at: InputAt = None,
    rank: Rank = 0,
    alpha: Alpha = 0.0,
    import_from: ImportFrom = None,
    threshold: Threshold = False,
    max_cost: MaxCost = None,
    reorder: Reorder = None,
    record: Record = None,
    force: Force = False,
    as_json: options.Json = False,
) -> None:
    """Run a text through a model: statistics and predictors of its neurons, beside the file."""
    if device:
        from polyneuron.cli.profile_device import measure

        measure(model, as_json=as_json)
        return
    if not model:
        raise ConfigError("-m: name a model file, or measure the machine with --device")
    from polyneuron.io.predictor_import import open_import
    from polyneuron.profiling.profile import make_profile
    from polyneuron.profiling.recorded import check_recording
    from polyneuron.profiling.reorder import check_reorder

    cost = _cost(threshold, max_cost, predictor)
    source = _as_bundles(locate_model(model), cost is not None)
    path = source.path
    ids = _tokens(source, text, tokens, random_tokens)
    found = None if import_from is None else open_import(import_from)
    kind = predictor if cost is None else PredictorChoice.NONE
    settings = _settings(
        source, kind, kept=recall, input=input_at, rank=rank, alpha=alpha, found=found
    )
    if reorder is not None:
        check_reorder(path, reorder, force)
    if record is not None:
        check_recording(path, record, force=force)
    with LoadProgress("profiling", unit="tokens x layers") as progress:
        made = make_profile(
            path, ids, settings, imported=found, max_cost=cost, record=record,
            progress=progress, on_wait=note_wait,
        )  # fmt: skip
    _show(path, made, as_json=as_json)
    if reorder is not None:
        _reorder(path, made, reorder, force=force)


def _show(path: Path, made: Made, *, as_json: bool) -> None:
    from polyneuron.cli.profile_table import as_object, show

    if made.resumed_layers:
        note(f"{made.resumed_layers} layers of them from an earlier run")
    if as_json:
        sys.stdout.write(json.dumps(as_object(path, made)) + "\n")
    else:
        show(made)


def _reorder(path: Path, made: Made, output: Path, *, force: bool) -> None:
    from polyneuron.profiling.reorder import reorder_model

    with LoadProgress("writing") as progress:
        reorder_model(path, made.profile, output, force=force, progress=progress)
    note(f"{output}: the model, hottest neurons first, its profile and predictors beside it")


def _cost(threshold: bool, max_cost: float | None, predictor: PredictorChoice) -> float | None:
    """What bounds may cost; None when none are wanted."""
    from polyneuron.profiling.activation_bounds import DEFAULT_COST

    if not threshold:
        if max_cost is not None:
            raise ConfigError("--max-cost: what bounds may cost; give --threshold too")
        return None
    if predictor not in (PredictorChoice.AUTO, PredictorChoice.NONE):
        raise ConfigError(f"--predictor {predictor}: threshold mode looks at gates, it needs none")
    cost = DEFAULT_COST if max_cost is None else max_cost
    if not 0 < cost <= 1:
        raise ConfigError(f"--max-cost {cost:g}: give a share above 0 and up to 1, as 0.01")
    return cost


def _as_bundles(path: Path, threshold: bool) -> ModelSource:
    """The file itself, or the bundles that a GGUF is converted to in the cache."""
    from polyneuron.io.ncf_format import Layout
    from polyneuron.model.model_cache import cached_ncf
    from polyneuron.planning.source import check_boundable, open_source
    from polyneuron.profiling.calibration import check_sparse

    source = open_source(path)
    if threshold:
        check_boundable(source.spec)
    else:
        check_sparse(path, source.spec)
    if source.can_stream:
        return source
    with LoadProgress("converting") as progress:
        return open_source(cached_ncf(path, progress, note_wait, layout=Layout.BUNDLES))


def _tokens(
    source: ModelSource, text: str | None, count: int, random_count: int | None
) -> list[int]:
    """What is run."""
    import numpy as np

    from polyneuron.model.tokenizer import Tokenizer

    if (text is None) == (random_count is None):
        raise ConfigError("give either --text FILE or --random-tokens N")
    if random_count is not None:
        if random_count < 1:
            raise ConfigError(f"--random-tokens {random_count}: give 1 or more")
        rng = np.random.default_rng(0)
        return [int(token) for token in rng.integers(3, source.spec.vocab_size, random_count)]
    if count < 1:
        raise ConfigError(f"--tokens {count}: give 1 or more")
    assert text is not None
    tokenizer = Tokenizer.from_metadata(source.metadata, source.path.name)
    return tokenizer.encode(read_text(text, "--text"), parse_special=False)[:count]


def _settings(source: ModelSource, kind: PredictorChoice, **given: Any) -> PredictorSettings | None:
    """What to fit; `auto` makes low-rank ones where the file can be run with them."""
    from polyneuron.io.ncf_format import Layout
    from polyneuron.profiling.kinds import settings_of

    is_auto = kind is PredictorChoice.AUTO
    has_bundles = source.manifest.layout is Layout.BUNDLES
    chosen = PredictorChoice.LOW_RANK if is_auto else kind
    role = "ffn_gate" if source.spec.has_gate else "ffn_up"
    deciding = next(t.storage for t in source.manifest.tensors if t.role == role)
    assert deciding is not None
    has_experts = source.spec.experts is not None
    settings = settings_of(
        chosen.value, source.spec.feed_forward, deciding, has_experts=has_experts, **given
    )
    is_none = kind is PredictorChoice.NONE or (is_auto and not has_bundles)
    return None if is_none else settings
