"""Records which neurons each token needs while a text is profiled (docs/PROFILE.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from polyneuron.errors import ConfigError
from polyneuron.io.activation_trace import TraceHead, needed_words, trace_bytes, write_trace
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import NcfFile
from polyneuron.io.piece_writer import check_free_space, check_output
from polyneuron.io.predictor_file import model_key, predictor_path
from polyneuron.io.profile_file import profile_path
from polyneuron.model.spec import ModelSpec
from polyneuron.planning.bundles import neuron_rows
from polyneuron.profiling.sample import LayerSample


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recording that was written."""

    path: Path
    num_tokens: int
    num_bytes: int


def check_recording(model: Path, output: Path, *, force: bool) -> None:
    """Raise ConfigError before any work when a recording cannot be written there."""
    check_output(output)
    taken = {model: "the model itself", profile_path(model): "the profile's name",
             predictor_path(model): "the predictors' name"}  # fmt: skip
    for path, what in taken.items():
        if output.resolve() == path.resolve():
            raise ConfigError(f"--record {output}: {what}; give another name")
    if output.exists() and not force:
        raise ConfigError(f"--record {output}: exists; give another name, or --force")


def recording_head(
    ncf: NcfFile, spec: ModelSpec, sequences: list[list[int]], text_key: str, output: Path
) -> TraceHead:
    """What is recorded of a text; ConfigError when there is no room for it."""
    if spec.experts is not None:
        raise ConfigError(
            f"--record {output}: what tokens need of a mixture of experts is not recorded; leave "
            "it out"
        )
    has_bundles = ncf.manifest.layout is Layout.BUNDLES
    task = neuron_rows(ncf.manifest).cluster_neurons if has_bundles else 0
    ends = list(accumulate(len(sequence) for sequence in sequences))
    head = TraceHead(
        model_key(ncf.manifest), text_key, spec.num_layers, spec.d_ff, ends[-1],
        task, (0, *ends[:-1]),
    )  # fmt: skip
    check_free_space({output: trace_bytes(head)})
    return head


def layer_block(sample: LayerSample) -> bytes:
    """One layer's words: a neuron is needed where the value that decides is above zero."""
    return needed_words(sample.needed).tobytes()


def write_recording(output: Path, head: TraceHead, blocks: Iterator[bytes]) -> Recorded:
    """Write or replace it, at once or not at all; DeviceError names the file."""
    write_trace(output, head, blocks)
    return Recorded(output, head.num_tokens, trace_bytes(head))
