"""Opens the back end that a choice of `--npu` names."""

from __future__ import annotations

from polyneuron.backends.backend import Backend
from polyneuron.backends.modelled import ModelledBackend
from polyneuron.backends.native import NativeBackend
from polyneuron.backends.spec import BackendKind, NpuSpec


def open_backend(spec: NpuSpec, num_threads: int) -> Backend:
    """The back end, at work on so many threads; ConfigError when it is not here."""
    if spec.kind is BackendKind.OPENVINO:
        from polyneuron.backends.openvino_backend import OpenvinoBackend  # an extra

        return OpenvinoBackend(spec.device, num_threads)
    return ModelledBackend(spec.limits) if spec.limits else NativeBackend()
