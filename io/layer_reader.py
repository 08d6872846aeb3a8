"""Keeps a ring of stage buffers filled with the layers a forward pass will need next."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from pathlib import Path

from polyneuron.errors import DeviceError
from polyneuron.io.ncf_format import NcfSection
from polyneuron.io.section_reader import SectionReader
from polyneuron.kernels.arena import Arena

WAIT_SLICE_NS = 200_000_000


class LayerReader:
    """Reads streamed layers in order, over and over, as far ahead as buffers are free."""

    def __init__(self, path: Path, arena: Arena, stream: int, sections: list[NcfSection]) -> None:
        self._arena, self._stream, self._sections = arena, stream, sections
        self._state = arena.layer_stream(stream)
        self._reader = SectionReader(path, arena)

    def run(self) -> None:
        """Read until the stream stops, or until a read fails for good (its error is set)."""
        pending: deque[list[Future[int]]] = deque()
        load = int(self._state.landed)
        try:
            while not self._state.stop:
                timeout_ns = 0 if pending else WAIT_SLICE_NS
                if self._arena.wait_free_buffer(self._stream, load, timeout_ns):
                    pending.append(self._order(load))
                    load = (load + 1) % (1 << 32)
                elif pending:
                    self._land(pending.popleft())
        except DeviceError as error:
            self._arena.fail_stream(self._stream, error.errno or 5)
        finally:
            self._reader.close()

    def _order(self, load: int) -> list[Future[int]]:
        section = self._sections[load % len(self._sections)]
        buffer = load % int(self._state.num_buffers)
        offset = int(self._state.buffers) + buffer * int(self._state.buffer_bytes)
        return self._reader.submit(section, offset, verify=False)

    def _land(self, parts: list[Future[int]]) -> None:
        for part in parts:
            self._state.bytes_read += part.result()
            self._state.reads += 1
        self._arena.land_layer(self._stream)
