"""Builds C programs for this and other CPUs and runs them, under qemu where the CPU is another."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from polyneuron.kernels.build_kernels import COMPILE_FLAGS
from polyneuron.kernels.isa import FORCE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
KERNEL_FOLDER = ROOT / "kernels" / "src"
TEST_FOLDER = Path(__file__).parent
CROSS_COMPILERS = {
    "aarch64": ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    "x86_64": ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu libc6-dev-amd64-cross"),
}
RUN_S = 120
"""Longest run of one program under qemu on a busy machine."""


def kernel_sources() -> list[Path]:
    """The C files that hold the kernels, apart from the engine's and the reader's."""
    names = ("crc32c", "dispatch", "kv_quants", "pack", "random_rows", "row_tiles")
    tables = sorted(KERNEL_FOLDER.glob("kernels_*.c"))
    return [*(KERNEL_FOLDER / f"{name}.c" for name in names), *tables]


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor to run programs on: this machine's own, or one that qemu imitates."""

    machine: str
    model: str = ""
    min_qemu: tuple[int, int] = (0, 0)
    """The first version of qemu that imitates it with all that it has."""

    @property
    def name(self) -> str:
        return f"{self.machine} {self.model or 'native'}"

    def command(self, program: Path) -> list[str]:
        """How `program` is run on it; skips the test where there is no qemu that can."""
        if not self.model:
            return [str(program)]
        qemu = shutil.which(f"qemu-{self.machine}")
        if qemu is None:
            pytest.skip(f"no qemu-{self.machine} on the path: apt install qemu-user")
        if qemu_version(qemu) < self.min_qemu:
            pytest.skip(f"{qemu} is older than {self.min_qemu[0]}.{self.min_qemu[1]}")
        return [qemu, "-cpu", self.model, str(program)]


@cache
def qemu_version(qemu: str) -> tuple[int, int]:
    """Of a qemu program, as it says itself."""
    said = subprocess.run([qemu, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


class ProgramBuilder:
    """Compiles C files with the flags of the kernels; an object is shared by all programs."""

    def __init__(self, machine: str, folder: Path) -> None:
        self.machine = machine
        self.folder = folder / machine
        self.folder.mkdir(parents=True)
        self._objects: dict[Path, Path] = {}

    def compiler(self) -> str:
        """The compiler for this machine's programs; skips the test where there is none."""
        if self.machine == platform.machine():
            path = shutil.which("cc") or shutil.which("gcc")
            if path is None:
                pytest.skip("no C compiler (cc or gcc) on the path")
            return path
        name, packages = CROSS_COMPILERS[self.machine]
        path = shutil.which(name)
        if path is None:
            pytest.skip(f"no {name} on the path: apt install {packages}")
        return path

    def build(self, name: str, sources: Iterable[Path]) -> Path:
        """The linked program; one for another machine brings its libraries with it."""
        compiler = self.compiler()
        wanted = list(sources)
        missing = [source for source in wanted if source not in self._objects]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            compiled = pool.map(lambda source: self._compile(compiler, source), missing)
            self._objects.update(zip(missing, compiled, strict=True))
        program = self.folder / name
        objects = [str(self._objects[source]) for source in wanted]
        static = [] if self.machine == platform.machine() else ["-static"]
        run_compiler([compiler, *static, "-pthread", *objects, "-lm", "-o", str(program)])
        return program

    def _compile(self, compiler: str, source: Path) -> Path:
        object_path = self.folder / f"{source.stem}.o"
        include = [f"-I{KERNEL_FOLDER}", f"-I{TEST_FOLDER}"]
        flags = [*COMPILE_FLAGS, *include, "-pthread", "-c", str(source)]
        run_compiler([compiler, *flags, "-o", str(object_path)])
        return object_path


def run_compiler(command: Sequence[str]) -> None:
    """Run it; a message of the compiler, warnings too, fails the test."""
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and built.stderr == "", built.stderr


def run_program(
    cpu: Cpu, program: Path, isa: str | None = None, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run it on `cpu` with the kernels of `isa`; None: with those it chooses."""
    environment = {k: v for k, v in os.environ.items() if k != FORCE_VARIABLE}
    if isa is not None:
        environment[FORCE_VARIABLE] = isa
    return subprocess.run(
        [*cpu.command(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
