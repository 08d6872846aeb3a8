"""A process that has Ray imported already and forks an actor process on request.

Importing Ray takes most of the start of an actor and most of its memory. Forked actors start at
once and share those pages. Run by path; ends when its standard input does.
"""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from worker_entry import (  # type: ignore[import-not-found]  # found beside this file
    DONE,
    MAX_REQUEST_BYTES,
    NUM_STREAMS,
    die_with_parent,
    prepare,
)

# What every actor imports, and nothing that starts a thread: only the caller survives a fork.
_PRELOADED = ("ray._private.workers.default_worker", "numpy", "msgpack", "cffi")


def main(socket_path: str) -> None:
    """Import, listen at the path, and fork until standard input ends."""
    del sys.path[0]  # this folder: its modules must not stand in for others of the same name
    libc = ctypes.CDLL(None, use_errno=True)
    die_with_parent(libc)
    prepare(libc)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(socket_path)
        listener.listen()  # who comes before the imports are done waits
        for name in _PRELOADED:
            __import__(name)
        gc.collect()
        gc.freeze()  # the collector would otherwise touch, and so unshare, every page
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                return
            connection, _ = listener.accept()
            with connection:
                wanted, streams = _receive(connection)
                suitable = _settings(wanted["environment"]) == _settings(dict(os.environ))
                if suitable and os.fork() == 0:
                    break
                for stream in streams:
                    os.close(stream)
                if suitable:
                    connection.send(DONE)
    _become_actor(libc, wanted, streams)


def _settings(environment: dict[str, str]) -> dict[str, str]:
    """What Ray's library has read from the environment once and for all in this process."""
    names = ("RAY_AUTH_TOKEN", "RAY_JOB_ID", "RAY_RAYLET_PID")
    return {name: environment.get(name, "") for name in names}


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request with the three standard streams of the process that asks."""
    space = socket.CMSG_SPACE(NUM_STREAMS * array.array("i").itemsize)
    request, ancillary, _, _ = connection.recvmsg(MAX_REQUEST_BYTES, space)
    streams = array.array("i")
    for _, _, content in ancillary:
        streams.frombytes(content)
    return json.loads(request), list(streams)


def _become_actor(libc: ctypes.CDLL, wanted: dict[str, Any], streams: list[int]) -> None:
    """In the forked process: take on arguments, environment and streams, and run Ray's worker."""
    die_with_parent(libc)
    os.setsid()  # the raylet ends a worker by its process group
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    script = os.environ["POLYNEURON_RAY_WORKER"]
    sys.argv = [script, *wanted["arguments"]]
    sys.path.insert(0, str(Path(script).parent))  # as if Ray had started its own script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
