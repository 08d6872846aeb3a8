"""polyneuron runs language models bigger than a board's memory: neuron clusters on Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyneuron.completion import Completion
    from polyneuron.config import EngineConfig
    from polyneuron.engine import Engine
    from polyneuron.generation import Generation
    from polyneuron.model.sampling import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "Generation", "SamplingParams"]

_HOMES = {
    "Completion": "polyneuron.completion",
    "Engine": "polyneuron.engine",
    "EngineConfig": "polyneuron.config",
    "Generation": "polyneuron.generation",
    "SamplingParams": "polyneuron.model.sampling",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use: `polyneuron --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'polyneuron' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
