"""A payload comes apart into a structure and its tensors, and together again; an emptied one keeps its checksums."""

import pytest
import torch

from stageline.broker.codec.message import Header, Message, decode, encode, fingerprint, read_header
from stageline.broker.codec.structure import (
    ONE_TENSOR,
    agree,
    count_tensors,
    emptied,
    flatten,
    is_emptied,
    rest_of,
    unflatten,
)
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


def header(payload: object) -> Header:
    return read_header(encode(Message("run", "call-1", 3, 1, payload))[0])


def test_an_emptied_message_agrees_with_what_it_was_and_with_nothing_else():
    whole, other = header((torch.ones(3), "a")), header((torch.zeros(3), "a"))
    left = fingerprint(header(emptied(fingerprint(whole), ("rest", 7))))
    assert agree(left, fingerprint(whole))
    assert agree(fingerprint(header(emptied(left))), left)
    assert not agree(left, fingerprint(other))
    assert not agree(fingerprint(whole), fingerprint(other))


def test_one_that_never_had_its_content_agrees_with_any():
    assert agree(fingerprint(header(emptied())), fingerprint(header(torch.ones(3))))


def test_the_rest_arrives():
    payload = decode(encode(Message("run", "call-1", 3, 1, emptied(rest=("train", {"rows": 7}))))).payload
    assert is_emptied(payload)
    assert rest_of(payload) == ("train", {"rows": 7})
    assert not is_emptied({"stageline": "skip"})
