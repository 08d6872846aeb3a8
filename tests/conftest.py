"""What whole folders of tests may not touch, and hypothesis without a clock."""

import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import settings

WITHOUT_RAY = frozenset({"unit", "kernels", "storage", "scenarios"})
"""Folders whose tests run in one process: no cluster, no sockets."""

# A busy machine makes single examples slow, and that is no fault of the code under test.
settings.register_profile("no_deadline", parent=settings.default, deadline=None)
settings.load_profile("no_deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Flags of this project's own."""
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files anew; git shows the rest"
    )


def _runs_without_ray(path: Path) -> bool:
    return path.relative_to(Path(__file__).parent).parts[0] in WITHOUT_RAY


@pytest.fixture(autouse=True)
def forbid_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make starting Ray an error.

    Ray is not imported for that: it reads its settings from the environment on import, and the
    integration tests, in the same process, set them first.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("a test of this folder may not start Ray: see tests/conftest.py")

    if not _runs_without_ray(request.path):
        return
    if "ray" in sys.modules:
        monkeypatch.setattr(sys.modules["ray"], "init", refuse)
    else:
        monkeypatch.setitem(sys.modules, "ray", None)


@pytest.fixture(autouse=True)
def forbid_sockets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make connecting and listening an error."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("a test of this folder may not use the network: see tests/conftest.py")

    if _runs_without_ray(request.path):
        for name in ("bind", "connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, refuse)
