"""Every kernel under the address and undefined-behaviour sanitizers, on all instruction sets."""

import shutil
import subprocess
from pathlib import Path

import pytest

from polyneuron.kernels import isa as isa_module

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["crc32c.c", "dispatch.c", "kv_quants.c", "pack.c", "random_rows.c", "row_tiles.c"]
PROGRAM = ["sanitize_main.c", "kernel_runs.c", "kernel_extremes.c"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-O1", "-g", "-std=c11", "-D_GNU_SOURCE", "-ffp-contract=off", "-Wall", "-Wextra"]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A C compiler that links both sanitizers."""
    path = shutil.which("cc") or shutil.which("gcc")
    if path is None:
        pytest.skip("no C compiler (cc or gcc) on the path")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [path, *SANITIZE, "probe.c", "-o", "probe"]
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{path} does not link -fsanitize=address,undefined")
    return path


def test_kernels_are_clean_and_equal(compiler: str, tmp_path: Path) -> None:
    folder = ROOT / "kernels" / "src"
    sources = [folder / name for name in SOURCES] + sorted(folder.glob("kernels_*.c"))
    program = tmp_path / "sanitize"
    sources += [Path(__file__).with_name(name) for name in PROGRAM]
    built = subprocess.run(
        [compiler, *FLAGS, *SANITIZE, f"-I{folder}", *map(str, sources), "-lm", "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0 and built.stderr == "", built.stderr
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    compared = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert compared == [name for name in isa_module.supported() if name != "scalar"]
