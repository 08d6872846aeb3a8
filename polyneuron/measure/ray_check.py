"""Check of Ray: which one there is, and that a private cluster starts."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from polyneuron.errors import PolyneuronError
from polyneuron.kernels.arena import monotonic_ns
from polyneuron.measure.check import Check, ok, problem, warning

NAME = "Ray"
SLOW_START_S = 20.0


def start_and_stop() -> float:
    """Seconds that a private cluster takes to start; it is stopped again."""
    from polyneuron.actors.cluster import ClusterConfig, PrivateCluster

    start_ns = monotonic_ns()
    with PrivateCluster(ClusterConfig(shared_bytes=0)):
        return (monotonic_ns() - start_ns) / 1e9


def check_ray(
    start: Callable[[], float] = start_and_stop,
    version: Callable[[str], str] = metadata.version,
) -> Check:
    """Start it as a run does, without actors."""
    try:
        found = version("ray")
    except metadata.PackageNotFoundError:
        return problem(NAME, "is not installed", "pip install ray")
    try:
        seconds = start()
    except PolyneuronError as error:
        return problem(NAME, f"{found} does not start", str(error))
    except Exception as error:  # noqa: BLE001  (whatever Ray raises is the finding)
        last = str(error).strip().splitlines()[-1:]
        cure = "allow sockets on the loopback interface and in the folder of TMPDIR"
        return problem(
            NAME, f"{found} does not start: {': '.join([type(error).__name__, *last])}", cure
        )
    if seconds > SLOW_START_S:
        cure = "end other programs, or expect as much before the first token"
        return warning(NAME, f"{found} takes {seconds:.0f} s to start", cure)
    return ok(NAME, f"{found} starts in {seconds:.1f} s")
