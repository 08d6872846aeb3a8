"""A program with a cluster of its own, for tests that end it in various ways."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import numpy as np

from polyneuron.actors.cluster import ClusterConfig, PrivateCluster

ARENA_BYTES = 100 << 20


class Holder:
    """An actor that keeps a shared object."""

    def hold(self, references: list[Any]) -> int:
        """Keep the object behind the reference; return its first byte."""
        import ray

        self.array = ray.get(references[0])
        return int(self.array[0])

    def pid(self) -> int:
        """The process of this actor."""
        return os.getpid()


def start_holder() -> Any:
    """Create one actor and give it an object in shared memory."""
    return start_holders(1)[0]


def start_holders(num_actors: int) -> list[Any]:
    """Create actors that share one object."""
    import ray

    remote: Any = ray.remote(num_cpus=0, max_restarts=-1)(Holder)
    holders = [remote.remote() for _ in range(num_actors)]
    reference = ray.put(np.full(ARENA_BYTES if num_actors == 1 else 1 << 20, 7, np.uint8))
    assert set(ray.get([each.hold.remote([reference]) for each in holders], timeout=60)) == {7}
    return holders


def freeze(holder: Any) -> None:
    """Stop the actor's process as SIGSTOP does: it notices nothing any more."""
    import ray

    os.kill(ray.get(holder.pid.remote(), timeout=60), signal.SIGSTOP)


def say(line: str) -> None:
    """Tell the test; standard output may be closed."""
    if sys.stdout is not None:
        print(line, flush=True)


def lose_actor(cluster: PrivateCluster, holder: Any) -> None:
    """Kill the actor while printing; return once Ray has had its say about it."""
    import ray

    os.kill(ray.get(holder.pid.remote(), timeout=60), signal.SIGKILL)
    pause = threading.Event()
    log = cluster.temp_dir / "driver.log"
    for attempt in range(1500):
        if attempt < 100:
            say(f"line {attempt}")
        elif log.exists() and "worker died" in log.read_text():
            say("reported")
            return
        pause.wait(0.02)


def main(mode: str) -> None:
    """Start, do what the mode says, stop."""
    with PrivateCluster(ClusterConfig(ARENA_BYTES)) as cluster:
        holder = start_holder()
        if mode == "purity":
            lose_actor(cluster, holder)
            return
        if mode == "hang":
            freeze(holder)
        say("ready")
        if mode == "raise":
            raise RuntimeError("on purpose")
        if mode != "exit":
            threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
