"""Structure of a payload: its tree without the tensors, which travels in the header.

In msgpack None, bool, int, float and str are themselves, and an array's first element is its kind:
`[0]` the next tensor, `[1, ...]` a tuple, `[2, ...]` a list, `[3, key, value, ...]` a dict in its own order.

A message whose content cannot be needed any more keeps its number, its place and its checksums:

    payload    {"stageline": "emptied", "was": checksums of the content, "rest": what is still wanted}

Put again with its content, such a message agrees with the emptied one if the checksums do.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeAlias

import msgspec
from torch import Tensor

from stageline.broker.errors import BadMessage, Unsendable
from stageline.pipeline.tree import Tree

from .tensors import PackedTensor

Structure: TypeAlias = Any  # of msgpack's own types

TENSOR, TUPLE, LIST, DICT = range(4)
ONE_TENSOR = [TENSOR]  # the structure of nearly every message
_SCALARS = frozenset({type(None), bool, int, float, str})
_MARK = "stageline", "emptied"
_encode = msgspec.msgpack.Encoder().encode


def flatten(tree: Tree, depth: int) -> tuple[Structure, list[Tensor | PackedTensor]]:
    """Return the structure of `tree`, and its tensors in order, packed ones among them.

    Raises `Unsendable`, naming the place, for a value that would not arrive as what it was, and for more than `depth`
    nested containers.
    """
    tensors: list[Tensor | PackedTensor] = []
    return _structure(tree, depth, "payload", tensors), tensors


def unflatten(node: Structure, tensors: Iterator[Tensor]) -> Tree:
    """Return the tree of a structure that `count_tensors` has accepted, with `tensors` in their places."""
    match node:
        case [0]:
            return next(tensors)
        case [1, *items]:
            return tuple([unflatten(item, tensors) for item in items])
        case [2, *items]:
            return [unflatten(item, tensors) for item in items]
        case [3, *pairs]:
            return {key: unflatten(value, tensors) for key, value in zip(pairs[::2], pairs[1::2], strict=True)}
    return node  # type: ignore[no-any-return]


def count_tensors(node: Structure, depth: int) -> int:
    """Return the number of tensors in a received structure.

    Raises `BadMessage` if the structure is malformed or deeper than `depth`.
    """
    if type(node) in _SCALARS:
        return 0
    match node:
        case [kind, *_] if type(kind) is not int:  # `False` and `0.0` equal 0
            raise BadMessage(
                f"the structure holds an array that begins with an object of type {type(kind).__name__}, not with "
                f"an int"
            )
        case [0]:
            return 1
        case [1 | 2 | 3, *_] if depth == 0:
            raise BadMessage("the structure nests deeper than the limit")
        case [1 | 2, *items]:
            return sum(count_tensors(item, depth - 1) for item in items)
        case [3, *pairs] if _alternate(pairs):
            return sum(count_tensors(value, depth - 1) for value in pairs[1::2])
    raise BadMessage(
        f"the structure holds an object of type {type(node).__name__} that is neither a value nor a container"
    )


def _structure(tree: "Tree | PackedTensor", depth: int, place: str, tensors: list[Tensor | PackedTensor]) -> Structure:
    if isinstance(tree, Tensor | PackedTensor):
        tensors.append(tree)
        return ONE_TENSOR
    if type(tree) in _SCALARS:
        return tree
    if depth == 0:
        raise Unsendable(f"{place} nests too deep; give the stage an output with fewer containers in containers")
    if type(tree) is tuple:
        return [TUPLE, *_structures(enumerate(tree), depth, place, tensors)]
    if type(tree) is list:
        return [LIST, *_structures(enumerate(tree), depth, place, tensors)]
    if type(tree) is dict and all(type(key) is str for key in tree):
        return [DICT, *chain.from_iterable(zip(tree, _structures(tree.items(), depth, place, tensors), strict=True))]
    raise Unsendable(_complaint(tree, place))


def _structures(
    items: Iterable[tuple[int | str, Tree]], depth: int, place: str, tensors: list[Tensor | PackedTensor]
) -> Iterator[Structure]:
    return (_structure(tree, depth - 1, f"{place}[{key!r}]", tensors) for key, tree in items)


def _complaint(tree: Tree, place: str) -> str:
    if type(tree) is dict:
        return f"{place} is a dict with a key that is not a string; name its entries"
    kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
    return f"{place} is a {kind}, which would not come back as one; make it a tensor, number, tuple, list or dict"


def _alternate(pairs: list[Structure]) -> bool:
    keys = pairs[::2]
    return len(pairs) % 2 == 0 and all(type(key) is str for key in keys) and len(set(keys)) == len(keys)


@dataclass(frozen=True, slots=True)
class FormerFingerprint:
    """Fingerprint of a message without content: a digest of the one that it had with it; None if that is not known."""

    digest: str | None


def emptied(was: Hashable = FormerFingerprint(None), rest: Tree = None) -> Tree:
    """Return the payload in place of one whose message had the fingerprint `was`; `rest` has no tensors."""
    return {_MARK[0]: _MARK[1], "was": digest_of(was), "rest": rest}


def is_emptied(payload: Tree) -> bool:
    """Return True if `payload` is what `emptied` has left of a payload."""
    return type(payload) is dict and payload.get(_MARK[0]) == _MARK[1]


def rest_of(payload: Tree) -> Tree:
    """Return the content that an emptied payload still holds; None for a payload that is not a dict."""
    return payload.get("rest") if isinstance(payload, dict) else None


def former_fingerprint(structure: Structure) -> FormerFingerprint | None:
    """Return the fingerprint of a message with this structure if its content is gone; None if the content is there."""
    match structure:
        case [3, "stageline", "emptied", "was", was, *_]:
            return FormerFingerprint(was if isinstance(was, str) else None)
    return None


def agree(one: Hashable, other: Hashable) -> bool:
    """Return True if two fingerprints may be of the same message."""
    if one == other:
        return True
    if not isinstance(one, FormerFingerprint) and not isinstance(other, FormerFingerprint):
        return False
    digests = digest_of(one), digest_of(other)
    return None in digests or digests[0] == digests[1]


def digest_of(fingerprint: Hashable) -> str | None:
    """Return the digest of a message's content, even after that is gone; None if the digest is not known."""
    if isinstance(fingerprint, FormerFingerprint):
        return fingerprint.digest
    return blake2b(_encode(fingerprint), digest_size=16).hexdigest()
