"""The bench of scattered rows runs every kernel it names."""

import re

import pytest

from polyneuron.measure.kernel_speed import STRIDES
from tests.bench.row_kernels import main


@pytest.mark.parametrize("name", ["q4", "q8", "q4m", "f16", "q1"])
def test_every_type_has_its_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        f"--types {name} --threads 2 --columns 256 --rows 9 --mib 4 --rounds 1 --seconds 0".split()
    )
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"{name} 2 thread(s): tiles ")
    figures = re.findall(r"(tiles|read|rows|(?:fetch|dot|axpy) \d+) \d+\.\d \(\d+%\)", line)
    kinds = [f"{kind} {stride}" for stride in STRIDES for kind in ("fetch", "dot", "axpy")]
    kinds = [] if name == "q1" else ["rows", *kinds]  # which has tiles only
    assert figures == ["tiles", "read", *kinds]
