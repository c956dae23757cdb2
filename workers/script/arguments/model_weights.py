"""The weights of a script's model as its state dict has them: names in its order, each with shape and dtype.

Weights that a script loads are checked here: a worker that cannot use them would end the run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stageline.pipeline.errors import ModelRefused
from stageline.pipeline.model.segment import Segment
from stageline.pipeline.plan.keys.key_types import nearest

_SHOWN = 4  # faults that one error tells


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """By name, in the order of the unsplit model's state dict. `copies` are names of parameters that stages share, each
    with its name in the first stage."""

    entries: Mapping[str, tuple[torch.Size, torch.dtype]]
    copies: Mapping[str, str] = field(default_factory=dict)

    def in_order(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`state` in the model's order."""
        return {name: state[name] for name in (*self.entries, *(state.keys() - self.entries.keys())) if name in state}

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raises `ModelRefused` for weights that are not those of this model, each with its name."""
        if faults := list(self._faults(state)):
            more = f", and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
            raise ModelRefused(f"these are not the model's weights: {'; '.join(faults[:_SHOWN])}{more}")

    def _faults(self, state: Mapping[str, Tensor]) -> Iterator[str]:
        for name in state:
            if name not in self.entries:
                yield f"{name} is not the model's{_hint(name, [key for key in self.entries if key not in state])}"
        for name, (shape, dtype) in self.entries.items():
            if name not in state:
                yield f"{name} is missing"
            elif not isinstance(state[name], Tensor):
                yield f"{name} is a {type(state[name]).__name__}, not a tensor"
            elif state[name].shape != shape:
                yield f"{name} has shape {tuple(state[name].shape)}, expected {tuple(shape)}"
            elif state[name].dtype != dtype:
                yield f"{name} has dtype {state[name].dtype}, expected {dtype}: pass it through .to({dtype})"
        for name, first in self.copies.items():
            if all(isinstance(state.get(each), Tensor) for each in (name, first)) and not _equal(state, name, first):
                yield f"{name} and {first} differ, and are one parameter"


def weights_of(model: Any, segments: Sequence[Segment]) -> ModelWeights:
    """Of `model` and its stages."""
    found = {name: (tensor.shape, tensor.dtype) for part in segments for name, tensor in part.weights.items()}
    order = model.state_dict() if isinstance(model, torch.nn.Module) else found
    copies = {name: first for part in segments for name, first in part.copies.items() if name != first}
    return ModelWeights({name: found[name] for name in (*order, *found) if name in found}, copies)


def _equal(state: Mapping[str, Tensor], one: str, other: str) -> bool:
    return state[one] is state[other] or torch.equal(state[one].cpu(), state[other].cpu())


def _hint(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f" ({near})" if near else ""
