"""A payload comes apart into a structure and its tensors, and together again."""

import pytest
import torch

from stageline.broker.codec.structure import ONE_TENSOR, count_tensors, flatten, unflatten
from stageline.broker.errors import BadMessage, Unsendable
from stageline.pipeline.tree import Tree

A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("tree", "structure", "tensors"),
    [
        (A, ONE_TENSOR, [A]),
        ((A, None, [B, 2.5]), [1, [0], None, [2, [0], 2.5]], [A, B]),
        ({"b": A, "a": ("x", B)}, [3, "b", [0], "a", [1, "x", [0]]], [A, B]),
        ((), [1], []),
        (True, True, []),
    ],
)
def test_a_tree_comes_apart_and_together(tree: Tree, structure: object, tensors: list[torch.Tensor]) -> None:
    found, parts = flatten(tree, depth=3)
    assert found == structure
    assert [id(part) for part in parts] == [id(tensor) for tensor in tensors]
    assert count_tensors(found, depth=3) == len(tensors)
    assert repr(unflatten(found, iter(parts))) == repr(tree)


def test_containers_nest_up_to_the_depth_on_both_sides() -> None:
    structure, _ = flatten([[[1]]], depth=3)
    with pytest.raises(Unsendable, match=r"payload\[0\]\[0\] nests too deep"):
        flatten([[[1]]], depth=2)
    assert count_tensors(structure, depth=3) == 0
    with pytest.raises(BadMessage, match="nests deeper than the limit"):
        count_tensors(structure, depth=2)
