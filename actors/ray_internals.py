"""The one place that knows Ray's private names: what of Ray is not started, and where it prints.

Ray has no public switch for most of its helper processes. A single node with a handful of actors
needs the control store (gcs_server) and the raylet, nothing else. Where a version of Ray lacks a
name used here, that process simply starts as usual: more memory, same behaviour.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from polyneuron.actors.process_stats import ProcessId, identify

_WORKER_ENTRY = Path(__file__).resolve().parent / "worker_entry.py"
_REAP_BOUND_S = 5.0
_WORKER_NURSERY = _WORKER_ENTRY.with_name("worker_nursery.py")

# Methods of ray's Node: autoscaler, log forwarder, dashboard head (with its usage statistics).
_UNNEEDED_STARTERS = ("start_monitor", "start_log_monitor", "start_api_server")

# Per-node daemons the raylet starts itself and dies with: metrics export, runtime environments.
_AGENT_FLAGS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")

# The ports the raylet waits for. -1 is Ray's own "not in use"; the last one must look like a port.
_AGENT_PORTS = {
    "METRICS_AGENT_PORT_NAME": -1,
    "METRICS_EXPORT_PORT_NAME": -1,
    "DASHBOARD_AGENT_LISTEN_PORT_NAME": -1,
    "RUNTIME_ENV_AGENT_PORT_NAME": 1,
}

_NURSERY_ENVIRONMENT = {
    "RAY_JOB_ID": "01000000",  # the first and only job; for another one the nursery declines
    "OPENBLAS_NUM_THREADS": "1",  # or numpy starts threads, which a fork would lose
}


def _find(module_name: str) -> ModuleType | None:
    try:
        return importlib.import_module(module_name)
    except ImportError:
        return None


class _Keeper:
    """A thread that starts processes and outlives them.

    The kernel ends Ray's processes when the thread that started them ends, and `start` may have
    been called in a short-lived thread.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="polyneuron-keeper", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the thread and return what it returns."""
        outcome: Future[Any] = Future()
        self._calls.put((function, outcome))
        return outcome.result()

    def close(self) -> None:
        """End the thread, and with it every process it started."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            function, outcome = item
            try:
                outcome.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
                outcome.set_exception(error)


def _replace_agents(command: list[str]) -> list[str]:
    """Let a silent stand-in take the place of the two daemons the raylet insists on.

    `cat` waits at the pipe the raylet holds open and ends with it, in 0.2 MB instead of 50.
    """
    raylet_api = _find("ray._raylet")
    stand_in = shutil.which("cat")
    options = dict(word[2:].split("=", 1) for word in command if "=" in word)
    if stand_in is None or not hasattr(raylet_api, "persist_port"):
        return command
    if not all(hasattr(raylet_api, name) for name in _AGENT_PORTS):
        return command
    for name, port in _AGENT_PORTS.items():
        raylet_api.persist_port(  # type: ignore[union-attr]
            options["session_dir"], options["node_id"], getattr(raylet_api, name), port
        )
    return [
        next((flag + stand_in for flag in _AGENT_FLAGS if word.startswith(flag)), word)
        for word in command
    ]


def _replace_worker_script(command: list[str]) -> list[str]:
    """Have the raylet start `worker_entry.py`, which asks the nursery, for Ray's own script."""
    workers = _find("ray._private.workers")
    if workers is None:
        return command
    script = str(Path(next(iter(workers.__path__))) / "default_worker.py")
    os.environ["POLYNEURON_RAY_WORKER"] = script
    return [
        word.replace(script, f"-I -S {_WORKER_ENTRY}")
        if word.startswith("--python_worker_command=") and " " not in str(_WORKER_ENTRY)
        else word
        for word in command
    ]


def _detached(popen: Callable[..., Any]) -> Callable[..., Any]:
    """Start in a session of its own: Ctrl-C at the terminal is for the program to handle.

    Were Ray's processes to end at once, an orderly shutdown would wait for them in vain.
    """

    def start(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("stdin") is None:
            kwargs["stdin"] = subprocess.DEVNULL
        return popen(*args, **kwargs, start_new_session=True)

    return start


class RayProcesses:
    """Starts Ray's processes, without the unneeded ones, and remembers them."""

    def __init__(self, nursery_path: Path) -> None:
        os.environ["POLYNEURON_RAY_NURSERY"] = str(nursery_path)
        self._keeper = _Keeper()
        self._handles: list[subprocess.Popen[bytes]] = []
        self.started: list[ProcessId] = []

    def _start_nursery(self, raylet_pid: int) -> None:
        """Start the process that actors are forked from; it imports while Ray starts."""
        command = [sys.executable, str(_WORKER_NURSERY), os.environ["POLYNEURON_RAY_NURSERY"]]
        own = {**_NURSERY_ENVIRONMENT, "RAY_RAYLET_PID": str(raylet_pid)}
        handle = self._keeper.call(
            lambda: subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # held open until stop
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **own},
            )
        )
        self._note(handle)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While inside, what `ray.init` starts is trimmed and recorded."""
        services, node = _find("ray._private.services"), _find("ray._private.node")
        with contextlib.ExitStack() as undo:
            if node is not None:
                for name in _UNNEEDED_STARTERS:
                    if hasattr(node.Node, name):
                        _swap(undo, node.Node, name, lambda *_args, **_kwargs: None)
            if services is not None and hasattr(services, "start_ray_process"):
                starter = services.start_ray_process
                _swap(undo, services, "start_ray_process", self._wrap(starter))
            if services is not None and hasattr(services, "ConsolePopen"):
                _swap(undo, services, "ConsolePopen", _detached(services.ConsolePopen))
            yield

    def dismiss_nursery(self) -> None:
        """Let the nursery end."""
        for handle in self._handles:
            if handle.stdin is not None:
                handle.stdin.close()

    def reap(self) -> None:
        """Collect the exit status of ended children, so that no zombie stays."""
        for handle in self._handles:
            handle.poll()

    def close(self) -> None:
        """End the thread the processes hang on; what is left of them ends with it."""
        self._keeper.close()
        for handle in self._handles:  # one may have ended after the last look
            with contextlib.suppress(subprocess.TimeoutExpired):
                handle.wait(_REAP_BOUND_S)

    def _wrap(self, starter: Callable[..., Any]) -> Callable[..., Any]:
        def start(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
            if process_type == "raylet":
                command = _replace_worker_script(_replace_agents(command))
            info = self._keeper.call(lambda: starter(command, process_type, *args, **kwargs))
            self._note(info.process)
            if process_type == "raylet":
                self._start_nursery(info.process.pid)
            return info

        return start

    def _note(self, handle: subprocess.Popen[bytes]) -> None:
        self._handles.append(handle)
        process = identify(handle.pid)
        if process is not None:
            self.started.append(process)


def _swap(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class RayOutput:
    """Sends what Ray prints or logs in this process to a file.

    When an actor dies, a thread of Ray prints a paragraph to the caller's standard output.
    """

    def __init__(self, log_path: Path) -> None:
        self._handler = logging.FileHandler(log_path, delay=True, errors="replace")
        self._undo = contextlib.ExitStack()
        self._undo.callback(self._handler.close)
        worker = _find("ray._private.worker")
        if worker is not None and hasattr(worker, "print_to_stdstream"):
            _swap(self._undo, worker, "print_to_stdstream", self._keep)

    def take_logger(self) -> None:
        """Redirect Ray's logger; needed again after `ray.init`, which clears its handlers."""
        logger = logging.getLogger("ray")
        _swap(self._undo, logger, "propagate", False)
        _swap(self._undo, logger, "handlers", [self._handler])

    def restore(self) -> None:
        """Give Ray its output back."""
        self._undo.close()

    def _keep(self, message: dict[str, Any], *_args: Any, **_kwargs: Any) -> None:
        for line in message.get("lines", []):
            self._handler.handle(logging.makeLogRecord({"msg": line}))


def takes_tokens() -> bool:
    """Whether this process's Ray authenticates: it read the mode when it was imported."""
    raylet_api = _find("ray._raylet")
    mode = getattr(raylet_api, "get_authentication_mode", None)
    return mode is None or int(mode()) != 0


def forget_token() -> None:
    """Make Ray read the token from the environment again: each cluster has its own."""
    raylet_api = _find("ray._raylet")
    loader = getattr(raylet_api, "AuthenticationTokenLoader", None)
    if loader is not None:
        loader.instance().reset_cache()
