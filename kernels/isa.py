"""Chooses the instruction set whose kernels this process runs."""

import os
from typing import TYPE_CHECKING

from polyneuron.errors import ConfigError
from polyneuron.kernels._kernels import ffi, lib

if TYPE_CHECKING:
    from polyneuron.kernels._kernels import _Lib

FORCE_VARIABLE = "POLYNEURON_FORCE_ISA"

NEEDS = {
    "avx512": "AVX-512 with VNNI",
    "avx2": "AVX2 and F16C",
    "neon_i8mm": "the int8 matrix instructions of ARMv8.6 (i8mm)",
    "neon_dotprod": "the dot-product instructions of ARMv8.2",
    "neon": "64-bit NEON",
}
"""What a CPU must have for each set of kernels; `scalar` needs nothing."""

_is_selected = False


def built() -> list[str]:
    """Names of the instruction sets compiled into this build, best first."""
    names: list[str] = []
    while (name := lib.kernels_built(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names


def supported() -> list[str]:
    """Those of `built()` that this CPU can run, best first."""
    return [name for name in built() if lib.kernels_supported(name.encode())]


def select(name: str | None = None) -> str:
    """Select kernels by name, else by POLYNEURON_FORCE_ISA, else the best; returns the name.

    Call it once a process, at the start; never while another thread is inside a kernel.
    """
    global _is_selected
    if lib.kernels_select(ffi.NULL if name is None else name.encode()) != 0:
        source = FORCE_VARIABLE if name is None else "isa"
        wanted = os.environ.get(FORCE_VARIABLE, "") if name is None else name
        cure = f"this CPU and build have {', '.join(supported())}"
        raise ConfigError(f"{source}={wanted}: not available; {cure}")
    _is_selected = True
    return active()


def active() -> str:
    """Name of the instruction set in use, selecting one first if none is."""
    return ffi.string(library().kernels_active()).decode()


def library() -> "_Lib":
    """The C library with an instruction set selected; a bad forced one is a ConfigError."""
    if not _is_selected:
        select()
    return lib
