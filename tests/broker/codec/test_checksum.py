"""A sealed frame is given back whole, or not at all."""

import zlib

import pytest

from stageline.broker.codec.checksum import checked, crc32, sealed


def test_the_checksum_is_that_of_zlib() -> None:
    assert crc32(b"activation") == zlib.crc32(b"activation")
    assert sealed(b"activation") == zlib.crc32(b"activation").to_bytes(4, "little") + b"activation"


@pytest.mark.parametrize("body", [b"", b"x", bytes(1000)])
def test_what_was_sealed_is_read_and_no_damaged_frame_is(body: bytes) -> None:
    frame = sealed(body)
    assert checked(frame) == body
    for place in range(min(len(frame), 20)):
        damaged = bytearray(frame)
        damaged[place] ^= 1
        assert checked(bytes(damaged)) is None
        assert checked(frame[:place]) is None or place == len(frame)
