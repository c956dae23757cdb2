"""Finds what a module refers to other than by registration: a copy of the module would go on using the original's.

    self.weight = weight             registered: the copy has its own
    self.again = [weight]            in a list, tuple, dict or set, or in any other object
    self.act = self._act             a bound method, a partial, what a function encloses: each refers to a module
    self.turned = weight.data.T      a tensor in the same memory
    LSTM()._flat_weights             torch itself does it

What a function finds among the global names of its file is not looked at, nor what a weak proxy stands for.
"""

import gc
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType

import torch
from torch.fx import Graph

from stageline.pipeline.model.traced.piece import TracedPiece

_REGISTERED = ("_parameters", "_buffers", "_modules")
_PASSED = (type, ModuleType, CodeType, FrameType, *weakref.ProxyTypes, Graph, TracedPiece)  # graphs are given tensors


class References:
    """To `originals`, parameters by their ids, from the modules that are asked for, one after the other: what several
    refer to is looked through once."""

    def __init__(self, originals: Mapping[int, torch.Tensor]) -> None:
        self._originals = originals
        self._places = {address: key for key, each in originals.items() if (address := _address(each))}
        self._seen: dict[int, object] = {}  # keeps what it has: an id is that of one object while it lives

    def first(self, module: torch.nn.Module) -> tuple[str, int] | None:
        """The first attribute of `module`, other than what is registered, from which an original can be reached, and
        the original's id."""
        for attribute, value in vars(module).items():
            if attribute not in _REGISTERED:
                for tensor in self._tensors(value):
                    if (key := self._original(tensor)) is not None:
                        return attribute, key
        return None

    def _tensors(self, value: object) -> Iterator[torch.Tensor]:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if id(each) in self._seen or issubclass(type(each), _PASSED):  # isinstance fails with a dead weak proxy
                continue
            self._seen[id(each)] = each
            if isinstance(each, torch.Tensor):
                yield each
            else:
                waiting.extend(_referents(each))

    def _original(self, tensor: torch.Tensor) -> int | None:
        return id(tensor) if id(tensor) in self._originals else self._places.get(_address(tensor))


def _referents(value: object) -> list[object]:
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)


def _address(tensor: torch.Tensor) -> int:
    """Where its memory begins; 0 if it has none."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return tensor.untyped_storage().data_ptr() if plain and not tensor.is_meta else 0
