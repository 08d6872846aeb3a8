"""`polyneuron verify`: every checksum of a neuron-cluster file; header and bounds of a GGUF."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from polyneuron.cli import options
from polyneuron.cli.progress import LoadProgress
from polyneuron.io.file_kind import is_ncf
from polyneuron.io.gguf_file import check_supported
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.predictor_file import SOURCE_FORMAT as PREDICTORS
from polyneuron.model.architecture import describe
from polyneuron.model.locate import locate_model
from polyneuron.model.model_header import read_model_header
from polyneuron.model.ncf_spec import spec_of


def verify(
    file: Annotated[
        str, typer.Argument(help="a .ncf or .gguf file, a folder, or the word smollm2")
    ],
    as_json: options.Json = False,
) -> None:
    """Check a model file; a damaged one gives one line that says where, and exit code 2."""
    path = locate_model(file)
    found = verify_ncf(path) if is_ncf(path) else verify_gguf(path)
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(f"{path}: ok: {found['checked']}\n")


def verify_ncf(path: Path) -> dict[str, Any]:
    """Head, model (of predictors there is none) and every extent of every section."""
    ncf = read_ncf(path)
    if ncf.manifest.source.format != PREDICTORS:
        spec_of(ncf)
    total, done = ncf.file_bytes - ncf.data_offset, 0
    with LoadProgress("checking") as progress:

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total)

        ncf.check_all(count)
    num_extents = sum(section.num_extents for section in ncf.sections)
    checked = f"header, manifest, {num_extents:,} extents of {len(ncf.sections)} sections"
    return {"file": str(path), "format": "ncf", "checked": checked, "bytes": ncf.file_bytes}


def verify_gguf(path: Path) -> dict[str, Any]:
    """What a GGUF or a folder allows: their formats have no checksums."""
    header = read_model_header(path)
    check_supported(header)
    describe(header)
    kind = "a GGUF carries" if header.version else "safetensors carry"
    checked = f"header and bounds of {len(header.tensors)} tensors; {kind} no checksums"
    return {
        "file": str(path),
        "format": header.format,
        "checked": checked,
        "bytes": header.file_bytes,
    }
