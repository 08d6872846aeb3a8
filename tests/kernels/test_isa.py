"""Which instruction set runs: the best, or the one that the environment forces."""

import os
import subprocess
import sys

import pytest

from polyneuron.errors import ConfigError
from polyneuron.kernels import isa as isa_module

SHOW_ACTIVE = """
from polyneuron.errors import ConfigError
from polyneuron.kernels import gemv, isa
import numpy
try:
    gemv.argmax(numpy.ones(3, numpy.float32))
except ConfigError as error:
    raise SystemExit(str(error))
print(isa.active())
"""


def run_with_forced(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != isa_module.FORCE_VARIABLE}
    if value is not None:
        environment[isa_module.FORCE_VARIABLE] = value
    return subprocess.run(
        [sys.executable, "-c", SHOW_ACTIVE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", isa_module.built())
def test_the_forced_one_runs(name: str) -> None:
    result = run_with_forced(name)
    if name in isa_module.supported():
        assert (result.returncode, result.stdout.strip()) == (0, name)
    else:
        assert result.returncode == 1 and f"{name}: not available" in result.stderr


def test_the_best_one_runs_unforced() -> None:
    assert run_with_forced(None).stdout.strip() == isa_module.supported()[0]


def test_an_unknown_one_is_one_clear_line() -> None:
    result = run_with_forced("altivec")
    assert result.returncode == 1 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert "POLYNEURON_FORCE_ISA=altivec" in lines[0] and "scalar" in lines[0]


def test_selecting_by_name(isa: str) -> None:
    assert isa_module.active() == isa
    with pytest.raises(ConfigError, match="isa=z80: not available"):
        isa_module.select("z80")
    assert isa_module.active() == isa, "a refused choice changes nothing"


def test_scalar_is_always_built_last() -> None:
    assert isa_module.built()[-1] == "scalar"
    assert "scalar" in isa_module.supported()


def test_doctor_can_say_what_each_needs() -> None:
    assert {*isa_module.built()} - {"scalar"} <= isa_module.NEEDS.keys()
