"""Makes `scenarios/library/recorded_text.trace`: some layers and tokens of a whole recording.

`polyneuron profile -m smollm2-135m-drelu-q8_0.gguf --text tests/data/text/genesis_1_12.txt
--tokens 256 --predictor none --record whole.trace`, then
`python -m tests.support.make_recorded_text whole.trace`.
"""

import sys
from dataclasses import replace
from pathlib import Path

from polyneuron.io.activation_trace import ActivationTrace, read_trace, write_trace
from polyneuron.scenarios.library import LIBRARY

LAYERS = (1, 8, 12, 20, 28)
NUM_TOKENS = 100


def cut(whole: ActivationTrace) -> None:
    """Write the cut; it is of no model's file, and says which layers it has."""
    layers = ", ".join(map(str, LAYERS))
    head = replace(
        whole.head, model_key=f"layers {layers} of {whole.head.model_key}",
        num_layers=len(LAYERS), num_tokens=NUM_TOKENS, starts=(0,),
    )  # fmt: skip
    blocks = (whole.bits[layer, :NUM_TOKENS].tobytes() for layer in LAYERS)
    write_trace(LIBRARY / "recorded_text.trace", head, blocks)


if __name__ == "__main__":
    cut(read_trace(Path(sys.argv[1])))
