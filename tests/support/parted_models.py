"""A tiny model in several files: a GGUF cut into parts, by plain code."""

from pathlib import Path

from polyneuron.io.gguf_file import read_header
from polyneuron.io.gguf_writer import plan_gguf_file
from tests.support.tiny_gguf import TinyModel, random_weights, write_tiny_gguf


def part_path(folder: Path, number: int, count: int, stem: str = "tiny") -> Path:
    """Parts are named from 1 on."""
    return folder / f"{stem}-{number:05}-of-{count:05}.gguf"


def split_gguf(
    folder: Path,
    model: TinyModel | None = None,
    *,
    count: int = 3,
    num_in_first: int = 0,
    num_told: int | None = None,
) -> Path:
    """The first of `count` parts; only that one has the model's keys. `num_told`: split.tensors."""
    model = model or TinyModel()
    names = list(random_weights(model))
    later = names[num_in_first:]
    num = len(names) if num_told is None else num_told
    whole = write_tiny_gguf(folder / "whole", model)
    header, data = read_header(whole), whole.read_bytes()
    first = part_path(folder, 1, count)
    keys = {"split.no": 0, "split.count": count, "split.tensors.count": num}
    write_tiny_gguf(first, model, metadata=keys, skip_tensors=tuple(later))
    whole.unlink()
    share = -(-len(later) // (count - 1))
    for number in range(2, count + 1):
        inside = [header.tensor(name) for name in later[(number - 2) * share :][:share]]
        keys = {"split.no": number - 1, "split.count": count, "split.tensors.count": num}
        plan = plan_gguf_file(keys, inside)
        raw = bytearray(plan.file_bytes)
        raw[: len(plan.head)] = plan.head
        for old, new in zip(inside, plan.tensors, strict=True):
            raw[new.offset : new.offset + new.num_bytes] = data[
                old.offset : old.offset + old.num_bytes
            ]
        part_path(folder, number, count).write_bytes(raw)
    return first
