"""The bytes that a stage holds: what autograd keeps of a forward for its backward, and what lasts from step to step."""

from collections.abc import Iterable

import torch

from .stage import Stage


class SavedBytes:
    """Counts the memory that autograd keeps for a backward, without that of the weights."""

    def __init__(self, stage: Stage) -> None:
        self.bytes = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in stage.state_dict().values()}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._seen:
            self._seen.add(memory.data_ptr())
            self.bytes += memory.nbytes()
        return tensor


def lasting_bytes(stage: Stage) -> dict[str, int]:
    """Of a stage after an update, by what it is: weights, gradients, the optimizer's state, and averages."""
    state = [] if stage.optimizer is None else list(stage.optimizer.state.values())
    return {
        "weights": total_bytes(stage.state_dict().values()),
        "gradients": total_bytes(trained_parameters(stage)),
        "optimizer": total_bytes(
            value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)
        ),
        "averages": total_bytes({id(each): each for each in stage.averages.values()}.values()),
    }


def trained_parameters(stage: Stage) -> list[torch.Tensor]:
    """What its optimizer updates."""
    return [] if stage.optimizer is None else [p for group in stage.optimizer.param_groups for p in group["params"]]


def total_bytes(held: Iterable[torch.Tensor]) -> int:
    """Of all of them together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
