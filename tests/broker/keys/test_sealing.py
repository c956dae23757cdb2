"""Sealed messages: only their own key, place and sealing open it, nothing about it repeats, and nothing shows a key."""

import os
import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zlib_ng.zlib_ng import crc32

from stageline.broker.errors import BadMessage
from stageline.broker.keys.sealing import (
    HEADER_SURPLUS,
    PIECE,
    SALT,
    SECRET,
    TAG,
    Frame,
    Purpose,
    QueueContext,
    QueueSecret,
    Sealing,
    padme,
    sealed_size,
)

CONTEXT = QueueContext(b"salt of the run", "run", "forward-1", producer=0, consumer=1, restart=3, generation=2)
KEY = bytes(range(SECRET))
FRAMES: Sequence[Frame] = (b"a header", memoryview(b"12345678" * 20), b"", b"abc")
START = 4 + 8 + SALT + 4  # bytes of a header before the CRC-32
AT = 3, 12  # step and number of a message


def sealing(context: QueueContext = CONTEXT, key: bytes = KEY, *, is_padded: bool = False) -> Sealing:
    secret = QueueSecret(context, key)
    return Sealing(lambda step: secret, os.urandom, is_padded)


def opened(end: Sealing, sealed: Sequence[Frame], sizes: Sequence[int], at: tuple[int, int] = AT) -> list[bytes]:
    """The frames, with tensors of `sizes` bytes."""
    message = end.open(*at, sealed[0])
    assert message is not None
    buffers = [bytearray(size) for size in sizes]
    message.fill([memoryview(buffer) for buffer in buffers], sealed[1:])
    return [message.header, *map(bytes, buffers)]


def sizes(frames: Sequence[Frame]) -> list[int]:
    return [len(frame) for frame in frames[1:]]


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.lists(st.binary(max_size=2000), max_size=6), st.booleans())
def test_what_is_sealed_is_opened_as_it_was(header: bytes, tensors: list[bytes], is_padded: bool) -> None:
    end = sealing(is_padded=is_padded)
    sealed = end.seal(*AT, [header, *tensors])
    assert opened(end, sealed, [len(tensor) for tensor in tensors]) == [header, *tensors]


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    "lengths", [(PIECE - TAG,), (PIECE - TAG + 1,), (5, PIECE, 3), (2 * PIECE + 9, 0, PIECE, 1), (0, 0)]
)
def test_tensors_larger_than_a_piece_lie_in_pieces_that_end_anywhere(lengths: Sequence[int], is_padded: bool) -> None:
    end = sealing(is_padded=is_padded)
    dice = random.Random(4)
    frames = [b"header", *map(dice.randbytes, lengths)]
    sealed = end.seal(*AT, frames)
    assert opened(end, sealed, lengths) == frames
    assert all(len(piece) == PIECE for piece in sealed[1:-1])
    assert sum(map(len, sealed[1:])) <= sealed_size(sum(lengths))
    assert len(sealed[0]) == HEADER_SURPLUS + (padme(6) if is_padded else 6)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_flipped_bit_is_opened(data: st.DataObject) -> None:
    end = sealing()
    sealed = list(map(bytearray, end.seal(*AT, FRAMES)))
    frame = sealed[data.draw(st.integers(0, len(sealed) - 1))]
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadMessage):
        opened(end, [bytes(part) for part in sealed], sizes(FRAMES))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nothing_that_is_cut_off_or_longer_is_opened(data: st.DataObject) -> None:
    end = sealing()
    sealed = [bytes(frame) for frame in end.seal(*AT, FRAMES)]
    place = data.draw(st.integers(0, len(sealed) - 1))
    sealed[place] = data.draw(st.sampled_from([sealed[place] + b"!", sealed[place][: data.draw(st.integers(0, 30))]]))
    with pytest.raises(BadMessage):
        opened(end, sealed, sizes(FRAMES))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_no_bytes_of_a_stranger_are_opened(junk: bytes, total: int) -> None:
    """Also behind a start as it must be: who has no key can compute its CRC-32."""
    start = b"SLSE" + CONTEXT.life.to_bytes(8, "big") + bytes(SALT) + total.to_bytes(4, "big")
    for forged in (junk, start + crc32(start).to_bytes(4, "big") + junk):
        with pytest.raises(BadMessage):
            sealing().open(*AT, forged)
    with pytest.raises(BadMessage):
        sealing().open_text(Purpose.KEPT, b"1-1", junk)


def test_a_message_that_is_not_sealed_is_refused_by_its_number() -> None:
    plain = b"SLMG" + bytes(100)
    with pytest.raises(BadMessage, match="message 12 is not sealed"):
        sealing().open(*AT, plain)
    start = plain[:START]
    with pytest.raises(BadMessage, match=r"message 12 begins with b'SLMG'.*not sealed"):
        sealing().open(*AT, start + crc32(start).to_bytes(4, "big") + plain)


def test_work_that_is_done_again_is_sealed_with_another_key() -> None:
    """A nonce made of the identity would repeat when a stage computes a message again, with an equal pad."""
    end = sealing()
    first, again = end.seal(*AT, FRAMES), end.seal(*AT, FRAMES)
    assert opened(end, first, sizes(FRAMES)) == opened(end, again, sizes(FRAMES))
    for one, other in zip(first, again, strict=True):
        assert bytes(one)[4:] != bytes(other)[4:]
    pads = [
        bytes(a ^ b for a, b in zip(bytes(piece), b"12345678" * 20, strict=False)) for piece in (first[1], again[1])
    ]
    assert pads[0] != pads[1]


def test_every_sealing_draws_as_many_random_bytes_as_never_repeat() -> None:
    """Twelve random bytes under one key that lives long may repeat after some billion messages; 24 do not."""
    drawn: list[int] = []

    def draw(count: int) -> bytes:
        drawn.append(count)
        return os.urandom(count)

    end = replace(sealing(), random=draw)
    end.seal(*AT, FRAMES)
    end.seal_text(Purpose.TAKEN, 0, b"1-1", b"5 9 -1")
    assert drawn == [SALT, SALT] == [24, 24]


def test_a_sealing_is_the_same_for_the_same_random_bytes() -> None:
    end = replace(sealing(), random=bytes)
    assert end.seal(*AT, FRAMES) == end.seal(*AT, FRAMES)


@pytest.mark.parametrize("place", range(4))
def test_no_piece_of_another_sealing_of_the_same_message_is_taken(place: int) -> None:
    end = sealing()
    frames = [b"header", bytes(3 * PIECE - 3 * TAG)]
    one, other = end.seal(*AT, frames), end.seal(*AT, frames)
    one[place] = other[place]
    with pytest.raises(BadMessage, match="of message 12 cannot be opened"):
        opened(end, one, sizes(frames))


def test_pieces_open_in_their_own_places_only() -> None:
    end = sealing()
    frames = [b"header", bytes(3 * PIECE - 3 * TAG)]
    header, first, second, third = end.seal(*AT, frames)
    for wrong in ([second, first, third], [first, third, third], [first, first, third]):
        with pytest.raises(BadMessage, match=r"piece \d of 3 of message 12 cannot be opened"):
            opened(end, [header, *wrong], sizes(frames))


@pytest.mark.parametrize("total", [0, 1, 3])
def test_a_message_with_fewer_pieces_than_were_sealed_is_refused_whatever_its_header_says(total: int) -> None:
    """A total outside the seal lets a server leave out the last piece."""
    end = sealing()
    frames = [b"header", bytes(2 * PIECE - 2 * TAG)]
    header, *pieces = end.seal(*AT, frames)
    with pytest.raises(BadMessage, match="came with 1 sealed pieces, not 2"):
        opened(end, [header, pieces[0]], [PIECE - TAG])
    start = bytes(header[: START - 4]) + total.to_bytes(4, "big")
    forged = start + crc32(start).to_bytes(4, "big") + bytes(header[START + 4 :])
    with pytest.raises(BadMessage, match="the header of message 12 cannot be opened"):
        opened(end, [forged, *pieces[:total]], [PIECE - TAG] * min(total, 2))


def test_a_message_opens_under_its_own_number_only() -> None:
    end = sealing()
    with pytest.raises(BadMessage, match="message 13 cannot be opened"):
        end.open(3, 13, end.seal(*AT, FRAMES)[0])


@pytest.mark.parametrize("name", [field.name for field in fields(QueueContext)])
def test_every_part_of_the_context_makes_another_key(name: str) -> None:
    """A run's name may be used again, a queue may have other ends, and a run is resumed: no key comes twice."""
    value = getattr(CONTEXT, name)
    changed: Any = {name: value - 1 if isinstance(value, int) else value + value}
    other = replace(CONTEXT, **changed)
    header = sealing().seal(*AT, FRAMES)[0]
    if other.life == CONTEXT.life:
        with pytest.raises(BadMessage, match="another key"):
            sealing(other).open(*AT, header)
    else:  # it says itself that it is of another life
        assert sealing(other).open(*AT, header) is None
    text = sealing().seal_text(Purpose.KEPT, 0, b"1-1", b"5 9")
    with pytest.raises(BadMessage, match="another key"):
        sealing(other).open_text(Purpose.KEPT, b"1-1", text)


def test_a_message_of_before_a_restart_is_told_from_one_that_is_damaged() -> None:
    header = bytes(sealing().seal(*AT, FRAMES)[0])
    later = sealing(replace(CONTEXT, restart=4), bytes(SECRET))
    assert later.open(*AT, header) is None
    for place in range(START):
        damaged = bytearray(header)
        damaged[place] ^= 1
        with pytest.raises(BadMessage, match="not sealed, or damaged"):
            later.open(*AT, bytes(damaged))


def test_the_parts_of_a_context_do_not_run_into_each_other() -> None:
    one, other = replace(CONTEXT, run="ab", queue="c"), replace(CONTEXT, run="a", queue="bc")
    assert one.encoded(Purpose.KEPT) != other.encoded(Purpose.KEPT)


def test_another_secret_opens_nothing() -> None:
    with pytest.raises(BadMessage, match="another key"):
        sealing(key=bytes(SECRET)).open(*AT, sealing().seal(*AT, FRAMES)[0])


def test_what_one_end_has_sealed_is_not_taken_for_what_the_other_end_seals() -> None:
    """With one key for both directions a server could give an end its own announcements back."""
    end = sealing()
    for purpose in Purpose:
        text = end.seal_text(purpose, 0, b"1-1", b"5 9")
        assert end.open_text(purpose, b"1-1", text) == b"5 9"
        for other in set(Purpose) - {purpose}:
            with pytest.raises(BadMessage, match=f"{other}: a text cannot be opened"):
                end.open_text(other, b"1-1", text)
    assert len({QueueSecret(CONTEXT, KEY).key(purpose) for purpose in Purpose}) == len(Purpose)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_text_opens_with_a_flipped_bit_or_under_another_name(data: st.DataObject) -> None:
    end = sealing()
    text = bytearray(end.seal_text(Purpose.TAKEN, 7, b"4-1", b"5 9 -1"))
    assert end.open_text(Purpose.TAKEN, b"4-1", bytes(text)) == b"5 9 -1"
    with pytest.raises(BadMessage):
        end.open_text(Purpose.TAKEN, b"4-2", bytes(text))
    text[data.draw(st.integers(0, len(text) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadMessage):
        end.open_text(Purpose.TAKEN, b"4-1", bytes(text))


def test_a_generation_begins_with_a_step() -> None:
    secrets = [QueueSecret(replace(CONTEXT, generation=each), bytes([each]) * SECRET) for each in range(2)]
    end = Sealing(lambda step: secrets[step >= 10], os.urandom)
    before, after = end.seal(9, 36, FRAMES), end.seal(10, 40, FRAMES)
    assert opened(end, before, sizes(FRAMES), (9, 36)) == opened(end, after, sizes(FRAMES), (10, 40))
    former = replace(end, secret_at=lambda step: secrets[0])
    assert former.open(10, 40, after[0]) is None
    sealed = former.seal(10, 40, FRAMES)[0]
    assert end.open(10, 40, sealed) is None  # who has the former secret can make nothing for later steps
    start = bytes(sealed[:4]) + secrets[1].context.life.to_bytes(8, "big") + bytes(sealed[12:START])
    with pytest.raises(BadMessage, match="another key"):
        end.open(10, 40, start + crc32(start).to_bytes(4, "big") + bytes(sealed[START + 4 :]))


def test_a_message_whose_tensors_are_larger_than_its_pieces_is_refused() -> None:
    end = sealing()
    sealed = end.seal(*AT, FRAMES)
    with pytest.raises(BadMessage, match="163 bytes came sealed for 164 bytes"):
        opened(end, sealed, [164])


def test_padding_makes_lengths_equal_and_costs_an_eighth_at_most() -> None:
    assert [padme(size) for size in (0, 1, 2, 8, 9, 100, 1000, 10**6)] == [0, 1, 2, 8, 10, 104, 1024, 1_015_808]
    assert all(size <= padme(size) <= size * 1.12 for size in range(1, 5000))
    end = sealing(is_padded=True)
    lengths = [[len(part) for part in end.seal(*AT, [b"h", bytes(size)])] for size in (993, 1024)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("frames", [FRAMES, [b"header", b"plaintext" * 1000]])
def test_nothing_of_the_plain_text_is_in_what_is_sealed(frames: Sequence[Frame]) -> None:
    sealed = b"".join(sealing().seal(*AT, frames))
    assert not [frame for frame in frames if len(frame) > 3 and bytes(frame[:8]) in sealed]


def test_nothing_that_is_shown_contains_a_key() -> None:
    """`repr` of a dataclass shows its fields, and a traceback or a log of arguments shows those."""
    secret = QueueSecret(CONTEXT, b"\xabVERY-SECRET-KEY" * 2)
    end = Sealing(lambda step: secret, os.urandom)
    message = end.open(*AT, end.seal(*AT, FRAMES)[0])
    assert message is not None
    for shown in map(repr, (secret, end, message, [secret], Purpose.KEPT)):
        assert "VERY-SECRET" not in shown
        assert secret.secret.hex() not in shown
        assert "a header" not in shown


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_secret_of_another_size_is_refused_without_being_shown(size: int) -> None:
    with pytest.raises(ValueError, match=f"the secret of forward-1 has {size} bytes, expected 32") as error:
        QueueSecret(CONTEXT, b"S" * size)
    assert "SS" not in str(error.value)
