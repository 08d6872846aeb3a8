"""Addresses over several files: every byte from its place, rows in their order, errors by name."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.errors import DeviceError, FormatError
from polyneuron.io import model_files
from polyneuron.io.block_device import ByteRange
from polyneuron.io.model_files import Extent, FilesReader, ModelFiles, RowSwap, views_of


def write_files(folder: Path) -> tuple[ModelFiles, bytes]:
    """Two files, of one a part and swapped rows, and bytes that are in none; and all as one."""
    rng = np.random.default_rng(0)
    first, second = (rng.integers(0, 256, 1000, np.uint8).tobytes() for _ in range(2))
    for name, data in (("a", first), ("b", second)):
        (folder / name).write_bytes(data)
    swap = RowSwap(num_rows=6, row_bytes=5)  # groups of 30 bytes
    rows = np.frombuffer(second, np.uint8)[100:160].reshape(2, 2, 3, 5)
    extents = (
        Extent(0, 700, folder / "a", 300),
        Extent(700, 60, folder / "b", 100, swap),
        Extent(760, 11, made=bytes(range(11))),
        Extent(771, 40, folder / "b", 0),
    )
    expected = first[300:] + rows.transpose(0, 2, 1, 3).tobytes() + bytes(range(11)) + second[:40]
    return ModelFiles(extents, (folder / "a", folder / "b")), expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, bytes]:
    return write_files(tmp_path_factory.mktemp("files"))


ranges = st.integers(0, 811).flatmap(
    lambda begin: st.tuples(st.just(begin), st.integers(0, 811 - begin))
)


@given(ranges)
def test_every_range_is_read(made: tuple[ModelFiles, bytes], wanted: tuple[int, int]) -> None:
    files, expected = made
    begin, count = wanted
    out = np.zeros(count, np.uint8)
    with FilesReader(files) as reader:
        reader.read(begin, out)
    assert out.tobytes() == expected[begin : begin + count]


@given(st.lists(ranges, max_size=9))
def test_views_come_in_order(made: tuple[ModelFiles, bytes], wanted: list[tuple[int, int]]) -> None:
    files, expected = made
    with closing(views_of(files, [ByteRange(*one) for one in wanted])) as views:
        found = [bytes(view) for view in views]
    assert found == [expected[begin : begin + count] for begin, count in wanted]


def test_rows_of_halves_are_taken_in_turn() -> None:
    rows = np.arange(8, dtype=np.uint8)
    assert RowSwap(4, 1).apply(rows).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_OPEN", 2)
    paths = [tmp_path / str(number) for number in range(5)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 10)
    files = ModelFiles(tuple(Extent(10 * i, 10, p) for i, p in enumerate(paths)), tuple(paths))
    before = len(os.listdir("/proc/self/fd"))
    out = np.empty(50, np.uint8)
    with FilesReader(files) as reader:
        for _ in range(2):
            reader.read(0, out)
            assert len(os.listdir("/proc/self/fd")) == before + 2
    assert out.tobytes() == b"".join(path.read_bytes() for path in paths)
    assert len(os.listdir("/proc/self/fd")) == before


class TestErrors:
    def test_file_that_became_shorter_is_named(self, tmp_path: Path) -> None:
        files, _ = write_files(tmp_path)
        os.truncate(tmp_path / "b", 20)
        with (
            closing(views_of(files, [ByteRange(0, 10), ByteRange(771, 40)])) as views,
            pytest.raises(DeviceError, match=r"b: ends at byte 20, 20 bytes are missing"),
        ):
            list(views)

    @pytest.mark.parametrize("failures", [1, 99])
    def test_failed_read_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
    ) -> None:
        files, expected = write_files(tmp_path)
        original, left = os.preadv, [failures]

        def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
            if left[0]:
                left[0] -= 1
                raise OSError(5, "Input/output error")
            return original(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", failing)
        out = np.empty(811, np.uint8)
        with FilesReader(files) as reader:
            if failures == 1:
                reader.read(0, out)
                assert out.tobytes() == expected
            else:
                with pytest.raises(DeviceError, match="a: read at byte 300 failed: Input") as found:
                    reader.read(0, out)
                assert found.value.errno == 5

    def test_address_behind_the_end_is_refused(self, tmp_path: Path) -> None:
        files, _ = write_files(tmp_path)
        with FilesReader(files) as reader, pytest.raises(DeviceError, match="no byte at 811"):
            reader.read(800, np.empty(20, np.uint8))

    def test_lost_file_is_named(self, tmp_path: Path) -> None:
        files, _ = write_files(tmp_path)
        before = files.stamp()
        os.utime(tmp_path / "b", ns=(1, 1))
        assert files.stamp() != before
        (tmp_path / "b").unlink()
        with pytest.raises(FormatError, match="b: No such file"):
            files.stamp()
        with FilesReader(files) as reader, pytest.raises(DeviceError, match="b: cannot be opened"):
            reader.read(771, np.empty(20, np.uint8))
