"""Device files: sources, what was fitted and why, costs of reads."""

from pathlib import Path

import pytest

from polyneuron.errors import ConfigError
from polyneuron.scenarios.device_model import DeviceModel, interpolated, with_fitted
from polyneuron.scenarios.script import read_toml
from tests.support.made_up_device import make_device
from tests.support.simulated import SCENARIOS, device

FILES = sorted((SCENARIOS / "devices").glob("*.toml"))
GIB = 1 << 30


class TestFiles:
    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_file_is_whole(self, path: Path) -> None:
        model = DeviceModel.from_table(read_toml(path), path.name)
        assert model.name == path.stem
        assert model.memory > GIB

    @pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
    def test_every_figure_has_a_source_or_a_reason(self, path: Path) -> None:
        table = read_toml(path)
        for section in ("cpu", "npu", "storage"):
            if set(table.get(section, {})) - {"source"}:
                assert len(table[section]["source"]) > 20
        _, reasons = with_fitted(table, path.name)
        assert all(len(reason) > 20 for reason in reasons.values())

    def test_oneplus_has_the_papers_bandwidths(self) -> None:
        model = device("oneplus12")
        assert model.npu is not None
        assert (model.cpu.bandwidth, model.npu.bandwidth) == (43.9e9, 56e9)
        assert model.npu.joint_bandwidth == 59.6e9
        assert not any(key.endswith("bandwidth") for key in model.fitted)

    def test_oneplus_has_the_papers_storage(self) -> None:
        storage = device("oneplus12").storage
        page_ns = storage.command_ns(128 << 20, False) + storage.moving_ns(4096, False)
        assert 4096e9 / page_ns == pytest.approx(1.0761e9, rel=1e-6)
        assert storage.page_reads[1] == (512 << 20, 0.85e9)
        assert "only the last point" in device("oneplus12").fitted["storage.page_reads"]


class TestStorage:
    def test_reads_cost_more_over_a_wider_range(self) -> None:
        storage = device().storage
        costs = [storage.command_ns(size << 20, False) for size in (64, 256, 512, 4096, 1 << 20)]
        assert costs == sorted(costs)
        assert costs[0] < costs[-1]

    def test_many_issuing_cores_cost_throughput(self) -> None:
        storage = device().storage
        assert storage.command_ns(GIB, True) > storage.command_ns(GIB, False)
        assert storage.moving_ns(8192, True) > storage.moving_ns(8192, False)

    def test_less_than_a_page_costs_a_page(self) -> None:
        storage = device().storage
        assert storage.moving_ns(512, False) == storage.moving_ns(4096, False)

    def test_interpolation_is_straight_in_logarithms(self) -> None:
        points = ((1.0, 1.0), (100.0, 10000.0))
        assert interpolated(points, 10.0) == pytest.approx(100.0)
        assert interpolated(points, 0.1) == 1.0
        assert interpolated(points, 1e9) == 10000.0


class TestSlips:
    @pytest.mark.parametrize(
        ("section", "key", "value", "complaint"),
        [
            ("cpu", "cores", 0, "cpu.cores"),
            ("cpu", "bandwith", 1, "bandwidth"),
            ("storage", "page_reads", [[2, 1], [1, 1]], "the smallest number of bytes first"),
            ("storage", "reader", 3, "storage.reader"),
        ],
    )
    def test_slips_are_named(self, section: str, key: str, value: object, complaint: str) -> None:
        table = read_toml(SCENARIOS / "devices" / "oneplus12.toml")
        table["fitted"].pop(f"{section}.{key}", None)
        table[section][key] = value
        with pytest.raises(ConfigError, match=complaint):
            DeviceModel.from_table(table, "device.toml")

    def test_fitted_needs_a_reason(self) -> None:
        with pytest.raises(ConfigError, match="reason"):
            with_fitted({"fitted": {"cpu.cores": {"value": 1}}}, "device.toml")


def test_measured_device_needs_no_fitting() -> None:
    model = DeviceModel.of_profile(make_device(), 8 * GIB)
    assert model.fitted == {}
    assert model.npu is None
    assert model.cpu.core_rate > 0 and model.storage.large_rate > 0
