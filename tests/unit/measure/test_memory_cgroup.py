"""Memory cgroups: where they are made, in trees of v1 and v2 and on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from polyneuron.measure.host import Host
from polyneuron.measure.memory_cgroup import MemoryCgroup, memory_cgroup

MIB = 1 << 20
LIMIT = 64 * MIB
NAME = f"polyneuron-{os.getpid()}-test"


def make_host(root: Path, own: str, files: dict[str, str]) -> Host:
    """A machine whose /proc/self/cgroup is `own`; `files` by path below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root=root)


class Made:
    """What the kernel does in a cgroup's folder: its files come and go with it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        self.written: dict[str, str] = {}
        mkdir = Path.mkdir

        def make(folder: Path, *arguments: object, **options: object) -> None:
            mkdir(folder, *arguments, **options)  # type: ignore[arg-type]
            for name in names:
                (folder / name).write_text("")

        def remove(folder: Path) -> None:
            for name in names:
                self.written[name] = (folder / name).read_text()
                (folder / name).unlink()
            os.rmdir(folder)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "rmdir", remove)


class TestPlace:
    def test_v1_below_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {"memory/job/memory.limit_in_bytes": "1", "memory/job/cgroup.procs": "1\n"}
        host = make_host(tmp_path, "3:memory:/job\n0::/\n", files)
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cgroup.procs")
        made = Made(monkeypatch, names)
        with memory_cgroup(LIMIT, "test", host) as cgroup:
            assert cgroup.folder == tmp_path / "sys/fs/cgroup/memory/job" / NAME
        assert made.written["memory.limit_in_bytes"] == str(LIMIT)
        assert made.written["memory.memsw.limit_in_bytes"] == str(LIMIT)
        assert not cgroup.folder.exists()

    def test_v2_where_memory_is_handed_down(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = {
            "user/app/cgroup.procs": "1\n",
            "user/app/cgroup.subtree_control": "\n",  # holds processes, so it hands nothing down
            "user/cgroup.procs": "",
            "user/cgroup.subtree_control": "cpu memory pids\n",
        }
        host = make_host(tmp_path, "0::/user/app\n", files)
        made = Made(monkeypatch, ("memory.max", "memory.swap.max", "cgroup.procs"))
        with memory_cgroup(LIMIT, "test", host) as cgroup:
            assert cgroup.folder == tmp_path / "sys/fs/cgroup/user" / NAME
        assert (made.written["memory.max"], made.written["memory.swap.max"]) == (str(LIMIT), "0")

    @pytest.mark.parametrize("own", ["0::/user\n", "5:cpu:/\n", ""])
    def test_nowhere_is_an_error(self, tmp_path: Path, own: str) -> None:
        files = {"user/cgroup.procs": "1\n", "user/cgroup.subtree_control": "cpu\n"}
        host = make_host(tmp_path, own, files)
        with pytest.raises(OSError), memory_cgroup(LIMIT, "test", host):
            pytest.fail("there is no place for it")

    def test_what_a_killed_program_left_is_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        files = {"user/cgroup.procs": "", "user/cgroup.subtree_control": "memory\n"}
        host = make_host(tmp_path, "0::/user\n", files)
        folder = tmp_path / "sys/fs/cgroup/user"
        left = [folder / f"polyneuron-{pid}-own" for pid in (ended.pid, os.getpid())]
        for place in left:
            place.mkdir()
        Made(monkeypatch, ("memory.max",))
        (left[0] / "memory.max").write_text("1")
        with memory_cgroup(LIMIT, "test", host):
            assert [place.exists() for place in left] == [False, True]


@pytest.fixture
def cgroup() -> Iterator[MemoryCgroup]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(memory_cgroup(LIMIT, "unit"))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error.strerror}")
        yield made


def own_cgroups() -> str:
    return Path("/proc/self/cgroup").read_text()


class TestOnThisMachine:
    def test_command_runs_inside_and_is_counted(self, cgroup: MemoryCgroup) -> None:
        code = "memory = bytearray(16 << 20); print(open('/proc/self/cgroup').read())"
        command = cgroup.inside([sys.executable, "-c", code])
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert cgroup.folder.name in done.stdout
        assert 16 * MIB < cgroup.peak_bytes() <= LIMIT
        assert (cgroup.oom_kills(), cgroup.limit_bytes) == (0, LIMIT)

    def test_limit_ends_who_takes_more(self, cgroup: MemoryCgroup) -> None:
        command = cgroup.inside([sys.executable, "-c", f"bytearray({2 * LIMIT})"])
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0
        assert cgroup.oom_kills() == 1

    def test_command_outside_does_not_run(self, tmp_path: Path) -> None:
        absent = MemoryCgroup(tmp_path / "absent", LIMIT, True)
        done = subprocess.run(absent.inside(["echo", "ran"]), capture_output=True, check=False)
        assert (done.returncode != 0, done.stdout) == (True, b"")

    def test_this_process_goes_in_and_out(self, cgroup: MemoryCgroup) -> None:
        before = own_cgroups()
        with cgroup.entered():
            assert cgroup.folder.name in own_cgroups()
        assert own_cgroups() == before
