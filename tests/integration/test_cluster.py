"""The private Ray cluster starts anywhere and leaves nothing, whatever ends it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from polyneuron.actors.cluster import ClusterConfig, PrivateCluster
from polyneuron.actors.private_dir import PREFIX, sweep
from polyneuron.actors.process_stats import cpu_ticks, is_alive, kill, process_name
from polyneuron.errors import ConfigError
from tests.integration import cluster_driver
from tests.support.leftovers import (
    Snapshot,
    assert_nothing_left,
    leftovers,
    snapshot,
    wait_until,
)

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture
def before() -> Iterator[Snapshot]:
    with snapshot() as taken:
        yield taken


def start_driver(mode: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.integration.cluster_driver", mode]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that a test can send Ctrl-C to the group as a terminal does
    )


def first_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def answers(holder: Any) -> int | None:
    """The process that answers for the actor, or None if none does yet."""
    import ray

    try:
        return int(ray.get(holder.pid.remote(), timeout=10))
    except ray.exceptions.RayError:
        return None


class Pace:
    """Processor use of a set of processes since the last reading."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self._read()

    def percent_of_core(self, over_s: float) -> float:
        """Use since the last reading, which must be that old; else infinite."""
        elapsed = time.monotonic() - self._at
        if elapsed < over_s:
            return math.inf
        before = self._ticks
        self._read()
        return 100 * (self._ticks - before) / os.sysconf("SC_CLK_TCK") / elapsed

    def _read(self) -> None:
        self._at = time.monotonic()
        self._ticks = sum(map(cpu_ticks, self._pids))


class TestPrivateCluster:
    def test_cycles_leave_nothing(self, before: Snapshot) -> None:
        environment = dict(os.environ)
        handler = signal.getsignal(signal.SIGTERM)
        for cycle in range(3):
            with PrivateCluster(ClusterConfig(cluster_driver.ARENA_BYTES)) as cluster:
                holder = cluster_driver.start_holder()
                if cycle == 2:
                    cluster_driver.freeze(holder)
                before.observe()
                assert cluster.temp_dir.stat().st_mode & 0o777 == 0o700
            assert_nothing_left(before)
            assert dict(os.environ) == environment
            assert signal.getsignal(signal.SIGTERM) == handler

    def test_only_needed_processes_run(self, before: Snapshot) -> None:
        with PrivateCluster(ClusterConfig(MIB)) as cluster:
            cluster_driver.start_holder()
            report = cluster.memory_report()
            before.observe()
        names = sorted(entry.name for entry in report)
        needed = ["driver", "gcs_server", "ray::Holder", "raylet", "worker_nursery"]
        assert names == ["cat", "cat", *needed]
        assert all(entry.pss_bytes > 0 for entry in report)
        helpers = [entry for entry in report if entry.name in ("cat", "gcs_server", "raylet")]
        assert sum(entry.pss_bytes for entry in helpers) < 120 * MIB
        assert_nothing_left(before)

    def test_idle_cluster_rests(self, before: Snapshot) -> None:
        """Six actors, Ray and this process use under 5 % of a core between requests."""
        with PrivateCluster(ClusterConfig(MIB)) as cluster:
            cluster_driver.start_holders(6)
            before.observe()
            pids = [os.getpid(), *(process.pid for process in cluster.processes())]
            settled = Pace(pids)
            wait_until(lambda: settled.percent_of_core(over_s=2.0) < 5.0, "below 5 % of a core", 30)
        assert_nothing_left(before)

    def test_killed_actor_is_back_soon(self, before: Snapshot) -> None:
        import ray

        with PrivateCluster(ClusterConfig(cluster_driver.ARENA_BYTES)):
            holder = cluster_driver.start_holder()
            before.observe()
            first = ray.get(holder.pid.remote(), timeout=60)
            os.kill(first, signal.SIGKILL)
            wait_until(lambda: answers(holder) not in (None, first), "a new process", 5)
        assert_nothing_left(before)

    def test_actor_starts_without_nursery(self, before: Snapshot) -> None:
        """If the process that actors are forked from is lost, they start on their own."""
        with PrivateCluster(ClusterConfig(cluster_driver.ARENA_BYTES)) as cluster:
            cluster_driver.start_holder()
            before.observe()
            (nursery,) = [
                process
                for process in cluster.processes()
                if process_name(process.pid) == "worker_nursery"
            ]
            kill(nursery)
            wait_until(lambda: not is_alive(nursery), "the nursery ends")
            cluster_driver.start_holder()
        assert_nothing_left(before)

    def test_second_cluster_is_refused(self, before: Snapshot) -> None:
        with PrivateCluster(ClusterConfig(MIB)):
            before.observe()
            with pytest.raises(ConfigError, match="already initialised"):
                PrivateCluster(ClusterConfig(MIB)).start()
        assert_nothing_left(before)

    def test_cluster_outlives_starting_thread(self, before: Snapshot) -> None:
        cluster = PrivateCluster(ClusterConfig(cluster_driver.ARENA_BYTES))
        starter = threading.Thread(target=cluster.start)
        starter.start()
        starter.join()
        cluster_driver.start_holder()
        before.observe()
        cluster.stop()
        assert_nothing_left(before)

    def test_failed_start_leaves_nothing(
        self, before: Snapshot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import ray

        def refuse(**_arguments: object) -> None:
            raise RuntimeError("no start")

        environment = dict(os.environ)
        monkeypatch.setattr(ray, "init", refuse)
        with pytest.raises(RuntimeError, match="no start"):
            PrivateCluster(ClusterConfig(MIB)).start()
        assert leftovers(before) == []
        assert dict(os.environ) == environment

    def test_small_shared_memory_is_refused(self, before: Snapshot) -> None:
        config = ClusterConfig(200 * MIB, free_bytes=lambda: 64 * MIB)
        with pytest.raises(ConfigError, match=r"64 MiB free, 216 MiB .*remount,size=216M"):
            PrivateCluster(config).start()
        assert leftovers(before) == []


class TestEndOfDriver:
    @pytest.mark.parametrize(
        ("mode", "signal_number", "status"),
        [
            ("wait", signal.SIGTERM, 128 + signal.SIGTERM),
            ("wait", signal.SIGINT, -signal.SIGINT),
            ("raise", None, 1),
        ],
    )
    def test_orderly_end_leaves_nothing(
        self, before: Snapshot, mode: str, signal_number: int | None, status: int
    ) -> None:
        with start_driver(mode) as driver:
            assert first_line(driver.stdout) == "ready"
            before.observe()
            if signal_number is not None:
                os.killpg(driver.pid, signal_number)
            output, errors = driver.communicate(timeout=30)
        assert driver.returncode == status, errors
        assert output == ""
        assert_nothing_left(before)

    def test_killed_driver_leaves_nothing(self, before: Snapshot) -> None:
        """A frozen actor, which cannot notice anything, must go too."""
        with start_driver("hang") as driver:
            assert first_line(driver.stdout) == "ready"
            before.observe()
            driver.kill()
            driver.communicate(timeout=10)  # ends when the last holder of the pipes has ended
        orphan = next(before.base.glob(f"{PREFIX}*"))
        assert sweep(before.base) == [orphan]
        assert_nothing_left(before)

    def test_sweep_spares_living_owner(self, before: Snapshot) -> None:
        with PrivateCluster(ClusterConfig(MIB)) as cluster:
            before.observe()
            assert sweep(before.base) == []
            assert cluster.temp_dir.is_dir()
        assert_nothing_left(before)


class TestSurroundings:
    def test_lost_actor_leaves_output_pure(self, before: Snapshot) -> None:
        with start_driver("purity") as driver:
            output, errors = driver.communicate(timeout=60)
        assert output.splitlines() == [f"line {index}" for index in range(100)] + ["reported"]
        assert errors == ""
        assert leftovers(before) == []

    def test_missing_home_stays_missing(self, before: Snapshot) -> None:
        home = before.base / "none"
        with start_driver("exit", HOME=str(home)) as driver:
            output, errors = driver.communicate(timeout=60)
        assert (driver.returncode, output, errors) == (0, "ready\n", "")
        assert not home.exists()
        assert leftovers(before) == []

    def test_closed_output_is_no_obstacle(self, before: Snapshot) -> None:
        command = f'exec "{sys.executable}" -m tests.integration.cluster_driver exit >&-'
        done = subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=60, check=False)
        assert done.returncode == 0
        assert leftovers(before) == []

    def test_long_temporary_directory_is_avoided(
        self, before: Snapshot, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Socket paths are limited to 107 bytes: with a deep TMPDIR another base is taken."""
        deep = before.base / ("d" * 60)
        deep.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(deep))
        with PrivateCluster(ClusterConfig(MIB)) as cluster:
            before.observe()
            path = cluster.temp_dir
            assert path.parent == Path("/tmp")
        deep.rmdir()
        assert not path.exists()
        wait_until(lambda: not leftovers(before), "everything gone")
