"""Outputs of models as trees of what a loss can use: tensors, None, numbers and texts, in tuples, lists and dicts.

    CausalLMOutput(logits=..., past_key_values=DynamicCache())    {"logits": ...}
    (logits, DynamicCache())                                      (logits, None)

What else a model returns cannot be sent between processes, nor cut into rows.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.stage.layers.layer import joined
from stageline.pipeline.tree import Tree, leaves

COMPUTED: Any = object()  # stands for a leaf of the output that differs from microbatch to microbatch
COMPUTED_KINDS = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PARTS = (Mapping, tuple, list, *COMPUTED_KINDS, bool, int, float, str, type(None))


def plain_output(output: Any) -> Tree:
    """Return a model's output as a tree, with a dict for every mapping, such as transformers' outputs are.

    An object of another kind, such as a cache, is left out of a dict; in a tuple or list, None stands for it.

    Raises:
        ModelRefused: Nothing computed is left without such objects.
    """
    tree = _plain(output)
    if any(isinstance(leaf, COMPUTED_KINDS) for _, leaf in leaves(tree)):
        return tree
    for path, other in _others(output, ""):
        raise ModelRefused(
            f"the model returns an object of type {type(other).__name__}{f' as its {path}' if path else ''}; expected "
            f"tensors, None, numbers and texts, in tuples, lists and dicts. Let its forward return what the loss needs"
        )
    return tree


def _plain(value: Any) -> Tree:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items() if isinstance(each, _PARTS)}
    if isinstance(value, tuple | list):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    return value if isinstance(value, _PARTS) else None  # type: ignore[return-value]  # numbers of torch's become numbers


def _others(value: Any, path: str) -> Iterator[tuple[str, object]]:
    """Yield the objects that no tree has, each with its path in the output."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _others(each, joined(path, str(key)))
    elif isinstance(value, tuple | list):
        for place, each in enumerate(value):
            yield from _others(each, joined(path, str(place)))
    elif not isinstance(value, _PARTS):
        yield path, value
