"""Simulated steps under sanitizers: random laws, costs and caches in exact memory."""

import subprocess
from pathlib import Path

from tests.kernels.test_neuron_cache_sanitizers import FLAGS, ROOT, compiler_for


def test_simulated_steps_are_clean(tmp_path: Path) -> None:
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compiler = compiler_for(sanitize, tmp_path)
    folder, program = ROOT / "kernels" / "src", tmp_path / "sanitize"
    sources = [
        Path(__file__).with_name("simulation_sanitize_main.c"),
        *sorted(folder.glob("simulation*.c")), *sorted(folder.glob("neuron_cache*.c")),
        folder / "wait.c",
    ]  # fmt: skip
    command = [compiler, *FLAGS, *sanitize, f"-I{folder}", *map(str, sources), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0 and built.stderr == "", built.stderr
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}  # a life's blocks end with the program
    ran = subprocess.run(
        [program], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout == "no rule broken\n"
