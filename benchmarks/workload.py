"""The work every trainer is measured on: pre-norm transformer encoder layers, mean squared error, plain SGD.

Model, data and order of additions are the same for all, so all end a run with the same loss, and a trainer that
skips work is detected.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stageline import Rows

STAGES = 2
MICROBATCHES = 8
SEED = 40
HEADS = 4
LEARNING_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """One size of model and batch. `rows` are those of a microbatch; `warm` steps run before `timed` ones count."""

    width: int
    layers: int  # per stage
    sequence: int
    rows: int
    warm: int
    timed: int

    def __str__(self) -> str:
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}/stage"
        return f"width {self.width}, {layers}, sequence {self.sequence}, {self.rows} rows/microbatch"

    @property
    def steps(self) -> int:
        return self.warm + self.timed


WORKLOADS = (
    Workload(width=16, layers=1, sequence=1, rows=1, warm=75, timed=300),
    Workload(width=64, layers=1, sequence=16, rows=4, warm=40, timed=160),
    Workload(width=256, layers=2, sequence=64, rows=4, warm=2, timed=8),
)


def layers(workload: Workload) -> list[nn.Module]:
    """The layers of the unsplit model, under the benchmark's seed."""
    return list(build(workload.width, workload.layers))


def build(width: int, layers: int) -> nn.Sequential:
    """The unsplit model, for stageline's plan: `layers` are those of one stage."""
    torch.manual_seed(SEED)
    return nn.Sequential(*(_layer(width) for _ in range(STAGES * layers)))


def batches(batch_size: int, seed: int, width: int, sequence: int, held_out: int = 0) -> Rows:
    """The data source of stageline's plan: the same batch in every step. `held_out`: rows to evaluate on."""
    kept = _rows(held_out, sequence, width) if held_out else None
    return Rows(*_rows(batch_size, sequence, width), batch_size, seed, shuffle=False, held_out=kept)


def stage(workload: Workload, index: int, stages: int = STAGES) -> nn.Sequential:
    """The layers of one of `stages` equal stages, with the weights they have in the unsplit model."""
    every = layers(workload)
    count = len(every) // stages
    return nn.Sequential(*every[index * count : (index + 1) * count])


def batch(workload: Workload) -> tuple[Tensor, Tensor]:
    """Inputs and targets of every step, float32 (microbatches * rows, sequence, width)."""
    return _rows(MICROBATCHES * workload.rows, workload.sequence, workload.width)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def mean_loss(losses: Iterable[Tensor]) -> float:
    """A step's loss from those of its microbatches, added in microbatch order."""
    return sum(loss.item() for loss in losses) / MICROBATCHES


def share() -> Tensor:
    """Weight of a microbatch's loss within its step; backpropagated as the loss's own gradient."""
    return torch.tensor(1.0 / MICROBATCHES)


def like(microbatches: Sequence[Tensor]) -> list[Tensor]:
    """Memory for what a neighbour will send for each of `microbatches`: every layer keeps its input's shape."""
    return [torch.empty_like(microbatch) for microbatch in microbatches]


def _rows(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, HEADS, dim_feedforward=4 * width, dropout=0.0, norm_first=True, batch_first=True
    )


class UnequalWork(Exception):
    """Trainers that did the same work would have ended with the same loss."""


def demand_equal_work(losses: Iterable[tuple[str, float]]) -> None:
    """Raises `UnequalWork` unless all trainers, by name, ended with about the loss of the first."""
    (first, expected), *others = losses
    for name, loss in others:
        if not math.isclose(loss, expected, rel_tol=1e-5):  # two threads add in another order
            raise UnequalWork(f"{name} ended with loss {loss!r}, {first} with {expected!r}")


@dataclass(frozen=True, slots=True)
class Timing:
    """One trainer's run of a workload: when each step ended, in seconds of one clock, the last step's loss, the bytes
    retained at most, the `seconds` from the start of its processes to its end, and, where they are known, the digest
    of the weights, the schedule of the last step, and for how many seconds of a step the busiest worker is at work.

    A trainer that times one stage takes stage 0, the last to end its part of a step.
    """

    ends: tuple[float, ...]
    loss: float
    retained: int = 0
    seconds: float = 0.0
    sha256: str = ""
    schedule: str = ""
    busy: float = 0.0

    def steps_per_second(self, warm: int) -> float:
        """Over all steps but the first `warm`."""
        return (len(self.ends) - warm) / (self.ends[-1] - self.ends[warm - 1])
