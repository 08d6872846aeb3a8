"""Runs each test that asks for `isa` once per instruction set this CPU supports."""

from collections.abc import Iterator

import pytest

from polyneuron.kernels import isa as isa_module


@pytest.fixture(params=isa_module.built())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """An instruction set, selected for the test; one that this CPU lacks is skipped by name."""
    name: str = request.param
    if name not in isa_module.supported():
        pytest.skip(f"this CPU has no {name}")
    before = isa_module.active()
    yield isa_module.select(name)
    isa_module.select(before)
