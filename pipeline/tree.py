"""A tree is what a stage takes and gives: tensors nested in tuples, lists and dicts, with plain values between them."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import Tensor

Leaf: TypeAlias = Tensor | bool | int | float | str | None
Tree: TypeAlias = "Leaf | tuple[Tree, ...] | list[Tree] | dict[str, Tree]"


def map_leaves(function: Callable[[Leaf], Leaf], tree: Tree) -> Tree:
    """The same tree with `function` applied to every leaf."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_leaves(function, value) for value in tree)
    if isinstance(tree, list):
        return [map_leaves(function, value) for value in tree]
    return function(tree)


def leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """The leaves of `tree` and their paths ("", "[0]", "[1].mask"): sequences from the front, dicts as filled."""
    match tree:
        case tuple() | list():
            for place, branch in enumerate(tree):
                yield from leaves(branch, f"{path}[{place}]")
        case dict():
            for name, branch in tree.items():
                yield from leaves(branch, f"{path}.{name}")
        case _:
            yield path, tree


def tensors(tree: Tree) -> Iterator[Tensor]:
    """The tensors of `tree`, in the order of `leaves`."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def map_tensors(function: Callable[[Tensor], Leaf], tree: Tree) -> Tree:
    """`tree` with `function` of each tensor in its place, called in the order of `leaves`; the rest is kept."""
    match tree:
        case Tensor():
            return function(tree)
        case tuple():
            return tuple([map_tensors(function, branch) for branch in tree])
        case list():
            return [map_tensors(function, branch) for branch in tree]
        case dict():
            return {name: map_tensors(function, branch) for name, branch in tree.items()}
        case _:
            return tree


def describe(tree: Tree) -> str:
    """`tree` for people: "(float32 [4, 8], None)"."""
    match tree:
        case Tensor():
            return f"{str(tree.dtype).removeprefix('torch.')} {list(tree.shape)}"
        case tuple():
            return f"({', '.join(map(describe, tree))})"
        case list():
            return f"[{', '.join(map(describe, tree))}]"
        case dict():
            return f"{{{', '.join(f'{name}: {describe(branch)}' for name, branch in tree.items())}}}"
        case _:
            return repr(tree)
