"""Starts Ray for this process alone and stops it without a trace."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from polyneuron.actors.guards import SigtermGuard, private_environment, signals_deferred
from polyneuron.actors.private_dir import PrivateDir, choose_base, sweep
from polyneuron.actors.process_stats import (
    ProcessId,
    ProcessMemory,
    descendants,
    is_alive,
    kill,
    process_name,
    pss_bytes,
)
from polyneuron.errors import ConfigError, EngineError

MIB: Final = 1 << 20
MIN_STORE_BYTES: Final = 75 * MIB  # Ray refuses less
STORE_SLACK_BYTES: Final = 16 * MIB  # the store's own bookkeeping, and room for small messages
SHM_PATH: Final = "/dev/shm"
_STOP_BOUND_S: Final = 10.0
_KILL_BOUND_S: Final = 5.0
_POLL_S: Final = 0.01

# Ray's own settings. What is off would write to disk, send statistics or wake up for nobody.
_SYSTEM_CONFIG: Final[Mapping[str, Any]] = {
    "automatic_object_spilling_enabled": False,
    "timeout_ms_task_wait_for_death_info": 100,  # a call to a killed actor fails soon
    "core_worker_internal_heartbeat_ms": 200,  # how often that is looked at
    "worker_niceness": 0,  # else actors yield to every other process of the machine
}


def free_shm_bytes() -> int:
    """Bytes free in the shared memory file system."""
    status = os.statvfs(SHM_PATH)
    return status.f_bavail * status.f_frsize


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What the cluster must hold; the processors are told to Ray only to pace its starts."""

    shared_bytes: int
    num_cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    free_bytes: Callable[[], int] = free_shm_bytes

    @property
    def store_bytes(self) -> int:
        """Size of Ray's object store: what is asked for, and slack."""
        return max(self.shared_bytes, MIN_STORE_BYTES) + STORE_SLACK_BYTES

    def check_room(self) -> None:
        """Refuse to start where shared memory is too small; Ray would use the disk instead."""
        need, free = self.store_bytes, self.free_bytes()
        if free < need:
            cure = -(-need // MIB)
            raise ConfigError(
                f"{SHM_PATH} has {free // MIB} MiB free, {cure} MiB are needed: free some, or "
                f"enlarge it with `mount -o remount,size={cure}M {SHM_PATH}` "
                f"(container: `--shm-size={cure}m`), or lower the memory budget"
            )


class PrivateCluster:
    """Ray on this machine for this process alone; a context manager.

    Whatever ends the block, an exception, Ctrl-C or SIGTERM, nothing is left. If the process is
    killed, the kernel ends Ray's processes at once, and the directory is swept at the next start.
    Actors must not ask for a runtime environment: the daemon that builds one is not started.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._cleanup = contextlib.ExitStack()
        self._processes: list[ProcessId] = []
        self._temp_dir: Path | None = None
        self._sigterm = SigtermGuard()
        self._is_up = False

    @property
    def temp_dir(self) -> Path:
        """The private directory, which holds Ray's logs and sockets while the cluster runs."""
        if self._temp_dir is None:
            raise EngineError("the Ray cluster is not running: call start() first")
        return self._temp_dir

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start Ray; blocks until it accepts actors."""
        if self._temp_dir is not None:
            raise EngineError("the Ray cluster already runs: call stop() first")
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            raise ConfigError(
                "Ray is already initialised in this process, and polyneuron needs a private "
                "cluster: close the engine that is open, or call ray.shutdown() if Ray is your "
                "own, or use a process of its own"
            )
        self._config.check_room()
        self._sigterm = SigtermGuard()
        base = choose_base()
        sweep(base)
        try:
            self._start_in(PrivateDir(base))
        except BaseException:
            self.stop()
            raise
        atexit.register(self.stop)

    def _start_in(self, private: PrivateDir) -> None:
        self._cleanup.callback(private.remove)
        self._temp_dir = private.path
        self._cleanup.enter_context(private_environment())
        # Imported late: Ray reads the environment on import; commands without actors stay quick.
        import ray

        from polyneuron.actors import ray_internals

        if not ray_internals.takes_tokens():
            raise ConfigError(
                "Ray was imported before polyneuron could turn its authentication on, and a "
                "cluster without it is open to the network: open the engine before importing "
                "ray, or set RAY_AUTH_MODE=token in the environment"
            )
        ray_internals.forget_token()
        output = ray_internals.RayOutput(private.path / "driver.log")
        self._cleanup.callback(output.restore)
        output.take_logger()
        started = ray_internals.RayProcesses(private.path / "nursery")
        self._processes = started.started
        self._cleanup.callback(started.close)
        self._cleanup.callback(self._end_processes, started.reap)
        self._cleanup.callback(started.dismiss_nursery)
        self._cleanup.callback(ray.shutdown)
        with started.starting():
            ray.init(
                address="local",
                num_cpus=self._config.num_cpus,
                num_gpus=0,
                object_store_memory=self._config.store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
                _temp_dir=str(private.for_ray),
                _plasma_directory=SHM_PATH,
                _system_config=dict(_SYSTEM_CONFIG),
            )
        output.take_logger()
        self._sigterm.install()
        self._is_up = True

    def stop(self) -> None:
        """Stop Ray and see to it that every process and file is gone; safe to call again."""
        if self._temp_dir is None:
            return
        atexit.unregister(self.stop)
        try:
            with signals_deferred():
                self._stop_processes()
        finally:
            self._sigterm.restore()

    def _stop_processes(self) -> None:
        self._processes = self._own_descendants()
        watchdog = threading.Timer(_STOP_BOUND_S, self._kill_processes)
        watchdog.daemon = True
        watchdog.start()  # ends what an orderly shutdown hangs on
        try:
            # A pipe to a process that has ended first is no error here, and must not stand in for
            # what ends the program; the stack runs all its steps in any case.
            with contextlib.suppress(BrokenPipeError):
                self._cleanup.close()
        finally:
            watchdog.cancel()
            self._temp_dir = None
            self._processes = []
            self._is_up = False

    def processes(self) -> list[ProcessId]:
        """Ray's living processes of this cluster, actors included."""
        return self._own_descendants()

    def memory_report(self) -> list[ProcessMemory]:
        """Memory of this process and of each of Ray's."""
        own = [ProcessMemory("driver", os.getpid(), pss_bytes(os.getpid()))]
        return own + [
            ProcessMemory(process_name(process.pid), process.pid, pss_bytes(process.pid))
            for process in self._own_descendants()
        ]

    def _own_descendants(self) -> list[ProcessId]:
        roots = [process for process in self._processes if is_alive(process)]
        found = {child for root in roots for child in descendants(root.pid)}
        return sorted({*roots, *found}, key=lambda process: process.pid)

    def _kill_processes(self) -> None:
        for process in self._processes:
            kill(process)

    def _end_processes(self, reap: Callable[[], None]) -> None:
        """Wait for every recorded process to be gone; kill what is not.

        Where the start itself was broken off nobody has told them to end: they are killed at once.
        """
        for bound_s in (_KILL_BOUND_S if self._is_up else 0.0, _KILL_BOUND_S):
            deadline = time.monotonic() + bound_s
            while time.monotonic() < deadline:
                reap()
                if not any(map(is_alive, self._processes)):
                    return
                time.sleep(_POLL_S)
            self._kill_processes()
        left = ", ".join(str(p.pid) for p in self._processes if is_alive(p))
        raise EngineError(f"processes of Ray did not end: {left}; end them with kill -9")
