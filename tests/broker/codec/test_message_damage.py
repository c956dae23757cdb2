"""Bytes that arrive become a message or `BadMessage`: never another exception, a wrong tensor or a huge allocation."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stageline.broker.codec.message import Frame, Limits, decode, encode
from stageline.broker.errors import BadMessage
from support.payloads import bits, message, trees

# torch warns whenever a complex32 tensor is made; it only has to travel here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SAMPLE = message(
    {
        "x": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
        "mask": (torch.tensor([True, False]), None, 0.5, "é"),
        "part": torch.arange(8, dtype=torch.int16).reshape(2, 4)[:, :3],
        "seen": torch.zeros(1, dtype=torch.uint8).expand(4),
    }
)


FRAMES = [bytes(frame) for frame in encode(SAMPLE)]


def refused(frames: Sequence[Frame]) -> bool:
    try:
        decode(frames)
    except BadMessage:
        return True
    return False


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_no_changed_byte_is_accepted(number: int):
    for place in range(len(FRAMES[number])):
        for flip in range(1, 256):
            damaged = bytearray(FRAMES[number])
            damaged[place] ^= flip
            assert refused([*FRAMES[:number], damaged, *FRAMES[number + 1 :]]), (place, flip)


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_no_shorter_or_longer_frame_is_accepted(number: int):
    for length in range(len(FRAMES[number])):
        assert refused([*FRAMES[:number], FRAMES[number][:length], *FRAMES[number + 1 :]]), length
    assert refused([*FRAMES[:number], FRAMES[number] + b"\0", *FRAMES[number + 1 :]])


@pytest.mark.parametrize(
    "frames",
    [[], FRAMES[:1], FRAMES[:-1], [*FRAMES, b""], FRAMES[1:], [FRAMES[0], *FRAMES[:0:-1]], [*FRAMES, FRAMES[-1]]],
)
def test_missing_additional_or_exchanged_frames_are_refused(frames: list[bytes]):
    assert refused(frames)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_noise_is_refused(frames: list[bytes]):
    assert refused(frames)


@given(trees, st.data())
def test_cut_and_pasted_messages_are_refused_or_right(payload: Any, data: st.DataObject):
    mixed = data.draw(st.lists(st.sampled_from([*FRAMES, *(bytes(f) for f in encode(message(payload)))]), max_size=6))
    if not refused(mixed):
        assert bits(decode(mixed).payload) in (bits(payload), bits(SAMPLE.payload))


@pytest.mark.parametrize(
    ("payload", "limits"),
    [
        (torch.zeros(9), Limits(message_bytes=32)),
        (torch.zeros(17)[::8], Limits(message_bytes=64)),
        (torch.zeros(9)[1:], Limits(message_bytes=35)),
        ((torch.zeros(5), torch.zeros(4)), Limits(message_bytes=32)),
        ((torch.zeros(5), torch.zeros(4)), Limits(tensors=1)),
        (torch.zeros(1, 1), Limits(ndim=1)),
        (([],), Limits(depth=1)),
        ("four", Limits(header_bytes=30)),
    ],
)
def test_a_receiver_refuses_what_is_beyond_its_own_limits(payload: Any, limits: Limits):
    frames = encode(message(payload))
    assert bits(decode(frames).payload) == bits(payload)
    with pytest.raises(BadMessage, match="limit"):
        decode(frames, limits=limits)
