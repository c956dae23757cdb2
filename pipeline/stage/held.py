"""The bytes that a stage holds: what autograd keeps of a forward for its backward, and what lasts from step to step."""

from collections.abc import Callable, Iterable

import torch

from stageline.pipeline.features.offload import LEAST

from .stage import Stage


class SavedBytes:
    """A count of the memory that autograd keeps for a backward, without that of the weights.

    Attributes:
        bytes: All bytes.
        large: Sizes of memory that can be offloaded, in bytes, by address.
    """

    def __init__(self, stage: Stage) -> None:
        """Begin at 0 for `stage`, whose parameters and buffers are not counted."""
        self.bytes = 0
        self.large: dict[int, int] = {}  # what can be offloaded, by address
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in stage.state_dict().values()}

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the memory of `tensor`, unless it was counted before, and return `tensor`: a hook for saved tensors."""
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self._seen:
            self._seen.add(memory.data_ptr())
            self.bytes += memory.nbytes()
            if memory.nbytes() >= LEAST:
                self.large[memory.data_ptr()] = memory.nbytes()
        return tensor


def lasting_bytes(stage: Stage, counts: Callable[[torch.Tensor], bool] = lambda tensor: True) -> dict[str, int]:
    """Return the bytes that last from step to step, after an update: weights, gradients, optimizer, averages.

    Args:
        stage: The stage.
        counts: True for a tensor that is counted. A gradient is counted if its parameter is.

    Returns:
        Bytes under "weights", "gradients", "optimizer" and "averages".
    """
    held: dict[str, Iterable[torch.Tensor]] = {
        "weights": stage.state_dict().values(),
        "gradients": trained_parameters(stage),
        "optimizer": optimizer_tensors(stage),
        "averages": {id(each): each for each in stage.averages.values()}.values(),
    }
    return {part: total_bytes(filter(counts, tensors)) for part, tensors in held.items()}


def trained_parameters(stage: Stage) -> list[torch.Tensor]:
    """Return the parameters that the optimizer of `stage` updates."""
    return [] if stage.optimizer is None else [p for group in stage.optimizer.param_groups for p in group["params"]]


def optimizer_tensors(stage: Stage) -> list[torch.Tensor]:
    """Return the tensors that the optimizer of `stage` keeps."""
    entries = [] if stage.optimizer is None else stage.optimizer.state.values()
    return [each for entry in entries for each in entry.values() if isinstance(each, torch.Tensor)]


def in_memory(stage: Stage, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the elements of `tensors`, which belong to `stage`, that are not in files."""
    files = stage.file_memory
    return [each for each in tensors if files is None or not files.has(each)]


def total_bytes(held: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all tensors in `held` together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in held)
