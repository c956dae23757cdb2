"""A tensor arrives with the bits, the strides and the alignment it was sent with."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stageline.broker.codec.message import (
    allocate,
    assemble,
    decode,
    encode,
    read_header,
)
from stageline.broker.codec.tensors import DTYPES
from stageline.broker.errors import Unsendable
from support.paths import DOCS
from support.payloads import bits, message, noise, raw, tensor_through, tensors

# torch warns whenever a complex32 tensor is made; it only has to travel here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DOCUMENT = (DOCS / "reference/messages.md").read_text()

Z = torch.randn(2, 3, dtype=torch.complex64)


def address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_the_codes_in_the_documentation_are_true():
    entries = re.findall(r"\| (\d+) \| ([a-z]\w+)[^|]* \| (\d+) (?=\|)", DOCUMENT)
    assert {int(code): (name, int(size)) for code, name, size in entries} == {
        code: (str(dtype).removeprefix("torch."), dtype.itemsize) for code, dtype in DTYPES.items()
    }


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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_quantized_and_nested_tensors_are_refused_by_name():
    with pytest.raises(Unsendable, match="quint8"):
        encode(message(torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8)))
    with pytest.raises(Unsendable, match="nested"):
        encode(message(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])))


@given(st.integers(0, 2**63 - 1))
def test_a_large_tensor_that_is_one_element_is_no_burden(count: int):
    assert tensor_through(torch.zeros(1, dtype=torch.uint8).expand(count)).shape == (count,)
