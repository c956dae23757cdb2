"""What is sent to add a message, beside the commands that it stands for."""

import random

import hiredis
import pytest

from stageline.broker.codec.message import Frame
from stageline.broker.transports.redis.entries import PIECE, UNCOPIED, Addition

KEY = b"stageline:{run}:forward-1"


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("sizes", [(), (0,), (4,), (0, 12, 0), (UNCOPIED,), (UNCOPIED + 1, 4), (4, PIECE // 2, 9)])
def test_a_message_is_packed_as_the_command_that_adds_it(sizes: tuple[int, ...], create: bool) -> None:
    dice = random.Random(1)
    frames: list[Frame] = [dice.randbytes(150), *(memoryview(dice.randbytes(size)) for size in sizes)]
    for number in (0, 9, 10, 12345):
        [packed] = Addition(KEY).pack(number, frames, 1_700_000_000_000, create=create)
        content = [word for frame in frames[1:] if len(frame) for word in (b"d", frame)]
        begin = (b"XADD", KEY, *(() if create else (b"NOMKSTREAM",)), b"%d-1" % number, b"t", b"1700000000000")
        assert b"".join(packed) == hiredis.pack_command((*begin, *content, b"h", frames[0]))


def test_a_large_tensor_is_not_copied() -> None:
    tensor = memoryview(bytearray(UNCOPIED + 1))
    [packed] = Addition(KEY).pack(0, [b"header", tensor], 0)
    assert [chunk for chunk in packed if chunk is tensor] == [tensor]
