"""What modules computed with in a forward, to be put in place when it runs again.

parameters   themselves: the leaves of a version where weights are stashed
buffers      as they were before the forward, which has changed the module's own already
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from stageline.pipeline.errors import StageError
from stageline.pipeline.stage.layers.memory import copied

Tensors = Mapping[str, torch.Tensor | None]


class BufferCopies:
    """Copies of buffers. Forwards between which a buffer has not changed share one, on the CPU, where comparing waits
    for nothing."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, str], torch.Tensor] = {}

    def of(self, modules: Sequence[torch.nn.Module]) -> list[Tensors]:
        """Of the buffers of each module itself. One that several modules have has one copy."""
        copies: dict[int, torch.Tensor] = {}
        for module in modules:
            for key, each in module._buffers.items():
                if each is not None and id(each) not in copies:
                    copies[id(each)] = self._copy((id(module), key), each)
        return [
            {key: None if each is None else copies[id(each)] for key, each in module._buffers.items()}
            for module in modules
        ]

    def _copy(self, place: tuple[int, str], buffer: torch.Tensor) -> torch.Tensor:
        known = self._newest.get(place)
        if known is None or not _same(known, buffer):
            known = self._newest[place] = copied(buffer.detach())
        return known


class ForwardState:
    """That of `module`, called `name` in errors, as it is now. With `demands_same`, its parameters must not be written
    to before the forward has run again."""

    def __init__(self, module: torch.nn.Module, name: str, copies: BufferCopies, *, demands_same: bool) -> None:
        self._name, self._demands_same = name, demands_same
        modules = [*module.modules()]
        self._parts = [
            (part, dict(part._parameters), buffers) for part, buffers in zip(modules, copies.of(modules), strict=True)
        ]
        self._written = self._writes()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the module has these parameters, and buffers like these. Raises `StageError` if parameters
        were written to."""
        if self._demands_same and self._writes() != self._written:
            raise StageError(
                f"weights of {self._name} have changed between a forward and its backward, which would run the forward "
                f"again with others: update once all microbatches have gone backward, or give the stage stash_weights"
            )
        own = [(part, dict(part._parameters), dict(part._buffers)) for part, *_ in self._parts]
        fresh = {id(each): copied(each) for *_, buffers in self._parts for each in buffers.values() if each is not None}
        try:
            for part, parameters, buffers in self._parts:
                _put(
                    part, parameters, {key: None if each is None else fresh[id(each)] for key, each in buffers.items()}
                )
            yield
        finally:
            for part, parameters, buffers in own:
                _put(part, parameters, buffers)

    def _writes(self) -> list[int]:
        """How often each parameter was written to."""
        return [each._version for _, parameters, _ in self._parts for each in parameters.values() if each is not None]


def _put(module: torch.nn.Module, parameters: Tensors, buffers: Tensors) -> None:
    """Without torch's checks of kind: what stands for a parameter in a version is none."""
    for held, tensors in ((module._parameters, parameters), (module._buffers, buffers)):
        held.clear()
        held.update(tensors)  # type: ignore[arg-type]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return other.is_cpu and one.dtype == other.dtype and torch.equal(one, other)
