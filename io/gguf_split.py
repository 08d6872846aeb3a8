"""Models split into several GGUFs, as llama-gguf-split and the hub cut them.

`NAME-00001-of-00003.gguf` counts from 1, its key `split.no` from 0; only the first part has the
model's metadata, and it may hold no tensors; `split.tensors.count` is the number over all parts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from polyneuron.errors import FormatError
from polyneuron.io.file_kind import GGUF_MAGIC
from polyneuron.io.gguf_file import GgufHeader, read_header
from polyneuron.io.gguf_values import quoted, quoted_value, some_of
from polyneuron.io.model_files import Extent, ModelFiles

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
MAX_PARTS = 10_000
MAX_NAMED = 3


def read_gguf(path: Path, magics: tuple[bytes, ...] = (GGUF_MAGIC,)) -> GgufHeader:
    """The header of a GGUF, of all its parts when it is one of several."""
    header = read_header(path, magics)
    count = header.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_PARTS:
        raise FormatError(
            f"{path}: split.count is {quoted_value(count)}; a number of parts is expected"
        )
    return header if count <= 1 else _joined(header, count)


def gguf_of_folder(folder: Path) -> Path:
    """The one model in a folder: a GGUF, or the first part of one; FormatError names several."""
    files = sorted(folder.glob("*.gguf"))
    models: dict[str, Path] = {}
    for file in files:
        if "mmproj" not in file.name or len(files) == 1:  # a projector lies beside its model
            named = PART_NAME.fullmatch(file.name)
            models.setdefault(named["stem"] if named else file.name, file)
    if len(models) == 1:
        return next(iter(models.values()))
    if not models:
        raise FormatError(
            f"{folder}: a folder without a model; one with config.json and *.safetensors, or with "
            "one .gguf file or all parts of one, is expected"
        )
    shown = some_of([file.name for file in models.values()], MAX_NAMED)
    raise FormatError(f"{folder}: a folder of {len(models)} models ({shown}); give one file")


def _joined(given: GgufHeader, count: int) -> GgufHeader:
    """All parts' tensors behind the first one's metadata."""
    headers = [_read_part(path, i, count) for i, path in enumerate(_part_paths(given, count))]
    first, begin, extents, tensors = headers[0], 0, [], []
    for header in headers:
        extents.append(Extent(begin, header.file_bytes, header.path))
        tensors += [replace(t, offset=begin + t.offset) for t in header.tensors]
        begin += header.file_bytes
    by_name = {tensor.name: tensor for tensor in tensors}
    _check_total(first, headers, len(by_name))
    return replace(
        first,
        tensors=tuple(tensors),
        by_name=by_name,
        file_bytes=begin,
        files=ModelFiles(tuple(extents), tuple(header.path for header in headers)),
    )


def _part_paths(given: GgufHeader, count: int) -> list[Path]:
    path, number = given.path, given.metadata.get("split.no", 0)
    named = PART_NAME.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        shown = number + 1 if isinstance(number, int) else "?"
        wanted = f"NAME-{shown:0>5}-of-{count:05}.gguf"
        raise FormatError(
            f"{path}: part {shown} of {count} by its metadata, but not by its name; give every "
            f"part its name back ({wanted}), or join them with llama-gguf-split --merge, never "
            "with cat"
        )
    paths = [
        path.with_name(f"{named['stem']}-{part:05}-of-{count:05}.gguf")
        for part in range(1, count + 1)
    ]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise FormatError(
            f"{path}: of {count} parts {len(missing)} missing beside it: "
            f"{some_of(missing, MAX_NAMED)}; fetch what is missing into the same folder"
        )
    return paths


def _read_part(path: Path, index: int, count: int) -> GgufHeader:
    header = read_header(path)
    found = header.metadata.get("split.no"), header.metadata.get("split.count")
    if found != (index, count):
        no, total = found
        said = f"part {no + 1} of {total}" if isinstance(no, int) else "no part of a model"
        raise FormatError(
            f"{path}: {said} by its metadata, part {index + 1} of {count} by its name; fetch it "
            "again"
        )
    return header


def _check_total(first: GgufHeader, headers: list[GgufHeader], num_names: int) -> None:
    found = sum(len(header.tensors) for header in headers)
    if found != num_names:
        seen: set[str] = set()
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in seen:
                    raise FormatError(
                        f"{header.path}: tensor {quoted(tensor.name)} is in an earlier part too; "
                        "parts of two models? fetch them again"
                    )
                seen.add(tensor.name)
    wanted = first.metadata.get("split.tensors.count", found)
    if wanted != found:
        raise FormatError(
            f"{first.path}: split.tensors.count is {quoted_value(wanted)}, the {len(headers)} "
            f"parts hold {found} tensors; parts of another model? fetch them again"
        )
