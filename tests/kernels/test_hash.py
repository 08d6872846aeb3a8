"""Every kernel on every instruction set: one hash of all results, natively and under qemu.

`pytest -s tests/kernels/test_hash.py` prints the table. Nothing here has run on an ARM CPU itself.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyneuron.kernels import isa as isa_module
from tests.kernels.c_programs import (
    KERNEL_FOLDER,
    TEST_FOLDER,
    Cpu,
    ProgramBuilder,
    kernel_sources,
    run_program,
)

NATIVE = Cpu(platform.machine())
CORTEX_A53 = Cpu("aarch64", "cortex-a53")
CORTEX_A76 = Cpu("aarch64", "cortex-a76", min_qemu=(7, 1))
ARM_MAX = Cpu("aarch64", "max", min_qemu=(6, 1))
HASWELL = Cpu("x86_64", "Haswell", min_qemu=(7, 2))
NEHALEM = Cpu("x86_64", "Nehalem")

TABLES = [
    *((NATIVE, name) for name in isa_module.supported()),
    (HASWELL, "avx2"),
    (NEHALEM, "scalar"),
    (CORTEX_A53, "scalar"),
    (CORTEX_A53, "neon"),
    (CORTEX_A76, "neon_dotprod"),
    (ARM_MAX, "neon"),
    (ARM_MAX, "neon_dotprod"),
    (ARM_MAX, "neon_i8mm"),
]
CHOSEN = [
    (HASWELL, "avx2"),
    (NEHALEM, "scalar"),
    (CORTEX_A53, "neon"),
    (CORTEX_A76, "neon_dotprod"),
    (ARM_MAX, "neon_i8mm"),
]
REFUSED = [
    (NEHALEM, "avx2"),
    (HASWELL, "avx512"),
    (CORTEX_A53, "neon_dotprod"),
    (CORTEX_A76, "neon_i8mm"),
]
MACHINES = ("x86_64", "aarch64")


@pytest.fixture(scope="module")
def builders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ProgramBuilder]]:
    """One builder a machine; what it compiles serves all tests of this file."""
    folder = tmp_path_factory.mktemp("programs")
    yield {machine: ProgramBuilder(machine, folder) for machine in {*MACHINES, NATIVE.machine}}


class Programs:
    """One program by machine, built when asked for: a missing compiler skips only its rows."""

    def __init__(self, builders: dict[str, ProgramBuilder], sources: list[Path]) -> None:
        self._builders = builders
        self._sources = sources
        self._built: dict[str, Path] = {}

    def on(self, machine: str) -> Path:
        if machine not in self._built:
            name = self._sources[0].stem
            self._built[machine] = self._builders[machine].build(name, self._sources)
        return self._built[machine]


@pytest.fixture(scope="module")
def hash_programs(builders: dict[str, ProgramBuilder]) -> Programs:
    """The program that hashes the results of all kernels."""
    names = ("hash_main.c", "kernel_runs.c", "kernel_extremes.c")
    return Programs(builders, [*(TEST_FOLDER / name for name in names), *kernel_sources()])


def kernel_hash(programs: Programs, cpu: Cpu, isa: str | None) -> list[str]:
    """Instruction set, number of results and hash, as the program prints them."""
    ran = run_program(cpu, programs.on(cpu.machine), isa)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.split()


def ids(rows: list[tuple[Cpu, str]]) -> list[str]:
    return [f"{cpu.name} {isa}".replace(" ", "-") for cpu, isa in rows]


@pytest.mark.parametrize(("cpu", "isa"), TABLES, ids=ids(TABLES))
def test_every_table_has_the_hash_of_scalar(hash_programs: Programs, cpu: Cpu, isa: str) -> None:
    result = kernel_hash(hash_programs, cpu, isa)
    print(f"\n{cpu.name:20} {result[0]:13} {result[1]} results, hash {result[2]}", end="")
    assert result[0] == isa
    assert result[1:] == kernel_hash(hash_programs, NATIVE, "scalar")[1:]


@pytest.mark.parametrize(("cpu", "isa"), CHOSEN, ids=ids(CHOSEN))
def test_a_cpu_gets_its_best_table(hash_programs: Programs, cpu: Cpu, isa: str) -> None:
    assert kernel_hash(hash_programs, cpu, None)[0] == isa


@pytest.mark.parametrize(("cpu", "isa"), REFUSED, ids=ids(REFUSED))
def test_a_cpu_refuses_what_it_lacks(hash_programs: Programs, cpu: Cpu, isa: str) -> None:
    ran = run_program(cpu, hash_programs.on(cpu.machine), isa)
    assert (ran.returncode, ran.stdout) == (2, "not available here\n")


@pytest.mark.parametrize("cpu", [CORTEX_A53, ARM_MAX], ids=lambda cpu: cpu.model)
def test_neuron_cache_keeps_its_rules(builders: dict[str, ProgramBuilder], cpu: Cpu) -> None:
    sources = [*sorted(KERNEL_FOLDER.glob("neuron_cache*.c")), KERNEL_FOLDER / "wait.c"]
    main = TEST_FOLDER / "neuron_cache_sanitize_main.c"
    program = builders[cpu.machine].build("neuron_cache", [main, *sources])
    ran = run_program(cpu, program)
    assert (ran.returncode, ran.stdout) == (0, "no rule broken\n"), ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def step_programs(builders: dict[str, ProgramBuilder]) -> Programs:
    """The whole library, and steps on its board."""
    return Programs(builders, [TEST_FOLDER / "engine_main.c", *KERNEL_FOLDER.glob("*.c")])


@pytest.mark.parametrize("num_executors", ["2", "5"])
@pytest.mark.parametrize("cpu", [NATIVE, CORTEX_A53, ARM_MAX], ids=lambda cpu: cpu.name)
def test_steps_have_one_hash(step_programs: Programs, cpu: Cpu, num_executors: str) -> None:
    ran = run_program(cpu, step_programs.on(cpu.machine), None, num_executors)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    alone = run_program(NATIVE, step_programs.on(NATIVE.machine), "scalar", "2")
    assert ran.stdout.split()[1] == alone.stdout.split()[1]
