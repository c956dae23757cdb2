"""Layouts against their definition: the set of addresses that the elements have."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from stageline.pipeline.stage.layout import layout, packed_strides, stored_shape

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
