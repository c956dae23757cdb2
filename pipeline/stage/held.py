"""The bytes that a stage holds: what autograd keeps of a forward for its backward, and what lasts from step to step."""

from collections.abc import Iterable

import torch

from .offload import LEAST
from .stage import Stage


class SavedBytes:
    """Counts the memory that autograd keeps for a backward, without that of the weights."""

    def __init__(self, stage: Stage) -> None:
        self.bytes = 0
        self.large: dict[int, int] = {}  # what can be offloaded, by address
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in stage.state_dict().values()}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._seen:
            self._seen.add(memory.data_ptr())
            self.bytes += memory.nbytes()
            if memory.nbytes() >= LEAST:
                self.large[memory.data_ptr()] = memory.nbytes()
        return tensor


def lasting_bytes(stage: Stage, least: int = 0) -> dict[str, int]:
    """Of a stage after an update, by what it is: weights, gradients, the optimizer's state, and averages; those of
    tensors that have at `least` so many."""
    state = [] if stage.optimizer is None else list(stage.optimizer.state.values())
    return {
        "weights": total_bytes(stage.state_dict().values(), least),
        "gradients": total_bytes(trained_parameters(stage), least),
        "optimizer": total_bytes(
            (value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)), least
        ),
        "averages": total_bytes({id(each): each for each in stage.averages.values()}.values(), least),
    }


def trained_parameters(stage: Stage) -> list[torch.Tensor]:
    """What its optimizer updates."""
    return [] if stage.optimizer is None else [p for group in stage.optimizer.param_groups for p in group["params"]]


def total_bytes(held: Iterable[torch.Tensor], least: int = 0) -> int:
    """Of all of them together that have at `least` so many."""
    sizes = (tensor.numel() * tensor.element_size() for tensor in held)
    return sum(size for size in sizes if size >= least)
