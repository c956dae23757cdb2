"""An optimizer's step, a part of its parameters at a time: files are read ahead, and filled with what it makes of each.

The bits are those of one step: torch's optimizers change each parameter by itself. Of another optimizer, or one with
hooks, that is not known, so it steps as a whole; what it keeps goes to files after that.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stageline.pipeline.stage.layers.file_memory import FileMemory
from stageline.pipeline.stage.layers.memory import copied

from .optimizer import is_torchs_own

_PART = 1 << 24  # bytes of parameters that are updated together


class UpdatedFiles:
    """The files in `memory` of what an optimizer changes: parameters, or the `state` that it keeps, or both."""

    def __init__(self, memory: FileMemory, *, state: bool) -> None:
        self._memory = memory
        self._state = state

    @property
    def copied_state(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Copies a tensor to where those are that the optimizer keeps."""
        return self._memory.copied if self._state else copied

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """As `optimizer.step()`. Raises what that raises."""
        groups = optimizer.param_groups
        if not is_torchs_own(optimizer):
            optimizer.step()
            for group in groups:
                self._take_state(optimizer, group["params"])
            return
        try:
            for group in groups:
                optimizer.param_groups = [group]
                self._step_of_group(optimizer, group)
        finally:
            optimizer.param_groups = groups

    def _step_of_group(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
        parameters = group["params"]
        try:
            parts = [*_parts(parameters)]
            for part in parts[:1]:
                self._memory.fetch(_used_by_step(optimizer, part))
            for part, following in zip(parts, [*parts[1:], []], strict=True):
                self._memory.fetch(_used_by_step(optimizer, following))
                group["params"] = part
                optimizer.step()
                self._take_state(optimizer, part)
        finally:
            group["params"] = parameters

    def _take_state(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        if self._state:
            self._memory.take_state(optimizer, parameters)


def _used_by_step(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        state = optimizer.state[parameter].values() if parameter in optimizer.state else ()
        yield from (each for each in (parameter, parameter.grad, *state) if isinstance(each, torch.Tensor))


def _parts(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    for parameter in parameters:
        part.append(parameter)
        if sum(each.nbytes for each in part) >= _PART:
            yield part
            part = []
    if part:
        yield part
