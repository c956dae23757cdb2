"""A message comes back as it was, to the bit, the stride and the alignment, and nothing is copied that need not be."""

import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stageline.broker.codec.message import (
    Limits,
    Message,
    allocate,
    assemble,
    decode,
    encode,
    read_header,
)
from stageline.broker.errors import BadMessage, Unsendable
from stageline.pipeline.tree import Tree
from support.paths import DOCS
from support.payloads import bits, message, through, trees

# torch warns whenever a complex32 tensor is made; it only has to travel here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DOCUMENT = (DOCS / "reference/messages.md").read_text()


MATRIX = Message("digits-7f3a", "forward-1", 9, 4, torch.tensor([[1.0, -0.0], [float("inf"), 3.5]]))


NESTED = Message(
    "r",
    "backward-0",
    number=0,
    incarnation=1,
    payload={
        "h": (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), None),
        "n": [True, -1, 0.5, "é", torch.arange(4, dtype=torch.int16).reshape(2, 2).t()],
    },
)


EXPANDED = Message("r", "backward-3", 70000, 1, torch.tensor([[7]], dtype=torch.uint8).expand(2, 3))


WITH_GAPS = Message("r", "forward-3", 0, 1, torch.arange(6, dtype=torch.float64).reshape(2, 3)[:, :2])


SKEWED = Message("r", "forward-3", 0, 1, torch.arange(7, dtype=torch.float32)[3:])


NOTHING = Message("r", "forward-3", 0, 1, None)


GOLDEN = [
    (
        MATRIX,
        "534c4d47020096ab6469676974732d37663361a9666f72776172642d310904910091970c920202920201c210ce5f87d51300103b7a2e",
        ["0000803f000000800000807f00006040"],
    ),
    (
        NESTED,
        "534c4d47020096a172aa6261636b776172642d3000019503a16893019100c0a16e9602c3ffcb3fe0000000000000a2c3a991"
        "0092970b9090c302ce3c45e88c009705920202920102c208ce2f5a9784005e1ce1fb",
        ["c03f", "0000010002000300"],
    ),
    (
        EXPANDED,
        "534c4d47020096a172aa6261636b776172642d33ce00011170019100919702920203920000c201ce4c667a2e00db171c45",
        ["07"],
    ),
    (
        WITH_GAPS,
        "534c4d47020096a172a9666f72776172642d330001910091970d920202920301c220ce7022af04000b06b1c8",
        ["0000000000000000000000000000f03f00000000000008400000000000001040"],
    ),
    (
        SKEWED,
        "534c4d47020096a172a9666f72776172642d330001910091970c91049101c210ced4d1f8700cd630b732",
        ["00004040000080400000a0400000c040"],
    ),
    (NOTHING, "534c4d47020096a172a9666f72776172642d330001c0908024aa89", []),
]


@pytest.mark.parametrize(("sent", "header", "contents"), GOLDEN)
def test_the_bytes_on_the_wire_stay_what_they_are(sent: Message, header: str, contents: list[str]):
    assert [bytes(frame).hex() for frame in encode(sent)] == [header, *contents]


@pytest.mark.parametrize(("sent", "header", "contents"), GOLDEN)
def test_bytes_of_old_are_read_as_they_were_meant(sent: Message, header: str, contents: list[str]):
    received = decode([bytes.fromhex(frame) for frame in (header, *contents)])
    assert (received.identity, received.incarnation, received.number) == (
        sent.identity,
        sent.incarnation,
        sent.number,
    )
    assert bits(received.payload) == bits(sent.payload)


def test_the_example_in_the_documentation_is_true():
    shown = DOCUMENT[DOCUMENT.index("## An example") :]
    lines = re.findall(r"^    ((?:[0-9a-f]{2} +)*[0-9a-f]{2})(?= {2}|$)", shown, re.MULTILINE)
    assert bytes.fromhex("".join(lines)) == b"".join(bytes(frame) for frame in encode(MATRIX))


@given(trees)
def test_any_payload_comes_back_to_the_bit(payload: Tree):
    assert bits(through(payload)) == bits(payload)


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


@given(st.integers(1, 500))
def test_tensors_may_come_in_pieces_and_no_piece_may_be_missing_exchanged_or_added(size: int) -> None:
    header, *tensors = map(bytes, encode(message((torch.arange(60.0), torch.empty(0), torch.arange(30.0)))))
    pieces = [each[at : at + size] for each in tensors for at in range(0, len(each) or 1, size)]
    assert bits(decode([header, *pieces]).payload) == bits(decode([header, *tensors]).payload)
    for wrong in (pieces[:-1], pieces[::-1], [*pieces, b""], [*pieces, pieces[0]], [b"".join(pieces)]):
        with pytest.raises(BadMessage):
            decode([header, *wrong])


def test_a_socket_can_receive_into_the_memory_of_the_tensors(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]):
    out, into = pair
    out.send_multipart(encode(message(MANY)), copy=False)
    header = read_header(into.recv())
    buffers = allocate(header)
    assert [into.recv_into(buffer) for buffer in buffers] == [tensor.nbytes for tensor in header.tensors]
    assert bits(assemble(header, buffers).payload) == bits(MANY)


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
    (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "nested tensor .*to_padded_tensor"),
    (torch.zeros(2).as_subclass(Special), "a Special cannot travel"),
    (torch.empty((1,) * 33), "tensor 0: it has 33 dimensions, the limit is 32"),
    ([torch.empty(0)] * 4097, "4097 tensors, the limit is 4096"),
    ("x" * 2**20, "header of [0-9]+ bytes, the limit is 1048576"),
]


@pytest.mark.parametrize(("payload", "complaint"), CANNOT_TRAVEL)
def test_what_would_not_come_back_as_it_was_is_refused_by_name(payload: Tree, complaint: str):
    with pytest.raises(Unsendable, match=complaint):
        encode(message(payload))


@pytest.mark.parametrize("sent", [torch.zeros(9), torch.zeros(17)[::8], (torch.zeros(5), torch.zeros(4))])
def test_a_sender_refuses_what_its_receiver_would(sent: Tree):
    with pytest.raises(Unsendable, match=r"needs [0-9]+ bytes .* the limit is 32"):
        encode(message(sent), limits=Limits(message_bytes=32))
