"""`polyneuron synth`: a model file of random weights with a real model's shape."""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyneuron.cli.convert import LayoutChoice, note, note_wait
from polyneuron.cli.options import option
from polyneuron.cli.progress import LoadProgress

if TYPE_CHECKING:
    from polyneuron.synth.write import SynthReport

SHAPE = "Changes to the shape"


class Quant(StrEnum):
    """What `--quant` takes."""

    Q4 = "q4"
    Q8 = "q8"
    F16 = "f16"


def synth(
    shape: Annotated[
        str,
        typer.Argument(
            help="bamboo-7b, turbosparse-mistral-7b, turbosparse-mixtral-47b (dReLU), mistral-7b, "
            "llama-13b, smollm2-135m, qwen3moe-30b-a3b"
        ),
    ],
    output: Annotated[Path, option("--output", "-o", text="the .ncf file to write")],
    gguf: Annotated[
        Path | None,
        option("--gguf", text="its twin, the same weights; llama.cpp runs it, with SiLU for dReLU"),
    ] = None,
    sparsity: Annotated[
        float | None,
        option("--sparsity", text="share of neurons a token leaves inactive; 0.9"),
    ] = None,
    seed: Annotated[int, option("--seed", "-s", text="same seed, same bytes")] = 0,
    layout: Annotated[
        LayoutChoice, option("--layout", text="auto: bundles for dReLU")
    ] = LayoutChoice.AUTO,
    quant: Annotated[Quant, option("--quant", text="type of the matrices")] = Quant.Q4,
    hot_first: Annotated[
        bool, option("--hot-first", text="order bundles as a profile would")
    ] = False,
    layers: Annotated[int | None, option("--layers", panel=SHAPE, text="layers")] = None,
    d_model: Annotated[int | None, option("--d-model", panel=SHAPE, text="width")] = None,
    d_ff: Annotated[int | None, option("--d-ff", panel=SHAPE, text="neurons a layer")] = None,
    heads: Annotated[int | None, option("--heads", panel=SHAPE, text="attention heads")] = None,
    kv_heads: Annotated[
        int | None, option("--kv-heads", panel=SHAPE, text="key-value heads")
    ] = None,
    vocab: Annotated[int | None, option("--vocab", panel=SHAPE, text="tokens")] = None,
    force: Annotated[bool, option("--force", text="replace an output that differs")] = False,
) -> None:
    """Write random weights with a real model's shape and sparsity, to try a machine with."""
    from polyneuron.io.ncf_format import Layout
    from polyneuron.synth.shapes import shape_spec
    from polyneuron.synth.write import SynthSettings, synthesize

    spec = shape_spec(
        shape,
        num_layers=layers,
        d_model=d_model,
        d_ff=d_ff,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
    )
    settings = SynthSettings(
        spec=spec,
        quant=quant.value,
        sparsity=sparsity,
        seed=seed,
        layout=None if layout is LayoutChoice.AUTO else Layout(layout.value),
        is_hot_first=hot_first,
    )
    with ExitStack() as bars:

        def progress(path: Path) -> LoadProgress:
            bars.close()
            return bars.enter_context(LoadProgress(f"writing {path.name}"))

        for report in synthesize(
            settings, output, gguf, force=force, progress=progress, on_wait=note_wait
        ):
            bars.close()
            note_report(report)


def note_report(report: SynthReport) -> None:
    """What was written, and how fast."""
    mib = report.file_bytes / 2**20
    if report.was_there:
        note(f"{report.output}: written before, {mib:,.1f} MiB; nothing to do")
        return
    rate = (report.file_bytes - report.resumed_bytes) / 1e6 / max(report.seconds, 1e-9)
    resumed = report.resumed_bytes >> 20
    kept = f", {resumed:,} MiB of them from an earlier run" if resumed else ""
    note(
        f"{report.output}: {mib:,.1f} MiB in {report.kind}{kept}, "
        f"{report.seconds:.1f} s, {rate:,.0f} MB/s"
    )
