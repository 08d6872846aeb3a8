"""CRC-32C against published values, a bit by bit reference, and both implementations alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyneuron.kernels.checksum import crc32c, crc32c_portable

# RFC 3720, appendix B.4; the first is the check value of the CRC catalogue.
VECTORS = {
    b"": 0x00000000,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
}
# Around words, around the three streams of 2048 bytes, and a whole extent.
LENGTHS = [0, 1, 7, 8, 9, 63, 6143, 6144, 6145, 6151, 12288, 12301, 1 << 20]


def bitwise(data: bytes, crc: int = 0) -> int:
    """The definition: one bit at a time."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("data", VECTORS)
def test_published_values(data: bytes) -> None:
    assert crc32c(data) == crc32c_portable(data) == bitwise(data) == VECTORS[data]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("start", [0, 1, 3])
def test_both_ways_agree(length: int, start: int) -> None:
    data = np.random.default_rng(length).integers(0, 256, length + start, np.uint8)[start:]
    assert crc32c(data) == crc32c_portable(data)
    if length < 10_000:
        assert crc32c(data) == bitwise(data.tobytes())


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_parts_go_on(first: bytes, second: bytes) -> None:
    assert crc32c(second, crc32c(first)) == crc32c(first + second) == bitwise(first + second)
    assert crc32c_portable(second, crc32c_portable(first)) == crc32c(first + second)


@pytest.mark.parametrize("bit", [0, 7, 8 * 2047, 8 * 2048 + 1, 8 * 6144, 8 * 8191 + 7])
def test_one_flipped_bit_is_seen(bit: int) -> None:
    data = bytearray(8192)
    before = crc32c(data)
    data[bit // 8] ^= 1 << bit % 8
    assert crc32c(data) != before
