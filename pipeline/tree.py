"""Trees, a stage's inputs and outputs: tensors nested in tuples, lists and dicts, with plain values among them.

Most trees are a single tensor, so every function checks for that first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

Leaf: TypeAlias = Tensor | bool | int | float | str | None
Tree: TypeAlias = "Leaf | tuple[Tree, ...] | list[Tree] | dict[str, Tree]"

_PLAIN = (bool, int, float, str, type(None))


def map_leaves(function: Callable[[Leaf], Leaf], tree: Tree) -> Tree:
    """Return `tree` with every leaf replaced by `function(leaf)`, called in the order of `leaves`."""
    kind = type(tree)  # exactly: a named tuple would come back as a plain one
    if kind is tuple:
        return tuple([map_leaves(function, branch) for branch in tree])  # type: ignore[union-attr]
    if kind is list:
        return [map_leaves(function, branch) for branch in tree]  # type: ignore[union-attr]
    if kind is dict:
        return {name: map_leaves(function, branch) for name, branch in tree.items()}  # type: ignore[union-attr]
    return function(tree)  # type: ignore[arg-type]


def map_tensors(function: Callable[[Tensor], Leaf], tree: Tree) -> Tree:
    """Return `tree` with every tensor replaced by `function(tensor)`, called in the order of `leaves`."""
    if isinstance(tree, Tensor):
        return function(tree)
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves(tree: Tree, path: str = "") -> list[tuple[str, Leaf]]:
    """Return the leaves of `tree`, each with its path, in order; dicts in their own order.

    A path is unique and begins with `path`: "" for `tree` itself, "[0]", "[1]['mask']".
    """
    match tree:
        case Tensor():
            return [(path, tree)]
        case tuple() | list():
            return [found for place, branch in enumerate(tree) for found in leaves(branch, f"{path}[{place}]")]
        case dict():
            return [found for name, branch in tree.items() for found in leaves(branch, f"{path}[{name!r}]")]
        case _:
            return [(path, tree)]


def tensors(tree: Tree) -> list[Tensor]:
    """Return the tensors of `tree`, in the order of `leaves`."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor)]


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Return trees of one structure as one: their tensors joined along dimension 0, other leaves as in the first."""
    found = iter([torch.cat(parts) for parts in zip(*map(tensors, trees), strict=True)])
    return map_tensors(lambda _: next(found), trees[0])


def describe(tree: Tree, more: Callable[[Tensor], str] = lambda leaf: "") -> str:
    """Return `tree` in words for people: "(float32 [4, 8], None)", and `more` of each tensor."""
    within = partial(describe, more=more)
    match tree:
        case Tensor():
            return f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}{more(tree)}"
        case tuple():
            return f"({', '.join(map(within, tree))})"
        case list():
            return f"[{', '.join(map(within, tree))}]"
        case dict():
            return f"{{{', '.join(f'{name}: {within(branch)}' for name, branch in tree.items())}}}"
        case _:  # within a stage, layers may give each other any object
            return repr(tree) if type(tree) in _PLAIN else f"of type {type(tree).__name__}"


def describe_values(tree: Tree) -> str:
    """Return `tree` in words, with the least and the greatest of whole numbers: "int64 [4, 8] from 0 to 99"."""
    return describe(tree, _range)


def _range(leaf: Tensor) -> str:
    whole = leaf.dtype in {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    if not whole or not leaf.numel() or leaf.device.type != "cpu" or type(leaf) is not Tensor:
        return ""  # a device that has failed computes no more, and a fake tensor has no values
    return " from {} to {}".format(*map(int, leaf.aminmax()))
