"""What reads files in C under sanitizers, with short, interrupted and failed reads put into it."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["io_engine.c", "io_file.c", "io_pool.c", "io_probe.c", "io_uring.c", "wait.c"]
FLAGS = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]


@dataclass(frozen=True)
class Program:
    """A C program beside this file, and whose functions it puts its own in front of."""

    main: str
    wrapped: tuple[str, ...]
    last_lines: tuple[str, ...]
    more_sources: tuple[str, ...] = ()


PROGRAMS = [
    Program("io_sanitize_main.c", ("io_piece_done",), ("pool", "pool buffered")),
    Program(
        "reads_sanitize_main.c",
        ("monotonic_ns", "io_submit", "io_reap"),
        ("pool",),
        (
            "neuron_cache.c",
            "neuron_cache_policy.c",
            "neuron_cache_regions.c",
            "neuron_reads.c",
            "trace.c",
        ),
    ),
]


def build(program: Program, compiler: str, sanitize: str, folder: Path) -> Path:
    """The program, or a skip where the compiler cannot link this sanitizer."""
    flags = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [compiler, *flags, "probe.c", "-o", "probe"]
    linked = subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
    runs = linked and subprocess.run([folder / "probe"], check=False).returncode == 0
    if not runs:
        pytest.skip(f"{compiler} has no working -fsanitize={sanitize} here")
    source = ROOT / "kernels" / "src"
    main = Path(__file__).with_name(program.main)
    files = [str(main), *(str(source / name) for name in (*SOURCES, *program.more_sources))]
    wraps = [f"-Wl,--wrap={name}" for name in program.wrapped]
    target = folder / "sanitize"
    built = subprocess.run(
        [compiler, *FLAGS, *flags, f"-I{source}", *files, *wraps, "-o", str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0 and built.stderr == "", built.stderr
    return target


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.main)
@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_bad_results_are_survived(program: Program, sanitize: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) on the path")
    command = [build(program, compiler, sanitize, tmp_path), tmp_path / "file.bin"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert tuple(lines[-len(program.last_lines) :]) == program.last_lines
