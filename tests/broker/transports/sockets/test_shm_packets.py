"""The frames of a message in one piece, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.codec.message import Frame
from stageline.broker.errors import BadMessage
from stageline.broker.transports.sockets.shm_producer import preamble
from stageline.broker.transports.sockets.shm_queues import split

frames_of_a_message = st.lists(st.binary(max_size=20), min_size=1, max_size=6)


def packed(frames: list[bytes]) -> bytes:
    return b"".join([preamble(list(frames)), *frames])


def split_or_refused(content: bytes) -> list[bytes] | None:
    """The frames, after a look at whether they can be; None if they are refused."""
    try:
        frames: list[Frame] = split(memoryview(content))
    except BadMessage:
        return None
    assert frames
    assert 2 + sum(8 + len(frame) for frame in frames) == len(content)
    return [bytes(frame) for frame in frames]


@given(frames_of_a_message)
def test_frames_come_back_as_they_were(frames: list[bytes]) -> None:
    assert split_or_refused(packed(frames)) == frames


def test_frames_are_not_copied() -> None:
    content = bytearray(packed([b"header", b"tensor"]))
    frames = split(memoryview(content))
    content[-6:] = b"TENSOR"
    assert frames[1] == b"TENSOR"


@given(frames_of_a_message)
def test_a_message_that_was_cut_short_is_refused(frames: list[bytes]) -> None:
    content = packed(frames)
    for length in range(len(content)):
        assert split_or_refused(content[:length]) is None


@given(frames_of_a_message, st.binary(min_size=1, max_size=9))
def test_a_message_with_more_behind_it_is_refused(frames: list[bytes], more: bytes) -> None:
    assert split_or_refused(packed(frames) + more) is None


@given(frames_of_a_message, st.integers(1, 255))
def test_every_damaged_byte_of_the_lengths_is_refused_or_gives_frames_of_the_right_total(
    frames: list[bytes], flipped: int
) -> None:
    content = packed(frames)
    for place in range(2 + 8 * len(frames)):
        split_or_refused(content[:place] + bytes([content[place] ^ flipped]) + content[place + 1 :])


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_or_are_frames_of_the_right_total(content: bytes) -> None:
    split_or_refused(content)


def test_lengths_beyond_all_memory_are_refused_with_both_numbers() -> None:
    content = (2).to_bytes(2, "little") + b"\xff" * 16
    with pytest.raises(BadMessage, match=f"a message of 18 bytes announces frames of {2 * (2**64 - 1)}"):
        split(memoryview(content))


def test_no_frames_are_no_message() -> None:
    with pytest.raises(BadMessage, match="cannot have the frames that it announces"):
        split(memoryview(bytes(2)))
