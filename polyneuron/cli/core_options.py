"""What the flags that name cores mean, as llama.cpp's do."""

from __future__ import annotations

import re
from typing import Any

from polyneuron.cores import Cores, parse_core_list, this_machine
from polyneuron.errors import ConfigError

MAX_DIGITS = 2048
"""Of a mask: as many cores as Linux can be built for."""


def core_settings(
    model: str,
    threads: int,
    threads_batch: int,
    cpu_mask: str,
    cpu_range: str,
    machine: Cores | None = None,
) -> dict[str, Any]:
    """The fields of EngineConfig that `-t`, `-tb`, `-C` and `-Cr` mean, and what is known beside.

    ConfigError names the flag and the cores that are allowed when one cannot be used.
    """
    cores = machine or this_machine()
    by_mask, by_range = _masked(cpu_mask), _ranged(cpu_range, cores)
    cores.check(by_mask, f"-C {cpu_mask[:40]}")
    cores.check(by_range, f"-Cr {cpu_range[:40]}")
    return {
        "num_workers": threads,
        "num_npu_threads": threads_batch,
        "cores": tuple(sorted({*by_mask, *by_range})),
        "io_cores": _reading_order(model, cores),
    }


def _masked(mask: str) -> list[int]:
    """Cores of a hexadecimal mask, the lowest bit core 0; none of an empty one."""
    if not mask:
        return []
    match = re.fullmatch(r"(?:0[xX])?([0-9a-fA-F]+)", mask)
    if match is None or len(mask) > MAX_DIGITS:
        raise ConfigError(f"-C {mask[:40]}: no hexadecimal mask; give one as f0 for cores 4 to 7")
    bits = int(match.group(1), 16)
    if not bits:
        raise ConfigError(f"-C {mask[:40]}: names no core; give one as f0, or leave it out")
    return [core for core in range(bits.bit_length()) if bits >> core & 1]


def _ranged(text: str, cores: Cores) -> list[int]:
    """Cores of `first-last`, where either may be left out; none of an empty text."""
    if not text:
        return []
    whole = text.strip()
    if whole.startswith("-"):
        whole = f"0{whole}"
    if whole.endswith("-"):
        whole = f"{whole}{cores.ids[-1]}"
    try:
        return list(parse_core_list(whole))
    except ValueError:
        raise ConfigError(f"-Cr {text[:40]}: no range of cores; give one as 4-7") from None


def _reading_order(model: str, cores: Cores) -> tuple[int, ...]:
    """Cores to read from, the best first, where they differ and were measured; else none."""
    if len(cores.kinds) < 2:
        return ()
    from polyneuron.measure.device_store import load_profile
    from polyneuron.model.locate import locate_model

    profile = load_profile(locate_model(model))
    return () if profile is None else profile.reading_order()
