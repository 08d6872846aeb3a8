"""What tests/conftest.py keeps out of the quick folders."""

import importlib
import socket

import pytest


class TestIsolation:
    def test_ray_cannot_start(self) -> None:
        # Not importable, or imported by another test module and then not startable.
        with pytest.raises((ImportError, RuntimeError), match=r"may not start Ray|halted"):
            importlib.import_module("ray").init()

    @pytest.mark.parametrize("use", ["bind", "connect", "connect_ex"])
    def test_sockets_reach_nobody(self, use: str) -> None:
        with socket.socket() as plain, pytest.raises(RuntimeError, match="network"):
            getattr(plain, use)(("127.0.0.1", 9))
