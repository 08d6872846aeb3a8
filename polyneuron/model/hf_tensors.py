"""A checkpoint's tensors by the names, shapes and addresses that a GGUF's have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from polyneuron.errors import FormatError, UnsupportedError
from polyneuron.io.gguf_tensors import GgufTensor
from polyneuron.io.gguf_values import quoted
from polyneuron.io.model_files import Extent, RowSwap
from polyneuron.io.safetensors_file import SafeTensor, SafetensorsFile
from polyneuron.model.hf_config import HfConfig
from polyneuron.model.hf_families import GROUPED_QKV, OF_NO_USE, HfFamily

LAYER_NAME = re.compile(
    r"(?:(?:model\.)?(?:decoder\.)?layers|transformer\.h)\.([0-9]{1,6})\.(.+)\.(weight|bias)"
)
EXPERT = re.compile(r"(.*\.experts\.)([0-9]{1,6})(\..+)")
GGML_TYPE = {"F32": 0, "F16": 1, "BF16": 30}
WIDTH = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class Found:
    """One tensor of a shard."""

    file: SafetensorsFile
    name: str
    entry: SafeTensor

    def fail(self, message: str) -> NoReturn:
        """FormatError naming the shard and the tensor."""
        raise FormatError(f"{self.file.path}: tensor {quoted(self.name)} {message}")


def gguf_name(family: HfFamily, name: str) -> tuple[str, int | None]:
    """What a GGUF calls a tensor, and which expert of a stack it is; a stranger keeps its name."""
    if named := LAYER_NAME.fullmatch(name):
        layer, role, kind = named.groups()
        expert = EXPERT.fullmatch(role)
        found = family.layer.get(f"{expert[1]}*{expert[3]}" if expert else role)
        if found is not None:
            return f"blk.{layer}.{found}.{kind}", int(expert[2]) if expert else None
    stem, _, kind = name.rpartition(".")
    found = family.outside.get(stem)
    return (name, None) if found is None else (f"{found}.{kind}", None)


class TensorTable:
    """Lays tensors out one after another; the order is that in which they were added."""

    def __init__(self, config: HfConfig) -> None:
        self.config = config
        self.tensors: list[GgufTensor] = []
        self.extents: list[Extent] = []
        self._end = 0
        self._names: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return self._end

    def add_all(self, found: Iterable[Found]) -> None:
        """All tensors of the shards, experts joined into stacks."""
        stacks: dict[str, dict[int, Found]] = {}
        for one in sorted(found, key=lambda f: (str(f.file.path), f.entry.begin)):
            if one.name.removesuffix(".weight").endswith(OF_NO_USE):
                continue
            name, expert = gguf_name(self.config.family, one.name)
            if expert is None:
                self._add(name, [one])
            else:
                stacks.setdefault(name, {})[expert] = one
        for name, parts in stacks.items():
            self._add(name, self._complete(name, parts))

    def add_made(self, name: str, values: Iterable[float]) -> None:
        """A float vector that is in no file."""
        made = np.fromiter(values, "<f4").tobytes()
        self._place(name, 0, (len(made) // 4,), [Extent(0, len(made), made=made)])

    def _complete(self, name: str, parts: Mapping[int, Found]) -> list[Found]:
        """The experts of a stack in order; FormatError names what is missing."""
        first = parts[min(parts)]
        for expert in range(max(parts) + 1):
            if expert not in parts:
                raise FormatError(
                    f"{first.file.path.parent}: expert {expert} of {name} is missing; fetch the "
                    "checkpoint again"
                )
            if parts[expert].entry.shape != first.entry.shape:
                parts[expert].fail(f"has another shape than {quoted(first.name)}")
            if parts[expert].entry.dtype != first.entry.dtype:
                parts[expert].fail(f"has another type than {quoted(first.name)}")
        return [parts[expert] for expert in range(len(parts))]

    def _add(self, name: str, parts: list[Found]) -> None:
        entry = parts[0].entry
        if entry.dtype not in GGML_TYPE:
            raise UnsupportedError(
                f"{parts[0].file.path}: tensor {quoted(parts[0].name)} has type "
                f"{quoted(entry.dtype)}; supported: {' '.join(GGML_TYPE)}; give the checkpoint "
                "before it was quantised, or a GGUF"
            )
        shape = entry.shape if len(parts) == 1 else (len(parts), *entry.shape)
        if len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]  # a gate of one row is a vector in a GGUF
        if not shape or not math.prod(shape):
            parts[0].fail(f"has the shape {entry.shape}, of no use")
        role = name.rpartition(".")[0].rpartition(".")[2]
        if name in self._names:
            parts[0].fail(f"is {name}, as another one is; two checkpoints in one folder?")
        self._names.add(name)
        if role in self.config.family.adds_one:
            self.add_made(name, _values(parts[0]) + np.float32(1.0))
            return
        if role == GROUPED_QKV:
            self._add_groups(name, parts[0])
            return
        swap = self._swap(role, entry)
        places = [
            Extent(0, p.entry.end - p.entry.begin, p.file.path, p.entry.begin, swap) for p in parts
        ]
        self._place(name, GGML_TYPE[entry.dtype], shape, places)

    def _add_groups(self, name: str, part: Found) -> None:
        """Query, key and value rows of all groups, as the three matrices they are."""
        entry, head, config = part.entry, self.config.head_dim, self.config
        groups, rows = config.count("num_key_value_heads"), entry.shape[0]
        queries = config.count("num_attention_heads") // groups
        if rows != groups * (queries + 2) * head:
            part.fail(f"has {rows} rows, not {groups} groups of {queries + 2} x {head}")
        row = (entry.end - entry.begin) // rows
        firsts = {"attn_q": (0, queries), "attn_k": (queries, 1), "attn_v": (queries + 1, 1)}
        for role, (first, heads) in firsts.items():
            starts = [(group * (queries + 2) + first) * head for group in range(groups)]
            places = [
                Extent(0, heads * head * row, part.file.path, entry.begin + start * row)
                for start in starts
            ]
            shape = (groups * heads * head, *entry.shape[1:])
            self._place(name.replace(GROUPED_QKV, role), GGML_TYPE[entry.dtype], shape, places)

    def _swap(self, role: str, entry: SafeTensor) -> RowSwap | None:
        rows, head = entry.shape[0], self.config.head_dim
        if role not in self.config.family.interleaved or rows % head or head % 2:
            return None
        return RowSwap(head, math.prod(entry.shape[1:]) * WIDTH[entry.dtype])

    def _place(
        self, name: str, type_id: int, shape: tuple[int, ...], parts: Iterable[Extent]
    ) -> None:
        begin = self._end
        for part in parts:
            self.extents.append(replace(part, begin=self._end))
            self._end += part.num_bytes
        self.tensors.append(GgufTensor(name, type_id, shape, begin, self._end - begin))


def _values(found: Found) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A vector's values in float32."""
    if len(found.entry.shape) != 1:
        found.fail(f"has the shape {found.entry.shape}; a vector is expected")
    return found.file.values(found.name)
