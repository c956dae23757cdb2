"""Counts the bytes of tensors that operations make, while these are there: what a stage takes besides what it holds.

As torch's dispatcher sees operations, in backward too: memory that an operation takes and frees by itself is not seen,
and that of files does not count.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.pipeline.tree import Tree, tensors


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`now`: the bytes of tensors that were made in this context, entered once or several times, and are still there;
    `peak`: the most since `watched` began. Memory that was there before does not count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @contextmanager
    def watched(self) -> Iterator["LiveBytes"]:
        """A context in which tensors are counted, from which on `peak` counts."""
        self.peak = self.now
        with self:
            yield self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors([*args, *(kwargs or {}).values()]):
            self._note(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            self._note(tensor, _size(tensor.untyped_storage()))
        return result

    def _note(self, tensor: torch.Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self._known:
            self._known[place] = weakref.ref(storage, lambda _: self._gone(place, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _gone(self, place: int, size: int) -> None:
        del self._known[place]
        self.now -= size


def _size(storage: torch.UntypedStorage) -> int:
    """In bytes; nothing if they are a file's."""
    return storage.nbytes() if storage.filename is None else 0


def _tensors(values: Tree) -> list[torch.Tensor]:
    return [each for each in tensors(values) if each.layout is torch.strided]
