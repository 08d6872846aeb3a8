"""The I/O engine under sanitizers, with short, interrupted and failed reads put into it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["io_engine.c", "io_file.c", "io_pool.c", "io_probe.c", "io_uring.c", "wait.c"]
FLAGS = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]
WRAP = "-Wl,--wrap=io_piece_done"


def build(compiler: str, sanitize: str, folder: Path) -> Path:
    """The program, or a skip where the compiler cannot link this sanitizer."""
    flags = [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [compiler, *flags, "probe.c", "-o", "probe"]
    linked = subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
    runs = linked and subprocess.run([folder / "probe"], check=False).returncode == 0
    if not runs:
        pytest.skip(f"{compiler} has no working -fsanitize={sanitize} here")
    source = ROOT / "kernels" / "src"
    main = Path(__file__).with_name("io_sanitize_main.c")
    files = [str(main), *(str(source / name) for name in SOURCES)]
    program = folder / "io_sanitize"
    built = subprocess.run(
        [compiler, *FLAGS, *flags, f"-I{source}", *files, WRAP, "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0 and built.stderr == "", built.stderr
    return program


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_engine_survives_bad_results(sanitize: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) on the path")
    program = build(compiler, sanitize, tmp_path)
    result = subprocess.run(
        [program, tmp_path / "file.bin"], capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-2:] == ["pool", "pool buffered"]
