"""The bench of scattered rows runs every kernel it names."""

import re

import pytest

from tests.bench.row_kernels import main


@pytest.mark.parametrize("name", ["q4", "q8", "q4m", "f16"])
def test_every_type_has_its_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        f"--types {name} --threads 2 --columns 256 --rows 9 --mib 4 --rounds 1 --seconds 0".split()
    )
    line = capsys.readouterr().out.splitlines()[1]
    assert line.startswith(f"{name} 2 thread(s): tiles ")
    figures = re.findall(r"(tiles|read|dot \d+|axpy \d+) \d+\.\d \(\d+%\)", line)
    expected = ["tiles", "read", "dot 5120", "axpy 5120", "dot 8192", "axpy 8192"]
    assert figures == expected
