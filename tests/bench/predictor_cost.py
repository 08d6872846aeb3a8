"""What predictors cost in perplexity and how many neurons they name: `python -m` this, MODEL TEXT.

MODEL is a file in bundles. Predictors are made with the first tokens of the text; those after them
are cut into chunks. As in a run, and in `polyneuron perplexity`, the first half of a chunk is a
prompt, which no mode predicts; the second half is scored, token by token, as generated tokens are.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from polyneuron.config import FeedForwardMode
from polyneuron.io.ncf_reader import NcfFile, read_ncf
from polyneuron.io.predictor_file import PredictorInput
from polyneuron.model.ncf_spec import spec_of
from polyneuron.model.tokenizer import Tokenizer
from polyneuron.profiling.kinds import settings_of
from polyneuron.profiling.predictors import PredictorSettings
from polyneuron.profiling.profile import make_profile
from tests.support.local_engine import LocalEngine

CALIBRATION_TOKENS = 2048
CHUNK_TOKENS = 512
FIRST_SCORED = CHUNK_TOKENS // 2
SETTINGS: dict[str, int] = {
    "num_ctx": CHUNK_TOKENS,
    "max_logit_rows": 1,
    "num_workers": 1,
    "num_npu_threads": 0,
}
KEPT = (0.95, 0.98, 0.99, 0.995)


def negative_logs(
    model: Path, chunks: list[list[int]], mode: FeedForwardMode
) -> NDArray[np.float64]:
    """-log p of every scored token, each computed alone by a decode step."""
    scores: list[float] = []
    with LocalEngine(model, **SETTINGS, mode=mode) as run:
        for chunk in chunks:
            scores += run.score(chunk, FIRST_SCORED)
    return -np.array(scores)


def candidates(ncf: NcfFile, kinds: list[str], kept: list[float]) -> Iterator[PredictorSettings]:
    """Kinds, each at an input, at each share."""
    feed_forward = spec_of(ncf).feed_forward
    deciding = next(t.storage for t in ncf.tensors if t.role == "ffn_gate")
    assert deciding is not None
    for name in kinds:
        kind, _, place = name.partition(":")
        for share in kept:
            at = PredictorInput(place)
            yield settings_of(kind, feed_forward, deciding, input=at, kept=share)


def main() -> None:
    """Print a row for each predictor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--kept", type=float, nargs="+", default=list(KEPT))
    parser.add_argument("--calibration", type=int, default=CALIBRATION_TOKENS)
    kinds = ["low-rank:attention", "low-rank:ffn", "sign:ffn"]
    parser.add_argument("--kinds", nargs="+", default=kinds)
    given = parser.parse_args()
    ncf = read_ncf(given.model)
    tokenizer = Tokenizer.from_metadata(ncf.metadata, given.model.name)
    tokens = tokenizer.encode(given.text.read_text(), parse_special=False)
    known, rest = tokens[: given.calibration], tokens[CALIBRATION_TOKENS:]
    chunks = [rest[at : at + CHUNK_TOKENS] for at in range(0, len(rest), CHUNK_TOKENS)]
    chunks = [chunk for chunk in chunks if len(chunk) == CHUNK_TOKENS][: given.chunks]
    exact = negative_logs(given.model, chunks, FeedForwardMode.EXACT)
    print(f"{len(exact)} tokens, exact perplexity {np.exp(exact.mean()):.3f}")
    print("predictor            kept   named  active recall kept(held out)   MiB  ppl +% (± s.e.)")
    with tempfile.TemporaryDirectory(dir=given.model.parent) as folder:
        copy = Path(folder, "model.ncf")
        os.link(given.model, copy)
        for settings in candidates(ncf, given.kinds, given.kept):
            mean = make_profile(copy, known, settings).report["mean"]
            more = negative_logs(copy, chunks, FeedForwardMode.PREDICTED) - exact
            error = more.std() / np.sqrt(len(more))
            print(
                f"{settings.kind:9} {settings.input:9}  {settings.kept:5.3f}  "
                f"{mean['predicted']:6.3f} {mean['active']:6.3f} {mean['recall']:6.3f} "
                f"{mean['kept']:8.4f} {mean['num_bytes'] / 2**20:12.1f}  "
                f"{100 * np.expm1(more.mean()):6.2f} ± {100 * error:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
