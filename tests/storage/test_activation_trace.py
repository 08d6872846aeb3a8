"""Recordings as files: what is written is read, and whatever is damaged is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyneuron.errors import ChecksumError, DeviceError, FormatError, UnsupportedError
from polyneuron.io import activation_trace
from polyneuron.io.activation_trace import (
    BLOCK_CRC,
    HEADER,
    VERSION,
    TraceHead,
    needed_words,
    read_trace,
    trace_bytes,
    write_trace,
)
from polyneuron.io.file_kind import TRACE_MAGIC
from polyneuron.io.packed_arrays import pack_arrays
from polyneuron.kernels.checksum import crc32c
from tests.support.recordings import made_up, write_masks

LAYERS, TOKENS, NEURONS = 2, 5, 70
HEAD = TraceHead("model", "text", LAYERS, NEURONS, TOKENS, 32, (0, 3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.trace"


def write(path: Path, head: TraceHead = HEAD) -> list[bytes]:
    """A recording, and its blocks."""
    masks = made_up(head.num_layers, head.num_tokens, head.num_neurons)
    blocks = [needed_words(masks[:, layer]).tobytes() for layer in range(head.num_layers)]
    write_trace(path, head, blocks)
    return blocks


class TestWhole:
    @pytest.mark.parametrize("neurons", [1, 63, 64, 65, 128, 333])
    def test_bits_are_the_neurons(self, path: Path, neurons: int) -> None:
        masks = made_up(3, 7, neurons)
        found = read_trace(write_masks(path, masks, task_neurons=32))
        assert found.head.num_words == -(-neurons // 64)
        assert found.bits.shape == (3, 7, found.head.num_words)
        for layer, token, neuron in np.ndindex(3, 7, neurons):
            word = int(found.bits[layer, token, neuron // 64])
            assert word >> neuron % 64 & 1 == masks[token, layer, neuron]
        assert np.unpackbits(found.bits.view(np.uint8)).sum() == masks.sum()

    def test_head_comes_back(self, path: Path) -> None:
        write(path)
        assert read_trace(path).head == HEAD
        assert path.stat().st_size == trace_bytes(HEAD)

    def test_same_recording_is_the_same_file(self, path: Path) -> None:
        write(path)
        first = path.read_bytes()
        write(path)
        assert path.read_bytes() == first

    def test_broken_off_leaves_the_old_one(self, path: Path) -> None:
        write(path)
        first = path.read_bytes()

        def blocks() -> Iterator[bytes]:
            yield bytes(HEAD.block_bytes)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_trace(path, HEAD, blocks())
        assert path.read_bytes() == first
        assert [p.name for p in path.parent.iterdir()] == [path.name]

    def test_folder_that_is_not_there_is_named(self, path: Path) -> None:
        with pytest.raises(DeviceError, match=r"none/a\.trace: cannot be written"):
            write(path.parent / "none" / "a.trace")


def refused(path: Path, data: bytes) -> str:
    """How a file with these bytes is refused: by its name, with the cure, in one line."""
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message
    return message


def with_head(fields: dict[str, object], blocks: bytes = b"") -> bytes:
    """A file whose checksums are right, whatever its head says."""
    plain = {name: getattr(HEAD, name) for name in activation_trace.PLAIN_FIELDS}
    starts = {"num_sequences": 1, "starts": np.zeros(1, np.uint32)}
    packed = pack_arrays({**plain, **starts, **fields})
    return HEADER.pack(TRACE_MAGIC, VERSION, crc32c(packed), len(packed)) + packed + blocks


class TestDamaged:
    def test_every_flipped_bit_is_found(self, path: Path) -> None:
        write(path)
        whole = path.read_bytes()
        for at in range(len(whole)):
            for bit in (0, 7):
                changed = bytearray(whole)
                changed[at] ^= 1 << bit
                assert "polyneuron profile --record" in refused(path, bytes(changed))

    def test_every_cut_is_found(self, path: Path) -> None:
        write(path)
        whole = path.read_bytes()
        for length in range(1, len(whole)):
            assert "polyneuron profile --record" in refused(path, whole[:length])
        assert "something follows its end" in refused(path, whole + b"\0")
        assert "cut off" in refused(path, whole[:-1])

    def test_kind_of_error_is_told(self, path: Path) -> None:
        write(path)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(TRACE_MAGIC)] + (2).to_bytes(4, "little") + whole[12:])
        with pytest.raises(UnsupportedError, match="version 2 of recordings; this reads 1"):
            read_trace(path)
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(ChecksumError, match="checksum of layer 1 does not match"):
            read_trace(path)

    @pytest.mark.parametrize(
        "fields",
        [
            {"num_tokens": 0}, {"num_tokens": 1 << 40}, {"num_layers": 1 << 20},
            {"num_layers": -1}, {"num_neurons": 1 << 17}, {"num_neurons": "many"},
            {"task_neurons": None}, {"model_key": 3}, {"num_sequences": 2}, {"starts": 7},
        ],
    )  # fmt: skip
    def test_heads_that_cannot_be_are_refused(self, path: Path, fields: dict[str, object]) -> None:
        message = refused(path, with_head(fields))
        assert "the recording's head has " in message and "profile --record" in message

    def test_much_is_not_taken_for_granted(self, path: Path) -> None:
        """A head of terabytes is refused by the file's size, before memory is taken."""
        message = refused(path, with_head({"num_tokens": 1 << 26, "num_layers": 1 << 12}))
        assert "cut off" in message

    def test_neurons_that_are_not_there_are_refused(self, path: Path) -> None:
        block = np.zeros((TOKENS, HEAD.num_words), np.uint64)
        block[3, 1] = 1 << (NEURONS - 64)
        blocks = [block.tobytes()] * LAYERS
        path.write_bytes(b"")
        write_trace(path, HEAD, blocks)
        assert "neurons that there are not" in refused(path, path.read_bytes())
        block[3, 1] = 1 << (NEURONS - 65)
        write_trace(path, HEAD, [block.tobytes()] * LAYERS)
        assert np.unpackbits(read_trace(path).bits.view(np.uint8)).sum() == LAYERS

    def test_what_is_no_file_is_named(self, path: Path) -> None:
        for make in (lambda: None, path.mkdir):
            make()
            with pytest.raises(FormatError, match=r"a\.trace: .*polyneuron profile --record"):
                read_trace(path)
        path.rmdir()
        os.mkfifo(path)
        with pytest.raises(FormatError, match="not a regular file"):
            read_trace(path)
        path.unlink()
        assert "not a recording" in refused(path, b"GGUF" + bytes(60))
        refused(path, b"")

    def test_blocks_of_another_size_are_a_mistake(self, path: Path) -> None:
        with pytest.raises(ValueError, match="a block of 3 bytes"):
            write_trace(path, replace(HEAD, num_layers=1), [b"abc"])
        assert not path.exists()
        assert BLOCK_CRC.size == 4
