"""Plays the turns of a sweep as tasks of a Ray cluster: of one machine, or of many."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from polyneuron.errors import ConfigError, EngineError

CONNECT_TIMEOUT_S = 5.0
TurnT = TypeVar("TurnT")
PlayedT = TypeVar("PlayedT")


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Ray, connected to the cluster at `address`, host:port.

    A connection that is there already is used as it is, and stays.
    """
    import ray

    if ray.is_initialized():
        yield ray
        return
    _check_answers(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--ray {address}: is no Ray cluster for us: {reason}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse at once what Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--ray {address}: give the address of a Ray cluster's head, host:port")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--ray {address}: nothing answers there: {error}") from None


def perform_on_ray(
    perform: Callable[[TurnT], PlayedT], turns: Sequence[TurnT], address: str
) -> Iterator[PlayedT]:
    """What `perform` makes of each turn, in order; every node needs this version of polyneuron."""
    with connected(address) as ray:
        task = ray.remote(num_cpus=1)(perform)
        # None is cancelled when one fails: a cancellation that meets the end of its task ends this
        # whole process (Ray 2.60), and the others end with the connection.
        pending = [task.remote(turn) for turn in turns]
        try:
            for reference in pending:
                yield ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ConfigError):
                raise error.cause from None
            raise EngineError(f"a task failed: {error.cause!r}") from error
