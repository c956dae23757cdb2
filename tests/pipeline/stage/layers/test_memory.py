"""How tensors lie in memory: layouts against their definition, copies that lie alike, outputs that share none."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.memory import (
    ALIGNMENT,
    copied,
    empty,
    layout,
    packed_strides,
    skew_of,
    stored_shape,
)
from stageline.pipeline.stage.stage import Stage
from support.payloads import bits, noise, raw, tensors

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # torch warns whenever a complex32 tensor is made; it only has to be copied here.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


dimensions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=4)


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    indices = product(*(range(size) for size in stored_shape(shape, strides)))
    return [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]


def test_an_image_in_channels_last_is_dense_and_its_crop_has_gaps():
    assert layout((8, 3, 32, 32), (3072, 1, 96, 3)) == (8 * 3 * 32 * 32, 8 * 3 * 32 * 32)
    assert layout((8, 3, 32, 30), (3072, 1, 96, 3)) == (8 * 3 * 32 * 30, 8 * 3 * 32 * 32 - 6)
    assert layout((8, 3, 32, 32), (3072, 1, 96, 3)).dense
    assert not layout((8, 3, 32, 30), (3072, 1, 96, 3)).dense


def test_windows_that_share_elements_have_no_extent():
    assert layout((4, 3), (1, 1)).extent is None


@given(dimensions)
def test_a_layout_with_an_extent_has_distinct_addresses_that_reach_exactly_so_far(dimensions):
    shape, strides = tuple(size for size, _ in dimensions), tuple(stride for _, stride in dimensions)
    found, form = addresses(shape, strides), layout(shape, strides)
    assert form.stored == len(found)
    if form.extent is not None:
        assert len(set(found)) == len(found)
        assert form.extent == max(found, default=-1) + 1
        assert form.dense == (sorted(found) == list(range(len(found))))


@given(dimensions)
def test_packing_gives_a_dense_layout_in_the_same_order(dimensions):
    shape, strides = tuple(size for size, _ in dimensions), tuple(stride for _, stride in dimensions)
    packed = packed_strides(shape, strides)
    assert layout(shape, packed).dense
    assert layout(shape, packed).stored == layout(shape, strides).stored
    assert [stride == 0 for stride in packed] == [stride == 0 for stride in strides]
    if layout(shape, strides).extent is not None:
        before, after = addresses(shape, strides), addresses(shape, packed)
        assert sorted(range(len(before)), key=before.__getitem__) == sorted(range(len(after)), key=after.__getitem__)
    if layout(shape, strides).dense and 0 not in shape and 1 not in shape:
        assert packed == strides


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


class Aliasing(nn.Module):
    """Gives back its input, a view of it, its parameter and its buffer: none may be sent as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x[:, 1:], self.weight, self.kept


def test_what_shares_memory_with_weights_or_input_is_copied_before_it_is_sent():
    module, x = Aliasing(), torch.randn(2, 3, requires_grad=True)
    sent = Stage(module).forward(x)
    kept = [t.detach().clone() for t in sent]
    with torch.no_grad():
        for tensor in (x, module.weight, module.kept):
            tensor.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(sent, kept, strict=True))


@pytest.mark.parametrize("twice", [lambda h: (h, h), lambda h: {"h": h, "head": h[:, :2]}], ids=["same", "slice"])
def test_memory_that_would_be_sent_twice_is_refused(twice):
    # They would arrive apart: an in-place layer would write to one alone, and gradients be added in another order.
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return twice(x * 2)

    with pytest.raises(StageError, match="returns the same memory twice"):
        Stage(Twice()).forward(torch.randn(3, 4, requires_grad=True))


def test_parts_of_one_tensor_that_do_not_overlap_may_be_sent():
    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (x * 2).chunk(2, dim=1)

    assert len(Stage(Parts()).forward(torch.randn(3, 4))) == 2
