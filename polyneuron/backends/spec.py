"""What `--npu` names: a back end, its device, and for `native` a model of a device's limits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from polyneuron.errors import ConfigError
from polyneuron.sizes import parse_size

OPENVINO_CURE = "pip install 'polyneuron[openvino]'"
OPENVINO_MISSING = f"--npu openvino: OpenVINO is not installed; {OPENVINO_CURE}"
FORMS = "native, native:KEY=VALUE,…, openvino, openvino:DEVICE or none"


class BackendKind(StrEnum):
    """The back ends there are."""

    NONE = "none"
    """No NPU executor: CPU workers compute prompts too."""
    NATIVE = "native"
    OPENVINO = "openvino"


class Failure(StrEnum):
    """How a modelled device fails."""

    COMPILE = "compile"
    """A shape cannot be compiled."""
    BIND = "bind"
    """Memory cannot be mapped."""
    RUN = "run"
    """A run ends with an error."""
    NAN = "nan"
    """A run writes what is no number."""
    HANG = "hang"
    """A run never ends."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """A device modelled on the native kernels."""

    gops: float = math.inf
    """Speed in 10^9 operations a second, two a weight and token; the kernels' own at most."""
    memory_bytes: int | None = None
    max_graphs: int | None = None
    failure: Failure | None = None
    fails_from: int = 1
    """The first call, counted from 1, that fails; all after it do too."""


@dataclass(frozen=True, slots=True)
class NpuSpec:
    """One choice of `--npu`."""

    kind: BackendKind
    device: str = ""
    limits: DeviceLimits | None = None

    @property
    def has_graphs(self) -> bool:
        """Whether ops go through a back end's graphs; else the executors compute them."""
        return self.kind is BackendKind.OPENVINO or self.limits is not None


def parse_npu(text: str, flag: str = "--npu") -> NpuSpec:
    """The choice that `text` means; ConfigError names `flag` and the forms."""
    name, colon, rest = text.partition(":")
    if name not in tuple(BackendKind) or (colon and not rest):
        raise ConfigError(f"{flag} {text[:60]!a}: give {FORMS}")
    kind = BackendKind(name)
    if kind is BackendKind.NATIVE and rest:
        return NpuSpec(kind, limits=_limits(rest, flag))
    if kind is BackendKind.NONE and rest:
        raise ConfigError(f"{flag} {text[:60]!a}: none has no device; give {FORMS}")
    return NpuSpec(kind, device=(rest or "CPU") if kind is BackendKind.OPENVINO else "")


def precision_of(device: str) -> str:
    """The precision asked of a device of OpenVINO: a CPU's own default may be bf16."""
    return "f32" if device.split(".")[0] == "CPU" else "f16"


def check_threads(text: str, wanted: int, automatic: int) -> int:
    """Threads of the NPU executor with this choice; `wanted` below 0: `automatic` ones.

    ConfigError when the choice has none of what it needs: threads, or its package.
    """
    spec = parse_npu(text)
    if spec.kind is BackendKind.NONE:
        if wanted > 0:
            raise ConfigError(f"-tb {wanted}: --npu none has no threads; leave one of them out")
        return 0
    threads = wanted if wanted >= 0 else automatic
    if spec.has_graphs and threads < 1:
        raise ConfigError(f"-tb {threads}: --npu {text} needs a thread; give 1 or more")
    if spec.kind is BackendKind.OPENVINO and find_spec("openvino") is None:
        raise ConfigError(OPENVINO_MISSING)
    return threads


def _limits(text: str, flag: str) -> DeviceLimits:
    found: dict[str, str] = {}
    for item in text.split(","):
        key, equals, value = item.partition("=")
        if key not in ("gops", "memory", "graphs", "fail") or not equals or key in found:
            keys = "gops=50, memory=1MiB, graphs=4 or fail=run@3"
            raise ConfigError(f"{flag} native: {item[:40]!a} is no limit; give {keys}, each once")
        found[key] = value
    failure, fails_from = _failure(found["fail"], flag) if "fail" in found else (None, 1)
    return DeviceLimits(
        _gops(found["gops"], flag) if "gops" in found else math.inf,
        parse_size(found["memory"], f"{flag} native: memory") if "memory" in found else None,
        _count(found["graphs"], f"{flag} native: graphs") if "graphs" in found else None,
        failure,
        fails_from,
    )


def _gops(text: str, flag: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{flag} native: gops={text[:40]!a}; give a number above 0, as gops=50")
    return value


def _count(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= 1 << 30):
        raise ConfigError(f"{name}={text[:40]!a}; give a whole number, 1 or more")
    return int(text)


def _failure(text: str, flag: str) -> tuple[Failure, int]:
    name, at, number = text.partition("@")
    if name not in tuple(Failure):
        raise ConfigError(f"{flag} native: fail={text[:40]!a}; give one of {', '.join(Failure)}")
    return Failure(name), _count(number, f"{flag} native: fail={name}@") if at else 1
