"""What is asked of a device profile, between and beside what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.errors import FormatError
from polyneuron.planning.device import DeviceProfile, Kernel
from tests.support.made_up_device import make_device

DEVICE = make_device(cores=4)


class TestReads:
    @given(size=st.integers(4096, 1 << 20), depth=st.integers(1, 64))
    def test_between_measured_ones(self, size: int, depth: int) -> None:
        found = DEVICE.random_reads(size, depth)
        fewest, most = DEVICE.random_reads(1 << 20, 1), DEVICE.random_reads(4096, 64)
        assert fewest.reads_per_s * 0.999 <= found.reads_per_s <= most.reads_per_s * 1.001
        assert found.cpu_ns == pytest.approx(4e3)

    def test_measured_ones_are_kept(self) -> None:
        assert DEVICE.random_reads(4096, 32).reads_per_s == pytest.approx(50e3)

    def test_ends_hold_beyond(self) -> None:
        assert DEVICE.random_reads(512, 32).reads_per_s == pytest.approx(50e3)
        assert DEVICE.random_reads(4096, 500).reads_per_s == pytest.approx(50e3)

    def test_deeper_is_never_slower(self) -> None:
        found = DEVICE.as_dict()
        for row in found["reads"]:
            row["reads_per_s"] /= 2 if row["depth"] == 64 else 1  # a busy moment
        device = DeviceProfile.from_dict(found)
        assert device.random_reads(4096, 64).reads_per_s == pytest.approx(50e3)

    def test_cores_that_read_more_come_first(self) -> None:
        """As on a OnePlus 12 (PAPER §1.14): 1076 MB/s from the big core, 762 from a little one."""
        assert DEVICE.reading_order() == ()
        rates = {0: 762.0, 2: 1008.0, 7: 1076.0}
        reads = [
            replace(row, core=core, reads_per_s=row.reads_per_s * rate)
            for core, rate in rates.items() for row in DEVICE.reads
        ]  # fmt: skip
        kinds = ((0, 1), (7,), (2, 3, 4, 5, 6))
        device = replace(DEVICE, core_kinds=kinds, reads=tuple(reads))
        assert device.reading_order() == (7, 2, 3, 4, 5, 6, 0, 1)

    def test_layers_are_read_in_order(self) -> None:
        row = DEVICE.layer_reads()
        assert row.reads_per_s * row.read_bytes == pytest.approx(2e9)


class TestKernels:
    def test_threads_between(self) -> None:
        speeds = [DEVICE.kernel_bytes_per_s(Kernel.TILES, "q4", 4096, n) for n in (1, 2, 3, 4, 9)]
        assert speeds[:4] == pytest.approx([24e9, 48e9, 72e9, 96e9])
        assert speeds[4] == pytest.approx(speeds[3])

    def test_other_types_and_widths_take_the_nearest(self) -> None:
        def ask(storage: str, cols: int) -> float:
            return DEVICE.kernel_bytes_per_s(Kernel.DOT, storage, cols, 1)

        assert ask("q4m", 5120) == ask("q4", 4096)
        assert ask("f16", 64) == ask("q8", 576)

    def test_more_tokens_than_measured_cost_in_proportion(self) -> None:
        def ask(tokens: int) -> float:
            return DEVICE.kernel_bytes_per_s(Kernel.TILES, "q4", 4096, 4, tokens)

        assert ask(1) > ask(2) > ask(3) > ask(8)
        assert ask(16) == pytest.approx(ask(8) / 2)


def damaged(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(DEVICE.as_dict()))
    return found | changes


class TestStored:
    def test_survives_json(self) -> None:
        again = DeviceProfile.from_dict(damaged())
        assert again.as_dict() == DEVICE.as_dict()

    @pytest.mark.parametrize(
        "changes",
        [
            {"format_version": 99}, {"reads": []}, {"steps": []}, {"cache": {}}, {"key": {}},
            {"kernels": [{"kernel": "magic"}]}, {"core_kinds": 3}, {"reads": None},
        ],
    )  # fmt: skip
    def test_damage_is_told(self, changes: dict[str, Any]) -> None:
        with pytest.raises(FormatError, match="device profile"):
            DeviceProfile.from_dict(damaged(**changes))

    @pytest.mark.parametrize("figure", [0.0, -1.0, float("nan"), float("inf"), "fast"])
    def test_figures_must_be_sane(self, figure: object) -> None:
        found = damaged()
        found["reads"][0]["reads_per_s"] = figure
        with pytest.raises(FormatError, match="device profile"):
            DeviceProfile.from_dict(found)
