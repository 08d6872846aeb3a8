"""The neuron cache under sanitizers: random calls in exact memory, and executors with a reader."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-pthread"]


def compiler_for(sanitize: list[str], folder: Path) -> str:
    """A C compiler whose programs run with these sanitizers; skips where there is none."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) on the path")
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [compiler, *sanitize, "probe.c", "-o", "probe"]
    linked = subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0
    if not linked or subprocess.run([folder / "probe"], check=False).returncode != 0:
        pytest.skip(f"{compiler} has no working {sanitize[0]} here")
    return compiler


@pytest.mark.parametrize("name", ["address,undefined", "thread"])
def test_neuron_cache_is_clean(name: str, tmp_path: Path) -> None:
    sanitize = [f"-fsanitize={name}", "-fno-sanitize-recover=all"]
    compiler = compiler_for(sanitize, tmp_path)
    folder, program = ROOT / "kernels" / "src", tmp_path / "sanitize"
    main = Path(__file__).with_name("neuron_cache_sanitize_main.c")
    sources = [main, *sorted(folder.glob("neuron_cache*.c")), folder / "wait.c"]
    command = [compiler, *FLAGS, *sanitize, f"-I{folder}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    ran = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "no rule broken\n"
