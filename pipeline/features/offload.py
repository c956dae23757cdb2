"""Offload of activations: they lie in a scratch, files for instance, between a forward and its backward.

    forward    autograd saves a tensor ─> its memory goes to the scratch; what several nodes save goes there once
    backward   a node wants it         <─ the same bytes, in the same layout; the next ones are on their way

Weights, buffers and small tensors stay. So does memory that does not begin where torch's own begins: kernels choose by
alignment.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.layers.memory import ALIGNMENT, copied
from stageline.pipeline.stage.layers.passage import Passage, Run
from stageline.pipeline.tree import Tree

LEAST = 1 << 16  # bytes of a tensor's memory; less is not worth the way
AHEAD = 1 << 26  # bytes that are fetched ahead


class Parcel(Protocol):
    """Bytes in a scratch. They stay there for as long as there is a reference to the parcel."""

    def fetch(self) -> None:
        """Begin to bring the bytes back. Returns at once."""

    def bytes(self) -> torch.Tensor:
        """Return the bytes, uint8 [n], in memory that begins as torch's own does.

        Raises the exception that made this impossible.
        """


class Scratch(Protocol):
    """A place where bytes lie for a while. They are lost with the process."""

    def put(self, data: torch.Tensor) -> Parcel:
        """Take `data`, uint8 [n], which must not be written to afterwards. Waits while too much is under way."""


class _Stowed:
    """Memory of saved tensors, `size` bytes: in the scratch, and here while a node uses it."""

    def __init__(self, parcel: Parcel, size: int) -> None:
        self.parcel, self.size = parcel, size
        self._here: weakref.ref[torch.UntypedStorage] | None = None

    def memory(self) -> torch.UntypedStorage:
        here = None if self._here is None else self._here()
        if here is None:
            here = self.parcel.bytes().untyped_storage()
            self._here = weakref.ref(here)
        return here


class _View(NamedTuple):
    """A tensor that autograd has saved."""

    stowed: _Stowed
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]


_Order = list["weakref.ref[_Stowed]"]  # as they were saved; autograd's graph holds them


@dataclass(frozen=True, slots=True)
class Offload:
    """The parts of a stage that lie outside its worker's memory; nothing by default. No bit changes.

    Args:
        scratch: Takes what forwards keep for their backwards.
        files: Take `weights` with their gradients and averages, the state of the `optimizer`, and the copies for
            snapshots.
        weights: True if weights, with their gradients and averages, are in the files.
        optimizer: True if the optimizer's state is in the files.
    """

    scratch: Scratch | None = None
    files: FileMemory | None = None
    weights: bool = False
    optimizer: bool = False

    @property
    def weight_files(self) -> FileMemory | None:
        """The files if weights are there, otherwise None."""
        return self.files if self.weights else None

    @property
    def copied(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that copies a tensor: `memory.copied`, or into a file if state lies in files."""
        return copied if self.files is None else self.files.copied


def in_memory(stage: int) -> Offload:
    """Return the offload of a stage of which everything stays in memory."""
    return Offload()


class NoScratch:
    """The absence of a scratch: activations stay in memory."""

    @property
    def begins(self) -> tuple[Callable[[object], object], ...]:
        """The functions to call with each microbatch before its backward."""
        return ()

    def around(self, run: Run) -> Run:
        """Return `run` with the activations of its microbatches put into the scratch, if there is one."""
        return run

    def clear(self) -> None:
        """Forget all microbatches: none of them goes backward any more."""


def scratch_of(scratch: Scratch | None, body: torch.nn.Module) -> NoScratch:
    """Return the place for the activations of the stage with this `body`: `scratch`, or memory if it is None."""
    return NoScratch() if scratch is None else ActivationOffload(scratch, body)


class ActivationOffload(NoScratch):
    """The offload of one stage's activations.

    Microbatches are expected to go backward in the order of their forwards.
    """

    def __init__(self, scratch: Scratch, body: torch.nn.Module) -> None:
        """Prepare for a stage.

        Args:
            scratch: Takes the activations.
            body: The stage's layers, whose parameters and buffers stay in memory.
        """
        self._scratch = scratch
        self._body = body
        self._kept: dict[object, _Order] = {}
        self._ahead: deque[weakref.ref[_Stowed]] = deque()  # to be fetched, in the order in which they are needed
        self._fetched: weakref.WeakKeyDictionary[_Stowed, int] = weakref.WeakKeyDictionary()  # bytes on their way

    @property
    def begins(self) -> tuple[Callable[[object], object], ...]:
        """The functions to call with each microbatch before its backward: the method `begin`."""
        return (self.begin,)

    def around(self, run: Run) -> Run:
        """Return `run` with the activations of its microbatches saved into the scratch.

        The weights and buffers that a microbatch reads stay in memory.
        """

        def saved(x: Tree, passage: Passage) -> Tree:
            version = passage.version
            own = (*self._body.parameters(), *self._body.buffers())
            with self.saving(passage.input_nodes, (*own, *version.weights.values(), *version.buffers.values())):
                return run(x, passage)

        return saved

    @contextmanager
    def saving(self, microbatch: object, stay: Iterable[torch.Tensor]) -> Iterator[None]:
        """Return a context in which the forward of `microbatch` saves into the scratch.

        A tensor that shares memory with one of `stay` is not put there.
        """
        known = {each.untyped_storage()._cdata: each for each in stay}
        seen: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Stowed]] = {}
        order: _Order = []

        def pack(tensor: torch.Tensor) -> torch.Tensor | _View:
            if tensor.layout is not torch.strided or not tensor.is_cpu:
                return tensor
            storage = tensor.untyped_storage()
            if storage._cdata in known or storage.nbytes() < LEAST or storage.data_ptr() % ALIGNMENT:
                return tensor
            found = seen.get(storage._cdata)
            if found is None or found[0]() is not storage:
                stowed = _Stowed(self._scratch.put(_bytes_of(storage)), storage.nbytes())
                seen[storage._cdata] = found = (weakref.ref(storage), stowed)
                order.append(weakref.ref(stowed))
            return _View(found[1], tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

        with saved_tensors_hooks(pack, self._unpack):
            yield
        seen.clear()  # only the graph holds them
        if order:  # else it may never go backward: a stage may train nothing
            self._kept[microbatch] = order

    def begin(self, microbatch: object) -> None:
        """Fetch what the backward of `microbatch`, which begins now, needs, and then what the next one will."""
        order = self._kept.pop(microbatch, [])
        following = next(iter(self._kept.values()), [])
        self._ahead = deque([*reversed(order), *reversed(following)])
        self._fetch()

    def clear(self) -> None:
        """Forget all microbatches: none of them goes backward any more."""
        self._kept.clear()
        self._ahead.clear()
        self._fetched.clear()

    def _unpack(self, packed: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        memory = packed.stowed.memory()
        self._fetched.pop(packed.stowed, None)
        self._fetch()
        empty = torch.empty(0, dtype=packed.dtype)
        return empty.set_(memory, packed.offset, packed.shape, packed.strides)

    def _fetch(self) -> None:
        while self._ahead and sum(self._fetched.values()) < AHEAD:
            stowed = self._ahead.popleft()()
            if stowed is not None and stowed not in self._fetched:
                self._fetched[stowed] = stowed.size
                stowed.parcel.fetch()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
