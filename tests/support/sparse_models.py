"""Tiny models whose neurons are often zero, one of each kind, and reads that land late for them."""

import random
from collections.abc import Callable
from dataclasses import replace

from polyneuron.clock import MonotonicClock
from polyneuron.io.block_device import BlockDevice
from polyneuron.io.device_wrappers import LatencyDevice
from tests.support.tiny_gguf import TinyModel

LATENCIES_NS = (0, 1_000_000, 5_000_000)


def drelu_model(num_layers: int) -> TinyModel:
    """dReLU in 4 bits, eleven clusters a layer."""
    return TinyModel(
        family="bamboo", num_layers=num_layers, d_model=64, d_ff=352, num_heads=4, num_kv_heads=2,
        head_dim=16, tensor_type="Q4_0", tied_head=False,
    )  # fmt: skip


def sparse_models(num_layers: int) -> dict[str, TinyModel]:
    """dReLU, the same in floats with a last tile that is not full, ReGLU, ReLU without a gate."""
    drelu = drelu_model(num_layers)
    relu = replace(drelu, family="llama", activation="relu", tensor_type="Q8_0")
    return {
        "drelu": drelu,
        "drelu_f16": replace(drelu, tensor_type="F16", d_ff=333),
        "reglu": relu,
        "relu": replace(relu, has_gate=False),
    }


def late_reads() -> Callable[[BlockDevice], BlockDevice]:
    """Around a device: reads land up to 5 ms late and in another order, the same in every run."""
    chance = random.Random(5)
    return lambda device: LatencyDevice(
        device, MonotonicClock(), lambda _: chance.choice(LATENCIES_NS)
    )
