"""A collated batch falls into inputs and targets, by place, by name or by a function."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from stageline.pipeline.data.parts import as_tree, split_parts
from stageline.pipeline.errors import DataError

X, Y, Z = torch.zeros(4, 3), torch.zeros(4), torch.ones(4, 2)
Pair = namedtuple("Pair", ["image", "label"])


@pytest.mark.parametrize(
    ("batch", "target", "inputs", "targets"),
    [
        ((X, Y), None, X, Y),
        ([X, Y], None, X, Y),
        (Pair(X, Y), None, X, Y),
        ((X, Z, Y), 2, (X, Z), Y),
        ((X, Z, Y), -1, (X, Z), Y),
        ((X, Z, Y), [1, 2], X, (Z, Y)),
        ((Y, X), 0, X, Y),
        ({"image": X, "label": Y}, "label", X, Y),
        (OrderedDict(image=X, mask=Z, label=Y), "label", {"image": X, "mask": Z}, Y),
        ({"image": X, "mask": Z, "label": Y}, ["mask", "label"], X, {"mask": Z, "label": Y}),
        (X, lambda x: (x, x), X, X),
        ({"image": X, "path": ["a", "b"], "label": Y}, lambda b: (b["image"], b["label"]), X, Y),
        (([X, [Z]], Y), None, (X, (Z,)), Y),
        (({"ids": X, "none": None, "scale": 2.0}, Y), None, {"ids": X, "none": None, "scale": 2.0}, Y),
    ],
)
def test_a_batch_falls_into_inputs_and_targets(batch: object, target: object, inputs: object, targets: object) -> None:
    assert str(split_parts(batch, target)) == str((inputs, targets))


@pytest.mark.parametrize(
    ("batch", "target", "text"),
    [
        (X, None, r"a batch is float32 \[4, 3\]: return pairs .* target=lambda x: \(x, x\)"),
        ((X, Z, Y), None, r"a batch is \(float32 \[4, 3\], .*such as target=2"),
        ((X, Y), 2, "target=2: a batch has 2 parts, 0 to 1, and none is 2"),
        ((X, Y), "label", "target='label': a batch has 2 parts, 0 to 1, and none is 'label'"),
        ((X, Y), [0, 1], "leaves no inputs"),
        ({"image": X, "label": Y}, None, "has the parts 'image', 'label': .* such as target='label'"),
        ({"image": X, "label": Y}, "labels", "a batch has no 'labels'. It has 'image', 'label'."),
        ({"label": Y}, "label", "leaves no inputs"),
        ((X, Y), lambda batch: batch[0], r"target returned float32 \[4, 3\]; expected two"),
        ((X, Y), lambda batch: batch[5], r"target failed on .*: IndexError.*test_parts\.py, line"),
        ((X, torch.zeros(3)), None, "have no common number of rows"),
        ((X, ["a", "b", "c", "d"]), None, "targets is 4 texts, which no tensor holds"),
        ((X, object()), None, "targets is object: give tensors, or a collate_fn"),
        (({3: X}, Y), None, "inputs has the key 3: name its parts by texts"),
        ((X.to_sparse(), Y), None, "inputs is a tensor of layout torch.sparse_coo: give dense ones"),
        ((torch.zeros(4, device="meta"), Y), None, "inputs is a tensor on meta: give dense ones on the CPU"),
    ],
)
def test_a_batch_without_inputs_and_targets_is_refused(batch: object, target: object, text: str) -> None:
    with pytest.raises(DataError, match=text):
        split_parts(batch, target)


@pytest.mark.parametrize(
    ("tensor", "strides"),
    [
        (torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), (48, 1, 12, 3)),
        (torch.zeros(8, 3)[::2], (3, 1)),
        (torch.zeros(1, 3).expand(4, 3), (3, 1)),
        (torch.zeros(13)[1:], (1,)),
    ],
)
def test_tensors_are_dense_and_aligned_and_keep_the_order_of_dense_dimensions(
    tensor: torch.Tensor, strides: tuple[int, ...]
) -> None:
    settled = as_tree(tensor, "inputs")
    assert isinstance(settled, torch.Tensor)
    assert torch.equal(settled, tensor)
    assert (settled.stride(), settled.data_ptr() % 64) == (strides, 0)


def test_arrays_become_tensors_and_gradients_are_left_behind() -> None:
    assert torch.equal(as_tree(np.arange(3), "inputs"), torch.arange(3))
    assert not as_tree(torch.zeros(2, requires_grad=True) * 2, "inputs").requires_grad
