"""Writes Q4_0 GGUF files of random weights with a real model's shape, to time engines on.

`python -m tests.bench.random_model` writes the 7B shape into the cache folder, 3.8 GB, and prints
its path; a file that is there already is left as it is.
"""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray

from polyneuron.kernels.gemv import FeedForwardKind, RopeLayout
from polyneuron.model.spec import ModelSpec, RopeSpec, tensor_shapes

LLAMA_2_7B = ModelSpec(
    family="llama",
    name="random weights, Llama-2-7B's shape",
    num_layers=32,
    d_model=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    d_ff=11008,
    vocab_size=32000,
    context_length=4096,
    norm_eps=1e-5,
    rope=RopeSpec(layout=RopeLayout.INTERLEAVED, rotary_dim=128, base=10000.0),
    feed_forward=FeedForwardKind.SILU,
    qk_norm=False,
    qkv_bias=False,
    output_bias=False,
    tied_head=False,
)
SMALL = replace(
    LLAMA_2_7B, name="small", num_layers=2, d_model=128, num_heads=4, num_kv_heads=4, head_dim=32,
    d_ff=192, vocab_size=512, context_length=256, rope=replace(LLAMA_2_7B.rope, rotary_dim=32),
)  # fmt: skip
"""The same kind of model, written in no time."""
FILE_NAME = "random-7b-q4_0.gguf"
WEIGHT_STD = 0.02
MOSTLY_Q4_0 = 2
Q4_0_BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
ROW_BLOCK = 32
NIBBLE_STD = ((16**2 - 1) / 12) ** 0.5
SPARE_BYTES = 256 << 20
MIN_TOKENS = 3 + 256 + 1


def cache_folder() -> Path:
    """Where big made files live; `make clean` empties it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "polyneuron"


def tensor_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor: vectors are F32, matrices Q4_0."""
    count = int(np.prod(shape, dtype=np.int64))
    return count * 4 if len(shape) == 1 else count // ROW_BLOCK * Q4_0_BLOCK.itemsize


def random_blocks(rng: np.random.Generator, num_bytes: int) -> NDArray[np.uint8]:
    """Q4_0 blocks with values of standard deviation WEIGHT_STD, about."""
    raw = np.frombuffer(bytearray(rng.bytes(num_bytes)), dtype=np.uint8)
    blocks = raw.view(Q4_0_BLOCK)
    scale = WEIGHT_STD / NIBBLE_STD
    signs = rng.choice(np.array([-1, 1], dtype=np.float32), len(blocks))
    # Both signs, as real files have them: nibbles reach from -8 to 7, their mean is not 0.
    blocks["scale"] = scale * signs * rng.uniform(0.7, 1.3, len(blocks)).astype(np.float32)
    return raw


def _add_vocabulary(writer: GGUFWriter, num_tokens: int) -> None:
    """An SPM vocabulary: control tokens, all bytes, the space, and pieces that no text holds."""
    assert num_tokens >= MIN_TOKENS
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    tokens += [f"\u2581piece{number}" for number in range(num_tokens - len(tokens))]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [TokenType.NORMAL] * (num_tokens - len(types))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(num_tokens)])
    writer.add_token_types([int(kind) for kind in types])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_keys(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_name(spec.name)
    writer.add_file_type(MOSTLY_Q4_0)
    writer.add_quantization_version(2)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.d_model)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.d_ff)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.rope.rotary_dim)
    writer.add_rope_freq_base(spec.rope.base)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_vocab_size(spec.vocab_size)


def write_random_model(path: Path, spec: ModelSpec, seed: int = 0) -> int:
    """Write the file tensor by tensor, in place when whole; returns its bytes of weights."""
    shapes = tensor_shapes(spec)
    total = sum(map(tensor_bytes, shapes.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < total + SPARE_BYTES:
        need = (total + SPARE_BYTES) >> 20
        raise SystemExit(f"error: {path.parent} has {free >> 20} MiB free, {need} MiB are needed")
    part = path.with_suffix(".part")
    writer = GGUFWriter(part, spec.family)
    try:
        _add_keys(writer, spec)
        _add_vocabulary(writer, spec.vocab_size)
        for name, shape in shapes.items():
            is_vector = len(shape) == 1
            kind = GGMLQuantizationType.F32 if is_vector else GGMLQuantizationType.Q4_0
            writer.add_tensor_info(name, shape, np.dtype("f4"), tensor_bytes(shape), kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        rng = np.random.default_rng(seed)
        for shape in shapes.values():
            if len(shape) == 1:
                writer.write_tensor_data(np.ones(shape, dtype=np.float32))
            else:
                writer.write_tensor_data(random_blocks(rng, tensor_bytes(shape)))
        writer.close()
        part.replace(path)
    finally:
        writer.close()
        part.unlink(missing_ok=True)
    return total


def ensure_model() -> Path:
    """The 7B file in the cache folder, written where it is missing."""
    path = cache_folder() / FILE_NAME
    if not path.is_file():
        note = f"writing {path}: 3.8 GB of random weights; `make clean` removes it"
        print(note, file=sys.stderr, flush=True)
        write_random_model(path, LLAMA_2_7B)
    return path


def main() -> None:
    """Make sure of the 7B file and print its path."""
    print(ensure_model())


if __name__ == "__main__":
    main()
