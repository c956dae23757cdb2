"""A codec makes a tensor's elements fewer bytes, the same ones each time; what it cannot hold travels as it is."""

import struct
import zlib
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from torch import Tensor

from stageline.broker.codec.codecs import Codec
from stageline.broker.codec.message import decode, encode, read_header
from stageline.broker.codec.tensors import coded, delivered
from stageline.broker.errors import BadMessage, Unsendable
from stageline.broker.queues.log import Log, RetentionBudget
from stageline.pipeline.tree import Tree
from support.payloads import bits, message, raw, tensors
from support.plain_codecs import CODECS
from support.queue_pair import queue_of

# torch warns whenever a complex32 tensor is made; it only has to travel here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

LOSSY = [Codec.BF16, Codec.INT8]
PLAIN = {codec: CODECS[codec.name.lower()] for codec in LOSSY}
SHAPES = [(4, 8), (2, 3, 70), (2, 3, 8, 8), (3, 5, 4, 4), (1, 64), (1, 1, 2), (2, 1), (3, 2), (7, 128, 2)]


def sent(payload: Tree, codec: Codec) -> list[bytes]:
    return [bytes(frame) for frame in encode(message(coded(payload, codec)))]


def through(payload: Tree, codec: Codec) -> Tree:
    return decode(sent(payload, codec)).payload


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_what_arrives_is_what_plain_torch_makes_of_it(codec: Codec, shape: tuple[int, ...]) -> None:
    for x in (drawn(*shape), 1e-30 * drawn(*shape), torch.zeros(shape)):
        assert bits(through(x, codec)) == bits(PLAIN[codec](x) + 0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_are_made_int8_by_way_of_float32(dtype: torch.dtype) -> None:
    x = drawn(4, 64, dtype=dtype)
    assert bits(through(x, Codec.INT8)) == bits(PLAIN[Codec.INT8](x) + 0.0)


@given(tensors())
def test_layout_and_alignment_come_back_and_what_is_told_beforehand_is_what_arrives(tensor: Tensor) -> None:
    for codec in LOSSY:
        arrived = through(tensor, codec)
        assert isinstance(arrived, Tensor)
        lossless = decode([bytes(frame) for frame in encode(message(tensor))]).payload
        assert isinstance(lossless, Tensor)
        assert bits(arrived)[:5] == bits(lossless)[:5]
        assert bits(arrived) == bits(delivered(lossless, codec))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
        lambda x: torch.cat([x, x], 1).chunk(2, 1)[1],
        lambda x: x[:, :1].expand(-1, 6, -1, -1),
    ],
)
@pytest.mark.parametrize("codec", LOSSY)
def test_values_do_not_follow_from_the_layout(layout: Any, codec: Codec) -> None:
    x = layout(drawn(4, 6, 9, 8))
    arrived = through(x, codec)
    assert isinstance(arrived, Tensor)
    assert arrived.stride() == x.stride()
    assert torch.equal(arrived, PLAIN[codec](x.contiguous()))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_pending_negation_of_every_other_element_is_carried_out(codec: Codec) -> None:
    """Resolving it first gave a tensor with other strides, and elements were read beyond its memory."""
    x = torch.randn(4, 70, dtype=torch.complex64).conj().imag[:, ::2]
    assert x.is_neg()
    assert torch.equal(through(x, codec), PLAIN[codec](x.resolve_neg()))  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", LOSSY)
def test_what_becomes_of_a_sample_does_not_depend_on_the_others(codec: Codec) -> None:
    x = drawn(5, 3, 8)
    x[2] *= 1000
    alone = [through(sample, codec) for sample in x.split(1)]
    assert raw(torch.cat(alone)) == raw(through(x, codec))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), torch.finfo(torch.float32).max])
@pytest.mark.parametrize("codec", LOSSY)
def test_numbers_that_would_not_come_back_finite_arrive_as_they_are(bad: float, codec: Codec) -> None:
    """The largest float32 would come back as infinity of bfloat16; of int8 it comes back, about, if its scale does."""
    x = drawn(3, 64)
    x[1, 5] = bad
    arrived = through(x, codec)
    assert isinstance(arrived, Tensor)
    if codec is Codec.BF16 or abs(bad) > torch.finfo(torch.float32).max or bad != bad:
        assert raw(arrived) == raw(x)
    assert torch.equal(arrived.isfinite(), x.isfinite())


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(200).view(2, 100),
        torch.ones(2, 100, dtype=torch.bool),
        torch.randn(2, 100, dtype=torch.complex64),
        torch.empty(0, 100),
        torch.empty(3, 0),
        torch.randn(2, 100).to(torch.float8_e4m3fn),
    ],
)
@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_no_floating_point_number_or_empty_arrives_as_it_is(x: Tensor, codec: Codec) -> None:
    assert sent(x, codec) == [bytes(frame) for frame in encode(message(x))]


def test_a_codec_that_would_make_it_no_fewer_bytes_is_not_used() -> None:
    for x, codec in [
        (drawn(2, 64, dtype=torch.bfloat16), Codec.BF16),
        (drawn(2, 64, dtype=torch.float16), Codec.BF16),
        (drawn(50), Codec.INT8),
        (torch.tensor(1.5), Codec.INT8),
        (drawn(9, 1), Codec.INT8),
    ]:
        assert raw(through(x, codec)) == raw(x)  # type: ignore[arg-type]


def test_every_leaf_of_a_tree_is_looked_at_alone() -> None:
    payload = {"hidden": drawn(2, 64).requires_grad_(), "ids": torch.arange(4), "more": (1.5, [drawn(2, 64)], None)}
    arrived = through(payload, Codec.INT8)
    assert bits(arrived) == bits(delivered(payload, Codec.INT8))
    assert arrived["hidden"].requires_grad  # type: ignore[index, call-overload, union-attr]
    assert [entry.codec for entry in read_header(sent(payload, Codec.INT8)[0]).tensors] == [2, 0, 2]


def test_the_bytes_are_those_of_the_codec() -> None:
    x = drawn(8, 128, 64)
    assert len(sent(x, Codec.BF16)[1]) == 2 * x.numel()
    assert len(sent(x, Codec.INT8)[1]) == x.numel() + 4 * 8 * 128
    assert sent(x, Codec.INT8) == sent(x.clone(), Codec.INT8)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_tensor_that_is_written_to_after_it_was_put_leaves_the_message_as_it_was(codec: Codec) -> None:
    """Its bytes are retained, the tensor is not: that would take more memory than without a codec."""
    x, whole = drawn(4, 64), message(None)
    log = Log(whole.run, queue_of(whole.queue), RetentionBudget())
    log.trim(whole.number // log.queue.count)
    before = delivered(x, codec)
    for number in range(5):
        log.put(msgspec.structs.replace(whole, number=52 + number, payload=coded(x, codec)), 0.0)
    assert log.bytes < 5 * x.nbytes
    x.zero_()
    assert bits(decode(log.frames(log.end - 1)).payload) == bits(before)


def test_what_cannot_travel_is_refused_as_without_a_codec() -> None:
    with pytest.raises(Unsendable, match="sparse"):
        encode(message(coded(drawn(2, 64).to_sparse(), Codec.INT8)))


def forged(frames: list[bytes], **changes: Any) -> list[bytes]:
    """The message with another entry for its tensor, its checksums right."""
    fields = ["dtype", "shape", "strides", "requires_grad", "nbytes", "crc32", "skew", "codec"]
    header = msgspec.msgpack.decode(frames[0][6:-4])
    header[-1] = [[changes.get(name, value) for name, value in zip(fields, header[-1][0], strict=True)]]
    body = frames[0][:6] + msgspec.msgpack.encode(header)
    return [body + struct.pack("<I", zlib.crc32(body)), *frames[1:]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": 3}, "codec 3 is unknown, or not for torch.float32 of shape"),
        ({"dtype": 9}, r"codec 2 is unknown, or not for torch.int64 of shape \(3, 64\)"),
        ({"codec": 0}, "204 bytes are announced, shape and dtype need 768"),
        ({"codec": 1}, "204 bytes are announced, shape and dtype need 384 with codec 1"),
        ({"nbytes": 2**40}, "need 204 with codec 2"),
        ({"shape": [2**20, 64], "strides": [0, 1]}, "204 bytes are announced, shape and dtype need 68 with codec 2"),
        ({"shape": [2**40, 64]}, "need 74766790688768 with codec 2"),
        ({"codec": -1}, "malformed"),
    ],
)
def test_a_header_that_does_not_agree_with_its_codec_is_refused_before_memory_is_taken(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadMessage, match=reason):
        read_header(forged(sent(drawn(3, 64), Codec.INT8), **changes)[0])


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf")])
def test_a_scale_that_no_sender_writes_is_refused(scale: float) -> None:
    header, content = sent(drawn(3, 64), Codec.INT8)
    content = content[:4] + struct.pack("<f", scale) + content[8:]
    with pytest.raises(BadMessage, match="a scale that is negative or not finite"):
        decode(forged([header, content], crc32=zlib.crc32(content)))


def test_damage_is_found_by_the_checksum() -> None:
    header, content = sent(drawn(3, 64), Codec.INT8)
    with pytest.raises(BadMessage, match="is damaged: its CRC-32 does not match"):
        decode([header, content[:-1] + bytes([content[-1] ^ 1])])
