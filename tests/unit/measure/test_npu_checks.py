"""What the doctor says of accelerators and back ends."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from polyneuron.errors import ConfigError
from polyneuron.measure.check import Status
from polyneuron.measure.npu_checks import check_native, check_npu, check_openvino
from tests.support.fake_host import FakeHost

CPU = {"CPU": "Fast 9000"}


def version(_name: str) -> str:
    return "2026.4.1-22982-releases"


def absent(_name: str) -> str:
    raise metadata.PackageNotFoundError


def raising(error: Exception) -> Callable[[], dict[str, str]]:
    def names() -> dict[str, str]:
        raise error

    return names


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, "none: dense clusters run on CPU cores"),
        ({"dev/accel/accel0": ""}, "accel0: used where"),
    ],
)
def test_accelerators(tmp_path: Path, files: dict[str, str | None], found: str) -> None:
    line = check_npu(FakeHost(tmp_path, files).make())
    assert (line.status, line.cure) == (Status.OK, "")
    assert line.found.startswith(found)


def test_native_is_there(tmp_path: Path) -> None:
    line = check_native(FakeHost(tmp_path).make())
    assert line.status is Status.OK
    assert line.found.endswith("weights in f16, f32, q4, q4m, q8")


class TestOpenvino:
    def test_what_devices_can_do(self, tmp_path: Path) -> None:
        host = FakeHost(tmp_path).make()
        line = check_openvino(host, lambda: CPU | {"NPU": "Intel AI Boost"}, version)
        assert (line.status, line.cure) == (Status.OK, "")
        weights = "weights in f16, f32, q4, q4m, q8, 12 graphs"
        assert line.found == (
            f"2026.4.1: CPU (Fast 9000), f32, {weights}; NPU (Intel AI Boost), f16, {weights}"
        )

    @pytest.mark.parametrize(
        ("names", "version"), [(lambda: CPU, absent), (raising(ConfigError("x")), version)]
    )
    def test_not_installed(
        self, tmp_path: Path, names: Callable[[], dict[str, str]], version: Callable[[str], str]
    ) -> None:
        line = check_openvino(FakeHost(tmp_path).make(), names, version)
        assert (line.status, line.found) == (Status.OK, "is not installed")
        assert "pip install 'polyneuron[openvino]'" in line.cure

    def test_broken(self, tmp_path: Path) -> None:
        names = raising(RuntimeError("first\nno plugin"))
        line = check_openvino(FakeHost(tmp_path).make(), names, version)
        assert line.status is Status.WARNING
        assert line.found == "does not start: RuntimeError: no plugin"

    def test_accelerator_without_a_driver(self, tmp_path: Path) -> None:
        host = FakeHost(tmp_path, {"dev/accel/accel0": ""}).make()
        assert "driver" in check_openvino(host, lambda: CPU, version).cure
        assert not check_openvino(host, lambda: CPU | {"NPU": "x"}, version).cure
