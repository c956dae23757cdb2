"""A header is read, or refused with the reason, whatever was made of it; fingerprints tell messages apart."""

import struct
import tracemalloc
import zlib
from math import prod
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from stageline.broker.codec.message import (
    Limits,
    allocate,
    check_run,
    decode,
    encode,
    fingerprint,
    read_header,
)
from stageline.broker.errors import BadMessage
from stageline.pipeline.tree import Tree
from support.payloads import bits, message, noise, raw, tensors

# torch warns whenever a complex32 tensor is made; it only has to travel here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

FRAMES = [bytes(frame) for frame in encode(message(torch.zeros(2, 3)))]


@given(tensors())
def test_two_copies_of_a_message_have_one_fingerprint_whichever_worker_sent_them(tensor: Tensor):
    one, other = (read_header(encode(message(tensor, incarnation=i))[0]) for i in (1, 2))
    assert one.identity == other.identity
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize("skew", [4, 16, 60])
def test_equal_tensors_have_one_fingerprint_wherever_they_lie(skew: int):
    one, other = (read_header(encode(message(noise(torch.float32, [3, 4], 0, place)))[0]) for place in (0, skew))
    assert one.tensors != other.tensors
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([[1.0, 2.0], [3.0, 4.0000005]]),
        torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t(),
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True),
        (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),),
    ],
)
def test_a_message_with_other_bits_has_another_fingerprint(other: Tree):
    one, another = (read_header(encode(message(x))[0]) for x in (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), other))
    assert fingerprint(one) != fingerprint(another)


@pytest.mark.parametrize("scalar", [0.0, float("nan"), True])
def test_plain_values_of_another_type_or_sign_are_other_bits(scalar: float):
    others = {0.0: -0.0, True: 1}.get(scalar, 1.0)
    one, another = (read_header(encode(message(x))[0]) for x in (scalar, others))
    assert fingerprint(one) == fingerprint(read_header(encode(message(scalar))[0]))
    assert fingerprint(one) != fingerprint(another)


def sealed(body: bytes, version: int = 2) -> bytes:
    """A header frame whose checksum is right, whatever its content."""
    frame = struct.pack("<4sH", b"SLMG", version) + body
    return frame + struct.pack("<I", zlib.crc32(frame))


def forged(**changes: Any) -> bytes:
    """A header for 4 float32 numbers, with `changes`, sealed."""
    tensor = {
        "dtype": 12,
        "shape": [4],
        "strides": [1],
        "requires_grad": False,
        "nbytes": 16,
        "crc32": 0,
        "skew": 0,
    }
    header = {
        "run": "r",
        "queue": "forward-1",
        "number": 0,
        "incarnation": 0,
        "structure": [0],
        "tensors": [[changes.pop(name, value) for name, value in tensor.items()]],
    }
    return sealed(msgspec.msgpack.encode(list({**header, **changes}.values())))


@pytest.mark.parametrize("skew", [0, 4, 60])
def test_the_forger_can_write_a_right_header(skew: int):
    received = decode([forged(crc32=zlib.crc32(bytes(16)), skew=skew), bytes(16)])
    assert bits(received.payload) == bits(noise(torch.float32, [4], 0, skew).zero_())


FORGERIES = [
    ({"run": None}, r"malformed.*\$\[0\]"),
    ({"queue": ""}, r"malformed.*at `\$\[1\]`"),
    ({"queue": "side ways"}, r"malformed.*at `\$\[1\]`"),
    ({"queue": "forward-1\n"}, r"malformed.*at `\$\[1\]`"),
    ({"queue": "vorwärts-1"}, r"malformed.*at `\$\[1\]`"),
    ({"queue": 65 * "f"}, r"malformed.*at `\$\[1\]`"),
    ({"number": -1}, r"malformed.*\$\[2\]"),
    ({"number": 2**63}, r"malformed.*\$\[2\]"),
    ({"incarnation": 1.5}, r"malformed.*\$\[3\]"),
    ({"more": 1}, "malformed"),
    ({"structure": []}, "neither a value nor a container"),
    ({"structure": [1]}, "0 tensors in its structure and announces 1"),
    ({"structure": [1, [0], [0]]}, "2 tensors in its structure and announces 1"),
    ({"structure": [4, [0]]}, "neither a value nor a container"),
    ({"structure": [3, "a"]}, "neither a value nor a container"),
    ({"structure": [3, "a", [0], "a", 1]}, "neither a value nor a container"),
    ({"structure": [3, 1, [0]]}, "neither a value nor a container"),
    ({"structure": [False]}, "begins with an object of type bool"),
    ({"structure": [0.0]}, "begins with an object of type float"),
    ({"structure": [True, [0]]}, "begins with an object of type bool"),
    ({"structure": [1, [False]]}, "begins with an object of type bool"),
    ({"structure": [[0]]}, "begins with an object of type list"),
    ({"structure": {"a": [0]}}, "an object of type dict that is neither"),
    ({"structure": b"x"}, "an object of type bytes that is neither"),
    ({"tensors": []}, "1 tensors in its structure and announces 0"),
    ({"dtype": 0}, "dtype code 0 is unknown"),
    ({"dtype": 23}, "dtype code 23 is unknown"),
    ({"shape": [2, 2]}, "1 strides for 2 dimensions"),
    ({"strides": [1, 1]}, "2 strides for 1 dimensions"),
    ({"shape": [-4]}, "malformed"),
    ({"strides": [-1]}, "malformed"),
    ({"shape": [2, 2], "strides": [1, 1]}, "overlap"),
    ({"shape": [5]}, "16 bytes are announced, shape and dtype need 20"),
    ({"nbytes": 12}, "12 bytes are announced, shape and dtype need 16"),
    ({"dtype": 13}, "16 bytes are announced, shape and dtype need 32"),
    ({"shape": [2**62], "nbytes": 2**62}, "more elements than can be counted"),
    ({"shape": [0, 2**62, 2], "strides": [1, 1, 1], "nbytes": 0}, "more elements than can be counted"),
    ({"shape": [2**60], "nbytes": 2**62}, "needs 4611686018427387904 bytes"),
    ({"shape": [4], "strides": [2**40]}, r"needs 13\d{12} bytes"),
    ({"shape": [1] * 33, "strides": [1] * 33, "nbytes": 4}, "33 dimensions"),
    ({"dtype": 9, "shape": [2], "requires_grad": True}, "int64 cannot require gradients"),
    ({"requires_grad": 1}, "malformed"),
    ({"crc32": 2**32}, "malformed"),
    ({"skew": -4}, "malformed"),
    ({"skew": None}, "malformed"),
    ({"skew": 64}, "skew of 64 bytes cannot be: it is below 64"),
    ({"skew": 2**63 - 1}, "skew of 9223372036854775807 bytes cannot be"),
    ({"skew": 3}, "skew of 3 bytes cannot be: it is below 64 and a multiple of 4"),
    ({"dtype": 16, "shape": [1], "skew": 8}, "skew of 8 bytes cannot be: it is below 64 and a multiple of 16"),
]


@pytest.mark.parametrize(("changes", "complaint"), FORGERIES)
def test_a_header_that_contradicts_itself_is_refused_with_the_reason(changes: dict[str, Any], complaint: str):
    with pytest.raises(BadMessage, match=complaint):
        read_header(forged(**changes))


def test_what_is_no_message_of_ours_is_told_from_damage():
    with pytest.raises(BadMessage, match=r"begins with b'HTTP', not with b'SLMG'"):
        read_header(b"HTTP/1.1 200 OK")
    with pytest.raises(BadMessage, match="the header is damaged"):
        read_header(FRAMES[0].replace(b"forward", b"forwarD"))


def test_a_message_of_another_wire_version_is_refused_with_both_versions_and_the_way_out():
    with pytest.raises(BadMessage, match=r"wire version 3, this side has 2; install the same version"):
        read_header(sealed(b"what version 3 may contain", version=3))


def test_a_message_of_another_run_is_refused_with_both_runs():
    header = read_header(encode(message(None, run="spring"))[0])
    check_run(header, "spring")
    with pytest.raises(BadMessage, match=r"belongs to run 'spring', this worker to run 'autumn'"):
        check_run(header, "autumn")


@pytest.mark.parametrize(
    "body",
    [
        b"\x99\xa1r\xa7forward" + bytes(5) + b"\x91" * 500_000,  # a structure that never ends
        b"\xdd\xff\xff\xff\xff" * 3,  # 2^32 - 1 entries announced
        b"\x99\xdb\xff\xff\xff\xff",  # a string of 4 GiB announced
        b"\x99\xa1\xff",  # not UTF-8
        b"\x99\xa1r\xa7forward" + bytes(5) + b"\x91" * 900 + b"\x00" + b"\x90",  # a deep structure
        b"\x99\xa1r\xa7forward" + bytes(5) + b"\x92\x01" * 300 + b"\x00" + b"\x90",  # a deep tuple
        b"\x99\xa1r\xa7forward" + bytes(5) + b"\xdd\xff\xff\xff\xff",  # a long structure announced
        b"\x99\xa1r\xa7forward" + bytes(5) + b"\xd6\xff\x00\x00\x00\x00\x90",  # a timestamp in the structure
        b"\x99\xa1r\xa7forward" + bytes(5) + b"\xc7\x01\x05\x00\x90",  # an extension type in the structure
        b"\x9a\xa1r\xa7forward" + bytes(5) + b"\xc0\x90\x00",  # ten entries
    ],
)
def test_a_hostile_header_is_refused_without_much_memory(body: bytes):
    header = sealed(body)
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage):
            read_header(header)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


sizes = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 2**31, 2**62, 2**63 - 1])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@st.composite
def tensor_entries(draw: Any) -> list[Any]:
    """Entries that are right about the number of strides and of bytes, if the dtype has one byte, and about no more."""
    dimensions = draw(st.lists(st.tuples(sizes, sizes), max_size=4))
    shape, strides = [size for size, _ in dimensions], [stride for _, stride in dimensions]
    if draw(st.booleans()):
        strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
    stored = prod(size for size, stride in zip(shape, strides, strict=True) if stride or not size)
    numbers = [draw(st.sampled_from([2, 3, 17, 12])), shape, [min(n, 2**63 - 1) for n in strides]]
    return [*numbers, draw(st.booleans()), min(stored, 2**63 - 1), 0, draw(st.sampled_from([0, 0, 1, 4, 63, 64]))]


@given(st.lists(tensor_entries(), max_size=2), anything, st.sampled_from([None] * 5) | anything)
@example([[12, [1], [2**63 - 1], False, 4, 0, 0]], None, None)
@example([[12, [0, 3], [2**63 - 1, 2**63 - 1], True, 0, 0, 4]], None, None)
@example([[2, [2**62, 2], [0, 0], False, 1, 0, 63]], None, None)
def test_a_forged_header_that_is_accepted_can_be_allocated_and_filled(entries: Any, beside: Any, instead: Any):
    structure = [1, beside, *[[0] for _ in entries]]
    body = ["r", "forward", 0, 0, 0, 0, 0, structure, entries if instead is None else instead]
    try:
        header = read_header(sealed(msgspec.msgpack.encode(body)), limits=Limits(message_bytes=2**16))
    except BadMessage:
        return
    zeros = [bytes(buffer.nbytes) for buffer in allocate(header)]
    for entry, content in zip(entries, zeros, strict=True):
        entry[5] = zlib.crc32(content)
    received = decode([sealed(msgspec.msgpack.encode(body)), *zeros]).payload
    assert isinstance(received, tuple)
    for tensor in received[1:]:
        assert isinstance(tensor, Tensor)
        assert tensor.numel() > 2**16 or not any(raw(tensor))
