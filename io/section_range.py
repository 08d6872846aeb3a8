"""Reads parts of a section of a neuron-cluster file, each compared with its checksums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polyneuron.io.file_device import FileDevice
from polyneuron.io.ncf_format import EXTENT_BYTES, NcfSection
from polyneuron.io.ncf_reader import NcfFile


class SectionRange:
    """Gives any run of a section's bytes; whole extents are read, so that all are verified.

    The extent read last is kept: runs that follow each other read none twice. The device's `read`
    must take `EXTENT_BYTES`.
    """

    def __init__(self, ncf: NcfFile, device: FileDevice, section: NcfSection) -> None:
        self._ncf, self._device, self._section = ncf, device, section
        self._index = -1
        self._extent: NDArray[np.uint8] = np.empty(0, np.uint8)

    def read_into(self, start: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` (num_bytes) with the bytes from `start` of the section on.

        Raises DeviceError or ChecksumError naming file and place.
        """
        done = 0
        while done < len(out):
            index, skip = divmod(start + done, EXTENT_BYTES)
            part = self._read_extent(index)[skip : skip + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def _read_extent(self, index: int) -> NDArray[np.uint8]:
        if index != self._index:
            offset, num_bytes = self._section.extent(index)
            view = self._device.read(offset, num_bytes)
            self._ncf.check_extents(self._section, index, view)
            self._extent, self._index = np.frombuffer(view, np.uint8), index
        return self._extent
