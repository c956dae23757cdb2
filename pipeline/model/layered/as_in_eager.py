"""Choices of transformers while torch.export traces a forward, made as in a plain call where they can be.

transformers asks whether it is traced, and computes something else then, with other bits:

without an attention mask        a plain call leaves the mask out: scaled_dot_product_attention is causal by itself, and
                                 repeats no keys; a traced one makes a mask, since its graph might get a length of 1
positions that count up          a plain call sees that no samples are packed into one row; a traced one cannot look

A graph here gets no lengths for which the forward decides otherwise, and positions that `torch.arange` has made are
known to count up. A mask that is an input stays: a plain call looks at its values.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MASKS, _EXPORTING, _PACKED = "transformers.masking_utils", "is_torchdynamo_exporting", "find_packed_sequence_indices"


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Let transformers' masks be made in the context as in a call that nothing traces."""
    names = vars(sys.modules[_MASKS]) if _MASKS in sys.modules else {}
    former = {name: names[name] for name in (_EXPORTING, _PACKED) if name in names}
    if len(former) < 2:
        yield
        return
    with _Counting() as counting:
        names.update({_EXPORTING: lambda: False, _PACKED: _unless_counting(counting, former[_PACKED])})
        try:
            yield
        finally:
            names.update(former)


_KEEP_COUNTING = ("add", "__add__", "__radd__", "unsqueeze")


def _unless_counting(counting: "_Counting", packed: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    return lambda positions: None if counting.has(positions) else packed(positions)


class _Counting(TorchFunctionMode):
    """Tensors that count up by 1 along their last dimension, as is known from how they were made."""

    def __init__(self) -> None:
        super().__init__()
        self._known: list[torch.Tensor] = []

    def has(self, tensor: object) -> bool:
        """Return True if `tensor` is known to count up."""
        return any(each is tensor for each in self._known)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, and note its result if it counts up."""
        name, given = getattr(func, "__name__", ""), kwargs or {}
        found = func(*args, **given)
        if _in_place(name) or "out" in given:
            self._known.clear()  # the same memory may be that of a known tensor
        elif _counts(func, args, given) or (self.has(next(iter(args), None)) and _keeps_counting(name, args[1:])):
            self._known.append(found)
        return found


def _counts(func: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    return func is torch.arange and len(args) < 3 and "step" not in kwargs


def _keeps_counting(name: str, args: Sequence[object]) -> bool:
    if name == "expand":  # of rows
        return isinstance(args[-1], int) and args[-1] == -1
    return name in _KEEP_COUNTING and not any(isinstance(each, torch.Tensor) for each in args)


def _in_place(name: str) -> bool:
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.startswith("_"))
