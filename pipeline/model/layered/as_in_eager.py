"""Choices that libraries make while torch.export traces a forward, made as in a plain call where they can be.

They ask whether something traces them, and compute something else then, with other bits:

masks of transformers            a plain call without an attention mask leaves the causal mask out, and does not repeat
                                 keys of grouped heads: scaled_dot_product_attention does both by itself. A traced one
                                 makes a mask, since its graph might get a length of 1
positions that count up          a plain call sees that no samples are packed into one row; a traced one cannot look
nn.TransformerEncoderLayer,      a plain call that needs no gradient takes one fast operator; a traced one does not
nn.MultiheadAttention
len(x)                           Python's `len` gives a number, and a graph is then for that number of rows;
                                 `x.shape[0]` gives a size that is left open

A graph here gets no lengths for which the forward decides otherwise, and positions that `torch.arange` has made are
known to count up. A mask that is an input stays: a plain call looks at its values.
"""

import builtins
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode, has_torch_function

_MASKS, _EXPORTING, _PACKED = "transformers.masking_utils", "is_torchdynamo_exporting", "find_packed_sequence_indices"
_KEEP_COUNTING = ("add", "__add__", "__radd__", "unsqueeze")
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor, type(None))


@contextmanager
def as_in_eager() -> Iterator[None]:
    """Let the libraries choose in the context as in a call that nothing traces."""
    with ExitStack() as stack:
        if not torch.is_grad_enabled():
            _replace(stack, "torch.overrides", has_torch_function=_has_torch_function)
            _replace(stack, "torch.nn.modules.activation", _is_make_fx_tracing=lambda: False)
        if packed := getattr(sys.modules.get(_MASKS), _PACKED, None):
            counting = stack.enter_context(_Counting())
            new = {_EXPORTING: lambda: False, _PACKED: lambda x: None if counting.has(x) else packed(x)}
            _replace(stack, _MASKS, **new)
        yield


def _replace(stack: ExitStack, module: str, **new: Any) -> None:
    """Give `module` the `new` values of names that it has, until the end of `stack`."""
    names = vars(sys.modules[module])
    former = {name: names[name] for name in new if name in names}
    stack.callback(names.update, former)
    names.update({name: new[name] for name in former})


def _has_torch_function(given: Sequence[object]) -> bool:
    """Return the answer of `torch.overrides.has_torch_function`, but for modes, of which torch.export has some."""
    return has_torch_function(given) and any(type(each) not in _PLAIN for each in given)


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


@contextmanager
def len_left_open(model: torch.nn.Module) -> Iterator[None]:
    """Let `len(x)` of a tensor be `x.shape[0]`, in the context, in the files of the model's own classes."""
    files = {type(module).__module__ for module in model.modules()}
    tables = [vars(sys.modules[file]) for file in files if file in sys.modules and file.partition(".")[0] != "torch"]
    tables = [table for table in tables if "len" not in table]
    for table in tables:
        table["len"] = _length
    try:
        yield
    finally:
        for table in tables:
            del table["len"]


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else builtins.len(value)
