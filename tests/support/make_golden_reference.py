"""Writes tests/data/golden/smollm2_reference.npz: the golden's tokens by a float32 forward pass.

Run from the repository root as `python -m tests.support.make_golden_reference`; takes a minute.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.gguf_file import read_header
from polyneuron.model.locate import locate_model
from polyneuron.model.tokenizer import Tokenizer
from tests.support.golden import REFERENCE, at_ids, read_golden
from tests.support.quantised_reference import HalfCacheReference
from tests.support.reference_model import ReferenceModel

Floats = NDArray[Any]


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def main() -> None:
    """Write the file and print what the cache's type alone changes."""
    path = locate_model("smollm2")
    tokenizer = Tokenizer.from_metadata(read_header(path).metadata, path.name)
    exact, half = ReferenceModel(path, np.float32), HalfCacheReference(path, np.float32)
    arrays: dict[str, Any] = {}
    for index, case in enumerate(read_golden(tokenizer)):
        logits = exact.logits(case.history)
        arrays[f"logprobs_{index}"] = reference = at_ids(logits, case)
        arrays[f"argmax_{index}"] = logits[len(case.prompt_tokens) - 1 : -1].argmax(axis=1)
        rounded = at_ids(half.logits(case.history), case)
        golden, cache = case.top_logprobs - reference, rounded - reference
        print(
            f"case {index}: golden {_rms(golden):.4f} rms, {np.abs(golden).max():.4f} max; "
            f"float16 cache {_rms(cache):.4f} rms, {np.abs(cache).max():.4f} max",
            flush=True,
        )
    np.savez_compressed(REFERENCE, **arrays)


if __name__ == "__main__":
    main()
