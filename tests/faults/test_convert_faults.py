"""Killed, short of room, short of bytes, started twice: the output is the same or there is none."""

import errno
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polyneuron.errors import DeviceError, FormatError
from polyneuron.io.device_wrappers import Fault, FaultDevice, FaultKind
from polyneuron.io.file_device import open_device
from polyneuron.io.ncf_format import Layout
from polyneuron.io.ncf_reader import read_ncf
from polyneuron.io.piece_writer import journal_path, partial_path
from polyneuron.kernels.quant import StorageType
from polyneuron.model.convert import convert
from polyneuron.model.model_cache import cached_ncf
from tests.faults.killing import MAX_EVENTS, fork, in_child, kill_at
from tests.support.tiny_ncf import cut_small, write_source


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF that is converted in many small pieces and writes."""
    cut_small(monkeypatch)
    return write_source(tmp_path)


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> str:
    """The sum of an undisturbed conversion."""
    return digest(convert(source, tmp_path / "expected.ncf").output)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class TestKilled:
    @pytest.mark.parametrize("torn", [False, True], ids=["before", "torn"])
    def test_killed_anywhere_gives_same_bytes(
        self, torn: bool, source: Path, expected: str, tmp_path: Path
    ) -> None:
        output, resumed = tmp_path / "out.ncf", []
        for event in range(1, MAX_EVENTS):

            def body(event: int = event) -> None:
                kill_at(event, torn=torn)
                convert(source, output)

            status = in_child(body)
            assert status in (0, signal.SIGKILL)
            if output.exists():
                assert digest(output) == expected
            report = convert(source, output)
            assert digest(output) == expected
            resumed.append(report.resumed_bytes)
            assert not partial_path(output).exists()
            assert not journal_path(output).exists()
            if status == 0:
                break
            output.unlink()
        assert event > 40
        assert status == 0
        assert sum(num_bytes > 0 for num_bytes in resumed) > event // 2

    def test_killed_again_and_again_gets_there(
        self, source: Path, expected: str, tmp_path: Path
    ) -> None:
        """Each run gets a little further than the one before."""
        output = tmp_path / "out.ncf"
        for _ in range(MAX_EVENTS):

            def body() -> None:
                kill_at(12, torn=True)
                convert(source, output)

            if in_child(body) == 0:
                break
        assert digest(output) == expected

    @pytest.mark.parametrize("event", [15, 25, 36])
    def test_each_type_of_down_resumes_its_own(
        self, event: int, source: Path, tmp_path: Path
    ) -> None:
        expected = digest(convert(source, tmp_path / "whole.ncf", down=StorageType.Q4).output)
        output = tmp_path / "out.ncf"

        def body() -> None:
            kill_at(event, torn=False)
            convert(source, output, down=StorageType.Q4)

        assert in_child(body) == signal.SIGKILL
        kept = journal_path(output).read_bytes(), partial_path(output).read_bytes()
        assert convert(source, output, down=StorageType.Q4).resumed_bytes > 0
        assert digest(output) == expected
        read_ncf(output).check_all()
        output.unlink()
        journal_path(output).write_bytes(kept[0])
        partial_path(output).write_bytes(kept[1])
        assert convert(source, output).resumed_bytes == 0
        assert digest(output) != expected


class TestLeftovers:
    @pytest.fixture
    def broken_off(self, source: Path, tmp_path: Path) -> Path:
        """The output of a run that was killed in its last third."""
        output = tmp_path / "out.ncf"

        def body() -> None:
            kill_at(36, torn=False)
            convert(source, output)

        assert in_child(body) == signal.SIGKILL
        assert journal_path(output).stat().st_size > 200
        return output

    def test_journal_is_believed_only_with_its_bytes(
        self, source: Path, expected: str, broken_off: Path
    ) -> None:
        partial = partial_path(broken_off)
        data = bytearray(partial.read_bytes())
        data[len(data) // 3] ^= 1
        partial.write_bytes(data)
        report = convert(source, broken_off)
        assert 0 < report.resumed_bytes < len(data) * 2 // 3
        assert digest(broken_off) == expected

    def test_damaged_journal_does_no_harm(
        self, source: Path, expected: str, broken_off: Path
    ) -> None:
        journal, partial = journal_path(broken_off), partial_path(broken_off)
        good, data = journal.read_bytes(), partial.read_bytes()
        for at in range(0, len(good), 7):
            journal.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            partial.write_bytes(data)
            convert(source, broken_off)
            assert digest(broken_off) == expected
            broken_off.unlink()

    @pytest.mark.parametrize("num_bytes", [0, 1, 4096, 20_000])
    def test_data_cut_off_are_made_again(
        self, num_bytes: int, source: Path, expected: str, broken_off: Path
    ) -> None:
        os.truncate(partial_path(broken_off), num_bytes)
        convert(source, broken_off)
        assert digest(broken_off) == expected

    def test_leftovers_of_another_source_are_not_used(
        self, source: Path, broken_off: Path, tmp_path: Path
    ) -> None:
        with source.open("r+b") as file:  # the last weights: in the content key's samples
            file.seek(-40, os.SEEK_END)
            file.write(bytes(2))
        report = convert(source, broken_off)
        assert report.resumed_bytes == 0
        assert digest(broken_off) == digest(convert(source, tmp_path / "fresh.ncf").output)


class TestWrites:
    def test_short_writes_are_completed(
        self, source: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original, lengths = os.pwrite, iter([4096, 1000, 1, 8192] * 1000)

        def short(fd: int, data: memoryview, offset: int) -> int:
            return original(fd, data[: next(lengths)], offset)

        monkeypatch.setattr(os, "pwrite", short)
        assert digest(convert(source, tmp_path / "out.ncf").output) == expected

    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
    def test_failed_write_is_said_and_gone_on_from(
        self, number: int, source: Path, expected: str, tmp_path: Path
    ) -> None:
        output = tmp_path / "out.ncf"
        for event in range(1, MAX_EVENTS):
            with pytest.MonkeyPatch.context() as patch:
                fail_at(patch, "pwrite", event, number)
                try:
                    convert(source, output)
                    break
                except DeviceError as error:
                    words = "write at byte" if number == errno.EIO else "no space left at byte"
                    assert words in str(error) and "out.ncf.partial" in str(error)
            assert not output.exists()
            convert(source, output)
            assert digest(output) == expected
            output.unlink()
        assert event > 10
        assert digest(output) == expected

    def test_direct_writes_refused_go_through_the_cache(
        self, source: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = os.open

        def refuse(path: Any, flags: int, *args: Any) -> int:
            if flags & os.O_DIRECT and flags & os.O_CREAT:
                raise OSError(errno.EINVAL, "no direct I/O")
            return original(path, flags, *args)

        monkeypatch.setattr(os, "open", refuse)
        assert digest(convert(source, tmp_path / "out.ncf").output) == expected

    def test_late_refusal_of_direct_writes_is_survived(
        self, source: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fail_at(monkeypatch, "pwrite", 2, errno.EINVAL)
        assert digest(convert(source, tmp_path / "out.ncf").output) == expected


def fail_at(patch: pytest.MonkeyPatch, name: str, event: int, number: int) -> None:
    """Make one call of `os.<name>` fail, once."""
    original, seen = getattr(os, name), 0

    def call(*args: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == event:
            raise OSError(number, os.strerror(number))
        return original(*args)

    patch.setattr(os, name, call)


class TestReads:
    @pytest.mark.parametrize("kind", [FaultKind.EIO, FaultKind.SHORT_READ])
    @pytest.mark.parametrize("is_persistent", [False, True], ids=["transient", "persistent"])
    def test_failed_sequential_read_ends_or_is_tried_again(
        self, kind: FaultKind, is_persistent: bool, source: Path, expected: str, tmp_path: Path
    ) -> None:
        output = tmp_path / "out.ncf"
        for event in range(1, MAX_EVENTS, 5):
            devices = []

            @contextmanager
            def open_faulty(
                path: Path, event: int = event, devices: list[FaultDevice] = devices
            ) -> Iterator[FaultDevice]:
                with open_device(path) as device:
                    devices.append(FaultDevice(device, Fault(kind, event, is_persistent)))
                    yield devices[0]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("polyneuron.model.convert.open_device", open_faulty)
                try:
                    convert(source, output)
                except DeviceError as error:
                    assert is_persistent and "tiny.gguf" in str(error)
                    assert not output.exists()
                    continue
            assert digest(output) == expected
            output.unlink()
            if devices[0].num_injected == 0:
                break
        assert event > 10

    def test_failed_read_is_said_and_gone_on_from(
        self, source: Path, expected: str, tmp_path: Path
    ) -> None:
        """A direct read that fails is tried through the cache; one that fails for good ends it."""
        output = tmp_path / "out.ncf"
        for event in range(3, MAX_EVENTS, 101):
            with pytest.MonkeyPatch.context() as patch:
                original, seen = os.preadv, 0

                def call(*args: Any, original: Any = original, event: int = event) -> Any:
                    nonlocal seen
                    seen += 1
                    if seen >= event:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    return original(*args)

                patch.setattr(os, "preadv", call)
                try:
                    convert(source, output)
                    break
                except DeviceError as error:
                    assert "read at byte" in str(error)
            assert not output.exists()
        assert event > 200
        assert digest(output) == expected

    def test_source_that_changes_meanwhile_is_refused(self, source: Path, tmp_path: Path) -> None:
        output = tmp_path / "out.ncf"

        def touch(done: int, total: int) -> None:
            os.utime(source, ns=(1, done))

        with pytest.raises(FormatError, match="changed while it was converted"):
            convert(source, output, progress=touch)
        assert list(tmp_path.glob("out*")) == []


class TestTwoAtOnce:
    def run_both(self, body: Callable[[], object]) -> list[int]:
        """Statuses of two processes that begin together."""
        gate, opened = os.pipe()

        def wait_and_run() -> None:
            os.read(gate, 1)
            body()

        pids = [fork(wait_and_run, opened) for _ in range(2)]
        os.close(gate)
        os.close(opened)
        return [os.waitpid(pid, 0)[1] for pid in pids]

    def test_same_output_is_made_once(self, source: Path, expected: str, tmp_path: Path) -> None:
        for _ in range(5):
            output = tmp_path / "out.ncf"
            assert self.run_both(lambda output=output: convert(source, output)) == [0, 0]
            assert digest(output) == expected
            assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.ncf"]
            output.unlink()

    def test_cache_entry_is_made_once(self, source: Path, tmp_path: Path) -> None:
        folder = tmp_path / "cache"
        tiles = convert(source, tmp_path / "tiles.ncf", layout=Layout.TILES).output
        assert self.run_both(lambda: cached_ncf(source, folder=folder)) == [0, 0]
        (entry,) = folder.iterdir()
        assert digest(entry) == digest(tiles)

    def test_waiting_one_finds_the_work_done(self, source: Path, tmp_path: Path) -> None:
        """The second starts while the first is at work, says that it waits, and takes its file."""
        output, waits = tmp_path / "out.ncf", []
        begun, begin = os.pipe()
        waiting, go_on = os.pipe()

        def first() -> None:
            def hold(done: int, total: int) -> None:
                os.write(begin, b"x")
                os.read(waiting, 1)  # ends at once when the other end is closed

            convert(source, output, progress=hold)

        def say() -> None:
            waits.append(1)
            os.close(go_on)

        pid = fork(first, begun, go_on)
        os.close(begin)
        os.read(begun, 1)
        report = convert(source, output, on_wait=say)
        for descriptor in (begun, waiting):
            os.close(descriptor)
        assert os.waitpid(pid, 0)[1] == 0
        assert waits == [1]
        assert report.was_there
        read_ncf(output).check_all()
