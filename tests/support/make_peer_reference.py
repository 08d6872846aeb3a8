"""Writes tests/data/golden/smollm2_peer.npz: a plain text by float32 and by llama.cpp.

Run from the repository root as `python -m tests.support.make_peer_reference TEXT_FILE`, in an
environment with the extra `peer`.
"""

import sys
from pathlib import Path

import llama_cpp
import numpy as np

from polyneuron.io.gguf_file import read_header
from polyneuron.model.locate import locate_model
from polyneuron.model.tokenizer import Tokenizer
from tests.support.golden import PEER, TOP, log_probabilities
from tests.support.reference_model import ReferenceModel

FIRST_CHARACTER, LAST_CHARACTER, NUM_TOKENS = 3000, 9000, 800


def main(text_file: str) -> None:
    """Write token ids, the reference's five best tokens, and both sides' log-probabilities."""
    path = locate_model("smollm2")
    tokenizer = Tokenizer.from_metadata(read_header(path).metadata, path.name)
    text = Path(text_file).read_text()[FIRST_CHARACTER:LAST_CHARACTER]
    token_ids = tokenizer.encode(text, parse_special=False)[:NUM_TOKENS]
    reference = log_probabilities(ReferenceModel(path, np.float32).logits(np.array(token_ids)))
    top_ids = np.argsort(-reference, axis=1)[:, :TOP]
    peer = llama_cpp.Llama(
        str(path), n_ctx=1024, n_batch=512, logits_all=True, verbose=False, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    peer.eval(token_ids)
    rows = log_probabilities(peer.scores[: len(token_ids)])
    np.savez_compressed(
        PEER,
        token_ids=np.array(token_ids, dtype=np.int32),
        top_ids=top_ids,
        float32=np.take_along_axis(reference, top_ids, axis=1).astype(np.float32),
        llama_cpp=np.take_along_axis(rows, top_ids, axis=1).astype(np.float32),
    )


if __name__ == "__main__":
    main(sys.argv[1])
