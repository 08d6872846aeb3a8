"""The files of random weights that engines are timed on, as `polyneuron synth` writes them.

`python -m tests.bench.random_model` writes the dense one into the cache folder, a neuron-cluster
file and its GGUF twin of 4.1 GB each, and prints the twin's path; files that are there are left.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from polyneuron.config import cache_folder
from polyneuron.errors import PolyneuronError
from polyneuron.io.predictor_file import predictor_path
from polyneuron.synth.shapes import shape_spec
from polyneuron.synth.write import RECIPE, SynthSettings, synthesize

DENSE = "mistral-7b"
PROFILED_TOKENS, KEPT, RANK = 2048, "0.98", "1024"
"""What predictors of the sparse shape are fitted with."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """One model in both formats."""

    shape: str
    folder: Path
    num_layers: int | None = None
    """Fewer than the shape has; None: all of them."""

    @property
    def ncf(self) -> Path:
        """For polyneuron."""
        depth = f"-{self.num_layers}-layers" if self.num_layers else ""
        return self.folder / f"{RECIPE}-{self.shape}{depth}-q4.ncf"

    @property
    def gguf(self) -> Path:
        """The same weights, for a peer."""
        return self.ncf.with_suffix(".gguf")

    @property
    def is_there(self) -> bool:
        """Whether both have been written."""
        return self.ncf.is_file() and self.gguf.is_file()


def random_model(shape: str = DENSE, num_layers: int | None = None) -> RandomModel:
    """Where the files of a shape are, or will be; `make clean` removes them."""
    return RandomModel(shape, cache_folder(), num_layers)


def ensure_model(shape: str = DENSE, num_layers: int | None = None) -> RandomModel:
    """The files in the cache folder, written where they are missing."""
    model = random_model(shape, num_layers)
    if not model.is_there:
        note(f"writing {model.ncf} and its GGUF twin; `make clean` removes them")
        model.folder.mkdir(parents=True, exist_ok=True)
        try:
            for report in synthesize(_settings(model), model.ncf, model.gguf):
                note(f"{report.output}: {report.file_bytes >> 20} MiB, {report.seconds:.0f} s")
        except PolyneuronError as error:
            raise SystemExit(f"error: {error}") from None
    return model


def _settings(model: RandomModel) -> SynthSettings:
    """Sparse shapes as after `profile --reorder`: hottest neurons first; experts have no order."""
    settings = SynthSettings(shape_spec(model.shape, num_layers=model.num_layers))
    is_ordered = settings.is_sparse and settings.spec.experts is None
    return replace(settings, is_hot_first=is_ordered)


def ensure_predictors(model: RandomModel, rank: str = RANK) -> None:
    """Profile a sparse model where that has not been done."""
    if not predictor_path(model.ncf).is_file():
        command = [sys.executable, "-m", "polyneuron", "profile", "-m", str(model.ncf)]
        command += ["--random-tokens", str(PROFILED_TOKENS), "--recall", KEPT, "--rank", rank]
        subprocess.run(command, check=True)


def note(line: str) -> None:
    """A line beside the results."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Make sure of the dense files and print the twin's path."""
    print(ensure_model().gguf)


if __name__ == "__main__":
    main()
