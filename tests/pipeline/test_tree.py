"""Trees keep their form; leaves have paths of their own."""

import torch

from stageline.pipeline.tree import describe, describe_values, leaves, map_leaves, map_tensors, tensors

ONE, TWO = torch.ones(2, 3), torch.arange(4)
TREE = ({"a.b": ONE, "a": [None, TWO]}, 7, "word")


def test_leaves_come_in_order_with_paths_that_can_be_followed():
    paths = ["[0]['a.b']", "[0]['a'][0]", "[0]['a'][1]", "[1]", "[2]"]
    assert [path for path, _ in leaves(TREE)] == paths
    assert [leaf for _, leaf in leaves(TREE)][3:] == [7, "word"]
    assert tensors(TREE) == [ONE, TWO]
    assert leaves(ONE) == [("", ONE)]


def test_mapping_keeps_the_form_and_calls_in_the_order_of_leaves():
    seen = []
    assert map_leaves(lambda leaf: seen.append(leaf), TREE) == ({"a.b": None, "a": [None, None]}, None, None)
    assert seen == [leaf for _, leaf in leaves(TREE)]
    assert map_tensors(lambda tensor: tensor.dim(), TREE) == ({"a.b": 2, "a": [None, 1]}, 7, "word")
    assert map_tensors(lambda tensor: tensor.dim(), ONE) == 2


def test_a_tree_is_described_by_dtypes_and_shapes():
    assert describe_values([torch.tensor([3, -1]), torch.zeros(2)]) == "[int64 [2] from -1 to 3, float32 [2]]"
    assert describe(TREE) == "({a.b: float32 [2, 3], a: [None, int64 [4]]}, 7, 'word')"
