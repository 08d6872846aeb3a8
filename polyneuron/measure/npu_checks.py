"""Checks of what could compute prompts: accelerators, and back ends with their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata

from polyneuron.backends.backend import Capabilities
from polyneuron.backends.native import NativeBackend
from polyneuron.backends.openvino_backend import device_names, load_openvino, stated_capabilities
from polyneuron.backends.spec import OPENVINO_CURE
from polyneuron.errors import ConfigError
from polyneuron.measure.check import Check, ok, warning
from polyneuron.measure.host import Host

DEVICE_NODES = ("accel/accel*", "rknpu*", "fastrpc-cdsp*", "apex_*")
INTEL_CURE = "install the driver of Intel's NPU (linux-npu-driver), for --npu openvino:NPU"


def check_npu(host: Host) -> Check:
    """Neural accelerators the kernel knows."""
    names = [
        path.name for pattern in DEVICE_NODES for path in sorted((host.root / "dev").glob(pattern))
    ]
    if names:
        return ok("NPU", f"{', '.join(names)}: used where a back end below names it")
    return ok("NPU", "none: dense clusters run on CPU cores (a modelled NPU)")


def check_native(_host: Host) -> Check:
    """The kernels on CPU cores, which always do."""
    return ok("--npu native", _can(NativeBackend().capabilities()))


def check_openvino(
    host: Host,
    names: Callable[[], dict[str, str]] = lambda: device_names(load_openvino()),
    version: Callable[[str], str] = metadata.version,
) -> Check:
    """OpenVINO and its devices."""
    name = "--npu openvino"
    try:
        found = version("openvino")
        devices = names()
    except (metadata.PackageNotFoundError, ConfigError):
        return ok(name, "is not installed", f"for Intel's devices: {OPENVINO_CURE}")
    except Exception as error:  # noqa: BLE001  (whatever a driver raises is the finding)
        last = str(error).strip().splitlines()[-1:]
        why = ": ".join([type(error).__name__, *last])
        return warning(name, f"does not start: {why}", f"reinstall it: {OPENVINO_CURE}")
    able = [_can(stated_capabilities(device, own)) for device, own in devices.items()]
    has_unused = any((host.root / "dev").glob("accel/accel*")) and "NPU" not in devices
    return ok(name, f"{found.split('-')[0]}: {'; '.join(able)}", INTEL_CURE if has_unused else "")


def _can(can: Capabilities) -> str:
    """Device, precision, storage of weights."""
    graphs = f", {can.max_graphs} graphs" if can.max_graphs else ""
    name = can.name.partition(":")[2]
    device = f"{name} ({can.device})" if name else can.device
    return f"{device}, {can.precision}, weights in {_storages(can.storages)}{graphs}"


def _storages(storages: Iterable[object]) -> str:
    return ", ".join(sorted(str(getattr(s, "name", s)).lower() for s in storages))
