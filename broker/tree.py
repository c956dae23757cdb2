"""Payloads are trees of tensors and plain values; this file takes them apart for the wire and puts them together again.

On the wire None, bool, int, float and str are themselves, and an array's first element says what it is:
`[0]` the next tensor, `[1, ...]` a tuple, `[2, ...]` a list, `[3, key, value, ...]` a dict in its own order.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor

from .errors import BadMessage, Unsendable

Tree: TypeAlias = "Tensor | bool | int | float | str | tuple[Tree, ...] | list[Tree] | dict[str, Tree] | None"
Node: TypeAlias = Any  # a tree as msgpack has it

TENSOR, TUPLE, LIST, DICT = range(4)
ONE_TENSOR = [TENSOR]  # the tree of nearly every message
_SCALARS = frozenset({type(None), bool, int, float, str})


def take_apart(tree: Tree, depth: int) -> tuple[Node, list[Tensor]]:
    """The wire's form of `tree`, and its tensors in order.

    Raises `Unsendable`, naming the place, for what would not come back as what it was, and beyond `depth` containers.
    """
    tensors: list[Tensor] = []
    return _take_apart(tree, depth, "payload", tensors), tensors


def put_together(node: Node, tensors: Iterator[Tensor]) -> Tree:
    """The tree that was taken apart, for a node that `count_tensors` has accepted."""
    match node:
        case [0]:
            return next(tensors)
        case [1, *items]:
            return tuple(put_together(item, tensors) for item in items)
        case [2, *items]:
            return [put_together(item, tensors) for item in items]
        case [3, *pairs]:
            return {key: put_together(value, tensors) for key, value in _pairs(pairs)}
    return node  # type: ignore[no-any-return]


def count_tensors(node: Node, depth: int) -> int:
    """How many tensors a received tree has. Raises `BadMessage` if it is none, or nests deeper than `depth`."""
    if type(node) in _SCALARS:
        return 0
    match node:
        case [0]:
            return 1
        case [1 | 2 | 3, *_] if depth == 0:
            raise BadMessage("the tree nests deeper than the limit")
        case [1 | 2, *items]:
            return sum(count_tensors(item, depth - 1) for item in items)
        case [3, *pairs] if _is_dict(pairs):
            return sum(count_tensors(value, depth - 1) for value in pairs[1::2])
    raise BadMessage(f"the tree holds a {type(node).__name__} that is neither a value nor a container")


def _take_apart(tree: Tree, depth: int, place: str, tensors: list[Tensor]) -> Node:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return ONE_TENSOR
    if type(tree) in _SCALARS:
        return tree
    if depth == 0:
        raise Unsendable(f"{place} nests too deep; give the stage an output with fewer containers in containers")
    if type(tree) is tuple:
        return [TUPLE, *_take_items_apart(tree, depth, place, tensors)]
    if type(tree) is list:
        return [LIST, *_take_items_apart(tree, depth, place, tensors)]
    if type(tree) is dict and all(type(key) is str for key in tree):
        values = _take_items_apart(tree.values(), depth, place, tensors)
        return [DICT, *chain.from_iterable(zip(tree, values, strict=True))]
    raise Unsendable(_complaint(tree, place))


def _take_items_apart(items: Iterable[Tree], depth: int, place: str, tensors: list[Tensor]) -> list[Node]:
    return [_take_apart(item, depth - 1, f"{place}[{i}]", tensors) for i, item in enumerate(items)]


def _complaint(tree: Tree, place: str) -> str:
    if type(tree) is dict:
        return f"{place} is a dict with a key that is not a string; name its entries"
    kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
    return f"{place} is a {kind}, which would not come back as one; make it a tensor, number, tuple, list or dict"


def _pairs(pairs: list[Node]) -> Iterator[tuple[str, Node]]:
    return zip(pairs[::2], pairs[1::2], strict=True)


def _is_dict(pairs: list[Node]) -> bool:
    keys = pairs[::2]
    return len(pairs) % 2 == 0 and all(type(key) is str for key in keys) and len(set(keys)) == len(keys)
