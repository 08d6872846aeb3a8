"""Sizes as users write them: 3GiB, 3G, 3000MB, 75%."""

from __future__ import annotations

import re

from polyneuron.errors import ConfigError

# G alone is GiB, as llama.cpp's users and most boards' data sheets mean it; GB is 10^9.
_UNITS = {
    "": 1, "B": 1,
    "K": 1 << 10, "KIB": 1 << 10, "KB": 10**3,
    "M": 1 << 20, "MIB": 1 << 20, "MB": 10**6,
    "G": 1 << 30, "GIB": 1 << 30, "GB": 10**9,
    "T": 1 << 40, "TIB": 1 << 40, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*|%)\s*")


def parse_size(text: str, flag: str, whole_bytes: int | None = None) -> int:
    """Bytes that `text` means; a percentage is of `whole_bytes` (None: not allowed there)."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(f"{flag} {text!r}: not a size; write 3GiB, 3000MB or 75%")
    if unit == "%":
        if whole_bytes is None:
            raise ConfigError(f"{flag} {text!r}: a share is not possible here; write 3GiB")
        return int(float(match.group(1)) / 100 * whole_bytes)
    return int(float(match.group(1)) * _UNITS[unit])


def show_size(num_bytes: int) -> str:
    """A size for people: MiB below 10 GiB, else GiB."""
    mib = num_bytes / 2**20
    return f"{mib:.0f} MiB" if mib < 10240 else f"{mib / 1024:.1f} GiB"
