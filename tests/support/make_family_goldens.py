"""Writes tests/data/families: tiny weights of every family and their logits by `transformers`.

Run from the repository root as `python -m tests.support.make_family_goldens`.
"""

import numpy as np
import torch

from tests.support.families import DATA, FAMILY_CASES, NUM_TOKENS, gguf_path, golden_path
from tests.support.reference_model import ReferenceModel
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.transformers_reference import transformers_logits


def main() -> None:
    """Write every case and print how far float32 is from float64."""
    DATA.mkdir(parents=True, exist_ok=True)
    for case, model in FAMILY_CASES.items():
        path = write_tiny_gguf(gguf_path(case), model)
        reference = ReferenceModel(path, np.float64)
        rng = np.random.default_rng(model.seed)
        token_ids = rng.integers(0, reference.spec.vocab_size, NUM_TOKENS)
        narrow = {name: values.astype(np.float32) for name, values in reference.weights.items()}
        single = transformers_logits(reference.spec, narrow, token_ids, torch.float32)
        double = transformers_logits(reference.spec, reference.weights, token_ids, torch.float64)
        np.savez_compressed(
            golden_path(case), token_ids=token_ids.astype(np.int32), logits=double.astype("<f4")
        )
        own = np.abs(reference.logits(token_ids) - double).max()
        gap = np.abs(single - double).max()
        print(f"{case}: float32 within {gap:.1e}, numpy within {own:.1e}, {path.stat().st_size} B")


if __name__ == "__main__":
    main()
