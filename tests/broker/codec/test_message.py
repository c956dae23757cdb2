"""A message comes back as it was, to the bit, the stride and the alignment, and nothing is copied that need not be."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stageline.broker.codec.message import (
    Flow,
    Limits,
    Message,
    allocate,
    assemble,
    decode,
    encode,
    fingerprint,
    read_header,
)
from stageline.broker.codec.tensors import DTYPES
from stageline.broker.errors import Unsendable
from stageline.pipeline.tree import Tree
from support.paths import DOCS
from support.payloads import bits, message, noise, raw, tensors, trees

# torch says so whenever a complex32 tensor is made; it only has to travel here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DOCUMENT = (DOCS / "messages.md").read_text()
MATRIX = Message("digits-7f3a", Flow.FORWARD, 2, 1, 1, 4, 9, torch.tensor([[1.0, -0.0], [float("inf"), 3.5]]))
NESTED = Message(
    "r",
    Flow.BACKWARD,
    step=0,
    microbatch=0,
    stage=0,
    incarnation=1,
    sequence=0,
    payload={
        "h": (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), None),
        "n": [True, -1, 0.5, "é", torch.arange(4, dtype=torch.int16).reshape(2, 2).t()],
    },
)
EXPANDED = Message("r", Flow.TARGET, 70000, 0, 3, 1, 70000, torch.tensor([[7]], dtype=torch.uint8).expand(2, 3))
WITH_GAPS = Message("r", Flow.FORWARD, 0, 0, 3, 1, 0, torch.arange(6, dtype=torch.float64).reshape(2, 3)[:, :2])
SKEWED = Message("r", Flow.FORWARD, 0, 0, 3, 1, 0, torch.arange(7, dtype=torch.float32)[3:])
NOTHING = Message("r", Flow.FORWARD, 0, 0, 3, 1, 0, None)

Z = torch.randn(2, 3, dtype=torch.complex64)

GOLDEN = [
    (
        MATRIX,
        "534c4d47010099ab6469676974732d37663361a7666f72776172640201010409910091970c920202920201c210ce5f87d5130029bc1841",
        ["0000803f000000800000807f00006040"],
    ),
    (
        NESTED,
        "534c4d470100"
        "99a172a86261636b7761726400000001009503a16893019100c0a16e9602c3ffcb3fe0000000000000a2c3a99100"
        "92970b9090c302ce3c45e88c009705920202920102c208ce2f5a978400"
        "34e5c3c2",
        ["c03f", "0000010002000300"],
    ),
    (
        EXPANDED,
        "534c4d47010099a172a6746172676574ce00011170000301ce000111709100919702920203920000c201ce4c667a2e00e31353d5",
        ["07"],
    ),
    (
        WITH_GAPS,
        "534c4d47010099a172a7666f72776172640000030100910091970d920202920301c220ce7022af04009c25a4d6",
        ["0000000000000000000000000000f03f00000000000008400000000000001040"],
    ),
    (
        SKEWED,
        "534c4d47010099a172a7666f72776172640000030100910091970c91049101c210ced4d1f8700ccaed14e2",
        ["00004040000080400000a0400000c040"],
    ),
    (NOTHING, "534c4d47010099a172a7666f72776172640000030100c0908138a93b", []),
]


def through(payload: Tree) -> Tree:
    return decode(encode(message(payload))).payload


def tensor_through(tensor: Tensor) -> Tensor:
    received = through(tensor)
    assert isinstance(received, Tensor)
    return received


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


@pytest.mark.parametrize(("sent", "header", "contents"), GOLDEN)
def test_the_bytes_on_the_wire_stay_what_they_are(sent: Message, header: str, contents: list[str]):
    assert [bytes(frame).hex() for frame in encode(sent)] == [header, *contents]


@pytest.mark.parametrize(("sent", "header", "contents"), GOLDEN)
def test_bytes_of_old_are_read_as_they_were_meant(sent: Message, header: str, contents: list[str]):
    received = decode([bytes.fromhex(frame) for frame in (header, *contents)])
    assert (received.identity, received.incarnation, received.sequence) == (
        sent.identity,
        sent.incarnation,
        sent.sequence,
    )
    assert bits(received.payload) == bits(sent.payload)


def test_the_codes_in_the_documentation_are_true():
    entries = re.findall(r"\| (\d+) \| ([a-z]\w+)[^|]* \| (\d+) (?=\|)", DOCUMENT)
    assert {int(code): (name, int(size)) for code, name, size in entries} == {
        code: (str(dtype).removeprefix("torch."), dtype.itemsize) for code, dtype in DTYPES.items()
    }


def test_the_example_in_the_documentation_is_true():
    shown = DOCUMENT[DOCUMENT.index("## An example") :]
    lines = re.findall(r"^    ((?:[0-9a-f]{2} +)*[0-9a-f]{2})(?= {2}|$)", shown, re.MULTILINE)
    assert bytes.fromhex("".join(lines)) == b"".join(bytes(frame) for frame in encode(MATRIX))


@given(trees)
def test_any_payload_comes_back_to_the_bit(payload: Tree):
    assert bits(through(payload)) == bits(payload)


@given(tensors())
def test_a_received_tensor_owns_its_memory_and_can_be_written_to(tensor: Tensor):
    frames = [bytearray(frame) for frame in encode(message(tensor))]
    received = decode(frames).payload
    assert isinstance(received, Tensor)
    before = raw(received)
    for frame in frames:
        frame[:] = bytes(len(frame))
    assert raw(received) == before
    assert received.is_leaf
    received.detach_()  # refused for a view
    if 0 not in received.stride():
        received.copy_(torch.empty_like(received))


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[:, 1:3],
    lambda x: x[::2, :1].expand(-1, 3),
    lambda x: x.unsqueeze(1).expand(-1, 2, -1)[..., ::2],
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("laid", LAYOUTS)
def test_a_received_tensor_begins_as_far_off_an_alignment_boundary_as_the_sent_one(
    laid: Callable[[Tensor], Tensor], dtype: torch.dtype
):
    for skew in range(0, 64, dtype.itemsize):
        sent = laid(noise(dtype, [4, 5], seed=skew, skew=skew))
        received = tensor_through(sent)
        assert received.data_ptr() % 64 == sent.data_ptr() % 64
        assert bits(received) == bits(sent)


def test_the_skew_of_a_conjugated_or_an_overlapping_tensor_is_kept_too():
    one_off = noise(torch.complex64, [6], seed=0, skew=8)
    for sent, skew in ((one_off.conj(), 8), (one_off.conj().imag, 12), (one_off.unfold(0, 3, 1)[1:], 16)):
        assert tensor_through(sent).data_ptr() % 64 == skew


def test_elements_that_lie_off_their_own_size_come_back_on_it():
    odd = torch.frombuffer(bytearray(range(17)), dtype=torch.float32, count=4, offset=1)
    received = tensor_through(odd)
    assert odd.data_ptr() % 4 != 0
    assert received.data_ptr() % 64 == 0
    assert raw(received) == raw(odd)


def test_a_tensor_without_elements_begins_nowhere():
    (sent,) = read_header(encode(message(torch.zeros(9)[5:5]))[0]).tensors
    assert sent.skew == 0


@given(tensors())
def test_two_copies_of_a_message_have_one_fingerprint_whoever_sent_them(tensor: Tensor):
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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_dense_tensor_is_sent_from_its_own_memory(memory_format: torch.memory_format):
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=memory_format)
    frame = encode(message(tensor))[1]
    assert isinstance(frame, memoryview)
    assert address(frame) == tensor.data_ptr()
    assert frame.nbytes == tensor.nbytes


def test_a_frame_keeps_the_memory_of_its_tensor_alive():
    frame = encode(message(torch.full((1000,), 7, dtype=torch.uint8)))[1]
    others = [torch.zeros(1000, dtype=torch.uint8) for _ in range(100)]
    assert bytes(frame) == bytes([7]) * len(others[0])


@pytest.mark.parametrize("tensor", [Z.conj(), Z.conj().imag, Z.t().conj(), Z[:, 1:].conj(), Z[:1].conj().expand(4, 3)])
def test_a_conjugated_or_negated_tensor_travels_as_its_values(tensor: Tensor):
    received = tensor_through(tensor)
    assert torch.equal(received, tensor)
    assert received.stride() == tensor.stride()
    assert not received.is_conj()
    assert not received.is_neg()


def test_an_expanded_tensor_is_sent_once():
    assert len(encode(message(torch.randn(1, 8).expand(1000, 8)))[1]) == 8 * 4


def test_a_received_buffer_becomes_the_tensor():
    frames = encode(message(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)))
    header = read_header(frames[0])
    (buffer,) = allocate(header)
    buffer[:] = frames[1]
    received = assemble(header, [buffer]).payload
    assert isinstance(received, Tensor)
    assert received.data_ptr() == address(buffer)


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as into:
        out.bind("inproc://messages")
        into.connect("inproc://messages")
        yield out, into


MANY = (torch.randn(300, 400), torch.empty(0, 4), torch.randn(4, 4)[:, :2], torch.tensor(True), "label")


def test_frames_pass_a_socket_without_being_copied_first(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]):
    out, into = pair
    out.send_multipart(encode(message(MANY)), copy=False)
    assert bits(decode([frame.buffer for frame in into.recv_multipart(copy=False)]).payload) == bits(MANY)


def test_a_socket_can_receive_into_the_memory_of_the_tensors(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]):
    out, into = pair
    out.send_multipart(encode(message(MANY)), copy=False)
    header = read_header(into.recv())
    buffers = allocate(header)
    assert [into.recv_into(buffer) for buffer in buffers] == [tensor.nbytes for tensor in header.tensors]
    assert bits(assemble(header, buffers).payload) == bits(MANY)


@pytest.mark.parametrize("step", [1, 2])
def test_overlapping_windows_come_back_dense(step: int):
    windows = torch.arange(9.0).unfold(0, 3, step)
    received = tensor_through(windows)
    assert torch.equal(received, windows)
    assert received.stride() == (3, 1)


def test_overlapping_windows_with_the_dimensions_exchanged_keep_that_order():
    windows = torch.arange(9.0).unfold(0, 3, 2).t()
    assert torch.equal(tensor_through(windows), windows)
    assert tensor_through(windows).stride() == (1, 3)


def test_a_parameter_and_a_result_of_autograd_travel_as_their_values():
    parameter = nn.Parameter(torch.randn(3))
    for tensor in (parameter, parameter * 2):
        received = tensor_through(tensor)
        assert torch.equal(received, tensor)
        assert received.requires_grad
        assert received.is_leaf


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Special(Tensor):
    pass


TOO_DEEP: Tree = None
for _ in range(17):
    TOO_DEEP = (TOO_DEEP,)

CANNOT_TRAVEL = [
    (Pair(torch.zeros(1), torch.zeros(1)), r"payload is a .*Pair"),
    ((1, OrderedDict(a=1)), r"payload\[1\] is a collections\.OrderedDict"),
    ([{"a": 1}, {2: 3}], r"payload\[1\] is a dict with a key that is not a string"),
    ({"a": np.float64(1.0)}, r"payload\['a'\] is a numpy\.float64"),
    (object(), "payload is a builtins.object"),
    (TOO_DEEP, r"payload(\[0\]){16} nests too deep"),
    (2**64, "a value that cannot travel"),
    ("\ud800", "a value that cannot travel"),
    (torch.eye(2).to_sparse(), "torch.sparse_coo tensor cannot travel"),
    (torch.empty(2, device="meta"), "meta tensor"),
    (torch.zeros(2).as_subclass(Special), "a Special cannot travel"),
    (torch.empty((1,) * 33), "tensor 0: it has 33 dimensions, the limit is 32"),
    ([torch.empty(0)] * 4097, "4097 tensors, the limit is 4096"),
    ("x" * 2**20, "header of [0-9]+ bytes, the limit is 1048576"),
]


@pytest.mark.parametrize(("payload", "complaint"), CANNOT_TRAVEL)
def test_what_would_not_come_back_as_it_was_is_refused_by_name(payload: Tree, complaint: str):
    with pytest.raises(Unsendable, match=complaint):
        encode(message(payload))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_quantized_and_nested_tensors_are_refused_by_name():
    with pytest.raises(Unsendable, match="quint8"):
        encode(message(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8)))
    with pytest.raises(Unsendable, match="nested"):
        encode(message(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])))


@pytest.mark.parametrize("sent", [torch.zeros(9), torch.zeros(17)[::8], (torch.zeros(5), torch.zeros(4))])
def test_a_sender_refuses_what_its_receiver_would(sent: Tree):
    with pytest.raises(Unsendable, match=r"needs [0-9]+ bytes .* the limit is 32"):
        encode(message(sent), limits=Limits(message_bytes=32))


@given(st.integers(0, 2**63 - 1))
def test_a_large_tensor_that_is_one_element_is_no_burden(count: int):
    assert tensor_through(torch.zeros(1, dtype=torch.uint8).expand(count)).shape == (count,)
