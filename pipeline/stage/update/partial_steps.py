"""An optimizer's step, a part of its parameters at a time, so that what it makes of each can go to files at once.

The bits are those of one step: torch's optimizers change each parameter by itself. Of another optimizer, or one with
hooks, that is not known, so it steps as a whole; what it keeps goes to files after that.
"""

from collections.abc import Iterator, Sequence

import torch

from stageline.pipeline.stage.layers.file_memory import FileMemory

from .optimizer_settings import is_torchs_own

_PART = 1 << 24  # bytes of parameters that are updated together


def step_in_parts(optimizer: torch.optim.Optimizer, memory: FileMemory) -> None:
    """As `optimizer.step()`; what it keeps is in `memory` then. Raises what that raises."""
    groups = optimizer.param_groups
    if not is_torchs_own(optimizer):
        optimizer.step()
        for group in groups:
            memory.take_state(optimizer, group["params"])
        return
    try:
        for group in groups:
            optimizer.param_groups = [group]
            _step_of_group(optimizer, group, memory)
    finally:
        optimizer.param_groups = groups


def _step_of_group(optimizer: torch.optim.Optimizer, group: dict[str, object], memory: FileMemory) -> None:
    parameters = group["params"]
    try:
        parts = [*_parts(parameters)]  # type: ignore[arg-type]  # a list of tensors
        for part, following in zip(parts, [*parts[1:], []], strict=True):
            memory.fetch(_used_by_step(optimizer, following))
            group["params"] = part
            optimizer.step()
            memory.take_state(optimizer, part)
    finally:
        group["params"] = parameters


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
