"""A copy lies in memory as the original does: same strides, same address modulo 64, other memory."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

from stageline.pipeline.stage.layout import ALIGNMENT
from stageline.pipeline.stage.placing import copied, empty, skew_of
from support.payloads import bits, noise, raw, tensors

# torch says so whenever a complex32 tensor is made; it only has to be copied here.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize("elements", [1, 3, 100, 10**5, 10**7])
def test_what_torch_allocates_begins_at_a_boundary(elements: int):
    assert torch.empty(elements, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0


def test_the_skew_of_a_slice_is_how_far_it_begins_behind_a_boundary():
    rows = torch.zeros(10, 6)
    assert [skew_of(part) for part in rows.tensor_split(4)] == [0, 8, 16, 0]
    assert [skew_of(rows.reshape(-1)[n:]) for n in range(17)] == [*range(0, 64, 4), 0]


def test_what_has_no_address_or_none_that_a_copy_could_have_is_not_skewed():
    assert skew_of(torch.zeros(9)[5:5]) == 0
    assert skew_of(torch.empty(9, device="meta")[5:]) == 0
    assert skew_of(torch.frombuffer(bytearray(17), dtype=torch.float32, count=4, offset=1)) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize(
    ("shape", "strides"),
    [((), ()), ((5,), (1,)), ((3, 4), (1, 3)), ((3, 2), (4, 1)), ((1, 2), (0, 7)), ((0, 3), (3, 1)), ((2, 0), (9, 9))],
)
def test_a_new_tensor_has_the_layout_and_skew_asked_for_and_can_be_filled(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
):
    for skew in range(0, ALIGNMENT, dtype.itemsize):
        tensor = empty(shape, strides, dtype, skew)
        assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (shape, strides, dtype)
        assert skew_of(tensor) == (skew if tensor.numel() else 0)
        assert torch.equal(tensor.fill_(7), torch.full(shape, 7, dtype=dtype))


@given(tensors())
def test_a_copy_agrees_in_every_bit_stride_and_skew_and_shares_no_memory(tensor: Tensor):
    original = tensor.detach()
    before = bits(original)
    copy = copied(original)
    assert bits(copy) == before
    assert not copy.is_conj()
    assert not copy.is_neg()
    copy.untyped_storage().fill_(0)
    assert bits(original) == before


def test_a_copy_keeps_gaps_and_expanded_dimensions_on_a_device_that_has_no_skew():
    tensor = torch.empty(4, 6, device="meta")[:, 1:4].unsqueeze(0).expand(2, 4, 3)
    copy = copied(tensor)
    assert (copy.device, copy.shape, copy.stride()) == (tensor.device, tensor.shape, tensor.stride())


def test_a_copy_of_overlapping_windows_is_packed_in_the_same_order_and_keeps_the_skew():
    windows = noise(torch.int32, [9], seed=0, skew=20).unfold(0, 3, 2)
    for laid, strides in ((windows, (3, 1)), (windows.t(), (1, 3))):
        copy = copied(laid)
        assert raw(copy) == raw(laid)
        assert (copy.stride(), skew_of(copy)) == (strides, 20)
